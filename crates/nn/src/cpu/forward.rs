//! The forward pass: each stage reads values of earlier nodes and writes its own.

use super::{Workspace, check_len, len_of, spans_mut};
use crate::error::{Error, Result};
use crate::graph::{NORM_EPS, NORM_MOMENTUM, Op};
use crate::kernels::attention::Attention;
use crate::kernels::conv::{Epilogue, Forward};
use crate::kernels::dense::Dense;
use crate::kernels::layer_norm::{self, LayerNorm};
use crate::kernels::linear::Linear;
use crate::kernels::norm::{BatchNorm, Fused, GroupNorm};
use crate::kernels::{NormMode, Sum, dropout, elementwise, embedding, pool};
use crate::mode::{Dropout, Mode};

impl Workspace {
    /// Computes every node for the samples `x` (batch, H, W, C). Buffers move only in [`crate::NormMode::Update`].
    ///
    /// # Errors
    /// If a vector does not fit the graph, if a text has a token that the network does not know, or if batch-norm shall train
    /// on one value per channel.
    ///
    /// # Panics
    /// If the mode is [`Dropout::OfStep`], which needs a fleet's lanes.
    pub fn forward(&mut self, params: &[f32], buffers: &mut [f32], x: &[f32], mode: Mode) -> Result<()> {
        assert_ne!(mode.dropout, Dropout::OfStep, "a workspace has no table of dropout keys");
        check_len("the parameter vector", self.graph.params().len(), params.len())?;
        check_len("the buffer vector", self.graph.buffers().len(), buffers.len())?;
        let sample = self.graph.shape(self.graph.input()).len();
        let batch = x.len() / sample;
        check_len("the input batch", batch * sample, x.len())?;
        if batch == 0 || batch > self.batch_max {
            return Err(Error::Batch { found: batch, max: self.batch_max });
        }
        if batch == 1
            && mode.norm != NormMode::Frozen
            && let Some(node) = self.graph.single_valued_norm()
        {
            let problem = "batch-norm needs more than one value per channel to train, but the batch has one sample";
            return Err(Error::shape(self.graph.name(node), problem));
        }
        self.tokens.read(x)?;
        (self.batch, self.mode) = (batch, mode);
        self.has_grad.fill(false);
        if let Some(slot) = self.schedule.value_slot[0] {
            elementwise::copy(&mut self.cpu, x, &mut self.values[slot][..x.len()]);
        }
        for i in 0..self.schedule.stages.len() {
            self.run_stage(i, params, buffers);
        }
        Ok(())
    }

    fn run_stage(&mut self, i: usize, params: &[f32], buffers: &mut [f32]) {
        let Self { graph, schedule, cpu, values, saved, saved_bytes, scratch, batch, tokens, mode, .. } = self;
        let stage = &schedule.stages[i];
        let node = &graph.nodes[stage.node];
        let len_of = |node: usize| len_of(&graph.nodes[node], *batch, tokens);
        let Some(out_slot) = schedule.value_slot[stage.out] else { return };
        // Taken out of the list while the stage runs, so that the other values can be read. This allocates nothing.
        let mut out = std::mem::take(&mut values[out_slot]);
        let value = |node: usize| schedule.value_slot[node].map_or(&[][..], |slot| &values[slot][..len_of(node)]);
        let x = value(node.inputs[0].0);
        let y = &mut out[..len_of(stage.out)];
        let [weight, bias, third] = node.params.each_ref().map(|span| &params[span.clone()]);
        let fused = Fused { residual: stage.residual.map(value), relu: stage.relu };
        let end = Epilogue { bias: node.has_bias().then_some(bias), relu: stage.relu };
        let c = node.shape.c;
        match node.op {
            Op::Conv(geometry) => geometry.forward(cpu, Forward { x, w: weight, end, y }, scratch.both()),
            Op::StandardizedConv(geometry) => {
                let (w, inverses) = saved[i].split_at_mut(weight.len());
                layer_norm::standardize(cpu, weight, NORM_EPS, w, inverses);
                geometry.forward(cpu, Forward { x, w, end, y }, scratch.both());
            }
            Op::Linear if node.packed => {
                let layer = Dense { inputs: node.linear_inputs(), outputs: c };
                layer.forward(cpu, x, weight, end, y, &mut scratch.shared);
            }
            Op::Linear => {
                let layer = Linear { inputs: node.linear_inputs(), outputs: c };
                layer.forward(cpu, x, weight, end, y, &mut scratch.shared);
            }
            Op::BatchNorm => {
                let layer = BatchNorm { weight, bias, mode: mode.norm, eps: NORM_EPS };
                let [mean, var] = spans_mut(buffers, &node.buffers);
                let saved = &mut saved[i];
                layer.forward(cpu, x, (mean, var), NORM_MOMENTUM, fused, y, saved, &mut scratch.shared);
            }
            Op::GroupNorm { groups } => {
                let layer = GroupNorm { weight, bias, groups, image: node.shape.len(), eps: NORM_EPS };
                layer.forward(cpu, x, fused, y, &mut saved[i], &mut scratch.private);
            }
            Op::Activation(f) => f.forward(cpu, x, y),
            Op::MaxPool(geometry) => geometry.forward(cpu, x, y, &mut saved_bytes[i][..y.len()]),
            Op::GlobalAveragePool => pool::global_average(cpu, graph.shape(node.inputs[0]).pixels(), c, x, y),
            Op::Add => {
                y.copy_from_slice(x);
                elementwise::add(cpu, Sum { values: y, fresh: false }, value(node.inputs[1].0));
            }
            Op::Dropout { rate } => match mode.drop_key(stage.node, rate) {
                Some(key) => dropout::forward(cpu, key, rate, x, y, &mut saved_bytes[i][..y.len()]),
                None => y.copy_from_slice(x),
            },
            Op::Embedding => embedding::forward(cpu, tokens, [weight, bias, third], c, y),
            Op::LayerNorm { eps } => LayerNorm { weight, bias, eps }.forward(cpu, x, y, &mut saved[i]),
            Op::Attention { heads, rate } => {
                let drop = mode.drop_key(stage.node, rate).map(|key| (key, rate));
                let layer = Attention { tokens, heads, width: c, drop };
                layer.forward(cpu, x, y, &mut saved[i], &mut scratch.private);
            }
            Op::FirstToken | Op::MeanOfTokens => {
                embedding::pool(cpu, tokens, node.op == Op::MeanOfTokens, x, c, y);
            }
            Op::Input | Op::Flatten => (),
        }
        values[out_slot] = out;
    }
}
