//! `fedproj selftest`: the GPU against the CPU, PyTorch's numbers and itself, from single layers to whole methods.

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

use crate::say;
use anyhow::{Result, bail};
use clap::Args;
use compare::Group;
use fedproj_core::Device;
use fedproj_nn::cuda::{Gpu, Precision};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Arguments of `selftest`.
#[derive(Args)]
pub struct SelfTest {
    /// What is tested: cuda, cuda:1, or cpu (those checks that have something to compare it with)
    #[arg(long, value_name = "DEVICE", default_value = "cuda")]
    device: String,
    /// Folder with the golden numbers of `torch/` and `methods/`; without one, and without `fixtures` here, they are skipped
    #[arg(long, value_name = "DIR")]
    fixtures: Option<PathBuf>,
    /// Only the groups whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Print a JSON array of objects, one a group
    #[arg(long)]
    json: bool,
}

/// What every group is given.
struct Setting {
    /// Where methods are run.
    device: Device,
    /// The GPU for everything below methods; none with `--device cpu`.
    gpu: Option<Arc<Gpu>>,
    /// Which GPU that is.
    ordinal: usize,
    fixtures: Option<PathBuf>,
}

/// Why a group does not run.
enum Needs {
    Nothing,
    Gpu,
    Fixtures,
    Both,
}

type Check = fn(&Setting, &mut Group) -> Result<()>;

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

/// What became of a group.
#[derive(Serialize)]
struct Outcome {
    group: &'static str,
    /// `ok`, `failed` or `skipped`.
    status: &'static str,
    /// Numbers or vectors that were compared.
    comparisons: usize,
    /// The one that came nearest to its tolerance, or beyond.
    worst: Option<compare::Worst>,
    /// What went wrong, or why it was skipped.
    messages: Vec<String>,
}

impl SelfTest {
    /// Runs every group, whatever became of those before it.
    pub fn run(self) -> Result<()> {
        let setting = self.setting()?;
        let name = setting.device.gpu_name().unwrap_or_else(|| "the CPU".into());
        eprintln!("testing {name}");
        let mut outcomes = Vec::new();
        for (group, needs, check) in GROUPS {
            if self.only.as_ref().is_some_and(|text| !group.contains(text.as_str())) {
                continue;
            }
            let outcome = outcome(group, &needs, check, &setting);
            if !self.json {
                outcome.print();
            }
            outcomes.push(outcome);
        }
        if self.json {
            say!("{}", serde_json::to_string(&outcomes)?);
        }
        let failed: Vec<&str> = outcomes.iter().filter(|o| o.status == "failed").map(|o| o.group).collect();
        if !failed.is_empty() {
            bail!("{} of {} groups failed on {name}: {}", failed.len(), outcomes.len(), failed.join(", "));
        }
        Ok(())
    }

    fn setting(&self) -> Result<Setting> {
        // Comparisons with the CPU ask for products as exact as the CPU's.
        let device = Device::open(&self.device, Precision::Fp32.name(), 2)?;
        let ordinal = self.device.strip_prefix("cuda:").and_then(|n| n.parse().ok()).unwrap_or(0);
        let gpu = if device.kind() == "cuda" { Some(Gpu::open(ordinal, Precision::Fp32)?) } else { None };
        let here = || Some(PathBuf::from("fixtures")).filter(|dir| dir.is_dir());
        if let Some(dir) = self.fixtures.as_deref().filter(|dir| !dir.is_dir()) {
            bail!("there is no folder `{}` with fixtures", dir.display());
        }
        Ok(Setting { device, gpu, ordinal, fixtures: self.fixtures.clone().or_else(here) })
    }
}

impl Setting {
    fn gpu(&self) -> Result<&Arc<Gpu>> {
        self.gpu.as_ref().ok_or_else(|| anyhow::anyhow!("there is no GPU to test"))
    }

    fn fixture(&self, path: &str) -> Result<PathBuf> {
        let folder: &Path = self.fixtures.as_deref().ok_or_else(|| anyhow::anyhow!("there are no fixtures"))?;
        Ok(folder.join(path))
    }
}

fn outcome(group: &'static str, needs: &Needs, check: Check, setting: &Setting) -> Outcome {
    let needs_gpu = matches!(needs, Needs::Gpu | Needs::Both);
    let needs_fixtures = matches!(needs, Needs::Fixtures | Needs::Both);
    let missing = match (needs_gpu && setting.gpu.is_none(), needs_fixtures && setting.fixtures.is_none()) {
        (true, _) => Some("GPU only"),
        (_, true) => Some("no fixtures here; name their folder with --fixtures"),
        _ => None,
    };
    if let Some(why) = missing {
        return Outcome { group, status: "skipped", comparisons: 0, worst: None, messages: vec![why.into()] };
    }
    let mut found = Group::default();
    if let Err(error) = check(setting, &mut found) {
        found.fail(crate::message(&error));
    }
    let status = if found.failures.is_empty() { "ok" } else { "failed" };
    Outcome { group, status, comparisons: found.n_compared, worst: found.worst, messages: found.failures }
}

impl Outcome {
    fn print(&self) {
        /// Failures that are told in full.
        const TOLD: usize = 8;
        let status = if self.status == "failed" { "FAILED" } else { self.status };
        let worst = match &self.worst {
            Some(w) => {
                let (error, tolerance) = (w.error, w.tolerance);
                format!("{:>5} comparisons, worst {error:.1e} of {tolerance:.0e}: {}", self.comparisons, w.place)
            }
            None if self.status == "skipped" => self.messages.join("; "),
            None => format!("{:>5} comparisons, all of them exact", self.comparisons),
        };
        say!("{:<11} {status:<7}  {worst}", self.group);
        if self.status == "failed" {
            self.messages.iter().take(TOLD).for_each(|message| say!("    {message}"));
            if self.messages.len() > TOLD {
                say!("    … and {} more", self.messages.len() - TOLD);
            }
        }
    }
}
