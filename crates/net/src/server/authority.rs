//! The server's small certificate authority.
//!
//! It can be replaced while nodes are members ([`Authority::begin_rotation`]). Until that ends, the server shows a
//! certificate of the old authority, signs nodes with the new one, and accepts nodes of both. Each node renews its
//! certificate and learns to trust the new authority, so that the old one can go.

use crate::der::Request;
use crate::error::{Error, Result};
use crate::files::{create_private_dir, lock, read_if_exists, write_private, write_synced};
use crate::identity::{alpn, certificate_from, fingerprint, provider, roots_of};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PublicKeyData, SignatureAlgorithm, SigningKey,
};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use time::{Duration, OffsetDateTime};

/// Validity of the certificates of the authority and of the server.
const AUTHORITY_DAYS: i64 = 3650;

/// Clocks differ: a certificate is valid from a day before it was made.
const CLOCK_SLACK: Duration = Duration::days(1);

/// The authority, in a folder that only its owner can read.
#[derive(Debug)]
pub struct Authority {
    /// What nodes trust.
    current: Pair,
    /// What replaces it, while nodes renew their certificates.
    next: Option<Pair>,
    /// Names the federation, whatever authority it has.
    federation: [u8; 32],
}

/// An authority's certificate and key.
#[derive(Debug)]
struct Pair {
    certificate: String,
    key: KeyPair,
}

impl Pair {
    fn new() -> Result<Self> {
        let key = KeyPair::generate().map_err(Error::identity)?;
        let certificate = Self::params().self_signed(&key).map_err(Error::identity)?;
        Ok(Self { certificate: certificate.pem(), key })
    }

    /// Every authority has the same name; its key distinguishes it.
    fn params() -> CertificateParams {
        let mut params = named(CertificateParams::default(), "fedproj federation", AUTHORITY_DAYS);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params
    }

    /// A pair from the text of its files.
    fn from_pem(certificate: String, key: &str) -> Result<Self> {
        Ok(Self { certificate, key: KeyPair::from_pem(key).map_err(Error::identity)? })
    }

    /// Writes the key first: where the certificate is, the key is too.
    fn write(&self, files: &Files) -> Result<()> {
        write_private(&files.key, &self.key.serialize_pem())?;
        write_synced(&files.certificate, self.certificate.as_bytes())
    }

    fn fingerprint(&self) -> Result<[u8; 32]> {
        Ok(*blake3::hash(&certificate_from(&self.certificate)?).as_bytes())
    }

    fn issuer(&self) -> Issuer<'_, &KeyPair> {
        Issuer::new(Self::params(), &self.key)
    }
}

/// Where a federation's folder keeps its authority.
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    /// Certificate and key of the next authority in one file, which is there whole or not at all.
    next: PathBuf,
    /// The fingerprint of the first authority, once it has been replaced.
    federation: PathBuf,
}

impl Files {
    fn of(dir: &Path) -> Self {
        let file = |name| dir.join(name);
        Self {
            certificate: file("ca.pem"),
            key: file("ca.key"),
            next: file("ca-next.pem"),
            federation: file("federation.id"),
        }
    }

    /// Makes the next authority the current one. It can be repeated from the start, whatever a crash left.
    fn replace(&self, next: &Pair) -> Result<()> {
        next.write(self)?;
        std::fs::remove_file(&self.next).map_err(Error::io("remove", &self.next))
    }
}

impl Authority {
    /// Opens the authority of a federation; creates it if there is none.
    ///
    /// # Errors
    /// If its files cannot be read or written, or others can read its folder.
    pub fn open(dir: &Path) -> Result<Self> {
        let files = Files::of(dir);
        create_private_dir(dir)?;
        // Without a lock, two first starts at the same time would each create one.
        let _lock = lock(&dir.join("registry.lock"))?;
        if !files.certificate.exists() {
            Pair::new()?.write(&files)?;
        }
        let read = |path: &Path| std::fs::read_to_string(path).map_err(Error::io("read", path));
        let key = read(&files.key)?;
        let mut next = None;
        if files.next.exists() {
            let text = read(&files.next)?;
            let (certificate, key_of_next) = text.split_at(certificate_len(&text));
            let pair = Pair::from_pem(certificate.into(), key_of_next)?;
            if pair.key.serialize_pem() == key {
                // A crash came while it replaced the current one.
                files.replace(&pair)?;
            } else {
                next = Some(pair);
            }
        }
        let current = Pair::from_pem(read(&files.certificate)?, &key)?;
        let federation = match read_if_exists(&files.federation)? {
            Some(bytes) => bytes.try_into().map_err(|_| Error::corrupt(&files.federation)("expected 32 bytes"))?,
            None => current.fingerprint()?,
        };
        Ok(Self { current, next, federation })
    }

