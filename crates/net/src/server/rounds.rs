//! The round loop of a server: ask, wait, close, fuse, record. A killed server resumes where the journal ends.

use super::config::{Ensemble, ServerConfig};
use super::desk::{Arrival, Desk, Offer};
use super::journal::{Entry, Event};
use super::spool::{Spool, Spooled};
use super::status::Status;
use crate::backoff::BackOff;
use crate::error::{Error, Result};
use crate::wire::{
    Blob, Contribution, Done, NamedBlob, Task, TaskMemory, encode_f32, encode_public, encode_u32, part_name,
};
use fedproj_core::{
    ClientStates, Coordinator, Download, Experiment, FederationConfig, Method, Opening, Part, RunDir, Summary,
};
use fedproj_data::{Dataset, gather_rows};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often the loop checks clocks while it waits.
const TICK: Duration = Duration::from_millis(200);

/// Pauses before clients that dropped out are asked again: the first, doubling up to the longest. A node that cannot train
/// now may be able to in an hour; a node that never will costs one request per five minutes.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_mins(5);

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
}

impl Recovered {
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
    /// Set to end the loop, within 0.2 s.
    pub stop: Arc<AtomicBool>,
    /// When the server began to listen.
    pub started: Instant,
}

/// The blobs that stay the same for all rounds.
struct RunBlobs {
    config: Blob,
    public: Option<Blob>,
}

impl Rounds {
    /// Runs all remaining rounds.
    ///
    /// # Errors
    /// If the disk fails or fusion leaves the finite numbers. Everything acknowledged is on disk.
    pub fn run(&mut self) -> Result<Summary> {
        let experiment = Arc::clone(self.coordinator.experiment());
        let blobs = RunBlobs {
            // Under the first names of its keys, which nodes of earlier versions know too.
            config: self.desk.blobs.put(experiment.config.identity()?.as_bytes())?,
            public: experiment.public.as_ref().map(|p| self.desk.blobs.put(&encode_public(p))).transpose()?,
        };
        while !self.coordinator.is_done() {
            self.round(&experiment, &blobs)?;
        }
        let state = self.coordinator.state();
        let summary = self.directory.finish(&experiment, state)?;
        self.desk.finish(Done { run: self.run.clone(), model_hash: summary.model_hash.clone() });
        self.status.finish();
        Ok(summary)
    }

    fn round(&mut self, experiment: &Experiment, blobs: &RunBlobs) -> Result<()> {
        let opening = self.coordinator.open()?;
        let round = opening.download.round;
        let (up, down) = self.desk.traffic();
        let spool = Spool::new(&self.dir, &self.run, round);
        spool.remove_others();
        let start = Instant::now();
        let (n_asked, counted) = self.contributions(experiment, &opening, blobs)?;
        let n_late = n_asked - counted.len();
        let results = Spooled::open(&self.dir, &self.desk.vault, counted)?;
        let mut record = self.coordinator.close(&opening, &results, start.elapsed().as_secs_f64())?;
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
        self.status.round_done(&record, n_late);
        let model_hash = record.model_hash.clone();
        // With a checkpoint per round, a server must keep the spool of one round only.
        let every_round = FederationConfig { checkpoint_every: 1, ..experiment.config.federation.clone() };
        self.directory.record(record, self.coordinator.state(), &ClientStates::new(), &every_round)?;
        self.desk.log(Event::RoundDone { run: self.run.clone(), round, model_hash })?;
        spool.remove();
        Ok(())
    }

    /// The contributions of a round, from the journal or from nodes, and how many clients were asked.
    fn contributions(
        &mut self,
        experiment: &Experiment,
        opening: &Opening,
        blobs: &RunBlobs,
    ) -> Result<(usize, Vec<Contribution>)> {
        let round = opening.download.round;
        let needed = experiment.config.federation.cohort(experiment.partition.n_clients());
        let recovered = std::mem::take(&mut self.recovered);
        let (asked, accepted, closed) = match recovered.opened {
            Some((of, asked)) if of == round => (asked, recovered.accepted, recovered.closed),
            _ => {
                let n_asked = (needed as f64 * (1.0 + self.config.over_selection)).ceil() as usize;
                let asked = experiment.cohort_among(round, &self.candidates(experiment)?, n_asked);
                self.desk.log(Event::RoundOpened { run: self.run.clone(), round, asked: asked.clone() })?;
                (asked, BTreeMap::new(), None)
            }
        };
        let n_asked = asked.len();
        if let Some(counted) = closed {
            return Ok((n_asked, accepted.into_values().filter(|c| counted.contains(&c.client)).collect()));
        }
        let task = self.task(&opening.download, blobs)?;
        self.desk.blobs.retain(&task.blobs())?;
        let offer = Offer {
            task,
            asked,
            parts: parts_of(experiment, self.coordinator.method(), &opening.download, self.config.ensemble),
            base: opening.download.weights.clone(),
            variances: experiment.variances(),
            epochs: experiment.config.local.epochs,
            batch: experiment.config.local.batch,
            accepted: accepted.into_values().collect(),
        };
        Ok((n_asked, self.collect(offer, needed)?))
    }

