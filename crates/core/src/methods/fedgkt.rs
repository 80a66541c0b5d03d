//! FedGKT. He, Annavaram and Avestimehr, "Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge", NeurIPS 2020,
//! arXiv:2007.14513.
//!
//! Client  has the layers f_k up to a level, and a small classifier c_k behind them
//!         (f_k, c_k) ← (f_k, c_k) − η ∇[CE(c_k(h), y) + α T² KL(σ(z_s/T) ‖ σ(c_k(h)/T))],  h = f_k(x)                      Alg. 1
//!         then it sends h, its logits z_k = c_k(h) and y of all its samples, and receives the server's logits z_s of them
//! Server  has the rest g of the network:  g ← g − η_s ∇[CE(g(h), y) + α T² KL(σ(z_k/T) ‖ σ(g(h)/T))] on all that was sent
//! State kept by a client: f_k and c_k, which never leave it.   Sent: features, logits and labels, in the place of the model.
//! Departures from the paper: features are computed once the client's training has ended and anew for each of the server's
//! passes. Both optimisers start afresh every round, and the server's learning rate does not fall on plateaus. Global scores are
//! those of the mean of the round's f_k with g, which no client uses.

use crate::config::{Config, OptimizerConfig};
use crate::contributions::Part;
use crate::error::{Error, Result};
use crate::exit::{EXIT, check_exit, with_exit};
use crate::fusion::Fusion;
use crate::method::Method;
use crate::partial::Mean;
use crate::robust::RobustRule;
use crate::step::{At, Batch, Step, Term};
use fedproj_data::PartitionConfig;
use fedproj_nn::{Direction, Graph, Loss, NodeId, Tail};
use serde::{Deserialize, Serialize};
use server::{Front, Server};
use std::ops::Range;

mod server;

/// z_s of all private samples, by their place in the private set; rows of clients that did not take part yet are 0.
const SENT: &str = "send.logits";

/// Hyper-parameters of FedGKT.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedGkt {
    /// Last level of the client's part of the network. 0: the stem of a ResNet, the first layer of other networks.
    pub level: usize,
    /// Weight α ≥ 0 of the divergence on both sides.
    pub distill_weight: f32,
    /// Temperature T of both sides, above 0.
    pub temperature: f32,
    /// The server's passes per round over what clients sent.
    pub epochs: u32,
    /// Samples per step of the server.
    pub batch: usize,
    /// The server's optimiser. It starts afresh every round.
    pub optimizer: OptimizerConfig,
}

impl Default for FedGkt {
    /// The official code's T and α.
    fn default() -> Self {
        let optimizer = OptimizerConfig::adam(1e-3);
        Self { level: 0, distill_weight: 1.0, temperature: 3.0, epochs: 5, batch: 64, optimizer }
    }
}

impl Method for FedGkt {
    fn check(&self, config: &Config) -> Result<()> {
        let robust = &config.federation.robust;
        if robust.rule != RobustRule::None || robust.clip > 0.0 || robust.clip_ratio > 0.0 {
            return Err(Error::config(
                "method.name = \"fedgkt\" runs in the simulator alone, and without federation.robust: that limits what models \
                 change, but clients send features, and each is answered\n\
                 hint: federation.robust={ rule = \"none\", clip = 0.0, clip_ratio = 0.0 }",
            ));
        }
        if matches!(config.data.partition, PartitionConfig::Virtual { .. }) {
            return Err(Error::config(
                "data.partition.kind = \"virtual\" gives a sample to several clients, and method.name = \"fedgkt\" keeps one \
                 row of logits per sample\nhint: another data.partition",
            ));
        }
        let Self { distill_weight, temperature, batch, .. } = *self;
        Error::require(distill_weight >= 0.0, "method.fedgkt.distill_weight", distill_weight, "0 or positive")?;
        Error::require(temperature > 0.0, "method.fedgkt.temperature", temperature, "positive")?;
        Error::require(batch > 0, "method.fedgkt.batch", batch, "at least 1")?;
        self.optimizer.check("method.fedgkt.optimizer")
    }

    fn network(&self, graph: Graph) -> Graph {
        with_exit(graph, self.level)
    }

