//! The server. [`serve`] opens a federation's folder and puts the parts together. The [`desk`] offers tasks and accepts
//! contributions, and [`http`] carries it. [`rounds`] is the round loop, and the [`journal`] records every decision.

mod attempt;
mod authority;
mod check;
mod config;
mod descriptors;
pub mod desk;
pub(crate) mod door;
mod export;
pub(crate) mod host;
pub mod http;
mod intake;
pub mod journal;
pub(crate) mod limit;
mod members;
mod patience;
pub mod presence;
mod refusals;
mod registry;
mod rollback;
pub mod rounds;
mod routes;
pub mod spool;
pub mod status;
pub(crate) mod strangers;
mod summing;
mod waiting;

pub use authority::{Authority, key_of_request};
pub use config::{Ensemble, ServerConfig};
pub use export::{Statement, check_export, export};
pub use registry::{INVITATION_LASTS, Invitation, NodeEntry, Registry};
pub use rollback::rollback;

use crate::error::{Error, Result};
use crate::files::create_dir;
use crate::identity::operator;
use crate::wire::{Done, hex, reject_simulated};
use desk::Desk;
use fedproj_core::{Config, Coordinator, Experiment, Manifest, Method, RunDir, Summary};
use http::{Addresses, Server};
use journal::{Event, Journal};
use members::Members;
use patience::Patience;
use rounds::{Recovered, Rounds};
use status::Status;
use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a finished server waits until its nodes know: a live node sends a heartbeat every ten seconds.
const FAREWELL: Duration = Duration::from_secs(12);

/// What a server needs.
#[derive(Clone, Debug)]
pub struct ServeSetup {
    /// The federation's folder.
    pub dir: PathBuf,
    /// The run.
    pub config: Config,
    /// What the same settings meant to earlier versions. A run that was begun with it resumes.
    pub earlier: Config,
    /// The server's own settings.
    pub server: ServerConfig,
    /// The data directory.
    pub data_dir: Option<PathBuf>,
    /// Threads that fuse and evaluate.
    pub n_threads: usize,
}

/// A finished run on a server.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Served {
    /// The run's directory.
    pub run: PathBuf,
    /// Its summary.
    #[serde(flatten)]
    pub summary: Summary,
}

/// Rejects a run that a federation cannot carry as it is set.
fn check_run(settings: &ServerConfig, experiment: &Experiment, method: &dyn Method) -> Result<()> {
    if let Some(reason) = method.needs_simulator() {
        return Err(Error::config(reason));
    }
    settings.check_privacy(&experiment.config)?;
    if settings.secure { summing::check(experiment, method) } else { Ok(()) }
}

