//! The tables of a report, each for people ([`Sheet::shown`]) and for machines ([`Sheet::raw`]).

use crate::arms::{Arm, Group};
use crate::clients::ClientSpread;
use crate::compare::{ComparedRow, mean, plus_minus, signed, standard_deviation};
use crate::networks::NetworkAccuracy;
use crate::paper::{self, Deviation};
use anyhow::Result;
use fedproj_core::RoundRecord;
use fedproj_report::{Measure, Table};
use serde::Serialize;
use std::collections::BTreeSet;

/// A table in its two forms.
pub struct Sheet {
    /// Name of its files.
    pub name: &'static str,
    /// Rounded, in per cent, for page, terminal and LaTeX.
    pub shown: Table,
    /// Unrounded, one number per cell, for CSV.
    pub raw: Table,
}

/// A group's results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupResult {
    /// The data in words.
    #[serde(rename = "setting")]
    pub title: String,
    /// What distinguishes it from the other groups.
    #[serde(skip)]
    pub short: String,
    /// The arm that the others are compared with.
    pub baseline: String,
    /// One row per arm.
    pub rows: Vec<ArmResult>,
    /// Differences from the paper; null where the paper has no such data.
    pub deviations: Option<Vec<Deviation>>,
}

/// An arm's results; accuracies are shares.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ArmResult {
    /// As `fedproj compare` has it.
    #[serde(flatten)]
    pub compared: ComparedRow,
    /// Whether all its rounds are done.
    pub is_finished: bool,
    /// The paper's result in per cent, where data set, β and method are the same.
    pub paper: Option<paper::Published>,
}

/// The results of a group.
pub fn results(group: &Group) -> Result<GroupResult> {
    let comparison = group.comparison();
    let row = |(compared, arm): (ComparedRow, &Arm)| {
        Ok(ArmResult { compared, is_finished: arm.is_finished(), paper: paper::published(arm)? })
    };
    Ok(GroupResult {
        title: group.title.clone(),
        short: group.short.clone(),
        baseline: comparison.baseline,
        rows: comparison.rows.into_iter().zip(&group.arms).map(row).collect::<Result<_>>()?,
        deviations: paper::deviations(group)?,
    })
}

/// A column: its head, and a head and cell for machines for each number in it.
type Cells = Vec<(String, Vec<Option<f64>>)>;

/// A table with a row for each arm. The group has a column where there are several; `columns` are the heads for people
/// and, behind each, those for machines. A column that is empty for people is hidden there.
fn sheet(name: &'static str, columns: &[(&str, &[&str])], rows: Vec<(String, String, Cells)>) -> Sheet {
    let has_groups = rows.iter().any(|(group, ..)| *group != rows[0].0);
    let is_shown: Vec<bool> =
        (0..columns.len()).map(|c| rows.iter().any(|(_, _, cells)| !cells[c].0.is_empty())).collect();
    let names = |group: &str, arm: &str| {
        let group = has_groups.then(|| group.to_owned());
        group.into_iter().chain([arm.to_owned()]).collect::<Vec<String>>()
    };
    let n_names = 1 + usize::from(has_groups);
    let shown_heads = columns.iter().zip(&is_shown).filter(|(_, is)| **is).map(|((head, _), _)| (*head).to_owned());
    let raw_heads = columns.iter().flat_map(|(_, raw)| raw.iter().map(|head| (*head).to_owned()));
    let mut shown = Table { headers: names("group", "method"), n_names, is_grouped: has_groups, ..Table::default() };
    // Programs read the tables for machines, so their heads keep the word of earlier versions.
    let mut raw = Table { headers: names("setting", "method"), n_names, ..Table::default() };
    shown.headers.extend(shown_heads);
    raw.headers.extend(raw_heads);
    for (group, arm, cells) in rows {
        let number = |value: &Option<f64>| value.map(|v| v.to_string()).unwrap_or_default();
        raw.rows.push(names(&group, &arm));
        shown.rows.push(names(&group, &arm));
        if let (Some(raw), Some(shown)) = (raw.rows.last_mut(), shown.rows.last_mut()) {
            raw.extend(cells.iter().flat_map(|(_, numbers)| numbers.iter().map(number)));
            shown.extend(cells.into_iter().zip(&is_shown).filter(|(_, is)| **is).map(|((text, _), _)| text));
        }
    }
    Sheet { name, shown, raw }
}

