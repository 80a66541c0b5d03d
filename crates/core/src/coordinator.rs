//! The server's half of a round: what it sends, and what it does with the results. The simulator and a networked server
//! share it, so the same contributions give the same bytes.

use crate::config::SumKind;
use crate::contributions::{ClientSummary, Contributions, Measured, Part};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::evaluate::{Evaluator, Model, Score};
use crate::experiment::Experiment;
use crate::fusion::{Fusion, GlobalModel, SEND, ServerState};
use crate::gpu::OnGpu;
use crate::groups::Groups;
use crate::machine;
use crate::memory;
use crate::method::{LOGITS, Method};
use crate::own::Own;
use crate::partial::{self, Mean};
use crate::privacy::Privacy;
use crate::pull::{self, Pull};
use crate::record::{RoundRecord, Seconds};
use crate::trainer::{ClientResult, ClientStates, Download, LocalStats};
use std::sync::Arc;
use std::time::Instant;

/// Fuses, evaluates and records. Does not know how clients train or how their results travel.
#[derive(Debug)]
pub struct Coordinator {
    experiment: Arc<Experiment>,
    method: Box<dyn Method>,
    device: Device,
    /// One per group of clients.
    evaluators: Vec<Evaluator>,
    state: ServerState,
    /// The last evaluation of the global model, if it is of the current state; one per group of clients.
    last_scores: Option<Vec<Score>>,
    /// What stands between the contributions and the rest, if privacy is on.
    privacy: Option<Privacy>,
}

/// A round in progress.
#[derive(Debug)]
pub struct Opening {
    /// The clients of the round, in increasing order. Nothing draws them but [`Coordinator::open`]: another draw may give others.
    pub cohort: Vec<u32>,
    /// What every client of the round receives.
    pub download: Arc<Download>,
    /// What those of the further groups receive (`model.clients`).
    pub(crate) others: Vec<Arc<Download>>,
    /// The score of the global model before the round, if clients are evaluated too; one per group of clients.
    global_before: Option<Vec<Score>>,
}

impl Opening {
    /// What the clients of each group receive.
    pub(crate) fn downloads(&self) -> Vec<Arc<Download>> {
        std::iter::once(&self.download).chain(&self.others).cloned().collect()
    }

    /// How hard each client pulls at the global model.
    ///
    /// # Errors
    /// If a contribution cannot be read.
    pub fn pulls(&self, results: &dyn Contributions) -> Result<Vec<Pull>> {
        Pull::all(results, &self.download.weights)
    }
}

impl Coordinator {
    /// A server at the start of a run.
    ///
    /// # Errors
    /// If the network cannot be laid out.
    pub fn new(experiment: Experiment, method: Box<dyn Method>, device: impl Into<Device>) -> Result<Self> {
        let state = ServerState::start(&experiment);
        Self::resume(experiment, method, device, state)
    }

    /// A server that resumes from a state.
    ///
    /// # Errors
    /// If the state does not fit the network.
    pub fn resume(
        experiment: Experiment,
        method: Box<dyn Method>,
        device: impl Into<Device>,
        state: ServerState,
    ) -> Result<Self> {
        state.check(&experiment, method.as_ref())?;
        let privacy = Privacy::new(&experiment, method.as_ref())?;
        let (device, experiment) = (device.into(), Arc::new(experiment));
        let evaluator = |of: &Arc<Experiment>| Evaluator::new(&of.graph, device.n_threads());
        let mut evaluators = experiment.groups().map(evaluator).collect::<Result<Vec<_>>>()?;
        if let Some(gpu) = device.gpu() {
            let on = OnGpu::for_groups(gpu, &experiment)?;
            evaluators.iter_mut().zip(&on).try_for_each(|(evaluator, on)| evaluator.use_gpu(on))?;
        }
        Ok(Self { experiment, method, device, evaluators, state, last_scores: None, privacy })
    }

    /// What the server keeps.
    pub fn state(&self) -> &ServerState {
        &self.state
    }

    /// Returns to an earlier state, after a fusion that failed half-way.
    pub fn restore(&mut self, state: ServerState) {
        (self.state, self.last_scores) = (state, None);
    }

    /// The contributions of a round, largest outlier first: by their longest vector, as a multiple of the round's median.
    ///
    /// # Errors
    /// If a contribution cannot be read.
    pub fn outliers(&self, opening: &Opening, results: &dyn Contributions) -> Result<Vec<usize>> {
        let Download { weights, buffers, .. } = &*opening.download;
        pull::outliers(results, weights, buffers, &self.method.uploads())
    }

