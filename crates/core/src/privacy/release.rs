//! What a round reveals: the noised mean of the clients' models, and of their logits on the public set.

use super::{Draws, Model, Privacy, PrivacySpent, Released, Which};
use crate::contributions::{ClientSummary, Contributions, Part};
use crate::error::{Error, Result};
use crate::evaluate::{Evaluator, Outputs};
use crate::experiment::Experiment;
use crate::fusion::ServerState;
use crate::trainer::LocalStats;
use fedproj_rng::{Bits, Stream};

/// Share of a round's budget that counts how many vectors are within a limit, per limit that adapts.
const COUNT_SHARE: f64 = 0.01;

/// Rate at which a limit moves towards the quantile, on the scale of its logarithm: η_C of Andrew et al., "Differentially
/// Private Learning with Adaptive Clipping", NeurIPS 2021, arXiv:1905.03871.
const LIMIT_RATE: f64 = 0.2;

/// Where the server keeps the limits.
pub(crate) const LIMITS: [&str; 2] = ["privacy.clip", "privacy.clip_logits"];

/// The noised means as a method sees them: m clients that all sent the same. So every sum, share and ensemble that a method
/// takes is a function of the means, and no method knows of privacy.
#[derive(Debug)]
pub(crate) struct Release {
    n: usize,
    weights: Vec<f32>,
    logits: Vec<f32>,
    stats: LocalStats,
    /// What all rounds have revealed, this one included.
    pub spent: PrivacySpent,
}

/// See [`Privacy::release`].
pub(super) fn release(
    privacy: &Privacy,
    experiment: &Experiment,
    evaluator: &Evaluator,
    results: &dyn Contributions,
    state: &mut ServerState,
) -> Result<Release> {
    let (config, round) = (&privacy.config, state.n_rounds_done);
    if config.is_by_nodes() {
        return by_nodes(privacy, experiment, results, state);
    }
    let n_counts = if config.quantile > 0.0 { 1.0 + f64::from(u8::from(privacy.has_logits)) } else { 0.0 };
    let for_vectors = 1.0 - COUNT_SHARE * n_counts;
    let for_logits = if privacy.has_logits { config.split } else { 0.0 };
    let updates = Sum {
        privacy,
        limit: limit_of(state, LIMITS[0], config.clip),
        share: for_vectors * (1.0 - for_logits),
        base: &state.weights,
    };
    let mut draws = privacy.draws(round, Draws::Updates);
    let weights_of = |at: usize, row: &mut [f32]| results.read(at, Part::Weights, 0, row);
    let (weights, next_clip) = updates.noised_mean(results.n(), weights_of, &mut draws)?;
    let mut spent = PrivacySpent {
        epsilon: privacy.epsilon(round + 1),
        delta: config.delta,
        nominal: config.is_repeatable(),
        clip: updates.limit,
        clip_logits: None,
    };
    let (mut logits, mut next_limits) = (Vec::new(), vec![(LIMITS[0], next_clip)]);
    if let (true, Some(public)) = (privacy.has_logits, &experiment.public) {
        let zero = vec![0.0; public.n_samples() * experiment.private.n_classes()];
        let limit = limit_of(state, LIMITS[1], config.clip_logits);
        let sum = Sum { privacy, limit, share: for_vectors * for_logits, base: &zero };
        let logits_of = |at: usize, row: &mut [f32]| client_logits(experiment, evaluator, results, at, row);
        let mut draws = privacy.draws(round, Draws::Logits);
        let (mean, next) = sum.noised_mean(results.n(), logits_of, &mut draws)?;
        (logits, spent.clip_logits) = (mean, Some(limit));
        next_limits.push((LIMITS[1], next));
    }
    if config.quantile > 0.0 {
        let kept = next_limits.into_iter().map(|(name, limit)| (name.to_owned(), vec![limit as f32]));
        state.vectors.extend(kept);
    }
    Ok(Release { n: privacy.divisor(results.n()), weights, logits, stats: LocalStats::default(), spent })
}

/// The same where clients have clipped their vectors and added the noise.
fn by_nodes(
    privacy: &Privacy,
    experiment: &Experiment,
    results: &dyn Contributions,
    state: &ServerState,
) -> Result<Release> {
    let (config, n) = (&privacy.config, results.n());
    let mean = |released: &Released, base: &[f32]| -> Result<Vec<f32>> {
        let sum = results.noised(released.part).filter(|sum| sum.len() == base.len()).ok_or_else(|| {
            let problem = format!("no noised sum of {:?}; privacy.noise = \"nodes\" needs a federation", released.part);
            Error::Internal { what: "releasing a round", problem }
        })?;
        // How many add the noise does not change the unit.
        let means = config.share_of(released, n.max(1)).mean(sum, n);
        Ok(base.iter().zip(means).map(|(base, mean)| (f64::from(*base) + mean) as f32).collect())
    };
    let all = config.released(privacy.has_logits);
    let zero = vec![0.0; experiment.public.as_ref().map_or(0, |p| p.n_samples() * experiment.private.n_classes())];
    let logits = all.get(1).map(|released| mean(released, &zero)).transpose()?;
    let spent = PrivacySpent {
        epsilon: privacy.epsilon(state.n_rounds_done + 1),
        delta: config.delta,
        nominal: false,
        clip: config.clip,
        clip_logits: logits.as_ref().map(|_| config.clip_logits),
    };
    let weights = mean(&all[0], &state.weights)?;
    Ok(Release { n, weights, logits: logits.unwrap_or_default(), stats: LocalStats::default(), spent })
}

