//! Finished runs, and the files of a run directory.

use super::manifest::Manifest;
use super::seal;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::files::read_if_exists;
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

    /// Reads a run that may be unfinished, as far as it is; the summary is of the rounds done. It may be written meanwhile.
    ///
    /// # Errors
    /// If a file is missing or does not hold what it should.
    pub fn so_far(dir: &Path) -> Result<Self> {
        let config = read_config(dir)?;
        let path = dir.join("metrics.jsonl");
        // It is made after the configuration.
        let text = String::from_utf8(read_if_exists(&path)?.unwrap_or_default()).map_err(Error::corrupt(&path))?;
        // The last line may be half written.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let rounds = parse_metrics(&path, whole.lines())?;
        let cohort = Manifest::read(dir)?.and_then(|m| m.sizes.get("cohort").copied()).unwrap_or(1);
        let summary = Summary::of(&config.method.name, config.seed, &config.federation, cohort, &rounds);
        Ok(Self { dir: dir.into(), config, summary, rounds })
    }
}

pub(super) fn read_summary(dir: &Path) -> Result<Summary> {
    let path = dir.join("summary.json");
    let text = read_text(&path)?;
    serde_json::from_str(&text).map_err(Error::corrupt(&path))
}

pub(super) fn read_config(dir: &Path) -> Result<Config> {
    Config::from_toml(&config_text(dir)?).map_err(Error::corrupt(&dir.join("config.toml")))
}

fn config_text(dir: &Path) -> Result<String> {
    read_text(&dir.join("config.toml"))
}

/// What ties checkpoints to a configuration: the text on disk, so that a later version with other keys still reads them.
pub(super) fn config_hash(dir: &Path) -> Result<String> {
    Ok(seal::hash(config_text(dir)?.as_bytes()))
}

pub(super) fn metrics_text(dir: &Path) -> Result<String> {
    read_text(&dir.join("metrics.jsonl"))
}

fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(Error::io("read", path))
}

/// The rounds stored in a run directory; with `n_rounds`, exactly the first `n_rounds`.
pub(super) fn read_metrics(dir: &Path, n_rounds: Option<u32>) -> Result<Vec<RoundRecord>> {
    let (path, text) = (dir.join("metrics.jsonl"), metrics_text(dir)?);
    let rounds = parse_metrics(&path, text.lines().take(n_rounds.map_or(usize::MAX, |n| n as usize)))?;
    match n_rounds {
        Some(n) if rounds.len() != n as usize => {
            let problem = format!("holds {} rounds, but the checkpoint is of round {n}", rounds.len());
            Err(Error::Corrupt { path, problem })
        }
        _ => Ok(rounds),
    }
}

fn parse_metrics<'a>(path: &Path, lines: impl Iterator<Item = &'a str>) -> Result<Vec<RoundRecord>> {
    let corrupt = |at: usize, e| {
        let problem = format!("line {}: {e}\nhint: the file was cut or changed; restore it from a copy", at + 1);
        Error::Corrupt { path: path.into(), problem }
    };
    lines
        .enumerate()
        .map(|(at, line)| serde_json::from_str(line).map_err(|e: serde_json::Error| corrupt(at, e)))
        .collect()
}
