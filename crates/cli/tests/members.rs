//! The members of a federation and its journal, with real processes.

mod command;
mod federate;

use command::{failure, fedproj, json, output, stdout};
use federate::{Federation, enrol_command};
use fedproj_net::Link;
use fedproj_net::node::{node_request, node_tls};
use fedproj_net::server::Authority;
use fedproj_net::wire::WorkRequest;
use std::process::Stdio;

#[test]
fn a_revoked_node_is_out_and_a_token_works_once() {
    let partition = "data.partition={kind='iid', clients=2}";
    let settings =
        ["federation.rounds=2", "method.name=fedavg", "server.quorum=0.5", "server.lost_after_s=2.0", partition];
    let mut federation = Federation::new(&settings);
    federation.start_server();
    let token = federation.invite("node-0", 0);
    let server = format!("https://{}", federation.address("enrol"));
    let enrol = |server: &str, token: &str, node: &str| enrol_command(federation.path(), server, token, node);
    assert!(output(enrol(&server, &token, "node-0")).status.success());
    let (code, stolen) = failure(enrol(&server, &token, "thief"));
    assert!(code == 1 && stolen.contains("has been used"), "{stolen}");
    // A token of another federation does not work here.
    let foreign = tempfile::tempdir().unwrap();
    let other = json(foreign.path(), &["nodes", "invite", "x"]);
    let (_, error) = failure(enrol(&server, other["token"].as_str().unwrap(), "lost"));
    assert!(error.contains("UnknownIssuer") && !error.contains("will try again"), "{error}");
    // The answer was lost and the server restarted: the same request is answered again and journaled once.
    std::fs::remove_file(federation.path().join("node-0/node.toml")).unwrap();
    federation.kill_server();
    federation.start_server();
    let server = format!("https://{}", federation.address("enrol"));
    assert!(output(enrol_command(federation.path(), &server, &token, "node-0")).status.success());
    assert_eq!(federation.journal().iter().filter(|e| e["event"] == "enrolled").count(), 1);
    federation.enrol(1);
    stdout(federation.path(), &["nodes", "revoke", "node-1"]);
    federation.start_node(1);
    federation.wait_for_log("has been revoked");
    federation.start_node(0);
    federation.outcome();
    let accepted: Vec<_> = federation.accepted().into_keys().collect();
    assert_eq!(accepted, [(0, 0), (1, 0)]);
    let listed = stdout(federation.path(), &["nodes"]);
    assert!(listed.contains("node-0") && listed.contains("revoked"), "{listed}");
}

#[test]
fn a_token_comes_from_a_file_standard_input_or_the_environment_and_never_from_the_command_line() {
    let mut federation = Federation::new(&["federation.rounds=1"]);
    federation.start_server();
    let server = format!("https://{}", federation.address("enrol"));
    let token = federation.invite("seen", 9);
    let (code, error) = failure(fedproj(federation.path(), &["enrol", &server, &token, "--node", "seen"]));
    assert!(code == 2 && error.contains("--token-file") && !error.contains(&token), "{error}");
    let file = federation.path().join("token");
    std::fs::write(&file, federation.invite("by-file", 0) + "\n").unwrap();
    stdout(federation.path(), &["enrol", &server, "--token-file", "token", "--node", "by-file"]);
    std::fs::write(&file, federation.invite("by-stdin", 1) + "\n").unwrap();
    let mut by_stdin = fedproj(federation.path(), &["enrol", &server, "--node", "by-stdin"]);
    by_stdin.stdin(std::fs::File::open(&file).unwrap());
    assert!(output(by_stdin).status.success());
    let by_environment = enrol_command(federation.path(), &server, &federation.invite("by-env", 2), "by-env");
    assert!(output(by_environment).status.success());
    assert_eq!(federation.journal().iter().filter(|e| e["event"] == "enrolled").count(), 3);
}

#[cfg(unix)]
#[test]
fn folders_that_others_can_read_are_refused() {
    use std::os::unix::fs::PermissionsExt;
    let mut federation = Federation::new(&["federation.rounds=1"]);
    federation.start_server();
    federation.enrol(0);
    federation.kill_server();
    let open = |path: &std::path::Path| std::fs::set_permissions(path, PermissionsExt::from_mode(0o750)).unwrap();
    open(&federation.server_dir());
    open(&federation.path().join("node-0"));
    let server = "https://127.0.0.1:1";
    let serve = ["serve", "--threads", "1", "server.listen=127.0.0.1:0"];
    for args in [&serve[..], &["nodes"], &["join", server, "--data", "run", "--node", "node-0"]] {
        let (code, error) = failure(fedproj(federation.path(), args));
        assert!(code == 2 && error.contains("mode 750") && error.contains("chmod 700"), "{args:?}: {error}");
    }
}

