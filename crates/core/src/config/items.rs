//! The configuration's types as their source has them: names, documentation, fields and variants.
//!
//! Only what rustfmt leaves is understood: items begin at the margin, fields and variants are one level deep.

use std::collections::BTreeMap;

/// A field, or a variant with its fields.
#[derive(Debug, Default)]
pub(super) struct Member {
    pub name: String,
    /// First paragraph of the documentation.
    pub doc: String,
    /// A field's type, without `Option`.
    pub kind: String,
    /// Fields of a variant.
    pub fields: Vec<Member>,
}

/// A struct or an enum.
#[derive(Debug, Default)]
pub(super) struct Item {
    pub doc: String,
    pub is_enum: bool,
    /// The key that holds the variant's name, where variants are tables.
    pub tag: Option<String>,
    pub members: Vec<Member>,
}

/// The public structs and enums of some source files, by name.
pub(super) fn parse(sources: &[&str]) -> BTreeMap<String, Item> {
    let mut items = BTreeMap::new();
    for source in sources {
        let mut lines = source.lines();
        let (mut doc, mut attributes) = (Vec::new(), String::new());
        while let Some(line) = lines.next() {
            if let Some(text) = line.strip_prefix("///") {
                doc.push(text.trim());
            } else if line.starts_with(['#', ' ', ')']) {
                // An attribute may span several lines.
                attributes += line;
            } else {
                // The body of an empty struct ends on its own line.
                let body = lines.by_ref().take(if line.ends_with("{}") { 0 } else { usize::MAX });
                let head = line.strip_suffix(" {").or(line.strip_suffix(" {}")).unwrap_or_default();
                let found = match head.split(' ').collect::<Vec<_>>()[..] {
                    ["pub", "struct", name] => Some((name, false, members(body))),
                    ["pub", "enum", name] => Some((name, true, members(body))),
                    ["registry!"] => Some(("MethodConfig", false, methods(body))),
                    _ => None,
                };
                if let Some((name, is_enum, mut members)) = found {
                    rename(&mut members, quoted(&attributes, "rename_all = "));
                    let tag = quoted(&attributes, "tag = ").map(str::to_owned);
                    items.insert(name.to_owned(), Item { doc: first_paragraph(&doc), is_enum, tag, members });
                }
                doc.clear();
                attributes.clear();
            }
        }
    }
    items
}

/// Fields or variants up to the closing brace.
fn members<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<Member> {
    let (mut all, mut doc): (Vec<Member>, Vec<&str>) = (Vec::new(), Vec::new());
    let (mut renamed, mut is_skipped) = (None, false);
    for line in lines.take_while(|line| *line != "}") {
        let text = line.trim();
        if let Some(text) = text.strip_prefix("///") {
            doc.push(text.trim());
            continue;
        }
        if text.starts_with('#') {
            (renamed, is_skipped) = (quoted(text, "rename = "), text == "#[serde(skip)]");
            continue;
        }
        let (name, kind) = text.trim_end_matches([',', '{']).trim().split_once(": ").unwrap_or_else(|| {
            let name = text.split([' ', '(', ',']).next().unwrap_or_default();
            (name, "")
        });
        let kind = kind.strip_prefix("Option<").and_then(|inner| inner.strip_suffix('>')).unwrap_or(kind);
        let name = renamed.take().unwrap_or(name).trim_start_matches("pub ").to_owned();
        let member = Member { name, doc: first_paragraph(&doc), kind: kind.to_owned(), fields: Vec::new() };
        doc.clear();
        match all.last_mut() {
            // No setting.
            _ if std::mem::take(&mut is_skipped) => (),
            // A variant's own fields are one level deeper.
            Some(variant) if line.starts_with("        ") => variant.fields.push(member),
            _ if member.name.starts_with(char::is_alphabetic) => all.push(member),
            _ => (),
        }
    }
    all
}

/// The lines of the table of methods, as fields of `MethodConfig`.
fn methods<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<Member> {
    let doc = "Which method runs. `fedproj methods` lists them.".to_owned();
    let chosen = Member { name: "name".into(), doc, kind: "String".into(), fields: Vec::new() };
    let method = |line: &str| {
        let (name, rest) = line.trim().split_once(": ")?;
        let (kind, rest) = rest.split_once(", ")?;
        let (_title, about) = rest.split_once(", ")?;
        let about = about.trim_matches(['"', ';']);
        let doc = about[..1].to_uppercase() + &about[1..] + ".";
        Some(Member { name: name.into(), doc, kind: kind.into(), fields: Vec::new() })
    };
    std::iter::once(chosen).chain(lines.take_while(|line| *line != "}").filter_map(method)).collect()
}

/// Words up to the first blank line, without links.
fn first_paragraph(doc: &[&str]) -> String {
    let lines: Vec<&str> = doc.iter().copied().take_while(|line| !line.is_empty()).collect();
    lines.join(" ").replace("[`", "`").replace("`]", "`")
}

/// The text in quotes after `key`.
fn quoted<'a>(attributes: &'a str, key: &str) -> Option<&'a str> {
    attributes.split_once(key)?.1.split('"').nth(1)
}

/// Names as serde writes them.
fn rename(members: &mut [Member], case: Option<&str>) {
    let Some(case) = case else { return };
    for member in members {
        let separator = match case {
            "snake_case" => "_",
            "kebab-case" => "-",
            _ => "",
        };
        let mut name = String::new();
        for c in member.name.chars() {
            if c.is_uppercase() && !name.is_empty() {
                name += separator;
            }
            name.extend(c.to_lowercase());
        }
        member.name = name;
    }
}
