//! Shamir's secret sharing of 32 bytes over GF(2⁸), by `vsss-rs`. No step depends on the value of a secret.
//!
//! The polynomials are drawn from a seed, because a node that was killed must make the same shares again.

use crate::error::{Error, Result};
use chacha20::ChaCha20Rng;
use chacha20::rand_core::SeedableRng;
use vsss_rs::Gf256;
use zeroize::Zeroizing;

/// A secret, a seed, or a share of one.
pub(super) type Secret = Zeroizing<[u8; 32]>;

/// Shares at the places 1 to `n`. Any `threshold` of them rebuild the secret, fewer tell nothing. The polynomials follow
/// from `seed`.
///
/// # Errors
/// If the threshold is below 2 or above `n`.
pub(super) fn split(secret: &Secret, seed: &Secret, threshold: usize, n: usize) -> Result<Vec<Secret>> {
    let shares = Gf256::split_bytes(threshold, n, &secret[..], ChaCha20Rng::from_seed(**seed));
    let shares = shares.map_err(|e| Error::internal(format!("sharing a secret: {e}")))?;
    // Each begins with its place.
    shares.into_iter().map(|share| secret_of(&Zeroizing::new(share)[1..])).collect()
}

/// The secret of shares at these places.
///
/// # Errors
/// If there are fewer than two, or two of the same place.
pub(super) fn combine(shares: &[(u8, Secret)]) -> Result<Secret> {
    let whole = |(place, share): &(u8, Secret)| [&[*place][..], &share[..]].concat();
    let shares: Zeroizing<Vec<Vec<u8>>> = Zeroizing::new(shares.iter().map(whole).collect());
    let secret = Gf256::combine_bytes(&*shares).map_err(|e| Error::protocol(format!("shares of a secret: {e}")))?;
    secret_of(&Zeroizing::new(secret))
}

fn secret_of(bytes: &[u8]) -> Result<Secret> {
    let bytes: [u8; 32] = bytes.try_into().map_err(|_| Error::internal("a share of another length"))?;
    Ok(Zeroizing::new(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// By hand: 0x2a + 0x11 x at 1, 2 and 3 is 0x3b, 0x08 and 0x19.
    #[test]
    fn a_line_through_two_known_points_is_rebuilt() {
        let share = |y: u8| Zeroizing::new([y; 32]);
        for pair in [[(1, 0x3b), (2, 0x08)], [(3, 0x19), (1, 0x3b)], [(2, 0x08), (3, 0x19)]] {
            assert_eq!(*combine(&pair.map(|(x, y)| (x, share(y)))).unwrap(), [0x2a; 32]);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
        #[test]
        fn any_threshold_of_shares_is_enough_and_one_less_is_not(
            secret: [u8; 32], seed: [u8; 32], n in 2usize..=127, part in 0.0..1.0f64, from: usize,
        ) {
            let threshold = 2 + (part * (n - 1) as f64) as usize;
            let (secret, seed) = (Zeroizing::new(secret), Zeroizing::new(seed));
            let shares = split(&secret, &seed, threshold, n).unwrap();
            let some = |k: usize| -> Vec<(u8, Secret)> {
                (0..k).map(|i| (from % n + i) % n).map(|at| (at as u8 + 1, shares[at].clone())).collect()
            };
            prop_assert_eq!(&combine(&some(threshold)).unwrap(), &secret);
            // One share alone is an error.
            prop_assert!(combine(&some(threshold - 1)).map_or(true, |other| other != secret));
            let mut flipped = some(threshold);
            flipped[0].1[31] ^= 1;
            prop_assert_ne!(&combine(&flipped).unwrap(), &secret);
            let again = split(&secret, &seed, threshold, n).unwrap();
            prop_assert_eq!(again, shares, "a node that was killed makes the same");
        }
    }
}
