//! Bytes in files of a limited size: some places do not keep larger ones.
//!
//! What fits is one file and nothing else. What does not is cut into shards, each in a file of its own beside `path`, whose
//! name holds its place and the beginning of its hash; the file at `path` is their index, and is written last. So the whole
//! is there or is not, whatever crashes, and writing another whole never harms the one that is there.
//!
//! An index, little-endian: magic `FEDPROJS`, version u32, number of shards u32, of each its length u64 and BLAKE3, BLAKE3 of
//! everything before.

use crate::checkpoint::write_atomically;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"FEDPROJS";
const VERSION: u32 = 1;
const HASH_BYTES: usize = 32;
const ENTRY_BYTES: usize = 8 + HASH_BYTES;

/// Writes bytes to `path`, and to shards beside it where they are more than `bytes_max`.
pub(crate) fn write(path: &Path, bytes: &[u8], bytes_max: usize) -> Result<()> {
    if bytes.len() <= bytes_max {
        return write_atomically(path, bytes);
    }
    let shards: Vec<&[u8]> = bytes.chunks(bytes_max.max(1)).collect();
    let mut index = MAGIC.to_vec();
    index.extend_from_slice(&VERSION.to_le_bytes());
    index.extend_from_slice(&(shards.len() as u32).to_le_bytes());
    let mut written = Vec::new();
    for (at, shard) in shards.iter().enumerate() {
        let hash = blake3::hash(shard);
        index.extend_from_slice(&(shard.len() as u64).to_le_bytes());
        index.extend_from_slice(hash.as_bytes());
        let shard_path = path_of(path, at, &hash);
        // One of that name and length belongs to the same bytes, perhaps to an index that is there.
        if std::fs::metadata(&shard_path).is_ok_and(|m| m.len() == shard.len() as u64) {
            continue;
        }
        written.push(shard_path.clone());
        if let Err(error) = write_atomically(&shard_path, shard) {
            // On a full disk, room is what is needed most; the error tells the cause.
            for shard in &written {
                let _ = std::fs::remove_file(shard);
            }
            return Err(error);
        }
    }
    let hash = blake3::hash(&index);
    index.extend_from_slice(hash.as_bytes());
    write_atomically(path, &index)
}

/// Reads what [`write`] wrote, in one file or in many. `hint` says what to do about damage.
pub(crate) fn read(path: &Path, hint: &str) -> Result<Vec<u8>> {
    let file = std::fs::read(path).map_err(Error::io("read", path))?;
    if !file.starts_with(MAGIC) {
        return Ok(file);
    }
    let corrupt =
        |path: &Path, problem: &str| Error::Corrupt { path: path.into(), problem: format!("{problem}\n{hint}") };
    let entries = entries(&file).map_err(|problem| corrupt(path, problem))?;
    let mut bytes = Vec::new();
    for (at, (len, hash)) in entries.into_iter().enumerate() {
        let shard_path = path_of(path, at, &hash);
        let shard = std::fs::read(&shard_path).map_err(|e| corrupt(&shard_path, &format!("cannot read: {e}")))?;
        if shard.len() as u64 != len || blake3::hash(&shard) != hash {
            return Err(corrupt(&shard_path, "damaged shard: its checksum does not match"));
        }
        bytes.extend_from_slice(&shard);
    }
    Ok(bytes)
}

/// Lengths and hashes of the shards.
fn entries(index: &[u8]) -> std::result::Result<Vec<(u64, blake3::Hash)>, &'static str> {
    let damaged = "damaged index of shards: its checksum does not match";
    let (body, hash) = index.split_last_chunk::<HASH_BYTES>().ok_or(damaged)?;
    if blake3::hash(body) != blake3::Hash::from_bytes(*hash) {
        return Err(damaged);
    }
    let rest = &body[MAGIC.len()..];
    let (version, rest) = rest.split_first_chunk::<4>().ok_or(damaged)?;
    if u32::from_le_bytes(*version) != VERSION {
        return Err("index of shards of another version");
    }
    let (n, rest) = rest.split_first_chunk::<4>().ok_or(damaged)?;
    let (entries, []) = rest.as_chunks::<ENTRY_BYTES>() else { return Err(damaged) };
    if entries.len() != u32::from_le_bytes(*n) as usize {
        return Err(damaged);
    }
    let entry = |entry: &[u8; ENTRY_BYTES]| {
        let (len, hash) = entry.split_first_chunk::<8>()?;
        Some((u64::from_le_bytes(*len), blake3::Hash::from_slice(hash).ok()?))
    };
    entries.iter().map(entry).collect::<Option<_>>().ok_or(damaged)
}

fn path_of(path: &Path, at: usize, hash: &blake3::Hash) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{at:04}-{}", &hash.to_hex()[..16]));
    path.with_file_name(name)
}

