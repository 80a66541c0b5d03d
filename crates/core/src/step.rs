//! One local step as a method sees it: gradients, vector arithmetic on handles, and the optimiser's update.
//!
//! A step is recorded, not computed. Handles name vectors; an executor runs the recorded operations later, on a CPU
//! thread or a GPU. So a method can branch only on what is known before the step.

use crate::cone::REFERENCES_MAX;
use crate::error::{Error, Result};
use crate::plan::{Op, Recorder, VectorId};
use fedproj_nn::vector::Bounds;
use fedproj_nn::{EmbeddingId, Graph, Loss, NodeId};
use fedproj_rng::{Purpose, Stream};
use serde::{Deserialize, Serialize};
use std::fmt::Debug;

/// The samples of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batch {
    /// The client's current mini-batch.
    Private,
    /// The next batch of the memory of public samples.
    Memory,
    /// The client's current mini-batch, with logits as the targets of [`Loss::Kl`]. The server sent them for it, or the client's
    /// own head computes them from features that the server's generator makes for the same labels.
    Taught,
    /// Features that the server's generator makes for random labels, and these labels; they enter the network where its own
    /// features are.
    Generated,
}

/// A vector as long as the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vector(pub(crate) VectorId);

/// A term of the objective whose gradient is taken: a loss, where it stands, and its weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Term {
    /// The loss, on the targets of the batch.
    pub loss: Loss,
    /// The nodes whose values it takes; the term is the mean over them.
    pub at: At,
    /// Its weight.
    pub weight: f32,
}

/// Where a loss stands in the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// The output.
    Output,
    /// The features, in networks that have them.
    Features,
    /// Every level.
    Levels,
    /// A node.
    Node(NodeId),
}

impl From<Loss> for Term {
    /// The loss at the output.
    fn from(loss: Loss) -> Self {
        Self { loss, at: At::Output, weight: 1.0 }
    }
}

impl At {
    /// The nodes, by their index.
    pub(crate) fn node(self, graph: &Graph, index: usize) -> Option<NodeId> {
        match self {
            Self::Levels => graph.levels().get(index).copied(),
            _ if index > 0 => None,
            Self::Output => Some(graph.output()),
            Self::Features => graph.features(),
            Self::Node(node) => Some(node),
        }
    }

    /// The number of nodes.
    pub(crate) fn n_nodes(self, graph: &Graph) -> usize {
        (0..).map_while(|index| self.node(graph, index)).count()
    }
}

/// How a gradient is projected against a reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProjectionRule {
    /// Whether and how far.
    pub bounds: Bounds,
    /// Whole vector, or tensor by tensor.
    pub scope: Scope,
    /// Only while the memory loss is not below that of the round's first model.
    pub from_round_start: bool,
}

/// What an inner product is taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// All parameters as one vector.
    Global,
    /// Each parameter tensor by itself.
    Layer,
}

/// One local step of one client.
#[derive(Debug)]
pub struct Step<'a> {
    pub(crate) recorder: &'a mut Recorder,
    pub(crate) place: Place,
}

/// The position of a step in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The run's seed.
    pub seed: u64,
    /// Round, counted from 0.
    pub round: u32,
    /// Rounds of the run.
    pub n_rounds: u32,
    /// The client.
    pub client: u32,
    /// Local epoch.
    pub epoch: u32,
    /// Local step in this round.
    pub step: u32,
}

