//! CSV files: numeric features and a label column, one sample per line.
//!
//! Fields are separated by commas, by tabs if the first line holds one, or by semicolons if it holds those and no comma. They
//! may be in double quotes. The first line is a header if none of its feature fields is a number. Labels may be any text but
//! fractions, which are measurements and no classes. Classes are the distinct labels, in numeric order if all are integers
//! and in alphabetic order otherwise. So are groups, if a column names the owner of each row.

use std::collections::BTreeSet;

use super::read_file;
use crate::dataset::{Dataset, Samples, Shape};
use crate::error::{Error, Result};
use crate::registry::{Origin, Read, Reader, Request};
use crate::source::{Column, Splits};

pub(crate) const READER: Reader = Reader {
    name: "csv",
    about: "a CSV file with numeric features and a label column",
    origin: Origin::Format,
    options: &["path", "label", "group", "standardise"],
    read: Read::Numbers(read),
};

fn read(request: &Request<'_>) -> Result<Splits> {
    let path = request.path()?;
    let bytes = read_file(&path)?;
    let file = path.display().to_string();
    let text = std::str::from_utf8(&bytes).map_err(|e| {
        let place = format!("byte {}", e.valid_up_to());
        Error::malformed(&file, place, "UTF-8 text", "other bytes", "save the table as UTF-8")
    })?;
    // Spreadsheets begin a file with this mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let label = match &request.config.label {
        None => Label::Last,
        Some(Column::Name(name)) if name == "none" => Label::Absent,
        Some(column) => Label::At(column),
    };
    let format = Format {
        file: &file,
        delimiter: delimiter_of(text.lines().next().unwrap_or_default()),
        label,
        group: request.config.group.as_ref(),
    };
    Ok(Splits { train: format.parse(text)?.into_dataset(request.name)?, test: None })
}

const LABEL_HINT: &str = "name the column of the classes with label = \"…\"; to classify a measurement, write its ranges as \
                          words, such as low and high";

/// What separates the fields of a line. Where numbers have a decimal comma, spreadsheets write semicolons.
fn delimiter_of(line: &str) -> char {
    match (line.contains('\t'), line.contains(';') && !line.contains(',')) {
        (true, _) => '\t',
        (_, true) => ';',
        _ => ',',
    }
}

/// What to do about a field that is no finite number.
fn hint_for(field: &str) -> &'static str {
    let is_missing = ["", "nan", "na", "n/a", "null", "none", "-", "?"].contains(&field.to_ascii_lowercase().as_str());
    if is_missing {
        "replace missing values, or leave out their lines"
    } else if field.replacen(',', ".", 1).parse::<f32>().is_ok_and(f32::is_finite) {
        "write a decimal point, not a comma"
    } else if field.parse::<f32>().is_ok() {
        "values must fit single precision: below 3.4e38"
    } else {
        "features are numbers; name the label with label = \"…\" and leave out other columns"
    }
}

/// Whether a label is a number with a fractional part.
fn is_fraction(label: &str) -> bool {
    label.parse::<f64>().is_ok_and(|value| value.is_finite() && value.fract() != 0.0)
}

/// How to read a table.
pub(super) struct Format<'a> {
    /// Name for messages.
    pub file: &'a str,
    pub delimiter: char,
    pub label: Label<'a>,
    pub group: Option<&'a Column>,
}

/// Which column is the label.
pub(super) enum Label<'a> {
    /// In the last column that is not the group's.
    Last,
    At(&'a Column),
    Absent,
}

/// The content of a table, column by role.
pub(super) struct CsvTable<'a> {
    n_features: usize,
    values: Vec<f32>,
    labels: Option<Vec<&'a str>>,
    groups: Option<Vec<&'a str>>,
}

