//! The round loop of a server: ask, wait, close, fuse, record. A killed server resumes where the journal ends.

use super::check::Trial;
use super::config::{Ensemble, ServerConfig};
use super::desk::{Desk, Offer};
use super::journal::{Entry, Event};
use super::members::Members;
use super::patience::Patience;
use super::spool::{Spool, Spooled};
use super::status::Status;
use super::summing::{PAUSE_FIRST, PAUSE_MAX};
use crate::backoff::BackOff;
use crate::error::{Error, Result};
use crate::secure::MaskedLayout;
use crate::wire::{
    Blob, Contribution, Done, NamedBlob, Task, TaskMemory, encode_f32, encode_public, encode_u32, parts_of,
};
use fedproj_core::{
    ClientStates, Config, Contributions, Coordinator, Download, Experiment, FederationConfig, Opening, Pull,
    RobustConfig, RoundRecord, RunDir, Summary,
};
use fedproj_data::gather_rows;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// What the journal knows of a run that was started before.
#[derive(Clone, Debug, Default)]
pub struct Recovered {
    /// The last round that was opened, and the clients that were asked.
    opened: Option<(u32, Vec<u32>)>,
    /// Contributions accepted in it.
    accepted: BTreeMap<u32, Contribution>,
    /// Clients whose contributions count, if it was closed.
    closed: Option<Vec<u32>>,
    /// Each client's last contribution that counted: round and id.
    pub last: BTreeMap<u32, (u32, String)>,
    /// The rounds that were kept, if the run was rolled back and no round was opened since.
    pub rolled_back: Option<u32>,
    /// A round that ended without a secure sum, if none was opened since.
    empty: Option<u32>,
}

impl Recovered {
    /// Whether a round has ended without a secure sum.
    pub(super) fn has_ended_empty(&self, round: u32) -> bool {
        self.empty == Some(round)
    }

    /// Follows an entry of the journal.
    pub fn follow(&mut self, run: &str, entry: Entry) {
        match entry.event {
            Event::RoundOpened { run: of, round, asked } if of == run => {
                *self = Self { opened: Some((round, asked)), last: std::mem::take(&mut self.last), ..Self::default() };
            }
            Event::Accepted(accepted) if accepted.run == run => {
                self.last.insert(accepted.client, (accepted.round, accepted.id()));
                self.accepted.insert(accepted.client, accepted);
            }
            Event::RoundClosed { run: of, counted, .. } if of == run => self.closed = Some(counted),
            Event::AskedInstead { run: of, clients, .. } if of == run => {
                self.opened.iter_mut().for_each(|(_, asked)| asked.extend(&clients));
            }
            Event::Excluded { run: of, client, .. } if of == run => {
                self.closed.iter_mut().for_each(|counted| counted.retain(|c| *c != client));
            }
            Event::Damaged { run: of, client, .. } if of == run => {
                self.accepted.remove(&client);
                self.last.remove(&client);
                self.closed = None;
            }
            Event::SumFailed { run: of, round, .. } if of == run => {
                self.last.retain(|_, (last, _)| *last != round);
                *self = Self { last: std::mem::take(&mut self.last), ..Self::default() };
            }
            Event::RoundEmpty { run: of, round, .. } if of == run => {
                self.last.retain(|_, (last, _)| *last != round);
                *self = Self { empty: Some(round), last: std::mem::take(&mut self.last), ..Self::default() };
            }
            Event::RolledBack { run: of, to_round } if of == run => {
                self.last.retain(|_, (round, _)| *round < to_round);
                *self = Self { rolled_back: Some(to_round), last: std::mem::take(&mut self.last), ..Self::default() };
            }
            _ => (),
        }
    }
}

/// A round of the journal: the clients that were asked, contributions that were accepted, and who counts if it was closed.
pub(super) type Opened = (Vec<u32>, BTreeMap<u32, Contribution>, Option<Vec<u32>>);

