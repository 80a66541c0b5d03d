//! The forward pass of a fleet: the stages of the schedule, launched one after another for all lanes.

use super::backward::Sum;
use super::batches::Table;
use super::conv::Div;
use super::fleet::{CHUNKS_MAX, Fleet};
use super::gpu::{self, Parameter, parameters};
use super::memory::{Extent, Rows, Vectors};
use super::products::{After, Operands};
use crate::error::{Error, Result};
use crate::graph::{NORM_EPS, NORM_MOMENTUM, NodeId, Op};
use crate::kernels::pool::MaxPool;
use crate::kernels::{Activation, NormMode};
use crate::mode::{Dropout, Mode};
use crate::schedule::Stage;
use fedproj_rng::Purpose;
use std::ops::Range;

/// The geometry of a max-pool in `pool.cu`, for `vec` floats at a time.
#[repr(C)]
pub(super) struct Pool {
    h: i32,
    w: i32,
    c: i32,
    ho: i32,
    wo: i32,
    kernel: i32,
    stride: i32,
    pad: i32,
    by_packs: Div,
    by_w: Div,
    by_h: Div,
    by_wo: Div,
    by_ho: Div,
    by_stride: Div,
}
parameters!(Pool);

impl Pool {
    pub fn new(p: &MaxPool, vec: usize) -> Self {
        let [h, w, c, ho, wo, kernel, stride, pad] =
            [p.h, p.w, p.c, p.ho, p.wo, p.kernel, p.stride, p.padding].map(|v| v as i32);
        let [by_packs, by_w, by_h, by_wo, by_ho, by_stride] = [p.c / vec, p.w, p.h, p.wo, p.ho, p.stride].map(Div::by);
        Self { h, w, c, ho, wo, kernel, stride, pad, by_packs, by_w, by_h, by_wo, by_ho, by_stride }
    }
}

/// What is dropped at a node, see `layers.cu`.
#[repr(C)]
pub(super) struct Drop {
    keys: Table,
    cursor: u64,
    purpose: u32,
    node: u32,
    rate: f32,
}
parameters!(Drop);

pub(super) fn norm_mode(mode: NormMode) -> i32 {
    match mode {
        NormMode::Update => 0,
        NormMode::Batch => 1,
        NormMode::Frozen => 2,
    }
}

pub(super) fn activation(f: Activation) -> i32 {
    match f {
        Activation::Relu => 0,
        Activation::Gelu => 1,
        Activation::Tanh => 2,
    }
}

/// Four floats at a time, where channels come in fours.
pub(super) fn vec_of(channels: usize) -> (usize, &'static str) {
    if channels.is_multiple_of(4) { (4, "4") } else { (1, "1") }
}

/// Threads that share the chunks of a channel's sum, as in `norm.cu`.
pub(super) const SHARES: u32 = 32;

/// Rows per chunk of a sum, and the number of chunks. Both depend on the shape alone.
pub(super) fn chunks(rows: usize) -> (usize, usize) {
    let n = (rows / 16).clamp(1, CHUNKS_MAX);
    (rows.div_ceil(n), rows.div_ceil(rows.div_ceil(n)))
}

impl Fleet {
    /// Computes every node for the gathered batch.
    ///
    /// # Errors
    /// If the mode names a dropout key, which would be that of all lanes, or the driver fails.
    pub fn forward(&mut self, params: Rows, buffers: Rows, mode: Mode) -> Result<()> {
        self.forward_from(self.graph.input(), params, buffers, mode)
    }

