//! Fashion-MNIST. Xiao, Rasul and Vollgraf, arXiv:1708.07747, 2017.

use std::path::Path;

use super::idx;
use crate::dataset::{Normalisation, Shape};
use crate::error::Result;
use crate::packages::{Package, Publication};
use crate::registry::{Files, Origin, Read, Reader, Request};
use crate::source::Splits;

const FILES: Files = Files {
    folders: &["fashion-mnist", "FashionMNIST/raw"],
    members: idx::MEMBERS,
    may_be_gzipped: true,
    archive: None,
    publication: Some(Publication {
        site: "https://github.com/zalandoresearch/fashion-mnist",
        forms: &[&[
            Package {
                file: "train-images-idx3-ubyte.gz",
                md5: Some("8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
                install: copy,
            },
            Package {
                file: "train-labels-idx1-ubyte.gz",
                md5: Some("25c81989df183df01b3e8a0aad5dffbe"),
                install: copy,
            },
            Package { file: "t10k-images-idx3-ubyte.gz", md5: Some("bef4ecab320f06d8554ea6380940ec79"), install: copy },
            Package { file: "t10k-labels-idx1-ubyte.gz", md5: Some("bb300cfdad3c16e7a12a480ee83cd310"), install: copy },
        ]],
    }),
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

fn copy(from: &Path, dir: &Path) -> Result<()> {
    idx::copy(from, &dir.join(FILES.folders[0]))
}

fn read(request: &Request<'_>) -> Result<Splits> {
    let classes =
        ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"];
    // The usual constants of the training images.
    idx::read_splits(request, &request.folder(&FILES)?, &classes, &Normalisation::bytes(&[0.2860], &[0.3530]))
}
