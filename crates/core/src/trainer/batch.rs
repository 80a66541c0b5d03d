//! Batches with their targets, and the terms of an objective on them.

use crate::augment;
use crate::error::Result;
use crate::memory::TargetTables;
use crate::step::Term;
use fedproj_data::{Dataset, gather_rows};
use fedproj_nn::{LossTargets, NormMode, Workspace};

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
    /// The image that is moved.
    image: Vec<f32>,
    indices: Vec<u32>,
    labels: Vec<u32>,
    logits: Vec<f32>,
    features: Vec<f32>,
    marks: Vec<bool>,
    /// Offsets of the classes, for all batches of a client.
    pub offsets: Vec<f32>,
    /// Embeddings of the batch, by place.
    embedded: Vec<Vec<f32>>,
}

impl Gathered {
    /// Gathers samples and their targets. `moves`: how each image is moved; empty if none is.
    pub fn gather(&mut self, feed: &Feed<'_>, samples: impl Iterator<Item = u32>, moves: &[u32]) {
        let (n, targets) = (feed.data.n_samples(), &feed.targets);
        self.indices.clear();
        self.indices.extend(samples);
        self.x.resize(self.indices.len() * feed.data.sample_len(), 0.0);
        feed.data.gather(&self.indices, &mut self.x);
        for (image, drawn) in self.x.chunks_exact_mut(feed.data.sample_len()).zip(moves) {
            augment::apply(image, feed.data.shape(), *drawn, &mut self.image);
        }
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

    /// The batch's labels.
    pub fn labels(&self) -> &[u32] {
        &self.labels
    }

    /// The labels of a batch that was not gathered.
    pub fn set_labels(&mut self, labels: &[u32]) {
        self.labels.clear();
        self.labels.extend_from_slice(labels);
    }

    /// The teacher's logits for the batch.
    pub fn set_logits(&mut self, logits: &[f32]) {
        self.logits.clear();
        self.logits.extend_from_slice(logits);
    }

    /// Room for an embedding of the batch.
    pub fn embedded(&mut self, index: usize) -> &mut Vec<f32> {
        if self.embedded.len() <= index {
            self.embedded.resize(index + 1, Vec::new());
        }
        &mut self.embedded[index]
    }

    /// Adds a term's gradient at its nodes, after a forward pass on the batch; returns its value, weighted.
    pub fn add_term(&self, ws: &mut Workspace, term: &Term) -> Result<f64> {
        let Self { labels, logits, features, marks, offsets, embedded: embeddings, .. } = self;
        let loss = (term.loss, LossTargets { labels, logits, features, marks, offsets, embeddings });
        let n = term.at.n_nodes(ws.graph());
        let mut total = 0.0;
        for index in 0..n {
            let Some(node) = term.at.node(ws.graph(), index) else { break };
            total += ws.add_loss(node, &loss, term.weight / n as f32)?;
        }
        Ok(f64::from(term.weight) * (total / n.max(1) as f64))
    }
}
