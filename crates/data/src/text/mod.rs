//! Texts with labels: what a reader of text files gives, before a [`Tokenizer`] makes a data set of it.

mod cache;
mod table;
mod tokenizer;

pub(crate) use table::{Classes, Layout, Table};
pub use tokenizer::{TextConfig, Tokenizer};

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
        let mut hasher = blake3::Hasher::new();
        // Each part is preceded by its length, so that no two different sets feed the same bytes.
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        for text in &self.texts {
            part(text.first.as_bytes());
            part(&[u8::from(text.second.is_some())]);
            part(text.second.as_deref().unwrap_or_default().as_bytes());
        }
        for ids in [&self.labels, &self.groups] {
            part(&ids.iter().flatten().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
        }
        part(self.class_names.join("\n").as_bytes());
        hasher.finalize().to_hex().to_string()
    }
}
