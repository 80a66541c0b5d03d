//! Instruction sets: one trait over vectors of `f32`, three implementations, chosen at run time.
//!
//! A kernel is written once, generic over [`Simd`]. [`dispatch!`](super::dispatch) compiles it three times. AVX2 and
//! AVX-512 give the same bits if a kernel's reduction order does not depend on the vector width.

use std::fmt;

/// An instruction set of the running CPU. Every constructor checks the CPU first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Isa(pub(super) Level);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// Plain Rust, for every CPU.
    pub const PORTABLE: Self = Self(Level::Portable);

    /// The best instruction set of this CPU.
    pub fn detect() -> Self {
        *Self::available().last().unwrap_or(&Self::PORTABLE)
    }

    /// Every instruction set of this CPU, from portable to best.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                all.push(Self(Level::Avx2));
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                {
                    all.push(Self(Level::Avx512));
                }
            }
        }
        all
    }

    /// The name in manifests and benchmarks.
    pub fn name(self) -> &'static str {
        match self.0 {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2+fma",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
        }
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Vectors of `f32`.
///
/// # Safety
/// Call a function only if the CPU has the instruction set. Pointers must be valid for the lanes that are read or
/// written. All functions are inlined into a caller that enables the instruction set.
pub(super) trait Simd: Copy {
    type V: Copy;
    /// Selects the first `n` lanes.
    type Mask: Copy;
    const LANES: usize;
    /// Vectors that a GEMM tile may keep in registers.
    const REGISTERS: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    unsafe fn mask(n: usize) -> Self::Mask;
    /// Lanes outside the mask are 0; they are not read.
    unsafe fn load_masked(p: *const f32, m: Self::Mask) -> Self::V;
    unsafe fn store_masked(p: *mut f32, v: Self::V, m: Self::Mask);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// a·b + c
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Sum of the lanes, always in the same order.
    unsafe fn sum(v: Self::V) -> f32;
    /// a·b + c for scalars, rounded as [`Simd::fma`] rounds.
    fn fma_scalar(a: f32, b: f32, c: f32) -> f32;
}

/// Functions of [`Simd`] that are one expression each.
macro_rules! inlined {
    ($($name:ident($($arg:ident: $ty:ty),*) $(-> $out:ty)? = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($arg: $ty),*) $(-> $out)? {
            #[allow(unused_unsafe, reason = "not every expression needs it")]
            unsafe { $body }
        }
    )*};
}

/// Eight lanes in an array. The compiler uses the target's baseline instructions.
#[derive(Clone, Copy)]
pub(super) struct Portable;

// SAFETY of every block: by the trait's contract, pointers are valid for the lanes touched, and m ≤ 8. Arrays of f32 need
// no stricter alignment.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them stands above")]
impl Simd for Portable {
    type V = [f32; 8];
    type Mask = usize;
    const LANES: usize = 8;
    const REGISTERS: usize = 16;

    inlined! {
        splat(x: f32) -> Self::V = [x; 8];
        load(p: *const f32) -> Self::V = p.cast::<[f32; 8]>().read_unaligned();
        store(p: *mut f32, v: Self::V) = p.cast::<[f32; 8]>().write_unaligned(v);
        mask(n: usize) -> usize = n.min(8);
        store_masked(p: *mut f32, v: Self::V, m: usize) = std::ptr::copy_nonoverlapping(v.as_ptr(), p, m);
        add(a: Self::V, b: Self::V) -> Self::V = std::array::from_fn(|i| a[i] + b[i]);
        sub(a: Self::V, b: Self::V) -> Self::V = std::array::from_fn(|i| a[i] - b[i]);
        mul(a: Self::V, b: Self::V) -> Self::V = std::array::from_fn(|i| a[i] * b[i]);
        fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V = std::array::from_fn(|i| a[i] * b[i] + c[i]);
        sum(v: Self::V) -> f32 = ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
    }
    #[inline(always)]
    unsafe fn load_masked(p: *const f32, m: usize) -> Self::V {
        let mut v = [0.0; 8];
        unsafe { std::ptr::copy_nonoverlapping(p, v.as_mut_ptr(), m) };
        v
    }
    #[inline(always)]
    fn fma_scalar(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Simd;
    #[allow(clippy::wildcard_imports, reason = "dozens of intrinsics, all from one place")]
    use std::arch::x86_64::*;

    /// 256-bit vectors with fused multiply-add.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2;

    // SAFETY of every block in both implementations: the trait's contract (the CPU has the instructions, the pointers
    // are valid for the lanes touched) is what each intrinsic requires.
    #[allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them stands above")]
    impl Simd for Avx2 {
        type V = __m256;
        type Mask = __m256i;
        const LANES: usize = 8;
        const REGISTERS: usize = 16;

        inlined! {
            splat(x: f32) -> Self::V = _mm256_set1_ps(x);
            load(p: *const f32) -> Self::V = _mm256_loadu_ps(p);
            store(p: *mut f32, v: Self::V) = _mm256_storeu_ps(p, v);
            load_masked(p: *const f32, m: Self::Mask) -> Self::V = _mm256_maskload_ps(p, m);
            store_masked(p: *mut f32, v: Self::V, m: Self::Mask) = _mm256_maskstore_ps(p, m, v);
            add(a: Self::V, b: Self::V) -> Self::V = _mm256_add_ps(a, b);
            sub(a: Self::V, b: Self::V) -> Self::V = _mm256_sub_ps(a, b);
            mul(a: Self::V, b: Self::V) -> Self::V = _mm256_mul_ps(a, b);
            fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V = _mm256_fmadd_ps(a, b, c);
        }
        #[inline(always)]
        unsafe fn mask(n: usize) -> Self::Mask {
            unsafe {
                let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                _mm256_cmpgt_epi32(_mm256_set1_epi32(n.min(8) as i32), lane)
            }
        }
        #[inline(always)]
        unsafe fn sum(v: Self::V) -> f32 {
            unsafe {
                let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
            }
        }
        #[inline(always)]
        fn fma_scalar(a: f32, b: f32, c: f32) -> f32 {
            a.mul_add(b, c)
        }
    }

    /// 512-bit vectors with masks.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512;

    #[allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them stands above")]
    impl Simd for Avx512 {
        type V = __m512;
        type Mask = __mmask16;
        const LANES: usize = 16;
        const REGISTERS: usize = 32;

        inlined! {
            splat(x: f32) -> Self::V = _mm512_set1_ps(x);
            load(p: *const f32) -> Self::V = _mm512_loadu_ps(p);
            store(p: *mut f32, v: Self::V) = _mm512_storeu_ps(p, v);
            load_masked(p: *const f32, m: Self::Mask) -> Self::V = _mm512_maskz_loadu_ps(m, p);
            store_masked(p: *mut f32, v: Self::V, m: Self::Mask) = _mm512_mask_storeu_ps(p, m, v);
            add(a: Self::V, b: Self::V) -> Self::V = _mm512_add_ps(a, b);
            sub(a: Self::V, b: Self::V) -> Self::V = _mm512_sub_ps(a, b);
            mul(a: Self::V, b: Self::V) -> Self::V = _mm512_mul_ps(a, b);
            fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V = _mm512_fmadd_ps(a, b, c);
            sum(v: Self::V) -> f32 = _mm512_reduce_add_ps(v);
        }
        #[inline(always)]
        unsafe fn mask(n: usize) -> Self::Mask {
            ((1u32 << n.min(16)) - 1) as u16
        }
        #[inline(always)]
        fn fma_scalar(a: f32, b: f32, c: f32) -> f32 {
            a.mul_add(b, c)
        }
    }
}
