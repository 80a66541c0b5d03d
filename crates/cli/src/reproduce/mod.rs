//! `fedproj reproduce`: the paper's studies.

mod pilot;
mod studies;
mod study;

use anyhow::Result;
use clap::Subcommand;

/// The studies there are.
#[derive(Subcommand)]
pub enum Reproduce {
    /// The pilot study on Iris in the plane: who forgets what, with pictures, in seconds
    Pilot(pilot::Pilot),
    /// The table of image classification: nine methods, three data sets, two degrees of skew
    Table1(studies::Table1),
    /// The table of text classification: four methods, a small BERT, three data sets, two degrees of skew
    Table2(studies::Table2),
    /// FedProj with its projection left out at random, from never to always
    ProjectionDropout(studies::ProjectionDropout),
    /// FedProj's distillation held near the average by a weight-divergence term of weight α
    WeightDivergence(studies::WeightDivergence),
}

impl Reproduce {
    /// Runs the study.
    pub fn run(self) -> Result<()> {
        match self {
            Self::Pilot(args) => args.run(),
            Self::Table1(args) => args.run(),
            Self::Table2(args) => args.run(),
            Self::ProjectionDropout(args) => args.run(),
            Self::WeightDivergence(args) => args.run(),
        }
    }
}
