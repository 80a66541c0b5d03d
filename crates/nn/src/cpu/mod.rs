//! Execution of a graph on the CPU: memory that is allocated once, and the forward and backward passes over it.

mod backward;
mod forward;

use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId, Saved};
use crate::kernels::conv::Scratch;
use crate::kernels::{Buffer, Cpu, Isa};
use crate::loss::{Loss, LossTargets};
use crate::mode::{Mode, Options};
use crate::schedule::Schedule;
use crate::tokens::Tokens;
use std::ops::Range;

/// The memory and threads that execute a graph. Passes allocate nothing.
#[derive(Debug)]
pub struct Workspace {
    graph: Graph,
    schedule: Schedule,
    cpu: Cpu,
    batch_max: usize,
    /// Samples of the last forward pass, and their tokens where they are texts.
    batch: usize,
    tokens: Tokens,
    mode: Mode,
    values: Vec<Buffer>,
    grads: Vec<Buffer>,
    /// Which nodes have a gradient so far in this backward pass. A flattened image shares the entry of the image.
    has_grad: Vec<bool>,
    /// Statistics that a stage keeps for its backward pass, and places of maxima or dropout masks.
    saved: Vec<Buffer>,
    saved_bytes: Vec<Vec<u8>>,
    scratch: ScratchMemory,
    loss_memory: crate::loss::Buffers,
}

#[derive(Debug)]
struct ScratchMemory {
    shared: Buffer,
    private: Buffer,
}

impl ScratchMemory {
    fn both(&mut self) -> Scratch<'_> {
        Scratch { shared: &mut self.shared, private: &mut self.private }
    }
}

impl Workspace {
    /// Memory for `graph`, executed by `cpu`.
    ///
    /// # Errors
    /// If the batch or a sample is empty.
    pub fn new(graph: &Graph, options: &Options<'_>, cpu: Cpu) -> Result<Self> {
        if options.batch == 0 {
            return Err(Error::Parameter { name: "batch", value: 0.0, expected: "must be at least 1" });
        }
        let input = graph.shape(graph.input());
        if input.is_empty() {
            return Err(Error::shape(graph.name(graph.input()), format!("a sample of shape {input} has no elements")));
        }
        let schedule = Schedule::new(graph, options, None);
        let n = options.batch;
        check_memory(schedule.value_len.iter().chain(&schedule.grad_len).copied().max().unwrap_or(0), n)?;
        let buffers = |lens: &[usize]| lens.iter().map(|len| Buffer::zeros(n * len)).collect::<Vec<_>>();
        let scratch = schedule.stages.iter().map(|stage| graph.nodes[stage.node].scratch(n));
        let (shared, private) = scratch.fold((0, 0), |most, len| (most.0.max(len.shared), most.1.max(len.private)));
        let saved: Vec<Saved> = schedule.stages.iter().map(|stage| stage.saved(graph, n)).collect();
        let private = Buffer::zeros(private.next_multiple_of(16) * cpu.n_threads());
        Ok(Self {
            values: buffers(&schedule.value_len),
            grads: buffers(&schedule.grad_len),
            has_grad: vec![false; graph.nodes.len()],
            graph: graph.clone(),
            schedule,
            cpu,
            batch_max: n,
            batch: 0,
            tokens: Tokens::new(graph, n),
            mode: Mode::EVAL,
            saved: saved.iter().map(|saved| Buffer::zeros(saved.floats)).collect(),
            saved_bytes: saved.iter().map(|saved| vec![0; saved.bytes]).collect(),
            scratch: ScratchMemory { shared: Buffer::zeros(shared), private },
            loss_memory: crate::loss::Buffers::default(),
        })
    }

