//! `fedproj bench`: how fast the engine is on this machine.

mod federation;
mod gpu;
mod text;

use crate::device::DeviceArgs;
use crate::{commands, give, say};
use anyhow::{Context, Result};
use clap::Args;
use fedproj_core::{ClientStates, Config, Device, Experiment, Seconds, ServerState, Simulation, Targets};
use fedproj_data::{Dataset, Normalisation, Partition, Samples};
use fedproj_nn::cuda::Gpu;
use fedproj_nn::models::{self, Variant};
use fedproj_nn::{Cpu, Dropout, Init, Loss, LossTargets, Mode, Optimizer, Options, Rule, Shape, Workspace};
use fedproj_rng::{Purpose, Stream};
use serde::Serialize;
use std::sync::{Arc, Barrier};
use std::time::Instant;

commands! {
    /// The kinds of measurement.
    pub enum Bench {
        /// One training step: forward, backward and Adam on synthetic 32×32 images or texts
        Step(StepArgs),
        /// One federated round on synthetic 32×32 images: local training of all clients, then fusion
        Round(Round),
        /// A real server under the load of many nodes on this machine
        Federation(federation::Load),
    }
}

/// Arguments of `bench step`.
#[derive(Args)]
pub struct StepArgs {
    /// The network (see `fedproj models`)
    #[arg(long, default_value = "resnet8")]
    model: String,
    /// Samples per step
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Threads: one client per thread, or with --shared all threads on one step
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Steps to time; the first third warms up, the median of the others counts
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// All threads share one step, as in the server's distillation
    #[arg(long)]
    shared: bool,
    /// Tokens per text, for networks that read texts
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=512))]
    length: u32,
    /// Length of the texts: all --length, or as SST-2's sentences
    #[arg(long, default_value = "full", value_parser = ["full", "sst2"])]
    lengths: String,
    /// Train without dropout
    #[arg(long)]
    no_dropout: bool,
    /// cpu, or cuda or cuda:1 for --clients networks side by side on a GPU
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: String,
    /// How a GPU multiplies matrices
    #[arg(long, default_value = "tf32", value_parser = ["fp32", "tf32", "bf16"])]
    precision: String,
    /// Clients side by side on a GPU
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1024))]
    clients: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct StepResult {
    model: String,
    batch: u32,
    threads: u32,
    shared: bool,
    isa: &'static str,
    ms_per_step: f64,
    samples_per_second: f64,
    /// Operations are counted for the plain algorithm, so a Winograd convolution may exceed the peak.
    gflops: f64,
    peak_gflops: f64,
    peak_fraction: f64,
    peak_rss_mib: Option<f64>,
}

impl StepArgs {
    fn run(self) -> Result<()> {
        let shape = if self.reads_text() { Shape::tokens(self.length as usize) } else { Shape::image(32, 32, 3) };
        let graph = models::build(&self.model, shape, 10, Variant::default())?;
        if let Some(gpu) = Device::open(&self.device, &self.precision, 1)?.gpu() {
            return self.run_on_gpu(&graph, gpu);
        }
        let (clients, team) = if self.shared { (1, self.threads) } else { (self.threads, 1) };
        let barrier = Barrier::new(clients as usize);
        let times = std::thread::scope(|scope| {
            let client = |id| {
                let (graph, barrier, args) = (&graph, &barrier, &self);
                scope.spawn(move || args.train(graph, id, team as usize, barrier))
            };
            let handles: Vec<_> = (0..clients).map(client).collect();
            let joined = handles.into_iter().map(|h| h.join().ok().context("a client's thread panicked")?);
            joined.collect::<Result<Vec<_>>>()
        })?;
        // Steps of all clients run at the same time: the slowest client's median stands for the cohort.
        let seconds = times.into_iter().fold(0.0, f64::max);
        let cpu = Cpu::new(1);
        let samples_per_second = f64::from(self.batch * clients) / seconds;
        let gflops = samples_per_second * self.flops(&graph)? / 1e9;
        let peak_gflops = cpu.measure_peak_flops() * f64::from(self.threads) / 1e9;
        let result = StepResult {
            model: self.model,
            batch: self.batch,
            threads: self.threads,
            shared: self.shared,
            isa: cpu.isa().name(),
            ms_per_step: seconds * 1e3,
            samples_per_second,
            gflops,
            peak_gflops,
            peak_fraction: gflops / peak_gflops,
            peak_rss_mib: peak_rss_mib(),
        };
        give(self.json, &result, || {
            say!("{} batch {} on {} thread(s), {}", result.model, result.batch, result.threads, result.isa);
            say!("  {:.2} ms per step, {:.0} samples/s", result.ms_per_step, result.samples_per_second);
            say!(
                "  {:.1} GFLOP/s, {:.0} % of the measured GEMM peak of {:.1} (plain operation count: Winograd may pass 100 %)",
                result.gflops,
                100.0 * result.peak_fraction,
                result.peak_gflops
            );
            if let Some(mib) = result.peak_rss_mib {
                say!("  {mib:.0} MiB peak memory");
            }
        })
    }

