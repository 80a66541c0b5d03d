//! New data sets from old ones: other image sizes, two sets as one, normalisation measured from the data.

use crate::dataset::{Dataset, Normalisation, Samples, Shape};
use crate::error::{Error, Result};

impl Dataset {
    /// The same samples after a defect of the FedProj authors' CINIC-10 loader. It casts normalised values to bytes
    /// (towards zero, wrapping below it) and normalises them again. Little more than a mask of dark pixels remains.
    /// Samples that are not bytes stay as they are.
    #[must_use]
    pub fn with_byte_cast(mut self) -> Self {
        let Samples::U8(values) = &mut self.samples else { return self };
        let Normalisation { unit, mean, std } = &self.normalisation;
        for pixel in values.chunks_exact_mut(mean.len()) {
            for ((value, mean), std) in pixel.iter_mut().zip(mean).zip(std) {
                *value = ((f32::from(*value) * unit - mean) / std) as i32 as u8;
            }
        }
        self
    }

    /// The same images at another size, so that a public set fits the private one's model.
    ///
    /// Shrinking both sides by whole factors averages boxes of pixels; anything else is bilinear between pixel
    /// centres. Bytes are rounded to the nearest.
    ///
    /// # Errors
    /// If the samples are no images or a side is 0.
    pub fn resized(&self, height: usize, width: usize) -> Result<Self> {
        let Shape::Image { height: from_height, width: from_width, channels } = self.shape else {
            return Err(Error::inconsistent(&self.name, "only images can be resized"));
        };
        if height == 0 || width == 0 {
            return Err(Error::inconsistent(&self.name, format!("images cannot be resized to {height}×{width}")));
        }
        let plan = Resize { from: [from_height, from_width], to: [height, width], channels };
        let samples = match &self.samples {
            Samples::U8(values) => Samples::U8(plan.apply(values, f32::from, |v| v.round() as u8)),
            Samples::F32(values) => Samples::F32(plan.apply(values, |v| v, |v| v)),
            Samples::Tokens(_) => unreachable!("texts have no image's shape"),
        };
        let shape = Shape::Image { height, width, channels };
        let resized = Self::new(&self.name, shape, samples, self.labels.clone(), self.class_names.clone())?;
        let resized = resized.with_normalisation(self.normalisation.clone())?;
        Ok(Self { groups: self.groups.clone(), ..resized })
    }

    /// The samples of this set followed by those of `other`; name and normalisation are this one's.
    ///
    /// # Errors
    /// If shape, kind of values or classes differ, or only one of them has labels or groups.
    pub fn concatenated(mut self, other: &Self) -> Result<Self> {
        let problem =
            |what: &str| Err(Error::inconsistent(&self.name, format!("cannot append `{}`: {what}", other.name)));
        if self.shape != other.shape {
            return problem(&format!("samples of shape {} and {}", self.shape, other.shape));
        }
        if self.class_names != other.class_names {
            return problem("the classes differ");
        }
        if self.labels.is_some() != other.labels.is_some() || self.groups.is_some() != other.groups.is_some() {
            return problem("only one of them has labels, or only one has groups");
        }
        match (&mut self.samples, &other.samples) {
            (Samples::U8(a), Samples::U8(b)) => a.extend_from_slice(b),
            (Samples::F32(a), Samples::F32(b)) => a.extend_from_slice(b),
            (Samples::Tokens(a), Samples::Tokens(b)) => a.append(b),
            _ => return problem("one holds bytes, the other floats"),
        }
        if let (Some(a), Some(b)) = (&mut self.labels, &other.labels) {
            a.extend_from_slice(b);
        }
        if let (Some(a), Some(b)) = (&mut self.groups, &other.groups) {
            a.extend_from_slice(b);
        }
        Ok(self)
    }

    /// Mean and standard deviation of every channel of this set, in the units of its present normalisation.
    ///
    /// A channel that never varies gets standard deviation 1.
    pub fn measured_normalisation(&self) -> Normalisation {
        let n_channels = self.shape.n_channels();
        let unit = f64::from(self.normalisation.unit);
        let n_rows = self.n_samples() * self.sample_len() / n_channels;
        // Two passes: the one-pass formula loses all digits on features with a large mean.
        let mean = self.channel_sums(|_, v| v).into_iter().map(|s| s / n_rows as f64).collect::<Vec<_>>();
        let squares = self.channel_sums(|c, v| (v - mean[c]).powi(2));
        let std = squares.into_iter().map(|s| (s / n_rows as f64).sqrt() * unit);
        Normalisation {
            unit: self.normalisation.unit,
            std: std.map(|s| if s > 1e-12 { s as f32 } else { 1.0 }).collect(),
            mean: mean.iter().map(|m| (m * unit) as f32).collect(),
        }
    }

