//! The round loop of a server: ask, wait, close, fuse, record; and how it goes on where a killed server stopped.

use crate::backoff::BackOff;
use crate::error::{Error, Result};
use crate::server::config::{Ensemble, ServerConfig};
use crate::server::desk::Desk;
use crate::server::journal::{Accepted, Entry, Event};
use crate::server::nodes::{Arrival, Nodes, Offer};
use crate::server::spool::Spool;
use crate::server::status::Status;
use crate::wire::message::{Blob, Done, Memory, Named, Train, part_name};
use crate::wire::numbers::{encode_f32, encode_public, encode_u32};
use fedproj_core::{Coordinator, Download, Experiment, FederationConfig, Method, Part, RunDir, Summary, Targets};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often the loop looks at clocks while it waits.
const TICK: Duration = Duration::from_millis(200);

/// Clients that dropped out are asked again after pauses that begin with this and double up to that: a node that cannot
/// today can perhaps in an hour, and one that never will costs a request every five minutes.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_mins(5);

/// What the journal tells of a run that was begun before.
#[derive(Clone, Debug, Default)]
pub struct Recovered {
    /// The last round that was opened, and the clients that were asked.
    opened: Option<(u32, Vec<u32>)>,
    /// Contributions accepted in it.
    accepted: BTreeMap<u32, Accepted>,
    /// Clients whose contributions count, if it was closed.
    closed: Option<Vec<u32>>,
    /// The last contribution of each client that counted: round and id.
    pub last: BTreeMap<u32, (u32, String)>,
}

impl Recovered {
    /// Takes in an entry of the journal.
    pub fn follow(&mut self, run: &str, entry: Entry) {
        match entry.event {
            Event::RoundOpened { run: of, round, asked } if of == run => {
                *self = Self { opened: Some((round, asked)), last: std::mem::take(&mut self.last), ..Self::default() };
            }
            Event::Accepted(accepted) if accepted.run == run => {
                self.last.insert(accepted.client, (accepted.round, accepted.id.clone()));
                self.accepted.insert(accepted.client, accepted);
            }
            Event::RoundClosed { run: of, counted, .. } if of == run => self.closed = Some(counted),
            _ => (),
        }
    }
}

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
    /// Set to end the loop at its next look at the clock.
    pub stop: Arc<AtomicBool>,
    /// When the server began to listen.
    pub started: Instant,
}

impl Rounds {
    /// Runs all rounds that are left.
    ///
    /// # Errors
    /// If the disk fails or fusion leaves the finite numbers; everything acknowledged is on disk.
    pub fn run(&mut self) -> Result<Summary> {
        let experiment = Arc::clone(self.coordinator.experiment());
        let config_blob = self.desk.put(experiment.config.to_toml()?.as_bytes())?;
        let public_blob = experiment.public.as_ref().map(|p| self.desk.put(&encode_public(p))).transpose()?;
        while !self.coordinator.is_done() {
            self.round(&experiment, &config_blob, public_blob.as_ref())?;
        }
        let state = self.coordinator.state();
        let summary = self.directory.finish(&experiment, state)?;
        self.desk.finish(Done { run: self.run.clone(), model_hash: summary.model_hash.clone() });
        self.status.finish();
        Ok(summary)
    }

    fn round(&mut self, experiment: &Experiment, config: &Blob, public: Option<&Blob>) -> Result<()> {
        let opening = self.coordinator.open()?;
        let round = opening.download.round;
        let (up, down) = (self.desk.bytes_up.load(Ordering::Relaxed), self.desk.bytes_down.load(Ordering::Relaxed));
        let spool = Spool::new(&self.dir, &self.run, round);
        spool.remove_others();
        let start = Instant::now();
        let needed = experiment.config.federation.cohort(experiment.partition.n_clients());
        let recovered = std::mem::take(&mut self.recovered);
        let (asked, accepted, closed) = match recovered.opened {
            Some((of, asked)) if of == round => (Some(asked), recovered.accepted, recovered.closed),
            _ => (None, BTreeMap::new(), None),
        };
        let asked = if let Some(asked) = asked {
            asked
        } else {
            let n_asked = (needed as f64 * (1.0 + self.config.over_selection)).ceil() as usize;
            let asked = experiment.cohort_among(round, &self.gather(experiment)?, n_asked);
            self.desk.log(Event::RoundOpened { run: self.run.clone(), round, asked: asked.clone() })?;
            asked
        };
        let counted = if let Some(counted) = closed {
            accepted.into_values().filter(|a| counted.contains(&a.client)).collect()
        } else {
            let task = self.task(&opening.download, config, public)?;
            self.desk.keep(&task.blobs())?;
            let offer = Offer {
                variances: experiment.variances(),
                epochs: experiment.config.local.epochs,
                batch: experiment.config.local.batch,
                parts: parts_of(experiment, self.coordinator.method(), &opening.download, self.config.ensemble),
                task,
                asked: asked.clone(),
                base: opening.download.weights.clone(),
                accepted: accepted.into_values().collect(),
            };
            self.collect(offer, needed)?
        };
        let n_late = asked.len() - counted.len();
        let results = self.desk.get(counted)?;
        let mut record = self.coordinator.close(&opening, &results, start.elapsed().as_secs_f64())?;
        record.bytes_up = self.desk.bytes_up.load(Ordering::Relaxed).wrapping_sub(up);
        record.bytes_down = self.desk.bytes_down.load(Ordering::Relaxed) - down;
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
        self.status.round_done(&record, n_late);
        let model_hash = record.model_hash.clone();
        // A server goes on from its last round, so that the spool of one round is all that must be kept.
        let every_round = FederationConfig { checkpoint_every: 1, ..experiment.config.federation.clone() };
        self.directory.record(record, self.coordinator.state(), &every_round)?;
        self.desk.log(Event::RoundDone { run: self.run.clone(), round, model_hash })?;
        spool.remove();
        Ok(())
    }

