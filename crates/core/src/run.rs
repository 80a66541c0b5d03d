//! Run directories: configuration, manifest, metrics and checkpoints on disk, in an order that survives `kill −9`.
//!
//! A round's line is appended to `metrics.jsonl` and synced before its checkpoint is written; a run that was killed goes on
//! from its last checkpoint, drops later lines and makes them again, bit for bit.

use crate::checkpoint::{self, write_atomically};
use crate::config::{Config, FederationConfig};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::fusion::ServerState;
use crate::record::{RoundRecord, Summary};
use crate::shards;
use crate::simulate::{Progress, Simulation};
use fedproj_nn::Isa;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// What a run was made of and on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of this software.
    pub version: String,
    /// The seed.
    pub seed: u64,
    /// Instruction set, threads, operating system and architecture.
    pub hardware: BTreeMap<String, String>,
    /// BLAKE3 of private, test and public data, of the partition and of the initial weights.
    pub hashes: BTreeMap<String, String>,
    /// Sizes: clients, cohort, samples, parameters; texts that were cut, if any.
    pub sizes: BTreeMap<String, usize>,
    /// Names of the classes; empty in runs of earlier versions.
    #[serde(default)]
    pub classes: Vec<String>,
    /// Samples of each class that the first clients hold, client by client; empty in runs of earlier versions.
    #[serde(default)]
    pub class_counts: Vec<Vec<u32>>,
}

/// Clients whose classes a manifest counts; there may be a million.
const N_CLIENTS_COUNTED: usize = 200;

impl Manifest {
    /// The manifest of a run directory; `None` if the directory has none.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join("manifest.json");
        match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io("read", &path)(error)),
            Ok(text) => {
                serde_json::from_str(&text).map(Some).map_err(|e| Error::Corrupt { path, problem: e.to_string() })
            }
        }
    }

    /// One key a line: the counts of classes would fill pages if every number had its own.
    fn to_json(&self) -> String {
        let Ok(serde_json::Value::Object(keys)) = serde_json::to_value(self) else { return String::new() };
        let lines: Vec<String> = keys.iter().map(|(key, value)| format!("  \"{key}\": {value}")).collect();
        format!("{{\n{}\n}}\n", lines.join(",\n"))
    }

    /// What a run of this experiment is made of.
    pub fn of(experiment: &Experiment, device: impl Into<Device>) -> Self {
        let device = device.into();
        let e = experiment;
        let mut partition = blake3::Hasher::new();
        // A million virtual clients are told by their rule; hashing each would cost more than the run.
        let n_hashed = e.partition.n_clients().min(10_000);
        for client in 0..n_hashed {
            let indices = e.partition.indices(client);
            partition.update(&(indices.len() as u64).to_le_bytes());
            for i in indices.iter() {
                partition.update(&i.to_le_bytes());
            }
        }
        let text = |s: &str| s.to_owned();
        let mut hashes = BTreeMap::from([
            (text("private"), e.private.hash()),
            (text("test"), e.test.hash()),
            (text("partition"), partition.finalize().to_hex().to_string()),
            (text("initial_model"), crate::model_hash(&e.weights, &e.buffers)),
        ]);
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
            (text("public_samples"), e.public.as_ref().map_or(0, fedproj_data::Dataset::n_samples)),
            (text("parameters"), e.weights.len()),
        ]);
        let sets = [("private", Some(&e.private)), ("test", Some(&e.test)), ("public", e.public.as_ref())];
        let truncated =
            sets.iter().filter_map(|(name, data)| Some((format!("{name}_truncated"), data.as_ref()?.n_truncated())));
        sizes.extend(truncated.filter(|(_, n)| *n > 0));
        let (labels, n_classes) = (e.private.labels().unwrap_or(&[]), e.private.n_classes());
        let counted = 0..n_clients.min(N_CLIENTS_COUNTED);
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            seed: e.config.seed,
            hardware,
            hashes,
            sizes,
            classes: e.private.class_names().to_vec(),
            class_counts: counted.map(|client| e.partition.class_counts(client, labels, n_classes)).collect(),
        }
    }
}

