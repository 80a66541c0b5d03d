//! A fleet: values and gradients of every lane, which lanes take part, what they measured, and recorded steps.

use super::batches::{Batches, Slot};
use super::beside::Beside;
use super::gpu::{Captured, DeviceArray, Gpu, Parameter, Precision, failed_lane};
use super::memory::{Extent, Rows, Vectors, padded, vectors};
use super::text::Texts;
use super::{conv, hopper, text};
use crate::cpu::check_len;
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId, Op, Saved};
use crate::kernels::pool::MaxPool;
use crate::mode::{Mode, Options};
use crate::schedule::{Schedule, Stage};
use std::collections::HashMap;
use std::sync::Arc;

/// What a lane has measured since [`Fleet::reset_lanes`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Sum of the losses of main batches.
    pub loss_total: f64,
    /// Loss of the first replayed batch.
    pub replay_loss_first: Option<f64>,
    /// Loss of the last replayed batch.
    pub replay_loss: f64,
    /// The loss last recorded as [`super::LossOf::Reference`].
    pub reference_loss: f64,
    /// Sum of cosines between gradients.
    pub cosine_total: f64,
    /// Comparisons of gradients.
    pub n_compared: u32,
    /// Projections.
    pub n_projected: u32,
    /// The first step whose loss was not finite, and that loss.
    pub not_finite: Option<(u32, f64)>,
}

/// Layout of a lane's statistics, as in `loss.cu`.
const STATS: usize = 16;
const BAD_STEP: usize = 7;

/// Networks of one graph that a GPU trains side by side.
#[derive(Debug)]
pub struct Fleet {
    pub(super) gpu: Arc<Gpu>,
    pub(super) graph: Graph,
    pub(super) schedule: Schedule,
    pub(super) n_lanes: usize,
    pub(super) batch_max: usize,
    pub(super) batch: usize,
    pub(super) mode: Mode,
    /// Where the last pass began.
    pub(super) first_stage: usize,
    /// Floats from pixel to pixel of the input.
    pub(super) input_pitch: usize,
    values: Vec<Vectors>,
    grads: Vec<Vectors>,
    pub(super) has_grad: Vec<bool>,
    pub(super) kept: Vec<Kept>,
    /// The chunks that the convolution before each stage's batch-norm has summed in this pass.
    pub(super) n_moments: Vec<usize>,
    pub(super) partial: Vectors,
    pub(super) coefficients: Vectors,
    pub(super) beside: Beside,
    pub(super) parts: DeviceArray<f32>,
    /// How far sums of weights' gradients are split, see [`Fleet::alone`].
    pub(super) further: usize,
    /// Weights with input and output exchanged, of one layer after another.
    pub(super) turned: Option<Vectors>,
    /// The tokens of the lanes' batches, where the network reads texts.
    pub(super) texts: Option<Texts>,
    /// The lanes of the next launches.
    pub(super) lanes: DeviceArray<i32>,
    active: Vec<u32>,
    pub(super) valid: DeviceArray<i32>,
    pub(super) labels: DeviceArray<i32>,
    pub(super) has_target: DeviceArray<i32>,
    pub(super) losses: DeviceArray<f64>,
    pub(super) stats: DeviceArray<f64>,
    pub(super) factors: DeviceArray<f32>,
    pub(super) scalars: DeviceArray<f32>,
    pub(super) n_updates: DeviceArray<i32>,
    pub(super) sums: DeviceArray<f64>,
    pub(super) cursors: [DeviceArray<i32>; 2],
    pub(super) tables: HashMap<Batches, (DeviceArray<u32>, usize, usize)>,
    pub(super) slots: HashMap<Slot, Vectors>,
    pub(super) recorded: HashMap<(u64, usize), Option<Captured>>,
}

/// What a step keeps per lane from the forward to the backward pass.
#[derive(Debug)]
pub(super) struct Kept {
    pub floats: Option<Vectors>,
    /// Places of maxima or dropout masks, and the stride between lanes in bytes.
    pub bytes: Option<(DeviceArray<u8>, usize)>,
    /// The inputs of a batch-norm that won in the max-pool it fuses.
    pub winners: Option<Vectors>,
    /// Sums of a batch-norm, by the convolution before it.
    pub moments: Option<Vectors>,
}

