//! A client's local training on one CPU thread: what stands behind [`Step`].

mod backend;
mod gradient;
mod vectors;

use crate::config::LocalConfig;
use crate::error::Result;
use crate::experiment::Experiment;
use crate::memory::{Cursor, MemoryConfig, Targets};
use crate::method::Method;
use crate::step::{Finish, Place, Step};
use fedproj_nn::{Buffer, Cpu, NodeId, Optimizer, Options, Workspace};
use fedproj_rng::{Purpose, Stream};
use prost::Message;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Vectors that a client keeps between rounds, by name.
pub type ClientState = BTreeMap<String, Vec<f32>>;

/// What names a vector inside a trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VectorId {
    Weights,
    RoundStart,
    Gradient(usize),
    State(usize),
    Broadcast(usize),
    Upload(usize),
}

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
}

/// What a client sends back, and what it keeps.
#[derive(Debug)]
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

/// The local training of clients one after another, for whoever is not the simulator: a node trains its one client.
#[derive(Debug)]
pub struct LocalTraining(Trainer);

impl LocalTraining {
    /// Memory for clients of this experiment.
    ///
    /// # Errors
    /// If the network cannot be laid out.
    pub fn new(experiment: &Arc<Experiment>, method: &dyn Method) -> Result<Self> {
        Trainer::new(experiment, method).map(Self)
    }

    /// Trains one client from what it received and what it keeps.
    ///
    /// # Errors
    /// If its loss leaves the finite numbers.
    pub fn run(
        &mut self,
        method: &dyn Method,
        download: &Arc<Download>,
        client: u32,
        state: ClientState,
    ) -> Result<ClientResult> {
        self.0.train(method, download, client, state)
    }
}

/// Memory and state of one thread that trains clients one after another.
#[derive(Debug)]
pub(crate) struct Trainer {
    experiment: Arc<Experiment>,
    memory_config: Option<MemoryConfig>,
    truncates_memory: bool,
    ws: Workspace,
    /// Made when a method first asks for an embedding.
    embed_ws: Option<Workspace>,
    optimizer: Optimizer,
    lr_factor: f32,
    lr_factor_total: f64,
    download: Arc<Download>,
    theta: Buffer,
    buffers: Vec<f32>,
    gradients: Vec<Buffer>,
    n_gradients: usize,
    broadcasts: Vec<(String, Buffer)>,
    states: Vec<(String, Buffer)>,
    uploads: Vec<(String, Buffer)>,
    samples: Vec<u32>,
    /// Positions in `samples` of the current batch.
    positions: Vec<u32>,
    cursor: Option<Cursor>,
    x: Vec<f32>,
    indices: Vec<u32>,
    labels: Vec<u32>,
    target_logits: Vec<f32>,
    target_features: Vec<f32>,
    /// Memory loss of the last memory gradient.
    memory_loss: f64,
    /// Embeddings of all samples of the client, computed once a round.
    embeddings: Vec<(VectorId, NodeId, Vec<f32>)>,
    embedded: Vec<Vec<f32>>,
    stats: LocalStats,
    cosine_total: f64,
    loss_total: f64,
}

impl Trainer {
    pub fn new(experiment: &Arc<Experiment>, method: &dyn Method) -> Result<Self> {
        let (graph, local) = (&experiment.graph, &experiment.config.local);
        let memory_config = method.memory().cloned();
        let batch = memory_config.as_ref().map_or(local.batch, |m| m.batch.min(m.size).max(local.batch));
        let taps = method.taps(graph);
        let options = Options { batch, taps: &taps, training: true };
        let n = graph.params().len();
        Ok(Self {
            ws: Workspace::new(graph, &options, Cpu::new(1))?,
            embed_ws: None,
            optimizer: Optimizer::new(local.optimizer.rule(), n)?,
            lr_factor: 1.0,
            lr_factor_total: 0.0,
            download: Arc::default(),
            theta: Buffer::zeros(n),
            buffers: Vec::new(),
            gradients: Vec::new(),
            n_gradients: 0,
            broadcasts: Vec::new(),
            states: Vec::new(),
            uploads: Vec::new(),
            samples: Vec::new(),
            positions: Vec::new(),
            cursor: None,
            x: Vec::new(),
            indices: Vec::new(),
            labels: Vec::new(),
            target_logits: Vec::new(),
            target_features: Vec::new(),
            memory_loss: 0.0,
            embeddings: Vec::new(),
            embedded: Vec::new(),
            stats: LocalStats::default(),
            cosine_total: 0.0,
            loss_total: 0.0,
            memory_config,
            truncates_memory: method.truncates_memory(),
            experiment: Arc::clone(experiment),
        })
    }

