//! A federation of real processes on this machine produces the simulator's bytes, whatever is killed, cut or late.
//!
//! `FEDPROJ_KILLS=100` sets the number of kills.

mod command;
mod federate;
mod page;
mod proxy;

use command::{fedproj, json, stdout};
use federate::{Chance, Federation};
use proxy::Proxy;
use std::io::BufRead;
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn demo_ends_with_the_simulators_model() {
    let folder = tempfile::tempdir().unwrap();
    let told = json(folder.path(), &["demo", "--nodes", "5", "federation.rounds=3"]);
    assert_eq!(told["model_hash"], told["simulator_hash"]);
    assert_eq!(told["rounds"], 3);
    assert!(told["bytes"].as_u64().unwrap() > 100_000, "{told}");
    // State on the nodes' disks, a further vector both ways, one of another length down, and logits from the clients.
    for settings in [
        &["method.name=scaffold", "local.optimizer={kind='sgd', lr=0.05}"][..],
        &["method.name=moon", "method.moon.head=16"],
        &["method.name=fedgen", "method.fedgen.weights=samples"],
        &["server.ensemble=clients", "method.fedproj.memory.feature_weight=0.5", "model.name=cnn", "data.augment=true"],
    ] {
        let told = json(
            folder.path(),
            &[&["demo", "--nodes", "2", "federation.rounds=3", "local.epochs=1"], settings].concat(),
        );
        assert_eq!(told["model_hash"], told["simulator_hash"], "{settings:?}");
    }
}

#[test]
fn demo_shows_its_status_where_it_is_told_to() {
    let folder = tempfile::tempdir().unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let status = format!("server.status=127.0.0.1:{port}");
    let args = ["demo", "--nodes", "1", "federation.rounds=1", "local.epochs=1", "method.name=fedavg", &status];
    let output = command::output(fedproj(folder.path(), &args));
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && told.contains(&format!("status page http://127.0.0.1:{port}\n")), "{told}");
}

#[test]
fn demo_keeps_its_page_until_somebody_looks_at_it() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["federation.rounds=1", "local.epochs=1", "method.name=fedavg"];
    let mut demo = page::Served::start(folder.path(), &[&["demo", "--nodes", "2", "--keep"], &settings[..]].concat());
    let mut log = String::new();
    while !log.contains("the status page stays") {
        assert!(demo.log.read_line(&mut log).unwrap() > 0, "{log}");
    }
    assert!(demo.child.try_wait().unwrap().is_none(), "it has ended before anybody looked");
    let page = demo.get("/");
    for words in ["FedAvg in a federation", "All 1 rounds are done", "node-1", "has contributed", ">cosine<"] {
        assert!(page.contains(words), "{words} in {page}");
    }
    assert!(demo.child.wait().unwrap().success());
}

#[test]
fn killed_servers_and_nodes_lose_nothing_and_count_nothing_twice() {
    let n_kills: u64 = std::env::var("FEDPROJ_KILLS").map_or(20, |n| n.parse().unwrap());
    // Twice as many rounds as kills, so that there is always something to kill.
    let rounds = format!("federation.rounds={}", 2 * n_kills);
    // It keeps state wherever there can be any, and all must match the model: each node's h_k; on the server their mean, the
    // averaged teacher, the memory, and an averaged model to evaluate.
    let leading = ["preset=leading", "method.fedproj.averages.teacher=0.7", "method.fedproj.projection.warmup=0"];
    let others = ["federation.average_evaluated=0.5", "local.epochs=2", "data.partition={kind='iid', clients=3}"];
    let mut federation = Federation::new(&[&[&rounds[..]], &leading[..], &others].concat());
    federation.start_server();
    federation.enrol_and_start(0..3);
    let mut chance = Chance(0x5eed);
    kill_some(&mut federation, &mut chance, n_kills);
    let outcome = federation.outcome();
    let declined: Vec<_> = federation.journal().into_iter().filter(|entry| entry["event"] == "declined").collect();
    assert_eq!(declined, [] as [serde_json::Value; 0], "a crash is no reason to decline");
    let n_rounds = 2 * n_kills as usize;
    assert_eq!(federation.accepted().len(), 3 * n_rounds);
    assert_eq!(outcome["model_hash"], federation.simulated_hash());
    let run = outcome["run"].as_str().unwrap();
    stdout(federation.path(), &["verify", run]);
}

