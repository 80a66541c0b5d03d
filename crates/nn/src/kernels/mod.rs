//! The CPU kernels: functions over slices, compiled for several instruction sets. The only CPU module with `unsafe`.
//!
//! Start with [`simd`] (the instruction sets) and [`gemm`] (the matrix product); most time is spent in [`conv`].
//! Tensors are channels-last, (N, H, W, C). Only shapes decide how work is cut into units, so results do not depend on
//! the number of threads ([`team`]).

#![allow(unsafe_code, reason = "vector instructions and work shared between threads; each block gives its reason")]
#![allow(clippy::inline_always, reason = "a kernel must be inlined into the function that enables its instructions")]
#![allow(clippy::needless_pass_by_value, reason = "scratch memory is handed over, not lent")]
#![allow(clippy::needless_range_loop, reason = "tiles are indexed in two directions")]
#![allow(clippy::too_many_arguments, reason = "a kernel takes its operands one by one")]

/// Compiles a kernel for every instruction set and picks one by the [`Isa`] that the caller passes first.
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $kernel:ident $(::<$($gen:tt),*>)?) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::kernels::simd::Isa, $($arg: $ty),*) $(-> $ret)? {
            use $crate::kernels::simd;
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
            unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: this function is only called if the CPU has these features.
                unsafe { $kernel::<simd::Avx512 $($(, $gen)*)?>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: as above.
                unsafe { $kernel::<simd::Avx2 $($(, $gen)*)?>($($arg),*) }
            }
            // SAFETY: an `Isa` other than the portable one exists only if the CPU has it (`Isa::available`). The caller
            // of this private function asserts the requirements on the operands.
            unsafe {
                match isa.0 {
                    simd::Level::Portable => $kernel::<simd::Portable $($(, $gen)*)?>($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    simd::Level::Avx2 => avx2($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    simd::Level::Avx512 => avx512($($arg),*),
                }
            }
        }
    };
}
pub(crate) mod attention;
mod buffer;
pub(crate) mod conv;
pub(crate) mod dense;
pub(crate) mod dropout;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod flat;
mod gemm;
pub(crate) mod layer_norm;
pub(crate) mod linear;
pub(crate) mod norm;
pub(crate) mod pool;
mod simd;
mod team;

pub use buffer::Buffer;
pub use elementwise::Activation;
pub use norm::NormMode;
pub use simd::Isa;
pub(crate) use team::Sum;
pub use team::Team;

/// A CPU: an instruction set, and the threads that share each operation.
///
/// To train many networks at once, use one `Cpu` of one thread per network. A larger team shares a single step.
#[derive(Debug)]
pub struct Cpu {
    pub(crate) isa: Isa,
    pub(crate) team: Team,
}

impl Cpu {
    /// The best instruction set of this machine, on `n_threads` threads including the caller's.
    pub fn new(n_threads: usize) -> Self {
        Self::with_isa(n_threads, Isa::detect())
    }

    /// A CPU with the given instruction set.
    pub fn with_isa(n_threads: usize, isa: Isa) -> Self {
        Self { isa, team: Team::new(n_threads) }
    }

    /// The instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The number of threads.
    pub fn n_threads(&self) -> usize {
        self.team.n_threads()
    }

    /// Measures this thread's matrix-product peak in floating-point operations per second, on operands in the cache.
    pub fn measure_peak_flops(&self) -> f64 {
        let (m, n, k) = (48, 64, 256);
        let (a, b, mut c) = (vec![0.5; m * k], vec![0.25; n * k], vec![0.0; m * n]);
        let d = gemm::Dims { m, n, k, lda: k, ldb: n, ldc: n };
        let repetitions = 64;
        let run = |c: &mut [f32]| {
            let start = std::time::Instant::now();
            for _ in 0..repetitions {
                gemm::gemm(self.isa, gemm::Order::Rows, d, &a, &b, std::hint::black_box(c), false);
            }
            start.elapsed().as_secs_f64()
        };
        let fastest = (0..60).map(|_| run(&mut c)).fold(f64::INFINITY, f64::min);
        (2 * m * n * k * repetitions) as f64 / fastest
    }
}
