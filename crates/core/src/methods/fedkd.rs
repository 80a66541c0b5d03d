//! FedKD. Gong et al., "Preserving Privacy in Federated Learning with Ensemble Cross-Domain Knowledge Distillation",
//! AAAI 2022, arXiv:2209.04599.
//!
//! Client  as FedAvg; its logits on the public set are quantised: z_k ← s_k round(q z_k / s_k) / q, s_k = max |z_k|
//! Server  z̄^c = Σ_k a_k^c z_k^c + Laplace(b), a_k^c = n_k^c / Σ_j n_j^c;   student ← wᵗ, trained on T² KL(σ(z̄/T) ‖ σ(f/T))
//! State kept by a client: none.   Sent beyond FedAvg: nothing.
//! Departures from the paper: it is one-shot, which is `federation.rounds = 1` with many epochs on both sides; with more rounds
//! clients go on from the student. Weights are sent, as with every method here, and the server uses their logits alone.
//! Of its two losses KL is offered, not L1; its optional vote is not. Laplace noise is added to the mean, as in the official
//! code; its scale is no privacy guarantee. Only the simulator knows the n_k^c; a federation weighs by samples.

use crate::config::{Config, OptimizerConfig};
use crate::distill::{Distill, DistillTargets};
use crate::error::{Error, Result};
use crate::fusion::Fusion;
use crate::memory::Targets;
use crate::method::Method;
use crate::partial::Mean;
use fedproj_rng::{Purpose, Stream};
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedKD.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedKd {
    /// Levels q of a client's quantised logits between 0 and their maximum; 0 sends them as they are.
    pub levels: u32,
    /// Scale b ≥ 0 of the Laplace noise on the ensemble's logits.
    pub noise: f64,
    /// How clients weigh in the ensemble.
    pub weights: ClassWeights,
    /// The server's passes over the public set per round.
    pub epochs: u32,
    /// Samples per step of the server.
    pub batch: usize,
    /// The student's optimiser. It starts afresh every round.
    pub optimizer: OptimizerConfig,
    /// Temperature T of teacher and student, above 0.
    pub temperature: f32,
}

/// See [`FedKd::weights`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClassWeights {
    /// Per class, in proportion to the clients' samples of that class. In the simulator only.
    Classes,
    /// In proportion to the clients' samples.
    Samples,
}

impl Default for FedKd {
    /// The official code's q, b, T and optimiser.
    fn default() -> Self {
        let (weights, optimizer) = (ClassWeights::Classes, OptimizerConfig::adam(1e-3));
        Self { levels: 100, noise: 1.0, weights, epochs: 1, batch: 512, optimizer, temperature: 3.0 }
    }
}

impl Method for FedKd {
    fn check(&self, _: &Config) -> Result<()> {
        Error::require(self.noise >= 0.0, "method.fedkd.noise", self.noise, "0 or positive")?;
        Error::require(self.batch > 0, "method.fedkd.batch", self.batch, "at least 1")?;
        Error::require(self.temperature > 0.0, "method.fedkd.temperature", self.temperature, "positive")?;
        self.optimizer.check("method.fedkd.optimizer")
    }

    fn needs_public(&self) -> bool {
        true
    }

    fn needs_simulator(&self) -> Option<&str> {
        let by_class = self.weights == ClassWeights::Classes;
        by_class.then_some(
            "method.fedkd.weights = \"classes\" needs the clients' samples per class, which nodes do not send\n\
             hint: method.fedkd.weights=samples",
        )
    }

    fn means(&self) -> Option<Vec<Mean>> {
        None
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let (previous, classes) = (round.state.weights.clone(), round.n_classes());
        let shares = match self.weights {
            ClassWeights::Classes => class_shares(&round.class_counts()),
            ClassWeights::Samples => round.sample_weights().into_iter().map(|share| vec![share; classes]).collect(),
        };
        let mut logits = vec![0.0; round.n_public() * classes];
        for (mut outputs, shares) in round.client_outputs(false)?.into_iter().zip(shares) {
            quantise(&mut outputs.logits, self.levels);
            for (i, (mean, z)) in logits.iter_mut().zip(&outputs.logits).enumerate() {
                *mean += shares[i % classes] * z;
            }
        }
        let mut stream = Stream::new(round.config().seed, Purpose::LaplaceNoise, [round.round(), 0, 0]);
        for z in &mut logits {
            *z += laplace(self.noise, &mut stream);
        }
        let Self { epochs, batch, temperature, .. } = *self;
        let distill = Distill { epochs, batch, temperature, optimizer: self.optimizer.clone(), ..Distill::default() };
        let teacher = Targets { logits, features: Vec::new() };
        round.distill(&distill, &DistillTargets::Teacher(&teacher), &previous)
    }
}

/// n_k^c / Σ_j n_j^c; equal shares of a class that no client has.
pub(super) fn class_shares(counts: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let total = |class: usize| counts.iter().map(|counts| counts[class]).sum::<u32>();
    let share = |n: u32, class: usize| match total(class) {
        0 => 1.0 / counts.len() as f32,
        all => n as f32 / all as f32,
    };
    counts.iter().map(|counts| counts.iter().enumerate().map(|(class, n)| share(*n, class)).collect()).collect()
}

fn quantise(logits: &mut [f32], levels: u32) {
    let (q, s) = (levels as f32, logits.iter().fold(0.0f32, |most, z| most.max(z.abs())));
    if q * s > 0.0 {
        for z in logits {
            *z = s * (q * *z / s).round() / q;
        }
    }
}

/// A draw of the Laplace distribution, by the inverse of its distribution function.
fn laplace(scale: f64, stream: &mut Stream) -> f32 {
    let u = stream.uniform() - 0.5;
    (-scale * u.signum() * (1.0 - 2.0 * u.abs()).max(f64::MIN_POSITIVE).ln()) as f32
}
