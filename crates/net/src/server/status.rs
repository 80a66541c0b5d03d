//! What people and monitoring see of a server: a page that follows the run, JSON, and Prometheus' text format.

use super::desk::Desk;
use super::presence::Seen;
use super::{Registry, lock};
use crate::live::{Screen, follow};
use axum::Router;
use axum::extract::State;
use axum::http::header;
use axum::routing::get;
use fedproj_core::methods::title;
use fedproj_core::{PrivacySpent, Pull, RoundRecord};
use fedproj_report::{Live, Pace, Table, duration};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long a node counts as alive after its last sign of life.
const ALIVE: Duration = Duration::from_mins(1);

/// The state of a run, for display.
#[derive(Debug)]
pub struct Status {
    view: Mutex<View>,
    /// When the last round ended; at first, when the server started.
    last: Mutex<Instant>,
    /// Whether a visitor has been shown the end.
    end_shown: watch::Sender<bool>,
}

/// See [`Status`].
#[derive(Clone, Debug, Default, Serialize)]
pub struct View {
    /// The run.
    pub run: String,
    /// Its method.
    pub method: String,
    /// Rounds of the whole run.
    pub n_rounds: u32,
    /// The open round, counted from 0.
    pub round: u32,
    /// Clients asked in it.
    pub asked: Vec<u32>,
    /// Clients whose contributions have arrived.
    pub arrived: Vec<u32>,
    /// Contributions that it needs.
    pub needed: usize,
    /// Whether the run is over.
    pub done: bool,
    /// Finished rounds.
    pub rounds: Vec<RoundLine>,
    /// Contributions since the start.
    pub n_contributions: u64,
    /// Clients that were late, since the start.
    pub n_late: u64,
    /// Clients that dropped out, since the start.
    pub n_dropped_out: u64,
    /// Clients asked again after they dropped out, since the start.
    pub n_asked_again: u64,
}

/// A finished round.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RoundLine {
    /// The round.
    pub round: u32,
    /// Test accuracy.
    pub accuracy: Option<f64>,
    /// Contributions.
    pub counted: usize,
    /// Bytes from nodes.
    pub bytes_up: u64,
    /// Bytes to nodes.
    pub bytes_down: u64,
    /// Seconds.
    pub seconds: f64,
    /// BLAKE3 of the model.
    pub model_hash: String,
    /// Mean training loss over clients; not under privacy.
    pub train_loss: Option<f64>,
    /// Share of projected gradients.
    pub projection_rate: Option<f64>,
    /// Mean memory loss of the clients before local training.
    pub memory_loss_before: Option<f64>,
    /// The same after it.
    pub memory_loss_after: Option<f64>,
    /// What all rounds so far have revealed, under privacy.
    pub privacy: Option<PrivacySpent>,
    /// How hard each client pulled at the model, where it is known: not for rounds before the server's start.
    pub pulls: Vec<Pull>,
}

impl RoundLine {
    /// What is shown of a round.
    pub fn of(r: &RoundRecord) -> Self {
        Self {
            round: r.round,
            accuracy: r.accuracy,
            counted: r.cohort.len(),
            bytes_up: r.bytes_up,
            bytes_down: r.bytes_down,
            seconds: r.seconds.total(),
            model_hash: r.model_hash.clone(),
            train_loss: r.train_loss,
            projection_rate: r.projection_rate,
            memory_loss_before: r.memory_loss_before,
            memory_loss_after: r.memory_loss_after,
            privacy: r.privacy.clone(),
            pulls: Vec::new(),
        }
    }

    /// What local training adds to the memory loss: above zero, clients forget.
    pub fn memory_loss_change(&self) -> Option<f64> {
        Some(self.memory_loss_after? - self.memory_loss_before?)
    }
}

