//! Who takes part in an attempt, with whose keys, and who is whose neighbour.

use super::masks::derive;
use crate::error::{Error, Result};
use crate::wire::{Member, RosterMessage, Shared, Shares};
use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use prost::Message;
use ring::signature::{ECDSA_P256_SHA256_ASN1, ED25519, UnparsedPublicKey};
use std::collections::{BTreeMap, BTreeSet};

/// Below this number of nodes each is everybody's neighbour.
pub const COMPLETE_BELOW: usize = 128;

/// Neighbours of a node in a larger roster. With a threshold of two thirds, a sixth of the nodes may drop out and a fifth
/// may collude, at random, before a neighbourhood is likely to fail.
const NEIGHBOURS: usize = 100;

const HASH: usize = 32;

/// The members of an attempt. The server knows all entries, a node those of its neighbourhood.
#[derive(Clone, Debug, PartialEq)]
pub struct Roster {
    hash: [u8; HASH],
    clients: Vec<u32>,
    hashes: Vec<u8>,
    members: BTreeMap<u32, Member>,
    threshold: usize,
    /// The clients in the order of the ring on which neighbours stand side by side; empty if all are neighbours.
    ring: Vec<u32>,
}

impl Roster {
    /// The server's roster of a round. `share`: how much of a neighbourhood rebuilds a secret, see `threshold_of`.
    ///
    /// # Errors
    /// If a client occurs twice.
    pub fn new(run: &str, round: u32, members: Vec<Member>, share: f64) -> Result<Self> {
        let threshold = threshold_of(share, neighbourhood_len(members.len()));
        Self::with_threshold(run, round, members, threshold)
    }

    /// As [`Roster::new`], with the number of shares that rebuild a secret.
    ///
    /// # Errors
    /// If a client occurs twice.
    pub fn with_threshold(run: &str, round: u32, mut members: Vec<Member>, threshold: usize) -> Result<Self> {
        members.sort_by_key(|m| m.client);
        let task = members.first().map(|m| m.task.clone()).unwrap_or_default();
        let clients: Vec<u32> = members.iter().map(|m| m.client).collect();
        let hashes: Vec<u8> = members.iter().flat_map(hash_of).collect();
        Self::of(run, round, &task, clients, hashes, members, threshold)
    }

    fn of(
        run: &str,
        round: u32,
        task: &[u8],
        clients: Vec<u32>,
        hashes: Vec<u8>,
        members: Vec<Member>,
        threshold: usize,
    ) -> Result<Self> {
        let is_sorted = clients.windows(2).all(|w| w[0] < w[1]);
        if !is_sorted || hashes.len() != HASH * clients.len() || clients.is_empty() {
            return Err(Error::protocol("roster: a client occurs twice, or an entry is missing"));
        }
        let mut hasher = blake3::Hasher::new_derive_key("fedproj secure roster 1");
        hasher.update(&(run.len() as u64).to_le_bytes()).update(run.as_bytes()).update(&round.to_le_bytes());
        hasher.update(&(threshold as u64).to_le_bytes());
        // A node sees the entries of its neighbours only, and the hash binds the others to the same task.
        hasher.update(task);
        for client in &clients {
            hasher.update(&client.to_le_bytes());
        }
        let hash = *hasher.update(&hashes).finalize().as_bytes();
        let ring = if clients.len() < COMPLETE_BELOW { Vec::new() } else { shuffled(&clients, &hash) };
        let members = members.into_iter().map(|m| (m.client, m)).collect();
        Ok(Self { hash, clients, hashes, members, threshold, ring })
    }

