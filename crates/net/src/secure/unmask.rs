//! The server's side: rebuilding secrets from shares, and taking the masks away from a sum.

use super::masks::{Sign, add, check_word, derive};
use super::party::{commitment, own_mask_seed, pair_seed, public_key, sign_of};
use super::roster::Roster;
use super::shamir::{Secret, combine};
use crate::error::{Error, Result};
use crate::wire::Reveal;
use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use std::collections::{BTreeMap, BTreeSet};
use zeroize::Zeroizing;

/// Whether the shares of these clients rebuild the secrets of all that have shared, if anybody has.
pub fn is_enough(roster: &Roster, shared: &[u32], revealed: &[u32]) -> bool {
    !shared.is_empty() && shared.iter().all(|client| roster.holders(*client, revealed).len() >= roster.threshold())
}

/// Everything that the masks in a sum of masked vectors follow from.
#[derive(Debug)]
pub struct Unmasking<'a> {
    /// The roster, with all entries.
    pub roster: &'a Roster,
    /// The commitment of each client that has shared.
    pub commitments: &'a BTreeMap<u32, Vec<u8>>,
    /// The clients whose vectors are in the sum, in increasing order.
    pub survivors: &'a [u32],
    /// What survivors have revealed.
    pub reveals: &'a BTreeMap<u32, Reveal>,
}

/// Why a sum keeps its masks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The clients whose secrets the shares do not give. More shares may; without them, these clients have dealt wrong ones or
    /// others have revealed wrong ones.
    pub clients: Vec<u32>,
    /// In words.
    pub reason: String,
}

/// Sets of shares that are tried for a secret. Of 101 shares with five wrong ones, one set of 68 in 340 is right.
const TRIES: usize = 3000;

/// A share of a secret: its place, who has revealed it, and the share.
type Revealed = (u8, u32, Secret);

impl Unmasking<'_> {
    /// Takes the masks away from a sum, and its check word.
    ///
    /// # Errors
    /// If secrets cannot be rebuilt; then the sum is as before. Or if the masks have not cancelled; then it is useless.
    pub fn unmask(&self, sum: &mut Vec<u64>) -> std::result::Result<(), Failed> {
        for (seed, sign) in self.masks()? {
            add(&seed, sign, sum);
        }
        let check = sum.pop();
        if check != Some(check_word(self.roster.hash(), sum)) {
            let reason = "the masks have not cancelled: a vector or a mask is wrong".into();
            return Err(Failed { clients: Vec::new(), reason });
        }
        Ok(())
    }

    /// The masks that the sum lacks, with the sign that removes them.
    fn masks(&self) -> std::result::Result<Vec<(Secret, Sign)>, Failed> {
        let (mut masks, mut failed, mut trusted) = (Vec::new(), Vec::new(), BTreeSet::new());
        for client in self.commitments.keys() {
            match self.masks_of(*client, &mut trusted) {
                Ok(of) => masks.extend(of),
                Err(error) => failed.push((*client, error.to_string())),
            }
        }
        let Some((_, reason)) = failed.first().cloned() else { return Ok(masks) };
        Err(Failed { clients: failed.into_iter().map(|(client, _)| client).collect(), reason })
    }

    /// The masks that follow from a client's secret.
    fn masks_of(&self, client: u32, trusted: &mut BTreeSet<u32>) -> Result<Vec<(Secret, Sign)>> {
        let member = self.roster.member(client)?;
        if self.survivors.binary_search(&client).is_ok() {
            let published = &self.commitments[&client];
            let is_right = |secret: &Secret| commitment(self.roster, secret)[..] == published[..];
            let own_mask = self.rebuild(client, trusted, &is_right)?;
            return Ok(vec![(own_mask_seed(self.roster, &own_mask), Sign::Minus)]);
        }
        let key = self.rebuild(client, trusted, &|secret| public_key(secret)[..] == member.mask_key[..])?;
        // What the survivors have added is taken away.
        let shared_with = |other| Ok((pair_seed(self.roster, &key, other)?, -sign_of(other, client)));
        self.roster.near(client, self.survivors).map(shared_with).collect()
    }

    /// The shares of a client's secret that have been revealed.
    fn shares_of(&self, client: u32) -> Vec<Revealed> {
        let shared: Vec<u32> = self.commitments.keys().copied().collect();
        let share = |(place, holder): (u8, u32)| {
            let at = self.roster.near(holder, &shared).position(|c| c == client)?;
            let share = self.reveals.get(&holder)?.shares.get(at)?;
            Some((place, holder, Zeroizing::new(<[u8; 32]>::try_from(&share[..]).ok()?)))
        };
        self.roster.holders(client, self.survivors).into_iter().filter_map(share).collect()
    }

    /// The secret of a client. Some shares may be wrong, so sets of them are tried until one gives what the client has
    /// published: first of those whose shares were right before, then at random.
    fn rebuild(&self, client: u32, trusted: &mut BTreeSet<u32>, is_right: &dyn Fn(&Secret) -> bool) -> Result<Secret> {
        let (mut shares, threshold) = (self.shares_of(client), self.roster.threshold());
        let have = shares.len();
        if have < threshold {
            return Err(Error::protocol(format!(
                "client {client}: {have} shares of its secret; {threshold} are needed"
            )));
        }
        shares.sort_by_key(|(_, holder, _)| !trusted.contains(holder));
        let mut rng = ChaCha20Rng::from_seed(*derive(self.roster.hash(), &client.to_le_bytes(), &[b"fedproj tries 1"]));
        for _ in 0..if have > threshold { TRIES } else { 1 } {
            let some: Vec<_> = shares[..threshold].iter().map(|(place, _, share)| (*place, share.clone())).collect();
            let secret = combine(&some)?;
            if is_right(&secret) {
                trusted.extend(shares[..threshold].iter().map(|(_, holder, _)| *holder));
                return Ok(secret);
            }
            for at in 0..threshold {
                shares.swap(at, at + (rng.next_u64() % (have - at) as u64) as usize);
            }
        }
        Err(Error::protocol(format!("client {client}: the {have} shares of its secret do not fit together")))
    }
}
