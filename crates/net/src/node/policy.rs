//! What a node does for its server: `policy.toml` in the node's folder.

use crate::error::{Error, Result};
use crate::files::read_if_exists;
use crate::wire::Task;
use fedproj_core::{Config, Method};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// No run needs a larger batch; it would exhaust memory.
const BATCH_MAX: usize = 1 << 16;

/// The node's policy. The node declines a task that exceeds it, and gives the reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Max local epochs per round.
    pub epochs_max: u32,
    /// Max weights of a model, and of a generator that comes with it.
    pub parameters_max: u64,
    /// Max bytes per round, to this node and back.
    pub bytes_max: u64,
    /// Methods that it runs; empty means all.
    pub methods: Vec<String>,
    /// Min nodes in a secure sum: fewer show more of each.
    pub cohort_min: usize,
    /// Min share of a node's neighbours that rebuilds its secrets in a secure sum. At two thirds, any third of them may
    /// collude with the server and learn nothing.
    pub threshold_min: f64,
    /// Whether it contributes to secure sums only.
    pub secure_only: bool,
    /// Min `privacy.noise_multiplier` of a run whose nodes add the noise. Above 0 it contributes to such runs only.
    pub noise_min: f64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            epochs_max: 1000,
            parameters_max: 100_000_000,
            bytes_max: 4_000_000_000,
            methods: Vec::new(),
            // With two, each knows the other's vector from the sum.
            cohort_min: 3,
            threshold_min: 2.0 / 3.0,
            secure_only: false,
            noise_min: 0.0,
        }
    }
}

impl Policy {
    /// Reads the policy of a node's folder, or the default if there is none.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("policy.toml");
        match read_if_exists(&path)? {
            Some(bytes) => toml::from_slice(&bytes).map_err(|e| Error::config(format!("`{}`: {e}", path.display()))),
            None => Ok(Self::default()),
        }
    }

    /// Checks the announced sizes of a task before it is fetched.
    ///
    /// # Errors
    /// Names what exceeds the policy.
    pub fn check_task(&self, task: &Task) -> Result<()> {
        if self.secure_only && task.secure_clients == 0 {
            return Err(Error::Declined(
                "the server would see this node's contribution; the node's policy has secure_only = true".into(),
            ));
        }
        self.check_parameters(task.weights.len / 4)?;
        // The contribution is at least as long as the model.
        self.check_bytes(task, task.weights.len.saturating_add(task.buffers.len))
    }

    /// Checks the size of a network.
    ///
    /// # Errors
    /// If it has more parameters than the policy allows.
    pub fn check_parameters(&self, n: u64) -> Result<()> {
        if n > self.parameters_max { Err(exceeds("parameters_max", n, self.parameters_max)) } else { Ok(()) }
    }

    /// Checks the number of nodes in a secure sum.
    ///
    /// # Errors
    /// Names what is below the policy.
    pub fn check_cohort(&self, n_nodes: usize) -> Result<()> {
        if n_nodes >= self.cohort_min {
            return Ok(());
        }
        let least = self.cohort_min;
        Err(Error::Declined(format!("a secure sum of {n_nodes} nodes; the node's policy has cohort_min = {least}")))
    }

    /// Checks the bytes of a round's task and of its contribution.
    ///
    /// # Errors
    /// Names what exceeds the policy.
    pub fn check_bytes(&self, task: &Task, up: u64) -> Result<()> {
        let total = task.blobs().iter().fold(up, |n, blob| n.saturating_add(blob.len));
        if total > self.bytes_max {
            return Err(exceeds("bytes_max", total, self.bytes_max));
        }
        Ok(())
    }

    /// Checks a run's settings.
    ///
    /// # Errors
    /// Names what exceeds the policy.
    pub fn check_run(&self, config: &Config, method: &dyn Method) -> Result<()> {
        let name = &config.method.name;
        if !self.methods.is_empty() && !self.methods.contains(name) {
            let known = self.methods.join(", ");
            return Err(Error::Declined(format!("the node's policy allows {known}, not {name}")));
        }
        if config.local.epochs > self.epochs_max {
            return Err(exceeds("epochs_max", config.local.epochs.into(), self.epochs_max.into()));
        }
        let privacy = &config.privacy;
        let noise = if privacy.is_by_nodes() { privacy.noise_multiplier } else { 0.0 };
        if noise < self.noise_min {
            return Err(Error::Declined(format!(
                "nodes of this run add noise of multiplier {noise}; the node's policy has noise_min = {}",
                self.noise_min
            )));
        }
        let batch = method.memory().map_or(0, |m| m.batch).max(config.local.batch);
        if batch > BATCH_MAX {
            return Err(exceeds("batch", batch as u64, BATCH_MAX as u64));
        }
        Ok(())
    }
}

