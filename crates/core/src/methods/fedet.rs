//! FedET. Cho et al., "Heterogeneous Ensemble Knowledge Transfer for Training Large Models in Federated Learning",
//! IJCAI 2022, arXiv:2204.12703.
//!
//! Client  as FedAvg
//! Server  per public sample: a_k = Var_c s_k / Σ_j Var_c s_j, consensus s = Σ a_k s_k, label ŷ = argmax s, diversity
//!         s_div = a-weighted mean over the clients whose argmax is not ŷ;
//!         student ← average, trained on CE(student, ŷ) + λ KL(σ(s_div) ‖ σ(student))
//! State kept by a client: none.   Sent beyond FedAvg: nothing.
//! Departures from the paper: no larger server model; the student is the average of its clients, one per network of
//! `model.clients`. Variant `authors-cv` is what FedProj's code calls FedET: per-class variances over samples, weights that
//! do not sum to 1, plain T²·KL (defect 6 in docs/fedproj.md).

use crate::authors;
use crate::config::{Config, OptimizerConfig};
use crate::distill::{Distill, DistillTargets};
use crate::error::{Error, Result};
use crate::evaluate::{argmax, variance};
use crate::fusion::Fusion;
use crate::method::Method;
use crate::partial::Mean;
use serde::{Deserialize, Serialize};

/// Hyper-parameters of FedET.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedEt {
    /// Weight λ ≥ 0 of the diversity term.
    pub diversity_weight: f32,
    /// The server's passes over the public set per round.
    pub epochs: u32,
    /// Samples per step of the server.
    pub batch: usize,
    /// The student's optimiser. It starts afresh every round.
    pub optimizer: OptimizerConfig,
    /// The FedET of its own paper, or that of FedProj's published code.
    pub variant: FedEtVariant,
}

/// See [`FedEt::variant`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FedEtVariant {
    /// The algorithm of its paper.
    Paper,
    /// What FedProj's published code for images calls FedET.
    AuthorsCv,
}

impl Default for FedEt {
    fn default() -> Self {
        let optimizer = OptimizerConfig::adam(1e-5);
        Self { diversity_weight: 0.05, epochs: 1, batch: 256, optimizer, variant: FedEtVariant::Paper }
    }
}

impl Method for FedEt {
    fn check(&self, _: &Config) -> Result<()> {
        Error::require(self.batch > 0, "method.fedet.batch", self.batch, "at least 1")?;
        let weight = self.diversity_weight;
        Error::require(weight >= 0.0, "method.fedet.diversity_weight", weight, "0 or positive")?;
        self.optimizer.check("method.fedet.optimizer")
    }

    fn needs_public(&self) -> bool {
        true
    }

    fn exchanges_logits(&self) -> bool {
        true
    }

    fn means(&self) -> Option<Vec<Mean>> {
        None
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let previous = round.state.weights.clone();
        round.average()?;
        let scores: Vec<Vec<f32>> = round.client_outputs(false)?.into_iter().map(|o| o.logits).collect();
        let optimizer = self.optimizer.clone();
        let distill = Distill { epochs: self.epochs, batch: self.batch, optimizer, ..Distill::default() };
        let classes = round.n_classes();
        if self.variant == FedEtVariant::AuthorsCv {
            let teacher = authors::teacher_by_class(&scores, classes);
            return round.distill(&distill, &DistillTargets::Teacher(&teacher), &previous);
        }
        let n = scores.first().map_or(0, Vec::len) / classes;
        let (mut labels, mut diversity, mut has_diversity) = (Vec::new(), Vec::new(), Vec::new());
        for sample in 0..n {
            let rows: Vec<&[f32]> = scores.iter().map(|s| &s[sample * classes..(sample + 1) * classes]).collect();
            let a: Vec<f32> = rows.iter().map(|row| variance(row)).collect();
            let weighted = |keep: &dyn Fn(&[f32]) -> bool| {
                let total: f32 = rows.iter().zip(&a).filter(|(row, _)| keep(row)).map(|(_, a)| a).sum();
                let mut mean = vec![0.0; classes];
                for (row, a) in rows.iter().zip(&a).filter(|(row, _)| keep(row)) {
                    mean.iter_mut().zip(*row).for_each(|(m, s)| *m += a / total * s);
                }
                (total > 0.0, mean)
            };
            let label = argmax(&weighted(&|_| true).1);
            let (exists, s_div) = weighted(&|row| argmax(row) != label);
            labels.push(label as u32);
            diversity.extend(s_div);
            has_diversity.push(exists);
        }
        let (logits, has_logits, weights) = (&diversity[..], &has_diversity[..], [1.0, self.diversity_weight]);
        let consensus = DistillTargets::Consensus { labels: &labels, logits, has_logits, weights };
        round.distill(&distill, &consensus, &previous)
    }
}
