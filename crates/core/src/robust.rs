//! Robust aggregation: what replaces a weighted mean where the server does not trust every client.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// How much the server trusts what clients send.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RobustConfig {
    /// What replaces a weighted mean. All rules but `"none"` give every client the same weight: sample counts are claims.
    pub rule: RobustRule,
    /// Share of the contributions that may be hostile, in [0, 0.5). `trimmed_mean` cuts it off at either end.
    pub share: f64,
    /// Largest norm of a client's update ‖θ_k − θ_g‖; longer ones are scaled down to it. 0: no limit.
    pub clip: f64,
    /// The same limit as a multiple of the round's median norm. It holds for weights, buffers, and all that clients send
    /// beside them. 0: no limit. `fedproj serve` sets 3 in new runs.
    pub clip_ratio: f64,
    /// Max samples and local steps credited to a client, as a multiple of the round's median. 0: no limit. `fedproj serve`
    /// sets 3 in new runs.
    pub claim_ratio: f64,
}

/// See [`RobustConfig::rule`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RobustRule {
    /// The method's own weighted mean.
    None,
    /// The median of each coordinate.
    Median,
    /// The mean of each coordinate without its smallest and largest values (Yin et al. 2018, arXiv:1803.01498).
    TrimmedMean,
    /// The contribution that is nearest to its neighbours (Blanchard et al. 2017, arXiv:1703.02757).
    Krum,
}

impl Default for RobustConfig {
    fn default() -> Self {
        Self { rule: RobustRule::None, share: 0.2, clip: 0.0, clip_ratio: 0.0, claim_ratio: 0.0 }
    }
}

impl RobustConfig {
    /// The limits of a federation that sets none itself: its clients are strangers to each other. A simulation's clients
    /// are honest, so [`RobustConfig::default`] limits nothing.
    pub const FEDERATION: &[(&str, f64)] = &[("clip_ratio", 3.0), ("claim_ratio", 3.0)];

    pub(crate) fn check(&self) -> Result<()> {
        let share = (0.0..0.5).contains(&self.share);
        Error::require(share, "federation.robust.share", self.share, "in [0, 0.5)")?;
        for (name, limit) in [("clip", self.clip), ("clip_ratio", self.clip_ratio), ("claim_ratio", self.claim_ratio)] {
            let key = format!("federation.robust.{name}");
            Error::require(limit >= 0.0 && limit.is_finite(), &key, limit, "0 (no limit) or positive")?;
        }
        Ok(())
    }

    /// The most that counts of a client's claim, where the clients of a round claim so much. Of two medians it takes the
    /// lower one: a client that claims too little loses weight, one that claims too much would own the model.
    pub(crate) fn claim_max(&self, claims: impl Iterator<Item = u64>) -> u64 {
        let mut claims: Vec<u64> = claims.collect();
        claims.sort_unstable();
        match claims.get(claims.len().saturating_sub(1) / 2) {
            Some(median) if self.claim_ratio > 0.0 => ((self.claim_ratio * *median as f64) as u64).max(1),
            _ => u64::MAX,
        }
    }

    /// Contributions of `n` that may be hostile.
    pub(crate) fn n_hostile(&self, n: usize) -> usize {
        (self.share * n as f64 + 1e-9) as usize
    }

    /// The rule's value for one coordinate. It may reorder the values.
    pub(crate) fn of_column(&self, column: &mut [f32]) -> f32 {
        column.sort_by(f32::total_cmp);
        let n = column.len();
        if self.rule == RobustRule::Median {
            return column[(n - 1) / 2].midpoint(column[n / 2]);
        }
        let cut = self.n_hostile(n);
        let kept = &column[cut..n - cut];
        (kept.iter().map(|&v| f64::from(v)).sum::<f64>() / kept.len() as f64) as f32
    }
}

/// Krum: the row whose n − f − 2 nearest neighbours are nearest, from the squared distances between all rows.
pub(crate) fn krum(squared_distances: &[Vec<f64>], n_hostile: usize) -> usize {
    let n = squared_distances.len();
    let n_near = n.saturating_sub(n_hostile + 2).max(1);
    let score = |row: usize| -> f64 {
        let mut others: Vec<f64> = (0..n).filter(|&k| k != row).map(|k| squared_distances[row][k]).collect();
        others.sort_by(f64::total_cmp);
        others.iter().take(n_near).sum()
    };
    let scores: Vec<f64> = (0..n).map(score).collect();
    (0..n).fold(0, |best, row| if scores[row] < scores[best] { row } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_minority_does_not_move_a_coordinate() {
        let median = RobustConfig { rule: RobustRule::Median, ..RobustConfig::default() };
        let check = |rule: &RobustConfig, column: &[f32], expected: f32| {
            assert_eq!(rule.of_column(&mut column.to_vec()).to_bits(), expected.to_bits(), "{rule:?} of {column:?}");
        };
        check(&median, &[1.0, 1e30, 2.0, 3.0, -1e30], 2.0);
        check(&median, &[1.0, 4.0, 2.0, 1e30], 3.0);
        let trimmed = RobustConfig { rule: RobustRule::TrimmedMean, ..median.clone() };
        check(&trimmed, &[1.0, 1e30, 2.0, 3.0, -1e30], 2.0);
        check(&trimmed, &[5.0], 5.0);
    }

    #[test]
    fn a_claim_counts_up_to_a_multiple_of_the_median() {
        let max = |claim_ratio: f64, claims: &[u64]| {
            RobustConfig { claim_ratio, ..RobustConfig::default() }.claim_max(claims.iter().copied())
        };
        assert_eq!(max(3.0, &[10_000_000, 20, 30]), 90);
        assert_eq!(max(3.0, &[10, 10_000_000]), 30);
        assert_eq!((max(0.01, &[10]), max(3.0, &[]), max(0.0, &[1, 2])), (1, u64::MAX, u64::MAX));
    }

    #[test]
    fn krum_takes_a_row_of_the_crowd() {
        let rows: [f64; 5] = [0.0, 0.1, 0.2, 90.0, 0.15];
        let distances: Vec<Vec<f64>> = rows.iter().map(|a| rows.iter().map(|b| (a - b) * (a - b)).collect()).collect();
        assert_eq!(krum(&distances, 1), 4);
        assert_eq!(krum(&[vec![0.0]], 0), 0);
    }
}
