//! Files that appear complete or not at all, whatever crashes.

use std::fs::{File, OpenOptions};
use std::io::{Result, Write};
use std::path::Path;

/// Writes a file so that it appears complete or not at all: a temporary one, synced, then renamed.
///
/// # Errors
/// If the directory cannot be written.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    write(path, bytes, OpenOptions::new().write(true).create(true).truncate(true))
}

/// As [`write_atomically`], for a secret: only the owner may read the file.
///
/// # Errors
/// If the directory cannot be written.
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    write(path, bytes, &options)
}

fn write(path: &Path, bytes: &[u8], options: &OpenOptions) -> Result<()> {
    let temporary = path.with_extension("tmp");
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let write = || {
        let mut file = options.open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        // The rename itself is only durable once the directory is.
        File::open(folder)?.sync_all()
    };
    write().inspect_err(|_| {
        // The rest of a failed write is useless; the caller's error names the cause.
        let _ = std::fs::remove_file(&temporary);
    })
}
