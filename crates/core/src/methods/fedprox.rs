//! FedProx. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, arXiv:1812.06127.
//!
//! Client  w ← w − η (∇F_k(w) + μ (w − wᵗ))        gradient of the local objective h_k, Eq. 2
//! Server  wᵗ⁺¹ ← Σ_k (n_k / n) w_k                as FedAvg
//! State kept by a client: none.   Sent beyond FedAvg: nothing.   Departures from the paper: none.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::method::Method;
use crate::step::{Batch, Step};
use fedproj_nn::Loss;
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedProx.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedProx {
    /// Proximal weight μ ≥ 0. 0: FedAvg. The paper tunes it in {0.001, 0.01, 0.1, 0.5, 1}.
    pub proximal_weight: f32,
}

impl Default for FedProx {
    fn default() -> Self {
        Self { proximal_weight: 0.01 }
    }
}

impl Method for FedProx {
    fn check(&self, _: &Config) -> Result<()> {
        let mu = self.proximal_weight;
        Error::require(mu >= 0.0, "method.fedprox.proximal_weight", mu, "0 or positive")
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        if self.proximal_weight > 0.0 {
            // ∇h_k(w; wᵗ) = ∇F_k(w) + μ (w − wᵗ)
            step.add_scaled_diff(g, self.proximal_weight, step.weights(), step.weights_round_start());
        }
        step.update(g);
        Ok(())
    }
}
