//! How a round collects contributions: whom it asks, whom it waits for, and when it closes.
//!
//! Clocks decide only when a round closes. The journal records who was asked and whose contributions count.

use super::desk::{Arrival, Offer};
use super::journal::Event;
use super::rounds::Rounds;
use crate::backoff::BackOff;
use crate::error::{Error, Result};
use crate::wire::Contribution;
use fedproj_core::Experiment;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often the loop checks clocks while it waits.
pub(super) const TICK: Duration = Duration::from_millis(200);

/// Pauses before clients that dropped out are asked again: the first, doubling up to the longest. A node that cannot train
/// now may be able to in an hour; a node that never will costs one request per five minutes.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_mins(5);

impl Rounds {
    /// The clients to sample from: all members, as in the simulator. Once `lost_after_s` has passed, those that are alive
    /// are enough if they make a quorum.
    pub(super) fn candidates(&self, experiment: &Experiment) -> Result<Vec<u32>> {
        let mut warned = false;
        loop {
            let present = self.present(experiment);
            let n_members = experiment.partition.n_clients() - self.out(experiment).len();
            let given_up = self.started.elapsed() > self.lost_after();
            let quorum = self.quorum(self.needed(experiment));
            if present.len() == n_members.max(1) || (given_up && present.len() >= quorum) {
                return Ok(present);
            }
            if given_up && !warned {
                warned = true;
                tracing::warn!(present = present.len(), quorum, "waiting for more nodes");
            }
            self.check_stop()?;
            std::thread::sleep(TICK);
        }
    }

    /// The members that are alive.
    fn present(&self, experiment: &Experiment) -> Vec<u32> {
        let (n, out) = (experiment.partition.n_clients(), self.out(experiment));
        let mut present = self.desk.presence.within(self.lost_after());
        present.retain(|client| (*client as usize) < n && !out.contains(client));
        present
    }

    fn out(&self, experiment: &Experiment) -> BTreeSet<u32> {
        self.members.out(experiment.partition.n_clients())
    }

    pub(super) fn lost_after(&self) -> Duration {
        Duration::from_secs_f64(self.config.lost_after_s)
    }

    pub(super) fn check_stop(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) { Err(Error::Stopped) } else { Ok(()) }
    }

    /// The contributions that complete a round. Clients that are out do not belong to the run.
    pub(super) fn needed(&self, experiment: &Experiment) -> usize {
        let n_members = experiment.partition.n_clients() - self.out(experiment).len();
        experiment.config.federation.cohort(n_members.max(1))
    }

    /// The fewest contributions that close a round.
    pub(super) fn quorum(&self, needed: usize) -> usize {
        let experiment = self.coordinator.experiment();
        self.config.fewest_in_round(&experiment.config, experiment.partition.n_clients(), needed)
    }

    /// Offers the task and waits until the round has what it needs.
    pub(super) fn gather(&mut self, experiment: &Experiment, offer: Offer) -> Result<Waited> {
        let (round, asked) = (offer.task.round, offer.asked.clone());
        self.status.round_opened(round, &asked, self.needed(experiment));
        self.desk.offer(offer);
        Waiting { rounds: self, experiment, round, asked, counted: BTreeMap::new(), start: Instant::now() }.run()
    }

    /// Offers the task and collects contributions. Returns all clients that were asked too.
    pub(super) fn collect(&mut self, experiment: &Experiment, offer: Offer) -> Result<(Vec<u32>, Vec<Contribution>)> {
        let round = offer.task.round;
        let Waited { asked, mut counted, missed } = self.gather(experiment, offer)?;
        self.desk.withdraw();
        while let Some(arrival) = self.desk.take(Duration::ZERO) {
            if let Arrival::Contribution(contribution) = arrival {
                counted.insert(contribution.client, *contribution);
            }
        }
        self.remember(round, &counted.keys().copied().collect::<Vec<_>>(), missed);
        let late = asked.iter().copied().filter(|client| !counted.contains_key(client)).collect();
        let clients = counted.keys().copied().collect();
        self.desk.log(Event::RoundClosed { run: self.run.clone(), round, counted: clients, late })?;
        Ok((asked, counted.into_values().collect()))
    }

    /// Remembers who came in time, and who is not waited for in the next rounds.
    pub(super) fn remember(&mut self, round: u32, counted: &[u32], missed: Vec<u32>) {
        for client in counted {
            self.patience.kept(*client);
        }
        for client in missed.into_iter().filter(|client| !counted.contains(client)) {
            tracing::warn!(round, client, node = self.members.name(client), "missed the deadline");
            self.patience.missed(client, round);
        }
    }
}

