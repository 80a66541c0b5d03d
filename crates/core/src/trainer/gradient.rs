//! Gradients and losses of a client's batches, and embeddings of its samples.

use super::{Trainer, VectorId, buffers_name};
use crate::error::Result;
use crate::memory::{Cursor, MemoryConfig, MemoryTarget};
use crate::step::{Place, Term};
use crate::terms;
use fedproj_nn::{Cpu, Dropout, Loss, Mode, NodeId, NormMode, Options, Workspace};
use fedproj_rng::{Purpose, Stream};

impl Trainer {
    /// A dropout key of this step's own.
    pub(super) fn dropout_key(place: Place) -> u64 {
        Stream::new(place.seed, Purpose::Dropout, [place.round, place.client, place.step]).next_u64()
    }

    pub(super) fn gather_private(&mut self) {
        let data = &self.experiment.private;
        self.indices.clear();
        self.indices.extend(self.positions.iter().map(|&p| self.samples[p as usize]));
        self.x.resize(self.indices.len() * data.sample_len(), 0.0);
        data.gather(&self.indices, &mut self.x);
        let labels = data.labels().unwrap_or(&[]);
        self.labels.clear();
        self.labels.extend(self.indices.iter().map(|&i| labels[i as usize]));
    }

    pub(super) fn gather_memory(&mut self) {
        let (Some(cursor), Some((memory, targets)), Some(public)) =
            (&mut self.cursor, &self.download.memory, &self.experiment.public)
        else {
            return;
        };
        cursor.next(memory, &mut self.indices);
        self.x.resize(self.indices.len() * public.sample_len(), 0.0);
        public.gather(&self.indices, &mut self.x);
        if let Some(labels) = public.labels() {
            self.labels.clear();
            self.labels.extend(self.indices.iter().map(|&i| labels[i as usize]));
        }
        gather_rows(&targets.logits, public.n_samples(), &self.indices, &mut self.target_logits);
        gather_rows(&targets.features, public.n_samples(), &self.indices, &mut self.target_features);
        if self.truncates_memory {
            self.x.iter_mut().chain(&mut self.target_logits).for_each(|v| *v = v.trunc());
        }
    }

    pub(super) fn add_term(&mut self, term: &Term) -> Result<f64> {
        let output = self.ws.graph().output();
        match *term {
            Term::CrossEntropy => Ok(self.ws.add_loss(output, &Loss::CrossEntropy { labels: &self.labels }, 1.0)?),
            Term::MemoryKl { temperature } => {
                Ok(self.ws.add_loss(output, &Loss::kl(&self.target_logits, temperature), 1.0)?)
            }
            Term::MemoryFeatures { weight } => {
                let Some(node) = self.ws.graph().features() else { return Ok(0.0) };
                let dim = self.ws.graph().shape(node).len();
                let target = &self.target_features;
                let loss = self.ws.inject(node, |f, grad| terms::masked_squares(dim, f, target, weight, grad))?;
                Ok(f64::from(weight) * loss)
            }
            Term::ModelContrast { node, positive, negative, temperature, weight } => {
                let dim = self.ws.graph().shape(node).len();
                let (p, q) = (&self.embedded[positive.0], &self.embedded[negative.0]);
                let contrast = |z: &[f32], g: &mut [f32]| terms::model_contrast(dim, z, p, q, temperature, weight, g);
                Ok(f64::from(weight) * self.ws.inject(node, contrast)?)
            }
            Term::RelaxedContrast(constants) => {
                let levels = self.ws.graph().levels().to_vec();
                let mut total = 0.0;
                for &node in &levels {
                    let shape = self.ws.graph().shape(node);
                    let (labels, scale) = (&self.labels, 1.0 / levels.len() as f32);
                    total += self.ws.inject(node, |value, grad| {
                        pooled(shape.pixels(), shape.c, value, grad, |f, g| {
                            terms::relaxed_contrast(&constants, shape.c, f, labels, scale, g)
                        })
                    })?;
                }
                Ok(total / levels.len().max(1) as f64)
            }
        }
    }

    /// Memory loss on the client's first memory batch, as it is before its first step.
    pub(super) fn first_memory_loss(&mut self, place: Place) -> Result<f64> {
        let (Some(config), Some((memory, _))) = (self.memory_config.clone(), &self.download.memory) else {
            return Ok(0.0);
        };
        self.cursor = Some(Cursor::new(place.seed, place.round, place.client, memory.len(), config.batch));
        self.gather_memory();
        self.loss_of_gathered(VectorId::Weights, &config)
    }

