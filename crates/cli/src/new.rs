//! `fedproj new`: a commented configuration to start from.
//!
//! The file holds every key, with its explanation from the library. The keys that make up a set-up are set; the others stand
//! behind a `#` with their defaults. For digits all values are defaults.

use crate::config::wrapped;
use crate::tell;
use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use fedproj_core::{Config, Error, Key, WHOLE_TABLES, write_atomically};
use fedproj_study::{PRESETS, SETUPS, Setup};
use std::fmt::Write;
use std::path::PathBuf;
use toml::Value;

/// Arguments of `new`.
#[derive(Args)]
pub struct New {
    /// File to write
    #[arg(default_value = "fedproj.toml")]
    file: PathBuf,
    /// Defaults from the paper's text (paper), its published code (authors-code), or a clean combination of both
    #[arg(long, default_value = "clean", value_parser = PRESETS)]
    preset: String,
    /// Private data set: digits with all defaults, or a data set of the paper with its set-up
    #[arg(
        long,
        default_value = DIGITS,
        ignore_case = true,
        value_parser = PossibleValuesParser::new(std::iter::once(DIGITS).chain(SETUPS.iter().map(|s| s.data)))
    )]
    data: String,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
}

impl New {
    /// Writes the file.
    pub fn run(self) -> Result<()> {
        let path = self.file.display();
        let setup = SETUPS.iter().find(|s| s.data == self.data);
        let text = configuration(setup, &self.preset)?;
        if !self.force && self.file.exists() {
            bail!(Error::config(format!("`{path}` exists already\nhint: --force replaces it")));
        }
        write_atomically(&self.file, text.as_bytes())?;
        tell!("wrote `{path}`; now: fedproj run {path}");
        Ok(())
    }
}

/// The data set of the default configuration.
const DIGITS: &str = "digits";

const HEAD: &str = "\
# A federated run.  Start it: fedproj run FILE    Show how data are partitioned: fedproj partition FILE
# A line `#key = value` shows a default: remove the `#` to change it. On the command line,
# key=value overrides the file: fedproj run FILE method.name=fedavg federation.rounds=4
# `fedproj config show --explain KEY` explains a key and its values.
";

const SEEDS: &str = "# One run per seed, instead of `seed`; `seeds = 3` is the same.\n#seeds = [0, 1, 2]\n";

const SWEEP: &str = "
# Many runs from one file: every combination of these lists, once per seed.
#[sweep]
#\"method.name\" = [\"fedavg\", \"feddf\", \"fedproj\"]
#\"data.partition.beta\" = [0.3, 0.5]
";

/// The text of the file, for the set-up of a data set or, without one, for the default configuration.
fn configuration(setup: Option<&Setup>, preset: &str) -> Result<String> {
    let chosen = setup.map_or_else(|| vec![("preset", format!("\"{preset}\""))], |setup| setup.with_preset(preset));
    let pairs: Vec<String> = chosen.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let effective = Value::try_from(Config::from_layers(None, &pairs)?)?;
    let always = SETUPS[0].with_preset(preset);
    let is_set = |path: &str| always.iter().chain(&chosen).any(|(key, _)| *key == path);
    let reference = Config::keys()?;
    let find = |path: &str| reference.iter().find(|key| key.path == path);
    let (mut text, mut open) = (HEAD.to_owned(), "");
    for key in &reference {
        let path = key.path.as_str();
        let is_inside = |table: &&str| path.strip_prefix(*table).is_some_and(|rest| rest.starts_with('.'));
        let section = section_of(key, &reference);
        if section != open {
            if open.is_empty() {
                text.push_str(SEEDS);
            }
            writeln!(text, "\n[{section}]")?;
            open = section;
        }
        let is_whole = WHOLE_TABLES.contains(&path);
        // A key without a default is unset, and belongs to another kind than the default one.
        if WHOLE_TABLES.iter().any(is_inside) || (!is_whole && (key.is_table || key.default.is_none())) {
            continue;
        }
        comment(&mut text, key, find(&format!("{path}.kind")).unwrap_or(key))?;
        let name = path.strip_prefix(section).map_or(path, |rest| rest.trim_start_matches('.'));
        let mark = if is_set(path) { "" } else { "#" };
        writeln!(text, "{mark}{name} = {}", value_at(&effective, path)?)?;
    }
    text.push_str(SWEEP);
    Ok(text)
}

