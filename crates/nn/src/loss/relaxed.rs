//! The relaxed contrastive loss: every sample is compared with every other.

use super::RelaxedContrast;
use crate::graph::Shape;

/// What the loss computes in, kept from step to step.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// Means over pixels, and the loss's gradient by them.
    pooled: Vec<f32>,
    slopes: Vec<f32>,
    norms: Vec<f64>,
    /// The normalised rows, and the loss's gradient by them.
    unit: Vec<f64>,
    unit_grad: Vec<f64>,
    /// Of one sample with each other.
    similarities: Vec<f64>,
}

/// The loss of the mean over pixels.
pub(super) fn add_gradient(
    c: &RelaxedContrast,
    shape: Shape,
    z: &[f32],
    labels: &[u32],
    weight: f32,
    grad: &mut [f32],
    memory: &mut Buffers,
) -> f64 {
    let (pixels, channels) = (shape.pixels(), shape.c);
    if pixels == 1 {
        return at_vectors(c, channels, z, labels, weight, grad, memory);
    }
    let [mut pooled, mut slopes] = [&mut memory.pooled, &mut memory.slopes].map(std::mem::take);
    for zeros in [&mut pooled, &mut slopes] {
        zeros.clear();
        zeros.resize(labels.len() * channels, 0.0);
    }
    for (mean, image) in pooled.chunks_exact_mut(channels).zip(z.chunks_exact(pixels * channels)) {
        for row in image.chunks_exact(channels) {
            mean.iter_mut().zip(row).for_each(|(m, v)| *m += v / pixels as f32);
        }
    }
    let loss = at_vectors(c, channels, &pooled, labels, weight, &mut slopes, memory);
    for (slope, image) in slopes.chunks_exact(channels).zip(grad.chunks_exact_mut(pixels * channels)) {
        for row in image.chunks_exact_mut(channels) {
            row.iter_mut().zip(slope).for_each(|(g, m)| *g += m / pixels as f32);
        }
    }
    (memory.pooled, memory.slopes) = (pooled, slopes);
    loss
}

/// Seo et al., CVPR 2024, at one level: rows `f` (n, dim) are normalised, and each sample i has
/// - a contrastive term, whose positive is the *least* similar sample of its class (itself included) and whose negatives are
///   the two most similar samples of other classes;
/// - a penalty, whose "positive" is itself and whose negative is the least similar other sample of its class, if that is
///   still more similar than λ: it pushes apart what has collapsed.
///
/// A sample without negatives, or without such a partner, contributes 0. Gradients reach both members of a pair.
fn at_vectors(
    c: &RelaxedContrast,
    dim: usize,
    f: &[f32],
    labels: &[u32],
    scale: f32,
    grad: &mut [f32],
    memory: &mut Buffers,
) -> f64 {
    let n = labels.len();
    let Buffers { norms, unit, unit_grad, similarities: sims, .. } = memory;
    norms.clear();
    norms.extend(f.chunks_exact(dim).map(|row| sum_squares(row).sqrt().max(1e-12)));
    unit.clear();
    unit.extend(f.iter().enumerate().map(|(i, v)| f64::from(*v) / norms[i / dim]));
    unit_grad.clear();
    unit_grad.resize(unit.len(), 0.0);
    let row = |i: usize| &unit[i * dim..(i + 1) * dim];
    let similarity = |i: usize, j: usize| row(i).iter().zip(row(j)).map(|(a, b)| a * b).sum::<f64>();
    let t = f64::from(c.temperature);
    let mut total = 0.0;
    let mut push = |i: usize, j: usize, slope: f64| {
        for d in 0..dim {
            unit_grad[i * dim + d] += slope * unit[j * dim + d];
            unit_grad[j * dim + d] += slope * unit[i * dim + d];
        }
    };
    for i in 0..n {
        sims.clear();
        sims.extend((0..n).map(|j| if i == j { 1.0 } else { similarity(i, j) }));
        let least = |with_self: bool| {
            let same = (0..n).filter(|&j| labels[j] == labels[i] && (with_self || j != i));
            same.min_by(|&a, &b| sims[a].total_cmp(&sims[b]))
        };
        // The first of equally similar ones, which `max_by` would not give.
        let nearest = |except: Option<usize>| {
            let others = (0..n).filter(|&j| labels[j] != labels[i] && Some(j) != except);
            others.min_by(|&a, &b| sims[b].total_cmp(&sims[a]))
        };
        let mut info_nce = |positive: usize, negatives: [Option<usize>; 2], weight: f32| {
            let top = negatives.iter().flatten().map(|&j| sims[j]).fold(sims[positive], f64::max);
            let exp = |j: usize| ((sims[j] - top) / t).exp();
            let denominator = exp(positive) + negatives.iter().flatten().map(|&j| exp(j)).sum::<f64>();
            total += f64::from(weight) * -(exp(positive) / denominator).ln() / n as f64;
            let slope = f64::from(weight * scale) / (n as f64 * t);
            if positive != i {
                push(i, positive, slope * (exp(positive) / denominator - 1.0));
            }
            for &j in negatives.iter().flatten() {
                push(i, j, slope * exp(j) / denominator);
            }
        };
        if let (Some(positive), Some(first)) = (least(true), nearest(None)) {
            info_nce(positive, [Some(first), nearest(Some(first))], c.contrast_weight);
        }
        if let Some(partner) = least(false).filter(|&j| sims[j] >= f64::from(c.threshold)) {
            info_nce(i, [Some(partner), None], c.penalty_weight);
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
