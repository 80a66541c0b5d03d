//! Sums in 64-bit integers: Σ_k round(w_k · x_k · 2^s).
//!
//! Integer sums are associative, also modulo 2⁶⁴. So any order of clients, partial sums on workers and sums under masks give
//! the same bytes. [`encode`] makes one client's integers, [`add`] sums them, [`decode`] turns a sum into a mean.
//!
//! A client weighs by its number of samples n_k, or by [`UNIT`] where all weigh the same. Weights are no shares, since nobody
//! knows Σ w_k before all clients are in; [`decode`] divides by it. Weights that are no integers are multiples of a power of
//! two, so that their sum does not depend on the order either; see [`total_digits`].

use crate::config::FederationConfig;
use crate::distill::EnsembleWeights;
use crate::error::{Error, Result};

/// The weight of a client where all weigh the same: of the size of a number of samples, so that as many digits count.
pub const UNIT: f64 = 256.0;

/// |w · x| stays below 2 to this power. With n = 1000 samples, |x| may be 134 000.
const RANGE_BITS: u32 = 27;

/// Most digits after the point. Then a value has 51 bits, which double precision rounds exactly.
const SCALE_MAX: u32 = 24;

/// 1.5 · 2⁵²: the sum of it and of any |v| < 2⁵¹ has v, rounded to even, in its lowest bits.
const ROUNDER: f64 = 6_755_399_441_055_744.0;

/// What [`accumulate`] makes of x with the weight w: x · (w · unit) + rounder, if |x · (w · unit)| is below the limit. For sums
/// that run elsewhere.
pub(crate) struct Rounding {
    /// 2^s
    pub unit: f64,
    pub limit: f64,
    pub rounder: f64,
}

impl Rounding {
    pub fn of(scale: Scale) -> Self {
        let unit = f64::from(1 << scale.0);
        Self { unit, limit: f64::from(1 << RANGE_BITS) * unit, rounder: ROUNDER }
    }
}

/// The binary digits after the point, s. It follows from the configuration alone, so a server, its nodes and a simulator agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale(u32);

/// A sum of clients' integers, and of their weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sum {
    /// Σ_k round(w_k · x_k · 2^s)
    pub values: Vec<i64>,
    /// Σ_k w_k
    pub weight: f64,
}

impl Scale {
    /// The scale of a run with `n_clients` clients: sums have room for four times its cohort, and for 4096 clients at least.
    pub fn of(federation: &FederationConfig, n_clients: usize) -> Self {
        let cohort_bits = federation.cohort(n_clients).next_power_of_two().ilog2();
        Self(SCALE_MAX.min((63 - RANGE_BITS - 2).saturating_sub(cohort_bits)))
    }

    /// s.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// How many clients a sum has room for.
    pub fn n_clients_max(self) -> usize {
        1 << (63 - RANGE_BITS - self.0)
    }

    /// The largest |x| of a client of this weight; it must be below.
    pub fn value_max(weight: f64) -> f64 {
        f64::from(1 << RANGE_BITS) / weight.abs()
    }
}

/// A client's weight in a mean, from its samples n_k and its normalised steps a_k.
pub fn weight_of(by: EnsembleWeights, n_samples: usize, steps: f64) -> f64 {
    let n = n_samples as f64;
    let exact = match by {
        EnsembleWeights::Uniform => UNIT,
        EnsembleWeights::Samples => n,
        EnsembleWeights::PerStep => UNIT * n / steps,
        EnsembleWeights::BySteps => n * steps,
    };
    let unit = f64::from(1 << total_digits(by).unwrap_or(0));
    (exact * unit).round() / unit
}

/// Binary digits after the point of a weight, where nobody knows the sum of the clients' weights from the numbers of clients
/// and samples alone. Double precision holds totals below 2³³ and 2³⁷ exactly, see `total_max`: a thousand clients of 10 000
/// samples that make 13 000 steps each.
pub fn total_digits(by: EnsembleWeights) -> Option<u32> {
    match by {
        EnsembleWeights::Uniform | EnsembleWeights::Samples => None,
        EnsembleWeights::PerStep => Some(20),
        EnsembleWeights::BySteps => Some(16),
    }
}