/// The limit that earlier rounds have led to.
fn limit_of(state: &ServerState, name: &str, first: f64) -> f64 {
    state.vectors.get(name).and_then(|limit| limit.first()).map_or(first, |limit| f64::from(*limit))
}

/// A client's logits on the public set: those that it sent, else computed from its model, as it would compute them.
fn client_logits(
    experiment: &Experiment,
    evaluator: &Evaluator,
    results: &dyn Contributions,
    at: usize,
    row: &mut [f32],
) -> Result<()> {
    if results.len_of(at, Part::Logits) == row.len() {
        return results.read(at, Part::Logits, 0, row);
    }
    let mut weights = vec![0.0; experiment.weights.len()];
    results.read(at, Part::Weights, 0, &mut weights)?;
    let model = Model { weights: &weights, buffers: &[] };
    for outputs in evaluator.outputs_on(experiment, Which::Public, &[model], false)? {
        row.copy_from_slice(&outputs.logits);
    }
    Ok(())
}

/// The sum of one vector per client, each within a limit of the base, and its share of the round's budget.
struct Sum<'a> {
    privacy: &'a Privacy,
    limit: f64,
    share: f64,
    base: &'a [f32],
}

impl Sum<'_> {
    /// base + (Σ_k clip(v_k − base) + noise) / m, and the next round's limit.
    ///
    /// Two Gaussian releases of shares s and 1 − s of the precision 1/z² are together one of multiplier z, so a part's noise is
    /// z/√s times its limit.
    fn noised_mean(
        &self,
        n: usize,
        read: impl Fn(usize, &mut [f32]) -> Result<()>,
        draws: &mut Stream<Box<dyn Bits>>,
    ) -> Result<(Vec<f32>, f64)> {
        let (m, z) = (self.privacy.divisor(n) as f64, self.privacy.config.noise_multiplier);
        let (mut row, mut sum) = (vec![0.0; self.base.len()], vec![0.0; self.base.len()]);
        // Counted from ½, so that a client moves it by ½ and not by 1.
        let mut n_within = 0.0;
        for at in 0..n {
            read(at, &mut row)?;
            let apart = || row.iter().zip(self.base).map(|(v, base)| f64::from(*v) - f64::from(*base));
            let norm = apart().map(|v| v * v).sum::<f64>().sqrt();
            n_within += if norm <= self.limit { 0.5 } else { -0.5 };
            // A client whose values are not finite adds nothing.
            if norm.is_finite() {
                let factor = self.limit / norm.max(self.limit);
                sum.iter_mut().zip(apart()).for_each(|(sum, v)| *sum += factor * v);
            }
        }
        let noise = z / self.share.sqrt() * self.limit;
        let mean = |(sum, base): (&f64, &f32)| (f64::from(*base) + (sum + noise * draws.normal()) / m) as f32;
        let mean = sum.iter().zip(self.base).map(mean).collect();
        let quantile = self.privacy.config.quantile;
        if quantile == 0.0 {
            return Ok((mean, self.limit));
        }
        let share_within = 0.5 + (n_within + 0.5 * z / COUNT_SHARE.sqrt() * draws.normal()) / m;
        Ok((mean, self.limit * (-LIMIT_RATE * (share_within - quantile)).exp()))
    }
}

impl Contributions for Release {
    fn n(&self) -> usize {
        self.n
    }

    fn summary(&self, at: usize) -> ClientSummary<'_> {
        ClientSummary { client: at as u32, n_samples: 1, n_steps: 1, stats: &self.stats }
    }

    fn len_of(&self, _: usize, part: Part<'_>) -> usize {
        self.part(part).len()
    }

    fn n_values(&self, _: usize) -> usize {
        self.weights.len()
    }

    fn read(&self, _: usize, part: Part<'_>, from: usize, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&self.part(part)[from..from + out.len()]);
        Ok(())
    }

    fn weighted_sum(&self, _: &[usize], weights: &[f32], part: Part<'_>) -> Option<Result<Vec<f32>>> {
        Some(Ok(scaled(weights, self.part(part))))
    }

    fn ensemble(&self, _: &Evaluator, _: &[usize], weights: &[f32], _: bool) -> Option<Result<Outputs>> {
        Some(Ok(Outputs { logits: scaled(weights, &self.logits), features: Vec::new() }))
    }
}

impl Release {
    fn part(&self, part: Part<'_>) -> &[f32] {
        match part {
            Part::Weights => &self.weights,
            Part::Logits => &self.logits,
            Part::Buffers | Part::Upload(_) | Part::Features => &[],
        }
    }
}

/// Σ_k w_k v of the same v. Weights that add up to 1 but for rounding leave it as it is.
fn scaled(weights: &[f32], values: &[f32]) -> Vec<f32> {
    let total: f64 = weights.iter().map(|w| f64::from(*w)).sum();
    let total = if (total - 1.0).abs() < 1e-5 { 1.0 } else { total as f32 };
    values.iter().map(|v| total * v).collect()
}