impl Format<'_> {
    /// A table without header or groups whose last column is the label.
    pub fn plain(file: &str) -> Format<'_> {
        Format { file, delimiter: ',', label: Label::Last, group: None }
    }

    pub fn parse<'t>(&self, text: &'t str) -> Result<CsvTable<'t>> {
        let lines = text.lines().enumerate().map(|(i, line)| (i + 1, line));
        let mut lines = lines.filter(|(_, line)| !line.trim().is_empty()).peekable();
        let Some(&(_, first)) = lines.peek() else {
            return Err(self.malformed(1, "at least one line", "an empty file", "write one sample per line"));
        };
        let mut fields = Vec::new();
        split_fields(first, self.delimiter, &mut fields);
        let n_columns = fields.len();
        let (label_at, group_at) = self.positions(&fields)?;
        let is_feature = |c: &usize| Some(*c) != label_at && Some(*c) != group_at;
        let features: Vec<usize> = (0..n_columns).filter(is_feature).collect();
        if features.is_empty() {
            let hint = "a line holds the features and the label, separated by commas, tabs or semicolons";
            return Err(self.malformed(1, "at least one feature column", format!("`{first}`"), hint));
        }
        if !features.iter().any(|&c| fields[c].parse::<f32>().is_ok()) {
            lines.next();
        }
        let mut table = CsvTable {
            n_features: features.len(),
            values: Vec::new(),
            labels: label_at.map(|_| Vec::new()),
            groups: group_at.map(|_| Vec::new()),
        };
        for (number, line) in lines {
            split_fields(line, self.delimiter, &mut fields);
            if fields.len() != n_columns {
                let hint = "every line needs the same number of fields";
                return Err(self.malformed(number, format!("{n_columns} fields"), fields.len().to_string(), hint));
            }
            for &c in &features {
                match fields[c].parse::<f32>() {
                    Ok(value) if value.is_finite() => table.values.push(value),
                    _ => {
                        let expected = format!("a finite number in column {c}");
                        let (found, hint) = (format!("`{}`", fields[c]), hint_for(fields[c]));
                        return Err(self.malformed(number, expected, found, hint));
                    }
                }
            }
            if let Some(label) = label_at.map(|at| fields[at]).filter(|l| l.is_empty() || is_fraction(l)) {
                let expected = "a class as label, a whole number or a text";
                return Err(self.malformed(number, expected, format!("`{label}`"), LABEL_HINT));
            }
            for (list, at) in [(&mut table.labels, label_at), (&mut table.groups, group_at)] {
                if let (Some(list), Some(at)) = (list, at) {
                    list.push(fields[at]);
                }
            }
        }
        if table.values.is_empty() {
            return Err(self.malformed(1, "lines with numbers", "a header alone", "write one sample per line"));
        }
        Ok(table)
    }

    /// Columns of label and group, looked up in the first line.
    fn positions(&self, first: &[&str]) -> Result<(Option<usize>, Option<usize>)> {
        let position = |column: &Column| {
            let hint = "columns have the names of the first line, or numbers from 0";
            column.position(first).map_err(|(expected, found)| self.malformed(1, expected, found, hint))
        };
        let group_at = self.group.map(position).transpose()?;
        let label_at = match self.label {
            Label::Last => (0..first.len()).rev().find(|&c| Some(c) != group_at),
            Label::At(column) => Some(position(column)?),
            Label::Absent => None,
        };
        Ok((label_at, group_at))
    }

    fn malformed(
        &self,
        line: usize,
        expected: impl Into<String>,
        found: impl Into<String>,
        hint: &'static str,
    ) -> Error {
        Error::malformed(self.file, format!("line {line}"), expected, found, hint)
    }
}

impl CsvTable<'_> {
    /// The data set, with classes and groups numbered.
    pub fn into_dataset(self, name: &str) -> Result<Dataset> {
        let (labels, class_names) = match self.labels {
            Some(labels) => {
                let (ids, names) = numbered(&labels);
                (Some(ids), names)
            }
            None => (None, Vec::new()),
        };
        let shape = Shape::Vector { features: self.n_features };
        let data = Dataset::new(name, shape, Samples::F32(self.values), labels, class_names)?;
        data.with_groups(self.groups.map(|groups| numbered(&groups).0))
    }
}

/// Splits a line into fields, keeping delimiters inside double quotes and dropping the quotes.
fn split_fields<'a>(line: &'a str, delimiter: char, out: &mut Vec<&'a str>) {
    out.clear();
    let mut is_quoted = false;
    let fields = line.split(|c| {
        is_quoted ^= c == '"';
        c == delimiter && !is_quoted
    });
    out.extend(fields.map(|f| {
        let field = f.trim();
        field.strip_prefix('"').and_then(|f| f.strip_suffix('"')).unwrap_or(field)
    }));
}

