//! `fedproj rollback`: back to an earlier round, on the server's machine.

use crate::say;
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;

/// Arguments of `rollback`.
#[derive(Args)]
pub struct Rollback {
    /// Rounds to keep; the rounds after them are run again
    #[arg(long, value_name = "N")]
    to_round: u32,
    /// Federation folder
    #[arg(long, value_name = "DIR", default_value = "federation")]
    dir: PathBuf,
}

impl Rollback {
    /// Goes back and reports what comes next.
    pub fn run(self) -> Result<()> {
        let run = fedproj_net::server::rollback(&self.dir, self.to_round)?;
        say!("run {run} is at the end of round {}; `fedproj serve` continues from there", self.to_round);
        Ok(())
    }
}