/// Totals of weights must be below: larger ones would depend on the order of the clients.
pub(crate) fn total_max(by: EnsembleWeights) -> f64 {
    2.0f64.powi(53 - total_digits(by).unwrap_or(0).cast_signed())
}

/// A power of two by which any weights, multiplied, are of the size of [`UNIT`]: the largest is in [1, 2) units.
pub(crate) fn factor_of(weights: &[f32]) -> f64 {
    const EXPONENT: u64 = 0x7FF << 52;
    let largest = weights.iter().fold(0.0f32, |largest, w| largest.max(w.abs()));
    if largest > 0.0 { UNIT / f64::from_bits(f64::from(largest).to_bits() & EXPONENT) } else { UNIT }
}

/// One client's integers, round(w · x · 2^s).
///
/// # Errors
/// If a value is not finite or out of range.
pub fn encode(values: &[f32], weight: f64, scale: Scale) -> Result<Vec<i64>> {
    let mut encoded = vec![0; values.len()];
    accumulate(values, weight, scale, &mut encoded)?;
    Ok(encoded)
}

/// Adds one client's integers to a sum of the same length: [`encode`] and [`add`] without memory of their own.
///
/// # Errors
/// If a value is not finite or out of range. Then the sum is of no use.
pub fn accumulate(values: &[f32], weight: f64, scale: Scale, sum: &mut [i64]) -> Result<()> {
    let Rounding { unit, limit, rounder } = Rounding::of(scale);
    let factor = weight * unit;
    let mut all_fit = true;
    for (sum, value) in sum.iter_mut().zip(values) {
        let scaled = f64::from(*value) * factor;
        all_fit &= scaled.abs() < limit;
        let rounded = (scaled + rounder).to_bits().wrapping_sub(rounder.to_bits());
        *sum = sum.wrapping_add(rounded.cast_signed());
    }
    if all_fit {
        return Ok(());
    }
    // Looking for the value costs as much as the sum.
    let out = |value: &&f32| value.is_nan() || f64::from(value.abs()) >= Scale::value_max(weight);
    match values.iter().find(out) {
        None => Ok(()),
        Some(value) => Err(Error::OutOfRange { value: *value, limit: Scale::value_max(weight) }),
    }
}

/// Adds sums of the same length, modulo 2⁶⁴.
pub fn add(sum: &mut [i64], more: &[i64]) {
    for (sum, more) in sum.iter_mut().zip(more) {
        *sum = sum.wrapping_add(*more);
    }
}

/// A sum divided by its weight: the mean Σ w_k x_k / Σ w_k.
pub fn decode(sum: &[i64], weight: f64, scale: Scale) -> Vec<f32> {
    let divisor = weight * f64::from(1 << scale.0);
    sum.iter().map(|v| (*v as f64 / divisor) as f32).collect()
}

impl Sum {
    /// A sum of nothing.
    pub fn of_length(n: usize) -> Self {
        Self { values: vec![0; n], weight: 0.0 }
    }

    /// Adds one client.
    ///
    /// # Errors
    /// As [`accumulate`].
    pub fn add_client(&mut self, values: &[f32], weight: f64, scale: Scale) -> Result<()> {
        self.weight += weight;
        accumulate(values, weight, scale, &mut self.values)
    }

