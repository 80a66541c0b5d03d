//! Forward passes over whole data sets, several models side by side.

use super::OnGpu;
use crate::error::Result;
use crate::evaluate::{Model, Outputs, Which};
use fedproj_nn::cuda::{Fleet, Vectors};
use fedproj_nn::{Mode, NodeId, Options};
use std::sync::Arc;

/// Samples per model in a pass, and the maximum number of models side by side.
const BATCH: usize = 256;
const LANES_MAX: usize = 16;

/// A model in a lane of a fleet on the same GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane<'a> {
    pub weights: &'a Vectors,
    pub buffers: &'a Vectors,
    pub at: usize,
}

/// Memory to evaluate some models at a time.
#[derive(Debug)]
pub(crate) struct GpuEvaluator {
    on: Arc<OnGpu>,
    fleet: Fleet,
    weights: Vectors,
    buffers: Vectors,
}

impl GpuEvaluator {
    pub fn new(on: &Arc<OnGpu>) -> Result<Self> {
        let experiment = &on.experiment;
        let taps: Vec<NodeId> = experiment.graph.features().into_iter().collect();
        let options = Options { batch: BATCH, taps: &taps, training: false };
        let per_lane = Fleet::lane_bytes(&experiment.graph, &options) + 4 * experiment.weights.len();
        let fitting = (on.gpu.free_bytes()? / 4 / per_lane).max(1);
        let wanted = experiment.config.federation.cohort(experiment.partition.n_clients());
        let fleet = Fleet::new(&on.gpu, &experiment.graph, wanted.min(LANES_MAX).min(fitting), &options)?;
        Ok(Self {
            weights: fleet.vectors(experiment.weights.len())?,
            buffers: fleet.vectors(experiment.buffers.len())?,
            fleet,
            on: Arc::clone(on),
        })
    }

    /// The number of models evaluated at a time.
    pub fn n_lanes(&self) -> usize {
        self.fleet.n_lanes()
    }

    /// Outputs of models on one of the experiment's data sets; empty without such a set.
    pub fn outputs(&mut self, models: &[Model<'_>], which: Which, with_features: bool) -> Result<Vec<Outputs>> {
        let mut all = Vec::with_capacity(models.len());
        for models in models.chunks(self.n_lanes()) {
            for (lane, model) in models.iter().enumerate() {
                self.fleet.write(&mut self.weights, lane, model.weights)?;
                self.fleet.write(&mut self.buffers, lane, model.buffers)?;
            }
            let Some((logits, features)) = self.pass(models.len(), which, with_features)? else { return Ok(all) };
            for lane in 0..models.len() {
                all.push(Outputs {
                    logits: self.fleet.read(&logits, lane)?,
                    features: self.fleet.read(&features, lane)?,
                });
            }
        }
        Ok(all)
    }

    /// Σ_k w_k of the outputs of models, max one per lane, on the public set. Neither models nor outputs leave the GPU; the
    /// sum does.
    pub fn sum(&mut self, models: &[Lane<'_>], weights: &[f32], with_features: bool) -> Result<Outputs> {
        for (lane, model) in models.iter().enumerate() {
            self.fleet.copy(model.weights, model.at, &mut self.weights, lane)?;
            self.fleet.copy(model.buffers, model.at, &mut self.buffers, lane)?;
        }
        let Some(found) = self.pass(models.len(), Which::Public, with_features)? else { return Ok(Outputs::default()) };
        let order: Vec<u32> = (0..models.len() as u32).collect();
        let sum = |vectors: &Vectors| self.fleet.weighted_sum(vectors, &order, weights);
        Ok(Outputs { logits: sum(&found.0)?, features: sum(&found.1)? })
    }

    /// Logits and features of the first `n_models` lanes for every sample of a set; none without such a set.
    fn pass(&mut self, n_models: usize, which: Which, with_features: bool) -> Result<Option<(Vectors, Vectors)>> {
        let (graph, fleet) = (&self.on.experiment.graph, &mut self.fleet);
        let (Some(data), Some(samples)) = (which.of(&self.on.experiment), self.on.data(which)) else { return Ok(None) };
        let (n, output) = (data.n_samples(), graph.output());
        let features = graph.features().filter(|_| with_features);
        let lanes: Vec<u32> = (0..n_models as u32).collect();
        fleet.set_lanes(&lanes)?;
        let mut logits = fleet.vectors(n * graph.shape(output).len())?;
        let mut found = fleet.vectors(features.map_or(0, |node| n * graph.shape(node).len()))?;
        for first in (0..n).step_by(BATCH) {
            fleet.gather_range(samples, first, BATCH.min(n - first), BATCH)?;
            fleet.forward(self.weights.rows(), self.buffers.rows(), Mode::EVAL)?;
            fleet.keep_value(output, first, &mut logits)?;
            if let Some(node) = features {
                fleet.keep_value(node, first, &mut found)?;
            }
        }
        Ok(Some((logits, found)))
    }
}
