//! How a run serves its clients: the accuracy of each on its own classes, and how they differ.

use crate::compare::{mean, standard_deviation};
use fedproj_core::RoundRecord;
use serde::Serialize;
use std::collections::BTreeMap;

/// Accuracies of clients on their own classes, as shares. Each client counts with its last round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ClientSpread {
    /// Mean over clients.
    pub mean: f64,
    /// Standard deviation over clients (n − 1); 0 for one client.
    pub std: f64,
    /// Mean of the worst tenth, of one client at least.
    pub worst: f64,
}

impl ClientSpread {
    /// Of a run whose clients were evaluated.
    pub fn of(rounds: &[RoundRecord]) -> Option<Self> {
        let mut last = BTreeMap::new();
        for round in rounds {
            last.extend(round.cohort.iter().copied().zip(round.personal_by_client.iter().flatten().copied()));
        }
        let mut sorted: Vec<f64> = last.into_values().collect();
        sorted.sort_by(f64::total_cmp);
        let worst = sorted.get(..sorted.len().div_ceil(10)).filter(|worst| !worst.is_empty())?;
        Some(Self { mean: mean(&sorted), std: standard_deviation(&sorted).unwrap_or(0.0), worst: mean(worst) })
    }

    /// The mean over runs.
    pub fn over(runs: &[Self]) -> Option<Self> {
        let average = |of: fn(&Self) -> f64| mean(&runs.iter().map(of).collect::<Vec<_>>());
        let all = Self { mean: average(|s| s.mean), std: average(|s| s.std), worst: average(|s| s.worst) };
        (!runs.is_empty()).then_some(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_counts_with_its_last_round() {
        let round = |cohort: &[u32], accuracies: Option<&[f64]>| RoundRecord {
            cohort: cohort.to_vec(),
            personal_by_client: accuracies.map(<[f64]>::to_vec),
            ..RoundRecord::default()
        };
        let rounds = [round(&[0, 1], Some(&[0.1, 0.5])), round(&[0, 2], Some(&[0.7, 0.9])), round(&[1], None)];
        let found = ClientSpread::of(&rounds).unwrap();
        assert!(
            (found.mean - 0.7).abs() < 1e-12 && (found.std - 0.2).abs() < 1e-12 && (found.worst - 0.5).abs() < 1e-12
        );
        assert_eq!(ClientSpread::of(&rounds[2..]), None);
        // Of eleven clients two are the worst tenth.
        let many: Vec<f64> = (0..11).map(|k| f64::from(k) / 10.0).collect();
        let found = ClientSpread::of(&[round(&(0..11).collect::<Vec<_>>(), Some(&many))]).unwrap();
        assert!((found.worst - 0.05).abs() < 1e-12, "{found:?}");
    }
}
