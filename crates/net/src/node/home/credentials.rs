//! A node's key and certificate: enrolment, identity and renewal.

use super::Home;
use crate::der::Certificate;
use crate::error::{Error, Result};
use crate::files::{
    create_private_dir, read_if_exists, read_toml, refuse_others, remove_if_exists, write_private, write_synced,
    write_toml,
};
use crate::identity::{certificate_from, expiry_of, has_passed, provider, roots_of};
use crate::wire::EnrolReply;
use rcgen::KeyPair;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Certificate and key after a renewal; before, they are in `certificate.pem` and `key.pem`.
const RENEWED: &str = "renewed.pem";
const RENEWAL_KEY: &str = "renewal.key";
const RENEWAL_REQUEST: &str = "renewal.der";

/// A node's identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Its name.
    pub name: String,
    /// Its client.
    pub client: u32,
}

impl Home {
    fn not_enrolled(&self) -> Error {
        let dir = self.dir.display();
        Error::config(format!("`{dir}` is not the folder of an enrolled node\nhint: fedproj enrol SERVER --node {dir}"))
    }

    fn text(&self, name: &str) -> Result<String> {
        let path = self.dir.join(name);
        let bytes = read_if_exists(&path)?.ok_or_else(|| self.not_enrolled())?;
        String::from_utf8(bytes).map_err(Error::corrupt(&path))
    }

    /// The request of an enrolment. Key and request are made once, so a second try asks for the same certificate.
    ///
    /// # Errors
    /// If they cannot be made or stored.
    pub fn request(&self) -> Result<Vec<u8>> {
        create_private_dir(&self.dir)?;
        if self.dir.join("node.toml").exists() && !self.is_expired() {
            return Err(Error::config(format!(
                "`{}` is the folder of a node that is already enrolled",
                self.dir.display()
            )));
        }
        self.request_with("key.pem", "request.der")
    }

    /// The request in this file. If there is none, it is made, with a new key in the other file.
    fn request_with(&self, key_file: &str, request_file: &str) -> Result<Vec<u8>> {
        let path = self.dir.join(request_file);
        if !path.exists() {
            let (key, request) = crate::node::node_request()?;
            write_private(&self.dir.join(key_file), &key)?;
            write_synced(&path, &request)?;
        }
        std::fs::read(&path).map_err(Error::io("read", &path))
    }

    /// Stores the certificate.
    ///
    /// # Errors
    /// If it cannot be written, or the folder holds the state of another client.
    pub fn enrolled(&self, reply: &EnrolReply) -> Result<()> {
        if let Some(before) = read_toml::<Identity>(&self.dir.join("node.toml"))?.filter(|b| b.client != reply.client) {
            return Err(Error::config(format!(
                "`{}` holds the state of client {}, but the token is for client {}; enrol in a new folder",
                self.dir.display(),
                before.client,
                reply.client
            )));
        }
        remove_if_exists(&self.dir.join(RENEWED))?;
        write_synced(&self.dir.join("certificate.pem"), reply.certificate.as_bytes())?;
        write_synced(&self.dir.join("authority.pem"), reply.authority.as_bytes())?;
        let identity = Identity { name: reply.name.clone(), client: reply.client };
        // Last: if it exists, the other files do too.
        write_toml(&self.dir.join("node.toml"), &identity)
    }

    /// The node's identity.
    ///
    /// # Errors
    /// If it is not enrolled, or others can read the folder.
    pub fn identity(&self) -> Result<Identity> {
        let identity = read_toml(&self.dir.join("node.toml"))?.ok_or_else(|| self.not_enrolled())?;
        refuse_others(&self.dir, "700")?;
        Ok(identity)
    }

    /// The node's side of TLS.
    ///
    /// # Errors
    /// If it is not enrolled.
    pub fn tls(&self) -> Result<rustls::ClientConfig> {
        let credentials = self.credentials()?;
        crate::node::node_tls(&self.text("authority.pem")?, &credentials, &credentials)
    }

