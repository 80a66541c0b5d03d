//! FedDyn's dynamic correction of local steps, for any method: it removes the drift of a client from all clients.
//!
//! Client  g ← g + α (w − wᵗ + h_k), clipped;   after its last step h_k ← h_k + w_k − wᵗ
//! Server  w̄ = mean of the w_k;   h̄ ← h̄ + m/N (w̄ − wᵗ), the mean of h over all N clients;   sends w + h̄ and
//!         evaluates w, where w is w̄ or what a method makes of it
//!
//! The h_k of absent clients grow stale. A-FedPD (Sun et al., "A-FedPD: Aligning Dual-Drift is All Federated Primal-Dual
//! Learning Needs", NeurIPS 2024) moves them by w̄ − wᵗ in every round that they miss. No server keeps a vector per client, so
//! `absent` does so on average: the h_k of all clients move by (1 − m/N)(w̄ − wᵗ) per round. The sum d of that is sent, and a
//! client adds it: h_k + d takes the place of h_k, and h̄ moves by w̄ − wᵗ.

use crate::contributions::Part;
use crate::distill::EnsembleWeights;
use crate::error::{Error, Result};
use crate::fusion::{Fusion, SEND};
use crate::partial::{Mean, averages};
use crate::step::{Finish, Step, Vector};
use serde::{Deserialize, Serialize};

/// The server's mean of the clients' h_k.
const H_MEAN: &str = "h_mean";
/// d, by which the h_k of all clients have moved.
const DRIFT: &str = "drift";

/// A correction of local steps by what the client drifted in earlier rounds. A client keeps one vector, h_k.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Correction {
    /// Weight α ≥ 0 of the correction. 0: off.
    pub alpha: f32,
    /// Largest norm of a corrected gradient, above 0; longer ones are scaled down to it.
    pub clip: f32,
    /// Whether the corrections of absent clients move, too, as in A-FedPD. It costs one more vector down per round.
    pub absent: bool,
}

impl Default for Correction {
    fn default() -> Self {
        Self { alpha: 0.0, clip: 10.0, absent: false }
    }
}

impl Correction {
    /// Whether all settings are in their ranges; `key` is their table in the configuration.
    pub(crate) fn check(self, key: &str) -> Result<()> {
        Error::require(self.alpha >= 0.0, &format!("{key}.alpha"), self.alpha, "0 or positive")?;
        Error::require(self.clip > 0.0, &format!("{key}.clip"), self.clip, "positive")
    }

    /// g ← g + α (w − wᵗ + h_k), clipped
    pub(crate) fn correct(self, step: &mut Step<'_>, g: Vector) {
        let h = step.state("h");
        step.add_scaled_diff(g, self.alpha, step.weights(), step.weights_round_start());
        step.add_scaled(g, self.alpha, h);
        if self.absent {
            let d = step.broadcast(DRIFT);
            step.add_scaled(g, self.alpha, d);
        }
        step.clip(g, self.clip);
    }

    /// h_k ← h_k + w_k − wᵗ
    pub(crate) fn keep(client: &mut Finish<'_>) {
        let h = client.state("h");
        client.add_scaled_diff(h, 1.0, client.weights(), client.weights_round_start());
    }

    /// Replaces the weights by the plain mean of the w_k and takes the round into h̄.
    pub(crate) fn average(self, round: &mut Fusion<'_>) -> Result<()> {
        let mean = round.mean(EnsembleWeights::Uniform, Part::Weights)?;
        round.average_buffers()?;
        // Σ_k h_k of all N clients moves by Σ_{k in the round} (w_k − wᵗ) = m (mean − wᵗ).
        let share = round.n_results() as f32 / round.n_clients() as f32;
        let sent = std::mem::replace(&mut round.state.weights, mean.clone());
        let mut add = |name: &str, factor: f32| {
            let vector = round.vector(name, 0.0);
            vector.iter_mut().zip(mean.iter().zip(&sent)).for_each(|(v, (mean, sent))| *v += factor * (mean - sent));
        };
        add(H_MEAN, if self.absent { 1.0 } else { share });
        if self.absent {
            add(&format!("{SEND}{DRIFT}"), 1.0 - share);
        }
        Ok(())
    }

    /// The means over clients that [`Self::average`] asks for.
    pub(crate) fn means() -> Vec<Mean> {
        averages(EnsembleWeights::Uniform)
    }

    /// The whole server of a method that adds nothing to the correction.
    pub(crate) fn fuse(self, round: &mut Fusion<'_>) -> Result<()> {
        self.average(round)?;
        Self::send(round);
        Ok(())
    }

    /// Evaluates the weights as they are and sends them with h̄ added.
    pub(crate) fn send(round: &mut Fusion<'_>) {
        round.evaluate_instead(round.state.weights.clone());
        let h_mean = round.vector(H_MEAN, 0.0).clone();
        round.state.weights.iter_mut().zip(&h_mean).for_each(|(w, h)| *w += h);
    }
}
