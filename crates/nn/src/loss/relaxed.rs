//! The relaxed contrastive loss: every sample is compared with every other.

use super::RelaxedContrast;
use crate::graph::Shape;

/// The loss of the mean over pixels.
pub(super) fn add_gradient(
    c: &RelaxedContrast,
    shape: Shape,
    z: &[f32],
    labels: &[u32],
    weight: f32,
    grad: &mut [f32],
) -> f64 {
    let (pixels, channels) = (shape.pixels(), shape.c);
    if pixels == 1 {
        return at_vectors(c, channels, z, labels, weight, grad);
    }
    let mut pooled = vec![0.0; labels.len() * channels];
    for (mean, image) in pooled.chunks_exact_mut(channels).zip(z.chunks_exact(pixels * channels)) {
        for row in image.chunks_exact(channels) {
            mean.iter_mut().zip(row).for_each(|(m, v)| *m += v / pixels as f32);
        }
    }
    let mut slopes = vec![0.0; pooled.len()];
    let loss = at_vectors(c, channels, &pooled, labels, weight, &mut slopes);
    for (slope, image) in slopes.chunks_exact(channels).zip(grad.chunks_exact_mut(pixels * channels)) {
        for row in image.chunks_exact_mut(channels) {
            row.iter_mut().zip(slope).for_each(|(g, m)| *g += m / pixels as f32);
        }
    }
    loss
}

/// Seo et al., CVPR 2024, at one level: rows `f` (n, dim) are normalised, and each sample i has
/// - a contrastive term, whose positive is the *least* similar sample of its class (itself included) and whose negatives are
///   the two most similar samples of other classes;
/// - a penalty, whose "positive" is itself and whose negative is the least similar other sample of its class, if that is
///   still more similar than λ: it pushes apart what has collapsed.
///
/// A sample without negatives, or without such a partner, contributes 0. Gradients reach both members of a pair.
fn at_vectors(c: &RelaxedContrast, dim: usize, f: &[f32], labels: &[u32], scale: f32, grad: &mut [f32]) -> f64 {
    let n = labels.len();
    let norms: Vec<f64> = f.chunks_exact(dim).map(|r| sum_squares(r).sqrt().max(1e-12)).collect();
    let unit: Vec<f64> =
        f.chunks_exact(dim).zip(&norms).flat_map(|(r, norm)| r.iter().map(move |v| f64::from(*v) / norm)).collect();
    let row = |i: usize| &unit[i * dim..(i + 1) * dim];
    let similarity = |i: usize, j: usize| row(i).iter().zip(row(j)).map(|(a, b)| a * b).sum::<f64>();
    let t = f64::from(c.temperature);
    let mut total = 0.0;
    // ∂L/∂unit, collected over all pairs.
    let mut unit_grad = vec![0.0; unit.len()];
    let mut push = |i: usize, j: usize, slope: f64| {
        for d in 0..dim {
            unit_grad[i * dim + d] += slope * unit[j * dim + d];
            unit_grad[j * dim + d] += slope * unit[i * dim + d];
        }
    };
    for i in 0..n {
        let sims: Vec<f64> = (0..n).map(|j| if i == j { 1.0 } else { similarity(i, j) }).collect();
        let least = |with_self: bool| {
            let same = (0..n).filter(|&j| labels[j] == labels[i] && (with_self || j != i));
            same.min_by(|&a, &b| sims[a].total_cmp(&sims[b]))
        };
        let mut others: Vec<usize> = (0..n).filter(|&j| labels[j] != labels[i]).collect();
        others.sort_by(|&a, &b| sims[b].total_cmp(&sims[a]));
        others.truncate(2);
        let mut info_nce = |positive: usize, negatives: &[usize], weight: f32| {
            let top = negatives.iter().map(|&j| sims[j]).fold(sims[positive], f64::max);
            let exps: Vec<f64> = negatives.iter().map(|&j| ((sims[j] - top) / t).exp()).collect();
            let positive_exp = ((sims[positive] - top) / t).exp();
            let denominator = positive_exp + exps.iter().sum::<f64>();
            total += f64::from(weight) * -(positive_exp / denominator).ln() / n as f64;
            let slope = f64::from(weight * scale) / (n as f64 * t);
            if positive != i {
                push(i, positive, slope * (positive_exp / denominator - 1.0));
            }
            for (&j, e) in negatives.iter().zip(&exps) {
                push(i, j, slope * e / denominator);
            }
        };
        if let (Some(positive), false) = (least(true), others.is_empty()) {
            info_nce(positive, &others, c.contrast_weight);
        }
        if let Some(partner) = least(false).filter(|&j| sims[j] >= f64::from(c.threshold)) {
            info_nce(i, &[partner], c.penalty_weight);
        }
    }
    // Through the normalisation: ∂/∂f = (g − ⟨g, u⟩ u) / ‖f‖.
    for i in 0..n {
        let (u, g) = (row(i), &unit_grad[i * dim..(i + 1) * dim]);
        let along: f64 = u.iter().zip(g).map(|(u, g)| u * g).sum();
        for ((out, g), u) in grad[i * dim..(i + 1) * dim].iter_mut().zip(g).zip(u) {
            *out += ((g - along * u) / norms[i]) as f32;
        }
    }
    total
}

fn sum_squares(row: &[f32]) -> f64 {
    row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum()
}