    /// The clients to sample from: all of them, as in the simulator. Once `lost_after_s` has passed, those that are alive
    /// are enough if they make a quorum.
    fn candidates(&self, experiment: &Experiment) -> Result<Vec<u32>> {
        let n = experiment.partition.n_clients();
        let lost_after = Duration::from_secs_f64(self.config.lost_after_s);
        let quorum = self.quorum(experiment.config.federation.cohort(n));
        let mut warned = false;
        loop {
            let mut present = self.desk.presence.within(lost_after);
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

    /// The fewest contributions that close a round.
    fn quorum(&self, needed: usize) -> usize {
        ((self.config.quorum * needed as f64).ceil() as usize).clamp(1, needed)
    }

    /// Offers the task and collects contributions. Clocks decide only when the round closes; the journal records which
    /// contributions count.
    fn collect(&self, offer: Offer, needed: usize) -> Result<Vec<Contribution>> {
        let (round, asked) = (offer.task.round, offer.asked.clone());
        self.status.round_opened(round, &asked, needed);
        self.desk.offer(offer);
        let mut counted = self.wait(round, &asked, needed)?;
        self.desk.withdraw();
        while let Some(arrival) = self.desk.take(Duration::ZERO) {
            if let Arrival::Contribution(contribution) = arrival {
                counted.insert(contribution.client, *contribution);
            }
        }
        let late = asked.iter().copied().filter(|client| !counted.contains_key(client)).collect();
        let clients = counted.keys().copied().collect();
        self.desk.log(Event::RoundClosed { run: self.run.clone(), round, counted: clients, late })?;
        Ok(counted.into_values().collect())
    }

    /// Waits until all needed contributions are there. With a quorum it stops waiting when every other client is gone or the
    /// deadline has passed. Without a quorum it waits for ever, and asks clients that dropped out again.
    fn wait(&self, round: u32, asked: &[u32], needed: usize) -> Result<BTreeMap<u32, Contribution>> {
        let quorum = self.quorum(needed);
        let (deadline, lost_after) =
            (Duration::from_secs_f64(self.config.deadline_s), Duration::from_secs_f64(self.config.lost_after_s));
        let start = Instant::now();
        let (mut counted, mut out, mut warned) = (BTreeMap::new(), DroppedOut::new(), false);
        while counted.len() < needed {
            match self.desk.take(TICK) {
                Some(Arrival::Contribution(contribution)) => {
                    self.status.contribution(contribution.client);
                    counted.insert(contribution.client, *contribution);
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
                    || (start.elapsed() > lost_after && self.desk.presence.silence(*client) > lost_after)
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
                tracing::warn!(round, have, quorum, "the round still waits: too few contributions for its quorum");
            }
            let again = out.due(Instant::now(), round);
            if !again.is_empty() {
                self.status.asked_again(again.len());
                self.desk.ask_again(&again);
            }
        }
        Ok(counted)
    }

    /// The round's task; its vectors become blobs that nodes can fetch.
    fn task(&self, download: &Download, blobs: &RunBlobs) -> Result<Task> {
        let store = &self.desk.blobs;
        let put = |values: &[f32]| store.put(&encode_f32(values));
        let named = |(name, values): (&String, &Vec<f32>)| Ok(NamedBlob { name: name.clone(), blob: put(values)? });
        let n_public = self.coordinator.experiment().public.as_ref().map_or(0, Dataset::n_samples);
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
        let by_clients = self.config.ensemble == Ensemble::Clients && method.needs_public();
        Ok(Task {
            run: self.run.clone(),
            round: download.round,
            client: 0,
            config: blobs.config.clone(),
            public: blobs.public.clone(),
            weights: put(&download.weights)?,
            buffers: put(&download.buffers)?,
            vectors: download.vectors.iter().map(named).collect::<Result<_>>()?,
            memory,
            outputs: if by_clients { 1 + u32::from(method.needs_features()) } else { 0 },
        })
    }
}

/// Clients that declined or were rejected. A round without a quorum asks them again.
struct DroppedOut {
    clients: BTreeSet<u32>,
    pauses: BackOff,
    again_at: Option<Instant>,
}

impl DroppedOut {
    fn new() -> Self {
        Self { clients: BTreeSet::new(), pauses: BackOff::new(PAUSE_FIRST, PAUSE_MAX), again_at: None }
    }

    /// The clients to ask again now: all of them after a pause, none before.
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

/// The vectors of a contribution, with their numbers of values.
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
            // Each client that is asked declines at once.
            out.clients.extend([3, 5]);
            if !out.due(start + Duration::from_secs(s), 0).is_empty() {
                asked_at.push(s);
            }
        }
        assert_eq!(asked_at[..4], [1, 4, 9, 18]);
        assert!((250..300).contains(&asked_at.len()), "{}", asked_at.len());
        assert!(DroppedOut::new().due(start, 0).is_empty());
    }
}
