//! What memory is made for, and how a forward pass runs: the same on the CPU and on a GPU.

use crate::graph::NodeId;
use crate::kernels::NormMode;
use fedproj_rng::{Purpose, philox4x32_10};

/// What a [`crate::Workspace`] or a [`crate::cuda::Fleet`] is made for.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// The largest batch.
    pub batch: usize,
    /// Nodes whose values are read or whose gradients are added to, besides the output.
    pub taps: &'a [NodeId],
    /// Whether there will be backward passes. Without them, layers share memory.
    pub training: bool,
}

impl Options<'_> {
    /// Training on batches of up to `batch` samples.
    pub fn training(batch: usize) -> Self {
        Self { batch, taps: &[], training: true }
    }
}

/// How a forward pass treats batch-norm and dropout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// The statistics of batch-norm.
    pub norm: NormMode,
    /// Which elements are dropped.
    pub dropout: Dropout,
}

/// Which elements a forward pass drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropout {
    /// None.
    Off,
    /// Those drawn with this key, on the CPU.
    Key(u64),
    /// Those drawn with each lane's key of the current step, on a GPU.
    OfStep,
}

impl Mode {
    /// Evaluation: running statistics, no dropout.
    pub const EVAL: Self = Self { norm: NormMode::Frozen, dropout: Dropout::Off };

    /// Training on the CPU. Every step takes another dropout key.
    pub fn train(dropout_key: u64) -> Self {
        Self { norm: NormMode::Update, dropout: Dropout::Key(dropout_key) }
    }

    /// The same pass, but running averages stay as they are.
    #[must_use]
    pub fn without_averaging(self) -> Self {
        let norm = if self.norm == NormMode::Update { NormMode::Batch } else { self.norm };
        Self { norm, ..self }
    }

    /// The key of a node's mask, where the pass drops elements there.
    pub(crate) fn drop_key(self, node: usize, rate: f32) -> Option<[u32; 2]> {
        let key = match self.dropout {
            Dropout::Key(key) if rate > 0.0 => key,
            _ => return None,
        };
        let words = [Purpose::Dropout as u32, node as u32, 0, 0];
        let [k0, k1, ..] = philox4x32_10(words, [key as u32, (key >> 32) as u32]);
        Some([k0, k1])
    }
}
