//! Training on a client: epochs, batches, optimiser and schedule.

use crate::error::{Error, Result};
use fedproj_nn::Rule;
use serde::{Deserialize, Serialize};

/// Training on a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LocalConfig {
    /// Passes over the client's samples per round.
    pub epochs: u32,
    /// Samples per step. The last batch of an epoch may be smaller.
    pub batch: usize,
    /// The client's optimiser. It starts afresh every round. SCAFFOLD and FedDC need plain SGD: unless `kind` is set, theirs is
    /// `{ kind = "sgd", lr = 0.1 }`.
    pub optimizer: OptimizerConfig,
    /// The learning rate over the local epochs.
    pub schedule: ScheduleConfig,
    /// Largest norm of a gradient; longer ones are scaled down to it. 0: no limit.
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

/// An optimiser. Keys that its kind does not know keep their defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// Which optimiser.
    pub kind: OptimizerKind,
    /// Learning rate, above 0.
    pub lr: f32,
    /// Weight decay. `sgd` and `adam` add it to the gradient (L2), `adamw` applies it to the weights. A file or a pair that
    /// changes `kind` and does not set it gets 0.
    pub weight_decay: f32,
    /// Momentum of `sgd`, in [0, 1). 0: none.
    pub momentum: f32,
    /// Use Nesterov's form of momentum. Only for `sgd`.
    pub nesterov: bool,
    /// Decay β₁ of the mean of gradients, in [0, 1). Only for `adam` and `adamw`.
    pub beta1: f32,
    /// Decay β₂ of the mean of squared gradients, in [0, 1). Only for `adam` and `adamw`.
    pub beta2: f32,
    /// ε in the denominator √v + ε. Only for `adam` and `adamw`.
    pub eps: f32,
}

/// The kinds of optimiser.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Stochastic gradient descent.
    Sgd,
    /// Adam; weight decay is part of the gradient.
    Adam,
    /// Adam with decoupled weight decay.
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

    /// Whether all constants are in their ranges; `key` is the optimiser's table in the configuration.
    ///
    /// # Errors
    /// Names the constant that is not.
    pub fn check(&self, key: &str) -> Result<()> {
        self.rule().check().map_err(|e| Error::config(format!("{key}: {e}")))?;
        let usual = Self::default();
        let pair = |name, value: &dyn ToString, usual: &dyn ToString| (name, value.to_string(), usual.to_string());
        let (kind, unknown) = match self.kind {
            OptimizerKind::Sgd => (
                "sgd",
                vec![
                    pair("beta1", &self.beta1, &usual.beta1),
                    pair("beta2", &self.beta2, &usual.beta2),
                    pair("eps", &self.eps, &usual.eps),
                ],
            ),
            OptimizerKind::Adam | OptimizerKind::AdamW => (
                "adam",
                vec![
                    pair("momentum", &self.momentum, &usual.momentum),
                    pair("nesterov", &self.nesterov, &usual.nesterov),
                ],
            ),
        };
        match unknown.into_iter().find(|(_, value, usual)| value != usual) {
            Some((name, value, _)) => Err(Error::config(format!(
                "{key}.{name} = {value}: has no effect, since `{kind}` has no {name}\n\
                 hint: leave it out, or choose another {key}.kind"
            ))),
            None => Ok(()),
        }
    }

    /// The engine's rule.
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
    /// Share of the local epochs between two drops of the rate, in [0, 1]. 0: the rate never drops.
    pub every: f64,
    /// Factor of the rate per drop, above 0.
    pub factor: f32,
}

impl Default for ScheduleConfig {
    /// As the published code: a tenth of the rate in the second half of the epochs.
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
