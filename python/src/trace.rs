//! What a method written in Python does in a step, recorded once and played back without Python.
//!
//! Python is asked with facts about the step. It answers with the facts that it looked at and with operations. A step with
//! the same facts is played back from here. So a method that looks at nothing is asked once in a run, and one that looks at
//! the round once per round.

use fedproj_core::{
    At, Batch, Error, Finish, GENERATOR, LOGITS, Loss, ProjectionRule, Result, Scope, Step, Term, Vector,
};
use fedproj_nn::vector::Bounds;
use fedproj_nn::{EmbeddingId, Graph, NodeId};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

/// Something that is known before a step, and that a method may look at.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fact {
    /// The run's seed.
    Seed,
    /// Round, counted from 0.
    Round,
    /// Rounds of the run.
    NRounds,
    /// The client.
    Client,
    /// Local epoch.
    Epoch,
    /// Local step of the round.
    Step,
    /// Whether the client has a memory with targets.
    HasMemory,
    /// Batches in a pass over the memory.
    NMemoryBatches,
    /// Whether the server has sent a generator.
    HasGenerator,
    /// Whether the server has sent logits for the client's own samples.
    HasLogits,
    /// Whether the client kept a model of this name.
    Kept(String),
    /// How a random number per client and round compares with a limit.
    ChanceOfRound(Comparison, f64),
    /// How a random number per step compares with a limit.
    ChanceOfStep(Comparison, f64),
    /// The sum of the learning rates of all local steps.
    LrTotal,
}

/// A comparison with a limit.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Comparison {
    /// <
    Below,
    /// ≤
    AtMost,
    /// >
    Above,
    /// ≥
    AtLeast,
}

impl Comparison {
    fn holds(self, value: f64, limit: f64) -> bool {
        match self {
            Self::Below => value < limit,
            Self::AtMost => value <= limit,
            Self::Above => value > limit,
            Self::AtLeast => value >= limit,
        }
    }
}

/// A step, or the end of a client's round: what knows facts, and takes operations.
pub trait Recorded {
    /// The answer as a number; equal facts have equal numbers.
    fn answer(&self, fact: &Fact) -> u64;
    /// All facts, for Python.
    fn facts(&self) -> serde_json::Value;
    /// Plays an operation back.
    fn play(&mut self, call: &Call, played: &mut Played, taps: &[String]) -> Result<()>;
}

/// What Python answers.
#[derive(Deserialize)]
pub struct Answer {
    facts: Vec<Fact>,
    calls: Vec<Call>,
}

/// A vector by its name.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Name {
    /// The client's weights.
    Weights,
    /// The weights that it received.
    Start,
    /// What it keeps between rounds.
    State(String),
    /// What the server sent.
    Broadcast(String),
    /// What it sends.
    Upload(String),
    /// A model that it kept.
    Kept(String),
    /// A gradient of this step, by its order.
    Gradient(usize),
}

/// An operation of a step.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Call {
    /// Names a vector, which exists from then on.
    Declare { v: Name },
    /// The gradient of a sum of terms on a batch.
    Gradient { batch: BatchName, terms: Vec<TermSpec> },
    /// The gradient at a vector that the client keeps.
    GradientAt { at: Name, batch: BatchName, terms: Vec<TermSpec> },
    /// The gradient uphill of the weights, at w + radius·g/‖g‖.
    GradientUphill { g: Name, radius: f32, batch: BatchName, terms: Vec<TermSpec> },
    /// Values of a node under other weights.
    Embed { weights: Name, at: String },
    /// y ← y + a·x
    AddScaled { y: Name, a: f32, x: Name },
    /// y ← x
    Assign { y: Name, x: Name },
    /// g ← g + a·(x − y)
    AddScaledDiff { g: Name, a: f32, x: Name, y: Name },
    /// Scales g to a norm of at most `norm_max`.
    Clip { g: Name, norm_max: f32 },
    /// Projects g against r.
    Project { g: Name, r: Name, rule: Rule },
    /// Projects g onto the vectors that conflict with none of the references.
    ProjectToCone { g: Name, references: Vec<Name> },
    /// Takes from g what acts on the layers' inputs along directions that the server sent.
    ProjectInputs { g: Name, sent: Vec<Name>, scales: bool },
    /// Steps of the optimiser, each along the gradient on its own batch.
    Descend { n: usize, batch: BatchName, terms: Vec<TermSpec> },
    /// A step of the optimiser.
    Update { g: Name },
    /// A step of the optimiser that is projected against r.
    UpdateProjected { g: Name, r: Name, rule: Rule },
    /// Keeps the weights and their buffers.
    KeepModel { name: String },
}

