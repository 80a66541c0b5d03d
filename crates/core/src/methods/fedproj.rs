//! FedProj. "Avoid Forgetting by Preserving Global Knowledge Gradients in Federated Learning with Non-IID Data",
//! arXiv:2505.20485.
//!
//! Client  g = ∇CE on its own batch,   r = ∇L_mem = ∇ mean KL(σ(Z_ens / T) ‖ σ(Z_k / T)) on a batch of the memory     Alg. 1
//!         project  g ← g − ⟨g, r⟩ / (‖r‖² + ε) · r   if ⟨g, r⟩ < 0,   then w ← w − η g
//! Server  average  w ← Σ_k (n_k / n) w_k
//!         distil   teacher = mean of the clients' logits on the public set;   w is the student, trained on
//!                  T² KL(σ(teacher / T) ‖ σ(student / T)) + α ‖w − w_avg‖²
//!         remember the teacher is the next round's memory
//! State kept by a client: none (rule `ogd` keeps its directions, a correction its h_k).   Sent beyond FedAvg: the memory's
//! samples (by index) and logits; rules on inputs send directions in their place.
//! Departures: each ambiguity of the paper is a setting of [`Projection`], [`MemoryConfig`] or [`Distill`]. Beyond the paper
//! are [`Averages`], [`Correction`] and the look-ahead, all off by default: `beyond` has what they do. What only the published
//! code does is in [`Authors`].

mod beyond;
mod settings;

use crate::authors::Authors;
use crate::averages::Averages;
use crate::config::Config;
use crate::correction::Correction;
use crate::distill::{Distill, DistillTargets};
use crate::error::Result;
use crate::fusion::{Fusion, GlobalModel};
use crate::memory::{MemoryConfig, Targets};
use crate::method::Method;
use crate::partial::Mean;
use crate::projection::Projection;
use crate::step::{Batch, Finish, Step};
use fedproj_nn::{Graph, Loss, NodeId};
use serde::{Deserialize, Serialize};

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
    /// Averages over rounds of the teacher and of the memory, beyond the paper.
    pub averages: Averages,
    /// Correction of local steps as in FedDyn, beyond the paper.
    pub correction: Correction,
    /// Momentum λ in [0, 1) of a look-ahead as in FedACG, beyond the paper; not with a correction. 0: none.
    pub lookahead: f32,
    /// Compatibility with the published code.
    pub authors: Authors,
}

impl Method for FedProj {
    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        let r = self.projection.constrain(step, g, &self.memory, &self.authors)?;
        self.correct(step, g);
        self.projection.update(step, g, r, &self.authors)
    }

    fn finish_local(&self, client: &mut Finish<'_>) -> Result<()> {
        self.keep_drift(client);
        Ok(())
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let sent = self.average(round)?;
        if self.needs_public() {
            let ensemble = round.ensemble(self.distill.weights, self.needs_features())?;
            if self.distill.epochs > 0 {
                let teacher = self.averages.teacher(round, &ensemble);
                round.distill(&self.distill, &DistillTargets::Teacher(&teacher), &sent)?;
            }
            if self.projection.uses_memory() {
                self.memory.remember(self.averages.memory(round, ensemble), round, self.needs_features())?;
            }
        }
        self.send(round, &sent);
        self.projection.send_inputs(round, &self.memory)
    }

    fn first_targets(&self, global: &GlobalModel<'_>) -> Result<Option<Targets>> {
        self.memory().map_or(Ok(None), |memory| memory.first_targets(global, self.needs_features()))
    }

    // The rest is what the settings need; `settings` has what takes more than a line.

    fn check(&self, config: &Config) -> Result<()> {
        self.check_settings(config)
    }

    fn check_network(&self, graph: &Graph) -> Result<()> {
        self.projection.check_network(graph)
    }

    fn means(&self) -> Option<Vec<Mean>> {
        Some(self.means_asked_for())
    }

    fn taps(&self, graph: &Graph) -> Vec<NodeId> {
        graph.features().filter(|_| self.memory.feature_weight > 0.0).into_iter().collect()
    }

    fn memory(&self) -> Option<&MemoryConfig> {
        self.projection.uses_memory().then_some(&self.memory)
    }

    fn needs_public(&self) -> bool {
        self.projection.is_on() || self.distill.epochs > 0
    }

    fn needs_public_labels(&self) -> bool {
        self.memory.has_labels()
    }

    fn needs_features(&self) -> bool {
        self.memory.feature_weight > 0.0 || self.distill.feature_weight > 0.0
    }

    fn exchanges_logits(&self) -> bool {
        self.needs_public() && !self.holds_to_one_model()
    }

    fn truncates_memory(&self) -> bool {
        self.authors.integer_cast
    }
}
