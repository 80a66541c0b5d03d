//! The server's side of a method written in Python.
//!
//! `fuse` runs in a thread of its own and asks for what it needs; the engine's thread answers from the [`Fusion`], which it
//! never gives away. When the round has ended nobody answers any more, so a server that Python kept is harmless.

use crate::caught;
use fedproj_core::methods::FedGen;
use fedproj_core::{
    Distill, DistillTargets, EnsembleWeights, Error, Fusion, GENERATOR, GeneratorConfig, LOGITS, Method,
    OptimizerConfig, Part, Result, ServerState, Targets,
};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyList};
use serde::Deserialize;
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

/// Vectors that go with a question or an answer.
type Arrays = Vec<Vec<f32>>;

/// A question, and where its answer goes.
pub struct Asked {
    question: Question,
    arrays: Arrays,
    answer: Sender<Result<(Value, Arrays)>>,
}

/// What a fusion can be asked.
#[derive(Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case", deny_unknown_fields)]
enum Question {
    /// Numbers of the round, and its clients.
    Round,
    /// Weights and buffers as they are.
    Model,
    /// Weights and buffers from now on.
    SetModel,
    /// n_k / Σ n, and 1 / m.
    ClientWeights,
    /// Σ_k w_k of a part.
    Sum { part: PartName },
    /// A part of all clients, coordinate by coordinate.
    Stack { part: PartName },
    /// A vector of the server's own.
    Vector { name: String, initial: f32 },
    /// Replaces it.
    SetVector { name: String },
    /// The mean of the clients' outputs on the public set.
    Ensemble { weights: EnsembleWeights, features: bool },
    /// Each client's outputs.
    ClientOutputs { features: bool },
    /// The outputs of the weights as they are.
    GlobalOutputs { features: bool },
    /// Trains the weights, or a model aside, towards targets.
    Distill { how: Box<Distill>, targets: TargetKind, aside: bool },
    /// The public samples' labels.
    PublicLabels,
    /// The targets of the next round's memory.
    SetMemory,
    /// Weights that are evaluated instead of those that are sent.
    EvaluateInstead,
    /// Trains the generator as FedGen does.
    TrainGenerator { steps: u32, diversity_weight: f32, decay: f32, optimizer: OptimizerConfig },
    /// The rows of a client's samples in the private set.
    SamplesOf { client: u32 },
}

/// What a method sends beside vectors as long as the weights.
#[derive(Clone, Copy)]
pub struct Sends<'a> {
    /// The generator of features, if it has one.
    pub generator: Option<&'a GeneratorConfig>,
    /// Whether logits for the clients' own samples.
    pub logits: bool,
    /// What its clients upload.
    pub uploads: &'a [String],
}

/// What a student is trained towards, see [`DistillTargets`].
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum TargetKind {
    Teacher,
    Scores,
    /// With the weights of the labels and of the logits.
    Consensus([f32; 2]),
}

/// A vector of a contribution.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum PartName {
    Weights,
    Buffers,
    Upload(String),
}

impl PartName {
    fn part(&self, uploads: &[String]) -> Result<Part<'_>> {
        match self {
            Self::Weights => Ok(Part::Weights),
            Self::Buffers => Ok(Part::Buffers),
            Self::Upload(name) if uploads.contains(name) => Ok(Part::Upload(name)),
            Self::Upload(name) => Err(Error::config(format!(
                "clients send no `{name}`; a part is weights, buffers or a name in uploads\nhint: uploads = (\"{name}\",)"
            ))),
        }
    }
}

/// Python's end: takes a question in JSON and vectors, and gives both back.
#[pyclass(frozen, module = "fedproj._fedproj")]
pub struct Questions(Mutex<Sender<Option<Asked>>>);

#[pymethods]
impl Questions {
    fn ask<'py>(
        &self,
        py: Python<'py>,
        question: &str,
        arrays: Vec<PyBuffer<f32>>,
    ) -> PyResult<(String, Bound<'py, PyList>)> {
        caught(|| {
            let question = crate::read(question)?;
            let arrays = arrays.iter().map(|array| array.to_vec(py)).collect::<PyResult<_>>()?;
            let ended = || PyRuntimeError::new_err("this server belongs to a round that has ended");
            let (answer, answered) = channel();
            let sender = self.0.lock().map_err(|_| ended())?.clone();
            let received = py.detach(move || {
                sender.send(Some(Asked { question, arrays, answer })).ok()?;
                drop(sender);
                answered.recv().ok()
            });
            let (value, arrays) = received.ok_or_else(ended)?.map_err(|error| crate::raise(py, error.into()))?;
            let bytes = |array: Vec<f32>| {
                PyByteArray::new_with(py, 4 * array.len(), |out| {
                    out.chunks_exact_mut(4).zip(&array).for_each(|(out, v)| out.copy_from_slice(&v.to_le_bytes()));
                    Ok(())
                })
            };
            let arrays = arrays.into_iter().map(bytes).collect::<PyResult<Vec<_>>>()?;
            Ok((value.to_string(), PyList::new(py, arrays)?))
        })
    }
}

