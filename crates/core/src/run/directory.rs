//! A run directory that is being written.

use super::manifest::{Manifest, check_gpu};
use super::seal;
use super::stored::{config_text, hash_of, metrics_text, read_config, read_metrics, read_summary};
use crate::checkpoint;
use crate::config::{Config, FederationConfig};
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::files::write_atomically;
use crate::fusion::ServerState;
use crate::record::{RoundRecord, Summary};
use crate::trainer::ClientStates;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A run directory that is being written, by the simulator or by a server.
#[derive(Debug)]
pub struct RunDir {
    dir: PathBuf,
    rounds: Vec<RoundRecord>,
    metrics: File,
    config_hash: String,
    /// Checkpoints that are kept.
    n_checkpoints: usize,
    /// Held as long as the run lives, so that no second process writes here.
    _lock: File,
}

impl RunDir {
    /// The summary of a finished run with this configuration, if the directory holds one.
    ///
    /// # Errors
    /// If the directory holds a run of another configuration, finished or not, or a run that does not match its seal.
    pub fn finished(dir: &Path, config: &Config) -> Result<Option<Summary>> {
        if dir.join("config.toml").exists() {
            check_config(dir, config)?;
        }
        if !dir.join("summary.json").exists() {
            return Ok(None);
        }
        seal::check(dir)?;
        read_summary(dir).map(Some)
    }

    /// Makes a directory for a run with this manifest. If it holds an unfinished run and `resume` is set, opens that run
    /// with the state of its newest checkpoint.
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
        if exists {
            check_config(dir, config)?;
            check_gpu(dir, manifest.hardware.get("gpu"))?;
            if !resume {
                return Err(Error::config(format!(
                    "`{}` holds an unfinished run of this configuration; resume it with --resume, or choose another --out",
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
            Some((state, _)) => read_metrics(dir, Some(state.n_rounds_done))?,
            None => Vec::new(),
        };
        if !exists {
            // The configuration comes last: where it is, the manifest is too.
            manifest.write(dir)?;
            write_atomically(&dir.join("config.toml"), text.as_bytes())?;
        } else if let (false, Some(begun)) = (dir.join("summary.json").exists(), Manifest::read(dir)?) {
            // An unfinished run has no seal: its files will change.
            Manifest { federated: manifest.federated, seal: BTreeMap::new(), ..begun }.write(dir)?;
        }
        // Drops the lines after the checkpoint, and half a line that a crash left. The others keep their bytes: a finished
        // run's are sealed.
        let path = dir.join("metrics.jsonl");
        let text = if rounds.is_empty() { String::new() } else { metrics_text(dir)? };
        let kept: String = text.lines().take(rounds.len()).flat_map(|line| [line, "\n"]).collect();
        write_atomically(&path, kept.as_bytes())?;
        let metrics = OpenOptions::new().append(true).open(&path).map_err(Error::io("open", &path))?;
        Ok((Self { dir: dir.into(), rounds, metrics, config_hash, n_checkpoints: 2, _lock: lock }, state))
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
        let (path, line) = (self.dir.join("metrics.jsonl"), line_of(&record)?);
        let mut append = || -> std::io::Result<()> {
            self.metrics.write_all(line.as_bytes())?;
            self.metrics.sync_data()
        };
        append().map_err(Error::io("append to", &path))?;
        let done = record.round + 1;
        if done.is_multiple_of(federation.checkpoint_every) || done >= federation.rounds {
            self.checkpoint(state, clients)?;
        }
        self.rounds.push(record);
        Ok(())
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
        let (path, model) = (self.dir.join("model.safetensors"), state.published());
        let bytes = fedproj_nn::weights::to_bytes(&path, &experiment.graph, model.weights, model.buffers)?;
        write_atomically(&path, &bytes)?;
        let cohort = config.federation.cohort(experiment.partition.n_clients());
        let summary = Summary::of(&config.method.name, config.seed, &config.federation, cohort, &self.rounds);
        let text = serde_json::to_string_pretty(&summary).map_err(Error::internal("writing the summary"))?;
        if let Some(manifest) = Manifest::read(&self.dir)? {
            seal::seal(&self.dir, manifest, &text)?.write(&self.dir)?;
        }
        write_atomically(&self.dir.join("summary.json"), text.as_bytes())?;
        Ok(summary)
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

/// An exclusive lock on the run directory. It ends with the process, however that ends.
pub(super) fn lock(dir: &Path) -> Result<File> {
    let path = dir.join(".lock");
    let file = File::create(&path).map_err(Error::io("create", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(Error::Locked(dir.into())),
        Err(std::fs::TryLockError::Error(source)) => Err(Error::Io { action: "lock", path, source }),
    }
}
