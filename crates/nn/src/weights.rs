//! Weights in files: safetensors with PyTorch's names, shapes and order of elements.

use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::layout::Span;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::path::Path;

/// The batch counter that PyTorch keeps beside running statistics; nothing here needs it.
const IGNORED_SUFFIX: &str = ".num_batches_tracked";

/// Writes parameters and buffers.
///
/// # Errors
/// If a vector does not fit the graph or the file cannot be written.
pub fn save(path: &Path, graph: &Graph, params: &[f32], buffers: &[f32]) -> Result<()> {
    crate::cpu::check_len("the parameter vector", graph.params().len(), params.len())?;
    crate::cpu::check_len("the buffer vector", graph.buffers().len(), buffers.len())?;
    let spans = graph.params().spans().iter().map(|span| (span, params));
    let all: Vec<(&Span, Vec<u8>)> = spans
        .chain(graph.buffers().spans().iter().map(|span| (span, buffers)))
        .map(|(span, flat)| (span, span.to_torch(flat).iter().flat_map(|v| v.to_le_bytes()).collect()))
        .collect();
    let mut views = Vec::with_capacity(all.len());
    for (span, bytes) in &all {
        let view = TensorView::new(Dtype::F32, span.shape.clone(), bytes)
            .map_err(|e| weights_error(path, format!("tensor `{}`: {e}", span.name)))?;
        views.push((span.name.as_str(), view));
    }
    let bytes = safetensors::serialize(views, None).map_err(|e| weights_error(path, e.to_string()))?;
    std::fs::write(path, bytes).map_err(|source| Error::Io { path: path.into(), source })
}

/// Reads parameters and buffers. Nothing is returned unless every tensor is there, fits and is finite.
///
/// # Errors
/// Names the first tensor that is missing, superfluous, of another shape or type, or not finite.
pub fn load(path: &Path, graph: &Graph) -> Result<(Vec<f32>, Vec<f32>)> {
    let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.into(), source })?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|e| weights_error(path, format!("not a complete safetensors file ({e})")))?;
    let mut params = vec![0.0; graph.params().len()];
    let mut buffers = vec![0.0; graph.buffers().len()];
    for (layout, flat) in [(graph.params(), &mut params), (graph.buffers(), &mut buffers)] {
        for span in layout.spans() {
            let tensor = read_tensor(&file, span).map_err(|problem| weights_error(path, problem))?;
            span.write_torch(&tensor, flat);
        }
    }
    let known = |name: &str| graph.params().find(name).or_else(|| graph.buffers().find(name)).is_some();
    let mut extra: Vec<&str> =
        file.names().into_iter().filter(|name| !known(name) && !name.ends_with(IGNORED_SUFFIX)).collect();
    extra.sort_unstable();
    if let Some(name) = extra.first() {
        let problem = format!("tensor `{name}` belongs to no node of this graph ({} such tensors)", extra.len());
        return Err(weights_error(path, problem));
    }
    Ok((params, buffers))
}

fn read_tensor(file: &SafeTensors<'_>, span: &Span) -> std::result::Result<Vec<f32>, String> {
    let name = &span.name;
    let view = file.tensor(name).map_err(|_| format!("tensor `{name}` of shape {:?} is missing", span.shape))?;
    if view.shape() != span.shape {
        return Err(format!("tensor `{name}` has shape {:?}, but the graph expects {:?}", view.shape(), span.shape));
    }
    if view.dtype() != Dtype::F32 {
        return Err(format!("tensor `{name}` has type {:?}, but F32 is expected", view.dtype()));
    }
    let (quads, _) = view.data().as_chunks::<4>();
    let tensor: Vec<f32> = quads.iter().map(|b| f32::from_le_bytes(*b)).collect();
    match tensor.iter().position(|v| !v.is_finite()) {
        Some(at) => Err(format!("tensor `{name}` holds {} at element {at}; all weights must be finite", tensor[at])),
        None => Ok(tensor),
    }
}

fn weights_error(path: &Path, problem: String) -> Error {
    Error::Weights { path: path.into(), problem }
}
