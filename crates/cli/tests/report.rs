//! `fedproj report`: what it shows is what `compare` counts, sweeps get their rows, and bad input is told and costs nothing.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;

use command::{SMALL, failure, fedproj, json, run, stdout};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Runs a small sweep into `runs`.
fn sweep(folder: &Path, settings: &[&str]) {
    stdout(folder, &[&["run", "--out", "runs", "--quiet"], SMALL, settings].concat());
}

fn read(folder: &Path, path: &str) -> String {
    fs::read_to_string(folder.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

#[test]
fn statistics_are_those_of_compare() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    sweep(folder, &["sweep.method.name=[fedavg,fedproj]", "seeds=0,1,2", "federation.evaluate_clients=true"]);
    let report = json(folder, &["report", "runs", "--out", "out"]);
    let compared = json(folder, &["compare", "runs", "--baseline", "fedavg"]);
    let rows = report["settings"][0]["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (row, expected) in rows.iter().zip(compared["settings"][0]["rows"].as_array().unwrap()) {
        for key in ["name", "seeds", "mean", "std", "last", "best", "difference"] {
            assert_eq!(row[key], expected[key], "{key}");
        }
        assert!(row["paper"].is_null());
    }
    let html = read(folder, "out/report.html");
    let percent = |v: &Value| 100.0 * v.as_f64().unwrap();
    for row in rows {
        let cell = format!("<td>{:.2} ± {:.2}</td>", percent(&row["mean"]), percent(&row["std"]));
        assert!(html.contains(&cell), "{cell}");
    }
    let d = &rows[1]["difference"];
    let cell = format!("{:+.2} ± {:.2}", percent(&d["mean"]), percent(&d["half_width"])).replace('-', "−");
    assert!(html.contains(&cell), "{cell}");
    let csv = read(folder, "out/tables/accuracy.csv");
    assert!(csv.contains(&format!("FedProj,3,{},{},{},", rows[1]["mean"], rows[1]["std"], d["mean"])), "{csv}");
    files_are_whole(folder, &report);
    for line in read(folder, "runs/fedproj-seed0/metrics.jsonl").lines() {
        let round: Value = serde_json::from_str(line).unwrap();
        let each: Vec<f64> = serde_json::from_value(round["forgetting_by_client"].clone()).unwrap();
        assert_eq!(each.len(), round["cohort"].as_array().unwrap().len());
        let mean = each.iter().sum::<f64>() / each.len() as f64;
        assert!((mean - round["forgetting"].as_f64().unwrap()).abs() < 1e-12, "{line}");
    }
}

/// Everything that is named was written, and nothing else.
fn files_are_whole(folder: &Path, report: &Value) {
    let names: Vec<&str> = report["files"].as_array().unwrap().iter().map(|f| f.as_str().unwrap()).collect();
    for name in ["outcome", "accuracy", "time", "clients", "forgetting", "projection", "partition"] {
        let svg = read(folder, &format!("out/figures/{name}.svg"));
        let picture = roxmltree::Document::parse(&svg).unwrap_or_else(|e| panic!("{name}: {e}"));
        let size = |side| picture.root_element().attribute(side).unwrap().parse::<f64>().unwrap();
        for text in picture.descendants().filter(|n| n.has_tag_name("text")) {
            let at = |name| text.attribute(name).unwrap().parse::<f64>().unwrap();
            assert!((0.0..size("width")).contains(&at("x")) && (0.0..size("height")).contains(&at("y")), "{name}");
        }
        assert!(fs::read(folder.join(format!("out/figures/{name}.png"))).unwrap().starts_with(b"\x89PNG"));
    }
    for name in ["accuracy", "costs", "clients", "runs"] {
        assert!(read(folder, &format!("out/tables/{name}.tex")).contains("\\begin{tabular}"));
        assert!(names.contains(&&format!("out/tables/{name}.csv")[..]), "{names:?}");
    }
    let n_written = ["out", "out/figures", "out/tables"]
        .map(|dir| fs::read_dir(folder.join(dir)).unwrap().filter(|e| e.as_ref().unwrap().path().is_file()).count());
    assert_eq!(n_written.iter().sum::<usize>(), names.len(), "{names:?}");
    let stored: Value = serde_json::from_str(&read(folder, "out/report.json")).unwrap();
    assert_eq!(stored["settings"], report["settings"]);
}

#[test]
fn a_sweep_gets_a_row_a_value_and_the_configuration_marks_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    sweep(folder, &["sweep.method.fedproj.distill.alpha=[0.0,0.1]", "sweep.data.partition.beta=[0.3,0.5]"]);
    let text = stdout(folder, &["report", "runs"]);
    for words in ["β = 0.3", "β = 0.5", "FedProj, alpha 0.0", "FedProj, alpha 0.1", "compare within a group"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let html = read(folder, "runs/report/report.html");
    assert!(html.contains("<mark>alpha = 0.1</mark>") && html.contains("<mark>beta = 0.5</mark>"));
    assert!(!html.contains("<mark>rounds") && html.contains("rounds = 3\n"));
    assert!(!html.contains("[method.moon]"), "other methods' tables are left out");
    // The report below the runs does not disturb the next one, nor do paths given twice.
    assert_eq!(stdout(folder, &["report", "runs", "runs"]).lines().next(), text.lines().next());
}

#[test]
fn real_runs_stand_beside_the_papers_figures() {
    let folder = tempfile::tempdir().unwrap();
    let quick = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../results/table1-cifar10-quick");
    let text = stdout(folder.path(), &["report", quick.to_str().unwrap(), "--out", "out"]);
    let line = text.lines().find(|line| line.starts_with("FedProj")).unwrap();
    let cells: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(cells[..12].join(" "), "FedProj 3 27.53 ± 2.85 +6.68 ± 7.80 65.52 ± 0.86 −37.99", "{line}");
    assert!(text.contains("This is not the paper's set-up (clients 20 instead of 100"), "{text}");
    // The first of these runs did not record who holds what, and its data are not here.
    let html = read(folder.path(), "out/report.html");
    assert!(
        html.contains("no picture of the partition") && html.contains("<code>cifar10</code> is not at hand"),
        "{text}"
    );
}

#[test]
fn an_old_run_gets_its_partition_from_the_data() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    run(folder, "new", &[]);
    stdout(folder, &["report", "new", "--out", "a"]);
    let path = folder.join("new/manifest.json");
    let mut manifest: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    for key in ["classes", "class_counts", "seal"] {
        manifest.as_object_mut().unwrap().remove(key).unwrap();
    }
    fs::write(&path, manifest.to_string()).unwrap();
    stdout(folder, &["report", "new", "--out", "b"]);
    assert_eq!(read(folder, "a/figures/partition.svg"), read(folder, "b/figures/partition.svg"));
    manifest["hashes"]["partition"] = "other".into();
    fs::write(&path, manifest.to_string()).unwrap();
    stdout(folder, &["report", "new", "--out", "c"]);
    assert!(!folder.join("c/figures/partition.svg").exists());
    assert!(read(folder, "c/report.html").contains("are not those of the runs (partition"));
    fs::remove_file(&path).unwrap();
    stdout(folder, &["report", "new", "--out", "d"]);
    assert!(read(folder, "d/report.html").contains("no manifest.json"));
}

