//! Several steps of a network on one batch, on any device.

use crate::backends::Backend;
use anyhow::Result;
use fedproj_nn::cuda::{Batches, Data, Fleet, Gpu, LossOf, Moments, Vectors};
use fedproj_nn::{Cpu, Dropout, Graph, Loss, LossTargets, Mode, NormMode, Optimizer, Options, Rule, Workspace};
use std::sync::Arc;

/// Networks that take the same batch again and again, without dropout.
pub enum Training {
    Cpu(Vec<OnCpu>),
    Gpu(Box<OnGpu>),
}

/// One of the networks after a step.
#[derive(Clone, Default)]
pub struct State {
    pub logits: Vec<f32>,
    /// The sum over all steps.
    pub loss_total: f64,
    pub gradient: Vec<f32>,
    pub params: Vec<f32>,
    pub buffers: Vec<f32>,
}

impl Training {
    /// `starts`: weights and running statistics of each network.
    pub fn new(
        backend: &Backend,
        graph: &Graph,
        rule: Rule,
        (x, labels): (&[f32], &[u32]),
        starts: &[(Vec<f32>, Vec<f32>)],
    ) -> Result<Self> {
        Ok(match backend {
            Backend::Cpu(isa, n_threads) => {
                let network = |start| OnCpu::new(Cpu::with_isa(*n_threads, *isa), graph, rule, (x, labels), start);
                Self::Cpu(starts.iter().map(network).collect::<Result<_>>()?)
            }
            Backend::Gpu(gpu) => Self::Gpu(Box::new(OnGpu::new(gpu, graph, rule, (x, labels), starts)?)),
        })
    }

    pub fn step(&mut self) -> Result<()> {
        match self {
            Self::Cpu(all) => all.iter_mut().try_for_each(OnCpu::step),
            Self::Gpu(all) => all.step(),
        }
    }

    /// A forward pass alone, with the running statistics.
    pub fn evaluate(&mut self) -> Result<()> {
        match self {
            Self::Cpu(all) => all.iter_mut().try_for_each(OnCpu::evaluate),
            Self::Gpu(all) => all.forward(Mode::EVAL),
        }
    }

    pub fn state(&self, lane: usize) -> Result<State> {
        match self {
            Self::Cpu(all) => Ok(all[lane].state()),
            Self::Gpu(all) => all.state(lane),
        }
    }
}

pub struct OnCpu {
    ws: Workspace,
    optimizer: Optimizer,
    x: Vec<f32>,
    labels: Vec<u32>,
    state: State,
}

impl OnCpu {
    fn new(
        cpu: Cpu,
        graph: &Graph,
        rule: Rule,
        (x, labels): (&[f32], &[u32]),
        (params, buffers): &(Vec<f32>, Vec<f32>),
    ) -> Result<Self> {
        Ok(Self {
            ws: Workspace::new(graph, &Options::training(labels.len()), cpu)?,
            optimizer: Optimizer::new(rule, params.len())?,
            x: x.to_vec(),
            labels: labels.to_vec(),
            state: State {
                gradient: vec![f32::NAN; params.len()],
                params: params.clone(),
                buffers: buffers.clone(),
                ..State::default()
            },
        })
    }

    fn step(&mut self) -> Result<()> {
        let Self { ws, x, labels, state, .. } = self;
        let State { params, buffers, gradient, .. } = state;
        let mode = Mode { norm: NormMode::Update, dropout: Dropout::Off };
        state.loss_total +=
            ws.loss_gradient(params, buffers, x, &(Loss::CrossEntropy, LossTargets::labels(labels)), mode, gradient)?;
        self.optimizer.step(ws.cpu(), params, gradient, 1.0);
        Ok(())
    }

    fn evaluate(&mut self) -> Result<()> {
        Ok(self.ws.forward(&self.state.params, &mut self.state.buffers, &self.x, Mode::EVAL)?)
    }

    fn state(&self) -> State {
        State { logits: self.ws.output().to_vec(), ..self.state.clone() }
    }
}

/// The networks are lanes; steps are recorded and replayed.
pub struct OnGpu {
    fleet: Fleet,
    data: Data,
    rule: Rule,
    moments: Moments,
    theta: Vectors,
    buffers: Vectors,
    gradient: Vectors,
    batch: usize,
}

impl OnGpu {
    fn new(
        gpu: &Arc<Gpu>,
        graph: &Graph,
        rule: Rule,
        (x, labels): (&[f32], &[u32]),
        starts: &[(Vec<f32>, Vec<f32>)],
    ) -> Result<Self> {
        let batch = labels.len();
        let mut fleet = Fleet::new(gpu, graph, starts.len(), &Options::training(batch))?;
        let mut data = Data::matrix(gpu, x, graph.shape(graph.input()).len())?;
        data.set_labels(gpu, labels)?;
        let mut theta = fleet.vectors(graph.params().len())?;
        let mut buffers = fleet.vectors(graph.buffers().len())?;
        for (lane, (params, statistics)) in starts.iter().enumerate() {
            fleet.write(&mut theta, lane, params)?;
            fleet.write(&mut buffers, lane, statistics)?;
        }
        fleet.set_table(Batches::Samples, &vec![(0..batch as u32).collect(); starts.len()], batch)?;
        fleet.set_table(Batches::LrFactors, &vec![vec![1.0f32.to_bits()]; starts.len()], 1)?;
        Ok(Self {
            moments: fleet.moments(&rule)?,
            gradient: fleet.vectors(graph.params().len())?,
            fleet,
            data,
            rule,
            theta,
            buffers,
            batch,
        })
    }

    fn forward(&mut self, mode: Mode) -> Result<()> {
        self.fleet.gather(&self.data, Batches::Samples, 0, false)?;
        Ok(self.fleet.forward(self.theta.rows(), self.buffers.rows(), mode)?)
    }

    fn step(&mut self) -> Result<()> {
        let Some(recording) = self.fleet.replay(0)? else { return Ok(()) };
        let done = self.launch_step();
        self.fleet.end_recording(recording, true)?;
        done
    }

    fn launch_step(&mut self) -> Result<()> {
        self.forward(Mode { norm: NormMode::Update, dropout: Dropout::Off })?;
        let (output, theta) = (self.fleet.graph().output(), self.theta.rows());
        self.fleet.add_loss(output, &Loss::CrossEntropy, 1.0, true)?;
        self.fleet.record_loss(LossOf::Samples)?;
        self.fleet.backward(theta, self.gradient.rows())?;
        Ok(self.fleet.update(&self.rule, &self.moments, theta, self.gradient.rows())?)
    }

    fn state(&self, lane: usize) -> Result<State> {
        let fleet = &self.fleet;
        Ok(State {
            logits: fleet.read_value(fleet.graph().output(), lane, self.batch)?,
            loss_total: fleet.stats()?[lane].loss_total,
            gradient: fleet.read(&self.gradient, lane)?,
            params: fleet.read(&self.theta, lane)?,
            buffers: fleet.read(&self.buffers, lane)?,
        })
    }
}
