//! Whole networks, several steps: the GPU beside the CPU.

use crate::Suite;
use crate::backends::{random, random_labels, random_weights};
use crate::compare::{Group, difference};
use anyhow::Result;
use fedproj_nn::cuda::{At, Batches, Cohort, Data, Gpu, LossTerm, Moments, Target, Vectors};
use fedproj_nn::models::{self, Variant};
use fedproj_nn::{Cpu, Dropout, Graph, Loss, Mode, NormMode, Optimizer, Options, Rule, Shape, Workspace};
use std::sync::Arc;

const TOLERANCE_ONE_STEP: f64 = 1e-4;
/// Rounding errors grow from step to step.
const TOLERANCE_TEN_STEPS: f64 = 1e-3;
/// With this rate two instruction sets of the CPU are within 5e-5 of each other after ten steps; with 0.05, weights that
/// begin as zeros and data that are noise, they differ by 4e-2, and nothing could be told from a comparison.
const LR: f32 = 0.01;
/// What is left of a difference of two nearly equal weights. Of a network's millions of values a few lie so near a kink of a
/// ReLU or a pool that rounding decides on which side, and each such value changes the gradient: measured on an H200 against
/// Winograd convolutions, up to 1.6e-3. A wrong term of a gradient shows as 1e-1 or more.
const TOLERANCE_MOVEMENT: f64 = 1e-2;
const BATCH: usize = 64;
const LANES: usize = 2;

pub fn check(suite: &Suite, group: &mut Group) -> Result<()> {
    let shape = Shape::image(32, 32, 3);
    for name in ["cnn", "resnet8-thin", "resnet8"] {
        let graph = models::build(name, shape, 10, Variant::default())?;
        let (x, labels) = batch(shape);
        ten_steps(suite, group, name, &graph, (&x, &labels))?;
    }
    Ok(())
}

/// Ten steps on the same batch beside the CPU's.
pub fn ten_steps(
    suite: &Suite,
    group: &mut Group,
    name: &str,
    graph: &Graph,
    (x, labels): (&[f32], &[u32]),
) -> Result<()> {
    let rule = Rule::sgd(LR);
    let start = |lane: usize| (random_weights(graph, lane as u32), graph.init_buffers());
    let starts: Vec<_> = (0..LANES).map(start).collect();
    let init: Vec<Vec<f32>> = starts.iter().map(|(params, _)| params.clone()).collect();
    let mut training = Training::new(suite.gpu()?, graph, &rule, (x, labels), &starts)?;
    let mut reference: Vec<Reference> =
        starts.into_iter().map(|start| Reference::new(graph, rule, labels.len(), start)).collect::<Result<_>>()?;
    for step in 1..=10 {
        training.step()?;
        for (lane, reference) in reference.iter_mut().enumerate() {
            reference.step(x, labels)?;
            let tolerance = match step {
                1 => TOLERANCE_ONE_STEP,
                10 => TOLERANCE_TEN_STEPS,
                _ => continue,
            };
            let what = format!("{name}, lane {lane}, step {step}:");
            let (found, expected) = (training.weights(lane)?, &reference.params);
            group.compare_tensors(&what, graph.params(), &found, expected, tolerance);
            let (found, expected) = (difference(&found, &init[lane]), difference(expected, &init[lane]));
            group.compare(&format!("{what} movement"), &found, &expected, TOLERANCE_MOVEMENT);
            let (found, expected) = (training.buffers(lane)?, &reference.buffers);
            group.compare_tensors(&what, graph.buffers(), &found, expected, tolerance);
        }
    }
    Ok(())
}

/// Ten patterns with noise: something to learn, so that gradients are more than the noise of their batch.
fn batch(shape: Shape) -> (Vec<f32>, Vec<u32>) {
    let labels = random_labels(101, BATCH, 10);
    let (patterns, noise) = (random(102, 10 * shape.len()), random(100, BATCH * shape.len()));
    let pattern = |i: usize| patterns[labels[i / shape.len()] as usize * shape.len() + i % shape.len()];
    let x = noise.iter().enumerate().map(|(i, v)| 0.5 * v + pattern(i)).collect();
    (x, labels)
}

/// The CPU's side.
struct Reference {
    ws: Workspace,
    optimizer: Optimizer,
    params: Vec<f32>,
    buffers: Vec<f32>,
}

