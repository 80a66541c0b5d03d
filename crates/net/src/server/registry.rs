//! Who belongs to the federation: one small file a node, one a token, in the server's folder.
//!
//! Files, so that `fedproj nodes` works beside a running server and without one; a lock orders their changes. A node that is
//! revoked, or whose certificate has ended, is out: its name and its client can be given to another.

use crate::error::{Error, Result};
use crate::files::{self, create_dir, sync_dir, write_synced};
use crate::identity::{Authority, Token, certificate_from, end_of, fingerprint};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long an invitation stands unless its maker says otherwise.
pub const INVITATION_LASTS: Duration = Duration::from_hours(24);

/// A node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeEntry {
    /// Its name.
    pub name: String,
    /// The client that it stands for.
    pub client: u32,
    /// Of its certificate, see [`fingerprint`].
    pub fingerprint: String,
    /// Whether it has been shut out.
    pub revoked: bool,
    /// When its certificate ends, in seconds since 1970; 0 in entries of earlier versions.
    #[serde(default)]
    pub expires: u64,
}

impl NodeEntry {
    /// Whether the certificate has ended: a connection that was opened before must not outlive it.
    pub fn is_expired(&self) -> bool {
        has_passed(self.expires)
    }

    /// Why it does not belong here any longer, if it does not.
    pub fn is_out(&self) -> Option<&'static str> {
        match (self.revoked, self.is_expired()) {
            (true, _) => Some("this node's certificate has been revoked"),
            (_, true) => Some("this node's certificate has expired"),
            _ => None,
        }
    }
}

/// Whether a moment, in seconds since 1970, is over; 0 never is.
pub(crate) fn has_passed(moment: u64) -> bool {
    moment > 0 && seconds_since_1970() > moment
}

fn seconds_since_1970() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// An invitation that nobody has used yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Invitation {
    /// The name that the node will have.
    pub name: String,
    /// The client that it will stand for.
    pub client: u32,
    /// When the token stops working, in seconds since 1970; 0 in invitations of earlier versions, which do not.
    #[serde(default)]
    pub expires: u64,
}

impl Invitation {
    /// Whether the token works no more.
    pub fn is_expired(&self) -> bool {
        has_passed(self.expires)
    }
}

/// What became of a token.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Spent {
    request_hash: String,
    certificate: String,
}

/// The nodes and tokens of a federation.
#[derive(Clone, Debug)]
pub struct Registry {
    nodes: PathBuf,
    tokens: PathBuf,
    lock: PathBuf,
}

impl Registry {
    /// The registry in a federation's folder.
    ///
    /// # Errors
    /// If its folders cannot be made.
    pub fn open(dir: &Path) -> Result<Self> {
        let registry = Self { nodes: dir.join("nodes"), tokens: dir.join("tokens"), lock: dir.join("registry.lock") };
        for folder in [&registry.nodes, &registry.tokens] {
            create_dir(folder)?;
        }
        Ok(registry)
    }

    /// Held while something is changed: two changes at a time could both find a client free.
    fn lock(&self) -> Result<File> {
        files::lock(&self.lock)
    }

