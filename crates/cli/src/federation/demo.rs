//! `fedproj demo`: a server and node processes on this machine, with real certificates, compared with the simulator.

use super::block_on;
use super::process::Process;
use crate::device::default_threads;
use crate::program;
use crate::settings::Settings;
use crate::{say, tell};
use anyhow::{Context, Result, bail};
use clap::Args;
use fedproj_core::{Config, Experiment, Simulation, StoredRun};
use fedproj_net::server::http::Addresses;
use fedproj_net::server::journal::{Event, Journal};
use fedproj_net::server::status::{RoundLine, Status};
use fedproj_net::server::{Authority, INVITATION_LASTS, Registry, ServeSetup, Served, ServerConfig, serve};
use fedproj_report::Measure;
use serde::Serialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

/// Arguments of `demo`.
#[derive(Args)]
pub struct Demo {
    /// Nodes, each a process with its own certificate
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=64))]
    nodes: u16,
    /// Secure aggregation: the server learns sums, and no single contribution
    #[arg(long)]
    secure: bool,
    /// Nodes that are killed in the second round; the simulator repeats the rounds with those that stayed
    #[arg(long, value_name = "N", default_value_t = 0)]
    drop: u16,
    #[command(flatten)]
    settings: Settings,
    /// Keep the federation folder here [default: a temporary folder, removed at the end]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Keep the status page until somebody has looked at the finished run
    #[arg(long)]
    keep: bool,
    /// Print one JSON object on the last line
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct DemoReport {
    model_hash: String,
    simulator_hash: String,
    rounds: usize,
    bytes: u64,
    nodes: u16,
    /// Clients per round whose contributions count.
    counted: Vec<usize>,
    accuracy: f64,
}

impl Demo {
    /// Runs the federation, then the simulator, and compares.
    pub fn run(mut self) -> Result<()> {
        let defaults = [
            "federation.rounds=8".to_owned(),
            "federation.fraction=1.0".into(),
            "local.epochs=5".into(),
            "method.fedproj.projection.warmup=1".into(),
            format!("data.partition={{kind='dirichlet', beta=0.5, clients={}, min_samples=15}}", self.nodes),
        ];
        self.settings.settings.splice(0..0, defaults);
        if self.secure {
            self.settings.settings.push("server.secure=true".into());
        }
        if self.drop > 0 {
            // The others do not wait long for those that are gone.
            self.settings.settings.push("server.lost_after_s=5.0".into());
        }
        let (config, _, mut server) = self.settings.federation()?;
        self.check(&config, &server)?;
        let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
        // Nodes get these addresses from us, so any free port will do. People may want a fixed address for the status page.
        (server.listen, server.enrol) = (loopback, Some(loopback));
        server.status = server.status.or(Some(loopback));
        if let Some(out) = self.out.as_ref().filter(|out| out.join("server").exists()) {
            let problem = format!("--out {}: a federation is there already", out.display());
            bail!(fedproj_net::Error::Config(format!("{problem}\nhint: remove it, or choose another directory")));
        }
        let temporary = std::env::temp_dir().join(format!("fedproj-demo-{}", std::process::id()));
        let dir = self.out.clone().unwrap_or_else(|| temporary.clone());
        let shown = self.federate(&dir, config, server).and_then(|(report, page)| {
            self.show(&report)?;
            if self.keep {
                tell!("the status page stays until somebody looks at it, or until Ctrl-C");
            }
            page.join().unwrap_or_else(|p| std::panic::resume_unwind(p));
            Ok(())
        });
        if self.out.is_none() {
            // A folder that cannot be removed does not change the result.
            let _ = std::fs::remove_dir_all(&temporary);
        }
        shown
    }

