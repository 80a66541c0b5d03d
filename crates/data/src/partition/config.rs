//! How to partition a data set among clients, as a configuration writes it.

use std::path::PathBuf;

use super::{Partition, dirichlet, explicit, iid, labels, natural, one_class, quantity, shards};
use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::split::indices_by_class;

/// A partition scheme with its parameters.
///
/// ```
/// use fedproj_data::{PartitionConfig, SourceConfig, load};
///
/// let iris = load(&SourceConfig::named("iris"), None)?.train;
/// let partition = PartitionConfig::OneClass { clients: 3 }.build(&iris, 0)?;
/// assert_eq!(partition.sizes().collect::<Vec<_>>(), [50, 50, 50]);
/// # Ok::<(), fedproj_data::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum PartitionConfig {
    /// Equal shares of a random order; every sample once.
    Iid {
        /// Number of clients.
        #[serde(default = "clients_default")]
        clients: usize,
    },
    /// Label skew: each class is partitioned in proportions drawn from Dir(β); every sample once.
    Dirichlet {
        /// Concentration β > 0; the smaller, the more skewed.
        beta: f64,
        /// Number of clients.
        #[serde(default = "clients_default")]
        clients: usize,
        /// Min samples per client.
        #[serde(default = "min_samples_default")]
        min_samples: usize,
    },
    /// Samples are sorted by label and cut into equal shards; each client gets some of them; every sample once.
    Shards {
        /// Number of clients.
        #[serde(default = "clients_default")]
        clients: usize,
        /// Shards per client; 2 in McMahan et al. 2017.
        #[serde(default = "shards_per_client_default")]
        shards_per_client: usize,
    },
    /// Each client holds exactly this many classes; every sample once if there are slots for all classes.
    Labels {
        /// Number of clients.
        #[serde(default = "clients_default")]
        clients: usize,
        /// Classes per client.
        labels_per_client: usize,
    },
    /// Quantity skew: sizes are drawn from Dir(β), labels are IID; every sample once.
    Quantity {
        /// Concentration β > 0; the smaller, the more skewed.
        beta: f64,
        /// Number of clients.
        #[serde(default = "clients_default")]
        clients: usize,
        /// Min samples per client.
        #[serde(default = "min_samples_default")]
        min_samples: usize,
    },
    /// Client k holds samples of class k mod C only; every sample once.
    OneClass {
        /// Number of clients, min one per class.
        #[serde(default = "clients_default")]
        clients: usize,
    },
    /// One client per group of the data set (CSV column `group`, NumPy array `group`); every sample once.
    Natural {},
    /// The lists in a file: JSON (`[[0, 5], [1]]`) or text with one line of indices per client.
    File {
        /// The file.
        path: PathBuf,
    },
    /// Each client draws this many samples for itself when it takes part; clients overlap.
    Virtual {
        /// Number of clients; a million costs nothing.
        #[serde(default = "clients_default")]
        clients: usize,
        /// Distinct samples per client.
        samples: usize,
    },
}

/// As in the default configuration.
fn clients_default() -> usize {
    10
}

/// NIID-Bench's minimum.
fn min_samples_default() -> usize {
    10
}

/// McMahan et al. 2017.
fn shards_per_client_default() -> usize {
    2
}

impl PartitionConfig {
    /// Partitions the samples of `data`.
    ///
    /// # Errors
    /// If the request cannot be met; the error names the numbers that conflict.
    pub fn build(&self, data: &Dataset, seed: u64) -> Result<Partition> {
        let n = data.n_samples();
        let by_label = |kind| {
            let labels = data.labels().ok_or_else(|| {
                let problem = format!("data set `{}` has no labels", data.name());
                Error::impossible(kind, problem, "use kind = \"iid\" or \"quantity\"")
            })?;
            Ok(indices_by_class(labels, data.n_classes()))
        };
        match *self {
            Self::Iid { clients } => iid::partition(n, clients, seed),
            Self::Dirichlet { beta, clients, min_samples } => {
                dirichlet::partition(&by_label("dirichlet")?, beta, clients, min_samples, seed)
            }
            Self::Shards { clients, shards_per_client } => {
                shards::partition(by_label("shards")?, clients, shards_per_client, seed)
            }
            Self::Labels { clients, labels_per_client } => {
                labels::partition(by_label("labels")?, clients, labels_per_client, seed)
            }
            Self::Quantity { beta, clients, min_samples } => quantity::partition(n, beta, clients, min_samples, seed),
            Self::OneClass { clients } => one_class::partition(by_label("one_class")?, clients, seed),
            Self::Natural {} => natural::partition(data),
            Self::File { ref path } => explicit::partition(path, n),
            Self::Virtual { clients, samples } => Partition::virtual_clients(clients, samples, n, seed),
        }
    }
}