impl Step<'_> {
    /// The step's position.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The network.
    pub fn graph(&self) -> &Graph {
        &self.recorder.graph
    }

    /// Whether the client has a memory with targets.
    pub fn has_memory(&self) -> bool {
        self.recorder.has_memory
    }

    /// Batches in a pass over the memory; 0 without one.
    pub fn n_memory_batches(&self) -> usize {
        self.recorder.n_memory_batches
    }

    /// Whether the server has sent a generator, see [`Method::generator`](crate::Method::generator).
    pub fn has_generator(&self) -> bool {
        self.recorder.has_generator
    }

    /// Whether the server has sent logits for the client's own samples, see
    /// [`Method::sends_logits`](crate::Method::sends_logits).
    pub fn has_logits(&self) -> bool {
        self.recorder.has_logits
    }

    /// A random number in [0, 1) per client and round.
    pub fn chance_of_round(&self) -> f64 {
        let Place { seed, round, client, .. } = self.place;
        Stream::new(seed, Purpose::ProjectionDropout, [round, client, u32::MAX]).uniform()
    }

    /// A random number in [0, 1) per step.
    pub fn chance_of_step(&self) -> f64 {
        let Place { seed, round, client, step, .. } = self.place;
        Stream::new(seed, Purpose::ProjectionDropout, [round, client, step]).uniform()
    }

    /// The gradient of a sum of terms on a batch. A plain [`Loss`] is a term at the output.
    ///
    /// # Errors
    /// If the loss is not finite, or the batch is of generated features and there is no generator.
    pub fn gradient(&mut self, batch: Batch, objective: &[impl Into<Term> + Copy]) -> Result<Vector> {
        self.check(batch)?;
        Ok(Vector(self.recorder.gradient(batch, VectorId::Weights, objective)))
    }

    /// The gradient of a sum of terms on a batch, not at w but at a vector that the client keeps. Running averages of
    /// batch-norm stay unchanged.
    ///
    /// # Errors
    /// If the vector is not kept by the client.
    pub fn gradient_at(&mut self, at: Vector, batch: Batch, objective: &[impl Into<Term> + Copy]) -> Result<Vector> {
        let VectorId::State(_) = at.0 else {
            return Err(Error::config("a gradient is taken at the weights or at a vector that the client keeps"));
        };
        self.check(batch)?;
        Ok(Vector(self.recorder.gradient(batch, at.0, objective)))
    }

    /// The gradient of a sum of terms on a batch, not at w but uphill of it, at w + radius·g/‖g‖.
    ///
    /// # Errors
    /// If the loss is not finite.
    pub fn gradient_uphill(
        &mut self,
        g: Vector,
        radius: f32,
        batch: Batch,
        objective: &[impl Into<Term> + Copy],
    ) -> Result<Vector> {
        self.check(batch)?;
        self.recorder.push(Op::Perturb { g: g.0, radius });
        Ok(Vector(self.recorder.gradient(batch, VectorId::Perturbed, objective)))
    }

    /// Whether there is such a batch: a generator and logits come from the server, and not before its first fusion.
    fn check(&self, batch: Batch) -> Result<()> {
        let is_there = match batch {
            Batch::Private | Batch::Memory => true,
            Batch::Taught => self.has_generator() || self.has_logits(),
            Batch::Generated => self.has_generator(),
        };
        let problem = "a step asks for generated features or a teacher's logits, but the server has sent none yet";
        if is_there { Ok(()) } else { Err(Error::config(problem)) }
    }

    /// Values of a node for the private batch under other weights, in evaluation mode, for [`Loss::Contrast`].
    ///
    /// # Errors
    /// If the network cannot take the batch.
    pub fn embed(&mut self, weights: Vector, node: NodeId) -> Result<EmbeddingId> {
        self.recorder.embed(weights.0, node)
    }

    /// The model that [`Finish::keep_model`] kept in an earlier round, if any.
    pub fn kept_model(&self, name: &str) -> Option<Vector> {
        self.recorder.kept_model(name).map(Vector)
    }

    /// Names of the vectors and models that the client keeps.
    pub fn kept(&self) -> impl Iterator<Item = &str> {
        self.recorder.kept.iter().map(|&at| self.recorder.names.states[at].as_str())
    }

    /// y ← x
    pub fn assign(&mut self, y: Vector, x: Vector) {
        self.recorder.push(Op::Assign { y: y.0, x: x.0 });
    }

    /// Scales g down to the norm `norm_max` if it is longer.
    pub fn clip(&mut self, g: Vector, norm_max: f32) {
        self.recorder.push(Op::Clip { g: g.0, norm_max });
    }

    /// g ← g − ⟨g, r⟩ / (‖r‖² + ε) · r if g points against r, within the rule's limits.
    ///
    /// # Errors
    /// If the network cannot take the memory batch.
    pub fn project(&mut self, g: Vector, r: Vector, rule: &ProjectionRule) -> Result<()> {
        self.recorder.push(Op::Project { g: g.0, r: r.0, rule: *rule });
        Ok(())
    }

    /// Replaces g by the nearest vector that points against none of several gradients, taken one after another.
    ///
    /// # Errors
    /// If there are none or more than 16 of them, or they are not gradients taken one after another.
    pub fn project_to_cone(&mut self, g: Vector, references: &[Vector]) -> Result<()> {
        let n = references.len();
        let first = match references.first() {
            Some(&Vector(VectorId::Gradient(first))) if n <= REFERENCES_MAX => first,
            _ => {
                let problem = format!("a cone is made of 1 to {REFERENCES_MAX} gradients of the step, not of {n}");
                return Err(Error::config(problem));
            }
        };
        if (first..first + n).map(VectorId::Gradient).ne(references.iter().map(|v| v.0)) {
            return Err(Error::config("a cone is made of gradients that are taken one after another"));
        }
        self.recorder.push(Op::ProjectToCone { g: g.0, first, n });
        Ok(())
    }

    /// `n` steps of the local optimiser, each along the gradient on its own batch.
    ///
    /// # Errors
    /// If a loss is not finite.
    pub fn descend(&mut self, n: usize, batch: Batch, objective: &[impl Into<Term> + Copy]) -> Result<()> {
        self.check(batch)?;
        let place = self.recorder.program.n_gradients();
        for _ in 0..n {
            let g = self.recorder.gradient_into(place, batch, VectorId::Weights, objective);
            self.recorder.push(Op::Update { g });
        }
        Ok(())
    }

    /// Removes from g what acts on inputs of the layers: G ← G − Σ_j (G r_j) r_jᵀ per layer, with the r_j in the rows of vectors
    /// that the server sent, named one after another. With `scales`, layers whose G lies mostly along them are scaled there
    /// (TRGP).
    ///
    /// # Errors
    /// If the vectors are not those that were sent, one after another.
    pub fn project_inputs(&mut self, g: Vector, sent: &[Vector], scales: bool) -> Result<()> {
        let places: Vec<VectorId> = sent.iter().map(|v| v.0).collect();
        let Some(&VectorId::Broadcast(first)) = places.first() else {
            return Err(Error::config("directions of inputs are vectors that the server sends"));
        };
        let n = places.len();
        if (first..first + n).map(VectorId::Broadcast).ne(places) {
            return Err(Error::config("directions of inputs are named one after another"));
        }
        self.recorder.push(Op::ProjectInputs { g: g.0, first, n, scales });
        Ok(())
    }

    /// One step of the local optimiser along g.
    pub fn update(&mut self, g: Vector) {
        self.recorder.push(Op::Update { g: g.0 });
    }

    /// As [`Step::update`], but then projects the optimiser's own step against r, for any optimiser.
    ///
    /// # Errors
    /// As [`Step::project`].
    pub fn update_projected(&mut self, g: Vector, r: Vector, rule: &ProjectionRule) -> Result<()> {
        self.recorder.push(Op::UpdateProjected { g: g.0, r: r.0, rule: *rule });
        Ok(())
    }
}

