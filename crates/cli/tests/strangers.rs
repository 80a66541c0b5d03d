//! A server against strangers, with real processes: idle connections, and members that flood the log.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;
mod federate;

use command::output;
use federate::{Federation, enrol_command};
use fedproj_net::node::Home;
use fedproj_net::wire::Contribution;
use fedproj_net::{Error, Link};
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Starts the server with this limit of open files, in the words of bash's `ulimit`.
fn start_server_under(federation: &mut Federation, limit: &str) {
    let serve = federation.serve_command();
    let mut command = Command::new("bash");
    command
        .args(["-c", &format!("ulimit {limit}; exec \"$0\" \"$@\"")])
        .arg(serve.get_program())
        .args(serve.get_args());
    command.current_dir(federation.path()).env_remove("FEDPROJ_DATA").stdin(std::process::Stdio::null());
    let append =
        |name: &str| std::fs::File::options().create(true).append(true).open(federation.path().join(name)).unwrap();
    command.stdout(append("server.out")).stderr(append("server.log"));
    federation.start_server_with(command);
}

/// Keeps so many silent connections to each address; opens new ones for those that the server has closed.
fn stay_silent(addresses: &[SocketAddr], n_each: usize, done: &AtomicBool) {
    let is_open = |mut stream: &TcpStream| {
        let read = stream.read(&mut [0]);
        read.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock)
    };
    let mut open: Vec<(SocketAddr, TcpStream)> = Vec::new();
    while !done.load(Ordering::Relaxed) {
        open.retain(|(_, stream)| is_open(stream));
        for address in addresses {
            for _ in open.iter().filter(|(to, _)| to == address).count()..n_each {
                let Ok(stream) = TcpStream::connect_timeout(address, Duration::from_secs(1)) else { continue };
                stream.set_nonblocking(true).unwrap();
                open.push((*address, stream));
            }
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

#[test]
fn more_idle_connections_than_open_files_stop_neither_enrolment_nor_the_run() {
    let settings = ["federation.rounds=2", "method.name=fedavg", "data.partition={kind='iid', clients=1}"];
    let mut federation = Federation::new(&settings);
    start_server_under(&mut federation, "-n 256");
    let (doors, done) = ([federation.address("listen"), federation.address("enrol")], AtomicBool::new(false));
    let flooded = std::thread::scope(|scope| {
        scope.spawn(|| stay_silent(&doors, 300, &done));
        federation.wait_for_log("its place was needed");
        let flooded = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            federation.enrol_and_start(0..1);
            federation.outcome()
        }));
        done.store(true, Ordering::Relaxed);
        flooded
    });
    assert_eq!(flooded.unwrap()["model_hash"], federation.simulated_hash());
    let log = federation.server_log();
    assert!(!log.contains("Too many open files"), "{log}");
}

#[test]
fn the_server_raises_the_soft_limit_of_open_files_and_refuses_a_hard_one_that_is_too_low() {
    let mut federation = Federation::new(&["federation.rounds=1"]);
    start_server_under(&mut federation, "-Sn 100");
    let open: Vec<_> = (0..200).map(|_| TcpStream::connect(federation.address("listen")).unwrap()).collect();
    federation.enrol(0);
    drop(open);
    let mut refused = Command::new("bash");
    let serve = format!("ulimit -n 100; {} serve --dir other server.listen=127.0.0.1:0", env!("CARGO_BIN_EXE_fedproj"));
    refused.args(["-c", &serve]).current_dir(federation.path());
    let (code, error) = command::failure(refused);
    assert!(code == 2 && error.contains("100 open files") && error.contains("LimitNOFILE"), "{error}");
}

#[test]
fn a_member_cannot_flood_the_log() {
    let mut federation = Federation::new(&["federation.rounds=1", "data.partition={kind='iid', clients=2}"]);
    federation.start_server();
    federation.enrol(0);
    let start = std::time::Instant::now();
    let server = format!("https://{}", federation.address("listen"));
    let link = Link::new(&server, Home::new(&federation.path().join("node-0")).tls().unwrap()).unwrap();
    // For another client, so that it is not accepted, and more often than a member may ask.
    let wrong = Contribution { client: 7, ..Contribution::default() };
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        for _ in 0..600 {
            match link.send(&wrong).await {
                Ok(_) | Err(Error::Rejected { status: 429, .. }) => (),
                Err(error) => panic!("{error}"),
            }
        }
    });
    federation.wait_for_log("not accepted");
    let n_lines = federation.server_log().lines().filter(|line| line.contains("WARN")).count();
    let n_max = 30 + start.elapsed().as_secs() as usize;
    assert!(n_lines <= n_max, "{n_lines} lines, expected max {n_max}");
}

#[test]
fn enrolment_waits_for_a_server_that_is_not_there_yet() {
    let mut federation = Federation::new(&["federation.rounds=1"]);
    federation.start_server();
    let token = federation.invite("early", 3);
    let enrol = federation.address("enrol");
    federation.kill_server();
    let serve = federation.serve_command();
    let enrolling = enrol_command(federation.path(), &format!("https://{enrol}"), &token, "early");
    let enrolled = std::thread::scope(|scope| {
        let enrolling = scope.spawn(|| output(enrolling));
        std::thread::sleep(Duration::from_secs(1));
        let mut command = Command::new(serve.get_program());
        // The same port; a later setting wins.
        command.args(serve.get_args()).arg(format!("server.enrol={enrol}")).current_dir(federation.path());
        command.env_remove("FEDPROJ_DATA").stdin(std::process::Stdio::null());
        federation.start_server_with(command);
        enrolling.join().unwrap()
    });
    assert!(enrolled.status.success(), "{}", String::from_utf8_lossy(&enrolled.stderr));
    assert!(String::from_utf8_lossy(&enrolled.stderr).contains("will try again"));
}
