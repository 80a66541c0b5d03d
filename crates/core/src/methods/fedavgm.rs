//! FedAvgM. Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
//! Classification", 2019, arXiv:1909.06335.
//!
//! Client  as FedAvg
//! Server  Δ = Σ_k (n_k / n) w_k − wᵗ,   m ← β m + Δ,   wᵗ⁺¹ ← wᵗ + η_g m
//! State kept by a client: none.   Sent beyond FedAvg: nothing.   Departures from the paper: none.

use crate::config::Config;
use crate::contributions::Part;
use crate::distill::EnsembleWeights;
use crate::error::{Error, Result};
use crate::fusion::Fusion;
use crate::method::Method;
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedAvgM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedAvgM {
    /// Server momentum β, in [0, 1).
    pub momentum: f32,
    /// Server learning rate η_g, above 0.
    pub server_lr: f32,
}

impl Default for FedAvgM {
    fn default() -> Self {
        Self { momentum: 0.9, server_lr: 1.0 }
    }
}

impl Method for FedAvgM {
    fn check(&self, _: &Config) -> Result<()> {
        let beta = self.momentum;
        Error::require((0.0..1.0).contains(&beta), "method.fedavgm.momentum", beta, "in [0, 1)")?;
        Error::require(self.server_lr > 0.0, "method.fedavgm.server_lr", self.server_lr, "positive")
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let mut next = std::mem::take(&mut round.state.weights);
        let average = round.mean(EnsembleWeights::Samples, Part::Weights)?;
        let m = round.vector("momentum", 0.0);
        for ((w, average), m) in next.iter_mut().zip(&average).zip(m) {
            *m = self.momentum * *m + (average - *w);
            *w += self.server_lr * *m;
        }
        round.state.weights = next;
        round.average_buffers()
    }
}
