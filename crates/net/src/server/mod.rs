//! A server from its folder: identities, journal, run directory and doors put together.

mod check;
mod config;
pub mod desk;
mod door;
pub mod http;
pub mod journal;
mod limit;
pub mod nodes;
pub mod presence;
pub mod registry;
pub mod rounds;
mod routes;
pub mod spool;
pub mod status;

pub use config::{Ensemble, ServerConfig};

use crate::error::{Error, Result};
use crate::files::create_dir;
use crate::identity::Authority;
use crate::node::session::refuse_texts;
use crate::server::desk::Desk;
use crate::server::http::{Addresses, Server};
use crate::server::journal::{Event, Journal};
use crate::server::registry::Registry;
use crate::server::rounds::{Recovered, Rounds};
use crate::server::status::Status;
use crate::wire::message::Done;
use fedproj_core::{Config, Coordinator, Experiment, RunDir, Summary};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a server that is done waits for nodes to hear of it: a node that is there gives a sign every ten seconds.
const FAREWELL: Duration = Duration::from_secs(12);

/// What a server needs.
#[derive(Clone, Debug)]
pub struct ServeSetup {
    /// The federation's folder.
    pub dir: PathBuf,
    /// The run.
    pub config: Config,
    /// The server's own settings.
    pub server: ServerConfig,
    /// Where data sets lie.
    pub data_dir: Option<PathBuf>,
    /// Threads that fuse and evaluate.
    pub n_threads: usize,
}

/// What a run on a server came to.
#[derive(Clone, Debug)]
pub struct Served {
    /// The run's directory.
    pub run: PathBuf,
    /// Its outcome.
    pub summary: Summary,
}

/// Runs a configuration to its end, or until it is dropped, from wherever an earlier server stopped. `ready` learns the
/// addresses, and where to look at the run.
///
/// # Errors
/// If the folder is in use, an address is taken, or the disk fails.
pub async fn serve(setup: ServeSetup, ready: impl FnOnce(&Addresses, &Arc<Status>)) -> Result<Served> {
    let ServeSetup { dir, config, server: settings, data_dir, n_threads } = setup;
    refuse_texts(&config)?;
    create_dir(&dir)?;
    let _lock = lock(&dir)?;
    let authority = Authority::open(&dir)?;
    let run = run_name(&authority, &config)?;
    let run_dir = dir.join("runs").join(&run);
    let mut recovered = Recovered::default();
    let mut enrolled = BTreeSet::new();
    let journal = Journal::open(&dir, &mut |entry| {
        if let Event::Enrolled { fingerprint, .. } = &entry.event {
            enrolled.insert(fingerprint.clone());
        }
        recovered.follow(&run, entry);
    })?;
    let desk = Arc::new(Desk::new(&dir, settings.clone(), journal, recovered.last.clone())?);
    let finished = RunDir::finished(&run_dir, &config)?;
    let method = config.method.build()?;
    let experiment = Experiment::load(config.clone(), method.as_ref(), data_dir.as_deref())?;
    create_dir(&run_dir.join("checkpoints"))?;
    let (directory, state) = RunDir::open(&run_dir, &experiment, n_threads, true)?;
    let status = Status::new(&run, &config.method.name, config.federation.rounds, directory.rounds());
    let status = Arc::new(status);
    let registry = Registry::open(&dir)?;
    let server = Server::new(Arc::clone(&desk), registry, authority, settings.clone(), Arc::clone(&status), enrolled);
    let addresses = Arc::new(server).listen().await?;
    tracing::info!(run, listen = %addresses.listen, done = directory.rounds().len(), "serving");
    ready(&addresses, &status);
    let summary = if let Some(summary) = finished {
        desk.finish(Done { run, model_hash: summary.model_hash.clone() });
        summary
    } else {
        let coordinator = match state {
            Some(state) => Coordinator::resume(experiment, method, n_threads, state)?,
            None => Coordinator::new(experiment, method, n_threads)?,
        };
        let started = Instant::now();
        let (desk, stop) = (Arc::clone(&desk), Arc::new(AtomicBool::new(false)));
        // Whoever drops this future stops the server; the loop is on a thread and must hear of it.
        let _stop = StopOnDrop(Arc::clone(&stop));
        let mut rounds =
            Rounds { dir, run, config: settings, coordinator, directory, desk, status, recovered, stop, started };
        let done = tokio::task::spawn_blocking(move || rounds.run());
        done.await.map_err(|e| Error::config(format!("the round loop failed: {e}")))??
    };
    farewell(&desk).await;
    Ok(Served { run: run_dir, summary })
}

/// Ends the round loop with the server.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits until every node that was heard of knows that the run is over, within reason.
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

/// A run's name: the same configuration in the same federation is the same run, and goes on.
fn run_name(authority: &Authority, config: &Config) -> Result<String> {
    let mut hasher = blake3::Hasher::new_derive_key("fedproj run 1");
    hasher.update(&authority.fingerprint()?);
    hasher.update(config.identity()?.as_bytes());
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}

/// One server a folder; the lock goes with the process, however it ends.
fn lock(dir: &Path) -> Result<File> {
    let path = dir.join(".lock");
    let file = File::create(&path).map_err(Error::io("create", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => {
            Err(Error::config(format!("`{}` is in use by another server", dir.display())))
        }
        Err(std::fs::TryLockError::Error(source)) => Err(Error::Io { action: "lock", path, source }),
    }
}
