//! What travels between server and nodes: messages, blobs, and vectors as bytes.

pub mod blob;
pub mod message;
pub mod numbers;