#[test]
fn bad_input_is_told_and_nothing_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let check = |paths: &[&str], code: i32, words: &[&str]| {
        let (found, message) = failure(fedproj(folder, &[&["report", "--out", "out"], paths].concat()));
        assert_eq!(found, code, "{message}");
        for word in words {
            assert!(message.contains(word), "no `{word}` in\n{message}");
        }
        assert!(!folder.join("out").exists());
    };
    check(&["nowhere"], 2, &["`nowhere`", "no directory"]);
    fs::create_dir_all(folder.join("empty/inner")).unwrap();
    check(&["empty"], 2, &["`empty` holds no run", "hint"]);
    run(folder, "good", &[]);
    check(&["good", "empty"], 2, &["`empty` holds no run"]);
    run(folder, "half", &["seed=1"]);
    fs::remove_file(folder.join("half/summary.json")).unwrap();
    check(&["half"], 2, &["no run is finished", "`half` is unfinished, 3 rounds", "--resume", "--unfinished"]);
    let metrics = fs::read_to_string(folder.join("good/metrics.jsonl")).unwrap();
    let mut lines: Vec<&str> = metrics.lines().collect();
    lines[1] = "{\"round\": oops";
    fs::write(folder.join("good/metrics.jsonl"), lines.join("\n")).unwrap();
    check(&["good"], 1, &["`good`: does not match its seal: metrics.jsonl has changed"]);
    // Without a seal, as earlier versions left runs.
    let manifest = fs::read_to_string(folder.join("good/manifest.json")).unwrap();
    let unsealed: Vec<&str> = manifest.lines().filter(|line| !line.contains("\"seal\"")).collect();
    fs::write(folder.join("good/manifest.json"), unsealed.join("\n")).unwrap();
    check(&["good"], 1, &["metrics.jsonl", "line 2"]);
    fs::write(folder.join("good/metrics.jsonl"), format!("{}\n", metrics.lines().next().unwrap())).unwrap();
    check(&["good"], 1, &["holds 1 rounds", "asks for 3", "hint"]);
    fs::write(folder.join("good/metrics.jsonl"), &metrics).unwrap();
    fs::write(folder.join("good/manifest.json"), "{").unwrap();
    check(&["good"], 1, &["manifest.json"]);
    fs::remove_file(folder.join("good/manifest.json")).unwrap();
    // Beside a finished run, an unfinished one is a note.
    let text = stdout(folder, &["report", "good", "half", "--out", "out"]);
    assert!(text.contains("Left out: `half` is unfinished"), "{text}");
    assert!(text.contains("`good` is not sealed"), "{text}");
    assert!(read(folder, "out/report.html").contains("Left out: <code>half</code> is unfinished"));
    fs::write(folder.join("file"), "").unwrap();
    let (_, message) = failure(fedproj(folder, &["report", "good", "--out", "file"]));
    assert!(message.contains("cannot make `file/figures`"), "{message}");
}

