//! Local training of a cohort on a GPU: every client is a lane, and lanes whose steps are alike share launches.

use super::OnGpu;
use super::record::{Names, Op, Program, Recorder};
use crate::error::{Error, Result};
use crate::memory::{Cursor, MemoryConfig};
use crate::method::Method;
use crate::simulate::Progress;
use crate::step::{Finish, Place, Step};
use crate::trainer::{ClientResult, ClientState, Download, LocalStats, VectorId, buffers_name};
use fedproj_nn::cuda::{Batches, Cohort, Data, Moments, NOBODY, Stats, Vectors};
use fedproj_nn::{Mode, Options, Rule};
use fedproj_rng::{Purpose, Stream};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// A cohort of clients on a GPU, and all vectors that their methods work on.
#[derive(Debug)]
pub(crate) struct GpuTrainer {
    pub(super) on: Arc<OnGpu>,
    pub(super) memory_config: Option<MemoryConfig>,
    pub(super) truncates_memory: bool,
    pub(super) rule: Rule,
    pub(super) cohort: Cohort,
    pub(super) moments: Moments,
    pub(super) theta: Vectors,
    pub(super) buffers: Vectors,
    pub(super) start: Vectors,
    pub(super) start_buffers: Vectors,
    /// θ before an update that is projected afterwards, and the update.
    pub(super) before: Option<(Vectors, Vectors)>,
    pub(super) gradients: Vec<Vectors>,
    pub(super) names: Names,
    pub(super) states: Vec<Vectors>,
    pub(super) broadcasts: Vec<Vectors>,
    pub(super) uploads: Vec<Vectors>,
    pub(super) embeddings: Vec<Vectors>,
    pub(super) logits: Option<Data>,
    pub(super) features: Option<Data>,
    pub(super) programs: Vec<Program>,
}

/// A client of a wave: what it does, step by step.
struct Lane {
    client: u32,
    samples: Vec<u32>,
    kept: Vec<String>,
    /// Programs of its steps, by place in the list.
    steps: Vec<usize>,
    epochs: Vec<u32>,
    finish: Program,
}

impl GpuTrainer {
    /// As many lanes as the cohort has clients, or as fit the GPU's memory, or `lanes_max`.
    pub fn new(on: &Arc<OnGpu>, method: &dyn Method, lanes_max: usize) -> Result<Self> {
        let experiment = &on.experiment;
        let (graph, config) = (&experiment.graph, &experiment.config);
        let batch = method.memory().map_or(config.local.batch, |m| m.batch.min(m.size).max(config.local.batch));
        let taps = method.taps(graph);
        let options = Options { batch, taps: &taps, training: true };
        // θ, two moments, two or three gradients, and what a method keeps.
        let per_lane = Cohort::lane_bytes(graph, &options) + 8 * 4 * graph.params().len();
        let fitting = (on.gpu.free_bytes()? / 10 * 8 / per_lane).max(1);
        let mut lanes = config.federation.cohort(experiment.partition.n_clients()).clamp(1, fitting.min(lanes_max));
        loop {
            match Self::with_cohort(on, method, lanes, &options) {
                Err(Error::Network(fedproj_nn::Error::GpuMemory { .. })) if lanes > 1 => lanes /= 2,
                made => return made,
            }
        }
    }

    fn with_cohort(on: &Arc<OnGpu>, method: &dyn Method, lanes: usize, options: &Options<'_>) -> Result<Self> {
        let experiment = &on.experiment;
        let cohort = Cohort::new(&on.gpu, &experiment.graph, lanes, options)?;
        let rule = experiment.config.local.optimizer.rule();
        Ok(Self {
            moments: cohort.moments(&rule)?,
            theta: cohort.vectors(experiment.weights.len())?,
            buffers: cohort.vectors(experiment.buffers.len())?,
            start: cohort.shared_vector(&experiment.weights)?,
            start_buffers: cohort.shared_vector(&experiment.buffers)?,
            before: None,
            gradients: Vec::new(),
            names: Names::default(),
            states: Vec::new(),
            broadcasts: Vec::new(),
            uploads: Vec::new(),
            embeddings: Vec::new(),
            logits: None,
            features: None,
            programs: Vec::new(),
            cohort,
            rule,
            memory_config: method.memory().cloned(),
            truncates_memory: method.truncates_memory(),
            on: Arc::clone(on),
        })
    }

    /// Clients that train at a time.
    pub fn n_lanes(&self) -> usize {
        self.cohort.n_lanes()
    }

