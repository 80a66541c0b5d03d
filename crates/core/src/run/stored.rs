//! Finished runs, and the files of a run directory.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::record::{RoundRecord, Summary};
use std::collections::{BTreeMap, BTreeSet};
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

    /// A label per run that says what, besides the seed, sets it apart: the method, and the keys in which runs of the same
    /// method differ.
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

/// The rounds stored in a run directory; with `n_rounds`, exactly the first `n_rounds`.
pub(super) fn read_metrics(dir: &Path, n_rounds: Option<u32>) -> Result<Vec<RoundRecord>> {
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
