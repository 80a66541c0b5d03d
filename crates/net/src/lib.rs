//! The real federation: one server, many nodes, over a network that fails.
#![forbid(unsafe_code)]

pub mod blob;
mod config;
pub mod desk;
mod error;
pub mod http;
pub mod identity;
pub mod journal;
pub mod message;
pub mod numbers;
pub mod registry;
pub mod rounds;
pub mod spool;
pub mod status;

pub use config::{Ensemble, ServerConfig};
pub use error::{Error, Result};