/// Rejects zero clients, a minimum that the samples cannot give, and more clients than samples.
pub(super) fn check_clients(kind: &'static str, n_samples: usize, n_clients: usize, n_min: usize) -> Result<()> {
    if n_clients == 0 {
        return Err(Error::impossible(kind, "there are 0 clients", "set data.partition.clients to at least 1"));
    }
    let n_needed = n_clients.saturating_mul(n_min.max(1));
    if n_needed > n_samples {
        let problem = format!(
            "{n_clients} clients with at least {} samples each need {n_needed}, but there are {n_samples}",
            n_min.max(1)
        );
        let and_minimum = if n_min > 1 { " or data.partition.min_samples" } else { "" };
        return Err(Error::impossible(kind, problem, format!("lower data.partition.clients{and_minimum}")));
    }
    Ok(())
}

/// Rejects a concentration that is no positive number, or so large that the draws overflow.
pub(super) fn check_beta(kind: &'static str, beta: f64) -> Result<()> {
    if beta > 0.0 && beta <= 1e9 {
        return Ok(());
    }
    let hint = "beta must be above 0 and at most 1e9, for example 0.3; kind = \"iid\" is its limit";
    Err(Error::impossible(kind, format!("beta is {beta}"), hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SourceConfig, load};

    fn parse(text: &str) -> Result<PartitionConfig, String> {
        toml::from_str(text).map_err(|e| e.to_string())
    }

    #[test]
    fn configurations_are_read_with_defaults_and_unknown_keys_refused() {
        let config = parse("kind = 'dirichlet'\nbeta = 0.3\nclients = 100").unwrap();
        assert_eq!(config, PartitionConfig::Dirichlet { beta: 0.3, clients: 100, min_samples: 10 });
        let text = toml::to_string(&config).unwrap();
        assert_eq!(parse(&text).unwrap(), config);
        assert_eq!(parse("kind = 'natural'").unwrap(), PartitionConfig::Natural {});
        assert_eq!(parse("kind = 'iid'").unwrap(), PartitionConfig::Iid { clients: 10 });
        for bad in [
            "kind = 'dirichlet'\nbeta = 0.3\nclients = 100\nalpha = 1",
            "kind = 'natural'\nclients = 1",
            "kind = 'labels'",
            "kind = 'fair'\nclients = 1",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn impossible_requests_say_their_numbers() {
        let iris = load(&SourceConfig::named("iris"), None).unwrap().train;
        let message = |text: &str| parse(text).unwrap().build(&iris, 0).unwrap_err().to_string();
        let check = |text: &str, expected: &str| assert!(message(text).contains(expected), "{}", message(text));
        check("kind = 'iid'\nclients = 0", "0 clients");
        check("kind = 'iid'\nclients = 151", "need 151, but there are 150");
        check("kind = 'dirichlet'\nbeta = 0.3\nclients = 100\nmin_samples = 2", "need 200, but there are 150");
        check("kind = 'dirichlet'\nbeta = 0.0\nclients = 2", "beta is 0");
        check("kind = 'dirichlet'\nbeta = nan\nclients = 2", "beta is NaN");
        check("kind = 'dirichlet'\nbeta = inf\nclients = 2", "beta is inf");
        check("kind = 'quantity'\nbeta = -1.0\nclients = 2", "beta is -1");
        check("kind = 'quantity'\nbeta = 1.0\nclients = 16", "need 160, but there are 150");
        check("kind = 'labels'\nclients = 2\nlabels_per_client = 4", "4 classes per client, but there are 3");
        check("kind = 'labels'\nclients = 2\nlabels_per_client = 0", "0 classes per client");
        check("kind = 'shards'\nclients = 100\nshards_per_client = 2", "200 shards of 150 samples");
        check("kind = 'shards'\nclients = 2\nshards_per_client = 0", "0 shards");
        check("kind = 'one_class'\nclients = 2", "2 clients cannot hold 3 classes");
        check("kind = 'natural'", "no groups");
        check("kind = 'virtual'\nclients = 2\nsamples = 151", "151 of 150");
        let unlabelled = iris.clone().without_labels();
        let config = parse("kind = 'one_class'\nclients = 3").unwrap();
        assert!(config.build(&unlabelled, 0).unwrap_err().to_string().contains("no labels"));
    }
}
