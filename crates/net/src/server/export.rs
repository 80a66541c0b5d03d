//! The journal for people who do not run the server: JSON lines that end with a signature of the federation's authority.
//!
//! The line before the last states what was exported, when and by whom. The last line signs everything before it, so that
//! nobody without the authority's key can change, remove or add a line. Standard tools can check it, see docs/security.md.

use super::Authority;
use super::journal::{Entry, Journal, Tail};
use crate::der::Certificate;
use crate::error::{Error, Result};
use crate::identity::{certificate_from, operator};
use crate::wire::hex;
use ring::digest::{Context, SHA256};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::path::Path;

const FORMAT: &str = "fedproj audit 1";

/// What an export states about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statement {
    /// The format.
    pub export: String,
    /// Entries in the export.
    pub entries: u64,
    /// Hash of the last entry.
    pub hash: String,
    /// When it was made.
    pub time: String,
    /// Who made it.
    pub operator: String,
    /// BLAKE3 of the authority's certificate.
    pub authority: String,
}

#[derive(Serialize, Deserialize)]
struct Signature {
    /// ECDSA with P-256 and SHA-256 in DER, hexadecimal.
    signature: String,
}

/// Writes the journal of a federation's folder and signs it. `None` if there is no journal.
///
/// # Errors
/// If the journal is broken, or `out` cannot be written.
pub fn export(dir: &Path, out: &mut dyn Write) -> Result<Option<Statement>> {
    let authority = Authority::open(dir)?;
    let (mut digest, mut n_entries) = (Context::new(&SHA256), 0);
    let mut write = |line: String| {
        digest.update(line.as_bytes());
        out.write_all(line.as_bytes()).map_err(|e| Error::internal(format!("writing the export: {e}")))
    };
    let tail = Journal::read(dir, &mut |entry: Entry| {
        n_entries += 1;
        write(line(&entry)?)
    })?;
    let Some(tail) = tail else { return Ok(None) };
    let statement = Statement {
        export: FORMAT.into(),
        entries: n_entries,
        hash: tail.hash.clone(),
        time: super::journal::now(),
        operator: operator(),
        authority: hex(&authority.fingerprint()?),
    };
    write(line(&statement)?)?;
    let signature = Signature { signature: hex(&authority.sign_message(&message(digest))?) };
    let written = out.write_all(line(&signature)?.as_bytes()).and_then(|()| out.flush());
    written.map_err(|e| Error::internal(format!("writing the export: {e}")))?;
    Ok(Some(statement))
}

/// Checks an export against the authority's certificate (PEM): the signature, and that every entry follows from the one
/// before.
///
/// # Errors
/// If it was changed, cut, or signed by somebody else.
pub fn check_export(certificate: &str, export: &mut dyn BufRead) -> Result<Statement> {
    let bad = |problem: &str| Error::protocol(format!("not a valid export: {problem}"));
    let (mut digest, mut tail, mut n_entries) = (Context::new(&SHA256), Tail::default(), 0);
    let mut statement: Option<Statement> = None;
    for text in export.lines() {
        let text = text.map_err(|e| bad(&e.to_string()))?;
        if let Some(statement) = statement {
            let signature: Signature = serde_json::from_str(&text).map_err(|_| bad("its signature is missing"))?;
            if (statement.entries, &statement.hash) != (n_entries, &tail.hash) {
                return Err(bad("entries are missing"));
            }
            verify(certificate, &message(digest), &signature.signature)?;
            return Ok(statement);
        }
        digest.update(text.as_bytes());
        digest.update(b"\n");
        statement = serde_json::from_str(&text).ok().filter(|s: &Statement| s.export == FORMAT);
        if statement.is_none() {
            if n_entries == 0 {
                // Earlier parts of the journal may be archived.
                let first: Entry = serde_json::from_str(&text).map_err(|e| bad(&e.to_string()))?;
                tail = Tail::before(&first);
            }
            tail.accept(text.as_bytes()).map_err(|e| bad(&e))?;
            n_entries += 1;
        }
    }
    Err(bad("it has no end"))
}

fn line(value: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string(value).map_err(Error::internal)? + "\n")
}

/// What is signed: a text that no certificate or handshake can be mistaken for.
fn message(digest: Context) -> Vec<u8> {
    format!("{FORMAT} sha256 {}\n", hex(digest.finish().as_ref())).into_bytes()
}

fn verify(certificate: &str, message: &[u8], signature: &str) -> Result<()> {
    let der = certificate_from(certificate)?;
    let certificate = Certificate::read(&der).ok_or_else(|| Error::identity("it cannot be read"))?;
    let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, certificate.key);
    let digits = |at: usize| signature.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
    let signature: Option<Vec<u8>> = (0..signature.len()).step_by(2).map(digits).collect();
    let is_valid = signature.is_some_and(|signature| key.verify(message, &signature).is_ok());
    is_valid
        .then_some(())
        .ok_or_else(|| Error::protocol("not a valid export: it has been changed, or another authority has signed it"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::journal::Event;

    #[test]
    fn an_export_is_checked_line_by_line_and_only_its_own_authority_signs_it() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("federation");
        let authority = Authority::open(&dir).unwrap();
        assert_eq!(export(&dir, &mut Vec::new()).unwrap(), None);
        let mut journal = Journal::open(&dir, &mut |_| ()).unwrap();
        for node in ["a", "b", "c"] {
            journal.append(Event::Revoked { node: node.into() }).unwrap();
        }
        let mut bytes = Vec::new();
        let made = export(&dir, &mut bytes).unwrap().unwrap();
        assert_eq!((made.entries, &made.hash), (3, &journal.tail().hash));
        let check = |text: &str| check_export(authority.certificate(), &mut text.as_bytes());
        let text = String::from_utf8(bytes).unwrap();
        assert_eq!(check(&text).unwrap(), made);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5);
        let without = |at: usize| {
            let rest: Vec<&str> = lines.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, l)| *l).collect();
            rest.join("\n") + "\n"
        };
        for damaged in [
            text.replace("\"a\"", "\"x\""),
            text.replace("\"c\"", "\"x\""),
            text.replace(&made.operator, "somebody"),
            text.replace(&made.time, "2020-01-01T00:00:00Z"),
            without(0),
            without(2),
            without(3),
            without(4),
            String::new(),
        ] {
            assert!(check(&damaged).is_err(), "{damaged}");
        }
        let other = tempfile::tempdir().unwrap();
        let other = Authority::open(&other.path().join("federation")).unwrap();
        let error = check_export(other.certificate(), &mut text.as_bytes()).unwrap_err();
        assert!(error.to_string().contains("another authority"), "{error}");
    }
}
