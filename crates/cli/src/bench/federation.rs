//! `fedproj bench federation`: a server process under the load of many nodes. This process plays the nodes, each with its own
//! certificate and connection. All ask for work, and a cohort contributes to each round. Nobody trains.

use crate::federation::block_on;
use crate::federation::process::Process;
use crate::{give, say, tell};
use anyhow::{Context, Result, bail};
use clap::Args;
use fedproj_core::{ClientState, ClientSummary, Config, Experiment, LocalStats, Part};
use fedproj_net::node::{Home, Summing};
use fedproj_net::secure::MaskedLayout;
use fedproj_net::server::http::Addresses;
use fedproj_net::server::{Authority, INVITATION_LASTS, Registry};
use fedproj_net::wire::{
    Contribution, EnrolReply, NamedBlob, PLAIN, Store, Task, VerdictKind, WorkKind, WorkRequest, encode_f32, encode_u64,
};
use fedproj_net::{Link, Policy};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
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
    /// Secure aggregation: nodes mask their contributions, and the server learns their sum
    #[arg(long)]
    secure: bool,
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
    bytes_per_contribution: u64,
    /// Processor seconds: of the server per round, of the nodes per contribution.
    server_cpu_s_per_round: f64,
    node_cpu_s_per_contribution: f64,
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
        give(self.json, &report, || {
            say!(
                "{} nodes, {} per round, {} rounds, model {:.2} MB: {:.2} s per round ({:.2} s of the server's processor, {:.3} s of \
                 a node's, {:.2} MB per contribution); server memory {:.0} MB early, {:.0} MB at the end, {:.0} MB peak",
                report.nodes,
                report.cohort,
                report.rounds,
                report.model_bytes as f64 / 1e6,
                report.seconds_per_round,
                report.server_cpu_s_per_round,
                report.node_cpu_s_per_contribution,
                report.bytes_per_contribution as f64 / 1e6,
                report.server_mb_early,
                report.server_mb_end,
                report.server_mb_peak
            );
        })
    }

    fn measure(&self, dir: &Path) -> Result<LoadReport> {
        let federation = dir.join("server");
        tell!("certificates for {} nodes", self.nodes);
        let homes = self.enrol(dir, &federation)?;
        let out = dir.join("out");
        let mut server = self.start_server(&federation, &out)?;
        let addresses = addresses(&mut server, &federation)?;
        let address = format!("https://{}", addresses.listen);
        let layout = if self.secure { Some(Arc::new(self.layout()?)) } else { None };
        let (start, cpu_before, mut server_cpu_s) = (Instant::now(), cpu_s("self"), 0.0);
        let samples = block_on(async {
            for (client, home) in homes.iter().enumerate() {
                let node = SimulatedNode {
                    link: Link::new(&address, home.tls()?)?,
                    cache: home.cache()?,
                    outbox: home.outbox()?,
                    client: client as u32,
                    home: home.clone(),
                    layout: layout.clone(),
                };
                tokio::spawn(node.run());
            }
            let mut samples = Vec::new();
            while server.child.try_wait()?.is_none() {
                samples.extend(resident_mb(&server.child));
                server_cpu_s = f64::max(server_cpu_s, cpu_s(&server.child.id().to_string()));
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
            Ok(samples)
        })?;
        let (seconds, node_cpu_s) = (start.elapsed().as_secs_f64(), cpu_s("self") - cpu_before);
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
        let (n_contributions, bytes) =
            (f64::from(self.cohort * self.rounds), rounds.iter().map(|r| r.bytes_up + r.bytes_down).sum::<u64>());
        let model_bytes = std::fs::metadata(run.join("model.safetensors"))?.len();
        Ok(LoadReport {
            nodes: self.nodes,
            cohort: self.cohort,
            rounds: self.rounds,
            model_bytes,
            seconds,
            seconds_per_round: rounds.iter().map(|r| r.seconds.total()).sum::<f64>() / f64::from(self.rounds),
            bytes,
            bytes_per_contribution: (bytes as f64 / n_contributions) as u64,
            server_cpu_s_per_round: server_cpu_s / f64::from(self.rounds),
            node_cpu_s_per_contribution: node_cpu_s / n_contributions,
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
        command.arg("server.listen=127.0.0.1:0").args(self.settings());
        if self.secure {
            command.arg("server.secure=true");
        }
        command.stdin(Stdio::null()).stdout(std::fs::File::create(out)?);
        Process::start("the server".into(), &mut command, dir.join("log"))
    }
}

impl Load {
    /// The run's settings.
    fn settings(&self) -> Vec<String> {
        vec![
            "method.name=fedavg".into(),
            "data.public=none".into(),
            format!("model.hidden=[{}]", self.hidden),
            format!("federation.rounds={}", self.rounds),
            format!("federation.fraction={}", f64::from(self.cohort) / f64::from(self.nodes)),
            format!("data.partition={{kind='virtual', clients={}, samples=10}}", self.nodes),
            format!("federation.sum={}", if self.secure { "fixed" } else { "float" }),
        ]
    }

    /// The layout of masked contributions.
    fn layout(&self) -> Result<MaskedLayout> {
        let config = Config::from_layers(None, &self.settings())?;
        let method = config.method.build()?;
        let experiment = Experiment::load(config, method.as_ref(), None)?;
        Ok(MaskedLayout::new(&experiment, method.as_ref(), self.nodes as usize, 0)?)
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
    super::status_kib(&child.id().to_string(), "VmRSS:").map(|kib| kib / 1000.0)
}

/// Processor seconds of a process so far, if the system reports them.
fn cpu_s(process: &str) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name before the last parenthesis may hold spaces. Then follow the state and, as 12th and 13th, the times.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
    let ticks: f64 = fields.filter_map(|field| field.parse::<f64>().ok()).sum();
    // Linux counts them in hundredths of a second.
    ticks / 100.0
}

/// A node that does everything except training.
struct SimulatedNode {
    link: Link,
    cache: Store,
    outbox: Store,
    client: u32,
    home: Home,
    layout: Option<Arc<MaskedLayout>>,
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
        if let Some(layout) = &self.layout {
            self.sum_up(task, layout, &weights).await?;
            self.cache.retain(&[])?;
            return self.outbox.retain(&[]);
        }
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

    /// Contributes to a secure sum.
    async fn sum_up(&self, task: &Task, layout: &MaskedLayout, weights: &Vec<f32>) -> fedproj_net::Result<()> {
        let none = Vec::new();
        let parts = [(Part::Weights, weights), (Part::Buffers, &none)];
        let summary = ClientSummary { client: 0, n_samples: 10, n_steps: 1, stats: &LocalStats::default() };
        let plain = encode_u64(&layout.encode(summary, 1.0, &[], &parts)?);
        let plain = NamedBlob { name: PLAIN.into(), blob: self.outbox.put(&plain)? };
        let (run, parts) = (task.run.clone(), vec![plain]);
        let pending = Contribution { run, round: task.round, client: self.client, parts, ..Contribution::default() };
        self.home.set_pending(task, &pending, &ClientState::new())?;
        let policy = &Policy::default();
        Summing { link: &self.link, home: &self.home, policy, pending: &pending }.run().await
    }
}
