//! Readers, one file each, and the few things they share.
//!
//! No reader trusts a file: it compares sizes with the actual content before it allocates memory, and every error names
//! the file and the place in it.

mod archive;
mod cifar;
pub(crate) mod cifar10;
pub(crate) mod cifar100;
pub(crate) mod cinic10;
pub(crate) mod csv;
pub(crate) mod digits;
pub(crate) mod folder;
mod idx;
mod image;
pub(crate) mod iris;
pub(crate) mod mnist;
mod npy;
pub(crate) mod numpy;
mod pickle;
pub(crate) mod procedural;
mod quoted;
pub(crate) mod sentences;
pub(crate) mod text;
pub(crate) mod tinyimagenet32;
pub(crate) mod zip;

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use crate::error::{Error, Result};
pub(crate) use archive::{each_file, md5_of};
pub(crate) use csv::numbered;

/// Largest decompressed size accepted from one file, so that a small archive cannot fill the memory.
const SIZE_LIMIT_BYTES: u64 = 8 << 30;

/// The whole content of a file, decompressed if its name ends in `.gz`.
pub(crate) fn read_file(path: &Path) -> Result<Vec<u8>> {
    let file = BufReader::new(File::open(path).map_err(Error::io("read", path))?);
    let mut bytes = Vec::new();
    let read = if path.extension().is_some_and(|e| e == "gz") {
        flate2::bufread::GzDecoder::new(file).take(SIZE_LIMIT_BYTES).read_to_end(&mut bytes)
    } else {
        file.take(SIZE_LIMIT_BYTES).read_to_end(&mut bytes)
    };
    read.map_err(Error::io("read", path))?;
    Ok(bytes)
}

/// The class names in a text file beside the data, one per line (the last column if tabs separate several). The classes'
/// numbers if there is no such file of `n_classes` lines.
fn class_names_beside(path: &Path, n_classes: usize) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines = text.lines().map(|line| line.rsplit('\t').next().unwrap_or(line).trim());
    let names: Vec<String> = lines.filter(|name| !name.is_empty()).map(str::to_owned).collect();
    if names.len() == n_classes { names } else { (0..n_classes).map(|class| class.to_string()).collect() }
}
