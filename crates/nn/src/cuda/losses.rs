//! Losses of a fleet's batches, on targets that are gathered like the batches.

use super::batches::{Batches, Slot};
use super::fleet::Fleet;
use super::gpu::{Parameter, parameters};
use super::memory::{Data, Rows};
use crate::cpu::check_loss_at;
use crate::error::Result;
use crate::graph::{NodeId, Shape};
use crate::loss::{Direction, EmbeddingId, Loss, RelaxedContrast};

/// The arguments that all losses share, as `loss.cu` takes them.
#[repr(C)]
pub(super) struct LossArgs {
    lanes: u64,
    valid: u64,
    features: i32,
    z: Rows,
    target: Rows,
    grad: Rows,
    losses: u64,
    losses_stride: i64,
    weight: f32,
    flags: i32,
}
parameters!(LossArgs);

/// Which targets are gathered, see [`crate::LossTargets`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Logits.
    Logits,
    /// Features.
    Features,
    /// Labels that replace the samples' own; the [`Data::numbers`] of a table.
    Labels,
    /// Marks, 0 or 1 per sample; the [`Data::numbers`] of a table. See [`Loss::Kl`].
    Marks,
}

/// Which batch a recorded loss is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossOf {
    /// A main batch.
    Samples,
    /// A replayed batch.
    Replay,
    /// A replayed batch under reference weights.
    Reference,
    /// Another batch, or a main batch once more under other weights: checked, not counted.
    Other,
}

impl Fleet {
    /// Gathers the targets of a table's current entry, or of the entry `offset` further on.
    ///
    /// # Errors
    /// If the table was not set.
    pub fn gather_target(
        &mut self,
        data: &Data,
        which: Batches,
        offset: usize,
        target: Target,
        truncate: bool,
    ) -> Result<()> {
        match target {
            Target::Logits => self.gather_rows(data, which, offset, Slot::Logits, truncate),
            Target::Features => self.gather_rows(data, which, offset, Slot::Features, truncate),
            Target::Labels => self.gather_numbers(data, which, offset, self.labels.at()),
            Target::Marks => self.gather_numbers(data, which, offset, self.has_target.at()),
        }
    }

    /// Sets the offsets of a lane's classes, see [`Loss::OffsetCrossEntropy`].
    ///
    /// # Errors
    /// If the lane is wrong, or the GPU's memory is too small.
    pub fn set_offsets(&mut self, lane: usize, offsets: &[f32]) -> Result<()> {
        self.slot(Slot::Offsets, offsets.len())?;
        let Some(mut all) = self.slots.remove(&Slot::Offsets) else { return Ok(()) };
        let done = self.write(&mut all, lane, offsets);
        self.slots.insert(Slot::Offsets, all);
        done
    }

    /// Adds `weight` times a loss at the output or a tap, on the targets gathered last; `first`: it is the batch's first.
    ///
    /// # Errors
    /// If the node is no tap or has tokens, or the fleet was made without training.
    pub fn add_loss(&mut self, node: NodeId, loss: &Loss, weight: f32, first: bool) -> Result<()> {
        check_loss_at(&self.graph, node)?;
        let (grad, fresh) = self.inject(node)?;
        self.launch_loss(node, loss, weight, first, grad, fresh)
    }

    fn slot_rows(&self, slot: Slot) -> Rows {
        self.slots.get(&slot).map_or(Rows::NONE, super::memory::Vectors::rows)
    }

