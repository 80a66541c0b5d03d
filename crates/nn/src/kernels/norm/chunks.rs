//! The vector kernels of [`super`]: passes over a chunk of rows, whose coefficients repeat with a period.

use super::super::conv::at_least;
use super::super::simd::Simd;

dispatch! {
    /// s1 += x − shift, s2 += (x − shift)², all with the period of the accumulators.
    pub(super) fn moments_chunk(x: &[f32], shift: &[f32], s1: &mut [f32], s2: &mut [f32]) = moments
}
dispatch! { pub(super) fn sum_chunk(x: &[f32], acc: &mut [f32]) = sum_rows }
dispatch! {
    pub(super) fn apply_chunk(x: &[f32], residual: Option<&[f32]>, scale: &[f32], shift: &[f32], relu: bool, z: &mut [f32]) = apply
}
dispatch! {
    /// s1 += dz, s2 += dz·x̂, with dz masked where z ≤ 0.
    pub(super) fn gradient_sums_chunk(dz: &[f32], z: Option<&[f32]>, x: &[f32], mean: &[f32], inv: &[f32], s1: &mut [f32], s2: &mut [f32])
        = gradient_sums
}
dispatch! {
    /// dz ← a·dz + b·x + c, with dz masked where z ≤ 0. Adds the masked dz to dr.
    pub(super) fn gradient_chunk(dz: &mut [f32], z: Option<&[f32]>, x: &[f32], a: &[f32], b: &[f32], c: &[f32], dr: Option<&mut [f32]>)
        = gradient
}

#[inline(always)]
unsafe fn moments<S: Simd>(x: &[f32], shift: &[f32], s1: &mut [f32], s2: &mut [f32]) {
    for x in x.chunks(shift.len()) {
        for (((x, shift), s1), s2) in x.iter().zip(shift).zip(&mut *s1).zip(&mut *s2) {
            let d = x - shift;
            *s1 += d;
            *s2 = S::fma_scalar(d, d, *s2);
        }
    }
}

#[inline(always)]
unsafe fn sum_rows<S: Simd>(x: &[f32], acc: &mut [f32]) {
    let period = acc.len() / 2;
    for x in x.chunks(period) {
        for (acc, x) in acc[..period].iter_mut().zip(x) {
            *acc += x;
        }
    }
}

#[inline(always)]
unsafe fn apply<S: Simd>(x: &[f32], residual: Option<&[f32]>, scale: &[f32], shift: &[f32], relu: bool, z: &mut [f32]) {
    let floor = if relu { 0.0 } else { f32::NEG_INFINITY };
    let period = scale.len();
    if let Some(residual) = residual {
        for ((x, r), z) in x.chunks(period).zip(residual.chunks(period)).zip(z.chunks_mut(period)) {
            for ((((z, x), r), scale), shift) in z.iter_mut().zip(x).zip(r).zip(scale).zip(shift) {
                *z = at_least(floor, S::fma_scalar(*x, *scale, *shift) + r);
            }
        }
    } else {
        for (x, z) in x.chunks(period).zip(z.chunks_mut(period)) {
            for (((z, x), scale), shift) in z.iter_mut().zip(x).zip(scale).zip(shift) {
                *z = at_least(floor, S::fma_scalar(*x, *scale, *shift));
            }
        }
    }
}

#[inline(always)]
unsafe fn gradient_sums<S: Simd>(
    dz: &[f32],
    z: Option<&[f32]>,
    x: &[f32],
    mean: &[f32],
    inv: &[f32],
    s1: &mut [f32],
    s2: &mut [f32],
) {
    let period = mean.len();
    // Without a ReLU the mask compares dz itself with −∞, which is always true.
    let (z, above) = z.map_or((dz, f32::NEG_INFINITY), |z| (z, 0.0));
    for ((dz, z), x) in dz.chunks(period).zip(z.chunks(period)).zip(x.chunks(period)) {
        let sums = s1.iter_mut().zip(&mut *s2);
        let stats = mean.iter().zip(inv);
        for ((((dz, z), x), (mean, inv)), (s1, s2)) in dz.iter().zip(z).zip(x).zip(stats).zip(sums) {
            let d = if *z > above { *dz } else { 0.0 };
            *s1 += d;
            *s2 = S::fma_scalar(d, (x - mean) * inv, *s2);
        }
    }
}

#[inline(always)]
unsafe fn gradient<S: Simd>(
    dz: &mut [f32],
    z: Option<&[f32]>,
    x: &[f32],
    a: &[f32],
    b: &[f32],
    c: &[f32],
    dr: Option<&mut [f32]>,
) {
    // One period at a time: the next loop finds it in the first-level cache.
    let period = a.len();
    let mut dr = dr.map(|dr| dr.chunks_mut(period));
    let mut z = z.map(|z| z.chunks(period));
    for (dz, x) in dz.chunks_mut(period).zip(x.chunks(period)) {
        if let Some(z) = z.as_mut().and_then(Iterator::next) {
            for (dz, z) in dz.iter_mut().zip(z) {
                *dz = if *z > 0.0 { *dz } else { 0.0 };
            }
        }
        if let Some(dr) = dr.as_mut().and_then(Iterator::next) {
            for (dr, dz) in dr.iter_mut().zip(&*dz) {
                *dr += dz;
            }
        }
        for ((((dz, x), a), b), c) in dz.iter_mut().zip(x).zip(a).zip(b).zip(c) {
            *dz = S::fma_scalar(*a, *dz, S::fma_scalar(*b, *x, *c));
        }
    }
}
