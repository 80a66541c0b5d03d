//! The simulator: a federation whose clients train on threads or a GPU of this process.

use crate::coordinator::{Coordinator, Opening};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::fusion::ServerState;
use crate::gpu::GpuResults;
use crate::halves::{LocalTraining, Stop};
use crate::machine;
use crate::method::Method;
use crate::privacy::accountant::Sampling;
use crate::record::RoundRecord;
use crate::trainer::{ClientResult, ClientState, ClientStates};
use std::time::Instant;

/// A federation simulated in this process: each thread trains one client at a time, or a GPU trains many.
///
/// ```
/// use fedproj_core::{Config, Experiment, Simulation};
///
/// let config = Config::from_layers(None, &["method.name=fedavg".into(), "federation.rounds=1".into()])?;
/// let method = config.method.build()?;
/// let experiment = Experiment::load(config, method.as_ref(), None)?;
/// let mut simulation = Simulation::new(experiment, method, 1)?;
/// let record = simulation.round(&|_| ())?;
/// assert!(record.accuracy.is_some_and(|a| a > 0.05));
/// # Ok::<(), fedproj_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Simulation {
    server: Coordinator,
    training: LocalTraining,
    /// What clients keep between rounds. A failed round leaves it unchanged.
    clients: ClientStates,
    /// What the clients of the last round sent.
    last_results: Vec<ClientResult>,
    /// The lanes that still hold their vectors, if a GPU trained them.
    last_lanes: Option<Vec<u32>>,
}

/// Events for a progress bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// A client has finished its local training.
    ClientDone,
    /// The server has begun to fuse.
    Fusing,
}

impl Simulation {
    /// A simulation at the start of a run.
    ///
    /// # Errors
    /// If the network cannot be laid out.
    pub fn new(experiment: Experiment, method: Box<dyn Method>, device: impl Into<Device>) -> Result<Self> {
        Self::with_server(Coordinator::new(experiment, method, device)?, ClientStates::new())
    }

    /// A simulation that resumes from the state of the server and its clients.
    ///
    /// # Errors
    /// If the state does not fit the network.
    pub fn resume(
        experiment: Experiment,
        method: Box<dyn Method>,
        device: impl Into<Device>,
        state: ServerState,
        clients: ClientStates,
    ) -> Result<Self> {
        Self::with_server(Coordinator::resume(experiment, method, device, state)?, clients)
    }

    pub(crate) fn with_server(server: Coordinator, clients: ClientStates) -> Result<Self> {
        if server.on_gpu().is_empty() {
            let experiment = server.experiment();
            let n_clients = experiment.partition.n_clients();
            let n_vectors = machine::n_vectors(&experiment.config, n_clients, server.device().n_threads());
            experiment.groups().try_for_each(|of| machine::check_memory(&of.graph, n_vectors))?;
        }
        let training = LocalTraining::beside(&server)?;
        Ok(Self { server, training, clients, last_results: Vec::new(), last_lanes: None })
    }

    /// What the server keeps.
    pub fn state(&self) -> &ServerState {
        self.server.state()
    }

    /// What its clients keep.
    pub fn clients(&self) -> &ClientStates {
        &self.clients
    }

    /// The experiment of the simulation.
    pub fn experiment(&self) -> &Experiment {
        self.server.experiment()
    }

    /// What the clients of the last round sent, in the order of their ids: their models after local training.
    ///
    /// # Errors
    /// If they are on a GPU that does not respond.
    pub fn last_results(&mut self) -> Result<&[ClientResult]> {
        if let Some(trainer) = self.training.gpu() {
            trainer.download_all(&mut self.last_results, self.last_lanes.take())?;
        }
        Ok(&self.last_results)
    }

    /// What ends a round while its clients train. The simulation is then as before the round.
    pub fn stop(&self) -> &Stop {
        self.training.stop()
    }

    /// See [`Coordinator::is_done`].
    pub fn is_done(&self) -> bool {
        self.server.is_done()
    }

    /// See [`Coordinator::ended_early`].
    pub fn ended_early(&self) -> Option<String> {
        self.server.ended_early()
    }

    /// Runs one round.
    ///
    /// # Errors
    /// If a loss is not finite; the error names round and client.
    pub fn round(&mut self, progress: &(dyn Fn(Progress) + Sync)) -> Result<RoundRecord> {
        self.last_results.clear();
        let start = Instant::now();
        let opening = self.server.open()?;
        self.train_and_fuse(&opening, start, progress)
    }

    /// Runs one round with these clients, in increasing order, instead of those that the seed would draw. Use it to
    /// repeat a real federation's round in which some clients were late. Without clients, the round leaves the model as it is.
    ///
    /// # Errors
    /// As [`Simulation::round`], and under privacy, unless its ε holds for clients that somebody chose.
    pub fn round_of(&mut self, cohort: &[u32], progress: &(dyn Fn(Progress) + Sync)) -> Result<RoundRecord> {
        let privacy = &self.server.experiment().config.privacy;
        if privacy.is_on() && privacy.sampling != Sampling::Public {
            return Err(Error::config(
                "privacy.sampling: ε counts on clients that are drawn in secret, and these are chosen\n\
                 hint: privacy.sampling=public",
            ));
        }
        self.last_results.clear();
        let start = Instant::now();
        let opening = self.server.open_with(cohort.to_vec())?;
        if cohort.is_empty() {
            return self.server.skip(&opening);
        }
        self.train_and_fuse(&opening, start, progress)
    }

    fn train_and_fuse(
        &mut self,
        opening: &Opening,
        start: Instant,
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<RoundRecord> {
        let none = ClientState::new();
        let kept_by = |client: &u32| (*client, self.clients.get(client).unwrap_or(&none));
        let clients: Vec<_> = opening.cohort.iter().map(kept_by).collect();
        let (mut results, on_gpu) =
            self.training.train(self.server.method(), &opening.downloads(), &clients, progress)?;
        let local = start.elapsed().as_secs_f64();
        progress(Progress::Fusing);
        let kept: ClientStates = results
            .iter_mut()
            .map(|r| (r.client, std::mem::take(&mut r.state)))
            .filter(|(_, s)| !s.is_empty())
            .collect();
        if let (Some(trainer), Some(lanes)) = (self.training.gpu(), on_gpu) {
            let sent = GpuResults::new(trainer, &results, &lanes);
            let mut record = self.server.close(opening, &sent, local)?;
            self.server.describe_personal(&kept, &sent, &mut record)?;
            self.clients.extend(kept);
            (self.last_results, self.last_lanes) = (results, Some(lanes));
            return Ok(record);
        }
        let mut record = self.server.close(opening, &results, local)?;
        self.server.describe_personal(&kept, &results, &mut record)?;
        self.clients.extend(kept);
        (self.last_results, self.last_lanes) = (results, None);
        Ok(record)
    }
}
