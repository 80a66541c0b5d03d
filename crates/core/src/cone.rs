//! GEM's projection: the nearest vector that points against none of several references.
//!
//! Minimise ½‖u − g‖² subject to ⟨u, r_i⟩ ≥ 0. The dual has one number per reference (Lopez-Paz and Ranzato, "Gradient
//! Episodic Memory for Continual Learning", NeurIPS 2017, Eq. 11): minimise ½ vᵀ(R Rᵀ)v + ⟨R g, v⟩ over v ≥ 0; u = g + Rᵀv.
//! It is solved one number after another (Hildreth 1957), on inner products alone: the long vectors are read once.

use fedproj_nn::cuda::Search;
use fedproj_nn::{Buffer, Cpu, vector};

/// References at most.
pub(crate) const REFERENCES_MAX: usize = 16;

/// A pass takes a few nanoseconds, and nearly parallel references need many. Single precision sees no smaller change of u.
pub(crate) const SEARCH: Search = Search { passes: 20_000, tolerance: 1e-9 };

/// What was found.
pub(crate) struct Found {
    /// Whether g was changed.
    pub projected: bool,
    /// Cosine of g, as it was, and the sum of the references.
    pub cosine: f64,
}

/// Replaces g by its projection.
pub(crate) fn project(cpu: &mut Cpu, g: &mut [f32], references: &[Buffer]) -> Found {
    let n = references.len().min(REFERENCES_MAX);
    let (mut gram, mut along) = ([[0.0; REFERENCES_MAX]; REFERENCES_MAX], [0.0; REFERENCES_MAX]);
    for i in 0..n {
        along[i] = vector::dot(cpu, g, &references[i]);
        for j in 0..=i {
            gram[i][j] = vector::dot(cpu, &references[i], &references[j]);
            gram[j][i] = gram[i][j];
        }
    }
    let norm = vector::squared_norm(cpu, g).sqrt();
    let sum_norm = gram.iter().flatten().sum::<f64>().max(0.0).sqrt();
    let cosine = if norm * sum_norm > 0.0 { along.iter().sum::<f64>() / (norm * sum_norm) } else { 0.0 };
    let dual = solve(&gram, &along, n, SEARCH.tolerance * norm);
    for (r, v) in references.iter().zip(dual).filter(|(_, v)| *v > 0.0) {
        vector::axpy(cpu, v as f32, r, g);
    }
    Found { projected: dual.iter().any(|v| *v > 0.0), cosine }
}

/// v ≥ 0 of the dual.
fn solve(
    gram: &[[f64; REFERENCES_MAX]; REFERENCES_MAX],
    along: &[f64; REFERENCES_MAX],
    n: usize,
    tolerance: f64,
) -> [f64; REFERENCES_MAX] {
    let mut dual = [0.0; REFERENCES_MAX];
    for _ in 0..SEARCH.passes {
        let mut moved: f64 = 0.0;
        // A reference of 0 constrains nothing.
        for i in (0..n).filter(|&i| gram[i][i] > 0.0) {
            let slope = along[i] + gram[i].iter().zip(&dual).map(|(r, v)| r * v).sum::<f64>();
            let next = (dual[i] - slope / gram[i][i]).max(0.0);
            moved = moved.max((next - dual[i]).abs() * gram[i][i].sqrt());
            dual[i] = next;
        }
        if moved <= tolerance {
            break;
        }
    }
    dual
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_projection_points_against_no_reference_and_is_the_nearest(
            g in prop::collection::vec(-1.0f32..1.0, 24),
            rows in prop::collection::vec(prop::collection::vec(-1.0f32..1.0, 24), 1..6),
        ) {
            let (cpu, mut u) = (&mut Cpu::new(1), g.clone());
            let references: Vec<Buffer> = rows.iter().map(|row| Buffer::from(&row[..])).collect();
            project(cpu, &mut u, &references);
            let moved: Vec<f32> = u.iter().zip(&g).map(|(u, g)| u - g).collect();
            // KKT: feasible, and u − g is a non-negative sum of the references that bind, so ⟨u, u − g⟩ = 0.
            for r in &references {
                prop_assert!(vector::dot(cpu, &u, r) > -1e-4, "{}", vector::dot(cpu, &u, r));
            }
            prop_assert!(vector::dot(cpu, &u, &moved).abs() < 1e-4);
            let is_free = references.iter().all(|r| vector::dot(cpu, &g, r) >= 0.0);
            prop_assert!(!is_free || u == g, "without a conflict nothing changes");
        }
    }

    #[test]
    fn with_one_reference_it_is_a_gems() {
        let (cpu, g, r) = (&mut Cpu::new(1), [-1.0, 1.0, 2.0], [2.0, 1.0, 0.0]);
        let (mut one, mut cone) = (g, g);
        vector::Conflict::between(cpu, &one, &r).resolve(cpu, &mut one, &r, &vector::Bounds::default());
        assert!(project(cpu, &mut cone, &[Buffer::from(&r[..])]).projected);
        assert_eq!(one.map(f32::to_bits), cone.map(f32::to_bits));
    }
}
