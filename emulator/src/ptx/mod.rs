//! PTX, NVIDIA's assembly for a machine that does not exist: its text ([`parse`]), and its instructions as closures
//! over the registers of a warp ([`decode`]).

pub mod arithmetic;
pub mod decode;
pub mod inline;
pub mod memory;
pub mod parse;
pub mod together;
