//! Distillation on the public set: step 5 of FedProj's algorithm, shared with FedDF and FedET.

use crate::config::OptimizerConfig;
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::fusion::ServerState;
use crate::memory::{BatchNormUse, Targets};
use crate::terms;
use fedproj_nn::{Cpu, Direction, Dropout, Loss, Mode, NodeId, Optimizer, Options, Workspace, vector};
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
    pub direction: DirectionConfig,
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
            direction: DirectionConfig::TeacherToStudent,
            weights: EnsembleWeights::Uniform,
            alpha: 0.0,
            anchor: Anchor::Average,
            feature_weight: 0.0,
            bn: StudentNorm::Update,
        }
    }
}

/// See [`Direction`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DirectionConfig {
    /// KL(teacher ‖ student).
    TeacherToStudent,
    /// KL(student ‖ teacher).
    StudentToTeacher,
}

/// Weights of clients in an ensemble of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnsembleWeights {
    /// The same weight per client.
    Uniform,
    /// In proportion to the clients' samples.
    Samples,
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
    /// FedET: hard labels, and logits of a diverse minority for the samples that have one.
    Consensus {
        /// ŷ
        labels: &'a [u32],
        /// s_div (n_public, classes)
        diversity: &'a [f32],
        /// Which samples have one.
        has_diversity: &'a [bool],
        /// λ
        weight: f32,
    },
}

impl Distill {
    /// Whether all settings lie in their ranges; `key` is where they stand in the configuration.
    pub(crate) fn check(&self, key: &str) -> Result<()> {
        let require =
            |ok, name: &str, value: f32, expected| Error::require(ok, &format!("{key}.{name}"), value, expected);
        require(self.batch > 0, "batch", 0.0, "at least 1")?;
        require(self.temperature > 0.0, "temperature", self.temperature, "positive")?;
        require(self.alpha >= 0.0, "alpha", self.alpha, "0 or positive")?;
        require(self.feature_weight >= 0.0, "feature_weight", self.feature_weight, "0 or positive")?;
        self.optimizer.check(&format!("{key}.optimizer"))
    }

    /// Trains `state.weights` and returns the mean loss of the last epoch.
    pub(crate) fn run(
        &self,
        experiment: &Experiment,
        n_threads: usize,
        round: u32,
        state: &mut ServerState,
        targets: &DistillTargets<'_>,
        previous: &[f32],
    ) -> Result<f64> {
        let Some(public) = &experiment.public else { return Ok(0.0) };
        let graph = &experiment.graph;
        let taps: Vec<NodeId> = graph.features().filter(|_| self.feature_weight > 0.0).into_iter().collect();
        let options = Options { batch: self.batch.min(public.n_samples()), taps: &taps, training: true };
        let mut ws = Workspace::new(graph, &options, Cpu::new(n_threads))?;
        let mut optimizer = Optimizer::new(self.optimizer.rule(), state.weights.len())?;
        let anchor = match self.anchor {
            Anchor::Average => state.weights.clone(),
            Anchor::PreviousGlobal => previous.to_vec(),
        };
        let mut grad = vec![0.0; state.weights.len()];
        let norm = match self.bn {
            StudentNorm::Update => BatchNormUse::Update,
            StudentNorm::Frozen => BatchNormUse::Frozen,
            StudentNorm::Recalibrate => BatchNormUse::Batch,
        };
        let mode = Mode { norm: norm.mode(), dropout: Dropout::Off };
        let mut x = Vec::new();
        let mut loss_mean = 0.0;
        for epoch in 0..self.epochs {
            let ids = [round, epoch, 0];
            let order = Stream::new(experiment.config.seed, Purpose::DistillOrder, ids).permutation(public.n_samples());
            let mut loss_total = 0.0;
            for indices in order.chunks(options.batch) {
                x.resize(indices.len() * public.sample_len(), 0.0);
                public.gather(indices, &mut x);
                ws.forward(&state.weights, &mut state.buffers, &x, mode)?;
                loss_total += self.add_losses(&mut ws, indices, targets)?;
                ws.backward(&state.weights, &mut grad)?;
                if self.alpha > 0.0 {
                    // ∇ α‖θ − anchor‖² = 2α (θ − anchor)
                    vector::axpy_difference(ws.cpu(), 2.0 * self.alpha, &state.weights, &anchor, &mut grad);
                }
                optimizer.step(ws.cpu(), &mut state.weights, &grad, 1.0);
            }
            loss_mean = loss_total / order.len().div_ceil(options.batch) as f64;
            if !loss_mean.is_finite() {
                return Err(Error::FusionNotFinite { round, what: "the distillation loss" });
            }
        }
        if self.bn == StudentNorm::Recalibrate {
            let all: Vec<u32> = (0..public.n_samples() as u32).collect();
            let mode = Mode { norm: BatchNormUse::Update.mode(), dropout: Dropout::Off };
            for indices in all.chunks(options.batch) {
                x.resize(indices.len() * public.sample_len(), 0.0);
                public.gather(indices, &mut x);
                ws.forward(&state.weights, &mut state.buffers, &x, mode)?;
            }
        }
        Ok(loss_mean)
    }

    fn add_losses(&self, ws: &mut Workspace, indices: &[u32], targets: &DistillTargets<'_>) -> Result<f64> {
        let output = ws.graph().output();
        let classes = ws.graph().shape(output).len();
        let rows = |matrix: &[f32], dim: usize| -> Vec<f32> {
            indices.iter().flat_map(|&i| matrix[i as usize * dim..(i as usize + 1) * dim].iter().copied()).collect()
        };
        match targets {
            DistillTargets::Teacher(targets) => {
                let direction = match self.direction {
                    DirectionConfig::TeacherToStudent => Direction::TeacherToStudent,
                    DirectionConfig::StudentToTeacher => Direction::StudentToTeacher,
                };
                let teacher = rows(&targets.logits, classes);
                let (temperature, times_t_squared) = (self.temperature, self.t2);
                let kl = Loss::Kl { teacher: &teacher, temperature, direction, times_t_squared };
                let mut loss = ws.add_loss(output, &kl, 1.0)?;
                if let Some(node) = ws.graph().features().filter(|_| self.feature_weight > 0.0) {
                    let dim = ws.graph().shape(node).len();
                    let (target, weight) = (rows(&targets.features, dim), self.feature_weight);
                    let add = |f: &[f32], g: &mut [f32]| terms::masked_squares(dim, f, &target, weight, g);
                    loss += f64::from(weight) * ws.inject(node, add)?;
                }
                Ok(loss)
            }
            DistillTargets::Consensus { labels, diversity, has_diversity, weight } => {
                let labels: Vec<u32> = indices.iter().map(|&i| labels[i as usize]).collect();
                let loss = ws.add_loss(output, &Loss::CrossEntropy { labels: &labels }, 1.0)?;
                // Samples whose clients agree have no diversity term: the student is its own teacher there, so that
                // KL and gradient vanish.
                let mut teacher = rows(diversity, classes);
                let own = ws.output();
                for (row, &i) in indices.iter().enumerate() {
                    if !has_diversity[i as usize] {
                        let span = row * classes..(row + 1) * classes;
                        teacher[span.clone()].copy_from_slice(&own[span]);
                    }
                }
                Ok(loss + f64::from(*weight) * ws.add_loss(output, &Loss::kl(&teacher, 1.0), *weight)?)
            }
        }
    }
}