/// Removes the files in a folder whose names begin with `prefix`, but for `keep` and their shards: what is no longer wanted,
/// and what crashes have left.
pub(crate) fn retain(dir: &Path, prefix: &str, keep: &[PathBuf]) -> Result<()> {
    let entries = std::fs::read_dir(dir).map_err(Error::io("list", dir))?;
    let mut names: Vec<String> = entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
    let kept = |name: &String| keep.iter().filter_map(|path| path.file_name()?.to_str()).any(|k| name.starts_with(k));
    names.retain(|name| name.starts_with(prefix) && !kept(name));
    // An index goes before its shards, so that no half is taken for a whole.
    names.sort();
    for name in names {
        let path = dir.join(name);
        std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn bytes_come_back_from_any_number_of_shards_none_of_which_is_too_large() {
        for (n, bytes_max, n_files) in [(0, 4, 1), (4, 4, 1), (5, 4, 3), (1000, 7, 144), (1000, 1000, 1), (9, 3, 4)] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a.ckpt");
            let bytes: Vec<u8> = (0..n).map(|i| (i % 251) as u8).collect();
            write(&path, &bytes, bytes_max).unwrap();
            assert_eq!(read(&path, "hint").unwrap(), bytes);
            assert_eq!(names(dir.path()).len(), n_files, "{n} bytes, {bytes_max} a shard");
            let is_shard = |name: &&String| *name != "a.ckpt";
            for name in names(dir.path()).iter().filter(is_shard) {
                assert!(std::fs::metadata(dir.path().join(name)).unwrap().len() <= bytes_max as u64);
            }
        }
    }

    #[test]
    fn every_damage_is_found_and_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.ckpt");
        write(&path, b"hello, world", 5).unwrap();
        for name in names(dir.path()) {
            let file = dir.path().join(&name);
            let whole = std::fs::read(&file).unwrap();
            // An index whose magic is damaged is the caller's to refuse: it takes it for the content itself.
            for at in if name == "a.ckpt" { MAGIC.len() } else { 0 }..whole.len() {
                let mut damaged = whole.clone();
                damaged[at] ^= 4;
                for bytes in [&damaged, &whole[..at]] {
                    std::fs::write(&file, bytes).unwrap();
                    let error = read(&path, "hint: x").unwrap_err().to_string();
                    assert!(error.contains(&name) && error.contains("hint: x"), "{name}, byte {at}: {error}");
                }
            }
            std::fs::remove_file(&file).unwrap();
            assert!(read(&path, "hint").unwrap_err().to_string().contains(&name));
            std::fs::write(&file, whole).unwrap();
        }
        assert_eq!(read(&path, "hint").unwrap(), b"hello, world");
    }

    #[test]
    fn a_crash_at_any_file_leaves_the_one_before_or_none() {
        // Every beginning of the sequence of files that a write makes, beside a whole of other bytes under the same name.
        let (old, new) = (b"the old content".to_vec(), b"new content, and more of it".to_vec());
        let made = tempfile::tempdir().unwrap();
        write(&made.path().join("a.ckpt"), &new, 4).unwrap();
        let mut sequence = names(made.path());
        // The index comes last.
        sequence.rotate_left(1);
        for n in 0..=sequence.len() {
            for has_old in [false, true] {
                let dir = tempfile::tempdir().unwrap();
                let path = dir.path().join("a.ckpt");
                if has_old {
                    write(&path, &old, 4).unwrap();
                }
                for name in &sequence[..n] {
                    std::fs::copy(made.path().join(name), dir.path().join(name)).unwrap();
                }
                let expected = if n == sequence.len() { Some(&new) } else { has_old.then_some(&old) };
                assert_eq!(read(&path, "hint").ok().as_ref(), expected, "{n} files");
                // And it can be written again, and be cleaned up.
                write(&path, &new, 4).unwrap();
                assert_eq!(read(&path, "hint").unwrap(), new);
                retain(dir.path(), "a.", &[]).unwrap();
                assert!(names(dir.path()).is_empty());
            }
        }
    }

    #[test]
    fn what_is_kept_keeps_its_shards_and_the_rest_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["round-1.ckpt", "round-2.ckpt", "round-3.ckpt"] {
            write(&path(name), name.as_bytes(), 5).unwrap();
        }
        for left in ["round-4.tmp", "round-4.ckpt.0000-1234", "other"] {
            std::fs::write(path(left), "left by a crash").unwrap();
        }
        retain(dir.path(), "round-", &[path("round-2.ckpt"), path("round-3.ckpt")]).unwrap();
        assert!(read(&path("round-1.ckpt"), "hint").is_err());
        assert_eq!(read(&path("round-2.ckpt"), "hint").unwrap(), b"round-2.ckpt");
        assert_eq!(names(dir.path()).len(), 1 + 2 * 4);
    }
}
