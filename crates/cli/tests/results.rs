//! Every result that the documentation prints is recomputed from the files under `results/`: between `<!-- results NAME -->`
//! and `<!-- end -->` must stand, to the last digit, the table that this file makes. A test that fails prints it.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;
mod leading_results;
mod networks_results;
mod text_results;
mod tuning_results;

use fedproj_core::{Config, Manifest, RoundRecord, StoredRun, Summary};
use fedproj_data::PartitionConfig;
use fedproj_study::{ComparedRow, Difference, compare, load};
use serde_json::Value;
use std::ops::Range;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn check(page: &str, name: &str, expected: &str) {
    let text = std::fs::read_to_string(root().join(page)).unwrap();
    let start = format!("<!-- results {name} -->\n");
    let after = text.split_once(&start).unwrap_or_else(|| panic!("{page} has no `{}`", start.trim())).1;
    let found = after.split_once("<!-- end -->").unwrap_or_else(|| panic!("{page}: no end of `{name}`")).0;
    assert!(found == expected, "{page}, {name}: the files under results/ say\n{expected}\nthe page says\n{found}");
}

/// That a page has these words, however its lines are broken, and no number goes on before or after them.
fn says(page: &str, words: &str) {
    let text = std::fs::read_to_string(root().join(page)).unwrap();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let digit = |c: char| c.is_ascii_digit();
    let stands_alone = |(at, _)| {
        let (before, after): (&str, &str) = (&text[..at], &text[at + words.len()..]);
        let goes_on_before = words.starts_with(digit) && before.trim_end_matches('.').ends_with(digit);
        let goes_on_after = words.ends_with(digit) && after.starts_with(digit);
        !goes_on_before && !goes_on_after
    };
    assert!(text.match_indices(words).any(stands_alone), "{page} does not say `{words}`");
}

/// `FedAvg` of `fedavg`.
fn title(method: &str) -> &'static str {
    let titles = ["FedAvg", "FedProx", "FedNova", "FedDyn", "MOON", "FedRCL", "FedDF", "FedET", "FedProj"];
    titles.into_iter().find(|title| title.eq_ignore_ascii_case(method)).unwrap()
}

/// A minus sign instead of a hyphen.
fn typographic(text: &str) -> String {
    text.replace('-', "−")
}

fn pilot() -> Value {
    let path = root().join("results/pilot/results.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Mean (least–greatest) over seeds, in per cent.
fn spread(seeds: &Value) -> String {
    let values: Vec<f64> = seeds.as_array().unwrap().iter().map(|v| 100.0 * v.as_f64().unwrap()).collect();
    let mean = fedproj_study::mean(&values);
    let (least, greatest) = values.iter().fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(*v), b.max(*v)));
    format!("{mean:.1} ({least:.1}–{greatest:.1})")
}

/// A table with its head, and colons where columns are to stand right.
fn markdown(head: &str, aligned: &str, rows: impl Iterator<Item = String>) -> String {
    format!("{head}\n{aligned}\n{}", rows.map(|row| row + "\n").collect::<String>())
}

/// One row for each of the pilot's settings and methods; the last argument is the paper's number.
fn pilot_rows(row: impl Fn(&str, &Value, &str, &str) -> String) -> impl Iterator<Item = String> {
    let results = pilot();
    let settings = [
        ("methods", "skewed, from scratch"),
        ("balanced", "balanced, from scratch"),
        ("pretrained", "skewed, pre-trained"),
    ];
    let methods = [("fedavg", "64"), ("feddf", "64"), ("fedproj", "93.33")];
    let pairs = settings.into_iter().flat_map(move |setting| methods.map(|method| (setting, method)));
    pairs.map(move |((key, setting), (method, paper))| {
        row(setting, &results[key][method], title(method), if key == "methods" { paper } else { "–" })
    })
}

#[test]
fn the_pilot_beside_the_paper_is_what_was_measured() {
    let rows = pilot_rows(|setting, r, method, paper| {
        let (global, clients) = (spread(&r["seeds"]), spread(&r["client"]["seeds"]));
        let forgetting = spread(&r["forgetting"]["seeds"]);
        let projected = r["projection_rate"]["mean"].as_f64().map_or("–".into(), |p| format!("{:.0}", 100.0 * p));
        format!("| {setting} | {method} | {paper} | {global} | {clients} | {forgetting} | {projected} |")
    });
    let head = "| clients | method | paper, % | ours, % | our clients', % | forgetting, % | steps projected, % |";
    check("docs/reproduction.md", "pilot", &markdown(head, "|---|---|---|---|---|---|---|", rows));
}

