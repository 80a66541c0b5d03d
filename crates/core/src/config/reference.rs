//! Every key with its documentation, type, default and values, taken from the types' own source.

use super::Config;
use super::items::{Item, Member, parse};
use super::layers::table_of;
use crate::error::{Error, Result};
use crate::methods;
use fedproj_data::registry;
use fedproj_data::spelling::nearest;
use fedproj_nn::models;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::LazyLock;
use toml::Value;

/// The files that define the configuration's types, beside those of the methods.
const SOURCES: &[&str] = &[
    include_str!("mod.rs"),
    include_str!("local.rs"),
    include_str!("../authors.rs"),
    include_str!("../distill.rs"),
    include_str!("../generator.rs"),
    include_str!("../memory.rs"),
    include_str!("../averages.rs"),
    include_str!("../correction.rs"),
    include_str!("../presets.rs"),
    include_str!("../privacy/mod.rs"),
    include_str!("../privacy/accountant.rs"),
    include_str!("../projection.rs"),
    include_str!("../robust.rs"),
    include_str!("../step.rs"),
    include_str!("../methods/mod.rs"),
];

/// A key of the configuration, or a table of keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    /// The whole path: `local.optimizer.lr`.
    pub path: String,
    /// What the key means.
    pub about: String,
    /// What a value looks like; for a table, the name of its type.
    pub kind: String,
    /// The default in TOML; none for a table, and where a key is unset by default.
    pub default: Option<String>,
    /// The values that a key can have, and what each means; empty where there are too many.
    pub values: Vec<(String, String)>,
    /// Whether this is a table of keys.
    pub is_table: bool,
}

impl Key {
    /// The keys of a type and of the tables in it, in the order of their definition: `sources` define them, and `defaults`
    /// is the serialised default, which stands at `path` in the configuration.
    pub fn all_of(sources: &[&str], root: &str, path: &str, defaults: &Value) -> Vec<Self> {
        let mut keys = Vec::new();
        let items = parse(sources);
        if let Some(item) = items.get(root) {
            walk(&items, item, path, Some(defaults), &mut keys);
        }
        keys
    }

    /// The documentation of a key, or of a table and the names of its keys.
    ///
    /// # Errors
    /// If there is no such key; the error names the nearest.
    pub fn explain(all: &[Self], path: &str) -> Result<String> {
        let Some(key) = all.iter().find(|key| key.path == path) else {
            let hint = Self::nearest(all, path).map(|key| format!("\nhint: did you mean `{key}`?")).unwrap_or_default();
            return Err(Error::config(format!("unknown key `{path}`{hint}")));
        };
        let mut text = format!("{path}\n  {}\n", key.about);
        if key.is_table {
            let inside = all.iter().filter_map(|key| Some((key.path.strip_prefix(path)?.strip_prefix('.')?, key)));
            for (name, key) in inside.filter(|(name, _)| !name.contains('.')) {
                let _ = writeln!(text, "  {name}: {}", key.about);
            }
            return Ok(text);
        }
        let _ = writeln!(text, "  type: {}", key.kind);
        let _ = writeln!(text, "  default: {}", key.default.as_deref().unwrap_or("unset"));
        for (value, about) in &key.values {
            let _ = writeln!(text, "  {value}: {about}");
        }
        Ok(text)
    }

    /// The key of the configuration that a word means on its own, such as `federation.rounds` by `rounds`.
    pub fn meant_by(word: &str) -> Option<String> {
        Self::nearest(known_keys(), word).map(str::to_owned)
    }

    /// The key that a wrong path probably means: the one with the same last word, the nearest path, or the nearest last word.
    pub(super) fn nearest<'a>(all: &'a [Self], path: &str) -> Option<&'a str> {
        fn last(path: &str) -> &str {
            path.rsplit('.').next().unwrap_or(path)
        }
        let paths = || all.iter().map(|key| key.path.as_str());
        // Tables are rarely meant by one word.
        let rank = |key: &&'a Self| (key.kind.contains("table"), key.path.matches('.').count());
        let named = |word: &str| {
            let named = all.iter().filter(|key| last(&key.path) == word).min_by_key(rank);
            named.map(|key| key.path.as_str())
        };
        let by_path = || nearest(path, paths());
        named(last(path)).or_else(by_path).or_else(|| named(nearest(last(path), paths().map(last))?))
    }

    /// What a value must be, for an error message.
    pub(super) fn expected(&self) -> String {
        match self.kind.as_str() {
            "true or false" => self.kind.clone(),
            "whole number" => "a whole number from 0 on".into(),
            "address:port" => "an address with a port, such as \"127.0.0.1:7443\"".into(),
            kind => format!("a {kind}"),
        }
    }
}

