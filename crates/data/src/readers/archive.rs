//! Unpacks an official `.tar.gz`.
//!
//! Only members listed here are written, under the names listed here. Names in the archive are compared and never used
//! as paths, so no archive can write elsewhere. Every file is checked by size and MD5 before it gets its final name;
//! an interrupted unpacking starts again.

use std::fs::{self, File};
use std::io::{BufReader, Read, Write};
use std::path::Path;

use flate2::bufread::GzDecoder;
use md5::{Digest, Md5};

use crate::error::{Error, Result};
use crate::registry::Files;

/// An official archive.
pub(super) struct Archive {
    pub file: &'static str,
    /// Folder inside the archive, and below the data directory.
    pub folder: &'static str,
    pub members: &'static [Member],
}

/// The form in which an archive ships its members.
pub(super) struct Form {
    /// Folder inside the archive.
    pub folder: &'static str,
    /// Names of the members there, in the order of [`Archive::members`].
    pub names: &'static [&'static str],
    /// Makes a member of what is there, or says what is wrong with it.
    pub convert: fn(&[u8]) -> Result<Vec<u8>, String>,
}

/// A file of an archive that is needed.
pub(super) struct Member {
    pub file: &'static str,
    pub n_bytes: u64,
    pub md5: &'static str,
}

impl Archive {
    /// Unpacks the archive if it is in the data directory and its files are not.
    pub fn unpack_if_needed(&self, data_dir: Option<&Path>, files: &Files) -> Result<()> {
        match data_dir {
            Some(dir) if files.locate(dir).is_none() && dir.join(self.file).is_file() => {
                self.unpack(&dir.join(self.file), dir, None)
            }
            _ => Ok(()),
        }
    }

    /// Unpacks `archive` into the data directory; its members are checked, in whatever form they come.
    pub fn unpack(&self, archive: &Path, data_dir: &Path, form: Option<&Form>) -> Result<()> {
        // Two processes may do this at once: each has its own folder, and the renames replace equal by equal.
        let partial = data_dir.join(format!(".{}.{}.partial", self.folder, std::process::id()));
        fs::create_dir_all(&partial).map_err(Error::io("unpack into", &partial))?;
        let done = self.write_members(archive, form, &partial).and_then(|()| {
            let folder = data_dir.join(self.folder);
            fs::create_dir_all(&folder).map_err(Error::io("unpack into", &folder))?;
            for Member { file, .. } in self.members {
                fs::rename(partial.join(file), folder.join(file)).map_err(Error::io("unpack into", &folder))?;
            }
            Ok(())
        });
        let removed = fs::remove_dir_all(&partial).map_err(Error::io("remove", &partial));
        done.and(removed)
    }

    fn write_members(&self, archive: &Path, form: Option<&Form>, into: &Path) -> Result<()> {
        let name = |at: usize| match form {
            Some(form) => format!("{}/{}", form.folder, form.names[at]),
            None => format!("{}/{}", self.folder, self.members[at].file),
        };
        let mut is_written = vec![false; self.members.len()];
        each_file(archive, |path, content| {
            let Some(at) = (0..self.members.len()).find(|&at| path == name(at)) else { return Ok(()) };
            is_written[at] = true;
            let Some(form) = form else { return self.members[at].write(archive, content, into) };
            let mut bytes = Vec::new();
            // The other form of a member is about as large.
            content.take(2 * self.members[at].n_bytes).read_to_end(&mut bytes).map_err(Error::io("unpack", archive))?;
            let converted = (form.convert)(&bytes)
                .map_err(|found| not_official(archive, &format!("`{}`", name(at)), "a batch of images", found))?;
            self.members[at].write(archive, &mut &converted[..], into)
        })?;
        match is_written.iter().position(|written| !written) {
            None => Ok(()),
            Some(at) => {
                Err(not_official(archive, "list of members", &format!("`{}`", name(at)), "no such file".into()))
            }
        }
    }
}

impl Member {
    fn write(&self, archive: &Path, content: &mut dyn Read, into: &Path) -> Result<()> {
        let path = into.join(self.file);
        let mut file = File::create(&path).map_err(Error::io("write", &path))?;
        let mut digest = Md5::new();
        let mut buffer = vec![0; 1 << 16];
        // One byte more than expected is enough to see that a member is too long.
        let mut content = content.take(self.n_bytes + 1);
        loop {
            let n = content.read(&mut buffer).map_err(Error::io("unpack", archive))?;
            if n == 0 {
                break;
            }
            digest.update(&buffer[..n]);
            file.write_all(&buffer[..n]).map_err(Error::io("write", &path))?;
        }
        file.sync_all().map_err(Error::io("write", &path))?;
        let found = format!("{:x}", digest.finalize());
        if found == self.md5 {
            return Ok(());
        }
        Err(Error::Checksum { file: format!("{}: {}", archive.display(), self.file), expected: self.md5, found })
    }
}

