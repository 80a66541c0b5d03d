//! What can go wrong between a server and its nodes.

use std::path::{Path, PathBuf};

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting that cannot be used.
    #[error("{0}")]
    Config(String),
    /// The federated core failed.
    #[error(transparent)]
    Core(#[from] fedproj_core::Error),
    /// Data could not be read.
    #[error(transparent)]
    Data(#[from] fedproj_data::Error),
    /// A file could not be read or written.
    #[error("`{}`: cannot {action}: {source}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file does not hold what it should.
    #[error("`{}`: {problem}", .path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A certificate or key could not be made or used.
    #[error("certificate: {0}")]
    Identity(String),
    /// The other side sent something that is not allowed.
    #[error("{0}")]
    Protocol(String),
    /// The other side could not be reached, or hung up.
    #[error("{0}")]
    Unreachable(String),
    /// A server was told to stop.
    #[error("stopped; everything acknowledged is on disk, and the same command goes on from here")]
    Stopped,
    /// The server cannot say yet; ask again.
    #[error("{0}")]
    NotNow(String),
    /// The other side has no certificate that counts here (any longer).
    #[error("{0}")]
    NotAMember(&'static str),
    /// There are too many requests at present.
    #[error("{0}")]
    TooMany(&'static str),
    /// The server refused a request, and said why.
    #[error("the server refused ({status}): {reason}")]
    Refused {
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
        move |source| Self::Io { action, path, source }
    }

    /// A setting that cannot be used.
    pub(crate) fn config(message: impl Into<String>) -> Self {
        Self::Config(message.into())
    }

    /// Something received that is not allowed.
    pub(crate) fn protocol(message: impl Into<String>) -> Self {
        Self::Protocol(message.into())
    }

    /// Something wrong with a certificate.
    pub(crate) fn identity(error: impl std::fmt::Display) -> Self {
        Self::Identity(error.to_string())
    }
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;
