//! `fedproj selftest`: its verdicts on the CPU, and its message without a GPU.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;

use serde_json::Value;
use std::path::Path;

fn status<'a>(outcomes: &'a Value, group: &str) -> &'a str {
    let found = outcomes.as_array().unwrap().iter().find(|o| o["group"] == group);
    found.unwrap_or_else(|| panic!("no group {group}"))["status"].as_str().unwrap()
}

/// `cargo test -p fedproj-conformance` runs the other groups.
#[test]
fn the_cpu_passes_the_traces_and_skips_what_needs_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures");
    let run = |group| {
        let args = ["selftest", "--device", "cpu", "--only", group, "--fixtures", fixtures];
        command::json(folder.path(), &args)
    };
    assert_eq!(status(&run("traces"), "traces"), "ok");
    assert_eq!(status(&run("precisions"), "precisions"), "skipped");
}

#[test]
fn golden_numbers_are_skipped_where_there_are_none() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["selftest", "--device", "cpu", "--only", "traces"];
    assert_eq!(status(&command::json(folder.path(), &args), "traces"), "skipped");
    let text = command::stdout(folder.path(), &args);
    assert!(text.contains("skipped") && text.contains("--fixtures"), "{text}");
}

#[test]
fn a_folder_of_fixtures_that_is_not_there_is_a_wrong_request() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["selftest", "--device", "cpu", "--only", "layers", "--fixtures", "nowhere"];
    let output = command::output(command::fedproj(folder.path(), &args));
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("there is no folder `nowhere`"), "{told}");
}

#[test]
fn a_group_that_is_not_there_is_a_wrong_request() {
    let folder = tempfile::tempdir().unwrap();
    let (code, told) =
        command::failure(command::fedproj(folder.path(), &["selftest", "--device", "cpu", "--only", "trace5"]));
    assert!(code == 2 && told.contains("--only trace5: no group's name contains it; groups: layers, "), "{told}");
}

#[test]
fn a_wrong_golden_number_fails_its_group_and_the_command() {
    let folder = tempfile::tempdir().unwrap();
    let from = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/methods/methods.safetensors");
    let mut bytes = std::fs::read(from).unwrap();
    // The numbers follow a header whose length stands first.
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let at = 8 + header_len + header["fedavg/round2/fc1.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&7.0f32.to_le_bytes());
    std::fs::create_dir(folder.path().join("methods")).unwrap();
    std::fs::write(folder.path().join("methods/methods.safetensors"), bytes).unwrap();
    for other in ["fedmd", "related"] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../fixtures/{other}/{other}.safetensors"));
        std::fs::create_dir(folder.path().join(other)).unwrap();
        std::fs::copy(from, folder.path().join(format!("{other}/{other}.safetensors"))).unwrap();
    }
    let args = ["selftest", "--device", "cpu", "--only", "traces", "--fixtures", "."];
    let output = command::output(command::fedproj(folder.path(), &args));
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stdout.contains("FAILED") && stdout.contains("fedavg, round 2: fc1.weight"), "{stdout}");
    assert!(stderr.contains("1 of 1 groups failed"), "{stderr}");
}

#[test]
fn without_a_gpu_the_message_names_what_is_missing() {
    let Some(missing) = fedproj_nn::cuda::Probe::new().missing() else {
        eprintln!("skipped: there is a GPU");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let (code, message) = command::failure(command::fedproj(folder.path(), &["selftest", "--device", "cuda"]));
    assert_eq!(code, 1);
    assert!(message.contains(&missing), "{message}");
}