/// A run directory that is being written, by the simulator or by a server.
#[derive(Debug)]
pub struct RunDir {
    dir: PathBuf,
    rounds: Vec<RoundRecord>,
    metrics: File,
    config_hash: String,
    /// Held while the run lives, so that no second process writes here.
    _lock: File,
}

impl RunDir {
    /// The outcome of a finished run with this configuration, if the directory holds one.
    ///
    /// # Errors
    /// If the directory holds a run of another configuration, finished or not.
    pub fn finished(dir: &Path, config: &Config) -> Result<Option<Summary>> {
        if dir.join("config.toml").exists() {
            check_config(dir, config)?;
        }
        if dir.join("summary.json").exists() { read_summary(dir).map(Some) } else { Ok(None) }
    }

    /// Makes a directory for a run, or opens the one of an unfinished run, with the state of its newest checkpoint:
    /// `resume` says whether such a run is welcome.
    ///
    /// # Errors
    /// If the directory is in use, holds another run, or cannot be written.
    pub fn open(
        dir: &Path,
        experiment: &Experiment,
        device: impl Into<Device>,
        resume: bool,
    ) -> Result<(Self, Option<ServerState>)> {
        let (config, device) = (&experiment.config, device.into());
        let exists = dir.join("config.toml").exists();
        if exists {
            check_config(dir, config)?;
            check_device(dir, &device)?;
            if !resume {
                return Err(Error::config(format!(
                    "`{}` holds an unfinished run of this configuration; go on with --resume, or choose another --out",
                    dir.display()
                )));
            }
        }
        std::fs::create_dir_all(dir.join("checkpoints")).map_err(Error::io("create", dir))?;
        let lock = lock(dir)?;
        let text = if exists { config_text(dir)? } else { config.to_toml()? };
        let config_hash = hash_of(&text);
        let newest = if exists { checkpoints(dir)?.pop() } else { None };
        let state = newest.map(|(_, path)| checkpoint::load(&path, &config_hash)).transpose()?;
        let rounds = match &state {
            Some(state) => read_metrics(dir, Some(state.n_rounds_done))?,
            None => Vec::new(),
        };
        if !exists {
            // The configuration comes last: where it stands, the manifest stands too.
            write_atomically(&dir.join("manifest.json"), Manifest::of(experiment, device).to_json().as_bytes())?;
            write_atomically(&dir.join("config.toml"), text.as_bytes())?;
        }
        // Lines after the checkpoint, or half a line that a crash left, are dropped here.
        let lines: String = rounds.iter().map(|r| line_of(r) + "\n").collect();
        let path = dir.join("metrics.jsonl");
        write_atomically(&path, lines.as_bytes())?;
        let metrics = OpenOptions::new().append(true).open(&path).map_err(Error::io("open", &path))?;
        Ok((Self { dir: dir.into(), rounds, metrics, config_hash, _lock: lock }, state))
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Rounds that are done.
    pub fn rounds(&self) -> &[RoundRecord] {
        &self.rounds
    }

    /// Puts a round on disk: its line, then a checkpoint where one is due.
    ///
    /// # Errors
    /// If the disk is full; what was on disk before stays.
    pub fn record(&mut self, record: RoundRecord, state: &ServerState, federation: &FederationConfig) -> Result<()> {
        let path = self.dir.join("metrics.jsonl");
        let mut append = || -> std::io::Result<()> {
            self.metrics.write_all((line_of(&record) + "\n").as_bytes())?;
            self.metrics.sync_data()
        };
        append().map_err(Error::io("append to", &path))?;
        let done = record.round + 1;
        if done.is_multiple_of(federation.checkpoint_every) || done >= federation.rounds {
            self.checkpoint(state)?;
        }
        self.rounds.push(record);
        Ok(())
    }

    /// Writes a checkpoint and removes all but the newest two.
    fn checkpoint(&self, state: &ServerState) -> Result<()> {
        let folder = self.dir.join("checkpoints");
        let path = folder.join(format!("round-{:06}.ckpt", state.n_rounds_done));
        checkpoint::save(&path, state, &self.config_hash, checkpoint::SHARD_BYTES_MAX)?;
        let all: Vec<PathBuf> = checkpoints(&self.dir)?.into_iter().map(|(_, path)| path).collect();
        shards::retain(&folder, "round-", &all[all.len().saturating_sub(2)..])
    }

    /// Writes what a finished run leaves: `metrics.csv`, the final model and `summary.json`.
    ///
    /// # Errors
    /// If the disk is full.
    pub fn finish(&self, experiment: &Experiment, state: &ServerState) -> Result<Summary> {
        let config = &experiment.config;
        let csv: String = self.rounds.iter().map(|r| r.to_csv() + "\n").collect();
        write_atomically(&self.dir.join("metrics.csv"), format!("{}\n{csv}", RoundRecord::CSV_HEADER).as_bytes())?;
        let path = self.dir.join("model.safetensors");
        fedproj_nn::weights::save(&path, &experiment.graph, &state.weights, &state.buffers)?;
        let cohort = config.federation.cohort(experiment.partition.n_clients());
        let summary = Summary::of(&config.method.name, config.seed, &config.federation, cohort, &self.rounds);
        let text = serde_json::to_string_pretty(&summary).unwrap_or_default();
        write_atomically(&self.dir.join("summary.json"), text.as_bytes())?;
        Ok(summary)
    }
}

/// A simulated run and its directory.
#[derive(Debug)]
pub struct Run {
    directory: RunDir,
    simulation: Simulation,
}

impl Run {
    /// As [`RunDir::finished`].
    ///
    /// # Errors
    /// If the directory holds a run of another configuration.
    pub fn finished(dir: &Path, config: &Config) -> Result<Option<Summary>> {
        RunDir::finished(dir, config)
    }

