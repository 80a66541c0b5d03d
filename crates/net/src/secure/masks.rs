//! Masks over Z/2⁶⁴, and the check word that shows whether they have cancelled.

use super::shamir::Secret;
use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use zeroize::Zeroizing;

/// Values of a mask that are made at a time.
const BLOCK: usize = 1024;

struct Bytes32;

impl KeyType for Bytes32 {
    fn len(&self) -> usize {
        32
    }
}

/// HKDF (SHA-256) of a secret; `info` says what for.
pub(super) fn derive(salt: &[u8], secret: &[u8], info: &[&[u8]]) -> Secret {
    let mut out = Zeroizing::new([0; 32]);
    let key = Salt::new(HKDF_SHA256, salt).extract(secret);
    // 32 bytes are one block of the hash: neither step can fail.
    if let Ok(okm) = key.expand(info, Bytes32) {
        let filled = okm.fill(&mut out[..]);
        debug_assert!(filled.is_ok());
    }
    out
}

/// Whether a mask is added or taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sign {
    Plus,
    Minus,
}

impl std::ops::Neg for Sign {
    type Output = Self;

    fn neg(self) -> Self {
        match self {
            Self::Plus => Self::Minus,
            Self::Minus => Self::Plus,
        }
    }
}

/// Adds the mask of a seed, the key stream of ChaCha20, or takes it away.
pub(super) fn add(seed: &Secret, sign: Sign, values: &mut [u64]) {
    stream(seed, values, |v, mask| match sign {
        Sign::Plus => v.wrapping_add(mask),
        Sign::Minus => v.wrapping_sub(mask),
    });
}

/// Σ r_i x_i with odd factors r_i that the roster gives. It is linear, so the check words of all nodes sum to that of their
/// sum. A difference of one bit in one value always changes it.
pub(super) fn check_word(roster: &[u8; 32], values: &[u64]) -> u64 {
    let mut sum = 0u64;
    let mut copy = [0; BLOCK];
    let seed = derive(roster, b"", &[b"fedproj secure check 1"]);
    let mut rng = ChaCha20Rng::from_seed(*seed);
    let mut bytes = [0; 8 * BLOCK];
    for values in values.chunks(BLOCK) {
        let factors = &mut copy[..values.len()];
        fill(&mut rng, &mut bytes, factors);
        for (v, r) in values.iter().zip(&*factors) {
            sum = sum.wrapping_add(v.wrapping_mul(r | 1));
        }
    }
    sum
}

fn fill(rng: &mut ChaCha20Rng, bytes: &mut [u8; 8 * BLOCK], out: &mut [u64]) {
    let bytes = &mut bytes[..8 * out.len()];
    rng.fill_bytes(bytes);
    out.iter_mut().zip(bytes.as_chunks().0).for_each(|(v, b)| *v = u64::from_le_bytes(*b));
}

fn stream(seed: &Secret, values: &mut [u64], with: impl Fn(u64, u64) -> u64) {
    let mut rng = ChaCha20Rng::from_seed(**seed);
    let mut bytes = Zeroizing::new([0; 8 * BLOCK]);
    for values in values.chunks_mut(BLOCK) {
        let bytes = &mut bytes[..8 * values.len()];
        rng.fill_bytes(bytes);
        for (v, mask) in values.iter_mut().zip(bytes.as_chunks().0) {
            *v = with(*v, u64::from_le_bytes(*mask));
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// χ² of bytes against the uniform distribution, with 255 degrees of freedom.
    pub(in super::super) fn chi2(bytes: &[u8]) -> f64 {
        let mut counts = [0u32; 256];
        for b in bytes {
            counts[usize::from(*b)] += 1;
        }
        let expected = bytes.len() as f64 / 256.0;
        counts.iter().map(|n| (f64::from(*n) - expected).powi(2) / expected).sum()
    }

    /// RFC 8439, appendix A.1, test vector 1: the key stream of a zero key.
    #[test]
    fn masks_are_the_standards_key_stream() {
        let mut values = [0; 8];
        add(&Secret::default(), Sign::Plus, &mut values);
        assert_eq!(values[..2], [0x903d_f1a0_ade0_b876, 0x28bd_8653_e56a_5d40]);
        add(&Secret::default(), Sign::Minus, &mut values);
        assert_eq!(values, [0; 8]);
    }

    /// RFC 5869, appendix A.1: the first 32 bytes of its output.
    #[test]
    fn keys_are_the_standards() {
        let salt: Vec<u8> = (0..13).collect();
        let info: Vec<u8> = (0xf0..0xfa).collect();
        let key = derive(&salt, &[0x0b; 22], &[&info]);
        assert_eq!(key[..8], [0x3c, 0xb2, 0x5f, 0x25, 0xfa, 0xac, 0xd5, 0x7a]);
        assert_eq!(key[24..], [0x5d, 0xb0, 0x2d, 0x56, 0xec, 0xc4, 0xc5, 0xbf]);
    }

    /// χ² of all bytes of a masked constant against 255 degrees of freedom. 5 % of the bytes of another value show.
    #[test]
    fn a_masked_vector_is_uniform_and_the_test_would_see_it_if_not() {
        let n = 1 << 16;
        let mut values = vec![123_456_789; n];
        add(&Zeroizing::new([7; 32]), Sign::Plus, &mut values);
        let mut bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        // Mean 255, standard deviation 22.6: five of them are beyond chance.
        assert!((142.0..368.0).contains(&chi2(&bytes)), "{}", chi2(&bytes));
        let ones: u32 = values.iter().map(|v| v.count_ones()).sum();
        let (mean, deviation) = (32.0 * n as f64, (16.0 * n as f64).sqrt());
        assert!((f64::from(ones) - mean).abs() < 5.0 * deviation, "{ones} ones");
        // Neighbouring values do not depend on each other.
        let differing: u32 = values.windows(2).map(|w| (w[0] ^ w[1]).count_ones()).sum();
        assert!((f64::from(differing) - mean).abs() < 5.0 * deviation, "{differing} differing bits");
        bytes.iter_mut().step_by(20).for_each(|b| *b = 0);
        assert!(chi2(&bytes) > 368.0);
    }
}
