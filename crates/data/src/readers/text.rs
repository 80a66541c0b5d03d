//! The user's own texts: a table with one column of text, or two for pairs, and one of labels; optionally a second table
//! for testing.

use crate::error::Result;
use crate::registry::{Origin, Read, Reader, Request};
use crate::source::Splits;
use crate::text::{Classes, ColumnRoles, TextTable, Texts};

pub(crate) const READER: Reader = Reader {
    name: "text",
    about: "a TSV, CSV or JSON-lines file with one or two columns of text and a label",
    origin: Origin::Format,
    options: &["path", "test", "text", "label", "group"],
    read: Read::Text(read),
};

fn read(request: &Request<'_>) -> Result<Splits<Texts>> {
    let config = request.config;
    let roles = ColumnRoles { text: config.text.as_ref(), label: config.label.as_ref(), group: config.group.as_ref() };
    let train = TextTable::read(&request.path()?, &roles)?.into_texts(request.name, &Classes::Distinct)?;
    let test = |path: &std::path::PathBuf| {
        // The model cannot predict a label that is not in the training file.
        let classes = Classes::Known(&train.class_names);
        TextTable::read(&request.resolve(path), &roles)?.into_texts(&format!("{} test", request.name), &classes)
    };
    let test = config.test.as_ref().map(test).transpose()?;
    Ok(Splits { train, test })
}