    /// Checks a roster that a node was given for a round: its own entry is in it as it was sent, those of all its neighbours
    /// are there, and their owners have signed them. `share`: the least part of a neighbourhood that may rebuild a secret.
    /// `key_of` gives the public key of a certificate of this federation.
    ///
    /// # Errors
    /// Names what is wrong.
    pub fn check(
        run: &str,
        round: u32,
        own: &Member,
        message: RosterMessage,
        share: f64,
        key_of: &dyn Fn(&[u8]) -> Result<Vec<u8>>,
    ) -> Result<Self> {
        let RosterMessage { clients, hashes, members, threshold } = message;
        let given: Vec<u32> = members.iter().map(|m| m.client).collect();
        let roster = Self::of(run, round, &own.task, clients, hashes, members, threshold as usize)?;
        if roster.members.get(&own.client) != Some(own) {
            return Err(Error::protocol("roster: this node's own entry is missing or changed"));
        }
        let expected = roster.neighbourhood(own.client);
        if given != expected {
            return Err(Error::protocol(format!("roster: entries of clients {given:?}; expected {expected:?}")));
        }
        let (threshold, n) = (roster.threshold, expected.len());
        let least = threshold_of(share, n);
        if threshold < least || threshold > n {
            return Err(Error::protocol(format!(
                "roster: {threshold} of {n} nodes would rebuild secrets; this node's policy has threshold_min = {share}, which \
                 is {least} of them"
            )));
        }
        let mut certificates = BTreeSet::new();
        for member in roster.members.values() {
            let client = member.client;
            if roster.leaf(client) != Some(&hash_of(member)[..]) || !certificates.insert(&member.certificate) {
                return Err(Error::protocol(format!("roster: the entry of client {client} is changed or doubled")));
            }
            // Nodes with other models, configurations or scales would tell the server which part of the sum is whose.
            if member.task != own.task {
                return Err(Error::protocol(format!("roster: client {client} has been given another task")));
            }
            if !is_signed(run, round, member, &key_of(&member.certificate)?) {
                return Err(Error::protocol(format!("roster: client {client} has not signed its entry")));
            }
        }
        Ok(roster)
    }

    fn leaf(&self, client: u32) -> Option<&[u8]> {
        self.hashes.chunks_exact(HASH).nth(self.clients.binary_search(&client).ok()?)
    }

    /// What a node gets of the server's roster.
    pub fn for_node(&self, client: u32) -> RosterMessage {
        let members = self.neighbourhood(client).iter().filter_map(|c| self.members.get(c)).cloned().collect();
        RosterMessage {
            clients: self.clients.clone(),
            hashes: self.hashes.clone(),
            members,
            threshold: self.threshold as u32,
        }
    }

    /// The hash that names it. It covers run, round, threshold and all entries.
    pub fn hash(&self) -> &[u8; HASH] {
        &self.hash
    }

    /// All clients, in increasing order.
    pub fn clients(&self) -> &[u32] {
        &self.clients
    }

    /// The entries that are known: all on the server.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.values()
    }

    /// Shares that rebuild a secret.
    pub fn threshold(&self) -> usize {
        self.threshold
    }

    /// Whether this very entry is in it.
    pub fn has(&self, member: &Member) -> bool {
        self.members.get(&member.client) == Some(member)
    }

    pub(super) fn member(&self, client: u32) -> Result<&Member> {
        self.members.get(&client).ok_or_else(|| Error::protocol(format!("client {client} is not in the roster")))
    }

    /// A client's neighbours and itself, in increasing order.
    pub fn neighbourhood(&self, client: u32) -> Vec<u32> {
        if self.ring.is_empty() {
            return self.clients.clone();
        }
        let Some(place) = self.ring.iter().position(|c| *c == client) else { return Vec::new() };
        let (n, first) = (self.ring.len(), place + self.ring.len() - NEIGHBOURS / 2);
        let mut near: Vec<u32> = (first..=first + NEIGHBOURS).map(|at| self.ring[at % n]).collect();
        near.sort_unstable();
        near
    }

    /// A client's neighbours among these clients, itself included, in increasing order.
    pub fn near(&self, client: u32, among: &[u32]) -> impl ExactSizeIterator<Item = u32> + use<> {
        self.holders(client, among).into_iter().map(|(_, client)| client)
    }

    /// What a client signs once per attempt: whose shares and whose vectors there are.
    pub(super) fn lists(&self, sharers: &[u32], survivors: &[u32]) -> Vec<u8> {
        let mut hasher = blake3::Hasher::new_derive_key("fedproj secure lists 1");
        hasher.update(&self.hash);
        for list in [sharers, survivors] {
            hasher.update(&(list.len() as u64).to_le_bytes());
            for client in list {
                hasher.update(&client.to_le_bytes());
            }
        }
        [&b"fedproj secure lists 1\n"[..], hasher.finalize().as_bytes()].concat()
    }

    /// Whether a client has signed these lists.
    pub fn has_signed(&self, client: u32, sharers: &[u32], survivors: &[u32], signature: &[u8]) -> bool {
        let Some(member) = self.members.get(&client) else { return false };
        let key = UnparsedPublicKey::new(&ED25519, &member.list_key);
        key.verify(&self.lists(sharers, survivors), signature).is_ok()
    }

    /// A client's neighbours among these clients, itself included, each with the place of its share.
    pub(super) fn holders(&self, client: u32, among: &[u32]) -> Vec<(u8, u32)> {
        let near = self.neighbourhood(client).into_iter().enumerate();
        near.filter(|(_, c)| among.binary_search(c).is_ok()).map(|(at, c)| (at as u8 + 1, c)).collect()
    }
}