    /// All nodes, by name.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn nodes(&self) -> Result<Vec<NodeEntry>> {
        let mut nodes: Vec<NodeEntry> = read_all(&self.nodes)?;
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(nodes)
    }

    /// All open invitations.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn invitations(&self) -> Result<Vec<Invitation>> {
        read_all(&self.tokens)
    }

    /// The node with this certificate, if it belongs here. One file is read, so it can be asked for every request, and a
    /// node that is shut out is out at once.
    ///
    /// # Errors
    /// If its file cannot be read.
    pub fn find(&self, fingerprint: &str) -> Result<Option<NodeEntry>> {
        read_entry(&self.nodes.join(format!("{fingerprint}.toml")))
    }

    /// The node with this certificate, if it is in.
    ///
    /// # Errors
    /// [`Error::NotAMember`] if it is not; or if its file cannot be read.
    pub fn admit(&self, fingerprint: &str) -> Result<NodeEntry> {
        let node = self.find(fingerprint)?.ok_or(Error::NotAMember("this certificate is not known here"))?;
        node.is_out().map_or(Ok(node), |reason| Err(Error::NotAMember(reason)))
    }

    /// Invites a node: a token that works once, and for a while. Without a number the node stands for the first client that
    /// nobody else stands for.
    ///
    /// # Errors
    /// If name or client are taken, or the token cannot be written.
    pub fn invite(
        &self,
        authority: &Authority,
        name: &str,
        client: Option<u32>,
        lasts: Duration,
    ) -> Result<(Token, Invitation)> {
        check_name(name)?;
        let _lock = self.lock()?;
        self.withdraw(Invitation::is_expired)?;
        let members = self.nodes()?.into_iter().filter(|node| node.is_out().is_none());
        let mut taken: Vec<(String, u32)> = members.map(|n| (n.name, n.client)).collect();
        taken.extend(self.invitations()?.into_iter().map(|i| (i.name, i.client)));
        let is_free = |client: u32| taken.iter().all(|(_, c)| *c != client);
        if taken.iter().any(|(other, _)| other == name) {
            return Err(Error::config(format!("there is a node or an invitation named `{name}` already")));
        }
        let client = match client {
            Some(client) if !is_free(client) => {
                return Err(Error::config(format!("another node stands for client {client} already")));
            }
            Some(client) => client,
            None => (0..u32::MAX).find(|&c| is_free(c)).unwrap_or(u32::MAX),
        };
        let token = Token::new(authority.fingerprint()?)?;
        let expires = seconds_since_1970().saturating_add(lasts.as_secs());
        let invitation = Invitation { name: name.into(), client, expires };
        write_synced(&self.tokens.join(Token::name_of(&token.secret) + ".toml"), to_toml(&invitation)?.as_bytes())?;
        Ok((token, invitation))
    }

    /// Spends a token: signs the request and enters the node. A second use fails, however close it comes to the first;
    /// only the very same request is answered again, since the first answer may have been lost on its way.
    ///
    /// # Errors
    /// If the token is unknown, spent or too old, or the request is not one.
    pub fn enrol(
        &self,
        authority: &Authority,
        secret: &[u8],
        request: &[u8],
        days: i64,
    ) -> Result<(NodeEntry, String)> {
        let unknown =
            || Error::protocol("this token is unknown or has been used; ask the server's owner for a new one");
        let _lock = self.lock()?;
        let path = self.tokens.join(Token::name_of(secret) + ".toml");
        let spent_path = path.with_extension("spent");
        let request_hash = blake3::hash(request).to_hex().to_string();
        let Ok(text) = std::fs::read_to_string(&path) else {
            let spent: Option<Spent> = read_entry(&spent_path)?;
            let same = spent.filter(|s| s.request_hash == request_hash).ok_or_else(unknown)?;
            let node = self.find(&fingerprint(&certificate_from(&same.certificate)?))?;
            let node = node.filter(|node| node.is_out().is_none()).ok_or_else(unknown)?;
            return Ok((node, same.certificate));
        };
        let invitation: Invitation = from_toml(&path, &text)?;
        if invitation.is_expired() {
            return Err(Error::protocol("this token has expired; ask the server's owner for a new one"));
        }
        // A request that cannot be signed does not cost the token.
        let certificate = authority.sign(request, &invitation.name, days)?;
        std::fs::rename(&path, &spent_path).map_err(|_| unknown())?;
        sync_dir(&self.tokens)?;
        let der = certificate_from(&certificate)?;
        let (fingerprint, expires) = (fingerprint(&der), end_of(&der)?);
        let Invitation { name, client, .. } = invitation;
        let node = NodeEntry { name, client, fingerprint, revoked: false, expires };
        self.write(&node)?;
        let spent = Spent { request_hash, certificate };
        write_synced(&spent_path, to_toml(&spent)?.as_bytes())?;
        Ok((node, spent.certificate))
    }

    /// Shuts a node out, from its next request on; an open invitation of that name is withdrawn.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn revoke(&self, name: &str) -> Result<()> {
        let _lock = self.lock()?;
        // More than one, where a name was given again.
        let nodes: Vec<NodeEntry> = self.nodes()?.into_iter().filter(|node| node.name == name).collect();
        for node in nodes.iter().filter(|node| !node.revoked) {
            self.write(&NodeEntry { revoked: true, ..node.clone() })?;
        }
        if self.withdraw(|invitation| invitation.name == name)? || !nodes.is_empty() {
            return Ok(());
        }
        Err(Error::config(format!("there is no node named `{name}`; `fedproj nodes` lists them")))
    }

    /// Removes invitations; whether there were any.
    fn withdraw(&self, of: impl Fn(&Invitation) -> bool) -> Result<bool> {
        let mut found = false;
        for path in entries(&self.tokens)? {
            if read_entry::<Invitation>(&path)?.is_some_and(|invitation| of(&invitation)) {
                std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
                found = true;
            }
        }
        if found {
            sync_dir(&self.tokens)?;
        }
        Ok(found)
    }

    fn write(&self, node: &NodeEntry) -> Result<()> {
        write_synced(&self.nodes.join(format!("{}.toml", node.fingerprint)), to_toml(node)?.as_bytes())
    }
}

