//! `fedproj bench federation`: a server process under the load of many nodes. This process plays the nodes, each with its own
//! certificate and connection. All ask for work, and a cohort contributes to each round. Nobody trains.

use crate::federation::block_on;
use crate::federation::process::Process;
use crate::say;
use anyhow::{Context, Result, bail};
use clap::Args;
use fedproj_core::LocalStats;
use fedproj_net::Link;
use fedproj_net::node::Home;
use fedproj_net::server::http::Addresses;
use fedproj_net::server::{Authority, INVITATION_LASTS, Registry};
use fedproj_net::wire::{
    Contribution, EnrolReply, NamedBlob, Store, Task, VerdictKind, WorkKind, WorkRequest, encode_f32,
};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Arguments of `bench federation`.
#[derive(Args)]
pub struct Load {
    /// Connected nodes
    #[arg(long, default_value_t = 1000)]
    nodes: u32,
    /// Nodes that contribute per round
    #[arg(long, default_value_t = 100)]
    cohort: u32,
    /// Rounds
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// Hidden layers of the model, an MLP on 8×8 images; 1000,1160 has 5 MB, 256,30 has 100 kB
    #[arg(long, default_value = "1000,1160")]
    hidden: String,
    /// Working directory, removed at the end [default: a temporary one]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print one JSON object on the last line
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct LoadReport {
    nodes: u32,
    cohort: u32,
    rounds: u32,
    model_bytes: u64,
    seconds: f64,
    seconds_per_round: f64,
    /// Bytes of all contributions and tasks.
    bytes: u64,
    /// Resident memory of the server in MB: after a quarter of the time, at the end, and its peak.
    server_mb_early: f64,
    server_mb_end: f64,
    server_mb_peak: f64,
}

impl Load {
    /// Measures and prints.
    pub fn run(self) -> Result<()> {
        let temporary = std::env::temp_dir().join(format!("fedproj-load-{}", std::process::id()));
        let dir = self.dir.clone().unwrap_or(temporary);
        std::fs::create_dir_all(&dir)?;
        let report = self.measure(&dir);
        // A folder that cannot be removed does not change the result.
        let _ = std::fs::remove_dir_all(&dir);
        let report = report?;
        if self.json {
            say!("{}", serde_json::to_string(&report)?);
        } else {
            say!(
                "{} nodes, {} per round, {} rounds, model {:.2} MB: {:.2} s per round; server memory {:.0} MB early, {:.0} MB at \
                 the end, {:.0} MB peak",
                report.nodes,
                report.cohort,
                report.rounds,
                report.model_bytes as f64 / 1e6,
                report.seconds_per_round,
                report.server_mb_early,
                report.server_mb_end,
                report.server_mb_peak
            );
        }
        Ok(())
    }

