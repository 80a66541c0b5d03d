//! SCAFFOLD. Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
//! arXiv:1910.06378.
//!
//! Client  w ← w − η (∇F_k(w) − c_k + c),   then c_k⁺ = c_k − c + (wᵗ − w_k) / (Kη)                 Alg. 1, option II
//! Server  wᵗ⁺¹ ← wᵗ + η_g mean_k (w_k − wᵗ),   c ← c + (1/N) Σ_k (c_k⁺ − c_k)
//! State kept by a client: the control variate c_k.   Sent beyond FedAvg: c down, c_k⁺ − c_k up.
//! Departures from the paper: with a learning-rate schedule Kη is the sum of the rates.

use crate::config::{Config, OptimizerConfig};
use crate::contributions::Part;
use crate::control::{self, CONTROL_VARIATE};
use crate::distill::EnsembleWeights;
use crate::error::Result;
use crate::fusion::Fusion;
use crate::method::Method;
use crate::partial::Mean;
use crate::step::{Batch, Finish, Step};
use fedproj_nn::Loss;
use serde::{Deserialize, Serialize};

/// Hyper-parameters of SCAFFOLD.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scaffold {
    /// Server learning rate η_g. 1: the server takes the clients' mean.
    pub server_lr: f32,
}

impl Default for Scaffold {
    fn default() -> Self {
        Self { server_lr: 1.0 }
    }
}

impl Method for Scaffold {
    fn check(&self, config: &Config) -> Result<()> {
        control::check(config)
    }

    fn optimizer(&self) -> Option<OptimizerConfig> {
        Some(control::optimizer())
    }

    fn uploads(&self) -> Vec<&str> {
        vec![CONTROL_VARIATE]
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        control::correct(step, g);
        step.update(g);
        Ok(())
    }

    fn finish_local(&self, client: &mut Finish<'_>) -> Result<()> {
        control::keep(client);
        Ok(())
    }

    fn means(&self) -> Option<Vec<Mean>> {
        Some(control::means())
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let mean = round.mean(EnsembleWeights::Uniform, Part::Weights)?;
        round.average_buffers()?;
        for (w, mean) in round.state.weights.iter_mut().zip(&mean) {
            *w += self.server_lr * (mean - *w);
        }
        control::average(round)
    }
}
