//! Both sides of FedGKT on the server: what clients send, computed from their models, and the server's part of the network.

use super::FedGkt;
use crate::error::{Error, Result};
use crate::exit::EXIT;
use fedproj_data::Dataset;
use fedproj_nn::{Cpu, Graph, Loss, LossTargets, Mode, NodeId, Optimizer, Options, Tail, Workspace};

/// What a client sends of a batch.
#[derive(Clone, Copy)]
pub(super) struct Sent<'a> {
    /// h
    pub features: &'a [f32],
    /// z_k
    logits: &'a [f32],
    labels: &'a [u32],
}

/// The clients' part, which sends.
pub(super) struct Front {
    ws: Workspace,
    at: NodeId,
    exit: NodeId,
    x: Vec<f32>,
    labels: Vec<u32>,
}

impl Front {
    pub fn new(how: &FedGkt, graph: &Graph) -> Result<Self> {
        let (Some(&at), Some(exit)) = (graph.levels().get(how.level), graph.find(EXIT)) else {
            return Err(Error::Internal { what: "FedGKT's network", problem: "it has no exit".into() });
        };
        let options = Options { batch: how.batch, taps: &[at, exit], training: false };
        let ws = Workspace::new(graph, &options, Cpu::new(1))?;
        Ok(Self { ws, at, exit, x: Vec::new(), labels: Vec::new() })
    }

    /// What a client with these weights and buffers sends of its samples.
    pub fn send(&mut self, [weights, buffers]: &[Vec<f32>; 2], data: &Dataset, rows: &[u32]) -> Result<Sent<'_>> {
        self.x.resize(rows.len() * data.sample_len(), 0.0);
        data.gather(rows, &mut self.x);
        let labels = data.labels().unwrap_or_default();
        self.labels.clear();
        self.labels.extend(rows.iter().map(|row| labels[*row as usize]));
        self.ws.forward(weights, &mut buffers.clone(), &self.x, Mode::EVAL)?;
        let Self { ws, at, exit, labels, .. } = self;
        Ok(Sent { features: ws.value(*at)?, logits: ws.value(*exit)?, labels })
    }
}

/// The server's part g.
pub(super) struct Server {
    ws: Workspace,
    pub params: Vec<f32>,
    gradient: Vec<f32>,
    optimizer: Optimizer,
}

impl Server {
    /// From the weights of the whole network.
    pub fn new(how: &FedGkt, tail: &Tail, weights: &[f32]) -> Result<Self> {
        let ws = Workspace::new(&tail.graph, &Options { batch: how.batch, taps: &[], training: true }, Cpu::new(1))?;
        let mut params = vec![0.0; tail.graph.params().len()];
        tail.take_params(weights, &mut params);
        let optimizer = Optimizer::new(how.optimizer.rule(), params.len())?;
        Ok(Self { ws, gradient: params.clone(), params, optimizer })
    }

    /// One step on a batch.
    pub fn learn(&mut self, objective: &[(Loss, f32)], sent: Sent<'_>) -> Result<()> {
        let targets = LossTargets { labels: sent.labels, logits: sent.logits, ..LossTargets::default() };
        self.ws.forward(&self.params, &mut [], sent.features, Mode::EVAL)?;
        let output = self.ws.graph().output();
        for (loss, weight) in objective {
            self.ws.add_loss(output, &(*loss, targets), *weight)?;
        }
        self.ws.backward(&self.params, &mut self.gradient)?;
        self.optimizer.step(self.ws.cpu(), &mut self.params, &self.gradient, 1.0);
        Ok(())
    }

    /// z_s = g(h)
    pub fn answer(&mut self, features: &[f32]) -> Result<&[f32]> {
        self.ws.forward(&self.params, &mut [], features, Mode::EVAL)?;
        Ok(self.ws.output())
    }
}
