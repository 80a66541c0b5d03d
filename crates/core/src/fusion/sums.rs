//! Sums and means over contributions, client by client over blocks of coordinates.

use super::Fusion;
use crate::contributions::Part;
use crate::distill::EnsembleWeights;
use crate::error::{Error, Result};
use crate::fixed::{self, Scale, Sum};
use crate::robust::RobustRule;
use fedproj_nn::{Cpu, vector};

/// Coordinates per client that a sum reads at a time: 64 KB, which stay in a core's cache.
const BLOCK: usize = 1 << 14;

/// Values, over all clients, that a rule over columns reads at a time.
const COLUMNS: usize = 1 << 20;

impl Fusion<'_> {
    /// n_k / Σ n
    pub fn sample_weights(&self) -> Vec<f32> {
        self.shares(EnsembleWeights::Samples, &self.chosen)
    }

    /// 1 / m
    pub fn uniform_weights(&self) -> Vec<f32> {
        self.shares(EnsembleWeights::Uniform, &self.chosen)
    }

    /// Σ_k w_k θ_k
    ///
    /// # Errors
    /// If a contribution cannot be read.
    pub fn weighted(&self, weights: &[f32]) -> Result<Vec<f32>> {
        self.sum(weights, Part::Weights)
    }

    /// The mean of any vector of the results. Under a robust rule: the rule's value.
    ///
    /// # Errors
    /// If a contribution cannot be read, or a value is out of the range of sums in integers.
    pub fn mean(&self, by: EnsembleWeights, part: Part<'_>) -> Result<Vec<f32>> {
        let Some(scale) = self.scale else { return self.sum(&self.shares(by, &self.chosen), part) };
        let sum = match self.results.summed(by, part) {
            Some(sum) => sum?,
            None => self.fixed_sum(&self.fixed_weights(by, &self.chosen), part, scale)?,
        };
        Ok(sum.mean(scale))
    }

    /// The weights of contributions in a mean over them.
    pub(super) fn shares(&self, by: EnsembleWeights, which: &[usize]) -> Vec<f32> {
        match by {
            EnsembleWeights::Uniform => vec![1.0 / which.len() as f32; which.len()],
            EnsembleWeights::Samples => {
                let total: usize = self.summaries_of(which).map(|r| r.n_samples).sum();
                self.summaries_of(which).map(|r| r.n_samples as f32 / total as f32).collect()
            }
            EnsembleWeights::PerStep | EnsembleWeights::BySteps => {
                let weights = self.fixed_weights(by, which);
                let total: f64 = weights.iter().sum();
                weights.iter().map(|w| (w / total) as f32).collect()
            }
        }
    }

    /// Whether the round adds up integers, so that nothing but [`crate::Method::means`] may be known of it.
    pub fn sums_integers(&self) -> bool {
        self.scale.is_some()
    }

    /// The weight of all clients in a mean, as [`fixed::weight_of`] counts it.
    ///
    /// # Errors
    /// If the clients were summed before, and not for this mean; or if the weight is too large to be exact.
    pub fn total(&self, by: EnsembleWeights, part: Part<'_>) -> Result<f64> {
        let total = match self.results.summed(by, part) {
            Some(sum) => sum?.weight,
            None => self.fixed_weights(by, &self.chosen).iter().sum(),
        };
        let limit = fixed::total_max(by);
        if total < limit { Ok(total) } else { Err(Error::OutOfRange { value: total as f32, limit }) }
    }

    /// Σ_k w_k of any vector of the results. Under a robust rule: (Σ_k w_k) times the rule's value.
    ///
    /// # Errors
    /// If a contribution cannot be read.
    pub fn sum(&self, weights: &[f32], part: Part<'_>) -> Result<Vec<f32>> {
        let robust = &self.experiment.config.federation.robust;
        if self.is_by_column() {
            let total: f32 = weights.iter().sum();
            return self.by_coordinate(part, |column| total * robust.of_column(column));
        }
        if let Some(scale) = self.scale {
            let factor = fixed::factor_of(weights);
            let weights: Vec<f64> = weights.iter().map(|w| f64::from(*w) * factor).collect();
            return Ok(fixed::decode(&self.fixed_sum(&weights, part, scale)?.values, factor, scale));
        }
        if self.clips.is_empty()
            && let Some(sum) = self.results.weighted_sum(&self.chosen, weights, part)
        {
            return sum;
        }
        let mut out = vec![0.0; self.len_of(part)];
        let (cpu, mut row) = (&mut Cpu::new(1), vec![0.0; BLOCK.min(out.len())]);
        for (block, out) in out.chunks_mut(BLOCK).enumerate() {
            let row = &mut row[..out.len()];
            for (&at, &w) in self.chosen.iter().zip(weights) {
                self.read(at, part, block * BLOCK, row)?;
                vector::axpy(cpu, w, row, out);
            }
        }
        Ok(out)
    }

    /// Σ_k / N of any vector of the results, with N the number of all clients.
    ///
    /// # Errors
    /// As [`Fusion::mean`].
    pub fn sum_over_all(&self, part: Part<'_>) -> Result<Vec<f32>> {
        let (m, n) = (self.n_results(), self.n_clients() as f32);
        if self.scale.is_none() {
            return self.sum(&vec![1.0 / n; m], part);
        }
        let share = m as f32 / n;
        Ok(self.mean(EnsembleWeights::Uniform, part)?.into_iter().map(|v| v * share).collect())
    }

    /// The weights of the clients in sums in integers.
    pub(super) fn fixed_weights(&self, by: EnsembleWeights, which: &[usize]) -> Vec<f64> {
        let config = &self.experiment.config;
        let summaries = self.summaries_of(which);
        summaries.map(|r| fixed::weight_of(by, r.n_samples, config.normalised_steps(r.n_steps))).collect()
    }

    /// As [`Fusion::sum`], in integers.
    pub(super) fn fixed_sum(&self, weights: &[f64], part: Part<'_>, scale: Scale) -> Result<Sum> {
        let weight = weights.iter().sum();
        if self.clips.is_empty()
            && let Some(values) = self.results.fixed_sum(&self.chosen, weights, part, scale)
        {
            return Ok(Sum { values: values?, weight });
        }
        let mut sum = Sum { weight, ..Sum::of_length(self.len_of(part)) };
        let mut row = vec![0.0; BLOCK.min(sum.values.len())];
        for (block, sum) in sum.values.chunks_mut(BLOCK).enumerate() {
            let row = &mut row[..sum.len()];
            for (&at, &w) in self.chosen.iter().zip(weights) {
                self.read(at, part, block * BLOCK, row)?;
                fixed::accumulate(row, w, scale, sum).map_err(|error| self.blame(at, error))?;
            }
        }
        Ok(sum)
    }

    /// An error that one contribution causes.
    pub(super) fn blame(&self, at: usize, error: Error) -> Error {
        Error::Client { round: self.round, client: self.results.summary(at).client, source: Box::new(error) }
    }

    /// Any function of a coordinate's values, with one value per client.
    ///
    /// # Errors
    /// If a contribution cannot be read.
    pub fn by_coordinate(&self, part: Part<'_>, of: impl Fn(&mut [f32]) -> f32) -> Result<Vec<f32>> {
        let (len, m) = (self.len_of(part), self.n_results());
        let block = (COLUMNS / m.max(1)).clamp(1, len.max(1));
        let (mut rows, mut column, mut out) = (vec![0.0; block * m], vec![0.0; m], Vec::with_capacity(len));
        for from in (0..len).step_by(block) {
            let width = block.min(len - from);
            for (&at, row) in self.chosen.iter().zip(rows.chunks_mut(block)) {
                self.read(at, part, from, &mut row[..width])?;
            }
            for i in 0..width {
                column.iter_mut().enumerate().for_each(|(k, v)| *v = rows[k * block + i]);
                out.push(of(&mut column));
            }
        }
        Ok(out)
    }

    pub(super) fn is_by_column(&self) -> bool {
        matches!(self.experiment.config.federation.robust.rule, RobustRule::Median | RobustRule::TrimmedMean)
    }

    pub(super) fn len_of(&self, part: Part<'_>) -> usize {
        self.chosen.first().map_or(0, |&at| self.results.len_of(at, part))
    }

    /// As [`Contributions::read`], with clipped vectors.
    pub(super) fn read(&self, at: usize, part: Part<'_>, from: usize, out: &mut [f32]) -> Result<()> {
        self.results.read(at, part, from, out)?;
        for clip in &self.clips {
            clip.apply(at, part, from, out);
        }
        Ok(())
    }

    /// ‖θ_j − θ_k‖² between all contributions.
    pub(super) fn squared_distances(&self) -> Result<Vec<Vec<f64>>> {
        let (len, n) = (self.len_of(Part::Weights), self.results.n());
        let block = (COLUMNS / n).clamp(1, len.max(1));
        let (mut rows, mut distances) = (vec![0.0; block * n], vec![vec![0.0; n]; n]);
        for from in (0..len).step_by(block) {
            let width = block.min(len - from);
            for (at, row) in rows.chunks_mut(block).enumerate() {
                self.read(at, Part::Weights, from, &mut row[..width])?;
            }
            for j in 0..n {
                for k in 0..j {
                    let (a, b) = (&rows[j * block..][..width], &rows[k * block..][..width]);
                    let part: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                    distances[j][k] += part;
                    distances[k][j] += part;
                }
            }
        }
        Ok(distances)
    }
}