/// The studies that were run, and of how many runs they are: nine methods and three seeds, twice; six and three; four and
/// two; the last ones four and three at two degrees of skew.
const QUICK: (&str, usize) = ("table1-cifar10-quick", 27);
const FULL: (&str, usize) = ("table1-cifar10-full", 27);
const FULL_HALF: (&str, usize) = ("table1-cifar10-full-0.5", 18);
const TEXT: (&str, usize) = ("table2-sst2-quick", 8);
const SST2: (&str, usize) = ("table2-sst2-full", 24);
const MNLI: (&str, usize) = ("table2-mnli-full", 24);
const MARC: (&str, usize) = ("table2-marc-full", 24);

/// Table 1 at the paper's scale: its studies, their skew, and what their tables are called in the pages.
const TABLE1: [((&str, usize), f64, &str); 2] = [(FULL, 0.3, "table1 full"), (FULL_HALF, 0.5, "table1 full 0.5")];

fn runs_of((folder, n_runs): (&str, usize)) -> Vec<StoredRun> {
    let (runs, _) = load(&[root().join("results").join(folder)], false).unwrap();
    let runs: Vec<StoredRun> = runs.into_iter().map(|r| r.run).collect();
    assert_eq!(runs.len(), n_runs);
    runs
}

fn is_beta(config: &Config, asked: f64) -> bool {
    matches!(config.data.partition, PartitionConfig::Dirichlet { beta, .. } if (beta - asked).abs() < 1e-9)
}

fn manifest(run: &StoredRun) -> Manifest {
    Manifest::read(&run.dir).unwrap().unwrap()
}

/// A study's rows at one degree of skew, from every run's metrics.
fn study(runs: (&str, usize), beta: f64) -> Vec<ComparedRow> {
    study_against("fedavg", runs, beta)
}

/// The same with differences to another method than `FedAvg`, which comes first.
fn study_against(baseline: &str, runs: (&str, usize), beta: f64) -> Vec<ComparedRow> {
    let order = |name: &str| fedproj_core::methods::CATALOGUE.iter().position(|(other, _)| *other == name);
    let mut outcomes: Vec<(String, Summary)> = Vec::new();
    for run in runs_of(runs).iter().filter(|run| is_beta(&run.config, beta)) {
        let cohort = manifest(run).sizes["cohort"];
        let method = &run.config.method.name;
        let summary = Summary::of(method, run.config.seed, &run.config.federation, cohort, &run.rounds);
        assert_eq!(summary, run.summary, "{}: the summary does not follow from the metrics", run.dir.display());
        outcomes.push((method.clone(), summary));
    }
    outcomes.sort_by_key(|(method, _)| (method != baseline, order(method)));
    compare(&outcomes).rows
}

fn accuracy(row: &ComparedRow) -> String {
    format!("{:.2} ± {:.2}", 100.0 * row.mean, 100.0 * row.std.unwrap())
}

fn difference(row: &ComparedRow) -> String {
    row.difference.map_or(String::new(), |d| interval(d.mean, d))
}

fn interval(mean: f64, difference: Difference) -> String {
    typographic(&format!("{:+.2} ± {:.2}", 100.0 * mean, 100.0 * difference.half_width.unwrap()))
}

/// The paper's number for data such as `cv,CIFAR-10,CIFAR-100` and a β; `arm` is that of an ablation, and empty elsewhere.
fn paper(setting: &str, beta: f64, method: &str, arm: &str) -> String {
    let tables = std::fs::read_to_string(root().join("crates/study/data/paper_tables.csv")).unwrap();
    let start = format!("{setting},{beta},{method},{arm},");
    let line = tables.lines().find_map(|line| line.strip_prefix(&start)).unwrap();
    line.replace(',', " ± ")
}

/// The mean in it, in per cent.
fn papers_mean(setting: &str, beta: f64, method: &str, arm: &str) -> f64 {
    paper(setting, beta, method, arm).split_once(' ').unwrap().0.parse().unwrap()
}

#[test]
fn tables_beside_the_paper_are_what_was_measured() {
    for (runs, beta, name) in TABLE1 {
        let rows = beside_the_paper(runs, "cv,CIFAR-10,CIFAR-100", beta).into_iter().map(|row| format!("| {row} |"));
        let head = "| method | seeds | paper, % | ours, % | Δ vs FedAvg | FedProj − this |";
        check("docs/reproduction.md", name, &markdown(head, "|---|---:|---:|---:|---:|---:|", rows));
    }
}