    /// Starts a run, or goes on with one: `resume` says whether a directory with an unfinished run is welcome.
    ///
    /// # Errors
    /// If the directory is in use, holds another run, or cannot be written.
    pub fn open(
        dir: &Path,
        config: &Config,
        data_dir: Option<&Path>,
        device: impl Into<Device>,
        resume: bool,
    ) -> Result<Self> {
        let device = device.into();
        let method = config.method.build()?;
        let experiment = Experiment::load(config.clone(), method.as_ref(), data_dir)?;
        let (directory, state) = RunDir::open(dir, &experiment, device.clone(), resume)?;
        let simulation = match state {
            Some(state) => Simulation::resume(experiment, method, device, state)?,
            None => Simulation::new(experiment, method, device)?,
        };
        Ok(Self { directory, simulation })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        self.directory.dir()
    }

    /// Rounds that are done.
    pub fn rounds(&self) -> &[RoundRecord] {
        self.directory.rounds()
    }

    /// The simulation.
    pub fn simulation(&self) -> &Simulation {
        &self.simulation
    }

    /// Runs one round and puts it on disk; `None` when all are done.
    ///
    /// # Errors
    /// If the round fails or the disk is full; what was on disk before stays.
    pub fn round(&mut self, progress: &(dyn Fn(Progress) + Sync)) -> Result<Option<&RoundRecord>> {
        if self.simulation.is_done() {
            return Ok(None);
        }
        let record = self.simulation.round(progress)?;
        let federation = &self.simulation.experiment().config.federation;
        self.directory.record(record, self.simulation.state(), federation)?;
        Ok(self.rounds().last())
    }

    /// Puts the rounds that are done into a checkpoint, whatever `federation.checkpoint_every` says: before a stop.
    ///
    /// # Errors
    /// If the disk is full.
    pub fn save(&self) -> Result<()> {
        if self.rounds().is_empty() { Ok(()) } else { self.directory.checkpoint(self.simulation.state()) }
    }

    /// As [`RunDir::finish`].
    ///
    /// # Errors
    /// If the disk is full.
    pub fn finish(&self) -> Result<Summary> {
        self.directory.finish(self.simulation.experiment(), self.simulation.state())
    }
}

/// A finished run as its directory tells it.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredRun {
    /// The directory.
    pub dir: PathBuf,
    /// Its configuration.
    pub config: Config,
    /// Its outcome.
    pub summary: Summary,
    /// Its rounds.
    pub rounds: Vec<RoundRecord>,
}

