//! A fifth of Tiny-ImageNet-200 at 32×32: 50 training images of each class and the 10 000 validation images.
//!
//! Records are laid out as CIFAR-10's, with 200 classes; pixels are 2×2 box averages of the 64×64 originals. It
//! stands in for ImageNet-100 as public set of CIFAR-100.

use super::cifar::{Records, SHAPE};
use super::class_names_beside;
use crate::dataset::Normalisation;
use crate::error::Result;
use crate::registry::{Files, Origin, Read, Reader, Request};
use crate::source::Splits;

const FILES: Files = Files {
    folders: &["tinyimagenet32"],
    members: &["train50.bin", "val.bin"],
    may_be_gzipped: false,
    archive: None,
    publication: None,
    how_to_get: "make `tinyimagenet32/train50.bin` and `tinyimagenet32/val.bin`, 10 000 records each in CIFAR-10's \
                 binary layout, from Tiny-ImageNet-200; its archive holds 64×64 JPEGs and does not say which 50 per class",
    known: (10_000, 10_000, 200, SHAPE),
};

pub(crate) const READER: Reader = Reader {
    name: "tinyimagenet32",
    about: "Tiny-ImageNet-200 at 32×32, 50 training images per class",
    origin: Origin::Files(FILES),
    options: &["resize"],
    read: Read::Numbers(read),
};

fn read(request: &Request<'_>) -> Result<Splits> {
    let folder = request.folder(&FILES)?;
    let class_names = class_names_beside(&folder.join("class_names.tsv"), 200);
    let records = Records { n_label_bytes: 1, label_at: 0, class_names: &class_names };
    // Measured on these training images: the usual constants are for 64×64 and have larger standard deviations.
    let normalisation = Normalisation::bytes(&[0.4784, 0.4470, 0.3971], &[0.2627, 0.2546, 0.2681]);
    records.read_splits(request.name, &folder, (&["train50.bin"], 10_000), ("val.bin", 10_000), &normalisation)
}
