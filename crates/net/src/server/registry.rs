//! The members of the federation: one small file per node and per token, in the server's folder.
//!
//! With files, `fedproj nodes` works beside a running server and without one; a lock orders changes. A revoked or expired node
//! is out: another node can get its name and its client.

use super::Authority;
use crate::error::{Error, Result};
use crate::files::{self, create_dir, read_if_exists, read_toml, remove_if_exists, sync_dir, write_toml};
use crate::identity::{Token, certificate_from, expiry_of, fingerprint, has_passed, seconds_since_1970};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long an invitation is valid by default.
pub const INVITATION_LASTS: Duration = Duration::from_hours(24);

/// A node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeEntry {
    /// Its name.
    pub name: String,
    /// Its client.
    pub client: u32,
    /// The fingerprint of its certificate.
    pub fingerprint: String,
    /// Whether it has been revoked.
    pub revoked: bool,
    /// When its certificate expires, in seconds since 1970; 0 in entries of earlier versions.
    #[serde(default)]
    pub expires: u64,
    /// The authorities that it trusts, see [`Authority::bundle_name`]; empty in entries of earlier versions.
    #[serde(default)]
    pub trusts: String,
    /// The fingerprint of the certificate that it replaces, until it is used for the first time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces: Option<String>,
}

impl NodeEntry {
    /// Whether it is time for a new certificate: of its `days` a third is left, or the authorities have changed.
    pub fn is_due(&self, authority: &Authority, days: i64) -> bool {
        let third_s = u64::try_from(days).unwrap_or(0) * 24 * 3600 / 3;
        has_passed(self.expires.saturating_sub(third_s)) || self.trusts != authority.bundle_name()
    }

    /// Whether the certificate has expired. An open connection must not outlive it.
    pub fn is_expired(&self) -> bool {
        has_passed(self.expires)
    }

    /// Why it is no longer a member, if so.
    pub fn is_out(&self) -> Option<&'static str> {
        match (self.revoked, self.is_expired()) {
            (true, _) => Some("this node's certificate has been revoked"),
            (_, true) => Some("this node's certificate has expired"),
            _ => None,
        }
    }
}

/// An unused invitation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Invitation {
    /// The node's future name.
    pub name: String,
    /// The node's future client.
    pub client: u32,
    /// When the token expires, in seconds since 1970; 0, never, in invitations of earlier versions.
    #[serde(default)]
    pub expires: u64,
}

impl Invitation {
    /// Whether the token has expired.
    pub fn is_expired(&self) -> bool {
        has_passed(self.expires)
    }
}