    /// The clients to draw from: all of them, as the simulator does; or, when some have not been heard of for so long
    /// that they are given up, those that are there.
    fn gather(&self, experiment: &Experiment) -> Result<Vec<u32>> {
        let (nodes, n) = (&*self.desk, experiment.partition.n_clients());
        let lost_after = Duration::from_secs_f64(self.config.lost_after_s);
        let quorum = self.quorum(experiment.config.federation.cohort(n));
        let mut warned = false;
        loop {
            let mut present = nodes.present(lost_after);
            present.retain(|client| (*client as usize) < n);
            let given_up = self.started.elapsed() > lost_after;
            if present.len() == n || (given_up && present.len() >= quorum) {
                return Ok(present);
            }
            if given_up && !warned {
                warned = true;
                tracing::warn!(present = present.len(), quorum, "waiting for more nodes");
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            std::thread::sleep(TICK);
        }
    }

    /// Contributions without which a round is not closed.
    fn quorum(&self, needed: usize) -> usize {
        ((self.config.quorum * needed as f64).ceil() as usize).clamp(1, needed)
    }

    /// Waits for contributions until there are enough, or nobody is left to wait for, or the deadline has passed; with a
    /// quorum in every case: if need be, those who have dropped out are asked again, for ever. Clocks decide only when; who is in is in the journal.
    fn collect(&self, offer: Offer, needed: usize) -> Result<Vec<Accepted>> {
        let (nodes, round): (&dyn Nodes, u32) = (&*self.desk, offer.task.round);
        let asked = offer.asked.clone();
        let quorum = self.quorum(needed);
        let (deadline, lost_after) =
            (Duration::from_secs_f64(self.config.deadline_s), Duration::from_secs_f64(self.config.lost_after_s));
        self.status.round_opened(round, &asked, needed);
        nodes.offer(offer);
        let start = Instant::now();
        let mut counted: BTreeMap<u32, Accepted> = BTreeMap::new();
        let mut out = DroppedOut::new();
        let mut warned = false;
        while counted.len() < needed {
            match nodes.take(TICK) {
                Some(Arrival::Contribution(accepted)) => {
                    self.status.contribution(accepted.client);
                    counted.insert(accepted.client, *accepted);
                    continue;
                }
                Some(Arrival::DroppedOut(client)) => {
                    self.status.dropped_out();
                    out.clients.insert(client);
                }
                None => (),
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            let is_gone = |client: &u32| {
                counted.contains_key(client)
                    || out.clients.contains(client)
                    || (start.elapsed() > lost_after && nodes.silence(*client) > lost_after)
            };
            let nobody_left = asked.iter().all(is_gone);
            if !nobody_left && start.elapsed() <= deadline {
                continue;
            }
            let have = counted.len();
            if have >= quorum {
                break;
            }
            if !warned {
                warned = true;
                tracing::warn!(round, have, quorum, "the round waits on: too few contributions for its quorum");
            }
            let again = out.due(Instant::now(), round);
            if !again.is_empty() {
                self.status.asked_again(again.len());
                nodes.ask_again(&again);
            }
        }
        nodes.withdraw();
        while let Some(arrival) = nodes.take(Duration::ZERO) {
            if let Arrival::Contribution(accepted) = arrival {
                counted.insert(accepted.client, *accepted);
            }
        }
        let late = asked.iter().copied().filter(|client| !counted.contains_key(client)).collect();
        let clients = counted.keys().copied().collect();
        self.desk.log(Event::RoundClosed { run: self.run.clone(), round, counted: clients, late })?;
        Ok(counted.into_values().collect())
    }

    /// The round's task, its vectors put where nodes can fetch them.
    fn task(&self, download: &Download, config: &Blob, public: Option<&Blob>) -> Result<Train> {
        let nodes: &dyn Nodes = &*self.desk;
        let put = |values: &[f32]| nodes.put(&encode_f32(values));
        let named = |(name, values): (&String, &Vec<f32>)| Ok(Named { name: name.clone(), blob: put(values)? });
        let memory = match &download.memory {
            Some((indices, targets)) => {
                let rows = |values: &[f32]| rows_of(values, indices, self.n_public());
                Some(Memory {
                    indices: nodes.put(&encode_u32(indices))?,
                    logits: put(&rows(&targets.logits))?,
                    features: put(&rows(&targets.features))?,
                })
            }
            None => None,
        };
        let method = self.coordinator.method();
        let by_clients = self.config.ensemble == Ensemble::Clients && method.needs_public();
        Ok(Train {
            run: self.run.clone(),
            round: download.round,
            client: 0,
            config: config.clone(),
            public: public.cloned(),
            weights: put(&download.weights)?,
            buffers: put(&download.buffers)?,
            vectors: download.vectors.iter().map(named).collect::<Result<_>>()?,
            memory,
            outputs: if by_clients { 1 + u32::from(method.needs_features()) } else { 0 },
        })
    }

    fn n_public(&self) -> usize {
        self.coordinator.experiment().public.as_ref().map_or(0, fedproj_data::Dataset::n_samples)
    }
}

/// Clients that have declined or were refused, and when a round that cannot do without them asks them again.
struct DroppedOut {
    clients: BTreeSet<u32>,
    pauses: BackOff,
    again_at: Option<Instant>,
}

impl DroppedOut {
    fn new() -> Self {
        Self { clients: BTreeSet::new(), pauses: BackOff::new(PAUSE_FIRST, PAUSE_MAX), again_at: None }
    }

    /// Those to be asked again now: all of them once a pause has passed, and nobody before.
    fn due(&mut self, now: Instant, round: u32) -> Vec<u32> {
        if self.clients.is_empty() {
            return Vec::new();
        }
        let pauses = &mut self.pauses;
        let again_at = *self.again_at.get_or_insert_with(|| {
            let pause = pauses.next();
            let (n, pause_s) = (self.clients.len(), pause.as_secs());
            tracing::warn!(round, n, pause_s, "no quorum without clients that dropped out: they will be asked again");
            now + pause
        });
        if now < again_at {
            return Vec::new();
        }
        self.again_at = None;
        std::mem::take(&mut self.clients).into_iter().collect()
    }
}

/// The rows of a (n, ·) matrix that a memory holds.
fn rows_of(values: &[f32], indices: &[u32], n: usize) -> Vec<f32> {
    let width = values.len() / n.max(1);
    indices.iter().flat_map(|&i| &values[i as usize * width..(i as usize + 1) * width]).copied().collect()
}

/// The opposite: rows put in their places in a (n, ·) matrix that is zero elsewhere, where nobody looks.
///
/// # Panics
/// If an index is not below `n`, or there is not one row an index.
pub fn place_rows(rows: &[f32], indices: &[u32], n: usize) -> Vec<f32> {
    let width = rows.len() / indices.len().max(1);
    let mut out = vec![0.0; n * width];
    for (&i, row) in indices.iter().zip(rows.chunks_exact(width.max(1))) {
        out[i as usize * width..(i as usize + 1) * width].copy_from_slice(row);
    }
    out
}

/// The memory of a round on a node, see [`place_rows`].
pub fn targets_of(logits: &[f32], features: &[f32], indices: &[u32], n: usize) -> Targets {
    Targets { logits: place_rows(logits, indices, n), features: place_rows(features, indices, n) }
}

/// The vectors that a contribution must hold.
fn parts_of(e: &Experiment, method: &dyn Method, download: &Download, ensemble: Ensemble) -> Vec<(String, usize)> {
    let mut parts = vec![(Part::Weights, e.weights.len()), (Part::Buffers, e.buffers.len())];
    parts.extend(method.uploads().iter().map(|name| (Part::Upload(name), download.weights.len())));
    if let (Ensemble::Clients, Some(public)) = (ensemble, e.public.as_ref().filter(|_| method.needs_public())) {
        let width = |node| e.graph.shape(node).len();
        parts.push((Part::Logits, public.n_samples() * width(e.graph.output())));
        if method.needs_features() {
            let features = e.graph.features().map_or(0, width);
            parts.push((Part::Features, public.n_samples() * features));
        }
    }
    parts.into_iter().map(|(part, n)| (part_name(part), n)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_that_always_decline_are_asked_again_for_ever_but_ever_less_often() {
        let (mut out, start) = (DroppedOut::new(), Instant::now());
        let mut asked_at = Vec::new();
        for s in 0..86_400 {
            // Whoever is asked declines at once.
            out.clients.extend([3, 5]);
            if !out.due(start + Duration::from_secs(s), 0).is_empty() {
                asked_at.push(s);
            }
        }
        assert_eq!(asked_at[..4], [1, 4, 9, 18]);
        assert!((250..300).contains(&asked_at.len()), "{}", asked_at.len());
        assert!(DroppedOut::new().due(start, 0).is_empty());
    }

    #[test]
    fn rows_travel_to_their_places() {
        let values: Vec<f32> = (0..10u8).map(f32::from).collect();
        let rows = rows_of(&values, &[1, 4], 5);
        assert_eq!(rows, [2.0, 3.0, 8.0, 9.0]);
        assert_eq!(place_rows(&rows, &[1, 4], 5), [0.0, 0.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 8.0, 9.0]);
        assert!(rows_of(&[], &[1, 4], 5).is_empty() && place_rows(&[], &[1, 4], 5).is_empty());
    }
}
