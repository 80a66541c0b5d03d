//! Runs recorded steps on a GPU: each call of a method becomes launches for the active lanes.

use super::trainer::GpuTrainer;
use crate::error::Result;
use crate::plan::{Op, VectorId};
use crate::step::{Batch, ProjectionRule, Scope, Term};
use fedproj_nn::cuda::{Batches, Cohort, LossOf, Rows, Target};
use fedproj_nn::{Dropout, Mode, NormMode};

/// Progress within a step.
#[derive(Debug, Default)]
pub(super) struct Current {
    /// Memory batches used so far.
    n_memory: usize,
    /// Whether a loss was added for the current batch.
    has_loss: bool,
}

impl GpuTrainer {
    /// Runs a program on the active lanes; records its launches at the second use.
    pub(super) fn run(&mut self, program: usize) -> Result<()> {
        if self.cohort.replay(program as u64)? {
            return Ok(());
        }
        let ops = self.planner.programs[program].ops.clone();
        let n_memory = self.planner.programs[program].n_memory();
        // The cohort records the launches between these two calls.
        let recording = self.cohort.begin_recording(program as u64)?;
        let done = (|| {
            let mut current = Current::default();
            ops.iter().try_for_each(|op| self.execute(op, &mut current))?;
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

    /// Runs one operation for the active lanes.
    pub(super) fn execute(&mut self, op: &Op, current: &mut Current) -> Result<()> {
        match *op {
            Op::Forward { batch } => self.forward(batch, current)?,
            Op::Loss { term } => add_term(&mut self.cohort, &term, &mut current.has_loss)?,
            Op::Backward { batch, out } => {
                let at = if batch == Batch::Private { LossOf::Samples } else { LossOf::Replay };
                self.cohort.record_loss(at)?;
                self.cohort.backward(self.theta.rows(), self.gradients[out].rows())?;
            }
            Op::Embed { index } => {
                let (_, node) = self.planner.names().embeddings[index];
                let row = self.on.experiment.graph.shape(node).len();
                self.cohort.gather_embedding(&self.embeddings[index], row, index)?;
            }
            Op::AddScaled { y, a, x } => self.cohort.axpy(a, self.rows(x), self.rows(y))?,
            Op::AddScaledDiff { g, a, x, y } => {
                self.cohort.axpy_difference(a, self.rows(x), self.rows(y), self.rows(g))?;
            }
            Op::Clip { g, norm_max } => self.cohort.clip(self.rows(g), norm_max)?,
            Op::Project { g, r, rule } => {
                if rule.from_round_start {
                    self.start_memory_loss()?;
                }
                let (g, r) = (self.rows(g), self.rows(r));
                self.project(g, r, &rule, g, 1.0)?;
            }
            Op::Update { g } => self.update(g)?,
            Op::UpdateProjected { g, r, rule } => self.update_projected(g, r, &rule)?,
            Op::KeepModel { weights, buffers } => {
                let (n, n_buffers) = (self.start_len(), self.on.experiment.buffers.len());
                self.cohort.assign(self.theta.rows(), self.states[weights].rows(), n)?;
                self.cohort.assign(self.buffers.rows(), self.states[buffers].rows(), n_buffers)?;
            }
        }
        Ok(())
    }

    /// Measures g against r. Adds `sign` times the projection's change of g to `to`.
    fn project(&self, g: Rows, r: Rows, rule: &ProjectionRule, to: Rows, sign: f32) -> Result<()> {
        let by_tensor = rule.scope == Scope::Layer;
        Ok(self.cohort.project(g, r, &rule.bounds, by_tensor, rule.from_round_start, to, sign)?)
    }

    fn update_projected(&mut self, g: VectorId, r: VectorId, rule: &ProjectionRule) -> Result<()> {
        let Some((before, moved)) = &self.before else { return Ok(()) };
        let (before, moved, theta) = (before.rows(), moved.rows(), self.theta.rows());
        let n = self.start_len();
        self.cohort.assign(theta, before, n)?;
        self.update(g)?;
        if rule.from_round_start {
            self.start_memory_loss()?;
        }
        // u = θ_before − θ_after replaces the gradient, so the change of u is subtracted from θ.
        self.cohort.clear(moved, n)?;
        self.cohort.axpy_difference(1.0, before, theta, moved)?;
        self.project(moved, self.rows(r), rule, theta, -1.0)
    }

    fn update(&self, g: VectorId) -> Result<()> {
        let g = self.rows(g);
        let clip = self.on.experiment.config.local.clip;
        if clip > 0.0 {
            self.cohort.clip(g, clip)?;
        }
        Ok(self.cohort.update(&self.rule, &self.moments, self.theta.rows(), g)?)
    }

    fn forward(&mut self, batch: Batch, current: &mut Current) -> Result<()> {
        let pass = match batch {
            Batch::Private => {
                self.cohort.gather(&self.on.private, Batches::Samples, 0, false)?;
                Mode { norm: NormMode::Update, dropout: Dropout::OfStep }
            }
            Batch::Memory => {
                self.gather_memory(current.n_memory)?;
                current.n_memory += 1;
                let norm = self.memory_config.as_ref().map_or(NormMode::Frozen, |m| m.bn);
                Mode { norm, dropout: Dropout::Off }
            }
        };
        current.has_loss = false;
        Ok(self.cohort.forward(self.theta.rows(), self.buffers.rows(), pass)?)
    }

    pub(super) fn gather_memory(&mut self, offset: usize) -> Result<()> {
        let Some(public) = &self.on.public else { return Ok(()) };
        let cast = self.truncates_memory;
        self.cohort.gather(public, Batches::Replay, offset, cast)?;
        if let Some(logits) = &self.logits {
            self.cohort.gather_target(logits, Batches::Replay, offset, Target::Logits, cast)?;
        }
        if let Some(features) = &self.features {
            self.cohort.gather_target(features, Batches::Replay, offset, Target::Features, false)?;
        }
        Ok(())
    }

    /// The memory loss of the round's first weights on the batch gathered last.
    fn start_memory_loss(&mut self) -> Result<()> {
        self.memory_loss_of(self.start.rows(), self.start_buffers.rows())
    }

    /// As on the CPU: batch-norm as in the gradient, but the running averages stay unchanged.
    pub(super) fn memory_loss_of(&mut self, params: Rows, buffers: Rows) -> Result<()> {
        let Some(config) = &self.memory_config else { return Ok(()) };
        let norm = match config.bn {
            NormMode::Update => NormMode::Batch,
            other => other,
        };
        let ((objective, n_terms), mut current) = (config.loss(), Current::default());
        self.cohort.forward(params, buffers, Mode { norm, dropout: Dropout::Off })?;
        objective[..n_terms].iter().try_for_each(|term| add_term(&mut self.cohort, term, &mut current.has_loss))?;
        Ok(self.cohort.record_loss(LossOf::Reference)?)
    }
}

/// Adds a term to the objective of the batch gathered last.
pub(super) fn add_term(cohort: &mut Cohort, term: &Term, has_loss: &mut bool) -> Result<()> {
    let n = term.at.n_nodes(cohort.graph());
    for index in 0..n {
        let Some(node) = term.at.node(cohort.graph(), index) else { break };
        let first = !std::mem::replace(has_loss, true);
        cohort.add_loss(node, &term.loss, term.weight / n as f32, first)?;
    }
    Ok(())
}