/// A used token.
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
    /// If its folders cannot be created.
    pub fn open(dir: &Path) -> Result<Self> {
        let registry = Self { nodes: dir.join("nodes"), tokens: dir.join("tokens"), lock: dir.join("registry.lock") };
        for folder in [&registry.nodes, &registry.tokens] {
            create_dir(folder)?;
        }
        Ok(registry)
    }

    /// Held during a change: two changes at the same time could both find a client free.
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

    /// The node with this certificate, if it is known. This reads one file, so every request can check it and a revoked node
    /// is out at once.
    ///
    /// # Errors
    /// If its file cannot be read.
    pub fn find(&self, fingerprint: &str) -> Result<Option<NodeEntry>> {
        read_toml(&self.nodes.join(format!("{fingerprint}.toml")))
    }

    /// The node with this certificate, if it is a member.
    ///
    /// # Errors
    /// [`Error::NotAMember`] if it is not; or if its file cannot be read.
    pub fn admit(&self, fingerprint: &str) -> Result<NodeEntry> {
        let node = self.find(fingerprint)?.ok_or(Error::NotAMember("this certificate is not known here"))?;
        node.is_out().map_or(Ok(node), |reason| Err(Error::NotAMember(reason)))
    }

    /// Invites a node: makes a token that works once and expires. Without a number the node gets the first free client.
    ///
    /// # Errors
    /// If the name or client is taken, or the token cannot be written.
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
            return Err(Error::config(format!("a node or an invitation named `{name}` already exists")));
        }
        let client = match client {
            Some(client) if !is_free(client) => {
                return Err(Error::config(format!("client {client} already has a node")));
            }
            Some(client) => client,
            None => (0..u32::MAX).find(|&c| is_free(c)).unwrap_or(u32::MAX),
        };
        let token = Token::new(authority.fingerprint()?)?;
        let expires = seconds_since_1970().saturating_add(lasts.as_secs());
        let invitation = Invitation { name: name.into(), client, expires };
        write_toml(&self.token_path(&token.secret), &invitation)?;
        Ok((token, invitation))
    }

    /// Whether there is an open invitation with this secret.
    pub(crate) fn is_invited(&self, secret: &[u8]) -> bool {
        self.token_path(secret).exists()
    }

    fn token_path(&self, secret: &[u8]) -> PathBuf {
        self.tokens.join(Token::name_of(secret) + ".toml")
    }

    /// Uses a token: signs the request and adds the node. A second use fails, even at the same time. Only the very same
    /// request is answered again, since the first answer may have been lost.
    ///
    /// # Errors
    /// If the token is unknown, used or expired, or the request is malformed.
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
        let path = self.token_path(secret);
        let spent_path = path.with_extension("spent");
        let request_hash = blake3::hash(request).to_hex().to_string();
        let Some(invitation) = read_toml::<Invitation>(&path)? else {
            // After a crash the file may still contain the invitation, which is no `Spent`.
            let spent = read_if_exists(&spent_path)?.and_then(|bytes| toml::from_slice::<Spent>(&bytes).ok());
            let same = spent.filter(|s| s.request_hash == request_hash).ok_or_else(unknown)?;
            let node = self.find(&fingerprint(&certificate_from(&same.certificate)?))?;
            let node = node.filter(|node| node.is_out().is_none()).ok_or_else(unknown)?;
            return Ok((node, same.certificate));
        };
        if invitation.is_expired() {
            return Err(Error::protocol("this token has expired; ask the server's owner for a new one"));
        }
        // A request that cannot be signed does not use up the token.
        let certificate = authority.sign(request, &invitation.name, days)?;
        std::fs::rename(&path, &spent_path).map_err(|_| unknown())?;
        sync_dir(&self.tokens)?;
        let node = self.add(authority, &invitation.name, invitation.client, &certificate, None)?;
        let spent = Spent { request_hash, certificate };
        write_toml(&spent_path, &spent)?;
        Ok((node, spent.certificate))
    }

    /// Adds a node with a certificate of this authority.
    fn add(
        &self,
        authority: &Authority,
        name: &str,
        client: u32,
        certificate: &str,
        replaces: Option<String>,
    ) -> Result<NodeEntry> {
        let der = certificate_from(certificate)?;
        let (fingerprint, expires) = (fingerprint(&der), expiry_of(&der)?);
        let trusts = authority.bundle_name();
        let node = NodeEntry { name: name.into(), client, fingerprint, revoked: false, expires, trusts, replaces };
        self.write(&node)?;
        Ok(node)
    }

    /// Renews the certificate of a member, once. The old one works until the new one is used. The very same request is
    /// answered again, since the first answer may have been lost.
    ///
    /// # Errors
    /// If the certificate is not due, has been renewed by another request, or the request is malformed.
    pub fn renew(
        &self,
        authority: &Authority,
        node: &NodeEntry,
        request: &[u8],
        days: i64,
    ) -> Result<(NodeEntry, String)> {
        let _lock = self.lock()?;
        let path = self.nodes.join(format!("{}.renewed", node.fingerprint));
        let request_hash = blake3::hash(request).to_hex().to_string();
        if let Some(Spent { request_hash: of, certificate }) = read_toml(&path)? {
            let known = self.find(&fingerprint(&certificate_from(&certificate)?))?;
            let same = known.filter(|_| of == request_hash);
            let same = same.ok_or_else(|| Error::protocol("this certificate has been renewed by another request"))?;
            return Ok((same, certificate));
        }
        if !node.is_due(authority, days) {
            return Err(Error::protocol("this certificate need not be renewed yet"));
        }
        let certificate = authority.sign(request, &node.name, days)?;
        let renewed = self.add(authority, &node.name, node.client, &certificate, Some(node.fingerprint.clone()))?;
        let spent = Spent { request_hash, certificate };
        write_toml(&path, &spent)?;
        Ok((renewed, spent.certificate))
    }

    /// Removes the certificate that this node's has replaced: the node uses the new one.
    ///
    /// # Errors
    /// If the disk fails.
    pub fn retire_replaced(&self, node: &NodeEntry) -> Result<()> {
        let Some(old) = &node.replaces else { return Ok(()) };
        let _lock = self.lock()?;
        for name in [format!("{old}.toml"), format!("{old}.renewed")] {
            remove_if_exists(&self.nodes.join(name))?;
        }
        sync_dir(&self.nodes)?;
        self.write(&NodeEntry { replaces: None, ..node.clone() })
    }

    /// Revokes a node, from its next request on, and withdraws open invitations of that name.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn revoke(&self, name: &str) -> Result<()> {
        let _lock = self.lock()?;
        // More than one if the name was reused.
        let nodes: Vec<NodeEntry> = self.nodes()?.into_iter().filter(|node| node.name == name).collect();
        for node in nodes.iter().filter(|node| !node.revoked) {
            self.write(&NodeEntry { revoked: true, ..node.clone() })?;
        }
        if self.withdraw(|invitation| invitation.name == name)? || !nodes.is_empty() {
            return Ok(());
        }
        Err(Error::config(format!("there is no node named `{name}`; `fedproj nodes` lists them")))
    }

    /// Removes invitations; returns whether there were any.
    fn withdraw(&self, of: impl Fn(&Invitation) -> bool) -> Result<bool> {
        let mut found = false;
        for path in entries(&self.tokens)? {
            if read_toml::<Invitation>(&path)?.is_some_and(|invitation| of(&invitation)) {
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
        write_toml(&self.nodes.join(format!("{}.toml", node.fingerprint)), node)
    }
}

/// Names appear in certificates and log lines.
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
    // A token may be used, and its file renamed, while the folder is read.
    entries(dir)?.iter().filter_map(|path| read_toml(path).transpose()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::node_request;

    fn federation() -> (tempfile::TempDir, Authority, Registry) {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("federation");
        let (authority, registry) = (Authority::open(&folder).unwrap(), Registry::open(&folder).unwrap());
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
    fn a_bad_request_does_not_use_up_the_token() {
        let (_dir, authority, registry) = federation();
        let (token, _) = registry.invite(&authority, "a", Some(3), INVITATION_LASTS).unwrap();
        assert!(registry.enrol(&authority, &token.secret, b"nonsense", 10).is_err());
        assert!(registry.enrol(&authority, &[0; 32], &node_request().unwrap().1, 10).is_err());
        let request = node_request().unwrap().1;
        let (node, certificate) = registry.enrol(&authority, &token.secret, &request, 10).unwrap();
        // The answer was lost: the same node gets the same certificate again; a thief does not.
        assert_eq!(registry.enrol(&authority, &token.secret, &request, 10).unwrap().1, certificate);
        assert!(registry.enrol(&authority, &token.secret, &node_request().unwrap().1, 10).is_err());
        assert_eq!((node.client, node.revoked), (3, false));
        registry.revoke("a").unwrap();
        assert!(registry.find(&node.fingerprint).unwrap().is_some_and(|n| n.revoked));
        assert!(registry.find("other").unwrap().is_none());
    }

    #[test]
    fn names_and_clients_are_unique_and_names_are_plain() {
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
    fn name_and_client_of_a_node_that_is_out_are_free_again() {
        let (_dir, authority, registry) = federation();
        let enrol = |client, days| {
            let (token, _) = registry.invite(&authority, "a", Some(client), INVITATION_LASTS)?;
            registry.enrol(&authority, &token.secret, &node_request()?.1, days).map(|(node, _)| node)
        };
        let first = enrol(7, 10).unwrap();
        assert!(enrol(7, 10).is_err());
        registry.revoke("a").unwrap();
        let second = enrol(7, 10).unwrap();
        // The name now has two entries; revoking affects the member.
        registry.revoke("a").unwrap();
        let find = |node: &NodeEntry| registry.find(&node.fingerprint).unwrap().unwrap();
        assert!(find(&first).revoked && find(&second).revoked);
        let third = enrol(7, 10).unwrap();
        registry.write(&NodeEntry { expires: 1, ..third.clone() }).unwrap();
        assert_eq!(find(&third).is_out(), Some("this node's certificate has expired"));
        enrol(7, 10).unwrap();
    }

    #[test]
    fn a_certificate_is_renewed_once_and_when_it_is_due() {
        let (dir, authority, registry) = federation();
        let (token, _) = registry.invite(&authority, "a", Some(4), INVITATION_LASTS).unwrap();
        let (node, _) = registry.enrol(&authority, &token.secret, &node_request().unwrap().1, 30).unwrap();
        let request = node_request().unwrap().1;
        assert!(registry.renew(&authority, &node, &request, 30).unwrap_err().to_string().contains("not be renewed"));
        // Nine of thirty days are left.
        let due = NodeEntry { expires: seconds_since_1970() + 9 * 24 * 3600, ..node.clone() };
        let (new, certificate) = registry.renew(&authority, &due, &request, 30).unwrap();
        assert_eq!((new.client, new.name.as_str(), new.replaces.as_ref()), (4, "a", Some(&node.fingerprint)));
        assert!(!new.is_due(&authority, 30));
        // The answer was lost; a thief of the old key gets nothing more.
        assert_eq!(registry.renew(&authority, &due, &request, 30).unwrap().1, certificate);
        assert!(registry.renew(&authority, &due, &node_request().unwrap().1, 30).is_err());
        registry.admit(&node.fingerprint).unwrap();
        registry.retire_replaced(&new).unwrap();
        assert!(registry.admit(&node.fingerprint).is_err());
        assert_eq!(registry.nodes().unwrap(), [NodeEntry { replaces: None, ..new.clone() }]);
        // Another authority is a reason too.
        let next = authority.begin_rotation(&dir.path().join("federation")).unwrap();
        assert!(new.is_due(&next, 30));
    }

    #[test]
    fn a_token_expires_and_its_place_is_free_again() {
        let (_dir, authority, registry) = federation();
        let (token, invitation) = registry.invite(&authority, "a", Some(0), INVITATION_LASTS).unwrap();
        let path = registry.token_path(&token.secret);
        let late = Invitation { expires: 1, ..invitation };
        write_toml(&path, &late).unwrap();
        let error = registry.enrol(&authority, &token.secret, &node_request().unwrap().1, 10).unwrap_err();
        assert!(error.to_string().contains("has expired"), "{error}");
        assert!(registry.nodes().unwrap().is_empty());
        registry.invite(&authority, "a", Some(0), INVITATION_LASTS).unwrap();
        assert_eq!(registry.invitations().unwrap().len(), 1);
    }

    #[test]
    fn invitations_at_the_same_time_get_different_clients() {
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