/// The table of the file in which a key stands: one per top-level table and per method. Deeper keys are dotted.
fn section_of<'a>(key: &'a Key, all: &[Key]) -> &'a str {
    let path = key.path.as_str();
    let is_table = |path: &str| all.iter().any(|key| key.is_table && key.path == path);
    let n_words = if path.starts_with("method.") { 2 } else { 1 };
    let ends = path.match_indices('.').map(|(at, _)| at).chain([path.len()]).take(n_words);
    ends.map(|end| &path[..end]).filter(|table| is_table(table)).last().unwrap_or("")
}

/// What a key means, and the values of it or of its table's kind.
fn comment(text: &mut String, key: &Key, kind: &Key) -> Result<()> {
    let values: Vec<&str> = kind.values.iter().map(|(value, _)| value.as_str()).collect();
    let values = if values.is_empty() { String::new() } else { format!(" One of: {}.", values.join(", ")) };
    for line in wrapped(&format!("{}{values}", key.about), 2).lines() {
        writeln!(text, "# {}", line.trim_start())?;
    }
    Ok(())
}

/// A setting as TOML.
fn value_at(config: &Value, path: &str) -> Result<String> {
    let value = path.split('.').try_fold(config, |at, key| at.get(key));
    Ok(match value.with_context(|| format!("there is no setting `{path}`"))? {
        // An `f32` shows its own short digits, not those of the `f64` that TOML made of it.
        Value::Float(v) if f64::from(*v as f32).total_cmp(v).is_eq() => format!("{:?}", *v as f32),
        // A data set without options is its name.
        Value::Table(table) if table.len() == 1 && table.contains_key("name") => table["name"].to_string(),
        value => value.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fedproj_study::{SweepRun, expand};
    use std::collections::BTreeSet;
    use toml::Table;

    fn runs(text: &str) -> Vec<SweepRun> {
        let table: Table = toml::from_str(text).unwrap();
        expand(Some(&table), &[]).unwrap()
    }

    fn each(check: impl Fn(Option<&Setup>, &str, &str)) {
        for setup in std::iter::once(None).chain(SETUPS.iter().map(Some)) {
            for preset in PRESETS {
                check(setup, preset, &configuration(setup, preset).unwrap());
            }
        }
    }

    #[test]
    fn every_configuration_is_one_valid_run_of_what_was_asked_for() {
        each(|setup, preset, text| {
            let [run] = &runs(text)[..] else { panic!("one run expected") };
            let config = Table::try_from(&run.config).unwrap();
            assert_eq!(config["preset"].as_str(), Some(preset));
            assert_eq!(config["data"]["private"]["name"].as_str(), Some(setup.map_or(DIGITS, |setup| setup.data)));
            assert_eq!(run.config.method.feddf.distill.epochs, setup.map_or(1, |setup| setup.distill_epochs));
        });
    }

    #[test]
    fn the_file_for_digits_is_the_default_configuration_with_every_key() {
        let text = configuration(None, "clean").unwrap();
        assert_eq!(runs(&text)[0].config, Config::default());
        // Data sets are written by their names alone.
        let is_named = |key: &String| key.starts_with("data.private.") || key.starts_with("data.public.");
        let mut expected: BTreeSet<String> = leaves(&Value::try_from(Config::default()).unwrap(), "");
        expected.retain(|key| !is_named(key));
        let text = uncommented(&text);
        let mut given: Table = toml::from_str(text.split_once("[sweep]").unwrap().0).unwrap();
        given.remove("seeds");
        let mut found = leaves(&Value::Table(given), "");
        assert!(found.remove("data.private") && found.remove("data.public"));
        assert_eq!(found, expected);
    }

    /// The paths of all values.
    fn leaves(value: &Value, path: &str) -> BTreeSet<String> {
        match value {
            Value::Table(table) => {
                let path = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
                table.iter().flat_map(|(key, value)| leaves(value, &path(key))).collect()
            }
            _ => BTreeSet::from([path.to_owned()]),
        }
    }

    /// All settings that stand behind a `#`, set.
    fn uncommented(text: &str) -> String {
        let uncomment = |line: &str| match line.strip_prefix('#') {
            Some(setting) if !setting.starts_with(' ') => format!("{setting}\n"),
            _ => format!("{line}\n"),
        };
        text.lines().map(uncomment).collect()
    }

    #[test]
    fn what_stands_behind_a_hash_is_the_default() {
        each(|_, _, text| {
            let uncommented = runs(&uncommented(text));
            assert_eq!(uncommented.len(), 3 * 3 * 2);
            assert!(uncommented.iter().any(|run| run.config == runs(text)[0].config), "{text}");
        });
    }
}