#[test]
fn hostile_names_stay_text() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let row = |i: u32| format!("{},{},<img src=x onerror=alert({})>", i % 7, i % 5, i % 2);
    let rows: Vec<String> = (0..400).map(row).collect();
    fs::write(folder.join("<script>alert(1)<!--.csv"), format!("a,b,label\n{}\n", rows.join("\n"))).unwrap();
    let private = "data.private={name='csv', path='<script>alert(1)<!--.csv', label='label'}";
    let clients = "data.partition={kind='iid', clients=4}";
    run(folder, "<b>run", &[private, clients, "data.public=split"]);
    stdout(folder, &["report", "<b>run", "--out", "out", "--title", "</title>\\input{x} & \"y\""]);
    let html = read(folder, "out/report.html");
    assert_eq!(html.matches("<script>").count(), 1, "the page's own");
    assert!(!html.contains("<img") && !html.contains("<b>") && !html.contains("</title>\\"));
    assert!(html.contains("&lt;script&gt;alert(1)") && html.contains("&lt;/title&gt;\\input{x} &amp; &quot;y&quot;"));
    roxmltree::Document::parse(&read(folder, "out/figures/partition.svg")).unwrap();
}

#[test]
fn unfinished_runs_are_reported_on_request_and_marked() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    sweep(folder, &["sweep.method.name=[fedavg,fedproj]", "seeds=0,1"]);
    // FedAvg's second seed ended in the middle of its third line.
    let half = folder.join("runs/fedavg-seed1");
    fs::remove_file(half.join("summary.json")).unwrap();
    let metrics = fs::read_to_string(half.join("metrics.jsonl")).unwrap();
    let lines: Vec<&str> = metrics.lines().collect();
    fs::write(half.join("metrics.jsonl"), format!("{}\n{}\n{}", lines[0], lines[1], &lines[2][..40])).unwrap();
    let report = json(folder, &["report", "runs", "--out", "out", "--unfinished"]);
    let rows = report["settings"][0]["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["FedAvg", "FedAvg (unfinished: 2 of 3 rounds)", "FedProj"]);
    assert_eq!(rows[1]["is_finished"], false);
    let accuracies: Vec<f64> = lines[..2]
        .iter()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["accuracy"].as_f64().unwrap())
        .collect();
    assert_eq!(rows[1]["last"].as_f64(), Some(accuracies[1]));
    let html = read(folder, "out/report.html");
    assert!(html.contains("4 runs, 1 of them unfinished. Unfinished runs are not ranked."));
    assert_eq!(html.matches("<tr class=\"bold\">").count(), 1);
    // A run that has not done a round has nothing to show.
    fs::write(half.join("metrics.jsonl"), "").unwrap();
    let text = stdout(folder, &["report", "runs", "--out", "out", "--unfinished"]);
    assert!(text.contains("fedavg-seed1` is unfinished, 0 rounds are done"), "{text}");
}

#[test]
fn costs_are_in_units_that_people_read() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    sweep(folder, &[]);
    // An hour and a half of training per round, and three megabytes.
    let path = folder.join("runs/metrics.jsonl");
    let long = |line: &str| {
        let mut round: Value = serde_json::from_str(line).unwrap();
        round["seconds"] = serde_json::json!({ "local": 5400.0, "fusion": 0.25, "evaluation": 2.0 });
        (round["bytes_down"], round["bytes_up"]) = (3_000_000.into(), 1500.into());
        format!("{round}\n")
    };
    let text: String = fs::read_to_string(&path).unwrap().lines().map(long).collect();
    fs::write(&path, text).unwrap();
    // What was changed does not match the run's seal.
    fs::remove_file(folder.join("runs/manifest.json")).unwrap();
    stdout(folder, &["report", "runs", "--out", "out"]);
    let latex = read(folder, "out/tables/costs.tex");
    let heads = "local, min / round & fusion, ms / round & evaluation, s / round & whole run, h & down, MB / round & up, \
                 kB / round & whole run, MB";
    assert!(latex.contains(heads), "{latex}");
    assert!(latex.contains("& 90.00 & 250.00 & 2.00 & 4.50 & 3.00 & 1.50 & 9.00"), "{latex}");
    let html = read(folder, "out/report.html");
    assert!(html.contains("time of training and fusion, h") && html.contains("sent, down and up, MB"));
}
