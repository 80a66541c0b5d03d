//! How hard each client pulls at the global model, and the limits on it that the round itself gives.

use crate::contributions::{Contributions, Part};
use crate::distill::EnsembleWeights;
use crate::error::Result;
use crate::robust::RobustConfig;
use crate::trainer::{ClientResult, Download};
use serde::{Deserialize, Serialize};

/// Values of a vector that are read at a time.
const BLOCK: usize = 1 << 14;

/// How hard a client pulled at the global model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pull {
    /// The client.
    pub client: u32,
    /// Norm of its update, ‖θ_k − θ_g‖, before clipping.
    pub norm: f64,
    /// Cosine between its update and the mean update of the round.
    pub cosine: f64,
}

impl Pull {
    /// The pulls of a round's clients at these weights.
    pub(crate) fn all(results: &dyn Contributions, base: &[f32]) -> Result<Vec<Self>> {
        let n = results.n();
        let (mut updates, mut mean) = (vec![0.0; n * BLOCK], vec![0.0; BLOCK]);
        let (mut squares, mut products, mut mean_square) = (vec![0.0; n], vec![0.0; n], 0.0);
        for (block, base) in base.chunks(BLOCK).enumerate() {
            let mean = &mut mean[..base.len()];
            mean.fill(0.0);
            for (at, update) in updates.chunks_mut(BLOCK).enumerate() {
                let update = &mut update[..base.len()];
                results.read(at, Part::Weights, block * BLOCK, update)?;
                update.iter_mut().zip(base).for_each(|(v, base)| *v -= base);
                mean.iter_mut().zip(&*update).for_each(|(mean, v)| *mean += f64::from(*v) / n as f64);
            }
            for (at, update) in updates.chunks(BLOCK).enumerate() {
                let update = &update[..base.len()];
                squares[at] += update.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
                products[at] += update.iter().zip(&*mean).map(|(v, mean)| f64::from(*v) * mean).sum::<f64>();
            }
            mean_square += mean.iter().map(|mean| mean * mean).sum::<f64>();
        }
        let of = |at: usize| {
            let lengths = (squares[at] * mean_square).sqrt();
            let cosine = if lengths > 0.0 { products[at] / lengths } else { 0.0 };
            Self { client: results.summary(at).client, norm: squares[at].sqrt(), cosine }
        };
        Ok((0..n).map(of).collect())
    }
}

/// The clipping of one vector of all contributions.
#[derive(Debug)]
pub(crate) struct Clip<'a> {
    part: Part<'a>,
    /// What the clients started from. Empty: zero.
    base: Vec<f32>,
    /// The factor of each contribution's distance from the base.
    factors: Vec<f32>,
}

