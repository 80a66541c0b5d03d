//! Execution of plans on the CPU, by one thread for a client or by a team for a student.

use super::batch::{Feed, Gathered};
use super::head::Head;
use super::vectors::Vectors;
use super::{Download, LocalStats};
use crate::cone;
use crate::error::{Error, Result};
use crate::generator::GENERATOR;
use crate::halves::Stop;
use crate::plan::{LocalPlan, LocalStep, Op, Program, VectorId};
use crate::step::{Batch, ProjectionRule, Scope, Term};
use crate::subspace::Projector;
use fedproj_data::gather_rows;
use fedproj_nn::vector::{self, Conflict};
use fedproj_nn::{Buffer, Dropout, Mode, NormMode, Optimizer, Workspace, clip_norm};
use std::sync::Arc;

/// What the batches of a plan are made of.
#[derive(Debug)]
pub(crate) struct Feeds<'a> {
    /// Of [`Batch::Private`].
    pub own: Feed<'a>,
    /// Of [`Batch::Memory`].
    pub memory: Option<Feed<'a>>,
    /// The objective on the memory, for what is measured beside the steps.
    pub memory_objective: Vec<Term>,
}

/// What a plan's steps have measured.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Sum of the losses of private batches.
    pub loss_total: f64,
    /// Loss of the last memory batch.
    memory_loss: f64,
    pub cosine_total: f64,
    pub stats: LocalStats,
}

/// Memory that runs programs. A program's first step may allocate; its later steps do not.
#[derive(Debug)]
pub(crate) struct Executor {
    pub ws: Workspace,
    pub vectors: Vectors,
    pub tally: Tally,
    optimizer: Optimizer,
    /// Largest norm of a gradient that reaches the optimiser; 0 is no limit.
    clip: f32,
    pub gathered: Gathered,
    projector: Projector,
    /// Values of a node for all samples of a client, by place in [`crate::plan::Names::embeddings`].
    pub embeddings: Vec<Vec<f32>>,
    /// The objective of the current batch.
    loss: f64,
    /// What runs on generated features, where there are any.
    pub head: Option<Head>,
    /// Whether the last pass was the head's.
    is_on_head: bool,
    /// Memory batches taken so far.
    n_memory: usize,
    /// Generated features and values of noise taken so far.
    n_generated: usize,
    n_noise: usize,
    /// Looked at before every step.
    pub stop: Stop,
}

/// The step that is executed.
#[derive(Clone, Copy)]
struct Current<'a> {
    plan: &'a LocalPlan,
    feeds: &'a Feeds<'a>,
    step: &'a LocalStep,
    at: u32,
}

impl Executor {
    pub fn new(ws: Workspace, optimizer: Optimizer, clip: f32) -> Self {
        Self {
            vectors: Vectors::new(ws.graph()),
            tally: Tally::default(),
            gathered: Gathered::default(),
            projector: Projector::default(),
            embeddings: Vec::new(),
            loss: 0.0,
            head: None,
            is_on_head: false,
            n_memory: 0,
            n_generated: 0,
            n_noise: 0,
            stop: Stop::default(),
            ws,
            optimizer,
            clip,
        }
    }

    /// Starts from weights; `download` holds the vectors beside them.
    pub fn begin(&mut self, weights: &[f32], buffers: &[f32], download: &Arc<Download>) {
        self.vectors.begin(weights, buffers, download);
        self.optimizer.reset();
        self.tally = Tally::default();
        (self.n_memory, self.n_generated, self.n_noise) = (0, 0, 0);
    }

    /// Runs all steps of a plan.
    pub fn run(&mut self, plan: &LocalPlan, programs: &[Program], feeds: &Feeds<'_>) -> Result<()> {
        for (at, step) in plan.steps.iter().enumerate() {
            self.stop.check()?;
            let current = Current { plan, feeds, step, at: at as u32 };
            programs[step.program].ops.iter().try_for_each(|op| self.execute(op, current))?;
        }
        Ok(())
    }

