//! The machine that runs kernels: [`launch`] spreads blocks over threads, a [`warp`] runs 32 lanes at once.

pub mod block;
pub mod code;
pub mod registers;
pub mod shared;
pub mod warp;
