//! A-FedPD. Sun et al., "A-FedPD: Aligning Dual-Drift is All Federated Primal-Dual Learning Needs", NeurIPS 2024,
//! arXiv:2409.18915.
//!
//! Client  w ← w − η (∇F_k(w) + α (w − wᵗ + h_k)),   then h_k ← h_k + w_k − wᵗ                    as FedDyn
//! Server  w̄ = mean_k w_k;   h_j ← h_j + w̄ − wᵗ for every absent client j;   wᵗ⁺¹ ← w̄ + mean over all N clients of h
//! State kept by a client: h_k.   Sent beyond FedAvg: one vector down.
//! Departures from the paper: no server keeps a vector per client. So the h of all clients move by their expected
//! share, (1 − m/N)(w̄ − wᵗ) per round, see `core::correction`. With all clients in every round it is FedDyn. Gradients are
//! clipped, and the plain mean of the w_k is evaluated, both as in FedDyn.

use crate::config::Config;
use crate::correction::Correction;
use crate::error::Result;
use crate::fusion::Fusion;
use crate::method::Method;
use crate::partial::Mean;
use crate::step::{Batch, Finish, Step};
use fedproj_nn::Loss;
use serde::{Deserialize, Serialize};

/// Hyper-parameters of A-FedPD.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AFedPd {
    /// Weight α ≥ 0 of the dual correction; the paper's 1/ρ.
    pub alpha: f32,
    /// Largest norm of a corrected gradient, above 0; longer ones are scaled down to it.
    pub clip: f32,
}

impl Default for AFedPd {
    fn default() -> Self {
        Self { alpha: 0.01, clip: 10.0 }
    }
}

impl AFedPd {
    fn duals(&self) -> Correction {
        Correction { alpha: self.alpha, clip: self.clip, absent: true }
    }
}

impl Method for AFedPd {
    fn check(&self, _: &Config) -> Result<()> {
        self.duals().check("method.afedpd")
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        self.duals().correct(step, g);
        step.update(g);
        Ok(())
    }

    fn finish_local(&self, client: &mut Finish<'_>) -> Result<()> {
        Correction::keep(client);
        Ok(())
    }

    fn means(&self) -> Option<Vec<Mean>> {
        Some(Correction::means())
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        self.duals().fuse(round)
    }
}
