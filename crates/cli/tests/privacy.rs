//! Differential privacy as a user sees it: the plan, and an ε in every output.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;

use command::{failure, fedproj, json, rounds, run, stdout};
use fedproj_core::methods::title;
use fedproj_report::{Chart, Charts, SERIES, Series, Spread};
use fedproj_study::{Loaded, compare, load, mean};
use std::path::Path;

#[test]
fn a_plan_answers_with_the_noise_and_rejects_what_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let plan = |more: &[&'static str]| {
        let least = ["privacy", "plan", "--rounds", "100", "--clients", "1000"];
        [&least[..], more].concat()
    };
    let args = plan(&["--epsilon", "8", "--cohort", "100", "--delta", "1e-5"]);
    let answer = json(folder, &args);
    // The number of dp-accounting for half of it, since neighbours replace one client.
    assert!((answer["noise_multiplier"].as_f64().unwrap() - 3.037_388_6).abs() < 1e-5, "{answer}");
    assert_eq!(answer["adjacency"], "replace-one");
    assert!(stdout(folder, &args).contains("3.0374"));
    for (more, words) in [
        (&["--epsilon", "-1", "--cohort", "10"][..], "--epsilon = -1: must be positive"),
        (&["--epsilon", "1", "--cohort", "2000"], "--cohort = 2000: must be at most the 1000 clients"),
        (&["--epsilon", "1", "--cohort", "10", "--delta", "0.1"], "--delta = 0.1: must be above 0 and below one over"),
        (&["--epsilon", "0.01", "--cohort", "10", "--delta", "1e-200"], "no noise multiplier up to 1e9 keeps it"),
    ] {
        let (code, message) = failure(fedproj(folder, &plan(more)));
        assert!(code == 2 && message.contains(words), "{message}");
    }
}

#[test]
fn every_output_of_a_run_shows_its_epsilon_and_whether_it_is_nominal() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let private = ["method.name=fedavg", "privacy.noise_multiplier=1.0", "privacy.noise=seeded"];
    let summary = run(folder, "all/private", &private);
    run(folder, "all/open", &["method.name=fedavg"]);
    let epsilon = summary["privacy"]["epsilon"].as_f64().unwrap();
    let shown = format!("{epsilon:.2} (nominal)");
    assert_eq!(rounds(&folder.join("all/private"))[2]["privacy"], summary["privacy"]);
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap();
    assert!(read("all/private/manifest.json").contains("ε is nominal"));
    let csv = read("all/private/metrics.csv");
    assert!(csv.lines().next().unwrap().ends_with(",epsilon_nominal") && csv.ends_with(&format!(",{epsilon}\n")));
    assert!(
        read("all/open/metrics.csv").starts_with("round,accuracy") && !read("all/open/metrics.csv").contains("epsilon")
    );
    let table = stdout(folder, &["compare", "all"]);
    assert!(table.contains(&shown) && table.contains('∞'), "{table}");
    stdout(folder, &["report", "all", "--out", "page"]);
    assert!(read("page/report.html").contains(&shown));
    assert!(read("page/tables/accuracy.tex").contains(&shown));
    // The table for machines marks it, too: 1 for this run, nothing for the other.
    let raw = read("page/tables/accuracy.csv");
    let last: Vec<&str> = raw.lines().map(|line| line.rsplit(',').next().unwrap()).collect();
    assert!(last.len() == 3 && last[0] == "epsilon_is_nominal" && last.contains(&"1") && last.contains(&""), "{raw}");
    stdout(folder, &["verify", "all/private"]);
    // A run of a real generator is checked as far as it can be.
    run(folder, "system", &["method.name=fedavg", "privacy.noise_multiplier=1.0"]);
    let verified = json(folder, &["verify", "system"]);
    assert_eq!(verified["n_rounds"], 0);
    assert!(stdout(folder, &["verify", "system"]).starts_with("no round was repeated; manifest.json"));
    let (code, message) = failure(fedproj(folder, &["serve", "privacy.noise_multiplier=1.0", "method.name=fedavg"]));
    assert!(code == 2 && message.contains("privacy: a federation's server"), "{message}");
}

#[test]
fn a_table_of_an_earlier_version_that_marks_no_epsilon_still_verifies() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    run(folder, "run", &["method.name=fedavg", "privacy.noise_multiplier=1.0", "privacy.noise=seeded"]);
    let path = |file: &str| folder.join("run").join(file);
    let [csv, manifest] = ["metrics.csv", "manifest.json"].map(|file| std::fs::read_to_string(path(file)).unwrap());
    let hash = |text: &str| blake3::hash(text.as_bytes()).to_hex().to_string();
    for (head, is_fine) in [("epsilon", true), ("epsilon_of_others", false)] {
        let earlier = csv.replacen("epsilon_nominal", head, 1);
        let sealed = manifest.replace(&hash(&csv), &hash(&earlier));
        assert!(earlier != csv && sealed != manifest);
        std::fs::write(path("metrics.csv"), earlier).unwrap();
        std::fs::write(path("manifest.json"), sealed).unwrap();
        assert_eq!(fedproj(folder, &["verify", "run"]).status().unwrap().success(), is_fine, "{head}");
        // Stored without the table, the run has its hash in the seal.
        std::fs::remove_file(path("metrics.csv")).unwrap();
        assert_eq!(fedproj(folder, &["verify", "run"]).status().unwrap().success(), is_fine, "{head}, without it");
    }
}

