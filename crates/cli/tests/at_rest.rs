//! Encryption at rest, with real processes: the same bytes come out, and nothing readable is left on disk.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;
mod federate;

use command::failure;
use federate::Federation;
use std::os::unix::fs::PermissionsExt;

#[test]
fn an_encrypted_federation_gives_the_simulators_bytes_and_leaves_nothing_readable() {
    // SCAFFOLD keeps state on its nodes and sends further vectors.
    let partition = "data.partition={kind='iid', clients=2}";
    let scaffold = ["method.name=scaffold", "local.optimizer={kind='sgd', lr=0.05}", "server.quorum=1.0"];
    let settings = [&scaffold[..], &["federation.rounds=6", partition]].concat();
    let mut federation = Federation::new(&settings);
    let encrypted = federation.serve_command_with(&["server.key_file=server.key"]);
    for name in ["server.key", "node.key", "other.key"] {
        fedproj_core::write_private(&federation.path().join(name), name.repeat(4).as_bytes()).unwrap();
    }
    federation.start_server_with(encrypted);
    let line = "exec \"$@\" --key-file node.key";
    for client in 0..2 {
        federation.enrol(client);
        federation.start_node_under(client, line);
    }
    federation.wait_for_log("round done");
    // Resumed with the same keys.
    federation.kill_node(1);
    federation.kill_server();
    let encrypted = federation.serve_command_with(&["server.key_file=server.key"]);
    federation.start_server_with(encrypted);
    federation.start_node_under(1, line);
    assert_eq!(federation.outcome()["model_hash"], federation.simulated_hash());
    let files = |folder: &str| {
        let all = std::fs::read_dir(federation.path().join(folder)).unwrap();
        all.map(|e| e.unwrap().path()).filter(|p| p.is_file()).collect::<Vec<_>>()
    };
    let blobs = [files("federation/blobs"), files("node-0/cache")].concat();
    assert!(!blobs.is_empty());
    for path in blobs {
        let hash = blake3::hash(&std::fs::read(&path).unwrap()).to_hex().to_string();
        assert_ne!(path.file_name().unwrap().to_str().unwrap(), hash, "{} is plain", path.display());
    }
    let kept: Vec<_> = files("node-0").into_iter().filter(|p| p.extension().is_some_and(|e| e == "state")).collect();
    assert_eq!(kept.len(), 1);
    assert!(std::fs::read(&kept[0]).unwrap().starts_with(b"FEDPROJE"));
    // A key that others can read is refused.
    let other = federation.path().join("other.key");
    std::fs::set_permissions(&other, PermissionsExt::from_mode(0o644)).unwrap();
    let (code, error) = failure(federation.serve_command_with(&["server.key_file=other.key"]));
    assert!(code == 2 && (error.contains("chmod 600") || federation.server_log().contains("chmod 600")), "{error}");
}

#[test]
fn a_server_with_another_key_continues_and_a_node_with_another_key_ends() {
    let partition = "data.partition={kind='iid', clients=2}";
    let mut federation =
        Federation::new(&["method.name=fedavg", "federation.rounds=6", "server.quorum=1.0", partition]);
    for name in ["first.key", "other.key"] {
        fedproj_core::write_private(&federation.path().join(name), name.repeat(4).as_bytes()).unwrap();
    }
    let first = federation.serve_command_with(&["server.key_file=first.key"]);
    federation.start_server_with(first);
    let line = "exec \"$@\" --key-file first.key";
    for client in 0..2 {
        federation.enrol(client);
        federation.start_node_under(client, line);
    }
    federation.wait_for_log("round done");
    federation.kill_node(1);
    federation.kill_server();
    let other = federation.serve_command_with(&["server.key_file=other.key"]);
    federation.start_server_with(other);
    let server = format!("https://{}", federation.address("listen"));
    let join = ["join", &server, "--data", "run", "--node", "node-1", "--key-file", "other.key"];
    let (code, error) = failure(command::fedproj(federation.path(), &join));
    assert!(code == 2 && error.contains("hint: --key-file names the key"), "{error}");
    // It needs everything from the server, which has it under its first key.
    std::fs::remove_dir_all(federation.path().join("node-1/cache")).unwrap();
    federation.start_node_under(1, line);
    assert_eq!(federation.outcome()["model_hash"], federation.simulated_hash());
}
