//! Contributions on disk: one folder per client, one file per vector. Fusion reads them block by block, so the server's
//! memory does not grow with their number.

use crate::error::{Error, Result};
use crate::files::{checked, content, create_dir, read_if_exists, write_synced};
use crate::vault::Vault;
use crate::wire::{Contribution, Store};
use fedproj_core::{ClientSummary, Contributions, Part};
use std::path::{Path, PathBuf};

/// The spool of a round.
#[derive(Clone, Debug)]
pub struct Spool {
    dir: PathBuf,
    vault: Vault,
}

impl Spool {
    /// The spool of a round in a federation's folder.
    pub fn new(dir: &Path, run: &str, round: u32) -> Self {
        Self { dir: dir.join("spool").join(run).join(round.to_string()), vault: Vault::default() }
    }

    /// The same, encrypted at rest.
    #[must_use]
    pub fn sealed(self, vault: &Vault) -> Self {
        Self { vault: vault.clone(), ..self }
    }

    /// The store of one client.
    ///
    /// # Errors
    /// If its folder cannot be created.
    pub fn client(&self, client: u32) -> Result<Store> {
        Store::sealed(&self.dir.join(client.to_string()), &self.vault)
    }

    /// Keeps a note beside the contributions.
    ///
    /// # Errors
    /// If the disk is full.
    pub(super) fn write_note(&self, note: &[u8]) -> Result<()> {
        create_dir(&self.dir)?;
        write_synced(&self.dir.join("note"), &checked(note))
    }

    /// The note, if there is one and it is whole.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(super) fn read_note(&self) -> Result<Option<Vec<u8>>> {
        let stored = read_if_exists(&self.dir.join("note"))?;
        Ok(stored.and_then(|bytes| content(&bytes).map(<[u8]>::to_vec)))
    }

    /// Removes what a client sent.
    pub fn clear(&self, client: u32) {
        remove(&self.dir.join(client.to_string()));
    }

    /// Removes the spools of the run's other rounds; a crash or a late node may have left them.
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

/// Failing to clean up does not end the server: a late node may be writing there. The next round tries again.
fn remove(dir: &Path) {
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(dir = %dir.display(), %error, "cannot remove; the next round tries again");
        }
        _ => (),
    }
}

/// The contributions of a round, read from the spool.
#[derive(Debug)]
pub struct Spooled {
    all: Vec<(Contribution, Store)>,
}

impl Spooled {
    /// The accepted contributions of a round in a federation's folder, sorted by client. Apart from them, those that are
    /// missing or changed on disk, and what was found.
    ///
    /// # Errors
    /// If the spool cannot be opened.
    pub fn open(
        dir: &Path,
        vault: &Vault,
        mut accepted: Vec<Contribution>,
    ) -> Result<(Self, Vec<(Contribution, String)>)> {
        accepted.sort_by_key(|c| c.client);
        let (mut all, mut damaged) = (Vec::new(), Vec::new());
        for contribution in accepted {
            let spool = Spool::new(dir, &contribution.run, contribution.round).sealed(vault);
            let store = spool.client(contribution.client)?;
            match contribution.parts.iter().try_for_each(|part| store.check(&part.blob)) {
                Ok(()) => all.push((contribution, store)),
                Err(error) => damaged.push((contribution, error.to_string())),
            }
        }
        Ok((Self { all }, damaged))
    }

    /// All contributions but one.
    #[must_use]
    pub fn without(&self, at: usize) -> Self {
        let mut all = self.all.clone();
        all.remove(at);
        Self { all }
    }

    /// The contributions without their vectors.
    pub fn into_contributions(self) -> impl Iterator<Item = Contribution> {
        self.all.into_iter().map(|(contribution, _)| contribution)
    }
}

impl Contributions for Spooled {
    fn n(&self) -> usize {
        self.all.len()
    }

    fn summary(&self, at: usize) -> ClientSummary<'_> {
        let c = &self.all[at].0;
        ClientSummary { client: c.client, n_samples: c.n_samples as usize, n_steps: c.n_steps, stats: &c.stats }
    }

    fn len_of(&self, at: usize, part: Part<'_>) -> usize {
        self.all[at].0.blob(part).map_or(0, |blob| (blob.len / 4) as usize)
    }

    fn n_values(&self, at: usize) -> usize {
        self.all[at].0.parts.iter().map(|p| (p.blob.len / 4) as usize).sum()
    }

    fn read(&self, at: usize, part: Part<'_>, from: usize, out: &mut [f32]) -> fedproj_core::Result<()> {
        let (contribution, store) = &self.all[at];
        let Some(blob) = contribution.blob(part).filter(|_| !out.is_empty()) else { return Ok(()) };
        store.read_values(blob, from, out).map_err(|error| match error {
            Error::Core(error) => error,
            other => fedproj_core::Error::Internal { what: "reading a contribution", problem: other.to_string() },
        })
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
