//! Runs sorted into settings, by the data that clients hold, and arms, by the method and the keys that tell them apart.

use super::load::Loaded;
use fedproj_core::methods::CATALOGUE;
use fedproj_core::{Comparison, Config, compare};
use fedproj_data::PartitionConfig;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

/// Keys and values of a configuration.
pub type Keys = BTreeMap<String, String>;

/// Runs on the same data, dealt out the same way: what may be compared.
pub struct Setting {
    /// The data in words.
    pub title: String,
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
    let titles: Vec<String> = settings.iter().map(|(_, runs)| data_title(&runs[0].run.config)).collect();
    let is_unique = |title: &String| titles.iter().filter(|t| *t == title).count() == 1;
    let told_by = differing(settings.iter().map(|(keys, _)| keys));
    settings
        .into_iter()
        .zip(&titles)
        .map(|((keys, runs), title)| {
            let title = if is_unique(title) { title.clone() } else { format!("{title}{}", label(&keys, &told_by)) };
            Setting { title, arms: arms(runs, notes) }
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
        .map(|(keys, _)| differing(arms.iter().map(|(k, _)| k).filter(|other| method(other) == method(keys))))
        .collect();
    let arm = |((keys, mut runs), told_by): ((Keys, Vec<Loaded>), BTreeSet<String>)| {
        runs.sort_by_key(|r| r.run.summary.seed);
        let name = method_title(&method(&keys)).to_owned() + &label(&keys, &told_by);
        Arm { name, told_by: keys.into_iter().filter(|(key, _)| told_by.contains(key)).collect(), runs }
    };
    arms.into_iter().zip(told_by).map(arm).collect()
}

/// The keys whose values are not all the same.
pub fn differing<'a>(all: impl Iterator<Item = &'a Keys>) -> BTreeSet<String> {
    let all: Vec<&Keys> = all.collect();
    let keys: BTreeSet<&String> = all.iter().flat_map(|keys| keys.keys()).collect();
    let differs = |key: &&String| all.iter().any(|keys| keys.get(*key) != all[0].get(*key));
    keys.into_iter().filter(differs).cloned().collect()
}

/// `, alpha 0.1, beta 0.3`: the last word of each key, or the last two where words alone could be mistaken.
fn label(keys: &Keys, told_by: &BTreeSet<String>) -> String {
    let last = |key: &str, n: usize| {
        let words: Vec<&str> = key.split('.').collect();
        words[words.len().saturating_sub(n)..].join(".")
    };
    let short = |key: &String| {
        let is_unique = told_by.iter().filter(|other| last(other, 1) == last(key, 1)).count() == 1;
        last(key, if is_unique { 1 } else { 2 })
    };
    told_by.iter().filter_map(|key| Some(format!(", {} {}", short(key), keys.get(key)?))).collect()
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

/// Data set and partition in words.
fn data_title(config: &Config) -> String {
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
    let samples =
        if data.private_samples == 0 { String::new() } else { format!(" ({} samples)", data.private_samples) };
    format!("{}{samples}, {dealt}", data.private.name)
}
