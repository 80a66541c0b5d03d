//! The student's distillation on a GPU: a cohort of one.

use super::OnGpu;
use crate::distill::{Anchor, DirectionConfig, Distill, DistillTargets, StudentNorm};
use crate::error::{Error, Result};
use crate::fusion::ServerState;
use fedproj_nn::cuda::{At, Batches, Cohort, Data, LossTerm, Moments, NOBODY, Target, Vectors};
use fedproj_nn::{Direction, Dropout, Mode, NodeId, NormMode, Options, Rule};
use fedproj_rng::{Purpose, Stream};

/// What the student is trained towards, on the device.
struct Goal {
    logits: Data,
    features: Option<Data>,
    /// FedET: labels, which samples have a diverse minority, and its weight λ.
    consensus: Option<(Data, Data, f32)>,
}

struct Student {
    cohort: Cohort,
    theta: Vectors,
    buffers: Vectors,
    anchor: Vectors,
    grad: Vectors,
    rule: Rule,
    moments: Moments,
    goal: Goal,
}

impl OnGpu {
    /// As [`Distill::run`].
    pub fn distill(
        &self,
        how: &Distill,
        round: u32,
        state: &mut ServerState,
        targets: &DistillTargets<'_>,
        previous: &[f32],
    ) -> Result<f64> {
        let (Some(public), Some(data)) = (&self.public, &self.experiment.public) else { return Ok(0.0) };
        let n = data.n_samples();
        let batch = how.batch.min(n);
        let anchor = match how.anchor {
            Anchor::Average => &state.weights[..],
            Anchor::PreviousGlobal => previous,
        };
        let mut student = self.student(how, batch, state, anchor, targets)?;
        let norm = match how.bn {
            StudentNorm::Update => NormMode::Update,
            StudentNorm::Frozen => NormMode::Frozen,
            StudentNorm::Recalibrate => NormMode::Batch,
        };
        let mut loss_mean = 0.0;
        for epoch in 0..how.epochs {
            let ids = [round, epoch, 0];
            let mut order = Stream::new(self.experiment.config.seed, Purpose::DistillOrder, ids).permutation(n);
            order.resize(n.next_multiple_of(batch), NOBODY);
            let n_steps = order.len() / batch;
            student.cohort.set_table(Batches::Private, &[order], batch)?;
            student.cohort.set_table(Batches::LrFactors, &[vec![1.0f32.to_bits(); n_steps]], 1)?;
            student.cohort.rewind()?;
            let before = student.loss_total()?;
            for _ in 0..n_steps {
                if !student.cohort.replay(0)? {
                    let recording = student.cohort.begin_recording(0)?;
                    let done = student.step(how, public, norm);
                    student.cohort.end_recording(recording)?;
                    done?;
                }
            }
            loss_mean = (student.loss_total()? - before) / n_steps as f64;
            if !loss_mean.is_finite() {
                return Err(Error::FusionNotFinite { round, what: "the distillation loss" });
            }
        }
        if how.bn == StudentNorm::Recalibrate {
            for first in (0..n).step_by(batch) {
                student.cohort.gather_range(public, first, batch.min(n - first), batch)?;
                let pass = Mode { norm: NormMode::Update, dropout: Dropout::Off };
                student.cohort.forward(student.theta.rows(), student.buffers.rows(), pass)?;
            }
        }
        state.weights = student.cohort.read(&student.theta, 0)?;
        state.buffers = student.cohort.read(&student.buffers, 0)?;
        Ok(loss_mean)
    }

