//! Element-wise operations, in chunks that threads may share.

use super::simd::Simd;
use super::team::{Shards, Team};
use super::{Cpu, Sum};
use std::ops::Range;

/// Elements per chunk: several chunks fit the second-level cache.
const CHUNK: usize = 16 * 1024;

/// Calls `f` for consecutive chunks of 0..len.
pub(super) fn for_each_chunk(team: &mut Team, len: usize, f: &(dyn Fn(Range<usize>) + Sync)) {
    team.run(len.div_ceil(CHUNK), &|unit, _| f(unit * CHUNK..((unit + 1) * CHUNK).min(len)));
}

/// Calls `f` with the chunks of a vector, which it may write.
pub(super) fn for_each_part(cpu: &mut Cpu, out: &mut [f32], f: &(dyn Fn(Range<usize>, &mut [f32]) + Sync)) {
    let (len, out) = (out.len(), Shards::new(out));
    // SAFETY: each unit owns its chunk.
    for_each_chunk(&mut cpu.team, len, &|range| f(range.clone(), unsafe { out.part(range) }));
}

/// Calls `f` with the chunks of a sum, to add to them.
pub(super) fn for_each_term(cpu: &mut Cpu, sum: Sum<'_>, f: &(dyn Fn(Range<usize>, &mut [f32]) + Sync)) {
    let (len, sum) = (sum.values.len(), sum.shards());
    // SAFETY: each unit owns its chunk.
    for_each_chunk(&mut cpu.team, len, &|range| f(range.clone(), unsafe { sum.part(range) }));
}

/// out = Σ slices, in order. `slices` is a whole number of vectors of `out`'s length.
pub(super) fn sum_slices(cpu: &mut Cpu, slices: &[f32], out: &mut [f32]) {
    add_slices(cpu, slices, Sum { values: out, fresh: true });
}

/// sum += Σ slices, in order.
pub(super) fn add_slices(cpu: &mut Cpu, slices: &[f32], sum: Sum<'_>) {
    let (isa, len) = (cpu.isa, sum.values.len());
    for_each_term(cpu, sum, &|range, sum| {
        for slice in slices.chunks_exact(len) {
            add_chunk(isa, sum, &slice[range.clone()]);
        }
    });
}

/// y = x. Each part is copied by the thread that will read it.
pub(crate) fn copy(cpu: &mut Cpu, x: &[f32], y: &mut [f32]) {
    for_each_part(cpu, &mut y[..x.len()], &|range, y| y.copy_from_slice(&x[range]));
}

/// sum += x
pub(crate) fn add(cpu: &mut Cpu, sum: Sum<'_>, x: &[f32]) {
    assert_eq!(sum.values.len(), x.len(), "vectors of different lengths");
    let isa = cpu.isa;
    for_each_term(cpu, sum, &|range, sum| add_chunk(isa, sum, &x[range]));
}

dispatch! { pub(super) fn add_chunk(y: &mut [f32], x: &[f32]) = add_kernel }

#[inline(always)]
unsafe fn add_kernel<S: Simd>(y: &mut [f32], x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += x;
    }
}

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// max(x, 0)
    Relu,
    /// x Φ(x) with the exact normal distribution function
    Gelu,
    /// tanh(x)
    Tanh,
}

impl Activation {
    /// y = f(x)
    pub(crate) fn forward(self, cpu: &mut Cpu, x: &[f32], y: &mut [f32]) {
        let isa = cpu.isa;
        for_each_part(cpu, y, &|range, y| activate_chunk(isa, self, &x[range], y));
    }

    /// dx += f'(x) dy, from the input x and the output y.
    pub(crate) fn backward(self, cpu: &mut Cpu, x: &[f32], y: &[f32], dy: &[f32], dx: Sum<'_>) {
        let isa = cpu.isa;
        for_each_term(cpu, dx, &|range, dx| {
            derive_chunk(isa, self, &x[range.clone()], &y[range.clone()], &dy[range], dx);
        });
    }
}

dispatch! { fn activate_chunk(f: Activation, x: &[f32], y: &mut [f32]) = activate }
dispatch! { fn derive_chunk(f: Activation, x: &[f32], y: &[f32], dy: &[f32], dx: &mut [f32]) = derive }

