//! What FedProj can do beyond its paper. All of it is off by default, and then each function here does what the paper does.
//!
//! A correction ([`crate::correction`], FedDyn's) and a look-ahead ([`crate::lookahead`], FedACG's) decide what clients start
//! from; a run has max one of them. Averages over rounds ([`crate::averages`]) change teacher and memory alone.

use super::FedProj;
use crate::correction::Correction;
use crate::distill::EnsembleWeights;
use crate::error::Result;
use crate::fusion::Fusion;
use crate::lookahead::look_ahead;
use crate::step::{Finish, Step, Vector};

impl FedProj {
    pub(super) fn corrects(&self) -> bool {
        self.correction.alpha > 0.0
    }

    /// A correction and a look-ahead hold all clients to one model.
    pub(super) fn holds_to_one_model(&self) -> bool {
        self.corrects() || self.lookahead > 0.0
    }

    /// g ← g + α (w − wᵗ + h_k)
    pub(super) fn correct(&self, step: &mut Step<'_>, g: Vector) {
        if self.corrects() {
            self.correction.correct(step, g);
        }
    }

    /// h_k ← h_k + w_k − wᵗ
    pub(super) fn keep_drift(&self, client: &mut Finish<'_>) {
        if self.corrects() {
            Correction::keep(client);
        }
    }

    /// How clients weigh in the average of their models.
    pub(super) fn weights_in_average(&self) -> EnsembleWeights {
        if self.corrects() { EnsembleWeights::Uniform } else { EnsembleWeights::Samples }
    }

    /// w ← Σ_k (n_k / n) w_k;   with a correction the plain mean, and h̄ moves. Returns the wᵗ that clients started from.
    pub(super) fn average(&self, round: &mut Fusion<'_>) -> Result<Vec<f32>> {
        let sent = round.state.weights.clone();
        if self.corrects() {
            self.correction.average(round)?;
        } else {
            round.average()?;
        }
        Ok(sent)
    }

    /// Clients start from w;   from w + h̄ with a correction, from w + λ m with a look-ahead, and w is evaluated.
    pub(super) fn send(&self, round: &mut Fusion<'_>, sent: &[f32]) {
        if self.corrects() {
            Correction::send(round);
        } else if self.lookahead > 0.0 {
            look_ahead(round, self.lookahead, sent);
        }
    }
}
