//! FedDyn. Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, arXiv:2111.04263.
//!
//! Client  w ← w − η (∇F_k(w) + α (w − wᵗ + h_k)),   then h_k ← h_k + w_k − wᵗ       (h_k = −∇L_k / α of the paper)
//! Server  wᵗ⁺¹ ← mean_k w_k + mean over all N clients of h_k
//! State kept by a client: h_k.   Sent beyond FedAvg: nothing (the server knows w_k − wᵗ).
//! Departures from the paper: the plain mean of the w_k is evaluated, as the official code does; gradients are clipped.
//! Key `authors` makes it what FedProj's code calls FedDyn (defect 8 in docs/fedproj.md).

use crate::authors;
use crate::config::Config;
use crate::correction::Correction;
use crate::distill::EnsembleWeights;
use crate::error::Result;
use crate::fusion::Fusion;
use crate::method::Method;
use crate::partial::{Mean, averages};
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
    /// Whether the corrections of absent clients move, too, as in A-FedPD. It costs one more vector down per round.
    pub absent: bool,
    /// Whether it is what FedProj's published code calls FedDyn: h_k is the last step's gradient.
    pub authors: bool,
}

impl Default for FedDyn {
    fn default() -> Self {
        Self { alpha: 0.01, clip: 10.0, absent: false, authors: false }
    }
}

impl FedDyn {
    fn correction(&self) -> Correction {
        Correction { alpha: self.alpha, clip: self.clip, absent: self.absent }
    }
}

impl Method for FedDyn {
    fn check(&self, _: &Config) -> Result<()> {
        self.correction().check("method.feddyn")
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        if self.authors {
            authors::correct_by_last_gradient(step, g, self.clip);
        } else {
            self.correction().correct(step, g);
        }
        step.update(g);
        Ok(())
    }

    fn finish_local(&self, client: &mut Finish<'_>) -> Result<()> {
        if !self.authors {
            Correction::keep(client);
        }
        Ok(())
    }

    fn means(&self) -> Option<Vec<Mean>> {
        // The published code weighs clients by their samples.
        Some(if self.authors { averages(EnsembleWeights::Samples) } else { Correction::means() })
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        if self.authors { authors::average_and_drift(round) } else { self.correction().fuse(round) }
    }
}