fn exceeds(key: &str, asked: u64, limit: u64) -> Error {
    Error::Declined(format!("the task needs {asked}; the node's policy has {key} = {limit}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Blob;

    fn check_run(policy: &Policy, settings: &[&str]) -> std::result::Result<(), String> {
        let settings: Vec<String> = settings.iter().map(|s| (*s).to_owned()).collect();
        let config = Config::from_layers(None, &settings).unwrap();
        policy.check_run(&config, config.method.build().unwrap().as_ref()).map_err(|e| e.to_string())
    }

    #[test]
    fn a_run_with_less_noise_than_the_policy_asks_for_is_declined() {
        let policy = Policy { noise_min: 2.0, ..Policy::default() };
        let by_nodes = ["method.name=fedavg", "privacy.sampling=public", "privacy.noise=nodes"];
        let with = |noise: &'static str| [&by_nodes[..], &[noise]].concat();
        check_run(&policy, &with("privacy.noise_multiplier=2")).unwrap();
        let declined = check_run(&policy, &with("privacy.noise_multiplier=1.9")).unwrap_err();
        assert!(declined.contains("multiplier 1.9") && declined.contains("noise_min = 2"), "{declined}");
        // The server's own noise is a promise that a node cannot check.
        let by_server = ["method.name=fedavg", "privacy.sampling=public", "privacy.noise_multiplier=9"];
        assert!(check_run(&policy, &by_server).unwrap_err().contains("multiplier 0"));
        check_run(&Policy::default(), &["method.name=fedavg"]).unwrap();
    }

    #[test]
    fn a_task_that_exceeds_the_policy_is_declined_with_the_key() {
        let blob = |len| Blob { hash: vec![0; 32], len };
        let task = |n: u64| Task { weights: blob(n), ..Task::default() };
        let policy = Policy {
            parameters_max: 10,
            bytes_max: 70,
            epochs_max: 2,
            methods: vec!["fedavg".into()],
            ..Policy::default()
        };
        policy.check_task(&task(32)).unwrap();
        assert!(policy.check_task(&task(44)).unwrap_err().to_string().contains("parameters_max = 10"));
        assert!(policy.check_task(&task(40)).unwrap_err().to_string().contains("bytes_max = 70"));
        assert!(policy.check_task(&Task { buffers: blob(u64::MAX), ..task(4) }).is_err());
        // Logits of the contribution count like everything else.
        assert!(policy.check_bytes(&task(32), 32).is_ok() && policy.check_bytes(&task(32), 39).is_err());
        let check = |settings: &[&str]| check_run(&policy, settings);
        check(&["method.name=fedavg", "local.epochs=2"]).unwrap();
        assert!(check(&["method.name=fedavg", "local.epochs=3"]).unwrap_err().contains("epochs_max"));
        assert!(check(&["method.name=fedproj", "local.epochs=1"]).unwrap_err().contains("fedproj"));
        assert!(check(&["method.name=fedavg", "local.epochs=1", "local.batch=1000000"]).unwrap_err().contains("batch"));
    }
}
