//! `fedproj doctor`: it tells what is there, and fails on no machine.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;

#[test]
fn findings_are_those_of_this_machine() {
    let folder = tempfile::tempdir().unwrap();
    let found = command::json(folder.path(), &["doctor"]);
    assert_eq!(found["version"], env!("CARGO_PKG_VERSION"));
    assert!(found["threads"].as_u64().unwrap() >= 1);
    let probe = fedproj_nn::cuda::Probe::new();
    assert_eq!(found["cuda"]["driver"], probe.driver);
    assert_eq!(found["cuda"]["nvrtc"], probe.compiler);
    assert_eq!(found["cuda"]["gpus"].as_array().unwrap().len(), probe.gpus.len());
    assert_eq!(found["cuda"]["missing"].as_str().map(str::to_owned), probe.missing());
}

#[test]
fn data_sets_are_found_where_they_lie() {
    let folder = tempfile::tempdir().unwrap();
    let state = |args: &[&str], name: &str| {
        let found = command::json(folder.path(), args);
        let sets = found["data_sets"].as_array().unwrap().clone();
        sets.into_iter().find(|set| set["name"] == name).unwrap()["state"].clone()
    };
    assert_eq!(state(&["doctor"], "digits"), "embedded");
    assert_eq!(state(&["doctor", "--data-dir", "."], "mnist"), "missing");
    let text = command::stdout(folder.path(), &["doctor"]);
    for what in ["libcuda", "libnvrtc", "threads", "digits"] {
        assert!(text.contains(what), "{what}: {text}");
    }
}
