//! Noise that clients add themselves, in integers, so that masked sums carry it: the distributed discrete Gaussian.
//!
//! Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation",
//! ICML 2021, arXiv:2102.06387. Each of n clients sends round(clip(v) · 2²⁰ / C) + N_ℤ(0, σ²) per value. The noise of a sum is
//! not quite a discrete Gaussian of variance nσ²; Prop. 14 there bounds what the difference reveals, see [`distance`]. Samples
//! are exact: Canonne, Kamath and Steinke 2020, arXiv:2004.00010, Alg. 1–3, in whole numbers. No value is rounded after the
//! noise is in, so attacks on the last bits of floating-point noise find nothing.

use fedproj_rng::Bits;

/// The limit C on a client's vector, in integers.
const LIMIT: f64 = (1 << 20) as f64;

/// Largest variance of one client's noise that the sampler's 128-bit products have room for.
pub const VARIANCE_MAX: f64 = (1u64 << 52) as f64;

/// Smallest variance of one client's noise: below it, the sum of discrete Gaussians is too far from one.
pub const VARIANCE_MIN: f64 = 16.0;

/// What each client does to a vector before it is summed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// Largest norm C of a client's vector.
    pub limit: f64,
    /// Variance of each client's noise, in squared integers.
    pub variance: f64,
}

impl Share {
    /// The share of each of `n_adders` clients in noise of this multiple of the limit.
    pub fn new(limit: f64, noise_multiplier: f64, n_adders: usize) -> Self {
        Self { limit, variance: ((noise_multiplier * LIMIT).powi(2) / n_adders as f64).ceil() }
    }

    /// A client's integers: the vector within the limit, and its share of the noise.
    pub fn noised(&self, vector: &[f64], bits: &mut impl Bits) -> Vec<i64> {
        let noise = DiscreteGaussian::new(self.variance as u64);
        self.within(vector).into_iter().map(|v| v + noise.draw(bits)).collect()
    }

    /// The vector within the limit, rounded. Rounding can lengthen it by √d / 2, so that much is left below the limit: no client
    /// sends more. A vector that is not finite is zero.
    fn within(&self, vector: &[f64]) -> Vec<i64> {
        let unit = LIMIT / self.limit;
        let norm = unit * vector.iter().map(|v| v * v).sum::<f64>().sqrt();
        if !norm.is_finite() {
            return vec![0; vector.len()];
        }
        let room = LIMIT - 0.5 * (vector.len() as f64).sqrt();
        let scale = unit * room / norm.max(room);
        vector.iter().map(|v| (v * scale).round() as i64).collect()
    }

    /// A sum of such integers, over n clients, as their mean.
    pub fn mean(&self, sum: &[i64], n: usize) -> Vec<f64> {
        let unit = self.limit / LIMIT / n as f64;
        sum.iter().map(|v| *v as f64 * unit).collect()
    }
}

/// The noise multiplier of a Gaussian that reveals as much as a sum of n discrete ones in d values, each of this variance:
/// 1/ε with ε = √(Δ²/(nσ²) + τd/2), where the sum's own multiplier is √n σ / Δ. The smaller of the two bounds in Prop. 14 may be
/// the other one; this one holds.
pub fn multiplier(noise_multiplier: f64, variance: f64, n: usize, d: usize) -> f64 {
    (noise_multiplier.powi(-2) + 0.5 * distance(variance, n) * d as f64).sqrt().recip()
}

/// τ = 10 Σ_{k=1}^{n−1} e^(−2π²σ² k/(k+1)): how far the sum of n discrete Gaussians is from one, in max-divergence.
pub fn distance(variance: f64, n: usize) -> f64 {
    let exponent = -2.0 * std::f64::consts::PI.powi(2) * variance;
    10.0 * (1..n).map(|k| (exponent * k as f64 / (k + 1) as f64).exp()).sum::<f64>()
}

/// N_ℤ(0, σ²): whole numbers x with probability ∝ e^(−x²/2σ²).
#[derive(Clone, Copy, Debug)]
struct DiscreteGaussian {
    variance: u64,
    /// ⌊σ⌋ + 1
    t: u64,
}

