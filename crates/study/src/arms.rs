//! Runs sorted into groups, by the data that clients hold, and arms, by the method and the keys that distinguish them.

use crate::clients::ClientSpread;
use crate::compare::{Comparison, compare};
use crate::networks::NetworkAccuracy;
use crate::runs::Loaded;
use fedproj_core::methods::{CATALOGUE, title};
use fedproj_core::{Config, Error, Result};
use fedproj_data::PartitionConfig;
use serde::Serialize;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

/// Keys and values of a configuration.
pub type Keys = BTreeMap<String, String>;

/// Runs on the same data, partitioned the same way: what may be compared. JSON and CSV call it a setting.
pub struct Group {
    /// The data in words.
    pub title: String,
    /// What distinguishes it from the other groups.
    pub short: String,
    /// What is compared; differences are to the first.
    pub arms: Vec<Arm>,
}

/// The runs of one configuration, one per seed.
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

    /// Whether all rounds are done.
    pub fn is_finished(&self) -> bool {
        self.runs[0].is_finished
    }

    /// Every key that matters to the method, but the seed.
    pub fn keys(&self) -> Keys {
        keys_of_arm(self.config())
    }
}

impl Group {
    /// The table of `fedproj compare`.
    pub fn comparison(&self) -> Comparison {
        let results =
            |arm: &Arm| arm.runs.iter().map(|r| (arm.name.clone(), r.run.summary.clone())).collect::<Vec<_>>();
        let mut comparison = compare(&self.arms.iter().flat_map(results).collect::<Vec<_>>());
        for (row, arm) in comparison.rows.iter_mut().zip(&self.arms) {
            let spreads: Vec<_> = arm.runs.iter().filter_map(|r| ClientSpread::of(&r.run.rounds)).collect();
            row.clients = ClientSpread::over(&spreads);
            let networks: Vec<_> = arm.runs.iter().map(|r| NetworkAccuracy::of(&r.run)).collect();
            row.networks = NetworkAccuracy::over(&networks);
        }
        comparison
    }
}

/// The comparison of one group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparedGroup {
    /// The data in words.
    #[serde(rename = "setting")]
    pub title: String,
    /// Its arms beside each other.
    #[serde(flatten)]
    pub comparison: Comparison,
}

/// Compares runs within their group, with the arm of this name or with the first. Notes name what is left out.
///
/// # Errors
/// If no arm has the baseline's name.
pub fn compare_runs(runs: Vec<Loaded>, baseline: Option<&str>, notes: &mut Vec<String>) -> Result<Vec<ComparedGroup>> {
    let mut groups = sort(runs, notes);
    if let Some(baseline) = baseline {
        let is_baseline = |arm: &Arm| arm.name.eq_ignore_ascii_case(baseline);
        let names: BTreeSet<&str> = groups.iter().flat_map(|g| &g.arms).map(|arm| arm.name.as_str()).collect();
        if !groups.iter().any(|group| group.arms.iter().any(is_baseline)) {
            let known = names.into_iter().collect::<Vec<_>>().join("; ");
            return Err(Error::config(format!("--baseline {baseline}: no such row; there are: {known}")));
        }
        for group in &mut groups {
            if !group.arms.iter().any(is_baseline) {
                let (title, first) = (&group.title, &group.arms[0].name);
                notes.push(format!("{title}: there is no `{baseline}`; differences are to {first}."));
            }
            group.arms.sort_by_key(|arm| !is_baseline(arm));
        }
    }
    Ok(groups.into_iter().map(|g| ComparedGroup { comparison: g.comparison(), title: g.title }).collect())
}

/// Sorts runs; a note for each run that repeats another.
pub fn sort(runs: Vec<Loaded>, notes: &mut Vec<String>) -> Vec<Group> {
    let mut groups: Vec<(Keys, Vec<Loaded>)> = Vec::new();
    for run in runs {
        let mut keys = run.run.config.keys_in_use();
        keys.retain(|key, _| ["data.private", "data.partition"].iter().any(|of| key.starts_with(of)));
        match groups.iter_mut().find(|(of, _)| *of == keys) {
            Some((_, members)) => members.push(run),
            None => groups.push((keys, vec![run])),
        }
    }
    groups.sort_by(|a, b| by_value(&a.0, &b.0));
    let titles: Vec<String> = groups.iter().map(|(_, runs)| data_title(&runs[0])).collect();
    let is_unique = |title: &String| titles.iter().filter(|t| *t == title).count() == 1;
    let told_by = differing(groups.iter().map(|(keys, _)| keys));
    groups
        .into_iter()
        .zip(&titles)
        .map(|((keys, runs), title)| {
            let short = parts(&keys, &told_by, &|_| true).join(", ");
            let title = if is_unique(title) { title.clone() } else { format!("{title}, {short}") };
            Group { title, short, arms: arms(runs, notes) }
        })
        .collect()
}

