//! What is known, what is there, and how to get the rest: plain data for `fedproj data` to print.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::dataset::{Dataset, Shape};
use crate::error::Result;
use crate::registry::{Files, Origin, READERS, Reader, find, load, load_texts};
use crate::source::{SourceConfig, Splits};
use crate::text::Texts;

/// How closely to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Only whether the files are there; counts are the published ones.
    Presence,
    /// Read everything found: real counts, hashes, and what is wrong with damaged files. Unpacks archives.
    Contents,
}

/// One data set or format.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Entry {
    /// Name, as users write it.
    pub name: &'static str,
    /// What it is, in a few words.
    pub about: &'static str,
    /// Whether it can be used now.
    pub state: State,
    /// Folder or archive that was found.
    pub location: Option<PathBuf>,
    /// Shape of one sample.
    pub shape: Option<Shape>,
    /// Number of classes.
    pub n_classes: Option<usize>,
    /// The training part.
    pub train: Option<Part>,
    /// The test part, if the data set has one.
    pub test: Option<Part>,
    /// Option keys it takes.
    pub options: &'static [&'static str],
    /// Files that must be in the data directory.
    pub files: Vec<String>,
    /// How to get it, for one that is not there.
    pub how_to_get: Option<&'static str>,
    /// Why it cannot be read although it is there.
    pub problem: Option<String>,
}

/// Whether a data set can be used now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Compiled into the program.
    Embedded,
    /// In the data directory.
    Found,
    /// Its official archive is in the data directory and will be unpacked on first use.
    Archive,
    /// Not there.
    Missing,
    /// There, but it cannot be read; see [`Entry::problem`].
    Damaged,
    /// A format for the user's own files.
    Format,
    /// Drawn from a seed.
    Drawn,
}

/// One part of a data set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// How many samples.
    pub n_samples: usize,
    /// [`Dataset::hash`] or [`Texts::hash`], if the content was read.
    pub hash: Option<String>,
}

/// What is in one part of a data set.
pub struct Content {
    /// Its size and its hash.
    pub part: Part,
    /// Shape of one sample; none of texts, where it depends on the tokeniser.
    pub shape: Option<Shape>,
    /// Names of the classes.
    pub classes: Vec<String>,
    /// Samples of each class.
    pub counts: Vec<usize>,
}

impl Content {
    fn new(n_samples: usize, hash: String, shape: Option<Shape>, labels: Option<&[u32]>, classes: &[String]) -> Self {
        let mut counts = vec![0; classes.len()];
        for &label in labels.unwrap_or_default() {
            counts[label as usize] += 1;
        }
        Self { part: Part { n_samples, hash: Some(hash) }, shape, classes: classes.to_vec(), counts }
    }
}

/// Reads a data set, of numbers or of texts, and counts what it holds.
///
/// # Errors
/// As [`load`].
pub fn read(name: &str, data_dir: Option<&Path>) -> Result<Splits<Content>> {
    let config = SourceConfig::named(name);
    if find(name)?.is_text() {
        let content = |t: Texts| Content::new(t.texts.len(), t.hash(), None, t.labels.as_deref(), &t.class_names);
        load_texts(&config, data_dir)?.map(|texts| Ok(content(texts)))
    } else {
        let content = |d: Dataset| Content::new(d.n_samples(), d.hash(), Some(d.shape()), d.labels(), d.class_names());
        load(&config, data_dir)?.map(|data| Ok(content(data)))
    }
}

/// Everything the registry knows, in its order.
///
/// ```
/// use fedproj_data::catalogue::{Depth, State, list};
///
/// let entries = list(None, Depth::Contents);
/// assert!(entries.iter().any(|e| e.name == "iris" && e.state == State::Embedded));
/// assert!(entries.iter().any(|e| e.name == "cifar10" && e.state == State::Missing));
/// ```
pub fn list(data_dir: Option<&Path>, depth: Depth) -> Vec<Entry> {
    READERS.iter().map(|reader| entry(reader, data_dir, depth)).collect()
}

