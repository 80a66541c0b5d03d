//! The desk's part of secure aggregation: which of the messages each node of the open round has sent.
//!
//! How the messages are made is in [`crate::secure`]; when a stage ends is in `summing.rs`.

use super::NodeEntry;
use super::desk::{Arrival, Desk, Inner};
use crate::der::Certificate;
use crate::error::{Error, Result};
use crate::identity::fingerprint;
use crate::secure::{Roster, SEALED_BYTES, are_usable, is_signed, shared_for};
use crate::wire::{
    Accepted, Announce, Contribution, InstructionKind, Member, Rejected, Reveal, RevealFor, Shares, SharesFor,
    Survivors, Wait,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What the round waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nodes train and announce their keys.
    #[default]
    Announcing,
    /// The roster is fixed; nodes share their secrets.
    Sharing,
    /// Nodes send their masked vectors.
    Masking,
    /// Nodes sign who has shared and whose vectors have arrived.
    Signing,
    /// Nodes reveal what takes the masks away.
    Revealing,
}

/// An attempt at the sum of a round.
#[derive(Clone, Debug, Default)]
pub(super) struct Attempt {
    pub stage: Stage,
    pub announced: BTreeMap<u32, Member>,
    pub roster: Option<Arc<Roster>>,
    pub shares: BTreeMap<u32, Shares>,
    pub sharers: Vec<u32>,
    pub survivors: Vec<u32>,
    pub signed: BTreeMap<u32, Vec<u8>>,
    pub reveals: BTreeMap<u32, Reveal>,
}

impl Attempt {
    /// What a node that the stage waits for has to do.
    fn instruction(&self, client: u32) -> InstructionKind {
        let Some(roster) = &self.roster else { return InstructionKind::Wait(Wait {}) };
        match self.stage {
            Stage::Announcing => InstructionKind::Wait(Wait {}),
            Stage::Sharing => InstructionKind::Share(roster.for_node(client)),
            Stage::Masking => InstructionKind::Mask(shared_for(roster, &self.shares, client)),
            Stage::Signing => InstructionKind::Sign(self.survivors(roster, Vec::new())),
            Stage::Revealing => {
                let signature = |client| self.signed.get(&client).cloned().unwrap_or_default();
                let signed = roster.near(client, &self.survivors).map(signature).collect();
                InstructionKind::Reveal(self.survivors(roster, signed))
            }
        }
    }

    fn survivors(&self, roster: &Roster, signed: Vec<Vec<u8>>) -> Survivors {
        Survivors { roster: roster.hash().to_vec(), clients: self.survivors.clone(), signed }
    }

    /// Takes a client's signature over the lists of this attempt. What others could not use is not passed on.
    fn sign(&mut self, client: u32, signature: &[u8]) -> bool {
        let lists = (&self.sharers, &self.survivors);
        let is_right = |roster: &Arc<Roster>| roster.has_signed(client, lists.0, lists.1, signature);
        let is_signed = self.roster.as_ref().is_some_and(is_right);
        if is_signed {
            self.signed.insert(client, signature.to_vec());
        }
        is_signed
    }

    /// Whether masked vectors are taken at present.
    pub fn takes_vectors(&self) -> bool {
        self.stage == Stage::Masking
    }

    fn is_of(&self, hash: &[u8], stage: Stage) -> bool {
        self.stage == stage && self.roster.as_ref().is_some_and(|roster| roster.hash() == hash)
    }
}

impl Desk {
    /// Looks at or changes the attempt of the open round and the clients that its stage waits for.
    pub(super) fn attempt<T: Default>(&self, change: impl FnOnce(&mut Attempt, &mut BTreeSet<u32>) -> T) -> T {
        let mut inner = self.inner();
        let open = inner.open.as_mut();
        open.and_then(|open| Some(change(open.attempt.as_mut()?, &mut open.waiting))).unwrap_or_default()
    }

    /// Begins the next stage; nodes that wait for it look again.
    pub(super) fn begin<T: Default>(&self, change: impl FnOnce(&mut Attempt, &mut BTreeSet<u32>) -> T) -> T {
        let begun = self.attempt(change);
        self.changed.send_modify(|n| *n += 1);
        begun
    }

    /// The clients that the stage still waits for.
    pub(super) fn awaited(&self) -> Vec<u32> {
        self.inner().open.as_ref().map_or_else(Vec::new, |open| open.waiting.iter().copied().collect())
    }

