//! The real federation: one server, many nodes, over a network that fails.
//!
//! A server ([`serve()`]) is a [`server::desk::Desk`] where nodes get tasks and hand in contributions, a round loop
//! ([`server::rounds::Rounds`]) that sees the desk through the trait [`server::nodes::Nodes`], and HTTPS ([`server::http`]) that carries it. A node
//! ([`Node`]) asks, trains and hands in. Both run the methods of [`fedproj_core`] and know nothing of how they work; the same
//! contributions give the same bytes as in the simulator.
//!
//! Nothing that is received is run, or becomes anything but text and numbers of a checked shape. Nothing is acknowledged
//! before it is on disk ([`server::journal`]).

#![forbid(unsafe_code)]

mod backoff;
pub mod decoders;
mod error;
mod files;
pub mod identity;
pub mod node;
pub mod server;
pub mod wire;

pub use error::{Error, Result};
pub use node::{Link, Node, NodeData, Policy, Setup, enrol};
pub use server::{Ensemble, ServeSetup, Served, ServerConfig, serve};
