//! A node's part in a secure sum: it announces keys, shares secrets, sends its masked vector and reveals what takes the masks
//! away, as the server asks. What it needs to resume after a crash is in its folder before each message leaves.

use super::home::Home;
use super::link::Link;
use super::policy::Policy;
use crate::error::{Error, Result};
use crate::secure::{Party, Roster};
use crate::wire::{
    Announce, Blob, Contribution, Instruction, InstructionKind, MASKED, Member, NOISE_CLIENTS, NamedBlob, PLAIN,
    RevealFor, RosterMessage, Shared, SharesFor, Survivors, VerdictKind, decode_u64, encode_u64,
};
use prost::Message;
use rcgen::SigningKey;

/// What a node keeps of an attempt.
#[derive(Clone, PartialEq, Message)]
pub struct KeptKeys {
    /// The seed of all its secrets, 32 random bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub seed: Vec<u8>,
    /// Its entry in the roster.
    #[prost(message, required, tag = "2")]
    pub member: Member,
    /// The roster that it has accepted.
    #[prost(message, optional, tag = "3")]
    pub roster: Option<RosterMessage>,
    /// The shares for it.
    #[prost(message, optional, tag = "4")]
    pub shared: Option<Shared>,
    /// The id of its masked contribution, once it is accepted.
    #[prost(string, tag = "5")]
    pub id: String,
    /// The survivors for which it has signed: one list per attempt.
    #[prost(uint32, repeated, tag = "6")]
    pub survivors: Vec<u32>,
    /// Its signature.
    #[prost(bytes = "vec", tag = "7")]
    pub signed: Vec<u8>,
}

/// Takes part in the sum of a round until it is known whether the contribution counts.
#[derive(Clone, Copy, Debug)]
pub struct Summing<'a> {
    /// The way to the server.
    pub link: &'a Link,
    /// The node's folder.
    pub home: &'a Home,
    /// The node's limits.
    pub policy: &'a Policy,
    /// The contribution: one vector, not yet masked.
    pub pending: &'a Contribution,
}

