//! The table of data sets and formats: one line each.

use std::path::{Path, PathBuf};

use crate::dataset::Shape;
use crate::error::{Error, Result};
use crate::packages::Publication;
use crate::readers;
use crate::source::{SourceConfig, Splits};
use crate::spelling::near;
use crate::text::{Texts, Tokenizer};

/// Every data set and format that [`load`] knows, in the order in which they are listed.
pub static READERS: &[Reader] = &[
    readers::iris::READER,
    readers::digits::READER,
    readers::cifar10::READER,
    readers::cifar100::READER,
    readers::cinic10::READER,
    readers::tinyimagenet32::READER,
    readers::mnist::MNIST,
    readers::mnist::FASHION,
    readers::sentences::SST2,
    readers::sentences::MNLI,
    readers::sentences::MARC,
    readers::sentences::SENT140,
    readers::sentences::SNLI,
    readers::sentences::YELP,
    readers::procedural::READER,
    readers::csv::READER,
    readers::folder::READER,
    readers::numpy::READER,
    readers::text::READER,
];

/// One row of the table.
pub struct Reader {
    /// Name, as users write it.
    pub name: &'static str,
    /// What it is, in a few words.
    pub about: &'static str,
    /// Where its samples come from.
    pub origin: Origin,
    /// Option keys of [`SourceConfig`] that it takes.
    pub options: &'static [&'static str],
    /// Reads it.
    pub read: Read,
}

/// How a row reads, by the kind of its samples.
pub enum Read {
    /// Images or tables of numbers.
    Numbers(fn(&Request<'_>) -> Result<Splits>),
    /// Texts, which need a tokeniser.
    Text(fn(&Request<'_>) -> Result<Splits<Texts>>),
}

/// Where the samples of a reader come from.
pub enum Origin {
    /// Compiled into the program.
    Embedded,
    /// Known files in the data directory.
    Files(Files),
    /// Any file or folder that the `path` option names.
    Format,
    /// Drawn from a seed.
    Drawn,
}

/// A published data set in the data directory.
pub struct Files {
    /// Folders that may hold it, relative to the data directory.
    pub folders: &'static [&'static str],
    /// Files or folders that must be in there.
    pub members: &'static [&'static str],
    /// Whether members may have `.gz` appended.
    pub may_be_gzipped: bool,
    /// Official archive; it is unpacked if it is in the data directory.
    pub archive: Option<&'static str>,
    /// Where it is published, and in which files; none where this program can unpack none.
    pub publication: Option<Publication>,
    /// How to get it.
    pub how_to_get: &'static str,
    /// Samples for training and for testing, classes, shape of one sample.
    pub known: (usize, usize, usize, Shape),
}

/// What a reader is given.
pub struct Request<'a> {
    /// Name of the row that reads.
    pub name: &'static str,
    /// Options, already checked against the row's list.
    pub config: &'a SourceConfig,
    /// The data directory; embedded data sets need none.
    pub data_dir: Option<&'a Path>,
}

/// Reads a data set of numbers; [`load_with`] also reads texts.
///
/// `data_dir` is needed for anything that is not embedded. An official archive found there is unpacked first.
///
/// ```
/// use fedproj_data::{SourceConfig, load};
///
/// let iris = load(&SourceConfig::named("iris"), None)?.train;
/// assert_eq!((iris.n_samples(), iris.n_classes()), (150, 3));
/// # Ok::<(), fedproj_data::Error>(())
/// ```
///
/// # Errors
/// If the name or an option is unknown, or the files are missing or damaged.
pub fn load(config: &SourceConfig, data_dir: Option<&Path>) -> Result<Splits> {
    load_with(config, data_dir, None)
}

/// As [`load`], with a tokeniser for texts.
///
/// # Errors
/// As [`load`], or if a text data set finds no tokeniser.
pub fn load_with(config: &SourceConfig, data_dir: Option<&Path>, tokenizer: Option<&Tokenizer>) -> Result<Splits> {
    let (reader, request) = request(config, data_dir)?;
    let mut splits = match (&reader.read, tokenizer) {
        (Read::Numbers(read), _) => read(&request)?,
        (Read::Text(read), Some(tokenizer)) => read(&request)?.map(|texts| tokenizer.dataset(texts))?,
        (Read::Text(_), None) => {
            let hint = "set model.name = \"bert\" and model.checkpoint to a BERT folder, or data.text.vocabulary to a vocab.txt";
            return Err(Error::bad_option(reader.name, "texts need a model with a vocabulary", hint));
        }
    };
    if let Some([height, width]) = config.resize {
        splits = splits.map(|part| match part.shape() {
            Shape::Image { height: h, width: w, .. } if [h, w] == [height, width] => Ok(part),
            _ => part.resized(height, width),
        })?;
    }
    if config.standardise == Some(true) {
        let normalisation = splits.train.measured_normalisation();
        splits = splits.map(|part| part.with_normalisation(normalisation.clone()))?;
    }
    Ok(splits)
}

/// The texts of a data set as they are.
///
/// # Errors
/// As [`load`], or if it is no data set of texts.
pub fn load_texts(config: &SourceConfig, data_dir: Option<&Path>) -> Result<Splits<Texts>> {
    let (reader, request) = request(config, data_dir)?;
    match reader.read {
        Read::Text(read) => read(&request),
        Read::Numbers(_) => Err(Error::inconsistent(reader.name, "its samples are no texts")),
    }
}

/// The row of a configuration and what it is given, once the options are known to be the row's.
pub(crate) fn request<'a>(
    config: &'a SourceConfig,
    data_dir: Option<&'a Path>,
) -> Result<(&'static Reader, Request<'a>)> {
    let reader = find(&config.name)?;
    if let Some(key) = config.options_given().iter().find(|key| !reader.options.contains(&key.as_str())) {
        let hint = match reader.options {
            _ if key == "path" => format!("{} is no format; write {{ name = \"csv\", path = … }}", reader.name),
            [] => "it takes no options".to_owned(),
            options => format!("its options are {}", options.join(", ")),
        };
        return Err(Error::bad_option(reader.name, format!("takes no option `{key}`"), hint));
    }
    Ok((reader, Request { name: reader.name, config, data_dir }))
}