/// The methods of the studies.
const METHODS: [&str; 3] = ["fedavg", "feddyn", "fedproj"];

/// A stored study: its name, its noise with the ε that it stands for, and how it is drawn.
struct Study {
    name: &'static str,
    noise: [(f64, &'static str); 4],
    n_seeds: usize,
    accuracy: (f64, f64, f64),
    noise_max: f64,
    subtitle: &'static str,
    note: &'static str,
}

#[test]
fn the_studies_are_what_was_measured() {
    for study in [
        Study {
            name: "privacy-digits",
            noise: [(0.0, "∞"), (1.1772, "8"), (1.8355, "4"), (3.0515, "2")],
            n_seeds: 3,
            accuracy: (60.0, 95.0, 5.0),
            noise_max: 3.2,
            subtitle: "digits, 200 clients with 50 per round, 50 rounds",
            note: "mean and range of 3 seeds",
        },
        Study {
            name: "privacy-cifar10",
            noise: [(0.0, "∞"), (0.7947, "8"), (1.1217, "4"), (1.6898, "2")],
            n_seeds: 1,
            accuracy: (34.0, 48.0, 2.0),
            noise_max: 1.8,
            subtitle: "CIFAR-10, 2500 clients with 250 per round, 50 rounds",
            note: "one seed",
        },
    ] {
        check(&study);
    }
}

fn check(study: &Study) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/privacy.md")).unwrap();
    let runs = load(&[root.join("results").join(study.name)], false).unwrap().0;
    let of = |method: &str, noise: f64| -> Vec<&Loaded> {
        let is_it = |run: &&Loaded| {
            let config = &run.run.config;
            config.method.name == method && (config.privacy.noise_multiplier - noise).abs() < 1e-9
        };
        runs.iter().filter(is_it).collect()
    };
    let mut lines = Vec::new();
    for method in METHODS {
        let (mut line, mut cells) = (Vec::new(), vec![title(method).to_owned()]);
        for (noise, epsilon) in study.noise {
            let arm = of(method, noise);
            assert_eq!(arm.len(), study.n_seeds, "{method} at {noise}");
            let summaries: Vec<_> = arm.iter().map(|run| (String::new(), run.run.summary.clone())).collect();
            for spent in summaries.iter().filter_map(|(_, summary)| summary.privacy.as_ref()) {
                let most: f64 = epsilon.parse().unwrap();
                assert!(spent.nominal && spent.epsilon <= most && spent.epsilon > 0.999 * most, "{spent:?}");
            }
            cells.push(compare(&summaries).rows[0].accuracy());
            let percent: Vec<f64> = summaries.iter().map(|(_, summary)| 100.0 * summary.headline).collect();
            let (min, max) = percent.iter().fold((f64::MAX, f64::MIN), |(a, b), v| (v.min(a), v.max(b)));
            line.push(Spread { x: noise, mean: mean(&percent), min, max });
        }
        let row = format!("| {} |", cells.join(" | "));
        assert!(page.contains(&row), "docs/privacy.md has no row\n{row}");
        lines.push(line);
    }
    let chart = Chart {
        title: "accuracy, %".into(),
        y: study.accuracy,
        x: (0.0, study.noise_max, study.noise.map(|(noise, _)| noise).to_vec()),
        x_label: "noise multiplier; ε = ∞, 8, 4, 2".into(),
        lines,
    };
    let series = METHODS.iter().zip(SERIES).map(|(method, look)| Series::new(title(method), look)).collect();
    let charts = Charts {
        title: "What privacy costs".into(),
        subtitle: study.subtitle.into(),
        series,
        notes: vec![study.note.into()],
        charts: vec![chart],
        size: fedproj_report::ChartSize { columns: 2, plot: (420.0, 240.0) },
    };
    let figure = format!("{}.svg", study.name);
    let (drawn, new) = (charts.draw(), Path::new(env!("CARGO_TARGET_TMPDIR")).join(&figure));
    std::fs::write(&new, &drawn).unwrap();
    let shown = std::fs::read_to_string(root.join("docs/figures").join(&figure)).unwrap_or_default();
    assert!(shown == drawn, "the picture of the stored runs is `{}`; copy it to docs/figures", new.display());
}
