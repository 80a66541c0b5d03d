//! The one-dimensional Winograd transforms of F(2, 3) and F(4, 3) and their adjoints (Lavin and Gray, "Fast Algorithms for
//! Convolutional Neural Networks", arXiv:1509.09308), with interpolation points 0, ±1, (±2,) ∞.
//!
//! A convolution is y = Aᵀ[(G g) ⊙ (Bᵀ d)]. In two dimensions each transform is applied to columns, then to rows. The
//! backward passes use the adjoints (B, A, Gᵀ), so they are the exact transposes of the forward pass.

use super::super::simd::Simd;

/// Output tiles of `M`, input tiles of `N = M + 2`.
///
/// # Safety
/// As [`Simd`]: the CPU has the instruction set `S`.
pub(super) trait Transform<const M: usize, const N: usize> {
    /// Bᵀ d
    unsafe fn input<S: Simd>(d: [S::V; N]) -> [S::V; N];
    /// B v
    unsafe fn input_adjoint<S: Simd>(v: [S::V; N]) -> [S::V; N];
    /// Aᵀ m
    unsafe fn output<S: Simd>(m: [S::V; N]) -> [S::V; M];
    /// A y
    unsafe fn output_adjoint<S: Simd>(y: [S::V; M]) -> [S::V; N];
    /// G g
    unsafe fn filter<S: Simd>(g: [S::V; 3]) -> [S::V; N];
    /// Gᵀ u
    unsafe fn filter_adjoint<S: Simd>(u: [S::V; N]) -> [S::V; 3];
}

/// F(2, 3).
pub(super) struct F2;
/// F(4, 3).
pub(super) struct F4;

// SAFETY of every block: arithmetic on vectors of an instruction set that the caller guarantees.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them stands above")]
impl Transform<2, 4> for F2 {
    #[inline(always)]
    unsafe fn input<S: Simd>([d0, d1, d2, d3]: [S::V; 4]) -> [S::V; 4] {
        unsafe { [S::sub(d0, d2), S::add(d1, d2), S::sub(d2, d1), S::sub(d1, d3)] }
    }
    #[inline(always)]
    unsafe fn input_adjoint<S: Simd>([v0, v1, v2, v3]: [S::V; 4]) -> [S::V; 4] {
        unsafe {
            let zero = S::splat(0.0);
            [v0, S::add(S::sub(v1, v2), v3), S::sub(S::add(v1, v2), v0), S::sub(zero, v3)]
        }
    }
    #[inline(always)]
    unsafe fn output<S: Simd>([m0, m1, m2, m3]: [S::V; 4]) -> [S::V; 2] {
        unsafe { [S::add(m0, S::add(m1, m2)), S::sub(S::sub(m1, m2), m3)] }
    }
    #[inline(always)]
    unsafe fn output_adjoint<S: Simd>([y0, y1]: [S::V; 2]) -> [S::V; 4] {
        unsafe { [y0, S::add(y0, y1), S::sub(y0, y1), S::sub(S::splat(0.0), y1)] }
    }
    #[inline(always)]
    unsafe fn filter<S: Simd>([g0, g1, g2]: [S::V; 3]) -> [S::V; 4] {
        unsafe {
            let half = S::splat(0.5);
            let (even, odd) = (S::mul(half, S::add(g0, g2)), S::mul(half, g1));
            [g0, S::add(even, odd), S::sub(even, odd), g2]
        }
    }
    #[inline(always)]
    unsafe fn filter_adjoint<S: Simd>([u0, u1, u2, u3]: [S::V; 4]) -> [S::V; 3] {
        unsafe {
            let half = S::splat(0.5);
            let sum = S::mul(half, S::add(u1, u2));
            [S::add(u0, sum), S::mul(half, S::sub(u1, u2)), S::add(sum, u3)]
        }
    }
}

