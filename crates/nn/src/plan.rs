//! From a graph to what is executed: which nodes run as one step, and which memory they use.

use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId, Op, Saved};
use crate::kernels::Activation;
use crate::kernels::pool::MaxPool;
use crate::mode::Options;

/// One step of execution: a node, with the nodes that were fused into it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Step {
    /// The node whose operation is run.
    pub node: usize,
    /// A residual that is added to a normalisation's or a dropout's result.
    pub residual: Option<usize>,
    /// Whether a ReLU follows in the same step.
    pub relu: bool,
    /// A max-pool after that.
    pub pool: Option<usize>,
    /// A batch-norm that the convolution `node` applies itself.
    pub norm: Option<usize>,
    /// The node whose value the step produces: the last of those fused.
    pub out: usize,
}

/// Steps in order of execution, and memory slots of values and gradients.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub steps: Vec<Step>,
    /// The slot of each node's value; none for nodes inside a fused step.
    pub value_slot: Vec<Option<usize>>,
    /// The slot of each node's gradient; none where no gradient is needed.
    pub grad_slot: Vec<Option<usize>>,
    /// The slot of a step's copy of its output's gradient, where the step would overwrite a gradient that is observed.
    pub work_slot: Vec<Option<usize>>,
    /// Floats for one sample in each slot.
    pub value_len: Vec<usize>,
    pub grad_len: Vec<usize>,
    /// Whether a node is the output or a tap.
    pub is_tap: Vec<bool>,
}

impl Plan {
    /// Plans `graph`. Output and taps keep their own value, and their own gradient if training. `more` turns on the GPU's
    /// fusions: a batch-norm and its ReLU fuse a max-pool, and a dropout fuses an addition. Without training, a
    /// convolution fuses a batch-norm, and the max-pool behind it where `more` allows it.
    pub fn new(graph: &Graph, options: &Options<'_>, more: Option<TakesPool<'_>>) -> Self {
        let is_observed = |i: usize| NodeId(i) == graph.output() || options.taps.contains(&NodeId(i));
        let is_tap: Vec<bool> = (0..graph.nodes.len()).map(is_observed).collect();
        let steps = fuse(graph, &is_tap, options.training, more);
        let (value_slot, value_len) = place_values(graph, &steps, &is_tap, options.training);
        let (grad_slot, work_slot, grad_len) = if options.training {
            place_gradients(graph, &steps, &is_tap)
        } else {
            (vec![None; graph.nodes.len()], vec![None; steps.len()], vec![])
        };
        Self { steps, value_slot, grad_slot, work_slot, value_len, grad_len, is_tap }
    }

    /// Fails for a node that is neither the output nor a tap.
    pub fn check_tap(&self, graph: &Graph, node: NodeId) -> Result<()> {
        if self.is_tap.get(node.0).copied().unwrap_or(false) {
            return Ok(());
        }
        Err(Error::NotATap(graph.nodes.get(node.0).map_or_else(String::new, |n| n.name.clone())))
    }
}

impl Step {
    /// What the step keeps of a batch of `n` samples. A convolution that fuses a norm and a pool never runs backward, so
    /// it keeps no places of maxima.
    pub fn saved(&self, graph: &Graph, n: usize) -> Saved {
        let of = |node: Option<usize>| node.map_or_else(Saved::default, |node| graph.nodes[node].saved(n));
        let (own, norm) = (of(Some(self.node)), of(self.norm));
        let pool = of(self.pool.filter(|_| self.norm.is_none()));
        Saved { floats: own.floats + norm.floats, bytes: own.bytes + pool.bytes }
    }
}

/// The nodes a step reads.
pub(crate) fn inputs<'a>(graph: &'a Graph, step: &'a Step) -> impl Iterator<Item = usize> + 'a {
    graph.nodes[step.node].inputs.iter().map(|id| id.0).chain(step.residual)
}

/// Whether a convolution can fuse a max-pool.
pub(crate) type TakesPool<'a> = &'a dyn Fn(&Node, &MaxPool) -> bool;

