//! Repeats recorded rounds and compares them, bit for bit.

use super::directory::checkpoints;
use super::manifest::check_device;
use super::stored::{config_text, hash_of, read_config, read_metrics};
use crate::checkpoint;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::simulate::Simulation;
use serde::Serialize;
use std::path::Path;

/// What [`verify`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// First round that was run again.
    pub from: u32,
    /// Rounds compared.
    pub n_rounds: u32,
}

/// Which rounds [`verify`] repeats. The default is all.
#[derive(Clone, Copy, Debug, Default)]
pub struct VerifyPart {
    /// Start from the oldest checkpoint that is left, not from the beginning.
    pub from_checkpoint: bool,
    /// Largest number of rounds.
    pub rounds: Option<u32>,
}

/// Repeats a recorded run or a part of it, and compares every round's model hash.
///
/// # Errors
/// [`Error::Differs`] at the first round that is not the same; or if the run cannot be read.
pub fn verify(
    dir: &Path,
    data_dir: Option<&Path>,
    device: impl Into<Device>,
    part: VerifyPart,
    progress: &(dyn Fn(u32) + Sync),
) -> Result<Verified> {
    let device = device.into();
    check_device(dir, &device)?;
    let config = read_config(dir)?;
    let method = config.method.build()?;
    let recorded = read_metrics(dir, None)?;
    let hash = hash_of(&config_text(dir)?);
    let experiment = Experiment::load(config, method.as_ref(), data_dir)?;
    let oldest = if part.from_checkpoint { checkpoints(dir)?.into_iter().next() } else { None };
    let mut simulation = match oldest {
        Some((_, path)) => {
            let (state, clients) = checkpoint::load(&path, &hash)?;
            Simulation::resume(experiment, method, device, state, clients)?
        }
        None => Simulation::new(experiment, method, device)?,
    };
    let from = simulation.state().n_rounds_done;
    let most = part.rounds.map_or(usize::MAX, |n| n as usize);
    let repeated = recorded.iter().skip(from as usize).take(most);
    let n_rounds = repeated.len() as u32;
    for expected in repeated {
        // The recorded clients, not those that the seed draws: in a federation some may have been late.
        let found = simulation.round_of(&expected.cohort, &|_| ())?;
        progress(found.round);
        if found.model_hash != expected.model_hash {
            let (expected, found_hash) = (expected.model_hash.clone(), found.model_hash);
            return Err(Error::Differs { round: found.round, expected, found: found_hash });
        }
    }
    Ok(Verified { from, n_rounds })
}
