//! Work beside the main queue: gradients of weights. Nothing in a backward pass waits for them, so they fill the processors
//! that the gradients of inputs leave idle: in the last wave of blocks, and where kernels wait for memory.
//!
//! They read the layer's input, which a backward pass never writes, and the gradient of its output. That gradient's memory is
//! used again by other layers, so whoever writes to it waits first.

use super::fleet::Fleet;
use super::gpu::{DeviceArray, Event, Gpu, Queue};
use crate::error::Result;

/// The queue beside the main one, and who reads there.
#[derive(Debug)]
pub(super) struct Beside {
    /// Where the next launches go.
    pub queue: Queue,
    /// Parts of split sums, as [`Fleet`]'s own are for the main queue.
    pub parts: DeviceArray<f32>,
    /// Where the last work ends that reads each slot of gradients, if this pass has any.
    ends: Vec<(Event, bool)>,
    /// The slot that the last of this work reads.
    last: Option<usize>,
}

impl Beside {
    pub fn new(gpu: &Gpu, parts: usize, n_slots: usize) -> Result<Self> {
        let ends = (0..n_slots).map(|_| Ok((gpu.event()?, false))).collect::<Result<_>>()?;
        Ok(Self { queue: Queue::Main, parts: gpu.zeros(parts)?, ends, last: None })
    }
}

impl Fleet {
    /// Makes launches beside the main queue, which read the gradient in this slot. [`Fleet::before_write`] waits for them.
    pub(super) fn beside(&mut self, slot: usize, launches: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        self.gpu.fork()?;
        self.beside.queue = Queue::Beside;
        let launched = launches(self);
        self.beside.queue = Queue::Main;
        let (end, is_read) = &mut self.beside.ends[slot];
        (*is_read, self.beside.last) = (true, Some(slot));
        // After an error too, so that whoever waits, waits for all of it.
        let marked = self.gpu.mark(end);
        launched.and(marked)
    }

    /// Waits for launches that read the gradient in this slot.
    pub(super) fn before_write(&mut self, slot: usize) -> Result<()> {
        let (end, is_read) = &mut self.beside.ends[slot];
        if std::mem::take(is_read) { self.gpu.wait(end) } else { Ok(()) }
    }

    /// Waits for all launches beside the main queue, which run in their order.
    pub(super) fn join(&mut self) -> Result<()> {
        let last = self.beside.last.take();
        last.map_or(Ok(()), |slot| self.gpu.wait(&self.beside.ends[slot].0))?;
        self.beside.ends.iter_mut().for_each(|(_, is_read)| *is_read = false);
        Ok(())
    }

    /// Memory for the parts of split sums. Queues do not share it.
    pub(super) fn parts(&self) -> u64 {
        if self.beside.queue == Queue::Main { self.parts.at() } else { self.beside.parts.at() }
    }
}