    /// The experiment of the run.
    pub fn experiment(&self) -> &Arc<Experiment> {
        &self.experiment
    }

    /// The method.
    pub fn method(&self) -> &dyn Method {
        self.method.as_ref()
    }

    /// The means of a round, if clients may be summed before they arrive ([`crate::Partial`]); `None` if something looks at
    /// single clients.
    pub fn means(&self) -> Option<Vec<Mean>> {
        partial::means_of(&self.experiment.config, self.method())
    }

    /// The device that it computes on.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn on_gpu(&self) -> Vec<Arc<OnGpu>> {
        self.evaluators.iter().filter_map(|evaluator| evaluator.on_gpu().cloned()).collect()
    }

    /// Whether all rounds are done, or the next one would exceed the privacy budget.
    pub fn is_done(&self) -> bool {
        self.state.n_rounds_done >= self.experiment.config.federation.rounds || self.is_budget_spent()
    }

    /// Whether the next round would exceed `privacy.epsilon_max`.
    pub fn is_budget_spent(&self) -> bool {
        self.privacy.as_ref().is_some_and(|privacy| !privacy.allows_after(self.state.n_rounds_done))
    }

    /// Why the run has ended before its last round; none if it has not.
    pub fn ended_early(&self) -> Option<String> {
        let (n, config) = (self.state.n_rounds_done, &self.experiment.config);
        let (of, most) = (config.federation.rounds, config.privacy.epsilon_max);
        let is_early = n < of && self.is_budget_spent();
        is_early.then(|| format!("ended after round {n} of {of}: the next would exceed privacy.epsilon_max = {most}"))
    }

    /// Counts releases of rounds that a crash lost: they will be made again, with other noise.
    pub fn count_lost_releases(&mut self, n: u32) {
        if let Some(privacy) = &mut self.privacy {
            privacy.count_lost(n);
        }
    }

    /// Rejects a round whose results, `n_vectors` vectors of the model's length, do not fit into this machine's memory.
    ///
    /// # Errors
    /// States the sizes.
    pub fn check_memory(&self, n_vectors: usize) -> Result<()> {
        machine::check_memory(&self.experiment.graph, machine::N_VECTORS_MIN + n_vectors)
    }

    /// Begins the next round and draws its clients. An unfinished round can begin again, with the same clients unless privacy
    /// rests on their being drawn in secret.
    ///
    /// # Errors
    /// If the network cannot take a batch.
    pub fn open(&mut self) -> Result<Opening> {
        let round = self.state.n_rounds_done;
        let drawn = self.privacy.as_ref().map(|privacy| privacy.cohort(round));
        self.open_with(drawn.unwrap_or_else(|| self.experiment.cohort(round)))
    }

    /// Begins the next round with these clients, in increasing order. None are named where a server first learns who is online;
    /// it cannot run a method that gives clients weights of their own ([`Method::needs_simulator`]).
    ///
    /// # Errors
    /// As [`Coordinator::open`].
    pub fn open_with(&mut self, cohort: Vec<u32>) -> Result<Opening> {
        let experiment = Arc::clone(&self.experiment);
        let round = self.state.n_rounds_done;
        if round == 0 {
            for (group, evaluator) in self.evaluators.iter().enumerate() {
                let state = self.state.group_mut(group);
                let global = GlobalModel { experiment: experiment.group(group), evaluator, state };
                state.targets = self.method.first_targets(&global)?.map(Arc::new);
            }
        }
        let known = self.last_scores.take();
        let sent = |(group, state): (usize, &ServerState)| self.score(group, &state.weights, &state.buffers);
        let global_before = match (experiment.config.federation.evaluate_clients, known) {
            (true, None) => Some(self.state.groups().enumerate().map(sent).collect::<Result<_>>()?),
            (_, scores) => scores,
        };
        let mut downloads = self.state.groups().map(|state| self.download(round, state, &cohort).map(Arc::new));
        let download = downloads.next().unwrap_or_else(|| Ok(Arc::default()))?;
        let others = downloads.collect::<Result<_>>()?;
        Ok(Opening { cohort, download, others, global_before })
    }

    /// Ends a round with the contributions that count: fuses, evaluates and records. `local` is the clients' training
    /// time in seconds.
    ///
    /// # Errors
    /// If a contribution cannot be read, or fusion gives values that are not finite.
    pub fn close(&mut self, opening: &Opening, results: &dyn Contributions, local: f64) -> Result<RoundRecord> {
        let experiment = Arc::clone(&self.experiment);
        let federation = &experiment.config.federation;
        let round = self.state.n_rounds_done;
        let start = Instant::now();
        let (n_threads, uploads) = (self.device.n_threads(), self.method.uploads());
        check_results(&experiment, round, results, &uploads)?;
        let n_groups = experiment.n_groups();
        let published_before: Vec<_> =
            (0..n_groups).map(|group| self.state.group_mut(group).evaluated.take()).collect();
        // From here on, nothing sees what single clients sent.
        let release = match &self.privacy {
            Some(privacy) => Some(privacy.release(&experiment, &self.evaluators[0], results, &mut self.state)?),
            None => None,
        };
        let results = release.as_ref().map_or(results, |release| release);
        let (groups, mut distilled) = (Groups::new(&experiment, &self.evaluators), Vec::new());
        for group in 0..n_groups {
            let state = self.state.group_mut(group);
            let mut fusing = Fusion::new(&groups, group, n_threads, results, &uploads, state)?;
            self.method.fuse(&mut fusing)?;
            distilled.push((fusing.before_distillation.take(), fusing.distill_loss.take()));
        }
        for (group, before) in published_before.into_iter().enumerate() {
            let state = self.state.group_mut(group);
            state.check_finite(round)?;
            if federation.average_evaluated > 0.0 {
                state.average_published(federation.average_evaluated, round, before);
            }
            state.n_rounds_done += 1;
        }
        let fusion = start.elapsed().as_secs_f64();

        let start = Instant::now();
        let is_due = federation.is_evaluated(round) || self.is_done();
        let is_evaluated = is_due || federation.evaluate_clients;
        let scores = is_evaluated.then(|| self.scores()).transpose()?;
        let mut record = self.describe(round, results, opening);
        if let Some(release) = &release {
            (record.cohort, record.train_loss) = (Vec::new(), None);
            record.privacy = Some(release.spent.clone());
        }
        if let Some(scores) = &scores {
            record.set_scores(scores);
        }
        if let (true, Some(before)) = (federation.evaluate_clients, &opening.global_before) {
            self.describe_clients(results, before, &mut record)?;
        }
        self.last_scores = scores.filter(|_| self.state.groups().all(|state| state.evaluated.is_none()));
        let (before_distillation, distill_loss) = distilled.swap_remove(0);
        record.accuracy_before_distillation = before_distillation.map(|s| s.accuracy);
        record.distill_loss = distill_loss;
        record.seconds = Seconds { local, fusion, evaluation: start.elapsed().as_secs_f64() };
        Ok(record)
    }

    /// Ends a round that has no contributions: the model stays as it is. Under privacy the round counts as a release, since
    /// others may have seen what was lost.
    ///
    /// # Errors
    /// If the model cannot be evaluated.
    pub fn skip(&mut self, opening: &Opening) -> Result<RoundRecord> {
        let (experiment, round) = (Arc::clone(&self.experiment), self.state.n_rounds_done);
        self.state.n_rounds_done += 1;
        let mut record = self.describe(round, &Vec::<ClientResult>::new(), opening);
        record.train_loss = None;
        if experiment.config.federation.is_evaluated(round) || self.is_done() {
            let published = self.state.published();
            let score = self.score(0, published.weights, published.buffers)?;
            (record.accuracy, record.loss) = (Some(score.accuracy), Some(score.loss));
            record.per_class = Some(score.per_class);
        }
        record.privacy = self.privacy.as_ref().map(|privacy| privacy.spent_without_release(round));
        Ok(record)
    }

    /// The score of a model with a group's network.
    fn score(&self, group: usize, weights: &[f32], buffers: &[f32]) -> Result<Score> {
        self.evaluators[group].score_on_test(&self.experiment, Model { weights, buffers })
    }

    /// The scores of the published models of all groups.
    fn scores(&self) -> Result<Vec<Score>> {
        let published = self.state.groups().map(ServerState::published).enumerate();
        published.map(|(group, Model { weights, buffers })| self.score(group, weights, buffers)).collect()
    }

    /// What the clients of a group receive; `state` is the group's.
    fn download(&self, round: u32, state: &ServerState, cohort: &[u32]) -> Result<Download> {
        let sent = |(name, v): (&String, &Vec<f32>)| name.strip_prefix(SEND).map(|name| (name.to_owned(), v.clone()));
        let memory = match (self.method.memory(), &state.targets, &self.experiment.public) {
            (Some(config), Some(targets), Some(public)) => {
                let indices = memory::draw(config, self.experiment.config.seed, round, public.n_samples());
                Some((indices, Arc::clone(targets)))
            }
            _ => None,
        };
        let personal = self.method.weights_of(&self.experiment, state, cohort)?;
        Ok(Download {
            round,
            weights: state.weights.clone(),
            buffers: state.buffers.clone(),
            vectors: state.vectors.iter().filter_map(sent).collect(),
            memory,
            personal: cohort.iter().copied().zip(personal).collect(),
        })
    }

    fn describe(&self, round: u32, results: &dyn Contributions, opening: &Opening) -> RoundRecord {
        let all = || (0..results.n()).map(|at| results.summary(at));
        let (train_loss, compared, projected, [cosine, memory_loss_before, memory_loss_after]) = self.measured(results);
        let n_public = self.experiment.public.as_deref().map_or(1, fedproj_data::Dataset::n_samples);
        let with_models = self.method.sends_weights();
        // Of logits for private samples, a client receives its own rows.
        let counted = |download: &Download| {
            let rows = download.vectors.get(LOGITS).filter(|_| self.method.sends_logits()).map_or(0, Vec::len);
            (download.n_floats(n_public, with_models) - rows, rows)
        };
        let floats: Vec<(usize, usize)> = opening.downloads().iter().map(|download| counted(download)).collect();
        let exchanged = |of: &ClientSummary<'_>| self.method.exchanged(&self.experiment.graph, of.n_samples);
        let in_all = |of: ClientSummary<'_>| {
            let (others, rows) = floats[self.experiment.group_of(of.client)];
            others + rows.min(of.n_samples * self.n_classes())
        };
        let floats_down: usize =
            all().map(|client| exchanged(&client).map_or_else(|| in_all(client), |[down, _]| down)).sum();
        let floats_up = |at: usize| {
            if let Some([_, up]) = exchanged(&results.summary(at)) {
                return up;
            }
            let memory = self.method.memory().filter(|_| !with_models);
            memory.map_or_else(|| results.n_values(at), |memory| memory.size.min(n_public) * self.n_classes())
        };
        RoundRecord {
            round,
            cohort: all().map(|r| r.client).collect(),
            train_loss: Some(train_loss),
            projection_rate: (compared > 0).then(|| projected as f64 / compared as f64),
            cosine,
            memory_loss_before,
            memory_loss_after,
            bytes_down: 4 * floats_down as u64,
            bytes_up: 4 * (0..results.n()).map(floats_up).sum::<usize>() as u64,
            model_hash: hash_of(self.state.groups().flat_map(|state| [&state.weights[..], &state.buffers])),
            ..RoundRecord::default()
        }
    }

    /// The mean loss, the compared and projected steps, and the means of the measurements that not every client has.
    fn measured(&self, results: &dyn Contributions) -> (f64, u64, u64, [Option<f64>; 3]) {
        let stats = || (0..results.n()).map(|at| results.summary(at).stats);
        if self.experiment.config.federation.sum == SumKind::Fixed {
            let mut sum = Measured::default();
            stats().for_each(|stats| sum.add(&Measured::of(stats)));
            return results.measured().unwrap_or(sum).mean(results.n());
        }
        let mean = |of: fn(&LocalStats) -> Option<f64>| {
            let values: Vec<f64> = stats().filter_map(of).collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
        };
        let loss = stats().map(|s| s.loss).sum::<f64>() / results.n().max(1) as f64;
        let compared = stats().map(|s| u64::from(s.n_compared)).sum();
        let projected = stats().map(|s| u64::from(s.n_projected)).sum();
        let optional = [mean(|s| s.cosine), mean(|s| s.memory_loss_before), mean(|s| s.memory_loss_after)];
        (loss, compared, projected, optional)
    }

    fn describe_clients(&self, results: &dyn Contributions, before: &[Score], record: &mut RoundRecord) -> Result<()> {
        let n = results.n() as f64;
        let (mut forgetting, mut client, mut personal) = (Vec::new(), 0.0, Vec::new());
        for at in 0..results.n() {
            let (weights, buffers) = (whole(results, at, Part::Weights)?, whole(results, at, Part::Buffers)?);
            let group = self.experiment.group_of(results.summary(at).client);
            let score = self.score(group, &weights, &buffers)?;
            let lost = before[group].per_class.iter().zip(&score.per_class).map(|(before, after)| before - after);
            forgetting.push(lost.fold(f64::NEG_INFINITY, f64::max));
            client += score.accuracy / n;
            // Where a part of the model stays with its client, it uses the new global model with its own part.
            let own = Own::new(self.method(), &self.experiment.group(group).graph);
            let used = if own.is_empty() {
                score
            } else {
                self.score(group, &own.personalise(&self.state.group(group).weights, &weights), &buffers)?
            };
            personal.push(self.on_own_classes(results.summary(at).client, &used));
        }
        // Where models do not travel, a client starts from its own, not from the global one.
        if self.method.sends_weights() {
            record.forgetting = Some(forgetting.iter().map(|lost| lost / n).sum());
            record.forgetting_by_client = Some(forgetting);
        }
        record.client_accuracy = Some(client);
        record.set_personal(personal);
        Ok(())
    }

    /// Measures the models that clients keep for themselves, in the place of those that they sent.
    ///
    /// # Errors
    /// If a contribution cannot be read.
    pub fn describe_personal(
        &self,
        kept: &ClientStates,
        results: &dyn Contributions,
        record: &mut RoundRecord,
    ) -> Result<()> {
        let Some(name) = self.method.personal_model().filter(|_| record.personal_accuracy.is_some()) else {
            return Ok(());
        };
        let mut personal = Vec::new();
        for at in 0..results.n() {
            let client = results.summary(at).client;
            let Some(weights) = kept.get(&client).and_then(|state| state.get(name)) else { return Ok(()) };
            let score = self.score(self.experiment.group_of(client), weights, &whole(results, at, Part::Buffers)?)?;
            personal.push(self.on_own_classes(client, &score));
        }
        record.set_personal(personal);
        Ok(())
    }

    fn n_classes(&self) -> usize {
        self.experiment.private.n_classes()
    }

    /// Accuracy on the classes that a client holds.
    fn on_own_classes(&self, client: u32, score: &Score) -> f64 {
        let labels = self.experiment.private.labels().unwrap_or(&[]);
        let held = self.experiment.partition.class_counts(client as usize, labels, score.per_class.len());
        score.accuracy_on((0..held.len()).filter(|&class| held[class] > 0))
    }
}

