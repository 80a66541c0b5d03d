//! Batches of a fleet: tables of which samples a step takes, and their gathering as inputs and targets.

use super::backward::Sum;
use super::fleet::Fleet;
use super::gpu::{Parameter, parameters};
use super::memory::{Data, Extent, Rows, Vectors};
use crate::cpu::check_len;
use crate::error::{Error, Result};
use crate::graph::NodeId;
use crate::mode::Mode;

/// Per-step tables of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Batches {
    /// Samples of the main batches.
    Samples,
    /// Their places among the lane's own samples.
    Positions,
    /// Samples of the batches that are replayed beside them.
    Replay,
    /// How the image of each sample is moved, see `gather_moved`.
    Moves,
    /// Factors of the learning rate, as bits.
    LrFactors,
    /// Keys of dropout, two words each.
    DropoutKeys,
    /// Generated features, see [`Fleet::gather_generated`].
    Generated,
}

/// A table as kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Table {
    pub(super) at: u64,
    pub(super) stride: i64,
    pub(super) width: i32,
}
parameters!(Table);

/// Gathered targets of a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Slot {
    Logits,
    Features,
    Embedding(usize),
    Offsets,
    Unit,
    Norms,
    Similarities,
    Slopes,
}

/// Padding of a short batch.
pub const NOBODY: u32 = u32::MAX;

/// An input image, see `layers.cu`.
#[repr(C)]
pub(super) struct Image {
    len: i32,
    channels: i32,
    pitch: i32,
}
parameters!(Image);

