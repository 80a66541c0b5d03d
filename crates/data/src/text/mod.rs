//! Texts with labels: what a reader of text files gives, before a [`Tokenizer`] makes a data set of it.

mod cache;
mod table;
mod tokenizer;
mod wordpiece;

pub(crate) use table::{Classes, ColumnRoles, TextTable};
pub use tokenizer::{TextConfig, Tokenizer};

use crate::parts::Parts;

/// One sample: a text, or a pair of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// The text, or the first of a pair.
    pub first: String,
    /// The second of a pair.
    pub second: Option<String>,
}

/// Texts with their labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Texts {
    /// Name of the data set.
    pub name: String,
    /// The samples.
    pub texts: Vec<Text>,
    /// Class of each sample, if known.
    pub labels: Option<Vec<u32>>,
    /// Natural owner of each sample, if known.
    pub groups: Option<Vec<u32>>,
    /// Names of the classes in label order.
    pub class_names: Vec<String>,
}

impl Texts {
    /// BLAKE3 (hex) of texts, labels, groups and class names.
    pub fn hash(&self) -> String {
        let mut parts = Parts::default();
        for text in &self.texts {
            parts.add(text.first.as_bytes());
            parts.add(&[u8::from(text.second.is_some())]);
            parts.add(text.second.as_deref().unwrap_or_default().as_bytes());
        }
        parts.add_ids(self.labels.as_deref().unwrap_or_default());
        parts.add_ids(self.groups.as_deref().unwrap_or_default());
        parts.add(self.class_names.join("\n").as_bytes());
        parts.hex()
    }
}
