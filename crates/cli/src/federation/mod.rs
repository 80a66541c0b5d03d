//! `fedproj serve`, `join`, `enrol`, `nodes`, `audit`, `rollback` and `demo`: a real federation.

pub mod audit;
pub mod demo;
pub mod join;
pub mod nodes;
pub mod process;
pub mod rollback;
pub mod serve;

use anyhow::Result;
use clap::{Args, ValueEnum};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

/// Logging of a server or node.
#[derive(Args, Clone, Copy)]
pub struct Logging {
    /// Log format on stderr; `FEDPROJ_LOG=debug` logs more
    #[arg(long, value_enum, default_value_t = LogForm::Text)]
    log: LogForm,
}

/// See [`Logging`].
#[derive(Clone, Copy, ValueEnum)]
enum LogForm {
    /// For people
    Text,
    /// One JSON object per line
    Json,
}

impl Logging {
    /// Starts logging, for the rest of the process.
    fn start(self) {
        let asked = std::env::var("FEDPROJ_LOG").ok().and_then(|filter| filter.parse().ok());
        let filter = asked.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
        // It would report a reader of its log that has gone to the same reader, and panic.
        let layer = tracing_subscriber::fmt::layer().log_internal_errors(false);
        let layer = layer.with_writer(std::io::stderr).with_target(false);
        let registry = tracing_subscriber::registry().with(filter);
        match self.log {
            LogForm::Text => registry.with(layer.with_ansi(false)).init(),
            LogForm::Json => registry.with(layer.json().flatten_event(true)).init(),
        }
    }
}

/// Runs network work to its end.
pub fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    // Each thread that waits for the disk holds a piece of a blob; more threads would not make the disk faster.
    tokio::runtime::Builder::new_multi_thread().enable_all().max_blocking_threads(32).build()?.block_on(work)
}
