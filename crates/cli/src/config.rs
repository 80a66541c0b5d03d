//! `fedproj config`: the effective configuration of a run, and what its keys mean.

use crate::say;
use crate::settings::Settings;
use anyhow::Result;
use clap::{Args, Subcommand};
use fedproj_core::{Config, Key};
use fedproj_net::ServerConfig;
use fedproj_report::wrap;
use std::collections::BTreeMap;
use std::fmt::Write;

/// What `config` does.
#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Prints the effective configuration of a run with every default, or explains one key
    Show(Show),
    /// Prints the reference of all keys (docs/configuration.md), or the entries of some (docs/methods)
    Reference {
        /// Keys, and tables for all keys in them
        #[arg(value_name = "KEY")]
        keys: Vec<String>,
    },
}

/// Arguments of `config show`.
#[derive(Args)]
pub struct Show {
    #[command(flatten)]
    settings: Settings,
    /// Explain this key or table instead: meaning, type, default and values
    #[arg(long, value_name = "KEY")]
    explain: Option<String>,
}

impl ConfigCommand {
    /// Prints what was asked for.
    pub fn run(self) -> Result<()> {
        match self {
            Self::Reference { keys } if keys.is_empty() => say!("{}", reference()?.trim_end()),
            Self::Reference { keys } => say!("{}", entries(&keys)?.trim_end()),
            Self::Show(Show { explain: Some(key), .. }) => say!("{}", Key::explain(&keys()?, &key)?.trim_end()),
            Self::Show(Show { settings, .. }) => {
                for (at, run) in settings.runs()?.iter().enumerate() {
                    if !run.id.is_empty() {
                        say!("{}# {}", if at > 0 { "\n" } else { "" }, run.id);
                    }
                    say!("{}", run.config.to_toml()?.trim_end());
                }
            }
        }
        Ok(())
    }
}

/// The keys of a run and of a server.
fn keys() -> Result<Vec<Key>> {
    let mut keys = Config::keys()?;
    keys.push(Key {
        path: "server".into(),
        about: "A federation's server (`fedproj serve`). A simulation ignores this table.".into(),
        kind: "ServerConfig".into(),
        default: None,
        values: Vec::new(),
        is_table: true,
    });
    keys.extend(ServerConfig::keys()?);
    Ok(keys)
}

const HEAD: &str = "\
# Configuration reference

<!-- Made by `fedproj config reference > docs/configuration.md` from the documentation of the
     fields; change that instead. -->

A configuration is a TOML file, `key=value` pairs on the command line, or both. Later layers win:
defaults, then the preset, then the file, then the pairs. `fedproj new` writes a commented file,
`fedproj config show [FILE] [KEY=VALUE]…` prints the effective configuration, and
`fedproj config show --explain KEY` prints the entry of one key.

A name may stand for its table: `method=fedavg` is `method.name=fedavg`, `data.partition=iid` is
`data.partition.kind=iid`. The case of names does not matter.

Two more keys make several runs from one file. `seeds = [0, 1, 2]`, or `seeds = 3`, runs once per
seed. The table `[sweep]` has a list per key, such as `\"method.name\" = [\"fedavg\", \"fedproj\"]`:
every combination runs.
";

/// The reference in Markdown. The keys of a type that occurs again are explained once.
fn reference() -> Result<String> {
    let keys = keys()?;
    let mut text = HEAD.to_owned();
    let top = keys.iter().filter(|key| !key.is_table && !key.path.contains('.'));
    text += "\n## Top level\n\n";
    top.for_each(|key| list(&mut text, key, &key.path));
    let mut explained: BTreeMap<&str, &str> = BTreeMap::new();
    let mut repeated: Vec<String> = Vec::new();
    for table in keys.iter().filter(|key| key.is_table) {
        if repeated.iter().any(|outer| table.path.starts_with(outer)) {
            continue;
        }
        let prefix = format!("{}.", table.path);
        write!(text, "\n## `[{}]`\n\n{}", table.path, wrapped(&table.about, 0))?;
        let inside = |path: &str| {
            let path = format!("{path}.");
            keys.iter().filter_map(move |key| Some((key.path.strip_prefix(&path)?.to_owned(), key)))
        };
        if let Some(first) = explained.get(table.kind.as_str()) {
            let other: BTreeMap<String, &Key> = inside(first).collect();
            let differs = |(name, key): &(String, &Key)| other.get(name).is_some_and(|o| o.default != key.default);
            let defaults = inside(&table.path).filter(differs);
            let defaults = defaults.map(|(name, key)| format!("`{name} = {}`", key.default.as_deref().unwrap_or("")));
            let defaults: Vec<String> = defaults.collect();
            let same = if defaults.is_empty() { "The defaults are the same" } else { "Other defaults: " };
            let anchor = first.replace('.', "");
            let sentence = format!("Keys as in [`[{first}]`](#{anchor}). {same}{}.", defaults.join(", "));
            write!(text, "\n{}", wrapped(&sentence, 0))?;
            repeated.push(prefix);
            continue;
        }
        explained.insert(&table.kind, &table.path);
        let own: Vec<(String, &Key)> = inside(&table.path).filter(|(name, _)| !name.contains('.')).collect();
        if own.iter().any(|(_, key)| !key.is_table) {
            text.push('\n');
        }
        own.iter().filter(|(_, key)| !key.is_table).for_each(|(name, key)| list(&mut text, key, name));
    }
    Ok(text)
}

/// The entries of keys, and of all keys of tables, by their whole paths.
fn entries(of: &[String]) -> Result<String> {
    let (keys, mut text) = (keys()?, String::new());
    for path in of {
        // The error for an unknown key names the nearest.
        Key::explain(&keys, path)?;
        let inside = format!("{path}.");
        let chosen = keys.iter().filter(|key| !key.is_table && (key.path == *path || key.path.starts_with(&inside)));
        chosen.for_each(|key| list(&mut text, key, &key.path));
    }
    Ok(text)
}

/// One key as an item of a list.
fn list(text: &mut String, key: &Key, name: &str) {
    let default =
        key.default.as_ref().map_or_else(|| format!("`{name}`, unset"), |value| format!("`{name} = {value}`"));
    let kind = if key.values.is_empty() { format!(" ({})", key.kind) } else { String::new() };
    let mut item = |indent: usize, item: &str| {
        *text += &" ".repeat(indent - 2);
        *text += "- ";
        *text += &wrapped(item, indent);
    };
    item(2, &format!("{default}{kind}: {}", key.about));
    for (value, about) in &key.values {
        item(4, &format!("`{value}`: {about}"));
    }
}

/// Lines of max 100 characters; those after the first are indented.
pub fn wrapped(text: &str, indent: usize) -> String {
    wrap(text, 100 - indent).join(&format!("\n{}", " ".repeat(indent))) + "\n"
}
