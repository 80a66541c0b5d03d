//! Losses at a node, each the mean over the samples of a batch, and their gradients.

use crate::error::{Error, Result};
use crate::kernels::elementwise::exp;
use serde::{Deserialize, Serialize};

/// Which distribution the divergence is an expectation over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// KL(teacher ‖ student), the usual distillation loss.
    #[default]
    TeacherToStudent,
    /// KL(student ‖ teacher).
    StudentToTeacher,
}

/// Constants of the relaxed contrastive loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RelaxedContrast {
    /// τ of both terms.
    pub temperature: f32,
    /// λ: same-class pairs at least this similar are pushed apart.
    pub threshold: f32,
    /// Weight of the supervised contrastive term.
    pub contrast_weight: f32,
    /// Weight β of the divergence penalty.
    pub penalty_weight: f32,
}

/// A loss between a node's values (batch, features) and a target.
#[derive(Clone, Copy, Debug)]
pub enum Loss<'a> {
    /// −log softmax(z)\[label\]
    CrossEntropy {
        /// One class a sample.
        labels: &'a [u32],
    },
    /// The divergence between softmax(t/T) and softmax(z/T).
    Kl {
        /// The teacher's logits t (batch, classes).
        teacher: &'a [f32],
        /// T > 0.
        temperature: f32,
        /// The order of its arguments.
        direction: Direction,
        /// Whether to multiply by T², which keeps the gradient's size independent of T.
        times_t_squared: bool,
    },
    /// Σ (z − t)²
    SquaredError {
        /// t (batch, features)
        target: &'a [f32],
    },
    /// Σ |z − t|
    AbsoluteError {
        /// t (batch, features)
        target: &'a [f32],
    },
}

impl<'a> Loss<'a> {
    /// KL(teacher ‖ student) at a temperature, without the factor T².
    pub fn kl(teacher: &'a [f32], temperature: f32) -> Self {
        Self::Kl { teacher, temperature, direction: Direction::TeacherToStudent, times_t_squared: false }
    }

    /// Whether the target fits `batch` samples of `features` values.
    pub(crate) fn check(&self, batch: usize, features: usize) -> Result<()> {
        let (what, expected, found) = match self {
            Self::CrossEntropy { labels } => {
                let wrong = labels.iter().enumerate().find(|(_, label)| **label as usize >= features);
                if let Some((sample, &label)) = wrong {
                    return Err(Error::Label { label, sample, classes: features });
                }
                ("the label vector", batch, labels.len())
            }
            Self::Kl { teacher, temperature, .. } => {
                if !(temperature.is_finite() && *temperature > 0.0) {
                    let value = f64::from(*temperature);
                    return Err(Error::Parameter { name: "temperature", value, expected: "must be positive" });
                }
                ("the teacher's logits", batch * features, teacher.len())
            }
            Self::SquaredError { target } | Self::AbsoluteError { target } => {
                ("the target", batch * features, target.len())
            }
        };
        if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
    }

    /// The loss of values (batch, features), without a gradient.
    ///
    /// # Errors
    /// If the target does not fit.
    pub fn value(&self, batch: usize, z: &[f32]) -> Result<f64> {
        let whole = z.len() / batch.max(1) * batch;
        if z.is_empty() || whole != z.len() {
            return Err(Error::Length { what: "the vector of values", expected: whole.max(batch), found: z.len() });
        }
        self.check(batch, z.len() / batch.max(1))?;
        let mut unused = vec![0.0; z.len()];
        Ok(self.add_gradient(batch, z, 0.0, &mut unused))
    }

    /// Adds weight·∂L/∂z to `grad` and returns L.
    pub(crate) fn add_gradient(&self, batch: usize, z: &[f32], weight: f32, grad: &mut [f32]) -> f64 {
        let features = z.len() / batch;
        let scale = weight / batch as f32;
        let rows = z.chunks_exact(features).zip(grad.chunks_exact_mut(features));
        let mut total = 0.0;
        match self {
            Self::CrossEntropy { labels } => {
                for ((z, grad), &label) in rows.zip(*labels) {
                    let log_sum = log_sum_exp(z, 1.0);
                    total += log_sum - f64::from(z[label as usize]);
                    for (grad, z) in grad.iter_mut().zip(z) {
                        *grad += scale * exp(z - log_sum as f32);
                    }
                    grad[label as usize] -= scale;
                }
            }
            Self::Kl { teacher, temperature, direction, times_t_squared } => {
                let t = *temperature;
                let factor = if *times_t_squared { t * t } else { 1.0 };
                for ((z, grad), teacher) in rows.zip(teacher.chunks_exact(features)) {
                    let (log_zs, log_ts) = (log_sum_exp(z, t) as f32, log_sum_exp(teacher, t) as f32);
                    let pairs = || z.iter().zip(teacher).map(|(z, q)| (z / t - log_zs, q / t - log_ts));
                    match direction {
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
            }
            Self::SquaredError { target } => {
                for ((z, grad), t) in z.iter().zip(grad).zip(*target) {
                    total += f64::from((z - t) * (z - t));
                    *grad += 2.0 * scale * (z - t);
                }
            }
            Self::AbsoluteError { target } => {
                for ((z, grad), t) in z.iter().zip(grad).zip(*target) {
                    let d = z - t;
                    total += f64::from(d.abs());
                    *grad += if d > 0.0 {
                        scale
                    } else if d < 0.0 {
                        -scale
                    } else {
                        0.0
                    };
                }
            }
        }
        total / batch as f64
    }
}

/// log Σ exp(z/T), safe for large z.
fn log_sum_exp(z: &[f32], temperature: f32) -> f64 {
    let max = z.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b)) / temperature;
    f64::from(max) + f64::from(z.iter().map(|z| exp(z / temperature - max)).sum::<f32>()).ln()
}
