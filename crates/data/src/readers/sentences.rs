//! The text data sets of the FedProj paper, as TSV files with a header and no quoting: `label`, then `text`, or `premise`
//! and `hypothesis`. Labels are the classes' numbers, in the order below, or their names.

use std::path::Path;

use super::quoted;
use crate::dataset::Shape;
use crate::error::{Error, Result};
use crate::packages::{Package, Publication, write_file, zip_members};
use crate::registry::{Files, Origin, Read, Reader, Request};
use crate::source::Splits;
use crate::text::{Classes, ColumnRoles, TextConfig, TextTable, Texts};

const GLUE_SITE: &str = "https://gluebenchmark.com/tasks";

const SENTIMENT: &[&str] = &["negative", "positive"];
const INFERENCE: &[&str] = &["entailment", "neutral", "contradiction"];
const STARS: &[&str] = &["1 star", "2 stars", "3 stars", "4 stars", "5 stars"];

/// Socher et al., "Recursive Deep Models for Semantic Compositionality Over a Sentiment Treebank", 2013. The test part is
/// GLUE's development set, as in the paper's code: the labels of GLUE's test set are not public.
pub(crate) const SST2: Reader = row(
    "sst2",
    "SST-2: sentiment of sentences of film reviews",
    &["sst2_train.tsv", "sst2_dev.tsv"],
    (67_349, 872, SENTIMENT.len()),
    Some(Publication {
        site: GLUE_SITE,
        forms: &[&[Package::new("SST-2.zip", Some("9f81648d4199384278b86e315dac217c"), install_sst2)]],
    }),
    "put `sst2_train.tsv` and `sst2_dev.tsv`, columns label (0 negative, 1 positive) and text, into the folder `text` of the \
     data directory",
);

/// Williams et al., "A Broad-Coverage Challenge Corpus for Sentence Understanding through Inference", 2018.
pub(crate) const MNLI: Reader = row(
    "mnli",
    "MNLI: does a premise entail a hypothesis",
    &["mnli_train.tsv", "mnli_test.tsv"],
    (392_702, 9_815, INFERENCE.len()),
    Some(Publication { site: GLUE_SITE, forms: &[&[Package::new("MNLI.zip", None, install_mnli)]] }),
    "put `mnli_train.tsv` and `mnli_test.tsv` (its matched development set), columns label (0 entailment, 1 neutral, 2 \
     contradiction), premise and hypothesis, into the folder `text` of the data directory",
);

/// Keung et al., "The Multilingual Amazon Reviews Corpus", 2020; English reviews, as in the paper's code.
pub(crate) const MARC: Reader = row(
    "marc",
    "MARC: stars of English product reviews",
    &["marc.tsv"],
    (210_000, 0, STARS.len()),
    None,
    "its publisher has withdrawn it; put a copy as `marc.tsv`, columns label (0 to 4 for 1 to 5 stars) and text, into the \
     folder `text` of the data directory",
);

/// Go et al., "Twitter Sentiment Classification using Distant Supervision", 2009.
pub(crate) const SENT140: Reader = row(
    "sent140",
    "Sentiment140: tweets; the public set beside SST-2",
    &["sent140.tsv"],
    (1_600_000, 0, SENTIMENT.len()),
    Some(Publication {
        site: "http://help.sentiment140.com/for-students",
        forms: &[&[Package { file: "trainingandtestdata.zip", md5: None, install: quoted::install_sent140 }]],
    }),
    "put `sent140.tsv`, columns label (0 negative, 1 positive) and text, into the folder `text` of the data directory",
);

/// Bowman et al., "A large annotated corpus for learning natural language inference", 2015.
pub(crate) const SNLI: Reader = row(
    "snli",
    "SNLI: premises and hypotheses; the public set beside MNLI",
    &["snli.tsv"],
    (570_000, 0, INFERENCE.len()),
    Some(Publication {
        site: "https://nlp.stanford.edu/projects/snli/",
        forms: &[&[Package::new("snli_1.0.zip", None, install_snli)]],
    }),
    "put `snli.tsv`, columns label (0 entailment, 1 neutral, 2 contradiction), premise and hypothesis, into the folder \
     `text` of the data directory",
);

/// Zhang et al., "Character-level Convolutional Networks for Text Classification", 2015.
pub(crate) const YELP: Reader = row(
    "yelp",
    "Yelp reviews; the public set beside MARC",
    &["yelp.tsv"],
    (700_000, 0, STARS.len()),
    Some(Publication {
        site: "https://course.fast.ai/datasets",
        forms: &[
            &[Package { file: "yelp_review_full_csv.tgz", md5: None, install: quoted::install_yelp }],
            &[Package { file: "yelp_review_full_csv.tar.gz", md5: None, install: quoted::install_yelp }],
        ],
    }),
    "put `yelp.tsv`, columns label (0 to 4 for 1 to 5 stars) and text, into the folder `text` of the data directory",
);