    /// Certificate and key. A renewed pair is in one file, which is there whole or not at all.
    fn credentials(&self) -> Result<String> {
        match read_if_exists(&self.dir.join(RENEWED))? {
            Some(bytes) => String::from_utf8(bytes).map_err(Error::corrupt(&self.dir.join(RENEWED))),
            None => Ok(self.text("certificate.pem")? + &self.text("key.pem")?),
        }
    }

    /// The request of a renewal, with a new key. They are made once, so a second try asks for the same certificate.
    ///
    /// # Errors
    /// If they cannot be made or stored.
    pub fn renewal_request(&self) -> Result<Vec<u8>> {
        self.request_with(RENEWAL_KEY, RENEWAL_REQUEST)
    }

    /// Stores a renewed certificate. Whatever crashes, the node has the old pair or the new one.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn renewed(&self, reply: &EnrolReply) -> Result<()> {
        // First: the new certificate may be used at once, and then the old authority may go.
        write_synced(&self.dir.join("authority.pem"), reply.authority.as_bytes())?;
        write_private(&self.dir.join(RENEWED), &(reply.certificate.clone() + &self.text(RENEWAL_KEY)?))?;
        remove_if_exists(&self.dir.join(RENEWAL_REQUEST))?;
        remove_if_exists(&self.dir.join(RENEWAL_KEY))
    }

    /// Whether the certificate has expired by this machine's clock.
    pub fn is_expired(&self) -> bool {
        let expiry = self.credentials().and_then(|pem| expiry_of(&certificate_from(&pem)?));
        expiry.is_ok_and(has_passed)
    }

    /// The node's certificate (DER), and its key.
    ///
    /// # Errors
    /// If it is not enrolled.
    pub(crate) fn signer(&self) -> Result<(Vec<u8>, KeyPair)> {
        let credentials = self.credentials()?;
        let key = PrivateKeyDer::from_pem_slice(credentials.as_bytes()).map_err(Error::identity)?;
        let key = KeyPair::try_from(&key).map_err(Error::identity)?;
        Ok((certificate_from(&credentials)?.to_vec(), key))
    }

    /// Gives the key of a certificate that the federation's authority has signed.
    ///
    /// # Errors
    /// If the node is not enrolled.
    pub(crate) fn key_of_members(&self) -> Result<impl Fn(&[u8]) -> Result<Vec<u8>> + use<>> {
        let roots = roots_of(&self.text("authority.pem")?)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider()).build();
        let verifier = verifier.map_err(Error::identity)?;
        Ok(move |certificate: &[u8]| {
            let der = CertificateDer::from(certificate);
            verifier.verify_client_cert(&der, &[], UnixTime::now()).map_err(Error::identity)?;
            let read = Certificate::read(certificate).ok_or_else(|| Error::identity("it cannot be read"))?;
            Ok(read.key.to_vec())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_knows_that_its_certificate_has_expired() {
        let dir = tempfile::tempdir().unwrap();
        let authority = crate::server::Authority::open(&dir.path().join("server")).unwrap();
        let home = Home::new(&dir.path().join("node"));
        let request = home.request().unwrap();
        assert!(!home.is_expired());
        for (days, is_expired) in [(10, false), (-1, true)] {
            let certificate = authority.sign(&request, "n", days).unwrap();
            let authority = authority.certificate().to_owned();
            home.enrolled(&EnrolReply { name: "n".into(), client: 0, certificate, authority }).unwrap();
            assert_eq!(home.is_expired(), is_expired);
            // An expired node may enrol again and keeps its folder; another client's state is not its own.
            assert_eq!(home.request().is_ok(), is_expired);
        }
        let certificate = authority.sign(&request, "n", 10).unwrap();
        let other = EnrolReply { name: "n".into(), client: 1, certificate, authority: authority.bundle() };
        assert!(home.enrolled(&other).unwrap_err().to_string().contains("the token is for client 1"));
        // A renewed certificate takes the place of the first.
        let request = home.renewal_request().unwrap();
        assert_eq!(home.renewal_request().unwrap(), request);
        let certificate = authority.sign(&request, "n", 10).unwrap();
        home.renewed(&EnrolReply { certificate, ..other }).unwrap();
        assert!(!home.is_expired());
        home.tls().unwrap();
    }
}