    /// The local training of one client.
    pub fn train(
        &mut self,
        method: &dyn Method,
        download: &Arc<Download>,
        client: u32,
        state: ClientState,
    ) -> Result<ClientResult> {
        let experiment = Arc::clone(&self.experiment);
        let config = &experiment.config;
        self.begin(download, client, state);
        let mut place = Place {
            seed: config.seed,
            round: download.round,
            n_rounds: config.federation.rounds,
            client,
            epoch: 0,
            step: 0,
        };
        let start = std::time::Instant::now();
        for epoch in 0..config.local.epochs {
            place.epoch = epoch;
            let ids = [download.round, client, epoch];
            let order = Stream::new(config.seed, Purpose::BatchOrder, ids).permutation(self.samples.len());
            self.lr_factor = config.local.schedule.factor(epoch, config.local.epochs);
            for positions in order.chunks(config.local.batch) {
                self.positions.clear();
                self.positions.extend_from_slice(positions);
                self.n_gradients = 0;
                method.local_step(&mut Step { trainer: self, place })?;
                place.step += 1;
            }
        }
        if self.stats.memory_loss_before.is_some() {
            self.stats.memory_loss_after = Some(self.first_memory_loss(place)?);
        }
        method.finish_local(&mut Finish { trainer: self });
        self.stats.seconds = start.elapsed().as_secs_f64();
        Ok(self.end(client, place.step))
    }

    fn begin(&mut self, download: &Arc<Download>, client: u32, state: ClientState) {
        self.download = Arc::clone(download);
        self.theta.copy_from_slice(&download.weights);
        self.buffers.clear();
        self.buffers.extend_from_slice(&download.buffers);
        self.optimizer.reset();
        self.lr_factor_total = 0.0;
        self.samples = self.experiment.partition.indices(client as usize).into_owned();
        self.broadcasts = download.vectors.iter().map(|(name, v)| (name.clone(), Buffer::from(&v[..]))).collect();
        self.states = state.into_iter().map(|(name, v)| (name, Buffer::from(&v[..]))).collect();
        self.uploads.clear();
        self.embeddings.clear();
        self.stats = LocalStats::default();
        (self.cosine_total, self.loss_total) = (0.0, 0.0);
        self.cursor = match (&self.memory_config, &download.memory) {
            (Some(config), Some((indices, _))) => {
                Some(Cursor::new(self.experiment.config.seed, download.round, client, indices.len(), config.batch))
            }
            _ => None,
        };
    }

    fn end(&mut self, client: u32, n_steps: u32) -> ClientResult {
        let mut stats = std::mem::take(&mut self.stats);
        stats.loss = self.loss_total / f64::from(n_steps.max(1));
        stats.cosine = (stats.n_compared > 0).then(|| self.cosine_total / f64::from(stats.n_compared));
        ClientResult {
            client,
            n_samples: self.samples.len(),
            n_steps,
            weights: self.theta.to_vec(),
            buffers: self.buffers.clone(),
            uploads: self.uploads.drain(..).map(|(name, v)| (name, v.to_vec())).collect(),
            state: self.states.drain(..).map(|(name, v)| (name, v.to_vec())).collect(),
            stats,
        }
    }
}

impl LocalConfig {
    fn clip_norm(&self) -> Option<f32> {
        (self.clip > 0.0).then_some(self.clip)
    }
}

/// The name under which a kept model's buffers are kept.
pub(crate) fn buffers_name(model: &str) -> String {
    format!("{model}.buffers")
}
