//! The head of a client's network, on features that a generator makes: see [`crate::generator`].

use crate::error::Result;
use crate::generator::{Generator, GeneratorConfig, head_of};
use fedproj_nn::{Cpu, Dropout, Graph, Mode, NormMode, Options, Tail, Workspace};

/// The head, its copy of the weights, and the generator.
#[derive(Debug)]
pub(super) struct Head {
    tail: Tail,
    pub ws: Workspace,
    /// Features that it takes per step, and values of noise for each.
    pub batch: usize,
    pub n_noise: usize,
    generator: Generator,
    params: Vec<f32>,
    buffers: Vec<f32>,
    gradient: Vec<f32>,
}

impl Head {
    /// For batches of up to `batch` features.
    pub fn new(how: &GeneratorConfig, network: &Graph, batch: usize) -> Result<Self> {
        let tail = head_of(network)?;
        let ws = Workspace::new(&tail.graph, &Options { batch, taps: &[], training: true }, Cpu::new(1))?;
        let zeros = || vec![0.0; tail.graph.params().len()];
        let buffers = tail.graph.init_buffers();
        let generator = Generator::new(how, network, batch, false)?;
        let GeneratorConfig { batch, noise: n_noise, .. } = *how;
        Ok(Self { params: zeros(), gradient: zeros(), buffers, tail, ws, batch, n_noise, generator })
    }

    /// Runs the head of these weights on features of these labels. Running averages stay as they are.
    pub fn forward(
        &mut self,
        (weights, buffers): (&[f32], &[f32]),
        generator: &[f32],
        labels: &[u32],
        noise: &[f32],
    ) -> Result<()> {
        self.tail.take_params(weights, &mut self.params);
        self.tail.take_buffers(buffers, &mut self.buffers);
        let features = self.generator.features(generator, labels, noise)?;
        let mode = Mode { norm: NormMode::Batch, dropout: Dropout::Off };
        Ok(self.ws.forward(&self.params, &mut self.buffers, features, mode)?)
    }

    /// Writes the gradient of what was added at the head's nodes, as long as the network's parameters.
    pub fn backward(&mut self, gradient: &mut [f32]) -> Result<()> {
        self.ws.backward(&self.params, &mut self.gradient)?;
        gradient.fill(0.0);
        self.tail.place_params(&self.gradient, gradient);
        Ok(())
    }
}
