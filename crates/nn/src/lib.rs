//! Neural networks as static graphs over one flat parameter vector, trained on the CPU or on a GPU.
//!
//! A network is a [`Graph`] of nodes with known shapes. Its parameters are named spans of one vector θ, its running
//! statistics spans of a second one. A [`Workspace`] executes it: forward passes, losses at any node, and backward passes
//! into a gradient as long as θ. Averaging or comparing networks is arithmetic on such vectors ([`vector`]).
//!
//! ```
//! use fedproj_nn::{Activation, Cpu, Graph, Init, Loss, LossTargets, Mode, Optimizer, Options, Rule, Shape, Workspace};
//!
//! let mut graph = Graph::new(Shape::vector(2));
//! let hidden = graph.linear("fc1", graph.input(), 16, true)?;
//! let hidden = graph.activation("tanh", hidden, Activation::Tanh)?;
//! graph.linear("fc2", hidden, 2, true)?;
//!
//! let (x, labels) = ([0., 0., 0., 1., 1., 0., 1., 1.], [0, 1, 1, 0]); // exclusive or
//! let mut theta = graph.init_params(0, Init::Torch);
//! let mut grad = vec![0.0; theta.len()];
//! let mut workspace = Workspace::new(&graph, &Options::training(4), Cpu::new(1))?;
//! let mut adam = Optimizer::new(Rule::adam(0.05), theta.len())?;
//! let mut loss = f64::INFINITY;
//! for step in 0..200 {
//!     let cross_entropy = (Loss::CrossEntropy, LossTargets::labels(&labels));
//!     loss = workspace.loss_gradient(&theta, &mut [], &x, &cross_entropy, Mode::train(step), &mut grad)?;
//!     adam.step(workspace.cpu(), &mut theta, &grad, 1.0);
//! }
//! assert!(loss < 0.05);
//! # Ok::<(), fedproj_nn::Error>(())
//! ```
//!
//! It promises the same bytes for any number of threads, steps that allocate nothing, and errors that name the node or
//! tensor. It knows nothing of federated learning, and reads no files but models ([`weights`], [`models`]). Graphs do not
//! change while they run.
//!
//! Start reading at [`Graph`] and `graph/op.rs`, then `cpu/` and [`cuda`] (execution) and `kernels/` (arithmetic). `unsafe`
//! stands in `kernels/`, `cuda/gpu.rs` and `cuda/programs.rs` only.

mod cpu;
pub mod cuda;
mod error;
mod graph;
mod kernels;
mod layout;
mod loss;
mod mode;
pub mod models;
mod optim;
mod schedule;
mod tokens;
pub mod vector;
pub mod weights;

pub use cpu::Workspace;
pub use error::{Error, Result};
pub use graph::{Graph, NodeId, Product, Shape, Tables, Tail, Window};
pub use kernels::{Activation, Buffer, Cpu, Isa, NormMode, Team};
pub use layout::{Init, Layout, Role, Span, Storage};
pub use loss::{Direction, EmbeddingId, Loss, LossTargets, RelaxedContrast};
pub use mode::{Dropout, Mode, Options};
pub use optim::{Optimizer, Rule, clip_norm};

/// The files that define what a configuration says about networks and losses, from which the reference of its keys is made.
pub const CONFIG_SOURCES: &[&str] =
    &[include_str!("kernels/norm.rs"), include_str!("layout.rs"), include_str!("loss.rs")];
