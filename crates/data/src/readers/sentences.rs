//! The text data sets of the FedProj paper, as TSV files with a header and no quoting: `label`, then `text`, or `premise`
//! and `hypothesis`. Labels are the classes' numbers, in the order below, or their names.

use crate::dataset::Shape;
use crate::error::{Error, Result};
use crate::registry::{Files, Origin, Read, Reader, Request};
use crate::source::Splits;
use crate::text::{Classes, ColumnRoles, TextConfig, TextTable, Texts};

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
    "put `sst2_train.tsv` and `sst2_dev.tsv`, columns label (0 negative, 1 positive) and text, into the folder `text` of the \
     data directory",
);

/// Williams et al., "A Broad-Coverage Challenge Corpus for Sentence Understanding through Inference", 2018.
pub(crate) const MNLI: Reader = row(
    "mnli",
    "MNLI: does a premise entail a hypothesis",
    &["mnli_train.tsv", "mnli_test.tsv"],
    (392_702, 9_815, INFERENCE.len()),
    "put `mnli_train.tsv` and `mnli_test.tsv` (its matched development set), columns label (0 entailment, 1 neutral, 2 \
     contradiction), premise and hypothesis, into the folder `text` of the data directory",
);

/// Keung et al., "The Multilingual Amazon Reviews Corpus", 2020; English reviews, as in the paper's code.
pub(crate) const MARC: Reader = row(
    "marc",
    "MARC: stars of English product reviews",
    &["marc.tsv"],
    (210_000, 0, STARS.len()),
    "put `marc.tsv`, columns label (0 to 4 for 1 to 5 stars) and text, into the folder `text` of the data directory",
);

/// Go et al., "Twitter Sentiment Classification using Distant Supervision", 2009.
pub(crate) const SENT140: Reader = row(
    "sent140",
    "Sentiment140: tweets; the public set beside SST-2",
    &["sent140.tsv"],
    (1_600_000, 0, SENTIMENT.len()),
    "put `sent140.tsv`, columns label (0 negative, 1 positive) and text, into the folder `text` of the data directory",
);

/// Bowman et al., "A large annotated corpus for learning natural language inference", 2015.
pub(crate) const SNLI: Reader = row(
    "snli",
    "SNLI: premises and hypotheses; the public set beside MNLI",
    &["snli.tsv"],
    (570_000, 0, INFERENCE.len()),
    "put `snli.tsv`, columns label (0 entailment, 1 neutral, 2 contradiction), premise and hypothesis, into the folder \
     `text` of the data directory",
);

/// Zhang et al., "Character-level Convolutional Networks for Text Classification", 2015.
pub(crate) const YELP: Reader = row(
    "yelp",
    "Yelp reviews; the public set beside MARC",
    &["yelp.tsv"],
    (700_000, 0, STARS.len()),
    "put `yelp.tsv`, columns label (0 to 4 for 1 to 5 stars) and text, into the folder `text` of the data directory",
);

/// A row of the registry: the first member is the training part, the second, if any, the test part.
const fn row(
    name: &'static str,
    about: &'static str,
    members: &'static [&'static str],
    (n_train, n_test, n_classes): (usize, usize, usize),
    how_to_get: &'static str,
) -> Reader {
    let known = (n_train, n_test, n_classes, Shape::Tokens { len: TextConfig::MAX_LENGTH });
    // The files may also be in the data directory itself.
    let files = Files { folders: &["text", ""], members, may_be_gzipped: true, archive: None, how_to_get, known };
    Reader { name, about, origin: Origin::Files(files), options: &[], read: Read::Text(read) }
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