impl Kept {
    fn new(gpu: &Gpu, graph: &Graph, stage: &Stage, lanes: usize, options: &Options<'_>) -> Result<Self> {
        let n = options.batch.max(1);
        let Saved { floats, bytes } = stage.saved(graph, n);
        let rows = |len: usize| if len == 0 { Ok(None) } else { vectors(gpu, lanes, len).map(Some) };
        let won = if stage.pool.is_some() && options.training { n * graph.nodes[stage.out].shape.len() } else { 0 };
        let stride = padded(bytes);
        let bytes = if bytes == 0 { None } else { Some((gpu.zeros(lanes * stride)?, stride)) };
        let node = &graph.nodes[stage.node];
        let is_summed = node.op == Op::BatchNorm && options.training && gpu.has_hopper();
        let positions = n * (node.shape.h + 1) * (node.shape.w + 1);
        let chunks = positions.div_ceil(128).max(2 * n); // a first layer has two per image
        let sums = if is_summed { 2 * node.shape.c * chunks } else { 0 };
        Ok(Self { floats: rows(floats)?, bytes, winners: rows(won)?, moments: rows(sums)? })
    }
}

impl Fleet {
    /// Memory for `lanes` networks that run side by side.
    ///
    /// # Errors
    /// If the GPU's memory is too small, or texts are too long for its attention.
    pub fn new(gpu: &Arc<Gpu>, graph: &Graph, lanes: usize, options: &Options<'_>) -> Result<Self> {
        graph.nodes.iter().try_for_each(text::check_attention)?;
        let (k, n) = (lanes.max(1), options.batch.max(1));
        let input_pitch = input_pitch(graph, options.taps);
        let takes_pool = |node: &Node, pool: &MaxPool| match &node.op {
            Op::Conv(geometry) if node.inputs[0] == graph.input() && gpu.precision() != Precision::Fp32 => {
                conv::stem_pool_shared(geometry, input_pitch, pool).is_some()
            }
            _ => false,
        };
        let schedule = Schedule::new(graph, options, Some(&takes_pool));
        let vectors = |len: usize| vectors(gpu, k, len);
        let mut value_len = schedule.value_len.clone();
        if let Some(slot) = schedule.value_slot[0] {
            value_len[slot] = value_len[slot].max(graph.nodes[0].shape.pixels() * input_pitch);
        }
        let values = value_len.iter().map(|len| vectors(n * len)).collect::<Result<_>>()?;
        let grads = schedule.grad_len.iter().map(|len| vectors(n * len)).collect::<Result<_>>()?;
        let kept = schedule.stages.iter().map(|stage| Kept::new(gpu, graph, stage, k, options));
        let kept = kept.collect::<Result<_>>()?;
        let channels_max = schedule.stages.iter().map(|stage| graph.nodes[stage.node].shape.c).max().unwrap_or(1);
        let chunks = graph.params().len().div_ceil(DOT_CHUNK) + graph.params().spans().len();
        let mut fleet = Self {
            values,
            grads,
            has_grad: vec![false; graph.nodes.len()],
            kept,
            n_moments: vec![0; schedule.stages.len()],
            partial: vectors(2 * channels_max * n.max(CHUNKS_MAX))?,
            coefficients: vectors(3 * channels_max)?,
            beside: Beside::new(gpu, if options.training { k * conv::PARTS_LEN } else { 0 }, schedule.grad_len.len())?,
            parts: gpu.zeros(k * conv::PARTS_LEN)?,
            further: 1,
            turned: if options.training && gpu.has_hopper() { Some(vectors(hopper::turned_len(graph))?) } else { None },
            texts: Texts::new(gpu, graph, k, n)?,
            lanes: gpu.zeros(k)?,
            active: Vec::new(),
            valid: gpu.zeros(k)?,
            labels: gpu.zeros(k * n)?,
            has_target: gpu.zeros(k * n)?,
            losses: gpu.zeros(k * n)?,
            stats: gpu.zeros(k * STATS)?,
            factors: gpu.zeros(k)?,
            scalars: gpu.zeros(4 * k)?,
            n_updates: gpu.zeros(k)?,
            sums: gpu.zeros(k * 3 * chunks)?,
            cursors: [gpu.zeros(k)?, gpu.zeros(k)?],
            tables: HashMap::new(),
            slots: HashMap::new(),
            recorded: HashMap::new(),
            input_pitch,
            schedule,
            n_lanes: k,
            batch_max: n,
            batch: 0,
            mode: Mode::EVAL,
            first_stage: 0,
            graph: graph.clone(),
            gpu: Arc::clone(gpu),
        };
        let all: Vec<u32> = (0..k as u32).collect();
        fleet.set_lanes(&all)?;
        fleet.reset_lanes()?;
        Ok(fleet)
    }

