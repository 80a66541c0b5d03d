//! A run directory that is being written.

use super::extend::{Extended, config_for, forget_evaluation};
use super::manifest::{Manifest, check_gpu};
use super::seal;
use super::stored::{config_hash, metrics_text, read_config, read_metrics, read_summary};
use crate::checkpoint;
use crate::config::{Config, FederationConfig};
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::files::{read_if_exists, remove_if_exists, write_atomically};
use crate::fusion::ServerState;
use crate::record::{RoundRecord, Summary};
use crate::trainer::ClientStates;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Locked while a process writes to the directory.
const LOCK: &str = ".lock";

/// One line per release of a run under privacy. Unlike the metrics it never shrinks: what was released stays released.
const RELEASES: &str = "releases.log";

/// A run directory that is being written, by the simulator or by a server.
#[derive(Debug)]
pub struct RunDir {
    dir: PathBuf,
    rounds: Vec<RoundRecord>,
    metrics: File,
    config_hash: String,
    /// Checkpoints that are kept.
    n_checkpoints: usize,
    notes: Vec<String>,
    /// Held as long as the run lives, so that no second process writes here.
    _lock: File,
}

impl RunDir {
    /// The summary of a finished run with this configuration, if the directory holds one. A run of fewer rounds is not
    /// finished: it can be extended.
    ///
    /// # Errors
    /// If the directory holds a run of another configuration, finished or not, or a run that does not match its seal.
    pub fn finished(dir: &Path, config: &Config) -> Result<Option<Summary>> {
        let config = config_for(dir, config)?;
        if !dir.join("summary.json").exists() || read_config(dir)? != config {
            return Ok(None);
        }
        seal::check(dir)?;
        read_summary(dir).map(Some)
    }

    /// Whether the directory holds a run that this configuration resumes or extends.
    pub fn holds(dir: &Path, config: &Config) -> bool {
        dir.join("config.toml").exists() && config_for(dir, config).is_ok()
    }

