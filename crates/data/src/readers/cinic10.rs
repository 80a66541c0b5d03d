//! CINIC-10: CIFAR-10's classes filled up from ImageNet. Darlow et al., arXiv:1810.03505, 2018.
//!
//! Training and validation part together are the training set (180 000 images), as the data set's authors suggest.
//! The FedProj authors' loader normalised these images twice and cast them to bytes in between; ours does not.

use std::fs::{self, File};
use std::path::Path;

use super::archive::{each_file, not_official};
use super::folder;
use crate::dataset::{Normalisation, Shape};
use crate::error::{Error, Result};
use crate::packages::{Package, Publication};
use crate::registry::{Files, Origin, Read, Reader, Request};
use crate::source::Splits;

const FILES: Files = Files {
    folders: &["CINIC-10", "cinic-10", "cinic10"],
    members: &["train", "valid", "test"],
    may_be_gzipped: false,
    archive: None,
    publication: Some(Publication {
        site: "https://datashare.ed.ac.uk/handle/10283/3192",
        forms: &[&[Package::new("CINIC-10.tar.gz", Some("6ee4d0c996905fe93221de577967a372"), unpack)]],
    }),
    how_to_get: "fetch `CINIC-10.tar.gz` from the University of Edinburgh's DataShare; `fedproj data get cinic10 --from \
                 FILE` unpacks it into the folder `CINIC-10` of the data directory",
    known: (180_000, 90_000, 10, Shape::Image { height: 32, width: 32, channels: 3 }),
};

pub(crate) const READER: Reader = Reader {
    name: "cinic10",
    about: "CINIC-10: CIFAR-10's classes with images from ImageNet",
    origin: Origin::Files(FILES),
    options: &["resize"],
    read: Read::Numbers(read),
};

/// Unpacks the images into the folder `CINIC-10`, which appears whole or not at all.
fn unpack(archive: &Path, data_dir: &Path) -> Result<()> {
    let folder = data_dir.join(FILES.folders[0]);
    let partial = data_dir.join(format!(".{}.{}.partial", FILES.folders[0], std::process::id()));
    let done = write_images(archive, &partial)
        .and_then(|()| fs::rename(&partial, &folder).map_err(Error::io("unpack into", &folder)));
    if done.is_err() && partial.exists() {
        fs::remove_dir_all(&partial).map_err(Error::io("remove", &partial))?;
    }
    done
}

fn write_images(archive: &Path, into: &Path) -> Result<()> {
    each_file(archive, |name, content| {
        let Some(place) = image_path(name) else {
            let expected = "images in train, valid and test, one folder per class";
            return Err(not_official(archive, "list of members", expected, format!("`{name}`")));
        };
        let path = into.join(place);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(Error::io("unpack into", folder))?;
        }
        let mut file = File::create(&path).map_err(Error::io("write", &path))?;
        std::io::copy(content, &mut file).map(drop).map_err(Error::io("unpack", archive))
    })
}

/// Where a member belongs: `part/class/name`, or a file at the top. `None` for any other path, so that none leads elsewhere.
fn image_path(member: &str) -> Option<&str> {
    let member = member.strip_prefix("./").unwrap_or(member);
    let is_plain = |word: &str| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !word.is_empty() && !word.starts_with('.') && word.chars().all(is_plain)
    };
    let words: Vec<&str> = member.split('/').collect();
    let is_known = match words[..] {
        [_] => true,
        [part, _, _] => FILES.members.contains(&part),
        _ => false,
    };
    (is_known && words.iter().all(|word| is_plain(word))).then_some(member)
}

fn read(request: &Request<'_>) -> Result<Splits> {
    // The shape is given beforehand because some of the files are stored as grey images.
    let [height, width] = request.config.resize.unwrap_or([32, 32]);
    let shape = Shape::Image { height, width, channels: 3 };
    let splits = folder::read_splits(request.name, &request.folder(&FILES)?, request.config.resize, Some(shape))?;
    // Constants of the FedProj authors' code.
    let mean = [0.478_895_22, 0.472_278_42, 0.430_474_04];
    let std = [0.242_057_76, 0.238_280_46, 0.258_748_35];
    splits.map(|part| part.with_normalisation(Normalisation::bytes(&mean, &std)))
}

#[cfg(test)]
mod tests {
    use super::super::archive::tests::archive;
    use super::*;

    #[test]
    fn images_are_unpacked_and_no_path_leads_elsewhere() {
        let outer = tempfile::tempdir().unwrap();
        let (dir, path) = (outer.path().join("data"), outer.path().join("c.tar.gz"));
        fs::create_dir(&dir).unwrap();
        let unpack = |members: &[(&str, &[u8])]| {
            fs::write(&path, archive(members)).unwrap();
            unpack(&path, &dir)
        };
        for wrong in ["../hello", "/train/cat/a.png", "train/../../a.png", "train/cat/..", "other/cat/a.png"] {
            let message = unpack(&[("train/cat/a.png", b"a"), (wrong, b"x")]).unwrap_err().to_string();
            assert!(message.contains(&format!("found `{wrong}`")), "{message}");
            assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "{wrong}");
            assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 2, "{wrong}");
        }
        unpack(&[("./train/cat/a.png", b"a"), ("valid/cat/b.png", b"b"), ("test/dog/c.png", b"c"), ("README.md", b"")])
            .unwrap();
        assert_eq!(fs::read(dir.join("CINIC-10/test/dog/c.png")).unwrap(), b"c");
        assert!(FILES.locate(&dir).is_some());
        // Cut short, nothing is left of it.
        let whole = archive(&[("train/cat/a.png", &[7; 5000])]);
        fs::write(&path, &whole[..whole.len() - 30]).unwrap();
        fs::remove_dir_all(dir.join("CINIC-10")).unwrap();
        let message = super::unpack(&path, &dir).unwrap_err().to_string();
        assert!(message.contains("c.tar.gz") && message.contains("cut short"), "{message}");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    }
}
