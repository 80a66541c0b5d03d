//! A node's side: its five messages, and what it never does.

use super::masks::{Sign, add, check_word, derive};
use super::roster::{Roster, signed_text};
use super::shamir::{Secret, split};
use crate::error::{Error, Result};
use crate::wire::{Member, Reveal, Shared, Shares, Survivors};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use ring::signature::{Ed25519KeyPair, KeyPair};
use x25519_dalek::{PublicKey, StaticSecret};
use zeroize::Zeroizing;

/// Bytes of both shares for a neighbour.
const PAIR: usize = 64;

/// Bytes of the same, encrypted.
pub const SEALED_BYTES: usize = PAIR + 16;

/// A neighbour's shares, if they can be read: of its own mask, of its mask key.
type Opened = (u32, Option<(Secret, Secret)>);

/// A node in one attempt. Everything follows from its seed, which must be random and serve one attempt only.
#[derive(Clone)]
pub struct Party {
    seed: Secret,
    client: u32,
}

impl std::fmt::Debug for Party {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Party").field("client", &self.client).finish_non_exhaustive()
    }
}

impl Party {
    /// The node of a client with the secret of an attempt.
    pub fn new(client: u32, seed: [u8; 32]) -> Self {
        Self { seed: Zeroizing::new(seed), client }
    }

    fn secret(&self, what: &[u8]) -> Secret {
        derive(b"fedproj secure party 1", &*self.seed, &[what])
    }

    pub(super) fn mask_key(&self) -> Secret {
        self.secret(b"mask key")
    }

    fn share_key(&self) -> StaticSecret {
        StaticSecret::from(*self.secret(b"share key"))
    }

    fn list_key(&self) -> Result<Ed25519KeyPair> {
        Ed25519KeyPair::from_seed_unchecked(&self.secret(b"list key")[..]).map_err(Error::internal)
    }

    pub(super) fn own_mask(&self) -> Secret {
        self.secret(b"own mask")
    }

    /// The node's entry for the roster of a round. `task`: the hash of the task to which it contributes.
    ///
    /// # Errors
    /// If `sign` fails.
    pub fn member(
        &self,
        run: &str,
        round: u32,
        task: Vec<u8>,
        certificate: Vec<u8>,
        sign: &dyn Fn(&[u8]) -> Result<Vec<u8>>,
    ) -> Result<Member> {
        let mut member = Member {
            client: self.client,
            certificate,
            mask_key: public_key(&self.mask_key()).to_vec(),
            share_key: PublicKey::from(&self.share_key()).as_bytes().to_vec(),
            list_key: self.list_key()?.public_key().as_ref().to_vec(),
            task,
            signature: Vec::new(),
        };
        member.signature = sign(&signed_text(run, round, &member))?;
        Ok(member)
    }

    /// Shares of both secrets for the neighbours.
    ///
    /// # Errors
    /// If a neighbour's key is malformed.
    pub fn shares(&self, roster: &Roster) -> Result<Shares> {
        let near = roster.neighbourhood(self.client);
        let of = |secret: &Secret, polynomials: &[u8]| {
            split(secret, &self.secret(polynomials), roster.threshold(), near.len())
        };
        let masks = of(&self.own_mask(), b"polynomials of the own mask")?;
        let keys = of(&self.mask_key(), b"polynomials of the mask key")?;
        let mut sealed = Vec::with_capacity(near.len());
        for (at, to) in near.iter().enumerate().filter(|(_, to)| **to != self.client) {
            let mut pair = Zeroizing::new([&masks[at][..], &keys[at][..]].concat());
            let (key, from_to) = self.seal_key(roster, *to, (self.client, *to))?;
            let tag = key
                .seal_in_place_separate_tag(nonce(), Aad::from(from_to), &mut pair)
                .map_err(|_| Error::internal("a share could not be encrypted"))?;
            sealed.push([&pair[..], tag.as_ref()].concat());
        }
        let commitment = commitment(roster, &self.own_mask()).to_vec();
        Ok(Shares { roster: roster.hash().to_vec(), commitment, sealed })
    }

