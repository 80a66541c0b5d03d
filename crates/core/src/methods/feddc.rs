//! FedDC. Gao et al., "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction", CVPR 2022,
//! arXiv:2203.11751.
//!
//! Client  w ← w − η (∇F_k(w) − c_k + c + α (w − wᵗ + h_k)),   then h_k ← h_k + w_k − wᵗ          Eq. 3 to 6
//!         and c_k⁺ = c_k − c + (wᵗ − w_k) / (Kη)
//! Server  wᵗ⁺¹ ← mean_k w_k + mean over all N clients of h_k,   c ← c + (1/N) Σ_k (c_k⁺ − c_k)
//! State kept by a client: the drift h_k and the control variate c_k.   Sent beyond FedAvg: c down, c_k⁺ − c_k up.
//! Departures from the paper: as in the official code, h is averaged over all clients, not over the round's. Gradients are
//! clipped, and the plain mean of the w_k is evaluated, both as in FedDyn. The official code divides α by the client's
//! share of the samples; here all clients have the same α.

use crate::config::{Config, OptimizerConfig};
use crate::control::{self, CONTROL_VARIATE};
use crate::correction::Correction;
use crate::error::Result;
use crate::fusion::Fusion;
use crate::method::Method;
use crate::partial::Mean;
use crate::step::{Batch, Finish, Step};
use fedproj_nn::Loss;
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedDC.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedDc {
    /// Weight α ≥ 0 of the penalty on the drift; 0 leaves the control variates and the mean drift.
    pub alpha: f32,
    /// Largest norm of a corrected gradient, above 0; longer ones are scaled down to it.
    pub clip: f32,
}

impl Default for FedDc {
    fn default() -> Self {
        Self { alpha: 0.01, clip: 10.0 }
    }
}

impl FedDc {
    fn drift(&self) -> Correction {
        Correction { alpha: self.alpha, clip: self.clip, absent: false }
    }
}

impl Method for FedDc {
    fn check(&self, config: &Config) -> Result<()> {
        self.drift().check("method.feddc")?;
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
        self.drift().correct(step, g);
        step.update(g);
        Ok(())
    }

    fn finish_local(&self, client: &mut Finish<'_>) -> Result<()> {
        control::keep(client);
        Correction::keep(client);
        Ok(())
    }

    fn means(&self) -> Option<Vec<Mean>> {
        Some(control::means())
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        self.drift().average(round)?;
        control::average(round)?;
        Correction::send(round);
        Ok(())
    }
}
