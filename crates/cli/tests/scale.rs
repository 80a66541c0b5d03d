//! Memory grows with the clients per round, not with the registered clients.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]
#![cfg(target_os = "linux")]

mod command;

use command::fedproj;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

/// Peak memory in MiB of a run of virtual clients with a cohort of ten.
fn peak_mib(folder: &Path, n_clients: u32, method: &[&str]) -> f64 {
    let partition = format!("data.partition={{kind='virtual', clients={n_clients}, samples=5}}");
    let fraction = format!("federation.fraction={}", 10.0 / f64::from(n_clients));
    let out = format!("{n_clients}-{}", method[0]);
    let args = [
        &["run", "--quiet", "--out", &out, &partition, &fraction, "model.hidden=[16]", "federation.rounds=20"],
        method,
    ]
    .concat();
    let mut child = fedproj(folder, &args).stdout(Stdio::null()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak_kib = 0.0f64;
    // The high-water mark never falls, so the last reading counts.
    let result = loop {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let mark = text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
        peak_kib = peak_kib.max(mark.map_or(0.0, |kib| kib.trim().parse().unwrap()));
        if let Some(result) = child.try_wait().unwrap() {
            break result;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(result.success(), "{args:?}: {result}");
    assert!(peak_kib > 0.0, "the run ended before anyone could look");
    let records = command::rounds(&folder.join(&out));
    assert!(!records.is_empty() && records.iter().all(|r| r["cohort"].as_array().unwrap().len() == 10));
    peak_kib / 1024.0
}

#[test]
fn a_million_clients_take_the_memory_of_a_thousand() {
    let folder = tempfile::tempdir().unwrap();
    let scaffold = ["method.name=scaffold", "local.optimizer={kind='sgd', lr=0.05}"];
    for method in [&["method.name=fedavg"][..], &scaffold] {
        let (thousand, million) = (peak_mib(folder.path(), 1_000, method), peak_mib(folder.path(), 1_000_000, method));
        assert!(million < 1024.0, "{method:?}: a million clients take {million} MiB");
        // Slack for the allocator, and for SCAFFOLD's state of a few more distinct clients.
        assert!(million < thousand + 32.0, "{method:?}: {million} MiB, with a thousand clients {thousand} MiB");
    }
}
