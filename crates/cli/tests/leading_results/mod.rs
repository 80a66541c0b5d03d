//! What makes `FedProj` work: preset `leading` and its parts beside the methods that it builds on.

use crate::{
    FULL, accuracy, check, command, difference, interval, is_beta, manifest, markdown, mean, percent, root, run_of,
    says, typographic,
};
use fedproj_core::methods::title;
use fedproj_core::{StoredRun, Summary};
use fedproj_study::{ComparedRow, compare, load};
use std::path::Path;

/// The study on digits: 25 arms and 20 seeds.
pub const DIGITS: (&str, usize) = ("leading-digits-full", 500);

/// On CIFAR-10: `leading` and `FedDyn` with five seeds, four arms with three, and a repeated run of `FedAvg`.
pub const CIFAR10: (&str, usize) = ("leading-cifar10-full", 23);

/// What an arm's folder is called, and what the pages call it. Other arms are methods.
const VARIANTS: [(&str, &str); 7] = [
    ("leading", "**`leading`**"),
    ("leading-no-projection", "`leading` without projection"),
    ("leading-no-averaging", "`leading` without averaging"),
    ("leading-no-correction", "`leading` without correction (`leading-stateless`)"),
    ("leading-lookahead", "`leading` with a look-ahead instead of the correction"),
    ("feddyn-averaged", "FedDyn, model averaged over rounds"),
    ("fedgems", "FedGEMS, with labels of the public set"),
];

fn name(arm: &str) -> &str {
    VARIANTS.iter().find(|(folder, _)| *folder == arm).map_or_else(|| title(arm), |(_, name)| name)
}

/// The arm of a run, from its folder: `beta0.1-ARM-seed3`.
fn arm_of(dir: &Path) -> String {
    let folder = dir.file_name().unwrap().to_str().unwrap();
    folder.split_once('-').unwrap().1.rsplit_once("-seed").unwrap().0.to_owned()
}

/// Every run of these folders at one degree of skew, with its arm.
fn runs_of(folders: &[&str], beta: f64) -> Vec<(String, StoredRun)> {
    let folders: Vec<_> = folders.iter().map(|folder| root().join("results").join(folder)).collect();
    let runs = load(&folders, false).unwrap().0.into_iter().map(|loaded| loaded.run);
    runs.filter(|run| is_beta(&run.config, beta)).map(|run| (arm_of(&run.dir), run)).collect()
}

/// Rows against a baseline, with summaries recomputed from the metrics.
fn against(baseline: &str, runs: &[(String, StoredRun)]) -> Vec<ComparedRow> {
    let summary = |(arm, run): &(String, StoredRun)| {
        let (config, cohort) = (&run.config, manifest(run).sizes["cohort"]);
        let summary = Summary::of(&config.method.name, config.seed, &config.federation, cohort, &run.rounds);
        assert_eq!(summary, run.summary, "{}: the summary does not follow from the metrics", run.dir.display());
        (arm.clone(), summary)
    };
    let mut all: Vec<(String, Summary)> = runs.iter().map(summary).collect();
    all.sort_by_key(|(arm, _)| arm != baseline);
    compare(&all).rows
}

/// How far the accuracy moves from one round to the next in the second half of a run, in points.
fn swing(run: &StoredRun) -> f64 {
    let accuracies: Vec<f64> = run.rounds.iter().map(|round| round.accuracy.unwrap()).collect();
    percent(accuracies[accuracies.len() / 2..].windows(2).map(|pair| (pair[1] - pair[0]).abs()))
}

/// `leading` and `FedDyn` beside the other methods of Table 1.
fn cifar10() -> Vec<(String, StoredRun)> {
    let ours = runs_of(&[CIFAR10.0], 0.3).into_iter().filter(|(arm, _)| arm != "fedavg");
    let others = runs_of(&[FULL.0], 0.3).into_iter().filter(|(arm, _)| arm != "feddyn");
    ours.chain(others).collect()
}