/// Whether the owner of a key has signed an entry for this round.
pub fn is_signed(run: &str, round: u32, member: &Member, key: &[u8]) -> bool {
    let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key);
    key.verify(&signed_text(run, round, member), &member.signature).is_ok()
}

/// What a client gets of those who have shared.
pub fn shared_for(roster: &Roster, shares: &BTreeMap<u32, Shares>, client: u32) -> Shared {
    let clients: Vec<u32> = shares.keys().copied().collect();
    let sealed_by = |(_, from): (u8, u32)| {
        let to = roster.neighbourhood(from).into_iter().filter(|c| *c != from).position(|c| c == client)?;
        shares.get(&from)?.sealed.get(to).cloned()
    };
    let sealed = roster.holders(client, &clients).into_iter().filter_map(sealed_by).collect();
    Shared { roster: roster.hash().to_vec(), clients, sealed }
}

/// How many of n neighbours rebuild a secret if it takes this share of them: more than half in any case. Then t of them agree
/// on one list of survivors only: two lists would need 2t signatures, and of n nodes with c that sign everything come n + c.
fn threshold_of(share: f64, n: usize) -> usize {
    ((share * n as f64 - 1e-9).ceil() as usize).clamp(n / 2 + 1, n.max(1))
}

fn neighbourhood_len(n: usize) -> usize {
    if n < COMPLETE_BELOW { n } else { NEIGHBOURS + 1 }
}

/// A random order that everybody can repeat. No node chooses it: the hash covers the keys of all members. A server can try
/// several, since a node checks the entries of its neighbours only (docs/security.md says what that is worth).
fn shuffled(clients: &[u32], hash: &[u8; HASH]) -> Vec<u32> {
    let mut rng = ChaCha20Rng::from_seed(*derive(hash, b"", &[b"fedproj secure ring 1"]));
    let mut ring = clients.to_vec();
    for i in (1..ring.len()).rev() {
        // The bias of a remainder of 64 bits is below 2⁻³².
        ring.swap(i, (rng.next_u64() % (i as u64 + 1)) as usize);
    }
    ring
}

fn hash_of(member: &Member) -> [u8; HASH] {
    *blake3::Hasher::new_derive_key("fedproj secure member 1").update(&member.encode_to_vec()).finalize().as_bytes()
}

/// What a node signs: a text that no certificate, handshake or export can be mistaken for.
pub(super) fn signed_text(run: &str, round: u32, member: &Member) -> Vec<u8> {
    let mut text = b"fedproj secure keys 2\n".to_vec();
    let Member { client, mask_key, share_key, list_key, task, .. } = member;
    for field in [run.as_bytes(), &round.to_le_bytes(), task, &client.to_le_bytes(), mask_key, share_key, list_key] {
        text.extend_from_slice(&(field.len() as u64).to_le_bytes());
        text.extend_from_slice(field);
    }
    text
}