/// Accuracy, differences and the paper's results.
pub fn accuracy(results: &[GroupResult]) -> Sheet {
    let baselines: BTreeSet<&str> = results.iter().map(|r| r.baseline.as_str()).collect();
    let baseline = if baselines.len() == 1 { &results[0].baseline } else { "the first" };
    let difference = format!("Δ vs {baseline}, 95 %");
    let is_private = results.iter().flat_map(|group| &group.rows).any(|row| row.compared.privacy.is_some());
    let mut columns: Vec<(&str, &[&str])> = vec![
        ("seeds", &["seeds"]),
        ("accuracy %", &["accuracy_mean", "accuracy_std"]),
        (&difference, &["difference_mean", "difference_half_width", "pairs"]),
        ("paper %", &["paper_mean", "paper_std"]),
        ("Δ vs paper", &["difference_to_paper"]),
        ("last %", &["last_mean"]),
        ("best %", &["best_mean"]),
    ];
    if is_private {
        columns.push(("ε", &["epsilon", "epsilon_is_nominal"]));
    }
    let has_networks = results.iter().flat_map(|group| &group.rows).any(|row| !row.compared.networks.is_empty());
    if has_networks {
        columns.push(("by network %", &[]));
    }
    let row = |group: &GroupResult, row: &ArmResult| {
        let c = &row.compared;
        let d = c.difference;
        let paper = row.paper.map(|p| format!("{:.2} ± {:.2}", p.mean, p.std)).unwrap_or_default();
        let to_paper = row.paper.map(|p| 100.0 * c.mean - p.mean);
        let mut cells = vec![
            (c.seeds.len().to_string(), vec![Some(c.seeds.len() as f64)]),
            (c.accuracy(), vec![Some(c.mean), c.std]),
            (
                d.map(|d| d.percent()).unwrap_or_default(),
                vec![d.map(|d| d.mean), d.and_then(|d| d.half_width), d.map(|d| d.n as f64)],
            ),
            (paper, vec![row.paper.map(|p| p.mean / 100.0), row.paper.map(|p| p.std / 100.0)]),
            (to_paper.map(signed).unwrap_or_default(), vec![to_paper.map(|v| v / 100.0)]),
            (format!("{:.2}", 100.0 * c.last), vec![Some(c.last)]),
            (format!("{:.2}", 100.0 * c.best), vec![Some(c.best)]),
        ];
        if is_private {
            let spent = c.privacy.as_ref();
            let numbers = vec![spent.map(|p| p.epsilon), spent.map(|p| f64::from(u8::from(p.nominal)))];
            cells.push((c.epsilon(), numbers));
        }
        if has_networks {
            cells.push((NetworkAccuracy::text(&c.networks), Vec::new()));
        }
        (group.short.clone(), c.name.clone(), cells)
    };
    let rows = results.iter().flat_map(|s| s.rows.iter().map(|r| row(s, r)).collect::<Vec<_>>()).collect();
    let mut sheet = sheet("accuracy", &columns, rows);
    sheet.shown.bold = winners(results);
    sheet
}

/// The rows with the highest mean of their group, as far as the table shows; none where nothing is compared.
fn winners(results: &[GroupResult]) -> Vec<usize> {
    let shown = |row: &ArmResult| (1e4 * row.compared.mean).round();
    let is_winner = |group: &GroupResult, row: &ArmResult| {
        let ranked = || group.rows.iter().filter(|r| r.is_finished);
        let most = ranked().map(shown).fold(f64::MIN, f64::max);
        row.is_finished && ranked().count() > 1 && shown(row) >= most
    };
    let all = results.iter().flat_map(|group| group.rows.iter().map(move |row| is_winner(group, row)));
    all.enumerate().filter_map(|(r, is)| is.then_some(r)).collect()
}

/// A column of costs: its name, its head for machines, what it measures, whether of the whole run, and its value of a round.
type Cost = (&'static str, &'static str, Measure, bool, fn(&RoundRecord) -> f64);

const COSTS: [Cost; 7] = [
    ("local", "local_seconds_a_round", Measure::Time, false, |r| r.seconds.local),
    ("fusion", "fusion_seconds_a_round", Measure::Time, false, |r| r.seconds.fusion),
    ("evaluation", "evaluation_seconds_a_round", Measure::Time, false, |r| r.seconds.evaluation),
    ("whole run", "seconds", Measure::Time, true, |r| r.seconds.total()),
    ("down", "bytes_down_a_round", Measure::Size, false, |r| r.bytes_down as f64),
    ("up", "bytes_up_a_round", Measure::Size, false, |r| r.bytes_up as f64),
    ("whole run", "bytes", Measure::Size, true, |r| (r.bytes_down + r.bytes_up) as f64),
];

