//! The two halves of a round for engines that distribute clients: Ray, Flower, or a program of the user's. They exchange bytes.

use crate::node::Node;
use crate::{Options, SweepRun, guarded};
use anyhow::Result;
use fedproj_core::{
    ClientResult, ClientState, ClientStates, Config, Coordinator, Download, Error, Experiment, LocalTraining, Manifest,
    Mean, Method, Needs, Opening, Partial, Run, RunDir, Stop, client_state_from_bytes, client_state_to_bytes,
};
use fedproj_data::Dataset;
use fedproj_net::wire::encode_public;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a worker must have in common with its server.
#[derive(Serialize, Deserialize)]
struct Origin {
    version: String,
    isa: String,
    config: String,
    /// Of data, partition and initial model.
    hashes: std::collections::BTreeMap<String, String>,
}

impl Origin {
    fn of(manifest: &Manifest, config: &Config) -> Result<Self> {
        let isa = manifest.hardware.get("isa").cloned().unwrap_or_default();
        let (version, hashes) = (manifest.version.clone(), manifest.hashes.clone());
        Ok(Self { version, isa, config: config.to_toml()?, hashes })
    }

    /// Rejects a worker whose results would be others. A node may have some facts of its own.
    fn check(&self, worker: &Self, own: &[&str]) -> Result<(), Error> {
        let mut differs = Vec::new();
        if self.version != worker.version {
            differs.push(format!("version {} instead of {}", worker.version, self.version));
        }
        if self.isa != worker.isa {
            differs.push(format!("instruction set {} instead of {}", worker.isa, self.isa));
        }
        let shared = self.hashes.iter().filter(|(name, _)| !own.contains(&name.as_str()));
        let other = shared.filter(|(name, hash)| worker.hashes.get(*name) != Some(*hash));
        differs.extend(other.map(|(name, _)| format!("another `{name}`")));
        if differs.is_empty() {
            return Ok(());
        }
        Err(Error::config(format!(
            "this worker would give other results: {}\nhint: install the same version and the same data on all machines",
            differs.join(", ")
        )))
    }
}

/// A round's number, its download and its clients.
type Task<'py> = (u32, Bound<'py, PyBytes>, Vec<u32>);

struct Serving {
    /// Until the server leaves it.
    directory: Option<RunDir>,
    coordinator: Coordinator,
    clients: ClientStates,
    open: Option<Open>,
}

/// A round in progress.
struct Open {
    opening: Opening,
    results: Results,
}

/// What has arrived.
enum Results {
    Single(Vec<ClientResult>),
    Summed(Partial),
}

/// The server's half, with the run directory of `fedproj run`.
#[pyclass(frozen, module = "fedproj._fedproj")]
pub struct Server {
    serving: Mutex<Serving>,
    means: Option<Vec<Mean>>,
    keeps: bool,
    measures_kept: bool,
    origin: String,
}

/// Vectors of the model's length that a server holds for each result: its bytes, and the result.
const N_VECTORS_PER_RESULT: usize = 2;

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[pymethods]
impl Server {
    /// Begins a run in a directory, or resumes it.
    #[new]
    fn new(py: Python<'_>, run: &SweepRun, dir: PathBuf, options: &str) -> PyResult<Self> {
        guarded(py, || {
            let options = Options::read(options)?;
            let (data_dir, device) =
                (fedproj::data_dir(options.data_dir.clone())?, options.device().open_for(1)?.remove(0));
            let opened = Run::open_server(&dir, &run.config, data_dir.as_deref(), device.clone(), options.resume)?;
            let (directory, coordinator, clients) = opened;
            let experiment = coordinator.experiment();
            let origin = serde_json::to_string(&Origin::of(&Manifest::of(experiment, device), &experiment.config)?)?;
            let (config, method, means) = (&experiment.config, coordinator.method(), coordinator.means());
            let n_public = experiment.public.as_deref().map_or(0, Dataset::n_samples);
            let keeps = Needs::of(config, method, &experiment.graph, n_public)?.bytes_kept > 0;
            let measures_kept = config.federation.evaluate_clients && method.personal_model().is_some();
            if means.is_none() {
                let cohort = config.federation.cohort(experiment.partition.n_clients());
                coordinator.check_memory(N_VECTORS_PER_RESULT * cohort)?;
            }
            let serving = Mutex::new(Serving { directory: Some(directory), coordinator, clients, open: None });
            Ok(Self { serving, means, keeps, measures_kept, origin })
        })
    }

    /// What workers must have in common with this server, for [`Trainer`].
    #[getter]
    fn origin(&self) -> &str {
        &self.origin
    }

    /// Whether workers may send one sum instead of every result.
    #[getter]
    fn takes_sums(&self) -> bool {
        self.means.is_some()
    }

    /// Whether clients of the method keep something between rounds.
    #[getter]
    fn keeps(&self) -> bool {
        self.keeps
    }

    /// Whether every round is measured on what clients keep.
    #[getter]
    fn measures_kept(&self) -> bool {
        self.measures_kept
    }

