//! What a recorded step does on a GPU: each call of a method as launches for the active lanes.

use super::record::Op;
use super::trainer::GpuTrainer;
use crate::error::Result;
use crate::memory::{MemoryConfig, MemoryTarget};
use crate::step::{Batch, Scope, Term};
use crate::trainer::{VectorId, buffers_name};
use fedproj_nn::cuda::{At, Batches, Cohort, LossTerm, RelaxedContrast, Rows, Target as LossTarget};
use fedproj_nn::{Direction, Dropout, Mode, NodeId, NormMode};

impl GpuTrainer {
    /// Runs a program on the active lanes, recorded from its second use on.
    pub(super) fn run(&mut self, program: usize) -> Result<()> {
        if self.cohort.replay(program as u64)? {
            return Ok(());
        }
        let ops = self.programs[program].ops.clone();
        let n_memory = self.programs[program].n_memory();
        // The cohort records what happens between these two calls.
        let recording = self.cohort.begin_recording(program as u64)?;
        let done = (|| {
            let mut offset = 0;
            ops.iter().try_for_each(|op| self.execute(op, &mut offset))?;
            Ok(self.cohort.advance(1, n_memory)?)
        })();
        self.cohort.end_recording(recording)?;
        done
    }

    fn rows(&self, id: VectorId) -> Rows {
        match id {
            VectorId::Weights => self.theta.rows(),
            VectorId::RoundStart => self.start.rows(),
            VectorId::Gradient(i) => self.gradients[i].rows(),
            VectorId::State(i) => self.states[i].rows(),
            VectorId::Broadcast(i) => self.broadcasts[i].rows(),
            VectorId::Upload(i) => self.uploads[i].rows(),
        }
    }