    /// Trains clients, given largest first; results in the order of their ids. Where all clients fit in one wave their
    /// weights stay on the GPU, and the lane of each is given: see [`GpuResults`].
    pub fn train(
        &mut self,
        method: &dyn Method,
        download: &Arc<Download>,
        mut jobs: Vec<(u32, ClientState)>,
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<(Vec<ClientResult>, Option<Vec<u32>>)> {
        let one_wave = jobs.len() <= self.n_lanes();
        self.receive(download)?;
        let mut all = Vec::with_capacity(jobs.len());
        while !jobs.is_empty() {
            let rest = jobs.split_off(jobs.len().min(self.n_lanes()));
            let wave = self.train_wave(method, download, &jobs)?;
            for (lane, mut result) in wave.into_iter().enumerate() {
                if !one_wave {
                    result.weights = self.cohort.read(&self.theta, lane)?;
                    result.buffers = self.cohort.read(&self.buffers, lane)?;
                    result.uploads = self.uploads_of(lane)?;
                }
                all.push((lane as u32, result));
                progress(Progress::ClientDone);
            }
            jobs = rest;
        }
        all.sort_by_key(|(_, result)| result.client);
        let lanes = one_wave.then(|| all.iter().map(|(lane, _)| *lane).collect());
        Ok((all.into_iter().map(|(_, result)| result).collect(), lanes))
    }

    /// What the server sent, for all lanes to share.
    fn receive(&mut self, download: &Download) -> Result<()> {
        self.cohort.write(&mut self.start, 0, &download.weights)?;
        self.cohort.write(&mut self.start_buffers, 0, &download.buffers)?;
        for (name, values) in &download.vectors {
            let at = self.names.broadcasts.iter().position(|n| n == name).unwrap_or(self.names.broadcasts.len());
            if at == self.names.broadcasts.len() {
                self.names.broadcasts.push(name.clone());
            }
            self.make_vectors()?;
            self.cohort.write(&mut self.broadcasts[at], 0, values)?;
        }
        if let Some((_, targets)) = &download.memory {
            let n_public = self.on.experiment.public.as_ref().map_or(1, fedproj_data::Dataset::n_samples);
            let gpu = &self.on.gpu;
            let put = |slot: &mut Option<Data>, values: &[f32]| -> Result<bool> {
                if values.is_empty() {
                    return Ok(std::mem::take(slot).is_some());
                }
                if let Some(data) = slot {
                    data.replace(gpu, values)?;
                    return Ok(false);
                }
                *slot = Some(Data::matrix(gpu, values, values.len() / n_public)?);
                Ok(true)
            };
            let moved = put(&mut self.logits, &targets.logits)? | put(&mut self.features, &targets.features)?;
            if moved {
                self.cohort.forget_recorded();
            }
        }
        Ok(())
    }

    /// Memory for every vector that has a name by now.
    fn make_vectors(&mut self) -> Result<()> {
        let n = self.start_len();
        let n_buffers = self.on.experiment.buffers.len();
        while self.states.len() < self.names.states.len() {
            let is_buffers = self.names.states[self.states.len()].ends_with(&buffers_name(""));
            self.states.push(self.cohort.vectors(if is_buffers { n_buffers } else { n })?);
        }
        while self.uploads.len() < self.names.uploads.len() {
            self.uploads.push(self.cohort.vectors(n)?);
        }
        while self.broadcasts.len() < self.names.broadcasts.len() {
            self.broadcasts.push(self.cohort.shared_vector(&vec![0.0; n])?);
        }
        let n_gradients = self.programs.iter().map(Program::n_gradients).max().unwrap_or(0);
        while self.gradients.len() < n_gradients {
            self.gradients.push(self.cohort.vectors(n)?);
        }
        let projects_updates = |p: &Program| p.ops.iter().any(|op| matches!(op, Op::UpdateProjected { .. }));
        if self.before.is_none() && self.programs.iter().any(projects_updates) {
            self.before = Some((self.cohort.vectors(n)?, self.cohort.vectors(n)?));
        }
        Ok(())
    }

    pub(super) fn start_len(&self) -> usize {
        self.on.experiment.weights.len()
    }

    /// Asks the method what it does for a client, step by step.
    fn plan(&mut self, method: &dyn Method, download: &Download, client: u32, state: &ClientState) -> Result<Lane> {
        let experiment = Arc::clone(&self.on.experiment);
        let config = &experiment.config;
        let samples = experiment.partition.indices(client as usize).into_owned();
        let mut kept: Vec<String> = state.keys().cloned().collect();
        for name in &kept {
            if !self.names.states.contains(name) {
                self.names.states.push(name.clone());
            }
        }
        let per_epoch = samples.len().div_ceil(config.local.batch);
        let has_memory = self.memory_config.is_some() && download.memory.is_some();
        let mut place = Place {
            seed: config.seed,
            round: download.round,
            n_rounds: config.federation.rounds,
            client,
            epoch: 0,
            step: 0,
        };
        let (mut steps, mut epochs, mut lr_factor_total) = (Vec::new(), Vec::new(), 0.0);
        for epoch in 0..config.local.epochs {
            place.epoch = epoch;
            let factor = f64::from(config.local.schedule.factor(epoch, config.local.epochs));
            for _ in 0..per_epoch {
                let program = self.record(&mut kept, has_memory, 0.0, |recorder| {
                    method.local_step(&mut Step { trainer: recorder, place })
                })?;
                let updates = |op: &&Op| matches!(op, Op::Update { .. } | Op::UpdateProjected { .. });
                lr_factor_total += factor * program.ops.iter().filter(updates).count() as f64;
                steps.push(self.program_id(program));
                epochs.push(epoch);
                place.step += 1;
            }
        }
        let lr_total = (lr_factor_total * f64::from(config.local.optimizer.lr)) as f32;
        let finish = self.record(&mut kept, has_memory, lr_total, |recorder| {
            method.finish_local(&mut Finish { trainer: recorder });
            Ok(())
        })?;
        for op in &finish.ops {
            if let Op::KeepModel { name } = op {
                for name in [name.clone(), buffers_name(name)] {
                    if !kept.contains(&name) {
                        kept.push(name.clone());
                    }
                    if !self.names.states.contains(&name) {
                        self.names.states.push(name);
                    }
                }
            }
        }
        Ok(Lane { client, samples, kept, steps, epochs, finish })
    }

    fn record(
        &mut self,
        kept: &mut Vec<String>,
        has_memory: bool,
        lr_total: f32,
        work: impl FnOnce(&mut Recorder<'_>) -> Result<()>,
    ) -> Result<Program> {
        let on = Arc::clone(&self.on);
        let graph = &on.experiment.graph;
        let mut recorder =
            Recorder { graph, names: &mut self.names, kept, has_memory, lr_total, program: Program::default() };
        work(&mut recorder)?;
        Ok(recorder.program)
    }

    fn program_id(&mut self, program: Program) -> usize {
        self.programs.iter().position(|p| *p == program).unwrap_or_else(|| {
            self.programs.push(program);
            self.programs.len() - 1
        })
    }

    /// Trains as many clients as there are lanes.
    fn train_wave(
        &mut self,
        method: &dyn Method,
        download: &Arc<Download>,
        jobs: &[(u32, ClientState)],
    ) -> Result<Vec<ClientResult>> {
        let start = Instant::now();
        let plans = jobs
            .iter()
            .map(|(client, state)| self.plan(method, download, *client, state))
            .collect::<Result<Vec<_>>>()?;
        self.make_vectors()?;
        let all: Vec<u32> = (0..plans.len() as u32).collect();
        self.cohort.set_lanes(&all)?;
        self.cohort.reset_lanes()?;
        self.begin(&plans, jobs)?;
        self.embed(&plans)?;
        self.set_tables(&plans, download)?;
        let n_steps = plans.iter().map(|lane| lane.steps.len()).max().unwrap_or(0);
        for step in 0..n_steps {
            // Lanes with the same program, in the order of the programs.
            let mut groups: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
            for (lane, plan) in plans.iter().enumerate() {
                if let Some(&program) = plan.steps.get(step) {
                    groups.entry(program).or_default().push(lane as u32);
                }
            }
            for (program, lanes) in groups {
                self.cohort.set_lanes(&lanes)?;
                self.run(program)?;
            }
        }
        let stats = self.cohort.stats()?;
        for (lane, stats) in plans.iter().zip(&stats) {
            if let Some((step, loss)) = stats.not_finite {
                let epoch = lane.epochs.get(step as usize).copied().unwrap_or(0);
                return Err(Error::NotFinite { round: download.round, client: lane.client, epoch, step, loss });
            }
        }
        let after = self.memory_loss_after(&stats)?;
        for (lane, plan) in plans.iter().enumerate() {
            self.cohort.set_lanes(&[lane as u32])?;
            let ops = plan.finish.ops.clone();
            ops.iter().try_for_each(|op| self.execute(op, &mut 0))?;
        }
        self.on.gpu.synchronize()?;
        let seconds = start.elapsed().as_secs_f64() / plans.len().max(1) as f64;
        let result = |(lane, plan): (usize, Lane)| {
            let s = &stats[lane];
            let n_steps = plan.steps.len() as u32;
            let compared = s.n_compared > 0;
            let state = self.state_of(lane, &plan.kept)?;
            Ok(ClientResult {
                client: plan.client,
                n_samples: plan.samples.len(),
                n_steps,
                weights: Vec::new(),
                buffers: Vec::new(),
                uploads: BTreeMap::new(),
                state,
                stats: LocalStats {
                    loss: s.loss_total / f64::from(n_steps.max(1)),
                    n_compared: s.n_compared,
                    n_projected: s.n_projected,
                    cosine: compared.then(|| s.cosine_total / f64::from(s.n_compared)),
                    memory_loss_before: s.memory_loss_first,
                    memory_loss_after: s.memory_loss_first.and(after.get(lane).copied().flatten()),
                    seconds,
                },
            })
        };
        plans.into_iter().enumerate().map(result).collect()
    }

    /// Weights, buffers, moments and what each client keeps, at the start of a wave.
    fn begin(&mut self, plans: &[Lane], jobs: &[(u32, ClientState)]) -> Result<()> {
        let (n, n_buffers) = (self.start_len(), self.on.experiment.buffers.len());
        self.cohort.assign(self.start.rows(), self.theta.rows(), n)?;
        self.cohort.assign(self.start_buffers.rows(), self.buffers.rows(), n_buffers)?;
        self.cohort.reset_moments(&self.moments)?;
        for upload in &self.uploads {
            self.cohort.clear(upload.rows(), n)?;
        }
        for (lane, (plan, (_, state))) in plans.iter().zip(jobs).enumerate() {
            for name in &plan.kept {
                let Some(at) = self.names.states.iter().position(|n| n == name) else { continue };
                match state.get(name) {
                    Some(values) => self.cohort.write(&mut self.states[at], lane, values)?,
                    None => self.cohort.zero(&mut self.states[at], lane)?,
                }
            }
        }
        Ok(())
    }

    /// Which samples, rates and keys each step takes: the same draws as on the CPU.
    fn set_tables(&mut self, plans: &[Lane], download: &Download) -> Result<()> {
        let config = &self.on.experiment.config;
        let (seed, round, batch) = (config.seed, download.round, config.local.batch);
        let (mut samples, mut positions, mut factors, mut keys) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for lane in plans {
            let (mut own_samples, mut own_positions) = (Vec::new(), Vec::new());
            for epoch in 0..config.local.epochs {
                let ids = [round, lane.client, epoch];
                let order = Stream::new(seed, Purpose::BatchOrder, ids).permutation(lane.samples.len());
                own_samples.extend(order.iter().map(|&p| lane.samples[p as usize]));
                own_positions.extend(order);
                for table in [&mut own_samples, &mut own_positions] {
                    table.resize(table.len().next_multiple_of(batch), NOBODY);
                }
            }
            samples.push(own_samples);
            positions.push(own_positions);
            factors.push(
                lane.epochs.iter().map(|&e| config.local.schedule.factor(e, config.local.epochs).to_bits()).collect(),
            );
            let key = |step: usize| Stream::new(seed, Purpose::Dropout, [round, lane.client, step as u32]).next_u64();
            keys.push((0..lane.steps.len()).map(key).flat_map(|k| [k as u32, (k >> 32) as u32]).collect());
        }
        self.cohort.set_table(Batches::Private, &samples, batch)?;
        self.cohort.set_table(Batches::Positions, &positions, batch)?;
        self.cohort.set_table(Batches::LrFactors, &factors, 1)?;
        self.cohort.set_table(Batches::DropoutKeys, &keys, 2)?;
        if let (Some(memory), Some((indices, _))) = (&self.memory_config, &download.memory) {
            let mut tables = Vec::new();
            for lane in plans {
                let mut cursor = Cursor::new(seed, round, lane.client, indices.len(), memory.batch);
                let draws: usize = lane.steps.iter().map(|&p| self.programs[p].n_memory()).sum();
                let (mut table, mut next) = (Vec::new(), Vec::new());
                for _ in 0..draws {
                    cursor.next(indices, &mut next);
                    table.extend_from_slice(&next);
                }
                tables.push(table);
            }
            self.cohort.set_table(Batches::Memory, &tables, memory.batch.min(indices.len()))?;
        }
        Ok(())
    }

    /// Values of nodes for every sample of a client under weights that do not move within the round.
    fn embed(&mut self, plans: &[Lane]) -> Result<()> {
        if self.names.embeddings.is_empty() {
            return Ok(());
        }
        let batch = self.on.experiment.config.local.batch;
        let sequential: Vec<Vec<u32>> = plans
            .iter()
            .map(|lane| {
                let mut all = lane.samples.clone();
                all.resize(all.len().next_multiple_of(batch), NOBODY);
                all
            })
            .collect();
        let n_batches = sequential.iter().map(|s| s.len() / batch).max().unwrap_or(0);
        self.cohort.set_table(Batches::Private, &sequential, batch)?;
        for (index, (weights, node)) in self.names.embeddings.clone().into_iter().enumerate() {
            let uses = |lane: &Lane| lane.steps.iter().any(|&p| self.programs[p].ops.contains(&Op::Embed { index }));
            let lanes: Vec<u32> =
                plans.iter().enumerate().filter(|(_, lane)| uses(lane)).map(|(i, _)| i as u32).collect();
            if lanes.is_empty() {
                continue;
            }
            let len = n_batches * batch * self.on.experiment.graph.shape(node).len();
            self.make_embedding(index, len)?;
            self.cohort.set_lanes(&lanes)?;
            self.cohort.rewind()?;
            let (params, buffers) = match weights {
                VectorId::State(i) => {
                    let name = buffers_name(&self.names.states[i]);
                    let kept = self.names.states.iter().position(|n| *n == name);
                    (self.states[i].rows(), kept.map_or(self.start_buffers.rows(), |b| self.states[b].rows()))
                }
                _ => (self.start.rows(), self.start_buffers.rows()),
            };
            for step in 0..n_batches {
                // A lane with fewer batches gets padding; what it computes from that is never looked at.
                self.cohort.gather(&self.on.private, Batches::Private, 0, false)?;
                self.cohort.forward(params, buffers, Mode::EVAL)?;
                self.cohort.keep_value(node, step * batch, &mut self.embeddings[index])?;
                self.cohort.advance(1, 0)?;
            }
        }
        let all: Vec<u32> = (0..plans.len() as u32).collect();
        self.cohort.set_lanes(&all)?;
        Ok(self.cohort.rewind()?)
    }

    fn make_embedding(&mut self, index: usize, len: usize) -> Result<()> {
        while self.embeddings.len() <= index {
            self.embeddings.push(self.cohort.vectors(0)?);
        }
        if self.embeddings[index].len() < len {
            self.embeddings[index] = self.cohort.vectors(len)?;
            self.cohort.forget_recorded();
        }
        Ok(())
    }

    /// The memory loss of each lane on its first memory batch, after local training; lanes without memory have none.
    fn memory_loss_after(&mut self, stats: &[Stats]) -> Result<Vec<Option<f64>>> {
        let lanes: Vec<u32> =
            (0..stats.len() as u32).filter(|&l| stats[l as usize].memory_loss_first.is_some()).collect();
        let Some(config) = self.memory_config.clone().filter(|_| !lanes.is_empty()) else {
            return Ok(vec![None; stats.len()]);
        };
        self.cohort.set_lanes(&lanes)?;
        self.cohort.rewind()?;
        self.gather_memory(0)?;
        self.memory_loss_of(self.theta.rows(), self.buffers.rows(), &config)?;
        let all = self.cohort.stats()?;
        Ok((0..stats.len()).map(|l| lanes.contains(&(l as u32)).then(|| all[l].start_loss)).collect())
    }

    fn state_of(&self, lane: usize, kept: &[String]) -> Result<ClientState> {
        let mut state = ClientState::new();
        for name in kept {
            if let Some(at) = self.names.states.iter().position(|n| n == name) {
                state.insert(name.clone(), self.cohort.read(&self.states[at], lane)?);
            }
        }
        Ok(state)
    }

    fn uploads_of(&self, lane: usize) -> Result<BTreeMap<String, Vec<f32>>> {
        let named = self.names.uploads.iter().zip(&self.uploads);
        named.map(|(name, v)| Ok((name.clone(), self.cohort.read(v, lane)?))).collect()
    }

    /// The results of a wave with all their vectors.
    pub fn downloaded(&self, results: &[ClientResult], lanes: &[u32]) -> Result<Vec<ClientResult>> {
        let whole = |(result, &lane): (&ClientResult, &u32)| {
            Ok(ClientResult {
                weights: self.cohort.read(&self.theta, lane as usize)?,
                buffers: self.cohort.read(&self.buffers, lane as usize)?,
                uploads: self.uploads_of(lane as usize)?,
                state: ClientState::new(),
                stats: result.stats.clone(),
                ..*result
            })
        };
        results.iter().zip(lanes).map(whole).collect()
    }
}
