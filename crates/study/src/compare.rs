//! Comparison of runs: mean ± standard deviation over seeds, and paired differences with 95 % intervals.

use crate::clients::ClientSpread;
use crate::networks::NetworkAccuracy;
use fedproj_core::{PrivacySpent, Summary};
use fedproj_report::Table;
use serde::Serialize;
use std::collections::BTreeMap;

/// Arms beside each other, each over its seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The arm that the others are compared with: the first.
    pub baseline: String,
    /// One row per arm.
    pub rows: Vec<ComparedRow>,
}

/// One arm over its seeds; accuracies are shares.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparedRow {
    /// The arm.
    pub name: String,
    /// Seeds that ran.
    pub seeds: Vec<u64>,
    /// Mean headline accuracy.
    pub mean: f64,
    /// Standard deviation over seeds (n − 1); `None` for a single seed.
    pub std: Option<f64>,
    /// Mean of the last rounds' accuracies.
    pub last: f64,
    /// Mean of the best rounds' accuracies.
    pub best: f64,
    /// Mean seconds.
    pub seconds: f64,
    /// The difference to the baseline, over the seeds that both ran.
    pub difference: Option<Difference>,
    /// What the seed with the largest ε has revealed, under privacy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub privacy: Option<PrivacySpent>,
    /// Accuracies of clients on their own classes, if they were evaluated; mean over seeds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clients: Option<ClientSpread>,
    /// Accuracies of the networks, where groups of clients have networks of their own; mean over seeds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<NetworkAccuracy>,
}

/// A paired difference.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Mean of the differences seed by seed.
    pub mean: f64,
    /// Half the width of the 95 % interval (Student's t); `None` for a single pair.
    pub half_width: Option<f64>,
    /// Pairs.
    pub n: usize,
}

impl Comparison {
    /// The table for people, in per cent.
    pub fn table(&self) -> Table {
        let difference = format!("Δ vs {}, 95 %", self.baseline);
        let headers = ["method", "seeds", "accuracy %", "last %", "best %", &difference, "seconds"];
        let row = |row: &ComparedRow| {
            vec![
                row.name.clone(),
                row.seeds.len().to_string(),
                row.accuracy(),
                format!("{:.2}", 100.0 * row.last),
                format!("{:.2}", 100.0 * row.best),
                row.difference.map(|d| d.percent()).unwrap_or_default(),
                format!("{:.1}", row.seconds),
            ]
        };
        let (mut headers, mut rows) =
            (headers.map(str::to_owned).to_vec(), self.rows.iter().map(row).collect::<Vec<_>>());
        if self.rows.iter().any(|row| row.privacy.is_some()) {
            headers.push("ε".into());
            rows.iter_mut().zip(&self.rows).for_each(|(cells, row)| cells.push(row.epsilon()));
        }
        if self.rows.iter().any(|row| row.clients.is_some()) {
            headers.extend(["own classes %", "over clients ±", "worst 10 %"].map(str::to_owned));
            for (cells, row) in rows.iter_mut().zip(&self.rows) {
                let percent = |of: fn(ClientSpread) -> f64| {
                    row.clients.map(|clients| format!("{:.2}", 100.0 * of(clients))).unwrap_or_default()
                };
                cells.extend([percent(|c| c.mean), percent(|c| c.std), percent(|c| c.worst)]);
            }
        }
        if self.rows.iter().any(|row| !row.networks.is_empty()) {
            headers.push("by network %".into());
            rows.iter_mut().zip(&self.rows).for_each(|(cells, row)| cells.push(NetworkAccuracy::text(&row.networks)));
        }
        Table::new(headers, 1, rows)
    }
}

impl ComparedRow {
    /// `21.32 ± 3.04`, in per cent.
    pub fn accuracy(&self) -> String {
        plus_minus(100.0 * self.mean, self.std.map(|std| 100.0 * std))
    }

    /// `7.98`, or `∞` without privacy.
    pub fn epsilon(&self) -> String {
        self.privacy.as_ref().map_or_else(|| "∞".to_owned(), PrivacySpent::shown)
    }
}

impl Difference {
    /// Whether the 95 % interval excludes zero; `None` for a single pair.
    pub fn is_significant(&self) -> Option<bool> {
        self.half_width.map(|half| self.mean.abs() > half)
    }

    /// How often chance alone gives a difference at least this large, by Student's t; `None` for a single pair.
    pub fn p_value(&self) -> Option<f64> {
        let degrees = self.n.checked_sub(1).filter(|n| *n > 0)?;
        let error = self.half_width? / t_95(degrees);
        (error > 0.0).then(|| two_sided_p(self.mean.abs() / error, degrees))
    }

    /// `+6.68 ± 7.80`, in per cent.
    pub fn percent(&self) -> String {
        match self.half_width {
            Some(half) => format!("{} ± {:.2}", signed(100.0 * self.mean), 100.0 * half),
            None => format!("{} (one pair)", signed(100.0 * self.mean)),
        }
    }
}

/// `21.32 ± 3.04`; the mean alone if there is no standard deviation.
pub fn plus_minus(mean: f64, std: Option<f64>) -> String {
    let mean = if mean < 0.0 { signed(mean) } else { format!("{mean:.2}") };
    std.map_or(mean.clone(), |std| format!("{mean} ± {std:.2}"))
}

