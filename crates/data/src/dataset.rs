//! A data set in memory: one contiguous buffer of samples, labels beside it, normalisation applied when gathering.
//!
//! Images stay `u8` and channels-last, so CIFAR-10 takes 184 MB rather than 737 MB, and a batch becomes `f32` only
//! when it is gathered. Texts stay ragged word pieces until then. A data set never changes after it is built; `subset`,
//! `resized` and friends make new ones.

use crate::error::{Error, Result};
use crate::parts::Parts;
use crate::tokens::Tokens;

/// What one sample looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// An image, stored row by row with the channels of a pixel side by side.
    Image {
        /// Rows.
        height: usize,
        /// Columns.
        width: usize,
        /// Values per pixel.
        channels: usize,
    },
    /// A row of a table.
    Vector {
        /// Values per row.
        features: usize,
    },
    /// A text of at most `len` tokens: slots as [`Tokens`] has them.
    Tokens {
        /// Slots per text.
        len: usize,
    },
}

impl Shape {
    /// Values per sample.
    pub fn len(self) -> usize {
        match self {
            Self::Image { height, width, channels } => height * width * channels,
            Self::Vector { features } => features,
            Self::Tokens { len } => len,
        }
    }

    /// Whether a sample holds no value at all (no data set has such a shape).
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// How many (mean, std) pairs normalise a sample: one per channel, or one per feature of a table.
    /// Texts are not normalised; they have one pair that changes nothing.
    pub fn n_channels(self) -> usize {
        match self {
            Self::Image { channels, .. } => channels,
            Self::Vector { features } => features,
            Self::Tokens { .. } => 1,
        }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Image { height, width, channels } => write!(f, "{height}×{width}×{channels}"),
            Self::Vector { features } => write!(f, "{features}"),
            Self::Tokens { len } => write!(f, "{len} tokens"),
        }
    }
}

/// The values of all samples, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub enum Samples {
    /// Bytes, as images have them.
    U8(Vec<u8>),
    /// Floats, as tables have them.
    F32(Vec<f32>),
    /// Word pieces, as texts have them.
    Tokens(Tokens),
}

impl Samples {
    /// How many samples of a shape there are, or what does not fit it.
    fn count(&self, shape: Shape) -> Result<usize, String> {
        let n_values = match (self, shape) {
            (Self::Tokens(texts), Shape::Tokens { len }) if !texts.is_empty() && texts.longest() <= len => {
                return Ok(texts.len());
            }
            (Self::Tokens(texts), _) => {
                let (n, longest) = (texts.len(), texts.longest());
                return Err(format!("{n} texts of up to {longest} tokens are not samples of shape {shape}"));
            }
            (_, Shape::Tokens { .. }) => return Err("its samples are no texts".into()),
            (Self::U8(values), _) => values.len(),
            (Self::F32(values), _) => values.len(),
        };
        if shape.is_empty() || n_values == 0 || !n_values.is_multiple_of(shape.len()) {
            return Err(format!("{n_values} values are not samples of shape {shape}"));
        }
        Ok(n_values / shape.len())
    }
}

/// How a stored value v becomes an input: `(v · unit − mean) / std`, with mean and std of its channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Normalisation {
    /// Factor that brings stored values to the units of mean and std: 1/255 for bytes of an image.
    pub unit: f32,
    /// Per channel (image) or per feature (table).
    pub mean: Vec<f32>,
    /// Per channel (image) or per feature (table).
    pub std: Vec<f32>,
}

impl Normalisation {
    /// Only the factor: `v · unit`.
    pub fn scaling(unit: f32, n_channels: usize) -> Self {
        Self { unit, mean: vec![0.0; n_channels], std: vec![1.0; n_channels] }
    }

    /// Bytes to [0, 1], then the given means and standard deviations.
    pub fn bytes(mean: &[f32], std: &[f32]) -> Self {
        Self { unit: 1.0 / 255.0, mean: mean.to_vec(), std: std.to_vec() }
    }
}

/// Samples with their labels, ready to be gathered into batches.
///
/// ```
/// use fedproj_data::{Dataset, Samples, Shape};
///
/// let rows = Samples::F32(vec![1.0, 2.0, 3.0, 4.0]);
/// let data = Dataset::new("toy", Shape::Vector { features: 2 }, rows, Some(vec![0, 1]), vec!["a".into(), "b".into()])?;
/// let mut batch = [0.0; 2];
/// data.gather(&[1], &mut batch);
/// assert_eq!(batch, [3.0, 4.0]);
/// # Ok::<(), fedproj_data::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Dataset {
    pub(crate) name: String,
    pub(crate) shape: Shape,
    pub(crate) samples: Samples,
    pub(crate) labels: Option<Vec<u32>>,
    pub(crate) groups: Option<Vec<u32>>,
    pub(crate) class_names: Vec<String>,
    pub(crate) normalisation: Normalisation,
    /// Scale and shift of one row of pixels, or of one row of a table. So gathering is one multiply-add over plain slices.
    /// The compiler vectorises it for any number of channels.
    pub(crate) scale_row: Vec<f32>,
    pub(crate) shift_row: Vec<f32>,
}

