//! What the server keeps between rounds.

use super::{SEND, STUDENT};
use crate::averages::{TEACHER, mix};
use crate::error::{Error, Result};
use crate::evaluate::{Evaluator, Model, Outputs, Which};
use crate::experiment::Experiment;
use crate::memory::Targets;
use crate::method::Method;
use crate::privacy::LIMITS;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What the server keeps between rounds. With the configuration it determines the rest of the run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerState {
    /// Completed rounds.
    pub n_rounds_done: u32,
    /// The weights that are sent next.
    pub weights: Vec<f32>,
    /// Their buffers.
    pub buffers: Vec<f32>,
    /// A method's own vectors, by name. Names that start with `send.` are sent to the clients.
    pub vectors: BTreeMap<String, Vec<f32>>,
    /// Targets of the memory.
    pub targets: Option<Arc<Targets>>,
    /// Weights and buffers that are evaluated instead of those that are sent: a method's, or an average over rounds.
    pub evaluated: Option<(Vec<f32>, Vec<f32>)>,
    /// The same for the further groups of `model.clients`.
    pub others: Vec<ServerState>,
}

impl ServerState {
    /// The state at the start of a run.
    pub(crate) fn start(experiment: &Experiment) -> Self {
        let of = |group: usize| {
            let experiment = experiment.group(group);
            Self { weights: experiment.weights.clone(), buffers: experiment.buffers.clone(), ..Self::default() }
        };
        Self { others: (1..experiment.n_groups()).map(of).collect(), ..of(0) }
    }

    /// Whether all vectors of all groups have the lengths of their networks. Sums over shorter ones would end early, unnoticed.
    pub(crate) fn check(&self, experiment: &Experiment, method: &dyn Method) -> Result<()> {
        let problem = |problem| Err(Error::Internal { what: "resuming", problem });
        if self.others.len() + 1 != experiment.n_groups() {
            let (found, expected) = (self.others.len() + 1, experiment.n_groups());
            return problem(format!("a state of {found} groups of clients does not fit {expected}"));
        }
        let (done, rounds) = (self.n_rounds_done, experiment.config.federation.rounds);
        if done > rounds {
            return problem(format!("a state after {done} rounds does not fit a run of {rounds}"));
        }
        for (group, state) in self.groups().enumerate() {
            let of = experiment.group(group);
            let (expected, found) = (of.weights.len(), state.weights.len());
            if expected != found || of.buffers.len() != state.buffers.len() {
                return problem(format!("a state of {found} weights does not fit a network of {expected}"));
            }
            state.check_vectors(of, method)?;
        }
        Ok(())
    }

    /// Whether a name is that of a vector which the engine keeps beside a method's. Methods choose others.
    pub fn holds(name: &str) -> bool {
        TEACHER.contains(&name) || LIMITS.contains(&name) || name == STUDENT[1]
    }

    /// The same for what stands beside weights and buffers.
    fn check_vectors(&self, of: &Experiment, method: &dyn Method) -> Result<()> {
        let check =
            |vector: &[f32], expected: usize| Error::check_len("a vector of the server", vector.len(), expected);
        let outputs = |at: usize| {
            let node = if at == 0 { Some(of.graph.output()) } else { of.graph.features() };
            of.n_public() * node.map_or(0, |node| of.graph.shape(node).len())
        };
        let check_outputs = |vector: &[f32], at| if vector.is_empty() { Ok(()) } else { check(vector, outputs(at)) };
        for (name, vector) in &self.vectors {
            let at = |names: &[&str; 2]| names.iter().position(|known| known == name);
            match (name.strip_prefix(SEND), at(&TEACHER)) {
                (Some(sent), _) => check(vector, method.len_of_sent(sent, of)?)?,
                (_, Some(at)) => check_outputs(vector, at)?,
                _ if at(&LIMITS).is_some() => check(vector, 1)?,
                _ if at(&STUDENT) == Some(1) => check(vector, of.buffers.len())?,
                _ => check(vector, method.len_of_kept(name, of)?)?,
            }
        }
        if let Some(targets) = &self.targets {
            check_outputs(&targets.logits, 0)?;
            check_outputs(&targets.features, 1)?;
        }
        if let Some((weights, buffers)) = &self.evaluated {
            check(weights, of.weights.len())?;
            check(buffers, of.buffers.len())?;
        }
        Ok(())
    }

    /// Rejects what a fusion made if clients cannot use it: the model, and all that is sent with it. A later round would fail
    /// for every client, when it is too late to leave out the contribution to blame.
    pub(crate) fn check_finite(&self, round: u32) -> Result<()> {
        let targets = self.targets.iter().flat_map(|targets| [&targets.logits, &targets.features]);
        let kept = self.vectors.values().chain(targets).map(|of| (of, "a value that the method's server keeps"));
        let evaluated = self.evaluated.iter().flat_map(|(weights, buffers)| [weights, buffers]);
        let evaluated = evaluated.map(|of| (of, "a weight of the evaluated model"));
        let sent = [&self.weights, &self.buffers].map(|of| (of, "a weight of the global model"));
        let mut all = sent.into_iter().chain(evaluated).chain(kept);
        match all.find(|(values, _)| values.iter().any(|v| !v.is_finite())) {
            None => Ok(()),
            Some((_, what)) => Err(Error::FusionNotFinite { round, what }),
        }
    }

    /// The states of all groups; the first is this one.
    pub fn groups(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(&self.others)
    }

    /// The state of a group.
    pub fn group(&self, group: usize) -> &Self {
        group.checked_sub(1).map_or(self, |at| &self.others[at])
    }

    pub(crate) fn group_mut(&mut self, group: usize) -> &mut Self {
        match group.checked_sub(1) {
            None => self,
            Some(at) => &mut self.others[at],
        }
    }

    /// The model that is evaluated and published: the one that is sent, unless another is evaluated.
    pub fn published(&self) -> Model<'_> {
        let sent = (&self.weights, &self.buffers);
        let (weights, buffers) = self.evaluated.as_ref().map_or(sent, |(weights, buffers)| (weights, buffers));
        Model { weights, buffers }
    }

    /// Averages the published model of a round with that of the rounds before, and publishes the average.
    pub(crate) fn average_published(&mut self, rate: f64, round: u32, before: Option<(Vec<f32>, Vec<f32>)>) {
        let ((weights, buffers), now) = (before.unwrap_or_default(), self.published());
        let average = (mix(rate, round, &weights, now.weights), mix(rate, round, &buffers, now.buffers));
        self.evaluated = Some(average);
    }
}

/// The global model and its evaluator, for the server's work before the first round.
#[derive(Clone, Copy, Debug)]
pub struct GlobalModel<'a> {
    pub(crate) experiment: &'a Experiment,
    pub(crate) evaluator: &'a Evaluator,
    pub(crate) state: &'a ServerState,
}

impl GlobalModel<'_> {
    /// Its outputs on the public set; none without a public set.
    ///
    /// # Errors
    /// If the model does not fit the network.
    pub fn public_outputs(&self, with_features: bool) -> Result<Targets> {
        if self.experiment.public.is_none() {
            return Ok(Targets::default());
        }
        let model = Model { weights: &self.state.weights, buffers: &self.state.buffers };
        let outputs = self.evaluator.outputs_on(self.experiment, Which::Public, &[model], with_features)?;
        let Outputs { logits, features } = outputs.into_iter().next().unwrap_or_default();
        Ok(Targets { logits, features })
    }
}