    /// Whether the next round ends with a checkpoint, which holds what all clients keep.
    #[getter]
    fn saves(&self, py: Python<'_>) -> PyResult<bool> {
        guarded(py, || {
            let serving = lock(&self.serving);
            Ok(serving.coordinator.experiment().config.federation.saves(serving.coordinator.state().n_rounds_done))
        })
    }

    /// The public set, for nodes that do not read it themselves.
    fn public<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let bytes =
            guarded(py, || Ok(lock(&self.serving).coordinator.experiment().public.as_deref().map(encode_public)))?;
        Ok(bytes.map(|bytes| PyBytes::new(py, &bytes)))
    }

    /// Opens the next round: its number, the download and the clients; `None` when all rounds are done.
    fn open<'py>(&self, py: Python<'py>) -> PyResult<Option<Task<'py>>> {
        let opened = guarded(py, || {
            let mut serving = lock(&self.serving);
            if serving.coordinator.is_done() {
                return Ok(None);
            }
            let opening = serving.coordinator.open()?;
            let round = opening.download.round;
            let cohort = opening.cohort.clone();
            let bytes = opening.download.to_bytes()?;
            let results = self.means.as_deref().map(|means| Results::Summed(Partial::new(means)));
            let results = results.unwrap_or_else(|| Results::Single(Vec::with_capacity(cohort.len())));
            serving.open = Some(Open { opening, results });
            Ok(Some((round, bytes, cohort)))
        })?;
        Ok(opened.map(|(round, bytes, cohort)| (round, PyBytes::new(py, &bytes), cohort)))
    }

    /// What a client keeps; `None` if nothing.
    fn state<'py>(&self, py: Python<'py>, client: u32) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let bytes = guarded(py, || {
            let serving = lock(&self.serving);
            Ok(serving.clients.get(&client).map(client_state_to_bytes).transpose()?)
        })?;
        Ok(bytes.map(|bytes| PyBytes::new(py, &bytes)))
    }

    /// Takes a client's result, or a sum of results.
    fn add(&self, py: Python<'_>, result: PyBuffer<u8>) -> PyResult<()> {
        let bytes = result.to_vec(py)?;
        guarded(py, || {
            let serving = &mut *lock(&self.serving);
            match &mut serving.open.as_mut().ok_or_else(no_round)?.results {
                Results::Single(all) => all.push(ClientResult::from_bytes(&bytes)?),
                Results::Summed(sum) => {
                    sum.merge(Partial::from_bytes(&bytes, self.means.as_deref().unwrap_or_default())?)?;
                }
            }
            Ok(())
        })
    }

    /// Ends the round with what has arrived; its record as JSON. `kept` is what clients keep, of all that have trained since the
    /// last checkpoint; it may be left out where neither a checkpoint nor a measurement needs it.
    fn close(&self, py: Python<'_>, kept: Vec<(u32, PyBackedBytes)>, seconds: f64) -> PyResult<String> {
        guarded(py, || {
            let Serving { directory, coordinator, clients, open } = &mut *lock(&self.serving);
            let Open { opening, results } = open.take().ok_or_else(no_round)?;
            for (client, state) in &kept {
                clients.insert(*client, client_state_from_bytes(state)?);
            }
            let record = match results {
                Results::Summed(sum) => {
                    check_cohort(&opening.cohort, sum.clients())?;
                    coordinator.close(&opening, &sum, seconds)?
                }
                Results::Single(mut all) => {
                    all.sort_by_key(|result| result.client);
                    check_cohort(&opening.cohort, all.iter().map(|result| result.client))?;
                    let mut record = coordinator.close(&opening, &all, seconds)?;
                    coordinator.describe_personal(clients, &all, &mut record)?;
                    record
                }
            };
            let text = serde_json::to_string(&record)?;
            let federation = coordinator.experiment().config.federation.clone();
            directory.as_mut().ok_or_else(no_directory)?.record(record, coordinator.state(), clients, &federation)?;
            Ok(text)
        })
    }

    /// Writes the results of a run whose rounds are all done; its summary as JSON.
    fn finish(&self, py: Python<'_>) -> PyResult<String> {
        guarded(py, || {
            let serving = lock(&self.serving);
            let Serving { directory, coordinator, .. } = &*serving;
            let directory = directory.as_ref().ok_or_else(no_directory)?;
            Ok(serde_json::to_string(&directory.finish(coordinator.experiment(), coordinator.state())?)?)
        })
    }

    /// Lets others use the run directory. The traceback of an error may keep this object for long.
    fn leave(&self) {
        lock(&self.serving).directory = None;
    }
}

fn no_round() -> Error {
    Error::config("no round is open")
}

fn no_directory() -> Error {
    Error::config("this server has left its run directory")
}

/// Every client of the round once, and nobody else.
fn check_cohort(cohort: &[u32], found: impl Iterator<Item = u32>) -> Result<(), Error> {
    let found: Vec<u32> = found.collect();
    if found == cohort {
        return Ok(());
    }
    Err(Error::config(format!("results of the clients {found:?}, but the round has {cohort:?}")))
}