    fn execute(&mut self, op: &Op, current: Current<'_>) -> Result<()> {
        match *op {
            Op::Forward { batch, at } => self.forward(batch, at, current),
            Op::Loss { term } => {
                let ws = self.head.as_mut().filter(|_| self.is_on_head).map_or(&mut self.ws, |head| &mut head.ws);
                self.loss += self.gathered.add_term(ws, &term)?;
                Ok(())
            }
            Op::Backward { batch, at, out } => self.backward(batch, at, out, current),
            Op::Embed { index } => {
                let Current { plan, step, .. } = current;
                let to = self.gathered.embedded(index);
                gather_rows(&self.embeddings[index], plan.samples.len(), &plan.order[step.batch.clone()], to);
                Ok(())
            }
            Op::Project { g, r, rule } => {
                let mut taken = self.vectors.take(g);
                let projected = self.project(&mut taken, r, &rule, current);
                self.vectors.put_back(g, taken);
                projected.map(drop)
            }
            Op::ProjectToCone { g, first, n } => {
                let mut taken = self.vectors.take(g);
                let found = cone::project(self.ws.cpu(), &mut taken, &self.vectors.gradients[first..first + n]);
                self.vectors.put_back(g, taken);
                self.tally.stats.n_compared += 1;
                self.tally.stats.n_projected += u32::from(found.projected);
                self.tally.cosine_total += found.cosine;
                Ok(())
            }
            Op::ProjectInputs { g, first, n, scales } => {
                let mut taken = self.vectors.take(g);
                let Self { ws, vectors, projector, .. } = self;
                let (vectors, theta) = (&vectors.broadcasts[first..first + n], &vectors.theta[..]);
                projector.project(ws, (&mut taken, theta), vectors, scales)?;
                self.vectors.put_back(g, taken);
                Ok(())
            }
            Op::Update { g } => {
                self.update(g, current.step.lr_factor);
                Ok(())
            }
            Op::UpdateProjected { g, r, rule } => self.update_projected(g, r, &rule, current),
            _ => {
                self.combine(op);
                Ok(())
            }
        }
    }

    /// The operations that need no batch.
    pub fn combine(&mut self, op: &Op) {
        match *op {
            Op::AddScaled { y, a, x } => {
                let mut to = self.vectors.take(y);
                vector::axpy(self.ws.cpu(), a, self.vectors.get(x), &mut to);
                self.vectors.put_back(y, to);
            }
            Op::Assign { y, x } => {
                let mut to = self.vectors.take(y);
                to.copy_from_slice(self.vectors.get(x));
                self.vectors.put_back(y, to);
            }
            Op::AddScaledDiff { g, a, x, y } => {
                let mut to = self.vectors.take(g);
                vector::axpy_difference(self.ws.cpu(), a, self.vectors.get(x), self.vectors.get(y), &mut to);
                self.vectors.put_back(g, to);
            }
            Op::Clip { g, norm_max } => {
                let mut taken = self.vectors.take(g);
                clip_norm(self.ws.cpu(), &mut taken, norm_max);
                self.vectors.put_back(g, taken);
            }
            Op::Perturb { g, radius } => {
                let mut to = self.vectors.take(VectorId::Perturbed);
                if to.is_empty() {
                    to = Buffer::zeros(self.vectors.theta.len());
                }
                vector::ascend(self.ws.cpu(), &self.vectors.theta, radius, self.vectors.get(g), &mut to);
                self.vectors.put_back(VectorId::Perturbed, to);
            }
            Op::KeepModel { weights, buffers } => self.vectors.keep_model(weights, buffers),
            _ => unreachable!("only a step has batches and an optimiser: {op:?}"),
        }
    }