    /// Splits the sums of weights' gradients so far that one lane fills a large GPU. The sums then have another order, so
    /// this is for networks that never train beside others, such as a student.
    ///
    /// # Errors
    /// If the GPU's memory is too small.
    pub fn alone(mut self) -> Result<Self> {
        self.further = conv::ALONE;
        let len = self.n_lanes * self.further * conv::PARTS_LEN;
        (self.parts, self.beside.parts) = (self.gpu.zeros(len)?, self.gpu.zeros(len)?);
        Ok(self)
    }

    /// Approximate bytes per lane, to decide how many lanes fit.
    pub fn lane_bytes(graph: &Graph, options: &Options<'_>) -> usize {
        let schedule = Schedule::new(graph, options, Some(&|_, _| false));
        let floats: usize = schedule.value_len.iter().chain(&schedule.grad_len).sum();
        let backward = if options.training { conv::PARTS_LEN + hopper::turned_len(graph) } else { 0 };
        4 * (options.batch * floats + conv::PARTS_LEN + backward)
    }

    /// The graph.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The largest batch.
    pub fn batch_max(&self) -> usize {
        self.batch_max
    }

    /// Number of lanes.
    pub fn n_lanes(&self) -> usize {
        self.n_lanes
    }

    /// Zeroed vectors of `len` floats, one per lane.
    ///
    /// # Errors
    /// If the GPU's memory is too small.
    pub fn vectors(&self, len: usize) -> Result<Vectors> {
        vectors(&self.gpu, self.n_lanes, len)
    }

    /// One vector that all lanes share.
    ///
    /// # Errors
    /// If the GPU's memory is too small.
    pub fn shared_vector(&self, values: &[f32]) -> Result<Vectors> {
        let mut vector = Vectors { memory: self.gpu.zeros(padded(values.len()))?, stride: 0, len: values.len() };
        self.gpu.write(&mut vector.memory, 0, values)?;
        Ok(vector)
    }

    /// Writes a lane's vector.
    ///
    /// # Errors
    /// If the length or the lane is wrong.
    pub fn write(&self, vectors: &mut Vectors, lane: usize, values: &[f32]) -> Result<()> {
        check_len("the vector", vectors.len, values.len())?;
        self.check_lane(lane)?;
        self.gpu.write(&mut vectors.memory, lane * vectors.stride, values)
    }

    /// Reads a lane's vector.
    ///
    /// # Errors
    /// If the lane is wrong, or the driver fails.
    pub fn read(&self, vectors: &Vectors, lane: usize) -> Result<Vec<f32>> {
        self.read_first(vectors, lane, vectors.len)
    }

    fn read_first(&self, vectors: &Vectors, lane: usize, len: usize) -> Result<Vec<f32>> {
        self.check_lane(lane)?;
        let mut out = vec![0.0; len];
        self.gpu.read(&vectors.memory, lane * vectors.stride, &mut out)?;
        Ok(out)
    }

    /// Copies a lane's vector of any fleet on this GPU to a lane of this one.
    ///
    /// # Errors
    /// If the lengths differ or the lane is wrong.
    pub fn copy(&self, from: &Vectors, from_lane: usize, to: &mut Vectors, lane: usize) -> Result<()> {
        check_len("the vector", to.len, from.len)?;
        self.check_lane(lane)?;
        let at = (from_lane * from.stride, lane * to.stride);
        self.gpu.copy(&from.memory, at.0, from.len, &mut to.memory, at.1)
    }

    fn check_lane(&self, lane: usize) -> Result<()> {
        if lane < self.n_lanes { Ok(()) } else { Err(failed_lane(lane, self.n_lanes)) }
    }

