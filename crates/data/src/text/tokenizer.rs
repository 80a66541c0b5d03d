//! BERT's tokenisation: cleaned and (for uncased models) lower-cased text, split at blanks and punctuation, each word cut
//! into the longest pieces that the vocabulary has.

use std::path::{Path, PathBuf};

use ahash::AHashMap;
use tokenizers::decoders::wordpiece::WordPiece as Decoder;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::processors::bert::BertProcessing;
use tokenizers::{EncodeInput, TokenizerBuilder, TokenizerImpl, TruncationParams};

use super::{Text, Texts, cache};
use crate::dataset::{Dataset, Samples, Shape};
use crate::error::{Error, Result};
use crate::readers::read_file;
use crate::tokens::{ID_LIMIT, Tokens};

/// How texts become tokens.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TextConfig {
    /// BERT's `vocab.txt`, one word piece a line, relative to the data directory; empty for the one of the model's
    /// checkpoint.
    pub vocabulary: PathBuf,
    /// Tokens a text may have, `[CLS]` and `[SEP]` among them; longer ones are cut. The paper's code has 512, padded.
    pub max_length: usize,
    /// Whether case and accents are dropped, as uncased models want it.
    pub lowercase: bool,
}

impl Default for TextConfig {
    fn default() -> Self {
        Self { vocabulary: PathBuf::new(), max_length: Self::MAX_LENGTH, lowercase: true }
    }
}

impl TextConfig {
    /// The default of `max_length`.
    pub const MAX_LENGTH: usize = 128;
}

/// A vocabulary with its settings.
pub struct Tokenizer {
    inner: TokenizerImpl<WordPiece, BertNormalizer, BertPreTokenizer, BertProcessing, Decoder>,
    path: PathBuf,
    n_words: usize,
    max_length: usize,
    /// Hash of vocabulary and settings.
    fingerprint: String,
    /// Where tokens are kept.
    cache: Option<PathBuf>,
}

impl Tokenizer {
    /// The tokeniser of a vocabulary; tokens are kept in the user's cache folder.
    ///
    /// # Errors
    /// If the file is no vocabulary, or texts could not even hold a token.
    pub fn open(vocabulary: &Path, config: &TextConfig) -> Result<Self> {
        Self::open_with_cache(vocabulary, config, cache::folder())
    }

    /// As [`Tokenizer::open`], with tokens kept in a folder of one's own or not at all.
    ///
    /// # Errors
    /// As [`Tokenizer::open`].
    pub fn open_with_cache(vocabulary: &Path, config: &TextConfig, cache: Option<PathBuf>) -> Result<Self> {
        let bytes = read_file(vocabulary)?;
        let words = words(vocabulary, &bytes)?;
        let special = |word: &str| {
            words.get(word).map(|id| (word.to_owned(), *id)).ok_or_else(|| {
                malformed(vocabulary, words.len(), format!("a line `{word}`, as BERT's vocabularies have"), "none")
            })
        };
        let (cls, sep) = (special("[CLS]")?, special("[SEP]")?);
        special("[UNK]")?;
        // A pair needs [CLS], two [SEP] and a token of each text.
        if config.max_length < 5 {
            let problem = format!("max_length = {} leaves no room for texts", config.max_length);
            return Err(Error::bad_option("text", problem, "set data.text.max_length to 5 or more"));
        }
        let n_words = words.len();
        let broken = |e: tokenizers::Error| Error::inconsistent("tokenizer", e.to_string());
        let model = WordPiece::builder().vocab(words).build().map_err(broken)?;
        let lowercase = config.lowercase;
        let truncation = TruncationParams { max_length: config.max_length, ..TruncationParams::default() };
        let inner = TokenizerBuilder::new()
            .with_model(model)
            .with_normalizer(Some(BertNormalizer::new(true, true, None, lowercase)))
            .with_pre_tokenizer(Some(BertPreTokenizer))
            .with_post_processor(Some(BertProcessing::new(sep, cls)))
            .with_decoder(None)
            .with_truncation(Some(truncation))
            .build()
            .map_err(broken)?;
        let settings = format!("BERT word pieces 1, {}, lowercase {lowercase}", config.max_length);
        let fingerprint = format!("{}, {settings}", blake3::hash(&bytes));
        Ok(Self { inner, path: vocabulary.to_owned(), n_words, max_length: config.max_length, fingerprint, cache })
    }

