//! Forward passes over whole data sets, several models side by side.

use super::OnGpu;
use crate::error::Result;
use crate::evaluate::{Model, Outputs, Which};
use fedproj_nn::cuda::{Cohort, Vectors};
use fedproj_nn::{Mode, NodeId, Options};
use std::sync::Arc;

/// Samples per model in a pass, and the maximum number of models side by side.
const BATCH: usize = 256;
const LANES_MAX: usize = 16;

/// Memory to evaluate some models at a time.
#[derive(Debug)]
pub(crate) struct GpuEvaluator {
    on: Arc<OnGpu>,
    cohort: Cohort,
    weights: Vectors,
    buffers: Vectors,
}

impl GpuEvaluator {
    pub fn new(on: &Arc<OnGpu>) -> Result<Self> {
        let experiment = &on.experiment;
        let taps: Vec<NodeId> = experiment.graph.features().into_iter().collect();
        let options = Options { batch: BATCH, taps: &taps, training: false };
        let per_lane = Cohort::lane_bytes(&experiment.graph, &options) + 4 * experiment.weights.len();
        let fitting = (on.gpu.free_bytes()? / 4 / per_lane).max(1);
        let wanted = experiment.config.federation.cohort(experiment.partition.n_clients());
        let cohort = Cohort::new(&on.gpu, &experiment.graph, wanted.min(LANES_MAX).min(fitting), &options)?;
        Ok(Self {
            weights: cohort.vectors(experiment.weights.len())?,
            buffers: cohort.vectors(experiment.buffers.len())?,
            cohort,
            on: Arc::clone(on),
        })
    }

    /// The number of models evaluated at a time.
    pub fn n_lanes(&self) -> usize {
        self.cohort.n_lanes()
    }

    /// Outputs of models on one of the experiment's data sets; empty without such a set.
    pub fn outputs(&mut self, models: &[Model<'_>], which: Which, with_features: bool) -> Result<Vec<Outputs>> {
        let on = Arc::clone(&self.on);
        let (Some(data), Some(samples)) = (which.of(&on.experiment), on.data(which)) else { return Ok(Vec::new()) };
        let graph = &on.experiment.graph;
        let (n, output) = (data.n_samples(), graph.output());
        let features = graph.features().filter(|_| with_features);
        let mut all = Vec::with_capacity(models.len());
        for models in models.chunks(self.n_lanes()) {
            for (lane, model) in models.iter().enumerate() {
                self.cohort.write(&mut self.weights, lane, model.weights)?;
                self.cohort.write(&mut self.buffers, lane, model.buffers)?;
            }
            let lanes: Vec<u32> = (0..models.len() as u32).collect();
            self.cohort.set_lanes(&lanes)?;
            let mut logits = self.cohort.vectors(n * graph.shape(output).len())?;
            let mut found = self.cohort.vectors(features.map_or(0, |node| n * graph.shape(node).len()))?;
            for first in (0..n).step_by(BATCH) {
                self.cohort.gather_range(samples, first, BATCH.min(n - first), BATCH)?;
                self.cohort.forward(self.weights.rows(), self.buffers.rows(), Mode::EVAL)?;
                self.cohort.keep_value(output, first, &mut logits)?;
                if let Some(node) = features {
                    self.cohort.keep_value(node, first, &mut found)?;
                }
            }
            for lane in 0..models.len() {
                all.push(Outputs {
                    logits: self.cohort.read(&logits, lane)?,
                    features: self.cohort.read(&found, lane)?,
                });
            }
        }
        Ok(all)
    }
}