    fn channel_sums(&self, term: impl Fn(usize, f64) -> f64) -> Vec<f64> {
        let n_channels = self.shape.n_channels();
        let mut sums = vec![0.0; n_channels];
        let mut add = |i: usize, v: f64| sums[i % n_channels] += term(i % n_channels, v);
        match &self.samples {
            Samples::U8(values) => values.iter().enumerate().for_each(|(i, &v)| add(i, v.into())),
            Samples::F32(values) => values.iter().enumerate().for_each(|(i, &v)| add(i, v.into())),
            // Ids are names, not quantities.
            Samples::Tokens(_) => (),
        }
        sums
    }
}

/// A change of image size, `[height, width]`.
#[derive(Clone, Copy)]
pub(crate) struct Resize {
    pub from: [usize; 2],
    pub to: [usize; 2],
    pub channels: usize,
}

impl Resize {
    /// Resizes the images in `values`, which follow each other.
    pub fn apply<T: Copy>(self, values: &[T], widen: impl Fn(T) -> f32, narrow: impl Fn(f32) -> T) -> Vec<T> {
        let rows = taps(self.from[0], self.to[0], self.uses_boxes());
        let columns = taps(self.from[1], self.to[1], self.uses_boxes());
        let mut out = Vec::new();
        for image in values.chunks_exact(self.from[0] * self.from[1] * self.channels) {
            for row in &rows {
                for column in &columns {
                    for c in 0..self.channels {
                        let mut sum = 0.0;
                        for &(y, weight_y) in row {
                            for &(x, weight_x) in column {
                                sum += weight_y * weight_x * widen(image[(y * self.from[1] + x) * self.channels + c]);
                            }
                        }
                        out.push(narrow(sum));
                    }
                }
            }
        }
        out
    }

    fn uses_boxes(self) -> bool {
        self.from[0].is_multiple_of(self.to[0]) && self.from[1].is_multiple_of(self.to[1])
    }
}

