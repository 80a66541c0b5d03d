//! A federation of real processes for tests: a server, nodes, free ports, and kill −9.

#![allow(dead_code, reason = "not every test file uses every helper")]
#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use crate::command::{fedproj, json, output, stdout};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A loaded machine may pause everything for a minute; a longer wait is a hang.
pub const PATIENCE: Duration = Duration::from_mins(5);

/// A server's folder, its nodes' folders, and the processes that run.
pub struct Federation {
    pub dir: tempfile::TempDir,
    settings: Vec<String>,
    server: Option<Child>,
    nodes: BTreeMap<u32, Child>,
    pub addresses: Option<Value>,
    /// Where nodes connect, if not to the server itself.
    pub via: Option<SocketAddr>,
    /// A library that server and nodes are started with.
    pub preload: Option<PathBuf>,
}

impl Federation {
    /// A folder for a run of these settings; nothing runs yet.
    pub fn new(settings: &[&str]) -> Self {
        let small = ["model.hidden=[16]", "local.epochs=1", "federation.fraction=1.0", "server.enrol=127.0.0.1:0"];
        let settings = small.iter().chain(settings).map(|s| (*s).to_owned()).collect();
        let dir = tempfile::tempdir().unwrap();
        Self { dir, settings, server: None, nodes: BTreeMap::new(), addresses: None, via: None, preload: None }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn server_dir(&self) -> PathBuf {
        self.path().join("federation")
    }

    /// The command that starts the server: the first time on any port, then on the same.
    pub fn serve_command(&self) -> Command {
        self.serve_command_with(&[])
    }

    /// The same with further settings.
    pub fn serve_command_with(&self, further: &[&str]) -> Command {
        let listen = match &self.addresses {
            Some(addresses) => format!("server.listen={}", addresses["listen"].as_str().unwrap()),
            None => "server.listen=127.0.0.1:0".to_owned(),
        };
        let settings = self.settings.iter().map(String::as_str).chain([listen.as_str()]);
        let settings: Vec<&str> = settings.chain(further.iter().copied()).collect();
        let mut command =
            fedproj(self.path(), &[&["serve", "--json", "--threads", "1", "--log", "json"], &settings[..]].concat());
        command.stdout(self.append("server.out")).stderr(self.append("server.log"));
        command.envs(self.preload.iter().map(|path| ("LD_PRELOAD", path)));
        command
    }

    fn append(&self, name: &str) -> File {
        File::options().create(true).append(true).open(self.path().join(name)).unwrap()
    }

    /// Starts the server and waits until it listens.
    pub fn start_server(&mut self) {
        let command = self.serve_command();
        self.start_server_with(command);
    }

    pub fn start_server_with(&mut self, mut command: Command) {
        let path = self.server_dir().join("addresses.json");
        let _ = std::fs::remove_file(&path);
        self.server = Some(command.spawn().unwrap());
        let text = self.wait_for("the server's addresses", |f| {
            if let Some(status) = f.server.as_mut().unwrap().try_wait().unwrap() {
                panic!("the server ended: {status}\n{}", f.server_log());
            }
            std::fs::read_to_string(&path).ok()
        });
        self.addresses = Some(serde_json::from_str(&text).unwrap());
    }

    pub fn address(&self, door: &str) -> SocketAddr {
        self.addresses.as_ref().unwrap()[door].as_str().unwrap().parse().unwrap()
    }

    /// Makes a token on the server's machine.
    pub fn invite(&self, name: &str, client: u32) -> String {
        let invited = json(self.path(), &["nodes", "invite", name, "--client", &client.to_string()]);
        invited["token"].as_str().unwrap().to_owned()
    }

    /// Invites and enrols a node.
    pub fn enrol(&self, client: u32) {
        let name = format!("node-{client}");
        let token = self.invite(&name, client);
        let server = format!("https://{}", self.address("enrol"));
        let enrolled = output(enrol_command(self.path(), &server, &token, &name));
        assert!(enrolled.status.success(), "{}", String::from_utf8_lossy(&enrolled.stderr));
    }

    /// Starts a node's process.
    pub fn start_node(&mut self, client: u32) {
        self.start_node_with(client, "run");
    }

    /// Starts a node's process with data of its own.
    pub fn start_node_with(&mut self, client: u32, data: &str) {
        let mut command = self.join_command(client, data);
        self.nodes.insert(client, command.spawn().unwrap());
    }

    /// Starts a node's process from a line of bash, which has the command as its arguments.
    pub fn start_node_under(&mut self, client: u32, line: &str) {
        let join = self.join_command(client, "run");
        let mut command = Command::new("bash");
        command.args(["-c", line, "node"]).arg(join.get_program()).args(join.get_args()).current_dir(self.path());
        command.stdout(Stdio::null()).stderr(self.append(&format!("node-{client}.log")));
        self.nodes.insert(client, command.spawn().unwrap());
    }

    fn join_command(&self, client: u32, data: &str) -> Command {
        let home = format!("node-{client}");
        let server = format!("https://{}", self.via.unwrap_or_else(|| self.address("listen")));
        let mut command = fedproj(self.path(), &["join", &server, "--data", data, "--node", &home, "--log", "json"]);
        command.stdout(Stdio::null()).stderr(self.append(&format!("{home}.log")));
        command.envs(self.preload.iter().map(|path| ("LD_PRELOAD", path)));
        command
    }

    pub fn enrol_and_start(&mut self, clients: std::ops::Range<u32>) {
        for client in clients {
            self.enrol(client);
            self.start_node(client);
        }
    }

    /// kill −9; whether the server was still running.
    pub fn kill_server(&mut self) -> bool {
        let mut server = self.server.take().unwrap();
        let was_running = server.try_wait().unwrap().is_none();
        server.kill().unwrap();
        server.wait().unwrap();
        was_running
    }

    /// kill −9
    pub fn kill_node(&mut self, client: u32) {
        if let Some(mut node) = self.nodes.remove(&client) {
            node.kill().unwrap();
            node.wait().unwrap();
        }
    }

    /// Whether the server has ended, well or not.
    pub fn server_has_ended(&mut self) -> bool {
        self.server.as_mut().is_none_or(|s| s.try_wait().unwrap().is_some())
    }

    /// Waits for the server's end; returns its last line.
    pub fn outcome(&mut self) -> Value {
        let status = self.wait_for("the end of the run", |f| f.server.as_mut().unwrap().try_wait().unwrap());
        assert!(status.success(), "{status}\n{}", self.server_log());
        let text = std::fs::read_to_string(self.path().join("server.out")).unwrap();
        serde_json::from_str(text.lines().last().unwrap()).unwrap()
    }

    pub fn server_log(&self) -> String {
        std::fs::read_to_string(self.path().join("server.log")).unwrap_or_default()
    }

    /// Waits until the server has logged this.
    pub fn wait_for_log(&mut self, text: &str) {
        self.wait_for(text, |f| f.server_log().contains(text).then_some(()));
    }

    /// Waits until something exists; a hang shows both logs.
    pub fn wait_for<T>(&mut self, what: &str, mut look: impl FnMut(&mut Self) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = look(self) {
                return found;
            }
            assert!(start.elapsed() < PATIENCE, "waited in vain for {what}:\n{}", self.server_log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The journal, checked by `fedproj audit`.
    pub fn journal(&self) -> Vec<Value> {
        let text = stdout(self.path(), &["audit"]);
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The simulator's model hash for the configuration that the server wrote into the run.
    pub fn simulated_hash(&self) -> Value {
        let run = std::fs::read_dir(self.server_dir().join("runs")).unwrap().next().unwrap().unwrap().path();
        let config = run.join("config.toml");
        json(self.path(), &["run", "--quiet", "--out", "simulated", config.to_str().unwrap()])["model_hash"].clone()
    }

    /// Each client's acknowledged contributions by round; none may occur twice.
    pub fn accepted(&self) -> BTreeMap<(u64, u64), String> {
        let mut all = BTreeMap::new();
        for entry in self.journal().iter().filter(|e| e["event"] == "accepted") {
            let place = (entry["round"].as_u64().unwrap(), entry["client"].as_u64().unwrap());
            let before = all.insert(place, entry["id"].as_str().unwrap().to_owned());
            assert_eq!(before, None, "counted twice: {entry}");
        }
        all
    }
}

/// `fedproj enrol` with a token, as nobody else can see it.
pub fn enrol_command(folder: &Path, server: &str, token: &str, node: &str) -> Command {
    let mut command = fedproj(folder, &["enrol", server, "--node", node]);
    command.env("FEDPROJ_TOKEN", token);
    command
}

impl Drop for Federation {
    fn drop(&mut self) {
        for child in self.nodes.values_mut().chain(&mut self.server) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A small generator for the moments of faults; the seed is printed when a test fails.
pub struct Chance(pub u64);

impl Chance {
    pub fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}
