//! Batches with their targets, and the terms of an objective on them.

use crate::error::Result;
use crate::memory::TargetTables;
use crate::step::Term;
use crate::terms;
use fedproj_data::{Dataset, gather_rows};
use fedproj_nn::{Loss, NormMode, Workspace};

/// Where the batches of a kind come from, and how the network runs on them.
#[derive(Debug)]
pub(crate) struct Feed<'a> {
    pub data: &'a Dataset,
    /// The statistics of batch-norm.
    pub norm: NormMode,
    /// Whether dropout is on.
    pub drops: bool,
    /// Whether inputs and target logits are cut to whole numbers.
    pub truncates: bool,
    pub targets: TargetTables<'a>,
}

/// The batch gathered last. Its memory is used again for the next one.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    pub x: Vec<f32>,
    indices: Vec<u32>,
    labels: Vec<u32>,
    logits: Vec<f32>,
    features: Vec<f32>,
    marks: Vec<bool>,
    /// Embeddings of the batch, by place.
    embedded: Vec<Vec<f32>>,
    /// Means over pixels and their gradient, of a term that pools.
    pooled: Vec<f32>,
    pooled_grad: Vec<f32>,
}

impl Gathered {
    /// Gathers samples and their targets.
    pub fn gather(&mut self, feed: &Feed<'_>, samples: impl Iterator<Item = u32>) {
        let (n, targets) = (feed.data.n_samples(), &feed.targets);
        self.indices.clear();
        self.indices.extend(samples);
        self.x.resize(self.indices.len() * feed.data.sample_len(), 0.0);
        feed.data.gather(&self.indices, &mut self.x);
        self.labels.clear();
        if let Some(labels) = targets.labels.or(feed.data.labels()) {
            self.labels.extend(self.indices.iter().map(|&i| labels[i as usize]));
        }
        self.marks.clear();
        if !targets.marks.is_empty() {
            self.marks.extend(self.indices.iter().map(|&i| targets.marks[i as usize]));
        }
        gather_rows(targets.logits, n, &self.indices, &mut self.logits);
        gather_rows(targets.features, n, &self.indices, &mut self.features);
        if feed.truncates {
            self.x.iter_mut().chain(&mut self.logits).for_each(|v| *v = v.trunc());
        }
    }

    /// Room for an embedding of the batch.
    pub fn embedded(&mut self, index: usize) -> &mut Vec<f32> {
        if self.embedded.len() <= index {
            self.embedded.resize(index + 1, Vec::new());
        }
        &mut self.embedded[index]
    }

    /// Adds a term's gradient at its nodes, after a forward pass on the batch; returns its value, weighted.
    pub fn add_term(&mut self, ws: &mut Workspace, term: &Term) -> Result<f64> {
        let output = ws.graph().output();
        match *term {
            Term::CrossEntropy => Ok(ws.add_loss(output, &Loss::CrossEntropy { labels: &self.labels }, 1.0)?),
            Term::MemoryKl { temperature } => Ok(ws.add_loss(output, &Loss::kl(&self.logits, temperature), 1.0)?),
            Term::Kl { temperature, direction, times_t_squared, only_marked, weight } => {
                if only_marked {
                    self.teach_unmarked(ws.output());
                }
                let kl = Loss::Kl { teacher: &self.logits, temperature, direction, times_t_squared };
                Ok(f64::from(weight) * ws.add_loss(output, &kl, weight)?)
            }
            Term::MemoryFeatures { weight } => {
                let Some(node) = ws.graph().features() else { return Ok(0.0) };
                let dim = ws.graph().shape(node).len();
                let target = &self.features;
                let loss = ws.inject(node, |f, grad| terms::masked_squares(dim, f, target, weight, grad))?;
                Ok(f64::from(weight) * loss)
            }
            Term::ModelContrast { node, positive, negative, temperature, weight } => {
                let dim = ws.graph().shape(node).len();
                let (p, q) = (&self.embedded[positive.0], &self.embedded[negative.0]);
                let contrast = |z: &[f32], g: &mut [f32]| terms::model_contrast(dim, z, p, q, temperature, weight, g);
                Ok(f64::from(weight) * ws.inject(node, contrast)?)
            }
            Term::RelaxedContrast(constants) => {
                let n_levels = ws.graph().levels().len();
                let mut total = 0.0;
                for level in 0..n_levels {
                    let node = ws.graph().levels()[level];
                    let shape = ws.graph().shape(node);
                    let scale = 1.0 / n_levels as f32;
                    total += ws.inject(node, |value, grad| {
                        self.pool(shape.pixels(), shape.c, value, grad, |f, labels, g| {
                            terms::relaxed_contrast(&constants, shape.c, f, labels, scale, g)
                        })
                    })?;
                }
                Ok(total / n_levels.max(1) as f64)
            }
        }
    }

    /// Makes a sample that is not marked its own teacher, so that its divergence and gradient vanish.
    fn teach_unmarked(&mut self, own: &[f32]) {
        let classes = own.len() / self.marks.len().max(1);
        for (row, _) in self.marks.iter().enumerate().filter(|(_, marked)| !**marked) {
            let span = row * classes..(row + 1) * classes;
            self.logits[span.clone()].copy_from_slice(&own[span]);
        }
    }

    /// Calls `f(pooled values, labels, their gradient)` on the mean over pixels, and spreads the gradient back.
    fn pool(
        &mut self,
        pixels: usize,
        channels: usize,
        value: &[f32],
        grad: &mut [f32],
        f: impl FnOnce(&[f32], &[u32], &mut [f32]) -> f64,
    ) -> f64 {
        if pixels == 1 {
            return f(value, &self.labels, grad);
        }
        let n = value.len() / (pixels * channels);
        for mean in [&mut self.pooled, &mut self.pooled_grad] {
            mean.clear();
            mean.resize(n * channels, 0.0);
        }
        for (mean, image) in self.pooled.chunks_exact_mut(channels).zip(value.chunks_exact(pixels * channels)) {
            for row in image.chunks_exact(channels) {
                mean.iter_mut().zip(row).for_each(|(m, v)| *m += v / pixels as f32);
            }
        }
        let loss = f(&self.pooled, &self.labels, &mut self.pooled_grad);
        for (slope, image) in self.pooled_grad.chunks_exact(channels).zip(grad.chunks_exact_mut(pixels * channels)) {
            for row in image.chunks_exact_mut(channels) {
                row.iter_mut().zip(slope).for_each(|(g, m)| *g += m / pixels as f32);
            }
        }
        loss
    }
}
