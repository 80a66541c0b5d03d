//! FedAdam. Reddi et al., "Adaptive Federated Optimization", ICLR 2021, arXiv:2003.00295.
//!
//! Client  as FedAvg
//! Server  Δ = Σ_k (n_k / n) w_k − wᵗ,   m ← β₁ m + (1 − β₁) Δ,   v ← β₂ v + (1 − β₂) Δ²,   wᵗ⁺¹ ← wᵗ + η m / (√v + ε)
//! State kept by a client: none.   Sent beyond FedAvg: nothing.
//! Departures from the paper: none; v starts at ε², no bias correction, as in its Alg. 2.

use crate::config::Config;
use crate::contributions::Part;
use crate::distill::EnsembleWeights;
use crate::error::{Error, Result};
use crate::fusion::Fusion;
use crate::method::Method;
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedAdam.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedAdam {
    /// Server learning rate η, above 0.
    pub server_lr: f32,
    /// Decay β₁ of the mean of updates, in [0, 1).
    pub beta1: f32,
    /// Decay β₂ of the mean of squared updates, in [0, 1).
    pub beta2: f32,
    /// ε > 0 in the denominator √v + ε: the paper's degree of adaptivity τ.
    pub eps: f32,
}

impl Default for FedAdam {
    fn default() -> Self {
        Self { server_lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-3 }
    }
}

impl Method for FedAdam {
    fn check(&self, _: &Config) -> Result<()> {
        let betas = (0.0..1.0).contains(&self.beta1) && (0.0..1.0).contains(&self.beta2);
        Error::require(betas, "method.fedadam.beta1, beta2", format!("{}, {}", self.beta1, self.beta2), "in [0, 1)")?;
        Error::require(self.eps > 0.0, "method.fedadam.eps", self.eps, "positive")?;
        Error::require(self.server_lr > 0.0, "method.fedadam.server_lr", self.server_lr, "positive")
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let Self { server_lr, beta1, beta2, eps } = *self;
        let mut next = std::mem::take(&mut round.state.weights);
        let average = round.mean(EnsembleWeights::Samples, Part::Weights)?;
        let mut v = std::mem::take(round.vector("variance", eps * eps));
        let m = round.vector("momentum", 0.0);
        for (((w, average), m), v) in next.iter_mut().zip(&average).zip(m).zip(&mut v) {
            let delta = average - *w;
            *m = beta1 * *m + (1.0 - beta1) * delta;
            *v = beta2 * *v + (1.0 - beta2) * delta * delta;
            *w += server_lr * *m / (v.sqrt() + eps);
        }
        *round.vector("variance", 0.0) = v;
        round.state.weights = next;
        round.average_buffers()
    }
}
