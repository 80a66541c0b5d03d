//! One forward and backward pass of several networks: on the CPU in turn, on a GPU side by side.

use crate::compare::Group;
use crate::nets::Net;
use anyhow::Result;
use fedproj_nn::cuda::{Batches, Data, Fleet, Gpu, LossOf, NOBODY, Target, Vectors};
use fedproj_nn::{Cpu, Dropout, Graph, Init, Isa, Loss, LossTargets, Mode, NormMode, Options, Workspace};
use fedproj_rng::{Purpose, Stream};
use std::sync::Arc;

/// Weight of the squared distance at each tap.
const TAP_WEIGHT: f32 = 0.1;

/// Normal numbers, the same for the same `id`.
pub fn random(id: u32, len: usize) -> Vec<f32> {
    let mut stream = Stream::new(5, Purpose::Synthetic, [id, 0, 0]);
    (0..len).map(|_| stream.normal() as f32).collect()
}

/// Labels of `classes` classes.
pub fn random_labels(id: u32, len: usize, classes: usize) -> Vec<u32> {
    let mut stream = Stream::new(5, Purpose::Synthetic, [id, 1, 0]);
    (0..len).map(|_| stream.below(classes as u32)).collect()
}

/// Texts of up to `slots` tokens, from so many words and types. The first ones are full, of one token, and empty. With two
/// types the texts are pairs.
pub fn random_texts(id: u32, len: usize, slots: usize, (words, types): (u32, u32)) -> Vec<f32> {
    let mut stream = Stream::new(5, Purpose::Synthetic, [id, 2, 0]);
    let mut x = vec![0.0; len * slots];
    for (i, text) in x.chunks_exact_mut(slots).enumerate() {
        let n = [slots, 1, 0].get(i / 2).copied().unwrap_or_else(|| 1 + stream.below(slots as u32) as usize);
        let second = stream.below(n as u32 + 1) as usize;
        for (at, slot) in text[..n].iter_mut().enumerate() {
            let kind = u32::from(types == 2 && at >= second);
            *slot = (1 + 2 * stream.below(words) + kind) as f32;
        }
    }
    x
}

/// Weights in which no tensor is constant.
pub fn random_weights(graph: &Graph, id: u32) -> Vec<f32> {
    let noise = random(1000 + id, graph.params().len());
    graph.init_params(u64::from(id), Init::Torch).iter().zip(noise).map(|(w, n)| w + 0.05 * n).collect()
}

/// Running statistics that differ from channel to channel; variances stay positive.
pub fn random_buffers(graph: &Graph, id: u32) -> Vec<f32> {
    let noise = random(2000 + id, graph.buffers().len());
    graph.init_buffers().iter().zip(noise).map(|(b, n)| b + 0.2 * n.abs()).collect()
}

/// The start of one network: weights, running statistics, the indices of its samples, and its dropout key.
#[derive(Clone)]
pub struct Start {
    pub params: Vec<f32>,
    pub buffers: Vec<f32>,
    pub samples: Vec<u32>,
    pub key: u64,
}

impl Start {
    /// Its samples, filled up to a batch.
    fn padded(&self, batch: usize) -> Vec<u32> {
        let mut samples = self.samples.clone();
        samples.resize(batch, NOBODY);
        samples
    }
}

/// Samples that all networks draw from.
pub struct Samples {
    pub x: Vec<f32>,
    pub labels: Vec<u32>,
    /// Targets at each tap, one row per sample.
    pub targets: Vec<Vec<f32>>,
}

/// The results of a pass.
pub struct Passed {
    pub logits: Vec<f32>,
    pub loss: f64,
    pub gradient: Vec<f32>,
    pub buffers: Vec<f32>,
    /// Gradients at the taps.
    pub taps: Vec<Vec<f32>>,
}

impl Passed {
    /// Logits, and gradients of parameters and at taps.
    pub fn compare(&self, group: &mut Group, what: &str, net: &Net, expected: &Self, tolerance: f64) {
        group.compare(&format!("{what} logits"), &self.logits, &expected.logits, tolerance);
        let (place, params) = (format!("{what} gradient of"), net.graph.params());
        group.compare_tensors(&place, params, &self.gradient, &expected.gradient, tolerance);
        for ((tap, found), expected) in net.taps.iter().zip(&self.taps).zip(&expected.taps) {
            let place = format!("{what} gradient at {}", net.graph.name(*tap));
            group.compare(&place, found, expected, tolerance);
        }
    }
}