impl Reference {
    fn new(graph: &Graph, rule: Rule, batch: usize, (params, buffers): (Vec<f32>, Vec<f32>)) -> Result<Self> {
        let cpu = Cpu::new(std::thread::available_parallelism().map_or(1, usize::from));
        let ws = Workspace::new(graph, &Options::training(batch), cpu)?;
        Ok(Self { ws, optimizer: Optimizer::new(rule, params.len())?, params, buffers })
    }

    fn step(&mut self, x: &[f32], labels: &[u32]) -> Result<()> {
        let mut grad = vec![0.0; self.params.len()];
        let (loss, mode) = (Loss::CrossEntropy { labels }, Mode { norm: NormMode::Update, dropout: Dropout::Off });
        self.ws.loss_gradient(&self.params, &mut self.buffers, x, &loss, mode, &mut grad)?;
        self.optimizer.step(self.ws.cpu(), &mut self.params, &grad, 1.0);
        Ok(())
    }
}

/// Networks that take the same batch again and again, without dropout; steps are recorded and replayed.
pub struct Training {
    cohort: Cohort,
    data: Data,
    rule: Rule,
    moments: Moments,
    theta: Vectors,
    buffers: Vectors,
    gradient: Vectors,
    batch: usize,
}

impl Training {
    /// `start`: weights and running statistics of each lane.
    pub fn new(
        gpu: &Arc<Gpu>,
        graph: &Graph,
        rule: &Rule,
        (x, labels): (&[f32], &[u32]),
        start: &[(Vec<f32>, Vec<f32>)],
    ) -> Result<Self> {
        let batch = labels.len();
        let options = Options { batch, taps: &[], training: true };
        let mut cohort = Cohort::new(gpu, graph, start.len(), &options)?;
        let mut data = Data::matrix(gpu, x, graph.shape(graph.input()).len())?;
        data.set_labels(gpu, labels)?;
        let mut theta = cohort.vectors(graph.params().len())?;
        let mut buffers = cohort.vectors(graph.buffers().len())?;
        for (lane, (params, statistics)) in start.iter().enumerate() {
            cohort.write(&mut theta, lane, params)?;
            cohort.write(&mut buffers, lane, statistics)?;
        }
        cohort.set_table(Batches::Private, &vec![(0..batch as u32).collect(); start.len()], batch)?;
        cohort.set_table(Batches::LrFactors, &vec![vec![1.0f32.to_bits()]; start.len()], 1)?;
        Ok(Self {
            moments: cohort.moments(rule)?,
            gradient: cohort.vectors(graph.params().len())?,
            cohort,
            data,
            rule: *rule,
            theta,
            buffers,
            batch,
        })
    }

    /// A forward pass alone.
    pub fn forward(&mut self, mode: Mode) -> Result<()> {
        self.cohort.gather(&self.data, Batches::Private, 0, false)?;
        Ok(self.cohort.forward(self.theta.rows(), self.buffers.rows(), mode)?)
    }

    pub fn step(&mut self) -> Result<()> {
        if self.cohort.replay(0)? {
            return Ok(());
        }
        let recording = self.cohort.begin_recording(0)?;
        let done = self.launch_step();
        self.cohort.end_recording(recording)?;
        done
    }

    fn launch_step(&mut self) -> Result<()> {
        self.forward(Mode { norm: NormMode::Update, dropout: Dropout::Off })?;
        let (output, theta) = (self.cohort.graph().output(), self.theta.rows());
        self.cohort.add_loss(output, &LossTerm::CrossEntropy, Target::Logits, 1.0, true)?;
        self.cohort.record_loss(At::Private)?;
        self.cohort.backward(theta, self.gradient.rows())?;
        Ok(self.cohort.update(&self.rule, &self.moments, theta, self.gradient.rows())?)
    }

    pub fn logits(&self, lane: usize) -> Result<Vec<f32>> {
        Ok(self.cohort.read_value(self.cohort.graph().output(), lane, self.batch)?)
    }

    pub fn loss_total(&self, lane: usize) -> Result<f64> {
        Ok(self.cohort.stats()?[lane].loss_total)
    }

    pub fn gradient(&self, lane: usize) -> Result<Vec<f32>> {
        Ok(self.cohort.read(&self.gradient, lane)?)
    }

    pub fn weights(&self, lane: usize) -> Result<Vec<f32>> {
        Ok(self.cohort.read(&self.theta, lane)?)
    }

    pub fn buffers(&self, lane: usize) -> Result<Vec<f32>> {
        Ok(self.cohort.read(&self.buffers, lane)?)
    }
}