/// Numbers distinct values by their order and gives their names.
pub(crate) fn numbered(values: &[&str]) -> (Vec<u32>, Vec<String>) {
    let mut distinct: Vec<&str> = values.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
    if distinct.iter().all(|v| v.parse::<i64>().is_ok()) {
        distinct.sort_by_key(|v| v.parse::<i64>().unwrap_or_default());
    }
    let order: std::collections::BTreeMap<&str, u32> = distinct.iter().zip(0..).map(|(v, id)| (*v, id)).collect();
    (values.iter().map(|v| order[v]).collect(), distinct.into_iter().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SourceConfig, load};

    fn check(text: &str, label: Option<Column>, group: Option<Column>) -> Result<Dataset> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("t.csv"), text).unwrap();
        let config = SourceConfig { path: Some("t.csv".into()), label, group, ..SourceConfig::named("csv") };
        load(&config, Some(dir.path())).map(|s| s.train)
    }

    fn name(name: &str) -> Column {
        Column::Name(name.into())
    }

    #[test]
    fn header_quotes_groups_and_text_labels() {
        let text = "x,\"kind\",who,y\n1,\"b, c\",ann,2\n\n3,a,bob,4\n5,a,ann,6\n";
        let data = check(text, Some(name("kind")), Some(name("who"))).unwrap();
        assert_eq!(data.class_names(), ["a", "b, c"]);
        assert_eq!(data.labels(), Some(&[1, 0, 0][..]));
        assert_eq!(data.groups(), Some(&[0, 1, 0][..]));
        assert_eq!(data.samples, Samples::F32(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
    }

    #[test]
    fn without_header_the_last_column_is_the_label_and_integers_sort_by_value() {
        let data = check("1,2,10\n3,4,9\n", None, None).unwrap();
        assert_eq!(data.class_names(), ["9", "10"]);
        assert_eq!(data.sample_len(), 2);
        let data = check("1,2,10\n3,4,9\n", Some(name("none")), None).unwrap();
        assert_eq!((data.sample_len(), data.labels()), (3, None));
        let data = check("1,2,10\n3,4,9\n", Some(Column::Index(0)), None).unwrap();
        assert_eq!(data.class_names(), ["1", "3"]);
    }

    #[test]
    fn measurements_are_no_classes() {
        let message = check("1,2,3\n3,4,0.25\n", None, None).unwrap_err().to_string();
        assert!(message.contains("line 2: expected a class as label") && message.contains("found `0.25`"), "{message}");
        assert!(message.contains("hint: name the column of the classes"), "{message}");
        let data = check("1,2,1.0\n3,4,0.0\n", None, None).unwrap();
        assert_eq!(data.class_names(), ["0.0", "1.0"]);
    }

    #[test]
    fn what_spreadsheets_write_is_read() {
        for text in [
            "\u{feff}a,b,kind\n1.5,2,x\n3,4,y\n",
            "a;b;kind\r\n1.5;2;x\r\n3;4;y\r\n",
            "a\tb\tkind\n1.5\t2\tx\n3\t4\ty\n",
        ] {
            let data = check(text, Some(name("kind")), None).unwrap();
            assert_eq!(data.samples, Samples::F32(vec![1.5, 2.0, 3.0, 4.0]), "{text:?}");
            let message = check(text, Some(name("a")), None).unwrap_err().to_string();
            assert!(message.contains("column 2, found `x`"), "the first column has its name: {message}");
        }
    }

    #[test]
    fn a_field_that_is_no_number_gets_the_hint_that_it_needs() {
        for (field, hint) in [
            ("", "replace missing values"),
            ("NaN", "replace missing values"),
            ("1,5", "a decimal point"),
            ("1e39", "single precision"),
            ("red", "leave out other columns"),
        ] {
            let message = check(&format!("1;2;a\n3;{field};b\n"), None, None).unwrap_err().to_string();
            assert!(
                message.contains(&format!("line 2: expected a finite number in column 1, found `{field}`")),
                "{message}"
            );
            assert!(message.contains(hint), "{field}: {message}");
        }
    }

    #[test]
    fn bad_lines_are_named() {
        let message = |text: &str, label| check(text, label, None).unwrap_err().to_string();
        assert!(message("1,2,a\n3,b\n", None).contains("line 2: expected 3 fields, found 2"));
        assert!(
            message("1,2,a\n3,nan,b\n", None).contains("line 2: expected a finite number in column 1, found `nan`")
        );
        assert!(message("x,y\n1,a\n", Some(name("z"))).contains("a column named `z`"));
        assert!(message("1,2\n", Some(Column::Index(7))).contains("a column 7"));
        assert!(message("x,y\n1,a\n", Some(name("z"))).contains("hint: columns have the names of the first line"));
        assert!(message("", None).contains("an empty file"));
        assert!(message("a\nb\n", None).contains("at least one feature"));
        assert!(message("x,y\n", None).contains("a header alone"));
    }
}
