//! What only the published code of FedProj does, apart from the method it was written for.
//!
//! Neither the paper nor the other methods know of it. Preset `authors-code` turns it on, to repeat the published numbers.

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
