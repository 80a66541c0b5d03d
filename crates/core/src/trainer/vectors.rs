//! The vectors behind the handles: arithmetic, the optimiser's step, projection.

use super::{Trainer, VectorId, buffers_name};
use crate::error::Result;
use crate::step::{ProjectionRule, Scope};
use fedproj_nn::vector::{self, Conflict};
use fedproj_nn::{Buffer, Cpu, clip_norm};

impl Trainer {
    pub fn broadcast_id(&mut self, name: &str) -> VectorId {
        VectorId::Broadcast(find_or_zeros(&mut self.broadcasts, name, self.theta.len()))
    }

    pub fn state_id(&mut self, name: &str) -> VectorId {
        VectorId::State(find_or_zeros(&mut self.states, name, self.theta.len()))
    }

    pub fn upload_id(&mut self, name: &str) -> VectorId {
        VectorId::Upload(find_or_zeros(&mut self.uploads, name, self.theta.len()))
    }

    pub fn kept_model(&self, name: &str) -> Option<VectorId> {
        self.states.iter().position(|(n, _)| n == name).map(VectorId::State)
    }

    pub fn keep_model(&mut self, name: &str) {
        self.states.retain(|(n, _)| *n != name && *n != buffers_name(name));
        self.states.push((name.to_owned(), self.theta.clone()));
        self.states.push((buffers_name(name), Buffer::from(&self.buffers[..])));
    }

    pub fn lr_total(&self) -> f32 {
        (self.lr_factor_total * f64::from(self.experiment.config.local.optimizer.lr)) as f32
    }

    fn vector(&self, id: VectorId) -> &[f32] {
        match id {
            VectorId::Weights => &self.theta,
            VectorId::RoundStart => &self.download.weights,
            VectorId::Gradient(i) => &self.gradients[i],
            VectorId::State(i) => &self.states[i].1,
            VectorId::Broadcast(i) => &self.broadcasts[i].1,
            VectorId::Upload(i) => &self.uploads[i].1,
        }
    }

    pub fn add_scaled(&mut self, y: VectorId, a: f32, x: VectorId) {
        let mut to = self.take(y);
        // A client trains on one thread: its vector operations need no team.
        vector::axpy(&mut Cpu::with_isa(1, self.ws.isa()), a, self.vector(x), &mut to);
        self.put_back(y, to);
    }

    pub fn add_scaled_diff(&mut self, g: VectorId, a: f32, x: VectorId, y: VectorId) {
        let mut to = self.take(g);
        let cpu = &mut Cpu::with_isa(1, self.ws.isa());
        vector::axpy_difference(cpu, a, self.vector(x), self.vector(y), &mut to);
        self.put_back(g, to);
    }

    /// Takes out a vector that is written to while others are read; its memory stays where it is.
    fn take(&mut self, id: VectorId) -> Buffer {
        match id {
            VectorId::Gradient(i) => std::mem::take(&mut self.gradients[i]),
            VectorId::State(i) => std::mem::take(&mut self.states[i].1),
            VectorId::Upload(i) => std::mem::take(&mut self.uploads[i].1),
            VectorId::Weights | VectorId::RoundStart | VectorId::Broadcast(_) => {
                unreachable!("weights move by `update` alone, and what was received stays as it is")
            }
        }
    }

    fn put_back(&mut self, id: VectorId, vector: Buffer) {
        match id {
            VectorId::Gradient(i) => self.gradients[i] = vector,
            VectorId::State(i) => self.states[i].1 = vector,
            VectorId::Upload(i) => self.uploads[i].1 = vector,
            VectorId::Weights | VectorId::RoundStart | VectorId::Broadcast(_) => (),
        }
    }

    pub fn clip(&mut self, g: VectorId, norm_max: f32) {
        if let VectorId::Gradient(i) = g {
            clip_norm(self.ws.cpu(), &mut self.gradients[i], norm_max);
        }
    }

    pub fn update(&mut self, g: VectorId) {
        let VectorId::Gradient(i) = g else { return };
        if let Some(norm_max) = self.experiment.config.local.clip_norm() {
            clip_norm(self.ws.cpu(), &mut self.gradients[i], norm_max);
        }
        self.optimizer.step(self.ws.cpu(), &mut self.theta, &self.gradients[i], self.lr_factor);
        self.lr_factor_total += f64::from(self.lr_factor);
    }

    pub fn project(&mut self, g: VectorId, r: VectorId, rule: &ProjectionRule) -> Result<()> {
        let (VectorId::Gradient(gi), VectorId::Gradient(ri)) = (g, r) else { return Ok(()) };
        let mut g = std::mem::take(&mut self.gradients[gi]);
        let r = std::mem::take(&mut self.gradients[ri]);
        let projected = self.project_slice(&mut g, &r, rule);
        (self.gradients[gi], self.gradients[ri]) = (g, r);
        projected.map(drop)
    }

    pub fn update_projected(&mut self, g: VectorId, r: VectorId, rule: &ProjectionRule) -> Result<()> {
        let VectorId::Gradient(ri) = r else { return Ok(()) };
        // u = θ_before − θ_after takes the gradient's part; then θ = θ_before − u.
        let before = Buffer::from(&self.theta[..]);
        self.update(g);
        let mut u = before.clone();
        vector::axpy(self.ws.cpu(), -1.0, &self.theta, &mut u);
        let r = std::mem::take(&mut self.gradients[ri]);
        let projected = self.project_slice(&mut u, &r, rule);
        self.gradients[ri] = r;
        if projected? {
            self.theta.copy_from_slice(&before);
            vector::axpy(self.ws.cpu(), -1.0, &u, &mut self.theta);
        }
        Ok(())
    }

    /// Projects g against r by the rule; whether it did.
    fn project_slice(&mut self, g: &mut [f32], r: &[f32], rule: &ProjectionRule) -> Result<bool> {
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

fn find_or_zeros(list: &mut Vec<(String, Buffer)>, name: &str, len: usize) -> usize {
    list.iter().position(|(n, _)| n == name).unwrap_or_else(|| {
        list.push((name.to_owned(), Buffer::zeros(len)));
        list.len() - 1
    })
}