/// For each output position along one side, the input positions it reads and their weights.
fn taps(from: usize, to: usize, boxes: bool) -> Vec<Vec<(usize, f32)>> {
    if boxes {
        let factor = from / to;
        return (0..to).map(|o| (0..factor).map(|i| (o * factor + i, 1.0 / factor as f32)).collect()).collect();
    }
    let step = from as f32 / to as f32;
    (0..to)
        .map(|o| {
            let centre = ((o as f32 + 0.5) * step - 0.5).clamp(0.0, (from - 1) as f32);
            let low = centre as usize;
            let high = (low + 1).min(from - 1);
            let weight = centre - low as f32;
            vec![(low, 1.0 - weight), (high, weight)]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn images(values: Vec<u8>, height: usize, width: usize, channels: usize) -> Dataset {
        let shape = Shape::Image { height, width, channels };
        let n = values.len() / shape.len();
        let labels = (0..n as u32).map(|i| i % 2).collect();
        Dataset::new("t", shape, Samples::U8(values), Some(labels), vec!["a".into(), "b".into()]).unwrap()
    }

    #[test]
    fn gather_normalises_each_channel_and_keeps_the_order_asked_for() {
        let data = images(vec![0, 255, 51, 102, 10, 20, 30, 40], 1, 2, 2);
        let data = data.with_normalisation(Normalisation::bytes(&[0.5, 0.0], &[0.5, 2.0])).unwrap();
        let mut out = [0.0; 8];
        data.gather(&[1, 0], &mut out);
        let expected = |v: f32, c: usize| if c == 0 { (v / 255.0 - 0.5) / 0.5 } else { v / 255.0 / 2.0 };
        for (i, v) in [10.0, 20.0, 30.0, 40.0, 0.0, 255.0, 51.0, 102.0].into_iter().enumerate() {
            assert!((out[i] - expected(v, i % 2)).abs() < 1e-6, "{i}: {}", out[i]);
        }
    }

    #[test]
    fn whole_factors_average_boxes_and_others_interpolate() {
        let data = images(vec![0, 100, 200, 100], 2, 2, 1);
        assert_eq!(data.resized(1, 1).unwrap().samples, Samples::U8(vec![100]));
        assert_eq!(data.resized(2, 2).unwrap(), data);
        let ramp = images(vec![0, 30, 60], 1, 3, 1).resized(1, 2).unwrap();
        // Centres of the two halves lie a quarter pixel outside the first and inside the last interval.
        assert_eq!(ramp.samples, Samples::U8(vec![8, 53]));
        let enlarged = images(vec![7; 12], 2, 2, 3).resized(3, 5).unwrap();
        assert_eq!(enlarged.samples, Samples::U8(vec![7; 45]));
        assert!(data.resized(0, 1).is_err());
    }

    #[test]
    fn subset_and_concatenation_carry_labels_and_groups() {
        let data = images((0..8).collect(), 1, 2, 1).with_groups(vec![9, 8, 7, 6]).unwrap();
        let both = data.subset(&[3]).concatenated(&data.subset(&[0, 1])).unwrap();
        assert_eq!(both.samples, Samples::U8(vec![6, 7, 0, 1, 2, 3]));
        assert_eq!(both.labels(), Some(&[1, 0, 1][..]));
        assert_eq!(both.groups(), Some(&[6, 9, 8][..]));
        assert_eq!(both.without_labels().n_classes(), 0);
        let wider = images((0..8).collect(), 1, 4, 1);
        let message = data.clone().concatenated(&wider).unwrap_err().to_string();
        assert!(message.contains("1×2×1 and 1×4×1"), "{message}");
    }

    #[test]
    fn hash_changes_with_every_part() {
        let data = images((0..8).collect(), 1, 2, 1);
        let mut hashes = vec![
            data.hash(),
            data.clone().without_labels().hash(),
            data.clone().with_groups(vec![0; 4]).unwrap().hash(),
            data.clone().with_normalisation(Normalisation::bytes(&[0.1], &[1.0])).unwrap().hash(),
            data.subset(&[1, 0, 2, 3]).hash(),
            images((0..8).collect(), 2, 1, 1).hash(),
        ];
        assert_eq!(data.hash(), data.clone().hash());
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 6);
    }

    #[test]
    fn measured_normalisation_gives_zero_mean_and_unit_variance() {
        let rows = Samples::F32(vec![1e6, 5.0, 1e6 + 2.0, 5.0]);
        let data = Dataset::new("t", Shape::Vector { features: 2 }, rows, None, vec![]).unwrap();
        let normalisation = data.measured_normalisation();
        let data = data.with_normalisation(normalisation).unwrap();
        let mut out = [0.0; 4];
        data.gather(&[0, 1], &mut out);
        assert_eq!(out.map(f32::round), [-1.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let shape = Shape::Vector { features: 2 };
        let build = |values: Vec<f32>, labels: Vec<u32>| {
            Dataset::new("t", shape, Samples::F32(values), Some(labels), vec!["a".into()]).unwrap_err().to_string()
        };
        assert!(build(vec![1.0; 3], vec![0]).contains("3 values"));
        assert!(build(vec![], vec![]).contains("0 values"));
        assert!(build(vec![1.0; 4], vec![0]).contains("1 labels for 2 samples"));
        assert!(build(vec![1.0; 4], vec![0, 1]).contains("record 1: label 1 is out of range for 1 classes"));
    }

    #[test]
    fn the_byte_cast_sends_small_values_to_0_and_negative_ones_to_255() {
        let shape = Shape::Image { height: 1, width: 4, channels: 1 };
        let pixels = Samples::U8(vec![0, 128, 230, 255]);
        let data = Dataset::new("toy", shape, pixels, None, Vec::new()).unwrap();
        let data = data.with_normalisation(Normalisation::bytes(&[0.5], &[0.25])).unwrap().with_byte_cast();
        // (p/255 − 0.5)/0.25 = −2, 0.008, 1.6, 2, cut towards zero: −2, 0, 1, 2.
        assert_eq!(data.samples, Samples::U8(vec![254, 0, 1, 2]));
    }
}
