//! `fedproj watch`: a page that follows a run while it is made.

use crate::federation::block_on;
use crate::tell;
use anyhow::Result;
use clap::Args;
use fedproj_core::{Manifest, StoredRun, draw_cohort, methods::title};
use fedproj_net::live::{Screen, follow, seconds_per_round};
use fedproj_net::server::status::RoundLine;
use fedproj_report::{Live, Pace, Table};
use fedproj_study::find_runs;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A run whose file has not changed for this long, and for this many rounds, is silent.
const SILENT_AFTER: Duration = Duration::from_mins(1);
const SILENT_ROUNDS: f64 = 4.0;

/// Clients in the table.
const N_CLIENTS_SHOWN: usize = 200;

/// Arguments of `watch`.
#[derive(Args)]
pub struct WatchArgs {
    /// Run directory, or a directory of run directories: the run that was written last is shown
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Address of the page, on this machine; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
}

impl WatchArgs {
    /// Serves the page until Ctrl-C.
    pub fn run(self) -> Result<()> {
        // What cannot be shown at all is an error now, not a page.
        look(&self.run)?;
        let shown = move || {
            look(&self.run).unwrap_or_else(|error| Live {
                title: "This run cannot be read".into(),
                now: format!("{error:#}"),
                pace: Pace::Silent,
                ..Live::default()
            })
        };
        let screen = Screen::new(shown, || ());
        block_on(async {
            let ready = |address| tell!("watching at http://{address} (Ctrl-C ends)");
            Ok(screen.serve(self.listen, ready).await?)
        })
    }
}

/// What is known of the run that was written last.
fn look(path: &Path) -> Result<Live> {
    let written = |dir: &PathBuf| {
        let time = |file| std::fs::metadata(dir.join(file)).and_then(|meta| meta.modified()).ok();
        time("metrics.jsonl").or_else(|| time("config.toml")).unwrap_or(SystemTime::UNIX_EPOCH)
    };
    let dirs = find_runs(&[path.to_owned()])?;
    let dir = dirs.iter().max_by_key(|dir| written(dir)).expect("find_runs finds a run or fails");
    let (run, manifest) = (StoredRun::so_far(dir)?, Manifest::read(dir)?);
    let since = SystemTime::now().duration_since(written(dir)).unwrap_or_default();
    let rounds: Vec<RoundLine> = run.rounds.iter().map(RoundLine::of).collect();
    let n_rounds = run.config.federation.rounds;
    let silent_after = SILENT_AFTER.as_secs_f64().max(SILENT_ROUNDS * seconds_per_round(&rounds).unwrap_or(0.0));
    let pace = if dir.join("summary.json").exists() {
        Pace::Finished
    } else if rounds.is_empty() {
        Pace::Waiting
    } else if since.as_secs_f64() > silent_after {
        Pace::Silent
    } else {
        Pace::Running
    };
    let round = rounds.len() + 1;
    let now = match pace {
        Pace::Finished if rounds.len() < n_rounds as usize => {
            format!("Ended after {} of {n_rounds} rounds: the privacy budget is spent", rounds.len())
        }
        Pace::Finished => format!("All {n_rounds} rounds are done"),
        Pace::Silent => {
            format!("Round {round} of {n_rounds}: no news for {}", fedproj_report::duration(since.as_secs_f64()))
        }
        _ => format!("Round {round} of {n_rounds}"),
    };
    let (method, data) = (title(&run.config.method.name), &run.config.data.private.name);
    let mut live = Live {
        title: format!("{method} on {data}, seed {}", run.config.seed),
        subtitle: dir.display().to_string(),
        pace,
        now,
        ..Live::default()
    };
    // Under privacy nobody may know who trains.
    let manifest = manifest.filter(|_| !run.config.privacy.is_on());
    live.tables.extend(manifest.map(|manifest| clients(&run, &manifest, pace)));
    follow(&mut live, &rounds, n_rounds, since);
    Ok(live)
}

/// What each client does and did. Who trains now follows from the seed and the round.
fn clients(run: &StoredRun, manifest: &Manifest, pace: Pace) -> (String, Table) {
    let n_clients = manifest.sizes.get("clients").copied().unwrap_or(0);
    let all: Vec<u32> = (0..n_clients as u32).collect();
    let size = run.config.federation.cohort(n_clients);
    let training = match pace {
        Pace::Running | Pace::Waiting => draw_cohort(run.config.seed, run.rounds.len() as u32, &all, size),
        Pace::Silent | Pace::Finished => Vec::new(),
    };
    let mut past: BTreeMap<u32, (usize, u32)> = BTreeMap::new();
    for round in &run.rounds {
        for client in &round.cohort {
            let (n, last) = past.entry(*client).or_default();
            (*n, *last) = (*n + 1, round.round + 1);
        }
    }
    // Of many clients, those that train are shown first.
    let mut shown = all;
    shown.sort_by_key(|client| (n_clients > N_CLIENTS_SHOWN && !training.contains(client), *client));
    shown.truncate(N_CLIENTS_SHOWN);
    let row = |client: &u32| {
        let state = if training.contains(client) { "training" } else { "idle" };
        let (n, last) = past.get(client).map_or((0, "–".into()), |(n, last)| (*n, last.to_string()));
        vec![client.to_string(), state.to_owned(), n.to_string(), last]
    };
    let table = Table::new(["client", "state", "rounds", "last round"], 2, shown.iter().map(row).collect());
    let of = if n_clients > N_CLIENTS_SHOWN { format!(" ({N_CLIENTS_SHOWN} of {n_clients})") } else { String::new() };
    (format!("Clients{of}"), table)
}
