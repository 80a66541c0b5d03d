//! Going back to an earlier round of a federation's run, after a member has spoiled the model.

use super::journal::{Event, Journal};
use super::lock_folder;
use crate::error::{Error, Result};
use crate::identity::operator;
use std::path::Path;

/// Goes back to the end of the first `to_round` rounds of a federation's last run; returns the run. The journal records it
/// first: a server that starts after an interruption completes it.
///
/// # Errors
/// If a server runs in the folder, there is no run, or no checkpoint of that round is left.
pub fn rollback(dir: &Path, to_round: u32) -> Result<String> {
    let no_run = || Error::config(format!("`{}` holds no run", dir.display()));
    if !dir.is_dir() {
        return Err(no_run());
    }
    let _lock = lock_folder(dir)?;
    let mut last = None;
    Journal::read(dir, &mut |entry| {
        if let Event::RoundOpened { run, .. } = entry.event {
            last = Some(run);
        }
        Ok(())
    })?;
    let run = last.ok_or_else(no_run)?;
    let run_dir = dir.join("runs").join(&run);
    fedproj_core::check_rollback(&run_dir, to_round)?;
    let event = Event::RolledBack { run: run.clone(), to_round };
    Journal::open(dir, &mut |_| ())?.append_as(Some(operator()), event)?;
    fedproj_core::rollback(&run_dir, to_round)?;
    Ok(run)
}
