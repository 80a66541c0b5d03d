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
use crate::averages::Averages;
use crate::config::Config;
use crate::correction::Correction;
use crate::distill::{Distill, DistillTargets, EnsembleWeights};
use crate::error::{Error, Result};
use crate::fusion::{Fusion, GlobalModel};
use crate::lookahead::look_ahead;
use crate::memory::{MemoryConfig, MemoryTarget, Round0, Targets};
use crate::method::Method;
use crate::partial::{Mean, averages, ensemble};
use crate::projection::Projection;
use crate::step::{Batch, Finish, Step};
use crate::subspace;
use fedproj_data::PartitionConfig;
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
    /// Averages over rounds of the teacher and of the memory, beyond the paper.
    pub averages: Averages,
    /// Correction of local steps as in FedDyn, beyond the paper.
    pub correction: Correction,
    /// Momentum λ in [0, 1) of a look-ahead as in FedACG, beyond the paper; not with a correction. 0: none.
    pub lookahead: f32,
    /// Compatibility with the published code.
    pub authors: Authors,
}

impl FedProj {
    fn corrects(&self) -> bool {
        self.correction.alpha > 0.0
    }

    /// Distils the ensemble into the average; the ensemble becomes the next round's memory.
    fn distill(&self, round: &mut Fusion<'_>, previous: &[f32]) -> Result<()> {
        let ensemble = round.ensemble(self.distill.weights, self.needs_features())?;
        if self.distill.epochs > 0 {
            let teacher = self.averages.teacher(round, &ensemble);
            round.distill(&self.distill, &DistillTargets::Teacher(&teacher), previous)?;
        }
        if self.projection.uses_memory() {
            round.state.targets = Some(Arc::new(match self.memory.target {
                MemoryTarget::Ensemble => self.averages.memory(round, ensemble),
                MemoryTarget::GlobalModel => round.global_outputs(self.needs_features())?,
                MemoryTarget::Labels => Targets::default(),
            }));
        }
        Ok(())
    }
}

impl Method for FedProj {
    fn check(&self, config: &Config) -> Result<()> {
        self.projection.check("method.fedproj.projection")?;
        self.memory.check("method.fedproj.memory")?;
        self.distill.check("method.fedproj.distill")?;
        self.averages.check("method.fedproj.averages")?;
        self.correction.check("method.fedproj.correction")?;
        let (lambda, key) = (self.lookahead, "method.fedproj.lookahead");
        Error::require((0.0..1.0).contains(&lambda), key, lambda, "in [0, 1)")?;
        let is_alone = lambda == 0.0 || !self.corrects();
        Error::require(is_alone, key, lambda, "0 where method.fedproj.correction.alpha is above 0")?;
        if self.corrects() && matches!(config.data.partition, PartitionConfig::Virtual { .. }) {
            return Err(Error::config(format!(
                "method.fedproj.correction.alpha = {}: a client keeps a vector for its next round, but data.partition.kind = \
                 \"virtual\" stands for clients that come once and keep nothing\n\
                 hint: preset=leading-stateless averages the teacher alone, or choose another data.partition",
                self.correction.alpha
            )));
        }
        Ok(())
    }

    fn check_network(&self, graph: &Graph) -> Result<()> {
        let is_used = self.projection.is_on() && self.projection.rule.is_of_inputs();
        if is_used { subspace::products(graph).map(drop) } else { Ok(()) }
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        let r = self.projection.constrain(step, g, &self.memory, &self.authors)?;
        if self.corrects() {
            self.correction.correct(step, g);
        }
        match r {
            Some(r) => self.projection.update(step, g, r, &self.authors)?,
            None => step.update(g),
        }
        Ok(())
    }

    fn finish_local(&self, client: &mut Finish<'_>) -> Result<()> {
        if self.corrects() {
            Correction::keep(client);
        }
        Ok(())
    }

    fn means(&self) -> Option<Vec<Mean>> {
        let mut means = averages(if self.corrects() { EnsembleWeights::Uniform } else { EnsembleWeights::Samples });
        if self.needs_public() {
            means.extend(ensemble(self.distill.weights, self.needs_features()));
        }
        Some(means)
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let previous = round.state.weights.clone();
        if self.corrects() {
            self.correction.average(round)?;
        } else {
            round.average()?;
        }
        if self.needs_public() {
            self.distill(round, &previous)?;
        }
        if self.corrects() {
            Correction::send(round);
        } else if self.lookahead > 0.0 {
            look_ahead(round, self.lookahead, &previous);
        }
        self.projection.send_inputs(round, &self.memory)
    }

    fn first_targets(&self, global: &GlobalModel<'_>) -> Result<Option<Targets>> {
        match (self.projection.uses_memory(), self.memory.round0, self.memory.target) {
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

    /// A correction and a look-ahead hold all clients to one model.
    fn exchanges_logits(&self) -> bool {
        self.needs_public() && !self.corrects() && self.lookahead == 0.0
    }

    fn needs_public_labels(&self) -> bool {
        self.memory.target == MemoryTarget::Labels
    }

    fn needs_features(&self) -> bool {
        self.memory.feature_weight > 0.0 || self.distill.feature_weight > 0.0
    }

    fn memory(&self) -> Option<&MemoryConfig> {
        self.projection.uses_memory().then_some(&self.memory)
    }

    fn needs_cpu(&self) -> Option<String> {
        self.projection.needs_cpu("method.fedproj.projection")
    }

    fn truncates_memory(&self) -> bool {
        self.authors.integer_cast
    }
}
