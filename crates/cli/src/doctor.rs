//! `fedproj doctor`: what this machine has, and what is missing for what it could do.

use crate::data::data_dir;
use crate::device::default_threads;
use crate::{give, say};
use anyhow::Result;
use clap::Args;
use fedproj_data::catalogue::{self, Depth, State};
use fedproj_nn::Isa;
use fedproj_nn::cuda::Probe;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Arguments of `doctor`.
#[derive(Args)]
pub struct Doctor {
    /// Data directory [default: $FEDPROJ_DATA, then ./data]
    #[arg(long = "data-dir", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What was found.
#[derive(Serialize)]
struct Findings {
    version: &'static str,
    /// Vector instructions in use.
    isa: &'static str,
    threads: u16,
    /// Of the machine; none where the system does not report it.
    memory_bytes: Option<u64>,
    memory_free_bytes: Option<u64>,
    cuda: Cuda,
    data_dir: Option<PathBuf>,
    data_sets: Vec<DataSet>,
}

#[derive(Serialize)]
struct Cuda {
    driver: bool,
    /// The CUDA version that the driver supports.
    driver_version: Option<String>,
    /// The run-time compiler of the kernels.
    nvrtc: bool,
    nvrtc_version: Option<String>,
    gpus: Vec<FoundGpu>,
    usable: bool,
    /// What is missing, and what to install.
    missing: Option<String>,
}

#[derive(Serialize)]
struct FoundGpu {
    name: String,
    compute_capability: String,
    memory_free_bytes: u64,
    memory_bytes: u64,
}

#[derive(Serialize)]
struct DataSet {
    name: &'static str,
    state: State,
}

impl Doctor {
    /// Looks and prints.
    pub fn run(self) -> Result<()> {
        let findings = Findings::new(data_dir(self.data_dir)?, &Probe::new());
        give(self.json, &findings, || findings.print())
    }
}

impl Findings {
    fn new(data_dir: Option<PathBuf>, probe: &Probe) -> Self {
        let [total, free] = fedproj_core::machine_memory();
        let entries = catalogue::list(data_dir.as_deref(), Depth::Presence);
        let named = entries.into_iter().filter(|entry| !matches!(entry.state, State::Format | State::Drawn));
        Self {
            version: env!("CARGO_PKG_VERSION"),
            isa: Isa::detect().name(),
            threads: default_threads(),
            memory_bytes: total,
            memory_free_bytes: free,
            cuda: Cuda::new(probe),
            data_dir,
            data_sets: named.map(|entry| DataSet { name: entry.name, state: entry.state }).collect(),
        }
    }

    fn print(&self) {
        let memory = match (self.memory_bytes, self.memory_free_bytes) {
            (Some(total), Some(free)) => format!("{} GiB, {} free", gib(total), gib(free)),
            _ => "unknown".into(),
        };
        say!("fedproj     {}", self.version);
        say!("CPU         {} threads, {}", self.threads, self.isa);
        say!("memory      {memory}");
        self.cuda.print();
        let dir = self.data_dir.as_deref().map(Path::display).map(|dir| format!("`{dir}`"));
        say!("data        {}", dir.unwrap_or_else(|| "none; set one with --data-dir or FEDPROJ_DATA".into()));
        for (what, is) in [
            ("found", (|s| matches!(s, State::Embedded | State::Found | State::Archive)) as fn(&State) -> bool),
            ("damaged", |s| matches!(s, State::Damaged)),
            ("missing", |s| matches!(s, State::Missing)),
        ] {
            let names: Vec<&str> = self.data_sets.iter().filter(|d| is(&d.state)).map(|d| d.name).collect();
            if !names.is_empty() {
                say!("  {what:<9} {}", names.join(", "));
            }
        }
        say!("            `fedproj data` shows how to get what is missing");
    }
}

impl Cuda {
    fn new(probe: &Probe) -> Self {
        let gpu = |(name, (major, minor), free, total): &(String, (i32, i32), usize, usize)| FoundGpu {
            name: name.clone(),
            compute_capability: format!("{major}.{minor}"),
            memory_free_bytes: *free as u64,
            memory_bytes: *total as u64,
        };
        let missing = probe.missing();
        Self {
            driver: probe.driver,
            driver_version: probe.driver_version.map(|v| format!("{}.{}", v / 1000, v % 1000 / 10)),
            nvrtc: probe.compiler,
            nvrtc_version: probe.compiler_version.map(|(major, minor)| format!("{major}.{minor}")),
            gpus: probe.gpus.iter().map(gpu).collect(),
            usable: missing.is_none(),
            missing,
        }
    }

    fn print(&self) {
        let library = |found: bool, version: &Option<String>, what: &str| match (found, version) {
            (false, _) => "not found".to_owned(),
            (true, Some(version)) => format!("found, {what} {version}"),
            (true, None) => "found".to_owned(),
        };
        say!("driver      libcuda {}", library(self.driver, &self.driver_version, "CUDA"));
        say!("compiler    libnvrtc {}", library(self.nvrtc, &self.nvrtc_version, "CUDA"));
        if self.gpus.is_empty() {
            say!("GPU         none");
        }
        for (ordinal, gpu) in self.gpus.iter().enumerate() {
            let (free, total) = (gib(gpu.memory_free_bytes), gib(gpu.memory_bytes));
            let capability = &gpu.compute_capability;
            say!("cuda:{ordinal}      {}, compute capability {capability}, {total} GiB, {free} free", gpu.name);
        }
        match &self.missing {
            Some(missing) => say!("            `--device cuda` cannot be used: {missing}"),
            None => say!("            `--device cuda` can be used; `fedproj selftest` tests it"),
        }
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_usable_only_with_driver_and_compiler() {
        let gpu = ("GPU".to_owned(), (9, 0), 1, 2);
        let all = Probe {
            driver: true,
            driver_version: Some(13_010),
            compiler: true,
            compiler_version: Some((12, 8)),
            gpus: vec![gpu],
            problem: None,
        };
        let found = Cuda::new(&all);
        assert!(found.usable && found.missing.is_none());
        assert_eq!(found.driver_version.as_deref(), Some("13.1"));
        assert_eq!(found.gpus[0].compute_capability, "9.0");
        let without = Cuda::new(&Probe { compiler: false, ..all });
        assert!(!without.usable && without.missing.is_some_and(|m| m.contains("libnvrtc")));
    }
}
