//! Arithmetic on flat vectors, with a reduction order that depends on lengths alone.

use super::Cpu;
use super::elementwise::for_each_chunk;
use super::simd::{Isa, Simd};
use super::team::Shards;

/// Elements whose products are summed in single precision before the sum goes to double precision.
const CHUNK: usize = 4096;
/// Independent partial sums of a chunk; the same on every instruction set.
const LANES: usize = 64;

/// Σ a·b
pub(crate) fn dot(isa: Isa, a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "vectors of different lengths");
    a.chunks(CHUNK).zip(b.chunks(CHUNK)).map(|(a, b)| f64::from(dot_chunk(isa, a, b))).sum()
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
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            acc[i] += acc[i + width];
        }
        width /= 2;
    }
    acc[0]
}

/// y += a·x
pub(crate) fn axpy(cpu: &mut Cpu, a: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "vectors of different lengths");
    let (isa, len) = (cpu.isa, y.len());
    let y = Shards::new(y);
    for_each_chunk(&mut cpu.team, len, &|range| {
        // SAFETY: each chunk is one unit's.
        axpy_chunk(isa, a, &x[range.clone()], unsafe { y.part(range) });
    });
}

dispatch! { fn axpy_chunk(a: f32, x: &[f32], y: &mut [f32]) = axpy_kernel }

#[inline(always)]
unsafe fn axpy_kernel<S: Simd>(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = S::fma_scalar(a, *x, *y);
    }
}

/// out += a·(x − y), with the difference taken first: it is exactly 0 where x = y.
pub(crate) fn axpy_difference(cpu: &mut Cpu, a: f32, x: &[f32], y: &[f32], out: &mut [f32]) {
    assert!(x.len() == out.len() && y.len() == out.len(), "vectors of different lengths");
    let (isa, len) = (cpu.isa, out.len());
    let out = Shards::new(out);
    for_each_chunk(&mut cpu.team, len, &|range| {
        // SAFETY: each chunk is one unit's.
        axpy_difference_chunk(isa, a, &x[range.clone()], &y[range.clone()], unsafe { out.part(range) });
    });
}

dispatch! { fn axpy_difference_chunk(a: f32, x: &[f32], y: &[f32], out: &mut [f32]) = axpy_difference_kernel }

#[inline(always)]
unsafe fn axpy_difference_kernel<S: Simd>(a: f32, x: &[f32], y: &[f32], out: &mut [f32]) {
    for ((out, x), y) in out.iter_mut().zip(x).zip(y) {
        *out = S::fma_scalar(a, x - y, *out);
    }
}

/// out = Σ_k w_k·row_k, rows in order.
pub(crate) fn weighted_sum(cpu: &mut Cpu, rows: &[&[f32]], weights: &[f32], out: &mut [f32]) {
    assert_eq!(rows.len(), weights.len(), "one weight a row");
    assert!(rows.iter().all(|row| row.len() == out.len()), "rows of different lengths");
    let (isa, len) = (cpu.isa, out.len());
    let out = Shards::new(out);
    for_each_chunk(&mut cpu.team, len, &|range| {
        // SAFETY: each chunk is one unit's.
        let out = unsafe { out.part(range.clone()) };
        out.fill(0.0);
        for (row, &w) in rows.iter().zip(weights) {
            axpy_chunk(isa, w, &row[range.clone()], out);
        }
    });
}

/// The constants of one optimiser step.
#[derive(Clone, Copy)]
pub(crate) enum Update {
    Sgd { lr: f32, momentum: f32, nesterov: bool, weight_decay: f32, first: bool },
    Adam { lr: f32, beta1: f32, beta2: f32, eps: f32, l2: f32, decay: f32, correction1: f32, correction2_sqrt: f32 },
}

/// θ ← θ − step(g); `m` and `v` are the optimiser's memory and may be empty where it has none.
pub(crate) fn update(cpu: &mut Cpu, rule: Update, theta: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    assert_eq!(theta.len(), g.len(), "gradient of another length than the parameters");
    let (isa, len) = (cpu.isa, g.len());
    let (theta, m, v) = (Shards::new(theta), Shards::new(m), Shards::new(v));
    for_each_chunk(&mut cpu.team, len, &|range| {
        let of = |shards: &Shards<'_, f32>| if shards.len() == 0 { 0..0 } else { range.clone() };
        // SAFETY: each chunk is one unit's.
        let (theta, m, v) = unsafe { (theta.part(range.clone()), m.part(of(&m)), v.part(of(&v))) };
        match rule {
            Update::Sgd { .. } => sgd_chunk(isa, rule, theta, &g[range.clone()], m),
            Update::Adam { .. } => adam_chunk(isa, rule, theta, &g[range.clone()], m, v),
        }
    });
}

dispatch! { fn sgd_chunk(rule: Update, theta: &mut [f32], g: &[f32], m: &mut [f32]) = sgd }
dispatch! { fn adam_chunk(rule: Update, theta: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) = adam }

#[inline(always)]
unsafe fn sgd<S: Simd>(rule: Update, theta: &mut [f32], g: &[f32], m: &mut [f32]) {
    let Update::Sgd { lr, momentum, nesterov, weight_decay, first } = rule else { return };
    if m.is_empty() {
        for (theta, g) in theta.iter_mut().zip(g) {
            *theta -= lr * (g + weight_decay * *theta);
        }
        return;
    }
    // The first step fills the buffer with the gradient itself, as PyTorch does.
    let keep = if first { 0.0 } else { momentum };
    for ((theta, g), m) in theta.iter_mut().zip(g).zip(m) {
        let d = g + weight_decay * *theta;
        *m = keep * *m + d;
        *theta -= lr * if nesterov { d + momentum * *m } else { *m };
    }
}

#[inline(always)]
unsafe fn adam<S: Simd>(rule: Update, theta: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    let Update::Adam { lr, beta1, beta2, eps, l2, decay, correction1, correction2_sqrt } = rule else { return };
    let (step, root) = (lr / correction1, 1.0 / correction2_sqrt);
    for (((theta, g), m), v) in theta.iter_mut().zip(g).zip(m).zip(v) {
        let g = g + l2 * *theta;
        *m = beta1 * *m + (1.0 - beta1) * g;
        *v = beta2 * *v + (1.0 - beta2) * g * g;
        *theta = *theta * (1.0 - lr * decay) - step * *m / (v.sqrt() * root + eps);
    }
}