    fn student(
        &self,
        how: &Distill,
        batch: usize,
        state: &ServerState,
        anchor: &[f32],
        targets: &DistillTargets<'_>,
    ) -> Result<Student> {
        let (graph, gpu) = (&self.experiment.graph, &self.gpu);
        let taps: Vec<NodeId> = graph.features().filter(|_| how.feature_weight > 0.0).into_iter().collect();
        let cohort = Cohort::new(gpu, graph, 1, &Options { batch, taps: &taps, training: true })?;
        let classes = graph.shape(graph.output()).len();
        let goal = match *targets {
            DistillTargets::Teacher(targets) => Goal {
                logits: Data::matrix(gpu, &targets.logits, classes)?,
                features: match graph.features().filter(|_| how.feature_weight > 0.0) {
                    Some(node) => Some(Data::matrix(gpu, &targets.features, graph.shape(node).len())?),
                    None => None,
                },
                consensus: None,
            },
            DistillTargets::Consensus { labels, diversity, has_diversity, weight } => {
                let marks: Vec<u32> = has_diversity.iter().map(|&has| u32::from(has)).collect();
                let labelled = |values: &[u32]| -> Result<Data> {
                    let mut data = Data::matrix(gpu, &[0.0], 1)?;
                    data.set_labels(gpu, values)?;
                    Ok(data)
                };
                let consensus = Some((labelled(labels)?, labelled(&marks)?, weight));
                Goal { logits: Data::matrix(gpu, diversity, classes)?, features: None, consensus }
            }
        };
        let rule = how.optimizer.rule();
        let mut theta = cohort.vectors(state.weights.len())?;
        let mut buffers = cohort.vectors(state.buffers.len())?;
        cohort.write(&mut theta, 0, &state.weights)?;
        cohort.write(&mut buffers, 0, &state.buffers)?;
        Ok(Student {
            moments: cohort.moments(&rule)?,
            grad: cohort.vectors(state.weights.len())?,
            anchor: cohort.shared_vector(anchor)?,
            cohort,
            theta,
            buffers,
            rule,
            goal,
        })
    }
}

impl Student {
    fn loss_total(&self) -> Result<f64> {
        Ok(self.cohort.stats()?[0].loss_total)
    }

    fn step(&mut self, how: &Distill, public: &Data, norm: NormMode) -> Result<()> {
        let Self { cohort, theta, buffers, anchor, grad, rule, moments, goal } = self;
        let (theta, grad) = (theta.rows(), grad.rows());
        let output = cohort.graph().output();
        cohort.gather(public, Batches::Private, 0, false)?;
        cohort.gather_target(&goal.logits, Batches::Private, 0, Target::Logits, false)?;
        cohort.forward(theta, buffers.rows(), Mode { norm, dropout: Dropout::Off })?;
        if let Some((labels, marks, weight)) = &goal.consensus {
            cohort.gather_labels(labels, Batches::Private)?;
            cohort.gather_marks(marks, Batches::Private)?;
            cohort.add_loss(output, &LossTerm::CrossEntropy, Target::Logits, 1.0, true)?;
            let direction = Direction::TeacherToStudent;
            let kl = LossTerm::Kl { temperature: 1.0, direction, times_t_squared: false, only_marked: true };
            cohort.add_loss(output, &kl, Target::Logits, *weight, false)?;
        } else {
            let direction = match how.direction {
                DirectionConfig::TeacherToStudent => Direction::TeacherToStudent,
                DirectionConfig::StudentToTeacher => Direction::StudentToTeacher,
            };
            let kl =
                LossTerm::Kl { temperature: how.temperature, direction, times_t_squared: how.t2, only_marked: false };
            cohort.add_loss(output, &kl, Target::Logits, 1.0, true)?;
            if let (Some(features), Some(node)) = (&goal.features, cohort.graph().features()) {
                cohort.gather_target(features, Batches::Private, 0, Target::Features, false)?;
                cohort.add_loss(node, &LossTerm::MaskedSquares, Target::Features, how.feature_weight, false)?;
            }
        }
        cohort.record_loss(At::Private)?;
        cohort.backward(theta, grad)?;
        if how.alpha > 0.0 {
            // ∇ α‖θ − anchor‖² = 2α (θ − anchor)
            cohort.axpy_difference(2.0 * how.alpha, theta, anchor.rows(), grad)?;
        }
        cohort.update(rule, moments, theta, grad)?;
        Ok(cohort.advance(1, 0)?)
    }
}
