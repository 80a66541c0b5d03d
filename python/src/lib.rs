//! The border between Python and the engine. Settings and results pass as JSON, vectors as buffers of single precision.
//!
//! Users see the package in `fedproj/` beside this crate. Here errors become exceptions with the command line's texts, the
//! interpreter's lock is released while the engine works, and a panic never leaves: [`caught`] makes it a `RunError`. PyO3's
//! own exception for panics is no `Exception`, so `except Exception` would miss it.

mod engine;
mod halves;
mod method;
mod node;
mod server;
mod trace;

use anyhow::Result;
use fedproj_core::{Config, Error, Manifest, StoredRun, VerifyPart};
use fedproj_nn::Shape;
use fedproj_nn::models::Layer;
use fedproj_study::{Job, ReportOptions, Stopped, compare_runs, load as load_runs, write_report};
use pyo3::create_exception;
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use serde::Deserialize;
use serde_json::json;
use std::any::Any;
use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

create_exception!(fedproj, SettingsError, PyValueError, "What was asked for is wrong: a setting, a file, data.");
create_exception!(fedproj, RunError, PyRuntimeError, "A run failed, or a rerun differs.");
create_exception!(fedproj, StoppedError, PyKeyboardInterrupt, "Ctrl-C ended a run after its round. It can be resumed.");

/// The exception of an error: the one that Python itself raised, if it did.
fn raise(py: Python<'_>, error: anyhow::Error) -> PyErr {
    if let Some(raised) = error.chain().find_map(|cause| cause.downcast_ref::<PyErr>()) {
        return raised.clone_ref(py);
    }
    if error.is::<Stopped>() {
        return StoppedError::new_err(error.to_string());
    }
    let text = fedproj::message(&error);
    if fedproj::exit_code(&error) == 2 { SettingsError::new_err(text) } else { RunError::new_err(text) }
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a text")
}

/// Turns a panic into an exception.
fn caught<T>(work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(RunError::new_err(format!("internal error: {}", text_of(&*panic)))))
}

/// Works without the interpreter's lock.
fn guarded<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    caught(|| py.detach(work).map_err(|error| raise(py, error)))
}

/// Reads JSON of the package's. What is wrong with it came from the user, who knows no Rust.
fn read<T: serde::de::DeserializeOwned>(json: &str) -> PyResult<T> {
    serde_json::from_str(json).map_err(|error| SettingsError::new_err(plain(&error)))
}

/// An error's text without its place in the JSON and without Rust's names of types.
fn plain(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.rsplit_once(" at line ").map_or(&text[..], |(text, _)| text);
    let Some((found, expected)) = text.split_once(", expected ") else { return text.to_owned() };
    let expected = match expected {
        "usize" | "u64" | "u32" | "u16" => "a whole number from 0 on",
        "f64" | "f32" => "a number",
        _ if expected.starts_with("struct ") => "a dictionary",
        "a string" => "a text",
        expected => expected,
    };
    format!("{found}, expected {expected}")
}

/// What `run`, `sweep` and `verify` share.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    data_dir: Option<PathBuf>,
    device: Option<String>,
    precision: Option<String>,
    threads: Option<u16>,
    jobs: u16,
    resume: bool,
}

impl Options {
    fn read(json: &str) -> Result<Self> {
        Ok(serde_json::from_str(json)?)
    }

    fn device(&self) -> fedproj::DeviceArgs {
        fedproj::DeviceArgs {
            threads: self.threads.unwrap_or_else(fedproj::default_threads).max(1),
            device: self.device.clone(),
            precision: self.precision.clone().unwrap_or_else(|| "tf32".into()),
        }
    }
}

/// A run that can be made.
#[pyclass(frozen, module = "fedproj._fedproj")]
struct SweepRun {
    /// Its name among the runs of a sweep; empty if it is alone.
    #[pyo3(get)]
    id: String,
    config: Config,
}

#[pymethods]
impl SweepRun {
    /// The same run with a method written in Python.
    fn with_method(&self, method: &Bound<'_, PyAny>) -> PyResult<Self> {
        caught(|| {
            let (name, external) = method::register(method)?;
            let config = self.config.clone().with_method(&name, external);
            Ok(Self { id: self.id.clone(), config: config.map_err(|error| raise(method.py(), error.into()))? })
        })
    }

    /// The directory that the command line would choose.
    fn directory(&self, py: Python<'_>) -> PyResult<PathBuf> {
        guarded(py, || fedproj::default_dir(&self.config))
    }

    /// The whole configuration as JSON.
    fn config(&self, py: Python<'_>) -> PyResult<String> {
        guarded(py, || Ok(serde_json::to_string(&self.config)?))
    }
}

/// The input of a network.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Input {
    Shape(Vec<usize>),
    Tokens(usize),
}

/// The functions of the module.
#[pymodule]
mod _fedproj {
    #[pymodule_export]
    use super::halves::{Server, Trainer};
    use super::{
        Bound, Error, Input, Job, Layer, Manifest, Options, OsString, PathBuf, PyAny, PyResult, Python, ReportOptions,
        Shape, StoredRun, VerifyPart, caught, compare_runs, engine, guarded, json, load_runs, method, plain,
        pyfunction, write_report,
    };
    #[pymodule_export]
    use super::{RunError, SettingsError, StoppedError, SweepRun};

    /// The command line.
    #[pyfunction]
    fn main(py: Python<'_>, args: Vec<OsString>, host: Vec<OsString>) -> PyResult<u8> {
        guarded(py, || Ok(fedproj::main(args, host)))
    }

