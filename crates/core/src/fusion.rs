//! The server's side of a round: averages, ensembles, distillation and the server's own state.
//!
//! Sums run client by client over blocks of coordinates, so memory does not grow with the number of clients.

use crate::averages::mix;
use crate::contributions::{Contributions, Head, Part};
use crate::distill::{Anchor, Distill, DistillTargets, DistillTask, EnsembleWeights, Student};
use crate::error::{Error, Result};
use crate::evaluate::{Evaluator, Model, Outputs, Score, Which};
use crate::experiment::Experiment;
use crate::fixed::{self, Scale, Sum};
use crate::gpu::GpuStudent;
use crate::memory::Targets;
use crate::pull::Clip;
use crate::robust::{RobustRule, krum};
use crate::trainer::CpuStudent;
use fedproj_nn::{Cpu, vector};
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
}

impl ServerState {
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

/// Prefix of vectors that are sent to the clients.
pub(crate) const SEND: &str = "send.";

/// Coordinates per client that a sum reads at a time: 64 KB, which stay in a core's cache.
const BLOCK: usize = 1 << 14;

/// Values, over all clients, that a rule over columns reads at a time.
const COLUMNS: usize = 1 << 20;

/// The fusion of one round.
#[derive(Debug)]
pub struct Fusion<'a> {
    pub(crate) experiment: &'a Experiment,
    pub(crate) evaluator: &'a Evaluator,
    pub(crate) n_threads: usize,
    pub(crate) round: u32,
    results: &'a dyn Contributions,
    /// The selected contributions, see [`RobustRule::Krum`].
    chosen: Vec<usize>,
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
    /// The fusion of these contributions, with the configured clipping and robust selection.
    pub(crate) fn new(
        experiment: &'a Experiment,
        evaluator: &'a Evaluator,
        n_threads: usize,
        results: &'a dyn Contributions,
        uploads: &[&'a str],
        state: &'a mut ServerState,
    ) -> Result<Self> {
        state.evaluated = None;
        let robust = &experiment.config.federation.robust;
        let scale = experiment.config.federation.scale(experiment.partition.n_clients());
        if let Some(scale) = scale.filter(|scale| results.n() > scale.n_clients_max()) {
            let (n, most) = (results.n(), scale.n_clients_max());
            return Err(Error::config(format!(
                "{n} contributions in a round, but federation.sum = \"fixed\" has room for {most}\n\
                 hint: a lower server.over_selection, or federation.sum=float"
            )));
        }
        let heads = || (0..results.n()).map(|at| results.head(at));
        let clips = Clip::all(robust, results, &state.weights, &state.buffers, uploads)?;
        let mut fusion = Self {
            experiment,
            evaluator,
            n_threads,
            round: state.n_rounds_done,
            results,
            chosen: (0..results.n()).collect(),
            claims_max: (
                robust.claim_max(heads().map(|head| head.n_samples as u64)) as usize,
                robust.claim_max(heads().map(|head| u64::from(head.n_steps))).try_into().unwrap_or(u32::MAX),
            ),
            clips,
            scale,
            state,
            before_distillation: None,
            distill_loss: None,
        };
        if robust.rule == RobustRule::Krum && results.n() > 0 {
            fusion.chosen = vec![krum(&fusion.squared_distances()?, robust.n_hostile(results.n()))];
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

    /// The heads of the selected contributions, in the order of client ids, with limited claims.
    pub fn heads(&self) -> impl Iterator<Item = Head<'_>> {
        let (samples_max, steps_max) = self.claims_max;
        self.chosen.iter().map(move |&at| {
            let head = self.results.head(at);
            Head { n_samples: head.n_samples.min(samples_max), n_steps: head.n_steps.min(steps_max), ..head }
        })
    }

    /// n_k / Σ n
    pub fn sample_weights(&self) -> Vec<f32> {
        let total: usize = self.heads().map(|r| r.n_samples).sum();
        self.heads().map(|r| r.n_samples as f32 / total as f32).collect()
    }

    /// 1 / m
    pub fn uniform_weights(&self) -> Vec<f32> {
        vec![1.0 / self.n_results() as f32; self.n_results()]
    }

    /// Σ_k w_k θ_k
    ///
    /// # Errors
    /// If a contribution cannot be read.
    pub fn weighted(&self, weights: &[f32]) -> Result<Vec<f32>> {
        self.sum(weights, Part::Weights)
    }

    /// The mean of any vector of the results. Under a robust rule: the rule's value.
    ///
    /// # Errors
    /// If a contribution cannot be read, or a value is out of the range of sums in integers.
    pub fn mean(&self, by: EnsembleWeights, part: Part<'_>) -> Result<Vec<f32>> {
        let Some(scale) = self.scale else { return self.sum(&self.shares(by), part) };
        let sum = match self.results.summed(by, part) {
            Some(sum) => sum?,
            None => self.fixed_sum(&self.fixed_weights(by), part, scale)?,
        };
        Ok(sum.mean(scale))
    }

    fn shares(&self, by: EnsembleWeights) -> Vec<f32> {
        match by {
            EnsembleWeights::Uniform => self.uniform_weights(),
            EnsembleWeights::Samples => self.sample_weights(),
            EnsembleWeights::PerStep | EnsembleWeights::BySteps => {
                let weights = self.fixed_weights(by);
                let total: f64 = weights.iter().sum();
                weights.iter().map(|w| (w / total) as f32).collect()
            }
        }
    }

    /// Whether the round adds up integers, so that nothing but [`crate::Method::means`] may be known of it.
    pub fn sums_integers(&self) -> bool {
        self.scale.is_some()
    }

    /// The weight of all clients in a mean, as [`fixed::weight_of`] counts it.
    ///
    /// # Errors
    /// If the clients were summed before, and not for this mean; or if the weight is too large to be exact.
    pub fn total(&self, by: EnsembleWeights, part: Part<'_>) -> Result<f64> {
        let total = match self.results.summed(by, part) {
            Some(sum) => sum?.weight,
            None => self.fixed_weights(by).iter().sum(),
        };
        let limit = fixed::total_max(by);
        if total < limit { Ok(total) } else { Err(Error::OutOfRange { value: total as f32, limit }) }
    }

    /// Σ_k w_k of any vector of the results. Under a robust rule: (Σ_k w_k) times the rule's value.
    ///
    /// # Errors
    /// If a contribution cannot be read.
    pub fn sum(&self, weights: &[f32], part: Part<'_>) -> Result<Vec<f32>> {
        let robust = &self.experiment.config.federation.robust;
        if self.is_by_column() {
            let total: f32 = weights.iter().sum();
            return self.by_coordinate(part, |column| total * robust.of_column(column));
        }
        if let Some(scale) = self.scale {
            let factor = fixed::factor_of(weights);
            let weights: Vec<f64> = weights.iter().map(|w| f64::from(*w) * factor).collect();
            return Ok(fixed::decode(&self.fixed_sum(&weights, part, scale)?.values, factor, scale));
        }
        if self.clips.is_empty()
            && let Some(sum) = self.results.weighted_sum(&self.chosen, weights, part)
        {
            return sum;
        }
        let mut out = vec![0.0; self.len_of(part)];
        let (cpu, mut row) = (&mut Cpu::new(1), vec![0.0; BLOCK.min(out.len())]);
        for (block, out) in out.chunks_mut(BLOCK).enumerate() {
            let row = &mut row[..out.len()];
            for (&at, &w) in self.chosen.iter().zip(weights) {
                self.read(at, part, block * BLOCK, row)?;
                vector::axpy(cpu, w, row, out);
            }
        }
        Ok(out)
    }

    /// Σ_k / N of any vector of the results, with N the number of all clients.
    ///
    /// # Errors
    /// As [`Fusion::mean`].
    pub fn sum_over_all(&self, part: Part<'_>) -> Result<Vec<f32>> {
        let (m, n) = (self.n_results(), self.n_clients() as f32);
        if self.scale.is_none() {
            return self.sum(&vec![1.0 / n; m], part);
        }
        let share = m as f32 / n;
        Ok(self.mean(EnsembleWeights::Uniform, part)?.into_iter().map(|v| v * share).collect())
    }

    /// The weights of the clients in sums in integers.
    fn fixed_weights(&self, by: EnsembleWeights) -> Vec<f64> {
        let config = &self.experiment.config;
        self.heads().map(|head| fixed::weight_of(by, head.n_samples, config.normalised_steps(head.n_steps))).collect()
    }

    /// As [`Fusion::sum`], in integers.
    fn fixed_sum(&self, weights: &[f64], part: Part<'_>, scale: Scale) -> Result<Sum> {
        let mut sum = Sum { weight: weights.iter().sum(), ..Sum::of_length(self.len_of(part)) };
        let mut row = vec![0.0; BLOCK.min(sum.values.len())];
        for (block, sum) in sum.values.chunks_mut(BLOCK).enumerate() {
            let row = &mut row[..sum.len()];
            for (&at, &w) in self.chosen.iter().zip(weights) {
                self.read(at, part, block * BLOCK, row)?;
                fixed::accumulate(row, w, scale, sum).map_err(|error| self.blame(at, error))?;
            }
        }
        Ok(sum)
    }

    /// An error that one contribution causes.
    fn blame(&self, at: usize, error: Error) -> Error {
        Error::Client { round: self.round, client: self.results.head(at).client, source: Box::new(error) }
    }

    /// Any function of a coordinate's values, with one value per client.
    ///
    /// # Errors
    /// If a contribution cannot be read.
    pub fn by_coordinate(&self, part: Part<'_>, of: impl Fn(&mut [f32]) -> f32) -> Result<Vec<f32>> {
        let (len, m) = (self.len_of(part), self.n_results());
        let block = (COLUMNS / m.max(1)).clamp(1, len.max(1));
        let (mut rows, mut column, mut out) = (vec![0.0; block * m], vec![0.0; m], Vec::with_capacity(len));
        for from in (0..len).step_by(block) {
            let width = block.min(len - from);
            for (&at, row) in self.chosen.iter().zip(rows.chunks_mut(block)) {
                self.read(at, part, from, &mut row[..width])?;
            }
            for i in 0..width {
                column.iter_mut().enumerate().for_each(|(k, v)| *v = rows[k * block + i]);
                out.push(of(&mut column));
            }
        }
        Ok(out)
    }

    fn is_by_column(&self) -> bool {
        matches!(self.experiment.config.federation.robust.rule, RobustRule::Median | RobustRule::TrimmedMean)
    }

    fn len_of(&self, part: Part<'_>) -> usize {
        self.chosen.first().map_or(0, |&at| self.results.len_of(at, part))
    }

    /// As [`Contributions::read`], with clipped vectors.
    fn read(&self, at: usize, part: Part<'_>, from: usize, out: &mut [f32]) -> Result<()> {
        self.results.read(at, part, from, out)?;
        for clip in &self.clips {
            clip.apply(at, part, from, out);
        }
        Ok(())
    }

    /// ‖θ_j − θ_k‖² between all contributions.
    fn squared_distances(&self) -> Result<Vec<Vec<f64>>> {
        let (len, n) = (self.len_of(Part::Weights), self.results.n());
        let block = (COLUMNS / n).clamp(1, len.max(1));
        let (mut rows, mut distances) = (vec![0.0; block * n], vec![vec![0.0; n]; n]);
        for from in (0..len).step_by(block) {
            let width = block.min(len - from);
            for (at, row) in rows.chunks_mut(block).enumerate() {
                self.read(at, Part::Weights, from, &mut row[..width])?;
            }
            for j in 0..n {
                for k in 0..j {
                    let (a, b) = (&rows[j * block..][..width], &rows[k * block..][..width]);
                    let part: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                    distances[j][k] += part;
                    distances[k][j] += part;
                }
            }
        }
        Ok(distances)
    }

    /// FedAvg: replaces weights and buffers by the n_k-weighted means.
    ///
    /// # Errors
    /// If a contribution cannot be read.
    pub fn average(&mut self) -> Result<()> {
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

    /// The number of all clients, N.
    pub fn n_clients(&self) -> usize {
        self.experiment.partition.n_clients()
    }

    /// The number of classes.
    pub fn n_classes(&self) -> usize {
        self.experiment.private.n_classes()
    }

    /// The number of public samples; 0 without a public set.
    pub fn n_public(&self) -> usize {
        self.experiment.public.as_ref().map_or(0, fedproj_data::Dataset::n_samples)
    }

    /// The configuration of the run.
    pub fn config(&self) -> &crate::Config {
        &self.experiment.config
    }

    /// Every client's outputs on the public set, in evaluation mode.
    ///
    /// # Errors
    /// If a model does not fit the network or cannot be read.
    pub fn client_outputs(&self, with_features: bool) -> Result<Vec<Outputs>> {
        let mut all = Vec::with_capacity(self.n_results());
        self.each_output(with_features, |_, outputs| {
            all.push(outputs);
            Ok(())
        })?;
        Ok(all)
    }

    /// Every client's outputs, a few clients at a time: those that it sent, else computed from its model.
    fn each_output(&self, with_features: bool, mut take: impl FnMut(usize, Outputs) -> Result<()>) -> Result<()> {
        if self.experiment.public.is_none() {
            return Ok(());
        }
        let whole = |at: usize, part: Part<'_>| -> Result<Vec<f32>> {
            let mut values = vec![0.0; self.results.len_of(at, part)];
            self.read(at, part, 0, &mut values)?;
            Ok(values)
        };
        let at_once = self.evaluator.n_at_once();
        for (batch, ids) in self.chosen.chunks(at_once).enumerate() {
            let sent = ids.iter().all(|&at| self.results.len_of(at, Part::Logits) > 0);
            let outputs = if sent {
                let of = |&at: &usize| {
                    let features = if with_features { whole(at, Part::Features)? } else { Vec::new() };
                    Ok(Outputs { logits: whole(at, Part::Logits)?, features })
                };
                ids.iter().map(of).collect::<Result<Vec<_>>>()?
            } else {
                let pair = |&at: &usize| Ok((whole(at, Part::Weights)?, whole(at, Part::Buffers)?));
                let models = ids.iter().map(pair).collect::<Result<Vec<_>>>()?;
                let models: Vec<Model<'_>> =
                    models.iter().map(|(weights, buffers)| Model { weights, buffers }).collect();
                self.evaluator.outputs_on(self.experiment, Which::Public, &models, with_features)?
            };
            outputs.into_iter().enumerate().try_for_each(|(i, out)| take(batch * at_once + i, out))?;
        }
        Ok(())
    }

    /// The ensemble: the mean of the clients' logits (and features) on the public set.
    ///
    /// # Errors
    /// If a model does not fit the network or cannot be read.
    pub fn ensemble(&self, weights: EnsembleWeights, with_features: bool) -> Result<Targets> {
        if let Some(scale) = self.scale {
            return self.fixed_ensemble(weights, with_features, scale);
        }
        let w = self.shares(weights);
        if self.is_by_column() {
            let outputs = self.client_outputs(with_features)?;
            let robust = &self.experiment.config.federation.robust;
            let over = |of: fn(&Outputs) -> &Vec<f32>| {
                let mut column = vec![0.0; outputs.len()];
                let value = |i: usize| {
                    column.iter_mut().zip(&outputs).for_each(|(v, out)| *v = of(out)[i]);
                    robust.of_column(&mut column)
                };
                (0..outputs.first().map_or(0, |out| of(out).len())).map(value).collect()
            };
            return Ok(Targets { logits: over(|o| &o.logits), features: over(|o| &o.features) });
        }
        if self.clips.is_empty()
            && let Some(sum) = self.results.ensemble(self.evaluator, &self.chosen, &w, with_features)
        {
            return sum.map(|Outputs { logits, features }| Targets { logits, features });
        }
        let (cpu, mut targets) = (&mut Cpu::new(1), Targets::default());
        self.each_output(with_features, |k, out| {
            targets.logits.resize(out.logits.len(), 0.0);
            targets.features.resize(out.features.len(), 0.0);
            vector::axpy(cpu, w[k], &out.logits, &mut targets.logits);
            vector::axpy(cpu, w[k], &out.features, &mut targets.features);
            Ok(())
        })?;
        Ok(targets)
    }

    /// As [`Fusion::ensemble`], in integers.
    fn fixed_ensemble(&self, by: EnsembleWeights, with_features: bool, scale: Scale) -> Result<Targets> {
        let summed = |part| self.results.summed(by, part).transpose();
        if let Some(logits) = summed(Part::Logits)? {
            let features = if with_features { summed(Part::Features)? } else { None };
            return Ok(Targets {
                logits: logits.mean(scale),
                features: features.map_or_else(Vec::new, |features| features.mean(scale)),
            });
        }
        let (w, mut logits, mut features) = (self.fixed_weights(by), Sum::of_length(0), Sum::of_length(0));
        self.each_output(with_features, |k, out| {
            for (sum, values) in [(&mut logits, &out.logits), (&mut features, &out.features)] {
                sum.values.resize(values.len(), 0);
                sum.add_client(values, w[k], scale).map_err(|error| self.blame(self.chosen[k], error))?;
            }
            Ok(())
        })?;
        Ok(Targets { logits: logits.mean(scale), features: features.mean(scale) })
    }

    /// Outputs of the state's weights on the public set.
    ///
    /// # Errors
    /// If the model does not fit the network.
    pub fn global_outputs(&self, with_features: bool) -> Result<Targets> {
        GlobalModel { experiment: self.experiment, evaluator: self.evaluator, state: self.state }
            .public_outputs(with_features)
    }

    /// Trains the state's weights towards targets on the public set. `previous`: the weights that clients received.
    ///
    /// # Errors
    /// If the loss is not finite.
    pub fn distill(&mut self, how: &Distill, targets: &DistillTargets<'_>, previous: &[f32]) -> Result<()> {
        self.before_distillation = Some(self.score()?);
        self.distill_loss = Some(self.train_student(how, targets, previous)?);
        Ok(())
    }

    fn train_student(&mut self, how: &Distill, targets: &DistillTargets<'_>, previous: &[f32]) -> Result<f64> {
        let (experiment, round) = (self.experiment, self.round);
        let Some(public) = &experiment.public else { return Ok(0.0) };
        let anchor = match how.anchor {
            Anchor::Average => &self.state.weights,
            Anchor::PreviousGlobal => previous,
        };
        let (weights, buffers) = (&self.state.weights[..], &self.state.buffers[..]);
        let task = DistillTask { how, round, weights, buffers, anchor, targets };
        let mut student: Box<dyn Student + '_> = match self.evaluator.on_gpu() {
            Some(on) => Box::new(GpuStudent::new(on, &task, public.n_samples())?),
            None => Box::new(CpuStudent::new(experiment, public, &task, self.n_threads)?),
        };
        let loss = how.run(experiment.config.seed, &task, public.n_samples(), student.as_mut())?;
        let (weights, buffers) = student.model()?;
        drop(student);
        (self.state.weights, self.state.buffers) = (weights, buffers);
        Ok(loss)
    }

    fn score(&self) -> Result<Score> {
        let model = Model { weights: &self.state.weights, buffers: &self.state.buffers };
        self.evaluator.score_on_test(self.experiment, model)
    }
}
