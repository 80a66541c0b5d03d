//! Local training of a cohort on a GPU. Every client is a lane; lanes with the same steps share launches.

use super::OnGpu;
use super::execute::Current;
use crate::error::{Error, Result};
use crate::memory::MemoryConfig;
use crate::method::Method;
use crate::plan::{LocalPlan, Planner, Program, VectorId};
use crate::simulate::Progress;
use crate::trainer::{ClientResult, ClientState, Download, LocalStats};
use fedproj_nn::cuda::{Batches, Cohort, Data, Moments, NOBODY, Stats, Vectors};
use fedproj_nn::{Mode, Options, Rule};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// A cohort of clients on a GPU, and all vectors of their methods.
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
    /// θ before an update that is projected afterwards, and the update itself.
    pub(super) before: Option<(Vectors, Vectors)>,
    pub(super) gradients: Vec<Vectors>,
    pub(super) states: Vec<Vectors>,
    pub(super) broadcasts: Vec<Vectors>,
    pub(super) uploads: Vec<Vectors>,
    /// What each lane of the last wave sends, by index in `uploads`.
    pub(super) uploaded: Vec<Vec<usize>>,
    pub(super) embeddings: Vec<Vectors>,
    pub(super) logits: Option<Data>,
    pub(super) features: Option<Data>,
    pub(super) planner: Planner,
}

