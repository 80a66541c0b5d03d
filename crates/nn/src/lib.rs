//! Engine.

mod cpu;
mod error;
mod graph;
mod kernels;
mod layout;
mod loss;
pub mod models;
mod optim;
pub mod vector;
pub mod weights;

pub use cpu::{Mode, Options, Workspace};
pub use error::{Error, Result};
pub use graph::{Graph, NodeId, Shape, Window};
pub use kernels::{Activation, Buffer, Cpu, Isa, NormMode, Team};
pub use layout::{Init, Layout, Role, Span, Storage};
pub use loss::{Direction, Loss};
pub use optim::{Optimizer, Rule, Schedule, clip_norm};
