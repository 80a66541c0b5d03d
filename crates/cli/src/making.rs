//! The arguments of commands that make runs: which of them, on which device, and what is printed.

use crate::device::DeviceArgs;
use crate::shard::{Shard, ShardArgs};
use anyhow::Result;
use clap::Args;
use fedproj_core::Device;

/// How runs are made.
#[derive(Args)]
pub struct MakingArgs {
    #[command(flatten)]
    shard: ShardArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Runs at a time, which share the GPU or the threads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    jobs: u16,
    /// Print one JSON object on the last line
    #[arg(long)]
    pub json: bool,
    /// Print neither progress nor results
    #[arg(long)]
    pub quiet: bool,
}

impl MakingArgs {
    /// The part of this process, if there is more than one.
    pub fn shard(&self) -> Result<Option<Shard>> {
        self.shard.shard()
    }

    /// The device, once per run that is made at a time.
    ///
    /// # Errors
    /// If there is no such device.
    pub fn devices(&self, n_runs: usize) -> Result<Vec<Device>> {
        self.device.open_for(usize::from(self.jobs).min(n_runs))
    }
}