/// The samples of a gradient.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchName {
    /// The client's own.
    Private,
    /// Those of the memory.
    Memory,
    /// The client's own, with a teacher's logits.
    Taught,
    /// Features of the generator.
    Generated,
}

impl From<BatchName> for Batch {
    fn from(name: BatchName) -> Self {
        match name {
            BatchName::Private => Self::Private,
            BatchName::Memory => Self::Memory,
            BatchName::Taught => Self::Taught,
            BatchName::Generated => Self::Generated,
        }
    }
}

/// How a gradient is projected.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    always: bool,
    eps: f64,
    norm_guard: Option<f64>,
    coefficient_max: Option<f64>,
    scope: Scope,
    from_round_start: bool,
}

impl From<Rule> for ProjectionRule {
    fn from(rule: Rule) -> Self {
        let bounds = Bounds {
            always: rule.always,
            eps: rule.eps,
            norm_guard: rule.norm_guard.unwrap_or(0.0),
            coefficient_max: rule.coefficient_max.unwrap_or(f64::INFINITY),
        };
        Self { bounds, scope: rule.scope, from_round_start: rule.from_round_start }
    }
}

/// A term of an objective.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TermSpec {
    /// Its embeddings by their order in the step.
    loss: Loss,
    at: String,
    weight: f32,
}

/// What operations of the same step refer to.
#[derive(Default)]
pub struct Played {
    gradients: Vec<Vector>,
    embeddings: Vec<EmbeddingId>,
}

impl Played {
    fn gradient(&self, index: usize) -> Result<Vector> {
        self.gradients.get(index).copied().ok_or_else(|| mismatch("there is no such gradient in this step"))
    }

    /// The loss, with the embeddings that the step has made.
    fn loss(&self, loss: Loss) -> Result<Loss> {
        let made =
            |at: EmbeddingId| self.embeddings.get(at.0).copied().ok_or_else(|| mismatch("there is no such embedding"));
        Ok(match loss {
            Loss::NotTrueKl { teacher, temperature } => Loss::NotTrueKl { teacher: made(teacher)?, temperature },
            Loss::Contrast { positive, negative, temperature } => {
                Loss::Contrast { positive: made(positive)?, negative: made(negative)?, temperature }
            }
            loss => loss,
        })
    }
}

fn mismatch(problem: &str) -> Error {
    Error::config(format!("a method's recorded step: {problem}"))
}

/// A node by `output`, `features` or its own name.
pub fn node(graph: &Graph, at: &str) -> Result<NodeId> {
    let node = match at {
        "output" => Some(graph.output()),
        "features" => graph.features(),
        name => graph.find(name),
    };
    node.ok_or_else(|| Error::config(format!("the network has no node `{at}`")))
}

