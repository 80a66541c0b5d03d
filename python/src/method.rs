//! A method written in Python, as the engine sees it.

use crate::read;
use crate::server::{self, Questions, Sends};
use crate::trace::{Trace, node};
use fedproj_core::methods::{External, FedGen};
use fedproj_core::{
    Config, Error, Experiment, Finish, Fusion, GeneratorConfig, GlobalModel, Mean, MemoryConfig, Method, Result, Step,
    Targets, check_exit, with_exit,
};
use fedproj_nn::models::Variant;
use fedproj_nn::{Graph, NodeId, Span};
use pyo3::prelude::*;
use serde::Deserialize;
use std::ops::Range;
use std::sync::Arc;
use toml::Table;

/// What a class says about itself, see `Method` in Python.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each answers a question of `Method` for itself")]
struct About {
    name: String,
    needs_public: bool,
    needs_public_labels: bool,
    needs_features: bool,
    uploads: Vec<String>,
    personal_model: Option<String>,
    taps: Vec<String>,
    memory: Option<MemoryConfig>,
    generator: Option<GeneratorConfig>,
    sends_logits: bool,
    exchanges_logits: bool,
    stays_with_client: Vec<String>,
    exit_level: Option<usize>,
    first_memory: FirstMemory,
    projection_head: Option<usize>,
    /// Which of its functions are its own.
    checks: bool,
    offsets: bool,
    finishes: bool,
    fuses: bool,
}

/// The memory's targets in the first round.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FirstMemory {
    None,
    GlobalModel,
    Labels,
}

/// An object of the class, and its recorded steps.
struct PythonMethod {
    object: Py<PyAny>,
    about: About,
    steps: Trace,
    ends: Trace,
}

impl std::fmt::Debug for PythonMethod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.about.fmt(f)
    }
}

/// Makes an object's class known to the engine, with the object's settings.
pub fn register(object: &Bound<'_, PyAny>) -> PyResult<(String, External)> {
    let about: String = object.call_method0("_about")?.extract()?;
    let about: About = read(&about)?;
    let (source, settings): (String, String) = object.call_method0("_identity")?.extract()?;
    let class = object.get_type().unbind();
    let make = move |settings: &Table| -> Result<Box<dyn Method>> {
        let settings = to_json(settings)?;
        Python::attach(|py| {
            let object = class.bind(py).call_method1("_from_settings", (settings,))?;
            let about: String = object.call_method0("_about")?.extract()?;
            let method = PythonMethod {
                object: object.unbind(),
                about: read(&about)?,
                steps: Trace::default(),
                ends: Trace::default(),
            };
            Ok(Box::new(method) as Box<dyn Method>)
        })
        .map_err(|error: PyErr| failed("", error))
    };
    Ok((about.name, External::register(&source, read(&settings)?, Arc::new(make))))
}

fn to_json(value: &impl serde::Serialize) -> Result<String> {
    let failed = |error: serde_json::Error| Error::Internal { what: "writing JSON", problem: error.to_string() };
    serde_json::to_string(value).map_err(failed)
}

fn failed(name: &str, error: PyErr) -> Error {
    Error::Method { name: name.to_owned(), source: Box::new(error) }
}

impl PythonMethod {
    /// What FedGen says about the generator. The engine has no other method with one.
    fn fedgen(&self) -> Option<FedGen> {
        let generator = self.about.generator.clone()?;
        Some(FedGen { generator, ..FedGen::default() })
    }

    /// Where the parameters of a layer are: those with its name before a dot.
    fn params_of(graph: &Graph, layer: &str) -> Vec<Range<usize>> {
        let spans = graph.params().spans().iter();
        let is_its_own = |name: &str| name.strip_prefix(layer).is_some_and(|rest| rest.starts_with('.'));
        spans.filter(|span| is_its_own(&span.name)).map(Span::range).collect()
    }

    /// Calls a function of the object; its exceptions become errors.
    fn call<T>(&self, work: impl for<'py> FnOnce(&Bound<'py, PyAny>) -> PyResult<T>) -> Result<T> {
        Python::attach(|py| work(self.object.bind(py))).map_err(|error| failed(&self.about.name, error))
    }

    /// Asks what a step does.
    fn ask(&self, function: &str, facts: &serde_json::Value) -> Result<crate::trace::Answer> {
        self.call(|object| {
            let answer: String = object.call_method1(function, (facts.to_string(),))?.extract()?;
            read(&answer)
        })
    }
}

impl Method for PythonMethod {
    fn means(&self) -> Option<Vec<Mean>> {
        // `fuse` is Python's.
        None
    }

