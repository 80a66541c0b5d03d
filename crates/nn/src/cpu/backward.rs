//! The backward pass: each stage turns the gradient of its output into gradients of its inputs and parameters.

use super::{Workspace, check_len, len_of, spans_mut};
use crate::error::Result;
use crate::graph::{NORM_EPS, Node, Norm, Op};
use crate::kernels::attention::Attention;
use crate::kernels::conv::Backward;
use crate::kernels::dense::Dense;
use crate::kernels::layer_norm::{self, LayerNorm};
use crate::kernels::linear::Linear;
use crate::kernels::norm::{self, BatchNorm, FusedBackward, GroupNorm};
use crate::kernels::{Buffer, Cpu, Sum, dropout, elementwise, embedding, pool};

/// A node's gradient, taken out of the workspace's list while a stage runs.
struct Taken {
    slot: usize,
    buffer: Buffer,
    len: usize,
    fresh: bool,
}

impl Taken {
    fn sum(&mut self) -> Sum<'_> {
        Sum { values: &mut self.buffer[..self.len], fresh: self.fresh }
    }
}

impl Workspace {
    /// Writes ∂L/∂θ to `grad`, where L is the sum of the losses and gradients added since the last forward pass.
    ///
    /// Only nodes that a gradient reaches are visited: after a loss at a tap, the pass starts at that tap.
    ///
    /// # Errors
    /// If a vector does not fit the graph.
    pub fn backward(&mut self, params: &[f32], grad: &mut [f32]) -> Result<()> {
        check_len("the parameter vector", self.graph.params().len(), params.len())?;
        check_len("the gradient vector", self.graph.params().len(), grad.len())?;
        for i in (0..self.schedule.stages.len()).rev() {
            if self.has_grad[self.schedule.stages[i].out] {
                self.run_stage_backward(i, params, grad);
            } else {
                for span in &self.graph.nodes[self.schedule.stages[i].node].params {
                    grad[span.clone()].fill(0.0);
                }
            }
        }
        for node in (0..self.schedule.is_tap.len()).filter(|&node| self.schedule.is_tap[node]) {
            if let (false, Some(slot)) = (self.has_grad[self.graph.owner(node)], self.schedule.grad_slot[node]) {
                self.grads[slot].fill(0.0);
            }
        }
        Ok(())
    }

    /// Takes a node's gradient, if the node needs one, and marks it as present.
    fn take_grad(&mut self, node: usize) -> Option<Taken> {
        let slot = self.schedule.grad_slot[node]?;
        let (owner, len) = (self.graph.owner(node), self.len_of(node));
        let fresh = !std::mem::replace(&mut self.has_grad[owner], true);
        Some(Taken { slot, buffer: std::mem::take(&mut self.grads[slot]), len, fresh })
    }

    fn run_stage_backward(&mut self, i: usize, params: &[f32], grad: &mut [f32]) {
        let stage = self.schedule.stages[i];
        let Some(mut out_slot) = self.schedule.grad_slot[stage.out] else { return };
        let dy_len = self.len_of(stage.out);
        if let Some(work) = self.schedule.work_slot[i] {
            let observed = std::mem::take(&mut self.grads[out_slot]);
            self.grads[work][..dy_len].copy_from_slice(&observed[..dy_len]);
            self.grads[out_slot] = observed;
            out_slot = work;
        }
        let mut dy_buffer = std::mem::take(&mut self.grads[out_slot]);
        let inputs = &self.graph.nodes[stage.node].inputs;
        let (input, second) = (inputs[0].0, inputs.get(1).map(|id| id.0).filter(|&id| id != inputs[0].0));
        if let Some(norm) = self.graph.nodes[stage.node].op.norm() {
            let mut residual = stage.residual.and_then(|r| self.take_grad(r));
            self.norm_backward((i, norm), params, &mut dy_buffer[..dy_len], residual.as_mut().map(Taken::sum), grad);
            self.put_back(residual);
            if self.schedule.grad_slot[input] == Some(out_slot) {
                // The normalisation worked in place: dy's memory now holds the input's gradient.
                let owner = self.graph.owner(input);
                self.has_grad[owner] = true;
            } else if let Some(mut dx) = self.take_grad(input) {
                elementwise::add(&mut self.cpu, dx.sum(), &dy_buffer[..dy_len]);
                self.put_back(Some(dx));
            }
        } else {
            let mut dx = self.take_grad(input);
            self.layer_backward(i, params, &mut dy_buffer[..dy_len], dx.as_mut().map(Taken::sum), grad);
            self.put_back(dx);
            if let Some(mut dx) = second.and_then(|id| self.take_grad(id)) {
                elementwise::add(&mut self.cpu, dx.sum(), &dy_buffer[..dy_len]);
                self.put_back(Some(dx));
            }
        }
        self.grads[out_slot] = dy_buffer;
    }

