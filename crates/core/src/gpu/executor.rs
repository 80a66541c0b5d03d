//! Execution of plans on a GPU, for clients and for a student. Each operation becomes launches for the active lanes.

use super::OnGpu;
use super::feed::Feed;
use super::head::Head;
use crate::cone;
use crate::error::{Error, Result};
use crate::halves::Stop;
use crate::plan::{LocalPlan, Names, Op, Program, VectorId};
use crate::step::{Batch, ProjectionRule, Scope, Term};
use crate::subspace;
use fedproj_nn::cuda::{Batches, Cone, Fleet, Inputs, LossOf, Moments, NOBODY, Rows, Vectors};
use fedproj_nn::{Dropout, Mode, Rule};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What the batches of plans are made of.
#[derive(Debug)]
pub(super) struct Feeds {
    /// Of [`Batch::Private`].
    pub own: Feed,
    /// Of [`Batch::Memory`].
    pub memory: Option<Feed>,
    /// The objective on the memory, for what is measured beside the steps.
    pub memory_objective: Vec<Term>,
}

/// Lanes that run programs, and the vectors behind the programs' names.
#[derive(Debug)]
pub(super) struct Executor {
    on: Arc<OnGpu>,
    pub fleet: Fleet,
    pub feeds: Feeds,
    rule: Rule,
    pub moments: Moments,
    /// Largest norm of a gradient that reaches the optimiser; 0 is no limit.
    clip: f32,
    pub theta: Vectors,
    pub buffers: Vectors,
    pub start: Vectors,
    pub start_buffers: Vectors,
    /// Weights uphill of θ; empty until a program uses them.
    perturbed: Vectors,
    /// θ before an update that is projected afterwards, and the update itself.
    before: Option<(Vectors, Vectors)>,
    /// What projections against several references need; empty until a program has one.
    cone: Option<Cone>,
    inputs: Option<Inputs>,
    gradients: Vec<Vectors>,
    pub states: Vec<Vectors>,
    pub broadcasts: Vec<Vectors>,
    pub uploads: Vec<Vectors>,
    /// Values of a node for all samples of a lane, by place in [`Names::embeddings`], and floats per sample.
    pub embeddings: Vec<(Vectors, usize)>,
    /// What runs on generated features, where there are any.
    pub head: Option<Head>,
    /// Memory batches used so far in the current step.
    n_memory: usize,
    /// Whether a loss was added for the current batch.
    has_loss: bool,
    /// Looked at before every step.
    pub stop: Stop,
}

impl Executor {
    pub fn new(on: &Arc<OnGpu>, fleet: Fleet, rule: Rule, clip: f32, feeds: Feeds) -> Result<Self> {
        let experiment = &on.experiment;
        Ok(Self {
            moments: fleet.moments(&rule)?,
            theta: fleet.vectors(experiment.weights.len())?,
            buffers: fleet.vectors(experiment.buffers.len())?,
            start: fleet.shared_vector(&experiment.weights)?,
            start_buffers: fleet.shared_vector(&experiment.buffers)?,
            perturbed: fleet.vectors(0)?,
            before: None,
            cone: None,
            inputs: None,
            gradients: Vec::new(),
            states: Vec::new(),
            broadcasts: Vec::new(),
            uploads: Vec::new(),
            embeddings: Vec::new(),
            head: None,
            n_memory: 0,
            has_loss: false,
            stop: Stop::default(),
            on: Arc::clone(on),
            fleet,
            feeds,
            rule,
            clip,
        })
    }

    /// Allocates every vector that the names and programs mention.
    pub fn make_vectors(&mut self, names: &Names, programs: &[Program]) -> Result<()> {
        let (n, n_buffers) = (self.theta.len(), self.buffers.len());
        while self.states.len() < names.states.len() {
            let len = if names.is_buffers(self.states.len()) { n_buffers } else { n };
            self.states.push(self.fleet.vectors(len)?);
        }
        while self.uploads.len() < names.uploads.len() {
            self.uploads.push(self.fleet.vectors(n)?);
        }
        while self.broadcasts.len() < names.broadcasts.len() {
            self.broadcasts.push(self.fleet.shared_vector(&vec![0.0; n])?);
        }
        let n_gradients = programs.iter().map(Program::n_gradients).max().unwrap_or(0);
        while self.gradients.len() < n_gradients {
            self.gradients.push(self.fleet.vectors(n)?);
        }
        if self.perturbed.len() == 0 && programs.iter().any(Program::perturbs) {
            self.perturbed = self.fleet.vectors(n)?;
        }
        if self.before.is_none() && programs.iter().any(Program::projects_updates) {
            self.before = Some((self.fleet.vectors(n)?, self.fleet.vectors(n)?));
        }
        self.make_constraints(programs)
    }