#[cfg(unix)]
#[test]
fn the_journal_names_the_operator() {
    let folder = tempfile::tempdir().unwrap();
    stdout(folder.path(), &["nodes", "invite", "a"]);
    stdout(folder.path(), &["nodes", "revoke", "a"]);
    let me = String::from_utf8(std::process::Command::new("id").arg("-un").output().unwrap().stdout).unwrap();
    let text = stdout(folder.path(), &["audit"]);
    assert_eq!(text.lines().count(), 2);
    for line in text.lines() {
        let entry: serde_json::Value = serde_json::from_str(line).unwrap();
        let operator = entry["operator"].as_str().unwrap();
        assert!(operator.contains(me.trim()), "{operator}");
    }
}

#[test]
fn audit_finds_a_changed_journal() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a", "b", "c"] {
        stdout(folder.path(), &["nodes", "invite", name]);
    }
    assert_eq!(json(folder.path(), &["audit"])["entries"], 3);
    let path = folder.path().join("federation/journal.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"node\":\"b\"", "\"node\":\"x\"")).unwrap();
    let (code, error) = failure(fedproj(folder.path(), &["audit"]));
    assert!(code == 1 && error.contains("entry 1") && error.contains("has been changed"), "{error}");
}

#[test]
fn strangers_are_kept_out_and_the_log_has_the_reason() {
    let mut federation = Federation::new(&["federation.rounds=1"]);
    federation.start_server();
    let ours = Authority::open(&federation.server_dir()).unwrap();
    let theirs = Authority::open(&federation.path().join("another")).unwrap();
    let (key, request) = node_request().unwrap();
    let server = format!("https://{}", federation.address("listen"));
    let knock = |certificate: String| {
        let link = Link::new(&server, node_tls(ours.certificate(), &certificate, &key).unwrap()).unwrap();
        tokio::runtime::Runtime::new().unwrap().block_on(link.send(&WorkRequest::current())).unwrap_err();
    };
    knock(ours.sign(&request, "n", -1).unwrap());
    federation.wait_for_log("certificate expired");
    knock(theirs.sign(&request, "n", 10).unwrap());
    // All authorities have the same name; only the signature differs.
    federation.wait_for_log("BadSignature");
    knock(ours.sign(&request, "n", 10).unwrap());
    federation.wait_for_log("this certificate is not known here");
    // The journal has the first reasons at once, the others within a minute, and nothing else.
    let expired = |e: &serde_json::Value| e["reason"].as_str().unwrap().contains("certificate expired");
    let journal =
        federation.wait_for("the journal", |f| Some(f.journal()).filter(|journal| journal.iter().any(expired)));
    assert!(journal.iter().all(|e| e["event"] == "handshakes_refused" && e["from"] == "127.0.0.1"), "{journal:?}");
    // So has an export, which its reader can check with the authority's certificate.
    stdout(federation.path(), &["audit", "--export", "audit.jsonl"]);
    let text = std::fs::read_to_string(federation.path().join("audit.jsonl")).unwrap();
    assert!(text.contains("handshakes_refused") && text.lines().last().unwrap().contains("signature"), "{text}");
    let check = ["audit", "--check", "audit.jsonl"];
    assert!(stdout(federation.path(), &check).contains("signed by this federation"));
    // The page shows how to check it with other tools.
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/security.md");
    let page = std::fs::read_to_string(page).unwrap();
    let recipe = page.split("```\n").find(|block| block.contains("openssl dgst")).unwrap();
    std::fs::copy(federation.server_dir().join("ca.pem"), federation.path().join("ca.pem")).unwrap();
    let by_hand = || std::process::Command::new("sh").args(["-ec", recipe]).current_dir(federation.path()).output();
    if by_hand().is_ok_and(|output| output.status.code() == Some(127)) {
        eprintln!("skipped: openssl or xxd is not installed");
    } else {
        assert!(String::from_utf8_lossy(&by_hand().unwrap().stdout).contains("Verified OK"));
    }
    std::fs::write(federation.path().join("audit.jsonl"), text.replace("127.0.0.1", "127.0.0.2")).unwrap();
    let (code, error) = failure(fedproj(federation.path(), &check));
    assert!(code == 1 && error.contains("has been changed"), "{error}");
}

