//! `fedproj reproduce`: the paper's studies.

mod pilot;

use anyhow::Result;
use clap::Subcommand;

/// The studies there are.
#[derive(Subcommand)]
pub enum Reproduce {
    /// The pilot study on Iris in the plane: who forgets what, with pictures, in seconds
    Pilot(pilot::Pilot),
}

impl Reproduce {
    /// Runs the study.
    pub fn run(self) -> Result<()> {
        match self {
            Self::Pilot(args) => args.run(),
        }
    }
}
