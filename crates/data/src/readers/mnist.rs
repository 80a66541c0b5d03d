//! MNIST. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998.

use super::idx;
use crate::dataset::{Normalisation, Shape};
use crate::error::Result;
use crate::registry::{Files, Origin, Read, Reader, Request};
use crate::source::Splits;

const FILES: Files = Files {
    folders: &["mnist", "MNIST/raw"],
    members: idx::MEMBERS,
    may_be_gzipped: true,
    archive: None,
    how_to_get: "put the four MNIST files (`train-images-idx3-ubyte.gz` and so on) into the folder `mnist` of the \
                 data directory",
    known: (60_000, 10_000, 10, Shape::Image { height: 28, width: 28, channels: 1 }),
};

pub(crate) const READER: Reader = Reader {
    name: "mnist",
    about: "MNIST: handwritten digits",
    origin: Origin::Files(FILES),
    options: &["resize"],
    read: Read::Numbers(read),
};

fn read(request: &Request<'_>) -> Result<Splits> {
    let classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];
    // The usual constants of the training images.
    idx::read_splits(request, &request.folder(&FILES)?, &classes, &Normalisation::bytes(&[0.1307], &[0.3081]))
}