    /// The runs that settings ask for, each `key=value` or a file.
    #[pyfunction]
    fn plan(py: Python<'_>, settings: Vec<String>) -> PyResult<Vec<SweepRun>> {
        let planned = guarded(py, || fedproj::Settings { settings, data_dir: None }.runs())?;
        Ok(planned.into_iter().map(|run| SweepRun { id: run.id, config: run.config }).collect())
    }

    /// Makes runs in directories; their summaries as JSON.
    #[pyfunction]
    fn make(
        py: Python<'_>,
        runs: Vec<(Bound<'_, SweepRun>, PathBuf)>,
        options: &str,
        progress: &Bound<'_, PyAny>,
    ) -> PyResult<String> {
        let job = |(run, dir): (Bound<'_, SweepRun>, PathBuf)| {
            let SweepRun { id, config } = run.get();
            Job { id: id.clone(), dir, config: config.clone() }
        };
        let jobs: Vec<Job> = runs.into_iter().map(job).collect();
        let driver = guarded(py, || engine::driver(&Options::read(options)?, jobs.len()))?;
        let summaries = engine::run(py, driver, jobs, progress)?;
        guarded(py, || Ok(serde_json::to_string(&summaries)?))
    }

    /// Whether a directory holds a run, and all its rounds are done.
    #[pyfunction]
    fn is_finished(py: Python<'_>, run: &SweepRun, dir: PathBuf) -> PyResult<bool> {
        guarded(py, || Ok(fedproj_core::RunDir::finished(&dir, &run.config)?.is_some()))
    }

    /// A stored run as JSON, as far as it is.
    #[pyfunction]
    fn load(py: Python<'_>, dir: PathBuf) -> PyResult<String> {
        guarded(py, || {
            let is_finished = dir.join("summary.json").exists();
            let run = if is_finished { StoredRun::open(&dir)? } else { StoredRun::so_far(&dir)? };
            let StoredRun { config, summary, rounds, .. } = run;
            let manifest = Manifest::read(&dir)?;
            Ok(json!({
                "config": config,
                "summary": summary,
                "rounds": rounds,
                "manifest": manifest,
                "finished": is_finished,
            })
            .to_string())
        })
    }

    /// Makes a method's class known, so that runs of it can be resumed and verified.
    #[pyfunction]
    fn register(method: &Bound<'_, PyAny>) -> PyResult<String> {
        caught(|| Ok(method::register(method)?.1.hash))
    }

    /// Repeats a run; what was compared, as JSON.
    #[pyfunction]
    fn verify(py: Python<'_>, dir: PathBuf, rounds: Option<u32>, options: &str) -> PyResult<String> {
        guarded(py, || {
            let options = Options::read(options)?;
            let (data_dir, part) =
                (fedproj::data_dir(options.data_dir.clone())?, VerifyPart { rounds, ..VerifyPart::default() });
            let device = options.device().open_for(1)?.remove(0);
            let verified = fedproj_core::verify(&dir, data_dir.as_deref(), device, part, &|_| ())?;
            Ok(serde_json::to_string(&verified)?)
        })
    }

    /// Writes a report; what was written, as JSON.
    #[pyfunction]
    fn report(py: Python<'_>, runs: Vec<PathBuf>, out: PathBuf, title: Option<String>) -> PyResult<String> {
        guarded(py, || {
            let data_dir = fedproj::data_dir(None)?;
            let (title, data_dir) = (title.as_deref(), data_dir.as_deref());
            let options = ReportOptions { runs: &runs, out: &out, title, unfinished: true, data_dir };
            Ok(serde_json::to_string(&write_report(&options)?)?)
        })
    }

    /// Compares stored runs; rows as JSON, and the tables as text.
    #[pyfunction]
    fn compare(py: Python<'_>, runs: Vec<PathBuf>, baseline: Option<String>) -> PyResult<String> {
        guarded(py, || {
            let (runs, mut notes) = load_runs(&runs, false)?;
            let groups = compare_runs(runs, baseline.as_deref(), &mut notes)?;
            let tables: Vec<String> = groups.iter().map(|group| group.comparison.table().to_text()).collect();
            Ok(json!({ "settings": groups, "tables": tables, "notes": notes }).to_string())
        })
    }

    /// The shape after the last of these layers. `input` is `{"shape": […]}`, channels last, or `{"tokens": n}`.
    #[pyfunction]
    fn check_layers(py: Python<'_>, input: &str, layers: &str) -> PyResult<String> {
        guarded(py, || {
            let input = match serde_json::from_str(input).map_err(|e| Error::config(plain(&e)))? {
                Input::Tokens(n) => Shape::tokens(n),
                Input::Shape(shape) => match shape[..] {
                    [features] => Shape::vector(features),
                    [height, width] => Shape::image(height, width, 1),
                    [height, width, channels] => Shape::image(height, width, channels),
                    _ => return Err(Error::config("a sample has 1 to 3 dimensions").into()),
                },
            };
            let layers: Vec<Layer> = serde_json::from_str(layers).map_err(|e| Error::config(plain(&e)))?;
            let shape = fedproj_nn::models::check_layers(&layers, input).map_err(|e| Error::config(e.to_string()))?;
            let Shape { h, w, c } = shape;
            Ok(if (h, w) == (1, 1) { json!([c]) } else { json!([h, w, c]) }.to_string())
        })
    }

    /// The curves of stored runs as SVG.
    #[pyfunction]
    fn curves(py: Python<'_>, runs: Vec<PathBuf>) -> PyResult<String> {
        guarded(py, || fedproj_study::accuracy_curves(&runs))
    }
}
