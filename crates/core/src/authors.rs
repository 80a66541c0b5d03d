//! What only the published code of FedProj does, apart from the methods it stands for.
//!
//! The paper knows nothing of it. Preset `authors-code` turns it on, to repeat the published numbers.

use crate::error::Result;
use crate::fusion::Fusion;
use crate::step::{Step, Vector};
use serde::{Deserialize, Serialize};

/// Behaviour of the published code that the paper does not describe. The defaults turn all of it off.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Authors {
    /// First round without projection again, counted from 0. 0: never. The published code stops at 90.
    pub stop_round: u32,
    /// No projection unless ‖r‖² is above this, for the memory gradient r. 0: no limit. The published code has 1e-6.
    pub norm_guard: f64,
    /// Largest size of the coefficient ⟨g, r⟩ / (‖r‖² + ε). 0: no limit. The published code has 10.
    pub coefficient_max: f64,
    /// Cut public inputs and target logits to whole numbers before the memory loss. The published code for images does so.
    pub integer_cast: bool,
}

/// FedDyn's local step: g ← g − h_k, clipped; h_k ← g. So h_k is the last mini-batch's gradient, not the client's drift.
///
/// The code adds α (w − wᵗ) / n, with n the size of each tensor: below 2e-4 of the drift for all but the classifier's
/// bias, so it is left out.
pub(crate) fn correct_by_last_gradient(step: &mut Step<'_>, g: Vector, clip: f32) {
    let h = step.state("h");
    step.add_scaled(g, -1.0, h);
    step.clip(g, clip);
    step.assign(h, g);
}

/// FedDyn's server: h̄ ← h̄ + (w̄ − wᵗ) / N with the n_k-weighted mean w̄, then wᵗ⁺¹ ← w̄ + h̄, which is also evaluated.
///
/// The paper divides the sum over the clients of the round by N; the code divides their mean.
pub(crate) fn average_and_drift(round: &mut Fusion<'_>) -> Result<()> {
    let sent = round.state.weights.clone();
    round.average()?;
    let n_clients = round.n_clients() as f32;
    let mean = round.state.weights.clone();
    let h_mean = round.vector("h_mean", 0.0);
    h_mean.iter_mut().zip(mean.iter().zip(&sent)).for_each(|(h, (mean, sent))| *h += (mean - sent) / n_clients);
    round.state.weights = mean.iter().zip(&*h_mean).map(|(mean, h)| mean + h).collect();
    Ok(())
}
