//! Runs sorted into settings, by the data that clients hold, and arms, by the method and the keys that tell them apart.

use crate::compare::{Comparison, compare};
use crate::runs::Loaded;
use fedproj_core::Config;
use fedproj_core::methods::CATALOGUE;
use fedproj_data::PartitionConfig;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

/// Keys and values of a configuration.
pub type Keys = BTreeMap<String, String>;

/// Runs on the same data, dealt out the same way: what may be compared.
pub struct Setting {
    /// The data in words.
    pub title: String,
    /// What tells it from the other settings.
    pub short: String,
    /// What is compared; differences are to the first.
    pub arms: Vec<Arm>,
}

/// The runs of one configuration, one a seed.
pub struct Arm {
    /// The method, and the keys in which it differs from other arms of the method.
    pub name: String,
    /// Those keys.
    pub told_by: Keys,
    /// In the order of their seeds; there is at least one.
    pub runs: Vec<Loaded>,
}

impl Arm {
    /// The configuration, whose seed is that of the first run.
    pub fn config(&self) -> &Config {
        &self.runs[0].run.config
    }

    /// A size of the first run's manifest.
    pub fn size(&self, name: &str) -> Option<usize> {
        size(&self.runs[0], name)
    }

    /// Every key that matters to the method.
    pub fn keys(&self) -> Keys {
        let mut keys = self.config().keys_in_use();
        keys.remove("seed");
        keys
    }
}

impl Setting {
    /// The table of `fedproj compare`.
    pub fn comparison(&self) -> Comparison {
        let outcome =
            |arm: &Arm| arm.runs.iter().map(|r| (arm.name.clone(), r.run.summary.clone())).collect::<Vec<_>>();
        compare(&self.arms.iter().flat_map(outcome).collect::<Vec<_>>())
    }
}

/// A method's name as papers write it.
pub fn method_title(name: &str) -> &str {
    const TITLES: [&str; 12] = [
        "FedAvg", "FedProx", "FedNova", "FedDyn", "MOON", "FedRCL", "FedDF", "FedET", "FedProj", "SCAFFOLD", "FedAvgM",
        "FedAdam",
    ];
    TITLES.into_iter().find(|title| title.eq_ignore_ascii_case(name)).unwrap_or(name)
}

/// Sorts runs; a note for each run that repeats another.
pub fn sort(runs: Vec<Loaded>, notes: &mut Vec<String>) -> Vec<Setting> {
    let mut settings: Vec<(Keys, Vec<Loaded>)> = Vec::new();
    for run in runs {
        let mut keys = run.run.config.keys_in_use();
        keys.retain(|key, _| ["data.private", "data.partition"].iter().any(|of| key.starts_with(of)));
        match settings.iter_mut().find(|(of, _)| *of == keys) {
            Some((_, members)) => members.push(run),
            None => settings.push((keys, vec![run])),
        }
    }
    settings.sort_by(|a, b| by_value(&a.0, &b.0));
    let titles: Vec<String> = settings.iter().map(|(_, runs)| data_title(&runs[0])).collect();
    let is_unique = |title: &String| titles.iter().filter(|t| *t == title).count() == 1;
    let told_by = differing(settings.iter().map(|(keys, _)| keys));
    settings
        .into_iter()
        .zip(&titles)
        .map(|((keys, runs), title)| {
            let title = if is_unique(title) { title.clone() } else { format!("{title}{}", label(&keys, &told_by)) };
            Setting { title, short: short(&keys, &told_by), arms: arms(runs, notes) }
        })
        .collect()
}