impl Samples {
    pub fn new(net: &Net, n: usize) -> Self {
        let g = &net.graph;
        // Positive, since rounding near 0 would turn masks on or off; small, so that the other loss stays visible beside it.
        let target = |(i, tap): (usize, &fedproj_nn::NodeId)| {
            random(10 + i as u32, n * g.shape(*tap).len()).into_iter().map(|t| 0.1 * t.abs()).collect()
        };
        let slots = g.shape(g.input()).len();
        Self {
            x: net.words.map_or_else(|| random(1, n * slots), |words| random_texts(1, n, slots, words)),
            labels: random_labels(2, n, g.shape(g.output()).len()),
            targets: net.taps.iter().enumerate().map(target).collect(),
        }
    }

    fn rows(matrix: &[f32], n: usize, chosen: &[u32]) -> Vec<f32> {
        let mut rows = Vec::new();
        fedproj_data::gather_rows(matrix, n, chosen, &mut rows);
        rows
    }
}

/// Where networks are computed.
pub enum Backend {
    /// The instruction set and the number of threads.
    Cpu(Isa, usize),
    Gpu(Arc<Gpu>),
}

impl Backend {
    /// The fastest instruction set of this CPU.
    pub fn cpu(n_threads: usize) -> Self {
        Self::Cpu(Isa::detect(), n_threads)
    }

    /// The prefix of names of comparisons; a suite has one GPU, so it needs none.
    pub fn prefix(&self) -> String {
        match self {
            Self::Cpu(isa, _) => format!("{isa:?}: "),
            Self::Gpu(_) => String::new(),
        }
    }

    /// A pass of each network, with dropout.
    pub fn pass(&self, net: &Net, samples: &Samples, starts: &[Start], norm: NormMode) -> Result<Vec<Passed>> {
        match self {
            Self::Cpu(isa, n_threads) => {
                let pass = |start| cpu_pass(Cpu::with_isa(*n_threads, *isa), net, samples, start, norm);
                starts.iter().map(pass).collect()
            }
            Self::Gpu(gpu) => gpu_pass(gpu, net, samples, starts, norm),
        }
    }
}

/// On the CPU. Short batches are not padded.
fn cpu_pass(cpu: Cpu, net: &Net, samples: &Samples, start: &Start, norm: NormMode) -> Result<Passed> {
    let (g, n) = (&net.graph, samples.labels.len());
    let options = Options { batch: net.batch, taps: &net.taps, training: true };
    let mut ws = Workspace::new(g, &options, cpu)?;
    let mut buffers = start.buffers.clone();
    let x = Samples::rows(&samples.x, n, &start.samples);
    let labels: Vec<u32> = start.samples.iter().map(|&i| samples.labels[i as usize]).collect();
    ws.forward(&start.params, &mut buffers, &x, Mode { norm, dropout: Dropout::Key(start.key) })?;
    let mut loss = ws.add_loss(g.output(), &(Loss::CrossEntropy, LossTargets::labels(&labels)), 1.0)?;
    for (tap, target) in net.taps.iter().zip(&samples.targets).filter(|(tap, _)| !g.has_tokens(**tap)) {
        let target = Samples::rows(target, n, &start.samples);
        loss += f64::from(TAP_WEIGHT)
            * ws.add_loss(*tap, &(Loss::MaskedSquares, LossTargets::features(&target)), TAP_WEIGHT)?;
    }
    let mut gradient = vec![f32::NAN; g.params().len()];
    ws.backward(&start.params, &mut gradient)?;
    let taps = net.taps.iter().map(|tap| ws.gradient(*tap).map(<[f32]>::to_vec)).collect::<Result<_, _>>()?;
    Ok(Passed { logits: ws.output().to_vec(), loss, gradient, buffers, taps })
}

/// The weights and buffers of each lane, on the GPU.
fn networks(fleet: &Fleet, starts: &[Start]) -> Result<(Vectors, Vectors)> {
    let g = fleet.graph();
    let (mut theta, mut buffers) = (fleet.vectors(g.params().len())?, fleet.vectors(g.buffers().len())?);
    for (lane, start) in starts.iter().enumerate() {
        fleet.write(&mut theta, lane, &start.params)?;
        fleet.write(&mut buffers, lane, &start.buffers)?;
    }
    Ok((theta, buffers))
}