#[test]
fn another_node_gets_the_client_of_a_revoked_one_and_the_run_continues() {
    let partition = "data.partition={kind='iid', clients=2}";
    let mut federation = Federation::new(&["federation.rounds=3", "method.name=fedavg", partition]);
    federation.start_server();
    federation.enrol_and_start(0..2);
    federation.wait_for_log("round done");
    // Without client 0 no round can close while client 1 has no node.
    federation.kill_node(0);
    stdout(federation.path(), &["nodes", "revoke", "node-1"]);
    federation.kill_node(1);
    std::fs::remove_dir_all(federation.path().join("node-1")).unwrap();
    federation.enrol_and_start(1..2);
    federation.start_node(0);
    assert_eq!(federation.outcome()["model_hash"], federation.simulated_hash());
    let listed = stdout(federation.path(), &["nodes"]);
    assert_eq!((listed.matches("node-1").count(), listed.matches("revoked").count()), (2, 1), "{listed}");
}

#[test]
fn a_rolled_back_run_repeats_its_last_rounds_with_the_same_result() {
    let partition = "data.partition={kind='iid', clients=2}";
    let mut federation = Federation::new(&["federation.rounds=4", "method.name=fedavg", partition]);
    let rollback = |federation: &Federation, to: &str| fedproj(federation.path(), &["rollback", "--to-round", to]);
    let (code, error) = failure(rollback(&federation, "1"));
    assert!(code == 2 && error.contains("holds no run"), "{error}");
    federation.start_server();
    federation.enrol_and_start(0..2);
    let (code, error) = failure(rollback(&federation, "1"));
    assert!(code == 1 && error.contains("in use"), "{error}");
    let first = federation.outcome();
    let (code, error) = failure(rollback(&federation, "7"));
    assert!(code == 2 && error.contains("can go back to 0, 1, 2, 3, 4"), "{error}");
    let told = stdout(federation.path(), &["rollback", "--to-round", "2"]);
    assert!(told.contains("end of round 2"), "{told}");
    federation.start_server();
    let second = federation.outcome();
    assert_eq!(first["model_hash"], second["model_hash"]);
    let opened = |e: &serde_json::Value| (e["event"] == "round_opened").then(|| e["round"].as_u64().unwrap());
    let rounds: Vec<u64> = federation.journal().iter().filter_map(opened).collect();
    assert_eq!(rounds, [0, 1, 2, 3, 2, 3]);
    assert!(federation.journal().iter().any(|e| e["event"] == "rolled_back" && e["to_round"] == 2));
    stdout(federation.path(), &["verify", second["run"].as_str().unwrap()]);
}

#[test]
fn a_stopped_reader_of_the_audit_does_not_block_the_journal() {
    let folder = tempfile::tempdir().unwrap();
    let name = "n".repeat(60);
    stdout(folder.path(), &["nodes", "invite", &name]);
    // More entries than a pipe holds.
    let path = folder.path().join("federation");
    let mut journal = fedproj_net::server::journal::Journal::open(&path, &mut |_| ()).unwrap();
    for _ in 0..1500 {
        journal.append(fedproj_net::server::journal::Event::Revoked { node: name.clone() }).unwrap();
    }
    let mut audit = fedproj(folder.path(), &["audit"]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    // It has begun to print, and the reader has stopped.
    let mut first = [0; 1];
    std::io::Read::read_exact(audit.stdout.as_mut().unwrap(), &mut first).unwrap();
    let mut invite =
        fedproj(folder.path(), &["nodes", "invite", "b"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let start = std::time::Instant::now();
    let invited = loop {
        if let Some(status) = invite.try_wait().unwrap() {
            break status.success();
        }
        if start.elapsed() > federate::PATIENCE {
            invite.kill().unwrap();
            break false;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    assert!(audit.try_wait().unwrap().is_none(), "the audit was not held up");
    audit.kill().unwrap();
    audit.wait().unwrap();
    assert!(invited, "the journal stayed locked");
}
