//! A round whose contributions are added up under masks: its four stages, and what the server makes of them.
//!
//! Until the round is closed, an attempt leaves nothing behind: a server that was killed begins another. The roster is on disk
//! before the round is closed, so a closed round is completed after a restart, with the same survivors. A node reveals for
//! one set of survivors per round.

use super::attempt::{Attempt, Stage};
use super::desk::{Arrival, Offer};
use super::journal::Event;
use super::rounds::{Lasting, Rounds};
use super::spool::Spool;
use super::waiting::{TICK, Waited};
use crate::backoff::BackOff;
use crate::error::{Error, Result};
use crate::secure::{Layout, Roster, Sums, Unmasking, is_enough};
use crate::wire::{Contribution, MASKED, Member, Reveal, decode_u64, hex};
use fedproj_core::{Experiment, Method, Opening};
use prost::Message;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Fewest clients in a sum: of two, each knows the other's vector.
pub(super) const COHORT_MIN: usize = 3;

/// Pauses between attempts: the first, doubling up to the longest.
const PAUSE_FIRST: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_mins(1);

/// A sum, or why there is none.
type Attempted<T> = Result<std::result::Result<T, String>>;

/// What a server needs to complete a closed round.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Closing {
    #[prost(message, repeated, tag = "1")]
    members: Vec<Member>,
    #[prost(uint32, tag = "2")]
    threshold: u32,
    /// The commitments of those who have shared, in the order of `sharers`.
    #[prost(bytes = "vec", repeated, tag = "3")]
    commitments: Vec<Vec<u8>>,
    #[prost(uint32, repeated, tag = "4")]
    sharers: Vec<u32>,
}

/// Checks before a run that sums are all it needs.
///
/// # Errors
/// Names what needs single contributions, or too few clients per round.
pub(super) fn check(experiment: &Experiment, method: &dyn Method) -> Result<()> {
    let (federation, n_clients) = (&experiment.config.federation, experiment.partition.n_clients());
    Layout::new(experiment, method, n_clients, COHORT_MIN)?;
    let robust = &federation.robust;
    let single = [
        (robust.clip_ratio > 0.0, "federation.robust.clip_ratio"),
        (robust.claim_ratio > 0.0, "federation.robust.claim_ratio"),
        (federation.evaluate_clients, "federation.evaluate_clients"),
    ];
    if let Some((_, key)) = single.iter().find(|(is_on, _)| *is_on) {
        return Err(Error::config(format!("server.secure: {key} looks at single contributions, and sums hide them")));
    }
    let cohort = federation.cohort(n_clients);
    if cohort < COHORT_MIN {
        return Err(Error::config(format!(
            "server.secure: {cohort} clients per round; in a sum of fewer than {COHORT_MIN} each member sees the others\n\
             hint: more clients, or a larger federation.fraction"
        )));
    }
    Ok(())
}

impl Rounds {
    /// The sum of a round's contributions and the number of clients that were asked. An attempt that fails is repeated.
    pub(super) fn summed(
        &mut self,
        experiment: &Experiment,
        opening: &Opening,
        lasting: &Lasting,
        layout: &Layout,
    ) -> Result<(usize, Sums)> {
        let round = opening.download.round;
        let mut pauses = BackOff::new(PAUSE_FIRST, PAUSE_MAX);
        loop {
            let reason = match self.try_sum(experiment, opening, lasting, layout)? {
                Ok(summed) => return Ok(summed),
                Err(reason) => reason,
            };
            self.desk.withdraw();
            tracing::warn!(round, reason, "the secure sum has failed; the round is repeated");
            self.desk.log(Event::SumFailed { run: self.run.clone(), round, reason })?;
            self.desk.forget_round(round);
            Spool::new(&self.dir, &self.run, round).remove();
            let until = Instant::now() + pauses.next();
            while Instant::now() < until {
                self.check_stop()?;
                std::thread::sleep(TICK.min(until - Instant::now()));
            }
        }
    }