/// The end of a client's local training.
#[derive(Debug)]
pub struct Finish<'a> {
    pub(crate) recorder: &'a mut Recorder,
}

impl Finish<'_> {
    /// A vector of zeros that is sent to the server with the weights.
    pub fn upload(&mut self, name: &str) -> Vector {
        Vector(self.recorder.upload_id(name))
    }

    /// The sum of the learning rates of all local steps.
    pub fn lr_total(&self) -> f32 {
        self.recorder.lr_total
    }

    /// Keeps the weights and their buffers for later rounds, see [`Step::kept_model`].
    pub fn keep_model(&mut self, name: &str) {
        self.recorder.keep_model(name);
    }
}

/// What a method may do with vectors both in a step and after the last one.
macro_rules! vectors {
    ($($place:ident),*) => {$(
        impl $place<'_> {
            /// The client's current weights θ_k.
            pub fn weights(&self) -> Vector {
                Vector(VectorId::Weights)
            }

            /// The weights that the client received, θ_g.
            pub fn weights_round_start(&self) -> Vector {
                Vector(VectorId::RoundStart)
            }

            /// A vector that the server sent, by its name there; zeros if it sent none.
            pub fn broadcast(&mut self, name: &str) -> Vector {
                Vector(self.recorder.broadcast_id(name))
            }

            /// A vector that the client keeps between rounds; starts as zeros.
            pub fn state(&mut self, name: &str) -> Vector {
                Vector(self.recorder.state_id(name))
            }

            /// y ← y + a·x
            pub fn add_scaled(&mut self, y: Vector, a: f32, x: Vector) {
                self.recorder.push(Op::AddScaled { y: y.0, a, x: x.0 });
            }

            /// g ← g + a·(x − y)
            pub fn add_scaled_diff(&mut self, g: Vector, a: f32, x: Vector, y: Vector) {
                self.recorder.push(Op::AddScaledDiff { g: g.0, a, x: x.0, y: y.0 });
            }
        }
    )*};
}

vectors!(Step, Finish);
