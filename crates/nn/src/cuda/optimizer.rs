//! The optimisers' steps on the lanes' flat vectors.

use super::batches::Batches;
use super::fleet::Fleet;
use super::gpu::{Parameter, parameters};
use super::memory::{Rows, Vectors, padded};
use crate::error::Result;
use crate::optim::Rule;

/// A rule, as in `vector.cu`.
#[repr(C)]
#[derive(Default)]
pub(super) struct DeviceRule {
    adam: i32,
    nesterov: i32,
    decoupled: i32,
    lr: f32,
    momentum: f32,
    weight_decay: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
}
parameters!(DeviceRule = "Rule");

impl DeviceRule {
    fn new(rule: &Rule) -> Self {
        let none = Self::default();
        match *rule {
            Rule::Sgd { lr, momentum, nesterov, weight_decay } => {
                Self { lr, momentum, nesterov: i32::from(nesterov), weight_decay, ..none }
            }
            Rule::Adam { lr, beta1, beta2, eps, weight_decay, decoupled } => {
                Self { adam: 1, decoupled: i32::from(decoupled), lr, weight_decay, beta1, beta2, eps, ..none }
            }
        }
    }
}

/// The moments of every lane's optimiser.
#[derive(Debug)]
pub struct Moments {
    mean: Vectors,
    mean_square: Vectors,
}

impl Fleet {
    /// Memory for a rule.
    ///
    /// # Errors
    /// If a constant is out of range, or the GPU's memory is too small.
    pub fn moments(&self, rule: &Rule) -> Result<Moments> {
        rule.check()?;
        let (mean, square) = rule.n_moments(self.graph.params().len());
        Ok(Moments { mean: self.vectors(mean)?, mean_square: self.vectors(square)? })
    }

    /// Forgets the moments of the active lanes.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn reset_moments(&self, moments: &Moments) -> Result<()> {
        for vectors in [&moments.mean, &moments.mean_square] {
            let len = vectors.len;
            self.clear(vectors.rows(), len)?;
        }
        Ok(())
    }

    /// One step of the optimiser along `grad`, with the learning rate times the lane's factor of this step.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn update(&self, rule: &Rule, moments: &Moments, theta: Rows, grad: Rows) -> Result<()> {
        let device = DeviceRule::new(rule);
        let factors = self.table(Batches::LrFactors)?;
        let p: [&dyn Parameter; 6] = [
            &self.lanes.at(),
            &device,
            &factors,
            &self.cursor(Batches::LrFactors),
            &self.n_updates.at(),
            &self.scalars.at(),
        ];
        self.launch("begin_update", [1, 1], [1, 1], 0, &p)?;
        let len = padded(self.graph.params().len());
        let (m, v) = (moments.mean.rows(), moments.mean_square.rows());
        let p: [&dyn Parameter; 8] =
            [&self.lanes.at(), &(len as i32), &device, &self.scalars.at(), &theta, &grad, &m, &v];
        self.each("update", len / 4, &p)
    }
}
