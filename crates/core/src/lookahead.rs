//! FedACG's look-ahead, for any method: clients start ahead along the server's momentum. They keep nothing.
//!
//! Server  m ← λ m + w − w̃ᵗ;   sends w̃ᵗ⁺¹ = w + λ m and evaluates w, which is what a method makes of the round

use crate::fusion::Fusion;

/// Evaluates the weights as they are and sends them moved ahead. `sent`: the weights that the clients received.
pub(crate) fn look_ahead(round: &mut Fusion<'_>, lambda: f32, sent: &[f32]) {
    round.evaluate_instead(round.state.weights.clone());
    let mut ahead = std::mem::take(&mut round.state.weights);
    let m = round.vector("momentum", 0.0);
    for ((w, sent), m) in ahead.iter_mut().zip(sent).zip(m) {
        *m = lambda * *m + (*w - sent);
        *w += lambda * *m;
    }
    round.state.weights = ahead;
}