    fn measure(&self, dir: &Path) -> Result<LoadReport> {
        let federation = dir.join("server");
        eprintln!("certificates for {} nodes", self.nodes);
        let homes = self.enrol(dir, &federation)?;
        let out = dir.join("out");
        let mut server = self.start_server(&federation, &out)?;
        let addresses = addresses(&mut server, &federation)?;
        let address = format!("https://{}", addresses.listen);
        let start = Instant::now();
        let samples = block_on(async {
            for (client, home) in homes.iter().enumerate() {
                let node = SimulatedNode {
                    link: Link::new(&address, home.tls()?)?,
                    cache: home.cache()?,
                    outbox: home.outbox()?,
                    client: client as u32,
                };
                tokio::spawn(node.run());
            }
            let mut samples = Vec::new();
            while server.child.try_wait()?.is_none() {
                samples.extend(resident_mb(&server.child));
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
            Ok(samples)
        })?;
        let seconds = start.elapsed().as_secs_f64();
        server.finish()?;
        let log = std::fs::read_to_string(&out)?;
        let report: serde_json::Value =
            serde_json::from_str(log.lines().last().context("the server printed nothing")?)?;
        let run = PathBuf::from(report["run"].as_str().context("no run")?);
        let lines = std::fs::read_to_string(run.join("metrics.jsonl"))?;
        let rounds: Vec<fedproj_core::RoundRecord> =
            lines.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        if rounds.iter().any(|r| r.cohort.len() != self.cohort as usize) {
            bail!("a round closed without its whole cohort");
        }
        let model_bytes = std::fs::metadata(run.join("model.safetensors"))?.len();
        Ok(LoadReport {
            nodes: self.nodes,
            cohort: self.cohort,
            rounds: self.rounds,
            model_bytes,
            seconds,
            seconds_per_round: rounds.iter().map(|r| r.seconds.total()).sum::<f64>() / f64::from(self.rounds),
            bytes: rounds.iter().map(|r| r.bytes_up + r.bytes_down).sum(),
            server_mb_early: samples.get(samples.len() / 4).copied().unwrap_or(0.0),
            server_mb_end: samples.last().copied().unwrap_or(0.0),
            server_mb_peak: samples.iter().copied().fold(0.0, f64::max),
        })
    }

    /// Certificates without the network: enrolment is not measured.
    fn enrol(&self, dir: &Path, federation: &Path) -> Result<Vec<Home>> {
        let (authority, registry) = (Authority::open(federation)?, Registry::open(federation)?);
        let enrol = |client: u32| {
            let name = format!("n{client}");
            let home = Home::new(&dir.join(&name));
            let (token, _) = registry.invite(&authority, &name, Some(client), INVITATION_LASTS)?;
            let (node, certificate) = registry.enrol(&authority, &token.secret, &home.request()?, 30)?;
            let authority = authority.certificate().to_owned();
            home.enrolled(&EnrolReply { name: node.name, client, certificate, authority })?;
            Ok(home)
        };
        (0..self.nodes).map(enrol).collect()
    }

    fn start_server(&self, dir: &Path, out: &Path) -> Result<Process> {
        let mut command = crate::program::again()?;
        command.args(["serve", "--json", "--threads", "1", "--dir"]).arg(dir);
        command.args(["method.name=fedavg", "data.public=none", "server.listen=127.0.0.1:0"]);
        command.arg(format!("model.hidden=[{}]", self.hidden));
        command.arg(format!("federation.rounds={}", self.rounds));
        command.arg(format!("federation.fraction={}", f64::from(self.cohort) / f64::from(self.nodes)));
        command.arg(format!("data.partition={{kind='virtual', clients={}, samples=10}}", self.nodes));
        command.stdin(Stdio::null()).stdout(std::fs::File::create(out)?);
        Process::start("the server".into(), &mut command, dir.join("log"))
    }
}

fn addresses(server: &mut Process, dir: &Path) -> Result<Addresses> {
    loop {
        if let Ok(text) = std::fs::read_to_string(dir.join("addresses.json")) {
            return Ok(serde_json::from_str(&text)?);
        }
        server.check()?;
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Resident memory of a process, if the system reports it.
fn resident_mb(child: &Child) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse::<f64>().ok().map(|kb| kb / 1000.0)
}

/// A node that does everything except training.
struct SimulatedNode {
    link: Link,
    cache: Store,
    outbox: Store,
    client: u32,
}

impl SimulatedNode {
    async fn run(self) {
        loop {
            match self.turn().await {
                Ok(true) => return,
                Ok(false) => (),
                Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }

    /// Whether the run is over.
    async fn turn(&self) -> fedproj_net::Result<bool> {
        match self.link.send(&WorkRequest::current()).await?.kind {
            Some(WorkKind::Train(task)) => self.contribute(&task).await.map(|()| false),
            Some(WorkKind::Done(_)) => Ok(true),
            _ => Ok(false),
        }
    }

    async fn contribute(&self, task: &Task) -> fedproj_net::Result<()> {
        self.cache.retain(&[&task.weights])?;
        self.link.fetch(&task.weights, &self.cache).await?;
        // Each node has its own small weights.
        let n = (task.weights.len / 4) as usize;
        let weights: Vec<f32> = (0..n).map(|i| ((i as u32 ^ self.client) % 1000) as f32 * 1e-4).collect();
        self.outbox.retain(&[])?;
        let named = |name: &str, values: &[f32]| -> fedproj_net::Result<NamedBlob> {
            Ok(NamedBlob { name: name.into(), blob: self.outbox.put(&encode_f32(values))? })
        };
        let contribution = Contribution {
            run: task.run.clone(),
            round: task.round,
            client: self.client,
            n_samples: 10,
            n_steps: 1,
            stats: LocalStats::default(),
            parts: vec![named("weights", &weights)?, named("buffers", &[])?],
        };
        while let Some(VerdictKind::Missing(missing)) = self.link.send(&contribution).await?.kind {
            for part in &contribution.parts {
                if let Some(have) = missing.have.iter().find(|have| have.hash == part.blob.hash) {
                    self.link.upload(&part.blob, have.len, &self.outbox).await?;
                }
            }
        }
        // A thousand nodes share the disk, so each removes its files early.
        self.cache.retain(&[])?;
        self.outbox.retain(&[])
    }
}
