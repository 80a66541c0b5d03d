//! Layers of tables: how defaults, preset, file and `key=value` pairs become one configuration.

use super::Config;
use super::reference::{Key, known_keys, known_names};
use crate::error::{Error, Result};
use fedproj_data::spelling::did_you_mean;
use toml::{Table, Value};

/// The configuration as a table. Single-precision numbers read as they were written: 0.001, not 0.0010000000474974513.
pub(crate) fn table_of(config: &Config) -> Result<Table> {
    fn shorten(value: &mut Value) {
        match value {
            Value::Float(v) if f64::from(*v as f32).to_bits() == v.to_bits() => {
                if let Ok(short) = (*v as f32).to_string().parse() {
                    *v = short;
                }
            }
            Value::Table(table) => table.iter_mut().for_each(|(_, v)| shorten(v)),
            Value::Array(values) => values.iter_mut().for_each(shorten),
            _ => (),
        }
    }
    let mut table = Table::try_from(config).map_err(Error::internal("writing the configuration"))?;
    table.iter_mut().for_each(|(_, v)| shorten(v));
    Ok(table)
}

/// Tables that describe one thing and are replaced as a whole; their keys depend on what they describe.
pub const WHOLE_TABLES: [&str; 3] = ["data.private", "data.public", "data.partition"];

/// Overlays `from` on `to`, table by table.
pub(crate) fn merge(to: &mut Table, from: &Table) {
    fn at(to: &mut Table, from: &Table, path: &str) {
        for (key, value) in from {
            let path = join(path, key);
            match (to.get_mut(key), value) {
                (Some(Value::Table(inner)), Value::Table(value)) if !WHOLE_TABLES.contains(&path.as_str()) => {
                    // The default's weight decay belongs to the default's kind of optimiser.
                    let is_other = value.get("kind").is_some_and(|kind| inner.get("kind") != Some(kind));
                    if is_other && inner.contains_key("weight_decay") {
                        inner.insert("weight_decay".into(), Value::Float(0.0));
                    }
                    at(inner, value, &path);
                }
                // A partial table such as `data.partition.beta=0.5` keeps the rest, unless the kind changes.
                (Some(Value::Table(inner)), Value::Table(value))
                    if !value.contains_key("kind") && !value.contains_key("name") =>
                {
                    inner.extend(value.clone());
                }
                _ => {
                    to.insert(key.clone(), value.clone());
                }
            }
        }
    }
    at(to, from, "");
}

/// A value on the command line: TOML, or a word that needs no quotes.
pub fn parse_value(text: &str) -> Value {
    let parsed = toml::from_str::<Table>(&format!("v = {text}")).ok().and_then(|mut t| t.remove("v"));
    parsed.unwrap_or_else(|| Value::String(text.to_owned()))
}

/// Key and value of `key=value`.
///
/// # Errors
/// If there is no `=`.
pub fn split_pair(pair: &str) -> Result<(&str, &str)> {
    let problem = || Error::config(format!("`{pair}` is not of the form key=value"));
    pair.split_once('=').map(|(key, value)| (key.trim(), value)).ok_or_else(problem)
}

/// `a.b.c=value` into nested tables.
pub(super) fn set_path(table: &mut Table, pair: &str) -> Result<()> {
    let (path, text) = split_pair(pair)?;
    let mut keys: Vec<&str> = path.split('.').collect();
    let last = keys.pop().unwrap_or_default();
    let mut at = table;
    for key in keys {
        at = match at.entry(key).or_insert_with(|| Value::Table(Table::new())) {
            Value::Table(inner) => inner,
            other => return Err(Error::config(format!("`{pair}`: `{key}` is {other}, not a table"))),
        };
    }
    let value = parse_value(text);
    if let (Value::String(_), Err(problem)) = (&value, check_closed(text)) {
        return Err(Error::config(format!(
            "`{pair}`: {problem}\nhint: texts need quotes, and the shell takes them away unless the whole setting is in others: \
             '{path}={{ name = \"…\" }}'"
        )));
    }
    match (at.get_mut(last), &value, word_field(path)) {
        // A word says which one a table is; what was set in it before stays.
        (Some(Value::Table(table)), Value::String(_), Some(field)) if !is_whole(path, table) => {
            table.insert(field.to_owned(), value);
        }
        _ => {
            at.insert(last.to_owned(), value);
        }
    }
    Ok(())
}

