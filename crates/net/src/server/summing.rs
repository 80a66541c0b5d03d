//! A round whose contributions are added up under masks: its five stages, and what the server makes of them.
//!
//! Until the round is closed, an attempt leaves nothing behind: it can be repeated with other members, and a server that was
//! killed begins another. The roster is on disk before the round is closed, so a closed round is completed after a restart, with
//! the same survivors. A node reveals for one set of survivors per vector. So if a closed round finds no sum, it ends without.

use super::attempt::{Attempt, Stage};
use super::check::SumChecks;
use super::desk::{Arrival, Offer};
use super::journal::Event;
use super::rounds::{Lasting, Rounds};
use super::spool::Spool;
use super::waiting::{TICK, Waited};
use crate::backoff::BackOff;
use crate::error::{Error, Result};
use crate::secure::{MaskedLayout, Roster, Sums, Unmasking, is_enough};
use crate::wire::{Contribution, MASKED, Member, Reveal, decode_u64, hex};
use fedproj_core::{Contributions, Experiment, Method, Opening, RoundRecord};
use prost::Message;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Fewest clients in a sum: of two, each knows the other's vector.
pub(super) const COHORT_MIN: usize = 3;

/// Pauses between attempts: the first, doubling up to the longest.
pub(super) const PAUSE_FIRST: Duration = Duration::from_millis(200);
pub(super) const PAUSE_MAX: Duration = Duration::from_mins(1);

/// How an attempt at a sum failed.
struct Failed {
    reason: String,
    /// Whether nodes may have revealed shares. They would not for other survivors, so the round ends without a sum.
    is_final: bool,
    /// Clients that are alive and have held it up.
    to_blame: Vec<u32>,
}

/// A sum, or why there is none.
type Attempted<T> = Result<std::result::Result<T, Failed>>;

/// A sum that can be used, and how many of those that were asked are not in it.
type Summed = (usize, Sums);

fn repeat<T>(reason: impl Into<String>) -> std::result::Result<T, Failed> {
    Err(Failed { reason: reason.into(), is_final: false, to_blame: Vec::new() })
}

