//! CIFAR's binary records, shared by `cifar10`, `cifar100` and `tinyimagenet32`.
//!
//! A record is one or two label bytes, then 1 024 red, 1 024 green and 1 024 blue bytes, row by row. Red, green and
//! blue are brought side by side here, because everything behind the readers is channels-last.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::dataset::{Dataset, Normalisation, Samples, Shape};
use crate::error::{Error, Result};
use crate::source::Splits;

/// Where CIFAR-10 and CIFAR-100 are published.
pub(super) const CIFAR_SITE: &str = "https://www.cs.toronto.edu/~kriz/cifar.html";

/// Shape of every image in these files.
pub(super) const SHAPE: Shape = Shape::Image { height: 32, width: 32, channels: 3 };
const PLANE_LEN: usize = 32 * 32;

/// Where the label is in a record, and what it may be.
pub(super) struct Records<'a> {
    /// Label bytes before the pixels.
    pub n_label_bytes: usize,
    /// Which of them is the label.
    pub label_at: usize,
    /// Names of the classes; their number bounds the labels.
    pub class_names: &'a [String],
}

impl Records<'_> {
    /// Training and test part, each with its files and their numbers of records.
    pub fn read_splits(
        &self,
        name: &str,
        folder: &Path,
        (train, n_train): (&[&str], usize),
        (test, n_test): (&str, usize),
        normalisation: &Normalisation,
    ) -> Result<Splits> {
        let train = self.read(name, folder, train, n_train)?;
        let test = self.read(&format!("{name} test"), folder, &[test], n_test)?;
        Splits { train, test: Some(test) }.map(|part| part.with_normalisation(normalisation.clone()))
    }

    /// Reads `n_per_file` records from each of `files` in `folder` into one data set.
    fn read(&self, name: &str, folder: &Path, files: &[&str], n_per_file: usize) -> Result<Dataset> {
        let mut pixels = Vec::new();
        let mut labels = Vec::new();
        for file in files {
            self.append(&folder.join(file), n_per_file, &mut pixels, &mut labels)?;
        }
        Dataset::new(name, SHAPE, Samples::U8(pixels), Some(labels), self.class_names.to_vec())
    }

    fn append(&self, path: &Path, n: usize, pixels: &mut Vec<u8>, labels: &mut Vec<u32>) -> Result<()> {
        let record_len = self.n_label_bytes + 3 * PLANE_LEN;
        let mut file = File::open(path).map_err(Error::io("read", path))?;
        let n_bytes = file.metadata().map_err(Error::io("read", path))?.len();
        if n_bytes != (n * record_len) as u64 {
            let place = format!("record {}", n_bytes / record_len as u64);
            let expected = format!("{n} records of {record_len} bytes, {} bytes in all", n * record_len);
            let hint = "the file is truncated or no CIFAR binary file; unpack or fetch the archive again";
            return Err(Error::malformed(path.display(), place, expected, format!("a file of {n_bytes} bytes"), hint));
        }
        let mut bytes = vec![0; n * record_len];
        file.read_exact(&mut bytes).map_err(Error::io("read", path))?;
        pixels.reserve(n * SHAPE.len());
        for (record, bytes) in bytes.chunks_exact(record_len).enumerate() {
            let label = bytes[self.label_at];
            let n_classes = self.class_names.len();
            if usize::from(label) >= n_classes {
                let file = path.display().to_string();
                return Err(Error::LabelOutOfRange { file, record, label: label.into(), n_classes });
            }
            labels.push(label.into());
            let (red, rest) = bytes[self.n_label_bytes..].split_at(PLANE_LEN);
            let (green, blue) = rest.split_at(PLANE_LEN);
            pixels.extend(red.iter().zip(green).zip(blue).flat_map(|((&r, &g), &b)| [r, g, b]));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `n` records whose planes hold `record`, `record + 1`, `record + 2` and whose label is `record % n_classes`.
    fn records(n: usize, n_label_bytes: usize, n_classes: usize) -> Vec<u8> {
        (0..n)
            .flat_map(|r| {
                let planes = (0..3).flat_map(move |plane| vec![(r + plane) as u8; PLANE_LEN]);
                vec![(r % n_classes) as u8; n_label_bytes].into_iter().chain(planes)
            })
            .collect()
    }

    fn read(bytes: &[u8], n: usize) -> Result<Dataset> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.bin"), bytes).unwrap();
        let class_names: Vec<String> = (0..4).map(|c| c.to_string()).collect();
        let format = Records { n_label_bytes: 2, label_at: 1, class_names: &class_names };
        format.read("t", dir.path(), &["a.bin"], n)
    }

    #[test]
    fn planes_become_channels_last() {
        let data = read(&records(5, 2, 4), 5).unwrap();
        assert_eq!(data.labels(), Some(&[0, 1, 2, 3, 0][..]));
        let mut pixels = vec![0.0; SHAPE.len()];
        data.gather(&[3], &mut pixels);
        let bytes: Vec<f32> = pixels[..6].iter().map(|v| (v * 255.0).round()).collect();
        assert_eq!(bytes, [3.0, 4.0, 5.0, 3.0, 4.0, 5.0]);
    }

    #[test]
    fn truncated_and_overlong_files_are_refused_with_the_place() {
        let whole = records(5, 2, 4);
        let message = read(&whole[..whole.len() - 1], 5).unwrap_err().to_string();
        assert!(message.contains("a.bin") && message.contains("record 4:"), "{message}");
        // Cut at a record's end: only the expected count shows it.
        assert!(read(&whole[..4 * 3074], 5).is_err());
        assert!(read(&records(6, 2, 4), 5).is_err());
        assert!(read(&[], 5).is_err());
    }

    #[test]
    fn a_label_out_of_range_names_its_record() {
        let mut bytes = records(5, 2, 4);
        bytes[2 * 3074 + 1] = 200;
        let message = read(&bytes, 5).unwrap_err().to_string();
        assert!(message.contains("record 2: label 200 is out of range for 4 classes"), "{message}");
    }
}
