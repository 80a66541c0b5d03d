//! `kill −9` at any moment costs only time: SIGKILL ends a run twenty times, at moments drawn from a seed; then it runs to its
//! end. Every record must equal that of an undisturbed run.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]
#![cfg(unix)]

mod command;

use command::{fedproj, rounds, run};
use fedproj_rng::{Purpose, Stream};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

const N_KILLS: u32 = 20;

fn check(settings: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let settings = [settings, &["federation.rounds=80", "model.hidden=[32]", "local.epochs=2"]].concat();
    let start = Instant::now();
    let reference = run(folder.path(), "undisturbed", &settings);
    let whole = start.elapsed();
    let expected = rounds(&folder.path().join("undisturbed"));
    assert_eq!(expected.len(), 80);

    let (mut n_killed, mut n_directories, mut n_rounds_seen) = (0, 0, std::collections::BTreeSet::new());
    while n_killed < N_KILLS {
        // A run that finished before its kill is done; the next one starts from the beginning.
        n_directories += 1;
        assert!(n_directories <= N_KILLS, "runs end before anyone can kill them");
        let out = format!("killed{n_directories}");
        let dir = folder.path().join(&out);
        while n_killed < N_KILLS && kill_once(folder.path(), &out, &settings, n_killed, whole) {
            n_killed += 1;
            n_rounds_seen.insert(std::fs::read_to_string(dir.join("metrics.jsonl")).map_or(0, |t| t.lines().count()));
        }
        let outcome = run(folder.path(), &out, &settings);
        assert_eq!(outcome["model_hash"], reference["model_hash"], "{settings:?}, after {n_killed} kills");
        assert_eq!(rounds(&dir), expected, "{settings:?}, after {n_killed} kills");
        for file in ["config.toml", "manifest.json", "metrics.csv", "model.safetensors", "summary.json"] {
            assert!(dir.join(file).exists(), "{out}/{file} is missing after {n_killed} kills");
        }
    }
    assert!(n_rounds_seen.len() >= 5, "the kills fell into few rounds: {n_rounds_seen:?}");
}

/// Starts or resumes a run and kills it; returns whether it was still alive.
fn kill_once(folder: &Path, out: &str, settings: &[&str], id: u32, whole: Duration) -> bool {
    let args = [&["run", "--out", out, "--resume", "--quiet"], command::SMALL, settings].concat();
    let mut child = fedproj(folder, &args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // Up to a third of a run: a few directories see all twenty kills, from start to end.
    let share = Stream::new(1, Purpose::Synthetic, [id, 0, 0]).uniform() / 3.0;
    std::thread::sleep(whole.mul_f64(share));
    child.kill().unwrap();
    let status = child.wait().unwrap();
    assert!(status.success() || status.signal() == Some(9), "before it could be killed, the run ended with {status}");
    !status.success()
}

#[test]
fn fedproj_survives_twenty_kills() {
    check(&["method.name=fedproj"]);
}

#[test]
fn scaffold_survives_twenty_kills() {
    check(&["method.name=scaffold", "local.optimizer={kind='sgd', lr=0.05}"]);
}

#[test]
fn checkpoints_further_apart_survive_too() {
    check(&["method.name=moon", "method.moon.head=16", "federation.checkpoint_every=7"]);
}
