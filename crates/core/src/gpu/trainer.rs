//! Local training of a cohort on a GPU. Clients are planned on the host, then run as lanes, one wave after another.

use super::OnGpu;
use super::executor::{Executor, Feeds};
use super::feed::Feed;
use super::head::Head;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::evaluate::Which;
use crate::generator::GENERATOR;
use crate::halves::Stop;
use crate::memory::MemoryConfig;
use crate::method::{LOGITS, Method};
use crate::own::Own;
use crate::plan::{LocalPlan, Op, Planner, VectorId};
use crate::simulate::Progress;
use crate::subspace;
use crate::trainer::{ClientResult, ClientState, Download, LocalStats};
use fedproj_nn::cuda::{Batches, Fleet, NOBODY, Stats, Target};
use fedproj_nn::{Dropout, Mode, NormMode, Options};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Plans the clients of a round and trains them on a GPU.
#[derive(Debug)]
pub(crate) struct GpuTrainer {
    on: Arc<OnGpu>,
    pub(super) planner: Planner,
    pub(super) executor: Executor,
    /// The part of a model that stays with its client.
    own: Own,
    /// What each lane of the last wave sends, by index in the executor's uploads.
    pub(super) uploaded: Vec<Vec<usize>>,
}

impl GpuTrainer {
    /// One lane per client of the cohort, limited by the GPU's memory and `lanes_max`.
    pub fn new(on: &Arc<OnGpu>, method: &dyn Method, lanes_max: usize) -> Result<Self> {
        let experiment = &on.experiment;
        let (graph, config) = (&experiment.graph, &experiment.config);
        let (mut taps, planner, generator) = (method.taps(graph), Planner::new(experiment, method), method.generator());
        // Passes on generated features begin there.
        taps.extend(graph.features().filter(|_| generator.is_some()));
        let batch = planner.batch_max().max(planner.features_max());
        let options = Options { batch, taps: &taps, training: true };
        let of_head = generator.map_or(Ok(0), |how| Head::lane_bytes(how, graph, batch))?;
        // θ, two moments, two or three gradients, and a method's state.
        let per_lane = Fleet::lane_bytes(graph, &options) + of_head + 8 * 4 * graph.params().len();
        let fitting = (on.gpu.free_bytes()? / 10 * 8 / per_lane).max(1);
        let mut lanes = config.federation.cohort(experiment.partition.n_clients()).clamp(1, fitting.min(lanes_max));
        let (rule, clip) = (config.local.optimizer.rule(), config.local.clip);
        let make = |lanes| {
            let fleet = Fleet::new(&on.gpu, graph, lanes, &options)?;
            let head = generator.map(|how| Head::new(on, how, &fleet, config.local.batch)).transpose()?;
            let mut executor = Executor::new(on, fleet, rule, clip, feeds(method, config))?;
            executor.head = head;
            Ok(executor)
        };
        let executor = loop {
            match make(lanes) {
                Err(error) if Error::is_gpu_memory(&error) && lanes > 1 => lanes /= 2,
                made => break made?,
            }
        };
        Ok(Self { on: Arc::clone(on), planner, executor, own: Own::new(method, graph), uploaded: Vec::new() })
    }

    /// Ends training within a wave when asked.
    pub fn stop_with(&mut self, stop: &Stop) {
        self.executor.stop = stop.clone();
    }

