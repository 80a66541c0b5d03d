//! The paper's figures, and how a setting differs from the one that they are for.

use super::arms::{Arm, Setting};
use crate::new::paper_setup;
use anyhow::Result;
use fedproj_core::Config;
use fedproj_data::PartitionConfig;
use serde::Serialize;

/// `table,dataset,public,beta,method,alpha,mean,std`, as printed in the paper.
const TABLES: &str = include_str!("../../data/paper_tables.csv");
/// Repeats behind each of the paper's figures.
const N_SEEDS: usize = 3;

/// A figure of the paper, in per cent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Mean.
    pub mean: f64,
    /// Deviation, as the paper gives it.
    pub std: f64,
}

/// What is not as in the paper.
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

/// What costs time and memory, and is made smaller for a smaller machine.
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

/// What decides how a run is watched and kept, not what it learns.
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
    figure: Figure,
}

fn lines() -> impl Iterator<Item = Line> {
    TABLES.lines().skip(1).filter_map(|line| {
        let cells: Vec<&'static str> = line.split(',').collect();
        let [table, dataset, public, beta, method, alpha, mean, std] = cells[..] else { return None };
        let figure = Figure { mean: mean.parse().ok()?, std: std.parse().ok()? };
        Some(Line { table, dataset, public, beta: beta.parse().ok()?, method, alpha, figure })
    })
}

/// `CIFAR-10` and `cifar10` are the same.
fn is_same(ours: &str, theirs: &str) -> bool {
    let plain = |s: &str| s.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase();
    plain(ours) == plain(theirs)
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

/// The paper's figure for an arm: data set, β and method are the same, and what tells the arm from others of its method
/// has the paper's value or is the weight α of its ablation.
pub fn figure(arm: &Arm) -> Result<Option<Figure>> {
    const ALPHA: &str = "method.fedproj.distill.alpha";
    let config = arm.config();
    let method = &config.method.name;
    let is_line = |l: &Line| l.method.eq_ignore_ascii_case(method);
    if arm.told_by.keys().eq([ALPHA]) {
        let alpha = f64::from(config.method.fedproj.distill.alpha);
        let is_alpha = |text: &str| text.parse::<f64>().unwrap_or(0.0);
        let mut lines = lines_for(config).filter(|l| l.table == "wd_ablation");
        return Ok(lines.find(|l| (is_alpha(l.alpha) - alpha).abs() < 1e-6).map(|l| l.figure));
    }
    let line = lines_for(config).find(|l| l.table != "wd_ablation" && is_line(l));
    let (Some(line), Some(beta)) = (line, beta(config)) else { return Ok(None) };
    let Some(paper) = paper_setup(&config.data.private.name, beta, method, "paper")? else { return Ok(None) };
    let keys = paper.keys_in_use();
    Ok(arm.told_by.iter().all(|(key, value)| keys.get(key) == Some(value)).then_some(line.figure))
}

/// What is not as in the paper; none where the paper has no such setting.
pub fn deviations(setting: &Setting) -> Result<Option<Vec<Deviation>>> {
    let mut all: Vec<Deviation> = Vec::new();
    let mut is_known = false;
    for arm in &setting.arms {
        let config = arm.config();
        let (data, method) = (&config.data.private.name, &config.method.name);
        let (Some(beta), Some(line)) = (beta(config), lines_for(config).next()) else { continue };
        let Some(paper) = paper_setup(data, beta, method, "paper")? else { continue };
        is_known = true;
        let preset_name = config.keys_in_use().remove("preset").unwrap_or_default();
        let preset = paper_setup(data, beta, method, &preset_name)?.map(|c| c.keys_in_use()).unwrap_or_default();
        let needs_public = config.method.build()?.needs_public();
        let here = config.keys_in_use();
        for (key, paper) in paper.keys_in_use() {
            let value = here.get(&key).cloned().unwrap_or_else(|| "not set".into());
            // Our stand-in for a public set is not the paper's.
            let (paper, is_as_paper) = match &key[..] {
                "data.public.name" => (line.public.to_owned(), is_same(&value, line.public)),
                _ => (paper.clone(), value == paper),
            };
            if is_as_paper || WATCHING.contains(&&key[..]) || (key.starts_with("data.public") && !needs_public) {
                continue;
            }
            let why = if SCALE.contains(&&key[..]) {
                "smaller, to cost less time".to_owned()
            } else if preset.get(&key) == Some(&value) {
                format!("preset {preset_name}")
            } else {
                "chosen for these runs".to_owned()
            };
            push(&mut all, Deviation { key, paper, here: value, arms: vec![arm.name.clone()], why });
        }
        if arm.runs.len() != N_SEEDS {
            let (paper, here) = (N_SEEDS.to_string(), arm.runs.len().to_string());
            let why = "as many as were run".to_owned();
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

/// The statement beside the paper's figures.
pub fn statement(setting: &Setting, deviations: &[Deviation]) -> String {
    let shown: Vec<String> = deviations
        .iter()
        .filter(|d| SCALE.contains(&&d.key[..]))
        .map(|d| format!("{} {} instead of {}", d.key, shown(&d.key, &d.here), shown(&d.key, &d.paper)))
        .collect();
    let title = &setting.title;
    if shown.is_empty() {
        let n = deviations.len();
        return format!("{title}: the paper's scale; {n} settings are not as its text has them, and are listed below.");
    }
    format!(
        "{title}: this is not the paper's set-up ({}). Its figures stand here for orientation; these runs are not \
         expected to reach them.",
        shown.join(", ")
    )
}

/// A value in words.
fn shown<'a>(key: &str, value: &'a str) -> &'a str {
    if key.ends_with("_samples") && value == "0" { "all" } else { value }
}

#[cfg(test)]
mod tests {
    use super::super::arms::method_title;
    use super::*;

    #[test]
    fn every_line_of_the_tables_is_read() {
        assert_eq!(lines().count(), TABLES.lines().count() - 1);
        for line in lines() {
            assert_eq!(method_title(&line.method.to_ascii_lowercase()), line.method);
        }
    }
}