impl<'a> Clip<'a> {
    /// The clipping of everything that the clients sent; empty if the configuration limits nothing.
    pub fn all(
        robust: &RobustConfig,
        results: &dyn Contributions,
        weights: &[f32],
        buffers: &[f32],
        uploads: &[&'a str],
    ) -> Result<Vec<Self>> {
        let mut all = Vec::new();
        if results.summed(EnsembleWeights::Samples, Part::Buffers).is_some() {
            // Clients that were summed before they arrived have clipped their own vectors.
            return Ok(all);
        }
        for (part, base) in parts(weights, buffers, uploads) {
            let clip = if part == Part::Weights { robust.clip } else { 0.0 };
            if clip > 0.0 || robust.clip_ratio > 0.0 {
                let norms = norms(results, part, base)?;
                let limits = [clip, robust.clip_ratio * median(&norms)].into_iter().filter(|limit| *limit > 0.0);
                let limit = limits.fold(f64::INFINITY, f64::min);
                let factor = |norm: f64| if norm > limit { (limit / norm) as f32 } else { 1.0 };
                all.push(Self { part, base: base.to_vec(), factors: norms.into_iter().map(factor).collect() });
            }
        }
        Ok(all)
    }

    /// Clips values of a vector, from value `from`.
    pub fn apply(&self, at: usize, part: Part<'_>, from: usize, values: &mut [f32]) {
        let factor = self.factors[at];
        if self.part != part || factor >= 1.0 {
            return;
        }
        if self.base.is_empty() {
            for v in values {
                *v *= factor;
            }
            return;
        }
        for (v, base) in values.iter_mut().zip(&self.base[from..]) {
            *v = base + factor * (*v - base);
        }
    }
}

/// Holds a client's own update to [`RobustConfig::clip`], as a server would that sees it.
///
/// # Errors
/// Never for results in memory.
pub fn hold_back(robust: &RobustConfig, sent: &Download, result: &mut ClientResult) -> Result<()> {
    let alone = vec![std::mem::take(result)];
    let clips = Clip::all(robust, &alone, &sent.weights, &sent.buffers, &[]);
    *result = alone.into_iter().next().unwrap_or_default();
    clips?.iter().for_each(|clip| clip.apply(0, Part::Weights, 0, &mut result.weights));
    Ok(())
}

/// The contributions by their longest vector, measured by the median of the round; the longest first.
pub(crate) fn outliers(
    results: &dyn Contributions,
    weights: &[f32],
    buffers: &[f32],
    uploads: &[&str],
) -> Result<Vec<usize>> {
    let mut longest = vec![0.0; results.n()];
    for (part, base) in parts(weights, buffers, uploads) {
        let norms = norms(results, part, base)?;
        let median = median(&norms);
        for (longest, norm) in longest.iter_mut().zip(norms).filter(|_| median > 0.0) {
            *longest = f64::max(*longest, norm / median);
        }
    }
    let mut order: Vec<usize> = (0..results.n()).collect();
    order.sort_by(|a, b| longest[*b].total_cmp(&longest[*a]));
    Ok(order)
}

/// All vectors that a client can send, and what it started from. Empty: zero.
fn parts<'a, 'b>(weights: &'b [f32], buffers: &'b [f32], uploads: &[&'a str]) -> Vec<(Part<'a>, &'b [f32])> {
    let mut parts = vec![(Part::Weights, weights), (Part::Buffers, buffers)];
    parts.extend(uploads.iter().map(|&name| (Part::Upload(name), &[][..])));
    parts.extend([(Part::Logits, &[][..]), (Part::Features, &[][..])]);
    parts
}

/// ‖v − base‖ of a vector of every contribution; without a base ‖v‖.
fn norms(results: &dyn Contributions, part: Part<'_>, base: &[f32]) -> Result<Vec<f64>> {
    let mut row = vec![0.0; BLOCK];
    let norm = |at: usize| -> Result<f64> {
        let (len, mut total) = (results.len_of(at, part), 0.0);
        for from in (0..len).step_by(BLOCK) {
            let row = &mut row[..BLOCK.min(len - from)];
            results.read(at, part, from, row)?;
            total += if base.is_empty() {
                row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>()
            } else {
                row.iter().zip(&base[from..]).map(|(v, base)| f64::from(v - base).powi(2)).sum::<f64>()
            };
        }
        Ok(total.sqrt())
    };
    (0..results.n()).map(norm).collect()
}

/// The median; 0 of nothing.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n => sorted[(n - 1) / 2].midpoint(sorted[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trainer::{ClientState, LocalStats};

    fn results(weights: &[[f32; 2]]) -> Vec<ClientResult> {
        let of = |(client, w): (usize, &[f32; 2])| ClientResult {
            client: client as u32,
            weights: w.to_vec(),
            buffers: vec![w[0]],
            uploads: [("c".to_owned(), vec![w[1]])].into(),
            n_samples: 1,
            n_steps: 1,
            state: ClientState::new(),
            stats: LocalStats::default(),
        };
        weights.iter().enumerate().map(of).collect()
    }

    #[test]
    fn norm_and_cosine_single_out_the_client_that_pulls_elsewhere() {
        // Updates (3, 4), (3, 4), (-9, -12) from (1, 0): the mean is (-1, -4/3).
        let pulls = Pull::all(&results(&[[4.0, 4.0], [4.0, 4.0], [-8.0, -12.0]]), &[1.0, 0.0]).unwrap();
        let expected = [(0, 5.0, -1.0), (1, 5.0, -1.0), (2, 15.0, 1.0)];
        for (pull, (client, norm, cosine)) in pulls.iter().zip(expected) {
            assert!(pull.client == client && (pull.norm - norm).abs() < 1e-12, "{pull:?}");
            assert!((pull.cosine - cosine).abs() < 1e-12, "{pull:?}");
        }
        let still = Pull::all(&results(&[[1.0, 0.0]]), &[1.0, 0.0]).unwrap();
        assert_eq!((still[0].norm, still[0].cosine), (0.0, 0.0));
    }

    #[test]
    fn every_vector_is_held_to_a_multiple_of_the_rounds_median() {
        let robust = RobustConfig { clip_ratio: 2.0, ..RobustConfig::default() };
        let results = results(&[[2.0, 1.0], [2.0, 1.0], [101.0, 40.0]]);
        let clips = Clip::all(&robust, &results, &[1.0, 1.0], &[1.0], &["c"]).unwrap();
        let read = |at: usize, part: Part<'_>| {
            let mut values = vec![0.0; results.len_of(at, part)];
            results.read(at, part, 0, &mut values).unwrap();
            for clip in &clips {
                clip.apply(at, part, 0, &mut values);
            }
            values
        };
        assert_eq!(read(1, Part::Weights), [2.0, 1.0]);
        let pulled = read(2, Part::Weights);
        let norm = (pulled[0] - 1.0).hypot(pulled[1] - 1.0);
        assert!((norm - 2.0).abs() < 1e-5, "{pulled:?}");
        assert_eq!((read(2, Part::Buffers), read(2, Part::Upload("c"))), (vec![3.0], vec![2.0]));
    }

    #[test]
    fn an_outlier_may_show_in_any_vector() {
        let mut results = results(&[[2.0, 1.0], [2.5, 1.0], [2.0, 1.0]]);
        let order = |results: &Vec<ClientResult>| outliers(results, &[1.0, 1.0], &[1.0], &["c"]).unwrap();
        assert_eq!(order(&results), [1, 0, 2]);
        results[2].uploads.insert("c".into(), vec![9.0]);
        assert_eq!(order(&results), [2, 1, 0]);
        results[0].buffers = vec![-90.0];
        assert_eq!(order(&results), [0, 2, 1]);
    }
}
