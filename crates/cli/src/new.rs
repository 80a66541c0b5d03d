//! `fedproj new`: a commented configuration to start from.
//!
//! The file sets the keys that make up a set-up. Every other key stands behind a `#` with its default, which comes from the
//! library, as does its explanation.

use crate::config::wrapped;
use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use fedproj_core::{Config, Error, Key};
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
    /// Private data set; all but digits get the paper's set-up
    #[arg(long, default_value = "digits", value_parser = PossibleValuesParser::new(SETUPS.iter().map(|s| s.data)))]
    data: String,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
}

impl New {
    /// Writes the file.
    pub fn run(self) -> Result<()> {
        let path = self.file.display();
        let setup = SETUPS.iter().find(|s| s.data == self.data).context("no set-up for this data set")?;
        let text = configuration(setup, &self.preset)?;
        if !self.force && self.file.exists() {
            bail!(Error::config(format!("`{path}` exists already\nhint: --force replaces it")));
        }
        std::fs::write(&self.file, text).with_context(|| format!("cannot write `{path}`"))?;
        eprintln!("wrote `{path}`; now: fedproj run {path}");
        Ok(())
    }
}

/// Sections, and their keys that are worth a look. What they mean comes from the configuration reference.
const SECTIONS: &[(&str, &str)] = &[
    ("", "seed preset"),
    (
        "data",
        "private private_samples private_draw test_fraction public public_fraction public_samples public_draw \
         text.vocabulary text.max_length text.lowercase partition",
    ),
    ("model", "name checkpoint pretrained hidden group_norm init weights"),
    (
        "federation",
        "rounds fraction evaluate_every evaluate_clients headline_rounds checkpoint_every robust.rule robust.share \
         robust.clip",
    ),
    ("local", "epochs batch optimizer schedule.every schedule.factor clip"),
    ("method", "name"),
    (
        "method.fedproj",
        "projection.mode projection.warmup projection.dropout memory.size memory.batch memory.temperature \
         distill.epochs distill.batch distill.optimizer.lr distill.temperature distill.alpha",
    ),
    ("method.feddf", "distill.epochs distill.batch distill.optimizer.lr"),
    ("method.fedet", "epochs batch optimizer.lr"),
    ("method.fedprox", "proximal_weight"),
];

const HEAD: &str = "\
# A federated run.  Start it: fedproj run FILE    Show how data are partitioned: fedproj partition FILE
# A line `#key = value` shows a default: remove the `#` to change it. On the command line,
# key=value overrides the file: fedproj run FILE method.name=fedavg federation.rounds=4
# `fedproj config show --explain KEY` explains a key and its values.
";

const SEEDS: &str = "# One run per seed, instead of `seed`.\n#seeds = [0, 1, 2]\n";

const SWEEP: &str = "
# Many runs from one file: every combination of these lists, once per seed.
#[sweep]
#\"method.name\" = [\"fedavg\", \"feddf\", \"fedproj\"]
#\"data.partition.beta\" = [0.3, 0.5]
";

/// The text of the file.
fn configuration(setup: &Setup, preset: &str) -> Result<String> {
    let written = setup.with_preset(preset);
    let pairs: Vec<String> = written.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let effective = Value::try_from(Config::from_layers(None, &pairs)?)?;
    let reference = Config::keys()?;
    let mut text = HEAD.to_owned();
    for (section, keys) in SECTIONS {
        if !section.is_empty() {
            writeln!(text, "\n[{section}]")?;
        }
        for key in keys.split(' ') {
            let path = if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") };
            let find = |path: &str| reference.iter().find(|known| known.path == path);
            let about = find(&path).with_context(|| format!("there is no key `{path}`"))?;
            comment(&mut text, about, find(&format!("{path}.kind")).unwrap_or(about))?;
            match written.iter().find(|(key, _)| *key == path) {
                Some((_, value)) => writeln!(text, "{key} = {value}")?,
                None => writeln!(text, "#{key} = {}", value_at(&effective, &path)?)?,
            }
        }
        if section.is_empty() {
            text.push_str(SEEDS);
        }
    }
    text.push_str(SWEEP);
    Ok(text)
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
        value => value.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fedproj_study::{PlannedRun, expand};
    use toml::Table;

    fn runs(text: &str) -> Vec<PlannedRun> {
        let table: Table = toml::from_str(text).unwrap();
        expand(Some(&table), &[]).unwrap()
    }

    fn each(check: impl Fn(&Setup, &str, &str)) {
        for setup in SETUPS {
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
            assert_eq!(config["data"]["private"]["name"].as_str(), Some(setup.data));
            assert_eq!(run.config.method.feddf.distill.epochs, setup.distill_epochs);
        });
    }

    #[test]
    fn what_stands_behind_a_hash_is_the_default() {
        each(|_, _, text| {
            let uncomment = |line: &str| match line.strip_prefix('#') {
                Some(setting) if !setting.starts_with(' ') => format!("{setting}\n"),
                _ => format!("{line}\n"),
            };
            let uncommented = runs(&text.lines().map(uncomment).collect::<String>());
            assert_eq!(uncommented.len(), 3 * 3 * 2);
            assert!(uncommented.iter().any(|run| run.config == runs(text)[0].config), "{text}");
        });
    }
}