/// Fuses convolution or linear layer + ReLU, and normalisation + addition + ReLU, if no other node reads the values between.
fn fuse(graph: &Graph, is_observed: &[bool], training: bool, more: Option<TakesPool<'_>>) -> Vec<Step> {
    let mut consumers = vec![Vec::new(); graph.nodes.len()];
    for (i, node) in graph.nodes.iter().enumerate() {
        for input in &node.inputs {
            consumers[input.0].push(i);
        }
    }
    let only_consumer = |i: usize| match consumers[i][..] {
        [next] if !is_observed[i] => Some(next),
        _ => None,
    };
    let relu_after =
        |i: usize| only_consumer(i).filter(|&next| matches!(graph.nodes[next].op, Op::Activation(Activation::Relu)));
    let mut absorbed = vec![false; graph.nodes.len()];
    // A step with a residual runs where the addition stood: both operands are ready there.
    let mut placed: Vec<(usize, Step)> = Vec::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        if absorbed[i] || node.op.is_idle() {
            continue;
        }
        let mut step = Step { node: i, residual: None, relu: false, pool: None, norm: None, out: i };
        let mut position = i;
        if more.is_some()
            && !training
            && matches!(node.op, Op::Conv(_))
            && !node.has_bias()
            && let Some(norm) = only_consumer(i).filter(|&next| graph.nodes[next].op == Op::BatchNorm)
        {
            absorbed[norm] = true;
            (step.norm, step.out, position) = (Some(norm), norm, norm);
        }
        let is_norm = matches!(node.op, Op::BatchNorm | Op::GroupNorm { .. });
        let is_dropout = matches!(node.op, Op::Dropout { .. });
        if (is_norm || step.norm.is_some() || more.is_some() && is_dropout)
            && let Some(add) =
                only_consumer(step.out).filter(|&next| graph.nodes[next].op == Op::Add && !absorbed[next])
        {
            absorbed[add] = true;
            step.residual = graph.nodes[add].inputs.iter().map(|id| id.0).find(|&other| other != step.out);
            (step.out, position) = (add, add);
        }
        if (is_norm || node.convolution().is_some())
            && let Some(relu) = relu_after(step.out)
        {
            absorbed[relu] = true;
            (step.relu, step.out) = (true, relu);
        }
        if let Some(takes_pool) = more
            && step.relu
            && step.residual.is_none()
            && let Some(pool) = only_consumer(step.out)
            && match (&node.op, &graph.nodes[pool].op) {
                (Op::BatchNorm, Op::MaxPool(_)) => true,
                (Op::Conv(_), Op::MaxPool(window)) => step.norm.is_some() && takes_pool(node, window),
                _ => false,
            }
        {
            absorbed[pool] = true;
            (step.pool, step.out) = (Some(pool), pool);
        }
        placed.push((position, step));
    }
    placed.sort_by_key(|(position, _)| *position);
    placed.into_iter().map(|(_, step)| step).collect()
}

/// A slot for each node or step that has one.
type SlotOf = Vec<Option<usize>>;

/// Slots that are reused once they are free.
#[derive(Default)]
struct Slots {
    len: Vec<usize>,
    free: Vec<usize>,
}

impl Slots {
    /// A free slot of this length, or a new one. Slots of other lengths are not reused: each thread keeps to its part of a
    /// tensor, and in a tensor of another length that part would be in another core's cache.
    fn take(&mut self, len: usize) -> usize {
        if let Some(i) = self.free.iter().position(|&slot| self.len[slot] == len) {
            return self.free.swap_remove(i);
        }
        self.len.push(len);
        self.len.len() - 1
    }
}