    /// Computes the nodes behind `from`, whose value is there, see [`Fleet::gather_generated`]. The backward pass then ends
    /// there, too. Nothing behind may read what is before: see [`crate::Graph::tail`].
    ///
    /// # Errors
    /// As [`Fleet::forward`].
    pub fn forward_from(&mut self, from: NodeId, params: Rows, buffers: Rows, mode: Mode) -> Result<()> {
        if let Dropout::Key(_) = mode.dropout {
            return Err(Error::gpu("dropout", "a fleet draws masks with the keys of its lanes' steps"));
        }
        self.mode = mode;
        self.has_grad.fill(false);
        self.n_moments.fill(0);
        let stages = &self.schedule.stages;
        self.first_stage = stages.iter().position(|stage| stage.node > from.0).unwrap_or(stages.len());
        (self.first_stage..self.schedule.stages.len()).try_for_each(|i| self.run_stage(i, params, buffers))
    }

    pub(super) fn len_of(&self, node: usize) -> usize {
        self.batch * self.graph.nodes[node].shape.len()
    }

    /// The part of a node's value or gradient that is in use.
    pub(super) fn extent(&self, node: usize) -> Extent {
        Extent::rows(self.len_of(node), self.graph.nodes[node].shape.c, self.tokens_of(node))
    }

    /// The address of the lanes' token counts, if the node's rows are tokens.
    pub(super) fn tokens_of(&self, node: usize) -> u64 {
        let texts = self.texts.as_ref().filter(|_| self.graph.nodes[node].packed);
        texts.map_or(0, super::text::Texts::counts)
    }

    /// What this pass drops at a node; nothing if the rate is 0.
    pub(super) fn drop_of(&self, node: usize, rate: f32) -> Result<Drop> {
        let is_on = self.mode.dropout == Dropout::OfStep && rate > 0.0;
        let keys = if is_on { self.table(super::Batches::DropoutKeys)? } else { Table { at: 0, stride: 0, width: 0 } };
        Ok(Drop {
            keys,
            cursor: self.cursor(super::Batches::Samples),
            purpose: Purpose::Dropout as u32,
            node: node as u32,
            rate: if is_on { rate } else { 0.0 },
        })
    }

    /// A node's parameters in every lane's vector `params`, or their gradients in such a vector.
    pub(super) fn params_of(&self, node: usize, params: Rows) -> [Rows; 3] {
        let place = |span: &Range<usize>| if span.is_empty() { Rows::NONE } else { params.from(span.start) };
        self.graph.nodes[node].params.each_ref().map(place)
    }

    /// What stage `i` keeps for its backward pass.
    pub(super) fn saved_rows(&self, i: usize) -> Rows {
        self.kept[i].floats.as_ref().map_or(Rows::NONE, Vectors::rows)
    }

