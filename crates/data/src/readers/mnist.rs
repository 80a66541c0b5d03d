//! MNIST. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998. And Fashion-MNIST. Xiao, Rasul
//! and Vollgraf, arXiv:1708.07747, 2017.

use super::idx;
use crate::dataset::{Normalisation, Shape};
use crate::packages::{Package, Publication};
use crate::registry::{Files, Origin, Read, Reader};

/// Handwritten digits.
pub(crate) const MNIST: Reader = Reader {
    name: "mnist",
    about: "MNIST: handwritten digits",
    origin: Origin::Files(DIGITS),
    options: &["resize"],
    read: Read::Numbers(|request| {
        // The usual constants of the training images, here and below.
        let classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];
        idx::read_splits(request, &DIGITS, &classes, &Normalisation::bytes(&[0.1307], &[0.3081]))
    }),
};

const DIGITS: Files = files(
    &["mnist", "MNIST/raw"],
    Publication {
        site: "http://yann.lecun.com/exdb/mnist/",
        forms: &[
            &[
                digits(0, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
                digits(1, "d53e105ee54ea40749a09fcbcd1e9432"),
                digits(2, "9fb629c4189551a2d022fa330f9573f3"),
                digits(3, "ec29112dd5afa0611ce80d1b7f02629c"),
            ],
            &[Package::new("mnist.npz", None, |from, dir| idx::from_npz(from, &dir.join(DIGITS.folders[0])))],
        ],
    },
    "put the four MNIST files (`train-images-idx3-ubyte.gz` and so on) into the folder `mnist` of the data directory",
);

const fn digits(at: usize, md5: &'static str) -> Package {
    Package::new(idx::PACKED[at], Some(md5), |from, dir| idx::copy(from, &dir.join(DIGITS.folders[0])))
}

/// Pieces of clothing.
pub(crate) const FASHION: Reader = Reader {
    name: "fashion_mnist",
    about: "Fashion-MNIST: pieces of clothing",
    origin: Origin::Files(CLOTHES),
    options: &["resize"],
    read: Read::Numbers(|request| {
        let classes =
            ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"];
        idx::read_splits(request, &CLOTHES, &classes, &Normalisation::bytes(&[0.2860], &[0.3530]))
    }),
};

const CLOTHES: Files = files(
    &["fashion-mnist", "FashionMNIST/raw"],
    Publication {
        site: "https://github.com/zalandoresearch/fashion-mnist",
        forms: &[&[
            clothes(0, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            clothes(1, "25c81989df183df01b3e8a0aad5dffbe"),
            clothes(2, "bef4ecab320f06d8554ea6380940ec79"),
            clothes(3, "bb300cfdad3c16e7a12a480ee83cd310"),
        ]],
    },
    "put the four Fashion-MNIST files (`train-images-idx3-ubyte.gz` and so on) into the folder `fashion-mnist` of the \
     data directory",
);

const fn clothes(at: usize, md5: &'static str) -> Package {
    Package::new(idx::PACKED[at], Some(md5), |from, dir| idx::copy(from, &dir.join(CLOTHES.folders[0])))
}

const fn files(folders: &'static [&'static str], publication: Publication, how_to_get: &'static str) -> Files {
    Files {
        folders,
        members: idx::MEMBERS,
        may_be_gzipped: true,
        archive: None,
        publication: Some(publication),
        how_to_get,
        known: (60_000, 10_000, 10, Shape::Image { height: 28, width: 28, channels: 1 }),
    }
}