/// While training, every value stays until the backward pass. Otherwise its memory is reused after the last reader.
fn place_values(
    graph: &Graph,
    steps: &[Step],
    is_observed: &[bool],
    training: bool,
) -> (Vec<Option<usize>>, Vec<usize>) {
    let mut last_use = vec![0; graph.nodes.len()];
    for (at, step) in steps.iter().enumerate() {
        for input in inputs(graph, step) {
            last_use[graph.owner(input)] = at;
        }
    }
    let mut keep = vec![training; graph.nodes.len()];
    for (i, &observed) in is_observed.iter().enumerate() {
        keep[graph.owner(i)] |= observed;
    }
    let mut slots = Slots::default();
    let mut slot_of = vec![None; graph.nodes.len()];
    slot_of[0] = Some(slots.take(graph.nodes[0].shape.len()));
    for (at, step) in steps.iter().enumerate() {
        slot_of[step.out] = Some(slots.take(graph.nodes[step.out].shape.len()));
        for input in inputs(graph, step) {
            let input = graph.owner(input);
            if last_use[input] == at && !keep[input] {
                slots.free.extend(slot_of[input]);
                keep[input] = true; // given back once, though both operands may be the same node
            }
        }
    }
    for i in 0..graph.nodes.len() {
        slot_of[i] = slot_of[graph.owner(i)];
    }
    (slot_of, slots.len)
}

/// A gradient lives from the backward step of its node's last reader to that of the node. Normalisations and fused ReLUs
/// work in place, or on a copy if the gradient is observed. Returns the slots of nodes, the slots of steps' copies, and the
/// lengths of slots.
fn place_gradients(graph: &Graph, steps: &[Step], is_observed: &[bool]) -> (SlotOf, SlotOf, Vec<usize>) {
    let n = graph.nodes.len();
    let mut needed = is_observed.to_vec();
    for (i, node) in graph.nodes.iter().enumerate() {
        needed[i] |= node.trains() || node.inputs.iter().any(|input| needed[input.0]);
    }
    let mut pinned = vec![false; n];
    let mut slots = Slots::default();
    let mut slot_of: SlotOf = vec![None; n];
    for i in (0..n).filter(|&i| is_observed[i]) {
        let own = graph.owner(i);
        pinned[own] = true;
        if slot_of[own].is_none() {
            slot_of[own] = Some(slots.take(graph.nodes[own].shape.len()));
        }
    }
    let mut work_slot: SlotOf = vec![None; steps.len()];
    for (at, step) in steps.iter().enumerate().rev() {
        let Some(mut out_slot) = slot_of[step.out] else { continue };
        let is_norm = graph.nodes[step.node].op.works_in_place();
        let mut handed_over = pinned[step.out];
        if pinned[step.out] && (is_norm || step.relu) {
            out_slot = slots.take(graph.nodes[step.out].shape.len());
            (work_slot[at], handed_over) = (Some(out_slot), false);
        }
        let main = graph.nodes[step.node].inputs.first().map(|id| graph.owner(id.0));
        // A normalisation that is added to its own input gives that input two gradients.
        let in_place = is_norm && step.pool.is_none() && step.residual.map(|r| graph.owner(r)) != main;
        for input in inputs(graph, step).map(|i| graph.owner(i)) {
            if !needed[input] || slot_of[input].is_some() {
                continue;
            }
            if in_place && Some(input) == main && !handed_over {
                slot_of[input] = Some(out_slot);
                handed_over = true;
            } else {
                slot_of[input] = Some(slots.take(graph.nodes[input].shape.len()));
            }
        }
        if !handed_over {
            slots.free.push(out_slot);
        }
    }
    for i in 0..n {
        slot_of[i] = slot_of[graph.owner(i)];
    }
    (slot_of, work_slot, slots.len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Shape;
    use crate::models::{self, Variant};

    #[test]
    fn without_training_layers_share_memory() {
        for name in ["resnet8", "resnet18"] {
            let graph = models::build(name, Shape::image(32, 32, 3), 10, Variant::default()).unwrap();
            let floats = |training| -> usize {
                let plan = Plan::new(&graph, &Options { batch: 1, taps: &[], training }, None);
                assert_eq!(plan.grad_len.is_empty(), !training, "{name}");
                plan.value_len.iter().sum()
            };
            assert!(floats(false) < floats(true), "{name}");
        }
    }
}