    fn run_stage(&mut self, i: usize, params: Rows, buffers: Rows) -> Result<()> {
        let stage = self.schedule.stages[i];
        let node = &self.graph.nodes[stage.node];
        let input = node.inputs[0].0;
        let (x, y) = (self.value(input), self.value(stage.out));
        let (len, c) = (self.len_of(stage.out), node.shape.c as i32);
        let (extent, lanes) = (self.extent(stage.out), self.lanes.at());
        let [w, b, _] = self.params_of(stage.node, params);
        let residual = stage.residual.map_or(Rows::NONE, |node| self.value(node));
        let relu = i32::from(stage.relu);
        match node.op {
            Op::Conv(_) | Op::StandardizedConv(_) | Op::Linear => {
                let w = if let Op::StandardizedConv(_) = node.op { self.standardize(i, w)? } else { w };
                let norm = match stage.norm {
                    Some(norm) => self.norm_statistics(i, norm, Rows::NONE, params, buffers)?,
                    None => Rows::NONE,
                };
                let sums = if b == Rows::NONE && !stage.relu { self.moments_after(i, buffers) } else { None };
                let (moments, mean) = sums.unwrap_or((Rows::NONE, Rows::NONE));
                let after = After { bias: b, norm, residual, moments, mean, valid: self.valid.at() };
                let operands = Operands { pass: gpu::Pass::Forward, x, w, y, after, fresh: true, relu: stage.relu };
                self.product(stage.node, &operands, stage.pool.and_then(|_| self.pool_of(i)))
            }
            Op::BatchNorm => {
                let saved = self.norm_statistics(i, stage.node, x, params, buffers)?;
                if stage.pool.is_some() {
                    return self.pool_forward(i, "normalise_pool", x, saved, y);
                }
                let (vec, suffix) = vec_of(node.shape.c);
                let p: [&dyn Parameter; 8] = [&lanes, &(len as i32), &c, &x, &saved, &residual, &y, &relu];
                self.each(&format!("normalise_{suffix}"), len / vec, &p)
            }
            Op::GroupNorm { groups } => {
                let (pixels, groups_i, saved) = (node.shape.pixels() as i32, groups as i32, self.saved_rows(i));
                let p: [&dyn Parameter; 12] =
                    [&lanes, &pixels, &c, &groups_i, &x, &w, &b, &residual, &y, &saved, &relu, &NORM_EPS];
                self.launch("group_norm", [groups, self.batch], [256, 1], 0, &p)
            }
            Op::Activation(f) => self.each_of("activation", extent.packs(), &[&lanes, &activation(f), &extent, &x, &y]),
            Op::MaxPool(_) => self.pool_forward(i, "pool", x, Rows::NONE, y),
            Op::GlobalAveragePool => {
                let pixels = self.graph.nodes[input].shape.pixels() as i32;
                self.each("average_pool", len, &[&lanes, &(len as i32), &pixels, &c, &x, &y])
            }
            Op::Add => self.each_of("add", extent, &[&lanes, &extent, &x, &self.value(node.inputs[1].0), &y]),
            Op::Dropout { rate } if self.mode.dropout == Dropout::OfStep && rate > 0.0 => {
                let Some((kept, stride)) = &self.kept[i].bytes else { return Ok(()) };
                let drop = self.drop_of(stage.node, rate)?;
                let p: [&dyn Parameter; 8] = [&lanes, &drop, &extent, &x, &residual, &y, &kept.at(), &(*stride as i64)];
                self.each_of("dropout", extent.calls(), &p)
            }
            Op::Dropout { .. } if stage.residual.is_some() => {
                self.each_of("add", extent, &[&lanes, &extent, &x, &residual, &y])
            }
            Op::Dropout { .. } => self.accumulate(extent, x, Sum { rows: y, fresh: true }),
            Op::Input | Op::Flatten => Ok(()),
            Op::Embedding => self.embed_forward(i, params),
            Op::LayerNorm { eps } => self.layer_norm_forward(i, eps, params),
            Op::Attention { heads, rate } => self.attention_forward(i, heads, rate),
            Op::FirstToken | Op::MeanOfTokens => self.pool_tokens(i),
        }
    }

    /// The standardised weights of a convolution, kept with stage `i`.
    fn standardize(&self, i: usize, w: Rows) -> Result<Rows> {
        let (co, len) = self.weight_rows(i);
        let saved = self.saved_rows(i);
        let p: [&dyn Parameter; 5] = [&self.lanes.at(), &(len as i32), &w, &saved, &NORM_EPS];
        self.launch("standardize", [co, 1], [256, 1], 0, &p)?;
        Ok(saved)
    }

    /// Output channels of a convolution, and weights per channel.
    pub(super) fn weight_rows(&self, i: usize) -> (usize, usize) {
        let node = &self.graph.nodes[self.schedule.stages[i].node];
        (node.shape.c, node.params[0].len() / node.shape.c)
    }

