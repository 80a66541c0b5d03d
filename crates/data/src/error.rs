//! What can go wrong with data. Messages name what failed, where, what was expected and found, and a hint.

use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong with a data set or a partition.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system reported an error.
    #[error("cannot {action} `{}`: {source}{}", path.display(), hint_of(source))]
    Io {
        /// What was tried, as a verb: "read", "unpack into".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file does not follow its format.
    #[error("`{file}`, {place}: expected {expected}, found {found}\nhint: {hint}")]
    Malformed {
        /// File, and for an archive its member.
        file: String,
        /// Record, line or field.
        place: String,
        /// What the format asks for.
        expected: String,
        /// What is there.
        found: String,
        /// How to mend it.
        hint: &'static str,
    },
    /// A label names a class that does not exist.
    #[error(
        "`{file}`, record {record}: label {label} is out of range for {n_classes} classes\n\
         hint: the file is damaged or belongs to another data set"
    )]
    LabelOutOfRange {
        /// The file or the name of the data set.
        file: String,
        /// Position of the sample, counted from 0.
        record: usize,
        /// The label found.
        label: u64,
        /// How many classes there are.
        n_classes: usize,
    },
    /// The content of a known file is not the published one.
    #[error(
        "`{file}`: MD5 is {found}, the published file has {expected}\n\
         hint: the download is damaged; fetch the archive again"
    )]
    Checksum {
        /// File inside its archive.
        file: String,
        /// Published digest.
        expected: &'static str,
        /// Digest of the actual bytes.
        found: String,
    },
    /// A known data set is not in the data directory.
    #[error("data set `{name}` is not under {looked_in}: no `{missing}`\nhint: {hint}")]
    Missing {
        /// Name in the registry.
        name: &'static str,
        /// The data directory, or that none was given.
        looked_in: String,
        /// First file that is not there.
        missing: String,
        /// How to get the data set.
        hint: String,
    },
    /// No data set of this name.
    #[error("unknown data set `{name}`\nhint: {hint}")]
    UnknownDataset {
        /// The name asked for.
        name: String,
        /// Near matches, or all known names.
        hint: String,
    },
    /// An option that the reader does not take, lacks or cannot honour.
    #[error("data set `{name}`: {problem}\nhint: {hint}")]
    BadOption {
        /// Name in the registry.
        name: String,
        /// Which option and why.
        problem: String,
        /// What to write instead.
        hint: String,
    },
    /// Parts of a data set do not fit together.
    #[error("data set `{name}`: {problem}")]
    Inconsistent {
        /// Name of the data set.
        name: String,
        /// The numbers that disagree.
        problem: String,
    },
    /// A split that cannot exist.
    #[error("cannot split `{name}`: {problem}\nhint: {hint}")]
    ImpossibleSplit {
        /// Name of the data set.
        name: String,
        /// Why, with the numbers.
        problem: String,
        /// What to change.
        hint: &'static str,
    },
    /// A partition that cannot exist.
    #[error("{kind} partition is impossible: {problem}\nhint: {hint}")]
    ImpossiblePartition {
        /// Kind as written in the configuration.
        kind: &'static str,
        /// Why, with the numbers.
        problem: String,
        /// What to change.
        hint: String,
    },
}

impl Error {
    /// Whether what was asked for is wrong; otherwise the data are.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::UnknownDataset { .. }
                | Self::BadOption { .. }
                | Self::ImpossiblePartition { .. }
                | Self::ImpossibleSplit { .. }
        )
    }

    /// Turns an I/O error into one that names the path; for `map_err`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }

    /// A file, or a member of an archive, that does not follow its format.
    pub(crate) fn malformed(
        file: impl std::fmt::Display,
        place: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
        hint: &'static str,
    ) -> Self {
        let (place, expected, found) = (place.into(), expected.into(), found.into());
        Self::Malformed { file: file.to_string(), place, expected, found, hint }
    }

    pub(crate) fn impossible(kind: &'static str, problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::ImpossiblePartition { kind, problem: problem.into(), hint: hint.into() }
    }

    pub(crate) fn bad_option(name: &str, problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::BadOption { name: name.to_owned(), problem: problem.into(), hint: hint.into() }
    }

    pub(crate) fn inconsistent(name: &str, problem: impl Into<String>) -> Self {
        Self::Inconsistent { name: name.to_owned(), problem: problem.into() }
    }
}

/// A hint for what the system reports; none where its own words say enough.
fn hint_of(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::NotFound => "\nhint: relative paths start at the data directory, else at the current directory",
        ErrorKind::IsADirectory => {
            "\nhint: it is a folder; name = \"folder\" reads images in class folders, name = \"numpy\" a folder of arrays"
        }
        ErrorKind::PermissionDenied => "\nhint: check who may read it",
        ErrorKind::UnexpectedEof | ErrorKind::InvalidData | ErrorKind::InvalidInput => {
            "\nhint: the file is damaged or cut short; fetch it again"
        }
        _ => "",
    }
}
