//! Training on a client: epochs, batches, optimiser and schedule.

use crate::error::{Error, Result};
use fedproj_nn::Rule;
use serde::{Deserialize, Serialize};

/// Training on a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LocalConfig {
    /// Passes over the client's samples.
    pub epochs: u32,
    /// Samples in a step.
    pub batch: usize,
    /// The optimiser, made new every round.
    pub optimizer: OptimizerConfig,
    /// The learning rate over epochs.
    pub schedule: ScheduleConfig,
    /// Largest norm of a gradient; 0 is no limit.
    pub clip: f32,
}

impl Default for LocalConfig {
    fn default() -> Self {
        Self {
            epochs: 10,
            batch: 32,
            optimizer: OptimizerConfig::default(),
            schedule: ScheduleConfig::default(),
            clip: 0.0,
        }
    }
}

/// An optimiser; keys that its kind does not know are ignored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// `"sgd"`, `"adam"` or `"adamw"`.
    pub kind: OptimizerKind,
    /// Learning rate.
    pub lr: f32,
    /// Weight decay; inside the gradient for sgd and adam.
    pub weight_decay: f32,
    /// Momentum of sgd.
    pub momentum: f32,
    /// Nesterov's form of it.
    pub nesterov: bool,
    /// Constants of adam and adamw.
    pub beta1: f32,
    /// See `beta1`.
    pub beta2: f32,
    /// See `beta1`.
    pub eps: f32,
}

/// The kinds of optimiser.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Gradient descent.
    Sgd,
    /// Adam with L2 decay.
    Adam,
    /// Adam with decoupled decay.
    AdamW,
}

impl Default for OptimizerConfig {
    /// The paper's Adam 1e-3, with the weight decay of its code.
    fn default() -> Self {
        Self {
            kind: OptimizerKind::Adam,
            lr: 1e-3,
            weight_decay: 5e-5,
            momentum: 0.0,
            nesterov: false,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
        }
    }
}

impl OptimizerConfig {
    /// Adam with a learning rate and nothing else.
    pub fn adam(lr: f32) -> Self {
        Self { lr, weight_decay: 0.0, ..Self::default() }
    }

    /// Whether all constants lie in their ranges; `key` is where the optimiser stands in the configuration.
    ///
    /// # Errors
    /// Names the constant that does not.
    pub fn check(&self, key: &str) -> Result<()> {
        self.rule().check().map_err(|e| Error::config(format!("{key}: {e}")))
    }

    /// The engine's word for it.
    pub fn rule(&self) -> Rule {
        let Self { kind, lr, weight_decay, momentum, nesterov, beta1, beta2, eps } = *self;
        match kind {
            OptimizerKind::Sgd => Rule::Sgd { lr, momentum, nesterov, weight_decay },
            OptimizerKind::Adam | OptimizerKind::AdamW => {
                Rule::Adam { lr, beta1, beta2, eps, weight_decay, decoupled: kind == OptimizerKind::AdamW }
            }
        }
    }
}

/// A step schedule over local epochs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleConfig {
    /// Share of the epochs after which the rate drops, again and again; 0 is never.
    pub every: f64,
    /// Factor of a drop.
    pub factor: f32,
}

impl Default for ScheduleConfig {
    /// As the paper's code: a tenth in the second half of the epochs.
    fn default() -> Self {
        Self { every: 0.5, factor: 0.1 }
    }
}

impl ScheduleConfig {
    /// The factor in an epoch of `n_epochs`.
    pub fn factor(self, epoch: u32, n_epochs: u32) -> f32 {
        let every = (self.every * f64::from(n_epochs)).floor().max(1.0) as u32;
        if self.every <= 0.0 { 1.0 } else { self.factor.powi((epoch / every) as i32) }
    }
}