    fn forward(&mut self, batch: Batch, at: VectorId, current: Current<'_>) -> Result<()> {
        let Current { plan, feeds, step, .. } = current;
        self.is_on_head = batch == Batch::Generated;
        if let (Batch::Generated, Some(head)) = (batch, &self.head) {
            let from = self.n_generated;
            self.n_generated += head.batch;
            self.gathered.set_labels(&plan.generated[from..self.n_generated]);
            self.loss = 0.0;
            return self.run_head(plan, at);
        }
        if let (Batch::Memory, Some(feed)) = (batch, &feeds.memory) {
            let first = self.n_memory * plan.memory_batch;
            self.n_memory += 1;
            let samples = plan.memory[first..first + plan.memory_batch].iter().copied();
            return self.pass(feed, samples, &[], at, Mode { norm: feed.norm, dropout: Dropout::Off });
        }
        let samples = plan.order[step.batch.clone()].iter().map(|&p| plan.samples[p as usize]);
        let dropout = if feeds.own.drops { Dropout::Key(step.dropout_key) } else { Dropout::Off };
        let moves = plan.moves.get(step.batch.clone()).unwrap_or(&[]);
        self.pass(&feeds.own, samples, moves, at, Mode { norm: feeds.own.norm, dropout })?;
        if batch == Batch::Taught {
            self.run_head(plan, at)?;
            self.head.iter().for_each(|head| self.gathered.set_logits(head.ws.output()));
        }
        Ok(())
    }

    /// Runs the head on features of the gathered labels.
    fn run_head(&mut self, plan: &LocalPlan, at: VectorId) -> Result<()> {
        let Self { head, gathered, vectors, n_noise: from, .. } = self;
        let Some(head) = head else { return Ok(()) };
        let noise = &plan.noise[*from..][..gathered.labels().len() * head.n_noise];
        *from += noise.len();
        let generator = vectors.download.vectors.get(GENERATOR).map_or(&[][..], Vec::as_slice);
        head.forward((vectors.get(at), &vectors.buffers), generator, gathered.labels(), noise)
    }

    /// Gathers samples and runs the network on them, at θ, at the perturbed weights or at a state.
    pub fn pass(
        &mut self,
        feed: &Feed<'_>,
        samples: impl Iterator<Item = u32>,
        moves: &[u32],
        at: VectorId,
        mode: Mode,
    ) -> Result<()> {
        self.gathered.gather(feed, samples, moves);
        let Vectors { theta, perturbed, states, buffers, .. } = &mut self.vectors;
        let (params, mode) = match at {
            VectorId::Perturbed => (&*perturbed, mode.without_averaging()),
            VectorId::State(i) => (&states[i], mode.without_averaging()),
            _ => (&*theta, mode),
        };
        self.ws.forward(params, buffers, &self.gathered.x, mode)?;
        self.loss = 0.0;
        Ok(())
    }

    fn backward(&mut self, batch: Batch, at: VectorId, out: usize, current: Current<'_>) -> Result<()> {
        let loss = self.loss;
        if !loss.is_finite() {
            let (round, client) = (self.vectors.download.round, current.plan.client);
            return Err(Error::NotFinite { round, client, epoch: current.step.epoch, step: current.at, loss });
        }
        match (at, batch) {
            (VectorId::Perturbed | VectorId::State(_), _) | (_, Batch::Generated) => (),
            (_, Batch::Private | Batch::Taught) => self.tally.loss_total += loss,
            (_, Batch::Memory) => {
                self.tally.memory_loss = loss;
                self.tally.stats.memory_loss_before.get_or_insert(loss);
            }
        }
        let Vectors { theta, perturbed, states, gradients, .. } = &mut self.vectors;
        while gradients.len() <= out {
            gradients.push(Buffer::zeros(theta.len()));
        }
        if let Some(head) = self.head.as_mut().filter(|_| self.is_on_head) {
            return head.backward(&mut gradients[out]);
        }
        let params = match at {
            VectorId::Perturbed => &*perturbed,
            VectorId::State(i) => &states[i],
            _ => &*theta,
        };
        Ok(self.ws.backward(params, &mut gradients[out])?)
    }

