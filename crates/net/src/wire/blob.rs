//! Blobs: bytes named by their BLAKE3 hash. A [`Store`] keeps them in a folder; an interrupted transfer resumes.

use crate::error::{Error, Result};
use crate::files::{create_dir, sync_dir, write_synced};
use crate::vault::Vault;
use prost::Message;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

/// Bytes named by their hash.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Message)]
pub struct Blob {
    /// BLAKE3, 32 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub hash: Vec<u8>,
    /// Length in bytes.
    #[prost(uint64, tag = "2")]
    pub len: u64,
}

impl Blob {
    /// The name of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self { hash: blake3::hash(bytes).as_bytes().to_vec(), len: bytes.len() as u64 }
    }

    /// The hash in file names and addresses.
    pub fn hex(&self) -> String {
        hex(&self.hash)
    }

    /// Checks that the hash has 32 bytes. Nothing else may become a file name.
    ///
    /// # Errors
    /// If it has not.
    pub fn check(&self) -> Result<()> {
        if self.hash.len() == 32 {
            return Ok(());
        }
        Err(Error::protocol(format!("a hash of {} bytes; expected 32", self.hash.len())))
    }

    /// Reads a hash in an address.
    pub fn parse_hex(text: &str) -> Option<Vec<u8>> {
        let digits = text.as_bytes();
        if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        (0..32).map(|i| u8::from_str_radix(text.get(2 * i..2 * i + 2)?, 16).ok()).collect()
    }
}

/// A folder of blobs. A file named by a hash is complete and checked; a `.part` file is incomplete.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    vault: Vault,
}

impl Store {
    /// Opens the store in a folder; creates the folder if it is missing.
    ///
    /// # Errors
    /// If the folder cannot be created.
    pub fn open(dir: &Path) -> Result<Self> {
        Self::sealed(dir, &Vault::default())
    }

    /// As [`Store::open`], encrypted at rest.
    ///
    /// # Errors
    /// If the folder cannot be created.
    pub fn sealed(dir: &Path, vault: &Vault) -> Result<Self> {
        create_dir(dir)?;
        Ok(Self { dir: dir.into(), vault: vault.clone() })
    }

    /// Bytes of content in a file; `None` if there is none.
    fn content_len(&self, path: &Path) -> Option<u64> {
        std::fs::metadata(path).ok().map(|m| self.vault.content_len(m.len()))
    }

    fn path(&self, blob: &Blob) -> PathBuf {
        self.dir.join(blob.hex())
    }

    fn part_path(&self, blob: &Blob) -> PathBuf {
        self.dir.join(blob.hex() + ".part")
    }

    /// Whether the blob is complete. An empty one always is.
    pub fn has(&self, blob: &Blob) -> bool {
        blob.len == 0 || self.content_len(&self.path(blob)) == Some(blob.len)
    }

