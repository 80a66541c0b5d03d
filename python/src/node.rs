//! A node of another engine's federation. It takes a run's settings from the network, so it reads no file that they name, and
//! trains within its owner's policy.

use anyhow::Result;
use fedproj_core::{Config, Error, Experiment, Method, Needs};
use fedproj_data::{Dataset, Partition, SourceConfig};
use fedproj_net::wire::decode_public;
use fedproj_net::{Policy, reject_files};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// What a node's owner has set.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// The client of the node's own samples.
    client: u32,
    /// Its own samples. Without them it reads the run's data set and trains any of its clients.
    data: Option<SourceConfig>,
    /// The folder of `policy.toml`.
    folder: Option<PathBuf>,
}

impl Node {
    /// What this node has in common with the run.
    ///
    /// # Errors
    /// If the policy forbids the run, or the node's data do not fit it.
    pub fn load(
        &self,
        mut config: Config,
        method: &dyn Method,
        data_dir: Option<&Path>,
        public: Option<&[u8]>,
    ) -> Result<Experiment> {
        let declined = |error: fedproj_net::Error| Error::config(error.to_string());
        reject_files(&config, self.data.is_some()).map_err(declined)?;
        // The server sends the weights.
        config.model.weights.clear();
        let policy = self.folder.as_deref().map(Policy::read).transpose()?.unwrap_or_default();
        policy.check_run(&config, method).map_err(declined)?;
        if policy.secure_only {
            let problem = "the server would see this node's results; the node's policy has secure_only = true";
            return Err(Error::config(problem).into());
        }
        let public = public.map(decode_public).transpose()?;
        let experiment = match &self.data {
            None => Experiment::load_beside(config, method, data_dir, public)?,
            Some(source) => {
                let private = fedproj_data::load(source, data_dir)?.train;
                let partition = Partition::sole(self.client, private.n_samples());
                // A node does not test, but an experiment needs a test sample.
                let test = private.subset(&[0]);
                Experiment::with_partition(config, method, private, test, public, partition)?
            }
        };
        check_size(&experiment, method, &policy)?;
        Ok(experiment)
    }

    /// The facts that it need not share with its server.
    pub fn own_facts(&self, config: &Config) -> Vec<&'static str> {
        let of_data: &[_] = if self.data.is_some() { &["private", "test", "partition"] } else { &[] };
        let of_weights: &[_] = if config.model.weights.is_empty() { &[] } else { &["initial_model"] };
        [of_data, of_weights].concat()
    }
}

/// Compares what a round needs with the policy.
fn check_size(experiment: &Experiment, method: &dyn Method, policy: &Policy) -> Result<(), Error> {
    let n_public = experiment.public.as_deref().map_or(0, Dataset::n_samples);
    let needs = Needs::of(&experiment.config, method, &experiment.graph, n_public)?;
    let (n_weights, n_bytes) = (experiment.weights.len(), needs.bytes_down + needs.bytes_up);
    let sizes = [("parameters_max", n_weights, policy.parameters_max), ("bytes_max", n_bytes, policy.bytes_max)];
    match sizes.into_iter().find(|(_, needed, most)| *needed as u64 > *most) {
        None => Ok(()),
        Some((key, needed, most)) => {
            Err(Error::config(format!("the run needs {needed}; this node's policy has {key} = {most}")))
        }
    }
}
