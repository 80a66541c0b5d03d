//! `fedproj export`: stored runs in the formats of other programs.

use crate::say;
use anyhow::Result;
use clap::Subcommand;
use fedproj_study::{export_tensorboard, find_runs};
use std::path::PathBuf;

/// The format.
#[derive(Subcommand)]
pub enum Export {
    /// Write event files, which `tensorboard --logdir DIR` shows
    Tensorboard {
        /// Run directories, or directories of run directories
        #[arg(required = true, value_name = "RUN")]
        runs: Vec<PathBuf>,
        /// Directory for one folder per run
        #[arg(long, value_name = "DIR", default_value = "tensorboard")]
        out: PathBuf,
    },
}

impl Export {
    /// Writes the files and prints their paths.
    pub fn run(self) -> Result<()> {
        let Self::Tensorboard { runs, out } = self;
        for run in find_runs(&runs)? {
            let name = run.canonicalize()?.file_name().unwrap_or_default().to_owned();
            say!("{}", export_tensorboard(&run, &out.join(name))?.display());
        }
        Ok(())
    }
}
