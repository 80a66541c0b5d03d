//! The IDX format of MNIST and its kin: magic number, big-endian sizes, bytes.

use std::path::Path;

use super::npy::{self, Values};
use super::read_file;
use crate::dataset::{Dataset, Normalisation, Samples, Shape};
use crate::error::{Error, Result};
use crate::packages::{write_file, zip_members};
use crate::registry::{Files, Request};
use crate::source::Splits;

/// The four files every data set of this family has.
pub(super) const MEMBERS: &[&str] =
    &["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"];

/// The same as they are published.
pub(super) const PACKED: [&str; 4] = [
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
];

/// Reads training and test part, each file plain or with `.gz`.
pub(super) fn read_splits(
    request: &Request<'_>,
    files: &Files,
    class_names: &[&str],
    normalisation: &Normalisation,
) -> Result<Splits> {
    let folder = &request.folder(files)?;
    let part = |name: &str, images: &str, labels: &str| {
        let (shape, pixels) = read_array(folder, images)?;
        let [_, height, width] = shape[..] else { unreachable!("the magic number asks for three sizes") };
        let (_, labels) = read_array(folder, labels)?;
        let labels = labels.into_iter().map(u32::from).collect();
        let classes = class_names.iter().map(|&c| c.to_owned()).collect();
        let shape = Shape::Image { height, width, channels: 1 };
        Dataset::new(name, shape, Samples::U8(pixels), Some(labels), classes)?.with_normalisation(normalisation.clone())
    };
    let train = part(request.name, MEMBERS[0], MEMBERS[1])?;
    let test = part(&format!("{} test", request.name), MEMBERS[2], MEMBERS[3])?;
    Ok(Splits { train, test: Some(test) })
}

/// Sizes and bytes of `folder/name` or `folder/name.gz`; `idx3` or `idx1` in the name gives the number of sizes.
fn read_array(folder: &Path, name: &str) -> Result<(Vec<usize>, Vec<u8>)> {
    let plain = folder.join(name);
    let path = if plain.exists() { plain } else { folder.join(format!("{name}.gz")) };
    let mut bytes = read_file(&path)?;
    let n_sizes = if name.contains("idx3") { 3 } else { 1 };
    let malformed = |place: &str, expected: String, found: String| {
        let hint = "the file is truncated or no IDX file; fetch it again";
        Error::malformed(path.display(), place, expected, found, hint)
    };
    let n_header = 4 + 4 * n_sizes;
    if bytes.len() < n_header {
        return Err(malformed("header", format!("{n_header} bytes"), format!("{} bytes", bytes.len())));
    }
    // Two zeros, the type (8 = unsigned bytes), the number of sizes.
    let magic = [0, 0, 8, n_sizes as u8];
    if bytes[..4] != magic {
        return Err(malformed("magic number", format!("{magic:?}"), format!("{:?}", &bytes[..4])));
    }
    let sizes: Vec<usize> =
        bytes[4..n_header].chunks_exact(4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]) as usize).collect();
    let n_values = sizes.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
    if n_values != Some(bytes.len() - n_header) {
        let found = format!("{} bytes after it", bytes.len() - n_header);
        return Err(malformed("header", format!("the {sizes:?} values it announces"), found));
    }
    bytes.drain(..n_header);
    Ok((sizes, bytes))
}

/// Copies one of the files into a folder.
pub(super) fn copy(from: &Path, folder: &Path) -> Result<()> {
    let name = from.file_name().unwrap_or_default();
    write_file(&folder.join(name), &std::fs::read(from).map_err(Error::io("read", from))?)
}

