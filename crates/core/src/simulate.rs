//! The simulator: a federation whose clients train on threads of this process.

use crate::coordinator::Coordinator;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::fusion::ServerState;
use crate::gpu::{GpuResults, GpuTrainer};
use crate::method::Method;
use crate::record::RoundRecord;
use crate::trainer::{ClientResult, ClientState, Download, Trainer};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// A federation simulated in this process: clients train on threads, one each.
///
/// ```
/// use fedproj_core::{Config, Experiment, Simulation};
///
/// let config = Config::from_layers(None, &["method.name=fedavg".into(), "federation.rounds=1".into()])?;
/// let method = config.method.build()?;
/// let experiment = Experiment::load(config, method.as_ref(), None)?;
/// let mut simulation = Simulation::new(experiment, method, 1)?;
/// let record = simulation.round(&|_| ())?;
/// assert!(record.accuracy.is_some_and(|a| a > 0.05));
/// # Ok::<(), fedproj_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Simulation {
    server: Coordinator,
    workers: Workers,
    /// What the clients of the last round sent.
    last_results: Vec<ClientResult>,
    /// The lanes in which their vectors still lie, where a GPU has trained them.
    last_lanes: Option<Vec<u32>>,
}

/// Who trains clients.
#[derive(Debug)]
enum Workers {
    /// One client a thread.
    Threads(Vec<Mutex<Trainer>>),
    /// All clients at once, as far as memory goes.
    Gpu(Box<GpuTrainer>),
}

/// What a progress bar can show while a round runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// A client has finished its local training.
    ClientDone,
    /// The server has begun to fuse.
    Fusing,
}

impl Simulation {
    /// A simulation at its start.
    ///
    /// # Errors
    /// If the network cannot be laid out.
    pub fn new(experiment: Experiment, method: Box<dyn Method>, device: impl Into<Device>) -> Result<Self> {
        Self::with_server(Coordinator::new(experiment, method, device)?)
    }

    /// A simulation that goes on from a state.
    ///
    /// # Errors
    /// If the state does not fit the network.
    pub fn resume(
        experiment: Experiment,
        method: Box<dyn Method>,
        device: impl Into<Device>,
        state: ServerState,
    ) -> Result<Self> {
        Self::with_server(Coordinator::resume(experiment, method, device, state)?)
    }

    fn with_server(server: Coordinator) -> Result<Self> {
        let workers = Self::workers(&server)?;
        Ok(Self { server, workers, last_results: Vec::new(), last_lanes: None })
    }

    fn workers(server: &Coordinator) -> Result<Workers> {
        if let Some(on) = server.on_gpu() {
            return Ok(Workers::Gpu(Box::new(GpuTrainer::new(on, server.method(), server.device().lanes_max())?)));
        }
        let experiment = server.experiment();
        let cohort = experiment.config.federation.cohort(experiment.partition.n_clients());
        let trainer = |_| Trainer::new(experiment, server.method()).map(Mutex::new);
        let n_threads = server.device().n_threads();
        Ok(Workers::Threads((0..n_threads.min(cohort)).map(trainer).collect::<Result<_>>()?))
    }

    /// What the server keeps.
    pub fn state(&self) -> &ServerState {
        self.server.state()
    }

    /// What the simulation works on.
    pub fn experiment(&self) -> &Experiment {
        self.server.experiment()
    }

    /// The method.
    pub fn method(&self) -> &dyn Method {
        self.server.method()
    }

    /// What the clients of the last round sent, in the order of their ids: their models after local training.
    ///
    /// # Errors
    /// If they are on a GPU that does not answer.
    pub fn last_results(&mut self) -> Result<&[ClientResult]> {
        if let (Workers::Gpu(trainer), Some(lanes)) = (&self.workers, self.last_lanes.take()) {
            self.last_results = trainer.downloaded(&self.last_results, &lanes)?;
        }
        Ok(&self.last_results)
    }

