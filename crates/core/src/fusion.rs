//! The server's side of a round: averages, ensembles, distillation and its own state.

use crate::distill::{Distill, DistillTargets, EnsembleWeights};
use crate::error::Result;
use crate::evaluate::{Evaluator, Model, Outputs, Score};
use crate::experiment::Experiment;
use crate::memory::Targets;
use crate::trainer::ClientResult;
use fedproj_nn::{Cpu, vector};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What the server keeps between rounds; together with the configuration it decides all that follows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerState {
    /// Rounds that are done.
    pub n_rounds_done: u32,
    /// The weights that go out next.
    pub weights: Vec<f32>,
    /// Their buffers.
    pub buffers: Vec<f32>,
    /// A method's own vectors, by name. Those whose name starts with `send.` go out to the clients.
    pub vectors: BTreeMap<String, Vec<f32>>,
    /// Targets of the memory.
    pub targets: Option<Arc<Targets>>,
    /// What clients keep, where the simulator stands in for them.
    pub clients: BTreeMap<u32, BTreeMap<String, Vec<f32>>>,
}

/// Prefix of vectors that go out to the clients.
pub(crate) const SEND: &str = "send.";

/// The fusion of one round.
#[derive(Debug)]
pub struct Fusion<'a> {
    pub(crate) experiment: &'a Experiment,
    pub(crate) evaluator: &'a Evaluator,
    pub(crate) n_threads: usize,
    pub(crate) round: u32,
    /// The clients' results, in the order of their ids.
    pub results: &'a [ClientResult],
    /// Becomes the next state; `weights` still hold what the clients started from.
    pub state: &'a mut ServerState,
    /// The model to evaluate, where it is not the one that goes out.
    pub(crate) evaluated: Option<(Vec<f32>, Vec<f32>)>,
    pub(crate) before_distillation: Option<Score>,
    pub(crate) distill_loss: Option<f64>,
}

impl Fusion<'_> {
    /// Round, counted from 0.
    pub fn round(&self) -> u32 {
        self.round
    }

    /// n_k / Σ n
    pub fn sample_weights(&self) -> Vec<f32> {
        let total: usize = self.results.iter().map(|r| r.n_samples).sum();
        self.results.iter().map(|r| r.n_samples as f32 / total as f32).collect()
    }

    /// 1 / m
    pub fn uniform_weights(&self) -> Vec<f32> {
        vec![1.0 / self.results.len() as f32; self.results.len()]
    }

    /// Σ_k w_k θ_k
    pub fn weighted(&self, weights: &[f32]) -> Vec<f32> {
        self.sum(weights, |r| &r.weights)
    }

    /// Σ_k w_k of any vector of the results.
    pub fn sum<'r>(&'r self, weights: &[f32], of: impl Fn(&'r ClientResult) -> &'r Vec<f32>) -> Vec<f32> {
        weighted_rows(self.results.iter().map(|r| &of(r)[..]), weights)
    }

    /// FedAvg: weights and buffers become the n_k-weighted means.
    pub fn average(&mut self) {
        let w = self.sample_weights();
        self.state.weights = self.weighted(&w);
        self.average_buffers();
    }

    /// Buffers become the n_k-weighted mean.
    pub fn average_buffers(&mut self) {
        self.state.buffers = self.sum(&self.sample_weights(), |r| &r.buffers);
    }

    /// Evaluates these weights instead of the ones that go out.
    pub fn evaluate_instead(&mut self, weights: Vec<f32>) {
        self.evaluated = Some((weights, self.state.buffers.clone()));
    }

    /// A vector of the server's own, `initial` at first.
    pub fn vector(&mut self, name: &str, initial: f32) -> &mut Vec<f32> {
        let n = self.experiment.weights.len();
        self.state.vectors.entry(name.to_owned()).or_insert_with(|| vec![initial; n])
    }

    /// All clients there are, N.
    pub fn n_clients(&self) -> usize {
        self.experiment.partition.n_clients()
    }

    /// Classes that are told apart.
    pub fn n_classes(&self) -> usize {
        self.experiment.private.n_classes()
    }

    /// The configuration of the run.
    pub fn config(&self) -> &crate::Config {
        &self.experiment.config
    }

    /// Every client's outputs on the public set, in evaluation mode.
    ///
    /// # Errors
    /// If a model does not fit the network.
    pub fn client_outputs(&self, with_features: bool) -> Result<Vec<Outputs>> {
        let models: Vec<Model<'_>> =
            self.results.iter().map(|r| Model { weights: &r.weights, buffers: &r.buffers }).collect();
        match &self.experiment.public {
            Some(public) => self.evaluator.outputs(&models, public, with_features),
            None => Ok(Vec::new()),
        }
    }

    /// The ensemble: means over clients of their logits (and features) on the public set.
    ///
    /// # Errors
    /// If a model does not fit the network.
    pub fn ensemble(&self, weights: EnsembleWeights, with_features: bool) -> Result<Targets> {
        let outputs = self.client_outputs(with_features)?;
        let w = match weights {
            EnsembleWeights::Uniform => self.uniform_weights(),
            EnsembleWeights::Samples => self.sample_weights(),
        };
        let logits = weighted_rows(outputs.iter().map(|o| &o.logits[..]), &w);
        let features = weighted_rows(outputs.iter().map(|o| &o.features[..]), &w);
        Ok(Targets { logits, features })
    }

    /// Outputs of the state's weights on the public set.
    ///
    /// # Errors
    /// If the model does not fit the network.
    pub fn global_outputs(&self, with_features: bool) -> Result<Targets> {
        let Some(public) = &self.experiment.public else { return Ok(Targets::default()) };
        let model = Model { weights: &self.state.weights, buffers: &self.state.buffers };
        let out = self.evaluator.outputs(&[model], public, with_features)?.pop().unwrap_or_default();
        Ok(Targets { logits: out.logits, features: out.features })
    }

    /// Trains the state's weights towards targets on the public set. `previous` is what the clients started from.
    ///
    /// # Errors
    /// If the loss is not finite.
    pub fn distill(&mut self, how: &Distill, targets: &DistillTargets<'_>, previous: &[f32]) -> Result<()> {
        self.before_distillation = Some(self.score()?);
        let loss = how.run(self.experiment, self.n_threads, self.round, self.state, targets, previous)?;
        self.distill_loss = Some(loss);
        Ok(())
    }

    fn score(&self) -> Result<Score> {
        let model = Model { weights: &self.state.weights, buffers: &self.state.buffers };
        Ok(self.evaluator.scores(&[model], &self.experiment.test)?.pop().unwrap_or_default())
    }
}

/// Σ w_k·row_k; empty if there is no row.
fn weighted_rows<'a>(rows: impl Iterator<Item = &'a [f32]>, weights: &[f32]) -> Vec<f32> {
    let rows: Vec<&[f32]> = rows.collect();
    let mut out = vec![0.0; rows.first().map_or(0, |row| row.len())];
    vector::weighted_sum(&mut Cpu::new(1), &rows, weights, &mut out);
    out
}