/// A run on a server.
#[derive(Debug)]
pub struct Rounds {
    /// The federation's folder.
    pub dir: PathBuf,
    /// The run's name: a hash of federation and configuration.
    pub run: String,
    /// The server's settings.
    pub config: ServerConfig,
    /// The server's half of a round.
    pub coordinator: Coordinator,
    /// Where rounds are recorded.
    pub directory: RunDir,
    /// Where nodes are served.
    pub desk: Arc<Desk>,
    /// What the status page shows.
    pub status: Arc<Status>,
    /// What the journal knows.
    pub recovered: Recovered,
    /// Who belongs to the federation.
    pub members: Members,
    /// Whom rounds wait for.
    pub(super) patience: Patience,
    /// Set to end the loop, within 0.2 s.
    pub stop: Arc<AtomicBool>,
    /// When the server began to listen.
    pub started: Instant,
}

/// What stays the same for all rounds.
pub(super) struct Lasting {
    config: Blob,
    public: Option<Blob>,
    pub trial: Arc<Trial>,
    /// The layout of secure sums.
    pub layout: Option<MaskedLayout>,
}

impl Rounds {
    /// Runs all remaining rounds.
    ///
    /// # Errors
    /// If the disk fails or fusion leaves the finite numbers. Everything acknowledged is on disk.
    pub fn run(&mut self) -> Result<Summary> {
        let experiment = Arc::clone(self.coordinator.experiment());
        let lasting = Lasting {
            config: self.desk.blobs.put(for_nodes(&experiment.config, self.config.secure)?.as_bytes())?,
            public: experiment.public.as_ref().map(|p| self.desk.blobs.put(&encode_public(p))).transpose()?,
            trial: Arc::new(Trial::new(&experiment)?),
            layout: if self.config.secure {
                let (n, method) = (experiment.partition.n_clients(), self.coordinator.method());
                Some(MaskedLayout::new(&experiment, method, n, self.config.fewest_in_sum(&experiment.config, n))?)
            } else {
                None
            },
        };
        let mut pauses = BackOff::new(PAUSE_FIRST, PAUSE_MAX);
        while !self.coordinator.is_done() {
            self.round(&experiment, &lasting, &mut pauses)?;
        }
        if let Some(reason) = self.coordinator.ended_early() {
            tracing::warn!(run = self.run, "{reason}");
        }
        let state = self.coordinator.state();
        let summary = self.directory.finish(&experiment, state)?;
        self.desk.finish(Done { run: self.run.clone(), model_hash: summary.model_hash.clone() });
        self.status.finish();
        Ok(summary)
    }

    fn round(&mut self, experiment: &Experiment, lasting: &Lasting, pauses: &mut BackOff) -> Result<()> {
        // Clients are drawn later, from the nodes that are online.
        let opening = self.coordinator.open_with(Vec::new())?;
        let round = opening.download.round;
        let (up, down) = self.desk.traffic();
        let spool = Spool::new(&self.dir, &self.run, round);
        spool.remove_others();
        let start = Instant::now();
        let (n_late, mut record, pulls) = if lasting.layout.is_some() {
            let (n_late, record) = self.secure_round(experiment, &opening, lasting, pauses)?;
            // How hard one client pulls is nobody's business here.
            (n_late, record, Vec::new())
        } else {
            let (n_asked, results) = self.whole_contributions(experiment, &opening, lasting)?;
            let (n_late, local) = (n_asked - results.n(), start.elapsed().as_secs_f64());
            if experiment.config.privacy.is_on() {
                // One release per round: a fusion that fails is not repeated with other noise. And no client's pull shows.
                (n_late, self.coordinator.close(&opening, &results, local)?, Vec::new())
            } else {
                let (record, pulls) = self.fuse(&opening, results, local)?;
                (n_asked - record.cohort.len(), record, pulls)
            }
        };
        let (up_now, down_now) = self.desk.traffic();
        (record.bytes_up, record.bytes_down) = (up_now.wrapping_sub(up), down_now - down);
        tracing::info!(
            round,
            counted = record.cohort.len(),
            late = n_late,
            accuracy = record.accuracy,
            bytes_up = record.bytes_up,
            bytes_down = record.bytes_down,
            model_hash = record.model_hash,
            "round done"
        );
        self.status.round_done(&record, n_late, &pulls);
        let model_hash = record.model_hash.clone();
        // With a checkpoint per round, a server must keep the spool of one round only.
        let every_round = FederationConfig { checkpoint_every: 1, ..experiment.config.federation.clone() };
        self.directory.record(record, self.coordinator.state(), &ClientStates::new(), &every_round)?;
        self.desk.log(Event::RoundDone { run: self.run.clone(), round, model_hash, pulls })?;
        spool.remove();
        Ok(())
    }

