//! Optimisers on flat vectors, and gradient clipping.

use crate::error::{Error, Result};
use crate::kernels::flat::{self, BLOCK, Moments, Update};
use crate::kernels::{Buffer, Cpu};
use crate::vector;

/// The update rule of an optimiser.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Stochastic gradient descent. Weight decay is added to the gradient.
    Sgd {
        /// Learning rate.
        lr: f32,
        /// Momentum; 0 for none.
        momentum: f32,
        /// Whether momentum is Nesterov's.
        nesterov: bool,
        /// L2 decay.
        weight_decay: f32,
    },
    /// Adam (Kingma and Ba 2015). The gradient includes weight decay. AdamW (`decoupled`) applies it to the weights.
    Adam {
        /// Learning rate.
        lr: f32,
        /// Decay β₁ of the mean gradient.
        beta1: f32,
        /// Decay β₂ of the mean squared gradient.
        beta2: f32,
        /// ε, added to the root of the mean squared gradient.
        eps: f32,
        /// Weight decay.
        weight_decay: f32,
        /// Whether the decay is decoupled from the gradient.
        decoupled: bool,
    },
}

impl Rule {
    /// Floats of the means and of the mean squares that the rule keeps for `n` parameters.
    pub(crate) fn n_moments(&self, n: usize) -> (usize, usize) {
        match self {
            Self::Sgd { momentum: 0.0, .. } => (0, 0),
            Self::Sgd { .. } => (n, 0),
            Self::Adam { .. } => (n, n),
        }
    }

    /// Plain gradient descent.
    pub fn sgd(lr: f32) -> Self {
        Self::Sgd { lr, momentum: 0.0, nesterov: false, weight_decay: 0.0 }
    }

    /// Adam with its usual constants.
    pub fn adam(lr: f32) -> Self {
        Self::Adam { lr, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, decoupled: false }
    }

    /// Checks that all constants are in range.
    ///
    /// # Errors
    /// Names the constant that is out of range.
    pub fn check(&self) -> Result<()> {
        let check = |name, value: f32, ok: bool, expected| {
            if ok { Ok(()) } else { Err(Error::Parameter { name, value: f64::from(value), expected }) }
        };
        let not_negative = |v: f32| v.is_finite() && v >= 0.0;
        let fraction = |v: f32| (0.0..1.0).contains(&v);
        match *self {
            Self::Sgd { lr, momentum, nesterov, weight_decay } => {
                check("learning rate", lr, not_negative(lr), "must be finite and not negative")?;
                check("momentum", momentum, fraction(momentum), "must lie in [0, 1)")?;
                check("momentum", momentum, !nesterov || momentum > 0.0, "must be positive for Nesterov's form")?;
                check("weight decay", weight_decay, not_negative(weight_decay), "must be finite and not negative")
            }
            Self::Adam { lr, beta1, beta2, eps, weight_decay, .. } => {
                check("learning rate", lr, not_negative(lr), "must be finite and not negative")?;
                check("beta1", beta1, fraction(beta1), "must lie in [0, 1)")?;
                check("beta2", beta2, fraction(beta2), "must lie in [0, 1)")?;
                check("eps", eps, eps.is_finite() && eps > 0.0, "must be positive")?;
                check("weight decay", weight_decay, not_negative(weight_decay), "must be finite and not negative")
            }
        }
    }
}

/// A rule with its state.
///
/// ```
/// use fedproj_nn::{Cpu, Optimizer, Rule};
///
/// let mut cpu = Cpu::new(1);
/// let mut theta = vec![1.0, -2.0];
/// let mut sgd = Optimizer::new(Rule::sgd(0.5), theta.len())?;
/// sgd.step(&mut cpu, &mut theta, &[2.0, 2.0], 1.0);
/// assert_eq!(theta, [0.0, -3.0]);
/// # Ok::<(), fedproj_nn::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Optimizer {
    rule: Rule,
    n_steps: u32,
    mean: Buffer,
    mean_square: Buffer,
    moves: Vec<bool>,
}

impl Optimizer {
    /// A fresh optimiser for `n_params` parameters.
    ///
    /// # Errors
    /// If a constant of the rule is out of range.
    pub fn new(rule: Rule, n_params: usize) -> Result<Self> {
        rule.check()?;
        let (m, v) = rule.n_moments(n_params);
        let moves = vec![Self::all_move(rule); v.div_ceil(BLOCK)];
        Ok(Self { rule, n_steps: 0, mean: Buffer::zeros(m), mean_square: Buffer::zeros(v), moves })
    }

    /// With weight decay, parameters without a gradient move too.
    fn all_move(rule: Rule) -> bool {
        matches!(rule, Rule::Adam { weight_decay, .. } if weight_decay != 0.0)
    }

    /// Resets the state; keeps the memory allocated.
    pub fn reset(&mut self) {
        self.n_steps = 0;
        self.mean.fill(0.0);
        self.mean_square.fill(0.0);
        self.moves.fill(Self::all_move(self.rule));
    }

    /// One step along `grad`. The learning rate is multiplied by `lr_factor`.
    ///
    /// # Panics
    /// If `theta` or `grad` does not have the optimiser's length.
    pub fn step(&mut self, cpu: &mut Cpu, theta: &mut [f32], grad: &[f32], lr_factor: f32) {
        let first = self.n_steps == 0;
        self.n_steps += 1;
        let rule = match self.rule {
            Rule::Sgd { lr, momentum, nesterov, weight_decay } => {
                Update::Sgd { lr: lr * lr_factor, momentum, nesterov, weight_decay, first }
            }
            Rule::Adam { lr, beta1, beta2, eps, weight_decay, decoupled } => {
                // 1 − βᵗ in double precision: single precision loses half the digits at the first steps.
                let correction = |beta: f32| 1.0 - f64::from(beta).powi(self.n_steps.min(i32::MAX as u32) as i32);
                Update::Adam {
                    lr: lr * lr_factor,
                    beta1,
                    beta2,
                    eps,
                    l2: if decoupled { 0.0 } else { weight_decay },
                    decay: if decoupled { weight_decay } else { 0.0 },
                    correction1: correction(beta1) as f32,
                    correction2_sqrt: correction(beta2).sqrt() as f32,
                }
            }
        };
        let Self { mean, mean_square, moves, .. } = self;
        flat::update(cpu, rule, theta, grad, Moments { mean, mean_square, moves });
    }
}

/// Scales `grad` to a norm of at most `norm_max`. Returns the norm before.
pub fn clip_norm(cpu: &mut Cpu, grad: &mut [f32], norm_max: f32) -> f64 {
    let norm = vector::squared_norm(cpu, grad).sqrt();
    if norm > f64::from(norm_max) {
        vector::scale(cpu, (f64::from(norm_max) / norm) as f32, grad);
    }
    norm
}
