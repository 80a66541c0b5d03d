//! The backward pass: each step turns the gradient of its output into gradients of its inputs and parameters.

use super::{Workspace, check_len};
use crate::error::Result;
use crate::graph::{NORM_EPS, Op};
use crate::kernels::conv::Scratch;
use crate::kernels::linear::Linear;
use crate::kernels::norm::{self, BatchNorm, FusedBackward, GroupNorm};
use crate::kernels::{dropout, elementwise, pool};

impl Workspace {
    /// Writes ∂L/∂θ to `grad`, where L is the sum of the losses and gradients added since the last forward pass.
    ///
    /// Only nodes that a gradient reaches are visited: from a loss at a tap, the pass starts at that tap.
    ///
    /// # Errors
    /// If a vector does not fit the graph.
    pub fn backward(&mut self, params: &[f32], grad: &mut [f32]) -> Result<()> {
        check_len("the parameter vector", self.graph.params().len(), params.len())?;
        check_len("the gradient vector", self.graph.params().len(), grad.len())?;
        for i in (0..self.plan.steps.len()).rev() {
            let step = &self.plan.steps[i];
            if self.has_grad[step.out] {
                self.run_step_backward(i, params, grad);
            } else {
                self.zero_params(i, grad);
            }
        }
        Ok(())
    }

    fn zero_params(&self, i: usize, grad: &mut [f32]) {
        let layout = self.graph.params();
        match self.graph.nodes[self.plan.steps[i].node].op {
            Op::Conv { weight, bias, .. } | Op::Linear { weight, bias } => {
                layout.slice_mut(weight, grad).fill(0.0);
                if let Some(bias) = bias {
                    layout.slice_mut(bias, grad).fill(0.0);
                }
            }
            Op::BatchNorm { weight, bias, .. } | Op::GroupNorm { weight, bias, .. } => {
                layout.slice_mut(weight, grad).fill(0.0);
                layout.slice_mut(bias, grad).fill(0.0);
            }
            _ => (),
        }
    }

    /// Takes a node's gradient memory out of the list, zeroed if this is the first contribution.
    fn take_grad(&mut self, node: usize) -> Option<(usize, crate::kernels::Buffer)> {
        let slot = self.plan.grad_slot[node]?;
        let mut buffer = std::mem::take(&mut self.grads[slot]);
        if !self.has_grad[node] {
            buffer[..self.batch * self.graph.nodes[node].shape.len()].fill(0.0);
            self.mark_grad(node);
        }
        Some((slot, buffer))
    }

