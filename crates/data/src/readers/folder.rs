//! Folders of images: `class/*.png|jpg|jpeg`, or `train/`, `valid/` and `test/` with such folders inside.
//!
//! Classes are the folders' names in alphabetic order, samples follow the files' names, other files are skipped.
//! A `valid` part is appended to the training part. If the first image is grey, all are read as grey, otherwise as
//! RGB. All images must have the same size unless `resize` gives one.

use std::path::{Path, PathBuf};

use super::image::Image;
use crate::dataset::{Dataset, Samples, Shape};
use crate::error::{Error, Result};
use crate::registry::{Origin, Read, Reader, Request};
use crate::source::Splits;
use crate::transform::Resize;

pub(crate) const READER: Reader = Reader {
    name: "folder",
    about: "folders of PNG or JPEG images, one per class",
    origin: Origin::Format,
    options: &["path", "resize", "standardise"],
    read: Read::Numbers(read),
};

fn read(request: &Request<'_>) -> Result<Splits> {
    read_splits(request.name, &request.path()?, request.config.resize, None)
}

/// Reads a folder of class folders, or of `train`, `valid` and `test`; the first image sets `shape` if it is none.
pub(super) fn read_splits(
    name: &str,
    folder: &Path,
    resize: Option<[usize; 2]>,
    shape: Option<Shape>,
) -> Result<Splits> {
    let train_folder = folder.join("train");
    if !train_folder.is_dir() {
        let mut images = Images { classes: class_names(folder)?, resize, shape };
        return Ok(Splits { train: images.read_part(name, folder)?, test: None });
    }
    let mut images = Images { classes: class_names(&train_folder)?, resize, shape };
    let mut train = images.read_part(name, &train_folder)?;
    let mut part = |part: &str| {
        let path = folder.join(part);
        path.is_dir().then(|| images.read_part(&format!("{name} {part}"), &path)).transpose()
    };
    if let Some(valid) = part("valid")? {
        train = train.concatenated(&valid)?;
    }
    Ok(Splits { train, test: part("test")? })
}

/// What all parts of a data set share.
struct Images {
    classes: Vec<String>,
    resize: Option<[usize; 2]>,
    shape: Option<Shape>,
}

impl Images {
    fn read_part(&mut self, name: &str, folder: &Path) -> Result<Dataset> {
        if let Some(stranger) = class_names(folder)?.iter().find(|class| !self.classes.contains(class)) {
            return Err(malformed(folder, "classes", self.classes.join(", "), format!("`{stranger}` as well")));
        }
        let mut pixels = Vec::new();
        let mut labels = Vec::new();
        for (label, class) in (0..).zip(self.classes.clone()) {
            for path in image_files(&folder.join(class))? {
                self.append(&path, &mut pixels)?;
                labels.push(label);
            }
        }
        match self.shape {
            Some(shape) if !labels.is_empty() => {
                Dataset::new(name, shape, Samples::U8(pixels), Some(labels), self.classes.clone())
            }
            _ => Err(malformed(folder, "class folders", "at least one PNG or JPEG image".into(), "none".into())),
        }
    }

    /// Decodes one image onto `pixels`.
    fn append(&mut self, path: &Path, pixels: &mut Vec<u8>) -> Result<()> {
        let image = Image::read(path)?.map_err(|e| malformed(path, "image data", "a PNG or JPEG image".into(), e))?;
        let is_grey = self.shape.map_or(image.is_grey(), |shape| shape.n_channels() == 1);
        let from = [image.height, image.width];
        let channels = if is_grey { 1 } else { 3 };
        let bytes = image.into_bytes(is_grey);
        let [height, width] = self.resize.unwrap_or(from);
        let found = Shape::Image { height, width, channels };
        let expected = *self.shape.get_or_insert(found);
        if found != expected {
            return Err(malformed(path, "size", format!("{expected} as the other images"), found.to_string()));
        }
        match self.resize {
            Some(to) if to != from && !found.is_empty() => {
                pixels.extend(Resize { from, to, channels }.apply(&bytes, f32::from, |v| v.round() as u8));
            }
            _ => pixels.extend(bytes),
        }
        Ok(())
    }
}

