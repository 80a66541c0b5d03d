//! What can go wrong in a run, with its place: key, file, round, client.
//!
//! [`Error::is_usage`] parts errors in two: what was asked for is wrong, or the run failed.

use std::path::{Path, PathBuf};

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting that cannot be used.
    #[error("{0}")]
    Config(String),
    /// Data could not be read or partitioned.
    #[error(transparent)]
    Data(#[from] fedproj_data::Error),
    /// The network or a vector does not fit.
    #[error(transparent)]
    Network(#[from] fedproj_nn::Error),
    /// A client's loss left the finite numbers.
    #[error(
        "round {round}, client {client}, epoch {epoch}, step {step}: the loss is {loss}; \
         the rounds before are on disk\nhint: lower local.optimizer.lr, or clip gradients with local.clip"
    )]
    NotFinite {
        /// Round, counted from 0.
        round: u32,
        /// The client.
        client: u32,
        /// Local epoch.
        epoch: u32,
        /// Local step.
        step: u32,
        /// The loss.
        loss: f64,
    },
    /// The server's fusion left the finite numbers.
    #[error(
        "round {round}: {what} is not finite after fusion; the rounds before are on disk\nhint: lower the server's learning rate"
    )]
    FusionNotFinite {
        /// Round, counted from 0.
        round: u32,
        /// What.
        what: &'static str,
    },
    /// A client's value that has no place in sums in integers.
    #[error(
        "the value {value} does not fit federation.sum = \"fixed\": it must stay below {limit} at this client's number of \
         samples\nhint: federation.sum=float"
    )]
    OutOfRange {
        /// The value.
        value: f32,
        /// What it must stay below.
        limit: f64,
    },
    /// Local training was stopped within a round.
    #[error("stopped within a round; the rounds before are on disk")]
    Cancelled,
    /// A vector that does not fit the network.
    #[error("{what}: {found} values; this network has {expected}")]
    Misfit {
        /// The vector.
        what: &'static str,
        /// Its values.
        found: usize,
        /// What it should have.
        expected: usize,
    },
    /// Bytes that are not the message that they should be.
    #[error("these bytes are not {what}: {problem}\nhint: both sides must run the same version")]
    Message {
        /// The message.
        what: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// A method from outside this program failed.
    #[error("method `{name}`: {source}")]
    Method {
        /// The method.
        name: String,
        /// What it reports.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An error of one client's training.
    #[error("round {round}, client {client}: {source}")]
    Client {
        /// Round, counted from 0.
        round: u32,
        /// The client.
        client: u32,
        /// What happened.
        source: Box<Error>,
    },
    /// A file could not be read or written.
    #[error("`{}`: cannot {action}: {source}{}", .path.display(), hint_for(action, source))]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file of a run directory does not hold what it should.
    #[error("`{}`: {problem}", .path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// This program contradicts itself: not the user's fault, nor the disk's.
    #[error("internal error: {what}: {problem}")]
    Internal {
        /// What was being done.
        what: &'static str,
        /// What went wrong.
        problem: String,
    },
    /// Another process writes to the run directory.
    #[error("`{}` is in use by another process; wait for it, or choose another directory with --out", .0.display())]
    Locked(PathBuf),
    /// A rerun gave something else than a run publishes.
    #[error("`{}` is not what its rerun gives:\n  {}", .dir.display(), .differences)]
    Differs {
        /// The run.
        dir: PathBuf,
        /// File, place and both values of each difference, one per line.
        differences: String,
    },
}

/// What to do where a directory cannot be made; other reasons say enough themselves.
fn hint_for(action: &str, reason: &std::io::Error) -> &'static str {
    use std::io::ErrorKind::{NotADirectory, PermissionDenied, ReadOnlyFilesystem};
    match (action, reason.kind()) {
        ("create", NotADirectory | PermissionDenied | ReadOnlyFilesystem) => {
            "\nhint: choose another directory with --out"
        }
        _ => "",
    }
}

impl Error {
    /// For `map_err` on file operations.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { action, path, source }
    }

    /// For `map_err` on the content of a file.
    pub(crate) fn corrupt<E: std::fmt::Display>(path: &Path) -> impl FnOnce(E) -> Self {
        let path = path.to_path_buf();
        move |problem| Self::Corrupt { path, problem: problem.to_string() }
    }

    /// For `map_err` on what cannot fail unless this program is wrong.
    pub(crate) fn internal<E: std::fmt::Display>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |problem| Self::Internal { what, problem: problem.to_string() }
    }

    /// Whether what was asked for is wrong (exit code 2). Otherwise the run failed (exit code 1).
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Config(_) => true,
            Self::Data(error) => error.is_usage(),
            Self::Network(error) => error.is_usage(),
            Self::Client { source, .. } => source.is_usage(),
            _ => false,
        }
    }

    /// Whether a GPU had too little memory. Beside fewer runs the same may succeed.
    pub fn is_gpu_memory(&self) -> bool {
        match self {
            Self::Network(error) => matches!(error, fedproj_nn::Error::GpuMemory { .. }),
            Self::Client { source, .. } => source.is_gpu_memory(),
            _ => false,
        }
    }

    /// Rejects a setting unless `ok`: `key = value: must be …`.
    ///
    /// # Errors
    /// [`Error::Config`] unless `ok`.
    pub fn require(ok: bool, key: &str, value: impl std::fmt::Display, expected: &str) -> Result<()> {
        if ok { Ok(()) } else { Err(Self::Config(format!("{key} = {value}: must be {expected}"))) }
    }

    /// Rejects a vector of another length.
    pub(crate) fn check_len(what: &'static str, found: usize, expected: usize) -> Result<()> {
        if found == expected { Ok(()) } else { Err(Self::Misfit { what, found, expected }) }
    }

    /// A setting that cannot be used.
    pub fn config(message: impl Into<String>) -> Self {
        Self::Config(message.into())
    }
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;
