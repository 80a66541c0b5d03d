//! `fedproj compare`: mean ± deviation over seeds, and paired differences.

use crate::say;
use anyhow::{Result, bail};
use clap::Args;
use fedproj_core::{Error, StoredRun};
use fedproj_study::{Comparison, compare};
use std::path::PathBuf;

/// Arguments of `compare`.
#[derive(Args)]
pub struct CompareArgs {
    /// Run directories, or directories of run directories
    #[arg(required = true, value_name = "DIR")]
    dirs: Vec<PathBuf>,
    /// The setting that the others are compared with; the first unless given
    #[arg(long, value_name = "NAME")]
    baseline: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl CompareArgs {
    /// Compares and prints.
    pub fn run(self) -> Result<()> {
        let mut runs = Vec::new();
        for dir in &self.dirs {
            runs.extend(StoredRun::find(dir)?);
        }
        if runs.is_empty() {
            let dirs: Vec<String> = self.dirs.iter().map(|d| d.display().to_string()).collect();
            bail!(Error::config(format!("no finished run in {}", dirs.join(", "))));
        }
        let labels = StoredRun::labels(&runs);
        let mut outcomes: Vec<_> = labels.into_iter().zip(runs.into_iter().map(|run| run.summary)).collect();
        if let Some(baseline) = &self.baseline {
            if !outcomes.iter().any(|(label, _)| label == baseline) {
                let known: std::collections::BTreeSet<&str> = outcomes.iter().map(|(l, _)| l.as_str()).collect();
                let known: Vec<&str> = known.into_iter().collect();
                bail!(Error::config(format!("no setting `{baseline}`; there are: {}", known.join(", "))));
            }
            // Rows keep the order in which names appear, and the first is the baseline.
            outcomes.sort_by_key(|(label, _)| label != baseline);
        }
        let table = compare(&outcomes);
        if self.json {
            say!("{}", serde_json::to_string(&table)?);
            return Ok(());
        }
        print_table(&table);
        Ok(())
    }
}

/// Prints the table for people.
pub fn print_table(table: &Comparison) {
    let width = table.rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(7);
    say!(
        "{:width$}  {:>5}  {:>15}  {:>7}  {:>7}  {:>22}  {:>8}",
        "setting",
        "seeds",
        "accuracy %",
        "last %",
        "best %",
        "difference, 95 %",
        "seconds"
    );
    for row in &table.rows {
        let accuracy = match row.std {
            Some(std) => format!("{:.2} ± {:.2}", 100.0 * row.mean, 100.0 * std),
            None => format!("{:.2}", 100.0 * row.mean),
        };
        let difference = match row.difference {
            None => String::new(),
            Some(d) => match d.half_width {
                Some(half) => format!("{:+.2} ± {:.2}", 100.0 * d.mean, 100.0 * half),
                None => format!("{:+.2} (one pair)", 100.0 * d.mean),
            },
        };
        say!(
            "{:width$}  {:>5}  {accuracy:>15}  {:>7.2}  {:>7.2}  {difference:>22}  {:>8.1}",
            row.name,
            row.seeds.len(),
            100.0 * row.last,
            100.0 * row.best,
            row.seconds
        );
    }
    say!(
        "Accuracy: mean over the last rounds, ± sample deviation over seeds. Differences to `{}`, paired by seed.",
        table.baseline
    );
}
