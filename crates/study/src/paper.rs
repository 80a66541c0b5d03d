//! The paper's results, and how runs differ from the set-up behind them.

use crate::arms::{Arm, Group};
use crate::page::GroupResult;
use crate::setups::{self, paper_setup};
use anyhow::Result;
use fedproj_core::Config;
use fedproj_data::PartitionConfig;
use serde::Serialize;

/// `table,dataset,public,beta,method,alpha,mean,std`, as printed in the paper.
const TABLES: &str = include_str!("../data/paper_tables.csv");
/// Repeats behind each of the paper's numbers.
const N_SEEDS: usize = 3;

/// What the paper fine-tunes on texts.
const CHECKPOINT: &str = "TinyBERT (its code: bert-tiny)";

/// The sizes of the paper's draws of texts. Private draws have at most 100 000 texts and are balanced while the classes last.
/// An incomplete copy of a data set gives fewer.
const DRAWN: [(&str, [(&str, usize); 2]); 3] = [
    ("sst2", [("private_samples", 63_454), ("public_samples", 30_000)]),
    ("mnli", [("private_samples", 99_999), ("public_samples", 30_000)]),
    ("marc", [("private_samples", 100_000), ("public_samples", 30_000)]),
];

/// A published accuracy, in per cent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Published {
    /// Mean.
    pub mean: f64,
    /// Standard deviation, as the paper gives it.
    pub std: f64,
}

/// A difference from the paper.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Deviation {
    /// The configuration's key.
    pub key: String,
    /// The paper's value.
    pub paper: String,
    /// The runs' value.
    pub here: String,
    /// Arms that differ so.
    pub arms: Vec<String>,
    /// Where the runs' value comes from.
    pub why: String,
}

/// The keys that cost time and memory, and are reduced for a smaller machine.
const SCALE: [&str; 9] = [
    "data.private_samples",
    "data.public_samples",
    "data.partition.clients",
    "federation.fraction",
    "federation.rounds",
    "local.epochs",
    "method.fedproj.memory.batch",
    "method.fedproj.memory.size",
    "model.name",
];

/// What FedProj gains beyond the paper: with it, a run is not compared with the paper's numbers.
const BEYOND: [&str; 3] = ["method.fedproj.averages.", "method.fedproj.correction.", "method.fedproj.lookahead"];

/// The keys that decide how a run is recorded, not what it learns.
const WATCHING: [&str; 5] =
    ["preset", "seed", "federation.checkpoint_every", "federation.evaluate_clients", "federation.evaluate_every"];

/// A line of the paper's tables.
struct Line {
    table: &'static str,
    dataset: &'static str,
    public: &'static str,
    beta: f64,
    method: &'static str,
    alpha: &'static str,
    published: Published,
}

fn lines() -> impl Iterator<Item = Line> {
    TABLES.lines().skip(1).filter_map(|line| {
        let cells: Vec<&'static str> = line.split(',').collect();
        let [table, dataset, public, beta, method, alpha, mean, std] = cells[..] else { return None };
        let published = Published { mean: mean.parse().ok()?, std: std.parse().ok()? };
        Some(Line { table, dataset, public, beta: beta.parse().ok()?, method, alpha, published })
    })
}

/// `CIFAR-10` and `cifar10` are the same, and so are `Sentiment140` and `sent140`.
fn is_same(ours: &str, theirs: &str) -> bool {
    let plain = |s: &str| s.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase();
    plain(setups::title(ours)) == plain(theirs)
}

fn beta(config: &Config) -> Option<f64> {
    match config.data.partition {
        PartitionConfig::Dirichlet { beta, .. } => Some(beta),
        _ => None,
    }
}

fn lines_for(config: &Config) -> impl Iterator<Item = Line> {
    let (data, beta) = (config.data.private.name.clone(), beta(config));
    lines().filter(move |l| is_same(&data, l.dataset) && beta.is_some_and(|b| (b - l.beta).abs() < 1e-9))
}

