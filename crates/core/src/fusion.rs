//! The server's side of a round: averages, ensembles, distillation and the server's own state.
//!
//! Sums run client by client over blocks of coordinates, so memory does not grow with the number of clients.

mod outputs;
mod state;
mod sums;

pub use state::{GlobalModel, ServerState};

use crate::contributions::{ClientSummary, Contributions, Part};
use crate::distill::EnsembleWeights;
use crate::error::{Error, Result};
use crate::evaluate::{Evaluator, Score};
use crate::experiment::Experiment;
use crate::fixed::Scale;
use crate::generator::{GENERATOR, GeneratorConfig};
use crate::groups::Groups;
use crate::method::LOGITS;
use crate::pull::Clip;
use crate::robust::{RobustRule, krum};
use fedproj_nn::Init;
use std::borrow::Cow;

/// Prefix of vectors that are sent to the clients.
pub(crate) const SEND: &str = "send.";

/// Weights and buffers of a student that stays on the server, in its state.
pub(crate) const STUDENT: [&str; 2] = ["student", "student.buffers"];

/// The fusion of one round.
#[derive(Debug)]
pub struct Fusion<'a> {
    pub(crate) experiment: &'a Experiment,
    pub(crate) evaluator: &'a Evaluator,
    pub(crate) n_threads: usize,
    pub(crate) round: u32,
    groups: &'a Groups<'a>,
    /// The group whose models are fused.
    group: usize,
    results: &'a dyn Contributions,
    /// The selected contributions of the group, see [`RobustRule::Krum`].
    chosen: Vec<usize>,
    /// The contributions whose outputs make the ensemble: those of all groups.
    speaking: Vec<usize>,
    /// The limits on what a client can claim: samples and local steps.
    claims_max: (usize, u32),
    /// How vectors are clipped. Empty: none is.
    clips: Vec<Clip<'a>>,
    /// The scale of sums in integers; `None` if they are in floating point.
    scale: Option<Scale>,
    /// Becomes the next state. `weights` still hold what the clients received.
    pub state: &'a mut ServerState,
    pub(crate) before_distillation: Option<Score>,
    pub(crate) distill_loss: Option<f64>,
}

impl<'a> Fusion<'a> {
    /// The fusion of a group's contributions, with the configured clipping and robust selection.
    pub(crate) fn new(
        groups: &'a Groups<'a>,
        group: usize,
        n_threads: usize,
        results: &'a dyn Contributions,
        uploads: &[&'a str],
        state: &'a mut ServerState,
    ) -> Result<Self> {
        state.evaluated = None;
        let (experiment, evaluator) = (groups.experiment.group(group), &groups.evaluators[group]);
        let speaking: Vec<usize> = (0..results.n()).collect();
        let is_member = |at: &usize| groups.experiment.group_of(results.summary(*at).client) == group;
        let robust = &experiment.config.federation.robust;
        let scale = experiment.config.federation.scale(experiment.partition.n_clients());
        if let Some(scale) = scale.filter(|scale| results.n() > scale.n_clients_max()) {
            let (n, most) = (results.n(), scale.n_clients_max());
            return Err(Error::config(format!(
                "{n} contributions in a round, but federation.sum = \"fixed\" has room for {most}\n\
                 hint: a lower server.over_selection, or federation.sum=float"
            )));
        }
        let summaries = || (0..results.n()).map(|at| results.summary(at));
        let clips = Clip::all(robust, results, &state.weights, &state.buffers, uploads)?;
        let mut fusion = Self {
            experiment,
            evaluator,
            n_threads,
            round: state.n_rounds_done,
            groups,
            group,
            results,
            chosen: speaking.iter().copied().filter(is_member).collect(),
            speaking,
            claims_max: (
                robust.claim_max(summaries().map(|client| client.n_samples as u64)) as usize,
                robust.claim_max(summaries().map(|client| u64::from(client.n_steps))).try_into().unwrap_or(u32::MAX),
            ),
            clips,
            scale,
            state,
            before_distillation: None,
            distill_loss: None,
        };
        if robust.rule == RobustRule::Krum && results.n() > 0 {
            fusion.chosen = vec![krum(&fusion.squared_distances()?, robust.n_hostile(results.n()))];
            fusion.speaking.clone_from(&fusion.chosen);
        }
        Ok(fusion)
    }
}

impl Fusion<'_> {
    /// Round, counted from 0.
    pub fn round(&self) -> u32 {
        self.round
    }

    /// The number of selected contributions.
    pub fn n_results(&self) -> usize {
        self.chosen.len()
    }

