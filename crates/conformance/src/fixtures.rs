//! The reader of golden files.

use anyhow::{Context, Result, bail};
use fedproj_nn::{Layout, Shape};
use safetensors::SafeTensors;
use std::path::Path;

/// A golden file in memory.
pub struct Fixture {
    bytes: Vec<u8>,
}

impl Fixture {
    /// The file `name` of a folder, without its ending.
    pub fn open(folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(name).with_extension("safetensors");
        let bytes = std::fs::read(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
        Ok(Self { bytes })
    }

    fn bytes_of(&self, name: &str, width: usize) -> Result<Vec<u8>> {
        let file = SafeTensors::deserialize(&self.bytes).context("not a safetensors file")?;
        let bytes = file.tensor(name).with_context(|| format!("tensor {name}"))?.data().to_vec();
        if !bytes.len().is_multiple_of(width) {
            bail!("tensor {name} is not of numbers of {width} bytes");
        }
        Ok(bytes)
    }

    pub fn floats(&self, name: &str) -> Result<Vec<f32>> {
        let bytes = self.bytes_of(name, 4)?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    pub fn integers(&self, name: &str) -> Result<Vec<u32>> {
        // Counts and labels, stored as 64 bits.
        let bytes = self.bytes_of(name, 8)?;
        Ok(bytes.chunks_exact(8).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// A flat vector from the tensors `prefix/<name of each span>`.
    pub fn flat(&self, layout: &Layout, prefix: &str) -> Result<Vec<f32>> {
        let mut flat = vec![0.0; layout.len()];
        for span in layout.spans() {
            let tensor = self.floats(&format!("{prefix}/{}", span.name))?;
            if tensor.len() != span.len() {
                bail!("tensor {prefix}/{} has {} values in place of {}", span.name, tensor.len(), span.len());
            }
            span.write_torch(&tensor, &mut flat);
        }
        Ok(flat)
    }

    /// Images, moved from (N, C, H, W) to (N, H, W, C).
    pub fn images(&self, name: &str, shape: Shape) -> Result<Vec<f32>> {
        let x = self.floats(name)?;
        let mut out = vec![0.0; x.len()];
        for (to, from) in out.chunks_exact_mut(shape.len()).zip(x.chunks_exact(shape.len())) {
            for (at, v) in to.iter_mut().enumerate() {
                *v = from[at % shape.c * shape.pixels() + at / shape.c];
            }
        }
        Ok(out)
    }
}
