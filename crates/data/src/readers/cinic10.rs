//! CINIC-10: CIFAR-10's classes filled up from ImageNet. Darlow et al., arXiv:1810.03505, 2018.
//!
//! Training and validation part together are the training set (180 000 images), as the data set's authors suggest.
//! The FedProj authors' loader normalised these images twice and cast them to bytes in between; ours does not.

use super::folder;
use crate::dataset::{Normalisation, Shape};
use crate::error::Result;
use crate::registry::{Files, Origin, Read, Reader, Request};
use crate::source::Splits;

const FILES: Files = Files {
    folders: &["CINIC-10", "cinic-10", "cinic10"],
    members: &["train", "valid", "test"],
    may_be_gzipped: false,
    archive: None,
    how_to_get: "fetch `CINIC-10.tar.gz` from the University of Edinburgh's DataShare and unpack it into the folder \
                 `CINIC-10` of the data directory",
    known: (180_000, 90_000, 10, Shape::Image { height: 32, width: 32, channels: 3 }),
};

pub(crate) const READER: Reader = Reader {
    name: "cinic10",
    about: "CINIC-10: CIFAR-10's classes with images from ImageNet",
    origin: Origin::Files(FILES),
    options: &["resize"],
    read: Read::Numbers(read),
};

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
