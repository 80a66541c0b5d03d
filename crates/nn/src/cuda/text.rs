//! The layers of text encoders: the tokens of the lanes' batches, and the launches of `text.cu` and `attention.cu`.
//!
//! Only the device knows how many tokens a batch has. Launches cover the maximum, and blocks without work end at once. So a
//! recorded step serves any texts, and no result depends on the texts of other lanes.

use super::backward::Sum;
use super::fleet::Fleet;
use super::gpu::{DeviceArray, Gpu, Parameter, parameters};
use super::memory::{Extent, Rows};
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, Op};

/// Max bytes of shared memory for attention: every GPU since 2020 has them.
pub(super) const SHARED_MAX: u32 = 96 * 1024;
/// Queries and keys per tile of attention, and threads per block, as in `attention.cu`.
const TILE: usize = 32;
const ATTENDING: u32 = 256;
/// Rows per block in kernels with one warp per row.
const ROWS: usize = 8;
/// Columns and threads per block in kernels that sum rows, as in `text.cu`.
const SUM_COLUMNS: usize = 8;
const SUM_THREADS: u32 = 512;

/// Floats per copy for heads of `d` numbers, and bytes of shared memory for tiles of `copies` matrices of such rows and of
/// `scores` matrices of attention.
fn shared_bytes(d: usize, copies: usize, scores: usize) -> (usize, u32) {
    let vec = if d.is_multiple_of(4) { 4 } else { 1 };
    let floats = copies * TILE * vec * ((d / vec) | 1) + scores * TILE * (TILE + 4);
    (vec, u32::try_from(4 * floats).unwrap_or(u32::MAX))
}

/// Tiles of the forward and of the backward pass: queries, keys and values, and the gradient of the result.
const FORWARD: (usize, usize) = (3, 1);
const BACKWARD: (usize, usize) = (4, 2);

/// Rejects attention that does not fit a block.
pub(super) fn check_attention(node: &Node) -> Result<()> {
    let Op::Attention { heads, .. } = node.op else { return Ok(()) };
    let d = node.shape.c / heads;
    let (_, bytes) = shared_bytes(d, BACKWARD.0, BACKWARD.1);
    if bytes <= SHARED_MAX {
        return Ok(());
    }
    let problem = format!(
        "heads of {d} numbers need {bytes} bytes of a processor's memory, and {SHARED_MAX} are there; choose an encoder with \
         more heads, or the device `cpu`"
    );
    Err(Error::gpu(format!("attention of `{}`", node.name), problem))
}

/// The tokens of every lane's batch, on the device.
#[derive(Debug)]
pub(super) struct Texts {
    /// Slots of a sample, and rows of the tables of words and types.
    slots: usize,
    words: usize,
    types: usize,
    tokens: DeviceArray<i32>,
    starts: DeviceArray<i32>,
    counts: DeviceArray<i32>,
}

/// The tokens, as in `text.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DeviceTexts {
    tokens: u64,
    rows: i32,
    batch: i32,
    starts: u64,
    counts: u64,
}
parameters!(DeviceTexts = "Texts");

impl Texts {
    /// Memory for batches of up to `batch` texts, where the network reads texts.
    pub fn new(gpu: &Gpu, graph: &Graph, lanes: usize, batch: usize) -> Result<Option<Self>> {
        let Some((words, types)) = graph.token_tables() else { return Ok(None) };
        let slots = graph.shape(graph.input()).w;
        Ok(Some(Self {
            slots,
            words,
            types,
            tokens: gpu.zeros(3 * lanes * batch * slots)?,
            starts: gpu.zeros(lanes * (batch + 1))?,
            counts: gpu.zeros(lanes)?,
        }))
    }

    /// The address of the lanes' token counts.
    pub fn counts(&self) -> u64 {
        self.counts.at()
    }

    /// The number of a lane's tokens.
    pub fn n_tokens(&self, gpu: &Gpu, lane: usize) -> Result<usize> {
        let mut count = [0];
        gpu.read(&self.counts, lane, &mut count)?;
        Ok(count[0].max(0) as usize)
    }

    fn of(&self, batch: usize) -> DeviceTexts {
        DeviceTexts {
            tokens: self.tokens.at(),
            rows: (batch * self.slots) as i32,
            batch: batch as i32,
            starts: self.starts.at(),
            counts: self.counts.at(),
        }
    }
}

impl Fleet {
    /// Finds the tokens of the batch gathered last; does nothing where the network reads no text.
    pub(super) fn find_tokens(&self) -> Result<()> {
        let Some(memory) = &self.texts else { return Ok(()) };
        let (texts, x, lanes) = (memory.of(self.batch), self.value(0), self.lanes.at());
        let slots = memory.slots as i32;
        self.launch("count_tokens", [self.batch, 1], [32, 1], 0, &[&lanes, &texts, &slots, &x])?;
        self.launch("place_texts", [1, 1], [256, 1], 0, &[&lanes, &texts])?;
        let p: [&dyn Parameter; 6] = [&lanes, &texts, &slots, &(memory.words as i32), &(memory.types as i32), &x];
        self.launch("place_tokens", [self.batch, 1], [128, 1], 0, &p)
    }

