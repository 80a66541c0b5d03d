//! Runs on a thread of the engine's own, while Python's thread shows progress and listens for Ctrl-C.

use crate::{caught, guarded};
use anyhow::Result;
use fedproj_core::Summary;
use fedproj_study::{Driver, Job, Watch};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often Python's thread looks for Ctrl-C and moves the bar.
const PAUSE: Duration = Duration::from_millis(100);

/// News for Python's `Progress`: the name of its function and a text.
type Event = (&'static str, String);

/// What both threads see.
#[derive(Default)]
struct Shared {
    stopping: AtomicBool,
    n_clients: AtomicU64,
    n_clients_done: AtomicU64,
}

/// The engine's end.
struct Follower {
    shared: Arc<Shared>,
    events: Sender<Event>,
}

impl Follower {
    fn tell(&self, function: &'static str, text: impl Into<String>) {
        // Python's thread listens until this end is closed.
        let _ = self.events.send((function, text.into()));
    }
}

impl Watch for Follower {
    fn is_stopping(&self) -> bool {
        self.shared.stopping.load(Ordering::SeqCst)
    }

    fn note(&self, line: &str) {
        self.tell("note", line);
    }

    fn begin(&self, _: usize, title: &str, n_clients: u64, n_done: u64) {
        self.shared.n_clients.fetch_add(n_clients, Ordering::SeqCst);
        self.shared.n_clients_done.fetch_add(n_done, Ordering::SeqCst);
        self.tell("begin", title);
    }

    fn client_done(&self, _: usize) {
        self.shared.n_clients_done.fetch_add(1, Ordering::SeqCst);
    }

    fn round(&self, _: usize, status: String) {
        self.tell("status", status);
    }

    fn round_done(&self, line: String) {
        self.tell("round", line);
    }

    fn end(&self, _: usize) {}

    fn result(&self, _: &str, _: &Job, _: &Summary, _: Option<f64>) {}
}

/// Makes all jobs. Ctrl-C ends them after the current round.
pub fn run(
    py: Python<'_>,
    driver: Driver,
    jobs: Vec<Job>,
    progress: &Bound<'_, PyAny>,
) -> PyResult<Vec<Option<Summary>>> {
    let (events, received) = channel();
    let shared = Arc::new(Shared::default());
    let follower = Follower { shared: Arc::clone(&shared), events };
    let work = move || driver.run_all(&jobs, &follower);
    let thread = std::thread::Builder::new().name("fedproj".into()).spawn(work)?;
    let shown = caught(|| follow(py, &shared, &Mutex::new(received), progress));
    // Where nobody follows any more, the work ends after the round.
    shared.stopping.fetch_or(shown.is_err(), Ordering::SeqCst);
    let made = guarded(py, || thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
    shown.and(made)
}

/// Shows progress until the engine's thread ends. An exception of Python's ends the work after the round too.
fn follow(
    py: Python<'_>,
    shared: &Shared,
    received: &Mutex<Receiver<Event>>,
    progress: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let mut failure = Ok(());
    loop {
        let event = py.detach(|| received.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(PAUSE));
        let shown = match event {
            Ok((function, text)) => progress.call_method1(function, (text,)),
            Err(RecvTimeoutError::Timeout) => {
                let n = |count: &AtomicU64| count.load(Ordering::SeqCst);
                progress.call_method1("bar", (n(&shared.n_clients_done), n(&shared.n_clients)))
            }
            Err(RecvTimeoutError::Disconnected) => return failure,
        };
        for result in [shown.map(drop), py.check_signals()] {
            let Err(error) = result else { continue };
            shared.stopping.store(true, Ordering::SeqCst);
            if error.is_instance_of::<PyKeyboardInterrupt>(py) {
                progress.call_method1("note", ("stopping after this round",))?;
            } else {
                failure = Err(error);
            }
        }
    }
}

/// The directories' devices and data, as the command line opens them.
pub fn driver(options: &crate::Options, n_jobs: usize) -> Result<Driver> {
    let devices = options.device().open_for(usize::from(options.jobs).min(n_jobs))?;
    let data_dir = fedproj::data_dir(options.data_dir.clone())?;
    Ok(Driver { data_dir, devices, resume: options.resume, shares: false })
}
