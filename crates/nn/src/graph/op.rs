//! What a node computes, and the facts about it that planning and both back ends need.
//!
//! Each fact is one `match` without a wildcard: a new operation does not compile until all of them are stated.

use super::{NodeId, Shape};
use crate::kernels::conv::Conv;
use crate::kernels::dense::Dense;
use crate::kernels::pool::MaxPool;
use crate::kernels::{Activation, attention, embedding, layer_norm, norm};
use std::ops::Range;

/// What a node computes. Its parameters and buffers are those of its [`Node`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Op {
    Input,
    Conv(Conv),
    /// A convolution with standardised weights.
    StandardizedConv(Conv),
    /// Its weight and its bias may each be several adjacent tensors.
    Linear,
    BatchNorm,
    GroupNorm {
        groups: usize,
    },
    Activation(Activation),
    MaxPool(MaxPool),
    GlobalAveragePool,
    Add,
    Flatten,
    Dropout {
        rate: f32,
    },
    /// Its parameters are the tables of words, positions and types.
    Embedding,
    LayerNorm {
        eps: f32,
    },
    /// Reads queries, keys and values side by side; drops attention at `rate` while training.
    Attention {
        heads: usize,
        rate: f32,
    },
    FirstToken,
    MeanOfTokens,
}

impl Op {
    /// Whether the value is packed tokens, given whether the input's value is.
    pub fn is_packed(&self, input: bool) -> bool {
        match self {
            Self::Embedding => true,
            Self::Input | Self::FirstToken | Self::MeanOfTokens => false,
            Self::Conv(_)
            | Self::StandardizedConv(_)
            | Self::Linear
            | Self::BatchNorm
            | Self::GroupNorm { .. }
            | Self::Activation(_)
            | Self::MaxPool(_)
            | Self::GlobalAveragePool
            | Self::Add
            | Self::Flatten
            | Self::Dropout { .. }
            | Self::LayerNorm { .. }
            | Self::Attention { .. } => input,
        }
    }

    /// Whether the backward pass overwrites the output's gradient with the input's.
    pub fn works_in_place(&self) -> bool {
        match self {
            Self::BatchNorm | Self::GroupNorm { .. } | Self::LayerNorm { .. } => true,
            Self::Input
            | Self::Conv(_)
            | Self::StandardizedConv(_)
            | Self::Linear
            | Self::Activation(_)
            | Self::MaxPool(_)
            | Self::GlobalAveragePool
            | Self::Add
            | Self::Flatten
            | Self::Dropout { .. }
            | Self::Embedding
            | Self::Attention { .. }
            | Self::FirstToken
            | Self::MeanOfTokens => false,
        }
    }

    /// Whether there is nothing to run: the value is the network's input, or another node's memory.
    pub fn is_idle(&self) -> bool {
        matches!(self, Self::Input | Self::Flatten)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Node {
    pub name: String,
    pub op: Op,
    pub inputs: Vec<NodeId>,
    pub shape: Shape,
    /// Whether a sample is a sequence of up to `shape.w` tokens. The value is then (tokens of the batch, C), without padding.
    pub packed: bool,
    /// Where its parameters stand in θ: a weight and a bias, or three tables. Those it does not have are empty.
    pub params: [Range<usize>; 3],
    /// Where its running mean and variance stand in the second vector; empty if it has none.
    pub buffers: [Range<usize>; 2],
}

/// Memory that a layer keeps from the forward to the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Saved {
    pub floats: usize,
    pub bytes: usize,
}

/// Floats that a layer needs while it runs on the CPU, for all threads together and per thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScratchLen {
    pub shared: usize,
    pub private: usize,
}

impl Node {
    /// Whether it has parameters.
    pub fn trains(&self) -> bool {
        self.params.iter().any(|span| !span.is_empty())
    }