    /// Whether all rounds are done.
    pub fn is_done(&self) -> bool {
        self.server.is_done()
    }

    /// Runs one round.
    ///
    /// # Errors
    /// If a loss leaves the finite numbers; the error names round and client.
    pub fn round(&mut self, progress: &(dyn Fn(Progress) + Sync)) -> Result<RoundRecord> {
        let cohort = self.experiment().cohort(self.state().n_rounds_done);
        self.round_of(&cohort, progress)
    }

    /// Runs one round with these clients, in increasing order, whatever the seed would draw: how a real federation's
    /// round is repeated, in which some were late.
    ///
    /// # Errors
    /// As [`Simulation::round`].
    pub fn round_of(&mut self, cohort: &[u32], progress: &(dyn Fn(Progress) + Sync)) -> Result<RoundRecord> {
        self.last_results.clear();
        let start = Instant::now();
        let opening = self.server.open()?;
        let mut jobs = self.jobs(cohort);
        let mut on_gpu = None;
        let mut results = match &mut self.workers {
            Workers::Threads(trainers) => {
                train(trainers, self.server.method(), std::mem::take(&mut jobs), &opening.download, progress)?
            }
            Workers::Gpu(trainer) => {
                let (results, lanes) = trainer.train(self.server.method(), &opening.download, jobs, progress)?;
                on_gpu = lanes;
                results
            }
        };
        let local = start.elapsed().as_secs_f64();
        progress(Progress::Fusing);
        for result in &mut results {
            let state = std::mem::take(&mut result.state);
            if !state.is_empty() {
                self.server.state.clients.insert(result.client, state);
            }
        }
        if let (Workers::Gpu(trainer), Some(lanes)) = (&self.workers, on_gpu) {
            let record = self.server.close(&opening, &GpuResults::new(trainer, &results, &lanes), local)?;
            (self.last_results, self.last_lanes) = (results, Some(lanes));
            return Ok(record);
        }
        let record = self.server.close(&opening, &results, local)?;
        self.last_results = results;
        Ok(record)
    }

    /// The clients of a round with what they keep, largest first.
    fn jobs(&mut self, cohort: &[u32]) -> Vec<(u32, ClientState)> {
        let states = &mut self.server.state.clients;
        let mut jobs: Vec<(u32, ClientState)> =
            cohort.iter().map(|&client| (client, states.remove(&client).unwrap_or_default())).collect();
        jobs.sort_by_key(|(client, _)| std::cmp::Reverse(self.experiment().partition.size(*client as usize)));
        jobs
    }
}

/// Trains clients in the given order on all threads; results come back in the order of the clients' ids.
fn train(
    trainers: &[Mutex<Trainer>],
    method: &dyn Method,
    jobs: Vec<(u32, ClientState)>,
    download: &Arc<Download>,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Vec<ClientResult>> {
    let jobs: Vec<(u32, Mutex<Option<ClientState>>)> =
        jobs.into_iter().map(|(client, state)| (client, Mutex::new(Some(state)))).collect();
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::with_capacity(jobs.len()));
    let work = |trainer: &mut Trainer| {
        while let Some((client, state)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let state = state.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
            let result = trainer.train(method, download, *client, state);
            let failed = result.is_err();
            results.lock().unwrap_or_else(PoisonError::into_inner).push((*client, result));
            if failed {
                // Nobody starts another client once one has failed.
                next.store(jobs.len(), Ordering::Relaxed);
            }
            progress(Progress::ClientDone);
        }
    };
    std::thread::scope(|scope| {
        for trainer in trainers {
            scope.spawn(|| work(&mut trainer.lock().unwrap_or_else(PoisonError::into_inner)));
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(client, _)| *client);
    let place = |client: u32, error: Error| match error {
        Error::NotFinite { .. } => error,
        source => Error::Client { round: download.round, client, source: Box::new(source) },
    };
    results.into_iter().map(|(client, result)| result.map_err(|e| place(client, e))).collect()
}