/// The arms of a setting, in the order of the catalogue, then of their values.
fn arms(runs: Vec<Loaded>, notes: &mut Vec<String>) -> Vec<Arm> {
    let mut arms: Vec<(Keys, Vec<Loaded>)> = Vec::new();
    for run in runs {
        let mut keys = run.run.config.keys_in_use();
        keys.remove("seed");
        let Some((_, members)) = arms.iter_mut().find(|(of, _)| *of == keys) else {
            arms.push((keys, vec![run]));
            continue;
        };
        match members.iter().find(|other| other.run.summary.seed == run.run.summary.seed) {
            Some(other) => notes.push(format!(
                "Left out: `{}` has the configuration and the seed of `{}`.",
                run.run.dir.display(),
                other.run.dir.display()
            )),
            None => members.push(run),
        }
    }
    let rank =
        |keys: &Keys| CATALOGUE.iter().position(|(name, _)| Some(*name) == keys.get("method.name").map(|n| &n[..]));
    arms.sort_by(|a, b| rank(&a.0).cmp(&rank(&b.0)).then_with(|| by_value(&a.0, &b.0)));
    let method = |keys: &Keys| keys.get("method.name").cloned().unwrap_or_default();
    let told_by: Vec<BTreeSet<String>> = arms
        .iter()
        .map(|(keys, _)| {
            let siblings: Vec<&Keys> = arms.iter().map(|(k, _)| k).filter(|k| method(k) == method(keys)).collect();
            told_by(&siblings)
        })
        .collect();
    let arm = |((keys, mut runs), told_by): ((Keys, Vec<Loaded>), BTreeSet<String>)| {
        runs.sort_by_key(|r| r.run.summary.seed);
        let name = method_title(&method(&keys)).to_owned() + &label(&keys, &told_by);
        Arm { name, told_by: keys.into_iter().filter(|(key, _)| told_by.contains(key)).collect(), runs }
    };
    arms.into_iter().zip(told_by).map(arm).collect()
}

/// The keys that tell the arms of one method apart, without those that follow from the preset.
fn told_by(arms: &[&Keys]) -> BTreeSet<String> {
    let mut all = differing(arms.iter().copied());
    if all.contains("preset") {
        let presets: Vec<Keys> = arms.iter().map(|keys| preset_keys(keys)).collect();
        let is_chosen = |key: &String| arms.iter().zip(&presets).any(|(keys, preset)| keys.get(key) != preset.get(key));
        all.retain(|key| key == "preset" || is_chosen(key));
    }
    all
}

/// What a preset sets for a method, a data set and β.
fn preset_keys(keys: &Keys) -> Keys {
    let given = ["preset", "method.name", "data.private.name", "data.partition.beta"];
    let pairs: Vec<String> = given.iter().filter_map(|key| Some(format!("{key}={}", keys.get(*key)?))).collect();
    Config::from_layers(None, &pairs).map(|config| config.keys_in_use()).unwrap_or_default()
}

/// The keys whose values are not all the same.
pub fn differing<'a>(all: impl Iterator<Item = &'a Keys>) -> BTreeSet<String> {
    let all: Vec<&Keys> = all.collect();
    let keys: BTreeSet<&String> = all.iter().flat_map(|keys| keys.keys()).collect();
    let differs = |key: &&String| all.iter().any(|keys| keys.get(*key) != all[0].get(*key));
    keys.into_iter().filter(differs).cloned().collect()
}

/// `, alpha 0.1, beta 0.3`: of each key as few of its last words as tell it from the others.
fn label(keys: &Keys, told_by: &BTreeSet<String>) -> String {
    let last = |key: &str, n: usize| {
        let words: Vec<&str> = key.split('.').collect();
        words[words.len().saturating_sub(n)..].join(".")
    };
    let short = |key: &String| {
        let is_unique = |n: &usize| told_by.iter().filter(|other| last(other, *n) == last(key, *n)).count() == 1;
        (1..key.split('.').count()).find(is_unique).map_or_else(|| key.clone(), |n| last(key, n))
    };
    told_by.iter().filter_map(|key| Some(format!(", {} {}", short(key), keys.get(key)?))).collect()
}

