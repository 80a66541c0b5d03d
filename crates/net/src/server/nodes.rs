//! What the round loop sees of nodes: one small trait, so that something else than the [`crate::server::desk`] can carry tasks later.

use crate::error::Result;
use crate::server::journal::Accepted;
use crate::server::spool::Spooled;
use crate::wire::message::{Blob, Train};
use std::time::Duration;

/// What carries tasks to nodes and contributions back.
pub trait Nodes: Sync {
    /// Makes bytes available to nodes.
    ///
    /// # Errors
    /// If they cannot be stored.
    fn put(&self, bytes: &[u8]) -> Result<Blob>;

    /// Offers a round's task.
    fn offer(&self, offer: Offer);

    /// The next contribution that counts, or the next node that drops out; `None` when `patience` is over.
    fn take(&self, patience: Duration) -> Option<Arrival>;

    /// The vectors of contributions that were taken, to be read in blocks.
    ///
    /// # Errors
    /// If they cannot be found.
    fn get(&self, accepted: Vec<Accepted>) -> Result<Spooled>;

    /// Offers the round's task once more to clients that have dropped out.
    fn ask_again(&self, clients: &[u32]);

    /// Takes no more contributions for the round; what was accepted before can still be taken.
    fn withdraw(&self);

    /// How long a client has not been heard of; nothing while it waits for work.
    fn silence(&self, client: u32) -> Duration;

    /// The clients that have been heard of within this time.
    fn present(&self, within: Duration) -> Vec<u32>;
}

/// A round as it is offered.
#[derive(Clone, Debug)]
pub struct Offer {
    /// The task, for any client.
    pub task: Train,
    /// The clients that are asked.
    pub asked: Vec<u32>,
    /// The vectors that a contribution must hold, in order, with their numbers of values.
    pub parts: Vec<(String, usize)>,
    /// What the clients start from.
    pub base: Vec<f32>,
    /// Places of variances among the buffers: they cannot be negative.
    pub variances: Vec<std::ops::Range<usize>>,
    /// Local epochs and samples of a step, which bound a client's steps.
    pub epochs: u32,
    /// See above.
    pub batch: usize,
    /// Contributions that were accepted before a restart.
    pub accepted: Vec<Accepted>,
}

/// What comes back.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrival {
    /// A contribution that counts.
    Contribution(Box<Accepted>),
    /// A client that will not contribute to this round.
    DroppedOut(u32),
}
