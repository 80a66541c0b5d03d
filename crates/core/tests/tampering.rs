//! A run that was changed after it finished is found: by its seal if nobody renewed that, by a rerun in any case.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod small;

use fedproj_core::{Config, Manifest, Run, RunDir, StoredRun, Verified, VerifyPart, verify};
use serde_json::{Value, json};
use small::config;
use std::path::{Path, PathBuf};

const FILES: [&str; 6] =
    ["config.toml", "manifest.json", "metrics.jsonl", "metrics.csv", "model.safetensors", "summary.json"];

/// A finished run that records everything that a run can record, and a folder for its forgeries.
struct Scene {
    folder: tempfile::TempDir,
    config: Config,
}

impl Scene {
    fn new(method: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = config(method, &["federation.evaluate_clients=true"]);
        run(&folder.path().join("true"), &config);
        Self { folder, config }
    }

    /// A copy of the run, without the checkpoints.
    fn copy(&self) -> PathBuf {
        let to = self.folder.path().join("forged");
        let _ = std::fs::remove_dir_all(&to);
        std::fs::create_dir(&to).unwrap();
        for file in FILES {
            std::fs::copy(self.folder.path().join("true").join(file), to.join(file)).unwrap();
        }
        to
    }

    /// As [`Scene::copy`], without the seal.
    fn unsealed(&self) -> PathBuf {
        let dir = self.copy();
        edit(&dir, "manifest.json", |manifest| drop(manifest.as_object_mut().unwrap().remove("seal").unwrap()));
        dir
    }
}

fn run(dir: &Path, config: &Config) {
    let mut run = Run::open(dir, config, None, 2, true).unwrap();
    while run.round(&|_| ()).unwrap().is_some() {}
    run.finish().unwrap();
}

fn verified(dir: &Path) -> Result<Verified, String> {
    verify(dir, None, 2, VerifyPart::default(), &|_| ()).map_err(|e| e.to_string())
}

/// Changes a file that holds one JSON value per line or in all.
fn edit(dir: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    let path = dir.join(file);
    let text = std::fs::read_to_string(&path).unwrap();
    if file == "metrics.jsonl" {
        let mut lines: Value = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect();
        change(&mut lines);
        let lines = lines.as_array().unwrap().iter().map(|line| format!("{line}\n"));
        std::fs::write(path, lines.collect::<String>()).unwrap();
    } else {
        let mut value = serde_json::from_str(&text).unwrap();
        change(&mut value);
        std::fs::write(path, value.to_string()).unwrap();
    }
}

/// Pointers to every number, text and null in a value.
fn leaves(value: &Value, at: &str, out: &mut Vec<String>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| leaves(value, &format!("{at}/{key}"), out)),
        Value::Array(list) => list.iter().enumerate().for_each(|(i, value)| leaves(value, &format!("{at}/{i}"), out)),
        _ => out.push(at.to_owned()),
    }
}

/// Another value of the same type.
fn other(value: &Value) -> Value {
    match value {
        Value::Null => json!(0.5),
        Value::Bool(is) => json!(!is),
        Value::Number(n) if n.is_f64() => json!(f64::from_bits(n.as_f64().unwrap().to_bits() ^ 1)),
        Value::Number(n) => json!(n.as_u64().unwrap() ^ 1),
        Value::String(text) => json!(format!("{text}0")),
        _ => unreachable!("a leaf"),
    }
}

#[test]
fn a_true_run_is_sealed_and_verified() {
    let scene = Scene::new("fedproj");
    let dir = scene.copy();
    let found = verified(&dir).unwrap();
    assert_eq!((found.n_rounds, found.sealed, &found.notes), (3, true, &vec![]));
    assert_eq!(found.compared.len(), FILES.len() - 1, "all but the configuration: {:?}", found.compared);
    assert!(StoredRun::open(&dir).is_ok() && RunDir::finished(&dir, &scene.config).unwrap().is_some());
    // A run of an earlier version has no seal and may be stored without its model.
    let dir = scene.unsealed();
    std::fs::remove_file(dir.join("model.safetensors")).unwrap();
    let found = verified(&dir).unwrap();
    assert!(!found.sealed && !found.compared.iter().any(|file| file == "model.safetensors"));
    assert!(found.notes.iter().any(|note| note.contains("not sealed")), "{:?}", found.notes);
    assert!(found.notes.iter().any(|note| note == "model.safetensors is missing"), "{:?}", found.notes);
    assert!(StoredRun::open(&dir).is_ok());
}