    /// Memory loss of some weights on the gathered memory batch; batch-norm as in the gradient, without moving averages.
    pub(super) fn loss_of_gathered(&mut self, weights: VectorId, config: &MemoryConfig) -> Result<f64> {
        let norm = match config.bn.mode() {
            NormMode::Update => NormMode::Batch,
            other => other,
        };
        let (params, buffers) = match weights {
            VectorId::RoundStart => (&self.download.weights[..], &self.download.buffers),
            _ => (&self.theta[..], &self.buffers),
        };
        let mut buffers = buffers.clone();
        self.ws.forward(params, &mut buffers, &self.x, Mode { norm, dropout: Dropout::Off })?;
        let target = match config.target {
            MemoryTarget::Labels => Loss::CrossEntropy { labels: &self.labels },
            MemoryTarget::Ensemble | MemoryTarget::GlobalModel => Loss::kl(&self.target_logits, config.temperature),
        };
        let mut loss = target.value(self.indices.len(), self.ws.output())?;
        if let Some(node) = self.ws.graph().features().filter(|_| config.feature_weight > 0.0) {
            let (dim, features) = (self.ws.graph().shape(node).len(), self.ws.value(node)?);
            let mut unused = vec![0.0; features.len()];
            let squares = terms::masked_squares(dim, features, &self.target_features, 0.0, &mut unused);
            loss += f64::from(config.feature_weight) * squares;
        }
        Ok(loss)
    }

    /// A node's values for every sample of the client: the weights do not change within the round.
    pub(super) fn embed_all(&mut self, weights: VectorId, node: NodeId) -> Result<Vec<f32>> {
        let (data, batch) = (&self.experiment.private, self.experiment.config.local.batch);
        if self.embed_ws.is_none() {
            let options = Options { batch, taps: &[node], training: false };
            self.embed_ws = Some(Workspace::new(&self.experiment.graph, &options, Cpu::new(1))?);
        }
        let Some(ws) = &mut self.embed_ws else { return Ok(Vec::new()) };
        let (params, buffers) = match weights {
            VectorId::State(i) => {
                let name = buffers_name(&self.states[i].0);
                let buffers = self.states.iter().find(|(n, _)| *n == name).map(|(_, b)| b.to_vec());
                (&self.states[i].1[..], buffers)
            }
            VectorId::Weights => (&self.theta[..], Some(self.buffers.clone())),
            _ => (&self.download.weights[..], None),
        };
        let mut buffers = buffers.unwrap_or_else(|| self.download.buffers.clone());
        let mut all = Vec::new();
        let mut x = vec![0.0; batch * data.sample_len()];
        for chunk in self.samples.chunks(batch) {
            let x = &mut x[..chunk.len() * data.sample_len()];
            data.gather(chunk, x);
            ws.forward(params, &mut buffers, x, Mode::EVAL)?;
            all.extend_from_slice(ws.value(node)?);
        }
        Ok(all)
    }
}

/// The rows `indices` of a matrix with `n_rows` rows; nothing for an empty matrix.
pub(super) fn gather_rows(matrix: &[f32], n_rows: usize, indices: &[u32], out: &mut Vec<f32>) {
    let dim = matrix.len() / n_rows.max(1);
    out.clear();
    for &i in indices {
        out.extend_from_slice(&matrix[i as usize * dim..(i as usize + 1) * dim]);
    }
}

/// Calls `f(pooled values, their gradient)` on the mean over pixels, and spreads the gradient back.
fn pooled(
    pixels: usize,
    channels: usize,
    value: &[f32],
    grad: &mut [f32],
    f: impl FnOnce(&[f32], &mut [f32]) -> f64,
) -> f64 {
    if pixels == 1 {
        return f(value, grad);
    }
    let n = value.len() / (pixels * channels);
    let (mut mean, mut mean_grad) = (vec![0.0; n * channels], vec![0.0; n * channels]);
    for (mean, image) in mean.chunks_exact_mut(channels).zip(value.chunks_exact(pixels * channels)) {
        for row in image.chunks_exact(channels) {
            mean.iter_mut().zip(row).for_each(|(m, v)| *m += v / pixels as f32);
        }
    }
    let loss = f(&mean, &mut mean_grad);
    for (mean_grad, image) in mean_grad.chunks_exact(channels).zip(grad.chunks_exact_mut(pixels * channels)) {
        for row in image.chunks_exact_mut(channels) {
            row.iter_mut().zip(mean_grad).for_each(|(g, m)| *g += m / pixels as f32);
        }
    }
    loss
}
