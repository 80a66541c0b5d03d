//! FedNTD. Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning", NeurIPS
//! 2022, arXiv:2106.03097.
//!
//! Client  w ← w − η ∇(CE + β KL(σ(z̃_g/τ) ‖ σ(z̃/τ)))       z̃, z̃_g: logits under w and wᵗ, without the true class
//! Server  as FedAvg
//! State kept by a client: none.   Sent beyond FedAvg: nothing.
//! Departures from the paper: z_g is computed once per round, in evaluation mode.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::method::Method;
use crate::step::{At, Batch, Step, Term};
use fedproj_nn::Loss;
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedNTD.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedNtd {
    /// Weight β ≥ 0 of the distillation. 0: FedAvg.
    pub distill_weight: f32,
    /// Temperature τ of the distillation, above 0.
    pub temperature: f32,
}

impl Default for FedNtd {
    fn default() -> Self {
        Self { distill_weight: 1.0, temperature: 1.0 }
    }
}

impl Method for FedNtd {
    fn check(&self, _: &Config) -> Result<()> {
        let (beta, tau) = (self.distill_weight, self.temperature);
        Error::require(beta >= 0.0, "method.fedntd.distill_weight", beta, "0 or positive")?;
        Error::require(tau > 0.0, "method.fedntd.temperature", tau, "positive")
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let mut objective = vec![Term::from(Loss::CrossEntropy)];
        if self.distill_weight > 0.0 {
            let output = step.graph().output();
            let teacher = step.embed(step.weights_round_start(), output)?;
            let loss = Loss::NotTrueKl { teacher, temperature: self.temperature };
            objective.push(Term { loss, at: At::Output, weight: self.distill_weight });
        }
        let g = step.gradient(Batch::Private, &objective)?;
        step.update(g);
        Ok(())
    }
}