impl Recorded for Step<'_> {
    fn answer(&self, fact: &Fact) -> u64 {
        let place = self.place();
        match fact {
            Fact::Seed => place.seed,
            Fact::Round => place.round.into(),
            Fact::NRounds => place.n_rounds.into(),
            Fact::Client => place.client.into(),
            Fact::Epoch => place.epoch.into(),
            Fact::Step => place.step.into(),
            Fact::HasMemory => self.has_memory().into(),
            Fact::NMemoryBatches => self.n_memory_batches() as u64,
            Fact::HasGenerator => self.has_generator().into(),
            Fact::HasLogits => self.has_logits().into(),
            Fact::Kept(name) => self.kept_model(name).is_some().into(),
            Fact::ChanceOfRound(how, limit) => how.holds(self.chance_of_round(), *limit).into(),
            Fact::ChanceOfStep(how, limit) => how.holds(self.chance_of_step(), *limit).into(),
            Fact::LrTotal => 0,
        }
    }

    fn facts(&self) -> serde_json::Value {
        let place = self.place();
        serde_json::json!({
            "seed": place.seed,
            "round": place.round,
            "n_rounds": place.n_rounds,
            "client": place.client,
            "epoch": place.epoch,
            "step": place.step,
            "has_memory": self.has_memory(),
            "n_memory_batches": self.n_memory_batches(),
            "has_generator": self.has_generator(),
            "has_logits": self.has_logits(),
            "kept": self.kept().collect::<Vec<_>>(),
            "chance_of_round": self.chance_of_round(),
            "chance_of_step": self.chance_of_step(),
        })
    }

    fn play(&mut self, call: &Call, played: &mut Played, taps: &[String]) -> Result<()> {
        match call {
            Call::Declare { v } => vector_of(self, v, played).map(drop)?,
            Call::Gradient { batch, terms }
            | Call::GradientAt { batch, terms, .. }
            | Call::GradientUphill { batch, terms, .. } => {
                let terms = objective(self.graph(), terms, played, taps)?;
                let g = gradient(self, call, (*batch).into(), &terms, played)?;
                played.gradients.push(g);
            }
            Call::Descend { n, batch, terms } => {
                let terms = objective(self.graph(), terms, played, taps)?;
                self.descend(*n, (*batch).into(), &terms)?;
            }
            Call::Embed { weights, at } => {
                let (weights, node) = (vector_of(self, weights, played)?, node(self.graph(), at)?);
                check_tap(at, taps)?;
                played.embeddings.push(self.embed(weights, node)?);
            }
            Call::AddScaled { y, a, x } => {
                let (y, x) = (vector_of(self, y, played)?, vector_of(self, x, played)?);
                self.add_scaled(y, *a, x);
            }
            Call::Assign { y, x } => {
                let (y, x) = (vector_of(self, y, played)?, vector_of(self, x, played)?);
                self.assign(y, x);
            }
            Call::AddScaledDiff { g, a, x, y } => {
                let g = vector_of(self, g, played)?;
                let (x, y) = (vector_of(self, x, played)?, vector_of(self, y, played)?);
                self.add_scaled_diff(g, *a, x, y);
            }
            Call::Clip { g, norm_max } => {
                let g = vector_of(self, g, played)?;
                self.clip(g, *norm_max);
            }
            Call::Project { g, r, rule } => {
                let (g, r) = (vector_of(self, g, played)?, vector_of(self, r, played)?);
                self.project(g, r, &(*rule).into())?;
            }
            Call::ProjectToCone { g, references } => {
                let references = references.iter().map(|r| vector_of(self, r, played)).collect::<Result<Vec<_>>>()?;
                let g = vector_of(self, g, played)?;
                self.project_to_cone(g, &references)?;
            }
            Call::ProjectInputs { g, sent, scales } => {
                let sent = sent.iter().map(|v| vector_of(self, v, played)).collect::<Result<Vec<_>>>()?;
                let g = vector_of(self, g, played)?;
                self.project_inputs(g, &sent, *scales)?;
            }
            Call::Update { g } => {
                let g = vector_of(self, g, played)?;
                self.update(g);
            }
            Call::UpdateProjected { g, r, rule } => {
                let (g, r) = (vector_of(self, g, played)?, vector_of(self, r, played)?);
                self.update_projected(g, r, &(*rule).into())?;
            }
            Call::KeepModel { .. } => return Err(mismatch("models are kept after the last step")),
        }
        Ok(())
    }
}

/// The gradient that a call asks for: at the weights, unless it names another place.
fn gradient(step: &mut Step<'_>, call: &Call, batch: Batch, terms: &[Term], played: &Played) -> Result<Vector> {
    match call {
        Call::GradientAt { at, .. } => {
            let at = vector_of(step, at, played)?;
            step.gradient_at(at, batch, terms)
        }
        Call::GradientUphill { g, radius, .. } => {
            let g = vector_of(step, g, played)?;
            step.gradient_uphill(g, *radius, batch, terms)
        }
        _ => step.gradient(batch, terms),
    }
}

fn objective(graph: &Graph, terms: &[TermSpec], played: &Played, taps: &[String]) -> Result<Vec<Term>> {
    let term = |spec: &TermSpec| {
        let at = place_of(graph, &spec.at, taps)?;
        Ok(Term { loss: played.loss(spec.loss)?, at, weight: spec.weight })
    };
    terms.iter().map(term).collect()
}

fn vector_of(step: &mut Step<'_>, name: &Name, played: &Played) -> Result<Vector> {
    Ok(match name {
        Name::Weights => step.weights(),
        Name::Start => step.weights_round_start(),
        Name::State(name) => step.state(kept(name)?),
        Name::Broadcast(name) => step.broadcast(sent(name)?),
        Name::Kept(name) => step.kept_model(name).ok_or_else(|| mismatch("there is no such kept model"))?,
        Name::Gradient(index) => played.gradient(*index)?,
        Name::Upload(_) => return Err(mismatch("vectors are sent after the last step")),
    })
}

/// The name of a vector that the server sent, which must be as long as the weights.
fn sent(name: &str) -> Result<&str> {
    if [GENERATOR, LOGITS].contains(&name) {
        let batches = "gradients on step.taught and step.generated use it";
        return Err(Error::config(format!("`{name}` is not as long as the weights, so no vector takes it: {batches}")));
    }
    Ok(name)
}

/// The name of a vector that a client keeps, which must not be one of the engine's own.
fn kept(name: &str) -> Result<&str> {
    if name == "stays" || name.ends_with(".buffers") {
        return Err(Error::config(format!("`{name}` is a name of the engine's own; a kept vector needs another")));
    }
    Ok(name)
}