    fn run_step_backward(&mut self, i: usize, params: &[f32], grad: &mut [f32]) {
        let step = self.plan.steps[i];
        let Some(out_slot) = self.plan.grad_slot[step.out] else { return };
        let node_inputs = (self.graph.nodes[step.node].inputs[0].0, self.graph.nodes[step.node].inputs.get(1).copied());
        let mut dy_buffer = std::mem::take(&mut self.grads[out_slot]);
        let in_place = matches!(self.graph.nodes[step.node].op, Op::BatchNorm { .. } | Op::GroupNorm { .. });
        let input = node_inputs.0;
        // A normalisation turns dy into dx in place, and hands the memory over where the input shares it.
        let mut dx_buffer = if in_place { None } else { self.take_grad(input) };
        let mut residual = step.residual.and_then(|r| self.take_grad(r));
        let second = node_inputs.1.and_then(|id| if id.0 == input { None } else { self.take_grad(id.0) });

        let Self { graph, plan, cpu, values, saved, saved_bytes, scratch, batch, mode, .. } = self;
        let node = &graph.nodes[step.node];
        let len_of = |node: usize| *batch * graph.nodes[node].shape.len();
        let value = |node: usize| plan.value_slot[node].map_or(&[][..], |slot| &values[slot][..len_of(node)]);
        let (x, y) = (value(input), value(step.out));
        let dy = &mut dy_buffer[..len_of(step.out)];
        let dx = dx_buffer.as_mut().map(|(_, buffer)| &mut buffer[..len_of(input)]);
        let layout = graph.params();
        let param = |id| layout.slice(id, params);
        if step.relu && !in_place {
            elementwise::mask_negative(cpu, y, dy);
        }
        match &node.op {
            Op::Conv { geometry, weight, bias } => {
                if let Some(bias) = bias {
                    norm::column_sums(cpu, dy, layout.slice_mut(*bias, grad), &mut scratch.shared);
                }
                let s = Scratch { shared: &mut scratch.shared, private: &mut scratch.private };
                geometry.backward(cpu, x, param(*weight), dy, dx, layout.slice_mut(*weight, grad), s);
            }
            Op::Linear { weight, bias } => {
                if let Some(bias) = bias {
                    norm::column_sums(cpu, dy, layout.slice_mut(*bias, grad), &mut scratch.shared);
                }
                let layer = Linear { inputs: graph.shape(node.inputs[0]).len(), outputs: node.shape.c };
                layer.backward_weights(cpu, x, dy, layout.slice_mut(*weight, grad));
                if let Some(dx) = dx {
                    layer.backward_input(cpu, param(*weight), dy, dx);
                }
            }
            Op::BatchNorm { weight, bias, .. } | Op::GroupNorm { weight, bias, .. } => {
                let residual = residual.as_mut().map(|(_, buffer)| &mut buffer[..dy.len()]);
                let fused = FusedBackward { z: step.relu.then_some(y), residual };
                // Weight and bias are neighbours in the layout.
                let at = layout.spans()[*weight].offset;
                let (dweight, dbias) = grad[at..at + 2 * node.shape.c].split_at_mut(node.shape.c);
                let (w, b) = (param(*weight), param(*bias));
                if let Op::GroupNorm { groups, .. } = node.op {
                    let layer = GroupNorm { weight: w, bias: b, groups, image: node.shape.len(), eps: NORM_EPS };
                    let (shared, private) = (&mut scratch.shared, &mut scratch.private);
                    layer.backward(cpu, x, &saved[i], fused, dy, dweight, dbias, shared, private);
                } else {
                    let layer = BatchNorm { weight: w, bias: b, mode: mode.norm, eps: NORM_EPS };
                    layer.backward(cpu, x, &saved[i], fused, dy, dweight, dbias, &mut scratch.shared);
                }
            }
            Op::Activation(f) => {
                if let Some(dx) = dx {
                    f.backward(cpu, x, y, dy, dx);
                }
            }
            Op::MaxPool(geometry) => {
                if let Some(dx) = dx {
                    geometry.backward(cpu, &saved_bytes[i], dy, dx);
                }
            }
            Op::GlobalAveragePool => {
                if let Some(dx) = dx {
                    pool::global_average_backward(cpu, graph.shape(node.inputs[0]).pixels(), node.shape.c, dy, dx);
                }
            }
            Op::Add => {
                // x + x passes the gradient twice.
                let times = if node.inputs[0] == node.inputs[1] { 2 } else { 1 };
                if let Some(dx) = dx {
                    (0..times).for_each(|_| elementwise::add_assign(cpu, dx, dy));
                }
            }
            Op::Dropout { rate } => {
                if let Some(dx) = dx {
                    match mode.dropout {
                        Some(_) if *rate > 0.0 => dropout::backward(cpu, *rate, &saved_bytes[i], dy, dx),
                        _ => elementwise::add_assign(cpu, dx, dy),
                    }
                }
            }
            Op::Input | Op::Flatten => (),
        }
        let mut second = second;
        if let (Some((_, buffer)), Op::Add) = (&mut second, &node.op) {
            elementwise::add_assign(cpu, &mut buffer[..dy.len()], dy);
        }
        let len = dy.len();
        for (slot, buffer) in [dx_buffer, residual, second].into_iter().flatten() {
            self.grads[slot] = buffer;
        }
        if in_place && self.plan.grad_slot[input].is_some_and(|slot| slot != out_slot) {
            // The input's gradient has memory of its own, because others add to it too.
            if let Some((slot, mut buffer)) = self.take_grad(input) {
                elementwise::add_assign(&mut self.cpu, &mut buffer[..len], &dy_buffer[..len]);
                self.grads[slot] = buffer;
            }
        } else if in_place && self.plan.grad_slot[input].is_some() {
            self.mark_grad(input);
        }
        self.grads[out_slot] = dy_buffer;
    }
}