impl DiscreteGaussian {
    fn new(variance: u64) -> Self {
        Self { variance, t: variance.isqrt() + 1 }
    }

    /// Alg. 3: a discrete Laplace draw y of scale t, kept with probability e^(−(|y| − σ²/t)² / 2σ²).
    fn draw(&self, bits: &mut impl Bits) -> i64 {
        let (variance, t) = (u128::from(self.variance), u128::from(self.t));
        loop {
            let y = self.laplace(bits);
            let apart = (u128::from(y.unsigned_abs()) * t).abs_diff(variance);
            if is_exp(apart * apart, 2 * variance * t * t, bits) {
                return y;
            }
        }
    }

    /// Alg. 2: whole numbers y with probability ∝ e^(−|y|/t).
    fn laplace(&self, bits: &mut impl Bits) -> i64 {
        loop {
            let u = below(u128::from(self.t), bits);
            if !is_exp(u, u128::from(self.t), bits) {
                continue;
            }
            let mut v = 0;
            while is_exp(1, 1, bits) {
                v += 1;
            }
            let magnitude = u as i64 + self.t as i64 * v;
            let is_negative = bits.next_u32() & 1 == 1;
            // Zero would come twice as often.
            if !(is_negative && magnitude == 0) {
                return if is_negative { -magnitude } else { magnitude };
            }
        }
    }
}

/// Alg. 1: true with probability e^(−num/den).
fn is_exp(num: u128, den: u128, bits: &mut impl Bits) -> bool {
    (0..num / den).all(|_| is_exp_of_share(1, 1, bits)) && is_exp_of_share(num % den, den, bits)
}

/// The same where num ≤ den: the number of successes of coins num/den, num/2den, num/3den, … before the first failure is even.
fn is_exp_of_share(num: u128, den: u128, bits: &mut impl Bits) -> bool {
    let mut k = 1;
    while below(den * k, bits) < num {
        k += 1;
    }
    k % 2 == 1
}

