//! From a graph to what is executed: which nodes run as one stage, and which memory they use.

use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId, Op, Saved};
use crate::kernels::Activation;
use crate::kernels::pool::MaxPool;
use crate::mode::Options;

/// One stage of execution: a node, with the nodes that were fused into it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Stage {
    /// The node whose operation is run.
    pub node: usize,
    /// A residual that is added to a normalisation's or a dropout's result.
    pub residual: Option<usize>,
    /// Whether a ReLU follows in the same stage.
    pub relu: bool,
    /// A max-pool after that.
    pub pool: Option<usize>,
    /// A batch-norm that the convolution `node` applies itself.
    pub norm: Option<usize>,
    /// The node whose value the stage produces: the last of those fused.
    pub out: usize,
}

/// Stages in order of execution, and memory slots of values and gradients.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    pub stages: Vec<Stage>,
    /// The slot of each node's value; none for nodes inside a fused stage.
    pub value_slot: Vec<Option<usize>>,
    /// The slot of each node's gradient; none where no gradient is needed.
    pub grad_slot: Vec<Option<usize>>,
    /// The slot of a stage's copy of its output's gradient, where the stage would overwrite a gradient that is observed.
    pub work_slot: Vec<Option<usize>>,
    /// Floats for one sample in each slot.
    pub value_len: Vec<usize>,
    pub grad_len: Vec<usize>,
    /// Whether a node is the output or a tap.
    pub is_tap: Vec<bool>,
}

impl Schedule {
    /// Plans `graph`. Output and taps keep their own value, and their own gradient if training. `more` turns on the GPU's
    /// fusions: a batch-norm and its ReLU fuse a max-pool, and a dropout fuses an addition. Without training, a
    /// convolution fuses a batch-norm, and the max-pool behind it where `more` allows it.
    pub fn new(graph: &Graph, options: &Options<'_>, more: Option<TakesPool<'_>>) -> Self {
        let is_observed = |i: usize| NodeId(i) == graph.output() || options.taps.contains(&NodeId(i));
        let is_tap: Vec<bool> = (0..graph.nodes.len()).map(is_observed).collect();
        let stages = fuse(graph, &is_tap, options.training, more);
        let (value_slot, value_len) = place_values(graph, &stages, &is_tap, options.training);
        let (grad_slot, work_slot, grad_len) = if options.training {
            place_gradients(graph, &stages, &is_tap)
        } else {
            (vec![None; graph.nodes.len()], vec![None; stages.len()], vec![])
        };
        Self { stages, value_slot, grad_slot, work_slot, value_len, grad_len, is_tap }
    }

    /// Fails for a node that is neither the output nor a tap.
    pub fn check_tap(&self, graph: &Graph, node: NodeId) -> Result<()> {
        if self.is_tap.get(node.0).copied().unwrap_or(false) {
            return Ok(());
        }
        Err(Error::NotATap(graph.nodes.get(node.0).map_or_else(String::new, |n| n.name.clone())))
    }
}

impl Stage {
    /// What the stage keeps of a batch of `n` samples. A convolution that fuses a norm and a pool never runs backward, so
    /// it keeps no places of maxima.
    pub fn saved(&self, graph: &Graph, n: usize) -> Saved {
        let of = |node: Option<usize>| node.map_or_else(Saved::default, |node| graph.nodes[node].saved(n));
        let (own, norm) = (of(Some(self.node)), of(self.norm));
        let pool = of(self.pool.filter(|_| self.norm.is_none()));
        Saved { floats: own.floats + norm.floats, bytes: own.bytes + pool.bytes }
    }
}

/// The nodes a stage reads.
pub(crate) fn inputs<'a>(graph: &'a Graph, stage: &'a Stage) -> impl Iterator<Item = usize> + 'a {
    graph.nodes[stage.node].inputs.iter().map(|id| id.0).chain(stage.residual)
}

/// Whether a convolution can fuse a max-pool.
pub(crate) type TakesPool<'a> = &'a dyn Fn(&Node, &MaxPool) -> bool;