/// The arms of a group, in the order of the catalogue, then of the values that distinguish them.
fn arms(runs: Vec<Loaded>, notes: &mut Vec<String>) -> Vec<Arm> {
    let mut arms: Vec<(Keys, Vec<Loaded>)> = Vec::new();
    for run in runs {
        let keys = keys_of_arm(&run.run.config);
        // Seeds that are not equally far have no common mean.
        let is_same = |members: &[Loaded]| members[0].rounds_done() == run.rounds_done();
        let Some((_, members)) = arms.iter_mut().find(|(of, members)| *of == keys && is_same(members)) else {
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
    let rank = |keys: &Keys| CATALOGUE.iter().position(|(name, _)| *name == method(keys));
    let told_by = told_by_method(arms.iter().map(|(keys, _)| keys));
    // Keys that follow from a preset must not decide the order: their names may change.
    let own = |keys: &Keys| -> Keys {
        let told_by = &told_by[method(keys)];
        keys.iter().filter(|(key, _)| told_by.contains(*key)).map(|(key, value)| (key.clone(), value.clone())).collect()
    };
    arms.sort_by(|a, b| rank(&a.0).cmp(&rank(&b.0)).then_with(|| by_value(&own(&a.0), &own(&b.0))));
    let arm = |(keys, mut runs): (Keys, Vec<Loaded>)| {
        runs.sort_by_key(|r| r.run.summary.seed);
        let name = name(&keys, &told_by[method(&keys)]);
        let name = match runs[0].rounds_done() {
            Some((done, all)) => format!("{name} (unfinished: {done} of {all} rounds)"),
            None => name,
        };
        Arm { name, told_by: own(&keys), runs }
    };
    arms.into_iter().map(arm).collect()
}

/// The name of each configuration's arm: the method, and the keys in which it differs from others of the method. The seed has
/// no part in it.
pub fn labels<'a>(configs: impl IntoIterator<Item = &'a Config>) -> Vec<String> {
    let all: Vec<Keys> = configs.into_iter().map(keys_of_arm).collect();
    let told_by = told_by_method(all.iter());
    all.iter().map(|keys| name(keys, &told_by[method(keys)])).collect()
}

/// Every key that matters to the method, but the seed.
fn keys_of_arm(config: &Config) -> Keys {
    let mut keys = config.keys_in_use();
    keys.remove("seed");
    keys
}

fn method(keys: &Keys) -> &str {
    keys.get("method.name").map_or("", |name| name)
}

fn name(keys: &Keys, told_by: &BTreeSet<String>) -> String {
    // Beside other presets, a key says something only where it departs from the arm's own.
    let preset = told_by.contains("preset").then(|| preset_keys(keys));
    let says = |key: &String| key == "preset" || preset.as_ref().is_none_or(|preset| preset.get(key) != keys.get(key));
    let parts = parts(keys, told_by, &says).into_iter().map(|part| format!(", {part}"));
    title(method(keys)).to_owned() + &parts.collect::<String>()
}

/// For each method, the keys that distinguish its arms.
fn told_by_method<'a>(all: impl Iterator<Item = &'a Keys>) -> BTreeMap<String, BTreeSet<String>> {
    let mut by_method: BTreeMap<String, Vec<&Keys>> = BTreeMap::new();
    for keys in all {
        by_method.entry(method(keys).to_owned()).or_default().push(keys);
    }
    by_method.into_iter().map(|(method, arms)| (method, told_by(&arms))).collect()
}

/// The keys that distinguish the arms of one method, without those that follow from the preset.
fn told_by(arms: &[&Keys]) -> BTreeSet<String> {
    let mut all = differing(arms.iter().copied());
    if all.contains("preset") {
        let presets: Vec<Keys> = arms.iter().map(|keys| preset_keys(keys)).collect();
        let is_chosen = |key: &String| arms.iter().zip(&presets).any(|(keys, preset)| keys.get(key) != preset.get(key));
        all.retain(|key| key == "preset" || is_chosen(key));
    }
    all
}

