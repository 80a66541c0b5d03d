//! Who is who: the server's certificate authority, node certificates, enrolment tokens, and TLS 1.3 in both directions.

use crate::error::{Error, Result};
use crate::files::{create_dir, lock, write_private, write_synced};
use crate::wire::blob::hex;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use time::{Duration, OffsetDateTime};

/// Days that the authority and the server's own certificate last.
const AUTHORITY_DAYS: i64 = 3650;

/// Clocks differ: a certificate is valid from a day before it was made.
const CLOCK_SLACK: Duration = Duration::days(1);

/// The server's small certificate authority, in a folder only its owner can read.
#[derive(Debug)]
pub struct Authority {
    dir: PathBuf,
    certificate: String,
    key: KeyPair,
}

impl Authority {
    /// The authority of a federation, made where there is none.
    ///
    /// # Errors
    /// If its files cannot be read or written.
    pub fn open(dir: &Path) -> Result<Self> {
        let (certificate_path, key_path) = (dir.join("ca.pem"), dir.join("ca.key"));
        create_dir(dir)?;
        // Two first starts at the same time would each make one.
        let _lock = lock(&dir.join("registry.lock"))?;
        if !certificate_path.exists() {
            let key = KeyPair::generate().map_err(Error::identity)?;
            let mut params = named("fedproj federation", AUTHORITY_DAYS);
            params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
            let certificate = params.self_signed(&key).map_err(Error::identity)?;
            write_private(&key_path, &key.serialize_pem())?;
            write_synced(&certificate_path, certificate.pem().as_bytes())?;
        }
        let key = KeyPair::from_pem(&read(&key_path)?).map_err(Error::identity)?;
        Ok(Self { dir: dir.into(), certificate: read(&certificate_path)?, key })
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

    /// Signs a node's request: only the key is taken from it, the name is the one that the token carries.
    ///
    /// # Errors
    /// If the request is not one, or not signed by its own key.
    pub fn sign(&self, request: &[u8], name: &str, days: i64) -> Result<String> {
        let key = key_of_request(request)?;
        let mut params = named(name, days);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let signed = params.signed_by(&key, &self.issuer()?).map_err(Error::identity)?;
        Ok(signed.pem())
    }

    /// TLS for the server. With `nodes_only` the handshake fails for whoever has no certificate of this authority.
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
            let verifier =
                rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider()).build();
            builder.with_client_cert_verifier(verifier.map_err(Error::identity)?)
        } else {
            builder.with_no_client_auth()
        };
        let mut config = builder.with_single_cert(chain, key).map_err(Error::identity)?;
        config.alpn_protocols = alpn();
        // A resumed session would not look at the certificate's dates again.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        Ok(Arc::new(config))
    }

    /// The server's own certificate, made anew at each start: its names may have changed, and nobody pins it.
    fn server_certificate(&self, names: &[String]) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
        let key = KeyPair::generate().map_err(Error::identity)?;
        let mut params = CertificateParams::new(names.to_vec()).map_err(Error::identity)?;
        let base = named("fedproj server", AUTHORITY_DAYS);
        (params.not_before, params.not_after) = (base.not_before, base.not_after);
        params.distinguished_name = base.distinguished_name;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let signed = params.signed_by(&key, &self.issuer()?).map_err(Error::identity)?;
        let chain = vec![signed.der().clone(), certificate_from(&self.certificate)?];
        let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(Error::identity)?;
        Ok((chain, key))
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// What a node is given to enrol: it names the authority, so that the node knows its server before it has a certificate,
/// and carries a secret that works once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// See [`Authority::fingerprint`].
    pub authority: [u8; 32],
    /// What the server knows by its hash only.
    pub secret: [u8; 32],
}

impl Token {
    const PREFIX: &str = "fedproj1";

    /// A new token.
    ///
    /// # Errors
    /// If the system has no randomness.
    pub fn new(authority: [u8; 32]) -> Result<Self> {
        let mut secret = [0; 32];
        provider().secure_random.fill(&mut secret).map_err(|_| Error::identity("no randomness from the system"))?;
        Ok(Self { authority, secret })
    }

    /// Reads a token as users paste it.
    ///
    /// # Errors
    /// If it is not one.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = || Error::config("not a token: it begins with `fedproj1-`; `fedproj nodes invite NAME` makes one");
        let parts: Vec<&str> = text.trim().split('-').collect();
        let [Self::PREFIX, authority, secret] = parts[..] else { return Err(bad()) };
        let bytes = |hex: &str| -> Result<[u8; 32]> {
            crate::wire::message::Blob::parse_hex(hex).and_then(|b| b.try_into().ok()).ok_or_else(bad)
        };
        Ok(Self { authority: bytes(authority)?, secret: bytes(secret)? })
    }

    /// The name under which the server keeps it: not the secret itself.
    pub fn name_of(secret: &[u8]) -> String {
        hex(&blake3::derive_key("fedproj enrolment token 1", secret)[..16])
    }
}

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}-{}", Self::PREFIX, hex(&self.authority), hex(&self.secret))
    }
}

