//! The part of a network behind one of its nodes, as a network of its own.

use super::{Graph, Node, NodeId};
use crate::error::{Error, Result};
use std::ops::Range;

/// The part of a network from a node's value to the output, and where its vectors stand in those of the network.
///
/// ```
/// use fedproj_nn::{Graph, Shape};
///
/// let mut graph = Graph::new(Shape::vector(4));
/// let hidden = graph.linear("fc1", graph.input(), 16, true)?;
/// graph.linear("fc2", hidden, 3, true)?;
/// let tail = graph.tail(hidden)?;
/// assert_eq!(tail.graph.shape(tail.graph.input()), Shape::vector(16));
/// assert_eq!(tail.graph.params().len(), 16 * 3 + 3);
/// # Ok::<(), fedproj_nn::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Tail {
    /// The part; its input has the node's shape.
    pub graph: Graph,
    /// Where its parameters stand in the network's, in order.
    pub params: Vec<Range<usize>>,
    /// The same of its buffers.
    pub buffers: Vec<Range<usize>>,
}

impl Graph {
    /// The part of the network behind a node.
    ///
    /// # Errors
    /// If the node is the output or gives tokens, or if the output also depends on the input in a way around the node.
    pub fn tail(&self, from: NodeId) -> Result<Tail> {
        let refuse = |problem: String| Err(Error::shape(self.name(from), problem));
        if from == self.output() {
            return refuse("is the output; nothing follows it".into());
        }
        if self.nodes[from.0].packed {
            return refuse("gives one vector per token; cut behind a node that pools the tokens".into());
        }
        let mut is_part = vec![false; self.nodes.len()];
        is_part[self.output().0] = true;
        for at in (from.0 + 1..self.nodes.len()).rev() {
            let inputs = self.nodes[at].inputs.iter().filter(|_| is_part[at]);
            inputs.map(|input| input.0).collect::<Vec<_>>().into_iter().for_each(|input| is_part[input] = true);
        }
        if let Some(around) = (0..from.0).find(|at| is_part[*at]) {
            let around = &self.nodes[around].name;
            return refuse(format!("does not cut the network in two: the output also reads `{around}` around it"));
        }
        let mut graph = Self::new(self.shape(from));
        let mut place = vec![graph.input(); self.nodes.len()];
        let (mut params, mut buffers) = (Vec::new(), Vec::new());
        for (at, node) in self.nodes.iter().enumerate().skip(from.0 + 1).filter(|(at, _)| is_part[*at]) {
            let inputs = node.inputs.iter().map(|input| place[input.0]).collect();
            graph.nodes.push(Node {
                inputs,
                params: node.params.each_ref().map(|range| graph.params.copy_spans(&self.params, range, &mut params)),
                buffers: node
                    .buffers
                    .each_ref()
                    .map(|range| graph.buffers.copy_spans(&self.buffers, range, &mut buffers)),
                ..node.clone()
            });
            place[at] = graph.output();
        }
        let in_part = |node: &NodeId| *node == from || node.0 > from.0 && is_part[node.0];
        graph.features = self.features.filter(in_part).map(|node| place[node.0]);
        graph.levels = self.levels.iter().filter(|node| in_part(node)).map(|node| place[node.0]).collect();
        Ok(Tail { graph, params, buffers })
    }
}

impl Tail {
    /// Copies the part's parameters out of the network's.
    ///
    /// # Panics
    /// If a vector has another length.
    pub fn take_params(&self, network: &[f32], part: &mut [f32]) {
        for (from, to) in pairs(&self.params) {
            part[to].copy_from_slice(&network[from]);
        }
    }

    /// Copies the part's parameters, or a gradient of them, to their places in a vector of the network's length.
    ///
    /// # Panics
    /// If a vector has another length.
    pub fn place_params(&self, part: &[f32], network: &mut [f32]) {
        for (to, from) in pairs(&self.params) {
            network[to].copy_from_slice(&part[from]);
        }
    }

    /// Copies the part's buffers out of the network's.
    ///
    /// # Panics
    /// If a vector has another length.
    pub fn take_buffers(&self, network: &[f32], part: &mut [f32]) {
        for (from, to) in pairs(&self.buffers) {
            part[to].copy_from_slice(&network[from]);
        }
    }
}

/// The ranges, with those that they take one after another.
fn pairs(ranges: &[Range<usize>]) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let mut end = 0;
    ranges.iter().cloned().map(move |range| {
        let start = end;
        end += range.len();
        (range, start..end)
    })
}
