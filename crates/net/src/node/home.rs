//! A node's folder: its credentials, its client's state between rounds, and a contribution on its way.
//!
//! The client's state (for example control variates) is replaced only when the server has accepted the contribution that
//! belongs to it. So it matches the model whatever crashes in between.

mod credentials;

use super::summing::KeptKeys;
use crate::error::{Error, Result};
use crate::files::{checked, content, read_if_exists, remove_if_exists, sync_dir, write_synced};
use crate::vault::Vault;
use crate::wire::{Contribution, Store, Task, decode, decode_f32, encode_f32, hex};
use fedproj_core::ClientState;
use prost::Message;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The first bytes of a state file that is encrypted at rest.
const SEALED: &[u8] = b"FEDPROJE";

/// Keys of a secure sum. They serve one attempt.
const SUMMING: &str = "pending.secure";
/// With whose vectors each of this node's was summed: a line per vector.
const REVEALED: &str = "revealed";

/// A node's folder.
#[derive(Clone, Debug)]
pub struct Home {
    dir: PathBuf,
    vault: Vault,
}

/// A client's state on disk.
#[derive(Clone, PartialEq, Message)]
struct Kept {
    /// The vectors.
    #[prost(message, repeated, tag = "1")]
    vectors: Vec<KeptVector>,
}

/// A vector of a client's state.
#[derive(Clone, PartialEq, Message)]
struct KeptVector {
    /// Its name.
    #[prost(string, tag = "1")]
    name: String,
    /// Its values, little-endian.
    #[prost(bytes = "vec", tag = "2")]
    values: Vec<u8>,
}