/// A round that waits for contributions.
struct Waiting<'a> {
    rounds: &'a Rounds,
    experiment: &'a Experiment,
    round: u32,
    asked: Vec<u32>,
    counted: BTreeMap<u32, Contribution>,
    start: Instant,
}

/// How the waiting ended.
pub(super) struct Waited {
    pub asked: Vec<u32>,
    pub counted: BTreeMap<u32, Contribution>,
    /// Clients that are alive and let the deadline pass.
    pub missed: Vec<u32>,
}

impl Waiting<'_> {
    /// Waits until all needed contributions are there. With a quorum it stops waiting when every other client is gone or the
    /// deadline has passed. Without a quorum it waits for ever, and asks clients that dropped out again.
    fn run(mut self) -> Result<Waited> {
        let deadline = Duration::from_secs_f64(self.rounds.config.deadline_s);
        let (mut dropped, mut warned) = (DroppedOut::new(), false);
        let mut missed = Vec::new();
        loop {
            let needed = self.rounds.needed(self.experiment);
            if self.counted.len() >= needed {
                break;
            }
            match self.rounds.desk.take(TICK) {
                Some(Arrival::Contribution(contribution)) => {
                    self.rounds.status.contribution(contribution.client);
                    self.counted.insert(contribution.client, *contribution);
                    continue;
                }
                Some(Arrival::DroppedOut(client)) => {
                    self.rounds.status.dropped_out();
                    dropped.clients.insert(client);
                }
                Some(Arrival::Answered) | None => (),
            }
            self.rounds.check_stop()?;
            let mut expected = self.expected(&dropped.clients);
            if self.counted.len() + expected.len() < needed {
                expected.extend(self.replace(needed - self.counted.len() - expected.len())?);
            }
            let is_late = self.start.elapsed() > deadline;
            if !is_late && expected.iter().any(|client| self.rounds.patience.waits_for(*client, self.round)) {
                continue;
            }
            let (round, have, quorum) = (self.round, self.counted.len(), self.rounds.quorum(needed));
            if have >= quorum {
                missed = if is_late { expected } else { missed };
                break;
            }
            if !warned {
                warned = true;
                tracing::warn!(round, have, quorum, "the round still waits: too few contributions for its quorum");
            }
            let again = dropped.due(Instant::now(), round);
            if !again.is_empty() {
                self.rounds.status.asked_again(again.len());
                self.rounds.desk.ask(&again);
            }
        }
        Ok(Waited { asked: self.asked, counted: self.counted, missed })
    }

    /// The clients that were asked and may still contribute: members that are alive and have not dropped out.
    fn expected(&self, dropped: &BTreeSet<u32>) -> Vec<u32> {
        let (rounds, out) = (self.rounds, self.rounds.out(self.experiment));
        let lost_after = rounds.lost_after();
        let is_lost =
            |client: u32| self.start.elapsed() > lost_after && rounds.desk.presence.silence(client) > lost_after;
        let may_come = |client: &u32| {
            !self.counted.contains_key(client)
                && !dropped.contains(client)
                && !out.contains(client)
                && !is_lost(*client)
        };
        self.asked.iter().copied().filter(may_come).collect()
    }

    /// Draws clients in the place of those that are gone, as far as there are others.
    fn replace(&mut self, n: usize) -> Result<Vec<u32>> {
        let mut others = self.rounds.present(self.experiment);
        others.retain(|client| !self.asked.contains(client));
        let drawn = self.experiment.cohort_among(self.round, &others, n);
        if !drawn.is_empty() {
            tracing::warn!(round = self.round, clients = ?drawn, "clients are gone: others are asked instead");
            let (run, clients) = (self.rounds.run.clone(), drawn.clone());
            self.rounds.desk.log(Event::AskedInstead { run, round: self.round, clients })?;
            self.asked.extend(&drawn);
            self.rounds.status.asked(&self.asked);
            self.rounds.desk.ask(&drawn);
        }
        Ok(drawn)
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
