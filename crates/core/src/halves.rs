//! The client's half of a round: local training, on threads or a GPU.
//!
//! A round has two halves that share nothing but messages. [`Coordinator`](crate::Coordinator) opens a round with a
//! [`Download`] and closes it with the results. [`LocalTraining`] turns the download and what a client keeps into a
//! [`ClientResult`]. That is a pure function of (configuration, round, client, download, state), so any worker may do it, and
//! repeat it. Both messages and both states have bytes ([`Download::to_bytes`]). `crates/core/examples/halves.rs` runs the
//! halves in two threads that exchange bytes only.

use crate::contributions::Part;
use crate::coordinator::Coordinator;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::evaluate::{Evaluator, Model, Which};
use crate::experiment::Experiment;
use crate::gpu::{GpuTrainer, OnGpu};
use crate::method::Method;
use crate::partial::{Partial, means_of};
use crate::simulate::Progress;
use crate::trainer::{ClientResult, ClientState, Download, Trainer};
use std::cmp::Reverse;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Ends local training within a round, from any thread. The round fails with [`Error::Cancelled`] and leaves nothing behind.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Asks to stop, or takes it back.
    pub fn set(&self, stop: bool) {
        self.0.store(stop, Ordering::Relaxed);
    }

    /// An error if somebody asked.
    pub(crate) fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// The local training of any clients of an experiment.
#[derive(Debug)]
pub struct LocalTraining {
    experiment: Arc<Experiment>,
    workers: Workers,
    stop: Stop,
    n_threads: usize,
    /// The data on a GPU, for each group of clients; empty on CPUs.
    on_gpu: Vec<Arc<OnGpu>>,
    /// Made when a sum first needs the clients' outputs.
    evaluator: Option<Evaluator>,
}

#[derive(Debug)]
enum Workers {
    /// One client per thread, and on each thread one trainer per group of clients.
    Threads(Vec<Mutex<Vec<Trainer>>>),
    /// All clients of a group at once, as far as memory allows: one trainer per group.
    Gpu(Vec<GpuTrainer>),
}

impl LocalTraining {
    /// For one client at a time, on the caller's machine.
    ///
    /// # Errors
    /// If the network cannot be laid out.
    pub fn new(experiment: &Arc<Experiment>, method: &dyn Method) -> Result<Self> {
        Self::open(experiment, method, 1)
    }

    /// On a device: a client per thread, or all lanes of a GPU.
    ///
    /// # Errors
    /// If the network cannot be laid out or the GPU does not take the data.
    pub fn open(experiment: &Arc<Experiment>, method: &dyn Method, device: impl Into<Device>) -> Result<Self> {
        let device = device.into();
        let on = device.gpu().map_or(Ok(Vec::new()), |gpu| OnGpu::for_groups(gpu, experiment))?;
        Self::on(experiment, method, &device, on)
    }

    /// Beside a server on the same device, with which it shares the data on a GPU.
    pub(crate) fn beside(server: &Coordinator) -> Result<Self> {
        Self::on(server.experiment(), server.method(), server.device(), server.on_gpu())
    }

    fn on(experiment: &Arc<Experiment>, method: &dyn Method, device: &Device, on: Vec<Arc<OnGpu>>) -> Result<Self> {
        let (experiment, stop, n_threads) = (Arc::clone(experiment), Stop::default(), device.n_threads());
        let workers = if on.is_empty() {
            let cohort = experiment.config.federation.cohort(experiment.partition.n_clients());
            let trainer = |of: &Arc<Experiment>| {
                let mut trainer = Trainer::new(of, method)?;
                trainer.stop_with(&stop);
                Ok(trainer)
            };
            let thread = |_| experiment.groups().map(trainer).collect::<Result<Vec<_>>>().map(Mutex::new);
            Workers::Threads((0..n_threads.min(cohort)).map(thread).collect::<Result<_>>()?)
        } else {
            let trainer = |on: &Arc<OnGpu>| {
                let mut trainer = GpuTrainer::new(on, method, device.lanes_max())?;
                trainer.stop_with(&stop);
                Ok(trainer)
            };
            Workers::Gpu(on.iter().map(trainer).collect::<Result<_>>()?)
        };
        Ok(Self { experiment, workers, stop, n_threads, on_gpu: on, evaluator: None })
    }

    /// The experiment.
    pub fn experiment(&self) -> &Arc<Experiment> {
        &self.experiment
    }

