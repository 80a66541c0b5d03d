//! What both sides know of certificates: enrolment tokens, fingerprints, expiry, and the settings of TLS 1.3.

use crate::der::Certificate;
use crate::error::{Error, Result};
use crate::wire::{Blob, hex};
use rustls::RootCertStore;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::sync::Arc;

/// What a node gets to enrol. It names the authority, so that the node knows its server before it has a certificate, and
/// carries a secret that works once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// BLAKE3 of the authority's certificate.
    pub authority: [u8; 32],
    /// The server knows only its hash.
    pub secret: [u8; 32],
}

impl Token {
    const PREFIX: &str = "fedproj1";

    /// A new token.
    ///
    /// # Errors
    /// If the system has no randomness.
    pub fn new(authority: [u8; 32]) -> Result<Self> {
        Ok(Self { authority, secret: random()? })
    }

    /// Reads a token as users paste it.
    ///
    /// # Errors
    /// If it is not one.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = || Error::config("not a token: it begins with `fedproj1-`; `fedproj nodes invite NAME` makes one");
        let parts: Vec<&str> = text.trim().split('-').collect();
        let [Self::PREFIX, authority, secret] = parts[..] else { return Err(bad()) };
        let bytes = |hex: &str| Blob::parse_hex(hex).and_then(|b| b.try_into().ok()).ok_or_else(bad);
        Ok(Self { authority: bytes(authority)?, secret: bytes(secret)? })
    }

    /// The name under which the server stores the token. It does not reveal the secret.
    pub fn name_of(secret: &[u8]) -> String {
        hex(&blake3::derive_key("fedproj enrolment token 1", secret)[..16])
    }
}

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}-{}", Self::PREFIX, hex(&self.authority), hex(&self.secret))
    }
}

/// 32 bytes of the system's randomness.
pub(crate) fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    provider().secure_random.fill(&mut bytes).map_err(|_| Error::identity("no randomness from the system"))?;
    Ok(bytes)
}

/// BLAKE3 of a certificate as text: the registry's key for a node.
pub fn fingerprint(certificate: &[u8]) -> String {
    blake3::hash(certificate).to_hex().to_string()
}

/// When a certificate expires, in seconds since 1970.
///
/// # Errors
/// If it cannot be read.
pub fn expiry_of(certificate: &[u8]) -> Result<u64> {
    let certificate = Certificate::read(certificate).ok_or_else(|| Error::identity("it cannot be read"))?;
    Ok(u64::try_from(certificate.expires).unwrap_or(0))
}

/// Whether a moment, in seconds since 1970, has passed; 0 never has.
pub(crate) fn has_passed(moment: u64) -> bool {
    moment > 0 && seconds_since_1970() > moment
}

pub(crate) fn seconds_since_1970() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// A PEM certificate as bytes.
///
/// # Errors
/// If it is not one.
pub fn certificate_from(pem: &str) -> Result<CertificateDer<'static>> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(Error::identity)
}

/// The roots of trust in a text with one or more PEM certificates.
pub(crate) fn roots_of(pem: &str) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        roots.add(certificate.map_err(Error::identity)?).map_err(Error::identity)?;
    }
    Ok(roots)
}

/// HTTP/2 where the path allows, otherwise HTTP/1.1.
pub(crate) fn alpn() -> Vec<Vec<u8>> {
    vec![b"h2".to_vec(), b"http/1.1".to_vec()]
}

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Who runs this process, for the journal: the login name, and with `sudo` who called it. Whoever may write the journal's
/// file can also write another name; this is a record among people who trust each other.
#[cfg(unix)]
pub fn operator() -> String {
    let user = nix::unistd::getuid();
    let known = nix::unistd::User::from_uid(user).ok().flatten();
    let login = known.map_or_else(|| format!("user {user}"), |known| known.name);
    match std::env::var("SUDO_USER") {
        Ok(caller) if user.is_root() => format!("{caller} as {login}"),
        _ => login,
    }
}

/// Who runs this process, for the journal.
#[cfg(not(unix))]
pub fn operator() -> String {
    std::env::var("USERNAME").unwrap_or_else(|_| "unknown".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_reads_back_and_nothing_else_is_a_token() {
        let token = Token::new([7; 32]).unwrap();
        let text = token.to_string();
        assert_eq!(Token::parse(&format!(" {text}\n")).unwrap(), token);
        for bad in ["", "fedproj1", &text[..text.len() - 1], &text.replace("fedproj1", "fedproj2"), &format!("{text}0")]
        {
            assert!(Token::parse(bad).is_err(), "{bad}");
        }
        assert_ne!(Token::new([7; 32]).unwrap(), token);
    }
}