    /// Whether a process makes the run in a directory, and the machine and process that make it, or made it last.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn holder(dir: &Path) -> Result<(bool, String)> {
        let path = dir.join(LOCK);
        let Some(name) = read_if_exists(&path)? else { return Ok((false, String::new())) };
        let file = File::open(&path).map_err(Error::io("open", &path))?;
        let is_held = matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock));
        Ok((is_held, String::from_utf8_lossy(&name).into_owned()))
    }

    /// Makes a directory for a run with this manifest. If it holds an unfinished run, or one of fewer rounds, and `resume`
    /// is set, opens that run with the state of its newest checkpoint that is whole.
    ///
    /// # Errors
    /// If the directory is in use, holds another run, or cannot be written.
    pub fn open(
        dir: &Path,
        config: &Config,
        manifest: &Manifest,
        resume: bool,
    ) -> Result<(Self, Option<(ServerState, ClientStates)>)> {
        let exists = dir.join("config.toml").exists();
        let config = &config_for(dir, config)?;
        if exists {
            check_gpu(dir, manifest.hardware.get("gpu"))?;
            if !resume {
                return Err(Error::config(format!(
                    "`{}` holds an unfinished run of this configuration, or one of fewer rounds; continue it with --resume, \
                     or choose another --out",
                    dir.display()
                )));
            }
        }
        std::fs::create_dir_all(dir.join("checkpoints")).map_err(Error::io("create", dir))?;
        let (lock, mut notes) = (lock(dir)?, Vec::new());
        let state = if exists { newest_state(dir, &mut notes)? } else { None };
        if !exists {
            // The configuration comes last: where it is, the manifest is too.
            manifest.write(dir)?;
            write_atomically(&dir.join("config.toml"), config.to_toml()?.as_bytes())?;
        } else if read_config(dir)? != *config {
            extend(dir, config, manifest)?;
        } else if let (false, Some(begun)) = (dir.join("summary.json").exists(), Manifest::read(dir)?) {
            // An unfinished run has no seal: its files will change.
            Manifest { federated: manifest.federated, seal: BTreeMap::new(), ..begun }.write(dir)?;
        }
        let rounds = keep_metrics(dir, state.as_ref().map_or(0, |(state, _)| state.n_rounds_done), &config.federation)?;
        let path = dir.join("metrics.jsonl");
        let metrics = OpenOptions::new().append(true).open(&path).map_err(Error::io("open", &path))?;
        let config_hash = config_hash(dir)?;
        Ok((Self { dir: dir.into(), rounds, metrics, config_hash, n_checkpoints: 2, notes, _lock: lock }, state))
    }

    /// What a user should know about the run's files.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Keeps more than the newest two checkpoints, for [`rollback`](super::rollback()).
    pub fn keep_checkpoints(&mut self, n: usize) {
        self.n_checkpoints = n.max(2);
    }

    /// Completed rounds.
    pub fn rounds(&self) -> &[RoundRecord] {
        &self.rounds
    }

    /// Writes a round: its line, then a checkpoint where one is due.
    ///
    /// # Errors
    /// If the disk is full; what was on disk before stays.
    pub fn record(
        &mut self,
        record: RoundRecord,
        state: &ServerState,
        clients: &ClientStates,
        federation: &FederationConfig,
    ) -> Result<()> {
        if let Some(spent) = record.privacy.as_ref().filter(|spent| !spent.nominal) {
            let path = self.dir.join(RELEASES);
            let opened = OpenOptions::new().append(true).create(true).open(&path);
            let mut log = opened.map_err(Error::io("open", &path))?;
            append(&mut log, &path, &format!("round {}, epsilon {}\n", record.round, spent.epsilon))?;
        }
        append(&mut self.metrics, &self.dir.join("metrics.jsonl"), &line_of(&record)?)?;
        if federation.saves(record.round) {
            self.checkpoint(state, clients)?;
        }
        self.rounds.push(record);
        Ok(())
    }

    /// Releases of noised sums that a crash lost: their rounds are made again with other noise, and both count.
    ///
    /// # Errors
    /// If their log cannot be read.
    pub fn n_releases_lost(&self) -> Result<u32> {
        let log = read_if_exists(&self.dir.join(RELEASES))?.unwrap_or_default();
        let n_released = log.split(|byte| *byte == b'\n').count() - 1;
        Ok(n_released.saturating_sub(self.rounds.len()) as u32)
    }

    /// Writes a checkpoint and keeps the newest ones.
    pub(super) fn checkpoint(&self, state: &ServerState, clients: &ClientStates) -> Result<()> {
        let path = self.dir.join("checkpoints").join(format!("round-{:06}.ckpt", state.n_rounds_done));
        checkpoint::save(&path, state, clients, &self.config_hash)?;
        let all = checkpoints(&self.dir)?;
        for (_, path) in &all[..all.len().saturating_sub(self.n_checkpoints)] {
            std::fs::remove_file(path).map_err(Error::io("remove", path))?;
        }
        Ok(())
    }

    /// Writes the results of a finished run: `metrics.csv`, the final model, the manifest with the seal, and `summary.json`.
    ///
    /// # Errors
    /// If the disk is full.
    pub fn finish(&self, experiment: &Experiment, state: &ServerState) -> Result<Summary> {
        let config = &experiment.config;
        write_atomically(&self.dir.join("metrics.csv"), RoundRecord::csv(&self.rounds).as_bytes())?;
        for (group, state) in state.groups().enumerate() {
            let (path, model) = (self.dir.join(seal::model_file(group)), state.published());
            let graph = &experiment.group(group).graph;
            let bytes = fedproj_nn::weights::to_bytes(&path, graph, model.weights, model.buffers)?;
            write_atomically(&path, &bytes)?;
        }
        let cohort = config.federation.cohort(experiment.partition.n_clients());
        let summary = Summary::of(&config.method.name, config.seed, &config.federation, cohort, &self.rounds);
        let text = serde_json::to_string_pretty(&summary).map_err(Error::internal("writing the summary"))?;
        if let Some(manifest) = Manifest::read(&self.dir)? {
            seal::seal(&self.dir, experiment.n_groups(), manifest, &text)?.write(&self.dir)?;
        }
        write_atomically(&self.dir.join("summary.json"), text.as_bytes())?;
        Ok(summary)
    }
}

/// Appends a line and waits until it is on disk.
fn append(file: &mut File, path: &Path, line: &str) -> Result<()> {
    file.write_all(line.as_bytes()).and_then(|()| file.sync_data()).map_err(Error::io("append to", path))
}

