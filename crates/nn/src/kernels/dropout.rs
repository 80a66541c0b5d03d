//! Dropout masks. A mask is a function of (key, element), so every back end and thread count draws the same one.

use super::elementwise::{for_each_chunk, for_each_term};
use super::simd::Simd;
use super::team::Shards;
use super::{Cpu, Sum};
use fedproj_rng::philox4x32_10;

/// Elements per Philox call: 16 bits each.
const PER_CALL: usize = 8;
/// Philox calls per vector: one per lane.
const LANES: usize = 16;
const BLOCK: usize = PER_CALL * LANES;

/// y = x / (1 − rate) for kept elements, else 0. `kept` records which were kept.
pub(crate) fn forward(cpu: &mut Cpu, key: [u32; 2], rate: f32, x: &[f32], y: &mut [f32], kept: &mut [u8]) {
    let (isa, len) = (cpu.isa, x.len());
    let (y, kept) = (Shards::new(y), Shards::new(kept));
    for_each_chunk(&mut cpu.team, len, &|range| {
        // SAFETY: each unit owns its chunk.
        let (y, kept) = unsafe { (y.part(range.clone()), kept.part(range.clone())) };
        drop_chunk(isa, key, (range.start / PER_CALL) as u32, rate, &x[range], y, kept);
    });
}

/// dx += dy / (1 − rate) for kept elements.
pub(crate) fn backward(cpu: &mut Cpu, rate: f32, kept: &[u8], dy: &[f32], dx: Sum<'_>) {
    let isa = cpu.isa;
    for_each_term(cpu, dx, &|range, dx| drop_backward_chunk(isa, rate, &kept[range.clone()], &dy[range], dx));
}

dispatch! {
    /// Dropout's factors: 0 or 1 / (1 − rate) per element. `part` distinguishes the parts of one operation.
    pub(super) fn multipliers(key: [u32; 2], part: [u32; 2], rate: f32, factors: &mut [f32]) = multiplier_kernel
}
dispatch! { fn drop_chunk(key: [u32; 2], first_call: u32, rate: f32, x: &[f32], y: &mut [f32], kept: &mut [u8]) = drop_kernel }
dispatch! { fn drop_backward_chunk(rate: f32, kept: &[u8], dy: &[f32], dx: &mut [f32]) = drop_backward_kernel }

#[inline(always)]
unsafe fn drop_kernel<S: Simd>(key: [u32; 2], first_call: u32, rate: f32, x: &[f32], y: &mut [f32], kept: &mut [u8]) {
    let (threshold, scale) = (threshold(rate), 1.0 / (1.0 - rate));
    let blocks = x.chunks(BLOCK).zip(y.chunks_mut(BLOCK)).zip(kept.chunks_mut(BLOCK));
    for (block, ((x, y), kept)) in blocks.enumerate() {
        let words = block_words(first_call + (block * LANES) as u32, [0, 0], key);
        for (i, ((x, y), kept)) in x.iter().zip(y).zip(kept).enumerate() {
            let keep = bits(&words, i) >= threshold;
            *kept = u8::from(keep);
            *y = if keep { x * scale } else { 0.0 };
        }
    }
}

#[inline(always)]
unsafe fn multiplier_kernel<S: Simd>(key: [u32; 2], part: [u32; 2], rate: f32, factors: &mut [f32]) {
    let (threshold, scale) = (threshold(rate), 1.0 / (1.0 - rate));
    for (block, factors) in factors.chunks_mut(BLOCK).enumerate() {
        let words = block_words((block * LANES) as u32, part, key);
        for (i, factor) in factors.iter_mut().enumerate() {
            *factor = if bits(&words, i) >= threshold { scale } else { 0.0 };
        }
    }
}

fn threshold(rate: f32) -> u32 {
    (rate * 65_536.0) as u32
}

/// The random words of a block of elements.
#[inline(always)]
fn block_words(first_call: u32, part: [u32; 2], key: [u32; 2]) -> [[u32; LANES]; 4] {
    let mut words = [[0; LANES]; 4];
    for lane in 0..LANES {
        let call = philox4x32_10([first_call + lane as u32, part[0], part[1], 0], key);
        for (word, value) in words.iter_mut().zip(call) {
            word[lane] = value;
        }
    }
    words
}

/// The bits of element (half, word, lane) of a block. The assignment is arbitrary but fixed.
#[inline(always)]
fn bits(words: &[[u32; LANES]; 4], i: usize) -> u32 {
    words[i / LANES % 4][i % LANES] >> (16 * (i / (4 * LANES))) & 0xFFFF
}

#[inline(always)]
unsafe fn drop_backward_kernel<S: Simd>(rate: f32, kept: &[u8], dy: &[f32], dx: &mut [f32]) {
    let scale = 1.0 / (1.0 - rate);
    for ((dx, dy), kept) in dx.iter_mut().zip(dy).zip(kept) {
        *dx += if *kept != 0 { dy * scale } else { 0.0 };
    }
}

#[cfg(test)]
mod tests {
    use super::super::Isa;
    use super::*;

    #[test]
    fn keeps_the_asked_share_and_scales_it() {
        let mut cpu = Cpu::new(1);
        let x = vec![1.0; 100_003];
        let (mut y, mut kept) = (vec![9.0; x.len()], vec![9; x.len()]);
        for rate in [0.1, 0.25, 0.5] {
            forward(&mut cpu, [1, 2], rate, &x, &mut y, &mut kept);
            let share = kept.iter().map(|&k| f32::from(k)).sum::<f32>() / x.len() as f32;
            assert!((share - (1.0 - rate)).abs() < 0.01, "rate {rate}: kept {share}");
            let mut dx = vec![7.0; x.len()];
            backward(&mut cpu, rate, &kept, &x, Sum { values: &mut dx, fresh: true });
            assert_eq!(y, dx);
            assert!(y.iter().all(|&v| v == 0.0 || (v - 1.0 / (1.0 - rate)).abs() < 1e-6));
        }
        let first = y.clone();
        forward(&mut cpu, [1, 3], 0.5, &x, &mut y, &mut kept);
        assert_ne!(first, y, "another key draws another mask");
    }

    #[test]
    fn the_mask_does_not_depend_on_threads_or_instruction_set() {
        let x: Vec<f32> = (0..50_021).map(|i| i as f32).collect();
        let run = |mut cpu: Cpu| {
            let (mut y, mut kept) = (vec![0.0; x.len()], vec![0; x.len()]);
            forward(&mut cpu, [5, 6], 0.3, &x, &mut y, &mut kept);
            kept
        };
        let expected = run(Cpu::new(1));
        assert_eq!(expected, run(Cpu::new(2)));
        for isa in Isa::available() {
            assert_eq!(expected, run(Cpu::with_isa(1, isa)));
        }
    }
}
