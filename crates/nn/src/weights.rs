//! Weight files: safetensors with PyTorch's names, shapes and element order.

use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::layout::Span;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// PyTorch's batch counter beside running statistics. It is ignored here.
const IGNORED_SUFFIX: &str = ".num_batches_tracked";

/// Parameters and buffers as the content of the file `path`, which errors name.
///
/// # Errors
/// If a vector does not fit the graph.
pub fn to_bytes(path: &Path, graph: &Graph, params: &[f32], buffers: &[f32]) -> Result<Vec<u8>> {
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
    safetensors::serialize(views, None).map_err(|e| weights_error(path, e.to_string()))
}

/// Reads parameters and buffers. Succeeds only if every tensor is present, fits and is finite.
///
/// # Errors
/// Names the first tensor that is missing, superfluous, of another shape or type, or not finite.
pub fn load(path: &Path, graph: &Graph) -> Result<(Vec<f32>, Vec<f32>)> {
    let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.into(), source })?;
    let file = open(path, &bytes)?;
    let mut params = vec![0.0; graph.params().len()];
    let mut buffers = vec![0.0; graph.buffers().len()];
    for (layout, flat) in [(graph.params(), &mut params), (graph.buffers(), &mut buffers)] {
        for span in layout.spans() {
            let tensor = read_tensor(&file, &span.name, span).map_err(|problem| weights_error(path, problem))?;
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

/// Reads a pretrained encoder into `params`. The classifier and the head keep their values. Names may begin with
/// `bert.`; numbers may be single precision, half precision or bfloat16. Returns the names of the tensors that the
/// graph does not have.
///
/// # Errors
/// Names every missing tensor, or the first that is not finite or has another shape or type. `params` may then be
/// partly overwritten.
pub fn load_encoder(path: &Path, graph: &Graph, params: &mut [f32]) -> Result<Vec<String>> {
    crate::cpu::check_len("the parameter vector", graph.params().len(), params.len())?;
    let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.into(), source })?;
    let file = open(path, &bytes)?;
    let mut by_name: BTreeMap<String, &str> = BTreeMap::new();
    for name in file.names() {
        by_name.insert(plain_name(name), name);
    }
    let mut missing = Vec::new();
    for span in graph.params().spans().iter().filter(|span| !is_fresh(&span.name)) {
        let Some(name) = by_name.remove(&span.name) else {
            missing.push(format!("`{}`", span.name));
            continue;
        };
        let tensor = read_tensor(&file, name, span).map_err(|problem| weights_error(path, problem))?;
        span.write_torch(&tensor, params);
    }
    if !missing.is_empty() {
        let problem = format!("{} tensors of the encoder are missing: {}", missing.len(), missing.join(", "));
        return Err(weights_error(path, problem));
    }
    Ok(by_name.into_values().map(str::to_owned).collect())
}

/// Whether a parameter is not part of a pretrained encoder.
fn is_fresh(name: &str) -> bool {
    name.starts_with("classifier.") || name.starts_with("head.")
}

/// A tensor's name in this crate: without the prefix of models that wrap an encoder, and with PyTorch's names for
/// normalisations instead of TensorFlow's.
pub(crate) fn plain_name(name: &str) -> String {
    let name = name.strip_prefix("bert.").unwrap_or(name);
    name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
}

/// The names of all tensors of a file; reads only the header.
pub(crate) fn names(path: &Path) -> Result<Vec<String>> {
    let io = |source| Error::Io { path: path.into(), source };
    let mut file = std::fs::File::open(path).map_err(io)?;
    let mut len = [0; 8];
    file.read_exact(&mut len).map_err(io)?;
    let mut header = Vec::new();
    file.take(u64::from_le_bytes(len).min(HEADER_MAX)).read_to_end(&mut header).map_err(io)?;
    let header: BTreeMap<String, serde_json::Value> = serde_json::from_slice(&header)
        .map_err(|e| weights_error(path, format!("not a complete safetensors file ({e})")))?;
    Ok(header.into_keys().collect())
}

/// Maximum bytes of a header, as in safetensors.
const HEADER_MAX: u64 = 100_000_000;

fn open<'a>(path: &Path, bytes: &'a [u8]) -> Result<SafeTensors<'a>> {
    SafeTensors::deserialize(bytes).map_err(|e| weights_error(path, format!("not a complete safetensors file ({e})")))
}

fn read_tensor(file: &SafeTensors<'_>, name: &str, span: &Span) -> std::result::Result<Vec<f32>, String> {
    let view = file.tensor(name).map_err(|_| format!("tensor `{name}` of shape {:?} is missing", span.shape))?;
    if view.shape() != span.shape {
        return Err(format!("tensor `{name}` has shape {:?}, but the graph expects {:?}", view.shape(), span.shape));
    }
    let pairs = || view.data().as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b));
    let tensor: Vec<f32> = match view.dtype() {
        Dtype::F32 => view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        Dtype::F16 => pairs().map(from_half).collect(),
        Dtype::BF16 => pairs().map(|bits| f32::from_bits(u32::from(bits) << 16)).collect(),
        other => return Err(format!("tensor `{name}` has type {other:?}, but F32, F16 or BF16 is expected")),
    };
    match tensor.iter().position(|v| !v.is_finite()) {
        Some(at) => Err(format!("tensor `{name}` holds {} at element {at}; all weights must be finite", tensor[at])),
        None => Ok(tensor),
    }
}

/// A half-precision number: 1 sign bit, 5 exponent bits, 10 fraction bits.
fn from_half(bits: u16) -> f32 {
    let (exponent, fraction) = (bits >> 10 & 31, f32::from(bits & 1023));
    let size = match exponent {
        0 => fraction * 2f32.powi(-24),
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        e => (1024.0 + fraction) * 2f32.powi(i32::from(e) - 25),
    };
    if bits >> 15 == 0 { size } else { -size }
}

fn weights_error(path: &Path, problem: String) -> Error {
    Error::ModelFile { path: path.into(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_widened_exactly() {
        for (bits, value) in [
            (0x0000, 0.0),
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x3555, 0.333_251_95),
            (0x7bff, 65_504.0),
            (0x0400, 2f32.powi(-14)),
            (0x0001, 2f32.powi(-24)),
            (0x83ff, -1023.0 * 2f32.powi(-24)),
            (0x7c00, f32::INFINITY),
            (0xfc00, f32::NEG_INFINITY),
        ] {
            assert_eq!(from_half(bits).to_bits(), value.to_bits(), "{bits:#x}");
        }
        assert!(from_half(0x7e00).is_nan());
    }
}
