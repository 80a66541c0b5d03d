//! A client's local training on one CPU thread: the vectors behind the handles of [`Step`](crate::Step).

use crate::config::LocalConfig;
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::memory::{Cursor, MemoryConfig, Targets};
use crate::method::Method;
use crate::step::{Batch, Finish, Place, ProjectionRule, Scope, Step, Term};
use crate::terms;
use fedproj_nn::{Buffer, Cpu, Graph, Loss, Mode, NodeId, Optimizer, Options, Workspace, clip_norm, vector};
use fedproj_rng::{Purpose, Stream};
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
#[derive(Debug, Default)]
pub(crate) struct Download {
    pub round: u32,
    pub weights: Vec<f32>,
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

/// Measurements of a client's local training.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LocalStats {
    /// Mean loss over the local steps.
    pub loss: f64,
    /// Steps that looked at the memory.
    pub n_compared: u32,
    /// Steps whose gradient was projected.
    pub n_projected: u32,
    /// Mean cosine of gradient and memory gradient, over those compared.
    pub cosine: Option<f64>,
    /// Memory loss on the client's first memory batch, before and after local training.
    pub memory_loss_before: Option<f64>,
    /// See above.
    pub memory_loss_after: Option<f64>,
    /// Seconds of local training.
    pub seconds: f64,
}

/// Memory and state of one thread that trains clients one after another.
#[derive(Debug)]
pub(crate) struct Trainer {
    experiment: Arc<Experiment>,
    memory_config: Option<MemoryConfig>,
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

    pub fn graph(&self) -> &Graph {
        &self.experiment.graph
    }

    pub fn has_memory(&self) -> bool {
        self.cursor.is_some()
    }

    /// A dropout key of this step's own.
    fn dropout_key(place: Place) -> u64 {
        Stream::new(place.seed, Purpose::Dropout, [place.round, place.client, place.step]).next_u64()
    }

    pub fn gradient(&mut self, place: Place, batch: Batch, objective: &[Term]) -> Result<VectorId> {
        let mode = match batch {
            Batch::Private => {
                self.gather_private();
                Mode::train(Self::dropout_key(place))
            }
            Batch::Memory => {
                self.gather_memory();
                let bn = self.memory_config.as_ref().map_or(Mode::EVAL.norm, |m| m.bn.mode());
                Mode { norm: bn, dropout: None }
            }
        };
        self.ws.forward(&self.theta, &mut self.buffers, &self.x, mode)?;
        let mut loss = 0.0;
        for term in objective {
            loss += self.add_term(term)?;
        }
        if !loss.is_finite() {
            let Place { round, client, epoch, step, .. } = place;
            return Err(Error::NotFinite { round, client, epoch, step, loss });
        }
        match batch {
            Batch::Private => self.loss_total += loss,
            Batch::Memory => {
                self.memory_loss = loss;
                self.stats.memory_loss_before.get_or_insert(loss);
            }
        }
        let id = self.n_gradients;
        self.n_gradients += 1;
        if self.gradients.len() == id {
            self.gradients.push(Buffer::zeros(self.theta.len()));
        }
        self.ws.backward(&self.theta, &mut self.gradients[id])?;
        Ok(VectorId::Gradient(id))
    }

    fn gather_private(&mut self) {
        let data = &self.experiment.private;
        self.indices.clear();
        self.indices.extend(self.positions.iter().map(|&p| self.samples[p as usize]));
        self.x.resize(self.indices.len() * data.sample_len(), 0.0);
        data.gather(&self.indices, &mut self.x);
        let labels = data.labels().unwrap_or(&[]);
        self.labels.clear();
        self.labels.extend(self.indices.iter().map(|&i| labels[i as usize]));
    }

    fn gather_memory(&mut self) {
        let (Some(cursor), Some((memory, targets)), Some(public)) =
            (&mut self.cursor, &self.download.memory, &self.experiment.public)
        else {
            return;
        };
        cursor.next(memory, &mut self.indices);
        self.x.resize(self.indices.len() * public.sample_len(), 0.0);
        public.gather(&self.indices, &mut self.x);
        gather_rows(&targets.logits, public.n_samples(), &self.indices, &mut self.target_logits);
        gather_rows(&targets.features, public.n_samples(), &self.indices, &mut self.target_features);
        if self.memory_config.as_ref().is_some_and(|m| m.integer_cast) {
            self.x.iter_mut().chain(&mut self.target_logits).for_each(|v| *v = v.trunc());
        }
    }