    fn reads_text(&self) -> bool {
        models::CATALOGUE.iter().any(|entry| entry.name == self.model && entry.reads_text)
    }

    /// Mean operations per sample and step; a text counts with its own length.
    fn flops(&self, graph: &fedproj_nn::Graph) -> Result<f64> {
        if !self.reads_text() {
            return Ok(graph.flops_training() as f64);
        }
        let mut total = 0;
        for text in 0..self.batch as usize {
            let shape = Shape::tokens(text::len(text, self.length as usize, &self.lengths));
            total += models::build(&self.model, shape, 10, Variant::default())?.flops_training();
        }
        Ok(total as f64 / f64::from(self.batch))
    }

    fn run_on_gpu(&self, graph: &fedproj_nn::Graph, gpu: &Arc<Gpu>) -> Result<()> {
        let (clients, batch) = (self.clients as usize, self.batch as usize);
        let x = self.samples(graph, &mut Stream::new(0, Purpose::Synthetic, [0, 0, 0]), clients * batch);
        let seconds = gpu::step(graph, gpu, clients, &x, self.steps as usize)?;
        let samples_per_second = f64::from(self.batch * self.clients) / seconds;
        let gflops = samples_per_second * self.flops(graph)? / 1e9;
        let (device, ms_per_step) = (gpu.name(), seconds * 1e3);
        let result = serde_json::json!({
            "model": self.model, "batch": self.batch, "clients": self.clients, "device": device,
            "precision": self.precision, "ms_per_step": ms_per_step,
            "samples_per_second": samples_per_second, "gflops": gflops,
        });
        give(self.json, &result, || {
            let (model, precision) = (&self.model, &self.precision);
            say!("{model} batch {batch}, {clients} clients side by side on {device}, {precision}");
            say!("  {ms_per_step:.3} ms per step of all, {samples_per_second:.0} samples/s, {gflops:.0} GFLOP/s");
        })
    }

    /// Synthetic samples.
    fn samples(&self, graph: &fedproj_nn::Graph, stream: &mut Stream, n: usize) -> Vec<f32> {
        let input = graph.shape(graph.input());
        if self.reads_text() {
            return text::batch(stream, n, input.w, &self.lengths);
        }
        (0..n * input.len()).map(|_| stream.normal() as f32).collect()
    }

    /// Trains one client and returns the median seconds of a step.
    fn train(&self, graph: &fedproj_nn::Graph, id: u32, team: usize, barrier: &Barrier) -> Result<f64> {
        let mut stream = Stream::new(0, Purpose::Synthetic, [id, 0, 0]);
        let n = self.batch as usize;
        let x = self.samples(graph, &mut stream, n);
        let labels: Vec<u32> = (0..n).map(|_| stream.below(10)).collect();
        let mut params = graph.init_params(0, Init::Torch);
        let mut buffers = graph.init_buffers();
        let mut grad = vec![0.0; params.len()];
        let mut adam = Optimizer::new(Rule::adam(1e-3), params.len())?;
        let mut ws = Workspace::new(graph, &Options::training(n), Cpu::new(team))?;
        let mut times = Vec::with_capacity(self.steps as usize);
        for step in 0..self.steps {
            barrier.wait();
            let start = Instant::now();
            let loss = (Loss::CrossEntropy, LossTargets::labels(&labels));
            let dropout = if self.no_dropout { Dropout::Off } else { Dropout::Key(u64::from(step)) };
            let mode = Mode { dropout, ..Mode::train(0) };
            ws.loss_gradient(&params, &mut buffers, &x, &loss, mode, &mut grad)?;
            adam.step(ws.cpu(), &mut params, &grad, 1.0);
            times.push(start.elapsed().as_secs_f64());
        }
        let timed = &mut times[self.steps as usize / 3..];
        timed.sort_by(f64::total_cmp);
        Ok(timed[timed.len() / 2])
    }
}