    fn check_network(&self, graph: &Graph) -> Result<()> {
        check_exit(graph, self.level, "method.fedgkt.level")?;
        let tail = self.tail(graph)?;
        if !tail.buffers.is_empty() {
            return Err(Error::config(
                "method.name = \"fedgkt\": the server's part of the network has batch-norm, whose running statistics stay with \
                 clients here\nhint: model.group_norm=8",
            ));
        }
        Ok(())
    }

    fn taps(&self, graph: &Graph) -> Vec<NodeId> {
        graph.find(EXIT).into_iter().collect()
    }

    fn stays_with_client(&self, graph: &Graph) -> Vec<Range<usize>> {
        let server = self.tail(graph).map_or_else(|_| Vec::new(), |tail| tail.params);
        let ends = server.iter().map(|range| range.start).chain([graph.params().len()]);
        let starts = std::iter::once(0).chain(server.iter().map(|range| range.end));
        starts.zip(ends).map(|(start, end)| start..end).filter(|range| !range.is_empty()).collect()
    }

    fn sends_logits(&self) -> bool {
        true
    }

    fn sends_weights(&self) -> bool {
        false
    }

    fn exchanged(&self, graph: &Graph, n_samples: usize) -> Option<[usize; 2]> {
        let width = |node| graph.shape(node).len();
        let (classes, features) =
            (width(graph.output()), graph.levels().get(self.level).map_or(0, |node| width(*node)));
        Some([n_samples * classes, n_samples * (features + classes + 1)])
    }

    fn needs_simulator(&self) -> Option<&str> {
        Some(
            "method.name = \"fedgkt\" sends features and labels of private samples, which only the simulator does\n\
             hint: `fedproj run` simulates it; method.name=feddf sends models alone",
        )
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let at = step.graph().find(EXIT).map_or(At::Output, At::Node);
        let term = |(loss, weight)| Term { loss, at, weight };
        let objective = self.objective().map(term);
        let g = if step.has_logits() {
            step.gradient(Batch::Taught, &objective)?
        } else {
            step.gradient(Batch::Private, &objective[..1])?
        };
        step.update(g);
        Ok(())
    }

    fn means(&self) -> Option<Vec<Mean>> {
        None
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let (experiment, batch) = (round.experiment, self.batch);
        let tail = self.tail(&experiment.graph)?;
        let mut server = Server::new(self, &tail, &round.state.weights)?;
        let ids = round.clients();
        let samples: Vec<_> = ids.iter().map(|client| experiment.partition.indices(*client as usize)).collect();
        let mut front = Front::new(self, &experiment.graph)?;
        let n_classes = round.n_classes();
        let zeros = || vec![0.0; experiment.private.n_samples() * n_classes];
        let mut logits = round.state.vectors.remove(SENT).unwrap_or_else(zeros);
        // One pass more, in which the server learns nothing but answers.
        for epoch in 0..=self.epochs {
            for (k, samples) in samples.iter().enumerate() {
                // One client's at a time: a copy of all would double the memory of a round.
                let model = [round.vector_of(k, Part::Weights)?, round.vector_of(k, Part::Buffers)?];
                for rows in samples.chunks(batch) {
                    let sent = front.send(&model, &experiment.private, rows)?;
                    if epoch < self.epochs {
                        server.learn(&self.objective(), sent)?;
                        continue;
                    }
                    let answers = server.answer(sent.features)?.chunks_exact(n_classes);
                    for (row, answer) in rows.iter().zip(answers) {
                        logits[*row as usize * n_classes..][..n_classes].copy_from_slice(answer);
                    }
                }
            }
        }
        round.state.vectors.insert(SENT.to_owned(), logits);
        round.average()?;
        tail.place_params(&server.params, &mut round.state.weights);
        Ok(())
    }
}

impl FedGkt {
    /// The server's part.
    fn tail(&self, graph: &Graph) -> Result<Tail> {
        let at = graph.levels().get(self.level).copied().unwrap_or(graph.output());
        Ok(graph.tail(at)?)
    }

    /// The losses and their weights, on either side.
    fn objective(&self) -> [(Loss, f32); 2] {
        let (temperature, direction) = (self.temperature, Direction::TeacherToStudent);
        let kl = Loss::Kl { temperature, direction, times_t_squared: true, only_marked: false };
        [(Loss::CrossEntropy, 1.0), (kl, self.distill_weight)]
    }
}