    fn make_constraints(&mut self, programs: &[Program]) -> Result<()> {
        let ops = || programs.iter().flat_map(|program| &program.ops);
        // Recorded launches hold the addresses, so nothing is made twice: there is room for what later programs may ask.
        if self.cone.is_none() && ops().any(|op| matches!(op, Op::ProjectToCone { .. })) {
            self.cone = Some(self.fleet.cone()?);
        }
        if self.inputs.is_none() && ops().any(|op| matches!(op, Op::ProjectInputs { .. })) {
            let products = subspace::products(self.fleet.graph())?;
            self.inputs = Some(self.fleet.inputs(products, subspace::COLUMNS_MAX)?);
        }
        Ok(())
    }

    /// The samples, rates and keys of each step. A short batch is padded to the width of the table.
    pub fn set_tables(&mut self, plans: &[LocalPlan], batch: usize) -> Result<()> {
        let padded = |plan: &LocalPlan, of: &dyn Fn(usize) -> u32| {
            let mut table = Vec::with_capacity(plan.steps.len() * batch);
            for step in &plan.steps {
                table.extend(step.batch.clone().map(of));
                table.resize(table.len().next_multiple_of(batch), NOBODY);
            }
            table
        };
        let all = |of: &dyn Fn(&LocalPlan) -> Vec<u32>| plans.iter().map(of).collect::<Vec<_>>();
        let samples = all(&|plan| padded(plan, &|at| plan.samples[plan.order[at] as usize]));
        let factors = all(&|plan| plan.steps.iter().map(|step| step.lr_factor.to_bits()).collect());
        self.fleet.set_table(Batches::Samples, &samples, batch)?;
        self.fleet.set_table(Batches::LrFactors, &factors, 1)?;
        if plans.iter().any(|plan| !plan.embeddings.is_empty()) {
            self.fleet.set_table(Batches::Positions, &all(&|plan| padded(plan, &|at| plan.order[at])), batch)?;
        }
        if self.feeds.own.moves {
            self.fleet.set_table(Batches::Moves, &all(&|plan| padded(plan, &|at| plan.moves[at])), batch)?;
        }
        if self.feeds.own.mode.dropout == Dropout::OfStep {
            let words = |key: u64| [key as u32, (key >> 32) as u32];
            let keys = all(&|plan| plan.steps.iter().flat_map(|step| words(step.dropout_key)).collect());
            self.fleet.set_table(Batches::DropoutKeys, &keys, 2)?;
        }
        if let Some(width) = plans.iter().map(|plan| plan.memory_batch).max().filter(|&width| width > 0) {
            self.fleet.set_table(Batches::Replay, &all(&|plan| plan.memory.clone()), width)?;
        }
        Ok(())
    }

    /// Runs the steps of plans, one plan per lane; lanes with the same program share its launches.
    pub fn run(&mut self, plans: &[LocalPlan], programs: &[Program]) -> Result<()> {
        let n_steps = plans.iter().map(|plan| plan.steps.len()).max().unwrap_or(0);
        for at in 0..n_steps {
            self.stop.check()?;
            // In the order of the programs.
            let mut groups: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
            for (lane, plan) in plans.iter().enumerate() {
                if let Some(step) = plan.steps.get(at) {
                    groups.entry(step.program).or_default().push(lane as u32);
                }
            }
            for (program, lanes) in groups {
                self.fleet.set_lanes(&lanes)?;
                self.head.as_mut().map_or(Ok(()), |head| head.set_lanes(&lanes))?;
                self.run_program(program as u64, &programs[program])?;
            }
        }
        Ok(())
    }

