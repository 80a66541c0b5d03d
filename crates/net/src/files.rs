//! Files and folders that survive a crash and that only their owner can read.

use crate::error::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{DirBuilder, File};
use std::path::Path;

/// Writes a file so that it appears complete or not at all, and survives a crash.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    Ok(fedproj_core::write_atomically(path, bytes)?)
}

/// Bytes with their hash before them.
pub(crate) fn checked(body: &[u8]) -> Vec<u8> {
    [blake3::hash(body).as_bytes(), body].concat()
}

/// The bytes of [`checked`], unless they are damaged.
pub(crate) fn content(bytes: &[u8]) -> Option<&[u8]> {
    let (hash, body) = bytes.split_at_checked(blake3::OUT_LEN)?;
    (blake3::hash(body).as_bytes() == hash).then_some(body)
}

/// As [`write_synced`], for a secret that only the owner can read.
pub(crate) fn write_private(path: &Path, text: &str) -> Result<()> {
    Ok(fedproj_core::write_private(path, text.as_bytes())?)
}

/// Creates a folder and its missing parents, for the owner only. Each is synced into its parent: a file is not on disk while
/// a power cut can still remove its folder.
pub(crate) fn create_dir(dir: &Path) -> Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let parent = parent_of(dir);
    create_dir(parent)?;
    let mut builder = DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    match builder.create(dir) {
        // Another process was faster.
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && dir.is_dir() => (),
        made => made.map_err(Error::io("create", dir))?,
    }
    sync_dir(parent)
}

/// As [`create_dir`], for keys and state: a folder that others can enter is rejected.
pub(crate) fn create_private_dir(dir: &Path) -> Result<()> {
    create_dir(dir)?;
    refuse_others(dir, "700")
}

/// Rejects a file or folder that other users of this machine can read.
#[cfg(unix)]
pub(crate) fn refuse_others(path: &Path, mode: &str) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let found = std::fs::metadata(path).map_err(Error::io("read", path))?.permissions().mode() & 0o777;
    let is_private = found & 0o700 == found;
    if is_private {
        return Ok(());
    }
    let path = path.display();
    Err(Error::config(format!(
        "`{path}` holds secrets, but other users of this machine may use it (mode {found:o})\nhint: chmod {mode} {path}"
    )))
}

#[cfg(not(unix))]
pub(crate) fn refuse_others(_: &Path, _: &str) -> Result<()> {
    Ok(())
}

fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A rename, a new file or a removal is durable only once its folder is.
pub(crate) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(Error::io("sync", dir))
}

/// The content of a file; `None` if there is none.
pub(crate) fn read_if_exists(path: &Path) -> Result<Option<Vec<u8>>> {
    Ok(fedproj_core::read_if_exists(path)?)
}

/// Removes a file, if there is one.
pub(crate) fn remove_if_exists(path: &Path) -> Result<()> {
    Ok(fedproj_core::remove_if_exists(path)?)
}

/// The value in a TOML file; `None` if there is no file.
pub(crate) fn read_toml<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let Some(bytes) = read_if_exists(path)? else { return Ok(None) };
    toml::from_slice(&bytes).map(Some).map_err(Error::corrupt(path))
}

/// Writes a value as a TOML file, see [`write_synced`].
pub(crate) fn write_toml(path: &Path, value: &impl Serialize) -> Result<()> {
    write_synced(path, toml::to_string(value).map_err(Error::internal)?.as_bytes())
}

/// Waits for a lock. It ends with the returned file, and with the process, however that ends.
pub(crate) fn lock(path: &Path) -> Result<File> {
    let file = File::options().write(true).create(true).truncate(false).open(path);
    let file = file.map_err(Error::io("open", path))?;
    file.lock().map_err(Error::io("lock", path))?;
    Ok(file)
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn new_folders_are_for_their_owner_and_existing_ones_keep_their_mode() {
        let dir = tempfile::tempdir().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let theirs = dir.path().join("theirs");
        std::fs::create_dir(&theirs).unwrap();
        std::fs::set_permissions(&theirs, std::fs::Permissions::from_mode(0o755)).unwrap();
        let ours = theirs.join("a/b");
        create_dir(&ours).unwrap();
        create_dir(&ours).unwrap();
        assert_eq!((mode(&theirs), mode(&theirs.join("a")), mode(&ours)), (0o755, 0o700, 0o700));
        write_private(&ours.join("key"), "secret").unwrap();
        assert_eq!(mode(&ours.join("key")), 0o600);
        create_private_dir(&ours).unwrap();
        let error = create_private_dir(&theirs).unwrap_err().to_string();
        assert!(error.contains("mode 755") && error.contains("chmod 700"), "{error}");
        std::fs::write(theirs.join("file"), "x").unwrap();
        assert!(create_dir(&theirs.join("file/c")).unwrap_err().to_string().contains("file"));
    }
}
