//! Token ids on disk, so that a text is tokenised once: one file per set of texts, vocabulary and settings.
//!
//! A file is named by the hash of all three and holds: magic bytes with a version, the number of texts, and the words of
//! [`Tokens::to_words`].

use std::path::Path;

use crate::cache;
use crate::tokens::Tokens;

const MAGIC: &[u8; 8] = b"fptoken1";

/// The tokens under `key`, unless they are missing or damaged.
pub(super) fn read(folder: &Path, key: &str) -> Option<Tokens> {
    let content = cache::read(folder, key)?;
    let (n_texts, words) = content.strip_prefix(MAGIC)?.split_first_chunk::<8>()?;
    let (words, rest) = words.as_chunks::<4>();
    let words: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let n_texts = usize::try_from(u64::from_le_bytes(*n_texts)).ok()?;
    Tokens::from_words(&words, n_texts).ok().filter(|_| rest.is_empty())
}

/// Stores tokens under `key`, as [`cache::write`] does.
pub(super) fn write(folder: &Path, key: &str, tokens: &Tokens) {
    let mut content = MAGIC.to_vec();
    content.extend((tokens.len() as u64).to_le_bytes());
    content.extend(tokens.to_words().iter().flat_map(|word| word.to_le_bytes()));
    cache::write(folder, key, &content);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_comes_back_and_every_damage_counts_as_missing() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("new/folder");
        let mut tokens = Tokens::default();
        tokens.push(&[101, 7, 102], 3, true).unwrap();
        tokens.push(&[101, 102, 8, 102], 2, false).unwrap();
        write(&folder, "key", &tokens);
        assert_eq!(read(&folder, "key"), Some(tokens));
        assert_eq!(read(&folder, "other"), None);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing temporary is left");
        let whole = std::fs::read(folder.join("key")).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(folder.join("key"), &damaged).unwrap();
            assert_eq!(read(&folder, "key"), None, "byte {at}");
        }
        std::fs::write(folder.join("key"), &whole[..whole.len() - 5]).unwrap();
        assert_eq!(read(&folder, "key"), None);
    }
}