/// The paper's number for an arm with the same data set, β and method. The keys that distinguish the arm have the paper's
/// values, or only the ablation's α differs.
pub fn published(arm: &Arm) -> Result<Option<Published>> {
    const ALPHA: &str = "method.fedproj.distill.alpha";
    let config = arm.config();
    let method = &config.method.name;
    let is_line = |l: &Line| l.method.eq_ignore_ascii_case(method);
    if arm.told_by.keys().eq([ALPHA]) {
        let alpha = f64::from(config.method.fedproj.distill.alpha);
        let is_alpha = |text: &str| text.parse::<f64>().unwrap_or(0.0);
        let mut lines = lines_for(config).filter(|l| l.table == "wd_ablation");
        return Ok(lines.find(|l| (is_alpha(l.alpha) - alpha).abs() < 1e-6).map(|l| l.published));
    }
    let line = lines_for(config).find(|l| l.table != "wd_ablation" && is_line(l));
    let (Some(line), Some(beta)) = (line, beta(config)) else { return Ok(None) };
    let Some(paper) = paper_setup(&config.data.private.name, beta, method, "paper")? else { return Ok(None) };
    let keys = paper.keys_in_use();
    // The other presets are readings of the same method.
    let is_papers = |(key, value): (&String, &String)| key == "preset" || keys.get(key) == Some(value);
    let goes_beyond = |key: &String| BEYOND.iter().any(|table| key.starts_with(table));
    let mut own = arm.keys();
    own.retain(|key, _| goes_beyond(key) || arm.told_by.contains_key(key));
    Ok(own.iter().all(is_papers).then_some(line.published))
}

/// What is not as in the paper; none where the paper has no results on such data.
pub fn deviations(group: &Group) -> Result<Option<Vec<Deviation>>> {
    let mut all: Vec<Deviation> = Vec::new();
    let mut is_known = false;
    for arm in &group.arms {
        let config = arm.config();
        let (data, method) = (&config.data.private.name, &config.method.name);
        let (Some(beta), Some(line)) = (beta(config), lines_for(config).next()) else { continue };
        let Some(paper) = paper_setup(data, beta, method, "paper")? else { continue };
        is_known = true;
        let preset_name = config.keys_in_use().remove("preset").unwrap_or_default();
        let preset = paper_setup(data, beta, method, &preset_name)?.map(|c| c.keys_in_use()).unwrap_or_default();
        let needs_public = config.method.build()?.needs_public();
        let (here, paper) = (config.keys_in_use(), paper.keys_in_use());
        for (name, papers) in DRAWN.iter().filter(|(set, _)| set == data).flat_map(|(_, sizes)| *sizes) {
            let key = format!("data.{name}");
            let is_asked_for = here.get(&key) == paper.get(&key) && (name == "private_samples" || needs_public);
            if let Some(n) = arm.size(name).filter(|n| is_asked_for && *n < papers) {
                let (arms, why) = (vec![arm.name.clone()], "all that were available".to_owned());
                push(&mut all, Deviation { key, paper: papers.to_string(), here: n.to_string(), arms, why });
            }
        }
        let is_small = paper.iter().any(|(key, paper)| here.get(key).is_some_and(|v| is_smaller(key, v, paper)));
        for (key, paper) in paper {
            let value = here.get(&key).cloned().unwrap_or_else(|| "not set".into());
            // Our stand-in for a public set is not the paper's.
            let (paper, is_as_paper) = match &key[..] {
                "data.public.name" => (line.public.to_owned(), is_same(&value, line.public)),
                "model.checkpoint" if !paper.is_empty() => (CHECKPOINT.to_owned(), false),
                _ => (paper.clone(), value == paper),
            };
            if is_as_paper || WATCHING.contains(&&key[..]) || (key.starts_with("data.public") && !needs_public) {
                continue;
            }
            let why = if ["data.public.name", "model.checkpoint"].contains(&&key[..]) {
                "a stand-in".to_owned()
            } else if is_smaller(&key, &value, &paper) {
                "smaller, to save time".to_owned()
            } else if is_small && SCALE.contains(&&key[..]) {
                "part of the smaller scale".to_owned()
            } else if preset.get(&key) == Some(&value) {
                format!("preset {preset_name}")
            } else {
                "chosen for these runs".to_owned()
            };
            push(&mut all, Deviation { key, paper, here: value, arms: vec![arm.name.clone()], why });
        }
        if arm.runs.len() != N_SEEDS {
            let (paper, here) = (N_SEEDS.to_string(), arm.runs.len().to_string());
            let why = "the runs that were made".to_owned();
            push(&mut all, Deviation { key: "number of seeds".into(), paper, here, arms: vec![arm.name.clone()], why });
        }
    }
    Ok(is_known.then_some(all))
}

/// Adds a deviation, or the arm to one that is there.
fn push(all: &mut Vec<Deviation>, new: Deviation) {
    let same = |d: &&mut Deviation| (&d.key, &d.paper, &d.here, &d.why) == (&new.key, &new.paper, &new.here, &new.why);
    match all.iter_mut().find(same) {
        Some(there) => there.arms.extend(new.arms),
        None => all.push(new),
    }
}

/// Whether a value makes a run cheaper than the paper's.
fn is_smaller(key: &str, value: &str, paper: &str) -> bool {
    // 0 samples are all there are.
    let size = |text: &str| text.parse::<f64>().ok().map(|v| if v == 0.0 { f64::INFINITY } else { v });
    SCALE.contains(&key) && size(value).zip(size(paper)).is_some_and(|(value, paper)| value < paper)
}

