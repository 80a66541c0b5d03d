//! SCAFFOLD. Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
//! arXiv:1910.06378.
//!
//! Client  w ← w − η (∇F_k(w) − c_k + c),   then c_k⁺ = c_k − c + (wᵗ − w_k) / (Kη)                 Alg. 1, option II
//! Server  wᵗ⁺¹ ← wᵗ + η_g mean_k (w_k − wᵗ),   c ← c + (1/N) Σ_k (c_k⁺ − c_k)
//! State kept by a client: the control variate c_k.   Sent beyond FedAvg: c down, c_k⁺ − c_k up.
//! Departures from the paper: with a learning-rate schedule Kη is the sum of the rates.

use crate::config::{Config, OptimizerKind};
use crate::contributions::Part;
use crate::distill::EnsembleWeights;
use crate::error::{Error, Result};
use crate::fusion::{Fusion, SEND};
use crate::method::Method;
use crate::partial::{Mean, averages};
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
        let optimizer = &config.local.optimizer;
        Error::require(optimizer.lr > 0.0, "local.optimizer.lr", optimizer.lr, "positive for scaffold")?;
        if optimizer.kind == OptimizerKind::Sgd && optimizer.momentum == 0.0 {
            return Ok(());
        }
        Err(Error::config(
            "scaffold needs plain SGD: its control variates are (wᵗ − w_k)/(Kη), which means nothing under Adam or momentum\n\
             hint: local.optimizer = { kind = \"sgd\", lr = 0.01 }",
        ))
    }

    fn uploads(&self) -> Vec<&str> {
        vec!["control_variate"]
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        let (c, c_k) = (step.broadcast("control_variate"), step.state("control_variate"));
        step.add_scaled_diff(g, 1.0, c, c_k);
        step.update(g);
        Ok(())
    }

    fn finish_local(&self, client: &mut Finish<'_>) -> Result<()> {
        let change = client.upload("control_variate");
        let (c, c_k) = (client.broadcast("control_variate"), client.state("control_variate"));
        let per_rate = 1.0 / client.lr_total();
        client.add_scaled(change, -1.0, c);
        client.add_scaled_diff(change, per_rate, client.weights_round_start(), client.weights());
        client.add_scaled(c_k, 1.0, change);
        Ok(())
    }

    fn means(&self) -> Option<Vec<Mean>> {
        let mut means = averages(EnsembleWeights::Uniform);
        means.push((EnsembleWeights::Uniform, Part::Upload("control_variate")));
        Some(means)
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let mean = round.mean(EnsembleWeights::Uniform, Part::Weights)?;
        round.average_buffers()?;
        for (w, mean) in round.state.weights.iter_mut().zip(&mean) {
            *w += self.server_lr * (mean - *w);
        }
        let change = round.sum_over_all(Part::Upload("control_variate"))?;
        let c = round.vector(&format!("{SEND}control_variate"), 0.0);
        c.iter_mut().zip(&change).for_each(|(c, d)| *c += d);
        Ok(())
    }
}