/// Kills servers and nodes at random moments, and starts them again.
fn kill_some(federation: &mut Federation, chance: &mut Chance, n_kills: u64) {
    for kill in 0..n_kills {
        std::thread::sleep(Duration::from_millis(30 + chance.below(250)));
        if federation.server_has_ended() {
            println!("the run was over after {kill} of {n_kills} kills");
            break;
        }
        // Sometimes a server and a node at the same time.
        let victim = chance.below(4);
        if victim >= 2 || kill % 5 == 0 {
            let node = chance.below(3) as u32;
            federation.kill_node(node);
            federation.start_node(node);
        }
        if victim < 2 && federation.kill_server() {
            federation.start_server();
        }
    }
}

#[test]
fn a_secure_demo_ends_with_the_simulators_model_though_a_node_leaves() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["demo", "--nodes", "5", "--secure", "federation.rounds=3", "local.epochs=1"];
    let told = json(folder.path(), &settings);
    assert_eq!((&told["model_hash"], &told["counted"]), (&told["simulator_hash"], &serde_json::json!([5, 5, 5])));
    let told = json(folder.path(), &[&settings[..], &["--drop", "1"]].concat());
    assert_eq!(told["model_hash"], told["simulator_hash"]);
    assert_eq!((&told["counted"][0], &told["counted"][2]), (&5.into(), &4.into()), "{told}");
}

#[test]
fn a_demo_that_could_not_end_or_be_repeated_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let private = ["privacy.noise_multiplier=8.0", "privacy.sampling=public", "privacy.delta=1e-3"];
    for (args, told) in [
        (&["--nodes", "3", "--drop", "3"][..], "of 3 nodes, 2 must stay"),
        (&["--nodes", "5", "--drop", "3"], "of 5 nodes, 3 must stay"),
        (&["--nodes", "3", "--drop", "1", "--secure"], "of 3 nodes, 3 must stay"),
        (&["--nodes", "8", "--drop", "5", "--secure"], "of 8 nodes, 4 must stay"),
        (&[&private[..], &["--nodes", "4"]].concat(), "noise that protects cannot be repeated"),
        (&[&private[..], &["--secure", "privacy.noise=nodes"]].concat(), "noise that protects cannot be repeated"),
    ] {
        let (code, message) = command::failure(fedproj(folder.path(), &[&["demo"], args].concat()));
        assert!(code == 2 && message.contains(told), "{args:?}: {message}");
    }
}

#[test]
fn a_secure_sum_survives_kills_of_anyone() {
    let n_kills: u64 = std::env::var("FEDPROJ_KILLS").map_or(20, |n| n.parse().unwrap());
    let rounds = format!("federation.rounds={n_kills}");
    // A node's state, h_k, must move with the sum that its contribution is in.
    let leading = ["preset=leading", "method.fedproj.projection.warmup=0", "data.partition={kind='iid', clients=3}"];
    let mut federation = Federation::new(&[&[&rounds[..], "server.secure=true"], &leading[..]].concat());
    federation.start_server();
    federation.enrol_and_start(0..3);
    kill_some(&mut federation, &mut Chance(0x5ec), n_kills);
    let outcome = federation.outcome();
    assert_eq!(outcome["model_hash"], federation.simulated_hash());
    stdout(federation.path(), &["verify", outcome["run"].as_str().unwrap()]);
    // What is sent for a sum claims nothing, and what is closed is everybody's.
    let journal = federation.journal();
    let of = |name: &str| journal.iter().filter(|e| e["event"] == name).collect::<Vec<_>>();
    let (accepted, closed) = (of("accepted"), of("round_closed"));
    assert!(accepted.len() as u64 >= 3 * n_kills && closed.len() as u64 >= n_kills, "{journal:?}");
    assert!(accepted.iter().all(|e| e["n_samples"] == 0 && e["parts"][0][0] == "masked"));
    assert!(closed.iter().all(|e| e["counted"] == serde_json::json!([0, 1, 2])));
    println!("{} sums failed and were repeated", of("sum_failed").len());
}

