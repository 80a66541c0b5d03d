//! Arithmetic on flat vectors.
//!
//! Lengths fix the order of sums: single precision over 4096 elements in 64 interleaved partial sums, then double
//! precision over those. The number of threads does not change the result.

use crate::kernels::{Cpu, flat};

/// ⟨a, b⟩
///
/// # Panics
/// Here and below: if the vectors differ in length.
pub fn dot(cpu: &Cpu, a: &[f32], b: &[f32]) -> f64 {
    flat::dot(cpu.isa(), a, b)
}

/// ‖a‖²
pub fn squared_norm(cpu: &Cpu, a: &[f32]) -> f64 {
    dot(cpu, a, a)
}

/// y ← y + a·x
pub fn axpy(cpu: &mut Cpu, a: f32, x: &[f32], y: &mut [f32]) {
    flat::axpy(cpu, a, x, y);
}

/// out ← out + a·(x − y). The difference comes first, so that equal vectors add exactly nothing. Otherwise an optimiser
/// that divides by the gradient's size would turn the rounding error into a visible step.
pub fn axpy_difference(cpu: &mut Cpu, a: f32, x: &[f32], y: &[f32], out: &mut [f32]) {
    flat::axpy_difference(cpu, a, x, y, out);
}

/// y ← a·y
pub fn scale(_cpu: &mut Cpu, a: f32, y: &mut [f32]) {
    for v in y {
        *v *= a;
    }
}

/// The result of [`project`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Projection {
    /// ⟨g, r⟩ before.
    pub dot: f64,
    /// ‖r‖²
    pub squared_norm: f64,
    /// Whether g was changed.
    pub active: bool,
}

/// Projection against a reference (arXiv:2505.20485, Eq. 7; A-GEM's with one reference): if ⟨g, r⟩ < 0, g ← g − ⟨g, r⟩
/// / (‖r‖² + ε) · r. Otherwise g stays unchanged, bit for bit.
///
/// ```
/// use fedproj_nn::{Cpu, vector};
///
/// let mut g = [1.0, -1.0];
/// let found = vector::project(&mut Cpu::new(1), &mut g, &[0.0, 1.0], 0.0);
/// assert!(found.active);
/// assert_eq!(g, [1.0, 0.0]);
/// ```
pub fn project(cpu: &mut Cpu, g: &mut [f32], r: &[f32], eps: f64) -> Projection {
    let conflict = Conflict::between(cpu, g, r);
    let active = conflict.resolve(cpu, g, r, &Bounds { eps, ..Bounds::default() });
    Projection { dot: conflict.dot, squared_norm: conflict.squared_norm, active }
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

impl Default for Bounds {
    /// The plain projection.
    fn default() -> Self {
        Self { always: false, eps: 0.0, norm_guard: f64::NEG_INFINITY, coefficient_max: f64::INFINITY }
    }
}

/// How a vector g relates to a reference r: [`project`] in two steps, for callers that measure first.
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

    /// Projects g, the measured vector, within the bounds. Returns whether it did.
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