    /// The key for shares between this node and another, in one direction, and what else the encryption binds.
    fn seal_key(&self, roster: &Roster, other: u32, (from, to): (u32, u32)) -> Result<(LessSafeKey, [u8; 8])> {
        let agreed = agree(&self.share_key(), other, &roster.member(other)?.share_key)?;
        let mut from_to = [0; 8];
        from_to[..4].copy_from_slice(&from.to_le_bytes());
        from_to[4..].copy_from_slice(&to.to_le_bytes());
        let key = derive(roster.hash(), &*agreed, &[b"fedproj secure shares 1", &from_to]);
        let key = UnboundKey::new(&CHACHA20_POLY1305, &key[..]).map_err(Error::internal)?;
        Ok((LessSafeKey::new(key), from_to))
    }

    /// Checks who has shared and decrypts the neighbours' shares. One that cannot be read is left out: a single dealer must not
    /// stop this node. If too few can be read, the neighbours have accepted another roster.
    fn open(&self, roster: &Roster, shared: &Shared) -> Result<Vec<Opened>> {
        check_clients(roster, self.client, &shared.roster, &shared.clients, roster.clients())?;
        let near = roster.holders(self.client, &shared.clients);
        if near.len() < roster.threshold() || near.len() != shared.sealed.len() + 1 {
            return Err(Error::protocol(format!(
                "shares of {} clients in a neighbourhood with {} of them and a threshold of {}",
                shared.sealed.len(),
                near.len(),
                roster.threshold()
            )));
        }
        let mut sealed = shared.sealed.iter();
        let mut opened = Vec::with_capacity(near.len());
        for (_, from) in near {
            let pair = if from == self.client {
                Some(self.kept(roster)?)
            } else {
                let mut bytes = Zeroizing::new(sealed.next().cloned().unwrap_or_default());
                let (key, from_to) = self.seal_key(roster, from, (from, self.client))?;
                let plain = key.open_in_place(nonce(), Aad::from(from_to), &mut bytes);
                plain.ok().and_then(|plain| <&[u8; PAIR]>::try_from(&*plain).ok()).map(|pair| Zeroizing::new(*pair))
            };
            let half = |pair: &[u8; PAIR], at: usize| Zeroizing::new(std::array::from_fn(|i| pair[at + i]));
            opened.push((from, pair.map(|pair| (half(&pair, 0), half(&pair, 32)))));
        }
        let n_read = opened.iter().filter(|(_, pair)| pair.is_some()).count();
        if n_read < roster.threshold() {
            return Err(Error::protocol(format!(
                "only {n_read} shares can be read; the others were changed, or made for another roster"
            )));
        }
        Ok(opened)
    }

    /// The node's own shares of its own secrets.
    fn kept(&self, roster: &Roster) -> Result<Zeroizing<[u8; PAIR]>> {
        let near = roster.neighbourhood(self.client);
        let at = near.binary_search(&self.client).unwrap_or_default();
        let of = |secret: &Secret, polynomials: &[u8]| {
            let shares = split(secret, &self.secret(polynomials), roster.threshold(), near.len());
            shares.map(|mut shares| shares.swap_remove(at))
        };
        let mask = of(&self.own_mask(), b"polynomials of the own mask")?;
        let key = of(&self.mask_key(), b"polynomials of the mask key")?;
        Ok(Zeroizing::new(std::array::from_fn(|i| if i < 32 { mask[i] } else { key[i - 32] })))
    }

    /// Masks a vector. It gets one value longer: the check word.
    ///
    /// # Errors
    /// If the shares cannot be read, or too few have shared.
    pub fn mask(&self, roster: &Roster, shared: &Shared, values: &mut Vec<u64>) -> Result<()> {
        self.open(roster, shared)?;
        values.push(check_word(roster.hash(), values));
        add(&own_mask_seed(roster, &self.own_mask()), Sign::Plus, values);
        let key = self.mask_key();
        for (_, other) in roster.holders(self.client, &shared.clients) {
            if other != self.client {
                add(&pair_seed(roster, &key, other)?, sign_of(self.client, other), values);
            }
        }
        Ok(())
    }

    /// Signs who has shared and whose vectors are in the sum. A caller must ask for one list of survivors per attempt.
    ///
    /// # Errors
    /// If the list is impossible, or too short for the threshold.
    pub fn sign(&self, roster: &Roster, shared: &Shared, survivors: &Survivors) -> Result<Vec<u8>> {
        check_clients(roster, self.client, &survivors.roster, &survivors.clients, &shared.clients)?;
        if roster.holders(self.client, &survivors.clients).len() < roster.threshold() {
            return Err(Error::protocol("too few of this node's neighbours are left"));
        }
        let lists = roster.lists(&shared.clients, &survivors.clients);
        Ok(self.list_key()?.sign(&lists).as_ref().to_vec())
    }

