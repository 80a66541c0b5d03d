//! Distillation on the public set: step 5 of FedProj's algorithm, shared with FedDF and FedET.

use crate::config::OptimizerConfig;
use crate::error::{Error, Result};
use crate::memory::{TargetTables, Targets};
use crate::plan::{LocalPlan, LocalStep, Op, Program, VectorId};
use crate::step::{At, Batch, Term};
use fedproj_nn::{Direction, Graph, Loss, NodeId, NormMode};
use fedproj_rng::{Purpose, Stream};
use serde::{Deserialize, Serialize};

/// How the ensemble is distilled into the average.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Distill {
    /// The server's passes E_d over the public set per round. 0: no distillation.
    pub epochs: u32,
    /// Samples per step of the server.
    pub batch: usize,
    /// The student's optimiser. It starts afresh every round.
    pub optimizer: OptimizerConfig,
    /// Temperature T of teacher and student, above 0.
    pub temperature: f32,
    /// Multiply the divergence by T².
    pub t2: bool,
    /// Order of the divergence's arguments.
    pub direction: Direction,
    /// How clients are weighted in the ensemble.
    pub weights: EnsembleWeights,
    /// Weight α ≥ 0 of the weight-divergence term α·‖θ − anchor‖². 0: off.
    pub alpha: f32,
    /// The anchor of the weight-divergence term.
    pub anchor: Anchor,
    /// Weight γ₂ ≥ 0 of the feature loss. 0: off.
    pub feature_weight: f32,
    /// Batch-norm statistics of the student while it distils.
    pub bn: StudentNorm,
}

impl Default for Distill {
    /// The paper's T = 3 with T², batch 256 and one epoch; learning rate of its code.
    fn default() -> Self {
        Self {
            epochs: 1,
            batch: 256,
            optimizer: OptimizerConfig::adam(1e-5),
            temperature: 3.0,
            t2: true,
            direction: Direction::TeacherToStudent,
            weights: EnsembleWeights::Uniform,
            alpha: 0.0,
            anchor: Anchor::Average,
            feature_weight: 0.0,
            bn: StudentNorm::Update,
        }
    }
}

/// Weights of clients in an ensemble of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnsembleWeights {
    /// The same weight per client.
    Uniform,
    /// In proportion to the clients' samples.
    Samples,
    /// By n_k / a_k, where a_k are a client's normalised steps. No setting: FedNova weighs models so.
    #[serde(skip)]
    PerStep,
    /// By n_k · a_k, likewise.
    #[serde(skip)]
    BySteps,
}

/// What the weight-divergence term holds the student to. A real copy: the published code compares the weights with
/// themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Anchor {
    /// The average of this round's clients.
    Average,
    /// The global model before the round.
    PreviousGlobal,
}

/// Batch-norm of the student while it distils.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StudentNorm {
    /// Batch statistics, which move the running averages towards those of the public set.
    Update,
    /// The averaged running statistics throughout.
    Frozen,
    /// Batch statistics that leave the averages alone. Afterwards one pass over the public set sets them.
    Recalibrate,
}

