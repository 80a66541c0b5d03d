//! Shamir's secret sharing of 32 bytes over GF(2⁸), by `vsss-rs`. No step depends on the value of a secret.
//!
//! The polynomials are drawn from a seed, because a node that was killed must make the same shares again. Earlier versions of the
//! crate drew them with a bias; a test here would find one.

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
/// If there are fewer than two, two of the same place, or one of place 0, where the secret itself lies.
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
    use super::super::masks::tests::chi2;
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

    #[test]
    fn sets_of_shares_that_cannot_be_and_impossible_thresholds_are_errors() {
        let of = |shares: &[(u8, u8)]| {
            let shares: Vec<_> = shares.iter().map(|(place, y)| (*place, Zeroizing::new([*y; 32]))).collect();
            combine(&shares)
        };
        // None, one, twice the same place, and the place of the secret.
        for wrong in [&[][..], &[(1, 5)], &[(3, 5), (3, 5)], &[(3, 5), (4, 5), (3, 6)], &[(0, 5), (1, 6)]] {
            assert!(of(wrong).is_err(), "{wrong:?}");
        }
        assert!(of(&[(3, 5), (255, 6)]).is_ok());
        let (secret, seed) = (Secret::default(), Secret::default());
        for (threshold, n) in [(0, 3), (1, 3), (4, 3), (2, 256)] {
            assert!(split(&secret, &seed, threshold, n).is_err(), "{threshold} of {n}");
        }
    }

    /// χ² against 255 degrees of freedom: mean 255, standard deviation 22.6. A generator that never draws 0, or odd numbers only,
    /// leaves cells empty.
    #[test]
    fn one_share_less_than_the_threshold_is_uniform_and_the_test_would_see_it_if_not() {
        const BYTE: u8 = 0x2a;
        let secret = Zeroizing::new([BYTE; 32]);
        let seed = |i: u16| Zeroizing::new(std::array::from_fn(|at| i.to_le_bytes()[at % 2]));
        let shares = |threshold: usize| -> Vec<Vec<Secret>> {
            (0..2048).map(|i| split(&secret, &seed(i), threshold, 4).unwrap()).collect()
        };
        let two = shares(2);
        for place in 0..4 {
            let bytes: Vec<u8> = two.iter().flat_map(|shares| *shares[place]).collect();
            assert!(chi2(&bytes) < 368.0, "share {place} of threshold 2: {}", chi2(&bytes));
            let without: Vec<u8> = bytes.iter().copied().filter(|b| *b != BYTE).collect();
            let odd: Vec<u8> = bytes.iter().map(|b| b | 1).collect();
            assert!(chi2(&without) > 368.0 && chi2(&odd) > 368.0);
        }
        // What two shares of three make of the secret, and how they differ.
        let three = shares(3);
        let pair = |shares: &[Secret]| [(1, shares[0].clone()), (2, shares[1].clone())];
        let guessed: Vec<u8> = three.iter().flat_map(|shares| *combine(&pair(shares)).unwrap()).collect();
        let apart: Vec<u8> =
            three.iter().flat_map(|s| s[0].iter().zip(&s[1][..]).map(|(a, b)| a ^ b).collect::<Vec<_>>()).collect();
        assert!(chi2(&guessed) < 368.0 && chi2(&apart) < 368.0, "{} {}", chi2(&guessed), chi2(&apart));
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
