//! Execution on an NVIDIA GPU: a cohort of networks, all trained by the same launches.
//!
//! A [`Cohort`] holds several *lanes*, networks of one graph with weights and batches of their own. Every kernel serves all
//! lanes that take part in a launch, so ten clients cost as many launches as one and fill the GPU. A step is recorded once
//! and replayed; what changes from step to step (which samples, learning rates, dropout keys) lies in tables on the device.
//!
//! Kernels are our own CUDA (`kernels/`), compiled when a GPU is opened and kept in a cache; the driver and the compiler
//! are loaded at run time, so the same program runs where there is neither. Sums run in orders that depend on shapes alone:
//! results are the same bytes on every run, whichever lanes share the launches.

mod backward;
mod batches;
mod cohort;
mod conv;
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
pub use cohort::{Cohort, Recording, Stats};
pub use gpu::{Gpu, Precision, Probe};
pub use losses::{At, LossTerm, RelaxedContrast, Target};
pub use memory::{Data, Rows, Vectors};
pub use optimizer::Moments;