    /// Makes a new authority that will replace the current one. No server may run.
    ///
    /// # Errors
    /// If a rotation has begun before, or a file cannot be written.
    pub fn begin_rotation(self, dir: &Path) -> Result<Self> {
        if self.next.is_some() {
            return Err(Error::config("the authority is being replaced already; `--finish` ends it"));
        }
        let next = Pair::new()?;
        let text = next.certificate.clone() + &next.key.serialize_pem();
        write_private(&Files::of(dir).next, &text)?;
        Self::open(dir)
    }

    /// Forgets the old authority. Nodes that do not trust the new one are out from then on. No server may run.
    ///
    /// # Errors
    /// If no rotation has begun, or a file cannot be written.
    pub fn finish_rotation(self, dir: &Path) -> Result<Self> {
        let next = self.next.ok_or_else(|| Error::config("the authority is not being replaced"))?;
        let files = Files::of(dir);
        write_synced(&files.federation, &self.federation)?;
        files.replace(&next)?;
        Self::open(dir)
    }

    /// The certificate of the authority that nodes trust (PEM).
    pub fn certificate(&self) -> &str {
        &self.current.certificate
    }

    /// The certificates that nodes shall trust from now on (PEM): during a rotation there are two.
    pub fn bundle(&self) -> String {
        let next = self.next.as_ref().map_or("", |next| next.certificate.as_str());
        self.current.certificate.clone() + next
    }

    /// Names the state of the bundle: a node that trusts another one renews its certificate.
    pub fn bundle_name(&self) -> String {
        fingerprint(self.bundle().as_bytes())
    }

    /// BLAKE3 of the authority's certificate: what a node pins.
    ///
    /// # Errors
    /// If the certificate cannot be read.
    pub fn fingerprint(&self) -> Result<[u8; 32]> {
        self.current.fingerprint()
    }

    /// The fingerprint of the federation's first authority. Runs are named after it.
    pub fn federation(&self) -> &[u8; 32] {
        &self.federation
    }

    /// Signs a node's request. Only the key comes from the request; the name comes from the token.
    ///
    /// # Errors
    /// If the request is malformed, or not signed by its own key.
    pub fn sign(&self, request: &[u8], name: &str, days: i64) -> Result<String> {
        let key = key_of_request(request)?;
        let mut params = named(CertificateParams::default(), name, days);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let issuer = self.next.as_ref().unwrap_or(&self.current).issuer();
        let signed = params.signed_by(&key, &issuer).map_err(Error::identity)?;
        Ok(signed.pem())
    }

    /// Signs a message with the key of the authority that nodes trust.
    pub(crate) fn sign_message(&self, message: &[u8]) -> Result<Vec<u8>> {
        self.current.key.sign(message).map_err(Error::identity)
    }

    /// TLS for the server. With `nodes_only` the handshake fails without a certificate of this authority.
    ///
    /// # Errors
    /// If a certificate cannot be made.
    pub fn server_tls(&self, names: &[String], nodes_only: bool) -> Result<Arc<ServerConfig>> {
        let (chain, key) = self.server_certificate(names)?;
        let builder = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(Error::identity)?;
        let builder = if nodes_only {
            let roots = roots_of(&self.bundle())?;
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider()).build();
            builder.with_client_cert_verifier(verifier.map_err(Error::identity)?)
        } else {
            builder.with_no_client_auth()
        };
        let mut config = builder.with_single_cert(chain, key).map_err(Error::identity)?;
        config.alpn_protocols = alpn();
        // A resumed session would not check the certificate's dates again.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Arc::new(config))
    }

    /// The server's own certificate. Each start makes a new one: its names may have changed, and nobody pins it.
    fn server_certificate(&self, names: &[String]) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
        let key = KeyPair::generate().map_err(Error::identity)?;
        let params = CertificateParams::new(names.to_vec()).map_err(Error::identity)?;
        let mut params = named(params, "fedproj server", AUTHORITY_DAYS);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let signed = params.signed_by(&key, &self.current.issuer()).map_err(Error::identity)?;
        let chain = vec![signed.der().clone(), certificate_from(&self.current.certificate)?];
        let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(Error::identity)?;
        Ok((chain, key))
    }
}