/// Times and sizes, each column in the unit in which its largest value reads well.
pub fn costs(groups: &[Group]) -> Sheet {
    let value = |arm: &Arm, (.., is_total, of): &Cost| {
        let of = |rounds: &[RoundRecord]| {
            let values: Vec<f64> = rounds.iter().map(of).collect();
            Some(if *is_total { values.iter().sum() } else { mean(&values) })
        };
        over_runs(arm, of).map(|(mean, _)| mean)
    };
    let rows = arm_rows(groups, |group, arm| (group, arm, COSTS.map(|cost| value(arm, &cost))));
    let unit = |c: usize| COSTS[c].2.unit(rows.iter().filter_map(|(.., values)| values[c]).fold(0.0, f64::max));
    let head = |c: usize| format!("{}, {}{}", COSTS[c].0, unit(c).1, if COSTS[c].3 { "" } else { " / round" });
    let heads: Vec<(String, [&str; 1])> = (0..COSTS.len()).map(|c| (head(c), [COSTS[c].1])).collect();
    let columns: Vec<(&str, &[&str])> = heads.iter().map(|(shown, raw)| (&shown[..], &raw[..])).collect();
    let row = |(group, arm, values): &(&Group, &Arm, [Option<f64>; 7])| {
        let cell = |(c, value): (usize, &Option<f64>)| {
            (value.map(|v| format!("{:.2}", v / unit(c).0)).unwrap_or_default(), vec![*value])
        };
        (group.short.clone(), arm.name.clone(), values.iter().enumerate().map(cell).collect())
    };
    sheet("costs", &columns, rows.iter().map(row).collect())
}

/// Clients after local training and projection, where a run recorded either.
pub fn clients(groups: &[Group]) -> Option<Sheet> {
    let columns: [(&str, &[&str]); 8] = [
        ("clients' accuracy %", &["client_accuracy_mean", "client_accuracy_std"]),
        ("on own classes %", &["personal_accuracy_mean", "personal_accuracy_std"]),
        ("their spread over clients %", &["personal_spread_mean", "personal_spread_std"]),
        ("worst 10 % of clients %", &["personal_worst_mean", "personal_worst_std"]),
        ("forgetting %", &["forgetting_mean", "forgetting_std"]),
        ("steps projected %", &["projection_rate_mean", "projection_rate_std"]),
        ("cosine of g and r", &["cosine_mean", "cosine_std"]),
        ("gain by distillation", &["distillation_gain_mean", "distillation_gain_std"]),
    ];
    let row = |group: &Group, arm: &Arm| {
        let cell = |unit: f64, over: Option<(f64, Option<f64>)>| {
            let text = over.map(|(m, s)| plus_minus(unit * m, s.map(|s| unit * s))).unwrap_or_default();
            (text, vec![over.map(|o| o.0), over.and_then(|o| o.1)])
        };
        let spread = |unit: f64, of: fn(&RoundRecord) -> Option<f64>| {
            let of_run = |rounds: &[RoundRecord]| {
                let values: Vec<f64> = rounds.iter().filter_map(of).collect();
                (!values.is_empty()).then(|| mean(&values))
            };
            cell(unit, over_runs(arm, of_run))
        };
        let clients =
            |of: fn(ClientSpread) -> f64| cell(100.0, over_runs(arm, |rounds| ClientSpread::of(rounds).map(of)));
        let cells = vec![
            spread(100.0, |r| r.client_accuracy),
            spread(100.0, |r| r.personal_accuracy),
            clients(|c| c.std),
            clients(|c| c.worst),
            spread(100.0, |r| r.forgetting),
            spread(100.0, |r| r.projection_rate),
            spread(1.0, |r| r.cosine),
            spread(100.0, |r| Some(r.accuracy? - r.accuracy_before_distillation?)),
        ];
        (group.short.clone(), arm.name.clone(), cells)
    };
    let mut rows = arm_rows(groups, row);
    rows.retain(|(_, _, cells)| cells.iter().any(|(text, _)| !text.is_empty()));
    (!rows.is_empty()).then(|| sheet("clients", &columns, rows))
}