impl Home {
    /// The folder of a node.
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.into(), vault: Vault::default() }
    }

    /// The same, with client state, tasks and contributions encrypted at rest.
    #[must_use]
    pub fn sealed(self, vault: Vault) -> Self {
        Self { vault, ..self }
    }

    /// Reads a file that is encrypted at rest. One from before there was a key is read too.
    fn unseal(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        let Some(stored) = read_if_exists(path)? else { return Ok(None) };
        match stored.strip_prefix(SEALED) {
            Some(_) if !self.vault.has_key() => {
                Err(Error::config(format!("`{}` is encrypted\nhint: --key-file names its key", path.display())))
            }
            Some(sealed) => self.vault.unseal(SEALED, sealed.to_vec()).map(Some).map_err(Error::io("read", path)),
            None => Ok(Some(stored)),
        }
    }

    /// Checks that the client's state and a contribution on its way can be decrypted.
    ///
    /// # Errors
    /// Names the file that cannot be.
    pub fn check_key(&self) -> Result<()> {
        let entries = std::fs::read_dir(&self.dir).map_err(Error::io("list", &self.dir))?;
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let is_kept = |path: &PathBuf| path.extension().is_some_and(|e| e == "state" || e == "contribution");
        for path in paths.filter(is_kept) {
            self.unseal(&path).map_err(|error| match error {
                Error::Core(fedproj_core::Error::Io { source, .. }) if source.kind() == ErrorKind::InvalidData => {
                    let hint = "--key-file names the key; if it is lost, remove the file: the client starts over";
                    Error::config(format!("`{}`: {source}\nhint: {hint}", path.display()))
                }
                other => other,
            })?;
        }
        Ok(())
    }

    fn seal(&self, path: &Path, content: &[u8]) -> Result<()> {
        if !self.vault.has_key() {
            return write_synced(path, content);
        }
        write_synced(path, &[SEALED, &self.vault.seal(SEALED, content)?].concat())
    }

    /// Blobs from the server.
    ///
    /// # Errors
    /// If its folder cannot be created.
    pub fn cache(&self) -> Result<Store> {
        Store::sealed(&self.dir.join("cache"), &self.vault)
    }

    /// Blobs for the server.
    ///
    /// # Errors
    /// If its folder cannot be created.
    pub fn outbox(&self) -> Result<Store> {
        Store::sealed(&self.dir.join("outbox"), &self.vault)
    }

    fn kept_path(&self, run: &str) -> PathBuf {
        // A run's name comes from the server, so only its hash becomes a file name.
        let name = blake3::hash(run.as_bytes()).to_hex();
        self.dir.join(format!("kept-{}.state", &name[..16]))
    }

    /// The client's state in a run.
    ///
    /// # Errors
    /// If the file is damaged.
    pub fn kept(&self, run: &str) -> Result<ClientState> {
        let path = self.kept_path(run);
        match self.unseal(&path)? {
            Some(bytes) => decode_kept(&bytes).map_err(Error::corrupt(&path)),
            None => Ok(ClientState::new()),
        }
    }

    /// Stores a contribution to a task and the state that belongs to it, before the server learns of it.
    ///
    /// # Errors
    /// If the disk is full.
    pub fn set_pending(&self, task: &Task, contribution: &Contribution, kept: &ClientState) -> Result<()> {
        // No keys serve two contributions.
        remove_if_exists(&self.dir.join(SUMMING))?;
        write_synced(&self.dir.join("task"), &task.common_hash())?;
        self.seal(&self.dir.join("pending.state"), &encode_kept(kept))?;
        self.seal(&self.dir.join("pending.contribution"), &checked(&contribution.encode_to_vec()))
    }

    /// The hash of the task to which the contribution on its way belongs.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(crate) fn task(&self) -> Result<Vec<u8>> {
        Ok(read_if_exists(&self.dir.join("task"))?.unwrap_or_default())
    }

    /// What the node keeps of an attempt at a secure sum.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(crate) fn summing(&self) -> Result<Option<KeptKeys>> {
        let stored = self.unseal(&self.dir.join(SUMMING))?;
        // A damaged one is dropped: the node announces new keys.
        Ok(stored.and_then(|bytes| KeptKeys::decode(content(&bytes)?).ok()))
    }

    /// Keeps it, for its owner only.
    ///
    /// # Errors
    /// If the disk is full.
    pub(crate) fn set_summing(&self, kept: &KeptKeys) -> Result<()> {
        self.seal(&self.dir.join(SUMMING), &checked(&kept.encode_to_vec()))
    }

    /// Notes with whose vectors this one is summed. There can be one set of clients only, whatever the round or the run: a
    /// run of another name that trains alike gives the same vector.
    ///
    /// # Errors
    /// If the node has revealed shares for a sum of this vector with others.
    pub(crate) fn set_revealed(&self, vector: &[u8], survivors: &[u32]) -> Result<()> {
        let path = self.dir.join(REVEALED);
        let text = read_if_exists(&path)?.unwrap_or_default();
        let mut text = String::from_utf8(text).map_err(Error::corrupt(&path))?;
        let vector = hex(vector);
        let line = format!("{vector} {survivors:?}");
        match text.lines().find(|line| line.starts_with(&vector)) {
            Some(before) if before == line => Ok(()),
            Some(before) => Err(Error::Declined(format!(
                "this vector was in a sum of clients {}, and would now be in one of {survivors:?}: the difference of two sums \
                 shows single contributions",
                before[vector.len()..].trim()
            ))),
            None => {
                text += &(line + "\n");
                write_synced(&path, text.as_bytes())
            }
        }
    }

    /// The contribution on its way, if there is one. A damaged one is dropped: the client trains again.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn pending(&self) -> Result<Option<Contribution>> {
        let path = self.dir.join("pending.contribution");
        let Some(bytes) = self.unseal(&path)? else { return Ok(None) };
        if let Some(contribution) = content(&bytes).and_then(|body| decode(body).ok()) {
            return Ok(Some(contribution));
        }
        tracing::warn!(path = %path.display(), "damaged: the contribution is dropped, and the client trains again");
        self.discard().map(|()| None)
    }

    /// Whether the last contribution was to this very task and is still here. If so, it is on its way again. Training again
    /// would move the client's state twice.
    ///
    /// # Errors
    /// If the disk fails.
    pub fn send_again(&self, task: &Task) -> Result<bool> {
        let sent = self.dir.join("sent.contribution");
        let is_same = read_if_exists(&self.dir.join("task"))?.is_some_and(|hash| hash == task.common_hash());
        let Some(bytes) = self.unseal(&sent)?.filter(|_| is_same) else { return Ok(false) };
        let Some(body) = content(&bytes) else { return Ok(false) };
        let (contribution, outbox): (Contribution, Store) = (decode(body)?, self.outbox()?);
        if !contribution.parts.iter().all(|part| outbox.has(&part.blob)) {
            return Ok(false);
        }
        self.rename(&sent, &self.dir.join("pending.contribution"))?;
        Ok(true)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        std::fs::rename(from, to).map_err(Error::io("rename", from))?;
        sync_dir(&self.dir)
    }

    /// The server has accepted the contribution: the state that belongs to it becomes the client's. The contribution stays
    /// until the next one, because the server may lose it.
    ///
    /// # Errors
    /// If the disk fails; the call can be repeated.
    pub fn commit(&self, run: &str) -> Result<()> {
        let pending = self.dir.join("pending.state");
        if pending.exists() {
            self.rename(&pending, &self.kept_path(run))?;
        }
        self.rename(&self.dir.join("pending.contribution"), &self.dir.join("sent.contribution"))?;
        remove_if_exists(&self.dir.join(SUMMING))
    }

    /// The contribution does not count: the client keeps its state.
    ///
    /// # Errors
    /// If the disk fails; the call can be repeated.
    pub fn discard(&self) -> Result<()> {
        for name in ["pending.contribution", "pending.state", SUMMING] {
            remove_if_exists(&self.dir.join(name))?;
        }
        sync_dir(&self.dir)?;
        self.outbox()?.retain(&[])
    }
}