/// A whole number below n, each with the same probability.
fn below(n: u128, bits: &mut impl Bits) -> u128 {
    let mask = u128::MAX.checked_shr((n - 1).leading_zeros()).unwrap_or(0);
    let n_words = (128 - (n - 1).leading_zeros()).div_ceil(32);
    loop {
        let drawn = (0..n_words).fold(0, |all: u128, _| all << 32 | u128::from(bits.next_u32())) & mask;
        if drawn < n {
            return drawn;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fedproj_rng::{Philox, Purpose};
    use proptest::prelude::*;

    #[derive(serde::Deserialize)]
    struct Golden {
        distance: Vec<(f64, usize, f64)>,
        exact: Vec<(f64, usize, u32, f64, f64)>,
    }

    fn golden() -> Golden {
        serde_json::from_str(include_str!("../../../../fixtures/privacy/discrete.json")).unwrap()
    }

    fn bits(id: u32) -> Philox {
        Philox::new(11, Purpose::Privacy, [id, 0, 0])
    }

    fn draws(variance: u64, n: usize, id: u32) -> Vec<i64> {
        let (noise, mut bits) = (DiscreteGaussian::new(variance), bits(id));
        (0..n).map(|_| noise.draw(&mut bits)).collect()
    }

    #[test]
    fn the_distance_of_sums_agrees_with_mpmath() {
        for (variance, n, expected) in golden().distance {
            let found = distance(variance, n);
            assert!((found - expected).abs() <= 1e-12 * expected, "{variance} {n}: {found}, expected {expected}");
        }
    }

    /// The exact divergence of a sum never exceeds the account, and reaches it where the noise is not tiny.
    #[test]
    fn the_account_covers_what_sums_reveal_and_not_much_more() {
        for (variance, n, shift, order, exact) in golden().exact {
            let z = (variance * n as f64).sqrt() / f64::from(shift);
            let account = order / 2.0 * multiplier(z, variance, n, 1).powi(-2);
            let place =
                format!("variance {variance}, {n} clients, shift {shift}, order {order}: {exact}, account {account}");
            assert!(exact <= account * (1.0 + 1e-12), "{place}");
            assert!(variance < 1.0 || account < exact * 1.01, "{place}");
        }
    }

    /// χ² of draws against the probabilities of a variance.
    fn chi2(draws: &[i64], variance: f64) -> f64 {
        let weight = |x: i64| (-(x * x) as f64 / (2.0 * variance)).exp();
        let total: f64 = (-60..=60).map(weight).sum();
        let cell = |x: i64| {
            let (found, share) = (draws.iter().filter(|v| **v == x).count() as f64, weight(x) / total);
            (found - draws.len() as f64 * share).powi(2) / (draws.len() as f64 * share)
        };
        (-5..=5).map(cell).sum()
    }

    #[test]
    fn draws_have_the_probabilities_of_the_discrete_gaussian_and_the_test_would_see_it_if_not() {
        for (variance, id) in [(1, 0), (3, 1), (4, 2)] {
            let draws = draws(variance, 100_000, id);
            // Max 11 degrees of freedom: mean 11, standard deviation 4.7.
            let found = chi2(&draws, variance as f64);
            assert!(found < 40.0, "variance {variance}: χ² = {found}");
            assert!(chi2(&draws, 1.1 * variance as f64) > 80.0, "variance {variance}");
        }
    }

    #[test]
    fn large_noise_has_its_mean_its_variance_and_its_tails() {
        for (variance, id) in [(1u64 << 40, 3), (VARIANCE_MAX as u64, 4), (1_000_003, 5)] {
            let draws = draws(variance, 20_000, id);
            let (n, sigma) = (draws.len() as f64, (variance as f64).sqrt());
            let moment = |power: i32| draws.iter().map(|v| (*v as f64 / sigma).powi(power)).sum::<f64>() / n;
            // Five standard deviations of each moment of n normal draws.
            assert!(moment(1).abs() < 5.0 / n.sqrt(), "{variance}: mean {}", moment(1));
            assert!((moment(2) - 1.0).abs() < 5.0 * (2.0 / n).sqrt(), "{variance}: variance {}", moment(2));
            assert!((moment(4) - 3.0).abs() < 5.0 * (96.0 / n).sqrt(), "{variance}: fourth moment {}", moment(4));
        }
    }

    #[test]
    fn sums_of_shares_have_the_noise_that_the_account_assumes() {
        let share = Share::new(0.5, 2.0, 7);
        let mut bits = bits(6);
        let mut sum = vec![0; 4000];
        for _ in 0..7 {
            crate::fixed::add(&mut sum, &share.noised(&vec![0.0; 4000], &mut bits));
        }
        // The mean of seven has noise of 2 · 0.5 / 7.
        let variance = share.mean(&sum, 7).iter().map(|v| v * v).sum::<f64>() / 4000.0;
        let ratio = variance / (1.0f64 / 7.0).powi(2);
        assert!((ratio - 1.0).abs() < 5.0 * (2.0f64 / 4000.0).sqrt(), "{ratio} times the variance that is due");
    }

    proptest! {
        #[test]
        fn no_client_sends_more_than_the_limit_and_short_vectors_stay(
            vector in prop::collection::vec(-1.0f64..1.0, 1..2000), length in -12i32..12, limit in 0.01f64..100.0,
        ) {
            let vector: Vec<f64> = vector.iter().map(|v| v * 2.0f64.powi(length)).collect();
            let share = Share::new(limit, 1.0, 3);
            let integers = share.within(&vector);
            let norm = integers.iter().map(|v| (*v as f64).powi(2)).sum::<f64>().sqrt();
            prop_assert!(norm <= LIMIT, "{} of {}", norm, LIMIT);
            let exact = vector.iter().map(|v| v * v).sum::<f64>().sqrt();
            let factor = (0.9999 * limit / exact).min(1.0);
            for (sent, v) in share.mean(&integers, 1).iter().zip(&vector) {
                prop_assert!((sent - factor * v).abs() < limit / LIMIT + 2e-4 * v.abs() * factor, "{} {}", sent, v);
            }
        }
    }

    #[test]
    fn a_vector_that_is_not_finite_adds_noise_only() {
        for wrong in [f64::NAN, f64::INFINITY, f64::MAX] {
            assert_eq!(Share::new(1.0, 1.0, 3).within(&[1.0, wrong]), [0, 0]);
        }
    }
}