    /// What ends training within a round.
    pub fn stop(&self) -> &Stop {
        &self.stop
    }

    /// Trains one client from what it received and what it keeps.
    ///
    /// # Errors
    /// If a message does not fit the network, or the client's loss leaves the finite numbers.
    pub fn run(
        &mut self,
        method: &dyn Method,
        download: &Arc<Download>,
        client: u32,
        state: &ClientState,
    ) -> Result<ClientResult> {
        let one = self.run_many(method, download, &[(client, state)])?.pop();
        one.ok_or_else(|| Error::Internal { what: "local training", problem: "no result".into() })
    }

    /// Trains clients; the results are in the order of their ids.
    ///
    /// # Errors
    /// As [`LocalTraining::run`], or if somebody stopped it.
    pub fn run_many(
        &mut self,
        method: &dyn Method,
        download: &Arc<Download>,
        clients: &[(u32, &ClientState)],
    ) -> Result<Vec<ClientResult>> {
        if self.experiment.n_groups() > 1 {
            return Err(Error::config(
                "model.clients, with groups of clients that have networks of their own, runs within one process only\n\
                 hint: fedproj run, or one network for all with model.name",
            ));
        }
        let (mut results, lanes) = self.train(method, std::slice::from_ref(download), clients, &|_| ())?;
        self.gpu().map_or(Ok(()), |trainer| trainer.download_all(&mut results, lanes))?;
        Ok(results)
    }

    /// As [`LocalTraining::run_many`], summed: see [`Partial`]. It holds as many results as it trains side by side.
    ///
    /// # Errors
    /// If the run looks at single clients, or as [`LocalTraining::run_many`].
    pub fn run_summed(
        &mut self,
        method: &dyn Method,
        download: &Arc<Download>,
        clients: &[(u32, &ClientState)],
    ) -> Result<Partial> {
        let experiment = Arc::clone(&self.experiment);
        let federation = &experiment.config.federation;
        let scale = federation.scale(experiment.partition.n_clients());
        let (Some(scale), Some(means)) = (scale, means_of(&experiment.config, method)) else {
            let problem =
                "clients can be summed only where federation.sum = \"fixed\" and nothing looks at single clients";
            return Err(Error::config(problem));
        };
        let needs_outputs = means.iter().any(|(_, part)| *part == Part::Logits);
        let mut partial = Partial::new(&means);
        for wave in clients.chunks(self.n_at_once()) {
            for result in self.run_many(method, download, wave)? {
                let (client, round) = (result.client, download.round);
                let model = Model { weights: &result.weights, buffers: &result.buffers };
                let outputs = if needs_outputs {
                    let with_features = method.needs_features();
                    self.evaluator()?.outputs_on(&experiment, Which::Public, &[model], with_features)?.pop()
                } else {
                    None
                };
                let added = partial.add_client(result, outputs.as_ref(), &experiment.config, scale);
                added.map_err(|source| Error::Client { round, client, source: Box::new(source) })?;
            }
        }
        Ok(partial)
    }

    fn n_at_once(&self) -> usize {
        match &self.workers {
            Workers::Threads(trainers) => trainers.len(),
            Workers::Gpu(trainers) => trainers[0].n_lanes(),
        }
    }

    fn evaluator(&mut self) -> Result<&Evaluator> {
        let evaluator = if let Some(made) = self.evaluator.take() {
            made
        } else {
            let mut made = Evaluator::new(&self.experiment.graph, self.n_threads)?;
            self.on_gpu.first().map_or(Ok(()), |on| made.use_gpu(on))?;
            made
        };
        Ok(self.evaluator.insert(evaluator))
    }

