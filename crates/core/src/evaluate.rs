//! Forward passes over whole data sets. Threads share them in fixed chunks.

use crate::error::Result;
use crate::experiment::Experiment;
use crate::gpu::{GpuEvaluator, Lane, OnGpu};
use fedproj_data::Dataset;
use fedproj_nn::{Cpu, Graph, Loss, LossTargets, Mode, NodeId, Options, Workspace};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Samples per chunk.
const CHUNK: usize = 64;

/// Weights and buffers of a model.
#[derive(Clone, Copy, Debug)]
pub struct Model<'a> {
    /// θ
    pub weights: &'a [f32],
    /// Running statistics.
    pub buffers: &'a [f32],
}

/// A data set of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Private,
    Test,
    Public,
}

impl Which {
    /// The set in host memory, if the experiment has one.
    pub fn of(self, experiment: &Experiment) -> Option<&Dataset> {
        match self {
            Self::Private => Some(&experiment.private),
            Self::Test => Some(&experiment.test),
            Self::Public => experiment.public.as_deref(),
        }
    }
}

/// Threads that evaluate, each with its own memory.
#[derive(Debug)]
pub struct Evaluator {
    workers: Vec<Mutex<Workspace>>,
    graph: Graph,
    gpu: Option<(Arc<OnGpu>, Mutex<GpuEvaluator>)>,
}

/// Logits of every sample, and features if requested.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outputs {
    /// (samples, classes)
    pub logits: Vec<f32>,
    /// (samples, features) or empty
    pub features: Vec<f32>,
}

impl Evaluator {
    /// Creates the threads for a network.
    ///
    /// # Errors
    /// If the network cannot be laid out.
    pub fn new(graph: &Graph, n_threads: usize) -> Result<Self> {
        let taps: Vec<NodeId> = graph.features().into_iter().collect();
        let options = Options { batch: CHUNK, taps: &taps, training: false };
        let worker = || Workspace::new(graph, &options, Cpu::new(1)).map(Mutex::new);
        let workers = (0..n_threads.max(1)).map(|_| worker()).collect::<fedproj_nn::Result<_>>()?;
        Ok(Self { workers, graph: graph.clone(), gpu: None })
    }

    /// Evaluates on a GPU all data sets that it holds.
    pub(crate) fn use_gpu(&mut self, on: &Arc<OnGpu>) -> Result<()> {
        self.gpu = Some((Arc::clone(on), Mutex::new(GpuEvaluator::new(on)?)));
        Ok(())
    }

    /// The data on the GPU, if one is used.
    pub(crate) fn on_gpu(&self) -> Option<&Arc<OnGpu>> {
        self.gpu.as_ref().map(|(on, _)| on)
    }

    /// The number of models that are evaluated side by side.
    pub(crate) fn n_at_once(&self) -> usize {
        if let Some((_, gpu)) = &self.gpu {
            return gpu.lock().unwrap_or_else(std::sync::PoisonError::into_inner).n_lanes();
        }
        self.workers.len()
    }

