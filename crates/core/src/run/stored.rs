//! Finished runs, and the files of a run directory.

use super::seal;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::record::{RoundRecord, Summary};
use std::path::{Path, PathBuf};

/// A finished run, read from its directory.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredRun {
    /// The directory.
    pub dir: PathBuf,
    /// Its configuration.
    pub config: Config,
    /// Its summary.
    pub summary: Summary,
    /// Its rounds.
    pub rounds: Vec<RoundRecord>,
}

impl StoredRun {
    /// Reads a finished run.
    ///
    /// # Errors
    /// If a file is missing, does not hold what it should, or does not match the run's seal.
    pub fn open(dir: &Path) -> Result<Self> {
        seal::check(dir)?;
        let (config, summary) = (read_config(dir)?, read_summary(dir)?);
        Ok(Self { dir: dir.into(), config, summary, rounds: read_metrics(dir, None)? })
    }
}

pub(super) fn read_summary(dir: &Path) -> Result<Summary> {
    let path = dir.join("summary.json");
    let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    serde_json::from_str(&text).map_err(|e| Error::Corrupt { path, problem: e.to_string() })
}

pub(super) fn read_config(dir: &Path) -> Result<Config> {
    Config::from_toml(&config_text(dir)?)
        .map_err(|e| Error::Corrupt { path: dir.join("config.toml"), problem: e.to_string() })
}

pub(super) fn config_text(dir: &Path) -> Result<String> {
    let path = dir.join("config.toml");
    std::fs::read_to_string(&path).map_err(Error::io("read", &path))
}

/// What ties checkpoints to a configuration: the text on disk, so that a later version with other keys still reads them.
pub(super) fn hash_of(config_text: &str) -> String {
    blake3::hash(config_text.as_bytes()).to_hex().to_string()
}

pub(super) fn metrics_text(dir: &Path) -> Result<String> {
    let path = dir.join("metrics.jsonl");
    std::fs::read_to_string(&path).map_err(Error::io("read", &path))
}

/// The rounds stored in a run directory; with `n_rounds`, exactly the first `n_rounds`.
pub(super) fn read_metrics(dir: &Path, n_rounds: Option<u32>) -> Result<Vec<RoundRecord>> {
    let (path, text) = (dir.join("metrics.jsonl"), metrics_text(dir)?);
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
