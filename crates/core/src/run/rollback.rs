//! Going back to an earlier round of a run.

use super::directory::{checkpoints, lock};
use super::seal::model_file;
use crate::error::{Error, Result};
use crate::files::remove_if_exists;
use std::path::Path;

/// Checks that a run can go back to the end of its first `n_rounds` rounds.
///
/// # Errors
/// If no checkpoint of that round is left.
pub fn check_rollback(dir: &Path, n_rounds: u32) -> Result<()> {
    let all = checkpoints(dir)?;
    if n_rounds == 0 || all.iter().any(|(n, _)| *n == n_rounds) {
        return Ok(());
    }
    let left: Vec<String> = all.iter().map(|(n, _)| format!(", {n}")).collect();
    Err(Error::config(format!(
        "`{}` has no checkpoint after {n_rounds} rounds; it can go back to 0{}",
        dir.display(),
        left.concat()
    )))
}

/// Goes back to the end of a run's first `n_rounds` rounds: removes later checkpoints and the results of a finished run.
/// Opening the run drops the metrics of later rounds. Calling it again changes nothing.
///
/// # Errors
/// If no checkpoint of that round is left, or the run is in use.
pub fn rollback(dir: &Path, n_rounds: u32) -> Result<()> {
    let _lock = lock(dir)?;
    check_rollback(dir, n_rounds)?;
    let all = checkpoints(dir)?;
    // Newest first: wherever this is interrupted, the run is one that could have been killed.
    let of_groups = (1..).map(|group| dir.join(model_file(group))).take_while(|path| path.exists());
    let mut results: Vec<_> = of_groups.collect();
    results.extend(["model.safetensors", "metrics.csv", "summary.json"].map(|name| dir.join(name)));
    let later = all.into_iter().rev().filter(|(n, _)| *n > n_rounds).map(|(_, path)| path);
    for path in results.into_iter().rev().chain(later) {
        remove_if_exists(&path)?;
    }
    Ok(())
}
