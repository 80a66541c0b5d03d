//! BERT's tokenisation: a vocabulary, its settings, and data sets of token ids.

use std::path::{Path, PathBuf};

use super::wordpiece::WordPieces;
use super::{Text, Texts, cache};
use crate::dataset::{Dataset, Samples, Shape};
use crate::error::{Error, Result};
use crate::readers::read_file;
use crate::tokens::{ID_LIMIT, Tokens};

/// How texts become tokens.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TextConfig {
    /// BERT's `vocab.txt`, one word piece per line, relative to the data directory; empty for the vocabulary of the
    /// model's checkpoint.
    pub vocabulary: PathBuf,
    /// Max tokens per text, `[CLS]` and `[SEP]` included; longer texts are cut. The paper's code has 512, padded.
    pub max_length: usize,
    /// Whether to drop case and accents, as uncased models expect.
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
    pieces: WordPieces,
    n_words: usize,
    cls: u32,
    sep: u32,
    unknown: u32,
    path: PathBuf,
    max_length: usize,
    lowercase: bool,
    /// Hash of vocabulary and settings.
    fingerprint: String,
    /// Where tokens are cached.
    cache: Option<PathBuf>,
}

impl Tokenizer {
    /// The tokeniser of a vocabulary; tokens are cached in the folder `cache`, or not at all.
    ///
    /// # Errors
    /// If the file is no vocabulary, or `max_length` leaves no room for a token.
    pub fn open(vocabulary: &Path, config: &TextConfig, cache: Option<PathBuf>) -> Result<Self> {
        let bytes = read_file(vocabulary)?;
        let (pieces, n_words) = words(vocabulary, &bytes)?;
        let special = |word: &str| {
            pieces.id(word).ok_or_else(|| {
                malformed(vocabulary, n_words, format!("a line `{word}`, as BERT's vocabularies have"), "none")
            })
        };
        let (cls, sep, unknown) = (special("[CLS]")?, special("[SEP]")?, special("[UNK]")?);
        let TextConfig { max_length, lowercase, .. } = *config;
        // A pair needs [CLS], two [SEP] and a token of each text.
        if max_length < 5 {
            let problem = format!("max_length = {max_length} leaves no room for texts");
            return Err(Error::bad_option("text", problem, "set data.text.max_length to 5 or more"));
        }
        let settings = format!("BERT word pieces 1, {max_length}, lowercase {lowercase}");
        let fingerprint = format!("{}, {settings}", blake3::hash(&bytes));
        let path = vocabulary.to_owned();
        Ok(Self { pieces, n_words, cls, sep, unknown, path, max_length, lowercase, fingerprint, cache })
    }

    /// The vocabulary's file.
    pub fn vocabulary(&self) -> &Path {
        &self.path
    }

    /// Words in the vocabulary.
    pub fn n_words(&self) -> usize {
        self.n_words
    }

    /// The tokens of a text, how many of them come before the second text of a pair, and whether the text was cut.
    pub fn encode(&self, text: &Text) -> (Vec<u32>, usize, bool) {
        let encode = |text: &str| self.pieces.encode(text, self.lowercase, self.unknown);
        let first = encode(&text.first);
        let second = text.second.as_deref().map(encode);
        let n_second = second.as_ref().map_or(0, Vec::len);
        let room = self.max_length - if second.is_some() { 3 } else { 2 };
        let (kept_first, kept_second) = shares(first.len(), n_second, room);
        let mut ids = vec![self.cls];
        ids.extend(&first[..kept_first]);
        ids.push(self.sep);
        let n_first = ids.len();
        if let Some(second) = second {
            ids.extend(&second[..kept_second]);
            ids.push(self.sep);
        }
        (ids, n_first, kept_first + kept_second < first.len() + n_second)
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
                let (ids, n_first, is_truncated) = self.encode(text);
                tokens.push(&ids, n_first, is_truncated)?;
            }
            if let Some(folder) = &self.cache {
                cache::write(folder, &key, &tokens);
            }
            tokens
        };
        let shape = Shape::Tokens { len: self.max_length };
        let data = Dataset::new(texts.name, shape, Samples::Tokens(tokens), texts.labels, texts.class_names)?;
        data.with_groups(texts.groups)
    }
}

/// How many tokens of two texts to keep so that they fit into `room`: the longer text loses first.
fn shares(n_first: usize, n_second: usize, room: usize) -> (usize, usize) {
    if n_first + n_second <= room {
        return (n_first, n_second);
    }
    let short = n_first.min(n_second).min(room / 2);
    if n_first <= n_second { (short, room - short) } else { (room - short, short) }
}

/// The pieces of a vocabulary and their number. The id of a piece is its line, counted from 0.
fn words(path: &Path, bytes: &[u8]) -> Result<(WordPieces, usize)> {
    let mut pieces = WordPieces::default();
    let mut n_words = 0;
    for line in bytes.strip_suffix(b"\n").unwrap_or(bytes).split(|byte| *byte == b'\n') {
        let id = n_words;
        n_words += 1;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let word = std::str::from_utf8(line).map_err(|_| malformed(path, n_words, "UTF-8 text", "other bytes"))?;
        if word.is_empty() || id >= ID_LIMIT as usize {
            let expected = format!("a word piece, and fewer than {ID_LIMIT} lines");
            return Err(malformed(path, n_words, expected, format!("`{word}`")));
        }
        if let Some(first) = pieces.insert(word, id as u32) {
            return Err(malformed(path, n_words, "a new word", format!("`{word}` of line {} again", first + 1)));
        }
    }
    Ok((pieces, n_words))
}

fn malformed(path: &Path, line: usize, expected: impl Into<String>, found: impl Into<String>) -> Error {
    let hint = "a vocabulary is BERT's `vocab.txt`: one word piece per line, in the order of the embedding's rows";
    Error::malformed(path.display(), format!("line {line}"), expected, found, hint)
}
