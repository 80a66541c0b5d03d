//! The vectors behind a program's names.

use super::Download;
use crate::plan::VectorId;
use fedproj_nn::{Buffer, Graph, Span};
use std::ops::Range;
use std::sync::Arc;

/// θ, its buffers, and every vector that a method works on.
#[derive(Debug)]
pub(crate) struct Vectors {
    pub theta: Buffer,
    pub buffers: Vec<f32>,
    pub gradients: Vec<Buffer>,
    pub states: Vec<Buffer>,
    pub broadcasts: Vec<Buffer>,
    pub uploads: Vec<Buffer>,
    /// Weights uphill of θ; empty until they are first used.
    pub perturbed: Buffer,
    /// θ before an update that is projected afterwards, and the update.
    pub moved: Option<(Buffer, Buffer)>,
    /// Where the parameter tensors are.
    pub tensors: Vec<Range<usize>>,
    pub download: Arc<Download>,
    /// A copy of the received buffers, for passes that must not move them.
    spare_buffers: Vec<f32>,
}

impl Vectors {
    pub fn new(graph: &Graph) -> Self {
        Self {
            theta: Buffer::zeros(graph.params().len()),
            buffers: Vec::new(),
            gradients: Vec::new(),
            states: Vec::new(),
            broadcasts: Vec::new(),
            uploads: Vec::new(),
            perturbed: Buffer::default(),
            moved: None,
            tensors: graph.params().spans().iter().map(Span::range).collect(),
            download: Arc::default(),
            spare_buffers: Vec::new(),
        }
    }

    pub fn begin(&mut self, weights: &[f32], buffers: &[f32], download: &Arc<Download>) {
        self.theta.copy_from_slice(weights);
        self.buffers.clear();
        self.buffers.extend_from_slice(buffers);
        self.download = Arc::clone(download);
    }

    pub fn get(&self, id: VectorId) -> &[f32] {
        match id {
            VectorId::Weights => &self.theta,
            VectorId::RoundStart => &self.download.weights,
            VectorId::Perturbed => &self.perturbed,
            VectorId::Gradient(i) => &self.gradients[i],
            VectorId::State(i) => &self.states[i],
            VectorId::Broadcast(i) => &self.broadcasts[i],
            VectorId::Upload(i) => &self.uploads[i],
        }
    }

    fn get_mut(&mut self, id: VectorId) -> &mut Buffer {
        match id {
            VectorId::Perturbed => &mut self.perturbed,
            VectorId::Gradient(i) => &mut self.gradients[i],
            VectorId::State(i) => &mut self.states[i],
            VectorId::Upload(i) => &mut self.uploads[i],
            VectorId::Weights | VectorId::RoundStart | VectorId::Broadcast(_) => {
                unreachable!("weights move by `update` alone, and what was received stays as it is")
            }
        }
    }

    /// Takes out a vector that is written to while others are read; its memory stays where it is.
    pub fn take(&mut self, id: VectorId) -> Buffer {
        std::mem::take(self.get_mut(id))
    }

    pub fn put_back(&mut self, id: VectorId, vector: Buffer) {
        *self.get_mut(id) = vector;
    }

    /// Takes out room for θ before an update and for the update.
    pub fn take_moved(&mut self) -> (Buffer, Buffer) {
        let n = self.theta.len();
        self.moved.take().unwrap_or_else(|| (Buffer::zeros(n), Buffer::zeros(n)))
    }

    pub fn keep_model(&mut self, weights: usize, buffers: usize) {
        self.states[weights].copy_from_slice(&self.theta);
        self.states[buffers].copy_from_slice(&self.buffers);
    }

    /// Parameters of a model, and a copy of its buffers that a pass may write to.
    pub fn model(&mut self, weights: VectorId) -> (&[f32], &mut [f32]) {
        let (params, buffers) = match weights {
            VectorId::RoundStart => (&self.download.weights[..], &self.download.buffers),
            _ => (&self.theta[..], &self.buffers),
        };
        self.spare_buffers.clear();
        self.spare_buffers.extend_from_slice(buffers);
        (params, &mut self.spare_buffers)
    }
}
