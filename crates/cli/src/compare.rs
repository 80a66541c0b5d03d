//! `fedproj compare`: mean ± standard deviation over seeds, and paired differences.

use crate::say;
use anyhow::{Result, bail};
use clap::Args;
use fedproj_core::Error;
use fedproj_study::{Comparison, compare, labels, load};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Arguments of `compare`.
#[derive(Args)]
pub struct CompareArgs {
    /// Run directories, or directories of run directories
    #[arg(required = true, value_name = "DIR")]
    dirs: Vec<PathBuf>,
    /// The row that the others are compared with, as the table names it [default: the first]
    #[arg(long, value_name = "NAME")]
    baseline: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl CompareArgs {
    /// Compares and prints.
    pub fn run(self) -> Result<()> {
        let (runs, notes) = load(&self.dirs)?;
        for note in notes {
            eprintln!("note: {note}");
        }
        let labels = labels(runs.iter().map(|r| &r.run.config));
        let mut results: Vec<_> = labels.into_iter().zip(runs.into_iter().map(|r| r.run.summary)).collect();
        if let Some(baseline) = &self.baseline {
            let is_baseline = |(label, _): &(String, _)| label.eq_ignore_ascii_case(baseline);
            if !results.iter().any(is_baseline) {
                let known: BTreeSet<&str> = results.iter().map(|(label, _)| label.as_str()).collect();
                let known: Vec<&str> = known.into_iter().collect();
                bail!(Error::config(format!("--baseline {baseline}: no such row; there are: {}", known.join("; "))));
            }
            // Rows keep the order in which names appear, and the first is the baseline.
            results.sort_by_key(|result| !is_baseline(result));
        }
        let table = compare(&results);
        if self.json {
            say!("{}", serde_json::to_string(&table)?);
        } else {
            print_table(&table);
        }
        Ok(())
    }
}

/// Prints the table for people.
pub fn print_table(table: &Comparison) {
    say!("{}", table.table().to_text().trim_end());
    say!(
        "Accuracy: mean over the last rounds, ± standard deviation over seeds. Δ: paired by seed, with the 95 % interval."
    );
}
