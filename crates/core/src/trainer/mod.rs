//! A client's local training on one CPU thread: a plan, and the executor that runs it.

mod batch;
mod executor;
mod head;
mod student;
#[cfg(test)]
mod tests;
mod vectors;

use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::halves::Stop;
use crate::memory::{MemoryConfig, TargetTables, Targets};
use crate::method::{LOGITS, Method};
use crate::own::Own;
use crate::plan::{LocalPlan, Planner, VectorId};
use crate::step::Term;
use batch::Feed;
use executor::{Executor, Feeds};
use fedproj_nn::{Buffer, Cpu, Mode, NodeId, NormMode, Optimizer, Options, Workspace};
use head::Head;
use prost::Message;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
pub(crate) use student::CpuStudent;
use vectors::Vectors;

/// Vectors that a client keeps between rounds, by name.
pub type ClientState = BTreeMap<String, Vec<f32>>;

/// What the clients of a simulation keep, by client.
pub type ClientStates = BTreeMap<u32, ClientState>;

/// What the server sends to every client of a round.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Download {
    /// Round, counted from 0.
    pub round: u32,
    /// The global weights θ_g.
    pub weights: Vec<f32>,
    /// Their buffers.
    pub buffers: Vec<f32>,
    /// Further vectors, by name.
    pub vectors: BTreeMap<String, Vec<f32>>,
    /// The memory: public samples and targets for all of the public set.
    pub memory: Option<(Vec<u32>, Arc<Targets>)>,
    /// Where each client of the round starts from weights of its own: those. Empty: all start from `weights`.
    pub personal: BTreeMap<u32, Vec<f32>>,
}

impl Download {
    /// The weights that a client receives.
    pub(crate) fn weights_of(&self, client: u32) -> Result<&[f32]> {
        match self.personal.get(&client) {
            Some(own) => Ok(own),
            None if self.personal.is_empty() => Ok(&self.weights),
            None => {
                let problem = format!("it has no weights for client {client}, which was not drawn");
                Err(Error::Message { what: "a download for this client", problem })
            }
        }
    }

    /// Values that a real federation would send: weights and buffers if these travel, a method's vectors, and the memory's
    /// indices and targets, of `n_public` samples in all.
    pub(crate) fn n_floats(&self, n_public: usize, with_model: bool) -> usize {
        let memory = self.memory.as_ref().map_or(0, |(indices, targets)| {
            indices.len() * (1 + (targets.logits.len() + targets.features.len()) / n_public)
        });
        let model = if with_model { self.weights.len() + self.buffers.len() } else { 0 };
        model + self.vectors.values().map(Vec::len).sum::<usize>() + memory
    }
}

/// What a client sends back, and what it keeps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClientResult {
    /// The client.
    pub client: u32,
    /// Its samples n_k.
    pub n_samples: usize,
    /// Local steps τ_k.
    pub n_steps: u32,
    /// Its weights θ_k.
    pub weights: Vec<f32>,
    /// Its buffers.
    pub buffers: Vec<f32>,
    /// Further vectors that a method uploads.
    pub uploads: BTreeMap<String, Vec<f32>>,
    /// What it keeps for its next round.
    pub state: ClientState,
    /// What was measured on the way.
    pub stats: LocalStats,
}

/// Measurements of a client's local training. They travel from a node to its server; field numbers are never reused.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
pub struct LocalStats {
    /// Mean loss over the local steps.
    #[prost(double, tag = "1")]
    pub loss: f64,
    /// Steps that used the memory.
    #[prost(uint32, tag = "2")]
    pub n_compared: u32,
    /// Steps with a projected gradient.
    #[prost(uint32, tag = "3")]
    pub n_projected: u32,
    /// Mean cosine of gradient and memory gradient over the compared steps.
    #[prost(double, optional, tag = "4")]
    pub cosine: Option<f64>,
    /// Memory loss on the client's first memory batch, before local training.
    #[prost(double, optional, tag = "5")]
    pub memory_loss_before: Option<f64>,
    /// The same loss after local training.
    #[prost(double, optional, tag = "6")]
    pub memory_loss_after: Option<f64>,
    /// Seconds of local training.
    #[prost(double, tag = "7")]
    pub seconds: f64,
}