/// What the page's sentences say of `FedProj` on CIFAR-10, with one decimal.
#[test]
fn sentences_on_table_1_are_what_was_measured() {
    let rows = TABLE1.map(|(runs, beta, _)| study_against("fedproj", runs, beta));
    let [ahead_of_fedavg, behind_fedprox, behind_feddyn, ahead_of_feddf] =
        [("fedavg", -1.0), ("fedprox", 1.0), ("feddyn", 1.0), ("feddf", -1.0)].map(|(method, sign)| {
            rows.each_ref().map(|rows| {
                let difference = rows.iter().find(|row| row.name == method).unwrap().difference.unwrap();
                format!("{:.1} ± {:.1}", sign * 100.0 * difference.mean, 100.0 * difference.half_width.unwrap())
            })
        });
    let gain = |table: &str, beta: f64, arm: &str| {
        let fedavg = papers_mean("cv,CIFAR-10,CIFAR-100", beta, "FedAvg", "");
        format!("{:.1}", papers_mean(&format!("{table},CIFAR-10,CIFAR-100"), beta, "FedProj", arm) - fedavg)
    };
    let theirs = [gain("cv", 0.3, ""), gain("cv", 0.5, "")];
    let without = gain("wd_ablation", 0.5, "none");
    for sentence in [
        format!(
            "{} and {} points. The paper has {} and {}.",
            ahead_of_fedavg[0], ahead_of_fedavg[1], theirs[0], theirs[1]
        ),
        format!("zero in its code; without it, {without}.)"),
        format!("FedDyn leads it by {} points and FedProx by {}", behind_feddyn[0], behind_fedprox[0]),
        format!("At 0.5 they lead by {} and {}.", behind_feddyn[1], behind_fedprox[1]),
        format!("Projection adds {} points to it at β = 0.3 and {} at 0.5", ahead_of_feddf[0], ahead_of_feddf[1]),
    ] {
        says("docs/reproduction.md", &sentence);
    }
}

/// "In this order in every seed", as the pages say.
#[test]
fn methods_come_in_the_same_order_in_every_seed() {
    let full: &[&str] = &["feddyn", "fedprox", "fedproj", "feddf", "moon", "fedavg"];
    let half: &[&str] = &["feddyn", "fedprox", "fedproj", "feddf", "fedavg"];
    for (runs, beta, order) in [(FULL, 0.3, full), (FULL_HALF, 0.5, half)] {
        for seed in 0..3 {
            let outcomes = order.iter().map(|method| run_of(runs, beta, method, seed).summary.headline);
            assert!(outcomes.is_sorted_by(|a, b| a > b), "β = {beta}, seed {seed}");
        }
    }
}

/// Cells of a study at the paper's scale: method, seeds, the paper's number and ours, differences to `FedAvg` and to `FedProj`.
fn beside_the_paper(runs: (&str, usize), setting: &str, beta: f64) -> Vec<String> {
    let to_fedproj = study_against("fedproj", runs, beta);
    let row = |row: ComparedRow| {
        let method = title(&row.name);
        let other = to_fedproj.iter().find(|other| other.name == row.name).unwrap();
        let behind = other.difference.map_or(String::new(), |d| interval(-d.mean, d));
        let (n_seeds, paper) = (row.seeds.len(), paper(setting, beta, method, ""));
        format!("{method} | {n_seeds} | {paper} | {} | {} | {behind}", accuracy(&row), difference(&row))
    };
    study(runs, beta).into_iter().map(row).collect()
}

#[test]
fn what_is_said_of_fine_tuning_in_one_place_is_what_was_measured() {
    let run = StoredRun::open(&root().join("results/sst2-central")).unwrap();
    let accuracy = format!("**{:.2} %**", 100.0 * run.rounds.last().unwrap().accuracy.unwrap());
    for page in ["docs/text.md", "results/sst2-central/README.md"] {
        says(page, &accuracy);
    }
}

