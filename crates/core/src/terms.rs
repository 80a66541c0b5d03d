//! Losses that belong to one method each: their values and gradients at a node, on plain slices.
//!
//! Rows are samples; every loss is a mean over them. Gradients are added with a weight to what is there.

pub use fedproj_nn::RelaxedContrast;

/// Squared distance over the dimensions where either is positive, f = features, t = target (rows of `dim`):
/// mean over samples of Σ_d (f − t)² · 1\[f > 0 or t > 0\]. The "feature distillation" of the authors' code (A.2),
/// which sums over the batch instead.
pub fn masked_squares(dim: usize, f: &[f32], t: &[f32], weight: f32, grad: &mut [f32]) -> f64 {
    let n = (f.len() / dim) as f32;
    let mut total = 0.0;
    for ((f, t), grad) in f.iter().zip(t).zip(grad) {
        if *f > 0.0 || *t > 0.0 {
            total += f64::from((f - t) * (f - t));
            *grad += weight * 2.0 * (f - t) / n;
        }
    }
    total / f64::from(n)
}

/// MOON (Li et al., CVPR 2021, Eq. 3): −log( e^{cos(z,z⁺)/τ} / (e^{cos(z,z⁺)/τ} + e^{cos(z,z⁻)/τ}) ).
pub fn model_contrast(
    dim: usize,
    z: &[f32],
    positive: &[f32],
    negative: &[f32],
    temperature: f32,
    weight: f32,
    grad: &mut [f32],
) -> f64 {
    let n = z.len() / dim;
    let t = f64::from(temperature);
    let mut total = 0.0;
    let others = positive.chunks_exact(dim).zip(negative.chunks_exact(dim));
    for ((z, (p, q)), grad) in z.chunks_exact(dim).zip(others).zip(grad.chunks_exact_mut(dim)) {
        let (cos_p, cos_q) = (Cosine::of(z, p), Cosine::of(z, q));
        // −log σ((cos⁺ − cos⁻)/τ)
        let gap = (cos_p.value - cos_q.value) / t;
        total += softplus(-gap);
        let slope = -f64::from(weight) / (n as f64 * t) / (1.0 + gap.exp());
        cos_p.add_gradient(z, p, slope, grad);
        cos_q.add_gradient(z, q, -slope, grad);
    }
    total / n as f64
}

/// The cosine of two vectors and what its gradient needs. Zero vectors have cosine 0.
struct Cosine {
    value: f64,
    norm_a: f64,
    norm_b: f64,
}

impl Cosine {
    fn of(a: &[f32], b: &[f32]) -> Self {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let (norm_a, norm_b) = (dot(a, a).sqrt().max(1e-8), dot(b, b).sqrt().max(1e-8));
        Self { value: dot(a, b) / (norm_a * norm_b), norm_a, norm_b }
    }

    /// grad += slope · ∂cos/∂a
    fn add_gradient(&self, a: &[f32], b: &[f32], slope: f64, grad: &mut [f32]) {
        let (to_b, to_a) = (slope / (self.norm_a * self.norm_b), slope * self.value / (self.norm_a * self.norm_a));
        for ((grad, a), b) in grad.iter_mut().zip(a).zip(b) {
            *grad += (to_b * f64::from(*b) - to_a * f64::from(*a)) as f32;
        }
    }
}

/// log(1 + eˣ) without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// FedRCL (Seo et al., CVPR 2024) at one level: rows `f` (n, dim) are normalised, and each sample i has
/// - a contrastive term, whose positive is the *least* similar sample of its class (itself included) and whose negatives are
///   the two most similar samples of other classes;
/// - a penalty, whose "positive" is itself and whose negative is the least similar other sample of its class, if that is
///   still more similar than λ: it pushes apart what has collapsed.
///
/// A sample without negatives, or without such a partner, contributes 0. Gradients reach both members of a pair.
pub fn relaxed_contrast(
    c: &RelaxedContrast,
    dim: usize,
    f: &[f32],
    labels: &[u32],
    scale: f32,
    grad: &mut [f32],
) -> f64 {
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
