//! Errors, with messages that name the cause and the remedy.

use std::path::PathBuf;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A GPU cannot be used, or rejected a request.
    #[error("GPU: {what}: {problem}")]
    Gpu {
        /// What was tried.
        what: String,
        /// Why it failed.
        problem: String,
    },
    /// A GPU has too little memory.
    #[error("GPU: out of memory: {needed} more bytes are needed, {free} are free")]
    GpuMemory {
        /// Bytes that were asked for.
        needed: usize,
        /// Bytes that were free.
        free: usize,
    },
    /// A layer does not fit the shape of its input.
    #[error("node `{node}`: {problem}")]
    Shape {
        /// The layer's name.
        node: String,
        /// What was expected and what was found.
        problem: String,
    },
    /// A vector does not fit the graph.
    #[error("{what} has {found} elements, but the graph needs {expected}")]
    Length {
        /// Which vector.
        what: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// A batch larger than the workspace, or empty.
    #[error("a batch of {found} samples does not fit a workspace made for 1 to {max}; make it with a larger batch")]
    Batch {
        /// Samples given.
        found: usize,
        /// Samples the workspace holds.
        max: usize,
    },
    /// A label that is not a class.
    #[error("label {label} of sample {sample} is not one of the {classes} classes 0 to {}", .classes - 1)]
    Label {
        /// The label.
        label: u32,
        /// Its sample in the batch.
        sample: usize,
        /// Number of classes.
        classes: usize,
    },
    /// A slot of a text that holds no token the network knows.
    #[error("slot {slot} of text {sample} of the batch: {problem}")]
    Token {
        /// The text in the batch.
        sample: usize,
        /// The slot in the text.
        slot: usize,
        /// What it holds and why that cannot be.
        problem: String,
    },
    /// A node that is neither the output nor a tap.
    #[error("node `{0}` is not a tap of this workspace; name it in `Options::taps`")]
    NotATap(String),
    /// A hyper-parameter outside its range.
    #[error("{name} = {value}: {expected}")]
    Parameter {
        /// Its name.
        name: &'static str,
        /// The value given.
        value: f64,
        /// What it must be.
        expected: &'static str,
    },
    /// No model of this name.
    #[error("unknown model `{name}`; known models: {known}")]
    UnknownModel {
        /// The name given.
        name: String,
        /// The names there are.
        known: String,
    },
    /// A model's weights, description or vocabulary that cannot be used.
    #[error("`{}`: {problem}", .path.display())]
    ModelFile {
        /// The file.
        path: PathBuf,
        /// Which tensor or key, what was expected, what was found.
        problem: String,
    },
    /// A file that could not be read or written.
    #[error("`{}`: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn shape(node: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Shape { node: node.into(), problem: problem.into() }
    }

    pub(crate) fn gpu(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Gpu { what: what.into(), problem: problem.into() }
    }

    /// Whether the request was wrong; otherwise something failed on the way.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::UnknownModel { .. })
    }
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;