/// Where the certificate ends in a text that has the key behind it.
fn certificate_len(pem: &str) -> usize {
    pem.find("-----BEGIN PRIVATE KEY").unwrap_or(pem.len())
}

/// The public key of a certificate signing request (DER), which that key must have signed.
///
/// # Errors
/// If the request is malformed or the signature is wrong.
pub fn key_of_request(request: &[u8]) -> Result<NodeKey> {
    let request = Request::read(request).ok_or_else(|| Error::protocol("not a certificate request of a node"))?;
    let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, request.key);
    let is_signed = key.verify(request.signed, request.signature).is_ok();
    is_signed
        .then(|| NodeKey(request.key.to_vec()))
        .ok_or_else(|| Error::protocol("certificate request: its key has not signed it"))
}

/// A node's public key, on the curve P-256.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeKey(Vec<u8>);

impl PublicKeyData for NodeKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

fn named(mut params: CertificateParams, name: &str, days: i64) -> CertificateParams {
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    let now = OffsetDateTime::now_utc();
    (params.not_before, params.not_after) = (now - CLOCK_SLACK, now + Duration::days(days));
    params
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::node_request;

    #[test]
    fn only_a_request_signed_by_its_own_key_is_signed() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("federation");
        let authority = Authority::open(&dir).unwrap();
        let (_, request) = node_request().unwrap();
        authority.sign(&request, "site-a", 10).unwrap();
        // The subject, the key, and the end of the signature; the bytes between them are encoding.
        for at in (6..100).chain(request.len() - 16..request.len()) {
            let mut damaged = request.clone();
            damaged[at] ^= 1;
            assert!(authority.sign(&damaged, "site-a", 10).is_err(), "byte {at}");
        }
        assert_eq!(Authority::open(&dir).unwrap().certificate(), authority.certificate());
    }

    #[test]
    fn first_starts_at_the_same_time_agree_on_one_authority() {
        for _ in 0..20 {
            let dir = tempfile::tempdir().unwrap();
            let (dir, start) = (dir.path().join("federation"), std::sync::Barrier::new(4));
            let certificates: Vec<String> = std::thread::scope(|scope| {
                let open = || {
                    start.wait();
                    Authority::open(&dir).unwrap().certificate().to_owned()
                };
                let all: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
                all.into_iter().map(|a| a.join().unwrap()).collect()
            });
            assert!(certificates.iter().all(|c| *c == certificates[0]));
            // The key belongs to the certificate.
            Authority::open(&dir).unwrap().server_tls(&["localhost".into()], true).unwrap();
        }
    }

    #[test]
    fn a_rotation_survives_a_crash_and_keeps_the_federations_name() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("federation");
        let open = || Authority::open(&dir).unwrap();
        let first = open();
        let (name, pinned) = (*first.federation(), first.fingerprint().unwrap());
        assert!(open().finish_rotation(&dir).is_err());
        let during = open().begin_rotation(&dir).unwrap();
        assert!(open().begin_rotation(&dir).is_err());
        // Nodes still know the old one; they shall trust both.
        assert_eq!((during.federation(), during.fingerprint().unwrap()), (&name, pinned));
        assert_eq!(during.bundle().matches("BEGIN CERTIFICATE").count(), 2);
        assert!(!during.bundle().contains("PRIVATE") && during.bundle_name() != first.bundle_name());
        during.server_tls(&["localhost".into()], true).unwrap();
        // Killed after the new key was written, and before the new certificate was.
        let next = std::fs::read_to_string(dir.join("ca-next.pem")).unwrap();
        std::fs::write(dir.join("federation.id"), name).unwrap();
        let (certificate, key) = next.split_at(certificate_len(&next));
        std::fs::write(dir.join("ca.key"), key).unwrap();
        let after = open();
        assert_eq!((after.federation(), after.bundle().as_str()), (&name, certificate));
        assert_ne!(after.fingerprint().unwrap(), pinned);
        after.server_tls(&["localhost".into()], true).unwrap();
        assert!(!dir.join("ca-next.pem").exists());
        // A second one.
        let again = open().begin_rotation(&dir).unwrap().finish_rotation(&dir).unwrap();
        assert_eq!(again.federation(), &name);
    }

    #[cfg(unix)]
    #[test]
    fn keys_are_for_their_owner_only() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("federation");
        Authority::open(&dir).unwrap();
        let mode = std::fs::metadata(dir.join("ca.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
