//! Where networks are trained: threads of this machine, and a GPU if one is used.

use crate::error::{Error, Result};
use fedproj_nn::cuda::{Gpu, Precision, Probe};
use std::sync::Arc;

/// Threads, and a GPU if one is used.
///
/// ```
/// use fedproj_core::Device;
///
/// let device = Device::from(2);
/// assert_eq!((device.n_threads(), device.kind()), (2, "cpu"));
/// assert!(Device::open("gpu7", "tf32", 2).is_err());
/// ```
#[derive(Clone, Debug)]
pub struct Device {
    n_threads: usize,
    gpu: Option<Arc<Gpu>>,
    /// Maximum number of clients that a GPU trains at a time.
    lanes_max: usize,
    /// Why a requested GPU is not used.
    note: Option<Arc<str>>,
}

impl From<usize> for Device {
    fn from(n_threads: usize) -> Self {
        Self { n_threads: n_threads.max(1), gpu: None, lanes_max: usize::MAX, note: None }
    }
}

impl Device {
    /// Opens a device by its name: `cpu`, `cuda`, `cuda:1`, or `auto` (a GPU if there is one). `precision` is that of a
    /// GPU's products: `fp32`, `tf32` or `bf16`.
    ///
    /// # Errors
    /// If there is no such device. The error names what is missing.
    pub fn open(name: &str, precision: &str, n_threads: usize) -> Result<Self> {
        let unknown = || Error::config(format!("unknown device `{name}`; known devices: cpu, cuda, cuda:N, auto"));
        let ordinal = match name {
            "cpu" => return Ok(Self::from(n_threads)),
            "cuda" | "auto" => 0,
            _ => name.strip_prefix("cuda:").and_then(|n| n.parse().ok()).ok_or_else(unknown)?,
        };
        Self::open_gpu(ordinal, name == "auto", precision, n_threads)
    }

    fn open_gpu(ordinal: usize, or_cpu: bool, precision: &str, n_threads: usize) -> Result<Self> {
        let known = Precision::NAMES.iter().find(|(name, _)| *name == precision);
        let Some((_, precision)) = known else {
            return Err(Error::config(format!("unknown precision `{precision}`; known precisions: fp32, tf32, bf16")));
        };
        if or_cpu && let Some(missing) = Probe::new().missing() {
            let note = Some(Arc::from(format!("no GPU found, using the CPU: {missing}")));
            return Ok(Self { note, ..Self::from(n_threads) });
        }
        let gpu = Gpu::open(ordinal, *precision, fedproj_data::cache::folder().as_deref())?;
        Ok(Self { gpu: Some(gpu), ..Self::from(n_threads) })
    }

    /// The same device with max `n` clients side by side on its GPU, for GPUs with little memory. Results do not depend
    /// on it.
    #[must_use]
    pub fn with_lanes_max(self, n: usize) -> Self {
        Self { lanes_max: n.max(1), ..self }
    }

    /// Threads of this machine.
    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// Why a requested GPU is not used, if so.
    pub fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// `cpu` or `cuda`.
    pub fn kind(&self) -> &'static str {
        if self.gpu.is_some() { "cuda" } else { "cpu" }
    }

    /// The GPU's name and precision, for manifests.
    pub fn gpu_name(&self) -> Option<String> {
        self.gpu.as_ref().map(|gpu| format!("{}, {}", gpu.name(), gpu.precision().name()))
    }

    pub(crate) fn lanes_max(&self) -> usize {
        self.lanes_max
    }

    /// The GPU, if one is used.
    pub fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.gpu.as_ref()
    }
}
