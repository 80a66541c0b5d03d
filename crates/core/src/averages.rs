//! Averages over rounds: of what the clients' ensemble says about the public samples, and of the published model.
//!
//! Z̄ᵗ = ρₜ Z̄ᵗ⁻¹ + (1 − ρₜ) Zᵗ,   ρₜ = min(ρ, t / (t + 2)):   the mean of all rounds at first, later of the last 1/(1 − ρ)
//!
//! A round's ensemble Zᵗ is a few clients, and which ones is chance. Its average is an ensemble of many.

use crate::error::{Error, Result};
use crate::fusion::Fusion;
use crate::memory::Targets;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Logits and features of the averaged teacher, in the server's state.
pub(crate) const TEACHER: [&str; 2] = ["teacher.logits", "teacher.features"];

/// The rates ρ in [0, 1) of the averages. 0: no average, as in the paper.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Averages {
    /// Rate ρ of the teacher, towards which the server distils.
    pub teacher: f64,
    /// Rate ρ of the memory, against which clients project.
    pub memory: f64,
}

impl Averages {
    /// Whether all settings are in their ranges; `key` is their table in the configuration.
    pub(crate) fn check(&self, key: &str) -> Result<()> {
        for (name, rate) in [("teacher", self.teacher), ("memory", self.memory)] {
            check_rate(&format!("{key}.{name}"), rate)?;
        }
        Ok(())
    }

    /// The averaged teacher, which the server keeps. Without an average it is the ensemble itself.
    pub(crate) fn teacher<'a>(&self, round: &mut Fusion<'_>, ensemble: &'a Targets) -> Cow<'a, Targets> {
        if self.teacher == 0.0 {
            return Cow::Borrowed(ensemble);
        }
        let mut kept = |name: &str| round.state.vectors.remove(name).unwrap_or_default();
        let before = Targets { logits: kept(TEACHER[0]), features: kept(TEACHER[1]) };
        let teacher = average(self.teacher, round.round(), &before, ensemble);
        let vectors = &mut round.state.vectors;
        vectors.insert(TEACHER[0].into(), teacher.logits.clone());
        vectors.insert(TEACHER[1].into(), teacher.features.clone());
        Cow::Owned(teacher)
    }

    /// The averaged memory; the last one is in the server's state.
    pub(crate) fn memory(&self, round: &Fusion<'_>, ensemble: Targets) -> Targets {
        if self.memory == 0.0 {
            return ensemble;
        }
        let none = Targets::default();
        average(self.memory, round.round(), round.state.targets.as_deref().unwrap_or(&none), &ensemble)
    }
}

/// Whether the rate of an average is in its range.
pub(crate) fn check_rate(key: &str, rate: f64) -> Result<()> {
    let expected = "in [0, 1); 0 is no average, 0.9 reaches back about ten rounds";
    Error::require((0.0..1.0).contains(&rate), key, rate, expected)
}

fn average(rate: f64, round: u32, before: &Targets, now: &Targets) -> Targets {
    Targets {
        logits: mix(rate, round, &before.logits, &now.logits),
        features: mix(rate, round, &before.features, &now.features),
    }
}

/// ρₜ before + (1 − ρₜ) now; `now` where there is nothing before.
pub(crate) fn mix(rate: f64, round: u32, before: &[f32], now: &[f32]) -> Vec<f32> {
    let t = f64::from(round);
    let rho = rate.min(t / (t + 2.0)) as f32;
    if rho == 0.0 || before.len() != now.len() {
        return now.to_vec();
    }
    before.iter().zip(now).map(|(before, now)| rho * before + (1.0 - rho) * now).collect()
}
