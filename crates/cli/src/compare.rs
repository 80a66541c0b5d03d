//! `fedproj compare`: mean ± standard deviation over seeds, and paired differences.

use crate::{give, say, tell};
use anyhow::Result;
use clap::Args;
use fedproj_study::{ComparedGroup, Comparison, compare_runs, load};
use std::path::PathBuf;

/// Arguments of `compare`.
#[derive(Args)]
pub struct CompareArgs {
    /// Run directories, or directories of run directories
    #[arg(required = true, value_name = "DIR")]
    dirs: Vec<PathBuf>,
    /// The row of each group that the others are compared with, as the table names it [default: the first]
    #[arg(long, value_name = "NAME")]
    baseline: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl CompareArgs {
    /// Compares and prints.
    pub fn run(self) -> Result<()> {
        let (runs, mut notes) = load(&self.dirs, false)?;
        let groups = compare_runs(runs, self.baseline.as_deref(), &mut notes)?;
        for note in notes {
            tell!("note: {note}");
        }
        give(self.json, &serde_json::json!({ "settings": groups }), || {
            for (at, ComparedGroup { title, comparison }) in groups.iter().enumerate() {
                if groups.len() > 1 {
                    say!("{}{title}", if at > 0 { "\n" } else { "" });
                }
                say!("{}", comparison.table().to_text().trim_end());
            }
            say!("{LEGEND}");
            if groups.iter().flat_map(|group| &group.comparison.rows).any(|row| row.clients.is_some()) {
                say!(
                    "Own classes: each client on the classes that it holds, as it was in its last round; mean over seeds."
                );
            }
        })
    }
}

const LEGEND: &str =
    "Accuracy: mean over the last rounds, ± standard deviation over seeds. Δ: paired by seed, with the 95 % interval.";

/// Prints the table for people.
pub fn print_table(table: &Comparison) {
    say!("{}", table.table().to_text().trim_end());
    say!("{LEGEND}");
}
