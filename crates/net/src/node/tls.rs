//! The node's side of TLS: its key, and how it recognises its server.

use crate::error::{Error, Result};
use crate::identity::{alpn, certificate_from, provider, roots_of};
use rcgen::{CertificateParams, KeyPair};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use std::sync::Arc;

/// A new key of the node and the request to certify it.
///
/// # Errors
/// If the system has no randomness.
pub fn node_request() -> Result<(String, Vec<u8>)> {
    let key = KeyPair::generate().map_err(Error::identity)?;
    let request = CertificateParams::default().serialize_request(&key).map_err(Error::identity)?;
    Ok((key.serialize_pem(), request.der().to_vec()))
}

/// TLS for a node with its certificate. It trusts only its federation's authority, or two while one replaces the other.
///
/// # Errors
/// If a certificate cannot be used.
pub fn node_tls(authority: &str, certificate: &str, key: &str) -> Result<ClientConfig> {
    let roots = roots_of(authority)?;
    let chain = vec![certificate_from(certificate)?];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(Error::identity)?;
    let config = client_builder()?.with_root_certificates(roots).with_client_auth_cert(chain, key);
    let mut config = config.map_err(Error::identity)?;
    config.alpn_protocols = alpn();
    Ok(config)
}

/// TLS for enrolment: the server's chain must end at the authority that the token names.
///
/// # Errors
/// Never with the built-in provider.
pub fn enrol_tls(authority: [u8; 32]) -> Result<ClientConfig> {
    let verifier = Arc::new(Pinned { authority });
    let mut config = client_builder()?.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
    config.alpn_protocols = alpn();
    Ok(config)
}

fn client_builder() -> Result<rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier>> {
    ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(Error::identity)
}

/// Checks the fingerprint of the server's authority, then the server's certificate against that authority.
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
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
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
        Err(rustls::Error::General("TLS 1.2 is not supported".into()))
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
