//! Losses of each sample by itself: cross-entropy, divergence, distance.

use super::Direction;
use crate::kernels::elementwise::exp;

pub(super) fn cross_entropy(features: usize, z: &[f32], labels: &[u32], weight: f32, grad: &mut [f32]) -> f64 {
    let batch = z.len() / features;
    let scale = weight / batch as f32;
    let mut total = 0.0;
    for ((z, grad), &label) in z.chunks_exact(features).zip(grad.chunks_exact_mut(features)).zip(labels) {
        let log_sum = log_sum_exp(z.iter().copied());
        total += log_sum - f64::from(z[label as usize]);
        for (grad, z) in grad.iter_mut().zip(z) {
            *grad += scale * exp(z - log_sum as f32);
        }
        grad[label as usize] -= scale;
    }
    total / batch as f64
}

pub(super) fn offset_cross_entropy(
    features: usize,
    z: &[f32],
    labels: &[u32],
    offsets: &[f32],
    weight: f32,
    grad: &mut [f32],
) -> f64 {
    let batch = z.len() / features;
    let scale = weight / batch as f32;
    let mut total = 0.0;
    for ((z, grad), &label) in z.chunks_exact(features).zip(grad.chunks_exact_mut(features)).zip(labels) {
        let label = label as usize;
        let log_sum = log_sum_exp(z.iter().zip(offsets).map(|(z, b)| z + b));
        total += log_sum - f64::from(z[label] + offsets[label]);
        for ((grad, z), b) in grad.iter_mut().zip(z).zip(offsets).filter(|(_, b)| b.is_finite()) {
            *grad += scale * exp(z + b - log_sum as f32);
        }
        grad[label] -= scale;
    }
    total / batch as f64
}

/// The settings of [`super::Loss::Kl`].
pub(super) struct Kl {
    pub temperature: f32,
    pub direction: Direction,
    pub times_t_squared: bool,
}

impl Kl {
    pub fn add_gradient(
        &self,
        features: usize,
        z: &[f32],
        teacher: &[f32],
        marks: Option<&[bool]>,
        weight: f32,
        grad: &mut [f32],
    ) -> f64 {
        let batch = z.len() / features;
        let scale = weight / batch as f32;
        let t = self.temperature;
        let factor = if self.times_t_squared { t * t } else { 1.0 };
        let rows = z.chunks_exact(features).zip(grad.chunks_exact_mut(features)).zip(teacher.chunks_exact(features));
        let mut total = 0.0;
        for (_, ((z, grad), teacher)) in rows.enumerate().filter(|(i, _)| marks.is_none_or(|marks| marks[*i])) {
            let log_sum = |logits: &[f32]| log_sum_exp(logits.iter().map(|z| z / t)) as f32;
            let (log_zs, log_ts) = (log_sum(z), log_sum(teacher));
            let pairs = || z.iter().zip(teacher).map(|(z, q)| (z / t - log_zs, q / t - log_ts));
            match self.direction {
                Direction::TeacherToStudent => {
                    // ∂/∂z = (p_student − p_teacher) / T
                    for ((log_p, log_q), grad) in pairs().zip(&mut *grad) {
                        let q = exp(log_q);
                        total += f64::from(factor * q * (log_q - log_p));
                        *grad += scale * factor / t * (exp(log_p) - q);
                    }
                }
                Direction::StudentToTeacher => {
                    // ∂/∂z_i = p_i (log p_i − log q_i − KL) / T
                    let kl: f32 = pairs().map(|(log_p, log_q)| exp(log_p) * (log_p - log_q)).sum();
                    total += f64::from(factor * kl);
                    for ((log_p, log_q), grad) in pairs().zip(&mut *grad) {
                        *grad += scale * factor / t * exp(log_p) * (log_p - log_q - kl);
                    }
                }
            }
        }
        total / batch as f64
    }
}

pub(super) fn not_true_kl(
    features: usize,
    z: &[f32],
    teacher: &[f32],
    labels: &[u32],
    temperature: f32,
    weight: f32,
    grad: &mut [f32],
) -> f64 {
    let batch = z.len() / features;
    let scale = weight / batch as f32 / temperature;
    let rows = z.chunks_exact(features).zip(grad.chunks_exact_mut(features)).zip(teacher.chunks_exact(features));
    let mut total = 0.0;
    for (((z, grad), teacher), &label) in rows.zip(labels) {
        let others = || (0..features).filter(|&class| class != label as usize);
        let log_sum = |logits: &[f32]| log_sum_exp(others().map(|class| logits[class] / temperature)) as f32;
        let (log_zs, log_ts) = (log_sum(z), log_sum(teacher));
        for class in others() {
            let (log_p, log_q) = (z[class] / temperature - log_zs, teacher[class] / temperature - log_ts);
            let q = exp(log_q);
            total += f64::from(q * (log_q - log_p));
            grad[class] += scale * (exp(log_p) - q);
        }
    }
    total / batch as f64
}

/// The dimensions that are off on both sides do not count.
pub(super) fn masked_squares(features: usize, z: &[f32], target: &[f32], weight: f32, grad: &mut [f32]) -> f64 {
    let n = (z.len() / features) as f32;
    let mut total = 0.0;
    for ((z, t), grad) in z.iter().zip(target).zip(grad) {
        if *z > 0.0 || *t > 0.0 {
            total += f64::from((z - t) * (z - t));
            *grad += weight * 2.0 * (z - t) / n;
        }
    }
    total / f64::from(n)
}

/// Where both are equal, the slope is 0.
pub(super) fn absolute_error(z: &[f32], target: &[f32], weight: f32, grad: &mut [f32]) -> f64 {
    let n = z.len() as f32;
    let mut total = 0.0;
    for ((z, t), grad) in z.iter().zip(target).zip(grad) {
        let d = z - t;
        total += f64::from(d.abs());
        if d != 0.0 {
            *grad += weight * d.signum() / n;
        }
    }
    total / f64::from(n)
}

/// log Σ exp(v), safe for large v. −∞ adds nothing.
fn log_sum_exp(values: impl Iterator<Item = f32> + Clone) -> f64 {
    let max = values.clone().fold(f32::NEG_INFINITY, f32::max);
    f64::from(max) + f64::from(values.map(|v| exp(v - max)).sum::<f32>()).ln()
}
