//! CIFAR-100, binary version, with fine or coarse labels. Source as CIFAR-10.

use super::archive::{Archive, Form, Member};
use super::cifar::{CIFAR_SITE, Records, SHAPE};
use super::{class_names_beside, pickle};
use crate::dataset::Normalisation;
use crate::error::Result;
use crate::packages::{Package, Publication};
use crate::registry::{Files, Origin, Read, Reader, Request};
use crate::source::{LabelSet, Splits};

const FOLDER: &str = "cifar-100-binary";

const FILES: Files = Files {
    folders: &[FOLDER],
    members: &["train.bin", "test.bin"],
    may_be_gzipped: false,
    archive: Some(ARCHIVE.file),
    publication: Some(Publication {
        site: CIFAR_SITE,
        forms: &[
            &[Package::new(ARCHIVE.file, Some("03b5dce01913d631647c71ecec9e9cb8"), |from, dir| {
                ARCHIVE.unpack(from, dir, None)
            })],
            &[Package::new("cifar-100-python.tar.gz", Some("eb9058c3a382ffc7106e4002c42a8d85"), |from, dir| {
                ARCHIVE.unpack(from, dir, Some(&PYTHON))
            })],
        ],
    }),
    how_to_get: "fetch `cifar-100-binary.tar.gz` from the CIFAR page of the University of Toronto into the data \
                 directory; it is unpacked and checked on first use. `fedproj data get cifar100` also takes the Python version",
    known: (50_000, 10_000, 100, SHAPE),
};

const ARCHIVE: Archive = Archive {
    file: "cifar-100-binary.tar.gz",
    folder: FOLDER,
    members: &[
        Member { file: "train.bin", n_bytes: 153_700_000, md5: "6172c7755cfe09b2fe270c85cebc1b15" },
        Member { file: "test.bin", n_bytes: 30_740_000, md5: "4499cfba6c016c1be1438163640a0898" },
    ],
};

/// The Python version: the same records in pickles.
const PYTHON: Form = Form {
    folder: "cifar-100-python",
    names: &["train", "test"],
    convert: |bytes| pickle::records(bytes, &["coarse_labels", "fine_labels"]),
};

pub(crate) const READER: Reader = Reader {
    name: "cifar100",
    about: "CIFAR-100: small colour photographs, 100 fine or 20 coarse classes",
    origin: Origin::Files(FILES),
    options: &["labels", "resize"],
    read: Read::Numbers(read),
};

fn read(request: &Request<'_>) -> Result<Splits> {
    ARCHIVE.unpack_if_needed(request.data_dir, &FILES)?;
    let folder = request.folder(&FILES)?;
    let (label_at, class_names) = match request.config.labels.unwrap_or_default() {
        LabelSet::Coarse => (0, class_names_beside(&folder.join("coarse_label_names.txt"), 20)),
        LabelSet::Fine => (1, class_names_beside(&folder.join("fine_label_names.txt"), 100)),
    };
    let records = Records { n_label_bytes: 2, label_at, class_names: &class_names };
    // Constants of the FedProj authors' code.
    let normalisation = Normalisation::bytes(&[0.507, 0.487, 0.441], &[0.267, 0.256, 0.276]);
    records.read_splits(request.name, &folder, (&["train.bin"], 50_000), ("test.bin", 10_000), &normalisation)
}