/// Arguments of `bench round`.
#[derive(Args)]
pub struct Round {
    /// The method (see `fedproj methods`)
    #[arg(long, default_value = "fedproj")]
    method: String,
    /// The network (see `fedproj models`)
    #[arg(long, default_value = "resnet8")]
    model: String,
    /// Clients; all of them take part
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    clients: u32,
    /// Samples per client
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..))]
    samples: u32,
    /// Local epochs
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Samples per local step
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Samples of the public set
    #[arg(long, default_value_t = 60_000, value_parser = clap::value_parser!(u32).range(1..))]
    public: u32,
    /// The local optimiser: adam (1e-3, weight decay 5e-5) or sgd (0.1)
    #[arg(long, default_value = "adam", value_parser = ["adam", "sgd"])]
    optimizer: String,
    #[command(flatten)]
    device: DeviceArgs,
    /// Rounds to time; the median counts
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Round {
    fn run(self) -> Result<()> {
        let optimizer = match self.optimizer.as_str() {
            "sgd" => "local.optimizer={kind='sgd', lr=0.1, weight_decay=0.0}",
            _ => "local.optimizer={kind='adam', lr=1e-3, weight_decay=5e-5}",
        };
        // Timing starts at round 1, so that clients project.
        let overrides = [
            format!("method.name={}", self.method),
            format!("model.name={}", self.model),
            format!("federation.rounds={}", self.rounds + 1),
            format!("local.epochs={}", self.epochs),
            format!("local.batch={}", self.batch),
            "federation.fraction=1.0".into(),
            "method.fedproj.projection.warmup=1".into(),
            optimizer.into(),
        ];
        let config = Config::from_layers(None, &overrides)?;
        let method = config.method.build()?;
        let n_private = self.clients * self.samples;
        let n_public = if method.needs_public() { self.public } else { 0 };
        let lists = (0..self.clients).map(|k| (k * self.samples..(k + 1) * self.samples).collect()).collect();
        let partition = Partition::from_lists("equal", lists, n_private as usize)?;
        let (private, test) = (synthetic(0, n_private, true)?, synthetic(2, 256, true)?);
        let public = (n_public > 0).then(|| synthetic(1, n_public, false)).transpose()?;
        let experiment = Experiment::with_partition(config, method.as_ref(), private, test, public, partition)?;
        // As if a first ensemble existed.
        let mut stream = Stream::new(0, Purpose::Synthetic, [3, 0, 0]);
        let logits: Vec<f32> = (0..n_public * 10).map(|_| stream.normal() as f32).collect();
        let state = ServerState {
            n_rounds_done: 1,
            weights: experiment.weights.clone(),
            buffers: experiment.buffers.clone(),
            targets: (n_public > 0).then(|| Arc::new(Targets { logits, features: Vec::new() })),
            ..ServerState::default()
        };
        let opened = self.device.open()?;
        let device = opened.gpu_name().unwrap_or_else(|| "cpu".into());
        let mut simulation = Simulation::resume(experiment, method, opened, state, ClientStates::new())?;
        let mut rounds = Vec::new();
        for _ in 0..self.rounds {
            rounds.push(simulation.round(&|_| ())?.seconds);
        }
        rounds.sort_by(|a, b| (a.local + a.fusion).total_cmp(&(b.local + b.fusion)));
        let Seconds { local, fusion, .. } = rounds[rounds.len() / 2];
        let result = serde_json::json!({
            "method": self.method, "model": self.model, "clients": self.clients, "samples": self.samples,
            "epochs": self.epochs, "threads": self.device.threads, "device": device, "local_s": local, "server_s": fusion,
            "round_s": local + fusion, "peak_rss_mib": peak_rss_mib(),
        });
        give(self.json, &result, || {
            say!(
                "{} with {}, {} clients × {} samples × {} epochs on {} thread(s)",
                self.method,
                self.model,
                self.clients,
                self.samples,
                self.epochs,
                self.device.threads
            );
            say!("  {:.2} s per round: {local:.2} s local training, {fusion:.2} s fusion", local + fusion);
        })
    }
}

/// Random 32×32 images.
fn synthetic(id: u32, n: u32, labelled: bool) -> Result<Dataset> {
    let mut stream = Stream::new(0, Purpose::Synthetic, [id, 1, 0]);
    let n_bytes = n as usize * 32 * 32 * 3;
    let mut bytes: Vec<u8> = Vec::with_capacity(n_bytes + 8);
    while bytes.len() < n_bytes {
        bytes.extend_from_slice(&stream.next_u64().to_le_bytes());
    }
    bytes.truncate(n_bytes);
    let labels = labelled.then(|| (0..n).map(|_| stream.below(10)).collect());
    let names = if labelled { (0..10).map(|c| c.to_string()).collect() } else { Vec::new() };
    let shape = fedproj_data::Shape::Image { height: 32, width: 32, channels: 3 };
    let data = Dataset::new("synthetic", shape, Samples::U8(bytes), labels, names)?;
    Ok(data.with_normalisation(Normalisation::bytes(&[0.5; 3], &[0.25; 3]))?)
}

/// Peak memory of this process, if the system reports it.
fn peak_rss_mib() -> Option<f64> {
    status_kib("self", "VmHWM:").map(|kib| kib / 1024.0)
}

/// A line of what the system reports of a process, in KiB.
fn status_kib(process: &str, key: &str) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(key))?.split_whitespace().next()?.parse().ok()
}