/// A row of the registry: the first member is the training part, the second, if any, the test part.
const fn row(
    name: &'static str,
    about: &'static str,
    members: &'static [&'static str],
    (n_train, n_test, n_classes): (usize, usize, usize),
    publication: Option<Publication>,
    how_to_get: &'static str,
) -> Reader {
    let known = (n_train, n_test, n_classes, Shape::Tokens { len: TextConfig::MAX_LENGTH });
    // The files may also be in the data directory itself.
    let files =
        Files { folders: &["text", ""], members, may_be_gzipped: true, archive: None, publication, how_to_get, known };
    Reader { name, about, origin: Origin::Files(files), options: &[], read: Read::Text(read) }
}

fn install_sst2(archive: &Path, dir: &Path) -> Result<()> {
    // Its columns are sentence and label.
    let parts = zip_members(archive, &["SST-2/train.tsv", "SST-2/dev.tsv"])?;
    write_tables(dir, &["sst2_train.tsv", "sst2_dev.tsv"], parts)
}

fn install_mnli(archive: &Path, dir: &Path) -> Result<()> {
    let names = ["MNLI/train.tsv", "MNLI/dev_matched.tsv"];
    let tables = names.iter().zip(zip_members(archive, &names)?).map(|(name, bytes)| pairs(archive, name, &bytes));
    write_tables(dir, &["mnli_train.tsv", "mnli_test.tsv"], tables.collect::<Result<_>>()?)
}

fn install_snli(archive: &Path, dir: &Path) -> Result<()> {
    let names = ["snli_1.0/snli_1.0_train.txt", "snli_1.0/snli_1.0_dev.txt", "snli_1.0/snli_1.0_test.txt"];
    let mut all = Vec::new();
    for (name, bytes) in names.iter().zip(zip_members(archive, &names)?) {
        let table = pairs(archive, name, &bytes)?;
        // One table has one line of names.
        let rows = if all.is_empty() { 0 } else { PAIR_HEADER.len() };
        all.extend_from_slice(&table[rows..]);
    }
    write_tables(dir, &["snli.tsv"], vec![all])
}

fn write_tables(dir: &Path, names: &[&str], tables: Vec<Vec<u8>>) -> Result<()> {
    names.iter().zip(tables).try_for_each(|(name, table)| write_file(&dir.join("text").join(name), &table))
}

const PAIR_HEADER: &str = "label\tpremise\thypothesis\n";

/// A published table of pairs with our three columns. Pairs on whose label the annotators did not agree (`-`) are left out.
fn pairs(archive: &Path, member: &str, bytes: &[u8]) -> Result<Vec<u8>> {
    let malformed = |line: usize, expected: &str, found: String| {
        let (file, place) = (format!("{}: {member}", archive.display()), format!("line {line}"));
        Error::malformed(file, place, expected, found, "this is not the published file; fetch it again")
    };
    let text = std::str::from_utf8(bytes).map_err(|e| malformed(1, "UTF-8 text", e.to_string()))?;
    let mut lines = text.lines().enumerate();
    let header: Vec<&str> = lines.next().map_or(Vec::new(), |(_, line)| line.split('\t').collect());
    let column = |name: &str| {
        let at = header.iter().position(|field| *field == name);
        at.ok_or_else(|| malformed(1, &format!("a column `{name}`"), header.join(", ")))
    };
    let columns = [column("gold_label")?, column("sentence1")?, column("sentence2")?];
    let mut out = PAIR_HEADER.to_owned();
    for (at, line) in lines {
        let fields: Vec<&str> = line.split('\t').collect();
        let [label, premise, hypothesis] = columns.map(|column| fields.get(column).copied());
        let (Some(label), Some(premise), Some(hypothesis)) = (label, premise, hypothesis) else {
            return Err(malformed(at + 1, &format!("{} fields", header.len()), fields.len().to_string()));
        };
        if label != "-" {
            out += &[label, premise, hypothesis].join("\t");
            out.push('\n');
        }
    }
    Ok(out.into_bytes())
}

