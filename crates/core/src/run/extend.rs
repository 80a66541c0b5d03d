//! Extending a run: the same configuration with more rounds.

use super::manifest::Manifest;
use super::stored::read_config;
use crate::config::{Config, FederationConfig};
use crate::error::{Error, Result};
use crate::record::RoundRecord;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Differing keys that an error names.
const N_SHOWN: usize = 3;

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
            format!("holds a run of another configuration{}", differences(&as_long, &wanted))
        };
        Err(Error::config(format!("`{}` {problem}; choose another directory with --out", dir.display())))
    }
}

/// The first keys in which a stored configuration differs from the wanted one, for an error message.
fn differences(stored: &Config, wanted: &Config) -> String {
    let (there, here) = (stored.keys_in_use(), wanted.keys_in_use());
    // Another method has other keys of its own.
    let is_own = |key: &str| key.starts_with("method.") && key != "method.name";
    let is_same_method = there.get("method.name") == here.get("method.name");
    let keys: BTreeSet<&String> =
        there.keys().chain(here.keys()).filter(|key| is_same_method || !is_own(key)).collect();
    let value = |keys: &BTreeMap<String, String>, key: &str| keys.get(key).map_or_else(|| "unset".into(), Clone::clone);
    let differing: Vec<String> = keys
        .into_iter()
        .filter(|key| there.get(*key) != here.get(*key))
        .map(|key| format!("{key} is {} there, {} here", value(&there, key), value(&here, key)))
        .collect();
    let more = if differing.len() > N_SHOWN {
        format!("; {} more keys differ", differing.len() - N_SHOWN)
    } else {
        String::new()
    };
    let shown: Vec<String> = differing.into_iter().take(N_SHOWN).collect();
    if shown.is_empty() { String::new() } else { format!(": {}{more}", shown.join("; ")) }
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