/// Calls `visit` with the name and the content of every file of a `.tar.gz`.
pub(crate) fn each_file(archive: &Path, mut visit: impl FnMut(&str, &mut dyn Read) -> Result<()>) -> Result<()> {
    let read_error = || Error::io("unpack", archive);
    let file = BufReader::new(File::open(archive).map_err(read_error())?);
    for entry in tar::Archive::new(GzDecoder::new(file)).entries().map_err(read_error())? {
        let mut entry = entry.map_err(read_error())?;
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        if entry.header().entry_type().is_file() {
            visit(&name, &mut entry)?;
        }
    }
    Ok(())
}

/// An archive that holds something else than the published one.
pub(super) fn not_official(archive: &Path, place: &str, expected: &str, found: String) -> Error {
    Error::malformed(archive.display(), place, expected, found, "this is not the official archive; fetch it again")
}

/// MD5 of a file.
pub(crate) fn md5_of(path: &Path) -> Result<String> {
    let mut file = File::open(path).map_err(Error::io("read", path))?;
    let mut digest = Md5::new();
    std::io::copy(&mut file, &mut digest).map_err(Error::io("read", path))?;
    Ok(format!("{:x}", digest.finalize()))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const HELLO: Archive = Archive {
        file: "a.tar.gz",
        folder: "box",
        members: &[Member { file: "hello", n_bytes: 5, md5: "5d41402abc4b2a76b9719d911017c592" }],
    };

    /// A `.tar.gz` with the given raw names and contents; the names go into the header unchecked.
    pub fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
        let gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        let mut tar = tar::Builder::new(gz);
        for (name, content) in entries {
            let mut header = tar::Header::new_gnu();
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_size(content.len() as u64);
            header.set_entry_type(tar::EntryType::Regular);
            header.set_mode(0o644);
            header.set_cksum();
            tar.append(&header, *content).unwrap();
        }
        tar.into_inner().unwrap().finish().unwrap()
    }

    /// Unpacks `bytes` and returns what was written below and beside the data directory.
    fn check(bytes: &[u8]) -> (Result<()>, Vec<String>) {
        let outer = tempfile::tempdir().unwrap();
        let dir = outer.path().join("data");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join(HELLO.file), bytes).unwrap();
        let result = HELLO.unpack(&dir.join(HELLO.file), &dir, None);
        let names = |dir: &Path| fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut all: Vec<String> = names(outer.path()).chain(names(&dir)).collect();
        all.sort();
        (result, all)
    }

    #[test]
    fn listed_members_are_written_and_checked() {
        let (result, names) = check(&archive(&[("box/readme", b"x"), ("box/hello", b"hello")]));
        result.unwrap();
        assert_eq!(names, ["a.tar.gz", "box", "data"]);
    }

    #[test]
    fn members_in_another_form_are_converted_and_checked() {
        let form = Form { folder: "other", names: &["hi"], convert: |bytes| Ok(bytes.to_ascii_lowercase()) };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b.tar.gz");
        fs::write(&path, archive(&[("other/hi", b"HELLO")])).unwrap();
        HELLO.unpack(&path, dir.path(), Some(&form)).unwrap();
        assert_eq!(fs::read(dir.path().join("box/hello")).unwrap(), b"hello");
        let broken = Form { convert: |_| Err("nonsense".into()), ..form };
        let message = HELLO.unpack(&path, dir.path(), Some(&broken)).unwrap_err().to_string();
        assert!(message.contains("`other/hi`") && message.contains("nonsense"), "{message}");
    }

    #[test]
    fn paths_outside_the_data_directory_are_never_written() {
        let (result, names) =
            check(&archive(&[("../hello", b"hello"), ("box/../../hello", b"hello"), ("/hello", b"")]));
        assert!(result.unwrap_err().to_string().contains("`box/hello`"));
        assert_eq!(names, ["a.tar.gz", "data"]);
    }

    #[test]
    fn damaged_archives_leave_nothing_behind() {
        let whole = archive(&[("box/hello", b"hello")]);
        let cases =
            [archive(&[("box/hello", b"hellO")]), archive(&[("box/hello", b"hello!")]), whole[..40].to_vec(), vec![]];
        for bytes in cases {
            let (result, names) = check(&bytes);
            assert!(result.is_err());
            assert_eq!(names, ["a.tar.gz", "data"]);
        }
    }
}
