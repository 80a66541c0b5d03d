//! The checks of a contribution before it counts.

use super::config::ServerConfig;
use super::desk::Offer;
use crate::error::{Error, Result};
use crate::secure::{MaskedLayout, Sums};
use crate::wire::{Blob, Contribution, Store, decode_f32, part_name};
use fedproj_core::{Contributions, Evaluator, Experiment, LocalStats, Model, Part};
use fedproj_data::Dataset;
use std::ops::Range;

/// Values per check.
const BLOCK: usize = 1 << 14;

/// No weight, logit or statistic of a learning network exceeds this. A single larger value can ruin the global model.
const VALUE_MAX: f32 = 1e6;

/// Samples on which a model is tried.
const TRIAL_SAMPLES: usize = 256;

/// Tries models before they count: each vector of one may be harmless and the model useless.
#[derive(Debug)]
pub(super) struct Trial {
    samples: Dataset,
    evaluator: Evaluator,
}

impl Trial {
    /// A trial on some public samples of a run, or else on test samples.
    pub fn new(experiment: &Experiment) -> Result<Self> {
        let data = experiment.public.as_ref().unwrap_or(&experiment.test);
        let some: Vec<u32> = (0..data.n_samples().min(TRIAL_SAMPLES) as u32).collect();
        Ok(Self { samples: data.subset(&some), evaluator: Evaluator::new(&experiment.graph, 1)? })
    }

    /// Checks that a contribution's model gives usable outputs.
    pub fn check(&self, c: &Contribution, store: &Store) -> Result<()> {
        let read = |part| {
            let blob = c.blob(part).filter(|blob| blob.len > 0);
            blob.map_or(Ok(Vec::new()), |blob| decode_f32(&store.get(blob)?, (blob.len / 4) as usize, "a vector"))
        };
        self.try_model(&read(Part::Weights)?, &read(Part::Buffers)?)
    }

    /// Checks that a model gives usable outputs.
    fn try_model(&self, weights: &[f32], buffers: &[f32]) -> Result<()> {
        let model = Model { weights, buffers };
        let outputs = self.evaluator.outputs(&[model], &self.samples, false)?;
        let logits = outputs.iter().flat_map(|outputs| &outputs.logits);
        match logits.copied().find(|v| !is_usable(*v)) {
            Some(v) => Err(Error::protocol(format!("the model's outputs contain {v}; it cannot be used"))),
            None => Ok(()),
        }
    }
}

/// The checks of a secure sum, in the place of those of the contributions in it: what holds for each holds for their mean.
pub(super) struct SumChecks<'a> {
    pub limits: &'a ServerConfig,
    /// The weights from which the clients started.
    pub base: &'a [f32],
    pub variances: Vec<Range<usize>>,
    pub trial: &'a Trial,
}

impl SumChecks<'_> {
    /// Checks the number of samples and the means.
    pub fn check(&self, layout: &MaskedLayout, sums: &Sums) -> Result<()> {
        let n = sums.n() as i64;
        let most = n.saturating_mul(self.limits.samples_max.min(i64::MAX as u64) as i64);
        if let Some(samples) = sums.n_samples().filter(|samples| !(n..=most).contains(samples)) {
            return Err(Error::protocol(format!("{samples} samples; {n} clients may have {n} to {most}")));
        }
        let (mut weights, mut buffers) = (Vec::new(), Vec::new());
        for (part, mean) in layout.means(sums, self.base) {
            let name = part_name(part);
            if let Some(v) = mean.iter().find(|v| !is_usable(**v)) {
                return Err(Error::protocol(format!("the mean of {name} contains the value {v}")));
            }
            match part {
                Part::Weights => weights = mean,
                Part::Buffers => buffers = mean,
                _ => (),
            }
        }
        let norm =
            weights.iter().zip(self.base).map(|(v, b)| (f64::from(*v) - f64::from(*b)).powi(2)).sum::<f64>().sqrt();
        if self.limits.norm_max > 0.0 && norm > self.limits.norm_max {
            return Err(Error::protocol(format!("a mean update of norm {norm:.3e}")));
        }
        let of_variances = self.variances.iter().filter_map(|range| buffers.get(range.clone()));
        if let Some(v) = of_variances.flatten().find(|v| **v < 0.0) {
            return Err(Error::protocol(format!("a mean variance of {v}")));
        }
        self.trial.try_model(&weights, &buffers)
    }
}

fn is_usable(v: f32) -> bool {
    v.is_finite() && v.abs() <= VALUE_MAX
}

