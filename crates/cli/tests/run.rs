//! `fedproj run`, `compare` and `verify` as a user sees them: what is printed, what lies on disk, what is not done twice.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;

use command::{SMALL, failure, fedproj, json, output, rounds, run, stdout};
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn keys(object: &Value) -> Vec<&str> {
    object.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn a_run_without_a_configuration_leaves_a_complete_directory() {
    let folder = folder();
    let outcome = json(folder.path(), &["run", "federation.rounds=2", "local.epochs=1"]);
    for key in ["run", "method", "headline", "last", "best", "model_hash", "seconds"] {
        assert!(keys(&outcome).contains(&key), "{outcome}");
    }
    assert_eq!(outcome["method"], "fedproj");
    let dir = folder.path().join(outcome["run"].as_str().unwrap());
    assert!(dir.starts_with(folder.path().join("runs")), "{}", dir.display());
    let read = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap();

    let config: toml::Table = toml::from_str(&read("config.toml")).unwrap();
    assert_eq!(config["federation"]["rounds"].as_integer(), Some(2));
    let manifest: Value = serde_json::from_str(&read("manifest.json")).unwrap();
    assert_eq!((&manifest["sizes"]["clients"], &manifest["sizes"]["cohort"]), (&10.into(), &5.into()));
    assert_eq!(keys(&manifest["hashes"]), ["initial_model", "partition", "private", "public", "test"]);
    let records = rounds(&dir);
    assert_eq!(records.len(), 2);
    assert_eq!(records[1]["model_hash"], outcome["model_hash"]);
    let csv: Vec<usize> = read("metrics.csv").lines().map(|line| line.split(',').count()).collect();
    assert_eq!((csv.len(), csv[0]), (3, csv[2]));
    let summary: Value = serde_json::from_str(&read("summary.json")).unwrap();
    assert_eq!(summary["model_hash"], outcome["model_hash"]);
    assert!(dir.join("checkpoints/round-000002.ckpt").exists());
    // A safetensors file: the length of a JSON header, then the header.
    let model = std::fs::read(dir.join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(model[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&model[8..8 + length]).unwrap();
    assert_eq!(header["fc1.weight"]["shape"], serde_json::json!([100, 64]));
}

#[test]
fn the_configuration_of_a_run_gives_the_same_run_again() {
    let folder = folder();
    let first = run(folder.path(), "first", &["method.name=feddf", "seed=3"]);
    let again = json(folder.path(), &["run", "first/config.toml", "--out", "again"]);
    assert_eq!(first["model_hash"], again["model_hash"]);
    let other = json(folder.path(), &["run", "first/config.toml", "seed=4", "--out", "other"]);
    assert_ne!(first["model_hash"], other["model_hash"]);
}

#[test]
fn quiet_says_nothing_and_json_prints_one_line() {
    let folder = folder();
    let quiet = output(fedproj(folder.path(), &[&["run", "--quiet", "--out", "quiet"], SMALL].concat()));
    assert!(quiet.status.success() && quiet.stdout.is_empty() && quiet.stderr.is_empty(), "{quiet:?}");
    assert!(folder.path().join("quiet/summary.json").exists());
    let text = stdout(folder.path(), &[&["run", "--json", "--quiet", "--out", "json"], SMALL].concat());
    assert_eq!(text.lines().count(), 1);
    let text = stdout(folder.path(), &[&["run", "--out", "plain"], SMALL].concat());
    assert!(text.contains("accuracy") && text.contains("plain"), "{text}");
}

#[test]
fn overrides_reach_the_run() {
    let folder = folder();
    let outcome = run(folder.path(), "a", &["method.name=fedprox", "method.fedprox.proximal_weight=0.5", "seed=9"]);
    assert_eq!((&outcome["method"], &outcome["seed"]), (&"fedprox".into(), &9.into()));
    let config = std::fs::read_to_string(folder.path().join("a/config.toml")).unwrap();
    assert!(config.contains("proximal_weight = 0.5"), "{config}");
    let other = run(folder.path(), "b", &["method.name=fedprox", "method.fedprox.proximal_weight=0.0", "seed=9"]);
    assert_ne!(outcome["model_hash"], other["model_hash"]);
}

#[test]
fn a_finished_run_is_not_run_again() {
    let folder = folder();
    let first = run(folder.path(), "a", &[]);
    let files = |dir: &Path| {
        let mut all: Vec<_> = std::fs::read_dir(dir)
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                (entry.file_name(), entry.metadata().unwrap().modified().unwrap())
            })
            .collect();
        all.sort();
        all
    };
    let before = files(&folder.path().join("a"));
    let args = [&["run", "--out", "a"], SMALL].concat();
    let again = output(fedproj(folder.path(), &args));
    assert!(again.status.success() && String::from_utf8_lossy(&again.stderr).contains("already finished"), "{again:?}");
    assert_eq!(json(folder.path(), &args), first);
    assert_eq!(files(&folder.path().join("a")), before);
}

#[test]
fn seeds_and_sweeps_run_every_combination_once_and_are_compared() {
    let folder = folder();
    let settings = ["seeds=[0,1]", "sweep.method.name=[fedavg,feddf]"];
    let outcome = run(folder.path(), "many", &settings);
    let names: Vec<&str> = outcome["runs"].as_array().unwrap().iter().map(|r| r["run"].as_str().unwrap()).collect();
    assert_eq!(names, ["many/fedavg-seed0", "many/fedavg-seed1", "many/feddf-seed0", "many/feddf-seed1"]);
    assert!(names.iter().all(|name| folder.path().join(name).join("summary.json").exists()));
    // One is lost: only that one is made again, and comes out the same.
    std::fs::remove_dir_all(folder.path().join("many/feddf-seed1")).unwrap();
    let again = run(folder.path(), "many", &settings);
    for at in 0..4 {
        assert_eq!(outcome["runs"][at]["model_hash"], again["runs"][at]["model_hash"]);
        assert_eq!(outcome["runs"][at]["seconds"] == again["runs"][at]["seconds"], at != 3, "run {at}");
    }
    // Three at a time they come out the same, in the same order.
    let beside = run(folder.path(), "beside", &[&settings[..], &["--jobs", "3"]].concat());
    for at in 0..4 {
        assert_eq!(outcome["runs"][at]["model_hash"], beside["runs"][at]["model_hash"]);
        assert_eq!(beside["runs"][at]["run"].as_str().unwrap(), names[at].replace("many", "beside"));
    }

    let table = &json(folder.path(), &["compare", "many"])["settings"][0];
    assert_eq!(table["baseline"], "FedAvg");
    let [fedavg, feddf] = &table["rows"].as_array().unwrap()[..] else { panic!("{table}") };
    assert_eq!((&feddf["name"], &feddf["seeds"]), (&"FedDF".into(), &serde_json::json!([0, 1])));
    assert!(fedavg["difference"].is_null() && fedavg["std"].is_f64(), "{table}");
    let headline = |at: usize| outcome["runs"][at]["headline"].as_f64().unwrap();
    let expected = (headline(2) - headline(0) + headline(3) - headline(1)) / 2.0;
    assert!((feddf["difference"]["mean"].as_f64().unwrap() - expected).abs() < 1e-12, "{table}");
    assert_eq!(feddf["difference"]["n"], 2);
    let text = stdout(folder.path(), &["compare", "many", "--baseline", "feddf"]);
    assert!(text.contains("FedAvg") && text.contains("±") && text.contains("Δ vs FedDF"), "{text}");
}

#[test]
fn compare_takes_differences_within_a_group() {
    let folder = folder();
    let sweep = ["sweep.data.partition.beta=[0.3,5.0]", "sweep.method.name=[fedavg,fedprox]"];
    let outcome = run(folder.path(), "many", &sweep);
    let table = json(folder.path(), &["compare", "many"]);
    let settings = table["settings"].as_array().unwrap();
    assert_eq!(settings.len(), 2, "{table}");
    let headline = |name: &str| {
        let runs = outcome["runs"].as_array().unwrap();
        let run = runs.iter().find(|r| r["run"] == format!("many/{name}")).unwrap_or_else(|| panic!("{outcome}"));
        run["headline"].as_f64().unwrap()
    };
    for (setting, beta) in settings.iter().zip(["0.3", "5.0"]) {
        let difference = setting["rows"][1]["difference"]["mean"].as_f64().unwrap();
        let expected = headline(&format!("beta{beta}-fedprox")) - headline(&format!("beta{beta}-fedavg"));
        assert!((difference - expected).abs() < 1e-12, "{setting}");
    }
    let text = stdout(folder.path(), &["compare", "many"]);
    assert!(text.contains("β = 0.3") && text.contains("β = 5") && text.matches("Δ vs FedAvg").count() == 2, "{text}");
}

#[test]
fn a_run_without_a_terminal_prints_a_line_per_round() {
    let folder = folder();
    let stderr = |out: &str, flags: &[&str]| {
        let output = output(fedproj(folder.path(), &[&["run", "--out", out], SMALL, flags].concat()));
        String::from_utf8(output.stderr).unwrap()
    };
    let told = stderr("a", &[]);
    let lines: Vec<&str> = told.lines().collect();
    assert!(lines.len() == 3 && lines[0].starts_with("round 1/3, accuracy "), "{told}");
    assert!(lines[2].starts_with("round 3/3, accuracy "), "{told}");
    assert_eq!(stderr("b", &["--quiet"]), "");
}

#[test]
fn a_run_goes_on_where_nobody_reads_its_output() {
    let folder = folder();
    let both = [SMALL, &["federation.rounds=4", "seeds=2"]].concat();
    let mut reading = fedproj(folder.path(), &[&["run", "--out", "a"], &both[..]].concat());
    let mut reading = reading.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // As `fedproj run 2>&1 | head -0`.
    drop((reading.stdout.take(), reading.stderr.take()));
    assert!(reading.wait().unwrap().success());
    for seed in ["seed0", "seed1"] {
        assert_eq!(rounds(&folder.path().join("a").join(seed)).len(), 4, "{seed}");
    }
}

#[test]
fn a_new_file_runs_as_no_file_does() {
    let folder = folder();
    stdout(folder.path(), &["new", "f.toml"]);
    let run = |first: &[&str]| json(folder.path(), &[first, &["federation.rounds=1", "local.epochs=1"]].concat());
    let (with, without) = (run(&["run", "--out", "a", "f.toml"]), run(&["run", "--out", "b"]));
    assert_eq!(with["model_hash"], without["model_hash"]);
    let shown = |args: &[&str]| stdout(folder.path(), args);
    assert_eq!(shown(&["config", "show", "f.toml"]), shown(&["config", "show"]));
}

#[test]
fn a_finished_run_is_extended_where_only_the_rounds_differ() {
    let folder = folder();
    // Three rounds with a warm-up of one, which a tenth of eleven rounds would not be; the third is evaluated as the last.
    let settings = ["federation.evaluate_every=2"];
    run(folder.path(), "a", &settings);
    let before = rounds(&folder.path().join("a"));
    assert!(before[2]["accuracy"].is_f64(), "{before:?}");
    let long = [&settings[..], &["federation.rounds=11"]].concat();
    let (code, message) = failure(fedproj(folder.path(), &[&["run", "--out", "a"], SMALL, &long[..]].concat()));
    assert!(code == 2 && message.contains("fewer rounds") && message.contains("--resume"), "{message}");
    let other = [&["run", "--resume", "--out", "a"], SMALL, &long[..], &["local.batch=16"]].concat();
    let (code, message) = failure(fedproj(folder.path(), &other));
    assert!(code == 2 && message.contains("another configuration"), "{message}");
    let extended = run(folder.path(), "a", &long);
    let whole = run(folder.path(), "b", &[&long[..], &["method.fedproj.projection.warmup=1.0"]].concat());
    assert_eq!(extended["model_hash"], whole["model_hash"]);
    assert_eq!(extended["headline"], whole["headline"]);
    assert_eq!(rounds(&folder.path().join("a")), rounds(&folder.path().join("b")));
    // It is finished, sealed and verified as any other run, and the same command finds it again.
    assert_eq!(run(folder.path(), "a", &long), extended);
    assert_eq!(json(folder.path(), &["verify", "a"])["sealed"], true);
    assert_eq!(json(folder.path(), &["verify", "a", "--from-checkpoint"])["n_rounds"], 1);
    let (_, message) =
        failure(fedproj(folder.path(), &[&["run", "--resume", "--out", "a"], SMALL, &settings].concat()));
    assert!(message.contains("11 rounds, which cannot be made shorter"), "{message}");
}

#[test]
fn an_extension_that_was_killed_before_its_first_round_goes_on() {
    let folder = folder();
    run(folder.path(), "a", &[]);
    let before = std::fs::read(folder.path().join("a/checkpoints/round-000003.ckpt")).unwrap();
    let extended = run(folder.path(), "a", &["federation.rounds=5"]);
    // As a kill leaves it: the new configuration, and only the old checkpoint.
    for file in ["summary.json", "checkpoints/round-000004.ckpt", "checkpoints/round-000005.ckpt"] {
        std::fs::remove_file(folder.path().join("a").join(file)).unwrap();
    }
    std::fs::write(folder.path().join("a/checkpoints/round-000003.ckpt"), before).unwrap();
    assert_eq!(run(folder.path(), "a", &["federation.rounds=5"])["model_hash"], extended["model_hash"]);
}

#[test]
fn a_number_of_seeds_is_a_flag_and_a_setting() {
    let folder = folder();
    let seeds = |args: &[&str]| {
        let outcome = json(folder.path(), &[&["run", "method=fedavg"], args, SMALL].concat());
        outcome["runs"].as_array().unwrap().iter().map(|run| run["seed"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(seeds(&["--seeds", "2", "--out", "a"]), [0, 1]);
    assert_eq!(seeds(&["seeds=2", "--out", "b"]), [0, 1]);
}

#[test]
fn a_path_below_the_working_directory_is_found_whatever_the_data_directory_is() {
    let folder = folder();
    std::fs::create_dir(folder.path().join("elsewhere")).unwrap();
    let rows = (0..300).map(|i| format!("{}.0,1.0,{}", i % 7, i % 3)).collect::<Vec<_>>().join("\n");
    std::fs::write(folder.path().join("points.csv"), &rows).unwrap();
    let partition = |path: &str| {
        let source = format!("data.private={{name='csv', path='{path}'}}");
        let mut command = fedproj(folder.path(), &["partition", "--json", &source, "data.partition=iid"]);
        output({
            command.env("FEDPROJ_DATA", "elsewhere");
            command
        })
    };
    assert!(partition("points.csv").status.success());
    // What is in the data directory comes first.
    std::fs::write(folder.path().join("elsewhere/points.csv"), &rows[..rows.len() / 2]).unwrap();
    let sizes = |output: std::process::Output| -> u64 {
        let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        summary["sizes"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum()
    };
    assert_eq!(sizes(partition("points.csv")), 60);
    let missing = partition("nosuch.csv");
    let told = String::from_utf8_lossy(&missing.stderr);
    assert!(told.contains("elsewhere/nosuch.csv") && told.contains("else at the current directory"), "{told}");
}

#[test]
fn verify_passes_a_true_run_and_names_the_round_of_a_false_one() {
    let folder = folder();
    run(folder.path(), "a", &[]);
    let verified = json(folder.path(), &["verify", "a", "--threads", "1"]);
    assert_eq!((&verified["from"], &verified["n_rounds"], &verified["sealed"]), (&0.into(), &3.into(), &true.into()));
    let all = ["manifest.json", "metrics.jsonl", "summary.json", "model.safetensors", "metrics.csv"];
    assert_eq!((&verified["compared"], &verified["notes"]), (&serde_json::json!(all), &serde_json::json!([])));
    assert_eq!(json(folder.path(), &["verify", "a", "--from-checkpoint"])["n_rounds"], 1);

    let path = folder.path().join("a/metrics.jsonl");
    let hash = rounds(&folder.path().join("a"))[1]["model_hash"].as_str().unwrap().to_owned();
    let other = if hash.starts_with('0') { "1" } else { "0" }.to_owned() + &hash[1..];
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace(&hash, &other)).unwrap();
    let (code, message) = failure(fedproj(folder.path(), &["verify", "a"]));
    assert_eq!(code, 1);
    assert!(message.contains("round 1") && message.contains(&other) && message.contains(&hash), "{message}");
    // What precedes it is still true.
    let verified = json(folder.path(), &["verify", "a", "--rounds", "1"]);
    assert_eq!((&verified["n_rounds"], &verified["sealed"]), (&1.into(), &false.into()));
    assert!(verified["notes"].to_string().contains("metrics.jsonl has changed"), "{verified}");
    // Nor is it a result to compare, to report, or to skip when the run is asked for again.
    for command in [&["compare", "a"][..], &["report", "a"], &[&["run", "--out", "a"], SMALL].concat()] {
        let (code, message) = failure(fedproj(folder.path(), command));
        assert_eq!(code, 1, "{command:?}: {message}");
        assert!(message.contains("`a`: does not match its seal: metrics.jsonl has changed"), "{command:?}: {message}");
    }
}