fn read(request: &Request<'_>) -> Result<Splits<Texts>> {
    let reader = crate::registry::find(request.name)?;
    let Origin::Files(files) = &reader.origin else {
        return Err(Error::inconsistent(request.name, "it has no files"));
    };
    let classes = match request.name {
        "sst2" | "sent140" => SENTIMENT,
        "mnli" | "snli" => INFERENCE,
        _ => STARS,
    };
    let classes: Vec<String> = classes.iter().map(|&class| class.to_owned()).collect();
    let folder = request.folder(files)?;
    let part = |member: &str, name: String| {
        let plain = folder.join(member);
        let path = if plain.exists() { plain } else { folder.join(format!("{member}.gz")) };
        let roles = ColumnRoles { text: None, label: None, group: None };
        let mut texts = TextTable::read(&path, &roles)?.into_texts(&name, &Classes::Known(&classes))?;
        if request.name == MNLI.name {
            // Copies of MNLI differ in whether sentences kept their final full stop; without it they agree.
            for text in &mut texts.texts {
                strip_full_stop(&mut text.first);
                text.second.iter_mut().for_each(strip_full_stop);
            }
        }
        Ok(texts)
    };
    let test = files.members.get(1).map(|member| part(member, format!("{} test", request.name))).transpose()?;
    Ok(Splits { train: part(files.members[0], request.name.to_owned())?, test })
}

/// A text that is a full stop and nothing else keeps it.
fn strip_full_stop(text: &mut String) {
    if let Some(rest) = text.strip_suffix('.').map(str::trim_end).filter(|rest| !rest.is_empty()) {
        text.truncate(rest.len());
    }
}

#[cfg(test)]
mod tests {
    use super::super::zip::tests::archive;
    use super::*;
    use crate::packages::install;
    use crate::{SourceConfig, load_texts};

    #[test]
    fn published_archives_of_texts_are_read_after_installation() {
        let dir = tempfile::tempdir().unwrap();
        let from = |file: &str| dir.path().join(file);
        let table = b"index\tsentence1\tsentence2\tgold_label\n0\tA man.\tA person.\tentailment\n1\tX\tY\tneutral\n";
        std::fs::write(from("MNLI.zip"), archive(&[("MNLI/train.tsv", table), ("MNLI/dev_matched.tsv", table)]))
            .unwrap();
        let (folder, installed) = install("mnli", &from("MNLI.zip"), dir.path()).unwrap();
        assert_eq!(folder, dir.path().join("text"));
        assert!(installed.len() == 1 && !installed[0].is_published && installed[0].md5.len() == 32, "{installed:?}");
        let mnli = load_texts(&SourceConfig::named("mnli"), Some(dir.path())).unwrap();
        assert_eq!(mnli.train.labels, Some(vec![0, 1]));
        assert_eq!(mnli.train.texts[0].first, "A man");
        assert_eq!(mnli.test.unwrap().texts.len(), 2);

        let open = b"gold_label\tsentence1\tsentence2\n-\tA\tB\ncontradiction\tC\tD\n";
        let names = ["train", "dev", "test"].map(|part| format!("snli_1.0/snli_1.0_{part}.txt"));
        let members: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &open[..])).collect();
        std::fs::write(from("snli_1.0.zip"), archive(&members)).unwrap();
        install("snli", &from("snli_1.0.zip"), dir.path()).unwrap();
        let snli = load_texts(&SourceConfig::named("snli"), Some(dir.path())).unwrap().train;
        assert_eq!(snli.labels, Some(vec![2, 2, 2]), "pairs without a label are left out");

        // A zip that was cut short, and one that lacks a member.
        let whole = std::fs::read(from("MNLI.zip")).unwrap();
        std::fs::write(from("MNLI.zip"), &whole[..whole.len() / 2]).unwrap();
        let message = install("mnli", &from("MNLI.zip"), dir.path()).unwrap_err().to_string();
        assert!(message.contains("MNLI.zip") && message.contains("a whole zip file"), "{message}");
        std::fs::write(from("MNLI.zip"), archive(&[("MNLI/train.tsv", table), ("../MNLI/dev_matched.tsv", table)]))
            .unwrap();
        let message = install("mnli", &from("MNLI.zip"), dir.path()).unwrap_err().to_string();
        assert!(message.contains("`MNLI/dev_matched.tsv`, found no such file"), "{message}");
        // SST-2's checksum is published, so no other file passes.
        let sst2 = b"sentence\tlabel\ngood film\t1\n";
        std::fs::write(from("SST-2.zip"), archive(&[("SST-2/train.tsv", sst2), ("SST-2/dev.tsv", sst2)])).unwrap();
        let message = install("sst2", &from("SST-2.zip"), dir.path()).unwrap_err().to_string();
        assert!(message.contains("the published file has 9f81648d4199384278b86e315dac217c"), "{message}");
        install_sst2(&from("SST-2.zip"), dir.path()).unwrap();
        let sst2 = load_texts(&SourceConfig::named("sst2"), Some(dir.path())).unwrap();
        assert_eq!((sst2.train.labels, &sst2.train.texts[0].first[..]), (Some(vec![1]), "good film"));
    }
}
