//! Contributions on disk: one folder a client, one file a vector. Fusion reads them block by block, so the server's memory
//! does not grow with their number.

use crate::error::{Error, Result};
use crate::server::journal::Accepted;
use crate::wire::blob::Store;
use crate::wire::message::{Blob, Contribution, part_name};
use fedproj_core::{Contributions, Head, Part};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The spool of a round.
#[derive(Clone, Debug)]
pub struct Spool {
    dir: PathBuf,
}

impl Spool {
    /// The spool of a run's round, in a federation's folder.
    pub fn new(dir: &Path, run: &str, round: u32) -> Self {
        Self { dir: dir.join("spool").join(run).join(round.to_string()) }
    }

    /// The store of one client.
    ///
    /// # Errors
    /// If its folder cannot be made.
    pub fn client(&self, client: u32) -> Result<Store> {
        Store::open(&self.dir.join(client.to_string()))
    }

    /// Removes what a client sent.
    pub fn clear(&self, client: u32) {
        remove(&self.dir.join(client.to_string()));
    }

    /// Removes the spools of the run's other rounds, which a crash or a late node may have left.
    pub fn remove_others(&self) {
        let Some(entries) = self.dir.parent().and_then(|run| std::fs::read_dir(run).ok()) else { return };
        let paths = entries.filter_map(|e| Some(e.ok()?.path()));
        paths.filter(|path| *path != self.dir).for_each(|path| remove(&path));
    }

    /// Removes everything.
    pub fn remove(&self) {
        remove(&self.dir);
    }
}

/// Cleaning up never ends a server: a late node may be writing there, and what stays is removed after the next round.
fn remove(dir: &Path) {
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(dir = %dir.display(), %error, "cannot remove; it will be tried again after the next round");
        }
        _ => (),
    }
}

/// Files are opened for each block: a round of many clients must not need as many open files.
pub(crate) fn read_values(store: &Store, blob: &Blob, from: usize, out: &mut [f32]) -> Result<()> {
    let mut bytes = vec![0; 4 * out.len()];
    let mut file: File = store.file(blob)?;
    file.seek(SeekFrom::Start(4 * from as u64))
        .and_then(|_| file.read_exact(&mut bytes))
        .map_err(|e| Error::protocol(format!("a contribution cannot be read back from the spool: {e}")))?;
    let (quads, _) = bytes.as_chunks::<4>();
    out.iter_mut().zip(quads).for_each(|(v, b)| *v = f32::from_le_bytes(*b));
    Ok(())
}

/// The contributions of a round, read from the spool.
#[derive(Debug)]
pub struct Spooled {
    all: Vec<(Accepted, Contribution, Store)>,
}

impl Spooled {
    /// The accepted contributions of a round in a federation's folder, put in the order of their clients.
    ///
    /// # Errors
    /// If the spool cannot be read.
    pub fn open(dir: &Path, mut accepted: Vec<Accepted>) -> Result<Self> {
        accepted.sort_by_key(|a| a.client);
        let open = |a: Accepted| {
            let store = Spool::new(dir, &a.run, a.round).client(a.client)?;
            let contribution = a.contribution();
            Ok((a, contribution, store))
        };
        Ok(Self { all: accepted.into_iter().map(open).collect::<Result<_>>()? })
    }

    fn blob(&self, at: usize, part: Part<'_>) -> Option<&Blob> {
        let name = part_name(part);
        self.all[at].1.parts.iter().find(|p| p.name == name).map(|p| &p.blob)
    }
}

impl Contributions for Spooled {
    fn n(&self) -> usize {
        self.all.len()
    }

    fn head(&self, at: usize) -> Head<'_> {
        let a = &self.all[at].0;
        Head { client: a.client, n_samples: a.n_samples as usize, n_steps: a.n_steps, stats: &a.stats }
    }

    fn len_of(&self, at: usize, part: Part<'_>) -> usize {
        self.blob(at, part).map_or(0, |blob| (blob.len / 4) as usize)
    }

    fn n_values(&self, at: usize) -> usize {
        self.all[at].1.parts.iter().map(|p| (p.blob.len / 4) as usize).sum()
    }

    fn read(&self, at: usize, part: Part<'_>, from: usize, out: &mut [f32]) -> fedproj_core::Result<()> {
        let Some(blob) = self.blob(at, part).filter(|_| !out.is_empty()) else { return Ok(()) };
        read_values(&self.all[at].2, blob, from, out)
            .map_err(|e| fedproj_core::Error::Internal { what: "reading a contribution", problem: e.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_late_node_that_still_writes_does_not_end_the_clean_up() {
        let dir = tempfile::tempdir().unwrap();
        let (spool, next) = (Spool::new(dir.path(), "run", 0), Spool::new(dir.path(), "run", 1));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    for client in 0..5 {
                        let _ = spool.client(client).and_then(|store| store.put(&[1, 2, 3]));
                    }
                }
            });
            for _ in 0..60 {
                spool.remove();
                next.remove_others();
            }
            done.store(true, Ordering::Relaxed);
        });
        next.remove_others();
        assert!(!dir.path().join("spool/run/0").exists());
    }
}
