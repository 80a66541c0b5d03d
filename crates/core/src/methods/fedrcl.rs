//! FedRCL. Seo et al., "Relaxed Contrastive Learning for Federated Learning", CVPR 2024, arXiv:2401.04928.
//!
//! Client  w ← w − η ∇(CE + Σ over levels of a relaxed contrastive loss, averaged)     see [`RelaxedContrast`]
//! Server  as FedAvg
//! State kept by a client: none.   Sent beyond FedAvg: nothing.
//! Departures from the paper: levels are the stem and every stage of the network (every hidden layer of an MLP).

use crate::config::Config;
use crate::error::{Error, Result};
use crate::method::Method;
use crate::step::{At, Batch, Step, Term};
use fedproj_nn::{Graph, Loss, NodeId, RelaxedContrast};
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedRCL.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedRcl {
    /// Temperature τ of the contrastive loss, above 0.
    pub temperature: f32,
    /// Smallest similarity λ at which pairs of the same class are pushed apart.
    pub threshold: f32,
    /// Weight of the contrastive term. 0: off.
    pub contrast_weight: f32,
    /// Weight β of the divergence penalty. 0: off.
    pub penalty_weight: f32,
}

impl Default for FedRcl {
    fn default() -> Self {
        Self { temperature: 0.05, threshold: 0.7, contrast_weight: 1.0, penalty_weight: 1.0 }
    }
}

impl Method for FedRcl {
    fn check(&self, _: &Config) -> Result<()> {
        Error::require(self.temperature > 0.0, "method.fedrcl.temperature", self.temperature, "positive")?;
        for (name, weight) in [("contrast_weight", self.contrast_weight), ("penalty_weight", self.penalty_weight)] {
            Error::require(weight >= 0.0, &format!("method.fedrcl.{name}"), weight, "0 or positive")?;
        }
        Ok(())
    }

    fn taps(&self, graph: &Graph) -> Vec<NodeId> {
        graph.levels().to_vec()
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let Self { temperature, threshold, contrast_weight, penalty_weight } = *self;
        let loss = Loss::RelaxedContrast(RelaxedContrast { temperature, threshold, contrast_weight, penalty_weight });
        let off = contrast_weight == 0.0 && penalty_weight == 0.0;
        let objective = [Loss::CrossEntropy.into(), Term { loss, at: At::Levels, weight: 1.0 }];
        let g = step.gradient(Batch::Private, if off { &objective[..1] } else { &objective })?;
        step.update(g);
        Ok(())
    }
}