    fn add_term(&mut self, term: &Term) -> Result<f64> {
        let output = self.ws.graph().output();
        match *term {
            Term::CrossEntropy => Ok(self.ws.add_loss(output, &Loss::CrossEntropy { labels: &self.labels }, 1.0)?),
            Term::MemoryKl { temperature } => {
                Ok(self.ws.add_loss(output, &Loss::kl(&self.target_logits, temperature), 1.0)?)
            }
            Term::MemoryFeatures { weight } => {
                let Some(node) = self.ws.graph().features() else { return Ok(0.0) };
                let dim = self.ws.graph().shape(node).len();
                let target = &self.target_features;
                let loss = self.ws.inject(node, |f, grad| terms::masked_squares(dim, f, target, weight, grad))?;
                Ok(f64::from(weight) * loss)
            }
            Term::ModelContrast { node, positive, negative, temperature, weight } => {
                let dim = self.ws.graph().shape(node).len();
                let (p, q) = (&self.embedded[positive.0], &self.embedded[negative.0]);
                let contrast = |z: &[f32], g: &mut [f32]| terms::model_contrast(dim, z, p, q, temperature, weight, g);
                Ok(f64::from(weight) * self.ws.inject(node, contrast)?)
            }
            Term::RelaxedContrast(constants) => {
                let levels = self.ws.graph().levels().to_vec();
                let mut total = 0.0;
                for &node in &levels {
                    let shape = self.ws.graph().shape(node);
                    let (labels, scale) = (&self.labels, 1.0 / levels.len() as f32);
                    total += self.ws.inject(node, |value, grad| {
                        pooled(shape.pixels(), shape.c, value, grad, |f, g| {
                            terms::relaxed_contrast(&constants, shape.c, f, labels, scale, g)
                        })
                    })?;
                }
                Ok(total / levels.len().max(1) as f64)
            }
        }
    }

    /// Memory loss on the client's first memory batch, as it is before its first step.
    fn first_memory_loss(&mut self, place: Place) -> Result<f64> {
        let (Some(config), Some((memory, _))) = (self.memory_config.clone(), &self.download.memory) else {
            return Ok(0.0);
        };
        self.cursor = Some(Cursor::new(place.seed, place.round, place.client, memory.len(), config.batch));
        self.gather_memory();
        self.loss_of_gathered(VectorId::Weights, &config)
    }

    /// Memory loss of some weights on the gathered memory batch; batch-norm as in the gradient, without moving averages.
    fn loss_of_gathered(&mut self, weights: VectorId, config: &MemoryConfig) -> Result<f64> {
        let norm = match config.bn.mode() {
            fedproj_nn::NormMode::Update => fedproj_nn::NormMode::Batch,
            other => other,
        };
        let (params, buffers) = match weights {
            VectorId::RoundStart => (&self.download.weights[..], &self.download.buffers),
            _ => (&self.theta[..], &self.buffers),
        };
        let mut buffers = buffers.clone();
        self.ws.forward(params, &mut buffers, &self.x, Mode { norm, dropout: None })?;
        Ok(Loss::kl(&self.target_logits, config.temperature).value(self.indices.len(), self.ws.output())?)
    }

    pub fn embed(&mut self, weights: VectorId, node: NodeId) -> Result<usize> {
        let cached = self.embeddings.iter().position(|(id, n, _)| (*id, *n) == (weights, node));
        let at = if let Some(at) = cached {
            at
        } else {
            let all = self.embed_all(weights, node)?;
            self.embeddings.push((weights, node, all));
            self.embeddings.len() - 1
        };
        if self.embedded.len() <= at {
            self.embedded.resize(at + 1, Vec::new());
        }
        gather_rows(&self.embeddings[at].2, self.samples.len(), &self.positions, &mut self.embedded[at]);
        Ok(at)
    }

    /// A node's values for every sample of the client: the weights do not change within the round.
    fn embed_all(&mut self, weights: VectorId, node: NodeId) -> Result<Vec<f32>> {
        let (data, batch) = (&self.experiment.private, self.experiment.config.local.batch);
        if self.embed_ws.is_none() {
            let options = Options { batch, taps: &[node], training: false };
            self.embed_ws = Some(Workspace::new(&self.experiment.graph, &options, Cpu::new(1))?);
        }
        let Some(ws) = &mut self.embed_ws else { return Ok(Vec::new()) };
        let (params, buffers) = match weights {
            VectorId::State(i) => {
                let name = buffers_name(&self.states[i].0);
                let buffers = self.states.iter().find(|(n, _)| *n == name).map(|(_, b)| b.to_vec());
                (&self.states[i].1[..], buffers)
            }
            VectorId::Weights => (&self.theta[..], Some(self.buffers.clone())),
            _ => (&self.download.weights[..], None),
        };
        let mut buffers = buffers.unwrap_or_else(|| self.download.buffers.clone());
        let mut all = Vec::new();
        let mut x = vec![0.0; batch * data.sample_len()];
        for chunk in self.samples.chunks(batch) {
            let x = &mut x[..chunk.len() * data.sample_len()];
            data.gather(chunk, x);
            ws.forward(params, &mut buffers, x, Mode::EVAL)?;
            all.extend_from_slice(ws.value(node)?);
        }
        Ok(all)
    }