/// One thread that trains clients one after another: it plans a client's round, then executes it.
#[derive(Debug)]
pub(crate) struct Trainer {
    experiment: Arc<Experiment>,
    memory: Option<MemoryConfig>,
    memory_objective: Vec<Term>,
    truncates_memory: bool,
    planner: Planner,
    executor: Executor,
    taps: Vec<NodeId>,
    own: Own,
    /// Made when a plan first has an embedding.
    embed_ws: Option<Workspace>,
}

impl Trainer {
    pub fn new(experiment: &Arc<Experiment>, method: &dyn Method) -> Result<Self> {
        let (graph, local) = (&experiment.graph, &experiment.config.local);
        let planner = Planner::new(experiment, method);
        let taps = method.taps(graph);
        let options = Options { batch: planner.batch_max(), taps: &taps, training: true };
        let ws = Workspace::new(graph, &options, Cpu::new(1))?;
        let optimizer = Optimizer::new(local.optimizer.rule(), graph.params().len())?;
        let mut executor = Executor::new(ws, optimizer, local.clip);
        if let Some(generator) = method.generator() {
            executor.head = Some(Head::new(generator, graph, planner.features_max())?);
        }
        Ok(Self {
            experiment: Arc::clone(experiment),
            memory: method.memory().cloned(),
            memory_objective: method.memory_objective(),
            truncates_memory: method.truncates_memory(),
            planner,
            executor,
            taps,
            own: Own::new(method, graph),
            embed_ws: None,
        })
    }

    /// Ends training within a client when asked.
    pub fn stop_with(&mut self, stop: &Stop) {
        self.executor.stop = stop.clone();
    }

    /// The local training of one client.
    pub fn train(
        &mut self,
        method: &dyn Method,
        download: &Arc<Download>,
        client: u32,
        state: &ClientState,
    ) -> Result<ClientResult> {
        let start = std::time::Instant::now();
        self.planner.receive(download);
        let plan = self.planner.plan(method, download, client, state)?;
        self.executor.begin(download.weights_of(client)?, &download.buffers, download);
        let Vectors { theta, buffers, .. } = &mut self.executor.vectors;
        self.own.restore(state, theta, buffers)?;
        self.place_vectors(&plan, download, state)?;
        self.embed(&plan)?;
        let Self { experiment, memory, memory_objective, truncates_memory, planner, executor, .. } = self;
        let mut feeds = feeds(experiment, (memory.as_ref(), memory_objective), *truncates_memory, download);
        if planner.has_logits() {
            feeds.own.targets.logits = &download.vectors[LOGITS];
        }
        executor.run(&plan, &planner.programs, &feeds)?;
        if executor.tally.stats.memory_loss_before.is_some() {
            executor.tally.stats.memory_loss_after = Some(executor.first_memory_loss(&plan, &feeds)?);
        }
        plan.finish.ops.iter().for_each(|op| executor.combine(op));
        executor.tally.stats.seconds = start.elapsed().as_secs_f64();
        Ok(self.result(&plan))
    }

    /// Vectors for every name that the plan uses.
    fn place_vectors(&mut self, plan: &LocalPlan, download: &Download, state: &ClientState) -> Result<()> {
        self.executor.gathered.offsets.clone_from(&plan.offsets);
        let (names, vectors) = (self.planner.names(), &mut self.executor.vectors);
        let (n, n_buffers) = (vectors.theta.len(), vectors.buffers.len());
        vectors.states.resize(names.states.len(), Buffer::default());
        for &at in &plan.kept {
            let len = if names.is_buffers(at) { n_buffers } else { n };
            vectors.states[at] = match state.get(&names.states[at]) {
                Some(values) => {
                    Error::check_len("a vector that the client keeps", values.len(), len)?;
                    Buffer::from(&values[..])
                }
                None => Buffer::zeros(len),
            };
        }
        let received = |name: &String| download.vectors.get(name).map(|v| Buffer::from(&v[..]));
        vectors.broadcasts = names.broadcasts.iter().map(|b| received(b).unwrap_or_else(|| Buffer::zeros(n))).collect();
        vectors.uploads.resize(names.uploads.len(), Buffer::default());
        for &at in &plan.uploaded {
            vectors.uploads[at] = Buffer::zeros(n);
        }
        Ok(())
    }

