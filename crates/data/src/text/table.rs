//! Tables of texts: TSV, CSV and JSON lines, with one or two columns of text and one of labels.
//!
//! TSV has no quoting (a `"` is a character), CSV has RFC 4180's, so that a text may hold commas, quotes and line breaks.
//! Both begin with a line of column names. In JSON lines every line is an object.

use std::borrow::Cow;
use std::path::Path;

use serde_json::Value;

use super::{Text, Texts};
use crate::error::{Error, Result};
use crate::readers::{numbered, read_file};
use crate::source::{Column, TextColumns};

/// Which columns hold what.
pub(crate) struct ColumnRoles<'a> {
    /// [default: every column that is neither label nor group]
    pub text: Option<&'a TextColumns>,
    /// [default: the column `label`]; the name `none` means that the table has no labels.
    pub label: Option<&'a Column>,
    /// Who owns a row.
    pub group: Option<&'a Column>,
}

/// What labels may be.
pub(crate) enum Classes<'a> {
    /// Any text: the distinct ones are the classes.
    Distinct,
    /// One of these names, or its position counted from 0.
    Known(&'a [String]),
}

/// The content of a table, column by role.
pub(crate) struct TextTable {
    file: String,
    texts: Vec<Text>,
    /// Each label with its line.
    labels: Option<Vec<(usize, String)>>,
    groups: Option<Vec<String>>,
}

/// A row: the line it begins on, and its fields in the order of the columns asked for.
struct Record<'a> {
    line: usize,
    fields: Vec<Cow<'a, str>>,
}

impl TextTable {
    /// Reads a file. Its name shows which kind it is; a file that ends in `.gz` is unpacked.
    pub fn read(path: &Path, roles: &ColumnRoles<'_>) -> Result<Self> {
        let bytes = read_file(path)?;
        let file = path.display().to_string();
        let name = file.trim_end_matches(".gz");
        let text = std::str::from_utf8(&bytes).map_err(|e| {
            let line = bytes[..e.valid_up_to()].split(|byte| *byte == b'\n').count();
            malformed(&file, line, "UTF-8 text", format!("other bytes (byte {} of the file)", e.valid_up_to()))
        })?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let (columns, records) = match name.rsplit('.').next() {
            Some("tsv") => delimited(&file, roles, text.lines().enumerate().map(tabs))?,
            Some("csv") => delimited(&file, roles, Quoted { rest: text, line: 1 })?,
            Some("jsonl") => json_lines(&file, roles, text)?,
            _ => {
                let hint = "tables of texts are TSV, CSV or JSON lines: name the file .tsv, .csv or .jsonl";
                return Err(Error::bad_option("text", format!("`{file}` is none of the known kinds"), hint));
            }
        };
        columns.table(file, records)
    }

    /// The texts, with classes and groups numbered.
    pub fn into_texts(self, name: &str, classes: &Classes<'_>) -> Result<Texts> {
        let (labels, class_names) = match (self.labels, classes) {
            (None, _) => (None, Vec::new()),
            (Some(labels), Classes::Distinct) => {
                let (ids, names) = numbered(&labels.iter().map(|(_, label)| &label[..]).collect::<Vec<_>>());
                (Some(ids), names)
            }
            (Some(labels), Classes::Known(names)) => {
                let id = |(line, label): &(usize, String)| {
                    let position = label.parse().ok().filter(|id| *id < names.len());
                    let found = names.iter().position(|name| name == label).or(position);
                    found.map(|id| id as u32).ok_or_else(|| {
                        let expected = format!("a label of {} or its number from 0", names.join(", "));
                        malformed(&self.file, *line, expected, format!("the unknown label `{label}`"))
                    })
                };
                (Some(labels.iter().map(id).collect::<Result<_>>()?), names.to_vec())
            }
        };
        let groups = self.groups.map(|g| numbered(&g.iter().map(String::as_str).collect::<Vec<_>>()).0);
        Ok(Texts { name: name.to_owned(), texts: self.texts, labels, groups, class_names })
    }
}

/// Columns by role: positions in a record's fields.
struct Columns {
    texts: Vec<usize>,
    label: Option<usize>,
    group: Option<usize>,
}

impl Columns {
    fn find(file: &str, roles: &ColumnRoles<'_>, names: &[Cow<'_, str>]) -> Result<Self> {
        let position =
            |column: &Column| column.position(names).map_err(|(expected, found)| malformed(file, 1, expected, found));
        let group = roles.group.map(position).transpose()?;
        let label = match roles.label {
            None => Some(position(&Column::Name("label".into()))?),
            Some(Column::Name(name)) if name == "none" => None,
            Some(column) => Some(position(column)?),
        };
        let texts = match roles.text {
            Some(columns) => columns.as_slice().iter().map(position).collect::<Result<Vec<_>>>()?,
            None => (0..names.len()).filter(|c| Some(*c) != label && Some(*c) != group).collect(),
        };
        if texts.is_empty() || texts.len() > 2 {
            let found = format!("{} of {}", texts.len(), names.join(", "));
            return Err(malformed(file, 1, "one column of text, or two (choose them with `text = …`)", found));
        }
        Ok(Self { texts, label, group })
    }

    fn table<'t>(self, file: String, records: impl Iterator<Item = Result<Record<'t>>>) -> Result<TextTable> {
        let mut texts = Vec::new();
        let mut labels = self.label.map(|_| Vec::new());
        let mut groups = self.group.map(|_| Vec::new());
        for record in records {
            let Record { line, fields } = record?;
            let text = |at: &usize| {
                let text = fields[*at].trim();
                let empty = || malformed(&file, line, "a text", format!("an empty field in column {at}"));
                if text.is_empty() { Err(empty()) } else { Ok(text.to_owned()) }
            };
            let second = self.texts.get(1).map(text).transpose()?;
            texts.push(Text { first: text(&self.texts[0])?, second });
            if let (Some(labels), Some(at)) = (&mut labels, self.label) {
                labels.push((line, fields[at].trim().to_owned()));
            }
            if let (Some(groups), Some(at)) = (&mut groups, self.group) {
                groups.push(fields[at].trim().to_owned());
            }
        }
        if texts.is_empty() {
            return Err(malformed(&file, 1, "at least one row of text", "none"));
        }
        Ok(TextTable { file, texts, labels, groups })
    }
}