/// [`Config::keys`], made once. They come from sources that are part of the program, so they are always there.
pub(super) fn known_keys() -> &'static [Key] {
    static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| Config::keys().unwrap_or_default());
    &KEYS
}

/// The names that a key takes; none where it takes anything else.
pub(super) fn known_names(path: &str) -> Box<dyn Iterator<Item = &'static str>> {
    match path {
        "method.name" => Box::new(methods::CATALOGUE.iter().map(|(name, _)| *name)),
        "model.name" => Box::new(models::CATALOGUE.iter().map(|entry| entry.name).chain(["bert", "layers"])),
        "data.private.name" | "data.public.name" => {
            Box::new(registry::READERS.iter().map(|reader| reader.name).chain(["split", "none"]))
        }
        _ => {
            let values = known_keys().iter().find(|key| key.path == path).map_or(&[][..], |key| &key.values);
            Box::new(values.iter().map(|(value, _)| value.trim_matches('"')))
        }
    }
}

impl Config {
    /// Every key, in the order of the documentation.
    ///
    /// # Errors
    /// As [`Config::to_toml`].
    pub fn keys() -> Result<Vec<Key>> {
        let sources = [SOURCES, methods::SOURCES, fedproj_data::CONFIG_SOURCES, fedproj_nn::CONFIG_SOURCES].concat();
        Ok(Key::all_of(&sources, "Config", "", &Value::Table(table_of(&Self::default())?)))
    }

    /// Every key that the chosen method looks at, with its value as text; the tables of the other methods are omitted.
    pub fn keys_in_use(&self) -> BTreeMap<String, String> {
        fn flatten(value: &Value, path: &str, out: &mut BTreeMap<String, String>) {
            if let Value::Table(table) = value {
                for (key, value) in table {
                    flatten(value, &if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, out);
                }
            } else {
                out.insert(path.to_owned(), value.to_string().replace('"', ""));
            }
        }
        let mut out = BTreeMap::new();
        if let Ok(table) = table_of(self) {
            flatten(&Value::Table(table), "", &mut out);
        }
        let own = match &self.method.external {
            Some(_) => "method.external.".to_owned(),
            None => format!("method.{}.", self.method.name),
        };
        out.retain(|key, _| !key.starts_with("method.") || key == "method.name" || key.starts_with(&own));
        out
    }
}

fn walk(items: &BTreeMap<String, Item>, item: &Item, path: &str, default: Option<&Value>, keys: &mut Vec<Key>) {
    for member in &item.members {
        let path = if path.is_empty() { member.name.clone() } else { format!("{path}.{}", member.name) };
        let default = default.and_then(|table| table.get(&member.name));
        let key = |kind: &str, values: Vec<(String, String)>, is_table: bool| Key {
            path: path.clone(),
            about: member.doc.clone(),
            kind: kind.to_owned(),
            default: default.filter(|_| !is_table).map(text_of),
            values,
            is_table,
        };
        match items.get(&member.kind) {
            Some(inner) if !inner.is_enum => {
                keys.push(key(&member.kind, Vec::new(), true));
                walk(items, inner, &path, default, keys);
            }
            Some(inner) if inner.tag.is_some() => {
                keys.push(key(&member.kind, Vec::new(), true));
                walk(items, &as_struct(inner), &path, default, keys);
                if let Some(tag) = keys.iter_mut().find(|key| key.path == format!("{path}.kind")) {
                    tag.values = values(inner);
                }
            }
            // Without names of its own, a type is described by its documentation.
            Some(inner) if inner.members.iter().any(|variant| variant.name.starts_with(char::is_uppercase)) => {
                keys.push(key(&inner.doc.trim_end_matches('.').to_lowercase(), Vec::new(), false));
            }
            Some(inner) => keys.push(key("one of the values below", values(inner), false)),
            None => keys.push(key(described(&member.kind), Vec::new(), false)),
        }
    }
}

fn values(item: &Item) -> Vec<(String, String)> {
    item.members.iter().map(|variant| (format!("\"{}\"", variant.name), variant.doc.clone())).collect()
}