    fn put_back(&mut self, taken: Option<Taken>) {
        if let Some(taken) = taken {
            self.grads[taken.slot] = taken.buffer;
        }
    }

    /// dz becomes the gradient of the normalisation's input.
    fn norm_backward(
        &mut self,
        (i, norm): (usize, Norm),
        params: &[f32],
        dz: &mut [f32],
        residual: Option<Sum<'_>>,
        grad: &mut [f32],
    ) {
        let Self { graph, schedule, cpu, values, saved, scratch, batch, tokens, mode, .. } = self;
        let stage = schedule.stages[i];
        let node = &graph.nodes[stage.node];
        let len_of = |node: usize| len_of(&graph.nodes[node], *batch, tokens);
        let value = |node: usize| schedule.value_slot[node].map_or(&[][..], |slot| &values[slot][..len_of(node)]);
        let x = value(node.inputs[0].0);
        let fused = FusedBackward { z: stage.relu.then(|| value(stage.out)), residual };
        let [weight, bias, _] = node.params.each_ref().map(|span| &params[span.clone()]);
        let [dweight, dbias, _] = spans_mut(grad, &node.params);
        let (saved, shared) = (&saved[i], &mut scratch.shared);
        match norm {
            Norm::Layer { eps } => {
                LayerNorm { weight, bias, eps }.backward(cpu, x, saved, dz, dweight, dbias, shared);
            }
            Norm::Group { groups } => {
                let layer = GroupNorm { weight, bias, groups, image: node.shape.len(), eps: NORM_EPS };
                layer.backward(cpu, x, saved, fused, dz, dweight, dbias, shared, &mut scratch.private);
            }
            Norm::Batch => {
                let layer = BatchNorm { weight, bias, mode: mode.norm, eps: NORM_EPS };
                layer.backward(cpu, x, saved, fused, dz, dweight, dbias, shared);
            }
        }
    }