    /// The mean.
    pub fn mean(&self, scale: Scale) -> Vec<f32> {
        decode(&self.values, self.weight, scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SCALE: Scale = Scale(SCALE_MAX);

    fn clients() -> impl Strategy<Value = Vec<(Vec<f32>, u16)>> {
        let vector = prop::collection::vec(prop_oneof![-2.0f32..2.0, -1e3f32..1e3, Just(0.0), Just(-1e-30)], 7);
        prop::collection::vec((vector, 1..2000u16), 1..20)
    }

    proptest! {
        #[test]
        fn any_order_and_any_partial_sums_give_the_same_bytes(
            clients in clients(), groups in prop::collection::vec(0..4usize, 20), order in any::<prop::sample::Index>()
        ) {
            let mut whole = Sum::of_length(7);
            for (values, n) in &clients {
                whole.add_client(values, f64::from(*n), SCALE).unwrap();
            }
            let mut partial = vec![Sum::of_length(7); 4];
            let start = order.index(clients.len());
            for at in (start..clients.len()).chain(0..start).rev() {
                let (values, n) = &clients[at];
                partial[groups[at]].add_client(values, f64::from(*n), SCALE).unwrap();
            }
            let mut sum = vec![0; 7];
            partial.iter().rev().for_each(|partial| add(&mut sum, &partial.values));
            prop_assert_eq!(&sum, &whole.values);
            // Masks cancel, though sums with them leave the range of 64 bits.
            let mask: Vec<i64> = (0..7).map(|i| i64::MAX - i).collect();
            add(&mut sum, &mask);
            add(&mut sum, &mask.iter().map(|v| v.wrapping_neg()).collect::<Vec<_>>());
            prop_assert_eq!(sum, whole.values);
        }

        #[test]
        fn a_mean_is_as_near_as_single_precision_allows(clients in clients()) {
            let mut sum = Sum::of_length(7);
            clients.iter().try_for_each(|(values, n)| sum.add_client(values, f64::from(*n), SCALE)).unwrap();
            let total: f64 = clients.iter().map(|(_, n)| f64::from(*n)).sum();
            for (at, mean) in sum.mean(SCALE).into_iter().enumerate() {
                let exact: f64 = clients.iter().map(|(v, n)| f64::from(v[at]) * f64::from(*n)).sum::<f64>() / total;
                // Half a unit of the last digit per client, then the rounding to single precision.
                let rounding = clients.len() as f64 * 0.5f64.powi(25) / total + exact.abs() * 0.5f64.powi(24);
                prop_assert!((f64::from(mean) - exact).abs() <= rounding + 1e-30, "{} {}", mean, exact);
            }
        }
    }

    #[test]
    fn values_are_rounded_to_even_and_signs_stay() {
        let half = 0.5f32.powi(25);
        let encoded = encode(&[half, 3.0 * half, -half, -3.0 * half, 1.0, -1.0], 1.0, SCALE).unwrap();
        assert_eq!(encoded, [0, 2, 0, -2, 1 << 24, -(1 << 24)]);
        assert_eq!(decode(&encoded, 1.0, SCALE)[4..], [1.0, -1.0]);
    }

    #[test]
    fn a_value_out_of_range_is_an_error_and_the_largest_is_exact() {
        let limit = 2.0f32.powi(27);
        let below = f32::from_bits(limit.to_bits() - 1);
        assert_eq!(decode(&encode(&[below, -below], 1.0, SCALE).unwrap(), 1.0, SCALE), [below, -below]);
        for value in [limit, -limit, f32::INFINITY, f32::NAN] {
            let error = encode(&[0.0, value], 1.0, SCALE).unwrap_err().to_string();
            assert!(error.contains("does not fit") && error.contains(&value.to_string()), "{error}");
        }
        assert!(encode(&[limit / 1000.0], 1001.0, SCALE).is_err() && encode(&[limit / 1000.0], 999.0, SCALE).is_ok());
    }

    #[test]
    fn sums_have_room_for_four_cohorts_and_for_4096_clients() {
        let all = FederationConfig { fraction: 1.0, ..FederationConfig::default() };
        for (n, bits) in [(1, 24), (1024, 24), (1025, 23), (1_000_000, 14)] {
            let scale = Scale::of(&all, n);
            assert_eq!(scale.bits(), bits, "{n} clients");
            assert!(scale.n_clients_max() >= (4 * n).max(4096), "{n} clients");
        }
        // As many values as there is room for, each as large as it may be.
        let largest = encode(&[f32::from_bits(2.0f32.powi(27).to_bits() - 1)], 1.0, SCALE).unwrap()[0];
        assert!(largest.checked_mul(SCALE.n_clients_max() as i64).is_some());
    }

    #[test]
    fn any_weights_keep_their_digits() {
        for weights in [&[0.001f32, 0.0005][..], &[3.0], &[1e-30, 0.0], &[0.0]] {
            let factor = factor_of(weights);
            let largest = f64::from(weights[0]) * factor;
            assert!(weights[0] == 0.0 || (UNIT..2.0 * UNIT).contains(&largest), "{weights:?}: {largest}");
        }
    }
}