    /// Sets the active lanes: those that the next launches serve.
    ///
    /// # Errors
    /// If there is no such lane.
    pub fn set_lanes(&mut self, lanes: &[u32]) -> Result<()> {
        if self.active == lanes {
            return Ok(());
        }
        lanes.iter().try_for_each(|lane| self.check_lane(*lane as usize))?;
        let list: Vec<i32> = lanes.iter().map(|lane| *lane as i32).collect();
        self.gpu.write(&mut self.lanes, 0, &list)?;
        self.active = lanes.to_vec();
        Ok(())
    }

    /// Number of active lanes.
    pub fn n_active(&self) -> usize {
        self.active.len()
    }

    /// Forgets all lanes' statistics, cursors and optimiser steps.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn reset_lanes(&mut self) -> Result<()> {
        let mut stats = vec![0.0; self.n_lanes * STATS];
        (0..self.n_lanes).for_each(|lane| stats[lane * STATS + BAD_STEP] = -1.0);
        self.gpu.write(&mut self.stats, 0, &stats)?;
        self.gpu.write(&mut self.n_updates, 0, &vec![0; self.n_lanes])?;
        self.rewind()
    }

    /// What each lane has measured.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn stats(&self) -> Result<Vec<Stats>> {
        let mut all = vec![0.0; self.n_lanes * STATS];
        self.gpu.read(&self.stats, 0, &mut all)?;
        let stats = |s: &[f64]| Stats {
            loss_total: s[0],
            replay_loss: s[1],
            reference_loss: s[9],
            replay_loss_first: (s[3] > 0.0).then_some(s[2]),
            cosine_total: s[4],
            n_compared: s[5] as u32,
            n_projected: s[6] as u32,
            not_finite: (s[BAD_STEP] >= 0.0).then_some((s[BAD_STEP] as u32, s[8])),
        };
        Ok(all.chunks_exact(STATS).map(stats).collect())
    }

    /// Replays the launches recorded under `key` for this number of lanes. Where there are none, the caller makes the
    /// launches and passes the returned recording to [`Fleet::end_recording`]. The first time they just run, because they
    /// may still allocate, which a recording must not. The second time they are recorded. They must be the same for the
    /// same key, whichever lanes are active.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn replay(&mut self, key: u64) -> Result<Option<Recording>> {
        let key = (key, self.active.len());
        let captures = match self.recorded.get_mut(&key) {
            Some(Some(recorded)) => return recorded.replay().map(|()| None),
            Some(None) => true,
            None => false,
        };
        if captures {
            self.gpu.begin_capture()?;
        } else {
            if self.recorded.len() >= RECORDED_MAX {
                self.recorded.clear();
            }
            self.recorded.insert(key, None);
        }
        Ok(Some(Recording { key, captures }))
    }

    /// Ends the recording, and runs and keeps it if it is complete.
    ///
    /// # Errors
    /// If the driver fails.
    #[allow(clippy::needless_pass_by_value, reason = "a recording ends once")]
    pub fn end_recording(&mut self, recording: Recording, is_complete: bool) -> Result<()> {
        if recording.captures {
            let mut captured = self.gpu.end_capture()?;
            if is_complete {
                captured.replay()?;
                self.recorded.insert(recording.key, Some(captured));
            }
        }
        Ok(())
    }

    /// Forgets recorded steps, so that their keys can be used again.
    pub fn forget_recorded(&mut self) {
        self.recorded.clear();
    }

    pub(super) fn launch(
        &self,
        kernel: &str,
        grid: [usize; 2],
        block: [u32; 2],
        shared: u32,
        parameters: &[&dyn Parameter],
    ) -> Result<()> {
        self.gpu.launch(self.beside.queue, kernel, [grid[0], grid[1], self.active.len()], block, shared, parameters)
    }

    /// One thread per element. If the number of elements is known on the device only, threads loop over further elements.
    pub(super) fn each_of(&self, kernel: &str, extent: Extent, parameters: &[&dyn Parameter]) -> Result<()> {
        let all = (extent.len as usize).div_ceil(256);
        let blocks = if extent.tokens == 0 { all } else { self.blocks(all) };
        self.launch(kernel, [blocks, 1], [256, 1], 0, parameters)
    }

    /// Blocks per lane for kernels that loop by the whole grid: `most`, or what keeps the processors busy, so that few
    /// blocks are started for tokens that do not exist.
    pub(super) fn blocks(&self, most: usize) -> usize {
        /// Blocks of 256 threads per processor: a few waves.
        const BLOCKS: usize = 32;
        most.min((BLOCKS * self.gpu.processors()).div_ceil(self.n_active().max(1)))
    }

    /// One thread per element, or per four.
    pub(super) fn each(&self, kernel: &str, len: usize, parameters: &[&dyn Parameter]) -> Result<()> {
        self.launch(kernel, [len.div_ceil(256), 1], [256, 1], 0, parameters)
    }

    pub(super) fn value(&self, node: usize) -> Rows {
        self.schedule.value_slot[node].map_or(Rows::NONE, |slot| self.values[slot].rows())
    }

    pub(super) fn grad(&self, slot: usize) -> Rows {
        self.grads[slot].rows()
    }

    /// The gradient of the output or a tap, and whether nothing has been added to it yet.
    pub(super) fn inject(&mut self, node: NodeId) -> Result<(Rows, bool)> {
        self.schedule.check_tap(&self.graph, node)?;
        let Some(slot) = self.schedule.grad_slot[node.0] else {
            return Err(Error::NotATap(self.graph.nodes[node.0].name.clone()));
        };
        let owner = self.graph.owner(node.0);
        let fresh = !std::mem::replace(&mut self.has_grad[owner], true);
        Ok((self.grad(slot), fresh))
    }

    /// A lane's value of the output or a tap, for the first `samples` of the batch, or for all of its tokens.
    ///
    /// # Errors
    /// If the node is neither.
    pub fn read_value(&self, node: NodeId, lane: usize, samples: usize) -> Result<Vec<f32>> {
        self.schedule.check_tap(&self.graph, node)?;
        let len = self.len_read(node, lane, samples)?;
        self.schedule.value_slot[node.0]
            .map_or(Ok(vec![0.0; len]), |slot| self.read_first(&self.values[slot], lane, len))
    }

    /// Floats of a lane's node for `samples`, or for all of its tokens.
    pub(super) fn len_read(&self, node: NodeId, lane: usize, samples: usize) -> Result<usize> {
        match &self.texts {
            Some(texts) if self.graph.nodes[node.0].packed => {
                Ok(texts.n_tokens(&self.gpu, lane)? * self.graph.shape(node).c)
            }
            _ => Ok(samples * self.graph.shape(node).len()),
        }
    }

    pub(super) fn read_grad_slot(&self, slot: usize, lane: usize, len: usize) -> Result<Vec<f32>> {
        self.read_first(&self.grads[slot], lane, len)
    }

    /// Copies a node's values of `batch` samples to rows `first…` of each active lane's matrix.
    ///
    /// # Errors
    /// If the node is no tap.
    pub fn keep_value(&self, node: NodeId, first: usize, to: &mut Vectors) -> Result<()> {
        self.schedule.check_tap(&self.graph, node)?;
        let row = self.graph.shape(node).len();
        let len = (self.batch * row).min(to.len.saturating_sub(first * row));
        let p: [&dyn Parameter; 5] =
            [&self.lanes.at(), &Extent::all(len), &self.value(node.0), &to.rows().from(first * row), &1i32];
        self.each_of("accumulate", Extent::all(len), &p)
    }
}

/// Work that is being recorded.
#[derive(Debug)]
#[must_use]
pub struct Recording {
    key: (u64, usize),
    captures: bool,
}

/// Max steps that stay recorded. Where steps differ from round to round, those of past rounds would fill the memory.
const RECORDED_MAX: usize = 1024;
/// Max chunks of rows per sum.
pub(super) const CHUNKS_MAX: usize = 256;
/// Elements per chunk of an inner product, as in `vector.cu`.
pub(super) const DOT_CHUNK: usize = 8192;

/// Images of three channels are padded to four if only convolutions read them, so that kernels copy vectors of four.
fn input_pitch(graph: &Graph, taps: &[NodeId]) -> usize {
    let input = graph.input();
    let shape = graph.shape(input);
    let mut readers = graph.nodes.iter().filter(|n| n.inputs.contains(&input));
    let only_convolutions = readers.all(|n| n.convolution().is_some());
    if shape.pixels() > 1 && only_convolutions && !taps.contains(&input) && graph.output() != input {
        shape.c.next_multiple_of(4)
    } else {
        shape.c
    }
}