/// Whether a value that begins as a table or a list is one.
fn check_closed(text: &str) -> std::result::Result<(), String> {
    if !text.trim_start().starts_with(['{', '[']) {
        return Ok(());
    }
    let parsed = toml::from_str::<Table>(&format!("v = {text}"));
    parsed.map(drop).map_err(|error| error.message().to_owned())
}

/// The key of a table that a word in its place stands for.
fn word_field(path: &str) -> Option<&'static str> {
    let is_known = |field: &&str| known_keys().iter().any(|key| key.path == format!("{path}.{field}"));
    ["name", "kind", "rule"].into_iter().find(is_known)
}

/// Whether a table describes one thing already, which another word replaces.
fn is_whole(path: &str, table: &Table) -> bool {
    WHOLE_TABLES.contains(&path) && word_field(path).is_some_and(|field| table.contains_key(field))
}

/// Makes a table of a word that stands for one, and writes names as the program does: `method = "FedAvg"` means
/// `method.name = "fedavg"`.
pub(super) fn read_words(given: &mut Table, defaults: &Table) {
    fn at(given: &mut Table, defaults: &Table, path: &str) {
        for (key, value) in given.iter_mut() {
            let path = join(path, key);
            let default = defaults.get(key).and_then(Value::as_table);
            if let (Some(word), Some(default)) = (value.as_str(), default)
                && let Some(field) = ["name", "kind", "rule"].into_iter().find(|field| default.contains_key(*field))
            {
                let is_default = default[field].as_str().is_some_and(|name| name.eq_ignore_ascii_case(word));
                let table = Table::from_iter([(field.to_owned(), value.clone())]);
                *value = Value::Table(if is_default { default.clone() } else { table });
            }
            match value {
                Value::Table(inner) => at(inner, default.unwrap_or(&Table::new()), &path),
                Value::String(word) => {
                    if let Some(name) = known_names(&path).find(|name| name.eq_ignore_ascii_case(word)) {
                        name.clone_into(word);
                    }
                }
                _ => (),
            }
        }
    }
    at(given, defaults, "");
}

