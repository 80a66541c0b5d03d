//! A contrast between two embeddings.

/// Li et al., CVPR 2021, Eq. 3: −log( e^{cos(z,z⁺)/τ} / (e^{cos(z,z⁺)/τ} + e^{cos(z,z⁻)/τ}) ).
pub(super) fn add_gradient(
    dim: usize,
    z: &[f32],
    [positive, negative]: [&[f32]; 2],
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
