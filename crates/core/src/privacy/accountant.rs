//! How much the releases of a run reveal: Rényi differential privacy (RDP), composed over rounds, as (ε, δ).
//!
//! One release adds Gaussian noise to a sum over the clients of a round. Its RDP at order α depends on how these clients
//! were drawn, and on what "neighbouring" means, see [`Sampling`]:
//!
//! - Poisson: Mironov, Talwar and Zhang, "Rényi Differential Privacy of the Sampled Gaussian Mechanism", 2019,
//!   arXiv:1908.10530, Sec. 3.3, at whole and fractional orders.
//! - Fixed size, without replacement: Wang, Balle and Kasiviswanathan, "Subsampled Rényi Differential Privacy and
//!   Analytical Moments Accountant", AISTATS 2019, arXiv:1808.00087, Thm. 27; Cor. 10 between whole orders.
//! - Conversion: Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", 2020, arXiv:2004.00010,
//!   Prop. 12.
//!
//! The orders and the conversion are those of Google's dp-accounting. The moments of Thm. 27 are integrals here: differences
//! of large numbers, as there, lose all their digits where the noise is large.

use serde::{Deserialize, Serialize};

/// How the clients of a round are drawn. It decides what a run may claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampling {
    /// A fixed number of clients per round, without replacement. Neighbours differ in one client's data (replace-one).
    Fixed,
    /// Each client by its own coin. Neighbours differ in the presence of one client (add-or-remove-one).
    Poisson,
    /// Any clients, known to everyone: sampling hides nobody. Neighbours differ in the presence of one client's vectors: everyone
    /// knows how many clients a sum has.
    Public,
}

impl Sampling {
    /// What neighbouring sets of clients differ in.
    pub fn adjacency(self) -> &'static str {
        match self {
            Self::Fixed => "replace-one",
            Self::Poisson | Self::Public => "add-or-remove-one",
        }
    }
}

/// One release per round: a sum over the round's clients with Gaussian noise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mechanism {
    /// How clients are drawn.
    pub sampling: Sampling,
    /// Share q of the clients that take part in a round, in (0, 1].
    pub rate: f64,
    /// Standard deviation of the noise, as a multiple of the longest vector that one client adds to the sum.
    pub noise_multiplier: f64,
}

/// The RDP of one round at every order.
#[derive(Clone, Debug, PartialEq)]
pub struct Accountant {
    per_round: Vec<f64>,
}

impl Accountant {
    /// The account of a mechanism.
    pub fn new(mechanism: &Mechanism) -> Self {
        let moments = match mechanism.sampling {
            Sampling::Fixed if mechanism.rate < 1.0 => Moments::new(mechanism.noise_multiplier / 2.0),
            _ => Moments::default(),
        };
        Self { per_round: orders().map(|order| rdp(mechanism, &moments, order)).collect() }
    }

    /// The least ε that holds with this δ after `rounds` rounds.
    pub fn epsilon(&self, rounds: u32, delta: f64) -> f64 {
        let epsilons =
            orders().zip(&self.per_round).map(|(order, rdp)| to_epsilon(order, f64::from(rounds) * rdp, delta));
        epsilons.fold(f64::INFINITY, f64::min)
    }
}

/// The largest noise multiplier that [`noise_for`] answers with. No model learns below so much noise.
pub const NOISE_MAX: f64 = 1e9;

/// The least noise multiplier, to one part in a million, that keeps ε after `rounds` rounds. None if it is above
/// [`NOISE_MAX`]: with a tiny δ, no order gives a small ε, however much noise there is.
pub fn noise_for(sampling: Sampling, rate: f64, rounds: u32, epsilon: f64, delta: f64) -> Option<f64> {
    let keeps = |noise_multiplier: f64| {
        Accountant::new(&Mechanism { sampling, rate, noise_multiplier }).epsilon(rounds, delta) <= epsilon
    };
    let (mut low, mut high) = (0.0, 1.0);
    while !keeps(high) {
        if high >= NOISE_MAX {
            return None;
        }
        (low, high) = (high, (2.0 * high).min(NOISE_MAX));
    }
    while high - low > 1e-6 * high {
        let middle = f64::midpoint(low, high);
        if keeps(middle) {
            high = middle;
        } else {
            low = middle;
        }
    }
    Some(high)
}