/// The public key of a certificate signing request (DER) that is signed by that key.
///
/// # Errors
/// If it is not one.
pub fn key_of_request(request: &[u8]) -> Result<rcgen::PublicKey> {
    let request = CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(request));
    request.map(|r| r.public_key).map_err(|e| Error::protocol(format!("certificate request: {e}")))
}

/// A key of the node's own and the request to certify it.
///
/// # Errors
/// If the system has no randomness.
pub fn node_request() -> Result<(String, Vec<u8>)> {
    let key = KeyPair::generate().map_err(Error::identity)?;
    let request = CertificateParams::default().serialize_request(&key).map_err(Error::identity)?;
    Ok((key.serialize_pem(), request.der().to_vec()))
}

/// TLS for a node with its certificate; it trusts its federation's authority and nobody else.
///
/// # Errors
/// If a certificate cannot be used.
pub fn node_tls(authority: &str, certificate: &str, key: &str) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(certificate_from(authority)?).map_err(Error::identity)?;
    let chain = vec![certificate_from(certificate)?];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(Error::identity)?;
    let config = client_builder()?.with_root_certificates(roots).with_client_auth_cert(chain, key);
    let mut config = config.map_err(Error::identity)?;
    config.alpn_protocols = alpn();
    Ok(config)
}

/// TLS for enrolment: the server must show a chain that ends at the authority whose fingerprint the token carries.
///
/// # Errors
/// Never with the provider built in.
pub fn enrol_tls(authority: [u8; 32]) -> Result<ClientConfig> {
    let verifier = Arc::new(Pinned { authority });
    let mut config = client_builder()?.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
    config.alpn_protocols = alpn();
    Ok(config)
}

/// HTTP/2 where the path allows, else HTTP/1.1.
fn alpn() -> Vec<Vec<u8>> {
    vec![b"h2".to_vec(), b"http/1.1".to_vec()]
}

fn client_builder() -> Result<rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier>> {
    ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(Error::identity)
}

/// Checks a server against a fingerprint of its authority, then as usual against that authority.
#[derive(Debug)]
struct Pinned {
    authority: [u8; 32],
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        let unknown = rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
        let pinned = intermediates.iter().find(|c| *blake3::hash(c).as_bytes() == self.authority);
        let mut roots = RootCertStore::empty();
        roots.add(pinned.ok_or(unknown)?.clone().into_owned())?;
        let verifier = rustls::client::WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
            .build()
            .map_err(|e| rustls::Error::General(e.to_string()))?;
        verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not spoken here".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &provider().signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}

/// BLAKE3 of a certificate, as text: how the registry knows a node.
pub fn fingerprint(certificate: &[u8]) -> String {
    blake3::hash(certificate).to_hex().to_string()
}

/// When a certificate ends, in seconds since 1970.
///
/// # Errors
/// If it cannot be read.
pub fn end_of(certificate: &[u8]) -> Result<u64> {
    let (_, certificate) = x509_parser::parse_x509_certificate(certificate).map_err(Error::identity)?;
    Ok(u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0))
}

/// A PEM certificate as bytes.
///
/// # Errors
/// If it is not one.
pub fn certificate_from(pem: &str) -> Result<CertificateDer<'static>> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(Error::identity)
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(Error::io("read", path))
}

fn named(name: &str, days: i64) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    let now = OffsetDateTime::now_utc();
    (params.not_before, params.not_after) = (now - CLOCK_SLACK, now + Duration::days(days));
    params
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_as_it_is_written_and_nothing_else_is() {
        let token = Token::new([7; 32]).unwrap();
        let text = token.to_string();
        assert_eq!(Token::parse(&format!(" {text}\n")).unwrap(), token);
        for bad in ["", "fedproj1", &text[..text.len() - 1], &text.replace("fedproj1", "fedproj2"), &format!("{text}0")]
        {
            assert!(Token::parse(bad).is_err(), "{bad}");
        }
        assert_ne!(Token::new([7; 32]).unwrap(), token);
    }

    #[test]
    fn only_a_request_that_is_signed_by_its_key_is_signed() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let (_, request) = node_request().unwrap();
        authority.sign(&request, "site-a", 10).unwrap();
        // The subject and the key, and the end of the signature; in between stands how it is written down.
        for at in (6..100).chain(request.len() - 16..request.len()) {
            let mut damaged = request.clone();
            damaged[at] ^= 1;
            assert!(authority.sign(&damaged, "site-a", 10).is_err(), "byte {at}");
        }
        assert_eq!(Authority::open(dir.path()).unwrap().certificate(), authority.certificate());
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
            // And its key is the certificate's.
            Authority::open(&dir).unwrap().server_tls(&["localhost".into()], true).unwrap();
        }
    }

    #[cfg(unix)]
    #[test]
    fn keys_are_for_their_owner_only() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        Authority::open(dir.path()).unwrap();
        let mode = std::fs::metadata(dir.path().join("ca.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