/// `cifar10, β = 0.3, 20 clients`: those of the keys that settings differ in.
fn short(keys: &Keys, told_by: &BTreeSet<String>) -> String {
    let part = |key: &String| {
        let value = keys.get(key)?;
        Some(match &key[..] {
            "data.private.name" | "data.partition.kind" => value.clone(),
            "data.partition.beta" => format!("β = {value}"),
            _ => format!("{} {value}", key.rsplit('.').next()?),
        })
    };
    let (names, others): (Vec<&String>, Vec<&String>) = told_by.iter().partition(|key| *key == "data.private.name");
    names.into_iter().chain(others).filter_map(part).collect::<Vec<_>>().join(", ")
}

/// Compares values key by key, as numbers where both are.
fn by_value(a: &Keys, b: &Keys) -> Ordering {
    let compare = |(x, y): (&String, &String)| match (x.parse::<f64>(), y.parse::<f64>()) {
        (Ok(x), Ok(y)) => x.total_cmp(&y),
        _ => x.cmp(y),
    };
    let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let orders = keys.into_iter().map(|key| match (a.get(key), b.get(key)) {
        (Some(x), Some(y)) => compare((x, y)),
        (x, y) => x.cmp(&y),
    });
    orders.fold(Ordering::Equal, Ordering::then)
}

fn size(run: &Loaded, name: &str) -> Option<usize> {
    run.manifest.as_ref()?.sizes.get(name).copied()
}