#[test]
fn connections_that_are_cut_and_slow_change_nothing() {
    let partition = "data.partition={kind='iid', clients=2}";
    let settings = ["federation.rounds=3", "method.fedproj.projection.warmup=0", "model.hidden=[64]", partition];
    let mut federation = Federation::new(&settings);
    federation.start_server();
    // Each connection breaks after some tens of kilobytes and is slow: transfers must resume.
    let proxy = Proxy::start(federation.address("listen"), Chance(7));
    federation.via = Some(proxy.address);
    federation.enrol_and_start(0..2);
    assert_eq!(federation.outcome()["model_hash"], federation.simulated_hash());
    assert!(proxy.n_cut() > 0, "the proxy has cut nothing");
    assert_eq!(federation.accepted().len(), 6);
}

#[test]
fn a_round_closes_without_those_who_are_late_and_can_be_repeated() {
    // One of four clients is killed after the first round; two are enough.
    let partition = "data.partition={kind='iid', clients=4}";
    let mut federation = Federation::new(&[
        "federation.rounds=5",
        "method.name=fedavg",
        "server.quorum=0.5",
        "server.deadline_s=1.0",
        partition,
    ]);
    federation.start_server();
    federation.enrol_and_start(0..4);
    federation.wait_for_log("round done");
    federation.kill_node(3);
    let outcome = federation.outcome();
    let run = outcome["run"].as_str().unwrap();
    let rounds = command::rounds(&federation.path().join(run));
    let counted: usize = rounds.iter().map(|r| r["cohort"].as_array().unwrap().len()).sum();
    assert_eq!(counted, federation.accepted().len());
    let closed: Vec<_> = federation.journal().into_iter().filter(|e| e["event"] == "round_closed").collect();
    assert_eq!(closed.len(), 5);
    let opened: Vec<_> = federation.journal().into_iter().filter(|e| e["event"] == "round_opened").collect();
    assert!(closed.iter().any(|e| e["late"].as_array().unwrap().contains(&3.into())), "{closed:?}");
    assert_eq!(opened[0]["asked"], serde_json::json!([0, 1, 2, 3]));
    // The journal records who contributed, so the simulator produces the same bytes.
    stdout(federation.path(), &["verify", run]);
}

#[test]
fn a_nodes_policy_declines_and_the_others_continue() {
    let partition = "data.partition={kind='iid', clients=3}";
    let mut federation = Federation::new(&[
        "federation.rounds=2",
        "method.name=fedavg",
        "server.quorum=0.6",
        "local.epochs=3",
        partition,
    ]);
    federation.start_server();
    for client in 0..3 {
        federation.enrol(client);
    }
    std::fs::write(federation.path().join("node-1/policy.toml"), "epochs_max = 2\n").unwrap();
    (0..3).for_each(|client| federation.start_node(client));
    let outcome = federation.outcome();
    let declined: Vec<_> = federation.journal().into_iter().filter(|e| e["event"] == "declined").collect();
    assert_eq!(declined.len(), 2);
    assert!(declined.iter().all(|e| e["client"] == 1 && e["reason"].as_str().unwrap().contains("epochs_max = 2")));
    stdout(federation.path(), &["verify", outcome["run"].as_str().unwrap()]);
}

#[test]
fn nodes_bring_data_of_their_own_and_those_that_do_not_fit_say_so() {
    let partition = "data.partition={kind='iid', clients=3}";
    let mut federation = Federation::new(&["federation.rounds=2", "method.name=feddf", "server.quorum=0.6", partition]);
    federation.start_server();
    for (client, data) in [(0, "digits"), (1, "iris"), (2, "run")] {
        federation.enrol(client);
        federation.start_node_with(client, data);
    }
    federation.outcome();
    let declined: Vec<_> = federation.journal().into_iter().filter(|e| e["event"] == "declined").collect();
    assert_eq!(declined.len(), 2);
    let reason = declined[0]["reason"].as_str().unwrap();
    assert!(declined[0]["client"] == 1 && reason.contains("data of the same shape and classes"), "{reason}");
    // Client 0 has all digits, client 2 a third of them.
    let sizes: Vec<_> =
        federation.journal().iter().filter(|e| e["event"] == "accepted").map(|e| e["n_samples"].as_u64()).collect();
    assert!(sizes.iter().flatten().any(|n| *n > 1000) && sizes.iter().flatten().any(|n| *n < 500), "{sizes:?}");
}

