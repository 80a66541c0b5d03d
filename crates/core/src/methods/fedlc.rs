//! FedLC. Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022,
//! arXiv:2209.00189.
//!
//! Client  w ← w − η ∇ mean −log σ(z − m)[y],   m_c = τ n_kc^(−1/4),   n_kc = its samples of class c
//!         classes that it lacks are left out of σ
//! Server  as FedAvg
//! State kept by a client: none.   Sent beyond FedAvg: nothing.
//! Departures from the paper: σ sums over the true class too, as published implementations do.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::method::Method;
use crate::step::{Batch, Step};
use fedproj_nn::Loss;
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedLC.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedLc {
    /// Margin τ ≥ 0 of a class with one sample; n samples have τ n^(−1/4). 0: only excludes absent classes.
    pub margin: f32,
}

impl Default for FedLc {
    fn default() -> Self {
        Self { margin: 1.0 }
    }
}

impl Method for FedLc {
    fn check(&self, _: &Config) -> Result<()> {
        Error::require(self.margin >= 0.0, "method.fedlc.margin", self.margin, "0 or positive")
    }

    fn class_offsets(&self, counts: &[u32]) -> Result<Vec<f32>> {
        let offset = |&n: &u32| if n == 0 { f32::NEG_INFINITY } else { -self.margin * (n as f32).powf(-0.25) };
        Ok(counts.iter().map(offset).collect())
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::OffsetCrossEntropy])?;
        step.update(g);
        Ok(())
    }
}
