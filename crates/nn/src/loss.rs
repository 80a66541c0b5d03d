//! Losses at a node, each the mean over the samples of a batch, and their gradients.

mod contrast;
mod relaxed;
mod rows;

use crate::error::{Error, Result};
use crate::graph::Shape;
pub(crate) use relaxed::Buffers;
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
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
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

/// An embedding of the batch: its place in [`LossTargets::embeddings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct EmbeddingId(pub usize);

/// A loss between a node's values z (batch, features) and the batch's targets.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Loss {
    /// −log softmax(z)\[label\]
    CrossEntropy,
    /// −log softmax(z + b)\[label\], b = [`LossTargets::offsets`]. A class whose offset is −∞ is left out.
    OffsetCrossEntropy,
    /// The divergence between softmax(t/T) and softmax(z/T), t = [`LossTargets::logits`].
    Kl {
        /// T > 0.
        temperature: f32,
        /// The order of its arguments.
        direction: Direction,
        /// Whether to multiply by T², which keeps the gradient's size independent of T.
        times_t_squared: bool,
        /// Only over the samples that are marked; the mean is over all.
        #[serde(default)]
        only_marked: bool,
    },
    /// KL(softmax(t/T) ‖ softmax(z/T)) over all classes but the label's: what a teacher knows beyond it.
    NotTrueKl {
        /// t, the teacher's logits.
        teacher: EmbeddingId,
        /// T > 0.
        temperature: f32,
    },
    /// Σ (z − t)² over the dimensions where z or t is positive, t = [`LossTargets::features`].
    MaskedSquares,
    /// The mean over the dimensions of |z − t|, t = [`LossTargets::logits`].
    AbsoluteError,
    /// −log( e^{cos(z,z⁺)/τ} / (e^{cos(z,z⁺)/τ} + e^{cos(z,z⁻)/τ}) ): a contrast between two embeddings of the batch.
    Contrast {
        /// z⁺, which attracts.
        positive: EmbeddingId,
        /// z⁻, which repels.
        negative: EmbeddingId,
        /// τ > 0.
        temperature: f32,
    },
    /// The relaxed contrastive loss (Seo et al., CVPR 2024) of z's mean over pixels.
    RelaxedContrast(RelaxedContrast),
}

/// What a batch's values are compared with, one row per sample. A loss reads only what it needs.
#[derive(Clone, Copy, Debug, Default)]
pub struct LossTargets<'a> {
    /// One class per sample.
    pub labels: &'a [u32],
    /// (batch, classes)
    pub logits: &'a [f32],
    /// (batch, features)
    pub features: &'a [f32],
    /// Which samples [`Loss::Kl`] counts, if only the marked ones.
    pub marks: &'a [bool],
    /// One number per class, the same for all samples.
    pub offsets: &'a [f32],
    /// Other values of the node, each (batch, features).
    pub embeddings: &'a [Vec<f32>],
}

impl<'a> LossTargets<'a> {
    /// Labels only.
    pub fn labels(labels: &'a [u32]) -> Self {
        Self { labels, ..Self::default() }
    }

    /// Logits only.
    pub fn logits(logits: &'a [f32]) -> Self {
        Self { logits, ..Self::default() }
    }

    /// Features only.
    pub fn features(features: &'a [f32]) -> Self {
        Self { features, ..Self::default() }
    }

    /// Whether there is one class below `classes` per sample.
    fn check_labels(&self, batch: usize, classes: usize) -> Result<()> {
        let wrong = self.labels.iter().enumerate().find(|(_, label)| **label as usize >= classes);
        if let Some((sample, &label)) = wrong {
            return Err(Error::Label { label, sample, classes });
        }
        fit("the label vector", batch, self.labels.len())
    }

    fn embedding(&self, EmbeddingId(index): EmbeddingId) -> &'a [f32] {
        self.embeddings.get(index).map_or(&[], Vec::as_slice)
    }
}

impl Loss {
    /// KL(teacher ‖ student) at a temperature, without the factor T².
    pub fn kl(temperature: f32) -> Self {
        let direction = Direction::TeacherToStudent;
        Self::Kl { temperature, direction, times_t_squared: false, only_marked: false }
    }

