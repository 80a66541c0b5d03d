//! Certificates are renewed and the authority is replaced while a run goes on, and no client loses its state.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;
mod federate;

use command::{failure, fedproj, stdout};
use federate::Federation;

/// FedDyn keeps state on its nodes: if one were lost, the model would differ from the simulator's.
const SETTINGS: [&str; 2] = ["method.name=feddyn", "server.quorum=1.0"];

#[test]
fn a_certificate_that_expires_soon_is_renewed_and_the_client_keeps_its_state() {
    let mut federation =
        Federation::new(&[&SETTINGS[..], &["federation.rounds=12", "data.partition={kind='iid', clients=2}"]].concat());
    federation.start_server();
    federation.enrol_and_start(0..2);
    federation.wait_for_log("round done");
    federation.kill_node(0);
    // An hour is left.
    let soon = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() + 3600;
    let nodes = std::fs::read_dir(federation.server_dir().join("nodes")).unwrap();
    let paths: Vec<_> = nodes.map(|entry| entry.unwrap().path()).collect();
    let of_first = paths.iter().find(|path| std::fs::read_to_string(path).unwrap().contains("node-0")).unwrap();
    let is_expiry = |line: &&str| line.starts_with("expires = ");
    let text = std::fs::read_to_string(of_first).unwrap();
    let expires = text.lines().find(is_expiry).unwrap();
    std::fs::write(of_first, text.replace(expires, &format!("expires = {soon}"))).unwrap();
    let key = std::fs::read(federation.path().join("node-0/key.pem")).unwrap();
    federation.start_node(0);
    federation.wait_for_log("\"is_renewed\":true");
    assert_eq!(federation.outcome()["model_hash"], federation.simulated_hash());
    let renewed: Vec<_> = federation.journal().into_iter().filter(|e| e["event"] == "renewed").collect();
    assert_eq!((renewed.len(), &renewed[0]["node"]), (1, &"node-0".into()));
    assert!(of_first.ends_with(format!("{}.toml", renewed[0]["replaces"].as_str().unwrap())));
    // The old certificate is out since the new one was used, and the key is another one.
    assert!(!of_first.exists());
    let pair = std::fs::read_to_string(federation.path().join("node-0/renewed.pem")).unwrap();
    assert!(!pair.contains(std::str::from_utf8(&key).unwrap()));
    assert_eq!(stdout(federation.path(), &["nodes"]).lines().count(), 2);
}

#[test]
fn the_authority_is_replaced_during_a_run_and_no_client_loses_its_state() {
    let mut federation =
        Federation::new(&[&SETTINGS[..], &["federation.rounds=40", "data.partition={kind='iid', clients=3}"]].concat());
    federation.start_server();
    federation.enrol_and_start(0..3);
    federation.wait_for_log("round done");
    // Without its third node the run waits, so that there is time to renew.
    federation.kill_node(2);
    let (code, error) = failure(fedproj(federation.path(), &["nodes", "rotate-ca"]));
    assert!(code == 1 && error.contains("in use by another server"), "{error}");
    federation.kill_server();
    let old = std::fs::read(federation.server_dir().join("ca.pem")).unwrap();
    stdout(federation.path(), &["nodes", "rotate-ca"]);
    federation.start_server();
    // A certificate is replaced when it was renewed and the new one was used.
    let n_renewed = |f: &Federation| f.server_log().matches("\"is_renewed\":true").count();
    let n_certificates = |f: &Federation| stdout(f.path(), &["nodes"]).lines().count();
    let all_use = |f: &Federation, n: usize| (n_renewed(f) == n && n_certificates(f) == 3).then_some(());
    federation.wait_for("two renewals", |f| all_use(f, 2));
    federation.kill_server();
    let (code, error) = failure(fedproj(federation.path(), &["nodes", "rotate-ca", "--finish"]));
    assert!(code == 2 && error.contains("not yet renewed: node-2"), "{error}");
    federation.start_server();
    federation.start_node(2);
    federation.wait_for("the third renewal", |f| all_use(f, 3));
    federation.kill_server();
    stdout(federation.path(), &["nodes", "rotate-ca", "--finish"]);
    assert_ne!(std::fs::read(federation.server_dir().join("ca.pem")).unwrap(), old);
    federation.start_server();
    assert_eq!(federation.outcome()["model_hash"], federation.simulated_hash());
    let runs = std::fs::read_dir(federation.server_dir().join("runs")).unwrap().count();
    assert_eq!(runs, 1, "the run has kept its name");
    let rotations = federation.journal().into_iter().filter(|e| e["event"] == "authority_rotated");
    assert!(
        rotations
            .map(|e| (e["finished"].clone(), e["operator"].is_string()))
            .eq([(false.into(), true), (true.into(), true)])
    );
}
