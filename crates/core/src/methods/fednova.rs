//! FedNova. Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
//! NeurIPS 2020, arXiv:2007.07481.
//!
//! Client  as FedAvg; counts its steps τ_k
//! Server  d_k = (wᵗ − w_k) / a_k,   wᵗ⁺¹ ← wᵗ − τ_eff Σ_k p_k d_k,   τ_eff = Σ_k p_k a_k,   p_k = n_k / n
//!         a_k = τ_k for plain steps; with momentum ρ: a_k = Σ_steps c, c ← ρ c + 1           (Sec. 4.2)
//! State kept by a client: none.   Sent beyond FedAvg: the number of steps.
//! Departures from the paper: its theory covers SGD-like methods; for Adam a_k = τ_k. Buffers take the weighted mean.
//!
//! Where sums are in integers the server knows no p_k, but three sums: Σ n_k, Σ n_k a_k, and Σ (n_k / a_k) w_k with its weight.
//! With m the mean of the last, wᵗ⁺¹ = wᵗ + Q (m − wᵗ), where Q = τ_eff Σ p_k / a_k = (Σ n_k a_k) (Σ n_k / a_k) / n².

use crate::config::{Config, OptimizerKind};
use crate::contributions::Part;
use crate::distill::EnsembleWeights;
use crate::error::{Error, Result};
use crate::fixed::UNIT;
use crate::fusion::Fusion;
use crate::method::Method;
use crate::partial::{Mean, NO_VALUES, averages};
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedNova.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedNova {
    /// Use the momentum formula with this ρ, whatever the optimiser, as FedProj's published code does. 0: off.
    pub momentum_formula: f64,
}

impl FedNova {
    /// a_k of τ steps.
    pub(crate) fn normaliser(&self, config: &Config, n_steps: u32) -> f64 {
        let optimizer = &config.local.optimizer;
        let momentum = if optimizer.kind == OptimizerKind::Sgd { f64::from(optimizer.momentum) } else { 0.0 };
        let rho = if self.momentum_formula > 0.0 { self.momentum_formula } else { momentum };
        let (mut c, mut a) = (0.0, 0.0);
        for _ in 0..n_steps {
            c = rho * c + 1.0;
            a += c;
        }
        a
    }

    /// The same update from sums alone.
    fn fuse_sums(round: &mut Fusion<'_>) -> Result<()> {
        let mean = round.mean(EnsembleWeights::PerStep, Part::Weights)?;
        let n = round.total(EnsembleWeights::Samples, Part::Buffers)?;
        let by_steps = round.total(EnsembleWeights::BySteps, NO_VALUES)?;
        let per_step = round.total(EnsembleWeights::PerStep, Part::Weights)? / UNIT;
        let q = (by_steps / n) * (per_step / n);
        for (w, mean) in round.state.weights.iter_mut().zip(&mean) {
            *w = ((1.0 - q) * f64::from(*w) + q * f64::from(*mean)) as f32;
        }
        round.average_buffers()
    }
}

impl Method for FedNova {
    fn check(&self, _: &Config) -> Result<()> {
        let rho = self.momentum_formula;
        Error::require((0.0..1.0).contains(&rho), "method.fednova.momentum_formula", rho, "in [0, 1)")
    }

    fn means(&self) -> Option<Vec<Mean>> {
        let mut means = averages(EnsembleWeights::PerStep);
        means.push((EnsembleWeights::BySteps, NO_VALUES));
        Some(means)
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        if round.sums_integers() {
            return Self::fuse_sums(round);
        }
        let n_steps: Vec<u32> = round.summaries().map(|r| r.n_steps).collect();
        if n_steps.windows(2).all(|w| w[0] == w[1]) {
            // τ_eff p_k / a_k = p_k: FedAvg, bit for bit.
            return round.average();
        }
        let p: Vec<f64> = round.sample_weights().iter().map(|&w| f64::from(w)).collect();
        let a: Vec<f64> = n_steps.iter().map(|&n| self.normaliser(round.config(), n)).collect();
        let tau_eff: f64 = p.iter().zip(&a).map(|(p, a)| p * a).sum();
        // wᵗ − τ_eff Σ p_k (wᵗ − w_k)/a_k = (1 − Σ q_k) wᵗ + Σ q_k w_k with q_k = τ_eff p_k / a_k
        let q: Vec<f32> = p.iter().zip(&a).map(|(p, a)| (tau_eff * p / a) as f32).collect();
        let mut next = round.weighted(&q)?;
        let rest = (1.0 - q.iter().map(|&q| f64::from(q)).sum::<f64>()) as f32;
        for (next, old) in next.iter_mut().zip(&round.state.weights) {
            *next += rest * old;
        }
        round.state.weights = next;
        round.average_buffers()
    }
}