#[inline(always)]
unsafe fn activate<S: Simd>(f: Activation, x: &[f32], y: &mut [f32]) {
    let pairs = y.iter_mut().zip(x);
    match f {
        // Written so that NaN stays NaN: a diverged network must be noticed.
        Activation::Relu => pairs.for_each(|(y, x)| *y = if *x < 0.0 { 0.0 } else { *x }),
        Activation::Gelu => pairs.for_each(|(y, x)| *y = x * normal_cdf(*x)),
        Activation::Tanh => pairs.for_each(|(y, x)| *y = x.tanh()),
    }
}

#[inline(always)]
unsafe fn derive<S: Simd>(f: Activation, x: &[f32], y: &[f32], dy: &[f32], dx: &mut [f32]) {
    let all = dx.iter_mut().zip(dy).zip(x.iter().zip(y));
    match f {
        Activation::Relu => all.for_each(|((dx, dy), (_, y))| *dx += if *y > 0.0 { *dy } else { 0.0 }),
        Activation::Gelu => all.for_each(|((dx, dy), (x, _))| {
            const INV_SQRT_TAU: f32 = 0.398_942_3;
            let density = exp(-0.5 * x * x);
            *dx += dy * (cdf_from_density(*x, density) + x * INV_SQRT_TAU * density);
        }),
        Activation::Tanh => all.for_each(|((dx, dy), (_, y))| *dx += dy * (1.0 - y * y)),
    }
}

/// dz = 0 where z ≤ 0: the backward pass of an in-place ReLU.
pub(crate) fn mask_negative(cpu: &mut Cpu, z: &[f32], dz: &mut [f32]) {
    let isa = cpu.isa;
    for_each_part(cpu, dz, &|range, dz| mask_chunk(isa, &z[range], dz));
}

dispatch! { fn mask_chunk(z: &[f32], dz: &mut [f32]) = mask_kernel }

#[inline(always)]
unsafe fn mask_kernel<S: Simd>(z: &[f32], dz: &mut [f32]) {
    for (dz, z) in dz.iter_mut().zip(z) {
        *dz = if *z > 0.0 { *dz } else { 0.0 };
    }
}

/// Φ(x), the distribution function of the standard normal (Abramowitz and Stegun 7.1.26, error below 1.5e-7).
#[inline(always)]
fn normal_cdf(x: f32) -> f32 {
    cdf_from_density(x, exp(-0.5 * x * x))
}

/// As [`normal_cdf`], from e^(−x²/2).
#[inline(always)]
fn cdf_from_density(x: f32, density: f32) -> f32 {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let poly = t * (0.254_829_6 + t * (-0.284_496_72 + t * (1.421_413_8 + t * (-1.453_152_1 + t * 1.061_405_4))));
    let half_tail = 0.5 * poly * density;
    if x >= 0.0 { 1.0 - half_tail } else { half_tail }
}

/// eˣ with a relative error below 2e-7, in a form that compiles to vector instructions (Cephes `expf`).
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // x = n ln 2 + r, |r| ≤ ln 2 / 2; adding 1.5·2²³ rounds to the nearest integer.
    const MAGIC: f32 = 12_582_912.0;
    let x = x.clamp(-87.3, 88.3);
    let n = x * std::f32::consts::LOG2_E + MAGIC - MAGIC;
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let e = p * r * r + r + 1.0;
    e * f32::from_bits((((n as i32) + 127) << 23) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_and_normal_cdf_are_accurate() {
        for i in -8000..8000 {
            let x = i as f32 * 0.01;
            let (ours, exact) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((ours / exact - 1.0).abs() < 3e-7, "exp({x}) = {ours}, not {exact}");
        }
        // Φ(1) and Φ(−2), from tables.
        assert!((normal_cdf(1.0) - 0.841_344_7).abs() < 2e-7);
        assert!((normal_cdf(-2.0) - 0.022_750_13).abs() < 2e-7);
        assert!(normal_cdf(-40.0) < 1e-38 && exp(-1000.0) < 2e-38);
    }

    #[test]
    fn sums_of_slices_keep_their_order() {
        let mut cpu = Cpu::new(2);
        let slices: Vec<f32> = (0..3 * 40_001).map(|i| (i % 977) as f32 * 0.37).collect();
        let mut sum = vec![0.0; 40_001];
        sum_slices(&mut cpu, &slices, &mut sum);
        for i in [0, 1, 16_384, 40_000] {
            let expected = slices[i] + slices[i + 40_001] + slices[i + 80_002];
            assert_eq!(sum[i].to_bits(), expected.to_bits());
        }
    }
}
