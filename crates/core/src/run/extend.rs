//! Extending a run: the same configuration with more rounds.

use super::manifest::Manifest;
use super::stored::read_config;
use crate::config::{Config, FederationConfig};
use crate::error::{Error, Result};
use crate::record::RoundRecord;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// What a run was before it was extended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extended {
    /// Rounds that were asked for when the run began. Settings that are a share of the rounds keep what they meant then.
    pub rounds_at_first: u32,
    /// Hash of the configuration before the last extension, which checkpoints of that time carry.
    pub config_hash: String,
}

/// The configuration with which `config` runs in a directory. Where it extends the run there, shares of the rounds keep their
/// first meaning.
///
/// # Errors
/// If the directory holds a run of another configuration, or a longer one.
pub(super) fn config_for(dir: &Path, config: &Config) -> Result<Config> {
    if !dir.join("config.toml").exists() {
        return Ok(config.clone());
    }
    let stored = read_config(dir)?;
    let n_rounds = stored.federation.rounds;
    let first = Manifest::read(dir)?.and_then(|m| m.extended).map_or(n_rounds, |e| e.rounds_at_first);
    let (wanted, mut as_long) = (config.begun_with(first), stored.begun_with(first));
    as_long.federation.rounds = wanted.federation.rounds;
    if stored == *config {
        Ok(stored)
    } else if as_long == wanted && n_rounds <= wanted.federation.rounds {
        Ok(wanted)
    } else {
        let problem = if as_long == wanted {
            format!("holds a run of {n_rounds} rounds, which cannot be made shorter")
        } else {
            "holds a run of another configuration".to_owned()
        };
        Err(Error::config(format!("`{}` {problem}; choose another directory with --out", dir.display())))
    }
}

/// Takes back the evaluation that a round had only because it was the last one before an extension.
pub(super) fn forget_evaluation(record: &mut RoundRecord, federation: &FederationConfig) -> bool {
    let is_extra = record.accuracy.is_some() && !federation.is_evaluated(record.round) && !federation.evaluate_clients;
    if is_extra {
        (record.accuracy, record.loss, record.per_class) = (None, None, None);
        record.accuracy_by_group = None;
    }
    is_extra
}