    /// Stores bytes. A file of that name that was damaged, or encrypted with another key, is replaced.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn put(&self, bytes: &[u8]) -> Result<Blob> {
        let blob = Blob::of(bytes);
        if self.check(&blob).is_err() {
            write_synced(&self.path(&blob), &self.vault.seal(&blob.hash, bytes)?)?;
        }
        Ok(blob)
    }

    /// The bytes of a blob. If they are damaged, or encrypted with another key, the file goes, so that the blob can be sent
    /// again.
    ///
    /// # Errors
    /// If it is missing, or its content does not match its hash.
    pub fn get(&self, blob: &Blob) -> Result<Vec<u8>> {
        if blob.len == 0 {
            return Ok(Vec::new());
        }
        let path = self.path(blob);
        let stored = std::fs::read(&path).map_err(Error::io("read", &path))?;
        let bytes = self.vault.unseal(&blob.hash, stored).map_err(Error::io("read", &path));
        match bytes.map(|bytes| (Blob::of(&bytes), bytes)) {
            Ok((found, bytes)) if found == *blob => Ok(bytes),
            other => {
                std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
                Err(other.err().unwrap_or_else(|| Error::corrupt(&path)("its content does not match its hash")))
            }
        }
    }

    /// Checks that a blob is there and matches its hash.
    ///
    /// # Errors
    /// If it is missing, changed or cut short.
    pub fn check(&self, blob: &Blob) -> Result<()> {
        let path = self.path(blob);
        if blob.len == 0 || self.hash_of(blob, &path)?.as_bytes()[..] == blob.hash[..] {
            return Ok(());
        }
        Err(Error::corrupt(&path)("its content does not match its hash"))
    }

    /// Reads `out.len()` values of a vector, beginning with value `from`.
    ///
    /// # Errors
    /// If the file is missing or too short.
    pub fn read_values(&self, blob: &Blob, from: usize, out: &mut [f32]) -> Result<()> {
        let (path, mut bytes) = (self.path(blob), vec![0; 4 * out.len()]);
        // Opened for each block, so that a round of many clients does not need one open file per client.
        let mut file = File::open(&path).map_err(Error::io("open", &path))?;
        let read = self.vault.read_at(&mut file, &blob.hash, 4 * from as u64, &mut bytes);
        read.map_err(Error::io("read", &path))?;
        let (quads, _) = bytes.as_chunks::<4>();
        out.iter_mut().zip(quads).for_each(|(v, b)| *v = f32::from_le_bytes(*b));
        Ok(())
    }

    /// Max `n_max` bytes from an offset, and the blob's length; `None` if there is no such blob.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn read(&self, hash: &[u8], from: u64, n_max: usize) -> Result<Option<(Vec<u8>, u64)>> {
        let path = self.path(&Blob { hash: hash.to_vec(), len: 0 });
        let Ok(mut file) = File::open(&path) else { return Ok(None) };
        let mut read = || -> std::io::Result<(Vec<u8>, u64)> {
            let len = self.vault.content_len(file.metadata()?.len());
            let mut bytes = vec![0; len.saturating_sub(from).min(n_max as u64) as usize];
            // A peer can ask for an offset beyond what any system can seek.
            if !bytes.is_empty() {
                self.vault.read_at(&mut file, hash, from, &mut bytes)?;
            }
            Ok((bytes, len))
        };
        read().map(Some).map_err(Error::io("read", &path))
    }

    /// Bytes of a blob that are stored: all, or the part that an interrupted transfer left.
    pub fn have(&self, blob: &Blob) -> u64 {
        if self.has(blob) {
            return blob.len;
        }
        let part = self.part_path(blob);
        match self.content_len(&part).unwrap_or(0) {
            n if n < blob.len => n,
            // A crash came between the last piece and the check of the whole: check now.
            _ => match self.complete(blob, &part) {
                Ok(()) => blob.len,
                Err(_) => std::fs::remove_file(&part).map_or(0, |()| 0),
            },
        }
    }

    /// Appends the next piece of a blob and returns how many bytes are stored now. A piece that is already stored, or that
    /// would leave a gap, changes nothing. The last piece completes the blob if the hash matches.
    ///
    /// # Errors
    /// If the piece exceeds the blob's length, the hash does not match (the whole blob is dropped then), or the disk fails.
    pub fn append(&self, blob: &Blob, from: u64, bytes: &[u8]) -> Result<u64> {
        let have = self.have(blob);
        let end = from.checked_add(bytes.len() as u64).filter(|&end| end <= blob.len);
        let end = end.ok_or_else(|| Error::protocol(format!("bytes beyond the blob's length of {}", blob.len)))?;
        if from > have || end <= have {
            return Ok(have);
        }
        let path = self.part_path(blob);
        let write = || -> std::io::Result<()> {
            let mut file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path)?;
            self.vault.append(&mut file, &blob.hash, have, &bytes[(have - from) as usize..])
        };
        match write() {
            // A crash tore the last block, which cannot be decrypted: the blob is sent again.
            Err(e) if e.kind() == std::io::ErrorKind::InvalidData => {
                std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
                return Ok(0);
            }
            written => written.map_err(Error::io("write", &path))?,
        }
        if end == blob.len {
            self.complete(blob, &path)?;
        }
        Ok(end)
    }

    /// The hash of what a file holds, which should be this blob.
    fn hash_of(&self, blob: &Blob, path: &Path) -> Result<blake3::Hash> {
        let mut file = File::open(path).map_err(Error::io("open", path))?;
        let len = file.metadata().map_err(Error::io("read", path))?.len();
        let hash = self.vault.hash(&mut file, &blob.hash, self.vault.content_len(len));
        hash.map_err(Error::io("read", path))
    }

    fn complete(&self, blob: &Blob, part: &Path) -> Result<()> {
        if self.hash_of(blob, part)?.as_bytes()[..] != blob.hash[..] {
            std::fs::remove_file(part).map_err(Error::io("remove", part))?;
            return Err(Error::protocol("the bytes of a blob do not match its hash; send it again"));
        }
        // After a crash, the file's name says that it is complete. So it must be on disk before it gets that name.
        File::open(part).and_then(|file| file.sync_all()).map_err(Error::io("sync", part))?;
        let path = self.path(blob);
        std::fs::rename(part, &path).map_err(Error::io("rename", part))?;
        sync_dir(&self.dir)
    }

    /// Removes all blobs but these.
    ///
    /// # Errors
    /// If the folder cannot be read, or a file cannot be removed.
    pub fn retain(&self, keep: &[&Blob]) -> Result<()> {
        let keep: Vec<String> = keep.iter().map(|blob| blob.hex()).collect();
        let entries = std::fs::read_dir(&self.dir).map_err(Error::io("list", &self.dir))?;
        for entry in entries {
            let path = entry.map_err(Error::io("list", &self.dir))?.path();
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            if !keep.iter().any(|hex| name.starts_with(hex)) {
                std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
            }
        }
        Ok(())
    }
}

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes.iter().flat_map(|b| [b >> 4, b & 15]).map(|d| char::from(DIGITS[usize::from(d)])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_blob_is_checked_after_a_crash_before_its_last_check() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let blob = Blob::of(b"hello");
        for (left, have) in [(&b"hello"[..], 5), (b"hellx", 0), (b"hello, world", 0), (b"hel", 3)] {
            let _ = std::fs::remove_file(store.path(&blob));
            std::fs::write(store.part_path(&blob), left).unwrap();
            assert_eq!((store.have(&blob), store.has(&blob)), (have, have == 5));
            assert_eq!(store.append(&blob, have, &b"hello"[have as usize..]).unwrap(), 5);
            assert_eq!(store.get(&blob).unwrap(), b"hello");
        }
    }

    #[test]
    fn a_sealed_blob_is_unreadable_and_survives_a_torn_write() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::sealed(dir.path(), &Vault::of(&[7; 32])).unwrap();
        let bytes = b"a patient's gradient, many times ".repeat(9000);
        let blob = Blob::of(&bytes);
        assert_eq!(store.append(&blob, 0, &bytes[..100_000]).unwrap(), 100_000);
        // Half a block was written when the power failed.
        let part = store.part_path(&blob);
        let whole = std::fs::read(&part).unwrap();
        std::fs::write(&part, &whole[..90_000]).unwrap();
        let have = store.have(&blob) as usize;
        assert_eq!(store.append(&blob, have as u64, &bytes[have..]).unwrap(), 0);
        assert_eq!(store.append(&blob, 0, &bytes).unwrap(), blob.len);
        assert_eq!(store.get(&blob).unwrap(), bytes);
        let stored = std::fs::read(store.path(&blob)).unwrap();
        assert!(!stored.windows(16).any(|w| w == b"patient's gradie"));
        // With another key, or changed, it cannot be read.
        let other = Store::sealed(dir.path(), &Vault::of(&[8; 32])).unwrap();
        assert!(other.read_values(&blob, 0, &mut [0.0; 4]).is_err());
        assert!(other.get(&blob).unwrap_err().to_string().contains("decrypted"));
    }

    #[test]
    fn what_is_damaged_or_has_another_key_is_stored_anew() {
        let dir = tempfile::tempdir().unwrap();
        let open = |key: u8| Store::sealed(dir.path(), &Vault::of(&[key; 32])).unwrap();
        let blob = open(7).put(b"hello").unwrap();
        assert_eq!(open(8).put(b"hello").unwrap(), blob);
        assert_eq!(open(8).get(&blob).unwrap(), b"hello");
        // Whoever cannot read it drops it, and fetches it again.
        assert!(open(7).get(&blob).unwrap_err().to_string().contains("decrypted"));
        assert!(!open(7).has(&blob));
        let plain = Store::open(dir.path()).unwrap();
        plain.put(b"hello").unwrap();
        std::fs::write(plain.path(&blob), b"hellx").unwrap();
        assert!(plain.get(&blob).unwrap_err().to_string().contains("match its hash") && !plain.has(&blob));
    }

    #[test]
    fn a_wrong_hash_drops_the_blob_and_the_right_bytes_still_fit() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let blob = Blob::of(b"hello");
        assert!(store.append(&blob, 0, b"hellx").unwrap_err().to_string().contains("match its hash"));
        assert_eq!((store.have(&blob), store.has(&blob)), (0, false));
        assert!(store.append(&blob, 0, b"hello, world").is_err());
        assert_eq!(store.append(&blob, 0, b"hello").unwrap(), 5);
        assert_eq!(store.get(&blob).unwrap(), b"hello");
    }

    proptest! {
        #[test]
        fn pieces_in_any_order_with_repeats_and_gaps_end_as_the_blob(
            bytes in proptest::collection::vec(any::<u8>(), 1..200),
            moves in proptest::collection::vec((0usize..220, 1usize..80), 0..40),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let plain = Store::open(&dir.path().join("plain")).unwrap();
            let sealed = Store::sealed(&dir.path().join("sealed"), &Vault::of(&[7; 32])).unwrap();
            let blob = Blob::of(&bytes);
            for store in [plain, sealed] {
                for (from, n) in &moves {
                    let from = (*from).min(bytes.len());
                    let end = (from + n).min(bytes.len());
                    let have = store.append(&blob, from as u64, &bytes[from..end]).unwrap();
                    prop_assert_eq!(have, store.have(&blob));
                }
                while !store.has(&blob) {
                    let have = store.have(&blob) as usize;
                    store.append(&blob, have as u64, &bytes[have..(have + 7).min(bytes.len())]).unwrap();
                }
                prop_assert_eq!(&store.get(&blob).unwrap(), &bytes);
            }
        }
    }
}