fn end<T>(reason: impl Into<String>, to_blame: Vec<u32>) -> std::result::Result<T, Failed> {
    Err(Failed { reason: reason.into(), is_final: true, to_blame })
}

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
    MaskedLayout::new(experiment, method, n_clients, COHORT_MIN)?;
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
    /// A round whose contributions are added up under masks: its record, and how many of those that were asked are not in it.
    /// An attempt that fails before nodes reveal shares is repeated. After that the round ends: with the sum, or with the model
    /// as it was. No member can hold the run up for ever, and none learns a second sum of the same vectors.
    pub(super) fn secure_round(
        &mut self,
        experiment: &Experiment,
        opening: &Opening,
        lasting: &Lasting,
        pauses: &mut BackOff,
    ) -> Result<(usize, RoundRecord)> {
        let (round, start) = (opening.download.round, Instant::now());
        while !self.recovered.has_ended_empty(round) {
            let failed = match self.try_sum(experiment, opening, lasting)? {
                Ok((n_late, sums)) => match self.fuse_sums(opening, lasting, &sums, start)? {
                    Ok(record) => {
                        pauses.reset();
                        return Ok((n_late, record));
                    }
                    Err(failed) => failed,
                },
                Err(failed) => failed,
            };
            let Failed { reason, is_final, to_blame } = failed;
            self.desk.withdraw();
            tracing::warn!(round, reason, is_final, "the secure sum has failed");
            let run = self.run.clone();
            self.desk.log(if is_final {
                Event::RoundEmpty { run, round, reason }
            } else {
                Event::SumFailed { run, round, reason }
            })?;
            self.remember(round, &[], to_blame);
            self.desk.forget_round(round);
            Spool::new(&self.dir, &self.run, round).remove();
            let until = Instant::now() + pauses.next();
            while Instant::now() < until {
                self.check_stop()?;
                std::thread::sleep(TICK.min(until - Instant::now()));
            }
            if is_final {
                break;
            }
        }
        Ok((0, self.coordinator.skip(opening)?))
    }

    /// Fuses a sum, if its values can be used: nobody has seen the contributions in it.
    fn fuse_sums(
        &mut self,
        opening: &Opening,
        lasting: &Lasting,
        sums: &Sums,
        start: Instant,
    ) -> Attempted<RoundRecord> {
        let variances = self.coordinator.experiment().variances();
        let checked = lasting.layout.as_ref().map_or(Ok(()), |layout| {
            let checks =
                SumChecks { limits: &self.config, base: &opening.download.weights, variances, trial: &lasting.trial };
            checks.check(layout, sums)
        });
        if let Err(problem) = checked {
            return Ok(end(format!("the sum cannot be used: {problem}"), Vec::new()));
        }
        let before = self.coordinator.state().clone();
        match self.coordinator.close(opening, sums, start.elapsed().as_secs_f64()) {
            Ok(record) => Ok(Ok(record)),
            Err(error @ (fedproj_core::Error::FusionNotFinite { .. } | fedproj_core::Error::Client { .. })) => {
                self.coordinator.restore(before);
                Ok(end(error.to_string(), Vec::new()))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn try_sum(&mut self, experiment: &Experiment, opening: &Opening, lasting: &Lasting) -> Attempted<Summed> {
        let round = opening.download.round;
        let recovered = self.take_recovered(round);
        let layout = lasting.layout.as_ref().ok_or_else(|| Error::internal("a secure round without a layout"))?;
        // The vector's values have eight bytes, those of other contributions four.
        let parts = vec![(MASKED.to_owned(), 2 * layout.n_masked())];
        let offer = Offer { parts, ..self.offer(experiment, opening, lasting)? };
        let spool = Spool::new(&self.dir, &self.run, round);
        let (asked, closing, counted) = match recovered {
            Some((asked, accepted, Some(counted))) => {
                let Some(closing) = spool.read_note()?.and_then(|bytes| Closing::decode(&bytes[..]).ok()) else {
                    return Ok(end("the server was restarted and finds no roster", Vec::new()));
                };
                (asked, closing, accepted.into_values().filter(|c| counted.contains(&c.client)).collect())
            }
            Some((_, accepted, None)) if !accepted.is_empty() => {
                return Ok(repeat("the server was restarted before the round was closed"));
            }
            recovered => {
                let asked = match recovered {
                    Some((asked, ..)) => asked,
                    None => self.draw(experiment, round)?,
                };
                match self.masked(experiment, Offer { asked, attempt: Some(Attempt::default()), ..offer.clone() })? {
                    Ok(masked) => masked,
                    Err(failed) => return Ok(Err(failed)),
                }
            }
        };
        let sums = self.unmasked(offer, &closing, &counted, layout)?;
        if let Ok(sums) = &sums {
            let survivors: Vec<u32> = counted.iter().map(|c| c.client).collect();
            tracing::debug!(round, n = sums.n(), "masks taken away");
            self.remember(round, &survivors, Vec::new());
        }
        Ok(sums.map(|sums| (asked.len() - counted.len(), sums)))
    }

    /// The first three stages: announcements, shares, and masked vectors, with which the round is closed.
    fn masked(&mut self, experiment: &Experiment, offer: Offer) -> Attempted<(Vec<u32>, Closing, Vec<Contribution>)> {
        let round = offer.task.round;
        let Waited { asked, missed, .. } = self.gather(experiment, offer)?;
        self.remember(round, &[], missed);
        let members = self.members_of(experiment, round);
        let roster = Arc::new(Roster::new(&self.run, round, members.clone(), self.config.secure_threshold)?);
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
        let end = self.deadline();
        self.wait_for_stage(end, || false)?;
        let stalled = self.stalled(end);
        let (sharers, commitments): (Vec<u32>, Vec<Vec<u8>>) = self.desk.begin(|attempt, waiting| {
            attempt.stage = Stage::Masking;
            *waiting = attempt.shares.keys().copied().collect();
            attempt.shares.iter().map(|(client, shares)| (*client, shares.commitment.clone())).unzip()
        });
        let least = self.config.fewest_in_sum(&experiment.config, experiment.partition.n_clients());
        if sharers.len() < least || !is_enough(&roster, &sharers, &sharers) {
            let reason = too_few("have shared their secrets", &sharers, &roster, least);
            return Ok(Err(Failed { reason, is_final: false, to_blame: stalled }));
        }
        self.remember(round, &[], stalled);
        let end = self.deadline();
        let mut counted = self.wait_for_stage(end, || false)?;
        let stalled = self.stalled(end);
        self.desk.withdraw();
        counted.extend(self.arrived());
        counted.sort_by_key(|c| c.client);
        let survivors: Vec<u32> = counted.iter().map(|c| c.client).collect();
        if survivors.len() < least || !is_enough(&roster, &sharers, &survivors) {
            let reason = too_few("have sent their vectors", &survivors, &roster, least);
            return Ok(Err(Failed { reason, is_final: false, to_blame: stalled }));
        }
        self.remember(round, &[], stalled);
        let closing = Closing { members, threshold: roster.threshold() as u32, commitments, sharers };
        Spool::new(&self.dir, &self.run, round).write_note(&closing.encode_to_vec())?;
        let late = asked.iter().copied().filter(|client| !survivors.contains(client)).collect();
        self.desk.log(Event::RoundClosed { run: self.run.clone(), round, counted: survivors, late })?;
        Ok(Ok((asked, closing, counted)))
    }

    /// Those who have announced themselves, without those that have let deadlines pass if enough others are there.
    fn members_of(&self, experiment: &Experiment, round: u32) -> Vec<Member> {
        let all = self.desk.attempt(|attempt, _| attempt.announced.values().cloned().collect::<Vec<_>>());
        let (reliable, others): (Vec<Member>, Vec<Member>) =
            all.into_iter().partition(|member| self.patience.waits_for(member.client, round));
        if reliable.len() >= self.quorum(self.needed(experiment)) {
            return reliable;
        }
        reliable.into_iter().chain(others).collect()
    }

    /// The last two stages: signatures and reveals, and the sum without masks.
    fn unmasked(
        &self,
        offer: Offer,
        closing: &Closing,
        counted: &[Contribution],
        layout: &MaskedLayout,
    ) -> Attempted<Sums> {
        let round = offer.task.round;
        let roster =
            Arc::new(Roster::with_threshold(&self.run, round, closing.members.clone(), closing.threshold as usize)?);
        let survivors: Vec<u32> = counted.iter().map(|c| c.client).collect();
        let (stage, of) = (Stage::Signing, Some(Arc::clone(&roster)));
        let (sharers, attempted) = (closing.sharers.clone(), survivors.clone());
        let attempt = Attempt { stage, roster: of, sharers, survivors: attempted, ..Attempt::default() };
        self.desk.offer(Offer { asked: survivors.clone(), attempt: Some(attempt), ..offer });
        let have_signed = || self.desk.attempt(|attempt, _| attempt.signed.keys().copied().collect::<Vec<_>>());
        let ends = self.deadline();
        self.wait_for_stage(ends, || is_enough(&roster, &survivors, &have_signed()))?;
        if !is_enough(&roster, &survivors, &have_signed()) {
            let reason = too_few("have signed whose vectors are in the sum", &have_signed(), &roster, COHORT_MIN);
            return Ok(end(reason, self.stalled(ends)));
        }
        self.desk.begin(|attempt, waiting| {
            attempt.stage = Stage::Revealing;
            *waiting = survivors.iter().copied().collect();
        });
        let mut sum = match self.masked_sum(round, counted, layout)? {
            Ok(sum) => sum,
            Err(failed) => return Ok(Err(failed)),
        };
        let commitments = closing.sharers.iter().copied().zip(closing.commitments.iter().cloned()).collect();
        let ends = self.deadline();
        let revealed = || self.desk.attempt(|attempt, _| attempt.reveals.keys().copied().collect::<Vec<_>>());
        self.wait_for_stage(ends, || is_enough(&roster, &closing.sharers, &revealed()))?;
        loop {
            let reveals: BTreeMap<u32, Reveal> = self.desk.attempt(|attempt, _| attempt.reveals.clone());
            let unmasking =
                Unmasking { roster: &roster, commitments: &commitments, survivors: &survivors, reveals: &reveals };
            let failed = match unmasking.unmask(&mut sum) {
                Ok(()) => break,
                Err(failed) => failed,
            };
            // Some shares are wrong or missing: further ones may do.
            if !failed.clients.is_empty() {
                self.wait_for_stage(ends, || revealed().len() > reveals.len())?;
                if revealed().len() > reveals.len() {
                    continue;
                }
            }
            let stalled = self.stalled(ends);
            self.desk.withdraw();
            // Wrong shares of few clients' secrets are the work of these clients; of many, that of others.
            let dealers = Some(failed.clients).filter(|clients| 2 * clients.len() < survivors.len());
            return Ok(end(failed.reason, dealers.into_iter().flatten().chain(stalled).collect()));
        }
        self.desk.withdraw();
        Ok(Ok(layout.sums(survivors, &sum)))
    }

    /// The sum of the masked vectors.
    fn masked_sum(&self, round: u32, counted: &[Contribution], layout: &MaskedLayout) -> Attempted<Vec<u64>> {
        let (spool, mut sum) = (self.desk.spool(&self.run, round), vec![0u64; layout.n_masked()]);
        for contribution in counted {
            let Some(part) = contribution.parts.iter().find(|part| part.name == MASKED) else { continue };
            match spool.client(contribution.client)?.get(&part.blob) {
                Ok(bytes) => sum.iter_mut().zip(decode_u64(&bytes)).for_each(|(sum, v)| *sum = sum.wrapping_add(v)),
                Err(error) => return Ok(end(format!("client {}: {error}", contribution.client), Vec::new())),
            }
        }
        Ok(Ok(sum))
    }

    /// When a stage that begins now ends at the latest.
    fn deadline(&self) -> Instant {
        let (now, longest) = (Instant::now(), Duration::from_hours(24 * 365));
        now + longest.min(Duration::from_secs_f64(self.config.deadline_s))
    }

    /// After a deadline: the clients that are alive and have not answered.
    fn stalled(&self, ends: Instant) -> Vec<u32> {
        let mut awaited = if Instant::now() < ends { Vec::new() } else { self.desk.awaited() };
        awaited.retain(|client| self.desk.presence.silence(*client) <= self.lost_after());
        awaited
    }

    /// Waits until all nodes of a stage have answered, or enough of them. It does not wait for those that are gone, and for
    /// nobody after the deadline. Returns the contributions that have arrived.
    fn wait_for_stage(&self, ends: Instant, is_enough: impl Fn() -> bool) -> Result<Vec<Contribution>> {
        let mut arrived = Vec::new();
        loop {
            let is_lost = |client: &u32| self.desk.presence.silence(*client) > self.lost_after();
            if self.desk.awaited().iter().all(is_lost) || Instant::now() >= ends || is_enough() {
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