    /// The contributions of a round as they were accepted, and how many clients were asked. Where a vector is missing or
    /// changed on disk, the round is opened again and asks its client again.
    fn whole_contributions(
        &mut self,
        experiment: &Experiment,
        opening: &Opening,
        lasting: &Lasting,
    ) -> Result<(usize, Spooled)> {
        loop {
            let (asked, counted) = self.contributions(experiment, opening, lasting)?;
            let (results, damaged) = Spooled::open(&self.dir, &self.desk.vault, counted)?;
            if damaged.is_empty() {
                return Ok((asked.len(), results));
            }
            for (c, reason) in damaged {
                let (run, round, client, node) = (c.run, c.round, c.client, self.members.name(c.client));
                tracing::error!(
                    round,
                    client,
                    node,
                    reason,
                    "an accepted contribution is damaged; it is asked for again"
                );
                self.desk.log(Event::Damaged { run: run.clone(), round, client, reason })?;
                Spool::new(&self.dir, &run, round).clear(client);
                self.desk.forget(client);
            }
            let accepted = results.into_contributions().map(|c| (c.client, c)).collect();
            let opened = Some((opening.download.round, asked));
            self.recovered = Recovered { opened, accepted, ..Recovered::default() };
        }
    }

    /// Fuses a round. A contribution that has no place in it is excluded. If fusion leaves the finite numbers, it is repeated
    /// without each contribution, those that stand out first: no single member may end the run.
    fn fuse(&mut self, opening: &Opening, mut results: Spooled, local: f64) -> Result<(RoundRecord, Vec<Pull>)> {
        let before = self.coordinator.state().clone();
        let close = |rounds: &mut Self, results: &Spooled| match rounds.coordinator.close(opening, results, local) {
            Ok(record) => Ok(Ok((record, opening.pulls(results)?))),
            Err(error @ (fedproj_core::Error::FusionNotFinite { .. } | fedproj_core::Error::Client { .. })) => {
                rounds.coordinator.restore(before.clone());
                Ok(Err(error))
            }
            Err(error) => Err(Error::from(error)),
        };
        let mut error = match close(self, &results)? {
            Ok(closed) => return Ok(closed),
            Err(error) => error,
        };
        while let (2.., fedproj_core::Error::Client { client, .. }) = (results.n(), &error) {
            let others =
                (0..results.n()).find(|at| results.summary(*at).client == *client).map(|at| results.without(at));
            self.exclude(opening.download.round, *client, &error)?;
            results = others.unwrap_or(results);
            error = match close(self, &results)? {
                Ok(closed) => return Ok(closed),
                Err(error) => error,
            };
        }
        while results.n() > 1 {
            let order = self.coordinator.outliers(opening, &results)?;
            for at in &order {
                if let Ok(closed) = close(self, &results.without(*at))? {
                    self.exclude(opening.download.round, results.summary(*at).client, &error)?;
                    return Ok(closed);
                }
            }
            // Several are to blame.
            self.exclude(opening.download.round, results.summary(order[0]).client, &error)?;
            results = results.without(order[0]);
        }
        Err(error.into())
    }

    fn exclude(&self, round: u32, client: u32, error: &fedproj_core::Error) -> Result<()> {
        let (run, node, reason) = (self.run.clone(), self.members.name(client), error.to_string());
        tracing::error!(round, client, node, reason, "fusion failed; the round is fused without this contribution");
        self.desk.log(Event::Excluded { run, round, client, node, reason })
    }

    /// The contributions of a round, from the journal or from nodes, and the clients that were asked.
    fn contributions(
        &mut self,
        experiment: &Experiment,
        opening: &Opening,
        lasting: &Lasting,
    ) -> Result<(Vec<u32>, Vec<Contribution>)> {
        let round = opening.download.round;
        let (asked, accepted, closed) = match self.take_recovered(round) {
            Some(recovered) => recovered,
            None => (self.draw(experiment, round)?, BTreeMap::new(), None),
        };
        if let Some(counted) = closed {
            return Ok((asked, accepted.into_values().filter(|c| counted.contains(&c.client)).collect()));
        }
        let offer = Offer {
            asked,
            parts: parts_of(experiment, self.coordinator.method(), self.config.ensemble == Ensemble::Clients),
            base: opening.download.weights.clone(),
            variances: experiment.variances(),
            trial: Some(Arc::clone(&lasting.trial)),
            accepted: accepted.into_values().collect(),
            ..self.offer(experiment, opening, lasting)?
        };
        self.collect(experiment, offer)
    }

