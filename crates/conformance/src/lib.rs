//! The conformance suite: groups of comparisons, from single layers to whole methods, of any device.
//!
//! `cargo test` runs it on the CPU and `fedproj selftest` on a GPU. A device is compared with PyTorch's numbers and with
//! independent traces of the methods (`fixtures/`), with the CPU, and with itself. Start reading at [`Suite`].

mod backends;
mod compare;
mod digits;
mod fedmd;
mod fixtures;
mod golden;
mod heads;
mod layers;
mod losses;
mod nets;
mod networks;
mod precisions;
mod related;
mod reruns;
mod slopes;
mod texts;
mod traces;
mod training;
mod vectors;

pub use compare::Worst;

use anyhow::{Context, Result};
use backends::Backend;
use compare::Group;
use fedproj_core::{Config, Device, Error};
use fedproj_nn::Isa;
use fedproj_nn::cuda::{Gpu, Precision};
use fixtures::Fixture;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;

/// What is tested, and with what.
pub struct Suite {
    device: Device,
    /// What the user calls it.
    name: String,
    fixtures: Option<PathBuf>,
}

/// What a group cannot run without.
#[derive(PartialEq)]
enum Needs {
    Nothing,
    Gpu,
    Fixtures,
}

type Check = fn(&Suite, &mut Group) -> Result<()>;

const NO_GPU: &str = "there is no GPU to test";

/// All groups, from the smallest part to the whole.
const GROUPS: [(&str, Needs, Check); 12] = [
    ("layers", Needs::Nothing, layers::check),
    ("precisions", Needs::Gpu, precisions::check),
    ("losses", Needs::Gpu, losses::check),
    ("slopes", Needs::Nothing, slopes::check),
    ("optimisers", Needs::Gpu, vectors::check_optimisers),
    ("vectors", Needs::Gpu, vectors::check_vectors),
    ("golden", Needs::Fixtures, golden::check),
    ("networks", Needs::Gpu, networks::check),
    ("text", Needs::Nothing, texts::check),
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
            let hint = "hint: --fixtures names the folder `fixtures` of the repository";
            return Err(Error::config(format!("there is no folder `{}` with fixtures\n{hint}", dir.display())).into());
        }
        // Comparisons with the CPU ask for products as exact as the CPU's.
        Ok(Self { device: open(device, Precision::Fp32)?, name: device.to_owned(), fixtures })
    }

    /// The GPU under test, in another precision.
    fn gpu_in(&self, precision: Precision) -> Result<Arc<Gpu>> {
        open(&self.name, precision)?.gpu().cloned().context(NO_GPU)
    }

    /// The device under test.
    pub fn device_name(&self) -> String {
        self.device.gpu_name().unwrap_or_else(|| "the CPU".into())
    }

    /// The names of all groups.
    pub fn groups() -> impl Iterator<Item = &'static str> {
        GROUPS.iter().map(|(group, ..)| *group)
    }

    /// Runs the groups whose name contains `only`, each when its verdict is asked for. A failure does not stop the others.
    pub fn run<'a>(&'a self, only: &'a str) -> impl Iterator<Item = Verdict> + 'a {
        let chosen = GROUPS.iter().filter(move |(group, ..)| group.contains(only));
        chosen.map(|(group, needs, check)| self.verdict(group, needs, *check))
    }

    fn verdict(&self, group: &'static str, needs: &Needs, check: Check) -> Verdict {
        let skipped = |why: &str| {
            let messages = vec![why.to_owned()];
            Verdict { group, status: "skipped", comparisons: 0, worst: None, messages }
        };
        if *needs == Needs::Gpu && self.device.gpu().is_none() {
            return skipped("GPU only");
        }
        if *needs == Needs::Fixtures && self.fixtures.is_none() {
            return skipped("no fixtures here; name their folder with --fixtures");
        }
        let mut found = Group::default();
        if let Err(error) = check(self, &mut found) {
            found.fail(format!("{error:#}"));
        }
        if found.n_compared == 0 && self.device.gpu().is_some() {
            found.fail("nothing was compared".to_owned());
        }
        if found.n_compared == 0 && found.failures.is_empty() {
            return skipped("nothing to compare with: this CPU has one instruction set");
        }
        let status = if found.failures.is_empty() { "ok" } else { "failed" };
        Verdict { group, status, comparisons: found.n_compared, worst: found.worst, messages: found.failures }
    }

    fn gpu(&self) -> Result<&Arc<Gpu>> {
        self.device.gpu().context(NO_GPU)
    }

    /// All ways to compute on the device: a GPU has one, the CPU one per instruction set.
    fn backends(&self) -> Vec<Backend> {
        match self.device.gpu() {
            Some(gpu) => vec![Backend::Gpu(gpu.clone())],
            None => Isa::available().into_iter().map(|isa| Backend::Cpu(isa, 1)).collect(),
        }
    }

    /// The reference of methods on the device, and the share of a tolerance that is allowed. A GPU's reference is the CPU.
    /// The CPU's is one of its threads, and no bit may differ.
    fn reference(&self) -> (Device, f64) {
        if self.device.gpu().is_some() { (Device::from(2), 1.0) } else { (Device::from(1), 0.0) }
    }

    fn fixture(&self, name: &str) -> Result<Fixture> {
        Fixture::open(self.fixtures.as_deref().context("there are no fixtures")?, name)
    }
}

fn open(device: &str, precision: Precision) -> Result<Device> {
    Ok(Device::open(device, precision.name(), 2)?)
}

/// The configuration of a method; later layers override earlier ones.
fn config(method: &str, layers: &[&[&str]]) -> Result<Config> {
    let settings = layers.concat().into_iter().map(str::to_owned).chain([format!("method.name={method}")]);
    Ok(Config::from_layers(None, &settings.collect::<Vec<_>>())?)
}