/// Names of the folders in `folder`, without hidden ones, in order.
fn class_names(folder: &Path) -> Result<Vec<String>> {
    let folders = entries(folder)?.into_iter().filter(|path| path.is_dir());
    let names = folders.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()));
    Ok(names.filter(|name| !name.starts_with('.')).collect())
}

/// Images in a class folder, in order of their names; a class may be absent from a part.
fn image_files(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let is_image = |path: &PathBuf| {
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase();
        path.is_file() && ["png", "jpg", "jpeg"].contains(&extension.as_str())
    };
    Ok(entries(folder)?.into_iter().filter(is_image).collect())
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let listing = std::fs::read_dir(folder).map_err(Error::io("list", folder))?;
    let mut paths: Vec<PathBuf> =
        listing.map(|e| e.map(|e| e.path())).collect::<std::io::Result<_>>().map_err(Error::io("list", folder))?;
    paths.sort();
    Ok(paths)
}

fn malformed(path: &Path, place: &str, expected: String, found: String) -> Error {
    let hint = match place {
        "image data" => "replace the file or remove it",
        "size" => "give all images one size: resize = [height, width]",
        "classes" => "train, valid and test need folders of the same names",
        _ => "the layout is class/image.png or train|valid|test/class/image.png",
    };
    Error::malformed(path.display(), place, expected, found, hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::readers::image::tests::COLOUR_JPEG;
    use crate::{SourceConfig, load};

    fn write(dir: &Path, file: &str, width: u32, height: u32, value: u8) {
        let path = dir.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut encoder = png::Encoder::new(std::fs::File::create(path).unwrap(), width, height);
        encoder.set_color(png::ColorType::Rgb);
        let pixels = [value, 0, 255].repeat((width * height) as usize);
        encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
    }

    fn check(dir: &Path, resize: Option<[usize; 2]>) -> Result<Splits> {
        load(&SourceConfig { path: Some(".".into()), resize, ..SourceConfig::named("folder") }, Some(dir))
    }

    #[test]
    fn parts_and_classes_follow_the_folders() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "train/dog/b.png", 2, 1, 3);
        write(dir.path(), "train/dog/a.PNG", 2, 1, 2);
        write(dir.path(), "train/cat/z.png", 2, 1, 1);
        write(dir.path(), "valid/cat/z.png", 2, 1, 4);
        write(dir.path(), "test/dog/z.png", 2, 1, 5);
        std::fs::write(dir.path().join("train/dog/notes.txt"), "x").unwrap();
        let splits = check(dir.path(), None).unwrap();
        assert_eq!(splits.train.class_names(), ["cat", "dog"]);
        assert_eq!(splits.train.labels(), Some(&[0, 1, 1, 0][..]));
        let expected = [1, 2, 3, 4].iter().flat_map(|&v| [v, 0, 255, v, 0, 255]).collect();
        assert_eq!(splits.train.samples, Samples::U8(expected));
        assert_eq!(splits.test.unwrap().labels(), Some(&[1][..]));
    }

    #[test]
    fn other_sizes_need_resize_and_damage_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "a/1.png", 4, 4, 9);
        std::fs::write(dir.path().join("a/2.jpg"), COLOUR_JPEG).unwrap();
        let message = check(dir.path(), None).unwrap_err().to_string();
        assert!(message.contains("2.jpg") && message.contains("5×3×3") && message.contains("resize"), "{message}");
        let data = check(dir.path(), Some([2, 2])).unwrap().train;
        assert_eq!((data.n_samples(), data.sample_len()), (2, 12));
        assert!(check(dir.path(), Some([0, 2])).is_err());

        let bytes = std::fs::read(dir.path().join("a/1.png")).unwrap();
        std::fs::write(dir.path().join("a/1.png"), &bytes[..bytes.len() / 2]).unwrap();
        let message = check(dir.path(), Some([2, 2])).unwrap_err().to_string();
        assert!(message.contains("1.png") && message.ends_with("hint: replace the file or remove it"), "{message}");
    }

    #[test]
    fn empty_folders_and_strange_classes_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(check(dir.path(), None).unwrap_err().to_string().contains("at least one"));
        write(dir.path(), "train/a/1.png", 1, 1, 9);
        write(dir.path(), "test/b/1.png", 1, 1, 9);
        assert!(check(dir.path(), None).unwrap_err().to_string().contains("`b` as well"));
    }
}
