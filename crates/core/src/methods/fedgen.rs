//! FedGen. Zhu, Hong and Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021,
//! arXiv:2105.10056.
//!
//! Client  w ← w − η ∇[F_k(w) + α CE(h(G(ŷ, ε)), ŷ) + β KL(σ(h(G(y, ε))) ‖ σ(f(x)))]                  Eq. 5
//!         h: its network behind the features, fixed in the last term; ŷ: random labels that clients hold; (x, y): its own batch
//! Server  G ← G − η_s ∇[Σ_k a_k(y) CE(h_k(z), y) + γ exp(−mean_ij ‖ε_i − ε_j‖² |z_i − z_j|)],  z = G(y, ε)          Eq. 4
//!         a_k(y) = n_k^y / Σ_j n_j^y, and y is a label that some client has; the models are averaged as in FedAvg
//! State kept by a client: none.   Sent beyond FedAvg: the generator down, from the second round on.
//! Departures from the paper: the server sums the clients' cross-entropies by label, there are terms in β and γ, labels are
//! uniform, and α, β and η_s decay, all as in the official code. G has no batch-norm, so a feature depends on its own label and noise alone, and
//! Adam starts afresh every round. Only the simulator knows the n_k^y; a federation weighs by samples.

use super::fedkd::{ClassWeights, class_shares};
use crate::config::{Config, OptimizerConfig};
use crate::contributions::Part;
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::fusion::Fusion;
use crate::generator::{Generator, GeneratorConfig, Judge, closeness_slope, draw_noise, head_of};
use crate::machine;
use crate::method::Method;
use crate::partial::Mean;
use crate::robust::RobustRule;
use crate::step::{At, Batch, Step, Term};
use fedproj_data::PartitionConfig;
use fedproj_nn::{Cpu, Graph, Loss, Optimizer};
use fedproj_rng::{Purpose, Stream};
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedGen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedGen {
    /// Weight α ≥ 0 of the cross-entropy on generated features.
    pub generated_weight: f32,
    /// Weight β ≥ 0 of the divergence from the head's output on generated features of the same label.
    pub distill_weight: f32,
    /// Weight γ ≥ 0 of the term that keeps the generator's features apart.
    pub diversity_weight: f32,
    /// Factor per round of α, β and the generator's learning rate, in (0, 1].
    pub decay: f32,
    /// How clients weigh in the generator's loss.
    pub weights: ClassWeights,
    /// The generator G.
    pub generator: GeneratorConfig,
    /// Steps of the generator per round.
    pub steps: u32,
    /// The generator's optimiser. It starts afresh every round.
    pub optimizer: OptimizerConfig,
}

impl Default for FedGen {
    /// The official code's.
    fn default() -> Self {
        let (weights, optimizer) = (ClassWeights::Classes, OptimizerConfig::adam(3e-4));
        let (generated_weight, distill_weight, diversity_weight, decay, steps) = (10.0, 10.0, 1.0, 0.98, 50);
        let generator = GeneratorConfig::default();
        Self { generated_weight, distill_weight, diversity_weight, decay, weights, generator, steps, optimizer }
    }
}

impl Method for FedGen {
    fn check(&self, config: &Config) -> Result<()> {
        if let rule @ (RobustRule::Median | RobustRule::TrimmedMean) = config.federation.robust.rule {
            let word = if rule == RobustRule::Median { "median" } else { "trimmed_mean" };
            return Err(Error::config(format!(
                "federation.robust.rule = \"{word}\" guards the mean of the models, but method.name = \"fedgen\" teaches its \
                 generator by every client's own\nhint: federation.robust.rule=krum, or a limit with clip_ratio"
            )));
        }
        let Self { generated_weight, distill_weight, diversity_weight, decay, .. } = *self;
        for (name, weight) in [
            ("generated_weight", generated_weight),
            ("distill_weight", distill_weight),
            ("diversity_weight", diversity_weight),
        ] {
            Error::require(weight >= 0.0, &format!("method.fedgen.{name}"), weight, "0 or positive")?;
        }
        Error::require(decay > 0.0 && decay <= 1.0, "method.fedgen.decay", decay, "above 0 and at most 1")?;
        self.generator.check("method.fedgen.generator")?;
        self.optimizer.check("method.fedgen.optimizer")
    }

    fn check_network(&self, graph: &Graph) -> Result<()> {
        // G, its two moments, and a gradient.
        machine::check_memory(&self.generator.network(graph)?, 4)
    }

    fn generator(&self) -> Option<&GeneratorConfig> {
        Some(&self.generator)
    }

