//! `fedproj reproduce table1` and the ablations through the binary, on the embedded digits with a narrow network: what is
//! skipped, what goes on after Ctrl-C and `kill −9`, and what is refused before anything starts.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;

use command::{failure, fedproj, json, output, rounds, stdout};
use serde_json::Value;
use std::path::Path;

/// Turns the quick study of CIFAR-10 into one of milliseconds on embedded data.
const TINY: &[&str] = &[
    "data.private=digits",
    "data.public=split",
    "data.private_samples=0",
    "data.public_samples=0",
    "data.partition.clients=5",
    "model.name=mlp",
    "model.hidden=[16]",
    "local.epochs=1",
];

fn study<'a>(name: &'a str, out: &'a str, args: &[&'a str]) -> Vec<&'a str> {
    [&["reproduce", name, "--scale", "quick", "--out", out], args, TINY].concat()
}

fn names(table: &Value) -> Vec<&str> {
    table["rows"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect()
}

#[test]
fn a_study_makes_ordinary_runs_and_skips_those_that_are_done() {
    let folder = tempfile::tempdir().unwrap();
    let args = |seeds| {
        study(
            "table1",
            "out",
            &["--methods", "fedavg,fedproj", "--beta", "0.3,0.5", "--seeds", seeds, "federation.rounds=2"],
        )
    };
    let first = json(folder.path(), &args("1"));
    assert_eq!(first["tables"].as_array().unwrap().len(), 2);
    assert_eq!(names(&first["tables"][1]["table"]), ["FedAvg", "FedProj"]);
    let run = folder.path().join("out/beta0.5-fedproj-seed0");
    let before = std::fs::metadata(run.join("summary.json")).unwrap().modified().unwrap();

    let again = output(fedproj(folder.path(), &args("2")));
    let (text, told) = (String::from_utf8(again.stdout).unwrap(), String::from_utf8(again.stderr).unwrap());
    assert!(again.status.success(), "{told}");
    assert_eq!(told.matches("is already finished").count(), 4, "{told}");
    assert!(text.contains("β = 0.3") && text.contains("β = 0.5") && text.contains("FedProj"), "{text}");
    assert_eq!(std::fs::metadata(run.join("summary.json")).unwrap().modified().unwrap(), before);
    assert!(folder.path().join("out/beta0.5-fedproj-seed1/summary.json").exists());
    stdout(folder.path(), &["verify", "out/beta0.3-fedproj-seed1"]);

    // The same place for another study: said before anything starts.
    let changed = [args("2"), vec!["local.batch=16"]].concat();
    let (code, message) = failure(fedproj(folder.path(), &changed));
    assert_eq!(code, 2, "{message}");
    assert!(message.contains("another configuration") && message.contains("--out"), "{message}");
}

#[test]
fn ablations_vary_their_key() {
    let folder = tempfile::tempdir().unwrap();
    let common = ["--beta", "0.5", "--seeds", "1", "federation.rounds=2", "--quiet"];
    let dropout =
        json(folder.path(), &[study("projection-dropout", "dropout", &common), vec!["--rates", "0,1"]].concat());
    assert_eq!(names(&dropout["tables"][0]["table"]), ["FedProj, dropout 0.0", "FedProj, dropout 1.0"]);
    let rates: Vec<Value> = ["dropout/beta0.5-dropout0.0-seed0", "dropout/beta0.5-dropout1.0-seed0"]
        .map(|dir| rounds(&folder.path().join(dir))[1]["projection_rate"].clone())
        .into();
    assert!(rates[0].is_number() && rates[1].is_null(), "dropped clients do not look at the memory: {rates:?}");

    let lr = vec!["method.fedproj.distill.optimizer.lr=0.01"];
    let alpha = json(folder.path(), &[study("weight-divergence", "alpha", &common), lr].concat());
    assert_eq!(
        names(&alpha["tables"][0]["table"]),
        ["0.0", "0.1", "0.3", "0.5"].map(|alpha| format!("FedProj, alpha {alpha}"))
    );
    let hash = |dir: &str| rounds(&folder.path().join(dir))[1]["model_hash"].clone();
    assert_ne!(hash("alpha/beta0.5-alpha0.0-seed0"), hash("alpha/beta0.5-alpha0.5-seed0"), "the term is alive");
}

#[test]
fn what_makes_fedproj_work_is_a_study_of_its_parts() {
    let folder = tempfile::tempdir().unwrap();
    let parts =
        "feddyn,feddyn-averaged,fedproj,leading,leading-no-projection,leading-no-averaging,leading-no-correction";
    let choice = ["reproduce", "leading", "--dataset", "digits", "--beta", "0.1", "--methods", parts];
    let small = ["--quiet", "federation.rounds=2", "model.hidden=[16]", "local.epochs=1"];
    let result = json(folder.path(), &[&choice[..], &["--seeds", "1-2", "--out", "out"], &small].concat());
    assert_eq!(
        names(&result["tables"][0]["table"]),
        [
            "FedDyn, average_evaluated 0.0",
            "FedDyn, average_evaluated 0.7",
            "FedProj, preset clean",
            "FedProj, preset leading",
            "FedProj, mode off, preset leading",
            "FedProj, teacher 0.0, preset leading",
            "FedProj, alpha 0.0, preset leading"
        ]
    );
    let mut runs: Vec<String> = std::fs::read_dir(folder.path().join("out"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("beta0.1-"))
        .collect();
    runs.sort();
    let expected = parts.split(',').flat_map(|part| [1, 2].map(|seed| format!("beta0.1-{part}-seed{seed}")));
    let mut expected: Vec<String> = expected.collect();
    expected.sort();
    assert_eq!(runs, expected);
}

#[test]
fn what_cannot_work_is_said_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let check = |args: &[&str], code: i32, expected: &[&str]| {
        let (found, message) = failure(fedproj(folder.path(), &[&["reproduce"], args].concat()));
        assert_eq!(found, code, "{args:?}: {message}");
        for part in expected {
            assert!(message.contains(part), "{args:?}: no `{part}` in: {message}");
        }
        assert!(!folder.path().join("runs").exists(), "{args:?} began");
    };
    check(
        &["table1", "--scale", "quick"],
        1,
        &["`cifar10`", "cifar-10-binary.tar.gz", "`cifar100`", "cifar-100-binary"],
    );
    check(&["table1", "--methods", "fedavg"], 1, &["`cifar10`"]);
    check(&["weight-divergence", "--dataset", "cifar100"], 1, &["`cifar100`", "`tinyimagenet32`"]);
    check(&["table1", "--dataset", "cinic10"], 1, &["CINIC-10.tar.gz"]);
    check(&["table1", "--dataset", "cifar-10"], 2, &["did you mean `cifar10`?"]);
    check(&["table1", "--methods", "fedavg,fedprojj"], 2, &["did you mean `fedproj`?"]);
    check(&["table1", "--scale", "quik"], 2, &["quick"]);
    check(&["table1", "--preset", "papr"], 2, &["paper"]);
    check(&["table1", "--beta=-1"], 2, &["beta"]);
    check(&["table1", "--beta=0"], 2, &["beta"]);
    check(&["table1", "--seeds", "0"], 2, &["--seeds"]);
    check(&["table1", "--seeds", "4-3"], 2, &["--seeds", "a range such as 3-4"]);
    check(&["leading", "--methods", "leading,leding"], 2, &["--methods leding", "did you mean `leading`?"]);
    check(&["projection-dropout", "--rates", "0,1.5"], 2, &["projection.dropout"]);
    check(&["weight-divergence", "--alphas", "many"], 2, &["--alphas"]);
    check(&["table1", "seed=3"], 2, &["--seeds"]);
    check(&["table1", "method.name=fedavg"], 2, &["--methods"]);
    check(&["table1", "federation.round=3"], 2, &["did you mean `federation.rounds`?"]);
    check(&["table1", "data.partition.kind=quantity"], 2, &["Dirichlet"]);
}

#[cfg(unix)]
mod signals {
    use super::*;
    use std::io::{BufRead, BufReader, Read};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command, Stdio};
    use std::time::Duration;

    fn spawn(folder: &Path, args: &[&str]) -> Child {
        fedproj(folder, args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn signal(child: &Child, name: &str) {
        assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
    }

    /// Waits until `ready`, while the child lives.
    fn wait_until(child: &mut Child, ready: impl Fn() -> bool) {
        while !ready() {
            assert!(child.try_wait().unwrap().is_none(), "the run ended before anyone could stop it");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn n_rounds(dir: &Path) -> usize {
        std::fs::read_to_string(dir.join("metrics.jsonl")).map_or(0, |text| text.lines().count())
    }

    /// Stops a command by a signal once `dir` has some rounds, follows its advice, and returns what it said. The signal comes
    /// twice, as `timeout` sends it.
    fn stop_and_follow(folder: &Path, args: &[&str], dir: &Path, name: &str) -> String {
        let mut child = spawn(folder, args);
        wait_until(&mut child, || n_rounds(dir) >= 3);
        let twice = format!("kill {name} {0}; kill {name} {0} 2>&1 || true", child.id());
        assert!(Command::new("sh").args(["-c", &twice]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(130), "{told}");
        let go_on = told.lines().find_map(|line| line.strip_prefix("to resume: ")).unwrap_or_else(|| panic!("{told}"));
        let mut shell = Command::new("sh");
        shell.args(["-c", go_on]).current_dir(folder).env_remove("FEDPROJ_DATA").stdout(Stdio::null());
        let followed = shell.output().unwrap();
        assert!(followed.status.success(), "{go_on}: {}", String::from_utf8_lossy(&followed.stderr));
        told
    }

    #[test]
    fn a_run_stopped_by_ctrl_c_says_how_to_go_on_and_loses_nothing() {
        let folder = tempfile::tempdir().unwrap();
        // Checkpoints far apart: a stop must write one of its own.
        let args = |out| {
            let fixed =
                ["model.hidden=[16]", "local.epochs=1", "federation.rounds=300", "federation.checkpoint_every=1000"];
            [&["run", "--out", out], &fixed[..]].concat()
        };
        stdout(folder.path(), &args("undisturbed"));
        let dir = folder.path().join("o'stopped run");
        let told = stop_and_follow(folder.path(), &args("o'stopped run"), &dir, "-INT");
        assert!(told.contains("--resume") && told.contains("nothing is lost"), "{told}");
        assert_eq!(rounds(&dir), rounds(&folder.path().join("undisturbed")));
        let model = |dir: &Path| std::fs::read(dir.join("model.safetensors")).unwrap();
        assert!(model(&dir) == model(&folder.path().join("undisturbed")));
    }

    #[test]
    fn a_study_goes_on_after_ctrl_c_and_after_a_kill() {
        let folder = tempfile::tempdir().unwrap();
        let args = |out| {
            let common = ["--methods", "fedavg,scaffold", "--beta", "0.5", "--seeds", "1", "--threads", "2"];
            let long = ["federation.rounds=200", "local.optimizer={kind='sgd', lr=0.05}"];
            study("table1", out, &[&common[..], &long].concat())
        };
        stdout(folder.path(), &args("undisturbed"));

        let first = folder.path().join("out/beta0.5-fedavg-seed0");
        let second = folder.path().join("out/beta0.5-scaffold-seed0");
        let mut child = spawn(folder.path(), &args("out"));
        wait_until(&mut child, || n_rounds(&first) >= 3);
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        stop_and_follow(folder.path(), &args("out"), &second, "-TERM");
        for run in ["beta0.5-fedavg-seed0", "beta0.5-scaffold-seed0"] {
            assert_eq!(
                rounds(&folder.path().join("out").join(run)),
                rounds(&folder.path().join("undisturbed").join(run)),
                "{run}"
            );
        }
    }

    #[test]
    fn a_second_ctrl_c_ends_the_program_at_once() {
        let folder = tempfile::tempdir().unwrap();
        // A round that nobody will see the end of.
        let mut child = spawn(folder.path(), &["run", "--out", "endless", "local.epochs=4000000000"]);
        wait_until(&mut child, || folder.path().join("endless/metrics.jsonl").exists());
        signal(&child, "-INT");
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut told = String::new();
        while !told.contains("Ctrl-C again") {
            assert_ne!(lines.read_line(&mut told).unwrap(), 0, "{told}");
        }
        std::thread::sleep(Duration::from_millis(400)); // two signals at once count as one
        signal(&child, "-INT");
        assert_eq!(child.wait().unwrap().code(), Some(130));
        lines.read_to_string(&mut told).unwrap();
        assert!(told.contains("to resume: ") && told.contains("--resume"), "{told}");
    }
}
