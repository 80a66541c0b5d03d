//! Sentences as word pieces: ragged rows of ids, stored without padding.

use std::ops::Range;

use crate::error::{Error, Result};

/// Ids must stay below this: a slot `1 + 2·id + type` is then an exact single-precision number.
pub const ID_LIMIT: u32 = 1 << 22;

/// Words that [`Tokens::to_words`] writes for a text beside its ids.
pub const WORDS_PER_TEXT: usize = 3;

/// Tokenised texts, one after the other.
///
/// A batch sees a text as a row of slots: `1 + 2·id + type` for each token, where the type is 1 in the second text of a
/// pair, then zeros.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    ids: Vec<u32>,
    rows: Vec<Row>,
}

/// Where a text ends, and what is known of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    /// Position after its last token.
    end: usize,
    /// Tokens before the second text of a pair; all of them where there is none.
    n_first: u32,
    is_truncated: bool,
}

impl Tokens {
    /// Appends a text: its ids, how many of them come before the second text of a pair, and whether it was cut.
    ///
    /// # Errors
    /// If there is no token, more of them in the first text than in all, or an id of 2²² or above.
    pub fn push(&mut self, ids: &[u32], n_first: usize, is_truncated: bool) -> Result<()> {
        let problem = |what: String| Err(Error::inconsistent("tokens", format!("text {}: {what}", self.rows.len())));
        if ids.is_empty() || n_first > ids.len() {
            return problem(format!("{} tokens, {n_first} of them in its first part", ids.len()));
        }
        if let Some(id) = ids.iter().find(|id| **id >= ID_LIMIT) {
            return problem(format!("token {id} is not below {ID_LIMIT}"));
        }
        self.ids.extend_from_slice(ids);
        self.rows.push(Row { end: self.ids.len(), n_first: n_first as u32, is_truncated });
        Ok(())
    }

    /// How many texts there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Tokens of all texts together.
    pub fn n_tokens(&self) -> usize {
        self.ids.len()
    }

    /// Tokens of the longest text.
    pub fn longest(&self) -> usize {
        (0..self.len()).map(|index| self.span(index).len()).max().unwrap_or(0)
    }

    /// How many texts were cut to fit.
    pub fn n_truncated(&self) -> usize {
        self.rows.iter().filter(|row| row.is_truncated).count()
    }

    /// The ids of a text, and how many of them come before the second text of a pair.
    ///
    /// # Panics
    /// If there is no such text.
    pub fn text(&self, index: usize) -> (&[u32], usize) {
        (&self.ids[self.span(index)], self.rows[index].n_first as usize)
    }

    /// Writes the slots of a text.
    pub(crate) fn write(&self, index: usize, slots: &mut [f32]) {
        let (ids, n_first) = self.text(index);
        slots.fill(0.0);
        for (at, (slot, id)) in slots.iter_mut().zip(ids).enumerate() {
            *slot = (1 + 2 * id + u32::from(at >= n_first)) as f32;
        }
    }

    pub(crate) fn subset(&self, indices: &[u32]) -> Self {
        let mut out = Self::default();
        for &index in indices {
            out.ids.extend_from_slice(&self.ids[self.span(index as usize)]);
            out.rows.push(Row { end: out.ids.len(), ..self.rows[index as usize] });
        }
        out
    }

    pub(crate) fn append(&mut self, other: &Self) {
        let before = self.ids.len();
        self.ids.extend_from_slice(&other.ids);
        self.rows.extend(other.rows.iter().map(|row| Row { end: before + row.end, ..*row }));
    }

    /// Everything as numbers, for files and messages: the length of every text, `n_first` and whether it was cut, then all
    /// ids.
    pub fn to_words(&self) -> Vec<u32> {
        let of_row = |index: usize| {
            let row = &self.rows[index];
            [self.span(index).len() as u32, row.n_first, u32::from(row.is_truncated)]
        };
        (0..self.len()).flat_map(of_row).chain(self.ids.iter().copied()).collect()
    }

    /// What [`Tokens::to_words`] wrote for `n_texts` texts.
    ///
    /// # Errors
    /// If the words are not such texts.
    pub fn from_words(words: &[u32], n_texts: usize) -> Result<Self> {
        let cut = || Error::inconsistent("tokens", format!("{} words are not {n_texts} texts", words.len()));
        let (rows, mut ids) =
            n_texts.checked_mul(WORDS_PER_TEXT).and_then(|n| words.split_at_checked(n)).ok_or_else(cut)?;
        let mut out = Self::default();
        for row in rows.chunks_exact(WORDS_PER_TEXT) {
            let (text, rest) = ids.split_at_checked(row[0] as usize).ok_or_else(cut)?;
            out.push(text, row[1] as usize, row[2] != 0)?;
            ids = rest;
        }
        if ids.is_empty() { Ok(out) } else { Err(cut()) }
    }

    fn span(&self, index: usize) -> Range<usize> {
        let start = index.checked_sub(1).map_or(0, |before| self.rows[before].end);
        start..self.rows[index].end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens() -> Tokens {
        let mut tokens = Tokens::default();
        tokens.push(&[5, 0, 7], 3, false).unwrap();
        tokens.push(&[1, 2, 3, 4], 2, true).unwrap();
        tokens.push(&[9], 1, false).unwrap();
        tokens
    }

    #[test]
    fn a_slot_tells_padding_the_first_text_and_the_second_apart() {
        let mut slots = [9.0; 5];
        tokens().write(0, &mut slots);
        assert_eq!(slots, [11.0, 1.0, 15.0, 0.0, 0.0]);
        tokens().write(1, &mut slots);
        assert_eq!(slots, [3.0, 5.0, 8.0, 10.0, 0.0]);
        let mut largest = Tokens::default();
        largest.push(&[ID_LIMIT - 1], 0, false).unwrap();
        largest.write(0, &mut slots);
        assert_eq!(slots[0] as u64, 2 * u64::from(ID_LIMIT), "exact in single precision");
    }

    #[test]
    fn subsets_and_sums_keep_what_belongs_to_a_text() {
        let some = tokens().subset(&[2, 1, 1]);
        assert_eq!((some.text(0), some.text(2)), ((&[9][..], 1), (&[1, 2, 3, 4][..], 2)));
        assert_eq!((some.n_truncated(), some.n_tokens(), some.longest()), (2, 9, 4));
        let mut both = tokens();
        both.append(&some);
        assert_eq!((both.len(), both.text(3), both.n_truncated()), (6, (&[9][..], 1), 3));
    }

    #[test]
    fn words_come_back_and_damaged_ones_are_refused() {
        let words = tokens().to_words();
        assert_eq!(Tokens::from_words(&words, 3).unwrap(), tokens());
        assert!(Tokens::from_words(&words, 2).is_err());
        assert!(Tokens::from_words(&words, usize::MAX).is_err());
        assert!(Tokens::from_words(&words[..words.len() - 1], 3).is_err());
        for (at, value) in [(0, u32::MAX), (1, 4), (9, ID_LIMIT)] {
            let mut damaged = words.clone();
            damaged[at] = value;
            assert!(Tokens::from_words(&damaged, 3).is_err(), "word {at}");
        }
    }
}
