//! The plane of the pilot study: Iris on its two principal components.

use anyhow::{Context, Result};
use fedproj_data::{Dataset, Samples, Shape, SourceConfig};

/// Measurements of a flower.
const FEATURES: usize = 4;
type Matrix = [[f64; FEATURES]; FEATURES];

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

/// Measurements less their means.
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
    let covariance: Matrix = std::array::from_fn(|i| {
        std::array::from_fn(|j| rows.iter().map(|row| row[i] * row[j]).sum::<f64>() / (rows.len() - 1) as f64)
    });
    let (values, vectors) = eigen(covariance);
    let mut pairs: [(f64, [f64; FEATURES]); FEATURES] = std::array::from_fn(|k| {
        let column: [f64; FEATURES] = std::array::from_fn(|i| vectors[i][k]);
        (values[k], column.map(|c| c * largest(&column).signum()))
    });
    pairs.sort_by(|a, b| b.0.total_cmp(&a.0));
    pairs
}

/// The value that is farthest from 0.
fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |best: f64, v| if v.abs() > best.abs() { *v } else { best })
}

fn dot(a: &[f64; FEATURES], b: &[f64; FEATURES]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Eigenvalues and, as columns, unit eigenvectors, by Jacobi's rotations: four by four needs no library.
fn eigen(mut a: Matrix) -> ([f64; FEATURES], Matrix) {
    let mut v: Matrix = std::array::from_fn(|i| std::array::from_fn(|j| f64::from(u8::from(i == j))));
    for _ in 0..50 {
        for p in 0..FEATURES {
            for q in p + 1..FEATURES {
                rotate(&mut a, &mut v, p, q);
            }
        }
    }
    (std::array::from_fn(|k| a[k][k]), v)
}

/// The rotation in the plane of axes p and q that makes `a[p][q]` vanish; `v` collects the rotations.
fn rotate(a: &mut Matrix, v: &mut Matrix, p: usize, q: usize) {
    if a[p][q].abs() < 1e-300 {
        return;
    }
    let theta = (a[q][q] - a[p][p]) / (2.0 * a[p][q]);
    let t = theta.signum() / (theta.abs() + theta.hypot(1.0));
    let c = 1.0 / t.hypot(1.0);
    let s = t * c;
    for m in [&mut *a, v] {
        for row in m.iter_mut() {
            (row[p], row[q]) = (c * row[p] - s * row[q], s * row[p] + c * row[q]);
        }
    }
    let (row_p, row_q) = (a[p], a[q]);
    a[p] = std::array::from_fn(|j| c * row_p[j] - s * row_q[j]);
    a[q] = std::array::from_fn(|j| s * row_p[j] + c * row_q[j]);
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
