//! The arguments that choose where networks are trained.

use crate::tell;
use anyhow::Result;
use clap::Args;
use fedproj_core::Device;

/// Threads, device and precision.
#[derive(Args, Clone, Debug)]
pub struct DeviceArgs {
    /// Threads; without a GPU, one client per thread
    #[arg(long, value_name = "N", default_value_t = default_threads(), value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: u16,
    /// cpu, cuda, cuda:1, or auto: a GPU if there is one [default: auto]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Precision of a GPU's matrix products
    #[arg(long, default_value = "tf32", value_parser = ["fp32", "tf32", "bf16"])]
    pub precision: String,
}

impl DeviceArgs {
    /// Opens the device. A note on stderr says why a requested GPU is not used.
    pub(crate) fn open(&self) -> Result<Device> {
        Ok(self.open_for(1)?.remove(0))
    }

    /// Opens the device once per run that is made at a time. They share the threads; on a GPU the work of each overlaps that
    /// of the others.
    ///
    /// # Errors
    /// If there is no such device.
    pub fn open_for(&self, n_runs: usize) -> Result<Vec<Device>> {
        let (name, n_runs) = (self.device.as_deref().unwrap_or("auto"), n_runs.max(1));
        let n_threads = (usize::from(self.threads) / n_runs).max(1);
        let open = |_| Device::open(name, &self.precision, n_threads);
        let devices = (0..n_runs).map(open).collect::<Result<Vec<_>, _>>()?;
        if let (Some(note), true) = (devices[0].note(), self.device.is_some()) {
            tell!("{note}");
        }
        Ok(devices)
    }
}

/// All threads of the machine.
pub fn default_threads() -> u16 {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(usize::from(u16::MAX)) as u16)
}
