//! Layers of tables: how defaults, preset, file and `key=value` pairs become one configuration.

use super::Config;
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
const WHOLE: [&str; 3] = ["data.private", "data.public", "data.partition"];

/// Overlays `from` on `to`, table by table.
pub(crate) fn merge(to: &mut Table, from: &Table) {
    fn at(to: &mut Table, from: &Table, path: &str) {
        for (key, value) in from {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            match (to.get_mut(key), value) {
                (Some(Value::Table(inner)), Value::Table(value)) if !WHOLE.contains(&path.as_str()) => {
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

/// `a.b.c=value` into nested tables.
pub(super) fn set_path(table: &mut Table, pair: &str) -> Result<()> {
    let Some((path, text)) = pair.split_once('=') else {
        return Err(Error::config(format!("`{pair}` is not of the form key=value")));
    };
    let mut keys: Vec<&str> = path.trim().split('.').collect();
    let last = keys.pop().unwrap_or_default();
    let mut at = table;
    for key in keys {
        let entry = at.entry(key).or_insert_with(|| Value::Table(Table::new()));
        // A data set that was given by its name becomes a table when one of its options is set.
        if let Value::String(name) = entry {
            *entry = Value::Table(Table::from_iter([("name".to_owned(), Value::String(name.clone()))]));
        }
        at = match entry {
            Value::Table(inner) => inner,
            other => return Err(Error::config(format!("`{pair}`: `{key}` is {other}, not a table"))),
        };
    }
    at.insert(last.to_owned(), parse_value(text));
    Ok(())
}

/// Rejects keys that the defaults do not have.
pub(super) fn check_keys(given: &Table, known: &Table, path: &str) -> Result<()> {
    for (key, value) in given {
        let full = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        let Some(default) = known.get(key) else {
            let hint = did_you_mean(key, known.keys().map(String::as_str));
            let place = if path.is_empty() { "at the top level".to_owned() } else { format!("in [{path}]") };
            let names = known.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(Error::config(format!("unknown key `{key}` {place}; known keys: {names}{hint}")));
        };
        match (value, default) {
            (Value::Table(value), Value::Table(default)) if !WHOLE.contains(&full.as_str()) => {
                check_keys(value, default, &full)?;
            }
            _ => (),
        }
    }
    Ok(())
}