    /// Shares of the own masks of survivors and of the mask keys of those who dropped out, if enough neighbours have signed the
    /// lists that this node knows. So no two nodes of a neighbourhood reveal for different lists, which would give both secrets
    /// of a node. A caller must ask for the one list that the node has signed.
    ///
    /// # Errors
    /// If the list is impossible, or too few have signed it.
    pub fn reveal(&self, roster: &Roster, shared: &Shared, survivors: &Survivors) -> Result<Reveal> {
        self.sign(roster, shared, survivors)?;
        let (near, threshold) = (roster.holders(self.client, &survivors.clients), roster.threshold());
        let have_signed = near.iter().zip(&survivors.signed).filter(|((_, client), signature)| {
            roster.has_signed(*client, &shared.clients, &survivors.clients, signature)
        });
        if have_signed.take(threshold).count() < threshold {
            return Err(Error::protocol(format!(
                "fewer than {threshold} neighbours have signed the lists of clients that this node was given"
            )));
        }
        let share = |(client, pair): Opened| {
            let Some((own_mask, mask_key)) = pair else { return Vec::new() };
            let is_there = survivors.clients.binary_search(&client).is_ok();
            if is_there { own_mask.to_vec() } else { mask_key.to_vec() }
        };
        let shares = self.open(roster, shared)?.into_iter().map(share).collect();
        Ok(Reveal { roster: roster.hash().to_vec(), shares })
    }
}

/// Checks that a list of clients belongs to the accepted roster, is sorted, within `among`, and has this client in it.
fn check_clients(roster: &Roster, client: u32, hash: &[u8], clients: &[u32], among: &[u32]) -> Result<()> {
    if hash != roster.hash() {
        return Err(Error::protocol("the server speaks of another roster than the one this node has accepted"));
    }
    let is_sorted = clients.windows(2).all(|w| w[0] < w[1]);
    let is_within = clients.iter().all(|c| among.binary_search(c).is_ok());
    if is_sorted && is_within && clients.binary_search(&client).is_ok() {
        return Ok(());
    }
    Err(Error::protocol(format!("impossible list of clients: {clients:?}")))
}

/// Each key encrypts one message.
fn nonce() -> Nonce {
    Nonce::assume_unique_for_key([0; 12])
}

pub(super) fn public_key(secret: &Secret) -> [u8; 32] {
    *PublicKey::from(&StaticSecret::from(**secret)).as_bytes()
}

fn agree(secret: &StaticSecret, other: u32, public: &[u8]) -> Result<Secret> {
    let refuse = |problem: &str| Error::protocol(format!("roster: client {other} has a key {problem}"));
    let public = <[u8; 32]>::try_from(public).map_err(|_| refuse("that has not 32 bytes"))?;
    let agreed = secret.diffie_hellman(&PublicKey::from(public));
    if !agreed.was_contributory() {
        return Err(refuse("that gives the same secret with everybody"));
    }
    Ok(Zeroizing::new(*agreed.as_bytes()))
}

/// Whether every node can use the keys of an entry: none has another length, or a small order, which shows with any secret.
pub fn are_usable(member: &Member) -> bool {
    let some = StaticSecret::from([1; 32]);
    member.list_key.len() == 32
        && [&member.mask_key, &member.share_key].into_iter().all(|key| agree(&some, member.client, key).is_ok())
}

/// What a node publishes about the seed of its own mask.
pub(super) fn commitment(roster: &Roster, own_mask: &Secret) -> Secret {
    derive(roster.hash(), &**own_mask, &[b"fedproj secure commitment 1"])
}

pub(super) fn own_mask_seed(roster: &Roster, own_mask: &Secret) -> Secret {
    derive(roster.hash(), &**own_mask, &[b"fedproj secure own mask 1"])
}

/// The seed of the mask that a node with this mask key shares with another.
pub(super) fn pair_seed(roster: &Roster, mask_key: &Secret, other: u32) -> Result<Secret> {
    let agreed = agree(&StaticSecret::from(**mask_key), other, &roster.member(other)?.mask_key)?;
    Ok(derive(roster.hash(), &*agreed, &[b"fedproj secure pair 1"]))
}

/// How a client uses the mask that it shares with another: one adds it, the other takes it away.
pub(super) fn sign_of(client: u32, other: u32) -> Sign {
    if client < other { Sign::Plus } else { Sign::Minus }
}
