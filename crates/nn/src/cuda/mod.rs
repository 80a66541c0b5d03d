//! Execution on an NVIDIA GPU: a fleet of networks, all trained by the same launches.
//!
//! A [`Fleet`] has several *lanes*: networks of one graph, each with its own weights and batch. Every launch serves all
//! active lanes, so ten networks need as many launches as one and fill the GPU. A step is recorded once and replayed. What
//! changes from step to step (samples, learning rates, dropout keys) is in tables on the device.
//!
//! Kernels are our own CUDA (`kernels/`), compiled when a GPU is opened and kept in a cache. The driver and the compiler
//! are loaded at run time, so the same program runs without them. The order of a sum depends on shapes alone, so results
//! are the same bytes on every run, whichever lanes share the launches.

mod backward;
mod batches;
mod beside;
mod constraints;
mod conv;
mod fleet;
mod gather;
mod gpu;
mod hopper;
mod layers;
mod losses;
mod memory;
mod optimizer;
mod products;
mod programs;
mod signatures;
mod text;
mod vectors;

pub use batches::{Batches, NOBODY};
pub use constraints::{Cone, Inputs, Search};
pub use fleet::{Fleet, Recording, Stats};
pub use gpu::{Gpu, Precision, Probe};
pub use losses::{LossOf, Target};
pub use memory::{Data, Rows, Vectors};
pub use optimizer::Moments;