impl Summing<'_> {
    /// Answers the server until the contribution counts, or does not.
    ///
    /// # Errors
    /// If the server cannot be reached, or asks for something that this node does not do.
    pub async fn run(&self) -> Result<()> {
        // Nobody accepts keys that a certificate has signed which was renewed since; after the roster, it no longer matters.
        let certificate = self.home.signer()?.0;
        let is_usable = |kept: &KeptKeys| kept.roster.is_some() || kept.member.certificate == certificate;
        let mut kept = match self.home.summing()?.filter(is_usable) {
            Some(kept) => kept,
            None => self.new_keys()?,
        };
        let mut accepted = kept.roster.clone().map(|message| self.check(&kept, message)).transpose()?;
        loop {
            let Instruction { kind } = self.link.send(&self.announce(&kept, accepted.as_ref())).await?;
            match kind {
                Some(InstructionKind::Wait(_)) => (),
                Some(InstructionKind::Renew(_)) => (kept, accepted) = (self.new_keys()?, None),
                Some(InstructionKind::Share(message)) => accepted = Some(self.share(&mut kept, message).await?),
                Some(InstructionKind::Mask(shared)) => self.mask(&mut kept, known(accepted.as_ref())?, shared).await?,
                Some(InstructionKind::Sign(survivors)) => {
                    self.sign(&mut kept, known(accepted.as_ref())?, &survivors)?;
                }
                Some(InstructionKind::Reveal(survivors)) => {
                    self.sign(&mut kept, known(accepted.as_ref())?, &survivors)?;
                    self.reveal(&kept, known(accepted.as_ref())?, &survivors).await?;
                }
                Some(InstructionKind::Counted(accepted)) => {
                    tracing::info!(round = self.pending.round, id = accepted.id, "contribution is in the sum");
                    return self.home.commit(&self.pending.run);
                }
                Some(InstructionKind::Rejected(rejected)) => {
                    tracing::warn!(
                        round = self.pending.round,
                        reason = rejected.reason,
                        "contribution is not in the sum"
                    );
                    return self.home.discard();
                }
                None => return Err(super::later_version()),
            }
        }
    }

    fn announce(&self, kept: &KeptKeys, accepted: Option<&Roster>) -> Announce {
        Announce {
            run: self.pending.run.clone(),
            round: self.pending.round,
            member: kept.member.clone(),
            roster: accepted.map_or_else(Vec::new, |roster| roster.hash().to_vec()),
            id: kept.id.clone(),
            signed: kept.signed.clone(),
        }
    }

    /// Keys for another attempt.
    fn new_keys(&self) -> Result<KeptKeys> {
        let seed = crate::identity::random()?;
        let Contribution { run, round, client, .. } = self.pending;
        let (certificate, key) = self.home.signer()?;
        let sign = |text: &[u8]| key.sign(text).map_err(Error::identity);
        let member = Party::new(*client, seed).member(run, *round, self.home.task()?, certificate, &sign)?;
        let kept = KeptKeys { seed: seed.to_vec(), member, ..KeptKeys::default() };
        self.home.set_summing(&kept)?;
        Ok(kept)
    }

    fn party(&self, kept: &KeptKeys) -> Result<Party> {
        let seed = <[u8; 32]>::try_from(&kept.seed[..]).map_err(|_| Error::internal("a seed must have 32 bytes"))?;
        Ok(Party::new(self.pending.client, seed))
    }

    /// A roster with this node's keys in it, whose members have signed theirs.
    fn check(&self, kept: &KeptKeys, message: RosterMessage) -> Result<Roster> {
        let key_of = self.home.key_of_members()?;
        Roster::check(&self.pending.run, self.pending.round, &kept.member, message, self.policy.threshold_min, &key_of)
    }

    async fn share(&self, kept: &mut KeptKeys, message: RosterMessage) -> Result<Roster> {
        if kept.roster.as_ref().is_some_and(|accepted| *accepted != message) {
            return Err(Error::Declined("the roster differs from the one that this node has accepted".into()));
        }
        let roster = self.check(kept, message.clone())?;
        self.policy.check_cohort(roster.clients().len())?;
        kept.roster = Some(message);
        self.home.set_summing(kept)?;
        let shares = self.party(kept)?.shares(&roster)?;
        self.link.send(&SharesFor { run: self.pending.run.clone(), round: self.pending.round, shares }).await?;
        Ok(roster)
    }

    /// The vector before it is masked.
    fn plain(&self) -> Result<&Blob> {
        let plain = self.pending.parts.iter().find(|part| part.name == PLAIN);
        Ok(&plain.ok_or_else(|| Error::internal("no vector to mask"))?.blob)
    }

    async fn mask(&self, kept: &mut KeptKeys, roster: &Roster, shared: Shared) -> Result<()> {
        if kept.shared.as_ref().is_some_and(|accepted| *accepted != shared) {
            return Err(Error::Declined("the shares differ from those that this node has accepted".into()));
        }
        self.policy.check_cohort(shared.clients.len())?;
        let (party, roster, outbox) = (self.party(kept)?, roster.clone(), self.home.outbox()?);
        let plain = self.plain()?.clone();
        let (store, given) = (outbox.clone(), shared.clone());
        let masking = tokio::task::spawn_blocking(move || {
            let mut values = decode_u64(&store.get(&plain)?);
            party.mask(&roster, &given, &mut values)?;
            store.put(&encode_u64(&values))
        });
        let blob = masking.await.map_err(Error::internal)??;
        kept.shared = Some(shared);
        self.home.set_summing(kept)?;
        let Contribution { run, round, client, .. } = self.pending.clone();
        let parts = vec![NamedBlob { name: MASKED.into(), blob: blob.clone() }];
        let masked = Contribution { run, round, client, parts, ..Contribution::default() };
        loop {
            match self.link.send(&masked).await?.kind {
                Some(VerdictKind::Accepted(accepted)) => {
                    kept.id = accepted.id;
                    return self.home.set_summing(kept);
                }
                Some(VerdictKind::Missing(missing)) => {
                    let have = missing.have.iter().find(|have| have.hash == blob.hash).map_or(0, |have| have.len);
                    self.link.upload(&blob, have, &outbox).await?;
                }
                // The stage is over: the next step shows what follows.
                Some(VerdictKind::Rejected(rejected)) => {
                    tracing::warn!(round, reason = rejected.reason, "masked vector rejected");
                    return Ok(());
                }
                None => return Err(super::later_version()),
            }
        }
    }

    /// A sum of fewer clients would have less noise than the run promises.
    fn check_noise(&self, n_survivors: usize) -> Result<()> {
        let Some(least) = self.pending.parts.iter().find(|part| part.name == NOISE_CLIENTS) else { return Ok(()) };
        let least = decode_u64(&self.home.outbox()?.get(&least.blob)?).first().copied().unwrap_or(u64::MAX);
        if n_survivors as u64 >= least {
            return Ok(());
        }
        Err(Error::Declined(format!(
            "{n_survivors} clients are left, and the noise that the run promises takes {least}"
        )))
    }

    /// Signs the lists of an attempt, once. The next announcement has the signature.
    fn sign(&self, kept: &mut KeptKeys, roster: &Roster, survivors: &Survivors) -> Result<()> {
        if !kept.signed.is_empty() && kept.survivors != survivors.clients {
            return Err(Error::Declined("the survivors differ from those that this node has signed".into()));
        }
        self.policy.check_cohort(survivors.clients.len())?;
        self.check_noise(survivors.clients.len())?;
        kept.signed = self.party(kept)?.sign(roster, shared_of(kept)?, survivors)?;
        kept.survivors.clone_from(&survivors.clients);
        self.home.set_summing(kept)
    }

    async fn reveal(&self, kept: &KeptKeys, roster: &Roster, survivors: &Survivors) -> Result<()> {
        let shared = shared_of(kept)?;
        let reveal = self.party(kept)?.reveal(roster, shared, survivors)?;
        let Contribution { run, round, .. } = self.pending;
        // Two sets of survivors would give two sums, and their difference.
        self.home.set_revealed(&self.plain()?.hash, &survivors.clients)?;
        self.link.send(&RevealFor { run: run.clone(), round: *round, reveal }).await
    }
}

fn shared_of(kept: &KeptKeys) -> Result<&Shared> {
    kept.shared.as_ref().ok_or_else(|| Error::protocol("no shares were accepted"))
}

/// The roster that this node has accepted, of which later messages speak.
fn known(accepted: Option<&Roster>) -> Result<&Roster> {
    accepted.ok_or_else(|| Error::protocol("this node has accepted no roster yet"))
}
