//! A second, small classifier at a node inside a network.

use super::{Graph, NodeId};
use crate::error::Result;
use crate::kernels::Activation;

impl Graph {
    /// The network with a second classifier behind a node: ReLU, the mean over pixels, and a linear layer of this name. The
    /// output stays the output, and the new parameters come last in θ.
    ///
    /// # Errors
    /// If the node gives tokens, or a name is taken.
    pub fn with_exit(&self, name: &str, at: NodeId, classes: usize) -> Result<Self> {
        let mut graph = self.clone();
        let mut x = graph.activation(&format!("{name}.relu"), at, Activation::Relu)?;
        if graph.shape(at).pixels() > 1 {
            x = graph.global_average_pool(&format!("{name}.pool"), x)?;
        }
        graph.linear(name, x, classes, true)?;
        // The new nodes move to their input, so that the output stays last.
        let (n_old, n_new) = (self.nodes.len(), graph.nodes.len() - self.nodes.len());
        let moved = |node: &mut NodeId| {
            node.0 = match node.0 {
                known if known <= at.0 => known,
                behind if behind < n_old => behind + n_new,
                new => new - n_old + at.0 + 1,
            }
        };
        graph.nodes[at.0 + 1..].rotate_right(n_new);
        graph.nodes.iter_mut().flat_map(|node| &mut node.inputs).for_each(moved);
        graph.features.iter_mut().chain(&mut graph.levels).for_each(moved);
        Ok(graph)
    }
}