    /// What the journal knows of a round that was opened before: who was asked, what was accepted, who counts if it was closed.
    pub(super) fn take_recovered(&mut self, round: u32) -> Option<Opened> {
        let Recovered { opened, accepted, closed, .. } = std::mem::take(&mut self.recovered);
        opened.filter(|(of, _)| *of == round).map(|(_, asked)| (asked, accepted, closed))
    }

    /// Draws the clients of a round and opens it.
    pub(super) fn draw(&self, experiment: &Experiment, round: u32) -> Result<Vec<u32>> {
        let candidates = self.candidates(experiment)?;
        let n_asked = (self.needed(experiment) as f64 * (1.0 + self.config.over_selection)).ceil() as usize;
        let asked = experiment.cohort_among(round, &candidates, n_asked);
        self.desk.log(Event::RoundOpened { run: self.run.clone(), round, asked: asked.clone() })?;
        Ok(asked)
    }

    /// The offer of a round's task to nobody yet.
    pub(super) fn offer(&self, experiment: &Experiment, opening: &Opening, lasting: &Lasting) -> Result<Offer> {
        let task = self.task(&opening.download, lasting)?;
        self.desk.blobs.retain(&task.blobs())?;
        let (epochs, batch) = (experiment.config.local.epochs, experiment.config.local.batch);
        Ok(Offer { task, epochs, batch, ..Offer::default() })
    }

    /// The round's task; its vectors become blobs that nodes can fetch.
    fn task(&self, download: &Download, lasting: &Lasting) -> Result<Task> {
        let store = &self.desk.blobs;
        let put = |values: &[f32]| store.put(&encode_f32(values));
        let named = |(name, values): (&String, &Vec<f32>)| Ok(NamedBlob { name: name.clone(), blob: put(values)? });
        let n_public = self.coordinator.experiment().n_public();
        let mut rows = Vec::new();
        let mut put_rows = |matrix: &[f32], indices: &[u32]| {
            gather_rows(matrix, n_public, indices, &mut rows);
            put(&rows)
        };
        let memory = match &download.memory {
            Some((indices, targets)) => Some(TaskMemory {
                indices: store.put(&encode_u32(indices))?,
                logits: put_rows(&targets.logits, indices)?,
                features: put_rows(&targets.features, indices)?,
            }),
            None => None,
        };
        let method = self.coordinator.method();
        let experiment = self.coordinator.experiment();
        let (config, n_clients) = (&experiment.config, experiment.partition.n_clients());
        let by_clients = (self.config.secure || self.config.ensemble == Ensemble::Clients) && method.needs_public();
        Ok(Task {
            run: self.run.clone(),
            round: download.round,
            client: 0,
            config: lasting.config.clone(),
            public: lasting.public.clone(),
            weights: put(&download.weights)?,
            buffers: put(&download.buffers)?,
            vectors: download.vectors.iter().map(named).collect::<Result<_>>()?,
            memory,
            outputs: if by_clients { 1 + u32::from(method.needs_features()) } else { 0 },
            secure_clients: if self.config.secure { n_clients as u32 } else { 0 },
            noise_clients: if config.privacy.is_by_nodes() {
                self.config.fewest_in_sum(config, n_clients) as u32
            } else {
                0
            },
        })
    }
}

/// The configuration that nodes get: under the first names of its keys, which earlier versions know too, and without the
/// limits on nodes, unless they apply them themselves.
fn for_nodes(config: &Config, secure: bool) -> Result<String> {
    let robust = if secure { config.federation.robust.clone() } else { RobustConfig::default() };
    let federation = FederationConfig { robust, ..config.federation.clone() };
    Ok(Config { federation, ..config.clone() }.identity()?)
}
