//! Files of a run or a federation, with errors that name them. See [`fedproj_data::files`] for what a crash leaves.

use crate::error::{Error, Result};
use fedproj_data::files;
use std::io::ErrorKind;
use std::path::Path;

/// Writes a file so that it appears complete or not at all, and survives a crash.
///
/// # Errors
/// If the directory cannot be written.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    files::write_atomically(path, bytes).map_err(Error::io("write", path))
}

/// As [`write_atomically`], for a secret: only the owner may read the file.
///
/// # Errors
/// If the directory cannot be written.
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<()> {
    files::write_private(path, bytes).map_err(Error::io("write", path))
}

/// The content of a file; `None` if there is none.
///
/// # Errors
/// If it is there and cannot be read.
pub fn read_if_exists(path: &Path) -> Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        read => read.map(Some).map_err(Error::io("read", path)),
    }
}

/// Removes a file, if there is one.
///
/// # Errors
/// If it is there and cannot be removed.
pub fn remove_if_exists(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::io("remove", path)(error)),
        _ => Ok(()),
    }
}