    /// The tokens of the batch, for layers that exist only in networks that read texts.
    fn batch_texts(&self) -> Result<DeviceTexts> {
        let missing = || Error::gpu("a layer of texts", "the network reads no texts");
        self.texts.as_ref().map(|texts| texts.of(self.batch)).ok_or_else(missing)
    }

    /// A kernel with one warp per row.
    fn each_row(&self, kernel: &str, n_rows: usize, parameters: &[&dyn Parameter]) -> Result<()> {
        self.launch(kernel, [self.blocks(n_rows.div_ceil(ROWS)), 1], [32 * ROWS as u32, 1], 0, parameters)
    }

    /// The node of a stage, and where its input and output are.
    fn ends_of(&self, i: usize) -> (&Node, Rows, Rows) {
        let stage = self.schedule.stages[i];
        let node = &self.graph.nodes[stage.node];
        (node, self.value(node.inputs[0].0), self.value(stage.out))
    }

    pub(super) fn embed_forward(&self, i: usize, params: Rows) -> Result<()> {
        let (node, _, y) = self.ends_of(i);
        let stage = self.schedule.stages[i];
        let [words, positions, types] = self.params_of(stage.node, params);
        let (lanes, texts, c) = (self.lanes.at(), self.batch_texts()?, node.shape.c as i32);
        let p: [&dyn Parameter; 7] = [&lanes, &texts, &c, &words, &positions, &types, &y];
        self.each_row("embed", self.extent(stage.out).n_rows(), &p)
    }

    pub(super) fn layer_norm_forward(&self, i: usize, eps: f32, params: Rows) -> Result<()> {
        let (_, x, y) = self.ends_of(i);
        let stage = self.schedule.stages[i];
        let [weight, bias, _] = self.params_of(stage.node, params);
        let (lanes, extent, saved) = (self.lanes.at(), self.extent(stage.out), self.saved_rows(i));
        let p: [&dyn Parameter; 8] = [&lanes, &extent, &x, &weight, &bias, &y, &saved, &eps];
        self.each_row("layer_norm", extent.n_rows(), &p)
    }

    pub(super) fn attention_forward(&self, i: usize, heads: usize, rate: f32) -> Result<()> {
        let (node, x, y) = self.ends_of(i);
        let (lanes, texts, c) = (self.lanes.at(), self.batch_texts()?, node.shape.c as i32);
        let (drop, saved) = (self.drop_of(self.schedule.stages[i].node, rate)?, self.saved_rows(i));
        let p: [&dyn Parameter; 8] = [&lanes, &texts, &(heads as i32), &c, &x, &y, &saved, &drop];
        // One block per tile of queries, as long as more blocks keep more processors busy. No byte depends on it.
        let (units, wanted) = (self.batch * heads * self.n_active(), 8 * self.gpu.processors());
        let tiles = node.shape.w.div_ceil(TILE).min(wanted.div_ceil(units.max(1)));
        self.attend("attention", FORWARD, node, tiles, &p)
    }

    pub(super) fn pool_tokens(&self, i: usize) -> Result<()> {
        let (node, x, y) = self.ends_of(i);
        let (lanes, texts, c) = (self.lanes.at(), self.batch_texts()?, node.shape.c as i32);
        let mean = i32::from(node.op == Op::MeanOfTokens);
        let p: [&dyn Parameter; 6] = [&lanes, &texts, &mean, &c, &x, &y];
        self.launch("pool_tokens", [self.batch, 1], [128, 1], 0, &p)
    }

    /// `tiles` blocks for every head of every text.
    fn attend(
        &self,
        kernel: &str,
        memory: (usize, usize),
        node: &Node,
        tiles: usize,
        p: &[&dyn Parameter],
    ) -> Result<()> {
        let Op::Attention { heads, .. } = node.op else { return Ok(()) };
        let (vec, shared) = shared_bytes(node.shape.c / heads, memory.0, memory.1);
        self.launch(&format!("{kernel}_{vec}"), [self.batch * heads, tiles], [ATTENDING, 1], shared, p)
    }

    pub(super) fn attention_backward(&self, i: usize, dy: Rows, dx: Sum) -> Result<()> {
        let stage = self.schedule.stages[i];
        let node = &self.graph.nodes[stage.node];
        let Op::Attention { heads, rate } = node.op else { return Ok(()) };
        let (x, y, lanes) = (self.value(node.inputs[0].0), self.value(stage.out), self.lanes.at());
        let (texts, drop, saved) = (self.batch_texts()?, self.drop_of(stage.node, rate)?, self.saved_rows(i));
        let (heads_i, c, fresh) = (heads as i32, node.shape.c as i32, i32::from(dx.fresh));
        let p: [&dyn Parameter; 11] = [&lanes, &texts, &heads_i, &c, &x, &y, &saved, &drop, &dy, &dx.rows, &fresh];
        self.attend("attention_backward", BACKWARD, node, 1, &p)
    }