impl StoredRun {
    /// Reads a finished run.
    ///
    /// # Errors
    /// If a file is missing or does not hold what it should.
    pub fn open(dir: &Path) -> Result<Self> {
        let (config, summary) = (read_config(dir)?, read_summary(dir)?);
        Ok(Self { dir: dir.into(), config, summary, rounds: read_metrics(dir, None)? })
    }

    /// All finished runs at or below a path, in the order of their names.
    ///
    /// # Errors
    /// If a directory cannot be read.
    pub fn find(path: &Path) -> Result<Vec<Self>> {
        if path.join("summary.json").exists() {
            return Ok(vec![Self::open(path)?]);
        }
        let entries = std::fs::read_dir(path).map_err(Error::io("list", path))?;
        let mut folders: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).filter(|p| p.is_dir()).collect();
        folders.sort();
        let mut runs = Vec::new();
        for folder in folders {
            runs.extend(Self::find(&folder)?);
        }
        Ok(runs)
    }

    /// What tells each of some runs from the others besides the seed: the method, and the keys in which runs of one method
    /// differ.
    pub fn labels(runs: &[Self]) -> Vec<String> {
        let all: Vec<BTreeMap<String, String>> = runs.iter().map(|run| run.config.keys_in_use()).collect();
        let differs = |key: &String| {
            let pairs = runs.iter().zip(&all);
            pairs.clone().any(|(a, keys_a)| {
                let same_method = |b: &Self| a.config.method.name == b.config.method.name;
                pairs.clone().any(|(b, keys_b)| same_method(b) && keys_a.get(key) != keys_b.get(key))
            })
        };
        let keys: BTreeSet<&String> = all.iter().flat_map(BTreeMap::keys).filter(|key| *key != "seed").collect();
        let differing: Vec<&String> = keys.into_iter().filter(|key| differs(key)).collect();
        let label = |(run, keys): (&Self, &BTreeMap<String, String>)| {
            let rest = differing.iter().filter_map(|key| Some(format!(" {key}={}", keys.get(*key)?)));
            run.config.method.name.clone() + &rest.collect::<String>()
        };
        runs.iter().zip(&all).map(label).collect()
    }
}

fn read_summary(dir: &Path) -> Result<Summary> {
    let path = dir.join("summary.json");
    let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    serde_json::from_str(&text).map_err(|e| Error::Corrupt { path, problem: e.to_string() })
}

fn read_config(dir: &Path) -> Result<Config> {
    toml::from_str(&config_text(dir)?)
        .map_err(|e| Error::Corrupt { path: dir.join("config.toml"), problem: e.to_string() })
}

fn config_text(dir: &Path) -> Result<String> {
    let path = dir.join("config.toml");
    std::fs::read_to_string(&path).map_err(Error::io("read", &path))
}

/// What ties checkpoints to a configuration: the text on disk, so that a later version with more keys still reads them.
fn hash_of(config_text: &str) -> String {
    blake3::hash(config_text.as_bytes()).to_hex().to_string()
}

/// The rounds stored in a run directory; with `n_rounds`, exactly the first that many.
fn read_metrics(dir: &Path, n_rounds: Option<u32>) -> Result<Vec<RoundRecord>> {
    let path = dir.join("metrics.jsonl");
    let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let mut rounds = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if n_rounds.is_some_and(|n| at >= n as usize) {
            break;
        }
        let record: RoundRecord = serde_json::from_str(line)
            .map_err(|e| Error::Corrupt { path: path.clone(), problem: format!("line {}: {e}", at + 1) })?;
        rounds.push(record);
    }
    match n_rounds {
        Some(n) if rounds.len() != n as usize => {
            let problem = format!("holds {} rounds, but the checkpoint is of round {n}", rounds.len());
            Err(Error::Corrupt { path, problem })
        }
        _ => Ok(rounds),
    }
}

fn check_config(dir: &Path, config: &Config) -> Result<()> {
    if read_config(dir)? == *config {
        return Ok(());
    }
    Err(Error::config(format!(
        "`{}` holds a run of another configuration; choose another directory with --out",
        dir.display()
    )))
}

fn line_of(record: &RoundRecord) -> String {
    serde_json::to_string(record).unwrap_or_default()
}