/// Differences from the paper.
pub fn deviations(results: &[GroupResult]) -> Option<Sheet> {
    let mut rows = Vec::new();
    for group in results {
        for d in group.deviations.iter().flatten() {
            let who = if d.arms.len() == group.rows.len() { "all".to_owned() } else { d.arms.join(", ") };
            let cells = [&group.short, &d.key, d.shown(&d.paper), d.shown(&d.here), &who, &d.why].map(str::to_owned);
            rows.push(if results.len() > 1 { cells.to_vec() } else { cells[1..].to_vec() });
        }
    }
    let heads = ["setting", "key", "paper", "here", "in", "why"];
    let heads = if results.len() > 1 { &heads[..] } else { &heads[1..] };
    let raw = Table::new(heads.iter().copied(), heads.len(), rows);
    let shown = for_people(&raw, results.len());
    (!raw.rows.is_empty()).then_some(Sheet { name: "deviations", shown, raw })
}

/// The same table with a head for people over the column of groups, where there are several.
fn for_people(raw: &Table, n_groups: usize) -> Table {
    let mut shown = Table { is_grouped: n_groups > 1, ..raw.clone() };
    if shown.is_grouped {
        "group".clone_into(&mut shown.headers[0]);
    }
    shown
}

/// Each run: seed, version, hardware, seal, hashes.
pub fn runs(groups: &[Group]) -> Sheet {
    const HASHES: [&str; 5] = ["private", "test", "public", "partition", "initial_model"];
    const SHORT: usize = 8;
    let heads = ["setting", "method", "seed", "version", "hardware", "threads", "seal"];
    let heads = heads.into_iter().chain(HASHES).chain(["final_model"]).map(|h| h.replace('_', " "));
    let mut raw = Table::new(heads, 2, Vec::new());
    for group in groups {
        for arm in &group.arms {
            for run in &arm.runs {
                let manifest = run.manifest.as_ref();
                let hardware = |key: &str| manifest.and_then(|m| m.hardware.get(key)).cloned().unwrap_or_default();
                let machine: Vec<String> =
                    ["os", "arch", "isa", "gpu"].iter().map(|k| hardware(k)).filter(|v| !v.is_empty()).collect();
                let hash = |key: &&str| manifest.and_then(|m| m.hashes.get(*key)).cloned().unwrap_or_default();
                let version = manifest.map(|m| m.version.clone()).unwrap_or_default();
                let mut row = vec![group.short.clone(), arm.name.clone(), run.run.summary.seed.to_string(), version];
                let seal = if run.is_sealed() { "sealed" } else { "not sealed" };
                row.extend([machine.join(" "), hardware("threads"), seal.into()]);
                row.extend(HASHES.iter().map(hash));
                row.push(run.run.summary.model_hash.clone());
                raw.rows.push(row);
            }
        }
    }
    let mut shown = for_people(&raw, groups.len());
    for row in &mut shown.rows {
        row[7..].iter_mut().for_each(|hash| hash.truncate(SHORT));
    }
    if groups.len() == 1 {
        shown.n_names = 1;
        shown.rows.iter_mut().chain([&mut shown.headers]).for_each(|row| drop(row.remove(0)));
    }
    Sheet { name: "runs", shown, raw }
}

fn arm_rows<'a, T>(groups: &'a [Group], row: impl Fn(&'a Group, &'a Arm) -> T) -> Vec<T> {
    groups.iter().flat_map(|group| group.arms.iter().map(|arm| row(group, arm)).collect::<Vec<_>>()).collect()
}

/// Mean and standard deviation over the runs of an arm.
fn over_runs(arm: &Arm, of: impl Fn(&[RoundRecord]) -> Option<f64>) -> Option<(f64, Option<f64>)> {
    let values: Vec<f64> = arm.runs.iter().filter_map(|r| of(&r.run.rounds)).collect();
    (!values.is_empty()).then(|| (mean(&values), standard_deviation(&values)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::{sort, tests::run};

    #[test]
    fn a_run_names_the_gpu_that_it_was_made_on() {
        let mut one = run(&[], 0, 0.5);
        let manifest = r#"{"version": "", "seed": 0, "hardware": {"os": "linux", "gpu": "NVIDIA H200, tf32"}, "hashes": {}, "sizes": {}}"#;
        one.manifest = Some(serde_json::from_str(manifest).unwrap());
        let sheet = runs(&sort(vec![one], &mut Vec::new()));
        assert_eq!(sheet.raw.rows[0][4], "linux NVIDIA H200, tf32");
        assert_eq!(sheet.raw.rows[0][6], "not sealed");
    }
}
