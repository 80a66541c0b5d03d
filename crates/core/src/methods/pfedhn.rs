//! pFedHN. Shamsian et al., "Personalized Federated Learning using Hypernetworks", ICML 2021, arXiv:2103.04628.
//!
//! Client  receives θ_k = h(v_k; φ) and trains it as FedAvg would                                            Alg. 1
//! Server  per client of the round: (φ, v_k) ← (φ, v_k) − η_s (J_kᵀ (θ_k − w_k) + λ (φ, v_k)), with momentum, J_k: the Jacobian
//!         of h at v_k
//! State kept by a client: none.   Sent beyond FedAvg: nothing, but each client receives weights of its own.
//! Departures from the paper: a round's clients follow one another on the server, where the paper has one client per step. The
//! last bias of h starts as the network's initial weights, so that clients start where other methods do. Batch-norm's running
//! statistics are averaged. The global score is that of the mean of the w_k, which no client uses.

use crate::config::Config;
use crate::contributions::Part;
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::fusion::{Fusion, ServerState};
use crate::machine;
use crate::method::Method;
use crate::partial::Mean;
use fedproj_nn::{Activation, Cpu, Graph, Init, Mode, Options, Shape, Workspace, clip_norm, vector};
use serde::{Deserialize, Serialize};

/// Hidden layers after the first, momentum, weight decay λ and the largest norm of a gradient: the official code's.
const LAYERS: usize = 3;
const MOMENTUM: f32 = 0.9;
const WEIGHT_DECAY: f32 = 1e-3;
const NORM_MAX: f32 = 50.0;

/// φ with the embeddings v_k, and their momentum, in the server's state.
const PARAMS: &str = "hypernetwork";
const MOVED: &str = "hypernetwork.momentum";

/// Hyper-parameters of pFedHN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PFedHn {
    /// Learning rate η_s ≥ 0 of the hypernetwork.
    pub lr: f32,
    /// Width of its hidden layers. The hypernetwork has about `hidden` times the network's parameters.
    pub hidden: usize,
}

impl Default for PFedHn {
    fn default() -> Self {
        Self { lr: 0.01, hidden: 100 }
    }
}

impl PFedHn {
    /// h as a network from a client, one-hot, to its weights: the first layer holds the embeddings.
    fn network(&self, n_clients: usize, n_weights: usize) -> Result<Graph> {
        let mut graph = Graph::new(Shape::vector(n_clients));
        let mut x = graph.linear("embedding", graph.input(), 1 + n_clients / 4, false)?;
        x = graph.linear("hidden0", x, self.hidden, true)?;
        for layer in 1..=LAYERS {
            x = graph.activation(&format!("relu{layer}"), x, Activation::Relu)?;
            x = graph.linear(&format!("hidden{layer}"), x, self.hidden, true)?;
        }
        graph.linear("weights", x, n_weights, true)?;
        Ok(graph)
    }
}

/// h, ready to run.
struct Hypernetwork {
    ws: Workspace,
    n_clients: usize,
}

impl Hypernetwork {
    fn new(how: &PFedHn, experiment: &Experiment) -> Result<Self> {
        let n_clients = experiment.partition.n_clients();
        let graph = how.network(n_clients, experiment.weights.len())?;
        Ok(Self { ws: Workspace::new(&graph, &Options::training(1), Cpu::new(1))?, n_clients })
    }

    /// φ and the embeddings: the server's, or those of the start.
    fn params(&self, experiment: &Experiment, state: &ServerState) -> Vec<f32> {
        state.vectors.get(PARAMS).cloned().unwrap_or_else(|| {
            let mut params = self.ws.graph().init_params(experiment.config.seed, Init::Torch);
            let bias = params.len() - experiment.weights.len();
            params[bias..].copy_from_slice(&experiment.weights);
            params
        })
    }

    /// h(v_k; φ)
    fn weights(&mut self, params: &[f32], client: u32) -> Result<Vec<f32>> {
        let mut one_hot = vec![0.0; self.n_clients];
        one_hot[client as usize] = 1.0;
        self.ws.forward(params, &mut [], &one_hot, Mode::EVAL)?;
        Ok(self.ws.output().to_vec())
    }

    /// Jᵀ v at the client of the last pass.
    fn pull_back(&mut self, params: &[f32], v: &[f32]) -> Result<Vec<f32>> {
        let output = self.ws.graph().output();
        self.ws.inject(output, |_, gradient| gradient.copy_from_slice(v))?;
        let mut gradient = vec![0.0; params.len()];
        self.ws.backward(params, &mut gradient)?;
        Ok(gradient)
    }
}

