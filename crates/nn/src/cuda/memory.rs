//! Memory of a GPU: arrays of all lanes, data sets, and which part of an array is in use.

use super::gpu::{DeviceArray, Gpu, parameters};
use crate::cpu::check_len;
use crate::error::Result;

/// Arrays on the GPU: one per lane, or one that all lanes share.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    pub(super) at: u64,
    pub(super) stride: i64,
}
parameters!(Rows);

impl Rows {
    /// No array.
    pub(super) const NONE: Self = Self { at: 0, stride: 0 };

    /// The same arrays from the float `offset` on.
    pub(super) fn from(self, offset: usize) -> Self {
        Self { at: self.at + 4 * offset as u64, ..self }
    }
}

/// Flat vectors on the GPU, one per lane.
#[derive(Debug)]
pub struct Vectors {
    pub(super) memory: DeviceArray<f32>,
    pub(super) stride: usize,
    pub(super) len: usize,
}

impl Vectors {
    /// Floats per vector.
    #[allow(clippy::len_without_is_empty, reason = "a vector of nothing is as good as any")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Their addresses.
    pub fn rows(&self) -> Rows {
        Rows { at: self.memory.at(), stride: self.stride as i64 }
    }
}

/// A data set on the GPU.
#[derive(Debug)]
pub struct Data {
    pub(super) samples: DeviceArray<f32>,
    pub(super) sample_len: usize,
    pub(super) labels: Option<DeviceArray<u32>>,
}

impl Data {
    /// Uploads samples of `sample_len` floats. `part` fills one range of samples at a time.
    ///
    /// # Errors
    /// If the GPU's memory is too small.
    pub fn upload(
        gpu: &Gpu,
        n_samples: usize,
        sample_len: usize,
        labels: Option<&[u32]>,
        mut part: impl FnMut(std::ops::Range<usize>, &mut [f32]),
    ) -> Result<Self> {
        const PART: usize = 4096;
        let mut samples = gpu.zeros(n_samples * sample_len)?;
        let mut buffer = vec![0.0; PART.min(n_samples) * sample_len];
        for start in (0..n_samples).step_by(PART) {
            let end = (start + PART).min(n_samples);
            let buffer = &mut buffer[..(end - start) * sample_len];
            part(start..end, buffer);
            gpu.write(&mut samples, start * sample_len, buffer)?;
        }
        let labels = labels.map(|labels| gpu.upload(labels)).transpose()?;
        Ok(Self { samples, sample_len, labels })
    }

    /// A matrix whose rows are gathered like samples.
    ///
    /// # Errors
    /// If the GPU's memory is too small.
    pub fn matrix(gpu: &Gpu, values: &[f32], row_len: usize) -> Result<Self> {
        Ok(Self { samples: gpu.upload(values)?, sample_len: row_len, labels: None })
    }

    /// One number per sample, such as labels or marks.
    ///
    /// # Errors
    /// If the GPU's memory is too small.
    pub fn numbers(gpu: &Gpu, values: &[u32]) -> Result<Self> {
        Ok(Self { samples: gpu.zeros(0)?, sample_len: 0, labels: Some(gpu.upload(values)?) })
    }

    /// Overwrites the values; the length must match.
    ///
    /// # Errors
    /// If the length differs, or the driver fails.
    pub fn replace(&mut self, gpu: &Gpu, values: &[f32]) -> Result<()> {
        check_len("the matrix", self.samples.len(), values.len())?;
        gpu.write(&mut self.samples, 0, values)
    }

    /// Gives the samples labels.
    ///
    /// # Errors
    /// If the GPU's memory is too small.
    pub fn set_labels(&mut self, gpu: &Gpu, labels: &[u32]) -> Result<()> {
        self.labels = Some(gpu.upload(labels)?);
        Ok(())
    }
}

/// Which part of an array is in use, see `common.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub len: i32,
    width: i32,
    pub tokens: u64,
}
parameters!(Extent);

impl Extent {
    /// All of its floats.
    pub fn all(len: usize) -> Self {
        Self::rows(len, 1, 0)
    }

    /// Rows of `width` floats: `len` floats in all, or as many rows as each lane's count at `tokens`.
    pub fn rows(len: usize, width: usize, tokens: u64) -> Self {
        Self { len: len as i32, width: width as i32, tokens }
    }

    /// The threads of dropout: one per eight elements.
    pub fn calls(self) -> Self {
        Self { len: (self.len + 127) / 128 * 16, ..self }
    }

    /// One thread per four elements.
    pub fn packs(self) -> Self {
        Self { len: (self.len + 3) / 4, ..self }
    }

    /// Max rows.
    pub fn n_rows(self) -> usize {
        (self.len / self.width.max(1)) as usize
    }
}

/// Rows start at multiples of 32 floats, so that kernels may read four at a time.
pub(super) fn padded(len: usize) -> usize {
    len.next_multiple_of(32).max(32)
}

/// Zeroed vectors, one per lane.
pub(super) fn vectors(gpu: &Gpu, lanes: usize, len: usize) -> Result<Vectors> {
    let stride = padded(len);
    Ok(Vectors { memory: gpu.zeros(lanes * stride)?, stride, len })
}
