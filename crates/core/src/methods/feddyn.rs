//! FedDyn. Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, arXiv:2111.04263.
//!
//! Client  w ← w − η (∇F_k(w) + α (w − wᵗ + h_k)),   then h_k ← h_k + w_k − wᵗ       (h_k = −∇L_k / α of the paper)
//! Server  wᵗ⁺¹ ← mean_k w_k + mean over all N clients of h_k
//! State kept by a client: h_k.   Sent beyond FedAvg: nothing (the server knows w_k − wᵗ).
//! Departures from the paper: the plain mean of the w_k is evaluated, as the official code does; gradients are clipped.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::fusion::Fusion;
use crate::method::Method;
use crate::step::{Batch, Finish, Step};
use fedproj_nn::Loss;
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedDyn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedDyn {
    /// Weight α ≥ 0 of the dynamic regulariser.
    pub alpha: f32,
    /// Largest norm of the gradient with the regulariser, above 0; longer ones are scaled down to it.
    pub clip: f32,
}

impl Default for FedDyn {
    fn default() -> Self {
        Self { alpha: 0.01, clip: 10.0 }
    }
}

impl Method for FedDyn {
    fn name(&self) -> &'static str {
        "feddyn"
    }

    fn check(&self, _: &Config) -> Result<()> {
        Error::require(self.alpha >= 0.0, "method.feddyn.alpha", self.alpha, "0 or positive")?;
        Error::require(self.clip > 0.0, "method.feddyn.clip", self.clip, "positive")
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        let h = step.state("h");
        step.add_scaled_diff(g, self.alpha, step.weights(), step.weights_round_start());
        step.add_scaled(g, self.alpha, h);
        step.clip(g, self.clip);
        step.update(g);
        Ok(())
    }

    fn finish_local(&self, client: &mut Finish<'_>) {
        let h = client.state("h");
        client.add_scaled_diff(h, 1.0, client.weights(), client.weights_round_start());
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let mean = round.weighted(&round.uniform_weights())?;
        round.average_buffers()?;
        round.evaluate_instead(mean.clone());
        // Σ_k h_k of all N clients moves by Σ_{k in the round} (w_k − wᵗ) = m (mean − wᵗ).
        let m = round.n_results() as f32 / round.n_clients() as f32;
        let change: Vec<f32> = mean.iter().zip(&round.state.weights).map(|(mean, old)| m * (mean - old)).collect();
        let h_mean = round.vector("h_mean", 0.0);
        h_mean.iter_mut().zip(&change).for_each(|(h, d)| *h += d);
        let next = mean.iter().zip(&*h_mean).map(|(mean, h)| mean + h).collect();
        round.state.weights = next;
        Ok(())
    }
}