    /// The convolution that its products compute; a linear layer is one of a single pixel.
    pub fn convolution(&self) -> Option<Conv> {
        match self.op {
            Op::Conv(geometry) | Op::StandardizedConv(geometry) => Some(geometry),
            Op::Linear => {
                let (ci, co) = (self.linear_inputs(), self.shape.c);
                Some(Conv { h: 1, w: 1, ci, ho: 1, wo: 1, co, kernel: 1, stride: 1, padding: 0 })
            }
            Op::Input
            | Op::BatchNorm
            | Op::GroupNorm { .. }
            | Op::Activation(_)
            | Op::MaxPool(_)
            | Op::GlobalAveragePool
            | Op::Add
            | Op::Flatten
            | Op::Dropout { .. }
            | Op::Embedding
            | Op::LayerNorm { .. }
            | Op::Attention { .. }
            | Op::FirstToken
            | Op::MeanOfTokens => None,
        }
    }

    /// Whether it adds a bias to its products.
    pub fn has_bias(&self) -> bool {
        self.convolution().is_some() && !self.params[1].is_empty()
    }

    /// Inputs per output of a linear layer.
    pub fn linear_inputs(&self) -> usize {
        self.params[0].len() / self.shape.c
    }

    /// Floating-point operations of one sample's forward pass. Only products count.
    pub fn flops(&self) -> usize {
        let products = self.convolution().map_or(0, |_| 2 * self.shape.pixels() * self.params[0].len());
        if let Op::Attention { .. } = self.op { 4 * self.shape.w * self.shape.len() } else { products }
    }

    /// What it keeps of a batch of `n` samples.
    pub fn saved(&self, n: usize) -> Saved {
        let (len, c) = (n * self.shape.len(), self.shape.c);
        let floats = |floats: usize| Saved { floats, bytes: 0 };
        match &self.op {
            // Mean and 1/σ of each channel; a GPU adds the scale and shift that follow from them.
            Op::BatchNorm => floats(4 * c),
            Op::GroupNorm { groups } => floats(2 * n * groups),
            // The standardised weights, then 1/σ of each output channel.
            Op::StandardizedConv(_) => floats(self.params[0].len() + c),
            Op::LayerNorm { .. } => floats(2 * len / c),
            // The largest score and the sum of exponentials of each row.
            Op::Attention { heads, .. } => floats(2 * len / c * heads),
            // Places of the maxima; a mask.
            Op::MaxPool(_) | Op::Dropout { .. } => Saved { floats: 0, bytes: len },
            Op::Input
            | Op::Conv(_)
            | Op::Linear
            | Op::Activation(_)
            | Op::GlobalAveragePool
            | Op::Add
            | Op::Flatten
            | Op::Embedding
            | Op::FirstToken
            | Op::MeanOfTokens => floats(0),
        }
    }

    /// What the CPU's kernels need for a batch of `n` samples.
    pub fn scratch(&self, n: usize) -> ScratchLen {
        let (len, c) = (n * self.shape.len(), self.shape.c);
        let shared = |shared: usize| ScratchLen { shared, private: 0 };
        match &self.op {
            Op::Conv(geometry) | Op::StandardizedConv(geometry) => {
                let (shared, private) = geometry.scratch_len(n);
                ScratchLen { shared: shared.max(norm::scratch_len(len, c)), private }
            }
            Op::Linear if self.packed => {
                let layer = Dense { inputs: self.linear_inputs(), outputs: c };
                shared(layer.scratch_len(n * self.shape.w).max(norm::scratch_len(len, c)))
            }
            Op::Linear => shared(self.params[0].len().max(norm::scratch_len(len, c))),
            Op::BatchNorm => shared(norm::scratch_len(len, c)),
            Op::GroupNorm { .. } => ScratchLen { shared: 2 * n * c, private: norm::private_len(c) },
            Op::LayerNorm { .. } => shared(layer_norm::scratch_len(len, c)),
            Op::Embedding => shared(embedding::scratch_len(len / c, c)),
            Op::Attention { heads, .. } => {
                ScratchLen { shared: 0, private: attention::private_len(self.shape.w, c / heads) }
            }
            Op::Input
            | Op::Activation(_)
            | Op::MaxPool(_)
            | Op::GlobalAveragePool
            | Op::Add
            | Op::Flatten
            | Op::Dropout { .. }
            | Op::FirstToken
            | Op::MeanOfTokens => shared(0),
        }
    }
}