    /// As in the official code; a federation does not know them.
    fn generated_classes(&self, experiment: &Experiment) -> Option<Vec<u32>> {
        let (private, partition) = (&experiment.private, &experiment.partition);
        let (labels, n_classes) = (private.labels()?, private.n_classes());
        let mut is_held = vec![false; n_classes];
        match experiment.config.data.partition {
            _ if self.weights == ClassWeights::Samples => return None,
            // Any client may draw any sample.
            PartitionConfig::Virtual { .. } => labels.iter().for_each(|label| is_held[*label as usize] = true),
            _ => (0..partition.n_clients()).for_each(|client| {
                let counts = partition.class_counts(client, labels, n_classes);
                is_held.iter_mut().zip(counts).for_each(|(held, n)| *held |= n > 0);
            }),
        }
        Some((0..n_classes as u32).filter(|class| is_held[*class as usize]).collect())
    }

    fn needs_simulator(&self) -> Option<&str> {
        let by_class = self.weights == ClassWeights::Classes;
        by_class.then_some(
            "method.fedgen.weights = \"classes\" needs the clients' samples per class, which nodes do not send\n\
             hint: method.fedgen.weights=samples",
        )
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let decay = self.decay.powi(step.place().round as i32);
        let term = |loss, weight: f32| Term { loss, at: At::Output, weight };
        let (alpha, beta) = (decay * self.generated_weight, decay * self.distill_weight);
        let own = [term(Loss::CrossEntropy, 1.0), term(Loss::kl(1.0), beta)];
        let g = if step.has_generator() && beta > 0.0 {
            step.gradient(Batch::Taught, &own)?
        } else {
            step.gradient(Batch::Private, &own[..1])?
        };
        if step.has_generator() && alpha > 0.0 {
            let generated = step.gradient(Batch::Generated, &[term(Loss::CrossEntropy, alpha)])?;
            step.add_scaled(g, 1.0, generated);
        }
        step.update(g);
        Ok(())
    }

    fn means(&self) -> Option<Vec<Mean>> {
        None
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        self.train_generator(round)?;
        round.average()
    }
}

impl FedGen {
    /// The server's steps of the generator, Eq. 4.
    ///
    /// # Errors
    /// If a contribution cannot be read, or the network cannot have a generator.
    pub fn train_generator(&self, round: &mut Fusion<'_>) -> Result<()> {
        let (graph, seed, batch) = (&round.experiment.graph, round.config().seed, self.generator.batch);
        let (mut heads, classes) = self.heads(round)?;
        let mut generator = Generator::new(&self.generator, graph, batch, true)?;
        let (number, params) = (round.round(), round.generator(&self.generator)?);
        let (mut gradient, mut noise) = (vec![0.0; params.len()], Vec::new());
        let mut optimizer = Optimizer::new(self.optimizer.rule(), params.len())?;
        for step in 0..self.steps {
            let mut stream = Stream::new(seed, Purpose::Generator, [number, u32::MAX, step]);
            let labels: Vec<u32> = (0..batch).map(|_| classes[stream.below(classes.len() as u32) as usize]).collect();
            noise.clear();
            draw_noise(&mut stream, batch * self.generator.noise, &mut noise);
            let z = generator.features(params, &labels, &noise)?;
            let mut slope = closeness_slope(z, &noise, batch, self.diversity_weight);
            heads.iter_mut().try_for_each(|head| head.add_slope(z, &labels, &mut slope))?;
            generator.pull_back(params, &slope, &mut gradient)?;
            optimizer.step(&mut Cpu::new(1), params, &gradient, self.decay.powi(number as i32));
        }
        Ok(())
    }

    /// The heads of the round's clients, and the labels that some of them has.
    fn heads(&self, round: &Fusion<'_>) -> Result<(Vec<Judge>, Vec<u32>)> {
        let (tail, n_classes) = (head_of(&round.experiment.graph)?, round.n_classes());
        let all = 0..n_classes as u32;
        let (shares, classes) = match self.weights {
            ClassWeights::Classes => {
                let counts = round.class_counts();
                let has = |class: &u32| counts.iter().any(|counts| counts[*class as usize] > 0);
                (class_shares(&counts), all.filter(has).collect())
            }
            ClassWeights::Samples => {
                let shares = round.sample_weights().into_iter().map(|share| vec![share; n_classes]);
                (shares.collect(), all.collect())
            }
        };
        let judge = |(k, shares)| {
            let model = [round.vector_of(k, Part::Weights)?, round.vector_of(k, Part::Buffers)?];
            Judge::new(&tail, self.generator.batch, &model, shares)
        };
        Ok((shares.into_iter().enumerate().map(judge).collect::<Result<_>>()?, classes))
    }
}
