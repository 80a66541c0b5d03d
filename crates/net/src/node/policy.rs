//! What a node will do for its server, and what not: `policy.toml` in the node's folder.

use crate::error::{Error, Result};
use crate::wire::message::Train;
use fedproj_core::{Config, Method};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A batch beyond this takes memory, not time; no run needs it.
const BATCH_MAX: usize = 1 << 16;

/// The node's policy. A task beyond it is declined, with the reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Most local epochs of a round.
    pub epochs_max: u32,
    /// Most weights of a model.
    pub parameters_max: u64,
    /// Most bytes that a round may send to this node and ask back.
    pub bytes_max: u64,
    /// Methods that it runs; empty is all.
    pub methods: Vec<String>,
}

impl Default for Policy {
    fn default() -> Self {
        Self { epochs_max: 1000, parameters_max: 100_000_000, bytes_max: 4_000_000_000, methods: Vec::new() }
    }
}

impl Policy {
    /// Reads the policy of a node's folder; the default where there is none.
    ///
    /// # Errors
    /// If it cannot be read: a policy that is not understood is not a policy.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("policy.toml");
        match std::fs::read_to_string(&path) {
            Ok(text) => toml::from_str(&text).map_err(|e| Error::config(format!("`{}`: {e}", path.display()))),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(Error::io("read", &path)(e)),
        }
    }

    /// Whether a task may be fetched: its sizes are told beforehand.
    ///
    /// # Errors
    /// Says what is beyond the policy.
    pub fn check_task(&self, task: &Train) -> Result<()> {
        let n_parameters = task.weights.len / 4;
        if n_parameters > self.parameters_max {
            return Err(beyond("parameters_max", n_parameters, self.parameters_max));
        }
        // What comes back is at least as long as the model.
        self.check_bytes(task, task.weights.len.saturating_add(task.buffers.len))
    }

    /// Whether a round's task, and so many bytes that it asks back, are within the policy.
    ///
    /// # Errors
    /// Says what is beyond it.
    pub fn check_bytes(&self, task: &Train, up: u64) -> Result<()> {
        let total = task.blobs().iter().fold(up, |n, blob| n.saturating_add(blob.len));
        if total > self.bytes_max {
            return Err(beyond("bytes_max", total, self.bytes_max));
        }
        Ok(())
    }

    /// Whether a run may be taken part in.
    ///
    /// # Errors
    /// Says what is beyond the policy.
    pub fn check_run(&self, config: &Config, method: &dyn Method) -> Result<()> {
        let name = &config.method.name;
        if !self.methods.is_empty() && !self.methods.contains(name) {
            let known = self.methods.join(", ");
            return Err(Error::config(format!("the node's policy runs {known}, not {name}")));
        }
        if config.local.epochs > self.epochs_max {
            return Err(beyond("epochs_max", config.local.epochs.into(), self.epochs_max.into()));
        }
        let batch = method.memory().map_or(0, |m| m.batch).max(config.local.batch);
        if batch > BATCH_MAX {
            return Err(beyond("batch", batch as u64, BATCH_MAX as u64));
        }
        Ok(())
    }
}

fn beyond(key: &str, asked: u64, limit: u64) -> Error {
    Error::config(format!("the task asks for {asked}, the node's policy has {key} = {limit}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::message::Blob;

    #[test]
    fn a_task_beyond_the_policy_is_declined_with_the_key() {
        let blob = |len| Blob { hash: vec![0; 32], len };
        let task = |n: u64| Train { weights: blob(n), ..Train::default() };
        let policy = Policy { parameters_max: 10, bytes_max: 70, epochs_max: 2, methods: vec!["fedavg".into()] };
        policy.check_task(&task(32)).unwrap();
        assert!(policy.check_task(&task(44)).unwrap_err().to_string().contains("parameters_max = 10"));
        assert!(policy.check_task(&task(40)).unwrap_err().to_string().contains("bytes_max = 70"));
        assert!(policy.check_task(&Train { buffers: blob(u64::MAX), ..task(4) }).is_err());
        // Logits that are asked back count like everything else.
        assert!(policy.check_bytes(&task(32), 32).is_ok() && policy.check_bytes(&task(32), 39).is_err());
        let check = |settings: &[&str]| {
            let settings: Vec<String> = settings.iter().map(|s| (*s).to_owned()).collect();
            let config = Config::from_layers(None, &settings).unwrap();
            policy.check_run(&config, config.method.build().unwrap().as_ref()).map_err(|e| e.to_string())
        };
        check(&["method.name=fedavg", "local.epochs=2"]).unwrap();
        assert!(check(&["method.name=fedavg", "local.epochs=3"]).unwrap_err().contains("epochs_max"));
        assert!(check(&["method.name=fedproj", "local.epochs=1"]).unwrap_err().contains("fedproj"));
        assert!(check(&["method.name=fedavg", "local.epochs=1", "local.batch=1000000"]).unwrap_err().contains("batch"));
    }
}