/// With its sign; the minus is as long as the plus.
pub fn signed(value: f64) -> String {
    format!("{value:+.2}").replace('-', "−")
}

/// Compares the results of named arms. Rows keep the order in which names first appear.
pub fn compare(results: &[(String, Summary)]) -> Comparison {
    let mut names: Vec<&String> = Vec::new();
    let mut by_name: BTreeMap<&String, BTreeMap<u64, &Summary>> = BTreeMap::new();
    for (name, summary) in results {
        if !names.contains(&name) {
            names.push(name);
        }
        by_name.entry(name).or_default().insert(summary.seed, summary);
    }
    let baseline = names.first().map(|name| (*name).clone()).unwrap_or_default();
    let base = by_name.get(&baseline).cloned().unwrap_or_default();
    let rows = names.iter().map(|name| {
        let runs = &by_name[name];
        let headlines: Vec<f64> = runs.values().map(|s| s.headline).collect();
        let pairs: Vec<f64> = runs.iter().filter_map(|(seed, s)| Some(s.headline - base.get(seed)?.headline)).collect();
        let average = |of: fn(&Summary) -> f64| mean(&runs.values().map(|s| of(s)).collect::<Vec<_>>());
        ComparedRow {
            name: (*name).clone(),
            seeds: runs.keys().copied().collect(),
            mean: mean(&headlines),
            std: standard_deviation(&headlines),
            last: average(|s| s.last),
            best: average(|s| s.best),
            seconds: average(|s| s.seconds),
            difference: (**name != baseline && !pairs.is_empty()).then(|| Difference {
                mean: mean(&pairs),
                half_width: standard_deviation(&pairs).map(|d| t_95(pairs.len() - 1) * d / (pairs.len() as f64).sqrt()),
                n: pairs.len(),
            }),
            privacy: runs.values().filter_map(|s| s.privacy.clone()).max_by(|a, b| a.epsilon.total_cmp(&b.epsilon)),
            clients: None,
            networks: Vec::new(),
        }
    });
    let rows = rows.collect();
    Comparison { baseline, rows }
}

/// Mean; 0 of nothing.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Standard deviation of a sample (n − 1); `None` for fewer than two values.
pub fn standard_deviation(values: &[f64]) -> Option<f64> {
    let m = mean(values);
    let n = values.len();
    (n > 1).then(|| (values.iter().map(|v| (v - m).powi(2)).sum::<f64>() / (n - 1) as f64).sqrt())
}

/// The share of Student's t beyond ±t, in closed form for whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4).
fn two_sided_p(t: f64, degrees: usize) -> f64 {
    let angle = (t / (degrees as f64).sqrt()).atan();
    let (sin, cos) = angle.sin_cos();
    let first = if degrees.is_multiple_of(2) { 1.0 } else { cos };
    let (mut sum, mut term) = (0.0, first);
    for k in (1 + degrees % 2..degrees).step_by(2) {
        sum += term;
        term *= cos * cos * k as f64 / (k + 1) as f64;
    }
    let inside = if degrees.is_multiple_of(2) { sin * sum } else { (angle + sin * sum) * std::f64::consts::FRAC_2_PI };
    (1.0 - inside).max(0.0)
}

/// The 97.5 % quantile of Student's t.
fn t_95(degrees: usize) -> f64 {
    const TABLE: [f64; 30] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
    ];
    TABLE.get(degrees.saturating_sub(1)).copied().unwrap_or(1.96)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str, seed: u64, headline: f64) -> (String, Summary) {
        let (last, best) = (headline, headline);
        let summary = Summary {
            method: name.into(),
            seed,
            headline,
            last,
            best,
            model_hash: String::new(),
            seconds: 1.0,
            privacy: None,
        };
        (name.into(), summary)
    }

    #[test]
    fn differences_are_paired_by_seed() {
        let table = compare(&[
            run("fedavg", 0, 0.50),
            run("fedavg", 1, 0.60),
            run("fedavg", 2, 0.55),
            run("fedproj", 1, 0.63),
            run("fedproj", 0, 0.52),
        ]);
        assert_eq!(table.baseline, "fedavg");
        assert!((table.rows[0].mean - 0.55).abs() < 1e-12 && table.rows[0].difference.is_none());
        let d = table.rows[1].difference.unwrap();
        // Differences 0.02 and 0.03: mean 0.025, standard deviation 0.00707, t(1) = 12.706.
        assert!((d.mean - 0.025).abs() < 1e-12 && d.n == 2);
        assert!((d.half_width.unwrap() - 12.706 * 0.005).abs() < 1e-6);
    }

    #[test]
    fn p_is_5_percent_at_the_ends_of_the_interval() {
        for degrees in 1..=30 {
            let p = two_sided_p(t_95(degrees), degrees);
            assert!((p - 0.05).abs() < 2e-4, "{degrees}: {p}");
        }
        let difference = |mean, half_width| Difference { mean, half_width, n: 3 };
        assert_eq!(difference(0.1, None).p_value(), None);
        // t = 4.303 · 3 = 12.909 with two degrees of freedom.
        let p = difference(-0.3, Some(0.1)).p_value().unwrap();
        assert!((p - 0.005_948).abs() < 1e-5, "{p}");
        assert_eq!(difference(-0.3, Some(0.1)).is_significant(), Some(true));
        assert_eq!(difference(0.05, Some(0.1)).is_significant(), Some(false));
    }
}
