//! FedProj. "Avoid Forgetting by Preserving Global Knowledge Gradients in Federated Learning with Non-IID Data",
//! arXiv:2505.20485.
//!
//! Client  g = ∇CE on its own batch,   r = ∇L_mem = ∇ mean KL(σ(Z_ens / T) ‖ σ(Z_k / T)) on a batch of the memory
//!         g ← g − ⟨g, r⟩ / (‖r‖² + ε) · r   if ⟨g, r⟩ < 0,   w ← w − η g
//! Server  teacher = mean of the clients' logits on the public set;   student ← Σ_k (n_k / n) w_k, then trained on
//!         T² KL(σ(teacher / T) ‖ σ(student / T)) + α ‖w − w_avg‖²;   the teacher is the next round's memory
//! State kept by a client: none.   Sent beyond FedAvg: the memory's samples (by index) and logits.
//! Departures: each ambiguity of the paper is a setting of [`Projection`], [`MemoryConfig`] or [`Distill`]. What only the
//! published code does is in [`Authors`].

use crate::authors::Authors;
use crate::config::Config;
use crate::distill::{Distill, DistillTargets};
use crate::error::Result;
use crate::fusion::{Fusion, GlobalModel};
use crate::memory::{MemoryConfig, MemoryTarget, Round0, Targets};
use crate::method::Method;
use crate::projection::Projection;
use crate::step::{Batch, Step};
use fedproj_nn::{Graph, Loss, NodeId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Hyper-parameters of FedProj.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedProj {
    /// The client's projection.
    pub projection: Projection,
    /// The memory of public samples.
    pub memory: MemoryConfig,
    /// The server's distillation.
    pub distill: Distill,
    /// Compatibility with the published code.
    pub authors: Authors,
}

impl Method for FedProj {
    fn name(&self) -> &'static str {
        "fedproj"
    }

    fn check(&self, _: &Config) -> Result<()> {
        self.projection.check("method.fedproj.projection")?;
        self.memory.check("method.fedproj.memory")?;
        self.distill.check("method.fedproj.distill")
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        if !self.projection.applies(step, &self.authors) {
            step.update(g);
            return Ok(());
        }
        let (memory_loss, n_terms) = self.memory.loss();
        let r = step.gradient(Batch::Memory, &memory_loss[..n_terms])?;
        self.projection.update(step, g, r, self.memory.temperature, &self.authors)
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let previous = round.state.weights.clone();
        round.average()?;
        if !self.needs_public() {
            return Ok(());
        }
        let teacher = Arc::new(round.ensemble(self.distill.weights, self.needs_features())?);
        if self.distill.epochs > 0 {
            round.distill(&self.distill, &DistillTargets::Teacher(&teacher), &previous)?;
        }
        if self.projection.is_on() {
            round.state.targets = Some(match self.memory.target {
                MemoryTarget::Ensemble => teacher,
                MemoryTarget::GlobalModel => Arc::new(round.global_outputs(self.needs_features())?),
                MemoryTarget::Labels => Arc::default(),
            });
        }
        Ok(())
    }

    fn first_targets(&self, global: &GlobalModel<'_>) -> Result<Option<Targets>> {
        match (self.projection.is_on(), self.memory.round0, self.memory.target) {
            // Labels need no ensemble: they are available from the start.
            (true, _, MemoryTarget::Labels) => Ok(Some(Targets::default())),
            (true, Round0::GlobalModel, _) => global.public_outputs(self.needs_features()).map(Some),
            _ => Ok(None),
        }
    }

    fn taps(&self, graph: &Graph) -> Vec<NodeId> {
        graph.features().filter(|_| self.memory.feature_weight > 0.0).into_iter().collect()
    }

    fn needs_public(&self) -> bool {
        self.projection.is_on() || self.distill.epochs > 0
    }

    fn needs_public_labels(&self) -> bool {
        self.memory.target == MemoryTarget::Labels
    }

    fn needs_features(&self) -> bool {
        self.memory.feature_weight > 0.0 || self.distill.feature_weight > 0.0
    }

    fn memory(&self) -> Option<&MemoryConfig> {
        self.projection.is_on().then_some(&self.memory)
    }

    fn truncates_memory(&self) -> bool {
        self.authors.integer_cast
    }
}