// SAFETY of every block: as above.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them stands above")]
impl Transform<4, 6> for F4 {
    #[inline(always)]
    unsafe fn input<S: Simd>([d0, d1, d2, d3, d4, d5]: [S::V; 6]) -> [S::V; 6] {
        unsafe {
            let (two, four, m4, m5) = (S::splat(2.0), S::splat(4.0), S::splat(-4.0), S::splat(-5.0));
            let (a, b) = (S::fma(m4, d2, d4), S::fma(m4, d1, d3));
            let (c, e) = (S::sub(d4, d2), S::mul(two, S::sub(d3, d1)));
            [
                S::fma(four, d0, S::fma(m5, d2, d4)),
                S::add(a, b),
                S::sub(a, b),
                S::add(c, e),
                S::sub(c, e),
                S::fma(four, d1, S::fma(m5, d3, d5)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn input_adjoint<S: Simd>([v0, v1, v2, v3, v4, v5]: [S::V; 6]) -> [S::V; 6] {
        unsafe {
            let (two, four, m2, m4, m5) =
                (S::splat(2.0), S::splat(4.0), S::splat(-2.0), S::splat(-4.0), S::splat(-5.0));
            let (a, b, c, e) = (S::add(v1, v2), S::sub(v1, v2), S::add(v3, v4), S::sub(v3, v4));
            [
                S::mul(four, v0),
                S::fma(m4, S::sub(b, v5), S::mul(m2, e)),
                S::fma(m5, v0, S::sub(S::mul(m4, a), c)),
                S::fma(two, e, S::fma(m5, v5, b)),
                S::add(v0, S::add(a, c)),
                v5,
            ]
        }
    }
    #[inline(always)]
    unsafe fn output<S: Simd>([m0, m1, m2, m3, m4, m5]: [S::V; 6]) -> [S::V; 4] {
        unsafe {
            let (a, b, c, e) = (S::add(m1, m2), S::sub(m1, m2), S::add(m3, m4), S::sub(m3, m4));
            [
                S::add(m0, S::add(a, c)),
                S::fma(S::splat(2.0), e, b),
                S::fma(S::splat(4.0), c, a),
                S::add(S::fma(S::splat(8.0), e, b), m5),
            ]
        }
    }
    #[inline(always)]
    unsafe fn output_adjoint<S: Simd>([y0, y1, y2, y3]: [S::V; 4]) -> [S::V; 6] {
        unsafe {
            let (even, odd) = (S::add(y0, y2), S::add(y1, y3));
            let even2 = S::fma(S::splat(4.0), y2, y0);
            let odd2 = S::fma(S::splat(8.0), y3, S::add(y1, y1));
            [y0, S::add(even, odd), S::sub(even, odd), S::add(even2, odd2), S::sub(even2, odd2), y3]
        }
    }
    #[inline(always)]
    unsafe fn filter<S: Simd>([g0, g1, g2]: [S::V; 3]) -> [S::V; 6] {
        unsafe {
            let sixth = S::splat(-1.0 / 6.0);
            let (even, odd) = (S::mul(sixth, S::add(g0, g2)), S::mul(sixth, g1));
            let even2 = S::fma(S::splat(1.0 / 24.0), g0, S::mul(S::splat(1.0 / 6.0), g2));
            let odd2 = S::mul(S::splat(1.0 / 12.0), g1);
            [
                S::mul(S::splat(0.25), g0),
                S::add(even, odd),
                S::sub(even, odd),
                S::add(even2, odd2),
                S::sub(even2, odd2),
                g2,
            ]
        }
    }
    #[inline(always)]
    unsafe fn filter_adjoint<S: Simd>([u0, u1, u2, u3, u4, u5]: [S::V; 6]) -> [S::V; 3] {
        unsafe {
            let (a, b, c, e) = (S::add(u1, u2), S::sub(u1, u2), S::add(u3, u4), S::sub(u3, u4));
            let (sixth, m6) = (S::splat(1.0 / 6.0), S::splat(-1.0 / 6.0));
            [
                S::fma(S::splat(0.25), u0, S::fma(S::splat(1.0 / 24.0), c, S::mul(m6, a))),
                S::fma(S::splat(1.0 / 12.0), e, S::mul(m6, b)),
                S::add(S::mul(sixth, S::sub(c, a)), u5),
            ]
        }
    }
}