impl Dataset {
    /// A data set from its parts; bytes are scaled by 1/255 and floats taken as they are until
    /// [`with_normalisation`](Self::with_normalisation) changes it.
    ///
    /// # Errors
    /// If there is no sample, if lengths disagree, or if a label is not below the number of class names.
    pub fn new(
        name: impl Into<String>,
        shape: Shape,
        samples: Samples,
        labels: Option<Vec<u32>>,
        class_names: Vec<String>,
    ) -> Result<Self> {
        let name = name.into();
        let n_samples = samples.count(shape).map_err(|problem| Error::inconsistent(&name, problem))?;
        if u32::try_from(n_samples).is_err() {
            return Err(Error::inconsistent(&name, format!("{n_samples} samples exceed the limit of 2³² − 1")));
        }
        if let Some(labels) = &labels {
            if labels.len() != n_samples {
                return Err(Error::inconsistent(&name, format!("{} labels for {n_samples} samples", labels.len())));
            }
            let n_classes = class_names.len();
            if let Some(record) = labels.iter().position(|&l| l as usize >= n_classes) {
                return Err(Error::LabelOutOfRange { file: name, record, label: labels[record].into(), n_classes });
            }
        }
        let unit = if matches!(samples, Samples::U8(_)) { 1.0 / 255.0 } else { 1.0 };
        let normalisation = Normalisation::scaling(unit, shape.n_channels());
        let (scale_row, shift_row) = affine_rows(shape, &normalisation);
        Ok(Self { name, shape, samples, labels, groups: None, class_names, normalisation, scale_row, shift_row })
    }

    /// Name, as reports show it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Shape of one sample.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Values per sample.
    pub fn sample_len(&self) -> usize {
        self.shape.len()
    }

    /// How many samples there are.
    pub fn n_samples(&self) -> usize {
        match &self.samples {
            Samples::U8(values) => values.len() / self.shape.len(),
            Samples::F32(values) => values.len() / self.shape.len(),
            Samples::Tokens(texts) => texts.len(),
        }
    }

    /// How many texts were cut to fit their shape; 0 for anything else.
    pub fn n_truncated(&self) -> usize {
        if let Samples::Tokens(texts) = &self.samples { texts.n_truncated() } else { 0 }
    }

    /// How many classes there are; 0 for a set without labels.
    pub fn n_classes(&self) -> usize {
        self.class_names.len()
    }

    /// Class of each sample, if known.
    pub fn labels(&self) -> Option<&[u32]> {
        self.labels.as_deref()
    }

    /// Natural owner of each sample (writer, hospital …), if known.
    pub fn groups(&self) -> Option<&[u32]> {
        self.groups.as_deref()
    }

    /// Names of the classes in label order.
    pub fn class_names(&self) -> &[String] {
        &self.class_names
    }

    /// The stored values of all samples, before normalisation.
    pub fn samples(&self) -> &Samples {
        &self.samples
    }

    /// The normalisation in force.
    pub fn normalisation(&self) -> &Normalisation {
        &self.normalisation
    }

    /// Writes the samples `indices`, normalised and channels-last, one after the other into `out`.
    ///
    /// # Panics
    /// If an index is out of range or `out` does not hold exactly `indices.len() · sample_len()` values.
    pub fn gather(&self, indices: &[u32], out: &mut [f32]) {
        let len = self.shape.len();
        assert_eq!(out.len(), indices.len() * len, "a batch of {} samples of {len} values", indices.len());
        for (&index, sample) in indices.iter().zip(out.chunks_exact_mut(len)) {
            let span = index as usize * len..(index as usize + 1) * len;
            match &self.samples {
                Samples::U8(values) => normalise(&values[span], &self.scale_row, &self.shift_row, sample),
                Samples::F32(values) => normalise(&values[span], &self.scale_row, &self.shift_row, sample),
                Samples::Tokens(texts) => texts.write(index as usize, sample),
            }
        }
    }

