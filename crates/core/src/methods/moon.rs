//! MOON. Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021, arXiv:2103.16257.
//!
//! Client  w ← w − η ∇(CE + μ ℓ_con),   ℓ_con = −log( e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ}) )
//!         z = the projection head's output; z_glob under wᵗ, z_prev under the client's last model           Eq. 3, 4
//! Server  as FedAvg
//! State kept by a client: its last model.   Sent beyond FedAvg: nothing.
//! Departures from the paper: before a client's first round z_prev is z_glob (no contrast; the official code uses the
//! common initial model). MOON adds a two-layer head to the network: compare with FedAvg on the same network.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::method::Method;
use crate::step::{At, Batch, Finish, Step, Term};
use fedproj_nn::models::Variant;
use fedproj_nn::{Graph, Loss, NodeId};
use serde::{Deserialize, Serialize};

/// Hyper-parameters of MOON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Moon {
    /// Weight μ ≥ 0 of the contrastive loss. The paper has 5 for CIFAR-10 and 1 for CIFAR-100.
    pub contrast_weight: f32,
    /// Temperature τ of the contrastive loss, above 0.
    pub temperature: f32,
    /// Outputs of the projection head that MOON adds to the network.
    pub head: usize,
}

impl Default for Moon {
    fn default() -> Self {
        Self { contrast_weight: 1.0, temperature: 0.5, head: 256 }
    }
}

fn head(graph: &Graph) -> Option<NodeId> {
    graph.find("head.2")
}

impl Method for Moon {
    fn check(&self, _: &Config) -> Result<()> {
        let (mu, tau) = (self.contrast_weight, self.temperature);
        Error::require(self.head > 0, "method.moon.head", self.head, "at least 1")?;
        Error::require(mu >= 0.0, "method.moon.contrast_weight", mu, "0 or positive")?;
        Error::require(tau > 0.0, "method.moon.temperature", tau, "positive")
    }

    fn variant(&self, variant: Variant) -> Variant {
        Variant { projection_head: Some(self.head), ..variant }
    }

    fn taps(&self, graph: &Graph) -> Vec<NodeId> {
        head(graph).into_iter().collect()
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let mut objective = vec![Term::from(Loss::CrossEntropy)];
        if let (Some(node), Some(previous)) = (head(step.graph()), step.kept_model("previous"))
            && self.contrast_weight > 0.0
        {
            let positive = step.embed(step.weights_round_start(), node)?;
            let negative = step.embed(previous, node)?;
            let loss = Loss::Contrast { positive, negative, temperature: self.temperature };
            objective.push(Term { loss, at: At::Node(node), weight: self.contrast_weight });
        }
        let g = step.gradient(Batch::Private, &objective)?;
        step.update(g);
        Ok(())
    }

    fn finish_local(&self, client: &mut Finish<'_>) -> Result<()> {
        client.keep_model("previous");
        Ok(())
    }
}