    /// Every other operation: adds to the gradient of the (first) input, where one is needed.
    fn layer_backward(&mut self, i: usize, params: &[f32], dy: &mut [f32], dx: Option<Sum<'_>>, grad: &mut [f32]) {
        let Self { graph, schedule, cpu, values, saved, saved_bytes, scratch, batch, tokens, mode, .. } = self;
        let stage = schedule.stages[i];
        let node = &graph.nodes[stage.node];
        let len_of = |node: usize| len_of(&graph.nodes[node], *batch, tokens);
        let value = |node: usize| schedule.value_slot[node].map_or(&[][..], |slot| &values[slot][..len_of(node)]);
        let (x, y) = (value(node.inputs[0].0), value(stage.out));
        let (w, c) = (&params[node.params[0].clone()], node.shape.c);
        let [dw, second, third] = spans_mut(grad, &node.params);
        if stage.relu {
            elementwise::mask_negative(cpu, y, dy);
        }
        if node.has_bias() {
            norm::column_sums(cpu, dy, second, &mut scratch.shared);
        }
        match (node.op, dx) {
            (Op::Conv(geometry), dx) => geometry.backward(cpu, Backward { x, w, dy, dx, dw }, scratch.both()),
            (Op::StandardizedConv(geometry), dx) => {
                let (w, inverses) = saved[i].split_at(w.len());
                geometry.backward(cpu, Backward { x, w, dy, dx, dw }, scratch.both());
                layer_norm::standardize_backward(cpu, w, inverses, dw);
            }
            (Op::Linear, dx) => linear_backward(node, cpu, x, w, dy, dx, dw, &mut scratch.shared),
            (Op::Embedding, dx) => {
                embedding::backward(cpu, tokens, dy, c, [dw, second, third], &mut scratch.shared);
                // Tokens themselves have no gradient.
                if let Some(dx) = dx {
                    dx.values.fill(0.0);
                }
            }
            (Op::Attention { heads, rate }, Some(dx)) => {
                let drop = mode.drop_key(stage.node, rate).map(|key| (key, rate));
                let layer = Attention { tokens, heads, width: c, drop };
                layer.backward(cpu, x, y, &saved[i], dy, dx, &mut scratch.private);
            }
            (Op::FirstToken | Op::MeanOfTokens, Some(dx)) => {
                embedding::pool_backward(cpu, tokens, node.op == Op::MeanOfTokens, dy, c, dx);
            }
            (Op::Activation(f), Some(dx)) => f.backward(cpu, x, y, dy, dx),
            (Op::MaxPool(geometry), Some(dx)) => geometry.backward(cpu, &saved_bytes[i], dy, dx),
            (Op::GlobalAveragePool, Some(dx)) => {
                pool::global_average_backward(cpu, graph.shape(node.inputs[0]).pixels(), c, dy, dx);
            }
            (Op::Dropout { rate }, Some(dx)) if mode.drop_key(stage.node, rate).is_some() => {
                dropout::backward(cpu, rate, &saved_bytes[i], dy, dx);
            }
            (Op::Dropout { .. }, Some(dx)) => elementwise::add(cpu, dx, dy),
            (Op::Add, Some(Sum { values, fresh })) => {
                elementwise::add(cpu, Sum { values: &mut *values, fresh }, dy);
                if node.inputs[0] == node.inputs[1] {
                    // x + x passes the gradient twice.
                    elementwise::add(cpu, Sum { values, fresh: false }, dy);
                }
            }
            // `norm_backward` handles normalisations.
            (Op::Input | Op::Flatten | Op::BatchNorm | Op::GroupNorm { .. } | Op::LayerNorm { .. }, _)
            // No parameters, and nobody wants the input's gradient.
            | (
                Op::Attention { .. }
                | Op::FirstToken
                | Op::MeanOfTokens
                | Op::Activation(_)
                | Op::MaxPool(_)
                | Op::GlobalAveragePool
                | Op::Dropout { .. }
                | Op::Add,
                None,
            ) => {}
        }
    }
}

/// Writes dw of a linear layer and adds to dx, if that is wanted.
#[allow(clippy::too_many_arguments, reason = "a kernel takes its operands one by one")]
fn linear_backward(
    node: &Node,
    cpu: &mut Cpu,
    x: &[f32],
    w: &[f32],
    dy: &[f32],
    dx: Option<Sum<'_>>,
    dw: &mut [f32],
    scratch: &mut [f32],
) {
    let (inputs, outputs) = (node.linear_inputs(), node.shape.c);
    if node.packed {
        let layer = Dense { inputs, outputs };
        layer.backward_weights(cpu, x, dy, dw, scratch);
        if let Some(dx) = dx {
            layer.backward_input(cpu, w, dy, dx, scratch);
        }
    } else {
        let layer = Linear { inputs, outputs };
        layer.backward_weights(cpu, x, dy, dw);
        if let Some(dx) = dx {
            layer.backward_input(cpu, w, dy, dx, scratch);
        }
    }
}
