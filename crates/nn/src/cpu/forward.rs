//! The forward pass: each step reads values of earlier nodes and writes its own.

use super::{Mode, Workspace, check_len, len_of};
use crate::error::{Error, Result};
use crate::graph::{NORM_EPS, NORM_MOMENTUM, Op};
use crate::kernels::attention::Attention;
use crate::kernels::conv::{Epilogue, Scratch};
use crate::kernels::dense::Dense;
use crate::kernels::layer_norm::LayerNorm;
use crate::kernels::linear::Linear;
use crate::kernels::norm::{BatchNorm, Fused, GroupNorm};
use crate::kernels::{Sum, dropout, elementwise, embedding, pool};

impl Workspace {
    /// Computes every node for the samples `x` (batch, H, W, C). Buffers move only in [`super::NormMode::Update`].
    ///
    /// # Errors
    /// If a vector does not fit the graph, or a text has a token that the network does not know.
    pub fn forward(&mut self, params: &[f32], buffers: &mut [f32], x: &[f32], mode: Mode) -> Result<()> {
        check_len("the parameter vector", self.graph.params().len(), params.len())?;
        check_len("the buffer vector", self.graph.buffers().len(), buffers.len())?;
        let sample = self.graph.shape(self.graph.input()).len();
        let batch = x.len() / sample;
        check_len("the input batch", batch * sample, x.len())?;
        if batch == 0 || batch > self.batch_max {
            return Err(Error::Batch { found: batch, max: self.batch_max });
        }
        self.tokens.read(x)?;
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
        let Self { graph, plan, cpu, values, saved, saved_bytes, scratch, batch, tokens, mode, .. } = self;
        let step = &plan.steps[i];
        let node = &graph.nodes[step.node];
        let len_of = |node: usize| len_of(&graph.nodes[node], *batch, tokens);
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
                let (inputs, outputs) = (graph.linear_inputs(node), node.shape.c);
                let weight = graph.params().slice_from(*weight, inputs * outputs, params);
                let bias = bias.map(|bias| graph.params().slice_from(bias, outputs, params));
                let end = Epilogue { bias, relu: step.relu };
                if node.packed {
                    Dense { inputs, outputs }.forward(cpu, x, weight, end, y, &mut scratch.shared);
                } else {
                    Linear { inputs, outputs }.forward(cpu, x, weight, end, y, &mut scratch.shared);
                }
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
            Op::Dropout { rate } => match mode.drop_key(step.node, *rate) {
                Some(key) => dropout::forward(cpu, key, *rate, x, y, &mut saved_bytes[i][..y.len()]),
                None => y.copy_from_slice(x),
            },
            Op::Embedding { word, position, kind } => {
                let tables = [param(*word), param(*position), param(*kind)];
                embedding::forward(cpu, tokens, tables, node.shape.c, y);
            }
            Op::LayerNorm { weight, bias, eps } => {
                let layer = LayerNorm { weight: param(*weight), bias: param(*bias), eps: *eps };
                layer.forward(cpu, x, y, &mut saved[i]);
            }
            Op::Attention { heads, rate } => {
                let drop = mode.drop_key(step.node, *rate).map(|key| (key, *rate));
                let layer = Attention { tokens, heads: *heads, width: node.shape.c, drop };
                layer.forward(cpu, x, y, &mut saved[i], &mut scratch.private);
            }
            Op::FirstToken | Op::MeanOfTokens => {
                embedding::pool(cpu, tokens, node.op == Op::MeanOfTokens, x, node.shape.c, y);
            }
            Op::Input | Op::Flatten => (),
        }
        values[out_slot] = out;
    }
}