/// What the student is trained towards, for every public sample.
#[derive(Clone, Copy, Debug)]
pub enum DistillTargets<'a> {
    /// A teacher's logits (and features).
    Teacher(&'a Targets),
    /// FedMD: a teacher's logits, by their mean absolute error.
    Scores(&'a Targets),
    /// Hard labels, and logits for the samples that have some: those of a diverse minority in FedET, of who is right in FedGEMS.
    Consensus {
        /// ŷ
        labels: &'a [u32],
        /// (n_public, classes)
        logits: &'a [f32],
        /// Which samples have logits.
        has_logits: &'a [bool],
        /// Weights of the cross-entropy and of the divergence.
        weights: [f32; 2],
    },
}

impl Distill {
    /// Whether all settings lie in their ranges; `key` is where they stand in the configuration.
    ///
    /// # Errors
    /// Names the setting that does not.
    pub fn check(&self, key: &str) -> Result<()> {
        let require =
            |ok, name: &str, value: f32, expected| Error::require(ok, &format!("{key}.{name}"), value, expected);
        require(self.batch > 0, "batch", 0.0, "at least 1")?;
        require(self.temperature > 0.0, "temperature", self.temperature, "positive")?;
        require(self.alpha >= 0.0, "alpha", self.alpha, "0 or positive")?;
        require(self.feature_weight >= 0.0, "feature_weight", self.feature_weight, "0 or positive")?;
        self.optimizer.check(&format!("{key}.optimizer"))
    }

    /// Nodes beside the output that the student's loss touches.
    pub(crate) fn taps(&self, graph: &Graph) -> Vec<NodeId> {
        graph.features().filter(|_| self.feature_weight > 0.0).into_iter().collect()
    }

    /// The student's loss on a batch.
    pub(crate) fn objective(&self, targets: &DistillTargets<'_>) -> Vec<Term> {
        let Self { temperature, direction, t2: times_t_squared, .. } = *self;
        match *targets {
            DistillTargets::Teacher(_) => {
                let kl = Loss::Kl { temperature, direction, times_t_squared, only_marked: false };
                let features = Term { loss: Loss::MaskedSquares, at: At::Features, weight: self.feature_weight };
                [kl.into()].into_iter().chain((self.feature_weight > 0.0).then_some(features)).collect()
            }
            DistillTargets::Scores(_) => vec![Loss::AbsoluteError.into()],
            DistillTargets::Consensus { weights: [labels, logits], .. } => {
                let direction = Direction::TeacherToStudent;
                let kl = Loss::Kl { temperature: 1.0, direction, times_t_squared: false, only_marked: true };
                let term = |loss, weight| Term { loss, at: At::Output, weight };
                vec![term(Loss::CrossEntropy, labels), term(kl, logits)]
            }
        }
    }

    /// One step of a student. Its round starts at the anchor.
    fn program(&self, targets: &DistillTargets<'_>) -> Program {
        let (batch, at, g) = (Batch::Private, VectorId::Weights, VectorId::Gradient(0));
        let mut ops = vec![Op::Forward { batch, at }];
        ops.extend(self.objective(targets).into_iter().map(|term| Op::Loss { term }));
        ops.push(Op::Backward { batch, at, out: 0 });
        if self.alpha > 0.0 {
            // ∇ α‖θ − anchor‖² = 2α (θ − anchor)
            ops.push(Op::AddScaledDiff { g, a: 2.0 * self.alpha, x: VectorId::Weights, y: VectorId::RoundStart });
        }
        ops.push(Op::Update { g });
        Program { ops }
    }

    /// The steps of an epoch; their order is still to be drawn.
    fn plan(&self, n_public: usize) -> LocalPlan {
        let batch = self.batch.min(n_public);
        let step = |first: usize| LocalStep {
            program: 0,
            epoch: 0,
            lr_factor: 1.0,
            dropout_key: 0,
            batch: first..(first + batch).min(n_public),
        };
        let steps = (0..n_public).step_by(batch).map(step).collect();
        LocalPlan { samples: (0..n_public as u32).collect(), steps, ..LocalPlan::default() }
    }

    /// Trains a student for all epochs; returns the mean loss of the last one.
    pub(crate) fn run(
        &self,
        seed: u64,
        task: &DistillTask<'_>,
        n_public: usize,
        student: &mut dyn Student,
    ) -> Result<f64> {
        let (round, program, mut plan) = (task.round, self.program(task.targets), self.plan(n_public));
        let mut loss_mean = 0.0;
        for epoch in 0..self.epochs {
            plan.order = Stream::new(seed, Purpose::DistillOrder, [round, epoch, 0]).permutation(n_public);
            loss_mean = student.epoch(&plan, &program)?;
            if !loss_mean.is_finite() {
                return Err(Error::FusionNotFinite { round, what: "the distillation loss" });
            }
        }
        if self.bn == StudentNorm::Recalibrate {
            student.recalibrate(&plan)?;
        }
        Ok(loss_mean)
    }
}

impl StudentNorm {
    /// How the student's training steps treat batch-norm.
    pub(crate) fn mode(self) -> NormMode {
        match self {
            Self::Update => NormMode::Update,
            Self::Frozen => NormMode::Frozen,
            Self::Recalibrate => NormMode::Batch,
        }
    }
}

impl<'a> DistillTargets<'a> {
    /// The same as tables over all public samples.
    pub(crate) fn tables(&self) -> TargetTables<'a> {
        match *self {
            Self::Teacher(Targets { logits, features }) | Self::Scores(Targets { logits, features }) => {
                TargetTables { logits, features, ..TargetTables::default() }
            }
            Self::Consensus { labels, logits, has_logits: marks, .. } => {
                TargetTables { logits, features: &[], labels: Some(labels), marks }
            }
        }
    }
}

/// What a student starts from and is trained towards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DistillTask<'a> {
    pub how: &'a Distill,
    pub round: u32,
    pub weights: &'a [f32],
    pub buffers: &'a [f32],
    /// What the weights are held to.
    pub anchor: &'a [f32],
    pub targets: &'a DistillTargets<'a>,
}

/// A student on some device.
pub(crate) trait Student {
    /// Runs the plan's steps, which share the program; returns their mean loss.
    fn epoch(&mut self, plan: &LocalPlan, program: &Program) -> Result<f64>;

    /// Sets the running statistics of batch-norm anew, by a pass over the plan's samples in their own order.
    fn recalibrate(&mut self, plan: &LocalPlan) -> Result<()>;

    /// Weights and buffers.
    fn model(&self) -> Result<(Vec<f32>, Vec<f32>)>;
}
