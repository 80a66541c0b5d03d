//! FedSAM. Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022, arXiv:2206.02618.
//!
//! Client  g = ∇F_k(w),   w ← w − η ∇F_k(w + ρ g/‖g‖)       both on the same batch, Alg. 1
//! Server  as FedAvg
//! State kept by a client: none.   Sent beyond FedAvg: nothing.
//! Departures from the paper: the second pass does not move batch-norm's running averages.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::method::Method;
use crate::step::{Batch, Step};
use fedproj_nn::Loss;
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedSAM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedSam {
    /// Distance ρ ≥ 0 from the weights to the point whose gradient counts. 0: FedAvg, at twice its cost.
    pub radius: f32,
}

impl Default for FedSam {
    /// The radius of SAM itself (Foret et al. 2021).
    fn default() -> Self {
        Self { radius: 0.05 }
    }
}

impl Method for FedSam {
    fn check(&self, _: &Config) -> Result<()> {
        Error::require(self.radius >= 0.0, "method.fedsam.radius", self.radius, "0 or positive")
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let objective = [Loss::CrossEntropy];
        let g = step.gradient(Batch::Private, &objective)?;
        let g = step.gradient_uphill(g, self.radius, Batch::Private, &objective)?;
        step.update(g);
        Ok(())
    }
}
