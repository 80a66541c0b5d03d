//! What a run was made of, and on which machine: `manifest.json`.

use super::extend::Extended;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::files::{read_if_exists, write_atomically};
use crate::methods::External;
use fedproj_nn::Isa;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// What a run was made of, and on which machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(expecting = "an object with the facts of a run")]
pub struct Manifest {
    /// Version of this software.
    pub version: String,
    /// The seed.
    pub seed: u64,
    /// Instruction set, threads, operating system and architecture.
    pub hardware: BTreeMap<String, String>,
    /// BLAKE3 of private, test and public data, of the partition and of the initial weights.
    pub hashes: BTreeMap<String, String>,
    /// Counts: clients, cohort, samples, parameters; if any, digits of sums in integers, texts that were cut, public samples in the test set.
    pub sizes: BTreeMap<String, usize>,
    /// Names of the classes; empty in runs of earlier versions.
    #[serde(default)]
    pub classes: Vec<String>,
    /// Samples per class of the first clients; empty in runs of earlier versions, and under privacy.
    #[serde(default)]
    pub class_counts: Vec<Vec<u32>>,
    /// Source of a method from outside this program. Empty: the method is one of ours.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub method_source: String,
    /// What a run under privacy claims, and whether its ε is nominal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub privacy: Option<String>,
    /// Whether nodes of a federation trained the clients. A federation decides who takes part and measures its traffic, so
    /// [`verify`](super::verify()) takes both as recorded.
    #[serde(default)]
    pub federated: bool,
    /// What the run was before it was extended, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extended: Option<Extended>,
    /// Hashes of a finished run's files, by name; empty in unfinished runs and in those of earlier versions.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub seal: BTreeMap<String, String>,
}

/// Largest number of clients whose classes a manifest counts; there may be a million.
const N_CLIENTS_COUNTED: usize = 200;

impl Manifest {
    /// The manifest of a run directory; `None` if the directory has none.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join("manifest.json");
        let Some(text) = read_if_exists(&path)? else { return Ok(None) };
        serde_json::from_slice(&text).map(Some).map_err(Error::corrupt(&path))
    }

    /// Whether it is that of a finished run, made by a version that seals runs.
    pub fn is_sealed(&self) -> bool {
        !self.seal.is_empty()
    }

    /// Writes it, one line per key: one per number would fill pages with counts of classes.
    pub(super) fn write(&self, dir: &Path) -> Result<()> {
        let value = serde_json::to_value(self).map_err(Error::internal("writing a manifest"))?;
        let keys = value.as_object().into_iter().flatten();
        let lines: Vec<String> = keys.map(|(key, value)| format!("  \"{key}\": {value}")).collect();
        write_atomically(&dir.join("manifest.json"), format!("{{\n{}\n}}\n", lines.join(",\n")).as_bytes())
    }

    /// What a run of this experiment is made of.
    pub fn of(experiment: &Experiment, device: impl Into<Device>) -> Self {
        let device = device.into();
        let e = experiment;
        let mut partition = blake3::Hasher::new();
        // Their rule identifies a million virtual clients; hashing each would cost more than the run.
        let n_hashed = e.partition.n_clients().min(10_000);
        for client in 0..n_hashed {
            let indices = e.partition.indices(client);
            partition.update(&(indices.len() as u64).to_le_bytes());
            for i in indices.iter() {
                partition.update(&i.to_le_bytes());
            }
        }
        let starts = (0..e.n_groups()).map(|group| e.group(group)).flat_map(|of| [&of.weights[..], &of.buffers]);
        let text = |s: &str| s.to_owned();
        let mut hashes = BTreeMap::from([
            (text("private"), e.private.hash()),
            (text("test"), e.test.hash()),
            (text("partition"), partition.finalize().to_hex().to_string()),
            (text("initial_model"), crate::coordinator::hash_of(starts)),
        ]);
        if let Some(method) = &e.config.method.external {
            hashes.insert(text("method"), method.hash.clone());
        }
        if let Some(public) = &e.public {
            hashes.insert(text("public"), public.hash());
        }
        let mut hardware = BTreeMap::from([
            (text("isa"), text(Isa::detect().name())),
            (text("threads"), device.n_threads().to_string()),
            (text("os"), text(std::env::consts::OS)),
            (text("arch"), text(std::env::consts::ARCH)),
        ]);
        if let Some(gpu) = device.gpu_name() {
            hardware.insert(text("gpu"), gpu);
        }
        let n_clients = e.partition.n_clients();
        let mut sizes = BTreeMap::from([
            (text("clients"), n_clients),
            (text("cohort"), e.config.federation.cohort(n_clients)),
            (text("private_samples"), e.private.n_samples()),
            (text("test_samples"), e.test.n_samples()),
            (text("public_samples"), e.n_public()),
            (text("parameters"), e.weights.len()),
        ]);
        if let Some(scale) = e.config.federation.scale(n_clients) {
            sizes.insert(text("sum_scale_bits"), scale.bits() as usize);
        }
        let sets = [("private", Some(&*e.private)), ("test", Some(&*e.test)), ("public", e.public.as_deref())];
        let truncated =
            sets.iter().filter_map(|(name, data)| Some((format!("{name}_truncated"), data.as_ref()?.n_truncated())));
        let shared = [(text("public_in_test"), e.n_public_in_test)];
        sizes.extend(truncated.chain(shared).filter(|(_, n)| *n > 0));
        let (labels, n_classes) = (e.private.labels().unwrap_or(&[]), e.private.n_classes());
        let counted = 0..if e.config.privacy.is_on() { 0 } else { n_clients.min(N_CLIENTS_COUNTED) };
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            seed: e.config.seed,
            hardware,
            hashes,
            sizes,
            classes: e.private.class_names().to_vec(),
            class_counts: counted.map(|client| e.partition.class_counts(client, labels, n_classes)).collect(),
            method_source: e.config.method.external.as_ref().and_then(External::source).unwrap_or_default(),
            privacy: e.config.privacy.statement(),
            federated: false,
            extended: None,
            seal: BTreeMap::new(),
        }
    }
}

/// A run resumes, and is verified, on the device that began it: devices and precisions agree only up to rounding.
pub(super) fn check_gpu(dir: &Path, now: Option<&String>) -> Result<()> {
    let Some(manifest) = Manifest::read(dir)? else { return Ok(()) };
    let begun = manifest.hardware.get("gpu");
    if begun == now {
        return Ok(());
    }
    let name = |gpu: Option<&String>| gpu.cloned().unwrap_or_else(|| "the CPU".into());
    let hint = match begun.and_then(|gpu| gpu.rsplit_once(", ")) {
        Some((_, precision)) => format!("--device cuda --precision {precision}, on such a GPU"),
        None => "--device cpu".into(),
    };
    Err(Error::config(format!(
        "the run in `{}` was begun on {}; on {} its numbers would differ\nhint: {hint}",
        dir.display(),
        name(begun),
        name(now)
    )))
}
