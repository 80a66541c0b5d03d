//! Published tables of texts in quotes, which become tables of this program: `label` and `text`, separated by tabs.

use std::path::Path;

use crate::error::{Error, Result};
use crate::packages::{tar_members, write_file, zip_members};

/// The names that Sentiment140 and the Yelp reviews are published under.
const TWEETS: &str = "training.1600000.processed.noemoticon.csv";
const REVIEWS: [&str; 2] = ["yelp_review_full_csv/train.csv", "yelp_review_full_csv/test.csv"];

/// Sentiment140: polarity (0 or 4), id, date, query, user and tweet, in Latin-1.
pub(super) fn install_sent140(archive: &Path, dir: &Path) -> Result<()> {
    let bytes = zip_members(archive, &[TWEETS])?.remove(0);
    let text: String = bytes.into_iter().map(char::from).collect();
    let mut table = HEADER.to_owned();
    let rows = Rows { archive, member: TWEETS, n_fields: 6, labels: &["0", "4"], clean: str::to_owned };
    rows.append(&text, &mut table)?;
    write_file(&dir.join("text/sent140.tsv"), table.as_bytes())
}

/// Yelp reviews of Zhang et al.: stars and review, whose line ends are written `\n`. The training part comes first.
pub(super) fn install_yelp(archive: &Path, dir: &Path) -> Result<()> {
    let mut table = HEADER.to_owned();
    for (name, bytes) in REVIEWS.iter().zip(tar_members(archive, &REVIEWS)?) {
        let text = String::from_utf8(bytes)
            .map_err(|e| Error::malformed(archive.display(), *name, "UTF-8 text", e.to_string(), HINT))?;
        let clean = |review: &str| review.replace("\"\"", "\"").replace("\\n", " ");
        let rows = Rows { archive, member: name, n_fields: 2, labels: &["1", "2", "3", "4", "5"], clean };
        rows.append(&text, &mut table)?;
    }
    write_file(&dir.join("text/yelp.tsv"), table.as_bytes())
}

const HEADER: &str = "label\ttext\n";

const HINT: &str = "this is not the published file; fetch it again";

/// The rows of a table whose first field is the label and whose last is the text.
struct Rows<'a> {
    archive: &'a Path,
    member: &'a str,
    n_fields: usize,
    /// The labels that are published, in the order of the classes.
    labels: &'a [&'a str],
    /// Makes a text of the published one.
    clean: fn(&str) -> String,
}

impl Rows<'_> {
    /// Appends them to a table of ours. Rows without a text are skipped.
    fn append(&self, published: &str, table: &mut String) -> Result<()> {
        for (at, line) in published.lines().enumerate() {
            let inside = line.strip_prefix('"').and_then(|line| line.strip_suffix('"')).unwrap_or_default();
            let fields: Vec<&str> = inside.splitn(self.n_fields, "\",\"").collect();
            if fields.len() != self.n_fields {
                return Err(self.malformed(at, format!("{} fields in quotes", self.n_fields), format!("`{line:.80}`")));
            }
            let Some(label) = self.labels.iter().position(|label| *label == fields[0]) else {
                let known = format!("a label of {}", self.labels.join(", "));
                return Err(self.malformed(at, known, format!("`{:.20}`", fields[0])));
            };
            let text = (self.clean)(fields[self.n_fields - 1]).replace('\t', " ");
            if !text.trim().is_empty() {
                table.extend([&label.to_string(), "\t", text.trim(), "\n"]);
            }
        }
        Ok(())
    }

    fn malformed(&self, at: usize, expected: String, found: String) -> Error {
        let file = format!("{}: {}", self.archive.display(), self.member);
        Error::Malformed { file, place: format!("line {}", at + 1), expected, found, hint: HINT }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{archive::tests::archive as tgz, zip::tests::archive as zip};
    use super::*;
    use crate::packages::install;
    use crate::{SourceConfig, load_texts};

    /// The labels and texts of a data set after its archive was installed.
    fn texts(name: &str, archive: &Path) -> (Vec<u32>, Vec<String>) {
        let dir = archive.parent().unwrap();
        install(name, archive, dir).unwrap();
        let train = load_texts(&SourceConfig::named(name), Some(dir)).unwrap().train;
        (train.labels.unwrap(), train.texts.into_iter().map(|text| text.first).collect())
    }

    #[test]
    fn sentiment140_is_read_as_it_is_published() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("trainingandtestdata.zip");
        let row = |polarity: u8, tweet: &str| format!("\"{polarity}\",\"1\",\"Mon\",\"NO_QUERY\",\"me\",\"{tweet}\"\n");
        let rows = row(0, "no, \",\" no\t\\no") + &row(4, "caf\u{e9} &amp; cake ") + &row(4, " ");
        let bytes: Vec<u8> = rows.chars().map(|c| c as u8).collect();
        std::fs::write(&from, zip(&[(TWEETS, &bytes), ("testdata.manual.2009.06.14.csv", b"x")])).unwrap();
        let (labels, tweets) = texts("sent140", &from);
        assert_eq!(labels, [0, 1]);
        assert_eq!(tweets, ["no, \",\" no \\no", "caf\u{e9} &amp; cake"]);
        // Neutral tweets are in the test part only.
        std::fs::write(&from, zip(&[(TWEETS, row(2, "x").as_bytes())])).unwrap();
        let message = install("sent140", &from, dir.path()).unwrap_err().to_string();
        assert!(message.contains("line 1: expected a label of 0, 4, found `2`"), "{message}");
        std::fs::write(&from, zip(&[(TWEETS, b"0,1,2,3,4,5\n")])).unwrap();
        let message = install("sent140", &from, dir.path()).unwrap_err().to_string();
        assert!(message.contains("6 fields in quotes"), "{message}");
    }

    #[test]
    fn yelp_is_read_as_it_is_published() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("yelp_review_full_csv.tgz");
        let (train, test) = ("\"5\",\"So \"\"good\"\".\\nReally, \"\"so\"\"\"\n", "\"1\",\"Bad.\"\n");
        let members = [(REVIEWS[0], train.as_bytes()), (REVIEWS[1], test.as_bytes())];
        std::fs::write(&from, tgz(&members)).unwrap();
        let (labels, reviews) = texts("yelp", &from);
        assert_eq!(labels, [4, 0]);
        assert_eq!(reviews, ["So \"good\". Really, \"so\"", "Bad."]);
        std::fs::write(&from, tgz(&members[..1])).unwrap();
        let message = install("yelp", &from, dir.path()).unwrap_err().to_string();
        assert!(message.contains(REVIEWS[1]) && message.contains("no such file"), "{message}");
        std::fs::write(&from, b"no archive").unwrap();
        assert!(install("yelp", &from, dir.path()).unwrap_err().to_string().contains("yelp_review_full_csv.tgz"));
    }
}