/// Checks that the files of a data set are there, without reading them.
///
/// # Errors
/// If the name is unknown or the files are missing; the error shows how to get them.
pub fn check(config: &SourceConfig, data_dir: Option<&Path>) -> Result<()> {
    let reader = find(&config.name)?;
    let request = Request { name: reader.name, config, data_dir };
    match &reader.origin {
        Origin::Embedded | Origin::Drawn => Ok(()),
        Origin::Files(files) => {
            let archive = files.archive.zip(data_dir).map(|(archive, dir)| dir.join(archive));
            if archive.is_some_and(|archive| archive.is_file()) { Ok(()) } else { request.folder(files).map(drop) }
        }
        Origin::Format => {
            let path = request.path()?;
            std::fs::metadata(&path).map(drop).map_err(Error::io("read", &path))
        }
    }
}

/// The row of `name`, in any case.
///
/// # Errors
/// If there is none; the error lists near matches.
pub fn find(name: &str) -> Result<&'static Reader> {
    READERS.iter().find(|r| r.name.eq_ignore_ascii_case(name)).ok_or_else(|| {
        let known = || READERS.iter().map(|r| r.name);
        let hint = match (near(name, known()).as_slice(), format_of(name)) {
            (_, Some(format)) if Path::new(name).is_dir() => {
                format!("the folder of that name: write {{ name = \"{format}\", path = \"{name}\" }}")
            }
            // A shell makes two words of {a=b,c=d}.
            _ if name.contains('=') => {
                "a table needs single quotes around the setting: 'data.private={ name = \"csv\", path = \"…\" }'".into()
            }
            ([], Some(format)) => format!("data of your own: write {{ name = \"{format}\", path = \"{name}\" }}"),
            ([], None) => format!("known are {}", known().collect::<Vec<_>>().join(", ")),
            (near, _) => format!("did you mean {}?", near.join(" or ")),
        };
        Error::UnknownDataset { name: name.to_owned(), hint }
    })
}

/// The format of a file or folder that was given in the place of a name.
fn format_of(path: &str) -> Option<&'static str> {
    match Path::new(path).extension().and_then(|ending| ending.to_str()) {
        Some("csv" | "tsv") => Some("csv"),
        Some("npz" | "npy") => Some("numpy"),
        Some("jsonl") => Some("text"),
        _ => (path.contains(['/', '\\']) || Path::new(path).is_dir()).then_some("folder"),
    }
}

impl Reader {
    /// Whether its samples are texts.
    pub fn is_text(&self) -> bool {
        matches!(self.read, Read::Text(_))
    }
}

impl Files {
    fn has(&self, folder: &Path, member: &str) -> bool {
        folder.join(member).exists() || (self.may_be_gzipped && folder.join(format!("{member}.gz")).exists())
    }

    /// The folder under `data_dir` that holds every member, if there is one.
    pub fn locate(&self, data_dir: &Path) -> Option<PathBuf> {
        let folders = self.folders.iter().map(|f| data_dir.join(f));
        folders.into_iter().find(|folder| self.members.iter().all(|m| self.has(folder, m)))
    }
}

