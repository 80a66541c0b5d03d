//! Outputs on the public set, their ensemble, and its distillation.

use super::{Fusion, GlobalModel, STUDENT};
use crate::contributions::Part;
use crate::distill::{Anchor, Distill, DistillTargets, DistillTask, EnsembleWeights, Student};
use crate::error::Result;
use crate::evaluate::{Model, Outputs, Score, Which};
use crate::fixed::{Scale, Sum};
use crate::gpu::GpuStudent;
use crate::memory::Targets;
use crate::trainer::CpuStudent;
use fedproj_nn::{Cpu, vector};

impl Fusion<'_> {
    /// Every client's outputs on the public set, in evaluation mode, in the order of client ids and whatever their networks.
    ///
    /// # Errors
    /// If a model does not fit the network or cannot be read.
    pub fn client_outputs(&self, with_features: bool) -> Result<Vec<Outputs>> {
        let mut all = Vec::with_capacity(self.speaking.len());
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
        let (at_once, mut n_taken) = (self.evaluator.n_at_once(), 0);
        let group_of = |&at: &usize| self.groups.experiment.group_of(self.results.summary(at).client);
        let same_network = self.speaking.chunk_by(|a, b| group_of(a) == group_of(b));
        for ids in same_network.flat_map(|ids| ids.chunks(at_once)) {
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
                let evaluator = &self.groups.evaluators[group_of(&ids[0])];
                evaluator.outputs_on(self.experiment, Which::Public, &models, with_features)?
            };
            outputs.into_iter().enumerate().try_for_each(|(i, out)| take(n_taken + i, out))?;
            n_taken += ids.len();
        }
        Ok(())
    }

    /// The ensemble: the mean of the clients' logits (and features) on the public set, over the clients of all groups.
    ///
    /// # Errors
    /// If a model does not fit the network or cannot be read.
    pub fn ensemble(&self, weights: EnsembleWeights, with_features: bool) -> Result<Targets> {
        if self.groups.evaluators.len() == 1 {
            return self.mean_outputs(weights, with_features);
        }
        if let Some(known) = self.groups.ensemble.get() {
            return Ok(known.clone());
        }
        let ensemble = self.mean_outputs(weights, with_features)?;
        Ok(self.groups.ensemble.get_or_init(|| ensemble).clone())
    }

    fn mean_outputs(&self, weights: EnsembleWeights, with_features: bool) -> Result<Targets> {
        if let Some(scale) = self.scale {
            return self.fixed_ensemble(weights, with_features, scale);
        }
        let w = self.shares(weights, &self.speaking);
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
            && let Some(sum) = self.results.ensemble(self.evaluator, &self.speaking, &w, with_features)
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
        let (w, mut logits, mut features) =
            (self.fixed_weights(by, &self.speaking), Sum::of_length(0), Sum::of_length(0));
        self.each_output(with_features, |k, out| {
            for (sum, values) in [(&mut logits, &out.logits), (&mut features, &out.features)] {
                sum.values.resize(values.len(), 0);
                sum.add_client(values, w[k], scale).map_err(|error| self.blame(self.speaking[k], error))?;
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

    /// As [`Fusion::distill`], for a student that never leaves the server. It trains on in every round, and it is evaluated and
    /// published. Clients receive what they would without it.
    ///
    /// # Errors
    /// If the loss is not finite.
    pub fn distill_aside(&mut self, how: &Distill, targets: &DistillTargets<'_>) -> Result<()> {
        let sent = (self.state.weights.clone(), self.state.buffers.clone());
        if let [Some(weights), Some(buffers)] = STUDENT.map(|name| self.state.vectors.get(name).cloned()) {
            (self.state.weights, self.state.buffers) = (weights, buffers);
        }
        let previous = self.state.weights.clone();
        let distilled = self.distill(how, targets, &previous);
        let weights = std::mem::replace(&mut self.state.weights, sent.0);
        let buffers = std::mem::replace(&mut self.state.buffers, sent.1);
        for (name, values) in STUDENT.into_iter().zip([&weights, &buffers]) {
            self.state.vectors.insert(name.to_owned(), values.clone());
        }
        self.state.evaluated = Some((weights, buffers));
        distilled
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