impl GpuTrainer {
    /// One lane per client of the cohort, limited by the GPU's memory and `lanes_max`.
    pub fn new(on: &Arc<OnGpu>, method: &dyn Method, lanes_max: usize) -> Result<Self> {
        let experiment = &on.experiment;
        let (graph, config) = (&experiment.graph, &experiment.config);
        let taps = method.taps(graph);
        let options = Options { batch: Planner::new(experiment, method).batch_max(), taps: &taps, training: true };
        // θ, two moments, two or three gradients, and a method's state.
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
            states: Vec::new(),
            broadcasts: Vec::new(),
            uploads: Vec::new(),
            uploaded: Vec::new(),
            embeddings: Vec::new(),
            logits: None,
            features: None,
            planner: Planner::new(experiment, method),
            cohort,
            rule,
            memory_config: method.memory().cloned(),
            truncates_memory: method.truncates_memory(),
            on: Arc::clone(on),
        })
    }

    /// The number of clients that train at a time.
    pub fn n_lanes(&self) -> usize {
        self.cohort.n_lanes()
    }

    /// Trains clients, given largest first. Results are in the order of client ids. If all clients fit in one wave,
    /// their weights stay on the GPU and each client's lane is returned: see [`GpuResults`].
    pub fn train(
        &mut self,
        method: &dyn Method,
        download: &Arc<Download>,
        jobs: &[(u32, &ClientState)],
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<(Vec<ClientResult>, Option<Vec<u32>>)> {
        let one_wave = jobs.len() <= self.n_lanes();
        self.receive(download)?;
        let mut all = Vec::with_capacity(jobs.len());
        for jobs in jobs.chunks(self.n_lanes()) {
            let wave = self.train_wave(method, download, jobs)?;
            for (lane, mut result) in wave.into_iter().enumerate() {
                if !one_wave {
                    result.weights = self.cohort.read(&self.theta, lane)?;
                    result.buffers = self.cohort.read(&self.buffers, lane)?;
                    result.uploads = self.uploads_of(lane)?;
                }
                all.push((lane as u32, result));
                progress(Progress::ClientDone);
            }
        }
        all.sort_by_key(|(_, result)| result.client);
        let lanes = one_wave.then(|| all.iter().map(|(lane, _)| *lane).collect());
        Ok((all.into_iter().map(|(_, result)| result).collect(), lanes))
    }

    /// What the server sent; all lanes share it.
    fn receive(&mut self, download: &Download) -> Result<()> {
        self.cohort.write(&mut self.start, 0, &download.weights)?;
        self.cohort.write(&mut self.start_buffers, 0, &download.buffers)?;
        self.planner.receive(download);
        self.make_vectors()?;
        for (name, to) in self.planner.names().broadcasts.iter().zip(&mut self.broadcasts) {
            if let Some(values) = download.vectors.get(name) {
                self.cohort.write(to, 0, values)?;
            }
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

    /// Allocates every vector that has been named so far.
    fn make_vectors(&mut self) -> Result<()> {
        let (n, n_buffers) = (self.start_len(), self.on.experiment.buffers.len());
        let (names, programs) = (self.planner.names(), &self.planner.programs);
        while self.states.len() < names.states.len() {
            let len = if names.is_buffers(self.states.len()) { n_buffers } else { n };
            self.states.push(self.cohort.vectors(len)?);
        }
        while self.uploads.len() < names.uploads.len() {
            self.uploads.push(self.cohort.vectors(n)?);
        }
        while self.broadcasts.len() < names.broadcasts.len() {
            self.broadcasts.push(self.cohort.shared_vector(&vec![0.0; n])?);
        }
        let n_gradients = programs.iter().map(Program::n_gradients).max().unwrap_or(0);
        while self.gradients.len() < n_gradients {
            self.gradients.push(self.cohort.vectors(n)?);
        }
        if self.before.is_none() && programs.iter().any(Program::projects_updates) {
            self.before = Some((self.cohort.vectors(n)?, self.cohort.vectors(n)?));
        }
        Ok(())
    }

    pub(super) fn start_len(&self) -> usize {
        self.on.experiment.weights.len()
    }

    /// Trains one client per lane.
    fn train_wave(
        &mut self,
        method: &dyn Method,
        download: &Arc<Download>,
        jobs: &[(u32, &ClientState)],
    ) -> Result<Vec<ClientResult>> {
        let start = Instant::now();
        let plans = jobs
            .iter()
            .map(|(client, state)| self.planner.plan(method, download, *client, state))
            .collect::<Result<Vec<_>>>()?;
        self.make_vectors()?;
        let all: Vec<u32> = (0..plans.len() as u32).collect();
        self.cohort.set_lanes(&all)?;
        self.cohort.reset_lanes()?;
        self.begin(&plans, jobs)?;
        self.embed(&plans)?;
        self.set_tables(&plans)?;
        self.run_steps(&plans)?;
        let stats = self.cohort.stats()?;
        for (plan, stats) in plans.iter().zip(&stats) {
            if let Some((step, loss)) = stats.not_finite {
                let epoch = plan.steps.get(step as usize).map_or(0, |step| step.epoch);
                return Err(Error::NotFinite { round: download.round, client: plan.client, epoch, step, loss });
            }
        }
        let after = self.memory_loss_after(&stats)?;
        for (lane, plan) in plans.iter().enumerate() {
            self.cohort.set_lanes(&[lane as u32])?;
            plan.finish.ops.iter().try_for_each(|op| self.execute(op, &mut Current::default()))?;
        }
        self.on.gpu.synchronize()?;
        let seconds = start.elapsed().as_secs_f64() / plans.len().max(1) as f64;
        let lanes = plans.iter().zip(&stats).zip(after).enumerate();
        let results =
            lanes.map(|(lane, ((plan, stats), after))| self.result(lane, plan, stats, after, seconds)).collect();
        self.uploaded = plans.into_iter().map(|plan| plan.uploaded).collect();
        results
    }

    /// Runs the plans step by step; lanes with the same program share its launches.
    fn run_steps(&mut self, plans: &[LocalPlan]) -> Result<()> {
        let n_steps = plans.iter().map(|plan| plan.steps.len()).max().unwrap_or(0);
        for at in 0..n_steps {
            // In the order of the programs.
            let mut groups: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
            for (lane, plan) in plans.iter().enumerate() {
                if let Some(step) = plan.steps.get(at) {
                    groups.entry(step.program).or_default().push(lane as u32);
                }
            }
            for (program, lanes) in groups {
                self.cohort.set_lanes(&lanes)?;
                self.run(program)?;
            }
        }
        Ok(())
    }

    /// A lane's measurements and state. Its other vectors stay on the GPU.
    fn result(
        &self,
        lane: usize,
        plan: &LocalPlan,
        found: &Stats,
        memory_loss_after: Option<f64>,
        seconds: f64,
    ) -> Result<ClientResult> {
        let n_steps = plan.steps.len() as u32;
        Ok(ClientResult {
            client: plan.client,
            n_samples: plan.samples.len(),
            n_steps,
            weights: Vec::new(),
            buffers: Vec::new(),
            uploads: BTreeMap::new(),
            state: self.state_of(lane, &plan.kept)?,
            stats: LocalStats {
                loss: found.loss_total / f64::from(n_steps.max(1)),
                n_compared: found.n_compared,
                n_projected: found.n_projected,
                cosine: (found.n_compared > 0).then(|| found.cosine_total / f64::from(found.n_compared)),
                memory_loss_before: found.replay_loss_first,
                memory_loss_after: found.replay_loss_first.and(memory_loss_after),
                seconds,
            },
        })
    }

    /// Weights, buffers, moments and each client's state, at the start of a wave.
    fn begin(&mut self, plans: &[LocalPlan], jobs: &[(u32, &ClientState)]) -> Result<()> {
        let (n, n_buffers) = (self.start_len(), self.on.experiment.buffers.len());
        self.cohort.assign(self.start.rows(), self.theta.rows(), n)?;
        self.cohort.assign(self.start_buffers.rows(), self.buffers.rows(), n_buffers)?;
        self.cohort.reset_moments(&self.moments)?;
        for upload in &self.uploads {
            self.cohort.clear(upload.rows(), n)?;
        }
        for (lane, (plan, (_, state))) in plans.iter().zip(jobs).enumerate() {
            for &at in &plan.kept {
                match state.get(&self.planner.names().states[at]) {
                    Some(values) => self.cohort.write(&mut self.states[at], lane, values)?,
                    None => self.cohort.zero(&mut self.states[at], lane)?,
                }
            }
        }
        Ok(())
    }

    /// The samples, rates and keys of each step. A short batch is padded to the width of the table.
    fn set_tables(&mut self, plans: &[LocalPlan]) -> Result<()> {
        let batch = self.on.experiment.config.local.batch;
        let padded = |plan: &LocalPlan, of: &dyn Fn(u32) -> u32| {
            let mut table = Vec::with_capacity(plan.steps.len() * batch);
            for step in &plan.steps {
                table.extend(plan.order[step.batch.clone()].iter().map(|&p| of(p)));
                table.resize(table.len().next_multiple_of(batch), NOBODY);
            }
            table
        };
        let all = |of: &dyn Fn(&LocalPlan) -> Vec<u32>| plans.iter().map(of).collect::<Vec<_>>();
        let samples = all(&|plan| padded(plan, &|p| plan.samples[p as usize]));
        let positions = all(&|plan| padded(plan, &|p| p));
        let factors = all(&|plan| plan.steps.iter().map(|step| step.lr_factor.to_bits()).collect());
        let words = |key: u64| [key as u32, (key >> 32) as u32];
        let keys = all(&|plan| plan.steps.iter().flat_map(|step| words(step.dropout_key)).collect());
        self.cohort.set_table(Batches::Samples, &samples, batch)?;
        self.cohort.set_table(Batches::Positions, &positions, batch)?;
        self.cohort.set_table(Batches::LrFactors, &factors, 1)?;
        self.cohort.set_table(Batches::DropoutKeys, &keys, 2)?;
        if let Some(width) = plans.iter().map(|plan| plan.memory_batch).max().filter(|&width| width > 0) {
            self.cohort.set_table(Batches::Replay, &all(&|plan| plan.memory.clone()), width)?;
        }
        Ok(())
    }

    /// Values of nodes for every sample of a client, under weights that stay fixed within the round.
    fn embed(&mut self, plans: &[LocalPlan]) -> Result<()> {
        if self.planner.names().embeddings.is_empty() {
            return Ok(());
        }
        let batch = self.on.experiment.config.local.batch;
        let sequential: Vec<Vec<u32>> = plans
            .iter()
            .map(|plan| {
                let mut all = plan.samples.clone();
                all.resize(all.len().next_multiple_of(batch), NOBODY);
                all
            })
            .collect();
        let n_batches = sequential.iter().map(|s| s.len() / batch).max().unwrap_or(0);
        self.cohort.set_table(Batches::Samples, &sequential, batch)?;
        for (index, (weights, node)) in self.planner.names().embeddings.clone().into_iter().enumerate() {
            let lanes = plans.iter().enumerate().filter(|(_, plan)| plan.embeddings.contains(&index));
            let lanes: Vec<u32> = lanes.map(|(lane, _)| lane as u32).collect();
            if lanes.is_empty() {
                continue;
            }
            let len = n_batches * batch * self.on.experiment.graph.shape(node).len();
            self.make_embedding(index, len)?;
            self.cohort.set_lanes(&lanes)?;
            self.cohort.rewind()?;
            let (params, buffers) = match weights {
                VectorId::State(i) => {
                    let kept = self.planner.names().buffers_of(i);
                    (self.states[i].rows(), kept.map_or(self.start_buffers.rows(), |b| self.states[b].rows()))
                }
                _ => (self.start.rows(), self.start_buffers.rows()),
            };
            for step in 0..n_batches {
                // A lane with fewer batches gets padding. Its values there are never read.
                self.cohort.gather(&self.on.private, Batches::Samples, 0, false)?;
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

    /// Each lane's memory loss on its first memory batch, after local training; `None` for lanes without memory.
    fn memory_loss_after(&mut self, stats: &[Stats]) -> Result<Vec<Option<f64>>> {
        let lanes: Vec<u32> =
            (0..stats.len() as u32).filter(|&l| stats[l as usize].replay_loss_first.is_some()).collect();
        if lanes.is_empty() {
            return Ok(vec![None; stats.len()]);
        }
        self.cohort.set_lanes(&lanes)?;
        self.cohort.rewind()?;
        self.gather_memory(0)?;
        self.memory_loss_of(self.theta.rows(), self.buffers.rows())?;
        let all = self.cohort.stats()?;
        Ok((0..stats.len()).map(|l| lanes.contains(&(l as u32)).then(|| all[l].reference_loss)).collect())
    }

    fn state_of(&self, lane: usize, kept: &[usize]) -> Result<ClientState> {
        let read =
            |&at: &usize| Ok((self.planner.names().states[at].clone(), self.cohort.read(&self.states[at], lane)?));
        kept.iter().map(read).collect()
    }

    fn uploads_of(&self, lane: usize) -> Result<BTreeMap<String, Vec<f32>>> {
        let names = &self.planner.names().uploads;
        let read = |&at: &usize| Ok((names[at].clone(), self.cohort.read(&self.uploads[at], lane)?));
        self.uploaded[lane].iter().map(read).collect()
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