/// The logits on the GPU, from a fleet that does not train.
pub fn gpu_evaluation(gpu: &Arc<Gpu>, net: &Net, samples: &Samples, starts: &[Start]) -> Result<Vec<Vec<f32>>> {
    let g = &net.graph;
    let options = Options { batch: net.batch, taps: &[], training: false };
    let mut fleet = Fleet::new(gpu, g, starts.len(), &options)?;
    let data = Data::matrix(gpu, &samples.x, g.shape(g.input()).len())?;
    let (theta, buffers) = networks(&fleet, starts)?;
    let batches: Vec<_> = starts.iter().map(|start| start.padded(net.batch)).collect();
    fleet.set_table(Batches::Samples, &batches, net.batch)?;
    fleet.gather(&data, Batches::Samples, 0, false)?;
    fleet.forward(theta.rows(), buffers.rows(), Mode::EVAL)?;
    let logits = |(lane, start): (usize, &Start)| Ok(fleet.read_value(g.output(), lane, start.samples.len())?);
    starts.iter().enumerate().map(logits).collect()
}

/// On the GPU: all networks at once. Short batches are padded.
pub fn gpu_pass(gpu: &Arc<Gpu>, net: &Net, samples: &Samples, starts: &[Start], norm: NormMode) -> Result<Vec<Passed>> {
    let (g, n) = (&net.graph, samples.labels.len());
    let options = Options { batch: net.batch, taps: &net.taps, training: true };
    let mut fleet = Fleet::new(gpu, g, starts.len(), &options)?;
    let mut data = Data::matrix(gpu, &samples.x, g.shape(g.input()).len())?;
    data.set_labels(gpu, &samples.labels)?;
    let (theta, buffers) = networks(&fleet, starts)?;
    let mut gradient = fleet.vectors(g.params().len())?;
    for lane in 0..starts.len() {
        fleet.write(&mut gradient, lane, &vec![f32::NAN; g.params().len()])?;
    }
    // A second batch repeats the first sample, which is of full length if samples are texts.
    let batches = starts.iter().map(|start| {
        let mut batch = start.padded(net.batch);
        batch.resize(2 * net.batch, 0);
        batch
    });
    fleet.set_table(Batches::Samples, &batches.collect::<Vec<_>>(), net.batch)?;
    let keys = starts.iter().map(|start| vec![start.key as u32, (start.key >> 32) as u32]);
    fleet.set_table(Batches::DropoutKeys, &keys.collect::<Vec<_>>(), 2)?;
    // It runs first; nothing of it may show in the next pass.
    fleet.gather(&data, Batches::Samples, 1, false)?;
    fleet.forward(theta.rows(), buffers.rows(), Mode { norm: NormMode::Frozen, dropout: Dropout::Off })?;
    fleet.add_loss(g.output(), &Loss::CrossEntropy, 1.0, true)?;
    fleet.backward(theta.rows(), gradient.rows())?;
    fleet.gather(&data, Batches::Samples, 0, false)?;
    fleet.forward(theta.rows(), buffers.rows(), Mode { norm, dropout: Dropout::OfStep })?;
    fleet.add_loss(g.output(), &Loss::CrossEntropy, 1.0, true)?;
    for (tap, target) in net.taps.iter().zip(&samples.targets).filter(|(tap, _)| !g.has_tokens(**tap)) {
        let target = Data::matrix(gpu, target, target.len() / n)?;
        fleet.gather_target(&target, Batches::Samples, 0, Target::Features, false)?;
        fleet.add_loss(*tap, &Loss::MaskedSquares, TAP_WEIGHT, false)?;
        gpu.synchronize()?;
    }
    fleet.record_loss(LossOf::Samples)?;
    fleet.backward(theta.rows(), gradient.rows())?;
    let stats = fleet.stats()?;
    let passed = |(lane, start): (usize, &Start)| {
        let n_valid = start.samples.len();
        let taps = net.taps.iter().map(|tap| fleet.read_gradient(*tap, lane, n_valid)).collect::<Result<_, _>>()?;
        Ok(Passed {
            logits: fleet.read_value(g.output(), lane, n_valid)?,
            loss: stats[lane].loss_total,
            gradient: fleet.read(&gradient, lane)?,
            buffers: fleet.read(&buffers, lane)?,
            taps,
        })
    };
    starts.iter().enumerate().map(passed).collect()
}
