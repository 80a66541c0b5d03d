//! What the clients of a round sent, as fusion reads it: from memory in the simulator, from disk on a server.

use crate::distill::EnsembleWeights;
use crate::error::{Error, Result};
use crate::evaluate::{Evaluator, Outputs};
use crate::fixed::{Scale, Sum};
use crate::trainer::{ClientResult, LocalStats};
use std::fmt::Debug;

/// A vector of a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part<'a> {
    /// The weights θ_k.
    Weights,
    /// Their buffers.
    Buffers,
    /// A vector that a method sends beside the weights.
    Upload(&'a str),
    /// Logits on the public set, if clients compute them.
    Logits,
    /// Features on the public set, likewise.
    Features,
}

/// A contribution without its vectors.
#[derive(Clone, Copy, Debug)]
pub struct ClientSummary<'a> {
    /// The client.
    pub client: u32,
    /// Its samples n_k.
    pub n_samples: usize,
    /// Local steps τ_k.
    pub n_steps: u32,
    /// Measurements during local training.
    pub stats: &'a LocalStats,
}

/// Sums of clients' measurements in integers, for rounds whose sums are in integers too. They are the sums of losses, of
/// compared steps and of projected steps. Not every client has the other three measurements: each has a sum and a count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measured(pub [i64; 9]);

impl Measured {
    /// 2 to this power is one unit of a measurement, which counts up to 2⁴⁰.
    const SCALE: f64 = (1 << 20) as f64;

    /// One client's.
    pub fn of(stats: &LocalStats) -> Self {
        let fixed =
            |v: f64| (v.clamp(-Self::SCALE * Self::SCALE, Self::SCALE * Self::SCALE) * Self::SCALE).round() as i64;
        let mut all = [fixed(stats.loss), stats.n_compared.into(), stats.n_projected.into(), 0, 0, 0, 0, 0, 0];
        let optional = [stats.cosine, stats.memory_loss_before, stats.memory_loss_after];
        for (pair, value) in all[3..].chunks_exact_mut(2).zip(optional) {
            pair.copy_from_slice(&value.map_or([0, 0], |v| [fixed(v), 1]));
        }
        Self(all)
    }

    /// Adds another client's.
    pub fn add(&mut self, other: &Self) {
        crate::fixed::add(&mut self.0, &other.0);
    }

    /// The measurements of `n` clients as one: means, and sums of steps.
    pub(crate) fn mean(&self, n: usize) -> (f64, u64, u64, [Option<f64>; 3]) {
        let [loss, compared, projected, ..] = self.0;
        let mean = |sum: i64, n: i64| (n > 0).then(|| sum as f64 / Self::SCALE / n as f64);
        let optional = std::array::from_fn(|i| mean(self.0[3 + 2 * i], self.0[4 + 2 * i]));
        (mean(loss, n.max(1) as i64).unwrap_or(0.0), compared as u64, projected as u64, optional)
    }
}

/// The contributions of a round, in the order of client ids. The order of arrival does not matter.
pub trait Contributions: Debug + Sync {
    /// Their number.
    fn n(&self) -> usize;

    /// The summary of a contribution.
    fn summary(&self, at: usize) -> ClientSummary<'_>;

    /// Values in a part of a contribution; 0 if the part was not sent.
    fn len_of(&self, at: usize, part: Part<'_>) -> usize;

    /// Values in all parts of a contribution.
    fn n_values(&self, at: usize) -> usize;

    /// Reads `out.len()` values of a part, from value `from`.
    ///
    /// # Errors
    /// If they cannot be read.
    fn read(&self, at: usize, part: Part<'_>, from: usize, out: &mut [f32]) -> Result<()>;

    /// Σ_k w_k of a part over the contributions `chosen`. An implementation may override this when it can sum faster
    /// than by reading each vector.
    fn weighted_sum(&self, chosen: &[usize], weights: &[f32], part: Part<'_>) -> Option<Result<Vec<f32>>> {
        let _ = (chosen, weights, part);
        None
    }

    /// Σ_k round(w_k · x_k · 2^s) of a part over the contributions `chosen`, see [`crate::fixed`]. An implementation may override
    /// this, as [`Contributions::weighted_sum`]. It need not where a value is out of range.
    fn fixed_sum(&self, chosen: &[usize], weights: &[f64], part: Part<'_>, scale: Scale) -> Option<Result<Vec<i64>>> {
        let _ = (chosen, weights, part, scale);
        None
    }

    /// The sum of a part over all contributions in integers, see [`crate::fixed`], where they were summed before they arrived:
    /// on workers, or under masks. Such contributions need no vectors that can be read.
    fn summed(&self, by: EnsembleWeights, part: Part<'_>) -> Option<Result<Sum>> {
        let _ = (by, part);
        None
    }

    /// The sum of a part over all contributions where clients have clipped it and added noise, as [`crate::privacy::discrete`]
    /// counts.
    fn noised(&self, part: Part<'_>) -> Option<&[i64]> {
        let _ = part;
        None
    }

    /// The sum of all clients' measurements, where single ones are not known.
    fn measured(&self) -> Option<Measured> {
        None
    }

    /// Σ_k w_k of the outputs of the models `chosen` on the public set. An implementation may override this when the models
    /// are where `evaluator` computes.
    fn ensemble(
        &self,
        evaluator: &Evaluator,
        chosen: &[usize],
        weights: &[f32],
        with_features: bool,
    ) -> Option<Result<Outputs>> {
        let _ = (evaluator, chosen, weights, with_features);
        None
    }
}

impl Contributions for Vec<ClientResult> {
    fn n(&self) -> usize {
        self.len()
    }

    fn summary(&self, at: usize) -> ClientSummary<'_> {
        self[at].summary()
    }

    fn len_of(&self, at: usize, part: Part<'_>) -> usize {
        self[at].part(part).len()
    }

    fn n_values(&self, at: usize) -> usize {
        self[at].n_values()
    }

    fn read(&self, at: usize, part: Part<'_>, from: usize, out: &mut [f32]) -> Result<()> {
        let values = self[at].part(part);
        let misfit = Error::Misfit { what: "a client's vector", found: values.len(), expected: from + out.len() };
        out.copy_from_slice(values.get(from..from + out.len()).ok_or(misfit)?);
        Ok(())
    }
}

impl ClientResult {
    /// The result without its vectors.
    pub fn summary(&self) -> ClientSummary<'_> {
        let Self { client, n_samples, n_steps, ref stats, .. } = *self;
        ClientSummary { client, n_samples, n_steps, stats }
    }

    pub(crate) fn n_values(&self) -> usize {
        self.weights.len() + self.buffers.len() + self.uploads.values().map(Vec::len).sum::<usize>()
    }

    /// A vector of the result. Simulated clients never compute the ensemble's parts.
    pub(crate) fn part(&self, part: Part<'_>) -> &[f32] {
        match part {
            Part::Weights => &self.weights,
            Part::Buffers => &self.buffers,
            Part::Upload(name) => self.uploads.get(name).map_or(&[], |v| v),
            Part::Logits | Part::Features => &[],
        }
    }
}
