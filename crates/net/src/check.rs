//! What is checked of a contribution before it counts.

use crate::blob::Store;
use crate::config::ServerConfig;
use crate::desk::Offer;
use crate::error::{Error, Result};
use crate::message::{Blob, Contribution};
use crate::spool::read_values;

/// Values that are checked at a time.
const BLOCK: usize = 1 << 14;

/// No weight, logit or statistic of a network that learns is beyond this; one that is can end everybody's run.
const VALUE_MAX: f32 = 1e6;

/// Everything that can be said of a contribution before its vectors are there.
pub(crate) fn check_shape(c: &Contribution, offer: &Offer, limits: &ServerConfig) -> Result<()> {
    let names: Vec<&str> = c.parts.iter().map(|p| p.name.as_str()).collect();
    let expected: Vec<&str> = offer.parts.iter().map(|(name, _)| name.as_str()).collect();
    if names != expected {
        return Err(Error::protocol(format!("vectors {names:?}, where {expected:?} are expected")));
    }
    for (part, (name, n)) in c.parts.iter().zip(&offer.parts) {
        part.blob.check()?;
        if part.blob.len != 4 * *n as u64 {
            return Err(Error::protocol(format!(
                "{name}: {} bytes where {n} values of 4 bytes are expected",
                part.blob.len
            )));
        }
    }
    if c.n_samples == 0 || c.n_samples > limits.samples_max {
        return Err(Error::protocol(format!("{} samples; 1 to {} are accepted", c.n_samples, limits.samples_max)));
    }
    if c.n_steps == 0 || !c.stats.is_finite() {
        return Err(Error::protocol("no local step, or a measurement that is not finite"));
    }
    Ok(())
}

/// Finite values, and an update that is not too large.
pub(crate) fn check_content(c: &Contribution, store: &Store, offer: &Offer, norm_max: f64) -> Result<()> {
    for part in c.parts.iter().filter(|p| p.blob.len > 0) {
        let is_weights = part.name == "weights";
        let norm = check_vector(store, &part.blob, is_weights.then_some(&offer.base), &part.name)?;
        if is_weights && norm_max > 0.0 && norm > norm_max {
            return Err(Error::protocol(format!("an update of norm {norm:.3e}; server.norm_max is {norm_max:.3e}")));
        }
    }
    Ok(())
}

/// Checks that every value of a vector is finite and of a sane size, and how far the vector is from `base`: ‖v − base‖, or ‖v‖ without one.
fn check_vector(store: &Store, blob: &Blob, base: Option<&[f32]>, what: &str) -> Result<f64> {
    let n = (blob.len / 4) as usize;
    let (mut total, mut values) = (0.0, Vec::with_capacity(BLOCK));
    for from in (0..n).step_by(BLOCK) {
        values.resize(BLOCK.min(n - from), 0.0);
        read_values(store, blob, from, &mut values)?;
        if let Some(v) = values.iter().find(|v| !v.is_finite() || v.abs() > VALUE_MAX) {
            return Err(Error::protocol(format!(
                "{what} holds the value {v}; finite ones up to {VALUE_MAX} are accepted"
            )));
        }
        total += match base {
            Some(base) => values.iter().zip(&base[from..]).map(|(v, b)| (f64::from(*v) - f64::from(*b)).powi(2)).sum(),
            None => values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>(),
        };
    }
    Ok(total.sqrt())
}