impl Status {
    /// The status of a run with its finished rounds.
    pub fn new(run: &str, method: &str, n_rounds: u32, rounds: &[RoundRecord]) -> Self {
        let rounds = rounds.iter().map(RoundLine::of).collect();
        let view = View { run: run.into(), method: method.into(), n_rounds, rounds, ..View::default() };
        Self { view: Mutex::new(view), last: Mutex::new(Instant::now()), end_shown: watch::Sender::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, View> {
        lock(&self.view)
    }

    /// A copy.
    pub fn view(&self) -> View {
        self.lock().clone()
    }

    pub(crate) fn round_opened(&self, round: u32, asked: &[u32], needed: usize) {
        let mut view = self.lock();
        (view.round, view.asked, view.needed) = (round, asked.to_vec(), needed);
        view.arrived.clear();
    }

    pub(crate) fn asked(&self, asked: &[u32]) {
        self.lock().asked = asked.to_vec();
    }

    pub(crate) fn contribution(&self, client: u32) {
        let mut view = self.lock();
        view.arrived.push(client);
        view.n_contributions += 1;
    }

    pub(crate) fn dropped_out(&self) {
        self.lock().n_dropped_out += 1;
    }

    pub(crate) fn asked_again(&self, n: usize) {
        self.lock().n_asked_again += n as u64;
    }

    pub(crate) fn round_done(&self, record: &RoundRecord, n_late: usize, pulls: &[Pull]) {
        let mut view = self.lock();
        view.rounds.push(RoundLine { pulls: pulls.to_vec(), ..RoundLine::of(record) });
        view.n_late += n_late as u64;
        *lock(&self.last) = Instant::now();
    }

    pub(crate) fn finish(&self) {
        self.lock().done = true;
    }

    /// Prometheus' text format.
    pub fn metrics(&self, desk: &Desk) -> String {
        let view = self.lock();
        let alive = desk.presence.within(ALIVE).len();
        let mut out = String::new();
        let mut metric = |name: &str, kind: &str, help: &str, value: f64| {
            let _ = write!(out, "# HELP fedproj_{name} {help}\n# TYPE fedproj_{name} {kind}\nfedproj_{name} {value}\n");
        };
        let load = |n: &std::sync::atomic::AtomicU64| n.load(Ordering::Relaxed) as f64;
        metric("rounds_done", "gauge", "Finished rounds.", view.rounds.len() as f64);
        metric("rounds", "gauge", "Rounds of the whole run.", f64::from(view.n_rounds));
        metric("nodes_alive", "gauge", "Nodes heard from within a minute.", alive as f64);
        metric("round_asked", "gauge", "Clients asked in the open round.", view.asked.len() as f64);
        metric("round_arrived", "gauge", "Contributions to the open round.", view.arrived.len() as f64);
        metric("contributions_total", "counter", "Contributions that count.", view.n_contributions as f64);
        metric("late_total", "counter", "Clients that were asked but did not contribute.", view.n_late as f64);
        metric("dropped_out_total", "counter", "Clients that declined or were rejected.", view.n_dropped_out as f64);
        metric(
            "asked_again_total",
            "counter",
            "Clients asked again after they dropped out.",
            view.n_asked_again as f64,
        );
        metric("refused_total", "counter", "Rejected contributions.", load(&desk.n_rejected));
        metric("received_bytes_total", "counter", "Bytes from nodes.", load(&desk.bytes_up));
        metric("sent_bytes_total", "counter", "Bytes to nodes.", load(&desk.bytes_down));
        if let Some(accuracy) = view.rounds.iter().rev().find_map(|r| r.accuracy) {
            metric("accuracy", "gauge", "Test accuracy of the global model.", accuracy);
        }
        out
    }

    /// What the page shows.
    pub fn live(&self, desk: &Desk, registry: &Registry) -> Live {
        let (view, since) = (self.view(), lock(&self.last).elapsed());
        let (round, n_rounds, needed) = (view.round + 1, view.n_rounds, view.needed);
        let pace = match (view.done, view.asked.is_empty()) {
            (true, _) => Pace::Finished,
            (false, true) => Pace::Waiting,
            (false, false) => Pace::Running,
        };
        let now = match pace {
            Pace::Finished => format!("All {n_rounds} rounds are done"),
            Pace::Waiting => "Waiting for nodes".into(),
            _ => format!("Round {round} of {n_rounds}: {} of {needed} contributions", view.arrived.len()),
        };
        let mut live = Live {
            title: format!("{} in a federation", title(&view.method)),
            subtitle: format!("run {}", view.run),
            pace,
            now,
            ..Live::default()
        };
        live.tables.push(("Clients".into(), clients(&view, desk, registry)));
        follow(&mut live, &view.rounds, n_rounds, since);
        live
    }

    /// Waits until a visitor has been shown the end of the run.
    pub async fn end_shown(&self) {
        // It fails only if the sender is gone, and this is the sender.
        let _ = self.end_shown.subscribe().wait_for(|shown| *shown).await;
    }
}

/// What each client does: those that were asked, were heard from, or have a node.
fn clients(view: &View, desk: &Desk, registry: &Registry) -> Table {
    // A page without names is better than none.
    let nodes = registry.nodes().unwrap_or_default();
    let seen = desk.presence.seen();
    // The last of each client, which shows who pulls hard or against the others.
    let pulls: BTreeMap<u32, &Pull> =
        view.rounds.iter().flat_map(|round| &round.pulls).map(|pull| (pull.client, pull)).collect();
    let all: BTreeSet<u32> = seen.keys().chain(&view.asked).copied().chain(nodes.iter().map(|n| n.client)).collect();
    let row = |client: &u32| {
        // A revoked node may have a successor.
        let node = nodes.iter().filter(|node| node.client == *client).max_by_key(|node| node.is_out().is_none());
        let silence = desk.presence.silence(*client);
        let state = match seen.get(client) {
            _ if view.arrived.contains(client) => "has contributed".to_owned(),
            _ if node.is_some_and(|node| node.revoked) => "revoked".into(),
            _ if node.is_some_and(|node| node.is_out().is_some()) => "certificate expired".into(),
            None if view.asked.contains(client) => "asked, not heard from yet".into(),
            None => "not heard from yet".into(),
            Some(_) if silence > ALIVE => "gone".into(),
            Some(Seen { round: Some(round), .. }) => format!("trains in round {}", round.saturating_add(1)),
            Some(_) => "waiting".into(),
        };
        let heard = if seen.contains_key(client) { duration(silence.as_secs_f64()) + " ago" } else { "–".into() };
        let number = |of: fn(&Pull) -> f64| match pulls.get(client) {
            Some(pull) => format!("{:.3}", of(pull)).replace('-', "−"),
            None => "–".into(),
        };
        vec![
            client.to_string(),
            node.map(|node| node.name.clone()).unwrap_or_default(),
            state,
            heard,
            number(|p| p.norm),
            number(|p| p.cosine),
        ]
    };
    let headers = ["client", "node", "state", "last heard", "norm", "cosine"].map(str::to_owned).to_vec();
    Table { headers, n_names: 3, rows: all.iter().map(row).collect(), ..Table::default() }
}

/// The page, JSON and metrics, all read-only.
pub(crate) fn routes(status: &Arc<Status>, desk: &Arc<Desk>, registry: &Registry) -> Router {
    type Both = State<(Arc<Status>, Arc<Desk>)>;
    let json = |State((status, _)): Both| async move {
        let text = serde_json::to_string(&status.view()).unwrap_or_default();
        ([(header::CONTENT_TYPE, "application/json")], text)
    };
    let metrics = |State((status, desk)): Both| async move {
        ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], status.metrics(&desk))
    };
    let shown = (Arc::clone(status), Arc::clone(desk), registry.clone());
    let seen = Arc::clone(status);
    let end_shown = move || {
        seen.end_shown.send_replace(true);
    };
    let screen = Screen::new(move || shown.0.live(&shown.1, &shown.2), end_shown);
    Router::new()
        .route("/status.json", get(json))
        .route("/metrics", get(metrics))
        .with_state((Arc::clone(status), Arc::clone(desk)))
        .merge(screen.routes())
}
