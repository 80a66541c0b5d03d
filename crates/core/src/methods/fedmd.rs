//! FedMD. Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019 workshop,
//! arXiv:1910.03581.
//!
//! Client  digest   w_k ← w_k − η ∇ mean |f(x; w_k) − s̄(x)|   on the round's public samples x, the alignment set      Alg. 1
//!         revisit  w_k ← w_k − η ∇F_k(w_k)   on its own samples;   then it sends its scores s_k(x) = f(x; w_k)
//! Server  consensus s̄(x) = mean_k s_k(x), over clients of any network
//! State kept by a client: its model w_k, which never leaves it.   Sent: scores, in the place of the model.
//! Departures from the paper: clients start from the seed's weights, not from training on public labels. The server has a
//! model of its own, which digests the consensus as a client does and is sent to nobody: it is what is evaluated.

use crate::config::Config;
use crate::distill::{Distill, DistillTargets, EnsembleWeights};
use crate::error::{Error, Result};
use crate::fusion::Fusion;
use crate::memory::MemoryConfig;
use crate::method::Method;
use crate::own::whole_model;
use crate::partial::Mean;
use crate::step::{Batch, Step, Term};
use fedproj_nn::{Graph, Loss};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// Hyper-parameters of FedMD. The digest uses the clients' optimiser.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FedMd {
    /// A client's passes over the alignment set per round, before its own samples. 0: no digest.
    pub epochs: u32,
    /// The alignment set: `size`, `batch`, `resample` and `bn`. The other settings have no meaning here.
    pub memory: MemoryConfig,
}

impl Default for FedMd {
    fn default() -> Self {
        Self { epochs: 1, memory: MemoryConfig { size: 5000, ..MemoryConfig::default() } }
    }
}

impl Method for FedMd {
    fn check(&self, _: &Config) -> Result<()> {
        self.memory.check("method.fedmd.memory")?;
        let MemoryConfig { size, batch, resample, bn, .. } = self.memory;
        let rest =
            "method.fedmd.memory: only size, batch, resample and bn apply; leave the other settings at their defaults";
        let is_used = self.memory == MemoryConfig { size, batch, resample, bn, ..MemoryConfig::default() };
        if is_used { Ok(()) } else { Err(Error::config(rest)) }
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        if step.place().step == 0 {
            let n_batches = self.epochs as usize * step.n_memory_batches();
            step.descend(n_batches, Batch::Memory, &[Loss::AbsoluteError])?;
        }
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        step.update(g);
        Ok(())
    }

    fn stays_with_client(&self, graph: &Graph) -> Vec<Range<usize>> {
        whole_model(graph)
    }

    fn means(&self) -> Option<Vec<Mean>> {
        // Clients send their scores, so there is no sum over models to ask for.
        None
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        let consensus = round.ensemble(EnsembleWeights::Uniform, false)?;
        let (batch, optimizer) = (self.memory.batch, round.config().local.optimizer.clone());
        let digest = Distill { batch, optimizer, ..Distill::default() };
        round.distill_aside(&digest, &DistillTargets::Scores(&consensus))?;
        round.state.targets = Some(Arc::new(consensus));
        Ok(())
    }

    fn needs_public(&self) -> bool {
        true
    }

    fn exchanges_logits(&self) -> bool {
        true
    }

    fn sends_weights(&self) -> bool {
        false
    }

    fn memory(&self) -> Option<&MemoryConfig> {
        Some(&self.memory)
    }

    fn memory_objective(&self) -> Vec<Term> {
        vec![Loss::AbsoluteError.into()]
    }
}