/// A table whose `kind` decides which keys it has: all of them, each once.
fn as_struct(item: &Item) -> Item {
    let doc = "Which kind. It decides which of the other keys apply.";
    let mut members = vec![Member { name: "kind".into(), doc: doc.into(), ..Member::default() }];
    for (variant, field) in item.members.iter().flat_map(|v| v.fields.iter().map(move |field| (v, field))) {
        match members.iter_mut().find(|member| member.name == field.name) {
            Some(known) => known.doc = format!("{}, `{}`", known.doc, variant.name),
            None => members.push(Member {
                name: field.name.clone(),
                doc: format!("{} For `{}`", field.doc, variant.name),
                kind: field.kind.clone(),
                fields: Vec::new(),
            }),
        }
    }
    for member in members.iter_mut().skip(1) {
        member.doc.push('.');
    }
    Item { members, ..Item::default() }
}

/// A value in TOML; small numbers as 1e-5.
fn text_of(value: &Value) -> String {
    match value {
        Value::Float(v) if *v != 0.0 && v.abs() < 1e-3 => format!("{v:e}"),
        value => value.to_string(),
    }
}

/// A Rust type in plain words.
fn described(kind: &str) -> &str {
    match kind {
        "u32" | "u64" | "i64" | "usize" => "whole number",
        "f32" | "f64" => "number",
        "bool" => "true or false",
        "PathBuf" => "path",
        "SocketAddr" => "address:port",
        "Vec<usize>" => "list of whole numbers",
        "Vec<String>" => "list of texts",
        "Vec<Layer>" | "Vec<ClientGroup>" => "list of tables",
        "[usize; 2]" => "list of two whole numbers",
        "" => "one of the values below",
        _ => "text",
    }
}

#[cfg(test)]
mod tests {
    use super::super::layers::parse_value;
    use super::*;

    #[test]
    fn every_key_of_the_default_configuration_is_documented() {
        fn check(value: &Value, path: &str, keys: &[Key]) {
            let key = keys.iter().find(|key| key.path == path);
            let key = key.unwrap_or_else(|| panic!("`{path}` is not in the reference"));
            assert!(key.about.ends_with('.') && key.about.len() > 10, "{path}: {:?}", key.about);
            assert!(key.values.iter().all(|(_, about)| about.ends_with('.')), "{path}: {:?}", key.values);
            match value {
                Value::Table(table) => table.iter().for_each(|(name, v)| check(v, &format!("{path}.{name}"), keys)),
                value => assert_eq!(key.default.as_deref().map(parse_value).as_ref(), Some(value), "{path}"),
            }
        }
        let keys = Config::keys().unwrap();
        for (name, value) in table_of(&Config::default()).unwrap() {
            check(&value, &name, &keys);
        }
        let fedavg = keys.iter().find(|key| key.path == "method.fedavg").unwrap();
        assert_eq!(fedavg.about, "Weighted averaging of local models (McMahan et al. 2017).");
        let kind = keys.iter().find(|key| key.path == "data.partition.kind").unwrap();
        assert!(kind.values.iter().any(|(value, _)| value == "\"one_class\""), "{kind:?}");
    }

    #[test]
    fn values_that_are_listed_can_be_read() {
        for key in Config::keys().unwrap().iter().filter(|key| key.path != "data.partition.kind") {
            for (value, _) in &key.values {
                let pair = format!("{}={value}", key.path);
                let read = Config::from_layers(None, std::slice::from_ref(&pair));
                // A value may ask for other keys, but it is known.
                let unknown = read.err().map(|e| e.to_string()).filter(|e| e.contains("unknown variant"));
                assert_eq!(unknown, None, "{pair}");
            }
        }
    }

    #[test]
    fn a_wrong_key_is_answered_with_the_nearest() {
        let keys = Config::keys().unwrap();
        let explain = |path: &str| Key::explain(&keys, path);
        assert!(explain("federation.rounds").unwrap().contains("default: 40"));
        assert!(explain("local.optimizer.kind").unwrap().contains("\"adamw\""));
        assert!(explain("local").unwrap().contains("  epochs: "));
        let wrong = |path: &str| explain(path).unwrap_err().to_string();
        assert!(wrong("federation.round").contains("`federation.rounds`?"));
        assert!(wrong("warmup").contains("`method.fedproj.projection.warmup`?"));
    }
}