/// Rejects keys that the defaults do not have.
pub(super) fn check_keys(given: &Table, known: &Table, path: &str) -> Result<()> {
    for (key, value) in given {
        let full = join(path, key);
        let Some(default) = known.get(key) else {
            let hint = Key::nearest(known_keys(), &full);
            let hint = hint.map(|key| format!("\nhint: did you mean `{key}`?")).unwrap_or_default();
            let place = if path.is_empty() { "at the top level".to_owned() } else { format!("in [{path}]") };
            let names = known.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(Error::config(format!("unknown key `{key}` {place}; known keys: {names}{hint}")));
        };
        match (value, default) {
            (Value::Table(value), Value::Table(default)) if !WHOLE_TABLES.contains(&full.as_str()) => {
                check_keys(value, default, &full)?;
            }
            _ => (),
        }
    }
    Ok(())
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// Reads a value at `path`, where `keys` are known. An error names the key and what it takes, in a user's words, not in
/// those of Rust's types.
///
/// # Errors
/// If a key is unknown or missing, or its value is of another type.
pub fn read_value<T: serde::de::DeserializeOwned>(value: &Value, path: &str, keys: &[Key]) -> Result<T> {
    value.clone().try_into().map_err(|error: toml::de::Error| {
        let text = error.to_string();
        let (problem, inside) = text.trim_end().rsplit_once("\nin `").unwrap_or((text.trim_end(), ""));
        let inside = inside.trim_end_matches('`');
        let found = inside.split('.').filter(|key| !key.is_empty()).try_fold(value, |at, key| at.get(key));
        let path = [path, inside].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(".");
        Error::config(wrong_value(&path, problem, found, keys))
    })
}

/// What is wrong at `path`, where `found` stands.
fn wrong_value(path: &str, problem: &str, found: Option<&Value>, keys: &[Key]) -> String {
    let find = |path: &str| keys.iter().find(|key| key.path == path);
    let word = |start: &str| problem.strip_prefix(start)?.split('`').next();
    if let Some(name) = word("missing field `") {
        let kind = found.and_then(|table| table.get("kind")).map(|kind| format!("kind = {kind}, ")).unwrap_or_default();
        return format!("{path}: `{name}` is missing\nhint: write {path}={{{kind}{name} = …}}");
    }
    if let Some(name) = word("unknown field `") {
        let known: Vec<&str> = problem.split('`').skip(3).step_by(2).collect();
        let hint = did_you_mean(name, known.iter().copied());
        return format!("unknown key `{name}` in [{path}]; known keys: {}{hint}", known.join(", "));
    }
    let Some(mut key) = find(path) else { return format!("{path}: {problem}") };
    let mut found = found;
    if let (true, Some(kind)) = (problem.starts_with("unknown variant"), find(&format!("{path}.kind"))) {
        // The word that decides what a table holds is wrong.
        (key, found) = (kind, found.and_then(|table| table.get("kind")));
    } else if let Some((name, value)) = found.and_then(Value::as_table).and_then(|table| wrong_in(table, problem)) {
        (key, found) = (find(&format!("{path}.{name}")).unwrap_or(key), Some(value));
    } else if !["unknown variant", "invalid"].iter().any(|start| problem.starts_with(start)) {
        return format!("{path}: {problem}");
    }
    let names = || key.values.iter().map(|(value, _)| value.trim_matches('"'));
    let expected = if key.is_table {
        let prefix = format!("{path}.");
        let inside = keys.iter().map(|key| key.path.as_str()).find(|key| key.starts_with(&prefix));
        format!("a table with keys such as `{}`", inside.unwrap_or(path))
    } else if names().next().is_some() {
        format!("one of {}", names().collect::<Vec<_>>().join(", "))
    } else if found.and_then(Value::as_integer).is_some_and(|value| value > u32::MAX.into()) {
        format!("at most {}", u32::MAX)
    } else {
        key.expected()
    };
    let hint = match found.and_then(Value::as_str) {
        Some(word) if path == "data" => format!("\nhint: data.private={word}"),
        Some(word) => did_you_mean(word, names()),
        None => String::new(),
    };
    let found = found.map(ToString::to_string).unwrap_or_default();
    format!("{} = {found}: must be {expected}{hint}", key.path)
}

/// The value that a problem quotes. Where a table's kind decides its keys, the problem does not name the key.
fn wrong_in<'a>(table: &'a toml::Table, problem: &str) -> Option<(&'a String, &'a Value)> {
    table.iter().find(|(_, value)| match value {
        Value::String(text) => problem.contains(&format!("string {text:?}")),
        Value::Table(_) | Value::Array(_) => false,
        value => problem.contains(&format!("`{value}`")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pairs: &[&str]) -> Result<Config> {
        Config::from_layers(None, &pairs.iter().map(|&pair| pair.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn a_word_stands_for_the_table_that_it_names() {
        let same =
            |short: &[&str], long: &[&str]| assert_eq!(config(short).unwrap(), config(long).unwrap(), "{short:?}");
        same(&["method=fedavg"], &["method.name=fedavg"]);
        same(&["model=cnn"], &["model.name=cnn"]);
        same(&["local.optimizer=sgd"], &["local.optimizer.kind=sgd"]);
        same(&["federation.robust=median"], &["federation.robust.rule=median"]);
        same(&["data.partition=iid"], &["data.partition={kind='iid', clients=10}"]);
        same(&["data.partition=iid", "data.partition.clients=4"], &["data.partition={kind='iid', clients=4}"]);
        same(&["data.partition=dirichlet"], &[]);
        // What was set before the word stays.
        same(&["data.partition.clients=4", "data.partition=iid"], &["data.partition={kind='iid', clients=4}"]);
        same(&["data.partition={kind='labels', labels_per_client=2}", "data.partition=iid"], &["data.partition=iid"]);
        same(&["local.optimizer.lr=0.1", "local.optimizer=sgd"], &["local.optimizer={kind='sgd', lr=0.1}"]);
        same(
            &["method.fedprox.proximal_weight=1.0", "method=fedprox"],
            &["method.name=fedprox", "method.fedprox.proximal_weight=1.0"],
        );
        assert!(config(&["method.fedprox.mu=1.0", "method=fedprox"]).unwrap_err().to_string().contains("`mu`"));
        same(
            &["data.private=iris", "data.private.standardise=true"],
            &["data.private={name='iris', standardise=true}"],
        );
        let file: Table = toml::from_str("method = 'fedprox'\n[local]\noptimizer = 'sgd'").unwrap();
        let overridden = Config::from_layers(Some(&file), &["method.fedprox.proximal_weight=1.0".into()]).unwrap();
        assert_eq!(
            overridden,
            config(&["method.name=fedprox", "local.optimizer.kind=sgd", "method.fedprox.proximal_weight=1.0"]).unwrap()
        );
    }

    #[test]
    fn the_case_of_names_does_not_matter() {
        let loud =
            ["method.name=FedAvg", "model.name=MLP", "data.private=Digits", "preset=Paper", "local.optimizer.kind=SGD"];
        let plain = loud.map(str::to_lowercase);
        assert_eq!(config(&loud).unwrap(), config(&plain.each_ref().map(String::as_str)).unwrap());
        // A path is no name.
        assert_eq!(config(&["model.weights=Mine.safetensors"]).unwrap().model.weights, "Mine.safetensors");
    }

    #[test]
    fn the_last_word_of_a_key_is_answered_with_the_whole_key() {
        for (pair, key) in [
            ("rounds=5", "federation.rounds"),
            ("lr=0.1", "local.optimizer.lr"),
            ("clients=4", "data.partition.clients"),
            ("beta=0.5", "data.partition.beta"),
            ("epoch=5", "local.epochs"),
            ("federation.lr=0.1", "local.optimizer.lr"),
        ] {
            let message = config(&[pair]).unwrap_err().to_string();
            assert!(message.ends_with(&format!("did you mean `{key}`?")), "{pair}: {message}");
        }
    }

    #[test]
    fn a_table_or_list_that_is_not_closed_or_lost_its_quotes_is_named_as_such() {
        for pair in [
            "data.private={name='csv', path='a.csv'",
            "data.private={name=csv, path=a.csv}",
            "data.private={name=csv,",
            "model.hidden=[8, 8",
            "model.hidden=[8 8]",
        ] {
            let message = config(&[pair]).unwrap_err().to_string();
            let key = pair.split('=').next().unwrap();
            assert!(message.starts_with(&format!("`{pair}`: ")), "{message}");
            assert!(message.contains("\nhint: texts need quotes") && message.contains(key), "{message}");
        }
    }

    #[test]
    fn values_of_another_type_are_answered_in_plain_words() {
        for (pair, expected) in [
            ("federation.rounds=many", "federation.rounds = \"many\": must be a whole number from 0 on"),
            ("local.epochs=-1", "local.epochs = -1: must be a whole number from 0 on"),
            ("local.epochs=5000000000", "local.epochs = 5000000000: must be at most 4294967295"),
            (
                "data=cifar10",
                "data = \"cifar10\": must be a table with keys such as `data.private`\nhint: data.private=cifar10",
            ),
            ("federation.fraction=half", "federation.fraction = \"half\": must be a number"),
            ("federation.evaluate_clients=3", "federation.evaluate_clients = 3: must be true or false"),
            ("model.hidden=x", "model.hidden = \"x\": must be a list of whole numbers"),
            ("federation=3", "federation = 3: must be a table with keys such as `federation.rounds`"),
            ("data.private=3", "data.private = 3: must be a table with keys such as `data.private.name`"),
            (
                "data.private_draw=unifrom",
                "data.private_draw = \"unifrom\": must be one of uniform, balanced\nhint: did you mean `uniform`?",
            ),
            (
                "local.optimizer=sgdd",
                "local.optimizer.kind = \"sgdd\": must be one of sgd, adam, adamw\nhint: did you mean `sgd`?",
            ),
            (
                "data.partition=labels",
                "data.partition: `labels_per_client` is missing\n\
                 hint: write data.partition={kind = \"labels\", labels_per_client = …}",
            ),
            ("data.partition.beta=abc", "data.partition.beta = \"abc\": must be a number"),
            ("data.partition.clients=-3", "data.partition.clients = -3: must be a whole number from 0 on"),
            (
                "data.private={name='csv', paht='x'}",
                "unknown key `paht` in [data.private]; known keys: kind, name, path, test, text, source, seed, \
                 samples, labels, label, group, layout, resize, standardise\nhint: did you mean `path`?",
            ),
        ] {
            assert_eq!(config(&[pair]).unwrap_err().to_string(), expected, "{pair}");
        }
        let message = config(&["preset=papre"]).unwrap_err().to_string();
        assert!(message.starts_with("preset = \"papre\": must be one of paper, authors-code, clean"), "{message}");
        assert!(message.ends_with("\nhint: did you mean `paper`?"), "{message}");
        let message = config(&["data.partition=fair"]).unwrap_err().to_string();
        assert!(message.starts_with("data.partition.kind = \"fair\": must be one of iid, dirichlet, "), "{message}");
    }
}
