//! What can go wrong between a server and its nodes.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The user asked for something that cannot be done.
    #[error("{0}")]
    Config(String),
    /// The federated core failed, or a file: files have the same errors on both sides of the crates' boundary.
    #[error(transparent)]
    Core(#[from] fedproj_core::Error),
    /// Data could not be read.
    #[error(transparent)]
    Data(#[from] fedproj_data::Error),
    /// Another server uses the federation's folder.
    #[error("`{}` is in use by another server", .0.display())]
    Locked(PathBuf),
    /// An address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A defect of this program.
    #[error("internal error: {0}")]
    Internal(String),
    /// A certificate or key could not be made or used.
    #[error("certificate: {0}")]
    Identity(String),
    /// The other side sent something that is not allowed.
    #[error("{0}")]
    Protocol(String),
    /// A task that this node does not do.
    #[error("{0}")]
    Declined(String),
    /// The other side could not be reached, or hung up.
    #[error("{0}")]
    Unreachable(String),
    /// A server was asked to stop.
    #[error("stopped; everything acknowledged is on disk, and the same command resumes the run")]
    Stopped,
    /// The server cannot answer yet; ask again.
    #[error("{0}")]
    NotNow(String),
    /// The other side's certificate is not valid here.
    #[error("{0}")]
    NotAMember(&'static str),
    /// There are too many requests at present.
    #[error("{0}")]
    TooMany(&'static str),
    /// The server rejected a request.
    #[error("the server rejected the request ({status}): {reason}")]
    Rejected {
        /// HTTP status.
        status: u16,
        /// The server's reason.
        reason: String,
    },
}

impl Error {
    /// Whether what was asked for is wrong; otherwise something failed on the way.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Config(_) => true,
            Self::Core(error) => error.is_usage(),
            Self::Data(error) => error.is_usage(),
            _ => false,
        }
    }

    /// For `map_err` on file operations.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Core(fedproj_core::Error::Io { action, path, source })
    }

    /// For `map_err` on the content of a file.
    pub(crate) fn corrupt<E: std::fmt::Display>(path: &Path) -> impl FnOnce(E) -> Self {
        let path = path.to_path_buf();
        move |problem| Self::Core(fedproj_core::Error::Corrupt { path, problem: problem.to_string() })
    }

    pub(crate) fn config(message: impl Into<String>) -> Self {
        Self::Config(message.into())
    }

    pub(crate) fn internal(error: impl std::fmt::Display) -> Self {
        Self::Internal(error.to_string())
    }

    pub(crate) fn protocol(message: impl Into<String>) -> Self {
        Self::Protocol(message.into())
    }

    pub(crate) fn identity(error: impl std::fmt::Display) -> Self {
        Self::Identity(error.to_string())
    }
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;