fn entry(reader: &Reader, data_dir: Option<&Path>, depth: Depth) -> Entry {
    let (state, location) = match &reader.origin {
        Origin::Embedded => (State::Embedded, None),
        Origin::Format => (State::Format, None),
        Origin::Drawn => (State::Drawn, None),
        Origin::Files(files) => data_dir.map_or((State::Missing, None), |dir| presence(files, dir)),
    };
    let mut entry = Entry {
        name: reader.name,
        about: reader.about,
        state,
        location,
        shape: None,
        n_classes: None,
        train: None,
        test: None,
        options: reader.options,
        files: Vec::new(),
        how_to_get: None,
        problem: None,
    };
    if let Origin::Files(files) = &reader.origin {
        let (n_train, n_test, n_classes, shape) = files.known;
        entry.shape = Some(shape);
        entry.n_classes = Some(n_classes);
        entry.train = Some(Part { n_samples: n_train, hash: None });
        entry.test = (n_test > 0).then_some(Part { n_samples: n_test, hash: None });
        entry.files = files.members.iter().map(|m| format!("{}/{m}", files.folders[0])).collect();
        entry.how_to_get = (state == State::Missing).then_some(files.how_to_get);
    }
    let is_readable = matches!(state, State::Found | State::Archive) && depth == Depth::Contents;
    if (state == State::Embedded || is_readable)
        && let Err(error) = inspect(&mut entry, data_dir)
    {
        entry.state = State::Damaged;
        entry.problem = Some(error.to_string());
    }
    if let (State::Archive, Origin::Files(files), Some(dir), true) =
        (entry.state, &reader.origin, data_dir, is_readable)
    {
        // Reading has unpacked it.
        (entry.state, entry.location) = presence(files, dir);
    }
    entry
}

fn presence(files: &Files, data_dir: &Path) -> (State, Option<PathBuf>) {
    if let Some(folder) = files.locate(data_dir) {
        return (State::Found, Some(folder));
    }
    match files.archive.map(|archive| data_dir.join(archive)).filter(|path| path.is_file()) {
        Some(archive) => (State::Archive, Some(archive)),
        None => (State::Missing, None),
    }
}

/// Reads the data set and puts what it really holds into `entry`.
fn inspect(entry: &mut Entry, data_dir: Option<&Path>) -> Result<()> {
    let Splits { train, test } = read(entry.name, data_dir)?;
    entry.shape = train.shape.or(entry.shape);
    entry.n_classes = Some(train.classes.len());
    entry.train = Some(train.part);
    entry.test = test.map(|test| test.part);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_follow_the_data_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("cifar-10-binary.tar.gz"), "no archive").unwrap();
        let folder = dir.path().join("tinyimagenet32");
        std::fs::create_dir(&folder).unwrap();
        for file in ["train50.bin", "val.bin"] {
            std::fs::write(folder.join(file), [0; 10]).unwrap();
        }
        let state = |depth, name| {
            let entries = list(Some(dir.path()), depth);
            entries.into_iter().find(|e| e.name == name).unwrap()
        };
        assert_eq!(state(Depth::Presence, "cifar10").state, State::Archive);
        assert_eq!(state(Depth::Presence, "tinyimagenet32").state, State::Found);
        assert_eq!(state(Depth::Presence, "csv").state, State::Format);
        let missing = state(Depth::Presence, "cifar100");
        assert_eq!(missing.state, State::Missing);
        assert!(missing.how_to_get.is_some_and(|h| h.contains("cifar-100-binary.tar.gz")));
        let damaged = state(Depth::Contents, "tinyimagenet32");
        assert_eq!(damaged.state, State::Damaged);
        assert!(damaged.problem.is_some_and(|p| p.contains("train50.bin")));
        assert_eq!(state(Depth::Contents, "cifar10").state, State::Damaged);
        let iris = state(Depth::Presence, "iris");
        assert_eq!(iris.train.map(|t| t.n_samples), Some(150));
    }

    #[test]
    fn entries_become_json() {
        let json = serde_json::to_value(list(None, Depth::Presence)).unwrap();
        assert_eq!(json[0]["name"], "iris");
        assert_eq!(json[0]["state"], "embedded");
        assert_eq!(json[2]["shape"]["image"]["height"], 32);
    }
}
