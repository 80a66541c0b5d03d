//! The server's side: rebuilding secrets from shares, and taking the masks away from a sum.

use super::masks::{Sign, add, check_word};
use super::party::{commitment, own_mask_seed, pair_seed, public_key, sign_of};
use super::roster::Roster;
use super::shamir::{Secret, combine};
use crate::error::{Error, Result};
use crate::wire::Reveal;
use std::collections::BTreeMap;
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

impl Unmasking<'_> {
    /// Takes the masks away from a sum, and its check word.
    ///
    /// # Errors
    /// If a secret cannot be rebuilt, or the masks have not cancelled: the values are useless then.
    pub fn unmask(&self, sum: &mut Vec<u64>) -> Result<()> {
        for (seed, sign) in self.masks()? {
            add(&seed, sign, sum);
        }
        let check = sum.pop();
        if check != Some(check_word(self.roster.hash(), sum)) {
            return Err(Error::protocol("the masks have not cancelled: a vector or a mask is wrong"));
        }
        Ok(())
    }

    /// The masks that the sum lacks, with the sign that removes them.
    fn masks(&self) -> Result<Vec<(Secret, Sign)>> {
        let shared: Vec<u32> = self.commitments.keys().copied().collect();
        let mut masks = Vec::new();
        for (client, published) in self.commitments {
            let shares = self.shares_of(*client, &shared)?;
            let member = self.roster.member(*client)?;
            if self.survivors.binary_search(client).is_ok() {
                let is_right = |secret: &Secret| commitment(self.roster, secret)[..] == published[..];
                let own_mask = self.rebuild(*client, &shares, &is_right)?;
                masks.push((own_mask_seed(self.roster, &own_mask), Sign::Minus));
                continue;
            }
            let key = self.rebuild(*client, &shares, &|secret| public_key(secret)[..] == member.mask_key[..])?;
            for (_, other) in self.roster.holders(*client, self.survivors) {
                // What the survivor has added is taken away.
                masks.push((pair_seed(self.roster, &key, other)?, -sign_of(other, *client)));
            }
        }
        Ok(masks)
    }

    /// The revealed shares of a client's secret, with their places.
    fn shares_of(&self, client: u32, shared: &[u32]) -> Result<Vec<(u8, Secret)>> {
        let mut shares = Vec::new();
        for (place, holder) in self.roster.holders(client, self.survivors) {
            let Some(reveal) = self.reveals.get(&holder) else { continue };
            let near = self.roster.holders(holder, shared);
            let at = near.iter().position(|(_, c)| *c == client);
            let share = at.and_then(|at| <[u8; 32]>::try_from(&reveal.shares.get(at)?[..]).ok());
            let share = share.ok_or_else(|| Error::protocol(format!("client {holder} has revealed too few shares")))?;
            shares.push((place, Zeroizing::new(share)));
        }
        Ok(shares)
    }

    /// The secret of these shares. If one of them is wrong and there are more than needed, it is found without that one.
    fn rebuild(&self, client: u32, shares: &[(u8, Secret)], is_right: &dyn Fn(&Secret) -> bool) -> Result<Secret> {
        let threshold = self.roster.threshold();
        if shares.len() < threshold {
            let have = shares.len();
            return Err(Error::protocol(format!(
                "client {client}: {have} shares of its secret; {threshold} are needed"
            )));
        }
        let without = |left_out: Option<usize>| -> Option<Secret> {
            let kept =
                shares.iter().enumerate().filter(|(at, _)| Some(*at) != left_out).map(|(_, share)| share.clone());
            let kept: Vec<_> = kept.take(threshold).collect();
            (kept.len() == threshold).then(|| combine(&kept)).filter(is_right)
        };
        std::iter::once(None)
            .chain((0..shares.len()).map(Some))
            .find_map(without)
            .ok_or_else(|| Error::protocol(format!("client {client}: the shares of its secret do not fit together")))
    }
}
