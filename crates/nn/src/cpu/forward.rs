//! The forward pass: each step reads values of earlier nodes and writes its own.

use super::{Mode, Workspace, check_len};
use crate::error::{Error, Result};
use crate::graph::{NORM_EPS, NORM_MOMENTUM, Op};
use crate::kernels::conv::{Epilogue, Scratch};
use crate::kernels::linear::Linear;
use crate::kernels::norm::{BatchNorm, Fused, GroupNorm};
use crate::kernels::{Sum, dropout, elementwise, pool};
use fedproj_rng::{Purpose, philox4x32_10};

impl Workspace {
    /// Computes every node for the samples `x` (batch, H, W, C). Buffers move only in [`super::NormMode::Update`].
    ///
    /// # Errors
    /// If a vector does not fit the graph.
    pub fn forward(&mut self, params: &[f32], buffers: &mut [f32], x: &[f32], mode: Mode) -> Result<()> {
        check_len("the parameter vector", self.graph.params().len(), params.len())?;
        check_len("the buffer vector", self.graph.buffers().len(), buffers.len())?;
        let sample = self.graph.shape(self.graph.input()).len();
        let batch = x.len() / sample;
        check_len("the input batch", batch * sample, x.len())?;
        if batch == 0 || batch > self.batch_max {
            return Err(Error::Batch { found: batch, max: self.batch_max });
        }
        (self.batch, self.mode) = (batch, mode);
        self.has_grad.fill(false);
        if let Some(slot) = self.plan.value_slot[0] {
            elementwise::copy(&mut self.cpu, x, &mut self.values[slot][..x.len()]);
        }
        for i in 0..self.plan.steps.len() {
            self.run_step(i, params, buffers);
        }
        Ok(())
    }

    fn run_step(&mut self, i: usize, params: &[f32], buffers: &mut [f32]) {
        let Self { graph, plan, cpu, values, saved, saved_bytes, scratch, batch, mode, .. } = self;
        let step = &plan.steps[i];
        let node = &graph.nodes[step.node];
        let len_of = |node: usize| *batch * graph.nodes[node].shape.len();
        let Some(out_slot) = plan.value_slot[step.out] else { return };
        // Taken out of the list while the step runs, so that the others can be read; nothing is allocated.
        let mut out = std::mem::take(&mut values[out_slot]);
        let value = |node: usize| plan.value_slot[node].map_or(&[][..], |slot| &values[slot][..len_of(node)]);
        let x = value(node.inputs[0].0);
        let y = &mut out[..len_of(step.out)];
        let param = |id| graph.params().slice(id, params);
        let fused = Fused { residual: step.residual.map(value), relu: step.relu };
        match &node.op {
            Op::Conv { geometry, weight, bias } => {
                let end = Epilogue { bias: bias.map(param), relu: step.relu };
                let s = Scratch { shared: &mut scratch.shared, private: &mut scratch.private };
                geometry.forward(cpu, x, param(*weight), end, y, s);
            }
            Op::Linear { weight, bias } => {
                let layer = Linear { inputs: graph.shape(node.inputs[0]).len(), outputs: node.shape.c };
                let end = Epilogue { bias: bias.map(param), relu: step.relu };
                layer.forward(cpu, x, param(*weight), end, y, &mut scratch.shared);
            }
            Op::BatchNorm { weight, bias, mean, var } => {
                let (weight, bias) = (param(*weight), param(*bias));
                let layer = BatchNorm { weight, bias, mode: mode.norm, eps: NORM_EPS };
                // The variance follows the mean in the layout, so one split separates the two.
                let at = graph.buffers().spans()[*var].offset;
                let (head, tail) = buffers.split_at_mut(at);
                let running = (graph.buffers().slice_mut(*mean, head), &mut tail[..node.shape.c]);
                layer.forward(cpu, x, running, NORM_MOMENTUM, fused, y, &mut saved[i], &mut scratch.shared);
            }
            Op::GroupNorm { weight, bias, groups } => {
                let (weight, bias, image) = (param(*weight), param(*bias), node.shape.len());
                let layer = GroupNorm { weight, bias, groups: *groups, image, eps: NORM_EPS };
                layer.forward(cpu, x, fused, y, &mut saved[i], &mut scratch.private);
            }
            Op::Activation(f) => f.forward(cpu, x, y),
            Op::MaxPool(geometry) => geometry.forward(cpu, x, y, &mut saved_bytes[i][..y.len()]),
            Op::GlobalAveragePool => {
                pool::global_average(cpu, graph.shape(node.inputs[0]).pixels(), node.shape.c, x, y);
            }
            Op::Add => {
                y.copy_from_slice(x);
                elementwise::add(cpu, Sum { values: y, fresh: false }, value(node.inputs[1].0));
            }
            Op::Dropout { rate } => match mode.dropout {
                Some(key) if *rate > 0.0 => {
                    let words = [Purpose::Dropout as u32, step.node as u32, 0, 0];
                    let [k0, k1, ..] = philox4x32_10(words, [key as u32, (key >> 32) as u32]);
                    dropout::forward(cpu, [k0, k1], *rate, x, y, &mut saved_bytes[i][..y.len()]);
                }
                _ => y.copy_from_slice(x),
            },
            Op::Input | Op::Flatten => (),
        }
        values[out_slot] = out;
    }
}
