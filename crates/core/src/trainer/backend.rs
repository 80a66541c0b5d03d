//! The CPU behind the handles of a step: every call computes at once.

use super::gradient::gather_rows;
use super::vectors::find_or_zeros;
use super::{Trainer, VectorId, buffers_name};
use crate::error::{Error, Result};
use crate::step::{Backend, Batch, Place, ProjectionRule, Term};
use fedproj_nn::{Buffer, Cpu, Dropout, Graph, Mode, NodeId, clip_norm, vector};

impl Backend for Trainer {
    fn graph(&self) -> &Graph {
        &self.experiment.graph
    }

    fn has_memory(&self) -> bool {
        self.cursor.is_some()
    }

    fn embed(&mut self, weights: VectorId, node: NodeId) -> Result<usize> {
        // Weights that move within the round must not be remembered.
        self.embeddings.retain(|(id, _, _)| *id != VectorId::Weights);
        let cached = self.embeddings.iter().position(|(id, n, _)| (*id, *n) == (weights, node));
        let at = if let Some(at) = cached {
            at
        } else {
            let all = self.embed_all(weights, node)?;
            self.embeddings.push((weights, node, all));
            self.embeddings.len() - 1
        };
        if self.embedded.len() <= at {
            self.embedded.resize(at + 1, Vec::new());
        }
        gather_rows(&self.embeddings[at].2, self.samples.len(), &self.positions, &mut self.embedded[at]);
        Ok(at)
    }

    fn gradient(&mut self, place: Place, batch: Batch, objective: &[Term]) -> Result<VectorId> {
        let mode = match batch {
            Batch::Private => {
                self.gather_private();
                Mode::train(Self::dropout_key(place))
            }
            Batch::Memory => {
                self.gather_memory();
                let bn = self.memory_config.as_ref().map_or(Mode::EVAL.norm, |m| m.bn.mode());
                Mode { norm: bn, dropout: Dropout::Off }
            }
        };
        self.ws.forward(&self.theta, &mut self.buffers, &self.x, mode)?;
        let mut loss = 0.0;
        for term in objective {
            loss += self.add_term(term)?;
        }
        if !loss.is_finite() {
            let Place { round, client, epoch, step, .. } = place;
            return Err(Error::NotFinite { round, client, epoch, step, loss });
        }
        match batch {
            Batch::Private => self.loss_total += loss,
            Batch::Memory => {
                self.memory_loss = loss;
                self.stats.memory_loss_before.get_or_insert(loss);
            }
        }
        let id = self.n_gradients;
        self.n_gradients += 1;
        if self.gradients.len() == id {
            self.gradients.push(Buffer::zeros(self.theta.len()));
        }
        self.ws.backward(&self.theta, &mut self.gradients[id])?;
        Ok(VectorId::Gradient(id))
    }

    fn broadcast_id(&mut self, name: &str) -> VectorId {
        VectorId::Broadcast(find_or_zeros(&mut self.broadcasts, name, self.theta.len()))
    }

    fn state_id(&mut self, name: &str) -> VectorId {
        VectorId::State(find_or_zeros(&mut self.states, name, self.theta.len()))
    }

    fn upload_id(&mut self, name: &str) -> VectorId {
        VectorId::Upload(find_or_zeros(&mut self.uploads, name, self.theta.len()))
    }

    fn kept_model(&self, name: &str) -> Option<VectorId> {
        self.states.iter().position(|(n, _)| n == name).map(VectorId::State)
    }

    fn keep_model(&mut self, name: &str) {
        self.states.retain(|(n, _)| *n != name && *n != buffers_name(name));
        self.states.push((name.to_owned(), self.theta.clone()));
        self.states.push((buffers_name(name), Buffer::from(&self.buffers[..])));
    }

    fn lr_total(&self) -> f32 {
        (self.lr_factor_total * f64::from(self.experiment.config.local.optimizer.lr)) as f32
    }

    fn add_scaled(&mut self, y: VectorId, a: f32, x: VectorId) {
        let mut to = self.take(y);
        // A client trains on one thread: its vector operations need no team.
        vector::axpy(&mut Cpu::with_isa(1, self.ws.isa()), a, self.vector(x), &mut to);
        self.put_back(y, to);
    }

    fn add_scaled_diff(&mut self, g: VectorId, a: f32, x: VectorId, y: VectorId) {
        let mut to = self.take(g);
        let cpu = &mut Cpu::with_isa(1, self.ws.isa());
        vector::axpy_difference(cpu, a, self.vector(x), self.vector(y), &mut to);
        self.put_back(g, to);
    }

    fn clip(&mut self, g: VectorId, norm_max: f32) {
        if let VectorId::Gradient(i) = g {
            clip_norm(self.ws.cpu(), &mut self.gradients[i], norm_max);
        }
    }

    fn update(&mut self, g: VectorId) {
        let VectorId::Gradient(i) = g else { return };
        if let Some(norm_max) = self.experiment.config.local.clip_norm() {
            clip_norm(self.ws.cpu(), &mut self.gradients[i], norm_max);
        }
        self.optimizer.step(self.ws.cpu(), &mut self.theta, &self.gradients[i], self.lr_factor);
        self.lr_factor_total += f64::from(self.lr_factor);
    }

    fn project(&mut self, g: VectorId, r: VectorId, rule: &ProjectionRule) -> Result<()> {
        let (VectorId::Gradient(gi), VectorId::Gradient(ri)) = (g, r) else { return Ok(()) };
        let mut g = std::mem::take(&mut self.gradients[gi]);
        let r = std::mem::take(&mut self.gradients[ri]);
        let projected = self.project_slice(&mut g, &r, rule);
        (self.gradients[gi], self.gradients[ri]) = (g, r);
        projected.map(drop)
    }

    fn update_projected(&mut self, g: VectorId, r: VectorId, rule: &ProjectionRule) -> Result<()> {
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
}