    /// The summaries of the selected contributions, in the order of client ids, with limited claims.
    pub fn summaries(&self) -> impl Iterator<Item = ClientSummary<'_>> {
        self.summaries_of(&self.chosen)
    }

    fn summaries_of<'s>(&'s self, which: &'s [usize]) -> impl Iterator<Item = ClientSummary<'s>> {
        let (samples_max, steps_max) = self.claims_max;
        which.iter().map(move |&at| {
            let client = self.results.summary(at);
            ClientSummary {
                n_samples: client.n_samples.min(samples_max),
                n_steps: client.n_steps.min(steps_max),
                ..client
            }
        })
    }

    /// FedAvg: replaces weights and buffers by the n_k-weighted means. A group without clients in the round keeps
    /// its model.
    ///
    /// # Errors
    /// If a contribution cannot be read.
    pub fn average(&mut self) -> Result<()> {
        if self.chosen.is_empty() && !self.speaking.is_empty() {
            return Ok(());
        }
        self.state.weights = self.mean(EnsembleWeights::Samples, Part::Weights)?;
        self.average_buffers()
    }

    /// Replaces the buffers by the n_k-weighted mean.
    ///
    /// # Errors
    /// If a contribution cannot be read.
    pub fn average_buffers(&mut self) -> Result<()> {
        self.state.buffers = self.mean(EnsembleWeights::Samples, Part::Buffers)?;
        Ok(())
    }

    /// Evaluates and publishes these weights instead of those that are sent.
    pub fn evaluate_instead(&mut self, weights: Vec<f32>) {
        self.state.evaluated = Some((weights, self.state.buffers.clone()));
    }

    /// A vector of the server's own; starts as `initial`.
    pub fn vector(&mut self, name: &str, initial: f32) -> &mut Vec<f32> {
        let n = self.experiment.weights.len();
        self.state.vectors.entry(name.to_owned()).or_insert_with(|| vec![initial; n])
    }

    /// The parameters of the generator that clients receive, see [`Method::generator`](crate::Method::generator); those that
    /// it starts with until they are changed.
    ///
    /// # Errors
    /// If this network cannot have a generator.
    pub fn generator(&mut self, how: &GeneratorConfig) -> Result<&mut Vec<f32>> {
        let name = format!("{SEND}{GENERATOR}");
        if !self.state.vectors.contains_key(&name) {
            let network = how.network(&self.experiment.graph)?;
            self.state.vectors.insert(name.clone(), network.init_params(self.config().seed, Init::Torch));
        }
        Ok(self.vector(&name, 0.0))
    }

    /// The logits that clients receive for their own samples, see [`Method::sends_logits`](crate::Method::sends_logits): a row
    /// per private sample. A client whose rows are all 0 has none.
    pub fn logits(&mut self) -> &mut Vec<f32> {
        let n = self.experiment.private.n_samples() * self.n_classes();
        self.state.vectors.entry(format!("{SEND}{LOGITS}")).or_insert_with(|| vec![0.0; n])
    }

    /// A client's samples, as rows of the private set. Only the simulator knows them, see
    /// [`Method::needs_simulator`](crate::Method::needs_simulator).
    ///
    /// # Errors
    /// If there is no such client.
    pub fn samples_of(&self, client: u32) -> Result<Cow<'_, [u32]>> {
        let n = self.experiment.partition.n_clients();
        let expected = format!("one of the clients 0 to {}", n - 1);
        Error::require((client as usize) < n, "client", client, &expected)?;
        Ok(self.experiment.partition.indices(client as usize))
    }

    /// The number of all clients of the group, N.
    pub fn n_clients(&self) -> usize {
        self.groups.experiment.n_clients_of(self.group)
    }

    /// The number of classes.
    pub fn n_classes(&self) -> usize {
        self.experiment.private.n_classes()
    }

    /// Samples per class of each client of the round. Only the simulator knows them, see
    /// [`Method::needs_simulator`](crate::Method::needs_simulator).
    pub(crate) fn class_counts(&self) -> Vec<Vec<u32>> {
        let (private, partition) = (&self.experiment.private, &self.experiment.partition);
        let (labels, n_classes) = (private.labels().unwrap_or_default(), private.n_classes());
        self.summaries().map(|r| partition.class_counts(r.client as usize, labels, n_classes)).collect()
    }

    /// The selected clients, in increasing order.
    pub(crate) fn clients(&self) -> Vec<u32> {
        self.summaries().map(|r| r.client).collect()
    }

    /// A whole vector of the k-th selected client.
    pub(crate) fn vector_of(&self, k: usize, part: Part<'_>) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.len_of(part)];
        self.read(self.chosen[k], part, 0, &mut values)?;
        Ok(values)
    }

    /// The public samples' labels, for methods that need them.
    pub fn public_labels(&self) -> &[u32] {
        self.experiment.public.as_deref().and_then(fedproj_data::Dataset::labels).unwrap_or_default()
    }

    /// The number of public samples; 0 without a public set.
    pub fn n_public(&self) -> usize {
        self.experiment.n_public()
    }

    /// The configuration of the run.
    pub fn config(&self) -> &crate::Config {
        &self.experiment.config
    }
}