/// The clients' half, on threads or a GPU.
#[pyclass(frozen, module = "fedproj._fedproj")]
pub struct Trainer {
    training: Mutex<LocalTraining>,
    method: Box<dyn Method>,
    stop: Stop,
}

/// A client's result, and what it keeps.
type Trained<'py> = (Bound<'py, PyBytes>, Option<Bound<'py, PyBytes>>);

/// A sum of results, and what their clients keep.
type Summed<'py> = (Bound<'py, PyBytes>, Vec<(u32, Bound<'py, PyBytes>)>);

/// Clients with the states that were read.
type Received = Vec<(u32, ClientState)>;

/// Clients and what they keep.
type Clients = Vec<(u32, Option<PyBackedBytes>)>;

#[pymethods]
impl Trainer {
    /// A worker of a server with this origin. It reads the data that the configuration names on its own machine. `node` limits it
    /// to what a [`Node`] does; `public` is the server's public set, for a node with data of its own.
    #[new]
    #[pyo3(signature = (origin, options, node=None, public=None))]
    fn new(
        py: Python<'_>,
        origin: &str,
        options: &str,
        node: Option<&str>,
        public: Option<PyBackedBytes>,
    ) -> PyResult<Self> {
        guarded(py, || {
            let (origin, options): (Origin, _) = (serde_json::from_str(origin)?, Options::read(options)?);
            let config = Config::from_toml(&origin.config).map_err(|error| Error::config(error.to_string()))?;
            let method = config.method.build()?;
            let data_dir = fedproj::data_dir(options.data_dir.clone())?;
            let device = options.device().open_for(1)?.remove(0);
            let node: Option<Node> = node.map(serde_json::from_str).transpose()?;
            let own = node.as_ref().map(|node| node.own_facts(&config)).unwrap_or_default();
            let experiment = match &node {
                None => Experiment::load(config, method.as_ref(), data_dir.as_deref())?,
                Some(node) => node.load(config, method.as_ref(), data_dir.as_deref(), public.as_deref())?,
            };
            origin.check(&Origin::of(&Manifest::of(&experiment, device.clone()), &experiment.config)?, &own)?;
            let training = LocalTraining::open(&Arc::new(experiment), method.as_ref(), device)?;
            let stop = training.stop().clone();
            Ok(Self { training: Mutex::new(training), method, stop })
        })
    }

    /// Trains clients; their results, and what they keep.
    fn train<'py>(&self, py: Python<'py>, download: &[u8], clients: Clients) -> PyResult<Vec<Trained<'py>>> {
        let results = guarded(py, || {
            let (download, clients) = read(download, &clients)?;
            let clients: Vec<_> = clients.iter().map(|(client, state)| (*client, state)).collect();
            let results = lock(&self.training).run_many(self.method.as_ref(), &download, &clients)?;
            let bytes = |mut result: ClientResult| {
                let state = std::mem::take(&mut result.state);
                let state = (!state.is_empty()).then(|| client_state_to_bytes(&state)).transpose()?;
                Ok((result.to_bytes()?, state))
            };
            results.into_iter().map(bytes).collect::<Result<Vec<_>>>()
        })?;
        let python = |(result, state): (Vec<u8>, Option<Vec<u8>>)| {
            (PyBytes::new(py, &result), state.map(|state| PyBytes::new(py, &state)))
        };
        Ok(results.into_iter().map(python).collect())
    }

    /// Trains clients; the sum of their results, and what they keep.
    fn train_summed<'py>(&self, py: Python<'py>, download: &[u8], clients: Clients) -> PyResult<Summed<'py>> {
        let (sum, kept) = guarded(py, || {
            let (download, clients) = read(download, &clients)?;
            let clients: Vec<_> = clients.iter().map(|(client, state)| (*client, state)).collect();
            let mut sum = lock(&self.training).run_summed(self.method.as_ref(), &download, &clients)?;
            let kept = std::mem::take(&mut sum.states).into_iter();
            let kept = kept.map(|(client, state)| Ok((client, client_state_to_bytes(&state)?)));
            Ok((sum.to_bytes()?, kept.collect::<Result<Vec<_>>>()?))
        })?;
        let kept = kept.into_iter().map(|(client, state)| (client, PyBytes::new(py, &state)));
        Ok((PyBytes::new(py, &sum), kept.collect()))
    }

    /// Ends training within a round, from another thread; `False` allows it again.
    fn stop(&self, stop: bool) {
        self.stop.set(stop);
    }
}

fn read(download: &[u8], clients: &Clients) -> Result<(Arc<Download>, Received)> {
    let state = |(client, bytes): &(u32, Option<PyBackedBytes>)| {
        let state = bytes.as_deref().map(client_state_from_bytes).transpose()?;
        Ok((*client, state.unwrap_or_default()))
    };
    Ok((Arc::new(Download::from_bytes(download)?), clients.iter().map(state).collect::<Result<_>>()?))
}
