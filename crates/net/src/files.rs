//! Files and folders that stay after a crash, and that are for their owner only.

use crate::error::{Error, Result};
use std::fs::{DirBuilder, File};
use std::path::Path;

/// Writes a file so that it appears complete or not at all, and stays.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    Ok(fedproj_core::write_atomically(path, bytes)?)
}

/// As [`write_synced`], for a secret that only the owner may read.
pub(crate) fn write_private(path: &Path, text: &str) -> Result<()> {
    Ok(fedproj_core::write_private(path, text.as_bytes())?)
}

/// Makes a folder, and those it lies in, where they are missing. Each is for the owner only, and synced into its parent: a
/// file in a folder that a power cut takes back is not on disk.
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
        // Somebody else was faster.
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && dir.is_dir() => (),
        made => made.map_err(Error::io("create", dir))?,
    }
    sync_dir(parent)
}

fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A rename, a new file or a removal is only durable once its folder is.
pub(crate) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(Error::io("sync", dir))
}

/// Waits for a lock, which goes with what is returned, and with the process, however it ends.
pub(crate) fn lock(path: &Path) -> Result<File> {
    let file = File::options().write(true).create(true).truncate(false).open(path);
    let file = file.map_err(Error::io("open", path))?;
    file.lock().map_err(Error::io("lock", path))?;
    Ok(file)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_is_made_is_for_its_owner_and_what_is_there_stays_as_it_is() {
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
        std::fs::write(theirs.join("file"), "x").unwrap();
        assert!(create_dir(&theirs.join("file/c")).unwrap_err().to_string().contains("file"));
    }
}