    fn update(&mut self, g: VectorId, lr_factor: f32) {
        let mut taken = self.vectors.take(g);
        if self.clip > 0.0 {
            clip_norm(self.ws.cpu(), &mut taken, self.clip);
        }
        self.optimizer.step(self.ws.cpu(), &mut self.vectors.theta, &taken, lr_factor);
        self.vectors.put_back(g, taken);
    }

    fn update_projected(
        &mut self,
        g: VectorId,
        r: VectorId,
        rule: &ProjectionRule,
        current: Current<'_>,
    ) -> Result<()> {
        // u = θ_before − θ_after takes the gradient's part; then θ = θ_before − u.
        let (mut before, mut u) = self.vectors.take_moved();
        before.copy_from_slice(&self.vectors.theta);
        self.update(g, current.step.lr_factor);
        u.copy_from_slice(&before);
        vector::axpy(self.ws.cpu(), -1.0, &self.vectors.theta, &mut u);
        let projected = self.project(&mut u, r, rule, current);
        if matches!(projected, Ok(true)) {
            self.vectors.theta.copy_from_slice(&before);
            vector::axpy(self.ws.cpu(), -1.0, &u, &mut self.vectors.theta);
        }
        self.vectors.moved = Some((before, u));
        projected.map(drop)
    }

    /// Projects g against r by the rule; whether it did.
    fn project(&mut self, g: &mut [f32], r: VectorId, rule: &ProjectionRule, current: Current<'_>) -> Result<bool> {
        let whole = Conflict::between(self.ws.cpu(), g, self.vectors.get(r));
        let norms = (whole.squared_norm * vector::squared_norm(self.ws.cpu(), g)).sqrt();
        self.tally.stats.n_compared += 1;
        self.tally.cosine_total += if norms > 0.0 { whole.dot / norms } else { 0.0 };
        if rule.from_round_start && self.tally.memory_loss < self.memory_loss(VectorId::RoundStart, current.feeds)? {
            return Ok(false);
        }
        let (cpu, r) = (self.ws.cpu(), self.vectors.get(r));
        let active = match rule.scope {
            Scope::Global => whole.resolve(cpu, g, r, &rule.bounds),
            Scope::Layer => {
                let mut active = false;
                for range in self.vectors.tensors.iter().cloned() {
                    let (g, r) = (&mut g[range.clone()], &r[range]);
                    active |= Conflict::between(cpu, g, r).resolve(cpu, g, r, &rule.bounds);
                }
                active
            }
        };
        self.tally.stats.n_projected += u32::from(active);
        Ok(active)
    }

    /// Memory loss of θ on the plan's first memory batch.
    pub fn first_memory_loss(&mut self, plan: &LocalPlan, feeds: &Feeds<'_>) -> Result<f64> {
        let Some(feed) = &feeds.memory else { return Ok(0.0) };
        self.gathered.gather(feed, plan.memory[..plan.memory_batch].iter().copied(), &[]);
        self.memory_loss(VectorId::Weights, feeds)
    }

    /// Memory loss of θ or its start on the gathered batch; batch-norm as in the gradient, without moving averages.
    fn memory_loss(&mut self, weights: VectorId, feeds: &Feeds<'_>) -> Result<f64> {
        let norm = feeds.memory.as_ref().map_or(NormMode::Frozen, |feed| feed.norm);
        let mode = Mode { norm, dropout: Dropout::Off }.without_averaging();
        let (params, buffers) = self.vectors.model(weights);
        self.ws.forward(params, buffers, &self.gathered.x, mode)?;
        let mut loss = 0.0;
        for term in &feeds.memory_objective {
            loss += self.gathered.add_term(&mut self.ws, term)?;
        }
        Ok(loss)
    }
}