    /// As [`LocalTraining::run_many`], with one download per group of clients; on a GPU the vectors may stay in the lanes that
    /// are returned.
    pub(crate) fn train(
        &mut self,
        method: &dyn Method,
        downloads: &[Arc<Download>],
        clients: &[(u32, &ClientState)],
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<(Vec<ClientResult>, Option<Vec<u32>>)> {
        let groups = self.experiment.groups().zip(downloads);
        groups.into_iter().try_for_each(|(of, download)| download.check(of, method))?;
        let partition = &self.experiment.partition;
        let (mut jobs, n) = (clients.to_vec(), partition.n_clients());
        if let Some((client, _)) = jobs.iter().find(|(client, _)| *client as usize >= n) {
            let problem = format!("there is no client {client}, only {n} clients");
            return Err(Error::Message { what: "a task of this experiment", problem });
        }
        // The largest first, so that no thread begins a long client last.
        jobs.sort_by_key(|(client, _)| Reverse(partition.size(*client as usize)));
        match &mut self.workers {
            // Where every client flips its own coin, all may stay away.
            _ if jobs.is_empty() => Ok((Vec::new(), None)),
            Workers::Threads(trainers) => {
                Ok((train(&self.experiment, trainers, method, &jobs, downloads, progress)?, None))
            }
            Workers::Gpu(trainers) => {
                if let [trainer] = &mut trainers[..] {
                    return trainer.train(method, &downloads[0], &jobs, progress);
                }
                let mut all = Vec::with_capacity(jobs.len());
                for (group, trainer) in trainers.iter_mut().enumerate() {
                    let is_member = |(client, _): &&(u32, _)| self.experiment.group_of(*client) == group;
                    let members: Vec<_> = jobs.iter().filter(is_member).copied().collect();
                    let (mut results, lanes) = trainer.train(method, &downloads[group], &members, progress)?;
                    trainer.download_all(&mut results, lanes)?;
                    all.append(&mut results);
                }
                all.sort_by_key(|result| result.client);
                Ok((all, None))
            }
        }
    }

    pub(crate) fn gpu(&self) -> Option<&GpuTrainer> {
        match &self.workers {
            Workers::Threads(_) => None,
            Workers::Gpu(trainers) => trainers.first(),
        }
    }
}

impl Download {
    /// Whether it fits the network and the public set.
    pub(crate) fn check(&self, experiment: &Experiment, method: &dyn Method) -> Result<()> {
        let (graph, n) = (&experiment.graph, experiment.weights.len());
        Error::check_len("the global weights", self.weights.len(), n)?;
        Error::check_len("the global buffers", self.buffers.len(), experiment.buffers.len())?;
        for (name, vector) in &self.vectors {
            Error::check_len("a vector of the server", vector.len(), method.len_of_sent(name, experiment)?)?;
        }
        self.personal.values().try_for_each(|v| Error::check_len("a client's own weights", v.len(), n))?;
        let (Some((indices, targets)), Some(public)) = (&self.memory, &experiment.public) else { return Ok(()) };
        let n = public.n_samples();
        if let Some(index) = indices.iter().find(|index| **index as usize >= n) {
            let problem = format!("the memory has public sample {index}, but there are {n}");
            return Err(Error::Message { what: "a download of this experiment", problem });
        }
        let width = |node| n * graph.shape(node).len();
        let features = graph.features().map_or(0, width);
        for (what, len, expected) in [
            ("the memory's logits", targets.logits.len(), width(graph.output())),
            ("the memory's features", targets.features.len(), features),
        ] {
            if len > 0 {
                Error::check_len(what, len, expected)?;
            }
        }
        Ok(())
    }
}

/// Trains clients in the given order on all threads. Results are in the order of client ids.
fn train(
    experiment: &Experiment,
    threads: &[Mutex<Vec<Trainer>>],
    method: &dyn Method,
    jobs: &[(u32, &ClientState)],
    downloads: &[Arc<Download>],
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Vec<ClientResult>> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::with_capacity(jobs.len()));
    let work = |trainers: &mut [Trainer]| {
        while let Some((client, state)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let group = experiment.group_of(*client);
            let result = trainers[group].train(method, &downloads[group], *client, state);
            let failed = result.is_err();
            results.lock().unwrap_or_else(PoisonError::into_inner).push((*client, result));
            if failed {
                // After a failure no thread starts another client.
                next.store(jobs.len(), Ordering::Relaxed);
            }
            progress(Progress::ClientDone);
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = threads
            .iter()
            .map(|trainers| scope.spawn(|| work(&mut trainers.lock().unwrap_or_else(PoisonError::into_inner))))
            .collect();
        // The scope itself would only say that some thread panicked.
        for worker in workers {
            worker.join().unwrap_or_else(|panic| resume_unwind(panic));
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(client, _)| *client);
    let place = |client: u32, error: Error| match error {
        Error::NotFinite { .. } | Error::Cancelled => error,
        source => Error::Client { round: downloads[0].round, client, source: Box::new(source) },
    };
    results.into_iter().map(|(client, result)| result.map_err(|e| place(client, e))).collect()
}