    fn launch_loss(
        &mut self,
        node: NodeId,
        loss: &Loss,
        weight: f32,
        first: bool,
        grad: Rows,
        fresh: bool,
    ) -> Result<()> {
        let shape = self.graph.shape(node);
        let target = self.slot_rows(if *loss == Loss::MaskedSquares { Slot::Features } else { Slot::Logits });
        let args = LossArgs {
            lanes: self.lanes.at(),
            valid: self.valid.at(),
            features: shape.len() as i32,
            z: self.value(node.0),
            target,
            grad,
            losses: self.losses.at(),
            losses_stride: self.batch_max as i64,
            weight,
            flags: i32::from(fresh) | (2 * i32::from(first)),
        };
        let (batch, batch_max) = (self.batch as i32, self.batch_max as i32);
        let (grid, block) = ([self.batch.div_ceil(4), 1], [128, 1]);
        match *loss {
            Loss::CrossEntropy => {
                self.launch("cross_entropy", grid, block, 0, &[&args, &batch, &self.labels.at(), &batch_max])
            }
            Loss::OffsetCrossEntropy => {
                let p: [&dyn Parameter; 5] =
                    [&args, &batch, &self.labels.at(), &batch_max, &self.slot_rows(Slot::Offsets)];
                self.launch("offset_cross_entropy", grid, block, 0, &p)
            }
            Loss::Kl { temperature, direction, times_t_squared, only_marked } => {
                let student_first = i32::from(direction == Direction::StudentToTeacher);
                let factor = if times_t_squared { temperature * temperature } else { 1.0 };
                let marks = if only_marked { self.has_target.at() } else { 0 };
                let p: [&dyn Parameter; 7] = [&args, &batch, &temperature, &student_first, &factor, &marks, &batch_max];
                self.launch("kl_divergence", grid, block, 0, &p)
            }
            Loss::NotTrueKl { teacher: EmbeddingId(teacher), temperature } => {
                let (labels, teacher) = (self.labels.at(), self.slot_rows(Slot::Embedding(teacher)));
                let p: [&dyn Parameter; 6] = [&args, &batch, &labels, &batch_max, &teacher, &temperature];
                self.launch("not_true_divergence", grid, block, 0, &p)
            }
            Loss::MaskedSquares => self.launch("masked_squares", grid, block, 0, &[&args, &batch]),
            Loss::AbsoluteError => self.launch("absolute_error", grid, block, 0, &[&args, &batch]),
            Loss::Contrast { positive, negative, temperature } => {
                let of = |EmbeddingId(index)| self.slot_rows(Slot::Embedding(index));
                let (positive, negative) = (of(positive), of(negative));
                self.launch("contrast", grid, block, 0, &[&args, &batch, &positive, &negative, &temperature])
            }
            Loss::RelaxedContrast(c) => self.launch_relaxed_contrast(&args, shape, &c),
        }
    }

    /// The loss of the mean over pixels; every sample is compared with every other.
    fn launch_relaxed_contrast(&mut self, args: &LossArgs, shape: Shape, c: &RelaxedContrast) -> Result<()> {
        let (n, pixels, channels) = (self.batch_max, shape.pixels() as i32, shape.c);
        let unit = self.slot(Slot::Unit, n * channels)?;
        let norms = self.slot(Slot::Norms, n)?;
        let sims = self.slot(Slot::Similarities, n * n)?;
        let slopes = self.slot(Slot::Slopes, n * n)?;
        let (lanes, channels_i) = (self.lanes.at(), channels as i32);
        let (batch, batch_max, rows) = (self.batch as i32, self.batch_max as i32, [self.batch, 1]);
        let p: [&dyn Parameter; 6] = [&lanes, &pixels, &channels_i, &args.z, &unit, &norms];
        self.launch("pool_and_normalise", rows, [128, 1], 0, &p)?;
        self.launch("similarities", rows, [128, 1], 0, &[&lanes, &batch, &channels_i, &unit, &sims])?;
        let p: [&dyn Parameter; 11] = [
            args,
            &batch,
            &self.labels.at(),
            &batch_max,
            &sims,
            &slopes,
            &c.temperature,
            &c.threshold,
            &c.contrast_weight,
            &c.penalty_weight,
            &args.weight,
        ];
        self.launch("relaxed_contrast", [self.batch.div_ceil(64), 1], [64, 1], 0, &p)?;
        let fresh = args.flags & 1;
        let p: [&dyn Parameter; 9] = [&lanes, &batch, &pixels, &channels_i, &unit, &norms, &slopes, &args.grad, &fresh];
        self.launch("relaxed_contrast_gradient", rows, [128, 1], 4 * channels as u32, &p)
    }

    /// Adds the mean of the batch's losses to the lanes' statistics.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn record_loss(&self, of: LossOf) -> Result<()> {
        let kind = match of {
            LossOf::Samples => 0i32,
            LossOf::Replay => 1,
            LossOf::Reference => 2,
            LossOf::Other => 3,
        };
        let p: [&dyn Parameter; 8] = [
            &self.lanes.at(),
            &self.valid.at(),
            &(self.batch as i32),
            &self.losses.at(),
            &(self.batch_max as i64),
            &self.stats.at(),
            &self.cursor(Batches::Samples),
            &kind,
        ];
        self.launch("record_loss", [1, 1], [256, 1], 0, &p)
    }
}