/// Names become parts of certificates and log lines.
fn check_name(name: &str) -> Result<()> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if !name.is_empty() && name.len() <= 64 && name.chars().all(fits) && !name.starts_with('.') {
        return Ok(());
    }
    Err(Error::config(format!("`{name}`: a node's name is 1 to 64 letters, digits, `-`, `_` or `.`")))
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let all = std::fs::read_dir(dir).map_err(Error::io("list", dir))?;
    let mut paths: Vec<PathBuf> = all.filter_map(|e| Some(e.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "toml"));
    paths.sort();
    Ok(paths)
}

fn read_all<T: serde::de::DeserializeOwned>(dir: &Path) -> Result<Vec<T>> {
    let entries: Result<Vec<Option<T>>> = entries(dir)?.iter().map(|path| read_entry(path)).collect();
    Ok(entries?.into_iter().flatten().collect())
}

/// An entry; none if the file has gone meanwhile (a token that was spent).
fn read_entry<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    match std::fs::read_to_string(path) {
        // A token that has just been spent still holds its invitation.
        Ok(text) if path.extension().is_some_and(|e| e == "spent") => Ok(toml::from_str(&text).ok()),
        Ok(text) => from_toml(path, &text).map(Some),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io("read", path)(e)),
    }
}

fn from_toml<T: serde::de::DeserializeOwned>(path: &Path, text: &str) -> Result<T> {
    toml::from_str(text).map_err(|e| Error::Corrupt { path: path.into(), problem: e.to_string() })
}