    pub fn broadcast_id(&mut self, name: &str) -> VectorId {
        VectorId::Broadcast(find_or_zeros(&mut self.broadcasts, name, self.theta.len()))
    }

    pub fn state_id(&mut self, name: &str) -> VectorId {
        VectorId::State(find_or_zeros(&mut self.states, name, self.theta.len()))
    }

    pub fn upload_id(&mut self, name: &str) -> VectorId {
        VectorId::Upload(find_or_zeros(&mut self.uploads, name, self.theta.len()))
    }

    pub fn kept_model(&self, name: &str) -> Option<VectorId> {
        self.states.iter().position(|(n, _)| n == name).map(VectorId::State)
    }

    pub fn keep_model(&mut self, name: &str) {
        self.states.retain(|(n, _)| *n != name && *n != buffers_name(name));
        self.states.push((name.to_owned(), self.theta.clone()));
        self.states.push((buffers_name(name), Buffer::from(&self.buffers[..])));
    }

    pub fn lr_total(&self) -> f32 {
        (self.lr_factor_total * f64::from(self.experiment.config.local.optimizer.lr)) as f32
    }

    fn vector(&self, id: VectorId) -> &[f32] {
        match id {
            VectorId::Weights => &self.theta,
            VectorId::RoundStart => &self.download.weights,
            VectorId::Gradient(i) => &self.gradients[i],
            VectorId::State(i) => &self.states[i].1,
            VectorId::Broadcast(i) => &self.broadcasts[i].1,
            VectorId::Upload(i) => &self.uploads[i].1,
        }
    }

    pub fn add_scaled(&mut self, y: VectorId, a: f32, x: VectorId) {
        let mut to = self.take(y);
        // A client trains on one thread: its vector operations need no team.
        vector::axpy(&mut Cpu::with_isa(1, self.ws.isa()), a, self.vector(x), &mut to);
        self.put_back(y, to);
    }

    pub fn add_scaled_diff(&mut self, g: VectorId, a: f32, x: VectorId, y: VectorId) {
        let mut to = self.take(g);
        let cpu = &mut Cpu::with_isa(1, self.ws.isa());
        vector::axpy_difference(cpu, a, self.vector(x), self.vector(y), &mut to);
        self.put_back(g, to);
    }

    /// Takes out a vector that is written to while others are read; its memory stays where it is.
    fn take(&mut self, id: VectorId) -> Buffer {
        match id {
            VectorId::Gradient(i) => std::mem::take(&mut self.gradients[i]),
            VectorId::State(i) => std::mem::take(&mut self.states[i].1),
            VectorId::Upload(i) => std::mem::take(&mut self.uploads[i].1),
            VectorId::Weights | VectorId::RoundStart | VectorId::Broadcast(_) => {
                unreachable!("weights move by `update` alone, and what was received stays as it is")
            }
        }
    }

    fn put_back(&mut self, id: VectorId, vector: Buffer) {
        match id {
            VectorId::Gradient(i) => self.gradients[i] = vector,
            VectorId::State(i) => self.states[i].1 = vector,
            VectorId::Upload(i) => self.uploads[i].1 = vector,
            VectorId::Weights | VectorId::RoundStart | VectorId::Broadcast(_) => (),
        }
    }

    pub fn clip(&mut self, g: VectorId, norm_max: f32) {
        if let VectorId::Gradient(i) = g {
            clip_norm(self.ws.cpu(), &mut self.gradients[i], norm_max);
        }
    }

    pub fn update(&mut self, g: VectorId) {
        let VectorId::Gradient(i) = g else { return };
        if let Some(norm_max) = self.experiment.config.local.clip_norm() {
            clip_norm(self.ws.cpu(), &mut self.gradients[i], norm_max);
        }
        self.optimizer.step(self.ws.cpu(), &mut self.theta, &self.gradients[i], self.lr_factor);
        self.lr_factor_total += f64::from(self.lr_factor);
    }

    pub fn project(&mut self, g: VectorId, r: VectorId, rule: &ProjectionRule) -> Result<()> {
        let (VectorId::Gradient(gi), VectorId::Gradient(ri)) = (g, r) else { return Ok(()) };
        let mut g = std::mem::take(&mut self.gradients[gi]);
        let r = std::mem::take(&mut self.gradients[ri]);
        let projected = self.project_slice(&mut g, &r, rule);
        (self.gradients[gi], self.gradients[ri]) = (g, r);
        projected
    }