/// Where a loss stands. Nodes beside the output exist only if the method has announced them.
fn place_of(graph: &Graph, at: &str, taps: &[String]) -> Result<At> {
    if at == "output" {
        return Ok(At::Output);
    }
    check_tap(at, taps)?;
    Ok(match at {
        "features" => node(graph, at).map(|_| At::Features)?,
        "levels" => At::Levels,
        name => At::Node(node(graph, name)?),
    })
}

fn check_tap(at: &str, taps: &[String]) -> Result<()> {
    if at == "output" || taps.iter().any(|tap| tap == at) {
        return Ok(());
    }
    Err(Error::config(format!("a loss stands at `{at}`, which the method does not announce\nhint: taps = (\"{at}\",)")))
}

impl Recorded for Finish<'_> {
    fn answer(&self, fact: &Fact) -> u64 {
        if *fact == Fact::LrTotal { self.lr_total().to_bits().into() } else { 0 }
    }

    fn facts(&self) -> serde_json::Value {
        serde_json::json!({ "lr_total": self.lr_total() })
    }

    fn play(&mut self, call: &Call, _: &mut Played, _: &[String]) -> Result<()> {
        match call {
            Call::Declare { v } => end_vector(self, v).map(drop)?,
            Call::AddScaled { y, a, x } => {
                let (y, x) = (end_vector(self, y)?, end_vector(self, x)?);
                self.add_scaled(y, *a, x);
            }
            Call::AddScaledDiff { g, a, x, y } => {
                let (g, x, y) = (end_vector(self, g)?, end_vector(self, x)?, end_vector(self, y)?);
                self.add_scaled_diff(g, *a, x, y);
            }
            Call::KeepModel { name } => self.keep_model(name),
            _ => return Err(mismatch("only a step has batches and an optimiser")),
        }
        Ok(())
    }
}

fn end_vector(client: &mut Finish<'_>, name: &Name) -> Result<Vector> {
    Ok(match name {
        Name::Weights => client.weights(),
        Name::Start => client.weights_round_start(),
        Name::State(name) => client.state(kept(name)?),
        Name::Broadcast(name) => client.broadcast(sent(name)?),
        Name::Upload(name) => client.upload(name),
        Name::Kept(_) | Name::Gradient(_) => return Err(mismatch("only a step has gradients and kept models")),
    })
}

/// Recorded steps, by the facts that the method looked at.
#[derive(Debug, Default)]
pub struct Trace {
    root: RwLock<(Node, usize)>,
}

#[derive(Debug, Default)]
enum Node {
    #[default]
    Unknown,
    Ask(Fact, BTreeMap<u64, Node>),
    Known(Arc<Vec<Call>>),
}

/// A method that looks at every step's number fills the memory with recordings that never occur again.
const N_KNOWN_MAX: usize = 10_000;

impl Trace {
    /// Records a step: played back where its facts are known, else asked for by `ask`.
    pub fn record<T: Recorded>(
        &self,
        of: &mut T,
        taps: &[String],
        ask: impl FnOnce(serde_json::Value) -> Result<Answer>,
    ) -> Result<()> {
        let known = self.root.read().unwrap_or_else(PoisonError::into_inner).0.find(of);
        let calls = match known {
            Some(calls) => calls,
            None => self.learn(of, ask(of.facts())?)?,
        };
        let mut played = Played::default();
        calls.iter().try_for_each(|call| of.play(call, &mut played, taps))
    }

    fn learn(&self, of: &impl Recorded, answer: Answer) -> Result<Arc<Vec<Call>>> {
        let mut root = self.root.write().unwrap_or_else(PoisonError::into_inner);
        if root.1 >= N_KNOWN_MAX {
            *root = (Node::Unknown, 0);
        }
        root.1 += 1;
        let (calls, mut at) = (Arc::new(answer.calls), &mut root.0);
        for fact in answer.facts {
            let asked = fact.clone();
            if let Node::Unknown = at {
                *at = Node::Ask(fact, BTreeMap::new());
            }
            match at {
                Node::Ask(known, answers) if *known == asked => at = answers.entry(of.answer(&asked)).or_default(),
                _ => {
                    return Err(Error::config(
                        "a method's step depends on more than what `step` shows and the method's settings: the same step \
                         was recorded in two ways",
                    ));
                }
            }
        }
        *at = Node::Known(Arc::clone(&calls));
        Ok(calls)
    }
}

impl Node {
    fn find(&self, of: &impl Recorded) -> Option<Arc<Vec<Call>>> {
        let mut at = self;
        loop {
            match at {
                Self::Unknown => return None,
                Self::Known(calls) => return Some(Arc::clone(calls)),
                Self::Ask(fact, answers) => at = answers.get(&of.answer(fact))?,
            }
        }
    }
}