#[test]
fn a_changed_byte_or_a_missing_file_breaks_the_seal() {
    let scene = Scene::new("fedavg");
    let is_rejected = |dir: &Path, file: &str, what: &str| {
        let told = format!("{file} {what}");
        for error in [StoredRun::open(dir).map(drop), RunDir::finished(dir, &scene.config).map(drop)] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("does not match its seal") && error.contains(&told), "{file}: {error}");
        }
    };
    for file in FILES {
        let dir = scene.copy();
        let mut text = std::fs::read(dir.join(file)).unwrap();
        // Layout alone, where the format allows it.
        if file == "metrics.jsonl" {
            text.insert(1, b' ');
        } else {
            text.push(b'\n');
        }
        std::fs::write(dir.join(file), text).unwrap();
        if file == "manifest.json" {
            assert!(StoredRun::open(&dir).is_ok(), "its seal covers what it says, not how it is laid out");
            edit(&dir, file, |manifest| manifest["hardware"]["threads"] = "64".into());
        }
        is_rejected(&dir, file, "has changed");
        let message = verified(&dir).unwrap_err();
        assert!(message.contains(&format!("{file} has changed since the run finished")), "{file}: {message}");
        if file != "manifest.json" && file != "config.toml" {
            std::fs::remove_file(dir.join(file)).unwrap();
            let (told, stored) = (verified(&dir), StoredRun::open(&dir));
            match file {
                // Not needed to compare results. The seal has their hashes.
                "metrics.csv" | "model.safetensors" => {
                    let note = format!("{file} is missing; the rerun's has its hash");
                    assert!(told.is_ok_and(|found| found.sealed && found.notes == [note]) && stored.is_ok(), "{file}");
                    edit(&dir, "manifest.json", |manifest| manifest["seal"][file] = "0".repeat(64).into());
                    let told = verified(&dir).unwrap_err();
                    assert!(told.contains(&format!("{file}: is missing, and")), "{file}: {told}");
                }
                _ => {
                    let told = told.unwrap_err();
                    assert!(told.contains(file), "{file}: {told}");
                    assert!(stored.unwrap_err().to_string().contains(&format!("{file} is missing")));
                }
            }
        }
    }
    let dir = scene.copy();
    edit(&dir, "manifest.json", |manifest| manifest["seal"] = json!({}));
    assert!(StoredRun::open(&dir).is_err(), "an empty seal is no seal of an earlier version");
    let dir = scene.copy();
    edit(&dir, "manifest.json", |manifest| manifest["note"] = "a key that nobody knows".into());
    assert!(StoredRun::open(&dir).is_err());
}

#[test]
fn every_changed_number_is_named_even_without_a_seal() {
    let scene = Scene::new("fedproj");
    let mut n_forged = 0;
    for file in ["metrics.jsonl", "summary.json", "manifest.json"] {
        let (mut all, mut value) = (Vec::new(), Value::Null);
        edit(&scene.unsealed(), file, |v| value = v.clone());
        leaves(&value, "", &mut all);
        // Nobody can repeat times, the program's version and the machine. Class counts have one leaf per client and class.
        let is_repeatable =
            |at: &String| !["seconds", "version", "hardware", "federated"].iter().any(|k| at.contains(k));
        let mut seen = std::collections::BTreeMap::<String, u32>::new();
        for at in all.into_iter().filter(is_repeatable) {
            let kind: String = at.chars().filter(|c| !c.is_ascii_digit()).collect();
            let n_alike = seen.entry(kind).or_default();
            *n_alike += 1;
            if *n_alike > 2 {
                continue;
            }
            let dir = scene.unsealed();
            edit(&dir, file, |v| {
                let leaf = v.pointer_mut(&at).unwrap();
                *leaf = other(leaf);
            });
            let key = at.split('/').rfind(|key| key.parse::<u32>().is_err() && !key.is_empty()).unwrap();
            let message = verified(&dir).expect_err(&at);
            assert!(message.contains(file) && message.contains(key), "{file}{at}: {message}");
            n_forged += 1;
        }
    }
    assert!(n_forged >= 60, "only {n_forged} values were forged");
}