    /// Rejects what would never end, or what the simulator cannot repeat.
    fn check(&self, config: &Config, server: &ServerConfig) -> Result<()> {
        let (n_nodes, n_staying) = (usize::from(self.nodes), usize::from(self.nodes.saturating_sub(self.drop)));
        let least = server.fewest_in_round(config, n_nodes, config.federation.cohort(n_nodes));
        if n_staying < least {
            bail!(fedproj_net::Error::Config(format!(
                "--drop {}: of {n_nodes} nodes, {least} must stay, for a round to close\nhint: more --nodes, or a smaller \
                 server.quorum",
                self.drop
            )));
        }
        if config.privacy.is_on() {
            bail!(fedproj_net::Error::Config(
                "privacy: a demo compares its model with the simulator's, and noise that protects cannot be repeated\n\
                 hint: `fedproj run` simulates privacy; `fedproj serve` and `fedproj join` run it"
                    .into()
            ));
        }
        Ok(())
    }

    fn show(&self, report: &DemoReport) -> Result<()> {
        if self.json {
            say!("{}", serde_json::to_string(report)?);
        }
        if report.model_hash != report.simulator_hash {
            bail!(
                "the federation's model {} differs from the simulator's {}",
                report.model_hash,
                report.simulator_hash
            );
        }
        if !self.json {
            say!(
                "{} rounds, {}, accuracy {:.2} %: model {}, identical to the simulator's",
                report.rounds,
                Measure::Size.text(report.bytes as f64),
                100.0 * report.accuracy,
                &report.model_hash[..16]
            );
        }
        Ok(())
    }

    /// The result, and the thread that serves the status page.
    fn federate(&self, dir: &Path, config: Config, server: ServerConfig) -> Result<(DemoReport, JoinHandle<()>)> {
        let federation = dir.join("server");
        // Created before the server, so that nodes can be invited while it starts.
        let authority = Authority::open(&federation)?;
        let registry = Registry::open(&federation)?;
        let data_dir = self.settings.data_dir()?;
        let setup = ServeSetup {
            dir: federation,
            config: config.clone(),
            earlier: config.clone(),
            server,
            data_dir: data_dir.clone(),
            n_threads: usize::from(default_threads()),
        };
        let ((tell, told), (deliver, delivered)) = (mpsc::channel(), mpsc::channel());
        let page = serve_in_background(setup, tell, deliver, self.keep);
        let watched = match told.recv() {
            Ok((addresses, status)) => self.watch(dir, &authority, &registry, &addresses, &status),
            // The server has failed; its error follows below.
            Err(_) => Ok(Vec::new()),
        };
        let rounds = watched.unwrap_or_else(|error| {
            // Without nodes the server would wait for ever.
            tell!("error: {error:#}");
            std::process::exit(1);
        });
        let served = delivered.recv().context("the server ended without a result")??;
        if !self.json {
            tell!("running the simulator with the same configuration");
        }
        let method = config.method.build()?;
        let experiment = Experiment::load(config, method.as_ref(), data_dir.as_deref())?;
        let mut simulation = Simulation::new(experiment, method, usize::from(default_threads()))?;
        let mut simulator_hash = String::new();
        let recorded = StoredRun::open(&served.run)?.rounds;
        while !simulation.is_done() {
            let record = match recorded.get(simulation.state().n_rounds_done as usize).filter(|_| self.drop > 0) {
                Some(recorded) => simulation.round_of(&recorded.cohort, &|_| ())?,
                None => simulation.round(&|_| ())?,
            };
            simulator_hash = record.model_hash;
        }
        let report = DemoReport {
            model_hash: served.summary.model_hash,
            simulator_hash,
            rounds: rounds.len(),
            bytes: rounds.iter().map(|r| r.bytes_up + r.bytes_down).sum(),
            nodes: self.nodes,
            counted: rounds.iter().map(|r| r.counted).collect(),
            accuracy: served.summary.last,
        };
        Ok((report, page))
    }

