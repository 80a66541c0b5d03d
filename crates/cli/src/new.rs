//! `fedproj new`: a commented configuration to start from.
//!
//! Keys that make up a set-up are written out; every other one stands behind a `#` with the value it has anyway, asked
//! from the library, so that the file never shows a default that is not one.

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use fedproj_core::{Config, Error};
use fedproj_study::{PRESETS, SETUPS, Setup};
use std::fmt::Write;
use std::path::PathBuf;
use toml::Value;

/// Arguments of `new`.
#[derive(Args)]
pub struct New {
    /// The file to write
    #[arg(default_value = "fedproj.toml")]
    file: PathBuf,
    /// Defaults: the paper's text, its published code, or a clean combination of both
    #[arg(long, default_value = "clean", value_parser = PRESETS)]
    preset: String,
    /// The private data set; all but the embedded digits get the paper's set-up
    #[arg(long, default_value = "digits", value_parser = PossibleValuesParser::new(SETUPS.iter().map(|s| s.data)))]
    data: String,
    /// Replace a file that is there
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
            bail!(Error::config(format!("`{path}` is there already\nhint: --force replaces it")));
        }
        std::fs::write(&self.file, text).with_context(|| format!("cannot write `{path}`"))?;
        eprintln!("wrote `{path}`; now: fedproj run {path}");
        Ok(())
    }
}

/// Sections, their keys, and a comment for each.
const SECTIONS: &[(&str, &[(&str, &str)])] = &[
    (
        "",
        &[
            ("seed", "decides partition, sampling of clients, initial weights and every order"),
            ("preset", "\"paper\": its text; \"authors-code\": its program; \"clean\": the text with a warm-up"),
        ],
    ),
    (
        "data",
        &[
            ("private", "the labelled set that clients share out (`fedproj data` lists them)"),
            ("private_samples", "training samples used; 0 is all"),
            ("private_draw", "\"uniform\", or \"balanced\": as many of each class, private_samples at most"),
            ("test_fraction", "held out for testing where a set has no test part"),
            ("public", "the unlabelled set: a data set, \"split\" (part of the private one) or \"none\""),
            ("public_fraction", "share that \"split\" takes"),
            ("public_samples", "public samples used; 0 is all"),
            ("public_draw", "as private_draw; \"balanced\" looks at the public labels"),
            ("text.vocabulary", "a vocab.txt; empty is the checkpoint's"),
            ("text.max_length", "tokens of a text; longer ones are cut"),
            ("text.lowercase", "for uncased vocabularies"),
            (
                "partition",
                "how samples are dealt: dirichlet, iid, shards, labels, quantity, one_class, natural, file or virtual",
            ),
        ],
    ),
    (
        "model",
        &[
            ("name", "`fedproj models` lists them; \"bert\" is a checkpoint's"),
            ("checkpoint", "folder of a BERT model: config.json, vocab.txt, model.safetensors"),
            ("pretrained", "start from its weights, or take its shape alone"),
            ("hidden", "hidden layers of mlp"),
            ("group_norm", "groups of group-norm; 0 is batch-norm"),
            ("init", "\"torch\" or \"authors\""),
            ("weights", "a safetensors file to start from"),
        ],
    ),
    (
        "federation",
        &[
            ("rounds", "communication rounds"),
            ("fraction", "share of the clients in a round"),
            ("evaluate_every", "rounds between tests of the global model"),
            ("evaluate_clients", "test every client's model too, for forgetting"),
            ("headline_rounds", "last rounds whose mean is the headline; 0 is as many as clients in a round"),
            ("checkpoint_every", "rounds between checkpoints"),
            ("robust.rule", "in the place of weighted means: \"none\", \"median\", \"trimmed_mean\" or \"krum\""),
            ("robust.share", "share of the clients that may be hostile"),
            ("robust.clip", "largest norm of a client's update; 0 is no limit"),
        ],
    ),
    (
        "local",
        &[
            ("epochs", "passes over a client's samples in a round"),
            ("batch", "samples in a step"),
            ("optimizer", "\"adam\", \"adamw\" or \"sgd\" (with momentum, nesterov); made new every round"),
            ("schedule.every", "share of the epochs after which the rate drops; 0 is never"),
            ("schedule.factor", "what it is multiplied by then"),
            ("clip", "largest norm of a gradient; 0 is no limit"),
        ],
    ),
    ("method", &[("name", "`fedproj methods` lists them; each has a table of its own")]),
    (
        "method.fedproj",
        &[
            ("projection.mode", "\"conditional\", \"always\", \"soft\" or \"off\""),
            ("projection.warmup", "rounds without it at the start; below 1 a share of all rounds"),
            ("projection.dropout", "chance that a client leaves it out for a round"),
            ("memory.size", "public samples in the memory"),
            ("memory.batch", "samples of one memory gradient"),
            ("memory.temperature", "of the memory loss"),
            ("distill.epochs", "the server's passes over the public set; 0 is no distillation"),
            ("distill.batch", "samples in a step of the server"),
            ("distill.optimizer.lr", "the server's learning rate"),
            ("distill.temperature", "of teacher and student"),
            ("distill.alpha", "weight α of the weight-divergence term"),
        ],
    ),
    (
        "method.feddf",
        &[
            ("distill.epochs", "the server's passes over the public set"),
            ("distill.batch", "samples in a step of the server"),
            ("distill.optimizer.lr", "the server's learning rate"),
        ],
    ),
    (
        "method.fedet",
        &[
            ("epochs", "the server's passes over the public set"),
            ("batch", "samples in a step of the server"),
            ("optimizer.lr", "the server's learning rate"),
        ],
    ),
    ("method.fedprox", &[("proximal_weight", "μ; 0 is FedAvg")]),
];

const HEAD: &str = "\
# A federated run.   Start it: fedproj run FILE   See who holds which data: fedproj partition FILE
# A line `#key = value` shows a default: take the `#` away to change it. On the command line, key=value overrides
# the file for once: fedproj run FILE method.name=fedavg federation.rounds=4
";

const SEEDS: &str = "#seeds = [0, 1, 2]               # one run for each, instead of `seed`\n";

const SWEEP: &str = "
# Many runs from one file: every combination of these lists, for every seed of `seeds`.
#[sweep]
#\"method.name\" = [\"fedavg\", \"feddf\", \"fedproj\"]
#\"data.partition.beta\" = [0.3, 0.5]
";

/// The text of the file.
fn configuration(setup: &Setup, preset: &str) -> Result<String> {
    let written = setup.with_preset(preset);
    let pairs: Vec<String> = written.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let effective = Value::try_from(Config::from_layers(None, &pairs)?)?;
    let mut text = HEAD.to_owned();
    for (section, keys) in SECTIONS {
        if !section.is_empty() {
            writeln!(text, "\n[{section}]")?;
        }
        for (key, comment) in *keys {
            let path = if section.is_empty() { (*key).to_owned() } else { format!("{section}.{key}") };
            let setting = match written.iter().find(|(key, _)| *key == path) {
                Some((_, value)) => format!("{key} = {value}"),
                None => format!("#{key} = {}", value_at(&effective, &path)?),
            };
            match setting.len() {
                ..=40 => writeln!(text, "{setting:<32} # {comment}")?,
                _ => writeln!(text, "# {comment}\n{setting}")?,
            }
        }
        if section.is_empty() {
            text.push_str(SEEDS);
        }
    }
    text.push_str(SWEEP);
    Ok(text)
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
