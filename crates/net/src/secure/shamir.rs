//! Shamir's secret sharing of 32 bytes, over GF(2⁸) with the polynomial of AES.
//!
//! Maintained crates draw their polynomials from a generator of their own. A node that was killed must make the same shares
//! again, so the polynomials come from its secret here. No step depends on the value of a secret, in time or in memory.

use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use zeroize::Zeroizing;

/// A secret, a seed, or a share of one.
pub(super) type Secret = Zeroizing<[u8; 32]>;

/// Shares at the places 1 to `n`. Any `threshold` of them rebuild the secret, fewer tell nothing. The polynomials follow
/// from `seed`.
pub(super) fn split(secret: &Secret, seed: &Secret, threshold: usize, n: usize) -> Vec<Secret> {
    let mut rng = ChaCha20Rng::from_seed(**seed);
    let mut coefficients: Vec<Secret> = vec![secret.clone()];
    for _ in 1..threshold {
        let mut next = Secret::default();
        rng.fill_bytes(&mut next[..]);
        coefficients.push(next);
    }
    let at = |x: u8| {
        let mut y = Secret::default();
        for coefficient in coefficients.iter().rev() {
            for (y, c) in y.iter_mut().zip(&**coefficient) {
                *y = multiply(*y, x) ^ c;
            }
        }
        y
    };
    (1..=n).map(|x| at(x as u8)).collect()
}

/// The secret of shares at these places, which must differ. There must be at least as many as the threshold.
pub(super) fn combine(shares: &[(u8, Secret)]) -> Secret {
    let mut secret = Secret::default();
    for (x, share) in shares {
        // Lagrange's basis at 0: Π x_j / (x_j − x_i); minus is plus here.
        let others = || shares.iter().map(|(other, _)| *other).filter(|other| other != x);
        let above = others().fold(1, multiply);
        let below = others().map(|other| other ^ x).fold(1, multiply);
        let basis = multiply(above, inverse(below));
        secret.iter_mut().zip(&**share).for_each(|(s, y)| *s ^= multiply(*y, basis));
    }
    secret
}

/// The product in GF(2⁸).
fn multiply(a: u8, b: u8) -> u8 {
    let (mut a, mut product) = (a, 0);
    for bit in 0..8 {
        product ^= a & (b >> bit & 1).wrapping_neg();
        a = a << 1 ^ 0x1b & (a >> 7).wrapping_neg();
    }
    product
}

/// 1 / a = a²⁵⁴; of zero zero.
fn inverse(a: u8) -> u8 {
    let (mut power, mut result) = (a, 1);
    for _ in 0..7 {
        power = multiply(power, power);
        result = multiply(result, power);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn products_are_those_of_the_standard() {
        // FIPS 197, sections 4.2 and 4.2.1.
        for (a, b, product) in [(0x57, 0x83, 0xc1), (0x57, 0x13, 0xfe), (0x57, 0x02, 0xae), (0x57, 0x10, 0x07)] {
            assert_eq!((multiply(a, b), multiply(b, a)), (product, product));
        }
        // The inverse that FIPS 197's S-box has of 0x53, and the rest by definition.
        assert_eq!((inverse(0x53), inverse(0)), (0xca, 0));
        assert!((1..=255).all(|a| multiply(a, inverse(a)) == 1));
    }

    /// By hand: 0x2a + 0x11 x at 1, 2 and 3 is 0x3b, 0x08 and 0x19.
    #[test]
    fn a_line_through_two_known_points_is_rebuilt() {
        let share = |y: u8| Zeroizing::new([y; 32]);
        for pair in [[(1, 0x3b), (2, 0x08)], [(3, 0x19), (1, 0x3b)], [(2, 0x08), (3, 0x19)]] {
            assert_eq!(*combine(&pair.map(|(x, y)| (x, share(y)))), [0x2a; 32]);
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
            let shares = split(&secret, &seed, threshold, n);
            let some = |k: usize| -> Vec<(u8, Secret)> {
                (0..k).map(|i| (from % n + i) % n).map(|at| (at as u8 + 1, shares[at].clone())).collect()
            };
            prop_assert_eq!(&combine(&some(threshold)), &secret);
            prop_assert_ne!(&combine(&some(threshold - 1)), &secret);
            let mut flipped = some(threshold);
            flipped[0].1[31] ^= 1;
            prop_assert_ne!(&combine(&flipped), &secret);
        }
    }
}