/// Checkpoints of a run, oldest first, by the number of rounds done.
fn checkpoints(dir: &Path) -> Result<Vec<(u32, PathBuf)>> {
    let folder = dir.join("checkpoints");
    let entries = std::fs::read_dir(&folder).map_err(Error::io("list", &folder))?;
    let mut all: Vec<(u32, PathBuf)> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let stem = path.file_name()?.to_str()?.strip_prefix("round-")?.strip_suffix(".ckpt")?;
            Some((stem.parse().ok()?, path))
        })
        .collect();
    all.sort();
    Ok(all)
}

/// An exclusive lock on the run directory, given back when the file is closed, however the process ends.
fn lock(dir: &Path) -> Result<File> {
    let path = dir.join(".lock");
    let file = File::create(&path).map_err(Error::io("create", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(Error::Locked(dir.into())),
        Err(std::fs::TryLockError::Error(source)) => Err(Error::Io { action: "lock", path, source }),
    }
}

/// What [`verify`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// First round that was run again.
    pub from: u32,
    /// Rounds compared.
    pub n_rounds: u32,
}

/// A run goes on, and is verified, where it was begun: a GPU and a CPU agree to rounding only, and so do two precisions.
fn check_device(dir: &Path, device: &Device) -> Result<()> {
    let Some(manifest) = Manifest::read(dir)? else { return Ok(()) };
    let (begun, now) = (manifest.hardware.get("gpu").cloned(), device.gpu_name());
    if begun == now {
        return Ok(());
    }
    let name = |gpu: &Option<String>| gpu.clone().unwrap_or_else(|| "the CPU".into());
    let hint = match begun.as_deref().and_then(|gpu| gpu.rsplit_once(", ")) {
        Some((_, precision)) => format!("--device cuda --precision {precision}, on such a GPU"),
        None => "--device cpu".into(),
    };
    Err(Error::config(format!(
        "the run in `{}` was begun on {}, and on {} its numbers would differ\nhint: {hint}",
        dir.display(),
        name(&begun),
        name(&now)
    )))
}

/// Which rounds [`verify`] repeats; by default all.
#[derive(Clone, Copy, Debug, Default)]
pub struct VerifyPart {
    /// Starts from the oldest checkpoint that is still there, not from the beginning.
    pub from_checkpoint: bool,
    /// At most so many rounds.
    pub rounds: Option<u32>,
}

/// Runs a recorded run again, or a part of it, and compares every round's model hash.
///
/// # Errors
/// [`Error::Differs`] at the first round that is not the same; or if the run cannot be read.
pub fn verify(
    dir: &Path,
    data_dir: Option<&Path>,
    device: impl Into<Device>,
    part: VerifyPart,
    progress: &(dyn Fn(u32) + Sync),
) -> Result<Verified> {
    let device = device.into();
    check_device(dir, &device)?;
    let config = read_config(dir)?;
    let method = config.method.build()?;
    let recorded = read_metrics(dir, None)?;
    let hash = hash_of(&config_text(dir)?);
    let experiment = Experiment::load(config, method.as_ref(), data_dir)?;
    let oldest = if part.from_checkpoint { checkpoints(dir)?.into_iter().next() } else { None };
    let mut simulation = match oldest {
        Some((_, path)) => Simulation::resume(experiment, method, device, checkpoint::load(&path, &hash)?)?,
        None => Simulation::new(experiment, method, device)?,
    };
    let from = simulation.state().n_rounds_done;
    let most = part.rounds.map_or(usize::MAX, |n| n as usize);
    let repeated = recorded.iter().skip(from as usize).take(most);
    let n_rounds = repeated.len() as u32;
    for expected in repeated {
        // The recorded clients, not those that the seed draws: in a real federation some may have been late.
        let found = simulation.round_of(&expected.cohort, &|_| ())?;
        progress(found.round);
        if found.model_hash != expected.model_hash {
            let (expected, found_hash) = (expected.model_hash.clone(), found.model_hash);
            return Err(Error::Differs { round: found.round, expected, found: found_hash });
        }
    }
    Ok(Verified { from, n_rounds })
}
