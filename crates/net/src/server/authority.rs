//! The server's small certificate authority.

use crate::error::{Error, Result};
use crate::files::{create_private_dir, lock, write_private, write_synced};
use crate::identity::{alpn, certificate_from, provider};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use std::path::Path;
use std::sync::Arc;
use time::{Duration, OffsetDateTime};

/// Validity of the certificates of the authority and of the server.
const AUTHORITY_DAYS: i64 = 3650;

/// Clocks differ: a certificate is valid from a day before it was made.
const CLOCK_SLACK: Duration = Duration::days(1);

/// The authority, in a folder that only its owner can read.
#[derive(Debug)]
pub struct Authority {
    certificate: String,
    key: KeyPair,
}

impl Authority {
    /// Opens the authority of a federation; creates it if there is none.
    ///
    /// # Errors
    /// If its files cannot be read or written, or others can read its folder.
    pub fn open(dir: &Path) -> Result<Self> {
        let (certificate_path, key_path) = (dir.join("ca.pem"), dir.join("ca.key"));
        create_private_dir(dir)?;
        // Without a lock, two first starts at the same time would each create one.
        let _lock = lock(&dir.join("registry.lock"))?;
        if !certificate_path.exists() {
            let key = KeyPair::generate().map_err(Error::identity)?;
            let mut params = named(CertificateParams::default(), "fedproj federation", AUTHORITY_DAYS);
            params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
            let certificate = params.self_signed(&key).map_err(Error::identity)?;
            write_private(&key_path, &key.serialize_pem())?;
            write_synced(&certificate_path, certificate.pem().as_bytes())?;
        }
        let read = |path: &Path| std::fs::read_to_string(path).map_err(Error::io("read", path));
        let key = KeyPair::from_pem(&read(&key_path)?).map_err(Error::identity)?;
        Ok(Self { certificate: read(&certificate_path)?, key })
    }

    /// The authority's certificate (PEM).
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// BLAKE3 of the authority's certificate: what a node pins.
    ///
    /// # Errors
    /// If the certificate cannot be read.
    pub fn fingerprint(&self) -> Result<[u8; 32]> {
        Ok(*blake3::hash(&certificate_from(&self.certificate)?).as_bytes())
    }

    fn issuer(&self) -> Result<Issuer<'_, &KeyPair>> {
        Issuer::from_ca_cert_pem(&self.certificate, &self.key).map_err(Error::identity)
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
        let signed = params.signed_by(&key, &self.issuer()?).map_err(Error::identity)?;
        Ok(signed.pem())
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
            let mut roots = RootCertStore::empty();
            roots.add(certificate_from(&self.certificate)?).map_err(Error::identity)?;
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
        let signed = params.signed_by(&key, &self.issuer()?).map_err(Error::identity)?;
        let chain = vec![signed.der().clone(), certificate_from(&self.certificate)?];
        let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(Error::identity)?;
        Ok((chain, key))
    }
}

/// The public key of a certificate signing request (DER), which that key must have signed.
///
/// # Errors
/// If the request is malformed or the signature is wrong.
pub fn key_of_request(request: &[u8]) -> Result<rcgen::PublicKey> {
    let request = CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(request));
    request.map(|r| r.public_key).map_err(|e| Error::protocol(format!("certificate request: {e}")))
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
