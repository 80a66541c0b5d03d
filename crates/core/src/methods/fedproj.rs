//! FedProj. "Avoid Forgetting by Preserving Global Knowledge Gradients in Federated Learning with Non-IID Data",
//! arXiv:2505.20485.
//!
//! Client  g = ∇CE on its own batch,   r = ∇L_mem = ∇ mean KL(σ(Z_ens / T) ‖ σ(Z_k / T)) on a batch of the memory
//!         g ← g − ⟨g, r⟩ / (‖r‖² + ε) · r   if ⟨g, r⟩ < 0,   w ← w − η g
//! Server  teacher = mean of the clients' logits on the public set;   student ← Σ_k (n_k / n) w_k, then trained on
//!         T² KL(σ(teacher / T) ‖ σ(student / T)) + α ‖w − w_avg‖²;   the teacher is the next round's memory
//! State kept by a client: none.   Sent beyond FedAvg: the memory's samples (by index) and logits.
//! Departures: each ambiguity of the paper is a switch below, its default with the reason in `docs/`.

use crate::config::Config;
use crate::distill::{Distill, DistillTargets};
use crate::error::{Error, Result};
use crate::fusion::Fusion;
use crate::memory::{MemoryConfig, Round0, Target, Targets};
use crate::method::Method;
use crate::step::{Batch, ProjectionRule, Scope, Step, Term};
use fedproj_nn::vector::Bounds;
use fedproj_nn::{Graph, NodeId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Hyper-parameters of FedProj.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedProj {
    /// The client's projection.
    pub projection: Projection,
    /// The memory of public samples.
    #[serde(default)]
    pub memory: MemoryConfig,
    /// The server's distillation.
    pub distill: Distill,
}

/// When and how gradients are projected.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Projection {
    /// Only on conflict (the paper's Eq.), always (its Alg. 1), as a soft penalty, or not at all.
    pub mode: ProjectionMode,
    /// Constraint at every step, or only while L_mem is not below that of the round's first model.
    pub reference: Reference,
    /// Whether the gradient is projected, or the optimiser's step.
    pub space: Space,
    /// One inner product over all parameters, or one a tensor.
    pub scope: Scope,
    /// Rounds without projection at the start; below 1 a share of all rounds.
    pub warmup: f64,
    /// The first round without projection again; 0 is never.
    pub stop_round: u32,
    /// Probability of leaving projection out.
    pub dropout: f64,
    /// What is left out: a client's whole round, or a step.
    pub dropout_unit: DropoutUnit,
    /// ε
    pub eps: f64,
    /// No projection where ‖r‖² is not above this (the authors' code: 1e-6).
    pub norm_guard: f64,
    /// Bound of the coefficient (the authors' code: 10); 0 is none.
    pub coefficient_max: f64,
    /// γ of mode `soft`: CE + γ T² KL.
    pub soft_weight: f32,
}

impl Default for Projection {
    fn default() -> Self {
        Self {
            mode: ProjectionMode::Conditional,
            reference: Reference::Step,
            space: Space::Gradient,
            scope: Scope::Global,
            warmup: 0.1,
            stop_round: 0,
            dropout: 0.0,
            dropout_unit: DropoutUnit::ClientRound,
            eps: 1e-8,
            norm_guard: 0.0,
            coefficient_max: 0.0,
            soft_weight: 1.0,
        }
    }
}

/// See [`Projection::mode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProjectionMode {
    /// Where ⟨g, r⟩ < 0.
    Conditional,
    /// At every step.
    Always,
    /// g + γ T² r instead of a projection.
    Soft,
    /// Never: FedDF.
    Off,
}

/// See [`Projection::reference`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reference {
    /// The current weights.
    Step,
    /// The round's first weights.
    RoundStart,
}

/// See [`Projection::space`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Space {
    /// The gradient, which then goes to the optimiser.
    Gradient,
    /// The optimiser's step: the first-order guarantee then holds for any optimiser.
    Update,
}

/// See [`Projection::dropout_unit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DropoutUnit {
    /// A client's whole round.
    ClientRound,
    /// A single step.
    Step,
}

impl FedProj {
    /// Whether this step looks at the memory.
    fn projects(&self, step: &Step<'_>) -> bool {
        let (p, at) = (&self.projection, step.place());
        let warmup = if p.warmup < 1.0 { (p.warmup * f64::from(at.n_rounds)).ceil() } else { p.warmup };
        let in_time = f64::from(at.round) >= warmup && (p.stop_round == 0 || at.round < p.stop_round);
        let kept = || match p.dropout_unit {
            DropoutUnit::ClientRound => step.chance_of_round() >= p.dropout,
            DropoutUnit::Step => step.chance_of_step() >= p.dropout,
        };
        p.mode != ProjectionMode::Off && step.has_memory() && in_time && (p.dropout == 0.0 || kept())
    }