    /// Where the convolution of stage `i` leaves the sums of the batch-norm that reads it, if it can, and the means that are
    /// subtracted first. These are the running means, which are near the batch's.
    fn moments_after(&mut self, i: usize, buffers: Rows) -> Option<(Rows, Rows)> {
        let stage = self.schedule.stages[i];
        let reads = |later: &Stage| {
            let node = &self.graph.nodes[later.node];
            node.op == Op::BatchNorm && node.inputs[0].0 == stage.out
        };
        let norm = self.schedule.stages.iter().position(reads).filter(|_| self.mode.norm != NormMode::Frozen)?;
        let kept = self.kept[norm].moments.as_ref()?.rows();
        let n_chunks = self.moment_chunks(stage.node)?;
        self.n_moments[norm] = n_chunks;
        Some((kept, buffers.from(self.graph.nodes[self.schedule.stages[norm].node].buffers[0].start)))
    }

    /// Statistics and coefficients of a batch-norm for this pass, kept with stage `i`.
    fn norm_statistics(&self, i: usize, norm: usize, x: Rows, params: Rows, buffers: Rows) -> Result<Rows> {
        let node = &self.graph.nodes[norm];
        let [weight, bias, _] = self.params_of(norm, params);
        let [mean, var] = node.buffers.each_ref().map(|span| buffers.from(span.start));
        let saved = self.saved_rows(i);
        let (c, lanes) = (node.shape.c, self.lanes.at());
        let (chunk_rows, n_chunks) = chunks(self.batch * node.shape.pixels());
        let (c_i, pixels) = (c as i32, node.shape.pixels() as i32);
        // The convolution before it may have summed already.
        let summed = self.kept[i].moments.as_ref().filter(|_| self.n_moments[i] > 0);
        let (partial, n_chunks, about) =
            summed.map_or((self.partial.rows(), n_chunks, x), |sums| (sums.rows(), self.n_moments[i], mean));
        if self.mode.norm != NormMode::Frozen && summed.is_none() {
            if x == Rows::NONE {
                return Err(Error::gpu(&node.name, "without training, batch-norms must be frozen"));
            }
            let (_, suffix) = vec_of(c);
            let none = Rows::NONE;
            let p: [&dyn Parameter; 11] = [
                &lanes,
                &self.valid.at(),
                &pixels,
                &c_i,
                &(chunk_rows as i32),
                &x,
                &none,
                &none,
                &none,
                &0i32,
                &partial,
            ];
            self.launch(&format!("reduce_MOMENTS_{suffix}"), [n_chunks, 1], [256, 1], 0, &p)?;
        }
        let p: [&dyn Parameter; 15] = [
            &lanes,
            &self.valid.at(),
            &pixels,
            &c_i,
            &(n_chunks as i32),
            &norm_mode(self.mode.norm),
            &about,
            &weight,
            &bias,
            &mean,
            &var,
            &saved,
            &partial,
            &NORM_EPS,
            &NORM_MOMENTUM,
        ];
        self.launch("batch_norm_statistics", [c.div_ceil(32), 1], [32, SHARES], 0, &p)?;
        Ok(saved)
    }

    /// The pooling window of a stage, if it has one.
    pub(super) fn pool_of(&self, i: usize) -> Option<&MaxPool> {
        let stage = self.schedule.stages[i];
        match &self.graph.nodes[stage.pool.unwrap_or(stage.node)].op {
            Op::MaxPool(pool) => Some(pool),
            _ => None,
        }
    }

    fn pool_forward(&self, i: usize, kernel: &str, x: Rows, saved: Rows, y: Rows) -> Result<()> {
        let (Some(pool), Some((places, stride))) = (self.pool_of(i), &self.kept[i].bytes) else { return Ok(()) };
        let (vec, suffix) = vec_of(pool.c);
        let packs = self.batch * pool.ho * pool.wo * pool.c / vec;
        let winners = self.kept[i].winners.as_ref().map_or(Rows::NONE, Vectors::rows);
        let p: [&dyn Parameter; 9] = [
            &self.lanes.at(),
            &Pool::new(pool, vec),
            &(packs as i32),
            &x,
            &saved,
            &y,
            &places.at(),
            &(*stride as i64),
            &winners,
        ];
        self.each(&format!("{kernel}_{suffix}"), packs, &p)
    }
}