impl Request<'_> {
    /// The folder of the published data set `files`, or an error that shows how to get it.
    pub(crate) fn folder(&self, files: &Files) -> Result<PathBuf> {
        let missing = |looked_in: String, missing: String| Error::Missing {
            name: self.name,
            looked_in,
            missing,
            hint: files.how_to_get.to_owned(),
        };
        let first = format!("{}/{}", files.folders[0], files.members[0]);
        let dir = self.data_dir.ok_or_else(|| {
            missing("any data directory (none was given; use --data-dir or FEDPROJ_DATA)".into(), first)
        })?;
        files.locate(dir).ok_or_else(|| {
            // If a folder exists but is incomplete, name the missing file; otherwise name the first choice.
            let folder = files.folders.iter().find(|f| dir.join(f).is_dir()).unwrap_or(&files.folders[0]);
            let lacking = files.members.iter().find(|m| !files.has(&dir.join(folder), m));
            missing(format!("`{}`", dir.display()), format!("{folder}/{}", lacking.unwrap_or(&files.members[0])))
        })
    }

    /// The file or folder that the `path` option names.
    pub(crate) fn path(&self) -> Result<PathBuf> {
        let path = self.config.path.as_deref().ok_or_else(|| {
            let hint = format!("write {{ name = \"{}\", path = \"…\" }}", self.name);
            Error::bad_option(self.name, "a format needs to know what to read", hint)
        })?;
        Ok(self.resolve(path))
    }

    /// A path of the configuration: below the data directory, else below the working directory.
    pub(crate) fn resolve(&self, path: &Path) -> PathBuf {
        let in_data_dir = self.data_dir.map(|dir| dir.join(path));
        in_data_dir.filter(|there| there.exists() || !path.exists()).unwrap_or_else(|| path.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_get_near_matches() {
        let message = |name| find(name).map(|r| r.name).unwrap_err().to_string();
        assert!(message("CIFAR-10").contains("did you mean cifar10 or cifar100?"), "{}", message("CIFAR-10"));
        assert!(message("iriss").contains("did you mean iris?"));
        assert!(message("imagenet-21k").contains("known are iris, digits"));
        assert!(message("path=points.csv").contains("single quotes around the setting"));
    }

    #[test]
    fn presence_is_told_without_reading() {
        let dir = tempfile::tempdir().unwrap();
        let check = |config: &SourceConfig| check(config, Some(dir.path())).map_err(|e| e.to_string());
        assert_eq!(check(&SourceConfig::named("digits")), Ok(()));
        let message = check(&SourceConfig::named("cifar10")).unwrap_err();
        assert!(message.contains("cifar-10-binary.tar.gz"), "{message}");
        std::fs::write(dir.path().join("cifar-10-binary.tar.gz"), "not looked at").unwrap();
        assert_eq!(check(&SourceConfig::named("cifar10")), Ok(()));
        let csv = SourceConfig { path: Some("a.csv".into()), ..SourceConfig::named("csv") };
        assert!(check(&csv).unwrap_err().contains("a.csv"));
    }

    #[test]
    fn options_of_other_readers_are_refused() {
        let config = SourceConfig { labels: Some(crate::LabelSet::Coarse), ..SourceConfig::named("iris") };
        let message = load(&config, None).unwrap_err().to_string();
        assert!(message.contains("takes no option `labels`"), "{message}");
        let config = SourceConfig { path: Some("mine.csv".into()), ..SourceConfig::named("digits") };
        let message = load(&config, None).unwrap_err().to_string();
        assert!(message.ends_with("hint: digits is no format; write { name = \"csv\", path = … }"), "{message}");
    }

    #[test]
    fn a_path_in_the_place_of_a_name_is_answered_with_its_format() {
        for (name, format) in [
            ("./mine.csv", "csv"),
            ("a.tsv", "csv"),
            ("a.npz", "numpy"),
            ("a.jsonl", "text"),
            ("my/images", "folder"),
            // A folder that is there; tests run in their crate's.
            ("src", "folder"),
        ] {
            let message = load(&SourceConfig::named(name), None).unwrap_err().to_string();
            assert!(message.contains(&format!("{{ name = \"{format}\", path = \"{name}\" }}")), "{message}");
        }
    }

    #[test]
    fn what_is_missing_is_named_with_the_way_to_get_it() {
        let message = load(&SourceConfig::named("cifar10"), None).unwrap_err().to_string();
        assert!(message.contains("none was given") && message.contains("cifar-10-binary.tar.gz"), "{message}");
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("cifar-10-batches-bin")).unwrap();
        std::fs::write(dir.path().join("cifar-10-batches-bin/data_batch_1.bin"), []).unwrap();
        let message = load(&SourceConfig::named("cifar10"), Some(dir.path())).unwrap_err().to_string();
        assert!(message.contains("cifar-10-batches-bin/data_batch_2.bin"), "{message}");
        let message = load(&SourceConfig::named("csv"), None).unwrap_err().to_string();
        assert!(message.contains("path = "), "{message}");
    }
}
