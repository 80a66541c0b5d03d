//! What a step does, written down: operations on named vectors, no numbers.

use crate::step::{Batch, ProjectionRule, Term};
use fedproj_nn::NodeId;

/// The name of a vector. All are as long as the parameters, but for the buffers of a kept model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VectorId {
    /// θ, which only the optimiser moves.
    Weights,
    /// θ as it was received, also where a client starts from its own.
    RoundStart,
    /// The result of an [`Op::Perturb`].
    Perturbed,
    /// The result of a [`Op::Backward`].
    Gradient(usize),
    /// A vector that the client keeps, by its place in [`Names::states`].
    State(usize),
    /// A vector that came with θ, by its place in [`Names::broadcasts`].
    Broadcast(usize),
    /// A vector that is sent back with θ, by its place in [`Names::uploads`].
    Upload(usize),
}

/// One operation. Operations hold no data, so equal steps of all clients share a program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Op {
    /// Gathers a batch with its targets and runs the network on it: at θ, or at [`VectorId::Perturbed`] or a state
    /// without moving running averages.
    Forward { batch: Batch, at: VectorId },
    /// Adds a term to the objective.
    Loss { term: Term },
    /// Writes the objective's gradient to `Gradient(out)` and, at θ, counts it as the loss of `batch`.
    Backward { batch: Batch, at: VectorId, out: usize },
    /// Perturbed ← θ + radius·g/‖g‖
    Perturb { g: VectorId, radius: f32 },
    /// Gathers an embedding's rows of the private batch; `index` is its place in [`Names::embeddings`].
    Embed { index: usize },
    /// y ← y + a·x
    AddScaled { y: VectorId, a: f32, x: VectorId },
    /// y ← x
    Assign { y: VectorId, x: VectorId },
    /// g ← g + a·(x − y)
    AddScaledDiff { g: VectorId, a: f32, x: VectorId, y: VectorId },
    /// Scales g down to the norm `norm_max` if it is longer.
    Clip { g: VectorId, norm_max: f32 },
    /// Projects g onto the vectors that point against none of the gradients `first..first + n`.
    ProjectToCone { g: VectorId, first: usize, n: usize },
    /// Takes from g what acts on the layers' inputs, whose directions are the broadcasts `first..first + n`.
    ProjectInputs { g: VectorId, first: usize, n: usize, scales: bool },
    /// Projects g against r.
    Project { g: VectorId, r: VectorId, rule: ProjectionRule },
    /// One step of the optimiser along g.
    Update { g: VectorId },
    /// One step of the optimiser along g, which is then projected against r.
    UpdateProjected { g: VectorId, r: VectorId, rule: ProjectionRule },
    /// Copies θ and its buffers to two states.
    KeepModel { weights: usize, buffers: usize },
}

/// The operations of one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Program {
    pub ops: Vec<Op>,
}

impl Program {
    /// Memory batches that it takes.
    pub fn n_memory(&self) -> usize {
        self.batches().filter(|batch| *batch == Batch::Memory).count()
    }

    /// The batches that it takes, in order.
    pub fn batches(&self) -> impl Iterator<Item = Batch> {
        self.ops.iter().filter_map(|op| if let Op::Forward { batch, .. } = op { Some(*batch) } else { None })
    }

    /// Gradients that it holds at a time.
    pub fn n_gradients(&self) -> usize {
        let place = |op: &Op| if let Op::Backward { out, .. } = op { out + 1 } else { 0 };
        self.ops.iter().map(place).max().unwrap_or(0)
    }

    /// Steps of the optimiser.
    pub fn n_updates(&self) -> usize {
        self.count(|op| matches!(op, Op::Update { .. } | Op::UpdateProjected { .. }))
    }

    /// Whether an optimiser's step is projected.
    pub fn projects_updates(&self) -> bool {
        self.count(|op| matches!(op, Op::UpdateProjected { .. })) > 0
    }

    /// Whether it uses [`VectorId::Perturbed`].
    pub fn perturbs(&self) -> bool {
        self.count(|op| matches!(op, Op::Perturb { .. })) > 0
    }

    fn count(&self, of: impl Fn(&Op) -> bool) -> usize {
        self.ops.iter().filter(|op| of(op)).count()
    }
}

/// Names of the vectors that programs work on, the same for all clients of a run.
#[derive(Debug, Default)]
pub(crate) struct Names {
    pub states: Vec<String>,
    pub broadcasts: Vec<String>,
    pub uploads: Vec<String>,
    /// Under which weights, and at which node.
    pub embeddings: Vec<(VectorId, NodeId)>,
}

impl Names {
    /// The place of a state.
    pub fn state(&mut self, name: &str) -> usize {
        place_of(&mut self.states, name)
    }

    /// Whether a state holds buffers, not parameters.
    pub fn is_buffers(&self, state: usize) -> bool {
        self.states[state].ends_with(&buffers_name(""))
    }

    /// The buffers that are kept with a kept model.
    pub fn buffers_of(&self, state: usize) -> Option<usize> {
        let name = buffers_name(&self.states[state]);
        self.states.iter().position(|n| *n == name)
    }
}

/// The name under which a kept model's buffers are kept.
pub(super) fn buffers_name(model: &str) -> String {
    format!("{model}.buffers")
}

/// The place of a name in a list, to which it is added if it is new.
pub(super) fn place_of(list: &mut Vec<String>, name: &str) -> usize {
    list.iter().position(|n| n == name).unwrap_or_else(|| {
        list.push(name.to_owned());
        list.len() - 1
    })
}