    pub(super) fn pool_tokens_backward(&self, i: usize, dy: Rows, dx: Sum) -> Result<()> {
        let node = &self.graph.nodes[self.schedule.stages[i].node];
        let (mean, c) = (i32::from(node.op == Op::MeanOfTokens), node.shape.c as i32);
        let p: [&dyn Parameter; 7] =
            [&self.lanes.at(), &self.batch_texts()?, &mean, &c, &dy, &dx.rows, &i32::from(dx.fresh)];
        self.each_row("pool_tokens_backward", self.extent(node.inputs[0].0).n_rows(), &p)
    }

    /// The gradients of the three tables; the input's own, where it is observed, is 0.
    pub(super) fn embedding_backward(&self, i: usize, dy: Rows, dx: Option<Sum>, grad: Rows) -> Result<()> {
        let stage = self.schedule.stages[i];
        let node = &self.graph.nodes[stage.node];
        let (texts, lanes) = (self.batch_texts()?, self.lanes.at());
        let (rows, c) = (self.extent(stage.out).n_rows(), node.shape.c);
        let c_i = c as i32;
        let [words, positions, types] = self.params_of(stage.node, grad);
        let [_, n_positions, n_types] = node.params.each_ref().map(|table| (table.len() / c) as i32);
        self.clear(words, node.params[0].len())?;
        let p: [&dyn Parameter; 5] = [&lanes, &texts, &c_i, &dy, &words];
        self.launch("embed_backward_words", [self.blocks(rows), 1], [128, 1], 0, &p)?;
        let slots = self.graph.shape(self.graph.input()).w;
        let p: [&dyn Parameter; 7] = [&lanes, &texts, &(slots as i32), &n_positions, &c_i, &dy, &positions];
        self.launch("embed_backward_positions", [slots, c.div_ceil(32)], [32, 8], 0, &p)?;
        self.sum_rows("embed_backward_types", c, &[&lanes, &texts, &n_types, &c_i, &dy, &types])?;
        match dx {
            Some(dx) => self.clear(dx.rows, self.len_of(node.inputs[0].0)),
            None => Ok(()),
        }
    }

    /// A kernel that sums rows of `c` columns.
    fn sum_rows(&self, kernel: &str, c: usize, parameters: &[&dyn Parameter]) -> Result<()> {
        self.launch(kernel, [c.div_ceil(SUM_COLUMNS), 1], [SUM_THREADS, 1], 0, parameters)
    }

    /// The gradient of a bias that every token has.
    pub(super) fn bias_backward(&self, extent: Extent, c: usize, dy: Rows, grad: Rows) -> Result<()> {
        self.sum_rows("sum_columns", c, &[&self.lanes.at(), &extent, &dy, &grad])
    }

    pub(super) fn layer_norm_backward(&self, i: usize, params: Rows, dy: Rows, dx: Sum, grad: Rows) -> Result<()> {
        let stage = self.schedule.stages[i];
        let node = &self.graph.nodes[stage.node];
        let (x, saved, lanes) = (self.value(node.inputs[0].0), self.saved_rows(i), self.lanes.at());
        let (extent, c): (Extent, usize) = (self.extent(stage.out), node.shape.c);
        // Before dx, which may take dy's place.
        let [dweight, dbias, _] = self.params_of(stage.node, grad);
        self.sum_rows("layer_norm_sums", c, &[&lanes, &extent, &x, &saved, &dy, &dweight, &dbias])?;
        let [weight, ..] = self.params_of(stage.node, params);
        let p: [&dyn Parameter; 8] = [&lanes, &extent, &x, &weight, &saved, &dy, &dx.rows, &i32::from(dx.fresh)];
        self.each_row("layer_norm_backward", extent.n_rows(), &p)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{self, BertConfig, Variant};

    fn refused(hidden: usize, heads: usize) -> Option<String> {
        let graph = models::bert(&BertConfig::sized(2, hidden, heads, 16), 512, 2, Variant::default()).unwrap();
        graph.nodes.iter().find_map(|node| check_attention(node).err()).map(|e| e.to_string())
    }

    #[test]
    fn published_encoders_fit_a_block_and_others_are_refused_by_name() {
        for (hidden, heads) in [(128, 2), (384, 12), (768, 12), (1024, 16)] {
            assert_eq!(refused(hidden, heads), None);
        }
        let error = refused(256, 1).unwrap();
        assert!(error.contains("`encoder.layer.0.attention.self`") && error.contains("256 numbers"), "{error}");
    }
}