/// The orders of dp-accounting: 1.1, 1.2, … 10.9, 11, 12, … 63, 128, 256, 512, 1024.
fn orders() -> impl Iterator<Item = f64> {
    let tenths = (1..100).map(|tenth| 1.0 + f64::from(tenth) / 10.0);
    tenths.chain((11..64).map(f64::from)).chain([128.0, 256.0, 512.0, 1024.0])
}

/// More than rounding takes from an RDP where the bound is the logarithm of almost 1. An RDP of zero, or below, would be an ε of
/// zero after any number of rounds.
const ROUNDING: f64 = 1e-14;

/// The RDP of one round at an order above 1.
fn rdp(mechanism: &Mechanism, moments: &Moments, order: f64) -> f64 {
    let Mechanism { sampling, rate, noise_multiplier: z } = *mechanism;
    // Where one client replaces another, the sum moves by up to two of the longest vectors.
    let sigma = if sampling == Sampling::Fixed { z / 2.0 } else { z };
    let whole = order / (2.0 * sigma * sigma);
    if sampling == Sampling::Public || rate >= 1.0 {
        return whole;
    }
    let bound = match sampling {
        Sampling::Fixed => moments.log_a_between(rate, order),
        _ if order.fract() == 0.0 => poisson_whole(rate, sigma, order as u32),
        _ => poisson_fractional(rate, sigma, order),
    };
    // Sampling never reveals more, whatever a bound loses; a bound that is not a number (noise near zero) loses all.
    (bound / (order - 1.0)).min(whole).max(ROUNDING.min(whole))
}

/// ln A_α of the Poisson-sampled Gaussian at a whole order: ln Σ_i C(α, i) (1 − q)^(α − i) q^i e^((i² − i) / 2σ²).
fn poisson_whole(q: f64, sigma: f64, order: u32) -> f64 {
    let (mut sum, mut choose) = (f64::NEG_INFINITY, 0.0);
    for i in 0..=order {
        let (at, alpha) = (f64::from(i), f64::from(order));
        let weight = choose + at * q.ln() + (alpha - at) * (-q).ln_1p();
        sum = log_add(sum, weight + (at * at - at) / (2.0 * sigma * sigma));
        choose += ((alpha - at) / (at + 1.0)).ln();
    }
    sum
}

/// The same at a fractional order: two series, over the halves of the line where one density is the larger one. Terms
/// alternate once i passes α; their magnitudes are summed, which bounds A_α from above.
fn poisson_fractional(q: f64, sigma: f64, alpha: f64) -> f64 {
    const N_TERMS_MAX: u32 = 1000;
    let (log_q, log_p) = (q.ln(), (-q).ln_1p());
    let z0 = sigma * sigma * (1.0 / q - 1.0).ln() + 0.5;
    let part = |distance: f64| log_erfc(distance / (std::f64::consts::SQRT_2 * sigma)) - std::f64::consts::LN_2;
    let (mut total, mut choose, mut last) = (f64::NEG_INFINITY, 0.0, (f64::NEG_INFINITY, f64::NEG_INFINITY));
    for i in (0..N_TERMS_MAX).map(f64::from) {
        let j = alpha - i;
        let grown = |k: f64| (k * k - k) / (2.0 * sigma * sigma);
        let left = choose + i * log_q + j * log_p + grown(i) + part(i - z0);
        let right = choose + j * log_q + i * log_p + grown(j) + part(z0 - j);
        total = log_add(total, log_add(left, right));
        if left < last.0 && right < last.1 && left.max(right) < total - 30.0 {
            return total;
        }
        last = (left, right);
        choose += ((alpha - i) / (i + 1.0)).abs().ln();
    }
    // Another order will give the ε.
    f64::INFINITY
}