    /// Runs a program on the active lanes, or replays its launches.
    fn run_program(&mut self, key: u64, program: &Program) -> Result<()> {
        let Some(recording) = self.fleet.replay(key)? else { return Ok(()) };
        self.n_memory = 0;
        self.head.iter_mut().for_each(Head::begin_step);
        let done = program.ops.iter().try_for_each(|op| self.execute(op));
        let done = done.and_then(|()| Ok(self.fleet.advance(1, program.n_memory())?));
        // Of a step that failed, that error counts: its recording is cut off and may not end well.
        let ended = self.fleet.end_recording(recording, done.is_ok());
        done.and(ended.map_err(Error::from))
    }

    fn rows(&self, id: VectorId) -> Rows {
        match id {
            VectorId::Weights => self.theta.rows(),
            VectorId::RoundStart => self.start.rows(),
            VectorId::Perturbed => self.perturbed.rows(),
            VectorId::Gradient(i) => self.gradients[i].rows(),
            VectorId::State(i) => self.states[i].rows(),
            VectorId::Broadcast(i) => self.broadcasts[i].rows(),
            VectorId::Upload(i) => self.uploads[i].rows(),
        }
    }

    /// Runs one operation for the active lanes.
    pub fn execute(&mut self, op: &Op) -> Result<()> {
        match *op {
            Op::Forward { batch, at } => self.forward(batch, at)?,
            Op::Loss { term } => self.add_term(&term)?,
            Op::Backward { batch, at, out } => {
                let of = match (at, batch) {
                    (VectorId::Perturbed | VectorId::State(_), _) | (_, Batch::Generated) => LossOf::Other,
                    (_, Batch::Private | Batch::Taught) => LossOf::Samples,
                    (_, Batch::Memory) => LossOf::Replay,
                };
                self.fleet.record_loss(of)?;
                self.fleet.backward(self.rows(at), self.gradients[out].rows())?;
            }
            Op::Perturb { g, radius } => {
                self.fleet.ascend(self.theta.rows(), radius, self.rows(g), self.perturbed.rows())?;
            }
            Op::Embed { index } => {
                let (values, row) = &self.embeddings[index];
                self.fleet.gather_embedding(values, *row, index)?;
            }
            Op::AddScaled { y, a, x } => self.fleet.axpy(a, self.rows(x), self.rows(y))?,
            Op::Assign { y, x } => self.fleet.assign(self.rows(x), self.rows(y), self.theta.len())?,
            Op::AddScaledDiff { g, a, x, y } => {
                self.fleet.axpy_difference(a, self.rows(x), self.rows(y), self.rows(g))?;
            }
            Op::Clip { g, norm_max } => self.fleet.clip(self.rows(g), norm_max)?,
            Op::Project { g, r, rule } => {
                if rule.from_round_start {
                    self.memory_loss(VectorId::RoundStart)?;
                }
                let (g, r) = (self.rows(g), self.rows(r));
                self.project(g, r, &rule, g, 1.0)?;
            }
            Op::ProjectToCone { g, first, n } => {
                let Some(cone) = &self.cone else { return Ok(()) };
                let references: Vec<Rows> = self.gradients[first..first + n].iter().map(Vectors::rows).collect();
                self.fleet.project_to_cone(cone, self.rows(g), &references, cone::SEARCH)?;
            }
            Op::ProjectInputs { g, first, n, scales } => {
                let Some(inputs) = &self.inputs else { return Ok(()) };
                let directions: Vec<Rows> = self.broadcasts[first..first + n].iter().map(Vectors::rows).collect();
                let (g, theta, trust) = (self.rows(g), self.theta.rows(), scales.then_some(subspace::TRUST));
                self.fleet.project_inputs(inputs, g, theta, &directions, trust)?;
            }
            Op::Update { g } => self.update(g)?,
            Op::UpdateProjected { g, r, rule } => self.update_projected(g, r, &rule)?,
            Op::KeepModel { weights, buffers } => {
                self.fleet.assign(self.theta.rows(), self.states[weights].rows(), self.theta.len())?;
                self.fleet.assign(self.buffers.rows(), self.states[buffers].rows(), self.buffers.len())?;
            }
        }
        Ok(())
    }