#[test]
fn lines_and_files_cannot_be_dropped_added_or_exchanged() {
    let scene = Scene::new("fedavg");
    let is_found = |change: &dyn Fn(&Path), told: &str| {
        let dir = scene.unsealed();
        change(&dir);
        let message = verified(&dir).expect_err(told);
        assert!(message.contains(told), "{told}: {message}");
    };
    let lines = |dir: &Path, change: &dyn Fn(&mut Vec<Value>)| {
        edit(dir, "metrics.jsonl", |v| change(v.as_array_mut().unwrap()));
    };
    is_found(&|dir| lines(dir, &|l| drop(l.pop())), "2 lines, but the configuration has 3 rounds");
    is_found(&|dir| lines(dir, &|l| l.push(l[2].clone())), "4 lines, but the configuration has 3 rounds");
    is_found(&|dir| lines(dir, &|l| l.swap(0, 1)), "metrics.jsonl, round 0: ");
    is_found(&|dir| std::fs::remove_file(dir.join("manifest.json")).unwrap(), "manifest.json is missing");
    // The other clients' work would be another run: the seed draws them.
    let cohort = |l: &mut Vec<Value>| {
        let drawn = l[1]["cohort"].take();
        l[1]["cohort"] = if drawn == json!([0, 1, 2]) { json!([1, 2, 3]) } else { json!([0, 1, 2]) };
    };
    is_found(&|dir| lines(dir, &cohort), "metrics.jsonl, round 1: cohort");
    let model = |dir: &Path, at: fn(usize) -> usize| {
        let path = dir.join("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        let n = bytes.len();
        bytes[at(n)] ^= 1;
        std::fs::write(path, bytes).unwrap();
    };
    is_found(&|dir| model(dir, |n| n - 4), "the rerun gives");
    is_found(&|dir| model(dir, |_| 9), "model.safetensors");
    is_found(
        &|dir| std::fs::write(dir.join("model.safetensors"), [7; 4096]).unwrap(),
        "not a complete safetensors file",
    );
    let csv = |dir: &Path| {
        let text = std::fs::read_to_string(dir.join("metrics.csv")).unwrap();
        std::fs::write(dir.join("metrics.csv"), text.replacen("0.", "1.", 1)).unwrap();
    };
    is_found(&csv, "metrics.csv");
    let another = |dir: &Path| {
        let text = std::fs::read_to_string(dir.join("config.toml")).unwrap();
        std::fs::write(dir.join("config.toml"), text.replace("seed = 5", "seed = 6")).unwrap();
    };
    is_found(&another, "manifest.json: seed is 5, the rerun gives 6");
}

#[test]
fn forged_rounds_are_blamed_and_the_files_that_follow_from_the_true_ones_are_not() {
    let scene = Scene::new("fedavg");
    let truth = RunDir::finished(&scene.copy(), &scene.config).unwrap().unwrap().last;
    let dir = scene.unsealed();
    edit(&dir, "metrics.jsonl", |lines| lines[2]["accuracy"] = 0.99.into());
    let message = verified(&dir).unwrap_err();
    assert!(
        message.contains(&format!("metrics.jsonl, round 2: accuracy is 0.99, the rerun gives {truth}")),
        "{message}"
    );
    assert!(!message.contains("summary.json") && !message.contains("metrics.csv"), "{message}");
    edit(&dir, "summary.json", |summary| summary["last"] = 0.99.into());
    let message = verified(&dir).unwrap_err();
    assert!(message.contains(&format!("summary.json: last is 0.99, the rerun gives {truth}")), "{message}");
}

#[test]
fn a_number_that_earlier_versions_did_not_record_is_missing_in_all_rounds_or_in_none() {
    let scene = Scene::new("fedavg");
    let without = |rounds: std::ops::Range<usize>| {
        let dir = scene.unsealed();
        edit(&dir, "metrics.jsonl", |lines| {
            for line in &mut lines.as_array_mut().unwrap()[rounds] {
                drop(line.as_object_mut().unwrap().remove("forgetting_by_client").unwrap());
            }
        });
        verified(&dir)
    };
    assert!(without(1..2).unwrap_err().contains("metrics.jsonl, round 1: forgetting_by_client"));
    let notes = without(0..3).unwrap().notes;
    assert!(notes.iter().any(|note| note.contains("not compared: forgetting_by_client")), "{notes:?}");
}

#[test]
fn a_part_is_compared_with_the_lines_that_it_repeats() {
    let scene = Scene::new("fedavg");
    let dir = scene.copy();
    edit(&dir, "metrics.jsonl", |lines| lines[2]["accuracy"] = 0.99.into());
    let first = |n| verify(&dir, None, 2, VerifyPart { from_checkpoint: false, rounds: Some(n) }, &|_| ());
    let found = first(2).unwrap();
    assert_eq!((found.n_rounds, found.sealed), (2, false));
    assert!(found.notes.iter().any(|note| note.contains("metrics.jsonl has changed")), "{:?}", found.notes);
    assert!(first(3).unwrap_err().to_string().contains("metrics.jsonl, round 2: accuracy is 0.99"));
}

#[test]
fn a_run_that_resumes_is_not_sealed_until_it_finishes_again() {
    let scene = Scene::new("fedavg");
    let dir = scene.folder.path().join("true");
    let is_sealed = || Manifest::read(&dir).unwrap().unwrap().is_sealed();
    assert!(is_sealed());
    std::fs::remove_file(dir.join("summary.json")).unwrap();
    assert!(verified(&dir).unwrap_err().contains("summary.json is missing"));
    let run = Run::open(&dir, &scene.config, None, 2, true).unwrap();
    assert!(!is_sealed());
    run.finish().unwrap();
    assert!(is_sealed() && verified(&dir).unwrap().sealed);
}

#[test]
fn a_server_that_opens_a_finished_run_leaves_its_seal_whole() {
    let scene = Scene::new("fedavg");
    let dir = scene.folder.path().join("true");
    let manifest = Manifest::read(&dir).unwrap().unwrap();
    RunDir::open(&dir, &scene.config, &manifest, true).unwrap();
    assert!(StoredRun::open(&dir).is_ok() && verified(&dir).unwrap().sealed);
}
