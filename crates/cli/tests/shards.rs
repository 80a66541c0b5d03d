//! Several processes share the runs of a sweep: each run is made once, by whichever launcher the processes were started.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const PLAN: &str = "seeds = 2\n[sweep]\n'method.name' = ['fedavg', 'feddyn', 'fedproj']\n[federation]\nrounds = 2\n\
                    [local]\nepochs = 1\n[model]\nhidden = [8]\n";

fn program() -> &'static str {
    env!("CARGO_BIN_EXE_fedproj")
}

/// A folder with the plan.
fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("plan.toml"), PLAN).unwrap();
    let out = folder.path().join("runs");
    (folder, out)
}

fn fedproj(folder: &Path, args: &[&str], variables: &[(&str, &str)]) -> (bool, String, String) {
    let mut command = Command::new(program());
    command.args(args).current_dir(folder).envs(variables.iter().copied());
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

/// What Slurm tells a task of `sbatch --array=0-3`.
fn array(id: &str) -> [(&str, &str); 5] {
    [
        ("SLURM_ARRAY_TASK_ID", id),
        ("SLURM_ARRAY_TASK_MIN", "0"),
        ("SLURM_ARRAY_TASK_MAX", "3"),
        ("SLURM_ARRAY_TASK_COUNT", "4"),
        ("SLURM_ARRAY_TASK_STEP", "1"),
    ]
}

fn names(out: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(out).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The models of all runs of the sweep, made by one process.
fn models(out: &Path) -> Vec<Vec<u8>> {
    names(out).iter().map(|name| fs::read(out.join(name).join("model.safetensors")).unwrap()).collect()
}

fn made_alone() -> Vec<Vec<u8>> {
    let (folder, out) = folder();
    let (ok, _, told) = fedproj(folder.path(), &["run", "plan.toml", "--out", "runs", "--quiet"], &[]);
    assert!(ok, "{told}");
    models(&out)
}

#[test]
fn the_tasks_of_a_slurm_array_make_every_run_once() {
    let (folder, out) = folder();
    let task = |id: &str, args: &[&str]| {
        fedproj(folder.path(), &[&["run", "plan.toml", "--out", "runs"], args].concat(), &array(id))
    };
    let (ok, _, told) = task("1", &[]);
    assert!(ok && told.contains("shard 2/4: 2 of 6 runs"), "{told}");
    assert_eq!(names(&out), ["fedavg-seed1", "fedproj-seed1"]);
    let status = |args: &[&str]| fedproj(folder.path(), &[&["status"], args].concat(), &[]).1;
    let shown = status(&["plan.toml", "--out", "runs"]);
    assert!(shown.contains("2 of 6 runs are finished, 0 are being made"), "{shown}");
    assert!(shown.lines().any(|line| line.starts_with("feddyn-seed0") && line.contains("waiting")), "{shown}");
    let by = fs::read_to_string(out.join("fedavg-seed1/.lock")).unwrap();
    assert!(by.contains("process") && shown.contains(&by), "{by}: {shown}");
    // The directory alone shows what was begun there.
    assert!(status(&["--out", "runs"]).contains("2 of 2 runs are finished"));
    for id in ["0", "2"] {
        assert!(task(id, &["--quiet"]).0);
    }
    // The template is a program that users run.
    let template = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/slurm.sh");
    let mut command = Command::new("bash");
    command.arg(template).args(["plan.toml", "runs"]).current_dir(folder.path());
    command.envs(array("3")).envs([("FEDPROJ", program()), ("SLURM_CPUS_PER_TASK", "2")]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let status = command::json(folder.path(), &["status", "plan.toml", "--out", "runs"]);
    let runs = status["runs"].as_array().unwrap();
    assert!(runs.len() == 6 && runs.iter().all(|run| run["state"] == "finished" && run["n_rounds_done"] == 2));
    assert_eq!(models(&out), made_alone());
    let (ok, _, told) = fedproj(folder.path(), &["run", "plan.toml", "--shard", "3/2"], &[]);
    assert!(!ok && told.contains("from 1 to 2"), "{told}");
}

#[test]
fn a_run_that_another_process_makes_is_left_to_it() {
    let (folder, out) = folder();
    let held = out.join("fedavg-seed0");
    fs::create_dir_all(&held).unwrap();
    let lock = fs::File::create(held.join(".lock")).unwrap();
    lock.lock().unwrap();
    let run = ["run", "plan.toml", "--out", "runs", "--shard", "1/3"];
    let (ok, _, told) = fedproj(folder.path(), &run, &[]);
    assert!(ok && told.contains("is being made by another process"), "{told}");
    assert!(out.join("feddyn-seed1/summary.json").exists() && !held.join("summary.json").exists());
    // Alone, the same is an error: nobody else was announced.
    let (ok, _, told) = fedproj(folder.path(), &["run", "plan.toml", "--out", "runs", "--shard", "none"], &[]);
    assert!(!ok && told.contains("in use by another process"), "{told}");
    drop(lock);
    assert!(fedproj(folder.path(), &run, &[]).0 && held.join("summary.json").exists());
}

#[test]
fn the_last_shard_of_a_study_writes_its_report() {
    let (folder, out) = folder();
    let study = |shard: &str| {
        let args = ["reproduce", "leading", "--dataset", "digits", "--scale", "quick", "--seeds", "1", "--beta", "0.3"];
        let own = ["--methods", "fedavg,fedprox", "--out", "runs", "federation.rounds=2", "local.epochs=1"];
        fedproj(folder.path(), &[&args[..], &own, &["--shard", shard]].concat(), &[])
    };
    let (ok, shown, told) = study("2/2");
    assert!(ok && told.contains("the last one writes tables"), "{told}");
    assert!(!shown.contains("report") && !out.join("report").exists());
    let (ok, shown, told) = study("1/2");
    assert!(ok && shown.contains("report"), "{shown}{told}");
    assert!(out.join("report").exists());
}

/// The template is a program that users run.
#[cfg(unix)]
#[test]
fn gnu_parallel_makes_a_plan_where_it_is_installed() {
    let is_gnu = |output: std::process::Output| String::from_utf8_lossy(&output.stdout).contains("GNU parallel");
    if !Command::new("parallel").arg("--version").output().is_ok_and(is_gnu) {
        eprintln!("skipped: GNU parallel is not installed");
        return;
    }
    let (folder, out) = folder();
    let template = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/parallel.sh");
    let mut command = Command::new(template);
    command.args(["3", "plan.toml", "runs"]).current_dir(folder.path()).env("FEDPROJ", program());
    let output = command.output().unwrap();
    let (shown, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && shown.contains("6 of 6 runs are finished"), "{shown}{told}");
    assert_eq!(models(&out), made_alone());
}
