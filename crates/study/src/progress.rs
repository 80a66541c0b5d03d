//! How far the runs of a sweep are, and who makes them. Several processes, on several machines, may share a sweep.

use crate::drive::Job;
use crate::runs::find_runs;
use anyhow::Result;
use fedproj_core::{RunDir, StoredRun};
use serde::Serialize;
use std::fmt;
use std::path::Path;

/// How far a run is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunProgress {
    /// Its name in the sweep.
    pub id: String,
    /// Its state.
    pub state: RunState,
    /// The machine and process that make it, or made it last; empty if unknown.
    pub by: String,
    /// Completed rounds.
    pub n_rounds_done: usize,
    /// All rounds.
    pub n_rounds: u32,
    /// Mean accuracy of the last rounds so far.
    pub accuracy: Option<f64>,
}

/// See [`RunProgress::state`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// All rounds are done.
    Finished,
    /// A process makes it.
    Running,
    /// It was begun, and no process makes it.
    Stopped,
    /// Nobody has begun it.
    Waiting,
}

impl fmt::Display for RunState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Finished => "finished",
            Self::Running => "running",
            Self::Stopped => "stopped",
            Self::Waiting => "waiting",
        })
    }
}

/// How far a job is.
///
/// # Errors
/// If its directory holds another run, or cannot be read.
pub fn progress_of(job: &Job) -> Result<RunProgress> {
    let Job { id, dir, config } = job;
    let n_rounds = config.federation.rounds;
    if !dir.join("config.toml").exists() {
        let (state, by) = (RunState::Waiting, String::new());
        return Ok(RunProgress { id: id.clone(), state, by, n_rounds_done: 0, n_rounds, accuracy: None });
    }
    let is_finished = RunDir::finished(dir, config)?.is_some();
    let (is_held, by) = RunDir::holder(dir)?;
    let state = match (is_finished, is_held) {
        (true, _) => RunState::Finished,
        (false, true) => RunState::Running,
        (false, false) => RunState::Stopped,
    };
    let run = StoredRun::so_far(dir)?;
    let accuracy = (!run.rounds.is_empty()).then_some(run.summary.headline);
    Ok(RunProgress { id: id.clone(), state, by, n_rounds_done: run.rounds.len(), n_rounds, accuracy })
}

/// How far the runs are that were begun below a directory.
///
/// # Errors
/// If there is none, or one cannot be read.
pub fn progress_in(out: &Path) -> Result<Vec<RunProgress>> {
    let progress = |dir: std::path::PathBuf| {
        let id = dir.strip_prefix(out).unwrap_or(&dir).display().to_string();
        let config = StoredRun::so_far(&dir)?.config;
        progress_of(&Job { id, dir, config })
    };
    find_runs(&[out.to_path_buf()])?.into_iter().map(progress).collect()
}