    /// Values of nodes for every sample of the client, under weights that do not move within the round.
    fn embed(&mut self, plan: &LocalPlan) -> Result<()> {
        let (experiment, names) = (&self.experiment, self.planner.names());
        let (data, batch) = (&experiment.private, experiment.config.local.batch);
        for &index in &plan.embeddings {
            if self.embed_ws.is_none() {
                let options = Options { batch, taps: &self.taps, training: false };
                self.embed_ws = Some(Workspace::new(&experiment.graph, &options, Cpu::new(1))?);
            }
            let Some(ws) = &mut self.embed_ws else { return Ok(()) };
            let (weights, node) = names.embeddings[index];
            let Executor { vectors, embeddings, .. } = &mut self.executor;
            let kept = match weights {
                VectorId::State(at) => names.buffers_of(at).filter(|b| plan.kept.contains(b)),
                _ => None,
            };
            let mut buffers = kept.map_or(&vectors.download.buffers[..], |b| &vectors.states[b]).to_vec();
            embeddings.resize(embeddings.len().max(index + 1), Vec::new());
            embeddings[index].clear();
            let mut x = vec![0.0; batch * data.sample_len()];
            for chunk in plan.samples.chunks(batch) {
                let x = &mut x[..chunk.len() * data.sample_len()];
                data.gather(chunk, x);
                ws.forward(vectors.get(weights), &mut buffers, x, Mode::EVAL)?;
                embeddings[index].extend_from_slice(ws.value(node)?);
            }
        }
        Ok(())
    }

    fn result(&mut self, plan: &LocalPlan) -> ClientResult {
        let (names, Executor { vectors, tally, .. }) = (self.planner.names(), &mut self.executor);
        let n_steps = plan.steps.len() as u32;
        let mut stats = std::mem::take(&mut tally.stats);
        stats.loss = tally.loss_total / f64::from(n_steps.max(1));
        stats.cosine = (stats.n_compared > 0).then(|| tally.cosine_total / f64::from(stats.n_compared));
        let named = |names: &[String], vectors: &[Buffer], places: &[usize]| {
            places.iter().map(|&at| (names[at].clone(), vectors[at].to_vec())).collect::<ClientState>()
        };
        let mut state = named(&names.states, &vectors.states, &plan.kept);
        self.own.keep(&vectors.theta, &vectors.buffers, &mut state);
        ClientResult {
            client: plan.client,
            n_samples: plan.samples.len(),
            n_steps,
            weights: vectors.theta.to_vec(),
            buffers: vectors.buffers.clone(),
            uploads: named(&names.uploads, &vectors.uploads, &plan.uploaded),
            state,
            stats,
        }
    }
}

/// A client's own samples, and the memory where it has one.
fn feeds<'a>(
    experiment: &'a Experiment,
    (memory, memory_objective): (Option<&MemoryConfig>, &[Term]),
    truncates_memory: bool,
    download: &'a Download,
) -> Feeds<'a> {
    let own = Feed {
        data: &experiment.private,
        norm: NormMode::Update,
        drops: true,
        truncates: false,
        targets: TargetTables::default(),
    };
    let memory_feed = match (memory, &download.memory, &experiment.public) {
        (Some(config), Some((_, targets)), Some(data)) => Some(Feed {
            data,
            norm: config.bn,
            drops: false,
            truncates: truncates_memory,
            targets: TargetTables { logits: &targets.logits, features: &targets.features, ..TargetTables::default() },
        }),
        _ => None,
    };
    Feeds { own, memory: memory_feed, memory_objective: memory_objective.to_vec() }
}
