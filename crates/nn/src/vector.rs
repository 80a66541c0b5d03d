//! What federated methods do with flat vectors.
//!
//! Sums run in an order fixed by the lengths: single precision over 4096 elements in 64 interleaved partial sums, double
//! precision over those. Threads change nothing in the result.

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

/// out ← out + a·(x − y). The difference is taken first, so that equal vectors add exactly nothing: an optimiser that divides
/// by the gradient's size would make a visible step of the rounding error.
pub fn axpy_difference(cpu: &mut Cpu, a: f32, x: &[f32], y: &[f32], out: &mut [f32]) {
    flat::axpy_difference(cpu, a, x, y, out);
}

/// y ← a·y
pub fn scale(_cpu: &mut Cpu, a: f32, y: &mut [f32]) {
    for v in y {
        *v *= a;
    }
}

/// out ← Σ_k w_k·row_k, in the order of the rows.
pub fn weighted_sum(cpu: &mut Cpu, rows: &[&[f32]], weights: &[f32], out: &mut [f32]) {
    flat::weighted_sum(cpu, rows, weights, out);
}

/// What [`project`] found and did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Projection {
    /// ⟨g, r⟩ before.
    pub dot: f64,
    /// ‖r‖²
    pub squared_norm: f64,
    /// Whether g was changed.
    pub active: bool,
}

/// FedProj's projection (Eq. 7 of the paper; A-GEM's with one reference): if ⟨g, r⟩ < 0,
/// g ← g − ⟨g, r⟩ / (‖r‖² + ε) · r. Otherwise g stays as it is, bit for bit.
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
    let (dot, squared_norm) = (dot(cpu, g, r), squared_norm(cpu, r));
    let factor = (-dot / (squared_norm + eps)) as f32;
    // A reference so small that its square is 0 has no direction to speak of.
    let active = dot < 0.0 && factor.is_finite();
    if active {
        axpy(cpu, factor, r, g);
    }
    Projection { dot, squared_norm, active }
}