    /// All samples, as [`Dataset::gather`] writes them.
    pub fn gather_all(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.n_samples() * self.sample_len()];
        self.gather(&(0..self.n_samples() as u32).collect::<Vec<_>>(), &mut out);
        out
    }

    /// The samples `indices`, in that order.
    ///
    /// # Panics
    /// If an index is out of range.
    #[must_use]
    pub fn subset(&self, indices: &[u32]) -> Self {
        fn rows<T: Copy>(values: &[T], n_samples: usize, indices: &[u32]) -> Vec<T> {
            let mut out = Vec::new();
            gather_rows(values, n_samples, indices, &mut out);
            out
        }
        let n = self.n_samples();
        let samples = match &self.samples {
            Samples::U8(values) => Samples::U8(rows(values, n, indices)),
            Samples::F32(values) => Samples::F32(rows(values, n, indices)),
            Samples::Tokens(texts) => Samples::Tokens(texts.subset(indices)),
        };
        Self {
            samples,
            labels: self.labels.as_ref().map(|l| rows(l, n, indices)),
            groups: self.groups.as_ref().map(|g| rows(g, n, indices)),
            name: self.name.clone(),
            class_names: self.class_names.clone(),
            normalisation: self.normalisation.clone(),
            scale_row: self.scale_row.clone(),
            shift_row: self.shift_row.clone(),
            shape: self.shape,
        }
    }

    /// The same samples without labels and classes, as a public set is used.
    #[must_use]
    pub fn without_labels(mut self) -> Self {
        self.labels = None;
        self.class_names.clear();
        self
    }

    /// The same samples with another normalisation.
    ///
    /// # Errors
    /// If it is not one finite mean and one positive std per channel.
    pub fn with_normalisation(mut self, normalisation: Normalisation) -> Result<Self> {
        let n = self.shape.n_channels();
        let Normalisation { unit, mean, std } = &normalisation;
        let is_scale = |s: &f32| s.is_finite() && *s > 0.0;
        let usable = mean.iter().all(|m| m.is_finite()) && std.iter().all(is_scale) && is_scale(unit);
        if mean.len() != n || std.len() != n || !usable {
            let problem = format!("{n} channels cannot be normalised with mean {mean:?}, std {std:?}, unit {unit}");
            return Err(Error::inconsistent(&self.name, problem));
        }
        (self.scale_row, self.shift_row) = affine_rows(self.shape, &normalisation);
        self.normalisation = normalisation;
        Ok(self)
    }

    /// The same samples, each with its natural owner, if it is known.
    ///
    /// # Errors
    /// If there is not exactly one group id per sample.
    pub fn with_groups(mut self, groups: impl Into<Option<Vec<u32>>>) -> Result<Self> {
        self.groups = groups.into();
        if let Some(n) = self.groups().map(<[u32]>::len).filter(|n| *n != self.n_samples()) {
            return Err(Error::inconsistent(&self.name, format!("{n} group ids for {} samples", self.n_samples())));
        }
        Ok(self)
    }

    /// BLAKE3 (hex) of everything that training sees: shape, values, labels, groups, class names, normalisation.
    pub fn hash(&self) -> String {
        let mut parts = Parts::default();
        parts.add(format!("fedproj data set 1, {:?}", self.shape).as_bytes());
        match &self.samples {
            Samples::U8(values) => parts.add(values),
            Samples::F32(values) => parts.add_floats(values),
            Samples::Tokens(texts) => parts.add_ids(&texts.to_words()),
        }
        parts.add_ids(self.labels.as_deref().unwrap_or_default());
        parts.add_ids(self.groups.as_deref().unwrap_or_default());
        parts.add(self.class_names.join("\n").as_bytes());
        parts.add_floats(&[self.normalisation.unit]);
        parts.add_floats(&self.normalisation.mean);
        parts.add_floats(&self.normalisation.std);
        parts.hex()
    }
}

fn normalise<T: Copy + Into<f32>>(values: &[T], scale: &[f32], shift: &[f32], out: &mut [f32]) {
    for (row, out) in values.chunks_exact(scale.len()).zip(out.chunks_exact_mut(scale.len())) {
        for (((o, &v), &a), &b) in out.iter_mut().zip(row).zip(scale).zip(shift) {
            *o = v.into() * a + b;
        }
    }
}

/// Replaces the content of `out` by the rows `indices` of a matrix with `n_rows` rows; nothing for an empty matrix.
///
/// # Panics
/// If an index is out of range.
pub fn gather_rows<T: Copy>(matrix: &[T], n_rows: usize, indices: &[u32], out: &mut Vec<T>) {
    let width = matrix.len() / n_rows.max(1);
    out.clear();
    out.reserve(indices.len() * width);
    for &i in indices {
        out.extend_from_slice(&matrix[i as usize * width..][..width]);
    }
}

/// `(v · unit − mean) / std` as `v · scale + shift`, repeated over one row of pixels.
fn affine_rows(shape: Shape, n: &Normalisation) -> (Vec<f32>, Vec<f32>) {
    let repeat = if let Shape::Image { width, .. } = shape { width } else { 1 };
    let scale: Vec<f32> = n.std.iter().map(|s| n.unit / s).collect();
    let shift: Vec<f32> = n.mean.iter().zip(&n.std).map(|(m, s)| -m / s).collect();
    (scale.repeat(repeat), shift.repeat(repeat))
}