fn to_toml(value: &impl Serialize) -> Result<String> {
    toml::to_string(value).map_err(|e| Error::config(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::node_request;

    fn federation() -> (tempfile::TempDir, Authority, Registry) {
        let dir = tempfile::tempdir().unwrap();
        let (authority, registry) = (Authority::open(dir.path()).unwrap(), Registry::open(dir.path()).unwrap());
        (dir, authority, registry)
    }

    #[test]
    fn a_token_works_once_even_for_rivals() {
        let (_dir, authority, registry) = federation();
        let (token, invitation) = registry.invite(&authority, "site-a", None, INVITATION_LASTS).unwrap();
        assert_eq!(invitation.client, 0);
        let enrol = || registry.enrol(&authority, &token.secret, &node_request().unwrap().1, 10);
        let won: Vec<bool> = std::thread::scope(|scope| {
            let rivals: Vec<_> = (0..4).map(|_| scope.spawn(|| enrol().is_ok())).collect();
            rivals.into_iter().map(|r| r.join().unwrap()).collect()
        });
        assert_eq!(won.iter().filter(|won| **won).count(), 1);
        assert!(enrol().unwrap_err().to_string().contains("has been used"));
        assert_eq!(registry.nodes().unwrap().len(), 1);
        assert!(registry.invitations().unwrap().is_empty());
    }

    #[test]
    fn a_bad_request_does_not_cost_the_token() {
        let (_dir, authority, registry) = federation();
        let (token, _) = registry.invite(&authority, "a", Some(3), INVITATION_LASTS).unwrap();
        assert!(registry.enrol(&authority, &token.secret, b"nonsense", 10).is_err());
        assert!(registry.enrol(&authority, &[0; 32], &node_request().unwrap().1, 10).is_err());
        let request = node_request().unwrap().1;
        let (node, certificate) = registry.enrol(&authority, &token.secret, &request, 10).unwrap();
        // The answer was lost: the same node asks again and gets the same certificate; a thief does not.
        assert_eq!(registry.enrol(&authority, &token.secret, &request, 10).unwrap().1, certificate);
        assert!(registry.enrol(&authority, &token.secret, &node_request().unwrap().1, 10).is_err());
        assert_eq!((node.client, node.revoked), (3, false));
        registry.revoke("a").unwrap();
        assert!(registry.find(&node.fingerprint).unwrap().is_some_and(|n| n.revoked));
        assert!(registry.find("other").unwrap().is_none());
    }

    #[test]
    fn names_and_clients_are_given_once_and_names_are_plain() {
        let (_dir, authority, registry) = federation();
        registry.invite(&authority, "a", None, INVITATION_LASTS).unwrap();
        assert!(registry.invite(&authority, "a", None, INVITATION_LASTS).is_err());
        assert!(registry.invite(&authority, "b", Some(0), INVITATION_LASTS).is_err());
        for name in ["", "../b", ".b", "a b", "b/c", &"x".repeat(65)] {
            assert!(registry.invite(&authority, name, None, INVITATION_LASTS).is_err(), "{name}");
        }
        assert_eq!(registry.invite(&authority, "b", None, INVITATION_LASTS).unwrap().1.client, 1);
    }

    #[test]
    fn what_a_node_that_is_out_had_can_be_given_again() {
        let (_dir, authority, registry) = federation();
        let enrol = |client, days| {
            let (token, _) = registry.invite(&authority, "a", Some(client), INVITATION_LASTS)?;
            registry.enrol(&authority, &token.secret, &node_request()?.1, days).map(|(node, _)| node)
        };
        let first = enrol(7, 10).unwrap();
        assert!(enrol(7, 10).is_err());
        registry.revoke("a").unwrap();
        let second = enrol(7, 10).unwrap();
        // The name now has two entries; the one that is in is the one that is shut out.
        registry.revoke("a").unwrap();
        let find = |node: &NodeEntry| registry.find(&node.fingerprint).unwrap().unwrap();
        assert!(find(&first).revoked && find(&second).revoked);
        let third = enrol(7, 10).unwrap();
        registry.write(&NodeEntry { expires: 1, ..third.clone() }).unwrap();
        assert_eq!(find(&third).is_out(), Some("this node's certificate has expired"));
        enrol(7, 10).unwrap();
    }

    #[test]
    fn a_token_stops_working_after_its_time_and_its_place_is_free_again() {
        let (_dir, authority, registry) = federation();
        let (token, invitation) = registry.invite(&authority, "a", Some(0), INVITATION_LASTS).unwrap();
        let path = registry.tokens.join(Token::name_of(&token.secret) + ".toml");
        let late = Invitation { expires: 1, ..invitation };
        write_synced(&path, to_toml(&late).unwrap().as_bytes()).unwrap();
        let error = registry.enrol(&authority, &token.secret, &node_request().unwrap().1, 10).unwrap_err();
        assert!(error.to_string().contains("has expired"), "{error}");
        assert!(registry.nodes().unwrap().is_empty());
        registry.invite(&authority, "a", Some(0), INVITATION_LASTS).unwrap();
        assert_eq!(registry.invitations().unwrap().len(), 1);
    }

    #[test]
    fn invitations_at_the_same_time_give_a_client_once() {
        let (_dir, authority, registry) = federation();
        let invite = |n: u32| registry.invite(&authority, &format!("n{n}"), None, INVITATION_LASTS).unwrap().1.client;
        let mut clients: Vec<u32> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..16).map(|n| scope.spawn(move || invite(n))).collect();
            all.into_iter().map(|a| a.join().unwrap()).collect()
        });
        clients.sort_unstable();
        assert_eq!(clients, (0..16).collect::<Vec<u32>>());
    }
}
