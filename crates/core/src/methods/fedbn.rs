//! FedBN. Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
//! arXiv:2102.07623.
//!
//! Client  starts from wᵗ with its own batch-norm (scale, shift, running statistics), and trains as FedAvg        Alg. 1
//! Server  as FedAvg on everything that is not batch-norm
//! State kept by a client: its batch-norm.   Sent beyond FedAvg: nothing.
//! Departures from the paper: a client sends its batch-norm, too, and the global model has the average of them, so that there
//! is one model to score and to publish. No client uses that average after its first round; its first one begins with it.

use crate::method::Method;
use fedproj_nn::Graph;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// FedBN has no hyper-parameters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FedBn {}

impl Method for FedBn {
    fn stays_with_client(&self, graph: &Graph) -> Vec<Range<usize>> {
        graph.batch_norms().collect()
    }

    fn note(&self, graph: &Graph) -> Option<String> {
        let has_norm = graph.batch_norms().next().is_some();
        (!has_norm)
            .then(|| "fedbn: the network has no batch-norm, so this is FedAvg; model.name=resnet8-thin has".into())
    }
}