/// Runs a configuration to its end, or until the future is dropped. It resumes where an earlier server stopped. `ready` gets
/// the addresses and the status once the server listens.
///
/// # Errors
/// If the folder is in use, an address is taken, or the disk fails.
pub async fn serve(setup: ServeSetup, ready: impl FnOnce(&Addresses, &Arc<Status>)) -> Result<Served> {
    let ServeSetup { dir, config, earlier, server: settings, data_dir, n_threads } = setup;
    reject_simulated(&config)?;
    create_dir(&dir)?;
    let _lock = lock_folder(&dir)?;
    let authority = Authority::open(&dir)?;
    let has_begun = |run: &str| dir.join("runs").join(run).join("config.toml").exists();
    let config = if has_begun(&run_name(&authority, &earlier)?) { earlier } else { config };
    let run = run_name(&authority, &config)?;
    let run_dir = dir.join("runs").join(&run);
    let mut recovered = Recovered::default();
    let mut enrolled = BTreeSet::new();
    let journal = Journal::open(&dir, &mut |entry| {
        if let Event::Enrolled { fingerprint, .. } | Event::Renewed { fingerprint, .. } = &entry.event {
            enrolled.insert(fingerprint.clone());
        }
        recovered.follow(&run, entry);
    })?;
    if let Some(to_round) = recovered.rolled_back {
        fedproj_core::rollback(&run_dir, to_round)?;
    }
    let desk = Arc::new(Desk::new(&dir, settings.clone(), journal, recovered.last.clone())?);
    let finished = RunDir::finished(&run_dir, &config)?;
    let method = config.method.build()?;
    let experiment = Experiment::load(config.clone(), method.as_ref(), data_dir.as_deref())?;
    check_run(&settings, &experiment, method.as_ref())?;
    experiment.notes().iter().for_each(|note| tracing::warn!(run, "{note}"));
    create_dir(&run_dir.join("checkpoints"))?;
    let manifest = Manifest { federated: true, ..Manifest::of(&experiment, n_threads) };
    let (mut directory, state) = RunDir::open(&run_dir, &config, &manifest, true)?;
    directory.keep_checkpoints(settings.checkpoints);
    directory.notes().iter().for_each(|note| tracing::warn!("{note}"));
    let status = Arc::new(Status::new(&run, &config.method.name, config.federation.rounds, directory.rounds()));
    let registry = Registry::open(&dir)?;
    let server = Server::new(Arc::clone(&desk), registry, authority, settings.clone(), Arc::clone(&status), enrolled);
    let addresses = Arc::new(server).listen().await?;
    tracing::info!(run, listen = %addresses.listen, done = directory.rounds().len(), "serving");
    ready(&addresses, &status);
    let summary = if let Some(summary) = finished {
        desk.finish(Done { run, model_hash: summary.model_hash.clone() });
        summary
    } else {
        let mut coordinator = match state {
            Some((state, _)) => Coordinator::resume(experiment, method, n_threads, state)?,
            None => Coordinator::new(experiment, method, n_threads)?,
        };
        coordinator.count_lost_releases(directory.n_releases_lost()?);
        let (desk, stop, started) = (Arc::clone(&desk), Arc::new(AtomicBool::new(false)), Instant::now());
        let _stop = StopOnDrop(Arc::clone(&stop));
        let (members, patience) = (Members::new(Registry::open(&dir)?), Patience::default());
        let mut rounds = Rounds {
            dir,
            run,
            config: settings,
            coordinator,
            directory,
            desk,
            status,
            recovered,
            members,
            patience,
            stop,
            started,
        };
        tokio::task::spawn_blocking(move || rounds.run()).await.map_err(Error::internal)??
    };
    farewell(&desk).await;
    Ok(Served { run: run_dir, summary })
}

/// Dropping the future of [`serve`] stops the server. The round loop runs on a thread of its own, so it must be informed.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits until every live node knows that the run is over, but max [`FAREWELL`].
async fn farewell(desk: &Desk) {
    let start = Instant::now();
    let unaware = || {
        let seen = desk.presence.seen();
        let alive = seen.iter().filter(|(client, _)| desk.presence.silence(**client) < FAREWELL);
        alive.filter(|(_, seen)| !seen.told_done).count()
    };
    while start.elapsed() < FAREWELL && (unaware() > 0 || start.elapsed() < Duration::from_millis(300)) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A run's name: the same configuration in the same federation is the same run and resumes.
fn run_name(authority: &Authority, config: &Config) -> Result<String> {
    let mut hasher = blake3::Hasher::new_derive_key("fedproj run 1");
    hasher.update(authority.federation());
    hasher.update(config.identity()?.as_bytes());
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}

/// Begins to replace the federation's authority, or finishes it once every member trusts the new one. Returns the
/// fingerprint of the authority that nodes pin from then on. The server must not run.
///
/// # Errors
/// If the server runs, or a member does not trust the new authority yet.
pub fn rotate_authority(dir: &Path, finish: bool) -> Result<String> {
    let authority = Authority::open(dir)?;
    let _lock = lock_folder(dir)?;
    let authority = if finish {
        let name = authority.bundle_name();
        let members = Registry::open(dir)?.nodes()?.into_iter().filter(|node| node.is_out().is_none());
        let behind: Vec<String> = members.filter(|node| node.trusts != name).map(|node| node.name).collect();
        if !behind.is_empty() {
            let behind = behind.join(", ");
            return Err(Error::config(format!(
                "not yet renewed: {behind}\nhint: let the server run until they have been connected, or revoke them"
            )));
        }
        authority.finish_rotation(dir)?
    } else {
        authority.begin_rotation(dir)?
    };
    let fingerprint = hex(&authority.fingerprint()?);
    let event = Event::AuthorityRotated { finished: finish, fingerprint: fingerprint.clone() };
    Journal::open(dir, &mut |_| ())?.append_as(Some(operator()), event)?;
    Ok(fingerprint)
}

/// One server per folder. The lock ends with the process, however that ends.
fn lock_folder(dir: &Path) -> Result<File> {
    let path = dir.join(".lock");
    let file = File::create(&path).map_err(Error::io("create", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::Locked(dir.into())),
        Err(TryLockError::Error(source)) => Err(Error::io("lock", &path)(source)),
    }
}

/// Locks a mutex. A panic of another request does not end the server.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
