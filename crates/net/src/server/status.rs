//! What people and monitoring see of a server: a page without scripts, JSON, and Prometheus' text format.

use super::desk::Desk;
use super::lock;
use axum::Router;
use axum::extract::State;
use axum::http::header;
use axum::routing::get;
use fedproj_core::{Pull, RoundRecord};
use serde::Serialize;
use std::fmt::Write;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// How long a node counts as alive after its last sign of life.
const ALIVE: Duration = Duration::from_mins(1);

/// The state of a run, for display.
#[derive(Debug)]
pub struct Status {
    view: Mutex<View>,
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
#[derive(Clone, Debug, Serialize)]
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
    /// How hard each client pulled at the model, where it is known: not for rounds before the server's start.
    pub pulls: Vec<Pull>,
}

impl RoundLine {
    fn of(r: &RoundRecord, pulls: &[Pull]) -> Self {
        Self {
            round: r.round,
            accuracy: r.accuracy,
            counted: r.cohort.len(),
            bytes_up: r.bytes_up,
            bytes_down: r.bytes_down,
            seconds: r.seconds.total(),
            model_hash: r.model_hash.clone(),
            pulls: pulls.to_vec(),
        }
    }
}

impl Status {
    /// The status of a run with its finished rounds.
    pub fn new(run: &str, method: &str, n_rounds: u32, rounds: &[RoundRecord]) -> Self {
        let rounds = rounds.iter().map(|record| RoundLine::of(record, &[])).collect();
        Self { view: Mutex::new(View { run: run.into(), method: method.into(), n_rounds, rounds, ..View::default() }) }
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
        view.rounds.push(RoundLine::of(record, pulls));
        view.n_late += n_late as u64;
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

    /// The page.
    pub fn page(&self, desk: &Desk) -> String {
        let view = self.lock();
        let state = if view.done {
            "done".to_owned()
        } else {
            format!(
                "round {} of {}: {} of {} contributions",
                view.round + 1,
                view.n_rounds,
                view.arrived.len(),
                view.needed
            )
        };
        let nodes: Vec<String> = desk
            .presence
            .seen()
            .iter()
            .map(|(client, seen)| {
                let doing = match (seen.round, view.arrived.contains(client)) {
                    (_, true) => "has contributed".to_owned(),
                    (Some(round), _) => format!("working on round {}", round.saturating_add(1)),
                    (None, _) => "waiting".to_owned(),
                };
                format!("<tr><td>{client}<td>{doing}<td>{} s ago</tr>", desk.presence.silence(*client).as_secs())
            })
            .collect();
        let rounds: Vec<String> = view
            .rounds
            .iter()
            .rev()
            .take(50)
            .map(|r| {
                let accuracy = r.accuracy.map_or("–".into(), |a| format!("{:.2} %", 100.0 * a));
                let kilobytes = (r.bytes_up + r.bytes_down) / 1000;
                format!(
                    "<tr><td>{}<td>{accuracy}<td>{}<td>{kilobytes} kB<td>{:.1} s<td><code>{}</code></tr>",
                    r.round + 1,
                    r.counted,
                    r.seconds,
                    &r.model_hash[..r.model_hash.len().min(12)]
                )
            })
            .collect();
        let (curve, nodes, rounds) = (curve(&view), nodes.concat(), rounds.concat());
        format!(
            "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=2>\
             <meta name=viewport content='width=device-width'><title>fedproj: {state}</title>\
             <style>body{{font:16px/1.5 system-ui,sans-serif;max-width:46em;margin:2em auto;padding:0 1em;color-scheme:light dark}}\
             table{{border-collapse:collapse}}td,th{{padding:.1em .8em;text-align:right}}svg{{width:100%;height:12em}}</style>\
             <h1>{method}</h1><p>Run <code>{run}</code>, {state}.</p>{curve}\
             <h2>Nodes</h2><table><tr><th>client<th>state<th>last heard</tr>{nodes}</table>\
             <h2>Rounds</h2><table><tr><th>round<th>accuracy<th>contributions<th>traffic<th>time<th>model</tr>{rounds}</table></html>",
            method = view.method,
            run = view.run,
        )
    }
}

/// The page, JSON and metrics, all read-only.
pub(crate) fn routes(status: &Arc<Status>, desk: &Arc<Desk>) -> Router {
    type Both = State<(Arc<Status>, Arc<Desk>)>;
    const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";
    let page = |State((status, desk)): Both| async move {
        let headers = [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CONTENT_SECURITY_POLICY, POLICY)];
        (headers, status.page(&desk))
    };
    let json = |State((status, _)): Both| async move {
        let text = serde_json::to_string(&status.view()).unwrap_or_default();
        ([(header::CONTENT_TYPE, "application/json")], text)
    };
    let metrics = |State((status, desk)): Both| async move {
        ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], status.metrics(&desk))
    };
    Router::new()
        .route("/", get(page))
        .route("/status.json", get(json))
        .route("/metrics", get(metrics))
        .with_state((Arc::clone(status), Arc::clone(desk)))
}

/// The accuracy over rounds as a picture.
fn curve(view: &View) -> String {
    let points: Vec<(f64, f64)> = view.rounds.iter().filter_map(|r| Some((f64::from(r.round), r.accuracy?))).collect();
    let width = f64::from(view.n_rounds.max(2) - 1);
    let line: Vec<String> =
        points.iter().map(|(x, y)| format!("{:.2},{:.2} ", 100.0 * x / width, 100.0 * (1.0 - y))).collect();
    let line = line.concat();
    format!(
        "<svg viewBox='-1 -2 102 104' preserveAspectRatio=none role=img aria-label='accuracy over rounds'>\
         <path d='M0 0H100M0 50H100M0 100H100' stroke='gray' stroke-width='.3' fill='none' opacity='.5'/>\
         <polyline points='{line}' fill='none' stroke='currentColor' stroke-width='2' vector-effect='non-scaling-stroke'/></svg>\
         <p>Test accuracy over rounds; lines at 0, 50 and 100 %.</p>"
    )
}
