//! How the desk accepts a contribution: admit, check its shape, receive its vectors, check their content, accept.
//!
//! The server acknowledges a contribution only after its vectors are checked and on disk, and its journal entry is too.

use super::attempt::Attempt;
use super::check::{check_content, check_shape};
use super::desk::{Arrival, Desk, Offer, Open};
use super::journal::Event;
use super::spool::Spool;
use crate::error::{Error, Result};
use crate::wire::{
    Accepted, Blob, Contribution, Decline, Missing, NamedBlob, Received, Rejected, Store, Verdict, VerdictKind,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Desk {
    /// A node drops out of a round.
    ///
    /// # Errors
    /// If the journal cannot be written.
    pub fn decline(&self, client: u32, decline: Decline) -> Result<()> {
        let Decline { run, round, reason } = decline;
        if !self.drop_out(client, &run, round) {
            return Ok(());
        }
        let reason = shorten(&reason);
        if let Some(left_out) = self.warnings.next(client) {
            tracing::warn!(round, client, reason, left_out, "declined");
        }
        self.log(Event::Declined { run, round, client, reason })
    }

    /// Whether the round waited for this client; it no longer does.
    fn drop_out(&self, client: u32, run: &str, round: u32) -> bool {
        let mut inner = self.inner();
        let Some(open) = inner.open.as_mut().filter(|open| open.is_of(run, round)) else { return false };
        if !open.waiting.remove(&client) {
            return false;
        }
        open.announced.remove(&client);
        inner.arrivals.push_back(Arrival::DroppedOut(client));
        self.arrived.notify_all();
        true
    }

    /// Accepts a contribution, or reports which parts are missing. Submitting it again changes nothing.
    ///
    /// # Errors
    /// If the disk fails: nothing is acknowledged then.
    pub fn submit(&self, client: u32, contribution: &Contribution) -> Result<Verdict> {
        let _one = self.uploading(client);
        let offer = match self.admit(client, contribution)? {
            Ok(offer) => offer,
            Err(verdict) => return Ok(verdict),
        };
        let spool = self.spool(&contribution.run, contribution.round);
        if let Err(problem) = check_shape(contribution, &offer, &self.limits) {
            return self.reject(client, contribution, &spool, &problem);
        }
        let store = self.announce(client, contribution, &spool)?;
        let lacking = |part: &NamedBlob| {
            let have = Blob { len: store.have(&part.blob), ..part.blob.clone() };
            (have.len < part.blob.len).then_some(have)
        };
        let have: Vec<Blob> = contribution.parts.iter().filter_map(lacking).collect();
        if !have.is_empty() {
            return Ok(VerdictKind::Missing(Missing { have }).into());
        }
        let tried = || offer.trial.as_ref().map_or(Ok(()), |trial| trial.check(contribution, &store));
        if let Err(problem) = check_content(contribution, &store, &offer, self.limits.norm_max).and_then(|()| tried()) {
            return self.reject(client, contribution, &spool, &problem);
        }
        self.accept(client, contribution)
    }

    /// The round's offer, if this client may contribute to it now; otherwise the verdict.
    fn admit(&self, client: u32, c: &Contribution) -> Result<std::result::Result<Arc<Offer>, Verdict>> {
        let inner = self.inner();
        let is_open = |open: &&Open| open.is_of(&c.run, c.round);
        // In other stages a vector would count as an answer, or replace one that is in the sum.
        let takes =
            |open: &&Open| open.waiting.contains(&client) && open.attempt.as_ref().is_none_or(Attempt::takes_vectors);
        let problem = if c.client != client {
            format!("this node stands for client {client}, not {}", c.client)
        } else if let Some(open) = inner.open.as_ref().filter(is_open).filter(takes) {
            // Before the receipt: a round that was done before may be repeated, after damage to the disk.
            return Ok(Ok(Arc::clone(&open.offer)));
        } else if inner.last.get(&client).is_some_and(|(round, id)| *round == c.round && *id == c.id()) {
            return Ok(Err(accepted(c.id())));
        } else if inner.open.as_ref().is_some_and(|open| is_open(&open)) {
            format!(
                "round {} does not wait for client {client}: it was not asked, has contributed, or dropped out",
                c.round
            )
        } else if let Some(Open { offer, .. }) = &inner.open {
            let (round, run) = (offer.task.round, &offer.task.run);
            format!("round {} is not open; the open one is round {round} of run {run}", c.round)
        } else if inner.done.is_some() {
            "the run is over".into()
        } else {
            // Between two rounds, or at the start: only the next round can answer.
            return Err(Error::NotNow("no round is open at present; ask again".into()));
        };
        if let Some(left_out) = self.warnings.next(client) {
            tracing::warn!(client, round = c.round, reason = problem, left_out, "contribution not accepted");
        }
        Ok(Err(rejected(problem)))
    }

    /// Notes what a client may upload and opens its folder. What it uploaded for another contribution is dropped.
    fn announce(&self, client: u32, contribution: &Contribution, spool: &Spool) -> Result<Store> {
        let known = {
            let mut inner = self.inner();
            let before = inner.open.as_mut().and_then(|o| o.announced.insert(client, contribution.clone()));
            before.is_some_and(|c| c.parts == contribution.parts)
        };
        let store = spool.client(client)?;
        if !known {
            store.retain(&contribution.parts.iter().map(|p| &p.blob).collect::<Vec<_>>())?;
        }
        Ok(store)
    }

    /// Rejects a contribution that cannot count; the round no longer waits for its client.
    fn reject(&self, client: u32, c: &Contribution, spool: &Spool, problem: &Error) -> Result<Verdict> {
        self.n_rejected.fetch_add(1, Ordering::Relaxed);
        let reason = shorten(&problem.to_string());
        if let Some(left_out) = self.warnings.next(client) {
            tracing::warn!(client, round = c.round, reason, left_out, "contribution rejected");
        }
        if self.drop_out(client, &c.run, c.round) {
            self.log(Event::Rejected { run: c.run.clone(), round: c.round, client, reason: reason.clone() })?;
            spool.clear(client);
        }
        Ok(rejected(reason))
    }

    /// Writes the contribution to the journal, then counts it, then acknowledges it. The disk is awaited without the lock,
    /// so that no other request waits; meanwhile the round does not close.
    fn accept(&self, client: u32, contribution: &Contribution) -> Result<Verdict> {
        // The round may have closed while the vectors were checked.
        let is_waited_for = self.inner().open.as_mut().is_some_and(|open| {
            let waits = open.is_of(&contribution.run, contribution.round) && open.waiting.remove(&client);
            open.n_accepting += usize::from(waits);
            waits
        });
        if !is_waited_for {
            return Ok(rejected(format!("round {} closed while the contribution was checked", contribution.round)));
        }
        let logged = self.log(Event::Accepted(contribution.clone()));
        let id = contribution.id();
        let mut inner = self.inner();
        if let Some(open) = &mut inner.open {
            open.n_accepting -= 1;
            if logged.is_ok() {
                open.announced.remove(&client);
            } else {
                open.waiting.insert(client);
            }
        }
        if logged.is_ok() {
            inner.last.insert(client, (contribution.round, id.clone()));
            inner.arrivals.push_back(Arrival::Contribution(Box::new(contribution.clone())));
            tracing::debug!(client, round = contribution.round, id, "contribution accepted");
        }
        self.arrived.notify_all();
        logged.map(|()| accepted(id))
    }

    /// Stores a piece of a blob that the client has announced.
    ///
    /// # Errors
    /// If the client has not announced it, the bytes do not fit, or the disk is full.
    pub fn receive(&self, client: u32, hash: &[u8], from: u64, bytes: &[u8]) -> Result<Received> {
        let _one = self.uploading(client);
        let announced = self.inner().open.as_ref().and_then(|open| {
            let contribution = open.announced.get(&client)?;
            let part = contribution.parts.iter().find(|p| p.blob.hash == hash)?;
            Some((contribution.run.clone(), contribution.round, part.blob.clone()))
        });
        let (run, round, blob) =
            announced.ok_or_else(|| Error::protocol("this blob is not expected; announce it first"))?;
        let have = self.spool(&run, round).client(client)?.append(&blob, from, bytes)?;
        Ok(Received { have })
    }
}

fn accepted(id: String) -> Verdict {
    VerdictKind::Accepted(Accepted { id }).into()
}

fn rejected(reason: String) -> Verdict {
    VerdictKind::Rejected(Rejected { reason }).into()
}

/// A text that a node influenced, as the journal stores it.
fn shorten(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(300).collect()
}