    /// The number of clients that train at a time.
    pub fn n_lanes(&self) -> usize {
        self.executor.fleet.n_lanes()
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
        self.receive(method, download)?;
        let mut all = Vec::with_capacity(jobs.len());
        for jobs in jobs.chunks(self.n_lanes()) {
            let wave = self.train_wave(method, download, jobs)?;
            for (lane, mut result) in wave.into_iter().enumerate() {
                if !one_wave {
                    self.download(lane, &mut result)?;
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
    fn receive(&mut self, method: &dyn Method, download: &Download) -> Result<()> {
        let Self { on, planner, executor, .. } = self;
        planner.receive(download);
        executor.make_vectors(planner.names(), &planner.programs)?;
        let Executor { fleet, start, start_buffers, broadcasts, feeds, head, .. } = executor;
        fleet.write(start, 0, &download.weights)?;
        fleet.write(start_buffers, 0, &download.buffers)?;
        for (name, to) in planner.names().broadcasts.iter().zip(broadcasts) {
            if let Some(values) = download.vectors.get(name) {
                fleet.write(to, 0, values)?;
            }
        }
        if let (Some(head), Some(params)) = (head, download.vectors.get(GENERATOR)) {
            head.receive(params)?;
        }
        // A row per private sample, for all clients: as many floats as the private set has samples, times the classes.
        let logits = download.vectors.get(LOGITS).filter(|_| method.sends_logits());
        if feeds.own.set_rows(on, Target::Logits, logits.map_or(&[], Vec::as_slice))? {
            fleet.forget_recorded();
        }
        if let (Some((_, targets)), Some(feed)) = (&download.memory, &mut feeds.memory) {
            let logits = feed.set_rows(on, Target::Logits, &targets.logits)?;
            let features = feed.set_rows(on, Target::Features, &targets.features)?;
            if logits || features {
                fleet.forget_recorded();
            }
        }
        Ok(())
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
        self.check_directions(download)?;
        self.executor.make_vectors(self.planner.names(), &self.planner.programs)?;
        let all: Vec<u32> = (0..plans.len() as u32).collect();
        self.executor.fleet.set_lanes(&all)?;
        self.executor.fleet.reset_lanes()?;
        self.begin(download, &plans, jobs)?;
        self.embed(&plans)?;
        self.executor.set_tables(&plans, self.on.experiment.config.local.batch)?;
        if let Executor { fleet, head: Some(head), .. } = &mut self.executor {
            let labels = self.on.experiment.private.labels().unwrap_or_default();
            head.set_table(fleet, &plans, &self.planner.programs, labels)?;
        }
        self.executor.run(&plans, &self.planner.programs)?;
        let stats = self.executor.fleet.stats()?;
        for (plan, stats) in plans.iter().zip(&stats) {
            if let Some((step, loss)) = stats.not_finite {
                let epoch = plan.steps.get(step as usize).map_or(0, |step| step.epoch);
                return Err(Error::NotFinite { round: download.round, client: plan.client, epoch, step, loss });
            }
        }
        let after = self.memory_loss_after(&stats)?;
        for (lane, plan) in plans.iter().enumerate() {
            self.executor.fleet.set_lanes(&[lane as u32])?;
            plan.finish.ops.iter().try_for_each(|op| self.executor.execute(op))?;
        }
        self.on.gpu.synchronize()?;
        let seconds = start.elapsed().as_secs_f64() / plans.len().max(1) as f64;
        let lanes = plans.iter().zip(&stats).zip(after).enumerate();
        let results =
            lanes.map(|(lane, ((plan, stats), after))| self.result(lane, plan, stats, after, seconds)).collect();
        self.uploaded = plans.into_iter().map(|plan| plan.uploaded).collect();
        results
    }

    /// Rejects directions of layers' inputs for which the GPU has no room.
    fn check_directions(&self, download: &Download) -> Result<()> {
        let names = &self.planner.names().broadcasts;
        for op in self.planner.programs.iter().flat_map(|program| &program.ops) {
            if let Op::ProjectInputs { first, n, .. } = *op {
                // A vector that was not sent is 0, which ends the directions.
                let sent = names[first..first + n].iter().map_while(|name| download.vectors.get(name));
                subspace::check_on_gpu(&self.on.experiment.graph, &sent.map(Vec::as_slice).collect::<Vec<_>>())?;
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
        let mut state = self.state_of(lane, &plan.kept)?;
        if !self.own.is_empty() {
            let Executor { fleet, theta, buffers, .. } = &self.executor;
            self.own.keep(&fleet.read(theta, lane)?, &fleet.read(buffers, lane)?, &mut state);
        }
        Ok(ClientResult {
            client: plan.client,
            n_samples: plan.samples.len(),
            n_steps,
            weights: Vec::new(),
            buffers: Vec::new(),
            uploads: BTreeMap::new(),
            state,
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
    fn begin(&mut self, download: &Download, plans: &[LocalPlan], jobs: &[(u32, &ClientState)]) -> Result<()> {
        let Executor { fleet, moments, start, start_buffers, theta, buffers, uploads, states, .. } = &mut self.executor;
        fleet.assign(start.rows(), theta.rows(), theta.len())?;
        fleet.assign(start_buffers.rows(), buffers.rows(), buffers.len())?;
        fleet.reset_moments(moments)?;
        uploads.iter().try_for_each(|upload| fleet.clear(upload.rows(), upload.len()))?;
        for (lane, (plan, (client, state))) in plans.iter().zip(jobs).enumerate() {
            if !self.own.is_empty() || !download.personal.is_empty() {
                let (mut weights, mut own_buffers) = (download.weights_of(*client)?.to_vec(), download.buffers.clone());
                self.own.restore(state, &mut weights, &mut own_buffers)?;
                fleet.write(theta, lane, &weights)?;
                fleet.write(buffers, lane, &own_buffers)?;
            }
            for &at in &plan.kept {
                let zeros = || Cow::Owned(vec![0.0; states[at].len()]);
                let kept = state.get(&self.planner.names().states[at]);
                let values = kept.map_or_else(zeros, |values| Cow::Borrowed(&values[..]));
                fleet.write(&mut states[at], lane, &values)?;
            }
            if !plan.offsets.is_empty() {
                fleet.set_offsets(lane, &plan.offsets)?;
            }
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
        let (names, data) = (self.planner.names(), self.on.data(Which::Private));
        let Executor { fleet, states, start, start_buffers, embeddings, .. } = &mut self.executor;
        let Some(data) = data else { return Ok(()) };
        fleet.set_table(Batches::Samples, &sequential, batch)?;
        for (index, &(weights, node)) in names.embeddings.iter().enumerate() {
            let lanes = plans.iter().enumerate().filter(|(_, plan)| plan.embeddings.contains(&index));
            let lanes: Vec<u32> = lanes.map(|(lane, _)| lane as u32).collect();
            if lanes.is_empty() {
                continue;
            }
            let row = self.on.experiment.graph.shape(node).len();
            while embeddings.len() <= index {
                embeddings.push((fleet.vectors(0)?, 0));
            }
            if embeddings[index].0.len() < n_batches * batch * row {
                embeddings[index] = (fleet.vectors(n_batches * batch * row)?, row);
                fleet.forget_recorded();
            }
            fleet.set_lanes(&lanes)?;
            fleet.rewind()?;
            let (params, buffers) = match weights {
                VectorId::State(i) => {
                    let kept = names.buffers_of(i);
                    (states[i].rows(), kept.map_or(start_buffers.rows(), |b| states[b].rows()))
                }
                _ => (start.rows(), start_buffers.rows()),
            };
            for step in 0..n_batches {
                // A lane with fewer batches gets padding. Its values there are never read.
                fleet.gather(data, Batches::Samples, 0, false)?;
                fleet.forward(params, buffers, Mode::EVAL)?;
                fleet.keep_value(node, step * batch, &mut embeddings[index].0)?;
                fleet.advance(1, 0)?;
            }
        }
        let all: Vec<u32> = (0..plans.len() as u32).collect();
        fleet.set_lanes(&all)?;
        Ok(fleet.rewind()?)
    }

    /// Each lane's memory loss on its first memory batch, after local training; `None` for lanes without memory.
    fn memory_loss_after(&mut self, stats: &[Stats]) -> Result<Vec<Option<f64>>> {
        let lanes: Vec<u32> =
            (0..stats.len() as u32).filter(|&l| stats[l as usize].replay_loss_first.is_some()).collect();
        if lanes.is_empty() {
            return Ok(vec![None; stats.len()]);
        }
        self.executor.fleet.set_lanes(&lanes)?;
        self.executor.fleet.rewind()?;
        self.executor.first_memory_loss()?;
        let all = self.executor.fleet.stats()?;
        Ok((0..stats.len()).map(|l| lanes.contains(&(l as u32)).then(|| all[l].reference_loss)).collect())
    }

    fn state_of(&self, lane: usize, kept: &[usize]) -> Result<ClientState> {
        let (names, Executor { fleet, states, .. }) = (self.planner.names(), &self.executor);
        kept.iter().map(|&at| Ok((names.states[at].clone(), fleet.read(&states[at], lane)?))).collect()
    }

    /// Copies the vectors of results that are still in lanes.
    pub fn download_all(&self, results: &mut [ClientResult], lanes: Option<Vec<u32>>) -> Result<()> {
        let mut in_lanes = results.iter_mut().zip(lanes.unwrap_or_default());
        in_lanes.try_for_each(|(result, lane)| self.download(lane as usize, result))
    }

    /// Copies a result's vectors from its lane.
    fn download(&self, lane: usize, result: &mut ClientResult) -> Result<()> {
        let (names, Executor { fleet, theta, buffers, uploads, .. }) = (self.planner.names(), &self.executor);
        let upload = |&at: &usize| Ok((names.uploads[at].clone(), fleet.read(&uploads[at], lane)?));
        result.weights = fleet.read(theta, lane)?;
        result.buffers = fleet.read(buffers, lane)?;
        result.uploads = self.uploaded[lane].iter().map(upload).collect::<Result<_>>()?;
        Ok(())
    }
}

/// A client's own samples, and the memory where its method has one.
fn feeds(method: &dyn Method, config: &Config) -> Feeds {
    let feed = |data, norm, dropout| {
        let mode = Mode { norm, dropout };
        Feed { data, mode, truncates: false, moves: false, targets: Vec::new() }
    };
    let truncates = method.truncates_memory();
    let memory = |config: &MemoryConfig| Feed { truncates, ..feed(Which::Public, config.bn, Dropout::Off) };
    Feeds {
        own: Feed { moves: config.data.augment, ..feed(Which::Private, NormMode::Update, Dropout::OfStep) },
        memory: method.memory().map(memory),
        memory_objective: method.memory_objective(),
    }
}
