//! Encryption at rest: spools and client state are unreadable without a key file that is kept elsewhere.
//!
//! A file is a sequence of blocks: a random nonce, max [`BLOCK`] bytes under ChaCha20-Poly1305, and the tag. Blocks can be
//! read alone and appended, so that fusion reads values and uploads resume as in plain files. A block is bound to the name
//! of its content and to its place. Without a key everything is plain.

use crate::error::{Error, Result};
use crate::files::refuse_others;
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;

/// Bytes of content per block.
const BLOCK: usize = 1 << 16;

/// What encryption adds to a block.
const EXTRA: usize = NONCE_LEN + 16;

/// Min bytes of a key file; they should be random.
const KEY_BYTES_MIN: usize = 32;

/// Encrypts what is stored, or does not.
#[derive(Clone, Debug, Default)]
pub struct Vault {
    key: Option<Arc<LessSafeKey>>,
}

impl Vault {
    /// A vault with the key in this file, or without a key.
    ///
    /// # Errors
    /// If the file cannot be read, is too short, or others can read it.
    pub fn open(key_file: Option<&Path>) -> Result<Self> {
        let Some(path) = key_file else { return Ok(Self::default()) };
        let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
        refuse_others(path, "600")?;
        if bytes.len() < KEY_BYTES_MIN {
            let path = path.display();
            return Err(Error::config(format!(
                "`{path}` has {} bytes; a key needs {KEY_BYTES_MIN} random ones\n\
                 hint: head -c {KEY_BYTES_MIN} /dev/urandom > {path}",
                bytes.len()
            )));
        }
        Self::with_key(&bytes)
    }

    fn with_key(secret: &[u8]) -> Result<Self> {
        let key = blake3::derive_key("fedproj encryption at rest 1", secret);
        let key = UnboundKey::new(&CHACHA20_POLY1305, &key).map_err(Error::internal)?;
        Ok(Self { key: Some(Arc::new(LessSafeKey::new(key))) })
    }

    /// A vault with a key, for tests.
    #[cfg(test)]
    pub(crate) fn of(secret: &[u8]) -> Self {
        Self::with_key(secret).unwrap()
    }

    /// Whether it encrypts.
    pub(crate) fn has_key(&self) -> bool {
        self.key.is_some()
    }

    /// Bytes of content in a file of this length.
    pub(crate) fn content_len(&self, file_len: u64) -> u64 {
        if self.key.is_none() {
            return file_len;
        }
        let (whole, rest) = (file_len / (BLOCK + EXTRA) as u64, file_len % (BLOCK + EXTRA) as u64);
        whole * BLOCK as u64 + rest.saturating_sub(EXTRA as u64)
    }

    /// Reads content from an offset; `name` is what it was written under.
    pub(crate) fn read_at<F: Read + Seek>(
        &self,
        file: &mut F,
        name: &[u8],
        from: u64,
        out: &mut [u8],
    ) -> io::Result<()> {
        let Some(key) = &self.key else {
            file.seek(SeekFrom::Start(from))?;
            return file.read_exact(out);
        };
        let mut done = 0;
        while done < out.len() {
            let at = from + done as u64;
            let (index, skip) = (at / BLOCK as u64, (at % BLOCK as u64) as usize);
            let block = read_block(key, file, name, index)?;
            let rest = block.get(skip..).filter(|rest| !rest.is_empty()).ok_or(io::ErrorKind::UnexpectedEof)?;
            let n = rest.len().min(out.len() - done);
            out[done..done + n].copy_from_slice(&rest[..n]);
            done += n;
        }
        Ok(())
    }

    /// Appends content; `at` is the length of what is there.
    pub(crate) fn append<F: Read + Write + Seek>(
        &self,
        file: &mut F,
        name: &[u8],
        at: u64,
        bytes: &[u8],
    ) -> io::Result<()> {
        let Some(key) = &self.key else {
            file.seek(SeekFrom::Start(at))?;
            return file.write_all(bytes);
        };
        let (first, skip) = (at / BLOCK as u64, (at % BLOCK as u64) as usize);
        // A block that is not full is encrypted anew, under another nonce.
        let mut content = if skip > 0 { read_block(key, file, name, first)? } else { Vec::new() };
        content.truncate(skip);
        content.extend_from_slice(bytes);
        file.seek(SeekFrom::Start(first * (BLOCK + EXTRA) as u64))?;
        for (index, block) in (first..).zip(content.chunks(BLOCK)) {
            file.write_all(&seal_block(key, name, index, block)?)?;
        }
        Ok(())
    }

    /// Content as it is stored.
    pub(crate) fn seal(&self, name: &[u8], content: &[u8]) -> Result<Vec<u8>> {
        let mut file = io::Cursor::new(Vec::new());
        self.append(&mut file, name, 0, content).map_err(Error::internal)?;
        Ok(file.into_inner())
    }

    /// The content of what was stored by [`Vault::seal`].
    pub(crate) fn unseal(&self, name: &[u8], stored: Vec<u8>) -> io::Result<Vec<u8>> {
        if self.key.is_none() {
            return Ok(stored);
        }
        let mut content = vec![0; self.content_len(stored.len() as u64) as usize];
        self.read_at(&mut io::Cursor::new(&stored), name, 0, &mut content)?;
        Ok(content)
    }