    fn forward(&mut self, batch: Batch, at: VectorId) -> Result<()> {
        self.has_loss = false;
        let (weights, buffers) = (self.rows(at), self.buffers.rows());
        if let (Batch::Taught | Batch::Generated, Some(head)) = (batch, &mut self.head) {
            head.forward(&mut self.fleet, batch, weights, buffers)?;
            if batch == Batch::Taught {
                // The pass on the client's own samples overwrites the head's values.
                self.fleet.keep_logits()?;
            }
        }
        let (feed, table, offset) = match batch {
            Batch::Generated => return Ok(()),
            // The server's logits of the batch, where it sent some, are rows of the feed's targets.
            Batch::Private | Batch::Taught => (Some(&self.feeds.own), Batches::Samples, 0),
            Batch::Memory => (self.feeds.memory.as_ref(), Batches::Replay, self.n_memory),
        };
        let Some(feed) = feed else { return Ok(()) };
        feed.gather(&self.on, &mut self.fleet, table, offset)?;
        self.n_memory += usize::from(batch == Batch::Memory);
        let mode = if at == VectorId::Weights { feed.mode } else { feed.mode.without_averaging() };
        Ok(self.fleet.forward(weights, buffers, mode)?)
    }

    /// Adds a term to the objective of the batch gathered last.
    fn add_term(&mut self, term: &Term) -> Result<()> {
        let n = term.at.n_nodes(self.fleet.graph());
        for index in 0..n {
            let Some(node) = term.at.node(self.fleet.graph(), index) else { break };
            let first = !std::mem::replace(&mut self.has_loss, true);
            self.fleet.add_loss(node, &term.loss, term.weight / n as f32, first)?;
        }
        Ok(())
    }

    /// Measures g against r. Adds `sign` times the projection's change of g to `to`.
    fn project(&self, g: Rows, r: Rows, rule: &ProjectionRule, to: Rows, sign: f32) -> Result<()> {
        let by_tensor = rule.scope == Scope::Layer;
        Ok(self.fleet.project(g, r, &rule.bounds, by_tensor, rule.from_round_start, to, sign)?)
    }

    fn update_projected(&mut self, g: VectorId, r: VectorId, rule: &ProjectionRule) -> Result<()> {
        let Some((before, moved)) = &self.before else { return Ok(()) };
        let (before, moved, theta) = (before.rows(), moved.rows(), self.theta.rows());
        let n = self.theta.len();
        self.fleet.assign(theta, before, n)?;
        self.update(g)?;
        if rule.from_round_start {
            self.memory_loss(VectorId::RoundStart)?;
        }
        // u = θ_before − θ_after replaces the gradient, so the change of u is subtracted from θ.
        self.fleet.clear(moved, n)?;
        self.fleet.axpy_difference(1.0, before, theta, moved)?;
        self.project(moved, self.rows(r), rule, theta, -1.0)
    }

    fn update(&self, g: VectorId) -> Result<()> {
        let g = self.rows(g);
        if self.clip > 0.0 {
            self.fleet.clip(g, self.clip)?;
        }
        Ok(self.fleet.update(&self.rule, &self.moments, self.theta.rows(), g)?)
    }

    /// The memory loss of θ on the lanes' first memory batches.
    pub fn first_memory_loss(&mut self) -> Result<()> {
        let Some(feed) = &self.feeds.memory else { return Ok(()) };
        feed.gather(&self.on, &mut self.fleet, Batches::Replay, 0)?;
        self.memory_loss(VectorId::Weights)
    }

    /// The memory loss of θ or its start on the batch gathered last. As on the CPU: batch-norm as in the gradient, but the
    /// running averages stay unchanged.
    fn memory_loss(&mut self, weights: VectorId) -> Result<()> {
        let Some(feed) = &self.feeds.memory else { return Ok(()) };
        let mode = Mode { norm: feed.mode.norm, dropout: Dropout::Off }.without_averaging();
        let buffers = if weights == VectorId::RoundStart { &self.start_buffers } else { &self.buffers };
        self.fleet.forward(self.rows(weights), buffers.rows(), mode)?;
        self.has_loss = false;
        for at in 0..self.feeds.memory_objective.len() {
            let term = self.feeds.memory_objective[at];
            self.add_term(&term)?;
        }
        Ok(self.fleet.record_loss(LossOf::Reference)?)
    }
}