    fn check(&self, config: &Config) -> Result<()> {
        self.about.memory.iter().try_for_each(|memory| memory.check("memory"))?;
        if let Some(fedgen) = self.fedgen() {
            fedgen.check(config)?;
        }
        if self.about.generator.is_some() && self.about.sends_logits {
            let problem = "a method has a generator or sends logits: step.taught has one teacher";
            return Err(Error::config(format!("method `{}`: {problem}", self.about.name)));
        }
        if !self.about.checks {
            return Ok(());
        }
        let config = to_json(config)?;
        self.call(|object| object.call_method1("_check", (config,)).map(drop))
    }

    fn check_network(&self, graph: &Graph) -> Result<()> {
        if let Some(fedgen) = self.fedgen() {
            fedgen.check_network(graph)?;
        }
        if let Some(level) = self.about.exit_level {
            check_exit(graph, level, "exit_level")?;
        }
        let taps = self.about.taps.iter().filter(|tap| *tap != "levels");
        taps.map(|tap| node(graph, tap)).collect::<Result<Vec<_>>>()?;
        let unknown = self.about.stays_with_client.iter().find(|layer| Self::params_of(graph, layer).is_empty());
        unknown.map_or(Ok(()), |layer| {
            let names = graph.params().spans().iter().filter_map(|span| Some(span.name.rsplit_once('.')?.0));
            let mut names: Vec<&str> = names.collect();
            names.dedup();
            let expected = format!("a layer of this network with parameters: {}", names.join(", "));
            Error::require(false, "stays_with_client", layer, &expected)
        })
    }

    fn network(&self, graph: Graph) -> Graph {
        match self.about.exit_level {
            Some(level) => with_exit(graph, level),
            None => graph,
        }
    }

    fn stays_with_client(&self, graph: &Graph) -> Vec<Range<usize>> {
        self.about.stays_with_client.iter().flat_map(|layer| Self::params_of(graph, layer)).collect()
    }

    fn sends_logits(&self) -> bool {
        self.about.sends_logits
    }

    fn exchanges_logits(&self) -> bool {
        self.about.exchanges_logits
    }

    fn generator(&self) -> Option<&GeneratorConfig> {
        self.about.generator.as_ref()
    }

    fn generated_classes(&self, experiment: &Experiment) -> Option<Vec<u32>> {
        self.fedgen()?.generated_classes(experiment)
    }

    fn variant(&self, variant: Variant) -> Variant {
        Variant { projection_head: self.about.projection_head.or(variant.projection_head), ..variant }
    }

    fn taps(&self, graph: &Graph) -> Vec<NodeId> {
        let of = |tap: &String| match tap.as_str() {
            "levels" => graph.levels().to_vec(),
            name => node(graph, name).into_iter().collect(),
        };
        self.about.taps.iter().flat_map(of).collect()
    }

    fn needs_public(&self) -> bool {
        self.about.needs_public || self.about.memory.is_some()
    }

    fn needs_public_labels(&self) -> bool {
        self.about.needs_public_labels
    }

    fn needs_features(&self) -> bool {
        self.about.needs_features
    }

    fn uploads(&self) -> Vec<&str> {
        self.about.uploads.iter().map(String::as_str).collect()
    }

    fn personal_model(&self) -> Option<&str> {
        self.about.personal_model.as_deref()
    }

    fn class_offsets(&self, counts: &[u32]) -> Result<Vec<f32>> {
        if !self.about.offsets {
            return Ok(vec![0.0; counts.len()]);
        }
        self.call(|object| object.call_method1("_class_offsets", (counts.to_vec(),))?.extract())
    }

    fn memory(&self) -> Option<&MemoryConfig> {
        self.about.memory.as_ref()
    }

    fn first_targets(&self, global: &GlobalModel<'_>) -> Result<Option<Targets>> {
        match self.about.first_memory {
            FirstMemory::None => Ok(None),
            FirstMemory::GlobalModel => global.public_outputs(self.needs_features()).map(Some),
            FirstMemory::Labels => Ok(Some(Targets::default())),
        }
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        self.steps.record(step, &self.about.taps, |facts| self.ask("_record_step", &facts))
    }

    fn finish_local(&self, client: &mut Finish<'_>) -> Result<()> {
        if !self.about.finishes {
            return Ok(());
        }
        self.ends.record(client, &[], |facts| self.ask("_record_finish", &facts))
    }

    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        if !self.about.fuses {
            return round.average();
        }
        let sends = Sends {
            generator: self.about.generator.as_ref(),
            logits: self.about.sends_logits,
            uploads: &self.about.uploads,
        };
        server::fuse(round, sends, |questions: Questions| {
            self.call(|object| object.call_method1("_fuse", (questions,)).map(drop))
        })
    }
}