    /// Enrols and starts the nodes, then shows rounds until the last.
    fn watch(
        &self,
        dir: &Path,
        authority: &Authority,
        registry: &Registry,
        addresses: &Addresses,
        status: &Status,
    ) -> Result<Vec<RoundLine>> {
        if let (Some(page), false) = (addresses.status, self.json) {
            tell!("status page http://{page}");
        }
        let enrol = addresses.enrol.context("the demo's server enrols")?;
        let mut nodes = Vec::new();
        for client in 0..u32::from(self.nodes) {
            let (token, _) = registry.invite(authority, &format!("node-{client}"), Some(client), INVITATION_LASTS)?;
            nodes.push(start_node(dir, client, enrol, addresses.listen, &token.to_string(), &self.settings)?);
        }
        let mut shown = 0;
        loop {
            let view = status.view();
            if nodes.len() + usize::from(self.drop) > usize::from(self.nodes) && is_under_way(&dir.join("server"))? {
                // Dropping a process kills it.
                nodes.truncate(usize::from(self.nodes - self.drop));
            }
            for round in view.rounds.iter().skip(shown).filter(|_| !self.json) {
                let accuracy = round.accuracy.map_or(String::new(), |a| format!(", accuracy {:.2} %", 100.0 * a));
                tell!("round {}/{}: {} nodes{accuracy}", round.round + 1, view.n_rounds, round.counted);
            }
            shown = view.rounds.len();
            if view.done || shown == view.n_rounds as usize {
                nodes.iter_mut().try_for_each(Process::finish)?;
                return Ok(view.rounds);
            }
            nodes.iter_mut().try_for_each(Process::check)?;
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Whether the second round has begun: its clients are fixed, and none of them is done.
fn is_under_way(federation: &Path) -> Result<bool> {
    let mut is_begun = false;
    Journal::read(federation, &mut |entry| {
        is_begun |= match entry.event {
            Event::RosterFixed { round, .. } => round >= 1,
            // Without secure aggregation there is no roster.
            Event::Accepted(accepted) => accepted.round >= 1,
            _ => false,
        };
        Ok(())
    })?;
    Ok(is_begun)
}

/// Serves on a thread, which delivers the result. With `keep`, it then serves the status page until somebody has seen the
/// end.
fn serve_in_background(
    setup: ServeSetup,
    tell: Sender<(Addresses, Arc<Status>)>,
    deliver: Sender<Result<Served>>,
    keep: bool,
) -> JoinHandle<()> {
    let work = async move {
        let mut status = None;
        let served = serve(setup, |addresses, serving| {
            status = Some(Arc::clone(serving));
            drop(tell.send((*addresses, Arc::clone(serving))));
        });
        let served = served.await.map_err(anyhow::Error::from);
        let is_done = served.is_ok();
        drop(deliver.send(served));
        if let (Some(status), true) = (status, keep && is_done) {
            status.end_shown().await;
        }
        Ok(())
    };
    // Its only error is that of the runtime, and then nothing is delivered.
    std::thread::spawn(move || drop(block_on(work)))
}

/// Enrols a node and starts its process.
fn start_node(
    dir: &Path,
    client: u32,
    enrol: SocketAddr,
    listen: SocketAddr,
    token: &str,
    settings: &Settings,
) -> Result<Process> {
    let home = dir.join(format!("node-{client}"));
    let enrolled = program::again()?
        .args(["enrol", &format!("https://{enrol}"), "--node"])
        .arg(&home)
        .env("FEDPROJ_TOKEN", token)
        .stdin(Stdio::null())
        .output()?;
    if !enrolled.status.success() {
        bail!("node {client} could not enrol: {}", String::from_utf8_lossy(&enrolled.stderr));
    }
    let mut command = program::again()?;
    command.args(["join", &format!("https://{listen}"), "--data", "run", "--until-done", "--with-stdin", "--node"]);
    command.arg(&home).stdin(Stdio::piped()).stdout(Stdio::null());
    if let Some(data_dir) = settings.data_dir()?.filter(|dir| dir.is_dir()) {
        command.arg("--data-dir").arg(data_dir);
    }
    Process::start(format!("node {client}"), &mut command, home.join("log"))
}