    fn try_sum(
        &mut self,
        experiment: &Experiment,
        opening: &Opening,
        lasting: &Lasting,
        layout: &Layout,
    ) -> Attempted<(usize, Sums)> {
        let round = opening.download.round;
        let recovered = self.take_recovered(round);
        // The vector's values have eight bytes, those of other contributions four.
        let parts = vec![(MASKED.to_owned(), 2 * layout.n_masked())];
        let offer = Offer { parts, ..self.offer(experiment, opening, lasting)? };
        let spool = Spool::new(&self.dir, &self.run, round);
        let (asked, closing, counted) = match recovered {
            Some((asked, accepted, Some(counted))) => {
                let Some(closing) = spool.read_note()?.and_then(|bytes| Closing::decode(&bytes[..]).ok()) else {
                    return Ok(Err("the server was restarted and finds no roster".into()));
                };
                (asked, closing, accepted.into_values().filter(|c| counted.contains(&c.client)).collect())
            }
            Some((_, accepted, None)) if !accepted.is_empty() => {
                return Ok(Err("the server was restarted before the round was closed".into()));
            }
            recovered => {
                let asked = match recovered {
                    Some((asked, ..)) => asked,
                    None => self.draw(experiment, round)?,
                };
                match self.masked(experiment, Offer { asked, attempt: Some(Attempt::default()), ..offer.clone() })? {
                    Ok(masked) => masked,
                    Err(reason) => return Ok(Err(reason)),
                }
            }
        };
        let summed = self.unmasked(offer, &closing, &counted, layout)?;
        Ok(summed.map(|summed| (asked.len(), summed)))
    }

    /// The first three stages: announcements, shares, and masked vectors, with which the round is closed.
    fn masked(&mut self, experiment: &Experiment, offer: Offer) -> Attempted<(Vec<u32>, Closing, Vec<Contribution>)> {
        let round = offer.task.round;
        let Waited { asked, counted, missed } = self.gather(experiment, offer)?;
        self.remember(round, &counted, missed);
        let share = self.config.secure_threshold;
        let members = self.desk.attempt(|attempt, _| attempt.announced.values().cloned().collect::<Vec<_>>());
        let roster = Arc::new(Roster::new(&self.run, round, members.clone(), share)?);
        self.desk.log(Event::RosterFixed {
            run: self.run.clone(),
            round,
            clients: roster.clients().to_vec(),
            threshold: roster.threshold(),
            roster: hex(roster.hash()),
        })?;
        self.desk.begin(|attempt, waiting| {
            (attempt.stage, attempt.roster) = (Stage::Sharing, Some(Arc::clone(&roster)));
            *waiting = roster.clients().iter().copied().collect();
        });
        self.wait_for_stage(|| false)?;
        let (sharers, commitments): (Vec<u32>, Vec<Vec<u8>>) = self.desk.begin(|attempt, waiting| {
            attempt.stage = Stage::Masking;
            *waiting = attempt.shares.keys().copied().collect();
            attempt.shares.iter().map(|(client, shares)| (*client, shares.commitment.clone())).unzip()
        });
        let least = self.config.fewest_in_sum(&experiment.config, experiment.partition.n_clients());
        if sharers.len() < least || !is_enough(&roster, &sharers, &sharers) {
            return Ok(Err(too_few("have shared their secrets", &sharers, &roster, least)));
        }
        let mut counted = self.wait_for_stage(|| false)?;
        self.desk.withdraw();
        counted.extend(self.arrived());
        counted.sort_by_key(|c| c.client);
        let survivors: Vec<u32> = counted.iter().map(|c| c.client).collect();
        if survivors.len() < least || !is_enough(&roster, &sharers, &survivors) {
            return Ok(Err(too_few("have sent their vectors", &survivors, &roster, least)));
        }
        let closing = Closing { members, threshold: roster.threshold() as u32, commitments, sharers };
        Spool::new(&self.dir, &self.run, round).write_note(&closing.encode_to_vec())?;
        let late = asked.iter().copied().filter(|client| !survivors.contains(client)).collect();
        self.desk.log(Event::RoundClosed { run: self.run.clone(), round, counted: survivors, late })?;
        Ok(Ok((asked, closing, counted)))
    }

