//! What a node computes, and the facts about it that planning and both back ends need.
//!
//! The facts stand in two tables without a wildcard, [`Op::facts`] and [`Node::memory`]: a new operation does not compile
//! until all of them are stated.

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

/// What is known of an operation without its node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Facts {
    /// Whether the value is packed tokens.
    pub packed: bool,
    /// The normalisation, if it is one.
    pub norm: Option<Norm>,
    pub products: Products,
    /// Whether each channel of the output is the same channel of the first input, in another scale or partly dropped.
    pub keeps_layout: bool,
}

/// A normalisation. Its backward pass overwrites the output's gradient with the input's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Norm {
    Batch,
    Group { groups: usize },
    Layer { eps: f32 },
}

/// The products that an operation computes with its weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Products {
    None,
    Convolution(Conv),
    /// Those of a convolution with weights that are computed from its parameters.
    StandardizedConvolution(Conv),
    /// Those of a linear layer, whose sizes are its node's.
    Linear,
}

impl Op {
    /// The facts, given whether the input's value is packed tokens.
    pub fn facts(&self, packed: bool) -> Facts {
        let [moves, keeps] =
            [false, true].map(|keeps_layout| Facts { packed, norm: None, products: Products::None, keeps_layout });
        match self {
            Self::Input | Self::FirstToken | Self::MeanOfTokens => Facts { packed: false, ..moves },
            Self::Embedding => Facts { packed: true, ..moves },
            Self::Conv(conv) => Facts { products: Products::Convolution(*conv), ..moves },
            Self::StandardizedConv(conv) => Facts { products: Products::StandardizedConvolution(*conv), ..moves },
            Self::Linear => Facts { products: Products::Linear, ..moves },
            Self::BatchNorm => Facts { norm: Some(Norm::Batch), ..keeps },
            Self::GroupNorm { groups } => Facts { norm: Some(Norm::Group { groups: *groups }), ..keeps },
            Self::LayerNorm { eps } => Facts { norm: Some(Norm::Layer { eps: *eps }), ..keeps },
            Self::Activation(_) | Self::Dropout { .. } => keeps,
            // A sum counts as a vector of its own: files that are stored rely on that order.
            Self::Add | Self::MaxPool(_) | Self::GlobalAveragePool | Self::Flatten | Self::Attention { .. } => moves,
        }
    }

    /// The normalisation, if it is one.
    pub fn norm(&self) -> Option<Norm> {
        self.facts(false).norm
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
        match self.op.facts(self.packed).products {
            Products::None => None,
            Products::Convolution(geometry) | Products::StandardizedConvolution(geometry) => Some(geometry),
            Products::Linear => {
                let (ci, co) = (self.linear_inputs(), self.shape.c);
                Some(Conv { h: 1, w: 1, ci, ho: 1, wo: 1, co, kernel: 1, stride: 1, padding: 0 })
            }
        }
    }

    /// Whether it has parameters that do not multiply its input as they are, such as an embedding's tables. Those of
    /// normalisations do not count.
    pub fn has_other_weights(&self) -> bool {
        let facts = self.op.facts(self.packed);
        match facts.products {
            Products::None => self.trains() && facts.norm.is_none(),
            Products::StandardizedConvolution(_) => true,
            Products::Convolution(_) | Products::Linear => false,
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
        self.memory(n).0
    }

    /// What the CPU's kernels need for a batch of `n` samples.
    pub fn scratch(&self, n: usize) -> ScratchLen {
        self.memory(n).1
    }

    fn memory(&self, n: usize) -> (Saved, ScratchLen) {
        let (len, c, weights) = (n * self.shape.len(), self.shape.c, self.params[0].len());
        let floats = |floats: usize| Saved { floats, bytes: 0 };
        let shared = |shared: usize| ScratchLen { shared, private: 0 };
        // Sums of a bias' gradient.
        let with_sums = |len_shared: usize| shared(len_shared.max(norm::scratch_len(len, c)));
        let of_conv = |geometry: Conv| {
            let (shared, private) = geometry.scratch_len(n);
            ScratchLen { private, ..with_sums(shared) }
        };
        match self.op {
            Op::Conv(geometry) => (floats(0), of_conv(geometry)),
            // The standardised weights, then 1/σ of each output channel.
            Op::StandardizedConv(geometry) => (floats(weights + c), of_conv(geometry)),
            Op::Linear if self.packed => {
                let layer = Dense { inputs: self.linear_inputs(), outputs: c };
                (floats(0), with_sums(layer.scratch_len(n * self.shape.w)))
            }
            Op::Linear => (floats(0), with_sums(weights)),
            // Mean and 1/σ of each channel; a GPU adds the scale and shift that follow from them.
            Op::BatchNorm => (floats(4 * c), with_sums(0)),
            Op::GroupNorm { groups } => {
                (floats(2 * n * groups), ScratchLen { shared: 2 * n * c, private: norm::private_len(c) })
            }
            Op::LayerNorm { .. } => (floats(2 * len / c), shared(layer_norm::scratch_len(len, c))),
            Op::Embedding => (floats(0), shared(embedding::scratch_len(len / c, c))),
            // The largest score and the sum of exponentials of each row.
            Op::Attention { heads, .. } => {
                let private = attention::private_len(self.shape.w, c / heads);
                (floats(2 * len / c * heads), ScratchLen { shared: 0, private })
            }
            // Places of the maxima; a mask.
            Op::MaxPool(_) | Op::Dropout { .. } => (Saved { floats: 0, bytes: len }, shared(0)),
            Op::Input
            | Op::Activation(_)
            | Op::GlobalAveragePool
            | Op::Add
            | Op::Flatten
            | Op::FirstToken
            | Op::MeanOfTokens => (floats(0), shared(0)),
        }
    }
}
