//! A generator of features, for methods whose server teaches the clients' classifiers without data (FedGen).
//!
//! It is a small network G(y, ε) from a label and noise to features as they enter the classifier. The server trains and sends it.
//! A client draws features from it and runs its head on them: the part of its network behind the features. It knows of no
//! round and draws nothing itself but by [`draw_noise`].

use crate::config::MAX_WIDTH;
use crate::error::{Error, Result};
use fedproj_nn::{Activation, Cpu, Graph, Mode, Options, Shape, Tail, Workspace};
use fedproj_rng::Stream;
use serde::{Deserialize, Serialize};

/// Most features per step: the server compares all pairs.
const MAX_BATCH: usize = 1 << 16;

/// The name under which its parameters are sent.
pub const GENERATOR: &str = "generator";

/// The generator's network and its batches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GeneratorConfig {
    /// Dimensions of the noise ε.
    pub noise: usize,
    /// Width of the hidden layer.
    pub hidden: usize,
    /// Features per step, on a client and on the server.
    pub batch: usize,
}

impl Default for GeneratorConfig {
    /// The official code's, for MNIST.
    fn default() -> Self {
        Self { noise: 32, hidden: 256, batch: 32 }
    }
}

impl GeneratorConfig {
    /// Whether all settings are in their ranges; `key` is their table in the configuration.
    pub(crate) fn check(&self, key: &str) -> Result<()> {
        let Self { noise, hidden, batch } = *self;
        let width = format!("from 1 to {MAX_WIDTH}");
        Error::require((1..=MAX_WIDTH).contains(&noise), &format!("{key}.noise"), noise, &width)?;
        Error::require((1..=MAX_WIDTH).contains(&hidden), &format!("{key}.hidden"), hidden, &width)?;
        let batches = format!("from 1 to {MAX_BATCH}");
        Error::require((1..=MAX_BATCH).contains(&batch), &format!("{key}.batch"), batch, &batches)
    }

    /// G for clients with this network: from noise and a one-hot label to features.
    pub(crate) fn network(&self, clients: &Graph) -> Result<Graph> {
        let n_features = head_of(clients)?.graph.shape(clients.input()).len();
        let mut graph = Graph::new(Shape::vector(self.noise + clients.shape(clients.output()).len()));
        let x = graph.linear("generator.hidden", graph.input(), self.hidden, true)?;
        let x = graph.activation("generator.relu", x, Activation::Relu)?;
        graph.linear("generator.features", x, n_features, true)?;
        Ok(graph)
    }
}

/// The part of the clients' network behind its features.
pub(crate) fn head_of(clients: &Graph) -> Result<Tail> {
    let features = clients.features().ok_or_else(|| {
        Error::config(
            "a generator makes features, and this network has none: its output is not a classifier's\n\
             hint: one of `fedproj models`, or model.layers with a linear layer at its end",
        )
    })?;
    Ok(clients.tail(features)?)
}

/// Adds the noise of `n` values.
pub(crate) fn draw_noise(stream: &mut Stream, n: usize, noise: &mut Vec<f32>) {
    noise.extend((0..n).map(|_| stream.normal() as f32));
}

/// G, ready to run.
#[derive(Debug)]
pub(crate) struct Generator {
    ws: Workspace,
    n_noise: usize,
    n_classes: usize,
    input: Vec<f32>,
}

impl Generator {
    /// G for batches of up to `batch` features.
    pub fn new(how: &GeneratorConfig, clients: &Graph, batch: usize, training: bool) -> Result<Self> {
        let options = Options { batch, taps: &[], training };
        let ws = Workspace::new(&how.network(clients)?, &options, Cpu::new(1))?;
        Ok(Self { ws, n_noise: how.noise, n_classes: clients.shape(clients.output()).len(), input: Vec::new() })
    }

    /// G(y, ε), one row per label.
    pub fn features(&mut self, params: &[f32], labels: &[u32], noise: &[f32]) -> Result<&[f32]> {
        self.input.clear();
        for (label, noise) in labels.iter().zip(noise.chunks_exact(self.n_noise)) {
            self.input.extend_from_slice(noise);
            self.input.extend((0..self.n_classes).map(|class| f32::from(u8::from(class == *label as usize))));
        }
        self.ws.forward(params, &mut [], &self.input, Mode::EVAL)?;
        Ok(self.ws.output())
    }