/// What a preset sets for a method, a data set, β and participation.
fn preset_keys(keys: &Keys) -> Keys {
    let given = ["preset", "method.name", "data.private.name", "data.partition.beta", "federation.fraction"];
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

/// `cifar10`, `β = 0.3`, `alpha 0.1`: of each key that says something as few of its last words as distinguish it from the
/// others. The data set comes first.
fn parts(keys: &Keys, told_by: &BTreeSet<String>, says: &dyn Fn(&String) -> bool) -> Vec<String> {
    let last = |key: &str, n: usize| {
        let words: Vec<&str> = key.split('.').collect();
        words[words.len().saturating_sub(n)..].join(".")
    };
    let short = |key: &String| {
        let is_unique = |n: &usize| told_by.iter().filter(|other| last(other, *n) == last(key, *n)).count() == 1;
        (1..key.split('.').count()).find(is_unique).map_or_else(|| key.clone(), |n| last(key, n))
    };
    let part = |key: &String| {
        let value = keys.get(key)?;
        Some(match &key[..] {
            "data.private.name" | "data.partition.kind" => value.clone(),
            "data.partition.beta" => format!("β = {value}"),
            _ => format!("{} {value}", short(key)),
        })
    };
    let (names, others): (Vec<&String>, Vec<&String>) = told_by.iter().partition(|key| *key == "data.private.name");
    names.into_iter().chain(others).filter(|key| says(key)).filter_map(part).collect()
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
        let summary =
            Summary { method, seed, headline, last: headline, best: headline, model_hash, seconds: 1.0, privacy: None };
        let dir = format!("{}-{seed}", settings.join("-")).into();
        Loaded { run: StoredRun { dir, config, summary, rounds: Vec::new() }, manifest: None, is_finished: true }
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
    fn compare_and_report_give_an_arm_the_same_name() {
        let runs = vec![
            run(&["method.name=fedavg"], 0, 0.5),
            run(&["method.fedproj.distill.alpha=0.1", "preset=paper"], 0, 0.5),
            run(&["method.fedproj.distill.alpha=0.1", "preset=paper"], 1, 0.5),
            run(&["method.fedproj.distill.epochs=3", "local.epochs=2"], 0, 0.5),
        ];
        let labels = labels(runs.iter().map(|r| &r.run.config));
        let groups = sort(runs.clone(), &mut Vec::new());
        for (run, label) in runs.iter().zip(labels) {
            let arm = groups[0].arms.iter().find(|arm| arm.runs.iter().any(|r| r.run.dir == run.run.dir)).unwrap();
            assert_eq!(arm.name, label);
        }
    }

    #[test]
    fn arms_are_compared_with_the_baseline_of_their_own_data() {
        let runs = || {
            let arm = |beta: &str, method: &str, headline: f64| {
                let settings = [format!("data.partition.beta={beta}"), format!("method.name={method}")];
                run(&settings.each_ref().map(String::as_str), 0, headline)
            };
            vec![
                arm("0.3", "fedavg", 0.25),
                arm("0.3", "fedproj", 0.5),
                arm("0.5", "fedavg", 0.75),
                arm("0.5", "fedproj", 0.875),
            ]
        };
        let differences = |baseline: Option<&str>| -> Vec<Option<f64>> {
            let groups = compare_runs(runs(), baseline, &mut Vec::new()).unwrap();
            groups.iter().flat_map(|g| &g.comparison.rows).map(|row| row.difference.map(|d| d.mean)).collect()
        };
        assert_eq!(differences(None), [None, Some(0.25), None, Some(0.125)]);
        assert_eq!(differences(Some("fedproj")), [None, Some(-0.25), None, Some(-0.125)]);
        let message = compare_runs(runs(), Some("moon"), &mut Vec::new()).unwrap_err().to_string();
        assert!(message.contains("no such row; there are: FedAvg; FedProj"), "{message}");
        let (mut fewer, mut notes) = (runs(), Vec::new());
        fewer.remove(2);
        compare_runs(fewer, Some("fedavg"), &mut notes).unwrap();
        assert!(matches!(&notes[..], [note] if note.contains("β = 0.5") && note.contains("to FedProj")), "{notes:?}");
    }

    #[test]
    fn data_are_named_where_runs_of_several_are_compared() {
        let runs = ["0.3", "0.5"].map(|beta| run(&[&format!("data.partition.beta={beta}")], 0, 0.5));
        assert_eq!(labels(runs.iter().map(|r| &r.run.config)), ["FedProj, β = 0.3", "FedProj, β = 0.5"]);
    }

    #[test]
    fn a_preset_stands_for_the_keys_that_it_sets() {
        let presets = ["authors-code", "paper"].map(|p| run(&[&format!("preset={p}")], 0, 0.5)).to_vec();
        let arms = [("FedProj, preset authors-code", 1), ("FedProj, preset paper", 1)];
        check(presets, &[("digits, Dirichlet β = 0.3, 10 clients", &arms)]);
        let runs = vec![run(&["preset=paper", "local.epochs=3"], 0, 0.5), run(&["preset=clean"], 0, 0.5)];
        let arms = [("FedProj, epochs 3, preset paper", 1), ("FedProj, preset clean", 1)];
        check(runs, &[("digits, Dirichlet β = 0.3, 10 clients", &arms)]);
        let leading = |more: &[&str]| run(&[&["preset=leading", "federation.fraction=0.3"], more].concat(), 0, 0.5);
        let runs = vec![
            run(&["federation.fraction=0.3"], 0, 0.5),
            leading(&[]),
            leading(&["method.fedproj.projection.mode=off"]),
            leading(&["method.fedproj.averages.teacher=0.0"]),
        ];
        let arms = [
            ("FedProj, preset clean", 1),
            ("FedProj, teacher 0.0, preset leading", 1),
            ("FedProj, preset leading", 1),
            ("FedProj, mode off, preset leading", 1),
        ];
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
    fn data_and_partition_make_groups_and_repeats_are_left_out() {
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
