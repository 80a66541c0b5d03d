//! Samples that two sets share.

use crate::dataset::{Dataset, Samples};
use std::collections::HashMap;

impl Dataset {
    /// How many samples of this set are in `other` too, value by value as they are stored. Reads both sets once. Sets of
    /// another shape or kind share nothing.
    pub fn n_shared_with(&self, other: &Self) -> usize {
        match (&self.samples, &other.samples) {
            _ if self.shape != other.shape => 0,
            (Samples::U8(a), Samples::U8(b)) => {
                let len = self.sample_len();
                n_shared(a.chunks_exact(len), b.chunks_exact(len), |sample| hash(words(sample)))
            }
            (Samples::F32(a), Samples::F32(b)) => {
                let len = self.sample_len();
                let bits = |sample: &[f32]| hash(sample.iter().map(|v| u64::from(v.to_bits())));
                n_shared(a.chunks_exact(len), b.chunks_exact(len), bits)
            }
            (Samples::Tokens(a), Samples::Tokens(b)) => {
                let (a, b) = ((0..a.len()).map(|i| a.text(i)), (0..b.len()).map(|i| b.text(i)));
                n_shared(a, b, |(ids, n_first)| hash(ids.iter().map(|id| u64::from(*id)).chain([n_first as u64])))
            }
            _ => 0,
        }
    }
}

/// How many of `a` are in `b`. Equal hashes are a hint; the samples themselves decide.
fn n_shared<T: Copy + PartialEq>(
    a: impl Iterator<Item = T>,
    b: impl Iterator<Item = T>,
    hash: impl Fn(T) -> u64,
) -> usize {
    let known: HashMap<u64, T> = b.map(|sample| (hash(sample), sample)).collect();
    a.filter(|sample| known.get(&hash(*sample)) == Some(sample)).count()
}

/// Eight bytes at a time; zeros fill the last word.
fn words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    let (whole, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    whole.iter().map(|word| u64::from_le_bytes(*word)).chain([u64::from_le_bytes(last)])
}

/// A quick hash. Chance makes two of 10⁵ samples collide once in 10⁹ pairs of sets.
fn hash(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0x9e37_79b9_7f4a_7c15, |h, word| (h ^ word).wrapping_mul(0xd6e8_feb8_6659_fd93).rotate_left(32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Shape, Tokens};

    fn rows(samples: Samples, features: usize) -> Dataset {
        Dataset::new("t", Shape::Vector { features }, samples, None, Vec::new()).unwrap()
    }

    #[test]
    fn samples_of_every_kind_are_counted_once_each() {
        let bytes = |values: &[u8]| rows(Samples::U8(values.to_vec()), 3);
        let test = bytes(&[1, 2, 3, 4, 5, 6, 4, 5, 6]);
        assert_eq!(bytes(&[4, 5, 6, 7, 8, 9, 4, 5, 6, 3, 2, 1]).n_shared_with(&test), 2);
        let floats = |values: &[f32]| rows(Samples::F32(values.to_vec()), 2);
        assert_eq!(floats(&[0.5, 1.0, 1.0, 0.5]).n_shared_with(&floats(&[1.0, 0.5, 2.0, 2.0])), 1);
        let texts = |all: &[(&[u32], usize)]| {
            let mut tokens = Tokens::default();
            for (ids, n_first) in all {
                tokens.push(ids, *n_first, false).unwrap();
            }
            Dataset::new("t", Shape::Tokens { len: 8 }, Samples::Tokens(tokens), None, Vec::new()).unwrap()
        };
        let test = texts(&[(&[5, 6, 7], 3), (&[5, 6], 2)]);
        assert_eq!(texts(&[(&[5, 6, 7], 2), (&[5, 6], 2), (&[5], 1)]).n_shared_with(&test), 1);
        assert_eq!(floats(&[0.0; 6]).n_shared_with(&bytes(&[0; 3])), 0, "other kinds have nothing in common");
    }
}