impl Deviation {
    /// A value in words.
    pub fn shown<'a>(&self, value: &'a str) -> &'a str {
        if self.key.ends_with("_samples") && value == "0" { "all" } else { value }
    }
}

/// The statements beside the paper's results: one for all groups if it is the same.
pub fn statements(results: &[GroupResult]) -> Vec<String> {
    let with_numbers = results.iter().filter(|r| r.rows.iter().any(|row| row.paper.is_some()));
    let all: Vec<(&str, String)> =
        with_numbers.map(|r| (&r.title[..], statement(r.deviations.as_deref().unwrap_or_default()))).collect();
    match &all[..] {
        [(_, first), rest @ ..] if rest.iter().all(|(_, text)| text == first) => vec![first.clone()],
        _ => all.iter().map(|(group, text)| format!("{group}: {text}")).collect(),
    }
}

fn statement(deviations: &[Deviation]) -> String {
    let in_words = |d: &Deviation| {
        let words: Vec<&str> = d.key.trim_end_matches(".name").split('.').collect();
        // `memory batch` and `local epochs`, but `rounds`.
        let n_words = if words[0] == "method" || words[0] == "local" { 2 } else { 1 };
        let what = words[words.len().saturating_sub(n_words)..].join(" ").replace('_', " ");
        format!("{what} {} instead of {}", d.shown(&d.here), d.shown(&d.paper))
    };
    let smaller: Vec<String> = deviations.iter().filter(|d| SCALE.contains(&&d.key[..])).map(in_words).collect();
    if smaller.is_empty() {
        let differs = match deviations.len() {
            0 => "every value is that of its text.".to_owned(),
            1 => "one value differs from its text (see below).".to_owned(),
            n => format!("{n} values differ from its text (see below)."),
        };
        return format!("This is the paper's scale; {differs}");
    }
    format!(
        "This is not the paper's set-up ({}). The paper's results are for orientation; these runs are not expected to \
         reach them.",
        smaller.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::{sort, tests::run};
    use fedproj_core::methods::title;

    fn groups(all: &[&[&str]]) -> Vec<Group> {
        sort(all.iter().map(|settings| run(settings, 0, 0.5)).collect(), &mut Vec::new())
    }

    /// The paper's means for the arms of one group.
    fn means(all: &[&[&str]]) -> Vec<Option<f64>> {
        groups(all)[0].arms.iter().map(|arm| published(arm).unwrap().map(|f| f.mean)).collect()
    }

    const CIFAR10: [&str; 2] = ["data.private=cifar10", "data.public=cifar100"];

    #[test]
    fn every_line_of_the_tables_is_read() {
        assert_eq!(lines().count(), TABLES.lines().count() - 1);
        for line in lines() {
            assert_eq!(title(&line.method.to_ascii_lowercase()), line.method);
        }
    }

    #[test]
    fn a_number_is_found_where_data_beta_and_method_are_the_same() {
        let [private, public] = CIFAR10;
        let moon = "method.name=moon";
        assert_eq!(means(&[&[private, public, moon]]), [Some(61.09)]);
        assert_eq!(means(&[&[private, public, moon, "data.partition.beta=0.5"]]), [Some(68.83)]);
        assert_eq!(means(&[&["data.private=cinic10", public, "data.partition.beta=0.5"]]), [Some(41.63)]);
        assert_eq!(means(&[&[private, public, moon, "data.partition.beta=0.4"]]), [None]);
        assert_eq!(means(&[&[private, public, moon, "data.partition={kind='iid', clients=4}"]]), [None]);
        assert_eq!(means(&[&[private, public, "method.name=fedadam"]]), [None]);
        assert_eq!(means(&[&[moon]]), [None], "digits");
    }

    #[test]
    fn arms_of_an_ablation_get_their_own_number_or_none() {
        let [private, public] = CIFAR10;
        let half = "data.partition.beta=0.5";
        let alpha = ["0.0", "0.1", "0.2", "0.3"].map(|a| format!("method.fedproj.distill.alpha={a}"));
        let runs: Vec<[&str; 4]> = alpha.iter().map(|alpha| [private, public, half, alpha]).collect();
        let runs: Vec<&[&str]> = runs.iter().map(|r| &r[..]).collect();
        assert_eq!(means(&runs), [Some(67.23), Some(66.57), None, Some(69.88)]);
        let presets: [[&str; 3]; 2] = ["preset=clean", "preset=paper"].map(|preset| [private, public, preset]);
        assert_eq!(means(&[&presets[0], &presets[1]]), [Some(65.52); 2]);
        let beyond = [private, public, "preset=leading"];
        assert_eq!(means(&[&beyond]), [None], "the paper has no correction");
        assert_eq!(means(&[&presets[0], &beyond]), [Some(65.52), None]);
        let rates = ["0.0", "0.5"].map(|p| format!("method.fedproj.projection.dropout={p}"));
        let runs: Vec<[&str; 3]> = rates.iter().map(|rate| [private, public, rate]).collect();
        assert_eq!(means(&[&runs[0], &runs[1]]), [Some(65.52), None], "only the arm without dropout is the paper's");
    }

    #[test]
    fn deviations_name_key_values_arms_and_reason() {
        let [private, public] = CIFAR10;
        let small = "data.partition.clients=20";
        let groups = groups(&[&[private, public, small], &[private, public, small, "method.name=fedavg"]]);
        let all = deviations(&groups[0]).unwrap().unwrap();
        let find = |key: &str| all.iter().find(|d| d.key == key).unwrap_or_else(|| panic!("{key}: {all:?}"));
        let clients = find("data.partition.clients");
        assert_eq!((&clients.paper[..], &clients.here[..], clients.arms.len()), ("100", "20", 2));
        assert_eq!(clients.why, "smaller, to save time");
        let warmup = find("method.fedproj.projection.warmup");
        assert_eq!((&warmup.arms[..], &warmup.why[..]), (&["FedProj".to_owned()][..], "preset clean"));
        assert_eq!(find("local.batch").why, "chosen for these runs");
        assert!(!all.iter().any(|d| d.key == "seed" || d.key == "preset" || d.key.starts_with("data.public")));
        let text = statement(&all);
        assert!(text.contains("not the paper's set-up (clients 20 instead of 100"), "{text}");
    }

    #[test]
    fn the_papers_own_set_up_deviates_in_nothing_but_seeds() {
        let config = paper_setup("cifar10", 0.3, "fedproj", "paper").unwrap().unwrap();
        let mut one = run(&[], 0, 0.5);
        one.run.config = config;
        let groups = sort(vec![one], &mut Vec::new());
        let all = deviations(&groups[0]).unwrap().unwrap();
        assert_eq!(all.iter().map(|d| &d.key[..]).collect::<Vec<_>>(), ["number of seeds"]);
        assert!(statement(&all).contains("the paper's scale"));
        let stand_in = paper_setup("cifar100", 0.5, "fedproj", "paper").unwrap().unwrap();
        let mut one = run(&[], 0, 0.5);
        one.run.config = stand_in;
        let all = deviations(&sort(vec![one], &mut Vec::new())[0]).unwrap().unwrap();
        assert!(all.iter().any(|d| d.paper == "ImageNet-100" && d.here == "tinyimagenet32"), "{all:?}");
    }

    #[test]
    fn texts_have_the_papers_numbers_and_say_that_the_checkpoint_is_another() {
        let mut one = run(&[], 0, 0.5);
        one.run.config = paper_setup("sst2", 0.5, "fedet", "paper").unwrap().unwrap();
        let groups = sort(vec![one], &mut Vec::new());
        assert_eq!(published(&groups[0].arms[0]).unwrap(), Some(Published { mean: 56.36, std: 9.42 }));
        let all = deviations(&groups[0]).unwrap().unwrap();
        let keys: Vec<&str> = all.iter().map(|d| &d.key[..]).collect();
        assert_eq!(keys, ["model.checkpoint", "number of seeds"], "{all:?}");
        assert!(all[0].paper.contains("TinyBERT") && all[0].here == "minilm-l3", "{all:?}");
    }

    #[test]
    fn a_draw_that_holds_less_than_the_papers_is_told() {
        let told = |data: &str, sizes: &str| {
            let mut one = run(&[], 0, 0.5);
            one.run.config = paper_setup(data, 0.3, "feddf", "clean").unwrap().unwrap();
            let manifest =
                format!(r#"{{"version": "", "seed": 0, "hardware": {{}}, "hashes": {{}}, "sizes": {sizes}}}"#);
            one.manifest = Some(serde_json::from_str(&manifest).unwrap());
            let groups = sort(vec![one], &mut Vec::new());
            (groups[0].title.clone(), statement(&deviations(&groups[0]).unwrap().unwrap()))
        };
        let (title, text) = told("marc", r#"{"private_samples": 5398, "public_samples": 10000}"#);
        assert!(title.starts_with("marc (5398 samples)"), "{title}");
        let expected = "(private samples 5398 instead of 100000, public samples 10000 instead of 30000)";
        assert!(text.contains(expected), "{text}");
        let (_, text) = told("sst2", r#"{"private_samples": 63454, "public_samples": 30000}"#);
        assert!(text.contains("the paper's scale"), "{text}");
    }
}