/// ln E[(P/Q − 1)^n] for P = N(1, σ²) and Q = N(0, σ²) at even n, from which Thm. 27 bounds sampling without replacement.
#[derive(Clone, Debug, Default)]
struct Moments {
    sigma: f64,
    /// At n = 2, 4, 6, …
    even: Vec<f64>,
}

impl Moments {
    /// Largest order at which dp-accounting uses moments; beyond it, a simpler bound serves.
    const ORDER_MAX: u32 = 256;

    fn new(sigma: f64) -> Self {
        Self { sigma, even: (1..=Self::ORDER_MAX / 2).map(|half| Self::moment(2 * half, sigma)).collect() }
    }

    /// ∫ φ(x) (e^(x/σ − 1/2σ²) − 1)^n dx by the trapezoidal rule, which converges faster than any power of its step on a
    /// smooth integrand that vanishes at both ends. The mass is near 0, ±√n and n/σ.
    fn moment(n: u32, sigma: f64) -> f64 {
        const STEP: f64 = 0.05;
        const REACH: f64 = 40.0;
        let n = f64::from(n);
        let log_term = |x: f64| {
            let y = x / sigma - 0.5 / (sigma * sigma);
            // ln|e^y − 1| without overflow.
            let log_ratio = if y > 0.0 { y + (-(-y).exp()).ln_1p() } else { (-y.exp_m1()).ln() };
            n * log_ratio - 0.5 * x * x
        };
        // Where n/σ is far out, nothing else counts.
        let far = n / sigma;
        let from = if far > 2.0 * REACH { far - REACH } else { -REACH };
        let n_cells = ((far + REACH - from) / STEP) as u32;
        let sum =
            (0..=n_cells).fold(f64::NEG_INFINITY, |sum, cell| log_add(sum, log_term(from + STEP * f64::from(cell))));
        sum + STEP.ln() - 0.5 * std::f64::consts::TAU.ln()
    }

    /// (α − 1) times the RDP at any order: linear between whole ones.
    fn log_a_between(&self, q: f64, order: f64) -> f64 {
        let (below, part) = (order.floor(), order.fract());
        let low = self.log_a(q, below as u32);
        if part == 0.0 { low } else { (1.0 - part) * low + part * self.log_a(q, below as u32 + 1) }
    }

    /// ln of the sum in Thm. 27 at a whole order.
    fn log_a(&self, q: f64, order: u32) -> f64 {
        let (ln2, square) = (std::f64::consts::LN_2, self.sigma * self.sigma);
        let (mut sum, alpha) = (0.0, f64::from(order));
        let mut choose = alpha.ln();
        for i in 2..=order {
            let at = f64::from(i);
            choose += ((alpha - at + 1.0) / at).ln();
            let plain = ln2 + (at - 1.0) * at / (2.0 * square);
            let bound = if i == 2 || order <= Self::ORDER_MAX {
                let moment = |n: u32| self.even[n as usize / 2 - 1];
                plain.min(2.0 * ln2 + 0.5 * (moment(i - i % 2) + moment(i + i % 2)))
            } else {
                plain
            };
            sum = log_add(sum, bound + at * q.ln() + choose);
        }
        sum
    }
}

/// The ε of an RDP at one order.
fn to_epsilon(order: f64, rdp: f64, delta: f64) -> f64 {
    // δ ≤ √(1 − e^−KL), and KL is below every RDP.
    if delta * delta + (-rdp).exp_m1() > 0.0 {
        return 0.0;
    }
    (rdp + (-1.0 / order).ln_1p() - (delta * order).ln() / (order - 1.0)).max(0.0)
}

/// ln(e^a + e^b)
fn log_add(a: f64, b: f64) -> f64 {
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    if low == f64::NEG_INFINITY { high } else { high + (low - high).exp().ln_1p() }
}

