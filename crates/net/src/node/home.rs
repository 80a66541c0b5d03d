//! A node's folder: who it is, what its client keeps between rounds, and a contribution that is on its way.
//!
//! What a client keeps (control variates and the like) moves on only when the server has taken the contribution that goes
//! with it, so that it stays in step with the model whatever crashes in between.

use crate::error::{Error, Result};
use crate::files::{create_dir, sync_dir, write_private, write_synced};
use crate::identity::{certificate_from, end_of};
use crate::server::registry::has_passed;
use crate::wire::blob::Store;
use crate::wire::message::{Contribution, EnrolReply};
use crate::wire::numbers::{decode_f32, encode_f32};
use fedproj_core::ClientState;
use prost::Message;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

const HASH_BYTES: usize = 32;

/// Who a node is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Its name.
    pub name: String,
    /// The client that it stands for.
    pub client: u32,
}

/// A node's folder.
#[derive(Clone, Debug)]
pub struct Home {
    dir: PathBuf,
}

/// What a client keeps, on disk.
#[derive(Clone, PartialEq, Message)]
pub struct Kept {
    /// The vectors.
    #[prost(message, repeated, tag = "1")]
    pub vectors: Vec<KeptVector>,
}

/// A vector that a client keeps.
#[derive(Clone, PartialEq, Message)]
pub struct KeptVector {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its values, little-endian.
    #[prost(bytes = "vec", tag = "2")]
    pub values: Vec<u8>,
}

impl Home {
    /// The folder of a node.
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.into() }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn text(&self, name: &str) -> Result<String> {
        let path = self.dir.join(name);
        std::fs::read_to_string(&path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::config(format!(
                "`{}` is not there: this node has not been enrolled\nhint: fedproj enrol SERVER TOKEN --node {}",
                path.display(),
                self.dir.display()
            )),
            _ => Error::io("read", &path)(source),
        })
    }

    /// Key and request of an enrolment, made once: a second try asks for the same certificate.
    ///
    /// # Errors
    /// If they cannot be made or kept.
    pub fn request(&self) -> Result<Vec<u8>> {
        create_dir(&self.dir)?;
        let path = self.dir.join("request.der");
        if self.dir.join("node.toml").exists() {
            return Err(Error::config(format!("`{}` is the folder of a node that is enrolled", self.dir.display())));
        }
        if !path.exists() {
            let (key, request) = crate::identity::node_request()?;
            write_private(&self.dir.join("key.pem"), &key)?;
            write_synced(&path, &request)?;
        }
        std::fs::read(&path).map_err(Error::io("read", &path))
    }

    /// Keeps a certificate.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn enrolled(&self, reply: &EnrolReply) -> Result<()> {
        write_synced(&self.dir.join("certificate.pem"), reply.certificate.as_bytes())?;
        write_synced(&self.dir.join("authority.pem"), reply.authority.as_bytes())?;
        let identity = Identity { name: reply.name.clone(), client: reply.client };
        let text = toml::to_string(&identity).map_err(|e| Error::config(e.to_string()))?;
        // Last: where it stands, the rest stands too.
        write_synced(&self.dir.join("node.toml"), text.as_bytes())
    }

    /// Who the node is.
    ///
    /// # Errors
    /// If it has not been enrolled.
    pub fn identity(&self) -> Result<Identity> {
        let text = self.text("node.toml")?;
        toml::from_str(&text).map_err(|e| Error::Corrupt { path: self.dir.join("node.toml"), problem: e.to_string() })
    }

    /// The node's side of TLS.
    ///
    /// # Errors
    /// If it has not been enrolled.
    pub fn tls(&self) -> Result<rustls::ClientConfig> {
        let (authority, certificate) = (self.text("authority.pem")?, self.text("certificate.pem")?);
        crate::identity::node_tls(&authority, &certificate, &self.text("key.pem")?)
    }

    /// Whether this machine's clock says that the certificate has ended.
    pub fn is_expired(&self) -> bool {
        let end = self.text("certificate.pem").and_then(|pem| end_of(&certificate_from(&pem)?));
        end.is_ok_and(has_passed)
    }

    /// Blobs from the server.
    ///
    /// # Errors
    /// If its folder cannot be made.
    pub fn cache(&self) -> Result<Store> {
        Store::open(&self.dir.join("cache"))
    }

    /// Blobs for the server.
    ///
    /// # Errors
    /// If its folder cannot be made.
    pub fn outbox(&self) -> Result<Store> {
        Store::open(&self.dir.join("outbox"))
    }

    fn kept_path(&self, run: &str) -> PathBuf {
        // A run's name comes from the server: it becomes a file name by its hash only.
        let name = blake3::hash(run.as_bytes()).to_hex();
        self.dir.join(format!("kept-{}.state", &name[..16]))
    }

    /// What the client keeps of a run.
    ///
    /// # Errors
    /// If the file is damaged.
    pub fn kept(&self, run: &str) -> Result<ClientState> {
        let path = self.kept_path(run);
        let bytes = match std::fs::read(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(ClientState::new()),
            read => read.map_err(Error::io("read", &path))?,
        };
        decode_kept(&bytes).map_err(|e| Error::Corrupt { path, problem: e.to_string() })
    }

    /// Puts a contribution and what goes with it on disk, before the server hears of it.
    ///
    /// # Errors
    /// If the disk is full.
    pub fn set_pending(&self, contribution: &Contribution, kept: &ClientState) -> Result<()> {
        write_synced(&self.dir.join("pending.state"), &encode_kept(kept))?;
        write_synced(&self.dir.join("pending.contribution"), &contribution.encode_to_vec())
    }

    /// The contribution that is on its way, if there is one.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn pending(&self) -> Result<Option<Contribution>> {
        let path = self.dir.join("pending.contribution");
        match std::fs::read(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            read => {
                let bytes = read.map_err(Error::io("read", &path))?;
                crate::wire::message::decode(&bytes)
                    .map(Some)
                    .map_err(|e| Error::Corrupt { path, problem: e.to_string() })
            }
        }
    }

    /// The server has taken the contribution: what goes with it is now what the client keeps.
    ///
    /// # Errors
    /// If the disk fails; it can be done again.
    pub fn commit(&self, run: &str) -> Result<()> {
        let pending = self.dir.join("pending.state");
        if pending.exists() {
            std::fs::rename(&pending, self.kept_path(run)).map_err(Error::io("rename", &pending))?;
            sync_dir(&self.dir)?;
        }
        self.discard()
    }

    /// The contribution does not count: the client keeps what it had.
    ///
    /// # Errors
    /// If the disk fails; it can be done again.
    pub fn discard(&self) -> Result<()> {
        for name in ["pending.contribution", "pending.state"] {
            let path = self.dir.join(name);
            match std::fs::remove_file(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("remove", &path)(e)),
                _ => (),
            }
        }
        sync_dir(&self.dir)?;
        self.outbox()?.retain(&[])
    }
}

