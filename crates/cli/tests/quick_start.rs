//! The quick start of docs/deploy.md is run as it is printed, one terminal per block. Only the ports are other ones.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What a person types into each terminal.
fn terminals(page: &str) -> Vec<String> {
    let blocks = page.split("```sh terminal\n").skip(1);
    blocks.map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

fn start(folder: &Path, script: &str) -> Child {
    let program = Path::new(env!("CARGO_BIN_EXE_fedproj")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-e", "-c", script]).current_dir(folder).env("PATH", path).env_remove("FEDPROJ_DATA");
    shell.stdin(Stdio::null()).spawn().unwrap()
}

#[test]
fn the_quick_start_reaches_its_last_round() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/deploy.md");
    let mut page = std::fs::read_to_string(page).unwrap();
    // All are bound before any is given back, so that they differ.
    let free: Vec<_> = (0..3).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    for (printed, free) in ["7443", "7444", "7445"].iter().zip(&free) {
        assert!(page.contains(printed));
        page = page.replace(printed, &free.local_addr().unwrap().port().to_string());
    }
    drop(free);
    let folder = tempfile::tempdir().unwrap();
    let scripts = terminals(&page);
    assert_eq!(scripts.len(), 3, "a server and two nodes");
    // A person opens the next terminal when the server has said that it listens.
    let mut running = vec![start(folder.path(), &scripts[0])];
    let started = Instant::now();
    let in_time = || assert!(started.elapsed() < Duration::from_mins(5), "the quick start hangs");
    while !folder.path().join("federation/addresses.json").exists() {
        in_time();
        std::thread::sleep(Duration::from_millis(50));
    }
    running.extend(scripts[1..].iter().map(|script| start(folder.path(), script)));
    for terminal in &mut running {
        let status = loop {
            if let Some(status) = terminal.try_wait().unwrap() {
                break status;
            }
            in_time();
            std::thread::sleep(Duration::from_millis(50));
        };
        assert!(status.success(), "{status}");
    }
    let journal = command::stdout(folder.path(), &["audit"]);
    assert_eq!(journal.matches("\"round_done\"").count(), 5, "{journal}");
}