    /// BLAKE3 of the first `len` bytes of content.
    pub(crate) fn hash<F: Read + Seek>(&self, file: &mut F, name: &[u8], len: u64) -> io::Result<blake3::Hash> {
        let (mut hasher, mut at, mut block) = (blake3::Hasher::new(), 0, vec![0; BLOCK]);
        while at < len {
            let n = BLOCK.min((len - at) as usize);
            self.read_at(file, name, at, &mut block[..n])?;
            hasher.update(&block[..n]);
            at += n as u64;
        }
        Ok(hasher.finalize())
    }
}

/// What a block is bound to.
fn bound_to(name: &[u8], index: u64) -> Aad<Vec<u8>> {
    Aad::from([name, &index.to_le_bytes()].concat())
}

fn read_block<F: Read + Seek>(key: &LessSafeKey, file: &mut F, name: &[u8], index: u64) -> io::Result<Vec<u8>> {
    file.seek(SeekFrom::Start(index * (BLOCK + EXTRA) as u64))?;
    let (mut nonce, mut block) = ([0; NONCE_LEN], Vec::with_capacity(BLOCK + EXTRA));
    file.read_exact(&mut nonce)?;
    file.take((BLOCK + EXTRA - NONCE_LEN) as u64).read_to_end(&mut block)?;
    let nonce = Nonce::assume_unique_for_key(nonce);
    let n = key.open_in_place(nonce, bound_to(name, index), &mut block).map(|content| content.len());
    block.truncate(n.map_err(|_| {
        io::Error::new(io::ErrorKind::InvalidData, "it cannot be decrypted: it is damaged, or the key is another one")
    })?);
    Ok(block)
}

fn seal_block(key: &LessSafeKey, name: &[u8], index: u64, content: &[u8]) -> io::Result<Vec<u8>> {
    let failed = |_| io::Error::other("no randomness from the system");
    let mut nonce = [0; NONCE_LEN];
    SystemRandom::new().fill(&mut nonce).map_err(failed)?;
    let mut sealed = content.to_vec();
    let bound = bound_to(name, index);
    key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), bound, &mut sealed).map_err(failed)?;
    Ok([&nonce[..], &sealed].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn pieces_of_any_size_read_back_from_anywhere(
            sizes in proptest::collection::vec(1usize..100_000, 1..5),
            from in 0.0f64..1.0,
            n in 0usize..150_000,
            with_key in any::<bool>(),
        ) {
            let vault = if with_key { Vault::of(&[7; 32]) } else { Vault::default() };
            let (mut file, mut content) = (io::Cursor::new(Vec::new()), Vec::new());
            for (i, size) in sizes.into_iter().enumerate() {
                let piece: Vec<u8> = (0..size).map(|b| (b * 31 + i) as u8).collect();
                vault.append(&mut file, b"name", content.len() as u64, &piece).unwrap();
                content.extend(piece);
            }
            prop_assert_eq!(vault.content_len(file.get_ref().len() as u64), content.len() as u64);
            let from = (from * content.len() as f64) as usize;
            let mut out = vec![0; n.min(content.len() - from)];
            vault.read_at(&mut file, b"name", from as u64, &mut out).unwrap();
            prop_assert_eq!(&out[..], &content[from..from + out.len()]);
            let hash = vault.hash(&mut file, b"name", content.len() as u64).unwrap();
            prop_assert_eq!(hash, blake3::hash(&content));
            prop_assert_eq!(vault.unseal(b"name", file.into_inner()).unwrap(), content);
        }
    }

    #[test]
    fn nothing_readable_is_stored_and_every_change_is_found() {
        let vault_a = Vault::of(&[7; 32]);
        let secret = b"a patient's gradient".repeat(4);
        let stored = vault_a.seal(b"name", &secret).unwrap();
        assert!(!stored.windows(8).any(|w| secret.windows(8).any(|s| s == w)));
        for at in 0..stored.len() {
            let mut damaged = stored.clone();
            damaged[at] ^= 1;
            assert!(vault_a.unseal(b"name", damaged).is_err(), "byte {at}");
        }
        assert!(vault_a.unseal(b"other", stored.clone()).is_err());
        assert!(Vault::of(&[8; 32]).unseal(b"name", stored).is_err());
    }

    #[test]
    fn blocks_cannot_change_places() {
        let vault = Vault::of(&[7; 32]);
        let stored = vault.seal(b"name", &[vec![1; BLOCK], vec![2; BLOCK]].concat()).unwrap();
        let (a, b) = stored.split_at(BLOCK + EXTRA);
        assert!(vault.unseal(b"name", [b, a].concat()).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn a_key_that_is_short_or_that_others_can_read_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        assert!(Vault::open(Some(&path)).unwrap_err().to_string().contains("key"));
        fedproj_core::write_private(&path, &[1; 31]).unwrap();
        assert!(Vault::open(Some(&path)).unwrap_err().to_string().contains("/dev/urandom"));
        fedproj_core::write_private(&path, &[1; 32]).unwrap();
        Vault::open(Some(&path)).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        assert!(Vault::open(Some(&path)).unwrap_err().to_string().contains("chmod 600"));
    }
}
