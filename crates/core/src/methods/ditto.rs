//! Ditto. Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, arXiv:2012.04221.
//!
//! Client  w ← w − η ∇F_k(w)   and, on the same batch,   v_k ← v_k − η_v (∇F_k(v_k) + λ (v_k − wᵗ))          Alg. 1
//! Server  as FedAvg, on the w_k
//! State kept by a client: its own model v_k, which never leaves it.   Sent beyond FedAvg: nothing.
//! Departures from the paper: v_k takes plain steps of rate η_v, whatever the optimiser of w is. It starts as the model
//! that the client first receives, and has the batch-norm statistics of the client's w_k.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::method::Method;
use crate::step::{Batch, Step};
use fedproj_nn::Loss;
use serde::{Deserialize, Serialize};

/// v_k, by its name in the client's state.
const PERSONAL: &str = "personal";

/// Hyper-parameters of Ditto.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Ditto {
    /// Weight λ ≥ 0 that holds a client's own model to the global one; 0 trains alone.
    pub proximal_weight: f32,
    /// Learning rate η_v of a client's own model, above 0.
    pub lr: f32,
}

impl Default for Ditto {
    fn default() -> Self {
        Self { proximal_weight: 1.0, lr: 0.01 }
    }
}

impl Method for Ditto {
    fn check(&self, _: &Config) -> Result<()> {
        let (lambda, lr) = (self.proximal_weight, self.lr);
        Error::require(lambda >= 0.0, "method.ditto.proximal_weight", lambda, "0 or positive")?;
        Error::require(lr > 0.0, "method.ditto.lr", lr, "positive")
    }

    fn personal_model(&self) -> Option<&str> {
        Some(PERSONAL)
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let is_new = step.kept_model(PERSONAL).is_none();
        let v = step.state(PERSONAL);
        if is_new {
            step.assign(v, step.weights_round_start());
        }
        let own = step.gradient_at(v, Batch::Private, &[Loss::CrossEntropy])?;
        step.add_scaled_diff(own, self.proximal_weight, v, step.weights_round_start());
        step.add_scaled(v, -self.lr, own);
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        step.update(g);
        Ok(())
    }
}