    /// Outputs of several models on a data set of the experiment. Runs on the GPU if it holds the set, else on threads.
    pub(crate) fn outputs_on(
        &self,
        experiment: &Experiment,
        which: Which,
        models: &[Model<'_>],
        with_features: bool,
    ) -> Result<Vec<Outputs>> {
        if let Some((_, gpu)) = &self.gpu {
            let mut gpu = gpu.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            return gpu.outputs(models, which, with_features);
        }
        which.of(experiment).map_or(Ok(Vec::new()), |data| self.outputs(models, data, with_features))
    }

    /// Σ_k w_k of the outputs of models in lanes of the GPU, if it evaluates that many side by side.
    pub(crate) fn sum_on_gpu(
        &self,
        lanes: &[Lane<'_>],
        weights: &[f32],
        with_features: bool,
    ) -> Option<Result<Outputs>> {
        let (_, gpu) = self.gpu.as_ref()?;
        let mut gpu = gpu.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        (lanes.len() <= gpu.n_lanes()).then(|| gpu.sum(lanes, weights, with_features))
    }

    /// A model's score on the experiment's test set.
    pub(crate) fn score_on_test(&self, experiment: &Experiment, model: Model<'_>) -> Result<Score> {
        let outputs = self.outputs_on(experiment, Which::Test, &[model], false)?;
        let labels = experiment.test.labels().unwrap_or(&[]);
        outputs.first().map_or_else(|| Ok(Score::default()), |out| Score::of(&out.logits, labels))
    }

    /// Outputs of several models on any data set, in evaluation mode, on the threads.
    ///
    /// # Errors
    /// If a model does not fit the network.
    pub fn outputs(&self, models: &[Model<'_>], data: &Dataset, with_features: bool) -> Result<Vec<Outputs>> {
        let n_chunks = data.n_samples().div_ceil(CHUNK);
        let classes = self.graph.shape(self.graph.output()).len();
        let dim = self.graph.features().filter(|_| with_features).map_or(0, |node| self.graph.shape(node).len());
        let blank = || Mutex::new((vec![0.0; data.n_samples() * classes], vec![0.0; data.n_samples() * dim]));
        let all: Vec<Mutex<(Vec<f32>, Vec<f32>)>> = models.iter().map(|_| blank()).collect();
        let next = AtomicUsize::new(0);
        let work = |ws: &mut Workspace| -> Result<()> {
            let mut x = vec![0.0; CHUNK * data.sample_len()];
            let mut indices = Vec::with_capacity(CHUNK);
            loop {
                let unit = next.fetch_add(1, Ordering::Relaxed);
                let (model, chunk) = (unit / n_chunks, unit % n_chunks);
                let Some(model_of) = models.get(model) else { return Ok(()) };
                let range = chunk * CHUNK..((chunk + 1) * CHUNK).min(data.n_samples());
                indices.clear();
                indices.extend(range.start as u32..range.end as u32);
                let x = &mut x[..range.len() * data.sample_len()];
                data.gather(&indices, x);
                let mut buffers = model_of.buffers.to_vec();
                ws.forward(model_of.weights, &mut buffers, x, Mode::EVAL)?;
                let mut out = all[model].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                out.0[range.start * classes..range.end * classes].copy_from_slice(ws.output());
                if let Some(node) = self.graph.features().filter(|_| dim > 0) {
                    out.1[range.start * dim..range.end * dim].copy_from_slice(ws.value(node)?);
                }
            }
        };
        std::thread::scope(|scope| {
            let handles: Vec<_> = self
                .workers
                .iter()
                .map(|ws| scope.spawn(|| work(&mut ws.lock().unwrap_or_else(std::sync::PoisonError::into_inner))))
                .collect();
            handles.into_iter().try_for_each(|h| h.join().unwrap_or_else(|p| std::panic::resume_unwind(p)))
        })?;
        let into = |m: Mutex<(Vec<f32>, Vec<f32>)>| m.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        Ok(all.into_iter().map(into).map(|(logits, features)| Outputs { logits, features }).collect())
    }

    /// Scores of several models on a labelled set.
    ///
    /// # Errors
    /// If a model does not fit the network.
    pub fn scores(&self, models: &[Model<'_>], data: &Dataset) -> Result<Vec<Score>> {
        let labels = data.labels().unwrap_or(&[]);
        self.outputs(models, data, false)?.iter().map(|out| Score::of(&out.logits, labels)).collect()
    }
}

/// A model's score on labelled samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// Share of correctly classified samples.
    pub accuracy: f64,
    /// Mean cross-entropy.
    pub loss: f64,
    /// The same share per class; 0 for a class without samples.
    pub per_class: Vec<f64>,
    /// Samples per class.
    pub class_sizes: Vec<u32>,
}

impl Score {
    fn of(logits: &[f32], labels: &[u32]) -> Result<Self> {
        let classes = logits.len() / labels.len().max(1);
        let (mut right, mut sizes) = (vec![0u32; classes], vec![0u32; classes]);
        for (row, &label) in logits.chunks_exact(classes).zip(labels) {
            sizes[label as usize] += 1;
            right[label as usize] += u32::from(argmax(row) == label as usize);
        }
        let loss = Loss::CrossEntropy.value(&LossTargets::labels(labels), labels.len(), logits)?;
        let share = |(r, n): (&u32, &u32)| if *n == 0 { 0.0 } else { f64::from(*r) / f64::from(*n) };
        let per_class = right.iter().zip(&sizes).map(share).collect();
        let accuracy = f64::from(right.iter().sum::<u32>()) / labels.len().max(1) as f64;
        Ok(Self { accuracy, loss, per_class, class_sizes: sizes })
    }

    /// Accuracy on the test samples of some classes.
    pub fn accuracy_on(&self, classes: impl Iterator<Item = usize>) -> f64 {
        let (mut right, mut all) = (0.0, 0.0);
        for class in classes {
            right += self.per_class[class] * f64::from(self.class_sizes[class]);
            all += f64::from(self.class_sizes[class]);
        }
        if all > 0.0 { right / all } else { 0.0 }
    }
}

/// The index of the largest value; the first one wins ties.
pub(crate) fn argmax(row: &[f32]) -> usize {
    row.iter().enumerate().fold(0, |best, (i, v)| if *v > row[best] { i } else { best })
}

/// Population variance.
pub(crate) fn variance(row: &[f32]) -> f32 {
    let n = row.len() as f32;
    let mean = row.iter().sum::<f32>() / n;
    row.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / n
}