    pub fn update_projected(&mut self, g: VectorId, r: VectorId, rule: &ProjectionRule) -> Result<()> {
        let VectorId::Gradient(ri) = r else { return Ok(()) };
        // u = θ_before − θ_after takes the gradient's part; then θ = θ_before − u.
        let before = Buffer::from(&self.theta[..]);
        self.update(g);
        let mut u = before.clone();
        vector::axpy(self.ws.cpu(), -1.0, &self.theta, &mut u);
        let r = std::mem::take(&mut self.gradients[ri]);
        let projected = self.project_slice(&mut u, &r, rule);
        self.gradients[ri] = r;
        self.theta.copy_from_slice(&before);
        vector::axpy(self.ws.cpu(), -1.0, &u, &mut self.theta);
        projected
    }

    fn project_slice(&mut self, g: &mut [f32], r: &[f32], rule: &ProjectionRule) -> Result<()> {
        let cpu = self.ws.cpu();
        let whole = Inner::of(cpu, g, r);
        self.stats.n_compared += 1;
        self.cosine_total += whole.cosine(vector::squared_norm(cpu, g));
        if rule.from_round_start
            && let Some(config) = self.memory_config.clone()
            && self.memory_loss < self.loss_of_gathered(VectorId::RoundStart, &config)?
        {
            return Ok(());
        }
        let cpu = self.ws.cpu();
        let active = match rule.scope {
            Scope::Global => whole.project(cpu, g, r, rule),
            Scope::Layer => {
                let mut active = false;
                for span in self.experiment.graph.params().spans() {
                    let (g, r) = (&mut g[span.range()], &r[span.range()]);
                    active |= Inner::of(cpu, g, r).project(cpu, g, r, rule);
                }
                active
            }
        };
        self.stats.n_projected += u32::from(active);
        Ok(())
    }
}

/// ⟨g, r⟩ and ‖r‖².
struct Inner {
    dot: f64,
    rr: f64,
}

impl Inner {
    fn of(cpu: &Cpu, g: &[f32], r: &[f32]) -> Self {
        Self { dot: vector::dot(cpu, g, r), rr: vector::squared_norm(cpu, r) }
    }

    fn cosine(&self, gg: f64) -> f64 {
        if self.rr > 0.0 && gg > 0.0 { self.dot / (self.rr * gg).sqrt() } else { 0.0 }
    }

    /// Projects by the rule; whether it did.
    fn project(&self, cpu: &mut Cpu, g: &mut [f32], r: &[f32], rule: &ProjectionRule) -> bool {
        let active = (self.dot < 0.0 || rule.always) && self.rr > rule.norm_guard;
        if active {
            let bound = rule.coefficient_max;
            let coefficient = (self.dot / (self.rr + rule.eps)).clamp(-bound, bound);
            vector::axpy(cpu, -coefficient as f32, r, g);
        }
        active
    }
}

impl LocalConfig {
    fn clip_norm(&self) -> Option<f32> {
        (self.clip > 0.0).then_some(self.clip)
    }
}

fn buffers_name(model: &str) -> String {
    format!("{model}.buffers")
}

fn find_or_zeros(list: &mut Vec<(String, Buffer)>, name: &str, len: usize) -> usize {
    list.iter().position(|(n, _)| n == name).unwrap_or_else(|| {
        list.push((name.to_owned(), Buffer::zeros(len)));
        list.len() - 1
    })
}

/// The rows `indices` of a matrix with `n_rows` rows; nothing for an empty matrix.
fn gather_rows(matrix: &[f32], n_rows: usize, indices: &[u32], out: &mut Vec<f32>) {
    let dim = matrix.len() / n_rows.max(1);
    out.clear();
    for &i in indices {
        out.extend_from_slice(&matrix[i as usize * dim..(i as usize + 1) * dim]);
    }
}

/// Calls `f(pooled values, their gradient)` on the mean over pixels, and spreads the gradient back.
fn pooled(
    pixels: usize,
    channels: usize,
    value: &[f32],
    grad: &mut [f32],
    f: impl FnOnce(&[f32], &mut [f32]) -> f64,
) -> f64 {
    if pixels == 1 {
        return f(value, grad);
    }
    let n = value.len() / (pixels * channels);
    let (mut mean, mut mean_grad) = (vec![0.0; n * channels], vec![0.0; n * channels]);
    for (mean, image) in mean.chunks_exact_mut(channels).zip(value.chunks_exact(pixels * channels)) {
        for row in image.chunks_exact(channels) {
            mean.iter_mut().zip(row).for_each(|(m, v)| *m += v / pixels as f32);
        }
    }
    let loss = f(&mean, &mut mean_grad);
    for (mean_grad, image) in mean_grad.chunks_exact(channels).zip(grad.chunks_exact_mut(pixels * channels)) {
        for row in image.chunks_exact_mut(channels) {
            row.iter_mut().zip(mean_grad).for_each(|(g, m)| *g += m / pixels as f32);
        }
    }
    loss
}
