//! Bytes on disk that can be made again: files named by a hash of what decides them, each with its checksum.

use std::path::Path;

use crate::files::write_atomically;

/// The bytes under `key`, unless they are missing or damaged.
pub(crate) fn read(folder: &Path, key: &str) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(folder.join(key)).ok()?;
    let (content, checksum) = bytes.split_last_chunk::<32>()?;
    if blake3::hash(content).as_bytes() != checksum {
        return None;
    }
    bytes.truncate(bytes.len() - 32);
    Some(bytes)
}

/// Stores bytes under `key`: the file appears whole or not at all. A failure is no error: it only costs the next start a
/// few seconds.
pub(crate) fn write(folder: &Path, key: &str, content: &[u8]) {
    let bytes = [content, blake3::hash(content).as_bytes()].concat();
    // Two processes may make the same bytes at once.
    let _ = std::fs::create_dir_all(folder).and_then(|()| write_atomically(&folder.join(key), &bytes));
}
