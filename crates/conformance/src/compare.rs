//! Comparisons of vectors, and a group's record of them.

use anyhow::{Context, Result};
use fedproj_nn::{Layout, Span};
use serde::Serialize;

/// The comparison that came nearest to its tolerance.
#[derive(Clone, Debug, Serialize)]
pub struct Worst {
    /// What was compared.
    pub place: String,
    /// Relative L2 error.
    pub error: f64,
    /// The largest error allowed.
    pub tolerance: f64,
}

/// The findings of a group so far.
#[derive(Debug, Default)]
pub struct Group {
    pub n_compared: usize,
    pub worst: Option<Worst>,
    pub failures: Vec<String>,
}

impl Group {
    /// A failure that no number describes.
    pub fn fail(&mut self, message: String) {
        self.failures.push(message);
    }

    /// One of several cases. An error does not stop the others.
    pub fn attempt(&mut self, case: &str, check: impl FnOnce(&mut Self) -> Result<()>) {
        if let Err(error) = check(self).with_context(|| case.to_owned()) {
            self.fail(format!("{error:#}"));
        }
    }

    /// Something that must hold exactly.
    pub fn require(&mut self, holds: bool, place: &str) {
        self.n_compared += 1;
        if !holds {
            self.fail(format!("{place} does not hold"));
        }
    }

    /// ‖found − expected‖ / ‖expected‖ is at most `tolerance`.
    pub fn compare(&mut self, place: &str, found: &[f32], expected: &[f32], tolerance: f64) {
        self.compare_beside(place, found, expected, 0.0, tolerance);
    }

    /// As [`Group::compare`], but the root mean square of the expected vector counts as at least `floor`. A vector that is
    /// zero except for rounding has no relative error.
    pub fn compare_beside(&mut self, place: &str, found: &[f32], expected: &[f32], floor: f64, tolerance: f64) {
        if found.len() != expected.len() {
            return self.fail(format!("{place}: {} values in place of {}", found.len(), expected.len()));
        }
        let differences = found.iter().zip(expected).map(|(a, b)| f64::from(*a) - f64::from(*b));
        let scale = norm(expected.iter().map(|v| f64::from(*v))).max(floor * (expected.len() as f64).sqrt());
        self.note(place, norm(differences) / scale.max(1e-12), tolerance);
    }

    /// Two numbers.
    pub fn compare_numbers(&mut self, place: &str, found: f64, expected: f64, tolerance: f64) {
        self.note(place, (found - expected).abs() / expected.abs().max(1e-12), tolerance);
    }

    /// Every tensor of a flat vector. Tensors that are zero except for rounding are measured against the whole vector.
    pub fn compare_tensors(&mut self, place: &str, layout: &Layout, found: &[f32], expected: &[f32], tolerance: f64) {
        self.compare_spans(place, layout, found, expected, tolerance, |_| true);
    }

    /// Every tensor by itself, however small. A bias of the keys shifts all scores of a query equally, so its gradient is
    /// rounding noise. Only these biases are measured against the whole vector.
    pub fn compare_each(&mut self, place: &str, layout: &Layout, found: &[f32], expected: &[f32], tolerance: f64) {
        self.compare_spans(place, layout, found, expected, tolerance, |span| span.name.ends_with("key.bias"));
    }

    fn compare_spans(
        &mut self,
        place: &str,
        layout: &Layout,
        found: &[f32],
        expected: &[f32],
        tolerance: f64,
        may_be_noise: fn(&Span) -> bool,
    ) {
        if found.len() != expected.len() || found.len() != layout.len() {
            return self.fail(format!("{place}: {} values in place of {}", found.len(), layout.len()));
        }
        let floor = SMALL * norm(expected.iter().map(|v| f64::from(*v))) / (expected.len().max(1) as f64).sqrt();
        for span in layout.spans() {
            let (place, floor) = (format!("{place} {}", span.name), if may_be_noise(span) { floor } else { 0.0 });
            self.compare_beside(&place, &found[span.range()], &expected[span.range()], floor, tolerance);
        }
    }

    fn note(&mut self, place: &str, error: f64, tolerance: f64) {
        self.n_compared += 1;
        if error.is_nan() || error > tolerance {
            self.fail(format!("{place}: relative error {error:.2e} exceeds {tolerance:.0e}"));
        }
        let ratio = |error: f64, tolerance: f64| if error.is_nan() { f64::INFINITY } else { error / tolerance };
        // An exact result that must be exact is no candidate for the worst.
        if tolerance == 0.0 && error == 0.0 {
            return;
        }
        if self.worst.as_ref().is_none_or(|w| ratio(error, tolerance) > ratio(w.error, w.tolerance)) {
            self.worst = Some(Worst { place: place.to_owned(), error, tolerance });
        }
    }
}

/// Tensors below this share of the whole vector's size are zero except for rounding, such as the gradient of a bias before
/// batch-norm.
const SMALL: f64 = 1e-2;

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|v| v * v).sum::<f64>().sqrt()
}

/// a − b
pub fn difference(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_notes_the_comparison_nearest_to_its_tolerance() {
        let mut group = Group::default();
        group.compare("near", &[1.0 + 1e-5], &[1.0], 1e-4);
        group.compare("nearer", &[1.0 + 1e-6], &[1.0], 2e-6);
        assert!(group.failures.is_empty() && group.worst.as_ref().is_some_and(|w| w.place == "nearer"));
        group.compare("beyond", &[1.1], &[1.0], 1e-4);
        assert_eq!(group.failures.len(), 1);
    }

    #[test]
    fn nan_and_wrong_lengths_fail() {
        let mut group = Group::default();
        group.compare("NaN", &[f32::NAN], &[1.0], 1e-4);
        group.compare("length", &[1.0], &[1.0, 2.0], 1e-4);
        group.compare("fine", &[1.0], &[1.0], 1e-4);
        assert_eq!(group.failures.len(), 2, "{:?}", group.failures);
        assert!(group.worst.is_some_and(|w| w.place == "NaN"));
    }

    #[test]
    fn what_is_zero_but_for_rounding_is_measured_beside_the_rest() {
        let mut group = Group::default();
        group.compare_beside("noise", &[1e-9], &[0.0], 1e-2, 1e-4);
        assert!(group.failures.is_empty());
        group.compare_beside("signal", &[1e-4], &[0.0], 1e-2, 1e-4);
        assert_eq!(group.failures.len(), 1);
    }
}
