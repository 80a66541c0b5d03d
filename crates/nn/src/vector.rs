//! Arithmetic on flat vectors.
//!
//! Lengths fix the order of sums: single precision over 4096 elements in 64 interleaved partial sums, then double
//! precision over those. The number of threads does not change the result.

use crate::kernels::Cpu;
pub use crate::kernels::flat::{axpy, axpy_difference, dot};

/// ‖a‖²
pub fn squared_norm(cpu: &Cpu, a: &[f32]) -> f64 {
    dot(cpu, a, a)
}

/// y ← a·y
pub fn scale(_cpu: &mut Cpu, a: f32, y: &mut [f32]) {
    for v in y {
        *v *= a;
    }
}

/// out ← x + radius·g/‖g‖, or x where g is 0: the point of steepest ascent at that distance (Foret et al. 2021, Eq. 2).
pub fn ascend(cpu: &mut Cpu, x: &[f32], radius: f32, g: &[f32], out: &mut [f32]) {
    let norm = squared_norm(cpu, g).sqrt();
    out.copy_from_slice(x);
    if norm != 0.0 {
        axpy(cpu, (f64::from(radius) / norm) as f32, g, out);
    }
}

/// Limits of [`Conflict::resolve`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Whether to project even if g does not point against r.
    pub always: bool,
    /// ε in the denominator.
    pub eps: f64,
    /// ‖r‖² must be above this.
    pub norm_guard: f64,
    /// Maximum absolute coefficient.
    pub coefficient_max: f64,
}

impl Bounds {
    /// The plain projection.
    pub const PLAIN: Self =
        Self { always: false, eps: 0.0, norm_guard: f64::NEG_INFINITY, coefficient_max: f64::INFINITY };
}

impl Default for Bounds {
    fn default() -> Self {
        Self::PLAIN
    }
}

/// How a vector g relates to a reference r.
///
/// ```
/// use fedproj_nn::Cpu;
/// use fedproj_nn::vector::{Bounds, Conflict};
///
/// let (mut cpu, mut g, r) = (Cpu::new(1), [1.0, -1.0], [0.0, 1.0]);
/// assert!(Conflict::between(&cpu, &g, &r).resolve(&mut cpu, &mut g, &r, &Bounds::default()));
/// assert_eq!(g, [1.0, 0.0]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conflict {
    /// ⟨g, r⟩
    pub dot: f64,
    /// ‖r‖²
    pub squared_norm: f64,
}

impl Conflict {
    /// Measures g against r.
    pub fn between(cpu: &Cpu, g: &[f32], r: &[f32]) -> Self {
        Self { dot: dot(cpu, g, r), squared_norm: squared_norm(cpu, r) }
    }

    /// Projects g, the measured vector (arXiv:2505.20485, Eq. 7; A-GEM's with one reference): if ⟨g, r⟩ < 0,
    /// g ← g − ⟨g, r⟩ / (‖r‖² + ε) · r, within the bounds. Otherwise g stays unchanged, bit for bit. Returns whether it
    /// projected.
    pub fn resolve(&self, cpu: &mut Cpu, g: &mut [f32], r: &[f32], bounds: &Bounds) -> bool {
        let coefficient = self.dot / (self.squared_norm + bounds.eps);
        let factor = -coefficient.clamp(-bounds.coefficient_max, bounds.coefficient_max) as f32;
        // If r is so small that its square is 0, its direction is meaningless.
        let active = (self.dot < 0.0 || bounds.always) && self.squared_norm > bounds.norm_guard && factor.is_finite();
        if active {
            axpy(cpu, factor, r, g);
        }
        active
    }
}