    /// The vocabulary's file.
    pub fn vocabulary(&self) -> &Path {
        &self.path
    }

    /// Words in the vocabulary.
    pub fn n_words(&self) -> usize {
        self.n_words
    }

    /// The tokens of a text, and how many of them come before the second text of a pair; whether it was cut.
    ///
    /// # Errors
    /// Never for a text that is a Rust string; the library's own errors are passed on.
    pub fn encode(&self, text: &Text) -> Result<(Vec<u32>, usize, bool)> {
        let input = match &text.second {
            None => EncodeInput::from(&text.first[..]),
            Some(second) => EncodeInput::from((&text.first[..], &second[..])),
        };
        let encoded =
            self.inner.encode_fast(input, true).map_err(|e| Error::inconsistent("tokenizer", e.to_string()))?;
        let n_first = encoded.get_type_ids().iter().take_while(|kind| **kind == 0).count();
        Ok((encoded.get_ids().to_vec(), n_first, !encoded.get_overflowing().is_empty()))
    }

    /// The texts as a data set, from the cache if they were tokenised before.
    ///
    /// # Errors
    /// If the parts of `texts` do not fit together.
    pub fn dataset(&self, texts: Texts) -> Result<Dataset> {
        let key = blake3::hash(format!("{}, {}", texts.hash(), self.fingerprint).as_bytes()).to_hex();
        let kept = self.cache.as_deref().and_then(|folder| cache::read(folder, &key));
        let tokens = if let Some(tokens) = kept {
            tokens
        } else {
            let mut tokens = Tokens::default();
            for text in &texts.texts {
                let (ids, n_first, is_truncated) = self.encode(text)?;
                tokens.push(&ids, n_first, is_truncated)?;
            }
            if let Some(folder) = &self.cache {
                cache::write(folder, &key, &tokens);
            }
            tokens
        };
        let shape = Shape::Tokens { len: self.max_length };
        let data = Dataset::new(texts.name, shape, Samples::Tokens(tokens), texts.labels, texts.class_names)?;
        match texts.groups {
            Some(groups) => data.with_groups(groups),
            None => Ok(data),
        }
    }
}

/// The words of a vocabulary and their ids, which are their lines counted from 0.
fn words(path: &Path, bytes: &[u8]) -> Result<AHashMap<String, u32>> {
    let mut words = AHashMap::new();
    let lines = bytes.strip_suffix(b"\n").unwrap_or(bytes).split(|byte| *byte == b'\n');
    for (id, line) in lines.enumerate() {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let word = std::str::from_utf8(line).map_err(|_| malformed(path, id + 1, "UTF-8 text", "other bytes"))?;
        if word.is_empty() || id >= ID_LIMIT as usize {
            let expected = format!("a word piece, and fewer than {ID_LIMIT} lines");
            return Err(malformed(path, id + 1, expected, format!("`{word}`")));
        }
        if let Some(first) = words.insert(word.to_owned(), id as u32) {
            return Err(malformed(path, id + 1, "a new word", format!("`{word}` of line {} again", first + 1)));
        }
    }
    Ok(words)
}

fn malformed(path: &Path, line: usize, expected: impl Into<String>, found: impl Into<String>) -> Error {
    Error::Malformed {
        file: path.display().to_string(),
        place: format!("line {line}"),
        expected: expected.into(),
        found: found.into(),
        hint: "a vocabulary is BERT's `vocab.txt`: one word piece a line, in the order of the embedding's rows",
    }
}
