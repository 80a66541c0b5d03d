//! MNIST. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998.

use std::path::Path;

use super::idx;
use crate::dataset::{Normalisation, Shape};
use crate::error::Result;
use crate::packages::{Package, Publication};
use crate::registry::{Files, Origin, Read, Reader, Request};
use crate::source::Splits;

const FILES: Files = Files {
    folders: &["mnist", "MNIST/raw"],
    members: idx::MEMBERS,
    may_be_gzipped: true,
    archive: None,
    publication: Some(Publication {
        site: "http://yann.lecun.com/exdb/mnist/",
        forms: &[
            &[
                Package {
                    file: "train-images-idx3-ubyte.gz",
                    md5: Some("f68b3c2dcbeaaa9fbdd348bbdeb94873"),
                    install: copy,
                },
                Package {
                    file: "train-labels-idx1-ubyte.gz",
                    md5: Some("d53e105ee54ea40749a09fcbcd1e9432"),
                    install: copy,
                },
                Package {
                    file: "t10k-images-idx3-ubyte.gz",
                    md5: Some("9fb629c4189551a2d022fa330f9573f3"),
                    install: copy,
                },
                Package {
                    file: "t10k-labels-idx1-ubyte.gz",
                    md5: Some("ec29112dd5afa0611ce80d1b7f02629c"),
                    install: copy,
                },
            ],
            &[Package {
                file: "mnist.npz",
                md5: None,
                install: |from, dir| idx::from_npz(from, &dir.join(FILES.folders[0])),
            }],
        ],
    }),
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

fn copy(from: &Path, dir: &Path) -> Result<()> {
    idx::copy(from, &dir.join(FILES.folders[0]))
}

fn read(request: &Request<'_>) -> Result<Splits> {
    let classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];
    // The usual constants of the training images.
    idx::read_splits(request, &request.folder(&FILES)?, &classes, &Normalisation::bytes(&[0.1307], &[0.3081]))
}