#[test]
fn a_full_disk_acknowledges_nothing_and_the_run_continues_when_there_is_room() {
    let partition = "data.partition={kind='iid', clients=2}";
    let mut federation =
        Federation::new(&["federation.rounds=3", "method.name=fedavg", "model.hidden=[200]", partition]);
    federation.start_server();
    (0..2).for_each(|client| federation.enrol(client));
    federation.kill_server();
    // No file may exceed 48 kB: weights of 62 kB do not fit, as on a full disk.
    let serve = federation.serve_command();
    let mut limited = Command::new("bash");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 48; exec \"$@\"", "limited"]);
    limited.arg(serve.get_program()).args(serve.get_args()).current_dir(federation.path());
    limited.stdout(Stdio::null()).stderr(std::fs::File::create(federation.path().join("server.log")).unwrap());
    federation.start_server_with(limited);
    (0..2).for_each(|client| federation.start_node(client));
    federation.wait_for_log("File too large");
    federation.kill_server();
    assert!(federation.accepted().is_empty());
    federation.start_server();
    assert_eq!(federation.outcome()["model_hash"], federation.simulated_hash());
    assert_eq!(federation.accepted().len(), 6);
}

#[test]
fn a_node_whose_disk_is_full_declines_and_is_asked_again_until_there_is_room() {
    let partition = "data.partition={kind='iid', clients=2}";
    let settings = ["federation.rounds=2", "method.name=fedavg", "model.hidden=[200]", "server.quorum=1.0", partition];
    let mut federation = Federation::new(&settings);
    federation.start_server();
    federation.enrol_and_start(0..1);
    federation.enrol(1);
    // As above: the weights do not fit into any file of this node.
    federation.start_node_under(1, "trap '' XFSZ; ulimit -f 48; exec \"$@\"");
    federation.wait_for_log("will be asked again");
    federation.kill_node(1);
    federation.start_node(1);
    assert_eq!(federation.outcome()["model_hash"], federation.simulated_hash());
    let declined = federation.journal().into_iter().find(|e| e["event"] == "declined").unwrap();
    assert!(declined["client"] == 1 && declined["reason"].as_str().unwrap().contains("File too large"), "{declined}");
    assert_eq!(federation.accepted().len(), 4);
}

/// The clock's library is C; without a compiler the test prints that it does nothing.
#[cfg(target_os = "linux")]
#[test]
fn a_wall_clock_that_jumps_by_hours_changes_nothing() {
    let partition = "data.partition={kind='iid', clients=2}";
    let mut federation = Federation::new(&["federation.rounds=8", "method.name=fedavg", "local.epochs=20", partition]);
    let library = federation.path().join("jump.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/federate/jump.c");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).status();
    if !built.is_ok_and(|status| status.success()) {
        println!("skipped: no C compiler");
        return;
    }
    federation.preload = Some(library);
    federation.start_server();
    federation.enrol_and_start(0..2);
    assert_eq!(federation.outcome()["model_hash"], federation.simulated_hash());
    let times: Vec<String> =
        federation.journal().iter().map(|e| e["time"].as_str().unwrap()[..13].to_owned()).collect();
    assert!(times.windows(2).any(|w| w[0] != w[1]), "the clock did not jump: {times:?}");
}

#[test]
fn more_nodes_are_asked_than_needed_and_the_first_count() {
    // Two of four are needed, and all four are asked.
    let partition = "data.partition={kind='iid', clients=4}";
    let settings =
        ["federation.rounds=3", "federation.fraction=0.5", "method.name=scaffold", "server.over_selection=1.0"];
    let sgd = "local.optimizer={kind='sgd', lr=0.05}";
    let mut federation = Federation::new(&[&settings[..], &[partition, sgd]].concat());
    federation.start_server();
    federation.enrol_and_start(0..4);
    let outcome = federation.outcome();
    let closed: Vec<_> = federation.journal().into_iter().filter(|e| e["event"] == "round_closed").collect();
    assert_eq!(closed.len(), 3);
    assert!(closed.iter().all(|entry| entry["counted"].as_array().unwrap().len() >= 2), "{closed:?}");
    let opened = federation.journal().into_iter().find(|e| e["event"] == "round_opened").unwrap();
    assert_eq!(opened["asked"], serde_json::json!([0, 1, 2, 3]));
    // The state of a late client has not changed, or the simulator would differ.
    stdout(federation.path(), &["verify", outcome["run"].as_str().unwrap()]);
}