    /// The parameters' gradient, given the loss's gradient `slope` at the features of the last pass.
    pub fn pull_back(&mut self, params: &[f32], slope: &[f32], gradient: &mut [f32]) -> Result<()> {
        let output = self.ws.graph().output();
        self.ws.inject(output, |_, gradient| gradient.copy_from_slice(slope))?;
        Ok(self.ws.backward(params, gradient)?)
    }
}

/// A client's head h_k on the server, which judges features, and how much it weighs per class.
#[derive(Debug)]
pub(crate) struct Judge {
    ws: Workspace,
    params: Vec<f32>,
    buffers: Vec<f32>,
    shares: Vec<f32>,
    /// The gradient of the parameters, which stay.
    unused: Vec<f32>,
}

impl Judge {
    /// The head of a client's weights and buffers.
    pub fn new(tail: &Tail, batch: usize, [weights, own_buffers]: &[Vec<f32>; 2], shares: Vec<f32>) -> Result<Self> {
        let options = Options { batch, taps: &[tail.graph.input()], training: true };
        let ws = Workspace::new(&tail.graph, &options, Cpu::new(1))?;
        let (mut params, mut buffers) = (vec![0.0; tail.graph.params().len()], tail.graph.init_buffers());
        tail.take_params(weights, &mut params);
        tail.take_buffers(own_buffers, &mut buffers);
        Ok(Self { ws, unused: params.clone(), params, buffers, shares })
    }

    /// Adds the gradient of the mean of a_k(y) CE(h_k(z), y) along z.
    pub fn add_slope(&mut self, z: &[f32], labels: &[u32], slope: &mut [f32]) -> Result<()> {
        let Self { ws, params, buffers, shares, unused } = self;
        let ([input, output], n) = ([ws.graph().input(), ws.graph().output()], labels.len() as f32);
        ws.forward(params, buffers, z, Mode::EVAL)?;
        ws.inject(output, |logits, gradient| {
            let rows = logits.chunks_exact(shares.len()).zip(gradient.chunks_exact_mut(shares.len()));
            for ((logits, gradient), label) in rows.zip(labels) {
                let weight = shares[*label as usize] / n;
                let most = logits.iter().fold(f32::NEG_INFINITY, |most, z| most.max(*z));
                let total: f32 = logits.iter().map(|z| (z - most).exp()).sum();
                gradient.iter_mut().zip(logits).for_each(|(g, z)| *g += weight * (z - most).exp() / total);
                gradient[*label as usize] -= weight;
            }
        })?;
        ws.backward(params, unused)?;
        slope.iter_mut().zip(ws.gradient(input)?).for_each(|(slope, along)| *slope += along);
        Ok(())
    }
}

/// The gradient of weight · exp(−mean_ij ‖ε_i − ε_j‖² |z_i − z_j|) along z, with both distances as means over dimensions.
pub(crate) fn closeness_slope(z: &[f32], noise: &[f32], n: usize, weight: f32) -> Vec<f32> {
    let (width, n_noise) = (z.len() / n, noise.len() / n);
    let row = |i: usize| &z[i * width..][..width];
    let apart = |i: usize, j: usize| {
        let pairs = noise[i * n_noise..][..n_noise].iter().zip(&noise[j * n_noise..][..n_noise]);
        pairs.map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / n_noise as f64
    };
    let (mut mean, mut slope) = (0.0, vec![0.0; z.len()]);
    for i in 0..n {
        for j in (0..n).filter(|j| *j != i) {
            // A pair counts twice, once from each side.
            let share = apart(i, j) / (n * n * width) as f64;
            for (d, (a, b)) in row(i).iter().zip(row(j)).enumerate() {
                let gap = a - b;
                mean += share * f64::from(gap.abs());
                slope[i * width + d] += 2.0 * share * f64::from(if gap == 0.0 { 0.0 } else { gap.signum() });
            }
        }
    }
    let factor = -f64::from(weight) * (-mean).exp();
    slope.into_iter().map(|along| (factor * along) as f32).collect()
}