fn encode_kept(state: &ClientState) -> Vec<u8> {
    let vector = |(name, values): (&String, &Vec<f32>)| KeptVector { name: name.clone(), values: encode_f32(values) };
    let body = Kept { vectors: state.iter().map(vector).collect() }.encode_to_vec();
    [blake3::hash(&body).as_bytes(), &body[..]].concat()
}

/// Reads what [`Home::kept`] finds on disk.
///
/// # Errors
/// If it is damaged.
pub fn decode_kept(bytes: &[u8]) -> Result<ClientState> {
    let damaged = || Error::protocol("what the client kept is damaged; remove the file to begin anew");
    let (hash, body) = bytes.split_at_checked(HASH_BYTES).ok_or_else(damaged)?;
    if blake3::hash(body).as_bytes() != hash {
        return Err(damaged());
    }
    let kept = Kept::decode(body).map_err(|_| damaged())?;
    let vector = |v: KeptVector| Ok((v.name.clone(), decode_f32(&v.values, v.values.len() / 4, &v.name)?));
    kept.vectors.into_iter().map(vector).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_client_keeps_moves_on_only_with_its_contribution() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        let state = |v: f32| ClientState::from([("h".to_owned(), vec![v, -v])]);
        let contribution = |round| Contribution { run: "r".into(), round, ..Contribution::default() };
        assert_eq!(home.kept("r").unwrap(), ClientState::new());
        home.set_pending(&contribution(0), &state(1.0)).unwrap();
        assert_eq!(home.kept("r").unwrap(), ClientState::new());
        home.commit("r").unwrap();
        assert_eq!((home.kept("r").unwrap(), home.pending().unwrap()), (state(1.0), None));
        home.set_pending(&contribution(1), &state(2.0)).unwrap();
        assert_eq!(home.pending().unwrap(), Some(contribution(1)));
        home.discard().unwrap();
        assert_eq!((home.kept("r").unwrap(), home.pending().unwrap()), (state(1.0), None));
        // Killed between the two steps of a commit: the commit is done again, with nothing left to move.
        home.set_pending(&contribution(2), &state(3.0)).unwrap();
        std::fs::rename(dir.path().join("pending.state"), home.kept_path("r")).unwrap();
        home.commit("r").unwrap();
        assert_eq!((home.kept("r").unwrap(), home.pending().unwrap()), (state(3.0), None));
        assert_eq!(home.kept("other").unwrap(), ClientState::new());
    }

    #[test]
    fn a_node_knows_that_its_certificate_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let authority = crate::identity::Authority::open(&dir.path().join("server")).unwrap();
        let home = Home::new(&dir.path().join("node"));
        let request = home.request().unwrap();
        assert!(!home.is_expired());
        for (days, is_expired) in [(10, false), (-1, true)] {
            let certificate = authority.sign(&request, "n", days).unwrap();
            let authority = authority.certificate().to_owned();
            home.enrolled(&EnrolReply { name: "n".into(), client: 0, certificate, authority }).unwrap();
            assert_eq!(home.is_expired(), is_expired);
        }
    }

    #[test]
    fn damage_to_what_is_kept_is_found() {
        let whole = encode_kept(&ClientState::from([("h".to_owned(), vec![1.0; 5])]));
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 4;
            assert!(decode_kept(&damaged).is_err() && decode_kept(&whole[..at]).is_err(), "byte {at}");
        }
    }
}