impl Fleet {
    /// Puts each lane back to the first step of its tables.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn rewind(&mut self) -> Result<()> {
        let zeros = vec![0; self.n_lanes];
        let [samples, replay] = &mut self.cursors;
        self.gpu.write(samples, 0, &zeros)?;
        self.gpu.write(replay, 0, &zeros)
    }

    /// Sets a table: for every lane its steps one after another, `width` entries each.
    ///
    /// # Errors
    /// If the GPU's memory is too small.
    pub fn set_table(&mut self, which: Batches, lanes: &[Vec<u32>], width: usize) -> Result<()> {
        let stride = lanes.iter().map(Vec::len).max().unwrap_or(0).max(width);
        let needed = stride * self.n_lanes;
        let fits = self.tables.get(&which).is_some_and(|(memory, old_stride, old_width)| {
            memory.len() >= needed && *old_stride >= stride && *old_width == width
        });
        if !fits {
            // Recorded steps hold the old address.
            self.recorded.clear();
            let roomy = (stride + stride / 4).next_multiple_of(width.max(1));
            self.tables.insert(which, (self.gpu.zeros(roomy * self.n_lanes)?, roomy, width));
        }
        let Some((memory, stride, _)) = self.tables.get_mut(&which) else { return Ok(()) };
        let mut all = vec![NOBODY; *stride * self.n_lanes];
        for (to, from) in all.chunks_exact_mut(*stride).zip(lanes) {
            to[..from.len()].copy_from_slice(from);
        }
        self.gpu.write(memory, 0, &all)
    }

    pub(super) fn table(&self, which: Batches) -> Result<Table> {
        let Some((memory, stride, width)) = self.tables.get(&which) else {
            return Err(Error::gpu(format!("{which:?}"), "the table was not set"));
        };
        Ok(Table { at: memory.at(), stride: *stride as i64, width: *width as i32 })
    }

    pub(super) fn cursor(&self, which: Batches) -> u64 {
        self.cursors[usize::from(which == Batches::Replay)].at()
    }

    /// A gathered target, made on first use.
    pub(super) fn slot(&mut self, slot: Slot, len: usize) -> Result<Rows> {
        if self.slots.get(&slot).is_none_or(|v| v.len < len) {
            self.recorded.clear();
            let vectors = self.vectors(len)?;
            self.slots.insert(slot, vectors);
        }
        Ok(self.slots[&slot].rows())
    }

    /// Gathers the batch of a table's current entry (`offset` entries on) as the network's input, with its labels.
    ///
    /// # Errors
    /// If the samples do not fit the network.
    pub fn gather(&mut self, data: &Data, which: Batches, offset: usize, truncate: bool) -> Result<()> {
        let batch = self.table(which)?.width as usize;
        let (image, to) = self.input(data, batch)?;
        self.launch_gather(data, which, offset, (image, to, self.valid.at()), truncate, 256)?;
        self.gather_numbers(data, which, offset, self.labels.at())?;
        self.batch = batch;
        self.find_tokens()
    }

    /// As [`Fleet::gather`] for the current entry of [`Batches::Samples`], with images moved as [`Batches::Moves`] says.
    ///
    /// # Errors
    /// As [`Fleet::gather`].
    pub fn gather_moved(&mut self, data: &Data) -> Result<()> {
        let (table, moves, cursor) =
            (self.table(Batches::Samples)?, self.table(Batches::Moves)?, self.cursor(Batches::Samples));
        let batch = table.width as usize;
        let (image, to) = self.input(data, batch)?;
        let width = self.graph.shape(self.graph.input()).w as i32;
        let (lanes, from, valid) = (self.lanes.at(), data.samples.at(), self.valid.at());
        let p: [&dyn Parameter; 9] = [&lanes, &table, &moves, &cursor, &from, &image, &width, &to, &valid];
        self.launch("gather_moved", [batch, 1], [256, 1], 0, &p)?;
        self.gather_numbers(data, Batches::Samples, 0, self.labels.at())?;
        self.batch = batch;
        Ok(())
    }

    /// Gathers rows of `data` as an image that has room at `to`. Counts the samples at `valid`, if it is an address.
    fn launch_gather(
        &self,
        data: &Data,
        which: Batches,
        offset: usize,
        (image, to, valid): (Image, Rows, u64),
        truncate: bool,
        threads: u32,
    ) -> Result<()> {
        let (table, cursor, from) = (self.table(which)?, self.cursor(which), data.samples.at());
        let (lanes, offset, truncate) = (self.lanes.at(), offset as i32, i32::from(truncate));
        let p: [&dyn Parameter; 9] = [&lanes, &table, &cursor, &offset, &from, &image, &to, &valid, &truncate];
        self.launch("gather", [table.width as usize, 1], [threads, 1], 0, &p)
    }

    /// Gathers the labels of `data`, if it has any.
    pub(super) fn gather_numbers(&self, data: &Data, which: Batches, offset: usize, to: u64) -> Result<()> {
        let Some(from) = &data.labels else { return Ok(()) };
        let (table, cursor, from) = (self.table(which)?, self.cursor(which), from.at());
        let (lanes, offset, batch_max) = (self.lanes.at(), offset as i32, self.batch_max as i32);
        let p: [&dyn Parameter; 7] = [&lanes, &table, &cursor, &offset, &from, &to, &batch_max];
        self.launch("gather_labels", [1, 1], [256, 1], 0, &p)
    }

    /// Gathers samples `first..first + count` for every lane, padded to `batch`.
    ///
    /// # Errors
    /// If the samples do not fit the network.
    pub fn gather_range(&mut self, data: &Data, first: usize, count: usize, batch: usize) -> Result<()> {
        let (image, to) = self.input(data, batch)?;
        let p: [&dyn Parameter; 7] =
            [&self.lanes.at(), &data.samples.at(), &(first as i32), &(count as i32), &image, &to, &self.valid.at()];
        self.launch("gather_range", [batch, 1], [256, 1], 0, &p)?;
        self.batch = batch;
        self.find_tokens()
    }

    fn input(&self, data: &Data, batch: usize) -> Result<(Image, Rows)> {
        let shape = self.graph.shape(self.graph.input());
        check_len("a sample", shape.len(), data.sample_len)?;
        if batch == 0 || batch > self.batch_max {
            return Err(Error::Batch { found: batch, max: self.batch_max });
        }
        let image = Image { len: shape.len() as i32, channels: shape.c as i32, pitch: self.input_pitch as i32 };
        Ok((image, self.value(0)))
    }

    /// Gathers features that `generator` makes from labels and noise as the values of the node `at`, from which a pass can
    /// begin ([`Fleet::forward_from`]). The labels become those of the batch. An entry of [`Batches::Generated`] has, for
    /// each of a step's passes, room for as many labels as the largest batch has samples, and behind them for each
    /// feature's noise as bits. `pass` of the step takes the first `n` of its features; [`NOBODY`] is padding.
    ///
    /// # Errors
    /// If the node is no tap, the generator's lanes or features do not fit, or the table was not set.
    pub fn gather_generated(
        &mut self,
        generator: &mut Self,
        params: Rows,
        at: NodeId,
        pass: usize,
        n: usize,
    ) -> Result<()> {
        self.schedule.check_tap(&self.graph, at)?;
        let (made, taken) = (generator.graph.output(), generator.graph.input());
        check_len("a generated feature", self.graph.shape(at).len(), generator.graph.shape(made).len())?;
        if n > self.batch_max.min(generator.batch_max) {
            return Err(Error::Batch { found: n, max: self.batch_max.min(generator.batch_max) });
        }
        let (n_in, n_classes) = (generator.graph.shape(taken).len(), self.graph.shape(self.graph.output()).len());
        let n_noise = n_in - n_classes;
        let (table, cursor, to) =
            (self.table(Batches::Generated)?, self.cursor(Batches::Generated), generator.value(0));
        let (lanes, labels, valid) = (self.lanes.at(), self.labels.at(), self.valid.at());
        let (batch_max, noise, classes, pass) = (self.batch_max as i32, n_noise as i32, n_classes as i32, pass as i32);
        let p: [&dyn Parameter; 10] =
            [&lanes, &table, &cursor, &pass, &noise, &classes, &to, &labels, &batch_max, &valid];
        self.launch("gather_generated", [n, 1], [64, 1], 0, &p)?;
        (self.batch, generator.batch) = (n, n);
        generator.forward(params, Rows::NONE, Mode::EVAL)?;
        let to = Sum { rows: self.value(at.0), fresh: true };
        self.accumulate(Extent::all(n * self.graph.shape(at).len()), generator.value(made.0), to)
    }

    /// Makes the last pass's output the target of [`crate::Loss::Kl`], as [`super::Target::Logits`].
    ///
    /// # Errors
    /// If the GPU's memory is too small.
    pub fn keep_logits(&mut self) -> Result<()> {
        let output = self.graph.output();
        let row = self.graph.shape(output).len();
        let rows = self.slot(Slot::Logits, self.batch_max * row)?;
        self.accumulate(Extent::all(self.batch * row), self.value(output.0), Sum { rows, fresh: true })
    }

    /// Gathers rows of a matrix that belong to a table's current entry, as targets of a loss.
    pub(super) fn gather_rows(
        &mut self,
        matrix: &Data,
        which: Batches,
        offset: usize,
        slot: Slot,
        truncate: bool,
    ) -> Result<()> {
        let len = matrix.sample_len as i32;
        let to = self.slot(slot, self.batch_max * matrix.sample_len)?;
        self.launch_gather(matrix, which, offset, (Image { len, channels: len, pitch: len }, to, 0), truncate, 64)
    }

    /// Gathers rows that each lane has for itself, such as embeddings of its samples.
    ///
    /// # Errors
    /// If the table was not set.
    pub fn gather_embedding(&mut self, all: &Vectors, row_len: usize, index: usize) -> Result<()> {
        let table = self.table(Batches::Positions)?;
        let to = self.slot(Slot::Embedding(index), self.batch_max * row_len)?;
        let p: [&dyn Parameter; 7] =
            [&self.lanes.at(), &table, &self.cursor(Batches::Samples), &0i32, &all.rows(), &(row_len as i32), &to];
        self.launch("gather_own", [table.width as usize, 1], [64, 1], 0, &p)
    }

    /// Ends a step: moves on in the tables.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn advance(&self, samples: usize, replay: usize) -> Result<()> {
        let [first, second] = &self.cursors;
        let p: [&dyn Parameter; 5] = [&self.lanes.at(), &first.at(), &(samples as i32), &second.at(), &(replay as i32)];
        self.launch("advance", [1, 1], [1, 1], 0, &p)
    }
}
