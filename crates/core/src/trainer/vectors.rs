//! The vectors behind the handles: arithmetic, the optimiser's step, projection.

use super::{Trainer, VectorId};
use crate::error::Result;
use crate::step::{ProjectionRule, Scope};
use fedproj_nn::Buffer;
use fedproj_nn::vector::{self, Conflict};

impl Trainer {
    pub(super) fn vector(&self, id: VectorId) -> &[f32] {
        match id {
            VectorId::Weights => &self.theta,
            VectorId::RoundStart => &self.download.weights,
            VectorId::Gradient(i) => &self.gradients[i],
            VectorId::State(i) => &self.states[i].1,
            VectorId::Broadcast(i) => &self.broadcasts[i].1,
            VectorId::Upload(i) => &self.uploads[i].1,
        }
    }

    /// Takes out a vector that is written to while others are read; its memory stays where it is.
    pub(super) fn take(&mut self, id: VectorId) -> Buffer {
        match id {
            VectorId::Gradient(i) => std::mem::take(&mut self.gradients[i]),
            VectorId::State(i) => std::mem::take(&mut self.states[i].1),
            VectorId::Upload(i) => std::mem::take(&mut self.uploads[i].1),
            VectorId::Weights | VectorId::RoundStart | VectorId::Broadcast(_) => {
                unreachable!("weights move by `update` alone, and what was received stays as it is")
            }
        }
    }

    pub(super) fn put_back(&mut self, id: VectorId, vector: Buffer) {
        match id {
            VectorId::Gradient(i) => self.gradients[i] = vector,
            VectorId::State(i) => self.states[i].1 = vector,
            VectorId::Upload(i) => self.uploads[i].1 = vector,
            VectorId::Weights | VectorId::RoundStart | VectorId::Broadcast(_) => (),
        }
    }

    /// Projects g against r by the rule; whether it did.
    pub(super) fn project_slice(&mut self, g: &mut [f32], r: &[f32], rule: &ProjectionRule) -> Result<bool> {
        let cpu = self.ws.cpu();
        let whole = Conflict::between(cpu, g, r);
        let norms = (whole.squared_norm * vector::squared_norm(cpu, g)).sqrt();
        self.stats.n_compared += 1;
        self.cosine_total += if norms > 0.0 { whole.dot / norms } else { 0.0 };
        if rule.from_round_start
            && let Some(config) = self.memory_config.clone()
            && self.memory_loss < self.loss_of_gathered(VectorId::RoundStart, &config)?
        {
            return Ok(false);
        }
        let cpu = self.ws.cpu();
        let active = match rule.scope {
            Scope::Global => whole.resolve(cpu, g, r, &rule.bounds),
            Scope::Layer => {
                let mut active = false;
                for span in self.experiment.graph.params().spans() {
                    let (g, r) = (&mut g[span.range()], &r[span.range()]);
                    active |= Conflict::between(cpu, g, r).resolve(cpu, g, r, &rule.bounds);
                }
                active
            }
        };
        self.stats.n_projected += u32::from(active);
        Ok(active)
    }
}

pub(super) fn find_or_zeros(list: &mut Vec<(String, Buffer)>, name: &str, len: usize) -> usize {
    list.iter().position(|(n, _)| n == name).unwrap_or_else(|| {
        list.push((name.to_owned(), Buffer::zeros(len)));
        list.len() - 1
    })
}