/// Everything that can be checked before the vectors arrive.
pub(crate) fn check_shape(c: &Contribution, offer: &Offer, limits: &ServerConfig) -> Result<()> {
    let names: Vec<&str> = c.parts.iter().map(|p| p.name.as_str()).collect();
    let expected: Vec<&str> = offer.parts.iter().map(|(name, _)| name.as_str()).collect();
    if names != expected {
        return Err(Error::protocol(format!("vectors {names:?}; expected {expected:?}")));
    }
    for (part, (name, n)) in c.parts.iter().zip(&offer.parts) {
        part.blob.check()?;
        if part.blob.len != 4 * *n as u64 {
            return Err(Error::protocol(format!("{name}: {} bytes; expected {n} values of 4 bytes", part.blob.len)));
        }
    }
    if offer.attempt.is_some() {
        let claims_nothing = c.n_samples == 0 && c.n_steps == 0 && c.stats == LocalStats::default();
        return claims_nothing.then_some(()).ok_or_else(|| Error::protocol("a masked contribution claims nothing"));
    }
    if c.n_samples == 0 || c.n_samples > limits.samples_max {
        return Err(Error::protocol(format!("{} samples; 1 to {} are accepted", c.n_samples, limits.samples_max)));
    }
    let steps_max = u64::from(offer.epochs) * c.n_samples.div_ceil(offer.batch.max(1) as u64);
    if c.n_steps == 0 || u64::from(c.n_steps) > steps_max {
        return Err(Error::protocol(format!(
            "{} local steps; {} samples allow 1 to {steps_max}",
            c.n_steps, c.n_samples
        )));
    }
    let (compared, projected) = (c.stats.n_compared, c.stats.n_projected);
    if !is_sane(&c.stats) || projected > compared || compared > c.n_steps {
        return Err(Error::protocol("impossible measurements: not finite, too large, or more than the local steps"));
    }
    Ok(())
}

/// Whether all numbers are finite, and so small that their sum over clients is finite too.
fn is_sane(stats: &LocalStats) -> bool {
    let optional = [stats.cosine, stats.memory_loss_before, stats.memory_loss_after];
    [stats.loss, stats.seconds].into_iter().chain(optional.into_iter().flatten()).all(|v| v.abs() <= 1e12)
}

/// Checks that values are finite and that the update is not too large.
pub(crate) fn check_content(c: &Contribution, store: &Store, offer: &Offer, norm_max: f64) -> Result<()> {
    if offer.attempt.is_some() {
        // Masked values are random; the sum's check word shows whether they are right.
        return Ok(());
    }
    for part in c.parts.iter().filter(|p| p.blob.len > 0) {
        let is_weights = part.name == "weights";
        let norm = check_vector(store, &part.blob, is_weights.then_some(&offer.base), &part.name)?;
        if is_weights && norm_max > 0.0 && norm > norm_max {
            return Err(Error::protocol(format!(
                "an update of norm {norm:.3e} exceeds server.norm_max = {norm_max:.3e}"
            )));
        }
        if part.name == "buffers" {
            check_variances(store, &part.blob, &offer.variances)?;
        }
    }
    Ok(())
}

/// A negative variance is finite, but makes every output of the network NaN.
fn check_variances(store: &Store, blob: &Blob, variances: &[Range<usize>]) -> Result<()> {
    for range in variances {
        let mut values = vec![0.0; range.len()];
        store.read_values(blob, range.start, &mut values)?;
        if let Some(v) = values.iter().find(|v| **v < 0.0) {
            return Err(Error::protocol(format!("buffers contain the negative variance {v}")));
        }
    }
    Ok(())
}

/// Checks that every value of a vector is finite and within ±[`VALUE_MAX`]. Returns ‖v − base‖, or ‖v‖ without a base.
fn check_vector(store: &Store, blob: &Blob, base: Option<&[f32]>, what: &str) -> Result<f64> {
    let n = (blob.len / 4) as usize;
    let (mut total, mut values) = (0.0, Vec::with_capacity(BLOCK));
    for from in (0..n).step_by(BLOCK) {
        values.resize(BLOCK.min(n - from), 0.0);
        store.read_values(blob, from, &mut values)?;
        if let Some(v) = values.iter().find(|v| !is_usable(**v)) {
            return Err(Error::protocol(format!(
                "{what} contains the value {v}; only finite values up to {VALUE_MAX} are accepted"
            )));
        }
        total += match base {
            Some(base) => values.iter().zip(&base[from..]).map(|(v, b)| (f64::from(*v) - f64::from(*b)).powi(2)).sum(),
            None => values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>(),
        };
    }
    Ok(total.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::encode_f32;

    fn offer() -> Offer {
        Offer { variances: vec![2..3, 3..4], epochs: 2, batch: 10, ..Offer::default() }
    }

    #[test]
    fn impossible_claims_are_rejected() {
        let limits = ServerConfig::default();
        let claim = |n_steps, stats: &LocalStats| {
            check_shape(
                &Contribution { n_samples: 25, n_steps, stats: stats.clone(), ..Contribution::default() },
                &offer(),
                &limits,
            )
        };
        let sane = LocalStats { loss: 1.0, n_compared: 6, n_projected: 6, ..LocalStats::default() };
        // 25 samples in batches of 10 make 3 steps per epoch.
        assert!(claim(6, &sane).is_ok());
        assert!(claim(7, &sane).is_err_and(|e| e.to_string().contains("1 to 6")));
        for stats in [
            LocalStats { loss: 1.7e308, ..sane.clone() },
            LocalStats { loss: f64::NAN, ..sane.clone() },
            LocalStats { n_compared: 7, ..sane.clone() },
            LocalStats { n_compared: 3, ..sane.clone() },
        ] {
            assert!(claim(6, &stats).is_err_and(|e| e.to_string().contains("impossible")), "{stats:?}");
        }
    }

    #[test]
    fn negative_variances_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        for (buffers, is_fine) in [([-1.0, -1.0, 0.0, 2.0, -1.0], true), ([0.0, 0.0, 1.0, -1e-3, 0.0], false)] {
            let blob = store.put(&encode_f32(&buffers)).unwrap();
            assert_eq!(check_variances(&store, &blob, &offer().variances).is_ok(), is_fine);
        }
    }
}
