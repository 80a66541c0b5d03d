//! Fashion-MNIST. Xiao, Rasul and Vollgraf, arXiv:1708.07747, 2017.

use super::idx;
use crate::dataset::{Normalisation, Shape};
use crate::error::Result;
use crate::registry::{Files, Origin, Read, Reader, Request};
use crate::source::Splits;

const FILES: Files = Files {
    folders: &["fashion-mnist", "FashionMNIST/raw"],
    members: idx::MEMBERS,
    may_be_gzipped: true,
    archive: None,
    how_to_get: "put the four Fashion-MNIST files (`train-images-idx3-ubyte.gz` and so on) into the folder \
                 `fashion-mnist` of the data directory",
    known: (60_000, 10_000, 10, Shape::Image { height: 28, width: 28, channels: 1 }),
};

pub(crate) const READER: Reader = Reader {
    name: "fashion_mnist",
    about: "Fashion-MNIST: pieces of clothing",
    origin: Origin::Files(FILES),
    options: &["resize"],
    read: Read::Numbers(read),
};

fn read(request: &Request<'_>) -> Result<Splits> {
    let classes =
        ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"];
    // The usual constants of the training images.
    idx::read_splits(request, &request.folder(&FILES)?, &classes, &Normalisation::bytes(&[0.2860], &[0.3530]))
}