#[test]
fn the_folders_own_tables_are_what_was_measured() {
    for (runs, beta, name) in [
        (QUICK, 0.3, "table1"),
        (FULL, 0.3, "table1"),
        (FULL_HALF, 0.5, "table1"),
        (TEXT, 0.3, "table2"),
        (SST2, 0.3, "table2 0.3"),
        (SST2, 0.5, "table2 0.5"),
        (MNLI, 0.3, "table2 0.3"),
        (MNLI, 0.5, "table2 0.5"),
        (MARC, 0.3, "table2 0.3"),
        (MARC, 0.5, "table2 0.5"),
    ] {
        let rows = study(runs, beta).into_iter().map(|row| {
            let (method, last, best) = (title(&row.name), 100.0 * row.last, 100.0 * row.best);
            let (accuracy, difference, seconds) = (accuracy(&row), difference(&row), row.seconds);
            format!("| {method} | {accuracy} | {difference} | {last:.2} | {best:.2} | {seconds:.0} |")
        });
        let head = "| method | accuracy % | Δ vs FedAvg | last % | best % | seconds per run |";
        let page = format!("results/{}/README.md", runs.0);
        check(&page, name, &markdown(head, "|---|---:|---:|---:|---:|---:|", rows));
    }
}

#[test]
fn the_full_study_seed_by_seed_is_what_was_measured() {
    for (runs, beta, name) in TABLE1 {
        let methods: Vec<String> = study(runs, beta).into_iter().map(|row| row.name).collect();
        let row = |first: &str, cells: Vec<String>| format!("| {first} | {} |", cells.join(" | "));
        let rows = (0..3).map(|seed| {
            let accuracy =
                |method: &String| format!("{:.2}", 100.0 * run_of(runs, beta, method, seed).summary.headline);
            row(&seed.to_string(), methods.iter().map(accuracy).collect())
        });
        let head = row("seed", methods.iter().map(|method| title(method).to_owned()).collect());
        let aligned = "|---:".repeat(1 + methods.len()) + "|";
        check("docs/reproduction.md", &format!("{name} seeds"), &markdown(&head, &aligned, rows));
    }
}

#[test]
fn the_pages_pictures_are_drawn_from_the_metrics() {
    let out = tempfile::tempdir().unwrap();
    let runs = TABLE1.map(|((folder, _), ..)| format!("results/{folder}"));
    command::stdout(&root(), &["report", &runs[0], &runs[1], "--out", out.path().to_str().unwrap()]);
    for (drawn, shown) in [("outcome.svg", "table1-cifar10.svg"), ("accuracy.svg", "table1-cifar10-rounds.svg")] {
        let read = |path: PathBuf| std::fs::read_to_string(path).unwrap();
        let is_same = read(out.path().join("figures").join(drawn)) == read(root().join("docs/figures").join(shown));
        assert!(is_same, "docs/figures/{shown} is not figures/{drawn} of `fedproj report {}`", runs.join(" "));
    }
}

/// A method's accuracy early and late, how far it moves from one round to the next in the last 50, and its best round.
#[test]
fn the_full_studys_steadiness_is_what_was_measured() {
    for (study_runs, beta, name) in TABLE1 {
        let runs = runs_of(study_runs);
        let rows = study(study_runs, beta).into_iter().map(|row| {
            let accuracies = |run: &StoredRun| run.rounds.iter().map(|r| r.accuracy.unwrap()).collect::<Vec<f64>>();
            let own = runs.iter().filter(|run| run.config.method.name == row.name);
            let own: Vec<Vec<f64>> = own.map(accuracies).collect();
            let over = |rounds: Range<usize>| mean(own.iter().map(|run| percent(run[rounds.clone()].iter().copied())));
            let change = |run: &Vec<f64>| percent(run[50..].windows(2).map(|pair| (pair[1] - pair[0]).abs()));
            let (early, middle, late) = (over(10..30), over(30..50), over(50..100));
            let (change, best) = (mean(own.iter().map(change)), 100.0 * row.best);
            format!("| {} | {early:.1} | {middle:.1} | {late:.1} | {change:.1} | {best:.1} |", title(&row.name))
        });
        let head = "| method | accuracy %, rounds 11–30 | 31–50 | 51–100 | change per round, points | best round, % |";
        check(
            "docs/reproduction.md",
            &format!("{name} steadiness"),
            &markdown(head, "|---|---:|---:|---:|---:|---:|", rows),
        );
    }
}

