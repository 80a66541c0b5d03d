//! The round loop: sample, broadcast, train, fuse, evaluate, record.

use crate::error::{Error, Result};
use crate::evaluate::{Evaluator, Model, Score};
use crate::experiment::Experiment;
use crate::fusion::{Fusion, SEND, ServerState};
use crate::memory;
use crate::method::Method;
use crate::record::{RoundRecord, Seconds};
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
    experiment: Arc<Experiment>,
    method: Box<dyn Method>,
    n_threads: usize,
    trainers: Vec<Mutex<Trainer>>,
    evaluator: Evaluator,
    state: ServerState,
    /// The last evaluation of the global model, if it is of the current state.
    last_score: Option<Score>,
    /// What the clients of the last round sent.
    last_results: Vec<ClientResult>,
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
    pub fn new(experiment: Experiment, method: Box<dyn Method>, n_threads: usize) -> Result<Self> {
        let state = ServerState {
            weights: experiment.weights.clone(),
            buffers: experiment.buffers.clone(),
            ..ServerState::default()
        };
        Self::resume(experiment, method, n_threads, state)
    }

    /// A simulation that goes on from a state.
    ///
    /// # Errors
    /// If the state does not fit the network.
    pub fn resume(
        experiment: Experiment,
        method: Box<dyn Method>,
        n_threads: usize,
        state: ServerState,
    ) -> Result<Self> {
        let (expected, found) = (experiment.weights.len(), state.weights.len());
        if expected != found || experiment.buffers.len() != state.buffers.len() {
            return Err(Error::config(format!("a state of {found} weights does not fit a network of {expected}")));
        }
        let n_threads = n_threads.max(1);
        let experiment = Arc::new(experiment);
        let cohort = experiment.config.federation.cohort(experiment.partition.n_clients());
        let trainer = |_| Trainer::new(&experiment, method.as_ref()).map(Mutex::new);
        let trainers = (0..n_threads.min(cohort)).map(trainer).collect::<Result<_>>()?;
        let evaluator = Evaluator::new(&experiment.graph, n_threads)?;
        Ok(Self {
            experiment,
            method,
            n_threads,
            trainers,
            evaluator,
            state,
            last_score: None,
            last_results: Vec::new(),
        })
    }

    /// What the server keeps.
    pub fn state(&self) -> &ServerState {
        &self.state
    }

    /// What the simulation works on.
    pub fn experiment(&self) -> &Experiment {
        &self.experiment
    }

    /// The method.
    pub fn method(&self) -> &dyn Method {
        self.method.as_ref()
    }

    /// What the clients of the last round sent, in the order of their ids: their models after local training.
    pub fn last_results(&self) -> &[ClientResult] {
        &self.last_results
    }

    /// Whether all rounds are done.
    pub fn is_done(&self) -> bool {
        self.state.n_rounds_done >= self.experiment.config.federation.rounds
    }

    /// Runs one round.
    ///
    /// # Errors
    /// If a loss leaves the finite numbers; the error names round and client.
    pub fn round(&mut self, progress: &(dyn Fn(Progress) + Sync)) -> Result<RoundRecord> {
        let experiment = Arc::clone(&self.experiment);
        let federation = &experiment.config.federation;
        let round = self.state.n_rounds_done;
        let cohort = experiment.cohort(round);
        self.last_results.clear();
        let start = Instant::now();
        if round == 0 {
            let server = fusion(&experiment, &self.evaluator, self.n_threads, round, &[], &mut self.state);
            let targets = self.method.first_targets(&server)?;
            self.state.targets = targets.map(Arc::new);
        }
        let global_before = match (federation.evaluate_clients, self.last_score.take()) {
            (true, None) => Some(self.score(&self.state.weights, &self.state.buffers)?),
            (_, score) => score,
        };
        let download = Arc::new(self.download(round));
        let mut results = self.train(&cohort, &download, progress)?;
        let local = start.elapsed().as_secs_f64();

        progress(Progress::Fusing);
        let start = Instant::now();
        for result in &mut results {
            let state = std::mem::take(&mut result.state);
            if !state.is_empty() {
                self.state.clients.insert(result.client, state);
            }
        }
        let mut fusing = fusion(&experiment, &self.evaluator, self.n_threads, round, &results, &mut self.state);
        self.method.fuse(&mut fusing)?;
        let (evaluated, before_distillation, distill_loss) =
            (fusing.evaluated.take(), fusing.before_distillation.take(), fusing.distill_loss.take());
        if self.state.weights.iter().chain(&self.state.buffers).any(|v| !v.is_finite()) {
            return Err(Error::FusionNotFinite { round, what: "a weight of the global model" });
        }
        self.state.n_rounds_done += 1;
        let fusion_seconds = start.elapsed().as_secs_f64();

        let start = Instant::now();
        let is_due = (round + 1).is_multiple_of(federation.evaluate_every) || round + 1 == federation.rounds;
        let score = match &evaluated {
            _ if !is_due && !federation.evaluate_clients => None,
            Some((weights, buffers)) => Some(self.score(weights, buffers)?),
            None => Some(self.score(&self.state.weights, &self.state.buffers)?),
        };
        let mut record = self.describe(round, cohort, &results, &download);
        if let Some(score) = &score {
            record.accuracy = Some(score.accuracy);
            record.loss = Some(score.loss);
            record.per_class = Some(score.per_class.clone());
        }
        if let (true, Some(before)) = (federation.evaluate_clients, &global_before) {
            self.describe_clients(&results, before, &mut record)?;
        }
        self.last_score = score.filter(|_| evaluated.is_none());
        record.accuracy_before_distillation = before_distillation.map(|s| s.accuracy);
        record.distill_loss = distill_loss;
        self.last_results = results;
        record.seconds = Seconds { local, fusion: fusion_seconds, evaluation: start.elapsed().as_secs_f64() };
        Ok(record)
    }

    fn score(&self, weights: &[f32], buffers: &[f32]) -> Result<Score> {
        let scores = self.evaluator.scores(&[Model { weights, buffers }], &self.experiment.test)?;
        Ok(scores.into_iter().next().unwrap_or_default())
    }

    fn download(&self, round: u32) -> Download {
        let sent = |(name, v): (&String, &Vec<f32>)| name.strip_prefix(SEND).map(|name| (name.to_owned(), v.clone()));
        let memory = match (self.method.memory(), &self.state.targets, &self.experiment.public) {
            (Some(config), Some(targets), Some(public)) => {
                let indices = memory::draw(config, self.experiment.config.seed, round, public.n_samples());
                Some((indices, Arc::clone(targets)))
            }
            _ => None,
        };
        Download {
            round,
            weights: self.state.weights.clone(),
            buffers: self.state.buffers.clone(),
            vectors: self.state.vectors.iter().filter_map(sent).collect(),
            memory,
        }
    }

    /// Trains the cohort, largest clients first, on all threads; results come back in the order of the clients' ids.
    fn train(
        &mut self,
        cohort: &[u32],
        download: &Arc<Download>,
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<Vec<ClientResult>> {
        let mut jobs: Vec<(u32, Mutex<Option<ClientState>>)> = cohort
            .iter()
            .map(|&client| (client, Mutex::new(Some(self.state.clients.remove(&client).unwrap_or_default()))))
            .collect();
        jobs.sort_by_key(|(client, _)| std::cmp::Reverse(self.experiment.partition.size(*client as usize)));
        let next = AtomicUsize::new(0);
        let results = Mutex::new(Vec::with_capacity(jobs.len()));
        let method = self.method.as_ref();
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
            for trainer in &self.trainers {
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

    fn describe(&self, round: u32, cohort: Vec<u32>, results: &[ClientResult], download: &Download) -> RoundRecord {
        let n = results.len().max(1) as f64;
        let stats = || results.iter().map(|r| &r.stats);
        let mean = |of: fn(&crate::LocalStats) -> Option<f64>| {
            let values: Vec<f64> = stats().filter_map(of).collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
        };
        let compared: u32 = stats().map(|s| s.n_compared).sum();
        let projected: u32 = stats().map(|s| s.n_projected).sum();
        // What a real federation would send: weights, buffers and a method's vectors; of the memory, indices and logits.
        let floats_down = download.weights.len()
            + download.buffers.len()
            + download.vectors.values().map(Vec::len).sum::<usize>()
            + download.memory.as_ref().map_or(0, |(indices, targets)| {
                let n_public = self.experiment.public.as_ref().map_or(1, fedproj_data::Dataset::n_samples);
                indices.len() * (1 + (targets.logits.len() + targets.features.len()) / n_public)
            });
        let floats_up =
            |r: &ClientResult| r.weights.len() + r.buffers.len() + r.uploads.values().map(Vec::len).sum::<usize>();
        RoundRecord {
            round,
            cohort,
            train_loss: stats().map(|s| s.loss).sum::<f64>() / n,
            projection_rate: (compared > 0).then(|| f64::from(projected) / f64::from(compared)),
            cosine: mean(|s| s.cosine),
            memory_loss_before: mean(|s| s.memory_loss_before),
            memory_loss_after: mean(|s| s.memory_loss_after),
            bytes_down: 4 * (floats_down * results.len()) as u64,
            bytes_up: 4 * results.iter().map(floats_up).sum::<usize>() as u64,
            model_hash: model_hash(&self.state.weights, &self.state.buffers),
            ..RoundRecord::default()
        }
    }

    fn describe_clients(&self, results: &[ClientResult], before: &Score, record: &mut RoundRecord) -> Result<()> {
        let models: Vec<Model<'_>> =
            results.iter().map(|r| Model { weights: &r.weights, buffers: &r.buffers }).collect();
        let scores = self.evaluator.scores(&models, &self.experiment.test)?;
        let n = scores.len() as f64;
        let labels = self.experiment.private.labels().unwrap_or(&[]);
        let (mut forgetting, mut client, mut personal) = (Vec::with_capacity(scores.len()), 0.0, 0.0);
        for (score, result) in scores.iter().zip(results) {
            let lost = before.per_class.iter().zip(&score.per_class).map(|(before, after)| before - after);
            forgetting.push(lost.fold(f64::NEG_INFINITY, f64::max));
            client += score.accuracy / n;
            let held = self.experiment.partition.class_counts(result.client as usize, labels, score.per_class.len());
            personal += score.accuracy_on((0..held.len()).filter(|&class| held[class] > 0)) / n;
        }
        record.forgetting = Some(forgetting.iter().map(|lost| lost / n).sum());
        record.forgetting_by_client = Some(forgetting);
        record.client_accuracy = Some(client);
        record.personal_accuracy = Some(personal);
        Ok(())
    }
}

fn fusion<'a>(
    experiment: &'a Experiment,
    evaluator: &'a Evaluator,
    n_threads: usize,
    round: u32,
    results: &'a [ClientResult],
    state: &'a mut ServerState,
) -> Fusion<'a> {
    Fusion {
        experiment,
        evaluator,
        n_threads,
        round,
        results,
        state,
        evaluated: None,
        before_distillation: None,
        distill_loss: None,
    }
}

/// BLAKE3 of weights and buffers, little-endian.
pub fn model_hash(weights: &[f32], buffers: &[f32]) -> String {
    let mut hasher = blake3::Hasher::new();
    for vector in [weights, buffers] {
        for chunk in vector.chunks(4096) {
            let bytes: Vec<u8> = chunk.iter().flat_map(|v| v.to_le_bytes()).collect();
            hasher.update(&bytes);
        }
    }
    hasher.finalize().to_hex().to_string()
}
