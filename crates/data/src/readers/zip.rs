//! As much of the zip format as `.npz` files and data sets use: stored and deflated members, found by the central directory.

use std::io::Read;

use super::SIZE_LIMIT_BYTES;

const END_LEN: usize = 22;
const CENTRAL_LEN: usize = 46;
const LOCAL_LEN: usize = 30;

/// Names and contents of the members that are asked for, or what is wrong with the archive.
pub(crate) fn members(bytes: &[u8], wanted: impl Fn(&str) -> bool) -> Result<Vec<(String, Vec<u8>)>, String> {
    let end_at = (0..=bytes.len().saturating_sub(END_LEN))
        .rev()
        .take(1 << 16) // The comment behind the end record is shorter than that.
        .find(|&at| bytes[at..].starts_with(b"PK\x05\x06"))
        .ok_or("no end record")?;
    let end = Fields(bytes.get(end_at..end_at + END_LEN).ok_or("a short end record")?);
    let n_members = end.u16(10);
    let mut at = end.u32(16);
    let mut members = Vec::new();
    for _ in 0..n_members {
        let entry = Fields(at.checked_add(CENTRAL_LEN).and_then(|to| bytes.get(at..to)).ok_or("a short directory")?);
        if !entry.0.starts_with(b"PK\x01\x02") {
            return Err(format!("no directory entry at byte {at}"));
        }
        let name_at = at + CENTRAL_LEN;
        let name = bytes.get(name_at..name_at + entry.u16(28)).ok_or("a short directory")?;
        let name = String::from_utf8_lossy(name).into_owned();
        if wanted(&name) {
            let content = content(bytes, &entry).map_err(|problem| format!("member `{name}`: {problem}"))?;
            members.push((name, content));
        }
        at = name_at + entry.u16(28) + entry.u16(30) + entry.u16(32);
    }
    Ok(members)
}

/// Content of the member that a directory entry describes.
fn content(bytes: &[u8], entry: &Fields<'_>) -> Result<Vec<u8>, String> {
    let (method, crc) = (entry.u16(10), entry.u32(16));
    let (n_packed, n_bytes, at) = (entry.u32(20), entry.u32(24), entry.u32(42));
    let local = Fields(at.checked_add(LOCAL_LEN).and_then(|to| bytes.get(at..to)).ok_or("its header is cut off")?);
    let from = at + LOCAL_LEN + local.u16(26) + local.u16(28);
    let packed = from.checked_add(n_packed).and_then(|to| bytes.get(from..to)).ok_or("its data are cut off")?;
    let mut content = Vec::new();
    match method {
        0 => content.extend_from_slice(packed),
        8 => {
            let limit = SIZE_LIMIT_BYTES.min(n_bytes as u64 + 1);
            let read = flate2::bufread::DeflateDecoder::new(packed).take(limit).read_to_end(&mut content);
            read.map_err(|e| e.to_string())?;
        }
        _ => return Err(format!("compression method {method} is not supported")),
    }
    if content.len() != n_bytes {
        return Err(format!("{n_bytes} bytes announced, {} found", content.len()));
    }
    let mut check = flate2::Crc::new();
    check.update(&content);
    if check.sum() as usize != crc {
        return Err("its checksum is wrong".into());
    }
    Ok(content)
}

/// Little-endian fields of a record whose length was checked.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u16(&self, at: usize) -> usize {
        usize::from(u16::from_le_bytes([self.0[at], self.0[at + 1]]))
    }

    fn u32(&self, at: usize) -> usize {
        self.u16(at) | self.u16(at + 2) << 16
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use super::*;

    /// An archive of the given members, each deflated.
    pub fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
        let (mut out, mut directory) = (Vec::new(), Vec::new());
        for (name, content) in members {
            let mut crc = flate2::Crc::new();
            crc.update(content);
            let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(content).unwrap();
            let packed = encoder.finish().unwrap();
            let mut common = vec![20, 0, 0, 0, 8, 0, 0, 0, 0, 0];
            for v in [crc.sum(), packed.len() as u32, content.len() as u32, name.len() as u32] {
                common.extend(v.to_le_bytes());
            }
            directory.extend(b"PK\x01\x02\x14\x00");
            directory.extend(&common);
            directory.extend([0; 10]);
            directory.extend((out.len() as u32).to_le_bytes());
            directory.extend(name.as_bytes());
            out.extend(b"PK\x03\x04");
            out.extend(&common);
            out.extend(name.as_bytes());
            out.extend(packed);
        }
        let directory_at = out.len() as u32;
        out.extend(&directory);
        out.extend(b"PK\x05\x06\0\0\0\0");
        out.extend([members.len() as u8, 0, members.len() as u8, 0]);
        out.extend((directory.len() as u32).to_le_bytes());
        out.extend(directory_at.to_le_bytes());
        out.extend([0, 0]);
        out
    }

    #[test]
    fn members_come_back_whole() {
        let long = vec![7; 100_000];
        let bytes = archive(&[("a.npy", b"hello"), ("b.npy", &long)]);
        let expected = vec![("a.npy".to_owned(), b"hello".to_vec()), ("b.npy".to_owned(), long)];
        assert_eq!(members(&bytes, |_| true).unwrap(), expected);
    }

    #[test]
    fn damage_is_an_error_or_does_not_matter() {
        let bytes = archive(&[("a.npy", b"hello hello hello")]);
        for n in 0..bytes.len() {
            assert!(members(&bytes[..n], |_| true).is_err(), "cut at {n}");
        }
        for at in 0..bytes.len() {
            for flip in [1, 0x80, 0xff] {
                let mut damaged = bytes.clone();
                damaged[at] ^= flip;
                // Some bytes (names, dates, versions) do not matter; damaged content is never taken for whole.
                for (_, content) in members(&damaged, |_| true).unwrap_or_default() {
                    assert_eq!(content, b"hello hello hello", "byte {at}");
                }
            }
        }
    }
}
