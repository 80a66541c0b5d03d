//! Run directories: configuration, manifest, metrics and checkpoints on disk, in an order that survives `kill −9`.
//!
//! A round's line is appended to `metrics.jsonl` and synced before its checkpoint is written. A run that was killed resumes
//! from its last checkpoint, drops later lines and makes them again, bit for bit.

mod compare;
mod directory;
mod extend;
mod manifest;
mod rollback;
mod seal;
mod stored;
mod verify;

pub use directory::RunDir;
pub use extend::Extended;
pub use manifest::Manifest;
pub use rollback::{check_rollback, rollback};
pub use stored::StoredRun;
pub use verify::{Verified, VerifyPart, verify};

use crate::config::Config;
use crate::coordinator::Coordinator;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::record::{RoundRecord, Summary};
use crate::simulate::{Progress, Simulation};
use crate::trainer::ClientStates;
use std::path::Path;

/// A simulated run and its directory.
#[derive(Debug)]
pub struct Run {
    directory: RunDir,
    simulation: Simulation,
}

impl Run {
    /// Starts a run. If `resume` is set, resumes an unfinished one, or extends one of fewer rounds.
    ///
    /// # Errors
    /// If the directory is in use, holds another run, or cannot be written.
    pub fn open(
        dir: &Path,
        config: &Config,
        data_dir: Option<&Path>,
        device: impl Into<Device>,
        resume: bool,
    ) -> Result<Self> {
        let (directory, server, clients) = Self::open_server(dir, config, data_dir, device, resume)?;
        Ok(Self { directory, simulation: Simulation::with_server(server, clients)? })
    }

    /// As [`Run::open`], if clients train elsewhere: the directory, the server's half, and what clients keep.
    ///
    /// # Errors
    /// As [`Run::open`].
    pub fn open_server(
        dir: &Path,
        config: &Config,
        data_dir: Option<&Path>,
        device: impl Into<Device>,
        resume: bool,
    ) -> Result<(RunDir, Coordinator, ClientStates)> {
        let device = device.into();
        let config = &extend::config_for(dir, config)?;
        if config.privacy.is_by_nodes() {
            return Err(Error::config(
                "privacy.noise = \"nodes\": only the nodes of a federation add noise (`fedproj serve` with server.secure=true)\n\
                 hint: privacy.noise=system",
            ));
        }
        let method = config.method.build()?;
        let experiment = Experiment::load(config.clone(), method.as_ref(), data_dir)?;
        let manifest = Manifest::of(&experiment, device.clone());
        let (directory, state) = RunDir::open(dir, config, &manifest, resume)?;
        let (mut server, clients) = match state {
            Some((state, clients)) => (Coordinator::resume(experiment, method, device, state)?, clients),
            None => (Coordinator::new(experiment, method, device)?, ClientStates::new()),
        };
        server.count_lost_releases(directory.n_releases_lost()?);
        Ok((directory, server, clients))
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        self.directory.dir()
    }

    /// What a user should know: checkpoints that were set aside, and [`Experiment::notes`].
    pub fn notes(&self) -> Vec<String> {
        self.directory.notes().iter().cloned().chain(self.simulation.experiment().notes()).collect()
    }

    /// Completed rounds.
    pub fn rounds(&self) -> &[RoundRecord] {
        self.directory.rounds()
    }

    /// The simulation.
    pub fn simulation(&self) -> &Simulation {
        &self.simulation
    }

    /// Runs one round and writes it to disk; `None` when all are done.
    ///
    /// # Errors
    /// If the round fails or the disk is full; earlier rounds stay on disk.
    pub fn round(&mut self, progress: &(dyn Fn(Progress) + Sync)) -> Result<Option<&RoundRecord>> {
        if self.simulation.is_done() {
            return Ok(None);
        }
        let record = self.simulation.round(progress)?;
        let federation = &self.simulation.experiment().config.federation;
        self.directory.record(record, self.simulation.state(), self.simulation.clients(), federation)?;
        Ok(self.rounds().last())
    }

    /// Writes a checkpoint of the completed rounds, before a stop, whatever `federation.checkpoint_every` says.
    ///
    /// # Errors
    /// If the disk is full.
    pub fn save(&self) -> Result<()> {
        if self.rounds().is_empty() {
            return Ok(());
        }
        self.directory.checkpoint(self.simulation.state(), self.simulation.clients())
    }

    /// As [`RunDir::finish`].
    ///
    /// # Errors
    /// If the disk is full.
    pub fn finish(&self) -> Result<Summary> {
        self.directory.finish(self.simulation.experiment(), self.simulation.state())
    }
}
