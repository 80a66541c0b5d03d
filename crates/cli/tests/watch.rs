//! `fedproj watch`: a page that follows a run while it is made, and shows everything as text.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;
mod page;

use command::{failure, fedproj, run};
use page::{Served, next_event};
use std::fs;
use std::io::{Read, Write};
use std::path::Path;

/// A run that has done two of three rounds, and its third line.
fn unfinished(folder: &Path, name: &str) -> String {
    run(folder, name, &[]);
    let dir = folder.join(name);
    fs::rename(dir.join("summary.json"), dir.join("later")).unwrap();
    let metrics = fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    let lines: Vec<&str> = metrics.lines().collect();
    fs::write(dir.join("metrics.jsonl"), format!("{}\n{}\n", lines[0], lines[1])).unwrap();
    format!("{}\n", lines[2])
}

#[test]
fn the_page_follows_a_run_to_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let name = "<img src=x>";
    let third = unfinished(folder, name);
    // The folder above shows the run that was written last.
    let watch = Served::start(folder, &["watch", "."]);
    let page = watch.get("/");
    for words in ["FedProj on digits, seed 0", "Round 3 of 3", "accuracy, %", "&lt;img src=x&gt;", ">training<"] {
        assert!(page.contains(words), "{words} in {page}");
    }
    assert!(!page.contains("<img") && page.contains("script-src 'self'"), "{page}");
    assert_eq!(page.matches("<td class=\"name\">training</td>").count(), 5, "half of the clients train");
    let mut events = watch.request("/events", "127.0.0.1");
    assert!(next_event(&mut events).contains("Round 3 of 3"));
    let dir = folder.join(name);
    let mut metrics = fs::OpenOptions::new().append(true).open(dir.join("metrics.jsonl")).unwrap();
    // Half a line is no round yet.
    metrics.write_all(&third.as_bytes()[..50]).unwrap();
    assert!(Served::start(folder, &["watch", "."]).get("/").contains("Round 3 of 3"));
    metrics.write_all(&third.as_bytes()[50..]).unwrap();
    fs::rename(dir.join("later"), dir.join("summary.json")).unwrap();
    while !next_event(&mut events).contains("All 3 rounds are done") {}
    let mut rest = String::new();
    events.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("event: end"), "{rest}");
}

#[test]
fn strangers_see_nothing_and_bad_input_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let check = |args: &[&str], words: &str| {
        let (code, message) = failure(fedproj(folder, &[&["watch"], args].concat()));
        assert!(code == 2 && message.contains(words), "{code} {message}");
    };
    check(&["nowhere"], "no directory");
    fs::create_dir(folder.join("empty")).unwrap();
    check(&["empty"], "holds no run");
    run(folder, "run", &[]);
    check(&["run", "--listen", "0.0.0.0:0"], "has no password");
    // A page of another site whose name leads here.
    let watch = Served::start(folder, &["watch", "run"]);
    let mut answer = String::new();
    watch.request("/", "evil.example").read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 421") && !answer.contains("digits"), "{answer}");
    assert!(watch.get("/").contains("All 3 rounds are done"));
}