/// Writes the arrays of an `.npz` file (`x_train`, `y_train`, `x_test`, `y_test`) as the four files of a folder.
pub(super) fn from_npz(from: &Path, folder: &Path) -> Result<()> {
    let names = ["x_train.npy", "y_train.npy", "x_test.npy", "y_test.npy"];
    let arrays = zip_members(from, &names)?;
    for ((name, bytes), member) in names.iter().zip(arrays).zip(MEMBERS) {
        let file = format!("{}: {name}", from.display());
        let array = npy::parse(&file, &bytes)?;
        let values: Option<Vec<u8>> = match array.values {
            Values::U8(values) => Some(values),
            Values::Int(values) => values.into_iter().map(|value| u8::try_from(value).ok()).collect(),
            Values::F32(_) => None,
        };
        let n_sizes = if member.contains("idx3") { 3 } else { 1 };
        let (Some(values), true) = (values, array.shape.len() == n_sizes) else {
            let (expected, found) =
                (format!("bytes with {n_sizes} axes"), format!("shape {:?} or other values", array.shape));
            let hint = "this is not the published file; fetch it again";
            return Err(Error::malformed(file, "array", expected, found, hint));
        };
        let mut out = vec![0, 0, 8, n_sizes as u8];
        out.extend(array.shape.iter().flat_map(|&size| (size as u32).to_be_bytes()));
        out.extend(values);
        write_file(&folder.join(member), &out)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::{SourceConfig, load};

    fn file(magic: u8, sizes: &[u32], values: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0, 0, 8, magic];
        bytes.extend(sizes.iter().flat_map(|s| s.to_be_bytes()));
        bytes.extend(values);
        bytes
    }

    /// Loads `mnist` with the given training images and labels (test: one good sample), gzipped or not.
    fn check(images: &[u8], labels: &[u8], gz: bool) -> Result<Splits> {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("mnist");
        std::fs::create_dir(&folder).unwrap();
        let contents = [images.to_vec(), labels.to_vec(), file(3, &[1, 1, 2], &[1, 2]), file(1, &[1], &[9])];
        for (name, content) in MEMBERS.iter().zip(contents) {
            if gz {
                let out = std::fs::File::create(folder.join(format!("{name}.gz"))).unwrap();
                flate2::write::GzEncoder::new(out, flate2::Compression::fast()).write_all(&content).unwrap();
            } else {
                std::fs::write(folder.join(name), content).unwrap();
            }
        }
        load(&SourceConfig::named("mnist"), Some(dir.path()))
    }

    #[test]
    fn plain_and_gzipped_files_give_the_same() {
        let (images, labels) = (file(3, &[2, 1, 2], &[1, 2, 3, 4]), file(1, &[2], &[7, 0]));
        let plain = check(&images, &labels, false).unwrap();
        assert_eq!(plain.train.labels(), Some(&[7, 0][..]));
        assert_eq!(plain.train.shape(), Shape::Image { height: 1, width: 2, channels: 1 });
        assert_eq!(plain.test.as_ref().unwrap().labels(), Some(&[9][..]));
        assert_eq!(check(&images, &labels, true).unwrap(), plain);
    }

    #[test]
    fn lying_headers_and_damage_are_refused() {
        let labels = file(1, &[1], &[7]);
        let message = |images: &[u8], labels: &[u8]| check(images, labels, false).unwrap_err().to_string();
        let good = file(3, &[1, 1, 2], &[1, 2]);
        assert!(message(&file(1, &[1, 1, 2], &[1, 2]), &labels).contains("magic number"));
        assert!(message(&good[..17], &labels).contains("announces"));
        assert!(message(&good[..3], &labels).contains("expected 16 bytes, found 3 bytes"));
        assert!(message(&file(3, &[u32::MAX; 3], &[1, 2]), &labels).contains("announces"));
        assert!(message(&good, &file(1, &[1], &[10])).contains("label 10 is out of range for 10 classes"));
        assert!(message(&good, &file(1, &[2], &[1, 1])).contains("2 labels for 1 samples"));
        assert!(message(&file(3, &[0, 1, 2], &[]), &file(1, &[0], &[])).contains("0 values"));
    }

    #[test]
    fn an_npz_and_the_four_files_are_installed() {
        let dir = tempfile::tempdir().unwrap();
        let npy = npy::tests::file;
        let arrays = super::super::zip::tests::archive(&[
            ("x_train.npy", &npy("|u1", "(2, 28, 28)", &[3; 2 * 784])),
            ("y_train.npy", &npy("<i8", "(2,)", &[4, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0])),
            ("x_test.npy", &npy("|u1", "(1, 28, 28)", &[5; 784])),
            ("y_test.npy", &npy("|u1", "(1,)", &[7])),
        ]);
        let npz = dir.path().join("mnist.npz");
        std::fs::write(&npz, &arrays).unwrap();
        let (folder, installed) = crate::packages::install("MNIST", &npz, dir.path()).unwrap();
        assert!(folder.ends_with("mnist") && !installed[0].is_published, "{installed:?}");
        let splits = load(&SourceConfig::named("mnist"), Some(dir.path())).unwrap();
        assert_eq!((splits.train.labels(), splits.test.unwrap().labels()), (Some(&[4, 9][..]), Some(&[7][..])));
        std::fs::write(&npz, &arrays[..arrays.len() / 2]).unwrap();
        let message = crate::packages::install("mnist", &npz, dir.path()).unwrap_err().to_string();
        assert!(message.contains("mnist.npz") && message.contains("a whole zip file"), "{message}");
        // Of the four files, each must be the published one.
        for member in MEMBERS {
            std::fs::write(dir.path().join(format!("{member}.gz")), "not it").unwrap();
        }
        let message = crate::packages::install("fashion_mnist", dir.path(), dir.path()).unwrap_err().to_string();
        assert!(message.contains("8d4fb7e6c68d591d4c3dfef9ec88bf0d"), "{message}");
    }
}
