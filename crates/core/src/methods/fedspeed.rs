//! FedSpeed. Sun et al., "FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization Accuracy",
//! ICLR 2023, arXiv:2302.10429.
//!
//! Client  g = ∇F_k(w),   w ← w − η (∇F_k(w + ρ g/‖g‖) + α (w − wᵗ + h_k)),   then h_k ← h_k + w_k − wᵗ       Alg. 1
//!         (α = 1/λ and h_k = −λ ĝ_k of the paper)
//! Server  as FedDyn
//! State kept by a client: h_k.   Sent beyond FedAvg: nothing.
//! Departures from the paper, all as in its published code: The step uphill has the length ρ, not ρ ‖g‖. The gradient
//! there replaces g; the two are not mixed. The server adds the mean of h over all clients, not over the round's.
//! Gradients are clipped. As with FedDyn the plain mean of the w_k is evaluated.

use crate::config::Config;
use crate::correction::Correction;
use crate::error::{Error, Result};
use crate::fusion::Fusion;
use crate::method::Method;
use crate::partial::Mean;
use crate::step::{Batch, Finish, Step};
use fedproj_nn::Loss;
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedSpeed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedSpeed {
    /// Distance ρ ≥ 0 from the weights to the point whose gradient counts. 0: FedDyn, at twice its cost.
    pub radius: f32,
    /// Weight α ≥ 0 of the correction, the paper's 1/λ.
    pub alpha: f32,
    /// Largest norm of a corrected gradient, above 0; longer ones are scaled down to it.
    pub clip: f32,
    /// Whether the corrections of absent clients move, too, as in A-FedPD. It costs one more vector down per round.
    pub absent: bool,
}

impl Default for FedSpeed {
    fn default() -> Self {
        Self { radius: 0.1, alpha: 0.1, clip: 10.0, absent: false }
    }
}

impl FedSpeed {
    fn correction(&self) -> Correction {
        Correction { alpha: self.alpha, clip: self.clip, absent: self.absent }
    }
}

impl Method for FedSpeed {
    fn check(&self, _: &Config) -> Result<()> {
        Error::require(self.radius >= 0.0, "method.fedspeed.radius", self.radius, "0 or positive")?;
        self.correction().check("method.fedspeed")
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let objective = [Loss::CrossEntropy];
        let g = step.gradient(Batch::Private, &objective)?;
        let g = step.gradient_uphill(g, self.radius, Batch::Private, &objective)?;
        self.correction().correct(step, g);
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
        self.correction().fuse(round)
    }
}
