//! Synthetic texts, as long as real ones.

use fedproj_rng::Stream;

/// Word pieces of the encoders in the catalogue.
const VOCABULARY: u32 = 30_522;

/// Tokens of SST-2's training sentences with BERT's vocabulary, special tokens included: the quantiles at 1/64, 3/64 … 63/64.
/// Their mean is 13.2.
const SST2: [usize; 32] =
    [3, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 8, 8, 9, 9, 10, 11, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22, 24, 26, 29, 34, 42];

/// Tokens of the `text`-th text: `slots`, or with `lengths` "sst2" the length of one of SST-2's sentences.
pub fn len(text: usize, slots: usize, lengths: &str) -> usize {
    if lengths == "sst2" { SST2[text % SST2.len()].min(slots) } else { slots }
}

/// `n` texts in rows of `slots`, of words drawn at random.
pub fn batch(stream: &mut Stream, n: usize, slots: usize, lengths: &str) -> Vec<f32> {
    let mut x = vec![0.0; n * slots];
    for (text, row) in x.chunks_exact_mut(slots).enumerate() {
        for slot in &mut row[..len(text, slots, lengths)] {
            *slot = 1.0 + 2.0 * stream.below(VOCABULARY) as f32;
        }
    }
    x
}