    /// Does what a method asked for; `offset` counts the memory batches of this step.
    pub(super) fn execute(&mut self, op: &Op, offset: &mut usize) -> Result<()> {
        let n = self.start_len();
        match op {
            Op::Gradient { batch, objective, out } => self.gradient(*batch, objective, *out, offset)?,
            Op::Embed { index } => {
                let row = self.on.experiment.graph.shape(self.names.embeddings[*index].1).len();
                self.cohort.gather_embedding(&self.embeddings[*index], row, *index)?;
            }
            Op::AddScaled { y, a, x } => self.cohort.axpy(*a, self.rows(*x), self.rows(*y))?,
            Op::AddScaledDiff { g, a, x, y } => {
                self.cohort.axpy_difference(*a, self.rows(*x), self.rows(*y), self.rows(*g))?;
            }
            Op::Clip { g, norm_max } => self.cohort.clip(self.rows(*g), *norm_max)?,
            Op::Project { g, r, rule } => {
                if rule.from_round_start {
                    self.start_memory_loss()?;
                }
                let (g, r) = (self.rows(*g), self.rows(*r));
                self.cohort.project(g, r, &rule.bounds, rule.scope == Scope::Layer, rule.from_round_start, g, 1.0)?;
            }
            Op::Update { g } => self.update(*g)?,
            Op::UpdateProjected { g, r, rule } => {
                let Some((before, moved)) = &self.before else { return Ok(()) };
                let (before, moved, theta) = (before.rows(), moved.rows(), self.theta.rows());
                self.cohort.assign(theta, before, n)?;
                self.update(*g)?;
                if rule.from_round_start {
                    self.start_memory_loss()?;
                }
                // u = θ_before − θ_after takes the gradient's part, so what is added to u is taken from θ.
                self.cohort.clear(moved, n)?;
                self.cohort.axpy_difference(1.0, before, theta, moved)?;
                let by_tensor = rule.scope == Scope::Layer;
                self.cohort.project(
                    moved,
                    self.rows(*r),
                    &rule.bounds,
                    by_tensor,
                    rule.from_round_start,
                    theta,
                    -1.0,
                )?;
            }
            Op::KeepModel { name } => {
                for (name, from, len) in [
                    (name.clone(), &self.theta, n),
                    (buffers_name(name), &self.buffers, self.on.experiment.buffers.len()),
                ] {
                    if let Some(at) = self.names.states.iter().position(|n| *n == name) {
                        self.cohort.assign(from.rows(), self.states[at].rows(), len)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn update(&self, g: VectorId) -> Result<()> {
        let g = self.rows(g);
        let clip = self.on.experiment.config.local.clip;
        if clip > 0.0 {
            self.cohort.clip(g, clip)?;
        }
        Ok(self.cohort.update(&self.rule, &self.moments, self.theta.rows(), g)?)
    }

    fn gradient(&mut self, batch: Batch, objective: &[Term], out: usize, offset: &mut usize) -> Result<()> {
        let (pass, at) = match batch {
            Batch::Private => {
                self.cohort.gather(&self.on.private, Batches::Private, 0, false)?;
                (Mode { norm: NormMode::Update, dropout: Dropout::OfStep }, At::Private)
            }
            Batch::Memory => {
                self.gather_memory(*offset)?;
                *offset += 1;
                let norm = self.memory_config.as_ref().map_or(NormMode::Frozen, |m| m.bn.mode());
                (Mode { norm, dropout: Dropout::Off }, At::Memory)
            }
        };
        let theta = self.theta.rows();
        self.cohort.forward(theta, self.buffers.rows(), pass)?;
        let mut first = true;
        for term in objective {
            self.add_term(term, &mut first)?;
        }
        self.cohort.record_loss(at)?;
        Ok(self.cohort.backward(theta, self.gradients[out].rows())?)
    }

    pub(super) fn gather_memory(&mut self, offset: usize) -> Result<()> {
        let Some(public) = &self.on.public else { return Ok(()) };
        let cast = self.truncates_memory;
        self.cohort.gather(public, Batches::Memory, offset, cast)?;
        if let Some(logits) = &self.logits {
            self.cohort.gather_target(logits, Batches::Memory, offset, LossTarget::Logits, cast)?;
        }
        if let Some(features) = &self.features {
            self.cohort.gather_target(features, Batches::Memory, offset, LossTarget::Features, false)?;
        }
        Ok(())
    }

    fn add_term(&mut self, term: &Term, first: &mut bool) -> Result<()> {
        let output = self.on.experiment.graph.output();
        let mut add =
            |cohort: &mut Cohort, node: NodeId, term: LossTerm, target: LossTarget, weight: f32| -> Result<()> {
                Ok(cohort.add_loss(node, &term, target, weight, std::mem::take(first))?)
            };
        match *term {
            Term::CrossEntropy => add(&mut self.cohort, output, LossTerm::CrossEntropy, LossTarget::Logits, 1.0),
            Term::MemoryKl { temperature } => add(&mut self.cohort, output, kl(temperature), LossTarget::Logits, 1.0),
            Term::MemoryFeatures { weight } => match self.on.experiment.graph.features() {
                Some(node) => add(&mut self.cohort, node, LossTerm::MaskedSquares, LossTarget::Features, weight),
                None => Ok(()),
            },
            Term::ModelContrast { node, positive, negative, temperature, weight } => {
                let contrast = LossTerm::ModelContrast { positive: positive.0, negative: negative.0, temperature };
                add(&mut self.cohort, node, contrast, LossTarget::Logits, weight)
            }
            Term::RelaxedContrast(c) => {
                let levels = self.on.experiment.graph.levels().to_vec();
                let term = LossTerm::RelaxedContrast(RelaxedContrast {
                    temperature: c.temperature,
                    threshold: c.threshold,
                    contrast_weight: c.contrast_weight,
                    penalty_weight: c.penalty_weight,
                    scale: 1.0 / levels.len().max(1) as f32,
                });
                levels.into_iter().try_for_each(|node| add(&mut self.cohort, node, term, LossTarget::Logits, 1.0))
            }
        }
    }

    /// The memory loss of the round's first weights on the batch gathered last.
    fn start_memory_loss(&mut self) -> Result<()> {
        let Some(config) = self.memory_config.clone() else { return Ok(()) };
        self.memory_loss_of(self.start.rows(), self.start_buffers.rows(), &config)
    }

    /// As [`crate::trainer`]'s: batch-norm as in the gradient, without moving averages.
    pub(super) fn memory_loss_of(&mut self, params: Rows, buffers: Rows, config: &MemoryConfig) -> Result<()> {
        let norm = match config.bn.mode() {
            NormMode::Update => NormMode::Batch,
            other => other,
        };
        self.cohort.forward(params, buffers, Mode { norm, dropout: Dropout::Off })?;
        let target = match config.target {
            MemoryTarget::Labels => Term::CrossEntropy,
            MemoryTarget::Ensemble | MemoryTarget::GlobalModel => Term::MemoryKl { temperature: config.temperature },
        };
        let mut first = true;
        self.add_term(&target, &mut first)?;
        if config.feature_weight > 0.0 {
            self.add_term(&Term::MemoryFeatures { weight: config.feature_weight }, &mut first)?;
        }
        Ok(self.cohort.record_loss(At::RoundStart)?)
    }
}

fn kl(temperature: f32) -> LossTerm {
    LossTerm::Kl { temperature, direction: Direction::TeacherToStudent, times_t_squared: false, only_marked: false }
}