/// Lets Python fuse: `call` gets Python's end, in a thread of its own.
pub fn fuse(round: &mut Fusion<'_>, sends: Sends<'_>, call: impl FnOnce(Questions) -> Result<()> + Send) -> Result<()> {
    let received = round.state.weights.clone();
    // Every method averages the buffers; Python may replace them. A network without clients in the round keeps its own.
    if round.n_results() > 0 {
        round.average_buffers()?;
    }
    let (ask, asked) = channel();
    std::thread::scope(|scope| {
        let fusing = scope.spawn(move || {
            let fused = catch_unwind(AssertUnwindSafe(|| call(Questions(Mutex::new(ask.clone())))));
            // Python may keep its end, so the channel does not close by itself. Where nobody listens, nobody need be told.
            let _ = ask.send(None);
            fused
        });
        while let Ok(Some(Asked { question, arrays, answer })) = asked.recv() {
            let _ = answer.send(answered(round, (&received, sends), question, arrays));
        }
        drop(asked);
        fusing.join().flatten().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

fn answered(
    round: &mut Fusion<'_>,
    (received, sends): (&[f32], Sends<'_>),
    question: Question,
    arrays: Arrays,
) -> Result<(Value, Arrays)> {
    let n = received.len();
    let mut arrays = arrays.into_iter();
    let mut take = |what: &str, len: usize| of_len(what, arrays.next().unwrap_or_default(), len);
    let (n_results, n_logits) = (round.n_results(), round.n_public() * round.n_classes());
    let nothing = || Ok((Value::Null, Vec::new()));
    match question {
        Question::Round => Ok((about(round), Vec::new())),
        Question::Model => Ok((Value::Null, vec![round.state.weights.clone(), round.state.buffers.clone()])),
        Question::SetModel => {
            round.state.weights = take("weights", n)?;
            round.state.buffers = take("buffers", round.state.buffers.len())?;
            nothing()
        }
        Question::ClientWeights => Ok((Value::Null, vec![round.sample_weights(), round.uniform_weights()])),
        Question::Sum { part } => {
            let sum = round.sum(&take("the list of clients' weights", n_results)?, part.part(sends.uploads)?)?;
            Ok((Value::Null, vec![sum]))
        }
        Question::Stack { part } => Ok((Value::Null, vec![stack(round, part.part(sends.uploads)?)?])),
        Question::Vector { name, initial } => Ok((Value::Null, vec![vector(round, sends, &name, initial)?.clone()])),
        Question::SetVector { name } => {
            let vector = vector(round, sends, &name, 0.0)?;
            *vector = take(&format!("vector `{name}`"), vector.len())?;
            nothing()
        }
        Question::Ensemble { weights, features } => {
            let Targets { logits, features } = round.ensemble(weights, features)?;
            Ok((Value::Null, vec![logits, features]))
        }
        Question::ClientOutputs { features } => {
            let outputs = round.client_outputs(features)?;
            Ok((Value::Null, outputs.into_iter().flat_map(|out| [out.logits, out.features]).collect()))
        }
        Question::GlobalOutputs { features } => {
            let Targets { logits, features } = round.global_outputs(features)?;
            Ok((Value::Null, vec![logits, features]))
        }
        Question::Distill { how, targets, aside } => {
            how.check("distill")?;
            distill(round, received, &how, &targets, aside, arrays)?;
            nothing()
        }
        Question::PublicLabels => {
            Ok((Value::Null, vec![round.public_labels().iter().map(|&label| label as f32).collect()]))
        }
        Question::SetMemory => {
            let targets = targets(round, take("the memory's logits", n_logits)?, arrays.next())?;
            round.state.targets = Some(Arc::new(targets));
            nothing()
        }
        Question::EvaluateInstead => {
            round.evaluate_instead(take("weights", n)?);
            nothing()
        }
        Question::TrainGenerator { steps, diversity_weight, decay, optimizer } => {
            let generator = sends.generator.ok_or_else(|| undeclared(GENERATOR))?.clone();
            let how = FedGen { steps, diversity_weight, decay, optimizer, generator, ..FedGen::default() };
            how.check(round.config())?;
            how.train_generator(round)?;
            nothing()
        }
        Question::SamplesOf { client } => Ok((round.samples_of(client)?.iter().copied().collect(), Vec::new())),
    }
}

/// A part of all clients, coordinate by coordinate.
fn stack(round: &Fusion<'_>, part: Part<'_>) -> Result<Vec<f32>> {
    let values = std::cell::RefCell::new(Vec::new());
    round.by_coordinate(part, |column| {
        values.borrow_mut().extend_from_slice(column);
        0.0
    })?;
    Ok(values.into_inner())
}

/// A vector of the server's own. Those that are sent for other things than vectors of the network have their own lengths.
fn vector<'a>(round: &'a mut Fusion<'_>, sends: Sends<'_>, name: &str, initial: f32) -> Result<&'a mut Vec<f32>> {
    match name.strip_prefix("send.") {
        Some(GENERATOR) => round.generator(sends.generator.ok_or_else(|| undeclared(GENERATOR))?),
        Some(LOGITS) if sends.logits => Ok(round.logits()),
        Some(LOGITS) => Err(undeclared(LOGITS)),
        None if ServerState::holds(name) => {
            Err(Error::config(format!("`{name}` is a name of the engine's own; choose another")))
        }
        _ => Ok(round.vector(name, initial)),
    }
}

fn undeclared(name: &str) -> Error {
    let (is_sent, hint) = match name {
        GENERATOR => ("a generator is", "define generator() in the class"),
        _ => ("logits are", "sends_logits = True in the class"),
    };
    Error::config(format!("{is_sent} sent only by a method that announces it\nhint: {hint}"))
}

/// Trains a student on the arrays of [`Question::Distill`].
fn distill(
    round: &mut Fusion<'_>,
    received: &[f32],
    how: &Distill,
    kind: &TargetKind,
    aside: bool,
    mut arrays: std::vec::IntoIter<Vec<f32>>,
) -> Result<()> {
    let (n, n_logits) = (round.n_public(), round.n_public() * round.n_classes());
    let mut take = |what: &str, len: usize| of_len(what, arrays.next().unwrap_or_default(), len);
    let (teacher, labels, logits, has_logits);
    let targets = match *kind {
        TargetKind::Consensus(weights) => {
            labels = take("the list of labels", n)?.into_iter().map(|label| label as u32).collect::<Vec<_>>();
            logits = take("the logits", n_logits)?;
            has_logits = take("the list of samples", n)?.into_iter().map(|has| has > 0.0).collect::<Vec<_>>();
            DistillTargets::Consensus { labels: &labels, logits: &logits, has_logits: &has_logits, weights }
        }
        TargetKind::Teacher | TargetKind::Scores => {
            let logits = take("the teacher's logits", n_logits)?;
            teacher = targets(round, logits, arrays.next())?;
            if let TargetKind::Scores = kind {
                DistillTargets::Scores(&teacher)
            } else {
                DistillTargets::Teacher(&teacher)
            }
        }
    };
    if aside { round.distill_aside(how, &targets) } else { round.distill(how, &targets, received) }
}

/// The round, and what is known of its clients.
fn about(round: &Fusion<'_>) -> Value {
    let clients = round.summaries().map(|client| {
        json!({ "client": client.client, "n_samples": client.n_samples, "n_steps": client.n_steps, "loss": client.stats.loss })
    });
    json!({
        "round": round.round(),
        "n_rounds": round.config().federation.rounds,
        "n_clients": round.n_clients(),
        "n_classes": round.n_classes(),
        "n_public": round.n_public(),
        "config": round.config(),
        "clients": clients.collect::<Vec<Value>>(),
    })
}

/// Targets for the public samples; features, if any, must be those of the network.
fn targets(round: &Fusion<'_>, logits: Vec<f32>, features: Option<Vec<f32>>) -> Result<Targets> {
    let features = match features.filter(|features| !features.is_empty()) {
        Some(features) => of_len("the array of features", features, round.global_outputs(true)?.features.len())?,
        None => Vec::new(),
    };
    Ok(Targets { logits, features })
}

fn of_len(what: &str, array: Vec<f32>, len: usize) -> Result<Vec<f32>> {
    if array.len() == len {
        return Ok(array);
    }
    Err(Error::config(format!("{what} has {} values, but needs {len}", array.len())))
}
