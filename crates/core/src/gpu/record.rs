//! What a method does in a step, written down instead of done: host choices are made here, numbers are computed later.

use crate::error::{Error, Result};
use crate::step::{Backend, Batch, Place, ProjectionRule, Term};
use crate::trainer::VectorId;
use fedproj_nn::{Graph, NodeId};

/// One call of a method.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Op {
    Gradient { batch: Batch, objective: Vec<Term>, out: usize },
    Embed { index: usize },
    AddScaled { y: VectorId, a: f32, x: VectorId },
    AddScaledDiff { g: VectorId, a: f32, x: VectorId, y: VectorId },
    Clip { g: VectorId, norm_max: f32 },
    Project { g: VectorId, r: VectorId, rule: ProjectionRule },
    Update { g: VectorId },
    UpdateProjected { g: VectorId, r: VectorId, rule: ProjectionRule },
    KeepModel { name: String },
}

/// The calls of one step. Clients and steps with equal programs share launches.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Program {
    pub ops: Vec<Op>,
}

impl Program {
    /// Memory batches that it takes.
    pub fn n_memory(&self) -> usize {
        self.ops.iter().filter(|op| matches!(op, Op::Gradient { batch: Batch::Memory, .. })).count()
    }

    /// Gradients that it holds at a time.
    pub fn n_gradients(&self) -> usize {
        self.ops.iter().filter(|op| matches!(op, Op::Gradient { .. })).count()
    }
}

/// Names of the vectors that handles stand for, the same for all clients of a run.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub states: Vec<String>,
    pub broadcasts: Vec<String>,
    pub uploads: Vec<String>,
    pub embeddings: Vec<(VectorId, NodeId)>,
}

fn place_of(list: &mut Vec<String>, name: &str) -> usize {
    list.iter().position(|n| n == name).unwrap_or_else(|| {
        list.push(name.to_owned());
        list.len() - 1
    })
}

/// Writes down what a method does for one client.
#[derive(Debug)]
pub(super) struct Recorder<'a> {
    pub graph: &'a Graph,
    pub names: &'a mut Names,
    /// Names of what the client keeps, to which new ones are added.
    pub kept: &'a mut Vec<String>,
    pub has_memory: bool,
    pub lr_total: f32,
    pub program: Program,
}

impl Backend for Recorder<'_> {
    fn graph(&self) -> &Graph {
        self.graph
    }

    fn has_memory(&self) -> bool {
        self.has_memory
    }

    fn gradient(&mut self, _: Place, batch: Batch, objective: &[Term]) -> Result<VectorId> {
        let out = self.program.n_gradients();
        self.program.ops.push(Op::Gradient { batch, objective: objective.to_vec(), out });
        Ok(VectorId::Gradient(out))
    }

    fn embed(&mut self, weights: VectorId, node: NodeId) -> Result<usize> {
        if weights == VectorId::Weights {
            return Err(Error::config(
                "a GPU embeds a client's samples once a round, so not under the weights that move within it\n\
                 hint: --device cpu",
            ));
        }
        let known = self.names.embeddings.iter().position(|e| *e == (weights, node));
        let index = known.unwrap_or_else(|| {
            self.names.embeddings.push((weights, node));
            self.names.embeddings.len() - 1
        });
        self.program.ops.push(Op::Embed { index });
        Ok(index)
    }

    fn broadcast_id(&mut self, name: &str) -> VectorId {
        VectorId::Broadcast(place_of(&mut self.names.broadcasts, name))
    }

    fn state_id(&mut self, name: &str) -> VectorId {
        place_of(self.kept, name);
        VectorId::State(place_of(&mut self.names.states, name))
    }

    fn upload_id(&mut self, name: &str) -> VectorId {
        VectorId::Upload(place_of(&mut self.names.uploads, name))
    }

    fn kept_model(&self, name: &str) -> Option<VectorId> {
        let known = self.kept.iter().any(|n| n == name);
        self.names.states.iter().position(|n| n == name).filter(|_| known).map(VectorId::State)
    }

    fn keep_model(&mut self, name: &str) {
        self.program.ops.push(Op::KeepModel { name: name.to_owned() });
    }

    fn lr_total(&self) -> f32 {
        self.lr_total
    }

    fn add_scaled(&mut self, y: VectorId, a: f32, x: VectorId) {
        self.program.ops.push(Op::AddScaled { y, a, x });
    }

    fn add_scaled_diff(&mut self, g: VectorId, a: f32, x: VectorId, y: VectorId) {
        self.program.ops.push(Op::AddScaledDiff { g, a, x, y });
    }

    fn clip(&mut self, g: VectorId, norm_max: f32) {
        self.program.ops.push(Op::Clip { g, norm_max });
    }

    fn project(&mut self, g: VectorId, r: VectorId, rule: &ProjectionRule) -> Result<()> {
        self.program.ops.push(Op::Project { g, r, rule: *rule });
        Ok(())
    }

    fn update(&mut self, g: VectorId) {
        self.program.ops.push(Op::Update { g });
    }

    fn update_projected(&mut self, g: VectorId, r: VectorId, rule: &ProjectionRule) -> Result<()> {
        self.program.ops.push(Op::UpdateProjected { g, r, rule: *rule });
        Ok(())
    }
}