/// Fuses convolution or linear layer + ReLU, and normalisation + addition + ReLU, if no other node reads the values between.
fn fuse(graph: &Graph, is_observed: &[bool], training: bool, more: Option<TakesPool<'_>>) -> Vec<Stage> {
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
    // A stage with a residual runs where the addition stood: both operands are ready there.
    let mut placed: Vec<(usize, Stage)> = Vec::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        if absorbed[i] || node.op.is_idle() {
            continue;
        }
        let mut stage = Stage { node: i, residual: None, relu: false, pool: None, norm: None, out: i };
        let mut position = i;
        if more.is_some()
            && !training
            && matches!(node.op, Op::Conv(_))
            && !node.has_bias()
            && let Some(norm) = only_consumer(i).filter(|&next| graph.nodes[next].op == Op::BatchNorm)
        {
            absorbed[norm] = true;
            (stage.norm, stage.out, position) = (Some(norm), norm, norm);
        }
        let is_norm = matches!(node.op, Op::BatchNorm | Op::GroupNorm { .. });
        let is_dropout = matches!(node.op, Op::Dropout { .. });
        if (is_norm || stage.norm.is_some() || more.is_some() && is_dropout)
            && let Some(add) =
                only_consumer(stage.out).filter(|&next| graph.nodes[next].op == Op::Add && !absorbed[next])
        {
            absorbed[add] = true;
            stage.residual = graph.nodes[add].inputs.iter().map(|id| id.0).find(|&other| other != stage.out);
            (stage.out, position) = (add, add);
        }
        if (is_norm || node.convolution().is_some())
            && let Some(relu) = relu_after(stage.out)
        {
            absorbed[relu] = true;
            (stage.relu, stage.out) = (true, relu);
        }
        if let Some(takes_pool) = more
            && stage.relu
            && stage.residual.is_none()
            && let Some(pool) = only_consumer(stage.out)
            && match (&node.op, &graph.nodes[pool].op) {
                (Op::BatchNorm, Op::MaxPool(_)) => true,
                (Op::Conv(_), Op::MaxPool(window)) => stage.norm.is_some() && takes_pool(node, window),
                _ => false,
            }
        {
            absorbed[pool] = true;
            (stage.pool, stage.out) = (Some(pool), pool);
        }
        placed.push((position, stage));
    }
    placed.sort_by_key(|(position, _)| *position);
    placed.into_iter().map(|(_, stage)| stage).collect()
}

/// A slot for each node or stage that has one.
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
    stages: &[Stage],
    is_observed: &[bool],
    training: bool,
) -> (Vec<Option<usize>>, Vec<usize>) {
    let mut last_use = vec![0; graph.nodes.len()];
    for (at, stage) in stages.iter().enumerate() {
        for input in inputs(graph, stage) {
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
    for (at, stage) in stages.iter().enumerate() {
        slot_of[stage.out] = Some(slots.take(graph.nodes[stage.out].shape.len()));
        for input in inputs(graph, stage) {
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

/// A gradient lives from the backward stage of its node's last reader to that of the node. Normalisations and fused ReLUs
/// work in place, or on a copy if the gradient is observed. Returns the slots of nodes, the slots of stages' copies, and the
/// lengths of slots.
fn place_gradients(graph: &Graph, stages: &[Stage], is_observed: &[bool]) -> (SlotOf, SlotOf, Vec<usize>) {
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
    let mut work_slot: SlotOf = vec![None; stages.len()];
    for (at, stage) in stages.iter().enumerate().rev() {
        let Some(mut out_slot) = slot_of[stage.out] else { continue };
        let is_norm = graph.nodes[stage.node].op.norm().is_some();
        let mut handed_over = pinned[stage.out];
        if pinned[stage.out] && (is_norm || stage.relu) {
            out_slot = slots.take(graph.nodes[stage.out].shape.len());
            (work_slot[at], handed_over) = (Some(out_slot), false);
        }
        let main = graph.nodes[stage.node].inputs.first().map(|id| graph.owner(id.0));
        // A normalisation that is added to its own input gives that input two gradients.
        let in_place = is_norm && stage.pool.is_none() && stage.residual.map(|r| graph.owner(r)) != main;
        for input in inputs(graph, stage).map(|i| graph.owner(i)) {
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
                let schedule = Schedule::new(&graph, &Options { batch: 1, taps: &[], training }, None);
                assert_eq!(schedule.grad_len.is_empty(), !training, "{name}");
                schedule.value_len.iter().sum()
            };
            assert!(floats(false) < floats(true), "{name}");
        }
    }
}
