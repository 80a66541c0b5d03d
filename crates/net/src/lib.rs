//! The real federation: one server, many nodes, over a network that fails.
//!
//! [`server`] and [`node`] are the two sides, [`wire`] is what travels between them, [`identity`] is what both know of
//! certificates, [`secure`] is secure aggregation without sockets. Start reading at [`serve()`] and [`Node`]. Both sides run the methods of [`fedproj_core`] without knowing how
//! they work; the same contributions give the same bytes as in the simulator.
//!
//! Nothing that is received is executed, or becomes anything but text and numbers of a checked shape. Nothing is
//! acknowledged before it is on disk ([`server::journal`]).

#![forbid(unsafe_code)]

mod backoff;
mod der;
mod error;
mod files;
pub mod identity;
pub mod live;
pub mod node;
pub mod secure;
pub mod server;
mod vault;
pub mod wire;

pub use error::{Error, Result};
pub use node::{Link, Node, NodeData, Policy, Setup, enrol, reject_files};
pub use server::{Ensemble, ServeSetup, Served, ServerConfig, serve};
pub use vault::Vault;
