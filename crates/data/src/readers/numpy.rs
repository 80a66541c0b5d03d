//! NumPy arrays: an `.npz` file, a folder of `.npy` files, or one `.npy` file without labels.
//!
//! Names of the arrays: `x_train`, `y_train`, and if there are any `x_test`, `y_test`, `group_train` and
//! `group_test`; or simply `x`, `y`, `group`. Arrays x are (N, features), (N, height, width) or four-dimensional.
//! Unless `layout` is set, the last kind is NHWC if its last axis has 1, 3 or 4 entries, else NCHW if its second
//! axis has. Images of type uint8 are scaled by 1/255; other types become `f32` and are taken as they are. Labels are
//! integers from 0; the largest label sets the number of classes.

use std::collections::BTreeMap;
use std::path::Path;

use super::npy::{self, Array, Values};
use super::{read_file, zip};
use crate::dataset::{Dataset, Samples, Shape};
use crate::error::{Error, Result};
use crate::registry::{Origin, Read, Reader, Request};
use crate::source::{ImageLayout, Splits};

pub(crate) const READER: Reader = Reader {
    name: "numpy",
    about: "NumPy arrays: an .npz file, a folder of .npy files or one .npy file",
    origin: Origin::Format,
    options: &["path", "layout", "resize", "standardise"],
    read: Read::Numbers(read),
};

fn read(request: &Request<'_>) -> Result<Splits> {
    let path = request.path()?;
    let mut arrays = Arrays { file: path.display().to_string(), by_name: read_arrays(&path)? };
    let suffix = if arrays.by_name.contains_key("x_train") { "_train" } else { "" };
    let n_classes = arrays.n_classes(&["y_train", "y_test", "y"])?;
    let layout = request.config.layout;
    let train = arrays.take_part(request.name, suffix, layout, n_classes)?;
    let mut test = None;
    if arrays.by_name.contains_key("x_test") {
        test = Some(arrays.take_part(&format!("{} test", request.name), "_test", layout, n_classes)?);
    }
    Ok(Splits { train, test })
}

fn read_arrays(path: &Path) -> Result<BTreeMap<String, Array>> {
    let file = path.display().to_string();
    if path.is_dir() {
        let names = ["x", "y", "group"].iter().flat_map(|n| ["", "_train", "_test"].map(|part| format!("{n}{part}")));
        let file_of = |name: &str| path.join(format!("{name}.npy"));
        let there = names.filter(|name| file_of(name).exists());
        return there.map(|n| Ok((n.clone(), npy::read(&format!("{file}: {n}.npy"), &file_of(&n))?))).collect();
    }
    if path.extension().is_some_and(|e| e == "npy") {
        return Ok(BTreeMap::from([("x".to_owned(), npy::read(&file, path)?)]));
    }
    let bytes = read_file(path)?;
    let members = zip::members(&bytes, |_| true).map_err(|found| {
        let hint = "save it with numpy.savez or numpy.savez_compressed";
        Error::malformed(&file, "archive", "a whole .npz file", found, hint)
    })?;
    let parse = |(name, bytes): &(String, Vec<u8>)| {
        Ok((name.trim_end_matches(".npy").to_owned(), npy::parse(&format!("{file}: {name}"), bytes)?))
    };
    members.iter().map(parse).collect()
}

struct Arrays {
    file: String,
    by_name: BTreeMap<String, Array>,
}

impl Arrays {
    /// Takes `x`, `y` and `group` with the given suffix and makes a data set of them.
    fn take_part(
        &mut self,
        name: &str,
        suffix: &str,
        layout: Option<ImageLayout>,
        n_classes: usize,
    ) -> Result<Dataset> {
        let x = self.by_name.remove(&format!("x{suffix}")).ok_or_else(|| {
            let found = self.by_name.keys().cloned().collect::<Vec<_>>().join(", ");
            self.malformed("names of arrays", "`x` or `x_train`".into(), format!("[{found}]"))
        })?;
        let n = x.shape.first().copied().unwrap_or_default();
        let (shape, samples) = self.samples(x, layout)?;
        let labels = self.ids(&format!("y{suffix}"))?;
        if let Some(labels) = labels.as_ref().filter(|labels| labels.len() != n) {
            let found = format!("{} labels for {n} samples", labels.len());
            return Err(self.malformed(&format!("y{suffix}"), format!("one label per sample of x{suffix}"), found));
        }
        let class_names = (0..n_classes).map(|c| c.to_string()).filter(|_| labels.is_some()).collect();
        Dataset::new(name, shape, samples, labels, class_names)?.with_groups(self.ids(&format!("group{suffix}"))?)
    }