/// Opens a run again for more rounds. The configuration comes last: until then the run is an unfinished one of the old
/// configuration, and then its checkpoints are known by the old configuration's hash.
fn extend(dir: &Path, config: &Config, manifest: &Manifest) -> Result<()> {
    let (old, path) = (read_config(dir)?, dir.join("summary.json"));
    remove_if_exists(&path)?;
    let begun = Manifest::read(dir)?.unwrap_or_else(|| manifest.clone());
    let rounds_at_first = begun.extended.as_ref().map_or(old.federation.rounds, |e| e.rounds_at_first);
    let extended = Some(Extended { rounds_at_first, config_hash: config_hash(dir)? });
    Manifest { extended, seal: BTreeMap::new(), ..begun }.write(dir)?;
    write_atomically(&dir.join("config.toml"), config.to_toml()?.as_bytes())
}

/// The state of the newest checkpoint that is whole. Damaged ones are set aside, as long as there is an older one.
fn newest_state(dir: &Path, notes: &mut Vec<String>) -> Result<Option<(ServerState, ClientStates)>> {
    let (hashes, mut all) = (config_hashes(dir)?, checkpoints(dir)?);
    while let Some((_, path)) = all.pop() {
        match checkpoint::load(&path, &hashes) {
            Err(Error::Corrupt { problem, .. }) if !all.is_empty() => {
                let aside = path.with_extension("ckpt.damaged");
                std::fs::rename(&path, &aside).map_err(Error::io("rename", &path))?;
                let (problem, aside) = (problem.lines().next().unwrap_or_default(), aside.display());
                notes.push(format!(
                    "`{}`: {problem}; it was set aside as `{aside}`, and the run resumes from the checkpoint before it",
                    path.display()
                ));
            }
            loaded => return loaded.map(Some),
        }
    }
    Ok(None)
}

/// The hashes that a run's checkpoints may carry: its configuration's, and that before an extension.
pub(super) fn config_hashes(dir: &Path) -> Result<Vec<String>> {
    let extended = Manifest::read(dir)?.and_then(|manifest| manifest.extended);
    Ok([config_hash(dir)?].into_iter().chain(extended.map(|e| e.config_hash)).collect())
}

/// Drops the lines after the checkpoint, and half a line that a crash left. The others keep their bytes: a finished run's are
/// sealed. Only an evaluation that an extension made superfluous goes.
fn keep_metrics(dir: &Path, n_rounds: u32, federation: &FederationConfig) -> Result<Vec<RoundRecord>> {
    let (mut rounds, mut kept) = (Vec::new(), String::new());
    if n_rounds > 0 {
        rounds = read_metrics(dir, Some(n_rounds))?;
        for (record, line) in rounds.iter_mut().zip(metrics_text(dir)?.lines()) {
            let line = if forget_evaluation(record, federation) { line_of(record)? } else { line.to_owned() + "\n" };
            kept += &line;
        }
    }
    write_atomically(&dir.join("metrics.jsonl"), kept.as_bytes())?;
    Ok(rounds)
}

/// A line of `metrics.jsonl`.
fn line_of(record: &RoundRecord) -> Result<String> {
    Ok(serde_json::to_string(record).map_err(Error::internal("writing a round's record"))? + "\n")
}

/// Checkpoints of a run, oldest first, by the number of rounds done.
pub(super) fn checkpoints(dir: &Path) -> Result<Vec<(u32, PathBuf)>> {
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

/// An exclusive lock on the run directory. It ends with the process, however that ends. Its file names the holder.
pub(super) fn lock(dir: &Path) -> Result<File> {
    let path = dir.join(LOCK);
    let options = OpenOptions::new().create(true).truncate(false).write(true).to_owned();
    let mut file = options.open(&path).map_err(Error::io("create", &path))?;
    // [`RunDir::holder`] holds it for a moment.
    let mut tries = 0..10;
    while let Err(error) = file.try_lock() {
        match error {
            TryLockError::Error(source) => return Err(Error::Io { action: "lock", path, source }),
            TryLockError::WouldBlock if tries.next().is_none() => return Err(Error::Locked(dir.into())),
            TryLockError::WouldBlock => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").ok().or_else(|| std::env::var("HOSTNAME").ok());
    let host = host.unwrap_or_else(|| "this machine".into());
    let named = file.set_len(0).and_then(|()| write!(file, "{}, process {}", host.trim(), std::process::id()));
    named.map_err(Error::io("write", &path))?;
    Ok(file)
}