/// Data set and partition in words.
fn data_title(run: &Loaded) -> String {
    let config = &run.run.config;
    let data = &config.data;
    let dealt = if let PartitionConfig::Dirichlet { beta, clients, .. } = &data.partition {
        format!("Dirichlet β = {beta}, {clients} clients")
    } else {
        let part = |(key, value): (&String, &String)| {
            let key = key.strip_prefix("data.partition.")?;
            Some(if key == "kind" { value.clone() } else { format!("{value} {key}") })
        };
        let mut parts: Vec<String> = config.keys_in_use().iter().filter_map(part).collect();
        parts.sort_by_key(|p| p.contains(' '));
        parts.join(", ")
    };
    // A draw holds less than was asked for where the set has less.
    let n_samples = size(run, "private_samples").unwrap_or(data.private_samples);
    let samples = if data.private_samples == 0 { String::new() } else { format!(" ({n_samples} samples)") };
    format!("{}{samples}, {dealt}", data.private.name)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use fedproj_core::{StoredRun, Summary};

    /// A run with settings and an accuracy, without rounds.
    pub fn run(settings: &[&str], seed: u64, headline: f64) -> Loaded {
        let mut pairs: Vec<String> = settings.iter().map(|&s| s.to_owned()).collect();
        pairs.push(format!("seed={seed}"));
        let config = Config::from_layers(None, &pairs).unwrap();
        let (method, model_hash) = (config.method.name.clone(), String::new());
        let summary = Summary { method, seed, headline, last: headline, best: headline, model_hash, seconds: 1.0 };
        let dir = format!("{}-{seed}", settings.join("-")).into();
        Loaded { run: StoredRun { dir, config, summary, rounds: Vec::new() }, manifest: None }
    }

    fn check(runs: Vec<Loaded>, expected: &[(&str, &[(&str, usize)])]) -> Vec<String> {
        let mut notes = Vec::new();
        let sorted = sort(runs, &mut notes);
        let found: Vec<(&str, Vec<(&str, usize)>)> = sorted
            .iter()
            .map(|s| (&s.title[..], s.arms.iter().map(|a| (&a.name[..], a.runs.len())).collect()))
            .collect();
        let expected: Vec<_> = expected.iter().map(|(title, arms)| (*title, arms.to_vec())).collect();
        assert_eq!(found, expected);
        notes
    }

    #[test]
    fn arms_are_named_by_what_differs_in_keys_their_method_reads() {
        let alpha = |alpha: &str| format!("method.fedproj.distill.alpha={alpha}");
        let runs =
            ["10.0", "0.0", "2.0"].iter().flat_map(|a| (0..2).map(|seed| run(&[&alpha(a)], seed, 0.5))).collect();
        let arms = [("FedProj, alpha 0.0", 2), ("FedProj, alpha 2.0", 2), ("FedProj, alpha 10.0", 2)];
        check(runs, &[("digits, Dirichlet β = 0.3, 10 clients", &arms)]);
        // A key of FedProj's says nothing about FedAvg.
        let runs = vec![run(&["method.name=fedproj"], 0, 0.5), run(&["method.name=fedavg", &alpha("0.3")], 0, 0.5)];
        check(runs, &[("digits, Dirichlet β = 0.3, 10 clients", &[("FedAvg", 1), ("FedProj", 1)])]);
        let rates = ["0.0", "0.5"].map(|p| run(&[&format!("method.fedproj.projection.dropout={p}")], 0, 0.5)).to_vec();
        let arms = [("FedProj, dropout 0.0", 1), ("FedProj, dropout 0.5", 1)];
        check(rates, &[("digits, Dirichlet β = 0.3, 10 clients", &arms)]);
    }

    #[test]
    fn a_preset_stands_for_the_keys_that_it_sets() {
        let presets = ["authors-code", "paper"].map(|p| run(&[&format!("preset={p}")], 0, 0.5)).to_vec();
        let arms = [("FedProj, preset authors-code", 1), ("FedProj, preset paper", 1)];
        check(presets, &[("digits, Dirichlet β = 0.3, 10 clients", &arms)]);
        let runs = vec![run(&["preset=paper", "local.epochs=3"], 0, 0.5), run(&["preset=clean"], 0, 0.5)];
        let arms = [("FedProj, epochs 3, preset paper", 1), ("FedProj, epochs 10, preset clean", 1)];
        check(runs, &[("digits, Dirichlet β = 0.3, 10 clients", &arms)]);
    }

    #[test]
    fn words_that_two_keys_share_get_their_table() {
        let runs = vec![
            run(&["local.epochs=1", "method.fedproj.distill.epochs=1"], 0, 0.5),
            run(&["local.epochs=2", "method.fedproj.distill.epochs=3"], 0, 0.5),
        ];
        let arms = [("FedProj, local.epochs 1, distill.epochs 1", 1), ("FedProj, local.epochs 2, distill.epochs 3", 1)];
        check(runs, &[("digits, Dirichlet β = 0.3, 10 clients", &arms)]);
        // Two optimisers: the last two words are not enough.
        let rates = |local: &str, server: &str| {
            let server = format!("method.fedproj.distill.optimizer.lr={server}");
            run(&[&format!("local.optimizer.lr={local}"), &server], 0, 0.5)
        };
        let arms = [
            ("FedProj, local.optimizer.lr 0.1, distill.optimizer.lr 0.2", 1),
            ("FedProj, local.optimizer.lr 0.3, distill.optimizer.lr 0.4", 1),
        ];
        check(vec![rates("0.1", "0.2"), rates("0.3", "0.4")], &[("digits, Dirichlet β = 0.3, 10 clients", &arms)]);
    }

    #[test]
    fn data_and_partition_make_settings_and_repeats_are_left_out() {
        let runs = vec![
            run(&["data.partition.beta=0.5"], 0, 0.5),
            run(&["data.partition.beta=0.3"], 0, 0.5),
            run(&["data.partition={kind='iid', clients=4}"], 0, 0.5),
            run(&["data.partition.beta=0.3"], 0, 0.5),
        ];
        let notes = check(
            runs,
            &[
                ("digits, iid, 4 clients", &[("FedProj", 1)]),
                ("digits, Dirichlet β = 0.3, 10 clients", &[("FedProj", 1)]),
                ("digits, Dirichlet β = 0.5, 10 clients", &[("FedProj", 1)]),
            ],
        );
        assert!(matches!(&notes[..], [note] if note.contains("beta=0.3-0` has the configuration")), "{notes:?}");
    }
}
