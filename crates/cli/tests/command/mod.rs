//! The real binary, run in a folder of its own.

#![allow(dead_code, reason = "not every test file uses every helper")]
#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A federation of a few milliseconds a round: digits, ten clients of which five take part, a narrow MLP.
pub const SMALL: &[&str] = &["model.hidden=[16]", "local.epochs=1", "federation.rounds=3"];

/// `fedproj` with arguments, to be run in `folder`, seeing no data directory but the one it is told.
pub fn fedproj(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fedproj"));
    command.args(args).current_dir(folder).env_remove("FEDPROJ_DATA").stdin(Stdio::null());
    command
}

/// Runs to the end, which must not be a panic.
pub fn output(mut command: Command) -> Output {
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!stderr.contains("panicked"), "{command:?}: {stderr}");
    output
}

/// What a command prints when it succeeds.
pub fn stdout(folder: &Path, args: &[&str]) -> String {
    let output = output(fedproj(folder, args));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "fedproj {args:?}: {}\n{stderr}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// The JSON value on the last line of a command that succeeds.
pub fn json(folder: &Path, args: &[&str]) -> Value {
    let text = stdout(folder, &[args, &["--json"]].concat());
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

/// `fedproj run --json` of a small federation into the directory `out`.
pub fn run(folder: &Path, out: &str, settings: &[&str]) -> Value {
    json(folder, &[&["run", "--out", out, "--resume"], SMALL, settings].concat())
}

/// Exit code and message of a command that must fail.
pub fn failure(command: Command) -> (i32, String) {
    let told = format!("{command:?}");
    let output = output(command);
    assert!(!output.status.success(), "{told} succeeded");
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The rounds in `metrics.jsonl`, without what a clock decides.
pub fn rounds(dir: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    let parse = |line: &str| {
        let mut record: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        record.as_object_mut().unwrap().remove("seconds").unwrap();
        record
    };
    text.lines().map(parse).collect()
}
