//! The conformance suite: groups of comparisons, from single layers to whole methods, of any device.
//!
//! `cargo test` runs it on the CPU and `fedproj selftest` on a GPU. A device is compared with PyTorch's numbers and with
//! independent traces of the methods (`fixtures/`), with the CPU, and with itself. Start reading at [`Suite`].

mod backends;
mod compare;
mod digits;
mod fixtures;
mod golden;
mod layers;
mod losses;
mod nets;
mod networks;
mod precisions;
mod reruns;
mod slopes;
mod texts;
mod traces;
mod vectors;

pub use compare::Worst;

use anyhow::{Result, bail};
use compare::Group;
use fedproj_core::Device;
use fedproj_nn::cuda::{Gpu, Precision};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What is tested, and with what.
pub struct Suite {
    /// Where methods are run.
    device: Device,
    /// The GPU for everything below methods; none on the CPU.
    gpu: Option<Arc<Gpu>>,
    /// Which GPU that is.
    ordinal: usize,
    fixtures: Option<PathBuf>,
}

/// What a group cannot run without.
enum Needs {
    Nothing,
    Gpu,
    Fixtures,
    Both,
}

type Check = fn(&Suite, &mut Group) -> Result<()>;

/// All groups, from the smallest part to the whole.
const GROUPS: [(&str, Needs, Check); 12] = [
    ("layers", Needs::Gpu, layers::check),
    ("precisions", Needs::Gpu, precisions::check),
    ("losses", Needs::Gpu, losses::check),
    ("slopes", Needs::Gpu, slopes::check),
    ("optimisers", Needs::Gpu, vectors::check_optimisers),
    ("vectors", Needs::Gpu, vectors::check_vectors),
    ("golden", Needs::Both, golden::check),
    ("networks", Needs::Gpu, networks::check),
    ("text", Needs::Gpu, texts::check),
    ("traces", Needs::Fixtures, traces::check),
    ("methods", Needs::Nothing, digits::check),
    ("reruns", Needs::Nothing, reruns::check),
];

/// The result of a group.
#[derive(Serialize)]
pub struct Verdict {
    /// The group's name.
    pub group: &'static str,
    /// `ok`, `failed` or `skipped`.
    pub status: &'static str,
    /// How many numbers or vectors were compared.
    pub comparisons: usize,
    /// The comparison that came nearest to its tolerance, or exceeded it most.
    pub worst: Option<Worst>,
    /// The failures, or why the group was skipped.
    pub messages: Vec<String>,
}

impl Suite {
    /// A suite for `device`: `cuda`, `cuda:1` or `cpu`. Groups that need fixtures are skipped without them.
    ///
    /// # Errors
    /// If the device cannot be used or the folder does not exist.
    pub fn open(device: &str, fixtures: Option<PathBuf>) -> Result<Self> {
        if let Some(dir) = fixtures.as_deref().filter(|dir| !dir.is_dir()) {
            bail!("there is no folder `{}` with fixtures", dir.display());
        }
        let ordinal = device.strip_prefix("cuda:").and_then(|n| n.parse().ok()).unwrap_or(0);
        // Comparisons with the CPU ask for products as exact as the CPU's.
        let device = Device::open(device, Precision::Fp32.name(), 2)?;
        let gpu = if device.kind() == "cuda" { Some(Gpu::open(ordinal, Precision::Fp32)?) } else { None };
        Ok(Self { device, gpu, ordinal, fixtures })
    }

    /// The device under test.
    pub fn device_name(&self) -> String {
        self.device.gpu_name().unwrap_or_else(|| "the CPU".into())
    }

    /// Runs the groups whose name contains `only`, each when its verdict is asked for. A failure does not stop the others.
    pub fn run<'a>(&'a self, only: &'a str) -> impl Iterator<Item = Verdict> + 'a {
        let chosen = GROUPS.iter().filter(move |(group, ..)| group.contains(only));
        chosen.map(|(group, needs, check)| self.verdict(group, needs, *check))
    }

    fn verdict(&self, group: &'static str, needs: &Needs, check: Check) -> Verdict {
        let needs_gpu = matches!(needs, Needs::Gpu | Needs::Both);
        let needs_fixtures = matches!(needs, Needs::Fixtures | Needs::Both);
        let missing = match (needs_gpu && self.gpu.is_none(), needs_fixtures && self.fixtures.is_none()) {
            (true, _) => Some("GPU only"),
            (_, true) => Some("no fixtures here; name their folder with --fixtures"),
            _ => None,
        };
        if let Some(why) = missing {
            return Verdict { group, status: "skipped", comparisons: 0, worst: None, messages: vec![why.into()] };
        }
        let mut found = Group::default();
        if let Err(error) = check(self, &mut found) {
            found.fail(format!("{error:#}"));
        }
        let status = if found.failures.is_empty() { "ok" } else { "failed" };
        Verdict { group, status, comparisons: found.n_compared, worst: found.worst, messages: found.failures }
    }

    fn gpu(&self) -> Result<&Arc<Gpu>> {
        self.gpu.as_ref().ok_or_else(|| anyhow::anyhow!("there is no GPU to test"))
    }

    fn fixture(&self, path: &str) -> Result<PathBuf> {
        let folder: &Path = self.fixtures.as_deref().ok_or_else(|| anyhow::anyhow!("there are no fixtures"))?;
        Ok(folder.join(path))
    }
}