/// One row per arm, best first.
fn table(runs: &[(String, StoredRun)]) -> String {
    let (mut rows, to_leading) = (against("feddyn", runs), against("leading", runs));
    rows.sort_by(|a, b| b.mean.total_cmp(&a.mean));
    let rows = rows.iter().map(|row| {
        let other = to_leading.iter().find(|other| other.name == row.name).unwrap();
        let behind = other.difference.map_or(String::new(), |d| interval(-d.mean, d));
        let swing = mean(runs.iter().filter(|(arm, _)| *arm == row.name).map(|(_, run)| swing(run)));
        let (seeds, accuracy, difference) = (row.seeds.len(), accuracy(row), difference(row));
        format!("| {} | {seeds} | {accuracy} | {difference} | {behind} | {swing:.1} |", name(&row.name))
    });
    let head = "| method | seeds | accuracy % | Δ vs FedDyn | `leading` − this | change per round, points |";
    markdown(head, "|---|---:|---:|---:|---:|---:|", rows)
}

#[test]
fn digits_are_what_was_measured() {
    let expected = table(&runs_of(&[DIGITS.0], 0.1));
    check("docs/leading.md", "leading digits", &expected);
}

/// The paired difference of two arms, `first` − `second`, with two decimals.
fn lead(runs: &[(String, StoredRun)], first: &str, second: &str) -> String {
    let rows = against(second, runs);
    let difference = rows.iter().find(|row| row.name == first).unwrap().difference.unwrap();
    let (mean, half) = (100.0 * difference.mean, 100.0 * difference.half_width.unwrap());
    format!("{mean:.2} ± {half:.2}").replace('-', "−")
}

#[test]
fn sentences_on_digits_are_what_was_measured() {
    let runs = runs_of(&[DIGITS.0], 0.1);
    let of = |first, second| lead(&runs, first, second);
    for sentence in [
        format!("Without them FedSpeed comes next, {} points behind", of("leading", "fedspeed")),
        format!("it is {} points above `leading`", of("fedgems", "leading")),
        format!("**The projection** gains {} points", of("leading", "leading-no-projection")),
        format!("**The correction** gains {} points", of("leading", "leading-no-correction")),
        format!("**The average** gains {} points", of("leading", "leading-no-averaging")),
        format!("FedDyn gains {} points from averaging its model", of("feddyn-averaged", "feddyn")),
        format!("FedDF differs from FedAvg by {} points", of("feddf", "fedavg")),
        format!("costs {} points", of("leading", "leading-no-correction")),
        format!("differs from FedProj by {} points", of("leading-no-correction", "fedproj")),
        format!("`leading-stateless` gains {} points", of("leading-lookahead", "leading-no-correction")),
        format!("{} points above FedACG", of("leading-lookahead", "fedacg")),
    ] {
        says("docs/leading.md", &sentence);
    }
}

#[test]
fn cifar10_is_what_was_measured() {
    let runs = cifar10();
    let expected = table(&runs);
    check("docs/leading.md", "leading cifar10", &expected);
    let of = |second| lead(&runs, "leading", second);
    let (feddyn, fedproj, fedavg) = (of("feddyn"), of("fedproj"), of("fedavg"));
    let leads = format!("`leading` is {feddyn} points above FedDyn, {fedproj} above FedProj as published, and");
    says("docs/leading.md", &format!("{leads} {fedavg} above FedAvg"));
    says("README.md", &format!("It is {feddyn} points above FedDyn"));
    let (fedspeed, averaged) = (lead(&runs, "fedspeed", "leading"), lead(&runs, "feddyn-averaged", "leading"));
    says("docs/leading.md", &format!("FedSpeed is {fedspeed} points above `leading`, and FedDyn"));
    says("docs/leading.md", &format!("with an averaged model is {averaged}"));
    says("README.md", &format!("FedSpeed is {fedspeed} points above `leading`"));
    let headline = |arm, seed| run_of(CIFAR10, 0.3, arm, seed).summary.headline;
    // The page says "in each seed".
    for (seed, ahead) in (0..3).flat_map(|seed| ["fedspeed", "feddyn-averaged"].map(|ahead| (seed, ahead))) {
        assert!(headline(ahead, seed) > headline("leading", seed), "{ahead}, seed {seed}");
    }
    says("docs/leading.md", &format!("The projection gains {} points here", of("leading-no-projection")));
    let from_averaging = lead(&runs, "feddyn-averaged", "feddyn");
    says("docs/leading.md", &format!("Averaging its model gives FedDyn {from_averaging} points"));
    let early = |arm: &str| {
        let of_arm = runs.iter().filter(|(name, run)| name == arm && run.config.seed < 3);
        mean(of_arm.map(|(_, run)| percent(run.rounds[20..30].iter().map(|round| round.accuracy.unwrap()))))
    };
    let (ours, theirs) = (early("leading"), early("fedspeed"));
    says("docs/leading.md", &format!("In rounds 21 to 30 `leading` has {ours:.1} % and FedSpeed {theirs:.1} %"));
}