    fn rule(&self) -> ProjectionRule {
        let p = &self.projection;
        let bounds = Bounds {
            always: p.mode == ProjectionMode::Always,
            eps: p.eps,
            norm_guard: p.norm_guard,
            coefficient_max: if p.coefficient_max > 0.0 { p.coefficient_max } else { f64::INFINITY },
        };
        ProjectionRule { bounds, scope: p.scope, from_round_start: p.reference == Reference::RoundStart }
    }
}

impl Method for FedProj {
    fn name(&self) -> &'static str {
        "fedproj"
    }

    fn check(&self, _: &Config) -> Result<()> {
        let (p, m) = (&self.projection, &self.memory);
        let require = |ok, name: &str, value: f64, expected| {
            Error::require(ok, &format!("method.fedproj.{name}"), value, expected)
        };
        require(m.size > 0, "memory.size", 0.0, "at least 1")?;
        require(m.batch > 0, "memory.batch", 0.0, "at least 1")?;
        require(m.temperature > 0.0, "memory.temperature", m.temperature.into(), "positive")?;
        require(m.feature_weight >= 0.0, "memory.feature_weight", m.feature_weight.into(), "0 or positive")?;
        require(p.warmup >= 0.0, "projection.warmup", p.warmup, "rounds, or below 1 a share of them")?;
        require((0.0..=1.0).contains(&p.dropout), "projection.dropout", p.dropout, "in [0, 1]")?;
        require(p.eps >= 0.0, "projection.eps", p.eps, "0 or positive")?;
        require(p.soft_weight >= 0.0, "projection.soft_weight", p.soft_weight.into(), "0 or positive")?;
        let features = m.target == Target::Labels && m.feature_weight > 0.0;
        require(!features, "memory.feature_weight", m.feature_weight.into(), "0 where labels are the target")?;
        self.distill.check("method.fedproj.distill")
    }

    fn taps(&self, graph: &Graph) -> Vec<NodeId> {
        graph.features().filter(|_| self.memory.feature_weight > 0.0).into_iter().collect()
    }

    fn needs_public(&self) -> bool {
        self.projection.mode != ProjectionMode::Off || self.distill.epochs > 0
    }

    fn needs_public_labels(&self) -> bool {
        self.memory.target == Target::Labels
    }

    fn needs_features(&self) -> bool {
        self.memory.feature_weight > 0.0 || self.distill.feature_weight > 0.0
    }

    fn memory(&self) -> Option<&MemoryConfig> {
        (self.projection.mode != ProjectionMode::Off).then_some(&self.memory)
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Term::CrossEntropy])?;
        if !self.projects(step) {
            step.update(g);
            return Ok(());
        }
        let (temperature, weight) = (self.memory.temperature, self.memory.feature_weight);
        let target = match self.memory.target {
            Target::Labels => Term::CrossEntropy,
            Target::Ensemble | Target::GlobalModel => Term::MemoryKl { temperature },
        };
        let memory_loss = [target, Term::MemoryFeatures { weight }];
        let r = step.gradient(Batch::Memory, if weight > 0.0 { &memory_loss } else { &memory_loss[..1] })?;
        match (self.projection.mode, self.projection.space) {
            (ProjectionMode::Soft, _) => {
                step.add_scaled(g, self.projection.soft_weight * temperature * temperature, r);
            }
            (_, Space::Update) => return step.update_projected(g, r, &self.rule()),
            _ => step.project(g, r, &self.rule())?,
        }
        step.update(g);
        Ok(())
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
        if self.memory().is_some() {
            let targets = match self.memory.target {
                Target::Ensemble => teacher,
                Target::GlobalModel => Arc::new(round.global_outputs(self.needs_features())?),
                Target::Labels => Arc::default(),
            };
            round.state.targets = Some(targets);
        }
        Ok(())
    }

    fn first_targets(&self, round: &Fusion<'_>) -> Result<Option<Targets>> {
        match (self.memory(), self.memory.round0, self.memory.target) {
            // Labels need no ensemble: they are there from the start.
            (Some(_), _, Target::Labels) => Ok(Some(Targets::default())),
            (Some(_), Round0::GlobalModel, _) => round.global_outputs(self.needs_features()).map(Some),
            _ => Ok(None),
        }
    }
}