    fn samples(&self, x: Array, layout: Option<ImageLayout>) -> Result<(Shape, Samples)> {
        let fits = |given: Option<ImageLayout>, layout: ImageLayout, channels: usize| {
            given.map_or(matches!(channels, 1 | 3 | 4), |given| given == layout)
        };
        let (shape, is_nchw) = match (x.shape.as_slice(), layout) {
            (&[_, features], _) => (Shape::Vector { features }, false),
            (&[_, height, width], _) => (Shape::Image { height, width, channels: 1 }, false),
            (&[_, height, width, channels], layout) if fits(layout, ImageLayout::Nhwc, channels) => {
                (Shape::Image { height, width, channels }, false)
            }
            (&[_, channels, height, width], layout) if fits(layout, ImageLayout::Nchw, channels) => {
                (Shape::Image { height, width, channels }, true)
            }
            (shape, _) => {
                let expected = "(N, features), (N, h, w), (N, h, w, c) or (N, c, h, w)".to_owned();
                return Err(self.malformed("shape of x", expected, format!("{shape:?}")));
            }
        };
        if x.shape.contains(&0) {
            return Err(self.malformed("shape of x", "at least one sample".into(), format!("{:?}", x.shape)));
        }
        let samples = match x.values {
            Values::U8(v) => Samples::U8(if is_nchw { channels_last(&v, shape) } else { v }),
            Values::F32(v) => Samples::F32(if is_nchw { channels_last(&v, shape) } else { v }),
            Values::Int(v) => {
                let v: Vec<f32> = v.into_iter().map(|v| v as f32).collect();
                Samples::F32(if is_nchw { channels_last(&v, shape) } else { v })
            }
        };
        match &samples {
            Samples::F32(v) if !v.iter().all(|v| v.is_finite()) => {
                let record = v.iter().position(|v| !v.is_finite()).unwrap_or_default() / shape.len();
                Err(self.malformed(&format!("x, sample {record}"), "finite numbers".into(), "NaN or infinity".into()))
            }
            // Bytes of a table are plain numbers, not brightness.
            Samples::U8(v) if matches!(shape, Shape::Vector { .. }) => {
                Ok((shape, Samples::F32(v.iter().map(|&v| v.into()).collect())))
            }
            _ => Ok((shape, samples)),
        }
    }

    /// The array `name` as non-negative integers.
    fn ids(&self, name: &str) -> Result<Option<Vec<u32>>> {
        let Some(array) = self.by_name.get(name) else { return Ok(None) };
        let strange = |found: String| Err(self.malformed(name, "non-negative integers of shape (N,)".into(), found));
        // Labels are often a column, (N, 1).
        if !matches!(array.shape[..], [_] | [_, 1]) {
            return strange(format!("shape {:?}", array.shape));
        }
        match &array.values {
            Values::U8(v) => Ok(Some(v.iter().map(|&v| v.into()).collect())),
            Values::Int(v) => match v.iter().position(|&v| u32::try_from(v).is_err()) {
                Some(at) => strange(format!("{} at position {at}", v[at])),
                None => Ok(Some(v.iter().map(|&v| v as u32).collect())),
            },
            Values::F32(_) => strange("floats".into()),
        }
    }

    /// One more than the largest label, which may not exceed the number of labels by far.
    fn n_classes(&self, names: &[&str]) -> Result<usize> {
        let mut n_classes = 0;
        for name in names {
            let Some(ids) = self.ids(name)? else { continue };
            let largest = ids.iter().max().map_or(0, |&l| l as usize + 1);
            // One wrong value must not create millions of class names.
            if largest > ids.len().max(1 << 16) {
                let found = format!("label {}", largest - 1);
                return Err(self.malformed(name, "labels counted from 0 without large gaps".into(), found));
            }
            n_classes = n_classes.max(largest);
        }
        Ok(n_classes)
    }

    fn malformed(&self, place: &str, expected: String, found: String) -> Error {
        let hint = match place {
            "names of arrays" => "name the arrays x_train, y_train, x_test, y_test, or x and y",
            "shape of x" => "give layout = \"nhwc\" or \"nchw\" where the shape leaves it open",
            _ if place.starts_with('x') => "replace or leave out samples with missing values",
            _ => "labels and groups are whole numbers from 0, one per sample: y.astype(numpy.int64)",
        };
        Error::Malformed { file: self.file.clone(), place: place.to_owned(), expected, found, hint }
    }
}