impl Method for PFedHn {
    fn check(&self, _: &Config) -> Result<()> {
        Error::require(self.lr >= 0.0, "method.pfedhn.lr", self.lr, "0 or positive")?;
        Error::require(self.hidden > 0, "method.pfedhn.hidden", self.hidden, "at least 1")
    }

    fn check_network(&self, graph: &Graph) -> Result<()> {
        // φ, its momentum, a gradient and a copy.
        machine::check_memory(&self.network(1, graph.params().len())?, 4)
    }

    fn weights_of(&self, experiment: &Experiment, state: &ServerState, clients: &[u32]) -> Result<Vec<Vec<f32>>> {
        let mut h = Hypernetwork::new(self, experiment)?;
        let params = h.params(experiment, state);
        clients.iter().map(|&client| h.weights(&params, client)).collect()
    }

    fn len_of_kept(&self, _: &str, experiment: &Experiment) -> Result<usize> {
        Ok(self.network(experiment.partition.n_clients(), experiment.weights.len())?.params().len())
    }

    fn needs_simulator(&self) -> Option<&str> {
        Some(
            "method.name = \"pfedhn\" sends each client weights of its own, and a federation sends all the same\n\
             hint: `fedproj run` simulates it; method.name=ditto keeps a model of its own on each node",
        )
    }

    fn means(&self) -> Option<Vec<Mean>> {
        None
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let (experiment, cpu) = (round.experiment, &mut Cpu::new(1));
        let mut h = Hypernetwork::new(self, experiment)?;
        let mut params = h.params(experiment, round.state);
        let sent = self.weights_of(experiment, round.state, &round.clients())?;
        let mut moved = round.state.vectors.remove(MOVED).unwrap_or_else(|| vec![0.0; params.len()]);
        for ((at, client), mut change) in round.clients().into_iter().enumerate().zip(sent) {
            vector::axpy(cpu, -1.0, &round.vector_of(at, Part::Weights)?, &mut change);
            h.weights(&params, client)?;
            let mut gradient = h.pull_back(&params, &change)?;
            clip_norm(cpu, &mut gradient, NORM_MAX);
            vector::axpy(cpu, WEIGHT_DECAY, &params, &mut gradient);
            vector::scale(cpu, MOMENTUM, &mut moved);
            vector::axpy(cpu, 1.0, &gradient, &mut moved);
            vector::axpy(cpu, -self.lr, &moved, &mut params);
        }
        round.average()?;
        round.state.vectors.extend([(PARAMS.to_owned(), params), (MOVED.to_owned(), moved)]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: u32 = 4;

    #[test]
    fn what_is_pulled_back_is_the_slope_of_the_weights() {
        let (n_clients, n_weights, mut n_alive, mut n_compared) = (6, 9, 0, 0);
        let graph = PFedHn { hidden: 5, ..PFedHn::default() }.network(n_clients, n_weights).unwrap();
        let ws = || Workspace::new(&graph, &Options::training(1), Cpu::new(1)).unwrap();
        let v: Vec<f32> = (0..n_weights).map(|i| (i as f32).cos()).collect();
        let embedding = graph.params().find("embedding.weight").unwrap();
        for seed in 0..6 {
            let (params, mut h) = (graph.init_params(seed, Init::Torch), Hypernetwork { ws: ws(), n_clients });
            h.weights(&params, CLIENT).unwrap();
            let found = h.pull_back(&params, &v).unwrap();
            // ⟨h, v⟩ with one parameter moved.
            let mut along = |at: usize, by: f32| -> f64 {
                let mut moved = params.clone();
                moved[at] += by;
                let weights = h.weights(&moved, CLIENT).unwrap();
                weights.iter().zip(&v).map(|(w, v)| f64::from(*w) * f64::from(*v)).sum()
            };
            for (at, found) in found.iter().enumerate() {
                let [down, here, up] = [-0.01, 0.0, 0.01].map(|by| along(at, by));
                // Between kinks the network is linear in each parameter, so differences are exact but for rounding.
                let is_kink = (up - 2.0 * here + down).abs() > 1e-5;
                n_compared += usize::from(!is_kink);
                let slope = (up - down) / 0.02;
                assert!(is_kink || (f64::from(*found) - slope).abs() < 1e-3, "seed {seed}, {at}: {found} {slope}");
            }
            let touched = || found[embedding.range()].iter().enumerate().filter(|(_, g)| **g != 0.0);
            assert!(touched().all(|(at, _)| at % n_clients == CLIENT as usize), "this client's embedding alone");
            n_alive += usize::from(touched().count() > 0);
        }
        assert!(n_alive > 1 && n_compared > 5 * graph.params().len(), "{n_alive} {n_compared}");
    }
}
