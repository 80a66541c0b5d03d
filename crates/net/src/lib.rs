//! The real federation: one server, many nodes, over a network that fails.
//!
//! A server ([`serve()`]) is a [`desk::Desk`] where nodes get tasks and hand in contributions, a round loop
//! ([`rounds::Rounds`]) that sees the desk through the trait [`nodes::Nodes`], and HTTPS ([`http`]) that carries it. A node
//! ([`Node`]) asks, trains and hands in. Both run the methods of [`fedproj_core`] and know nothing of how they work; the same
//! contributions give the same bytes as in the simulator.
//!
//! Nothing that is received is run, or becomes anything but text and numbers of a checked shape. Nothing is acknowledged
//! before it is on disk ([`journal`]).

#![forbid(unsafe_code)]

mod backoff;
pub mod blob;
mod check;
mod config;
pub mod decoders;
pub mod desk;
mod door;
mod error;
mod files;
pub mod home;
pub mod http;
pub mod identity;
pub mod journal;
mod limit;
mod link;
mod local;
pub mod message;
mod node;
pub mod nodes;
pub mod numbers;
mod policy;
pub mod presence;
pub mod registry;
pub mod rounds;
mod routes;
mod serve;
pub mod spool;
pub mod status;

pub use config::{Ensemble, ServerConfig};
pub use error::{Error, Result};
pub use link::Link;
pub use local::{NodeData, Setup};
pub use node::{Node, enrol};
pub use policy::Policy;
pub use serve::{ServeSetup, Served, serve};