#[test]
fn fedproj_is_ahead_of_fedprox_early_in_each_seed_as_the_page_says() {
    for (runs, beta, _) in TABLE1 {
        for seed in 0..3 {
            let early =
                |method| percent(run_of(runs, beta, method, seed).rounds[10..30].iter().map(|r| r.accuracy.unwrap()));
            let (fedproj, fedprox) = (early("fedproj"), early("fedprox"));
            assert!(fedproj > fedprox, "β = {beta}, seed {seed}: {fedproj} and {fedprox}");
        }
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    fedproj_study::mean(&values.collect::<Vec<f64>>())
}

/// A mean of shares, in per cent.
fn percent(shares: impl Iterator<Item = f64>) -> f64 {
    100.0 * mean(shares)
}

fn run_of((folder, _): (&str, usize), beta: f64, method: &str, seed: u32) -> StoredRun {
    StoredRun::open(&root().join("results").join(folder).join(format!("beta{beta}-{method}-seed{seed}"))).unwrap()
}

/// What the pages say of single rounds of the full study, from the metrics.
#[test]
fn the_full_study_in_more_detail_is_what_was_measured() {
    let rows = (0..3).map(|seed| {
        let rounds = |method| run_of(FULL, 0.3, method, seed).rounds;
        let [fedavg, feddf, fedet, fedproj] = ["fedavg", "feddf", "fedet", "fedproj"].map(rounds);
        let late = |rounds: &[RoundRecord]| {
            percent(rounds[50..].iter().map(|r| r.accuracy.unwrap() - r.accuracy_before_distillation.unwrap()))
        };
        let ahead = |a: &[RoundRecord], b: &[RoundRecord]| {
            a.iter().zip(b).skip(10).filter(|(a, b)| a.accuracy > b.accuracy).count()
        };
        typographic(&format!(
            "| {seed} | {} of 90 | {} of 90 | {:.1} | {:.1} | {:.1} |",
            ahead(&fedproj, &feddf),
            ahead(&feddf, &fedavg),
            late(&feddf),
            late(&fedet),
            late(&fedproj)
        ))
    });
    let head = "| seed | rounds with FedProj above FedDF | FedDF above FedAvg | distillation gain of FedDF, points | FedET | FedProj |";
    check("docs/reproduction.md", "table1 full rounds", &markdown(head, "|---|---:|---:|---:|---:|---:|", rows));
}

#[test]
fn every_method_of_a_seed_begins_alike() {
    for study in [QUICK, FULL, FULL_HALF, TEXT, SST2, MNLI, MARC, leading_results::DIGITS, leading_results::CIFAR10] {
        let runs = runs_of(study);
        let cohorts = |run: &StoredRun| run.rounds.iter().map(|r| r.cohort.clone()).collect::<Vec<_>>();
        let is_alike = |a: &StoredRun, b: &StoredRun| {
            a.config.seed == b.config.seed && a.config.data.partition == b.config.data.partition
        };
        for run in &runs {
            // Who is sampled depends on the seed alone, and not on the skew.
            let first = runs.iter().find(|other| other.config.seed == run.config.seed).unwrap();
            assert_eq!(cohorts(run), cohorts(first), "{}", run.dir.display());
            for key in ["initial_model", "partition", "private", "test", "public"] {
                // MOON's network has a projection head, so it begins with other weights.
                // FedGEMS has the labels of the public set, which the hash includes.
                let is_exempt = [("initial_model", "moon"), ("public", "fedgems")]
                    .contains(&(key, run.config.method.name.as_str()));
                if is_exempt {
                    continue;
                }
                let Some(hash) = manifest(run).hashes.remove(key) else {
                    assert_eq!(key, "public", "{} has no hash of {key}", run.dir.display());
                    continue;
                };
                let first =
                    runs.iter().filter(|other| is_alike(run, other)).find_map(|r| manifest(r).hashes.remove(key));
                assert_eq!(Some(hash), first, "{key} of {}", run.dir.display());
            }
        }
    }
}

#[test]
fn the_readmes_results_are_what_was_measured() {
    let half = study(FULL_HALF, 0.5);
    let cells = |row: &ComparedRow| format!("{} | {}", accuracy(row), difference(row));
    let rows = study(FULL, 0.3).into_iter().map(|row| {
        let half = half.iter().find(|other| other.name == row.name).map_or(" | ".into(), cells);
        format!("| {} | {} | {half} |", title(&row.name), cells(&row))
    });
    let leading = format!("| FedProj, `preset=leading` | {} |  |  |", cells(&leading_results::leading_row()));
    let rows = rows.chain([leading]);
    let head = "| method | β = 0.3: accuracy % | Δ vs FedAvg | β = 0.5: accuracy % | Δ vs FedAvg |";
    check("README.md", "table1", &markdown(head, "|---|---:|---:|---:|---:|", rows));
}
