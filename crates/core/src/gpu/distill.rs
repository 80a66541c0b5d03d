//! The student's distillation on a GPU, as a cohort of one.

use super::OnGpu;
use super::execute::add_term;
use crate::distill::{DistillTask, Student};
use crate::error::Result;
use crate::memory::TargetTables;
use crate::step::Term;
use fedproj_nn::cuda::{Batches, Cohort, Data, LossOf, Moments, NOBODY, Target, Vectors};
use fedproj_nn::{Dropout, Mode, NormMode, Options, Rule};
use std::sync::Arc;

/// The student's targets, on the device.
#[derive(Debug)]
struct Goal {
    logits: Data,
    features: Option<Data>,
    labels: Option<Data>,
    marks: Option<Data>,
}

/// A student on a GPU.
#[derive(Debug)]
pub(crate) struct GpuStudent {
    on: Arc<OnGpu>,
    cohort: Cohort,
    theta: Vectors,
    buffers: Vectors,
    anchor: Vectors,
    grad: Vectors,
    rule: Rule,
    moments: Moments,
    goal: Goal,
    objective: Vec<Term>,
    mode: Mode,
    /// Factor of θ − anchor in the gradient; 0 is off.
    anchor_slope: f32,
    batch: usize,
    n: usize,
}

impl GpuStudent {
    pub fn new(on: &Arc<OnGpu>, task: &DistillTask<'_>) -> Result<Self> {
        let (graph, gpu, how) = (&on.experiment.graph, &on.gpu, task.how);
        let n = on.experiment.public.as_ref().map_or(0, fedproj_data::Dataset::n_samples);
        let (batch, taps) = (how.batch.min(n), how.taps(graph));
        let cohort = Cohort::new(gpu, graph, 1, &Options { batch, taps: &taps, training: true })?;
        let TargetTables { logits, features, labels, marks } = task.targets.tables();
        let numbers = |values: &[u32]| -> Result<Data> {
            let mut data = Data::matrix(gpu, &[0.0], 1)?;
            data.set_labels(gpu, values)?;
            Ok(data)
        };
        let marks: Vec<u32> = marks.iter().map(|&marked| u32::from(marked)).collect();
        let rows = |node| Data::matrix(gpu, features, graph.shape(node).len());
        let goal = Goal {
            logits: Data::matrix(gpu, logits, graph.shape(graph.output()).len())?,
            features: taps.first().filter(|_| !features.is_empty()).map(|&node| rows(node)).transpose()?,
            labels: labels.map(numbers).transpose()?,
            marks: if marks.is_empty() { None } else { Some(numbers(&marks)?) },
        };
        let rule = how.optimizer.rule();
        let mut theta = cohort.vectors(task.weights.len())?;
        let mut buffers = cohort.vectors(task.buffers.len())?;
        cohort.write(&mut theta, 0, task.weights)?;
        cohort.write(&mut buffers, 0, task.buffers)?;
        Ok(Self {
            moments: cohort.moments(&rule)?,
            grad: cohort.vectors(task.weights.len())?,
            anchor: cohort.shared_vector(task.anchor)?,
            objective: how.objective(task.targets),
            mode: Mode { norm: how.bn.mode(), dropout: Dropout::Off },
            anchor_slope: how.anchor_slope(),
            on: Arc::clone(on),
            cohort,
            theta,
            buffers,
            rule,
            goal,
            batch,
            n,
        })
    }

    fn loss_total(&self) -> Result<f64> {
        Ok(self.cohort.stats()?[0].loss_total)
    }

    fn step(&mut self) -> Result<()> {
        let Self { on, cohort, theta, buffers, anchor, grad, goal, .. } = self;
        let (theta, grad) = (theta.rows(), grad.rows());
        let Some(public) = &on.public else { return Ok(()) };
        cohort.gather(public, Batches::Samples, 0, false)?;
        cohort.gather_target(&goal.logits, Batches::Samples, 0, Target::Logits, false)?;
        if let Some(features) = &goal.features {
            cohort.gather_target(features, Batches::Samples, 0, Target::Features, false)?;
        }
        if let Some(labels) = &goal.labels {
            cohort.gather_labels(labels, Batches::Samples)?;
        }
        if let Some(marks) = &goal.marks {
            cohort.gather_marks(marks, Batches::Samples)?;
        }
        cohort.forward(theta, buffers.rows(), self.mode)?;
        let mut has_loss = false;
        self.objective.iter().try_for_each(|term| add_term(cohort, term, &mut has_loss))?;
        cohort.record_loss(LossOf::Samples)?;
        cohort.backward(theta, grad)?;
        if self.anchor_slope > 0.0 {
            cohort.axpy_difference(self.anchor_slope, theta, anchor.rows(), grad)?;
        }
        cohort.update(&self.rule, &self.moments, theta, grad)?;
        Ok(cohort.advance(1, 0)?)
    }
}

impl Student for GpuStudent {
    fn epoch(&mut self, mut order: Vec<u32>) -> Result<f64> {
        order.resize(self.n.next_multiple_of(self.batch), NOBODY);
        let n_steps = order.len() / self.batch;
        self.cohort.set_table(Batches::Samples, &[order], self.batch)?;
        self.cohort.set_table(Batches::LrFactors, &[vec![1.0f32.to_bits(); n_steps]], 1)?;
        self.cohort.rewind()?;
        let before = self.loss_total()?;
        for _ in 0..n_steps {
            if !self.cohort.replay(0)? {
                let recording = self.cohort.begin_recording(0)?;
                let done = self.step();
                self.cohort.end_recording(recording)?;
                done?;
            }
        }
        Ok((self.loss_total()? - before) / n_steps as f64)
    }

    fn recalibrate(&mut self) -> Result<()> {
        let Some(public) = &self.on.public else { return Ok(()) };
        for first in (0..self.n).step_by(self.batch) {
            self.cohort.gather_range(public, first, self.batch.min(self.n - first), self.batch)?;
            let mode = Mode { norm: NormMode::Update, dropout: Dropout::Off };
            self.cohort.forward(self.theta.rows(), self.buffers.rows(), mode)?;
        }
        Ok(())
    }

    fn model(&self) -> Result<(Vec<f32>, Vec<f32>)> {
        Ok((self.cohort.read(&self.theta, 0)?, self.cohort.read(&self.buffers, 0)?))
    }
}
