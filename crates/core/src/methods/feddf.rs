//! FedDF. Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
//! arXiv:2006.07242.
//!
//! Client  as FedAvg
//! Server  student ← Σ_k (n_k / n) w_k, trained towards the mean of the clients' logits on public data
//! State kept by a client: none.   Sent beyond FedAvg: nothing.
//! Departures from the paper: no validation set and no early stop, as in FedProj's comparison. It is FedProj with
//! projection off and shares its code.

use crate::config::Config;
use crate::distill::{Distill, DistillTargets, EnsembleWeights};
use crate::error::Result;
use crate::fusion::Fusion;
use crate::method::Method;
use crate::partial::{Mean, averages, ensemble};
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedDF.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedDf {
    /// The server's distillation.
    pub distill: Distill,
}

impl Method for FedDf {
    fn check(&self, _: &Config) -> Result<()> {
        self.distill.check("method.feddf.distill")
    }

    fn needs_public(&self) -> bool {
        true
    }

    fn exchanges_logits(&self) -> bool {
        true
    }

    fn needs_features(&self) -> bool {
        self.distill.feature_weight > 0.0
    }

    fn means(&self) -> Option<Vec<Mean>> {
        let mut means = averages(EnsembleWeights::Samples);
        if self.distill.epochs > 0 {
            means.extend(ensemble(self.distill.weights, self.needs_features()));
        }
        Some(means)
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let previous = round.state.weights.clone();
        round.average()?;
        if self.distill.epochs > 0 {
            let teacher = round.ensemble(self.distill.weights, self.needs_features())?;
            round.distill(&self.distill, &DistillTargets::Teacher(&teacher), &previous)?;
        }
        Ok(())
    }
}
