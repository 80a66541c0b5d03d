//! `fedproj serve`, `join`, `enrol`, `nodes`, `audit` and `demo`: a real federation.

pub mod demo;
pub mod join;
pub mod nodes;
pub mod serve;

use anyhow::Result;
use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;

/// How a server or node logs.
#[derive(Args, Clone, Copy)]
pub struct Logging {
    /// Form of the log on stderr; `FEDPROJ_LOG=debug` says more
    #[arg(long, value_enum, default_value_t = LogForm::Text)]
    log: LogForm,
}

/// See [`Logging`].
#[derive(Clone, Copy, ValueEnum)]
enum LogForm {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

impl Logging {
    /// Starts logging, for the rest of the process.
    fn start(self) {
        let filter = EnvFilter::try_from_env("FEDPROJ_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
        let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
        match self.log {
            LogForm::Text => builder.with_ansi(false).init(),
            LogForm::Json => builder.json().flatten_event(true).init(),
        }
    }
}

/// Runs network work to its end.
pub fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    // Threads that wait for the disk each hold a piece of some blob; more of them than this do not make a disk faster.
    tokio::runtime::Builder::new_multi_thread().enable_all().max_blocking_threads(32).build()?.block_on(work)
}
