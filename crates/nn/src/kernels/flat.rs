//! Arithmetic on flat vectors. The reduction order depends only on lengths.

use super::Cpu;
use super::elementwise::{for_each_chunk, for_each_part};
use super::simd::Simd;
use super::team::Shards;

/// Products summed in single precision before they are added in double precision.
const CHUNK: usize = 4096;
/// Independent partial sums per chunk; the same on every instruction set.
const LANES: usize = 64;

/// ⟨a, b⟩
///
/// # Panics
/// If the vectors differ in length.
pub fn dot(cpu: &Cpu, a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "vectors of different lengths");
    a.chunks(CHUNK).zip(b.chunks(CHUNK)).map(|(a, b)| f64::from(dot_chunk(cpu.isa, a, b))).sum()
}

dispatch! { fn dot_chunk(a: &[f32], b: &[f32]) -> f32 = dot_kernel }

#[inline(always)]
unsafe fn dot_kernel<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0.0f32; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for ((acc, a), b) in acc.iter_mut().zip(a).zip(b) {
            *acc = S::fma_scalar(*a, *b, *acc);
        }
    }
    sum_of_halves(acc)
}

/// Sums a power of two of partial sums: adds the upper half to the lower half until one is left.
#[inline(always)]
pub(crate) fn sum_of_halves<const N: usize>(mut sums: [f32; N]) -> f32 {
    let mut width = N / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

/// y ← y + a·x
///
/// # Panics
/// If the vectors differ in length.
pub fn axpy(cpu: &mut Cpu, a: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "vectors of different lengths");
    let isa = cpu.isa;
    for_each_part(cpu, y, &|range, y| axpy_chunk(isa, a, &x[range], y));
}

dispatch! { fn axpy_chunk(a: f32, x: &[f32], y: &mut [f32]) = axpy_kernel }

#[inline(always)]
unsafe fn axpy_kernel<S: Simd>(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = S::fma_scalar(a, *x, *y);
    }
}

/// out ← out + a·(x − y). The difference comes first, so that equal vectors add exactly nothing. Otherwise an optimiser
/// that divides by the gradient's size would turn the rounding error into a visible step.
///
/// # Panics
/// If the vectors differ in length.
pub fn axpy_difference(cpu: &mut Cpu, a: f32, x: &[f32], y: &[f32], out: &mut [f32]) {
    assert!(x.len() == out.len() && y.len() == out.len(), "vectors of different lengths");
    let isa = cpu.isa;
    for_each_part(cpu, out, &|range, out| axpy_difference_chunk(isa, a, &x[range.clone()], &y[range], out));
}

dispatch! { fn axpy_difference_chunk(a: f32, x: &[f32], y: &[f32], out: &mut [f32]) = axpy_difference_kernel }

#[inline(always)]
unsafe fn axpy_difference_kernel<S: Simd>(a: f32, x: &[f32], y: &[f32], out: &mut [f32]) {
    for ((out, x), y) in out.iter_mut().zip(x).zip(y) {
        *out = S::fma_scalar(a, x - y, *out);
    }
}

/// The constants of one optimiser step.
#[derive(Clone, Copy)]
pub(crate) enum Update {
    Sgd { lr: f32, momentum: f32, nesterov: bool, weight_decay: f32, first: bool },
    Adam { lr: f32, beta1: f32, beta2: f32, eps: f32, l2: f32, decay: f32, correction1: f32, correction2_sqrt: f32 },
}

/// Parameters per block. Adam skips a block while all its gradients have been 0.
pub(crate) const BLOCK: usize = 128;

/// An optimiser's memory. Parts that the rule does not use are empty.
pub(crate) struct Moments<'a> {
    pub mean: &'a mut [f32],
    pub mean_square: &'a mut [f32],
    /// Whether a block of parameters can move: only after its first gradient other than 0. A batch touches a few
    /// hundred of 30 000 words; Adam only reads the gradient of the others. Skipping does not change the result.
    pub moves: &'a mut [bool],
}

/// θ ← θ − step(g)
pub(crate) fn update(cpu: &mut Cpu, rule: Update, theta: &mut [f32], g: &[f32], memory: Moments<'_>) {
    assert_eq!(theta.len(), g.len(), "gradient of another length than the parameters");
    let (isa, len) = (cpu.isa, g.len());
    let (theta, moves) = (Shards::new(theta), Shards::new(memory.moves));
    let (m, v) = (Shards::new(memory.mean), Shards::new(memory.mean_square));
    for_each_chunk(&mut cpu.team, len, &|range| {
        let of = |shards: &Shards<'_, f32>| if shards.len() == 0 { 0..0 } else { range.clone() };
        // SAFETY: each unit owns its chunk.
        let (theta, m, v) = unsafe { (theta.part(range.clone()), m.part(of(&m)), v.part(of(&v))) };
        let g = &g[range.clone()];
        match rule {
            Update::Sgd { .. } => sgd_chunk(isa, rule, theta, g, m),
            Update::Adam { .. } => {
                // SAFETY: as above; a chunk is a whole number of blocks, or the last one.
                let moves = unsafe { moves.part(range.start / BLOCK..range.end.div_ceil(BLOCK)) };
                adam_chunk(isa, rule, theta, g, m, v, moves);
            }
        }
    });
}