    /// A node announces its keys, or asks what comes next.
    ///
    /// # Errors
    /// If its entry is not its own.
    pub fn next_instruction(&self, node: &NodeEntry, announce: &Announce) -> Result<InstructionKind> {
        let (client, round) = (node.client, announce.round);
        let mut inner = self.inner();
        let Inner { open, done, last, arrivals } = &mut *inner;
        // Between two rounds, or at the start, only the next round can answer.
        let is_between = open.is_none() && done.is_none();
        let Some(open) = open.as_mut().filter(|open| open.is_of(&announce.run, round)) else {
            let is_counted = last.get(&client).is_some_and(|(of, id)| *of == round && *id == announce.id);
            return Ok(match (is_between, is_counted) {
                (true, _) => InstructionKind::Wait(Wait {}),
                (_, true) => InstructionKind::Counted(Accepted { id: announce.id.clone() }),
                _ => rejected(format!("round {round} is not open")),
            });
        };
        let Some(attempt) = &mut open.attempt else {
            return Ok(rejected("this run does not add up masked vectors".into()));
        };
        if attempt.stage == Stage::Announcing {
            if !open.waiting.contains(&client) && !attempt.announced.contains_key(&client) {
                return Ok(rejected(format!("round {round} does not wait for client {client}")));
            }
            // A node that has shared secrets under these keys does not use them again.
            if !announce.roster.is_empty() {
                return Ok(InstructionKind::Renew(Wait {}));
            }
            if announce.member.task != open.offer.task.common_hash() {
                return Ok(rejected("the node has trained for another task".into()));
            }
            check_member(node, announce)?;
            attempt.announced.insert(client, announce.member.clone());
            if open.waiting.remove(&client) {
                // The round waits for announcements as it would for contributions.
                let run = announce.run.clone();
                let announced = Contribution { run, round, client, ..Contribution::default() };
                arrivals.push_back(Arrival::Contribution(Box::new(announced)));
                self.arrived.notify_all();
            }
            return Ok(InstructionKind::Wait(Wait {}));
        }
        let is_member = attempt.roster.as_ref().is_some_and(|roster| roster.has(&announce.member));
        let is_asked = is_member && open.waiting.contains(&client);
        let has_signed = attempt.stage == Stage::Signing && !announce.signed.is_empty();
        if is_asked && !has_signed {
            return Ok(attempt.instruction(client));
        }
        if is_asked && attempt.sign(client, &announce.signed) {
            open.waiting.remove(&client);
            arrivals.push_back(Arrival::Answered);
            self.arrived.notify_all();
        } else if open.waiting.remove(&client) {
            // It has lost its keys, or signed other lists.
            arrivals.push_back(Arrival::DroppedOut(client));
            self.arrived.notify_all();
        }
        Ok(InstructionKind::Wait(Wait {}))
    }

    /// A node shares its secrets. Shares that come late or twice change nothing.
    pub fn share(&self, client: u32, message: SharesFor) {
        let SharesFor { run, round, shares } = message;
        self.answer(client, &run, round, |attempt| {
            let n_near = attempt.roster.as_ref().map_or(0, |roster| roster.neighbourhood(client).len());
            let have_lengths = shares.commitment.len() == 32 && shares.sealed.iter().all(|s| s.len() == SEALED_BYTES);
            let is_whole = shares.sealed.len() + 1 == n_near && have_lengths;
            let is_taken = attempt.is_of(&shares.roster, Stage::Sharing) && is_whole;
            is_taken && attempt.shares.insert(client, shares).is_none()
        });
    }

    /// A node reveals shares of others' secrets.
    pub fn reveal(&self, client: u32, message: RevealFor) {
        let RevealFor { run, round, reveal } = message;
        self.answer(client, &run, round, |attempt| {
            let n_due = attempt.roster.as_ref().map_or(0, |roster| roster.near(client, &attempt.sharers).len());
            // Empty: the dealer's share for this node could not be read.
            let is_whole = reveal.shares.len() == n_due && reveal.shares.iter().all(|s| matches!(s.len(), 0 | 32));
            is_whole
                && attempt.is_of(&reveal.roster, Stage::Revealing)
                && attempt.reveals.insert(client, reveal).is_none()
        });
    }

    /// Takes an answer that the stage waits for.
    fn answer(&self, client: u32, run: &str, round: u32, take: impl FnOnce(&mut Attempt) -> bool) {
        let mut inner = self.inner();
        let Some(open) = inner.open.as_mut().filter(|open| open.is_of(run, round)) else { return };
        let Some(attempt) = open.attempt.as_mut().filter(|_| open.waiting.contains(&client)) else { return };
        if take(attempt) {
            open.waiting.remove(&client);
            inner.arrivals.push_back(Arrival::Answered);
            self.arrived.notify_all();
        }
    }

    /// Forgets what was accepted for a round whose attempt has failed.
    pub(super) fn forget_round(&self, round: u32) {
        self.inner().last.retain(|_, (of, _)| *of != round);
    }
}

/// Checks that a node announces itself.
fn check_member(node: &NodeEntry, announce: &Announce) -> Result<()> {
    let member = &announce.member;
    let key = Certificate::read(&member.certificate).map(|certificate| certificate.key);
    let is_own = member.client == node.client && fingerprint(&member.certificate) == node.fingerprint;
    if !are_usable(member) {
        return Err(Error::protocol("the announced keys give the same secret with everybody, or have other lengths"));
    }
    if is_own && key.is_some_and(|key| is_signed(&announce.run, announce.round, member, key)) {
        return Ok(());
    }
    Err(Error::protocol("the announced keys are not signed with the certificate of this node"))
}

fn rejected(reason: String) -> InstructionKind {
    InstructionKind::Rejected(Rejected { reason })
}
