//! FedGEMS. Cheng et al., "FedGEMS: Federated Learning of Larger Server Models via Selective Knowledge Fusion",
//! arXiv:2110.11027.
//!
//! Client  on its own batch w_k ← w_k − η ∇CE, on a public batch w_k ← w_k − η ∇[ε CE + (1 − ε) KL(σ(l) ‖ σ(f))], l: the
//!         server's logits; w_k goes on where it ended in its last round
//! Server  per public sample: if its model is right, its own logits are kept and are the target; else the clients that are right
//!         teach, by softmax(−H_k) of their entropies; if none is, what it kept.   w ← w − η ∇[ε CE + (1 − ε) KL(σ(target) ‖ σ(f))]
//! State kept by a client: its model.   Sent beyond FedAvg: the memory's indices and logits.
//! Departures from the paper: server and clients have the same network. Weights are sent, as with every method here, and the
//! server uses their logits alone. A client alternates own and public batches, the paper has an epoch of each.

use crate::config::{Config, OptimizerConfig};
use crate::distill::{Distill, DistillTargets};
use crate::error::{Error, Result};
use crate::evaluate::argmax;
use crate::experiment::Experiment;
use crate::fusion::Fusion;
use crate::memory::{MemoryConfig, Targets};
use crate::method::Method;
use crate::own::whole_model;
use crate::partial::Mean;
use crate::step::{At, Batch, Step, Term};
use fedproj_nn::{Graph, Loss};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// The server's logits for samples on which it was right, and which those are.
const LOGITS: &str = "logits";
const KNOWN: &str = "known";

/// Hyper-parameters of FedGEMS.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedGems {
    /// Weight ε of the public labels on both sides, in (0, 1]; 1 − ε is that of the logits.
    pub label_weight: f32,
    /// The public samples that clients distil.
    pub memory: MemoryConfig,
    /// The server's passes over the public set per round.
    pub epochs: u32,
    /// Samples per step of the server.
    pub batch: usize,
    /// The server's optimiser. It starts afresh every round.
    pub optimizer: OptimizerConfig,
}

impl Default for FedGems {
    fn default() -> Self {
        let memory = MemoryConfig { temperature: 1.0, ..MemoryConfig::default() };
        Self { label_weight: 0.5, memory, epochs: 1, batch: 256, optimizer: OptimizerConfig::adam(1e-3) }
    }
}

impl Method for FedGems {
    fn check(&self, _: &Config) -> Result<()> {
        let (epsilon, batch) = (self.label_weight, self.batch);
        Error::require(
            epsilon > 0.0 && epsilon <= 1.0,
            "method.fedgems.label_weight",
            epsilon,
            "above 0 and at most 1",
        )?;
        Error::require(batch > 0, "method.fedgems.batch", batch, "at least 1")?;
        self.memory.check("method.fedgems.memory")?;
        self.optimizer.check("method.fedgems.optimizer")
    }

    fn needs_public(&self) -> bool {
        true
    }

    fn needs_public_labels(&self) -> bool {
        true
    }

    fn memory(&self) -> Option<&MemoryConfig> {
        Some(&self.memory)
    }

    fn stays_with_client(&self, graph: &Graph) -> Vec<Range<usize>> {
        whole_model(graph)
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        step.update(g);
        if step.has_memory() {
            let term = |loss, weight| Term { loss, at: At::Output, weight };
            let (labels, logits) = (self.label_weight, 1.0 - self.label_weight);
            let loss = [term(Loss::CrossEntropy, labels), term(Loss::kl(self.memory.temperature), logits)];
            let g = step.gradient(Batch::Memory, &loss)?;
            step.update(g);
        }
        Ok(())
    }

    fn means(&self) -> Option<Vec<Mean>> {
        None
    }

    fn len_of_kept(&self, name: &str, experiment: &Experiment) -> Result<usize> {
        let n_public = experiment.n_public();
        Ok(if name == KNOWN { n_public } else { n_public * experiment.private.n_classes() })
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let (previous, classes) = (round.state.weights.clone(), round.n_classes());
        let labels = round.public_labels().to_vec();
        let own = round.global_outputs(false)?.logits;
        let clients: Vec<Vec<f32>> = round.client_outputs(false)?.into_iter().map(|o| o.logits).collect();
        let vectors = &mut round.state.vectors;
        let mut kept = vectors.remove(LOGITS).unwrap_or_else(|| vec![0.0; own.len()]);
        let mut known = vectors.remove(KNOWN).unwrap_or_else(|| vec![0.0; labels.len()]);
        let (mut targets, mut has_target) = (vec![0.0; own.len()], Vec::new());
        for (sample, &label) in labels.iter().enumerate() {
            let at = sample * classes..(sample + 1) * classes;
            let is_right = |logits: &&[f32]| argmax(logits) == label as usize;
            let teachers: Vec<&[f32]> = clients.iter().map(|z| &z[at.clone()]).filter(is_right).collect();
            if is_right(&&own[at.clone()]) {
                kept[at.clone()].copy_from_slice(&own[at.clone()]);
                known[sample] = 1.0;
            }
            if !is_right(&&own[at.clone()]) && !teachers.is_empty() {
                targets[at].copy_from_slice(&ensemble(&teachers));
            } else {
                targets[at.clone()].copy_from_slice(&kept[at]);
            }
            has_target.push(known[sample] > 0.0 || !teachers.is_empty());
        }
        vectors.extend([(LOGITS.to_owned(), kept), (KNOWN.to_owned(), known)]);
        let distill =
            Distill { epochs: self.epochs, batch: self.batch, optimizer: self.optimizer.clone(), ..Distill::default() };
        let weights = [self.label_weight, 1.0 - self.label_weight];
        let consensus =
            DistillTargets::Consensus { labels: &labels, logits: &targets, has_logits: &has_target, weights };
        round.distill(&distill, &consensus, &previous)?;
        let Targets { logits, .. } = round.global_outputs(false)?;
        round.state.targets = Some(Arc::new(Targets { logits, features: Vec::new() }));
        Ok(())
    }
}

/// The mean of logits, weighed by softmax(−H) of their entropies: who is sure counts more.
fn ensemble(logits: &[&[f32]]) -> Vec<f32> {
    let entropy = |z: &[f32]| {
        let most = z.iter().fold(f32::NEG_INFINITY, |most, z| most.max(*z));
        let total: f32 = z.iter().map(|z| (z - most).exp()).sum();
        // H = log Σ e^z − Σ p z
        total.ln() - z.iter().map(|z| (z - most).exp() / total * (z - most)).sum::<f32>()
    };
    let weights: Vec<f32> = logits.iter().map(|z| (-entropy(z)).exp()).collect();
    let total: f32 = weights.iter().sum();
    let mut mean = vec![0.0; logits[0].len()];
    for (z, w) in logits.iter().zip(weights) {
        mean.iter_mut().zip(*z).for_each(|(mean, z)| *mean += w / total * z);
    }
    mean
}