dispatch! { fn sgd_chunk(rule: Update, theta: &mut [f32], g: &[f32], m: &mut [f32]) = sgd }
dispatch! {
    fn adam_chunk(rule: Update, theta: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], moves: &mut [bool]) = adam
}

#[inline(always)]
unsafe fn sgd<S: Simd>(rule: Update, theta: &mut [f32], g: &[f32], m: &mut [f32]) {
    let Update::Sgd { lr, momentum, nesterov, weight_decay, first } = rule else { return };
    if m.is_empty() {
        for (theta, g) in theta.iter_mut().zip(g) {
            *theta -= lr * (g + weight_decay * *theta);
        }
        return;
    }
    // The first step fills the buffer with the gradient, as PyTorch does.
    let keep = if first { 0.0 } else { momentum };
    for ((theta, g), m) in theta.iter_mut().zip(g).zip(m) {
        let d = g + weight_decay * *theta;
        *m = keep * *m + d;
        *theta -= lr * if nesterov { d + momentum * *m } else { *m };
    }
}

#[inline(always)]
unsafe fn adam<S: Simd>(rule: Update, theta: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], moves: &mut [bool]) {
    let Update::Adam { lr, beta1, beta2, eps, l2, decay, correction1, correction2_sqrt } = rule else { return };
    let (step, root) = (lr / correction1, 1.0 / correction2_sqrt);
    let blocks = theta.chunks_mut(BLOCK).zip(g.chunks(BLOCK)).zip(m.chunks_mut(BLOCK)).zip(v.chunks_mut(BLOCK));
    for ((((theta, g), m), v), moves) in blocks.zip(moves) {
        if !*moves {
            // The shift by one bit ignores the sign of a zero.
            *moves = g.iter().fold(0, |bits, g| bits | g.to_bits() << 1) != 0;
        }
        if *moves {
            for (((theta, g), m), v) in theta.iter_mut().zip(g).zip(m).zip(v) {
                let g = g + l2 * *theta;
                *m = beta1 * *m + (1.0 - beta1) * g;
                *v = beta2 * *v + (1.0 - beta2) * g * g;
                *theta = *theta * (1.0 - lr * decay) - step * *m / (v.sqrt() * root + eps);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fedproj_rng::{Purpose, Stream};

    #[test]
    fn parameters_without_gradients_end_as_if_none_had_been_skipped() {
        let n = 40 * BLOCK + 17;
        let mut s = Stream::new(2, Purpose::Synthetic, [0; 3]);
        let start: Vec<f32> = (0..n).map(|i| if i % 9 == 0 { -0.0 } else { s.normal() as f32 }).collect();
        let mut sides =
            [false, true].map(|moves| (start.clone(), vec![0.0; n], vec![0.0; n], vec![moves; n.div_ceil(BLOCK)]));
        let mut cpu = Cpu::new(2);
        for step in 0..20 {
            // Some blocks get gradients at some steps. One gets them only in its last element, others never or only −0.
            let g: Vec<f32> = (0..n)
                .map(|i| match i / BLOCK {
                    3 if i % BLOCK == BLOCK - 1 => 0.5,
                    block if block % 4 == 0 && step % 5 == 4 => s.normal() as f32,
                    40 if step == 7 => 1e-30,
                    block if block % 4 == 1 => -0.0,
                    _ => 0.0,
                })
                .collect();
            let (lr, correction1, correction2_sqrt) = (0.1, 0.1 + 0.01 * step as f32, 0.03);
            let rule = Update::Adam {
                lr,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                l2: 0.0,
                decay: 0.0,
                correction1,
                correction2_sqrt,
            };
            for (theta, mean, mean_square, moves) in &mut sides {
                update(&mut cpu, rule, theta, &g, Moments { mean, mean_square, moves });
            }
        }
        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let [skipped, whole] = &sides;
        assert_eq!(bits(&skipped.0), bits(&whole.0));
        assert_eq!((bits(&skipped.1), bits(&skipped.2)), (bits(&whole.1), bits(&whole.2)));
        assert_eq!(skipped.3.iter().filter(|moves| **moves).count(), 12, "of 41 blocks");
    }
}
