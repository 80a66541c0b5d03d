//! The plane of the pilot study: Iris on its two principal components.

use anyhow::{Context, Result};
use fedproj_core::eigen;
use fedproj_data::{Dataset, Samples, Shape, SourceConfig};

/// Measurements of a flower.
const FEATURES: usize = 4;

/// Iris in the plane: all 150 flowers, (x, y) and kind.
#[derive(Clone, Debug)]
pub struct Plane {
    /// The flowers.
    pub data: Dataset,
}

impl Plane {
    /// Centres the measurements, leaves their scale alone, and projects them on the two directions of most variance.
    pub fn new() -> Result<Self> {
        let iris = fedproj_data::load(&SourceConfig::named("iris"), None)?.train;
        let rows = centred(&iris);
        let [(_, first), (_, second), ..] = components(&rows);
        let points = rows.iter().flat_map(|row| [dot(row, &first) as f32, dot(row, &second) as f32]).collect();
        let labels = iris.labels().context("Iris has labels")?.to_vec();
        let (shape, names) = (Shape::Vector { features: 2 }, iris.class_names().to_vec());
        let data = Dataset::new("iris in the plane", shape, Samples::F32(points), Some(labels), names)?;
        Ok(Self { data })
    }

    /// Coordinates and kind of every flower.
    pub fn points(&self) -> Vec<(f64, f64, usize)> {
        let values = self.data.gather_all();
        let labels = self.data.labels().unwrap_or(&[]);
        values.chunks_exact(2).zip(labels).map(|(p, &l)| (f64::from(p[0]), f64::from(p[1]), l as usize)).collect()
    }
}

/// Measurements minus their means.
fn centred(iris: &Dataset) -> Vec<[f64; FEATURES]> {
    let n = iris.n_samples();
    let rows: Vec<[f64; FEATURES]> =
        iris.gather_all().chunks_exact(FEATURES).map(|row| std::array::from_fn(|i| f64::from(row[i]))).collect();
    let mean: [f64; FEATURES] = std::array::from_fn(|i| rows.iter().map(|row| row[i]).sum::<f64>() / n as f64);
    rows.into_iter().map(|row| std::array::from_fn(|i| row[i] - mean[i])).collect()
}

/// Variances (with n − 1) in decreasing order and their directions, whose largest loading is positive, so that the picture
/// does not depend on how eigenvectors are found.
fn components(rows: &[[f64; FEATURES]]) -> [(f64, [f64; FEATURES]); FEATURES] {
    let covariance = |at: usize| {
        let (i, j) = (at / FEATURES, at % FEATURES);
        rows.iter().map(|row| row[i] * row[j]).sum::<f64>() / (rows.len() - 1) as f64
    };
    let (values, vectors) = eigen((0..FEATURES * FEATURES).map(covariance).collect(), FEATURES);
    std::array::from_fn(|k| {
        let axis: [f64; FEATURES] = std::array::from_fn(|i| vectors[k * FEATURES + i]);
        (values[k], axis.map(|c| c * largest(&axis).signum()))
    })
}

/// The value that is farthest from 0.
fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |best: f64, v| if v.abs() > best.abs() { *v } else { best })
}

fn dot(a: &[f64; FEATURES], b: &[f64; FEATURES]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iris() -> [(f64, [f64; FEATURES]); FEATURES] {
        components(&centred(&fedproj_data::load(&SourceConfig::named("iris"), None).unwrap().train))
    }

    #[test]
    fn components_have_the_known_deviations_and_are_orthonormal() {
        let [(first, a), (second, b), ..] = iris();
        assert!((first.sqrt() - 2.06).abs() < 0.01, "{first}");
        assert!((second.sqrt() - 0.49).abs() < 0.01, "{second}");
        assert!((dot(&a, &a) - 1.0).abs() < 1e-12 && (dot(&b, &b) - 1.0).abs() < 1e-12 && dot(&a, &b).abs() < 1e-12);
    }

    #[test]
    fn the_largest_loading_of_each_component_is_positive() {
        for (_, loadings) in iris() {
            assert!(largest(&loadings) > 0.0, "{loadings:?}");
        }
    }

    #[test]
    fn points_are_centred_uncorrelated_and_vary_as_the_components_say() {
        let points = Plane::new().unwrap().points();
        let n = points.len() as f64;
        let mean = |of: &dyn Fn(&(f64, f64, usize)) -> f64| points.iter().map(of).sum::<f64>() / n;
        assert!(mean(&|p| p.0).abs() < 1e-6 && mean(&|p| p.1).abs() < 1e-6 && mean(&|p| p.0 * p.1).abs() < 1e-6);
        for (square, (variance, _)) in [mean(&|p| p.0 * p.0), mean(&|p| p.1 * p.1)].into_iter().zip(iris()) {
            assert!((square * n / (n - 1.0) - variance).abs() < 1e-5);
        }
    }
}
