//! CIFAR-10, binary version. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.

use super::archive::{Archive, Form, Member};
use super::cifar::{CIFAR_SITE, Records, SHAPE};
use super::pickle;
use crate::dataset::Normalisation;
use crate::error::Result;
use crate::packages::{Package, Publication};
use crate::registry::{Files, Origin, Read, Reader, Request};
use crate::source::Splits;

const FOLDER: &str = "cifar-10-batches-bin";
const TRAIN: [&str; 5] =
    ["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"];
const TEST: &str = "test_batch.bin";
const N_PER_FILE: usize = 10_000;
const N_BYTES: u64 = 30_730_000;
const CLASSES: [&str; 10] = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

const FILES: Files = Files {
    folders: &[FOLDER],
    members: &[TRAIN[0], TRAIN[1], TRAIN[2], TRAIN[3], TRAIN[4], TEST],
    may_be_gzipped: false,
    archive: Some(ARCHIVE.file),
    publication: Some(Publication {
        site: CIFAR_SITE,
        forms: &[
            &[Package::new(ARCHIVE.file, Some("c32a1d4ab5d03f1284b67883e8d87530"), |from, dir| {
                ARCHIVE.unpack(from, dir, None)
            })],
            &[Package::new("cifar-10-python.tar.gz", Some("c58f30108f718f92721af3b95e74349a"), |from, dir| {
                ARCHIVE.unpack(from, dir, Some(&PYTHON))
            })],
        ],
    }),
    how_to_get: "fetch `cifar-10-binary.tar.gz` from the CIFAR page of the University of Toronto into the data \
                 directory; it is unpacked and checked on first use. `fedproj data get cifar10` also takes the Python version",
    known: (50_000, 10_000, 10, SHAPE),
};

const ARCHIVE: Archive = Archive {
    file: "cifar-10-binary.tar.gz",
    folder: FOLDER,
    members: &[
        Member { file: TRAIN[0], n_bytes: N_BYTES, md5: "5dd7e06a14cb22eb9f671a540d1b7c25" },
        Member { file: TRAIN[1], n_bytes: N_BYTES, md5: "5ea93a67294ea407fff1d09f752e9692" },
        Member { file: TRAIN[2], n_bytes: N_BYTES, md5: "942cd6a4bcdd0dd3c604fbe906cb4421" },
        Member { file: TRAIN[3], n_bytes: N_BYTES, md5: "ae636b3ba5c66a11e91e8cb52e771fcb" },
        Member { file: TRAIN[4], n_bytes: N_BYTES, md5: "53f37980c15c3d472c316c40844f3f0d" },
        Member { file: TEST, n_bytes: N_BYTES, md5: "803d5f7f4d78ea53de84dbe85f74fb6d" },
    ],
};

/// The Python version: the same records in pickles.
const PYTHON: Form = Form {
    folder: "cifar-10-batches-py",
    names: &["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"],
    convert: |bytes| pickle::records(bytes, &["labels"]),
};

pub(crate) const READER: Reader = Reader {
    name: "cifar10",
    about: "CIFAR-10: small colour photographs",
    origin: Origin::Files(FILES),
    options: &["resize"],
    read: Read::Numbers(read),
};

fn read(request: &Request<'_>) -> Result<Splits> {
    ARCHIVE.unpack_if_needed(request.data_dir, &FILES)?;
    let folder = request.folder(&FILES)?;
    let class_names = CLASSES.map(str::to_owned);
    let records = Records { n_label_bytes: 1, label_at: 0, class_names: &class_names };
    // Constants of the FedProj authors' code.
    let normalisation = Normalisation::bytes(&[0.4914, 0.4822, 0.4465], &[0.2023, 0.1994, 0.2010]);
    records.read_splits(request.name, &folder, (&TRAIN, N_PER_FILE), (TEST, N_PER_FILE), &normalisation)
}

#[cfg(test)]
mod tests {
    use super::super::{archive::tests::archive, pickle::tests::batch};
    use super::*;
    use crate::packages::install;

    #[test]
    fn only_published_archives_are_installed() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("cifar-10-python.tar.gz");
        let name = format!("{}/{}", PYTHON.folder, PYTHON.names[0]);
        std::fs::write(&from, archive(&[(&name, &batch(&[("labels", &[6])], &[0; 3072]))])).unwrap();
        let message = install("cifar10", &from, dir.path()).unwrap_err().to_string();
        assert!(message.contains("published file has c58f30108f718f92721af3b95e74349a"), "{message}");
        // Even in an archive that passed, every member is compared with the binary version's.
        let message = ARCHIVE.unpack(&from, dir.path(), Some(&PYTHON)).unwrap_err().to_string();
        assert!(
            message.contains("data_batch_1.bin") && message.contains("5dd7e06a14cb22eb9f671a540d1b7c25"),
            "{message}"
        );
        std::fs::rename(&from, dir.path().join("other.tar.gz")).unwrap();
        let message = install("cifar10", &dir.path().join("other.tar.gz"), dir.path()).unwrap_err().to_string();
        assert!(message.contains("offers cifar-10-binary.tar.gz; or cifar-10-python.tar.gz"), "{message}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