/// ln erfc(x)
fn log_erfc(x: f64) -> f64 {
    let half_log_pi = 0.5 * std::f64::consts::PI.ln();
    if x >= 2.0 {
        // The continued fraction of Abramowitz and Stegun 7.1.14, from its end.
        let fraction = (1..=120).rev().fold(x, |tail, k| x + f64::from(k) / 2.0 / tail);
        return -x * x - fraction.ln() - half_log_pi;
    }
    if x <= -2.0 {
        return std::f64::consts::LN_2 + (-0.5 * log_erfc(-x).exp()).ln_1p();
    }
    // erf(x) = 2/√π e^(−x²) Σ 2ⁿ x^(2n+1) / (1·3·…·(2n+1)), whose terms have one sign.
    let (mut term, mut sum) = (x, 0.0);
    for n in 0..60 {
        sum += term;
        term *= 2.0 * x * x / f64::from(2 * n + 3);
    }
    (1.0 - 2.0 * (-x * x - half_log_pi).exp() * sum).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Golden {
        rdp: Vec<(Sampling, f64, f64, f64, f64)>,
        rdp_exact: Vec<(Sampling, f64, f64, f64, f64)>,
        epsilon: Vec<(Sampling, f64, f64, u32, f64, f64)>,
        two_releases: Vec<(Sampling, f64, f64, f64, u32, f64, f64)>,
        noise: Vec<(Sampling, f64, u32, f64, f64, f64)>,
    }

    fn golden() -> Golden {
        serde_json::from_str(include_str!("../../../../fixtures/privacy/accountant.json")).unwrap()
    }

    /// The RDP of one round at one order.
    fn at_order(sampling: Sampling, rate: f64, noise_multiplier: f64, order: f64) -> f64 {
        let moments =
            if sampling == Sampling::Fixed { Moments::new(noise_multiplier / 2.0) } else { Moments::default() };
        rdp(&Mechanism { sampling, rate, noise_multiplier }, &moments, order)
    }

    fn check(what: &str, found: f64, expected: f64) {
        assert!((found - expected).abs() <= 1e-6 * expected.abs().max(1e-9), "{what}: {found}, expected {expected}");
    }

    #[test]
    fn one_round_agrees_with_dp_accounting_at_whole_and_fractional_orders() {
        for (sampling, rate, noise, order, expected) in golden().rdp {
            check(&format!("{sampling:?} {rate} {noise} at {order}"), at_order(sampling, rate, noise, order), expected);
        }
    }

    #[test]
    fn large_noise_and_high_orders_lose_no_digits() {
        for (sampling, rate, noise, order, expected) in golden().rdp_exact {
            check(&format!("{rate} {noise} at {order}"), at_order(sampling, rate, noise, order), expected);
        }
    }

    #[test]
    fn epsilon_of_many_rounds_agrees_with_dp_accounting() {
        for (sampling, rate, noise_multiplier, rounds, delta, expected) in golden().epsilon {
            let found = Accountant::new(&Mechanism { sampling, rate, noise_multiplier }).epsilon(rounds, delta);
            check(&format!("{sampling:?} {rate} {noise_multiplier} {rounds} {delta}"), found, expected);
        }
    }

    /// Noise of z/√s and z/√(1 − s) on weights and logits is one release of z, whatever s is.
    #[test]
    fn weights_and_logits_together_agree_with_dp_accountings_composition() {
        for (sampling, rate, noise_multiplier, split, rounds, delta, expected) in golden().two_releases {
            let found = Accountant::new(&Mechanism { sampling, rate, noise_multiplier }).epsilon(rounds, delta);
            check(&format!("{sampling:?} {noise_multiplier} split {split}"), found, expected);
        }
    }

    #[test]
    fn noise_for_an_epsilon_agrees_with_dp_accounting_and_keeps_it() {
        for (sampling, rate, rounds, epsilon, delta, expected) in golden().noise {
            let noise_multiplier = noise_for(sampling, rate, rounds, epsilon, delta).unwrap();
            assert!((noise_multiplier - expected).abs() < 2e-6 * expected, "{noise_multiplier}, expected {expected}");
            let spent = Accountant::new(&Mechanism { sampling, rate, noise_multiplier }).epsilon(rounds, delta);
            assert!(spent <= epsilon && spent > epsilon - 1e-4, "{spent} of {epsilon}");
        }
    }

    #[test]
    fn extreme_rates_and_noise_give_finite_accounts_that_sampling_only_improves() {
        for sampling in [Sampling::Fixed, Sampling::Poisson] {
            for noise_multiplier in [1e-2, 0.1, 1.0, 30.0, 1e4] {
                let epsilon = |rate, rounds| {
                    Accountant::new(&Mechanism { sampling, rate, noise_multiplier }).epsilon(rounds, 1e-6)
                };
                let all = epsilon(1.0, 10);
                let mut last = 0.0;
                for rate in [1e-9, 1e-6, 1e-3, 0.5, 0.999_999] {
                    let found = epsilon(rate, 10);
                    let place = format!("{sampling:?}, rate {rate}, noise {noise_multiplier}");
                    assert!(found.is_finite() && found >= last && found <= all, "{place}: {found}");
                    assert!(epsilon(rate, 1000) >= found, "{place}");
                    last = found;
                }
            }
        }
    }

    #[test]
    fn rounding_never_makes_a_release_free() {
        for (sampling, rate) in [(Sampling::Fixed, 0.01), (Sampling::Poisson, 0.01), (Sampling::Poisson, 1e-9)] {
            for order in [1.1, 1.5, 2.0, 3.7, 10.9, 16.0, 63.0, 1024.0] {
                for noise_multiplier in [1e3, 1e6, 1e9] {
                    let found = at_order(sampling, rate, noise_multiplier, order);
                    let most = 2.0 * order / (noise_multiplier * noise_multiplier);
                    assert!(found > 0.0 && found <= most, "{sampling:?} {rate} {noise_multiplier} at {order}: {found}");
                }
                // Almost without noise, nothing bounds what is revealed.
                assert!(at_order(sampling, rate, 1e-300, order).is_infinite(), "{sampling:?} {rate} at {order}");
            }
        }
    }

    #[test]
    fn a_plan_ends_for_every_request() {
        for sampling in [Sampling::Fixed, Sampling::Poisson, Sampling::Public] {
            let plan = |epsilon, delta, rounds| noise_for(sampling, 0.01, rounds, epsilon, delta);
            // With so small a δ, the best order gives an ε above 0.4 for any noise.
            assert_eq!((plan(0.1, 1e-200, 100), plan(1e-300, 1e-100, 1)), (None, None), "{sampling:?}");
            for (epsilon, delta, rounds) in [(1e3, 1e-200, 100), (8.0, 1e-5, u32::MAX), (1e-6, 1e-6, 100_000)] {
                let noise = plan(epsilon, delta, rounds).unwrap();
                assert!(noise > 0.0 && noise < NOISE_MAX, "{sampling:?} {epsilon} {delta} {rounds}: {noise}");
                let spent = Accountant::new(&Mechanism { sampling, rate: 0.01, noise_multiplier: noise });
                assert!(spent.epsilon(rounds, delta) <= epsilon);
            }
        }
    }

    #[test]
    fn log_erfc_is_right_on_both_sides_and_far_out() {
        // From mpmath.
        for (x, expected) in [
            (-6.0, std::f64::consts::LN_2),
            (-1.0, 0.611_232_317_678_070_5),
            (0.0, 0.0),
            (0.5, -0.735_011_129_837_084_4),
            (1.999, -5.360_524_027_545_016),
            (2.0, -5.364_941_264_616_638),
            (3.0, -10.720_363_041_981_113),
            (40.0, -1_604.261_556_653_273_6),
        ] {
            let found = log_erfc(x);
            assert!((found - expected).abs() < 1e-13 * expected.abs().max(1.0), "{x}: {found}");
        }
    }
}