/// What other kernels change, run by run.
#[test]
fn repeated_runs_differ_as_the_page_says() {
    let change = |method, seed| {
        let headline = |study| 100.0 * run_of(study, 0.3, method, seed).summary.headline;
        typographic(&format!("{:+.2}", headline(CIFAR10) - headline(FULL)))
    };
    let [zero, one, two] = [0, 1, 2].map(|seed| change("feddyn", seed));
    let fedavg = change("fedavg", 0);
    let feddyn = format!("FedDyn's seeds 0, 1 and 2 differ by {zero}, {one} and {two} points");
    says("docs/leading.md", &format!("{feddyn}, and FedAvg's seed 0 by {fedavg}"));
}

/// The row of `leading` at β = 0.3 against `FedAvg`.
pub fn leading_row() -> ComparedRow {
    against("fedavg", &cifar10()).into_iter().find(|row| row.name == "leading").unwrap()
}

/// The arms of the picture: what `leading` is made of, and what it builds on.
const PICTURED: [&str; 7] = [
    "feddyn",
    "feddyn-averaged",
    "fedproj",
    "leading",
    "leading-no-projection",
    "leading-no-averaging",
    "leading-no-correction",
];

/// Those of the curves over rounds, each with its folder and its number of seeds.
const CURVES: [(&str, &str, u64); 6] = [
    ("leading-cifar10-full", "leading", 5),
    ("leading-cifar10-full", "feddyn", 5),
    ("leading-cifar10-full", "fedspeed", 3),
    ("table1-cifar10-full", "fedprox", 3),
    ("table1-cifar10-full", "fedproj", 3),
    ("table1-cifar10-full", "fedavg", 3),
];

/// Checks that a picture of the docs is what `fedproj report` draws of these runs.
fn check_picture(drawn: &str, shown: &str, runs: impl Iterator<Item = String>) {
    let out = tempfile::tempdir().unwrap();
    let mut args = vec!["report".to_owned(), "--out".to_owned(), out.path().to_str().unwrap().to_owned()];
    args.extend(runs);
    command::stdout(&root(), &args.iter().map(String::as_str).collect::<Vec<_>>());
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap();
    let is_same = read(out.path().join("figures").join(drawn)) == read(root().join("docs/figures").join(shown));
    assert!(is_same, "docs/figures/{shown} is not figures/{drawn} of `fedproj report` of its arms");
}

#[test]
fn the_pictures_of_leading_are_drawn_from_the_metrics() {
    let digits = |arm: &&str| format!("results/leading-digits-full/beta0.1-{arm}");
    let seeds = |dir: String, n: u64| (0..n).map(move |seed| format!("{dir}-seed{seed}"));
    check_picture("outcome.svg", "leading-digits.svg", PICTURED.iter().flat_map(|arm| seeds(digits(arm), 20)));
    let cifar10 = CURVES.iter().flat_map(|(folder, arm, n)| seeds(format!("results/{folder}/beta0.3-{arm}"), *n));
    check_picture("accuracy.svg", "leading-cifar10-rounds.svg", cifar10);
}