type Records<'t> = Box<dyn Iterator<Item = Result<Record<'t>>> + 't>;

/// A table whose first record names its columns.
fn delimited<'t>(
    file: &str,
    roles: &ColumnRoles<'_>,
    mut records: impl Iterator<Item = Record<'t>> + 't,
) -> Result<(Columns, Records<'t>)> {
    let Some(header) = records.next() else {
        return Err(malformed(file, 1, "a line of column names", "an empty file"));
    };
    let n_columns = header.fields.len();
    let columns = Columns::find(file, roles, &header.fields)?;
    let file = file.to_owned();
    let check = move |record: Record<'t>| match record.fields.len() {
        n if n == n_columns => Ok(record),
        n => Err(malformed(&file, record.line, format!("{n_columns} fields"), n.to_string())),
    };
    // An empty line is no row of a table of texts, which has no empty fields.
    let is_row = |record: &Record<'t>| record.fields.iter().any(|field| !field.is_empty());
    Ok((columns, Box::new(records.filter(is_row).map(check))))
}

fn tabs((at, line): (usize, &str)) -> Record<'_> {
    Record { line: at + 1, fields: line.split('\t').map(Cow::Borrowed).collect() }
}

/// Records of RFC 4180: a field in double quotes may hold anything, with each of its own quotes doubled.
struct Quoted<'t> {
    rest: &'t str,
    line: usize,
}

impl<'t> Iterator for Quoted<'t> {
    type Item = Record<'t>;

    fn next(&mut self) -> Option<Record<'t>> {
        if self.rest.is_empty() {
            return None;
        }
        let mut record = Record { line: self.line, fields: Vec::new() };
        loop {
            let mut is_quoted = false;
            let end = self.rest.find(|c| {
                is_quoted ^= c == '"';
                (c == ',' || c == '\n') && !is_quoted
            });
            let (field, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
            self.line += field.matches('\n').count();
            let field = field.strip_suffix('\r').unwrap_or(field);
            let inner = field.strip_prefix('"').and_then(|f| f.strip_suffix('"'));
            record.fields.push(match inner {
                Some(inner) if inner.contains('"') => inner.replace("\"\"", "\"").into(),
                _ => inner.unwrap_or(field).into(),
            });
            self.rest = rest.get(1..).unwrap_or_default();
            if !rest.starts_with(',') {
                self.line += 1;
                return Some(record);
            }
        }
    }
}

/// Objects, one per line. Pairs need `text = …`: keys have no order, so nothing shows which text is the first.
fn json_lines<'t>(file: &str, roles: &ColumnRoles<'_>, text: &'t str) -> Result<(Columns, Records<'t>)> {
    let file = file.to_owned();
    let parse = |file: &str, (line, text): (usize, &str)| {
        let object = serde_json::from_str::<serde_json::Map<String, Value>>(text);
        object.map_err(|e| malformed(file, line, "a JSON object", format!("`{}` ({e})", shortened(text))))
    };
    let lines =
        |text: &'t str| text.lines().zip(1..).map(|(text, line)| (line, text)).filter(|(_, t)| !t.trim().is_empty());
    let Some(first) = lines(text).next() else { return Err(malformed(&file, 1, "a JSON object", "an empty file")) };
    let names: Vec<String> = parse(&file, first)?.into_iter().map(|(name, _)| name).collect();
    let heads: Vec<Cow<'_, str>> = names.iter().map(|name| Cow::Borrowed(&name[..])).collect();
    let columns = Columns::find(&file, roles, &heads)?;
    if roles.text.is_none() && columns.texts.len() > 1 {
        let expected = "which key is the first text of a pair (`text = [\"…\", \"…\"]`)";
        return Err(malformed(&file, first.0, expected, names.join(", ")));
    }
    let used: Vec<usize> = columns.texts.iter().copied().chain(columns.label).chain(columns.group).collect();
    let record = move |(line, text): (usize, &'t str)| {
        let mut object = parse(&file, (line, text))?;
        let field = |(at, name): (usize, &String)| match object.remove(name) {
            _ if !used.contains(&at) => Ok(Cow::Borrowed("")),
            Some(Value::String(text)) => Ok(text.into()),
            Some(value @ (Value::Number(_) | Value::Bool(_))) => Ok(value.to_string().into()),
            other => {
                let found = other.map_or("none".to_owned(), |value| shortened(&value.to_string()));
                Err(malformed(&file, line, format!("a text or number under the key `{name}`"), found))
            }
        };
        Ok(Record { line, fields: names.iter().enumerate().map(field).collect::<Result<_>>()? })
    };
    Ok((columns, Box::new(lines(text).map(record))))
}

fn shortened(text: &str) -> String {
    if text.chars().count() > 40 { text.chars().take(39).chain(['…']).collect() } else { text.to_owned() }
}

fn malformed(file: &str, line: usize, expected: impl Into<String>, found: impl Into<String>) -> Error {
    let hint = "every row needs a text that is not empty, a known label and as many fields as there are columns";
    Error::malformed(file, format!("line {line}"), expected, found, hint)
}
