//! Published files of data sets: which there are, where to download them, and how they become files of the data directory.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files::write_atomically;
use crate::readers::{each_file, md5_of, zip};
use crate::registry::{Files, Origin, Request, find};
use crate::source::SourceConfig;

/// Where a data set is published, and in which files.
#[derive(Clone, Copy)]
pub struct Publication {
    /// The page to download it from.
    pub site: &'static str,
    /// The forms it comes in. The files of one form belong together.
    pub forms: &'static [&'static [Package]],
}

/// A published file.
pub struct Package {
    /// Its name on the site.
    pub file: &'static str,
    /// Its published MD5; none where this program knows none.
    pub md5: Option<&'static str>,
    /// Puts what it holds into the data directory.
    pub(crate) install: fn(&Path, &Path) -> Result<()>,
}

impl Package {
    pub(crate) const fn new(
        file: &'static str,
        md5: Option<&'static str>,
        install: fn(&Path, &Path) -> Result<()>,
    ) -> Self {
        Self { file, md5, install }
    }
}

/// A file that was installed.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Installed {
    /// The file.
    pub file: PathBuf,
    /// MD5 of its content.
    pub md5: String,
    /// Whether that is the published MD5; otherwise none is known.
    pub is_published: bool,
}

/// The publication of a data set.
///
/// # Errors
/// If there is no such data set, or none that comes in files which this program can unpack.
pub fn publication(name: &str) -> Result<Publication> {
    let reader = find(name)?;
    let problem = match &reader.origin {
        Origin::Files(Files { publication: Some(publication), .. }) => return Ok(*publication),
        Origin::Files(files) => {
            return Err(Error::bad_option(reader.name, "no archive of it is known", files.how_to_get));
        }
        Origin::Embedded | Origin::Drawn => "it is part of the program",
        Origin::Format => "it is a format for files of your own",
    };
    Err(Error::bad_option(reader.name, problem, "`fedproj data` lists the data sets that need files"))
}

/// Installs a data set into the data directory from a published file, or from a folder with published files.
///
/// # Errors
/// If the files are none of the published ones, or are damaged.
pub fn install(name: &str, from: &Path, data_dir: &Path) -> Result<(PathBuf, Vec<Installed>)> {
    let (reader, publication) = (find(name)?, publication(name)?);
    let mut installed = Vec::new();
    let chosen = choose(reader.name, &publication, from)?;
    for (file, package) in &chosen {
        let md5 = md5_of(file)?;
        if let Some(expected) = package.md5.filter(|expected| *expected != md5) {
            return Err(Error::Checksum { file: file.display().to_string(), expected, found: md5 });
        }
        installed.push(Installed { file: file.clone(), md5, is_published: package.md5.is_some() });
    }
    for (file, package) in &chosen {
        (package.install)(file, data_dir)?;
    }
    let Origin::Files(files) = &reader.origin else { unreachable!("a publication consists of files") };
    let config = SourceConfig::named(reader.name);
    let request = Request { name: reader.name, config: &config, data_dir: Some(data_dir) };
    Ok((request.folder(files)?, installed))
}

/// The files of one form at `from`, with what to do with each.
fn choose(name: &str, publication: &Publication, from: &Path) -> Result<Vec<(PathBuf, &'static Package)>> {
    if !from.exists() {
        return Err(Error::bad_option(name, format!("there is no `{}`", from.display()), publication.describe()));
    }
    let folder = if from.is_dir() { from } else { from.parent().unwrap_or(Path::new("")) };
    let is_asked = |form: &&&[Package]| from.is_dir() || form.iter().any(|p| from.file_name() == Some(p.file.as_ref()));
    let is_there = |form: &&&[Package]| form.iter().all(|package| folder.join(package.file).is_file());
    let form = publication.forms.iter().filter(is_asked).find(is_there).ok_or_else(|| {
        let problem = format!("`{}` is not what it is published as", from.display());
        Error::bad_option(name, problem, publication.describe())
    })?;
    Ok(form.iter().map(|package| (folder.join(package.file), package)).collect())
}

impl Publication {
    /// `SITE offers A; B; or C with D`.
    fn describe(&self) -> String {
        let form = |form: &&[Package]| form.iter().map(|package| package.file).collect::<Vec<_>>().join(" with ");
        format!("{} offers {}", self.site, self.forms.iter().map(form).collect::<Vec<_>>().join("; or "))
    }
}

/// Writes a file, and its folder if there is none.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new(""));
    fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    write_atomically(path, bytes).map_err(Error::io("write", path))
}

/// Largest member of an archive that is read into memory.
const MEMBER_BYTES_MAX: u64 = 1 << 31;

/// The members of a `.tar.gz`, in the order of their names here. Names in the archive are compared and never used as paths.
pub(crate) fn tar_members(archive: &Path, names: &[&str]) -> Result<Vec<Vec<u8>>> {
    let mut found = vec![None; names.len()];
    each_file(archive, |path, content| {
        let Some(at) = names.iter().position(|name| *name == path) else { return Ok(()) };
        let mut bytes = Vec::new();
        content.take(MEMBER_BYTES_MAX).read_to_end(&mut bytes).map_err(Error::io("unpack", archive))?;
        found[at] = Some(bytes);
        Ok(())
    })?;
    found.into_iter().zip(names).map(|(bytes, name)| bytes.ok_or_else(|| missing(archive, name))).collect()
}

/// The members of a zip file, in the order of their names here. Names in the archive are compared and never used as paths.
pub(crate) fn zip_members(archive: &Path, names: &[&str]) -> Result<Vec<Vec<u8>>> {
    let bytes = fs::read(archive).map_err(Error::io("read", archive))?;
    let members = zip::members(&bytes, |name| names.contains(&name))
        .map_err(|found| damaged(archive, "archive", "a whole zip file", &found))?;
    let content = |name: &&str| {
        let found = members.iter().find(|(member, _)| member == name).map(|(_, content)| content.clone());
        found.ok_or_else(|| missing(archive, name))
    };
    names.iter().map(content).collect()
}

fn missing(archive: &Path, member: &str) -> Error {
    damaged(archive, "list of members", &format!("`{member}`"), "no such file")
}

fn damaged(archive: &Path, place: &str, expected: &str, found: &str) -> Error {
    let hint = "the download is damaged or another file; fetch it again";
    Error::malformed(archive.display(), place, expected, found, hint)
}