/// NCHW to NHWC.
fn channels_last<T: Copy>(values: &[T], shape: Shape) -> Vec<T> {
    let n_channels = shape.n_channels();
    let plane_len = shape.len() / n_channels;
    let pixels = |image: &'_ [T]| -> Vec<T> {
        (0..plane_len).flat_map(|p| (0..n_channels).map(move |c| c * plane_len + p)).map(|at| image[at]).collect()
    };
    values.chunks_exact(shape.len()).flat_map(pixels).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SourceConfig, load};

    fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
        npy::tests::file(descr, shape, data)
    }

    fn check(file: &str, bytes: &[u8], layout: Option<ImageLayout>) -> Result<Splits> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(file), bytes).unwrap();
        load(&SourceConfig { path: Some(file.into()), layout, ..SourceConfig::named("numpy") }, Some(dir.path()))
    }

    #[test]
    fn an_npz_with_train_and_test_is_read() {
        let archive = zip::tests::archive(&[
            ("x_train.npy", &npy("|u1", "(2, 3, 1, 2)", &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])),
            ("y_train.npy", &npy("<i8", "(2, 1)", &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
            ("x_test.npy", &npy("|u1", "(1, 3, 1, 2)", &[0; 6])),
            ("y_test.npy", &npy("|u1", "(1,)", &[2])),
        ]);
        let splits = check("a.npz", &archive, None).unwrap();
        assert_eq!(splits.train.shape(), Shape::Image { height: 1, width: 2, channels: 3 });
        assert_eq!(splits.train.samples, Samples::U8(vec![0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]));
        assert_eq!(splits.train.labels(), Some(&[1, 0][..]));
        assert_eq!(splits.train.n_classes(), 3);
        assert_eq!(splits.concatenated().unwrap().n_samples(), 3);
    }

    #[test]
    fn the_shape_tells_the_layout_unless_the_option_does() {
        let shape = |text: &str, layout| {
            let splits = check("a.npy", &npy("|u1", text, &[0; 36]), layout).unwrap();
            splits.train.shape()
        };
        assert_eq!(shape("(2, 6, 3)", None), Shape::Image { height: 6, width: 3, channels: 1 });
        assert_eq!(shape("(2, 3, 2, 3)", None), Shape::Image { height: 3, width: 2, channels: 3 });
        let nchw = Shape::Image { height: 2, width: 3, channels: 3 };
        assert_eq!(shape("(2, 3, 2, 3)", Some(ImageLayout::Nchw)), nchw);
        assert_eq!(shape("(2, 18)", None), Shape::Vector { features: 18 });
        let message = check("a.npy", &npy("|u1", "(1, 6, 3, 2)", &[0; 36]), None).unwrap_err().to_string();
        assert!(message.contains("[1, 6, 3, 2]") && message.contains("layout"), "{message}");
    }

    #[test]
    fn strange_labels_and_values_are_refused() {
        let with_labels = |descr: &str, shape: &str, data: &[u8]| {
            let x = npy("<f4", "(1, 1)", &1.0_f32.to_le_bytes());
            let archive = zip::tests::archive(&[("x.npy", &x), ("y.npy", &npy(descr, shape, data))]);
            check("a.npz", &archive, None).unwrap_err().to_string()
        };
        assert!(with_labels("<f4", "(1,)", &[0; 4]).contains("non-negative integers of shape (N,), found floats"));
        assert!(with_labels("|i1", "(1,)", &[0xff]).contains("found -1 at position 0"));
        assert!(with_labels("|u1", "(1, 2)", &[0, 0]).contains("found shape [1, 2]"));
        assert!(with_labels("<u4", "(1,)", &[0xff; 4]).contains("label 4294967295"));
        let message = with_labels("|u1", "(2,)", &[0, 0]);
        assert!(
            message.contains("a.npz`, y: expected one label per sample of x, found 2 labels for 1 samples"),
            "{message}"
        );
        let nan = npy("<f4", "(1, 1)", &f32::NAN.to_le_bytes());
        assert!(check("a.npy", &nan, None).unwrap_err().to_string().contains("sample 0"));
        assert!(check("a.npz", b"PK", None).unwrap_err().to_string().contains("no end record"));
        assert!(check("a.npy", &npy("|u1", "(0, 4)", &[]), None).unwrap_err().to_string().contains("at least one"));
    }
}