    /// The last stage: reveals, and the sum without masks.
    fn unmasked(&self, offer: Offer, closing: &Closing, counted: &[Contribution], layout: &Layout) -> Attempted<Sums> {
        let round = offer.task.round;
        let roster =
            Arc::new(Roster::with_threshold(&self.run, round, closing.members.clone(), closing.threshold as usize)?);
        let survivors: Vec<u32> = counted.iter().map(|c| c.client).collect();
        let (stage, of) = (Stage::Revealing, Some(Arc::clone(&roster)));
        let (sharers, attempted) = (closing.sharers.clone(), survivors.clone());
        let attempt = Attempt { stage, roster: of, sharers, survivors: attempted, ..Attempt::default() };
        self.desk.offer(Offer { asked: survivors.clone(), attempt: Some(attempt), ..offer });
        let revealed = || self.desk.attempt(|attempt, _| attempt.reveals.keys().copied().collect::<Vec<_>>());
        let enough = || is_enough(&roster, &closing.sharers, &revealed());
        self.wait_for_stage(enough)?;
        let reveals: BTreeMap<u32, Reveal> = self.desk.attempt(|attempt, _| std::mem::take(&mut attempt.reveals));
        self.desk.withdraw();
        let commitments = closing.sharers.iter().copied().zip(closing.commitments.iter().cloned()).collect();
        let mut sum = vec![0u64; layout.n_masked()];
        for contribution in counted {
            let store = Spool::new(&self.dir, &self.run, round).sealed(&self.desk.vault).client(contribution.client)?;
            let Some(part) = contribution.parts.iter().find(|part| part.name == MASKED) else { continue };
            match store.get(&part.blob) {
                Ok(bytes) => sum.iter_mut().zip(decode_u64(&bytes)).for_each(|(sum, v)| *sum = sum.wrapping_add(v)),
                Err(error) => return Ok(Err(format!("client {}: {error}", contribution.client))),
            }
        }
        let unmasking =
            Unmasking { roster: &roster, commitments: &commitments, survivors: &survivors, reveals: &reveals };
        if let Err(error) = unmasking.unmask(&mut sum) {
            return Ok(Err(error.to_string()));
        }
        Ok(Ok(layout.sums(survivors, &sum)))
    }

    /// Waits until all nodes of a stage have answered, or enough of them. It does not wait for those that are gone, and for
    /// nobody after the deadline. Returns the contributions that have arrived.
    fn wait_for_stage(&self, is_enough: impl Fn() -> bool) -> Result<Vec<Contribution>> {
        let (start, deadline) = (Instant::now(), Duration::from_secs_f64(self.config.deadline_s));
        let mut arrived = Vec::new();
        loop {
            let is_lost = |client: &u32| self.desk.presence.silence(*client) > self.lost_after();
            if self.desk.awaited().iter().all(is_lost) || start.elapsed() > deadline || is_enough() {
                arrived.extend(self.arrived());
                return Ok(arrived);
            }
            if let Some(Arrival::Contribution(contribution)) = self.desk.take(TICK) {
                arrived.push(*contribution);
            }
            self.check_stop()?;
        }
    }

    /// The contributions that have arrived.
    fn arrived(&self) -> Vec<Contribution> {
        let mut all = Vec::new();
        while let Some(arrival) = self.desk.take(Duration::ZERO) {
            if let Arrival::Contribution(contribution) = arrival {
                all.push(*contribution);
            }
        }
        all
    }
}

fn too_few(what: &str, clients: &[u32], roster: &Roster, least: usize) -> String {
    let (n, of, threshold) = (clients.len(), roster.clients().len(), roster.threshold());
    format!("{n} of {of} nodes {what}; secrets need {threshold} in every neighbourhood, and a sum {least}")
}