fn encode_kept(state: &ClientState) -> Vec<u8> {
    let vector = |(name, values): (&String, &Vec<f32>)| KeptVector { name: name.clone(), values: encode_f32(values) };
    checked(&Kept { vectors: state.iter().map(vector).collect() }.encode_to_vec())
}

/// Reads a client's state from disk.
///
/// # Errors
/// If it is damaged.
pub fn decode_kept(bytes: &[u8]) -> Result<ClientState> {
    let damaged = || Error::protocol("the client's state is damaged; remove the file to start over");
    let body = content(bytes).ok_or_else(damaged)?;
    let kept = Kept::decode(body).map_err(|_| damaged())?;
    let vector = |v: KeptVector| Ok((v.name.clone(), decode_f32(&v.values, v.values.len() / 4, &v.name)?));
    kept.vectors.into_iter().map(vector).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_revealed_for_one_set_of_survivors_per_vector() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        for (vector, survivors) in [(1, &[0, 1, 2][..]), (1, &[0, 1, 2]), (11, &[0, 1, 3])] {
            home.set_revealed(&[vector; 32], survivors).unwrap();
        }
        for survivors in [&[0, 1, 2, 3][..], &[0, 1]] {
            let error = home.set_revealed(&[1; 32], survivors).unwrap_err().to_string();
            assert!(error.contains("in a sum of clients [0, 1, 2], and"), "{error}");
        }
        home.set_revealed(&[2; 32], &[0, 1]).unwrap();
    }

    #[test]
    fn state_changes_only_with_its_contribution() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        let state = |v: f32| ClientState::from([("h".to_owned(), vec![v, -v])]);
        let task = Task::default();
        let contribution = |round| Contribution { run: "r".into(), round, ..Contribution::default() };
        assert_eq!(home.kept("r").unwrap(), ClientState::new());
        home.set_pending(&task, &contribution(0), &state(1.0)).unwrap();
        assert_eq!(home.kept("r").unwrap(), ClientState::new());
        home.commit("r").unwrap();
        assert_eq!((home.kept("r").unwrap(), home.pending().unwrap()), (state(1.0), None));
        home.set_pending(&task, &contribution(1), &state(2.0)).unwrap();
        assert_eq!(home.pending().unwrap(), Some(contribution(1)));
        home.discard().unwrap();
        assert_eq!((home.kept("r").unwrap(), home.pending().unwrap()), (state(1.0), None));
        // Killed between the two steps of a commit: the commit is repeated, with nothing left to move.
        home.set_pending(&task, &contribution(2), &state(3.0)).unwrap();
        std::fs::rename(dir.path().join("pending.state"), home.kept_path("r")).unwrap();
        home.commit("r").unwrap();
        assert_eq!((home.kept("r").unwrap(), home.pending().unwrap()), (state(3.0), None));
        // The same task again: the same contribution, and the state does not move.
        assert!(home.send_again(&task).unwrap() && !home.send_again(&task).unwrap());
        assert_eq!(home.pending().unwrap(), Some(contribution(2)));
        home.commit("r").unwrap();
        assert_eq!((home.kept("r").unwrap(), home.pending().unwrap()), (state(3.0), None));
        assert!(!home.send_again(&Task { round: 9, ..Task::default() }).unwrap());
        assert_eq!(home.kept("other").unwrap(), ClientState::new());
    }

    #[test]
    fn state_is_unreadable_without_its_key_and_older_state_is_still_read() {
        let dir = tempfile::tempdir().unwrap();
        let (plain, sealed) = (Home::new(dir.path()), Home::new(dir.path()).sealed(Vault::of(&[7; 32])));
        let state = |v: f32| ClientState::from([("control_variate".to_owned(), vec![v; 9])]);
        let contribution = Contribution { run: "r".into(), ..Contribution::default() };
        plain.set_pending(&Task::default(), &contribution, &state(1.0)).unwrap();
        plain.commit("r").unwrap();
        assert_eq!(sealed.kept("r").unwrap(), state(1.0));
        sealed.set_pending(&Task::default(), &contribution, &state(2.0)).unwrap();
        assert_eq!(sealed.pending().unwrap(), Some(contribution));
        sealed.commit("r").unwrap();
        assert_eq!(sealed.kept("r").unwrap(), state(2.0));
        let stored = std::fs::read(sealed.kept_path("r")).unwrap();
        assert!(!stored.windows(7).any(|w| w == b"control"));
        let other = Home::new(dir.path()).sealed(Vault::of(&[8; 32]));
        assert!(other.kept("r").unwrap_err().to_string().contains("decrypted"));
        let told = other.check_key().unwrap_err();
        assert!(told.is_usage() && told.to_string().contains("hint: --key-file names the key"), "{told}");
        sealed.check_key().unwrap();
        assert!(plain.check_key().unwrap_err().to_string().contains("--key-file"));
        assert!(plain.kept("r").unwrap_err().to_string().contains("--key-file"));
    }

    #[test]
    fn a_contribution_that_was_damaged_is_dropped_with_its_state() {
        let dir = tempfile::tempdir().unwrap();
        let (home, path) = (Home::new(dir.path()), dir.path().join("pending.contribution"));
        let state = ClientState::from([("h".to_owned(), vec![1.0])]);
        let contribution = Contribution { run: "r".into(), n_samples: 10, ..Contribution::default() };
        home.set_pending(&Task::default(), &contribution, &state).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            home.set_pending(&Task::default(), &contribution, &state).unwrap();
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(home.pending().unwrap(), None, "byte {at}");
            assert!(!dir.path().join("pending.state").exists());
        }
        assert_eq!(home.kept("r").unwrap(), ClientState::new());
    }

    #[test]
    fn damage_to_the_state_is_detected() {
        let whole = encode_kept(&ClientState::from([("h".to_owned(), vec![1.0; 5])]));
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 4;
            assert!(decode_kept(&damaged).is_err() && decode_kept(&whole[..at]).is_err(), "byte {at}");
        }
    }
}
