//! A small classifier behind one of a network's levels, for methods whose clients train the layers up to it.

use crate::error::{Error, Result};
use fedproj_nn::Graph;

/// Its node, and its layer.
pub const EXIT: &str = "exit";

/// The network with the classifier behind a level; as it was where it cannot have one, which [`check_exit`] rejects.
pub fn with_exit(graph: Graph, level: usize) -> Graph {
    let classes = graph.shape(graph.output()).len();
    let with_exit = graph.levels().get(level).and_then(|at| graph.with_exit(EXIT, *at, classes).ok());
    with_exit.unwrap_or(graph)
}

/// Whether the network is one that [`with_exit`] made; `key` is the setting of the level.
///
/// # Errors
/// If there is no such level, or no classifier behind it.
pub fn check_exit(graph: &Graph, level: usize, key: &str) -> Result<()> {
    let levels = graph.levels();
    let expected = format!("one of this network's levels; it has {}, counted from 0", levels.len());
    Error::require(level < levels.len(), key, level, &expected)?;
    // A layer of this name may be the user's. The classifier's parameters come last, and nothing behind the level reads it.
    let is_last = graph.params().spans().last().is_some_and(|span| span.name == format!("{EXIT}.bias"));
    if !is_last || graph.tail(levels[level]).is_ok_and(|tail| tail.graph.find(EXIT).is_some()) {
        graph.with_exit(EXIT, levels[level], 1)?;
    }
    Ok(())
}
