//! How a configuration describes a data set, and what a reader returns.

use std::path::PathBuf;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor, value::MapAccessDeserializer};
use serde::{Serialize, Serializer};

use crate::dataset::Dataset;
use crate::error::Result;

/// A data set by name, with the options of its reader.
///
/// A configuration writes it as a name, `"cifar10"`, or as a table, `{ name = "csv", path = "flowers.csv" }`. An
/// option that the named reader does not take is an error.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
pub struct SourceConfig {
    /// Name in the registry; `kind` means the same.
    #[serde(alias = "kind")]
    pub name: String,
    /// File or folder, for formats (`csv`, `folder`, `numpy`, `text`) and the image of procedural crops; below the data
    /// directory, else below the current one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// File of the test part, for `text`; found as `path` is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test: Option<PathBuf>,
    /// Text column of a table of texts, or the two of a table of pairs. Default: all columns but label and group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<TextColumns>,
    /// What `procedural` draws.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<ProceduralSource>,
    /// Seed of `procedural` images; 0 if unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// How many `procedural` images there are; 10 000 if unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples: Option<usize>,
    /// Which labels of CIFAR-100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<LabelSet>,
    /// Label column of a CSV file (default: the last one) or of a table of texts (default: `label`). `"none"`: the file has
    /// no labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<Column>,
    /// Column of a CSV file or table of texts that names the owner of each row. It is no feature then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<Column>,
    /// Order of axes of four-dimensional NumPy arrays, where their shape leaves it open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layout: Option<ImageLayout>,
    /// `[height, width]`: images are resized to it while they are read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resize: Option<[usize; 2]>,
    /// Whether inputs get zero mean and unit variance per channel or feature, measured on the training part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standardise: Option<bool>,
}

/// Sources of images that are drawn from a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProceduralSource {
    /// Shapes of one colour each that cover one another.
    DeadLeaves,
    /// Traces of iterated function systems.
    Fractal,
    /// Smooth noise of several frequencies.
    Noise,
    /// Crops of the image that `path` names: scaled, turned, mirrored and in changed colours.
    Crops,
}

/// CIFAR-100's two sets of labels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LabelSet {
    /// 100 classes.
    #[default]
    Fine,
    /// 20 superclasses.
    Coarse,
}

/// One column of text, or the two of pairs.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(
    untagged,
    expecting = "expected a column or a list of two columns, each by its name or its position counted from 0"
)]
pub enum TextColumns {
    /// A single text.
    One(Column),
    /// A pair.
    Pair([Column; 2]),
}

impl TextColumns {
    pub(crate) fn as_slice(&self) -> &[Column] {
        match self {
            Self::One(column) => std::slice::from_ref(column),
            Self::Pair(columns) => columns,
        }
    }
}

/// A column of a table.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(untagged, expecting = "expected the name of a column or its position counted from 0")]
pub enum Column {
    /// Position, counted from 0.
    Index(usize),
    /// Name in the header line.
    Name(String),
}

impl Column {
    /// Its place among named columns; else what was expected and what is there.
    pub(crate) fn position(&self, names: &[impl AsRef<str>]) -> Result<usize, (String, String)> {
        let (found, expected) = match self {
            Self::Index(i) => (Some(*i).filter(|i| *i < names.len()), format!("a column {i}, counted from 0")),
            Self::Name(name) => {
                (names.iter().position(|field| field.as_ref() == name), format!("a column named `{name}`"))
            }
        };
        let there = || names.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ");
        found.ok_or_else(|| (expected, format!("{} columns: {}", names.len(), there())))
    }
}

/// Order of the axes of an array of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageLayout {
    /// Sample, row, column, channel.
    Nhwc,
    /// Sample, channel, row, column.
    Nchw,
}

/// What a reader returns: data sets, or texts that are not tokenised yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Splits<T = Dataset> {
    /// The training part, or everything if the data set comes in one piece.
    pub train: T,
    /// The published test part, if there is one.
    pub test: Option<T>,
}

impl Splits {
    /// Training and test part as one set, as public sets are used.
    ///
    /// # Errors
    /// If the parts do not fit together.
    pub fn concatenated(self) -> Result<Dataset> {
        match self.test {
            Some(test) => self.train.concatenated(&test),
            None => Ok(self.train),
        }
    }
}

impl<T> Splits<T> {
    /// Applies `change` to both parts.
    pub(crate) fn map<U>(self, change: impl Fn(T) -> Result<U>) -> Result<Splits<U>> {
        Ok(Splits { train: change(self.train)?, test: self.test.map(change).transpose()? })
    }
}

impl SourceConfig {
    /// The data set `name` with default options.
    pub fn named(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// Keys of the options that are set.
    pub(crate) fn options_given(&self) -> Vec<String> {
        let Ok(serde_json::Value::Object(keys)) = serde_json::to_value(self) else { return Vec::new() };
        keys.into_iter().map(|(key, _)| key).filter(|key| key != "name").collect()
    }
}

impl Serialize for SourceConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

// By hand, because serde's untagged enums answer every misspelt key with "did not match any variant".
impl<'de> Deserialize<'de> for SourceConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameOrTable;
        impl<'de> Visitor<'de> for NameOrTable {
            type Value = SourceConfig;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("the name of a data set or a table with `name` and options")
            }

            fn visit_str<E>(self, name: &str) -> Result<SourceConfig, E> {
                Ok(SourceConfig::named(name))
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<SourceConfig, M::Error> {
                // What serde derives for the table, not this implementation.
                SourceConfig::deserialize(MapAccessDeserializer::new(map))
            }
        }
        deserializer.deserialize_any(NameOrTable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct Data {
        private: SourceConfig,
    }

    fn parse(text: &str) -> Result<SourceConfig, String> {
        toml::from_str::<Data>(text).map(|d| d.private).map_err(|e| e.to_string())
    }

    #[test]
    fn a_name_and_a_table_are_both_understood() {
        assert_eq!(parse("private = 'iris'").unwrap(), SourceConfig::named("iris"));
        let csv = parse("private = { name = 'csv', path = 'a.csv', label = 3, group = 'who' }").unwrap();
        assert_eq!(csv.label, Some(Column::Index(3)));
        assert_eq!(csv.options_given(), ["group", "label", "path"]);
    }

    #[test]
    fn misspelt_keys_and_values_are_named() {
        let message = parse("private = { name = 'csv', pth = 'a.csv' }").unwrap_err();
        assert!(message.contains("unknown field `pth`") && message.contains("`path`"), "{message}");
        let message = parse("private = { name = 'cifar100', labels = 'rough' }").unwrap_err();
        assert!(message.contains("`fine` or `coarse`"), "{message}");
        let message = parse("private = 3").unwrap_err();
        assert!(message.contains("the name of a data set"), "{message}");
    }
}
