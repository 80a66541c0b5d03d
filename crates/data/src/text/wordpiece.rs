//! BERT's word pieces: text is cleaned and split at blanks and punctuation, and each word becomes the longest pieces
//! that the vocabulary has.
//!
//! The ids are those of Hugging Face's `tokenizers`: the Unicode tables are the ones that it uses.

use std::collections::HashMap;

use unicode_categories::UnicodeCategories;
use unicode_normalization_alignments::UnicodeNormalization;

/// Longer words are unknown, as in BERT's code.
const WORD_CHARS_MAX: usize = 100;

/// The pieces of a vocabulary and their ids.
#[derive(Default)]
pub(super) struct WordPieces {
    /// Pieces that begin a word.
    beginnings: HashMap<String, u32>,
    /// Pieces that continue a word, without their `##`.
    continuations: HashMap<String, u32>,
}

impl WordPieces {
    /// Adds a piece as vocabularies write it; returns the id of an equal piece that came before.
    pub fn insert(&mut self, piece: &str, id: u32) -> Option<u32> {
        match piece.strip_prefix("##") {
            None => self.beginnings.insert(piece.to_owned(), id),
            Some(rest) => self.continuations.insert(rest.to_owned(), id),
        }
    }

    /// The id of a word that is one piece.
    pub fn id(&self, word: &str) -> Option<u32> {
        self.beginnings.get(word).copied()
    }

    /// The ids of a text; a word that cannot be made of pieces has the id `unknown`.
    pub fn encode(&self, text: &str, lowercase: bool, unknown: u32) -> Vec<u32> {
        let mut ids = Vec::new();
        let text = if lowercase { folded(text) } else { cleaned(text).collect() };
        for word in text.split_whitespace() {
            let mut start = 0;
            for (at, mark) in word.match_indices(|c: char| c.is_ascii_punctuation() || c.is_punctuation()) {
                self.push(&word[start..at], unknown, &mut ids);
                self.push(mark, unknown, &mut ids);
                start = at + mark.len();
            }
            self.push(&word[start..], unknown, &mut ids);
        }
        ids
    }

    fn push(&self, word: &str, unknown: u32, ids: &mut Vec<u32>) {
        let n_before = ids.len();
        let is_long = word.chars().count() > WORD_CHARS_MAX;
        let (mut rest, mut pieces) = (word, &self.beginnings);
        while !rest.is_empty() {
            let mut ends = rest.char_indices().rev().map(|(at, c)| at + c.len_utf8());
            let Some((id, end)) = ends.find_map(|end| Some((*pieces.get(&rest[..end])?, end))).filter(|_| !is_long)
            else {
                ids.truncate(n_before);
                ids.push(unknown);
                return;
            };
            ids.push(id);
            (rest, pieces) = (&rest[end..], &self.continuations);
        }
    }
}

/// Drops control characters, turns every blank into a space, and sets CJK ideographs apart as words.
fn cleaned(text: &str) -> impl Iterator<Item = char> {
    let is_blank = |c: char| c.is_whitespace();
    let is_control = |c: char| !matches!(c, '\t' | '\n' | '\r') && c.is_other();
    text.chars().filter(move |c| !(matches!(c, '\0' | '\u{fffd}') || is_control(*c))).flat_map(move |c| {
        let around = is_ideograph(c).then_some(' ');
        [around, Some(if is_blank(c) { ' ' } else { c }), around].into_iter().flatten()
    })
}

/// As [`cleaned`], without case and accents.
fn folded(text: &str) -> String {
    let decomposed = cleaned(text).nfd().map(|(c, _)| c);
    decomposed.filter(|c| !c.is_mark_nonspacing()).flat_map(char::to_lowercase).collect()
}

/// The blocks of CJK ideographs that BERT's code names.
fn is_ideograph(c: char) -> bool {
    matches!(u32::from(c),
        0x4E00..=0x9FFF | 0x3400..=0x4DBF | 0x20000..=0x2A6DF | 0x2A700..=0x2B73F | 0x2B740..=0x2B81F
        | 0x2B920..=0x2CEAF | 0xF900..=0xFAFF | 0x2F800..=0x2FA1F)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces() -> WordPieces {
        let mut pieces = WordPieces::default();
        for (id, word) in (0..).zip(["[UNK]", "a", "##b", "##bc", "é", "e", "!", "中", "ab"]) {
            assert_eq!(pieces.insert(word, id), None);
        }
        pieces
    }

    #[test]
    fn a_piece_is_known_by_its_spelling_and_place() {
        let mut pieces = pieces();
        assert_eq!(
            (pieces.id("b"), pieces.id("ab"), pieces.insert("##b", 9), pieces.insert("b", 10)),
            (None, Some(8), Some(2), None)
        );
    }

    #[test]
    fn text_is_cleaned_and_cut_into_the_longest_pieces() {
        let check = |text: &str, folded: &[u32], cased: &[u32]| {
            let encode = |lowercase| pieces().encode(text, lowercase, 0);
            assert_eq!((&encode(true)[..], &encode(false)[..]), (folded, cased), "{text:?}");
        };
        check("ab abbc  a", &[8, 8, 3, 1], &[8, 8, 3, 1]);
        check("abc", &[0], &[0]);
        check("aB É é", &[8, 5, 5], &[0, 0, 4]);
        check("a!!a中a", &[1, 6, 6, 1, 7, 1], &[1, 6, 6, 1, 7, 1]);
        check("a\u{200b}b\u{a0}e\u{301}", &[8, 5], &[8, 0]);
        check("\u{fffd}\0\u{85}", &[], &[]);
        check(&("a".to_owned() + &"b".repeat(99)), &[&[8][..], &[2; 98]].concat(), &[&[8][..], &[2; 98]].concat());
        check(&("a".to_owned() + &"b".repeat(100)), &[0], &[0]);
    }
}
