//! Bytes on disk that can be made again: the user's cache, and files named by a hash of what decides them, each with its
//! checksum.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::files::write_atomically;

/// Where this program keeps what it can make again: `$XDG_CACHE_HOME/fedproj`, else `~/.cache/fedproj`; none if both
/// variables are unset.
pub fn folder() -> Option<PathBuf> {
    folder_in(std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME"))
}

fn folder_in(cache: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let base = cache.map(PathBuf::from).or_else(|| Some(PathBuf::from(home?).join(".cache")));
    Some(base?.join("fedproj"))
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_where_the_user_wants_it() {
        let (cache, home) = (|| Some(OsString::from("/cache")), || Some(OsString::from("/home/ada")));
        assert_eq!(folder_in(cache(), home()), Some("/cache/fedproj".into()));
        assert_eq!(folder_in(None, home()), Some("/home/ada/.cache/fedproj".into()));
        assert_eq!(folder_in(None, None), None);
    }
}
