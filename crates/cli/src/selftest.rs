//! `fedproj selftest`: the conformance suite on a device of this machine.

use crate::{say, tell};
use anyhow::{Result, bail};
use clap::Args;
use fedproj_conformance::{Suite, Verdict};
use fedproj_core::Error;
use std::path::PathBuf;

/// Arguments of `selftest`.
#[derive(Args)]
pub struct SelfTest {
    /// Device to test: cuda, cuda:1, or cpu (only the groups that do not need a GPU)
    #[arg(long, value_name = "DEVICE", default_value = "cuda")]
    device: String,
    /// Folder with the golden numbers of `torch/` and `methods/` [default: ./fixtures if it exists, else they are skipped]
    #[arg(long, value_name = "DIR")]
    fixtures: Option<PathBuf>,
    /// Only the groups whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    only: String,
    /// Print a JSON array with one object per group
    #[arg(long)]
    json: bool,
}

impl SelfTest {
    /// Runs every group, even after failures.
    pub fn run(self) -> Result<()> {
        let here = || Some(PathBuf::from("fixtures")).filter(|dir| dir.is_dir());
        let suite = Suite::open(&self.device, self.fixtures.or_else(here))?;
        tell!("testing {}", suite.device_name());
        let print = |verdict: &Verdict| {
            if !self.json {
                self::print(verdict);
            }
        };
        let verdicts: Vec<Verdict> = suite.run(&self.only).inspect(print).collect();
        if verdicts.is_empty() {
            let groups = Suite::groups().collect::<Vec<_>>().join(", ");
            return Err(
                Error::config(format!("--only {}: no group's name contains it; groups: {groups}", self.only)).into()
            );
        }
        if self.json {
            say!("{}", serde_json::to_string(&verdicts)?);
        }
        let failed: Vec<&str> = verdicts.iter().filter(|v| v.status == "failed").map(|v| v.group).collect();
        if !failed.is_empty() {
            let (n_failed, n, name) = (failed.len(), verdicts.len(), suite.device_name());
            bail!("{n_failed} of {n} groups failed on {name}: {}", failed.join(", "));
        }
        Ok(())
    }
}

fn print(verdict: &Verdict) {
    /// Failures that are printed in full.
    const PRINTED_MAX: usize = 8;
    let Verdict { group, status, comparisons, worst, messages } = verdict;
    let is_failed = *status == "failed";
    let found = match worst {
        Some(w) => {
            let (error, tolerance) = (w.error, w.tolerance);
            format!("{comparisons:>5} comparisons, worst {error:.1e} of {tolerance:.0e}: {}", w.place)
        }
        None if *status == "skipped" => messages.join("; "),
        None => format!("{comparisons:>5} comparisons, all of them exact"),
    };
    say!("{group:<11} {:<7}  {found}", if is_failed { "FAILED" } else { status });
    if is_failed {
        messages.iter().take(PRINTED_MAX).for_each(|message| say!("    {message}"));
        if messages.len() > PRINTED_MAX {
            say!("    … and {} more", messages.len() - PRINTED_MAX);
        }
    }
}
