//! The two halves of a round for engines that distribute clients: Ray, Flower, or a program of the user's. They exchange bytes.

use crate::{Options, Planned, guarded};
use anyhow::Result;
use fedproj_core::{
    ClientResult, ClientState, ClientStates, Config, Coordinator, Download, Error, LocalTraining, Manifest, Mean,
    Method, Opening, Partial, Run, RunDir, Stop, client_state_from_bytes, client_state_to_bytes,
};
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

    /// Rejects a worker whose results would be others.
    fn check(&self, worker: &Self) -> Result<(), Error> {
        let mut differs = Vec::new();
        if self.version != worker.version {
            differs.push(format!("version {} instead of {}", worker.version, self.version));
        }
        if self.isa != worker.isa {
            differs.push(format!("instruction set {} instead of {}", worker.isa, self.isa));
        }
        let other = self.hashes.iter().filter(|(name, hash)| worker.hashes.get(*name) != Some(*hash));
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
    directory: RunDir,
    coordinator: Coordinator,
    clients: ClientStates,
    /// The open round, and its clients.
    opening: Option<(Opening, Vec<u32>)>,
}

/// The server's half, with the run directory of `fedproj run`.
#[pyclass(frozen, module = "fedproj._fedproj")]
pub struct Server {
    serving: Mutex<Serving>,
    means: Option<Vec<Mean>>,
    origin: String,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[pymethods]
impl Server {
    /// Begins a run in a directory, or resumes it.
    #[new]
    fn new(py: Python<'_>, run: &Planned, dir: PathBuf, options: &str) -> PyResult<Self> {
        guarded(py, || {
            let options = Options::read(options)?;
            let (data_dir, device) =
                (fedproj::data_dir(options.data_dir.clone())?, options.device().open_for(1)?.remove(0));
            let opened = Run::open_server(&dir, &run.config, data_dir.as_deref(), device.clone(), options.resume)?;
            let (directory, coordinator, clients) = opened;
            let experiment = coordinator.experiment();
            let origin = Origin::of(&Manifest::of(experiment, device), &experiment.config)?;
            let means = coordinator.means();
            let serving = Mutex::new(Serving { directory, coordinator, clients, opening: None });
            Ok(Self { serving, means, origin: serde_json::to_string(&origin)? })
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

    /// Opens the next round: its number, the download and the clients; `None` when all rounds are done.
    fn open<'py>(&self, py: Python<'py>) -> PyResult<Option<Task<'py>>> {
        let opened = guarded(py, || {
            let mut serving = lock(&self.serving);
            if serving.coordinator.is_done() {
                return Ok(None);
            }
            let opening = serving.coordinator.open()?;
            let round = opening.download.round;
            let cohort = serving.coordinator.cohort();
            let bytes = opening.download.to_bytes()?;
            serving.opening = Some((opening, cohort.clone()));
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

    /// Ends the round with the results of all its clients, or with sums of them; the round's record as JSON. Beside a result is
    /// what the client keeps, unless it keeps that itself.
    fn close(
        &self,
        py: Python<'_>,
        results: Vec<(PyBackedBytes, Option<PyBackedBytes>)>,
        are_sums: bool,
        seconds: f64,
    ) -> PyResult<String> {
        guarded(py, || {
            let Serving { directory, coordinator, clients, opening } = &mut *lock(&self.serving);
            let (opening, cohort) = opening.take().ok_or_else(|| Error::config("no round is open"))?;
            let record = if are_sums {
                let means = self.means.as_deref().unwrap_or_default();
                let mut whole = Partial::new(means);
                results.iter().try_for_each(|(bytes, _)| whole.merge(Partial::from_bytes(bytes, means)?))?;
                check_cohort(&cohort, whole.clients())?;
                let record = coordinator.close(&opening, &whole, seconds)?;
                clients.extend(whole.states);
                record
            } else {
                let (mut all, mut kept) = (Vec::with_capacity(results.len()), ClientStates::new());
                for (result, state) in &results {
                    let result = ClientResult::from_bytes(result)?;
                    if let Some(state) = state {
                        kept.insert(result.client, client_state_from_bytes(state)?);
                    }
                    all.push(result);
                }
                all.sort_by_key(|result| result.client);
                check_cohort(&cohort, all.iter().map(|result| result.client))?;
                let record = coordinator.close(&opening, &all, seconds)?;
                clients.extend(kept);
                record
            };
            let text = serde_json::to_string(&record)?;
            let federation = coordinator.experiment().config.federation.clone();
            directory.record(record, coordinator.state(), clients, &federation)?;
            Ok(text)
        })
    }

    /// Writes the results of a run whose rounds are all done; its summary as JSON.
    fn finish(&self, py: Python<'_>) -> PyResult<String> {
        guarded(py, || {
            let serving = lock(&self.serving);
            let coordinator = &serving.coordinator;
            Ok(serde_json::to_string(&serving.directory.finish(coordinator.experiment(), coordinator.state())?)?)
        })
    }
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

/// Clients with the states that were read.
type Received = Vec<(u32, ClientState)>;

/// Clients and what they keep.
type Clients = Vec<(u32, Option<PyBackedBytes>)>;

#[pymethods]
impl Trainer {
    /// A worker of a server with this origin. It reads the data that the configuration names on its own machine.
    #[new]
    fn new(py: Python<'_>, origin: &str, options: &str) -> PyResult<Self> {
        guarded(py, || {
            let (origin, options): (Origin, _) = (serde_json::from_str(origin)?, Options::read(options)?);
            let config = Config::from_toml(&origin.config).map_err(|error| Error::config(error.to_string()))?;
            let method = config.method.build()?;
            let data_dir = fedproj::data_dir(options.data_dir.clone())?;
            let device = options.device().open_for(1)?.remove(0);
            let experiment = fedproj_core::Experiment::load(config, method.as_ref(), data_dir.as_deref())?;
            origin.check(&Origin::of(&Manifest::of(&experiment, device.clone()), &experiment.config)?)?;
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

    /// Trains clients; the sum of their results.
    fn train_summed<'py>(&self, py: Python<'py>, download: &[u8], clients: Clients) -> PyResult<Bound<'py, PyBytes>> {
        let sums = guarded(py, || {
            let (download, clients) = read(download, &clients)?;
            let clients: Vec<_> = clients.iter().map(|(client, state)| (*client, state)).collect();
            Ok(lock(&self.training).run_summed(self.method.as_ref(), &download, &clients)?.to_bytes()?)
        })?;
        Ok(PyBytes::new(py, &sums))
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
