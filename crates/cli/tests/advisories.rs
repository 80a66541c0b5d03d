//! `.ci/advisories` checks dependencies where the database of advisories is found, and says so where it is not.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

/// Runs the script with a `cargo` that prints its arguments and fails with this code on `deny check`.
fn check(home: &Path, has_deny: bool, code: u8) -> Output {
    let cargo = home.join("cargo");
    let version = if has_deny { "exit 0" } else { "exit 101" };
    let script = format!("#!/bin/sh\ncase \"$*\" in *--version) {version};; esac\necho \"cargo $*\"; exit {code}\n");
    std::fs::write(&cargo, script).unwrap();
    std::fs::set_permissions(&cargo, PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", home.display(), std::env::var("PATH").unwrap());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.ci/advisories");
    Command::new(script).env("CARGO_HOME", home).env("PATH", path).output().unwrap()
}

#[test]
fn advisories_are_checked_where_their_database_is_found_and_else_skipped_with_a_message() {
    let home = tempfile::tempdir().unwrap();
    let told = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();
    let without = check(home.path(), true, 1);
    assert!(without.status.success() && told(&without).contains("skipped: no advisory database"), "{without:?}");
    std::fs::create_dir_all(home.path().join("advisory-dbs/advisory-db-1")).unwrap();
    let found = check(home.path(), true, 0);
    assert!(
        found.status.success() && told(&found).contains("cargo deny check --disable-fetch advisories"),
        "{found:?}"
    );
    assert!(!check(home.path(), true, 1).status.success(), "a weakness ends the run");
    let missing = check(home.path(), false, 1);
    assert!(missing.status.success() && told(&missing).contains("skipped: cargo deny"), "{missing:?}");
}