    /// Whether the targets fit `batch` samples of `features` values.
    pub(crate) fn check(&self, targets: &LossTargets<'_>, batch: usize, features: usize) -> Result<()> {
        match *self {
            Self::CrossEntropy => targets.check_labels(batch, features),
            Self::OffsetCrossEntropy => {
                fit("the vector of offsets", features, targets.offsets.len())?;
                targets.check_labels(batch, features)
            }
            Self::Kl { temperature, only_marked, .. } => {
                check_temperature(temperature)?;
                if only_marked {
                    fit("the vector of marks", batch, targets.marks.len())?;
                }
                fit("the teacher's logits", batch * features, targets.logits.len())
            }
            Self::NotTrueKl { teacher, temperature } => {
                check_temperature(temperature)?;
                targets.check_labels(batch, features)?;
                fit("the teacher's logits", batch * features, targets.embedding(teacher).len())
            }
            Self::MaskedSquares => fit("the target", batch * features, targets.features.len()),
            Self::AbsoluteError => fit("the teacher's logits", batch * features, targets.logits.len()),
            Self::Contrast { positive, negative, temperature } => {
                check_temperature(temperature)?;
                [positive, negative]
                    .into_iter()
                    .try_for_each(|index| fit("the embedding", batch * features, targets.embedding(index).len()))
            }
            Self::RelaxedContrast(constants) => {
                check_temperature(constants.temperature)?;
                fit("the label vector", batch, targets.labels.len())
            }
        }
    }

    /// The loss of values (batch, features), without a gradient.
    ///
    /// # Errors
    /// If the targets do not fit.
    pub fn value(&self, targets: &LossTargets<'_>, batch: usize, z: &[f32]) -> Result<f64> {
        let whole = z.len() / batch.max(1) * batch;
        if z.is_empty() || whole != z.len() {
            return Err(Error::Length { what: "the vector of values", expected: whole.max(batch), found: z.len() });
        }
        let features = z.len() / batch.max(1);
        self.check(targets, batch, features)?;
        let mut unused = vec![0.0; z.len()];
        let memory = &mut Buffers::default();
        Ok(self.add_gradient(targets, Shape::vector(features), z, 0.0, &mut unused, memory))
    }

    /// Adds weight·∂L/∂z to `grad` and returns L, for samples of a shape.
    pub(crate) fn add_gradient(
        &self,
        targets: &LossTargets<'_>,
        shape: Shape,
        z: &[f32],
        weight: f32,
        grad: &mut [f32],
        memory: &mut Buffers,
    ) -> f64 {
        let features = shape.len();
        match *self {
            Self::CrossEntropy => rows::cross_entropy(features, z, targets.labels, weight, grad),
            Self::OffsetCrossEntropy => {
                rows::offset_cross_entropy(features, z, targets.labels, targets.offsets, weight, grad)
            }
            Self::Kl { temperature, direction, times_t_squared, only_marked } => {
                let marks = only_marked.then_some(targets.marks);
                let kl = rows::Kl { temperature, direction, times_t_squared };
                kl.add_gradient(features, z, targets.logits, marks, weight, grad)
            }
            Self::NotTrueKl { teacher, temperature } => {
                let teacher = targets.embedding(teacher);
                rows::not_true_kl(features, z, teacher, targets.labels, temperature, weight, grad)
            }
            Self::MaskedSquares => rows::masked_squares(features, z, targets.features, weight, grad),
            Self::AbsoluteError => rows::absolute_error(z, targets.logits, weight, grad),
            Self::Contrast { positive, negative, temperature } => {
                let others = [targets.embedding(positive), targets.embedding(negative)];
                contrast::add_gradient(features, z, others, temperature, weight, grad)
            }
            Self::RelaxedContrast(c) => relaxed::add_gradient(&c, shape, z, targets.labels, weight, grad, memory),
        }
    }
}

fn fit(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
}

fn check_temperature(temperature: f32) -> Result<()> {
    if temperature.is_finite() && temperature > 0.0 {
        return Ok(());
    }
    Err(Error::Parameter { name: "temperature", value: f64::from(temperature), expected: "must be positive" })
}
