//! FedACG. Kim, Kim and Han, "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR 2024,
//! arXiv:2201.03172.
//!
//! Client  w ← w − η ∇(F_k(w) + β ‖w − w̃ᵗ‖²),   starting at w̃ᵗ
//! Server  m ← λ m + mean_k w_k − w̃ᵗ,   wᵗ⁺¹ ← mean_k w_k,   sends the look-ahead w̃ᵗ⁺¹ = wᵗ⁺¹ + λ m       Alg. 1
//! State kept by a client: none.   Sent beyond FedAvg: nothing.
//! Departures from the paper: the proximal term has no factor ½, as in the official code.

use crate::config::Config;
use crate::contributions::Part;
use crate::distill::EnsembleWeights;
use crate::error::{Error, Result};
use crate::fusion::Fusion;
use crate::lookahead::look_ahead;
use crate::method::Method;
use crate::partial::{Mean, averages};
use crate::step::{Batch, Step};
use fedproj_nn::Loss;
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedACG.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedAcg {
    /// Momentum λ of the server and length of its look-ahead, in [0, 1).
    pub momentum: f32,
    /// Weight β ≥ 0 of the squared distance to the weights that the client received.
    pub proximal_weight: f32,
}

impl Default for FedAcg {
    fn default() -> Self {
        Self { momentum: 0.85, proximal_weight: 0.001 }
    }
}

impl Method for FedAcg {
    fn check(&self, _: &Config) -> Result<()> {
        let (lambda, beta) = (self.momentum, self.proximal_weight);
        Error::require((0.0..1.0).contains(&lambda), "method.fedacg.momentum", lambda, "in [0, 1)")?;
        Error::require(beta >= 0.0, "method.fedacg.proximal_weight", beta, "0 or positive")
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        // ∇ β‖w − w̃ᵗ‖² = 2β (w − w̃ᵗ)
        step.add_scaled_diff(g, 2.0 * self.proximal_weight, step.weights(), step.weights_round_start());
        step.update(g);
        Ok(())
    }

    fn means(&self) -> Option<Vec<Mean>> {
        Some(averages(EnsembleWeights::Uniform))
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let mean = round.mean(EnsembleWeights::Uniform, Part::Weights)?;
        round.average_buffers()?;
        let sent = std::mem::replace(&mut round.state.weights, mean);
        look_ahead(round, self.momentum, &sent);
        Ok(())
    }
}