    /// The graph.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.cpu.isa()
    }

    /// The threads and instruction set, for vector operations between passes.
    pub fn cpu(&mut self) -> &mut Cpu {
        &mut self.cpu
    }

    /// The output of the last forward pass, (batch, outputs).
    pub fn output(&self) -> &[f32] {
        self.node_value(self.graph.output().0)
    }

    /// The value of the output or of a tap, (batch, …) channels-last, or (tokens of the batch, C) without padding.
    ///
    /// # Errors
    /// If the node is neither.
    pub fn value(&self, node: NodeId) -> Result<&[f32]> {
        self.schedule.check_tap(&self.graph, node)?;
        Ok(self.node_value(node.0))
    }

    fn node_value(&self, node: usize) -> &[f32] {
        let len = self.len_of(node);
        self.schedule.value_slot[node].map_or(&[], |slot| &self.values[slot][..len])
    }

    /// Floats of a node's value in the last forward pass.
    fn len_of(&self, node: usize) -> usize {
        len_of(&self.graph.nodes[node], self.batch, &self.tokens)
    }

    /// Calls `f(value, gradient)` for the output or a tap, to add to its gradient before [`Workspace::backward`].
    ///
    /// # Errors
    /// If the node is not a tap, or the workspace was made without training.
    pub fn inject<T>(&mut self, node: NodeId, f: impl FnOnce(&[f32], &mut [f32]) -> T) -> Result<T> {
        self.schedule.check_tap(&self.graph, node)?;
        if self.batch == 0 {
            return Err(Error::Batch { found: 0, max: self.batch_max });
        }
        let len = self.len_of(node.0);
        let (Some(value), Some(grad)) = (self.schedule.value_slot[node.0], self.schedule.grad_slot[node.0]) else {
            return Err(Error::NotATap(self.graph.nodes[node.0].name.clone()));
        };
        let owner = self.graph.owner(node.0);
        let gradient = &mut self.grads[grad][..len];
        if !std::mem::replace(&mut self.has_grad[owner], true) {
            gradient.fill(0.0);
        }
        Ok(f(&self.values[value][..len], gradient))
    }

    /// Adds `weight` times a loss at the output or a tap. Returns the loss without the weight.
    ///
    /// # Errors
    /// If the targets do not fit the node's shape, or as [`Workspace::inject`].
    pub fn add_loss(&mut self, node: NodeId, (loss, targets): &(Loss, LossTargets<'_>), weight: f32) -> Result<f64> {
        check_loss_at(&self.graph, node)?;
        let shape = self.graph.shape(node);
        loss.check(targets, self.batch, shape.len())?;
        let mut memory = std::mem::take(&mut self.loss_memory);
        let loss = self.inject(node, |z, grad| loss.add_gradient(targets, shape, z, weight, grad, &mut memory));
        self.loss_memory = memory;
        loss
    }

    /// The gradient that the last backward pass left at a tap, (batch, …).
    ///
    /// # Errors
    /// If the node is not a tap.
    pub fn gradient(&self, node: NodeId) -> Result<&[f32]> {
        self.schedule.check_tap(&self.graph, node)?;
        let len = self.len_of(node.0);
        Ok(self.schedule.grad_slot[node.0].map_or(&[], |slot| &self.grads[slot][..len]))
    }

    /// Forward pass, loss at the output, backward pass: writes the loss's gradient to `grad` and returns the loss.
    ///
    /// # Errors
    /// If a vector does not fit the graph, or the loss does not fit the output.
    pub fn loss_gradient(
        &mut self,
        params: &[f32],
        buffers: &mut [f32],
        x: &[f32],
        loss: &(Loss, LossTargets<'_>),
        mode: Mode,
        grad: &mut [f32],
    ) -> Result<f64> {
        self.forward(params, buffers, x, mode)?;
        let value = self.add_loss(self.graph.output(), loss, 1.0)?;
        self.backward(params, grad)?;
        Ok(value)
    }
}

/// Rejects a batch for which the system refuses memory, where `widest` is the longest value of a sample: the allocator would end
/// the process.
fn check_memory(widest: usize, batch: usize) -> Result<()> {
    // The memory is given back at once, and no page of it is touched.
    let mut memory: Vec<f32> = Vec::new();
    let fits = |len: &usize| u32::try_from(batch).is_ok() && memory.try_reserve_exact(*len).is_ok();
    match widest.checked_mul(batch).filter(fits) {
        Some(_) => Ok(()),
        None => Err(Error::Parameter {
            name: "batch",
            value: batch as f64,
            expected: "must be smaller: its values do not fit into this machine's memory",
        }),
    }
}

/// Floats of a node's value for a batch.
fn len_of(node: &Node, batch: usize, tokens: &Tokens) -> usize {
    if node.packed { tokens.len() * node.shape.c } else { batch * node.shape.len() }
}

/// A node's tensors in a flat vector.
fn spans_mut<'a, const N: usize>(flat: &'a mut [f32], spans: &[Range<usize>; N]) -> [&'a mut [f32]; N] {
    flat.get_disjoint_mut(spans.clone()).expect("a layout's spans do not overlap, and its vector's length was checked")
}

/// Rejects a loss at a node with tokens.
pub(crate) fn check_loss_at(graph: &Graph, node: NodeId) -> Result<()> {
    if graph.nodes[node.0].packed {
        let problem = "has one vector per token; put the loss behind a node that pools the tokens";
        return Err(Error::shape(graph.name(node), problem));
    }
    Ok(())
}

pub(crate) fn check_len(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
}