/// A whole vector of a contribution.
fn whole(results: &dyn Contributions, at: usize, part: Part<'_>) -> Result<Vec<f32>> {
    let mut values = vec![0.0; results.len_of(at, part)];
    results.read(at, part, 0, &mut values)?;
    Ok(values)
}

/// Whether the results are of this experiment's clients, and all vectors have the lengths of this network.
fn check_results(experiment: &Experiment, round: u32, results: &dyn Contributions, uploads: &[&str]) -> Result<()> {
    let n_public = experiment.n_public();
    let wrong = |problem: String| Error::Message { what: "results of this round", problem };
    // By coins of their own, all clients may have stayed away.
    if results.n() == 0 && !experiment.config.privacy.is_on() {
        return Err(wrong("there are none".into()));
    }
    for at in 0..results.n() {
        let (ClientSummary { client, n_samples, .. }, n) = (results.summary(at), experiment.partition.n_clients());
        if client as usize >= n {
            return Err(wrong(format!("there is no client {client}, only {n} clients")));
        }
        // As many as there are indices, so that no sum of them overflows.
        if n_samples > u32::MAX as usize {
            return Err(wrong(format!("client {client} claims {n_samples} samples")));
        }
        let of = experiment.group(experiment.group_of(client));
        let (graph, n) = (&of.graph, of.weights.len());
        let outputs = |node| n_public * graph.shape(node).len();
        let always = [(Part::Weights, n), (Part::Buffers, of.buffers.len())];
        let optional = [(Part::Logits, outputs(graph.output())), (Part::Features, graph.features().map_or(0, outputs))];
        let check = |(part, expected): (Part<'_>, usize), needed: bool| match results.len_of(at, part) {
            0 if !needed => Ok(()),
            found => Error::check_len("a client's vector", found, expected),
        };
        let checked = always.into_iter().try_for_each(|part| check(part, true));
        let checked = checked.and_then(|()| optional.into_iter().try_for_each(|part| check(part, false)));
        let checked = checked.and_then(|()| uploads.iter().try_for_each(|u| check((Part::Upload(u), n), true)));
        checked.map_err(|e| Error::Client { round, client, source: Box::new(e) })?;
    }
    Ok(())
}

/// BLAKE3 of weights and buffers, little-endian.
pub fn model_hash(weights: &[f32], buffers: &[f32]) -> String {
    hash_of([weights, buffers].into_iter())
}

/// BLAKE3 of vectors, little-endian.
pub(crate) fn hash_of<'a>(vectors: impl Iterator<Item = &'a [f32]>) -> String {
    let mut hasher = blake3::Hasher::new();
    for vector in vectors {
        for chunk in vector.chunks(4096) {
            let bytes: Vec<u8> = chunk.iter().flat_map(|v| v.to_le_bytes()).collect();
            hasher.update(&bytes);
        }
    }
    hasher.finalize().to_hex().to_string()
}
