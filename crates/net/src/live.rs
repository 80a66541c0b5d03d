//! Pages that follow a run in a browser: a federation's status page, and `fedproj watch`. Both look alike, since
//! [`follow`] fills in what they share and [`Screen`] serves them. A browser gets each part of the page again when it has
//! changed, as server-sent events.

use crate::error::{Error, Result};
use crate::server::door::{Door, VISIT_TIME_MAX, Visitors};
use crate::server::host::only_our_hosts;
use crate::server::limit::Warnings;
use crate::server::lock;
use crate::server::status::RoundLine;
use crate::server::strangers::Strangers;
use axum::Router;
use axum::body::Body;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use fedproj_core::PrivacySpent;
use fedproj_report::{Chart, Live, Measure, Pace, Spread, Table, axis, duration, ticks};
use futures_util::stream;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::time::sleep;

/// How often a page is looked at for changes.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long a stream of events lasts; then the browser connects anew. A visit must not last longer.
const STREAM_TIME_MAX: Duration = Duration::from_secs(25);

/// Connections to the page of `fedproj watch`.
const VISITORS_MAX: usize = 32;

/// Rounds in the table.
const N_ROUNDS_SHOWN: usize = 50;

/// Rounds whose mean time estimates the time left.
const N_ROUNDS_TIMED: usize = 10;

/// What a page shows, looked up at most once per second for all visitors.
pub struct Screen {
    look: Box<dyn Fn() -> Live + Send + Sync>,
    /// Called when a visitor has been shown the end.
    end_shown: Box<dyn Fn() + Send + Sync>,
    last: Mutex<Option<(Instant, Arc<Live>)>>,
}

impl Screen {
    /// A screen that shows what `look` returns, and calls `end_shown` when a visitor has been sent the end.
    pub fn new(
        look: impl Fn() -> Live + Send + Sync + 'static,
        end_shown: impl Fn() + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { look: Box::new(look), end_shown: Box::new(end_shown), last: Mutex::default() })
    }

    /// What to show now. Looking may read files, so it has a thread of its own.
    async fn now(self: &Arc<Self>) -> Arc<Live> {
        let screen = Arc::clone(self);
        let look = move || {
            let mut last = lock(&screen.last);
            match &*last {
                Some((at, live)) if at.elapsed() < LOOK_EVERY / 2 => Arc::clone(live),
                _ => Arc::clone(&last.insert((Instant::now(), Arc::new((screen.look)()))).1),
            }
        };
        tokio::task::spawn_blocking(look).await.unwrap_or_default()
    }

    /// The page, its script and its events.
    pub(crate) fn routes(self: &Arc<Self>) -> Router {
        let (page, events) = (Arc::clone(self), Arc::clone(self));
        let page = async move || {
            let live = page.now().await;
            if live.pace == Pace::Finished {
                (page.end_shown)();
            }
            let kind = (header::CONTENT_TYPE, "text/html; charset=utf-8");
            ([kind, (header::CONTENT_SECURITY_POLICY, Live::POLICY)], live.page())
        };
        let script = async || ([(header::CONTENT_TYPE, "text/javascript; charset=utf-8")], Live::script());
        Router::new()
            .route("/", get(page))
            .route("/live.js", get(script))
            .route("/events", get(async move || Events::new(&events).into_response()))
    }

    /// Serves the page on an address of this machine, until the future is dropped. `ready` gets the address.
    ///
    /// # Errors
    /// If other machines can reach the address, or it is taken.
    pub async fn serve(self: &Arc<Self>, address: SocketAddr, ready: impl FnOnce(SocketAddr)) -> Result<()> {
        if !address.ip().is_loopback() {
            return Err(Error::Config(format!(
                "{address}: other machines can reach it, and the page has no password\n\
                 hint: use 127.0.0.1, and `ssh -L` to look at it from another machine"
            )));
        }
        let listener = TcpListener::bind(address).await.map_err(|source| Error::Listen { address, source })?;
        ready(listener.local_addr().map_err(|source| Error::Listen { address, source })?);
        let door = Door {
            visitors: Visitors::Browsers,
            strangers: Arc::new(Strangers::new(VISITORS_MAX)),
            members_max: 1,
            visit_time_max: VISIT_TIME_MAX,
            warnings: Arc::new(Warnings::new()),
            refusals: Arc::default(),
            routes: only_our_hosts(self.routes(), &[]),
        };
        door.open(listener).await;
        Ok(())
    }
}

/// What a visitor has been sent.
struct Events {
    screen: Arc<Screen>,
    sent: BTreeMap<&'static str, String>,
    until: Instant,
    is_over: bool,
}

impl Events {
    fn new(screen: &Arc<Screen>) -> Self {
        let until = Instant::now() + STREAM_TIME_MAX;
        Self { screen: Arc::clone(screen), sent: BTreeMap::new(), until, is_over: false }
    }

    /// The next event: the parts that have changed. `None` when the stream's time is over or the end has been shown.
    async fn next(&mut self) -> Option<String> {
        while !self.is_over && Instant::now() < self.until {
            let live = self.screen.now().await;
            let mut changed = BTreeMap::new();
            for (id, html) in live.parts() {
                if self.sent.get(id) != Some(&html) {
                    changed.insert(id, html.clone());
                    self.sent.insert(id, html);
                }
            }
            self.is_over = live.pace == Pace::Finished;
            let end = if self.is_over { "event: end\ndata:\n\n" } else { "" };
            if self.is_over {
                (self.screen.end_shown)();
            }
            if !changed.is_empty() {
                // JSON has no line breaks, which would end the event.
                let data = serde_json::to_string(&changed).unwrap_or_default();
                return Some(format!("retry: 1000\ndata: {data}\n\n{end}"));
            }
            sleep(LOOK_EVERY).await;
        }
        None
    }

    fn into_response(self) -> impl IntoResponse {
        let events = stream::unfold(self, async |mut events| {
            let event = events.next().await?;
            Some((Ok::<_, Infallible>(event), events))
        });
        ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(events))
    }
}

/// Fills in what every page shows of a run: its progress, its numbers, its curves and its last rounds. `since` is the time
/// since the last round ended.
pub fn follow(live: &mut Live, rounds: &[RoundLine], n_rounds: u32, since: Duration) {
    live.share_done = rounds.len() as f64 / f64::from(n_rounds.max(1));
    let percent = |share: f64| format!("{:.2} %", 100.0 * share);
    let mut tile = |name: &str, value: Option<String>| live.tiles.extend(value.map(|value| (name.to_owned(), value)));
    let accuracies = || rounds.iter().filter_map(|r| r.accuracy);
    tile("accuracy", accuracies().next_back().map(percent));
    tile("best accuracy", accuracies().reduce(f64::max).map(percent));
    tile("time per round", seconds_per_round(rounds).map(|s| Measure::Time.text(s)));
    if let (Some(left), true) = (seconds_left(rounds, n_rounds, since), live.pace == Pace::Running) {
        tile("time left", Some(duration(left)));
    }
    let last = |of: fn(&RoundLine) -> Option<f64>| rounds.iter().rev().find_map(of);
    tile("steps projected", last(|r| r.projection_rate).map(percent));
    tile("memory loss, change", last(RoundLine::memory_loss_change).map(signed));
    let spent = rounds.iter().rev().find_map(|r| r.privacy.as_ref());
    tile("privacy, ε", spent.map(PrivacySpent::shown));
    let bytes: u64 = rounds.iter().map(|r| r.bytes_up + r.bytes_down).sum();
    tile("sent, down and up", (bytes > 0).then(|| Measure::Size.text(bytes as f64)));
    live.charts = [
        chart("accuracy, %", rounds, |r| r.accuracy.map(|a| 100.0 * a)),
        chart("training loss", rounds, |r| r.train_loss),
        chart("steps projected, %", rounds, |r| r.projection_rate.map(|p| 100.0 * p)),
        chart("memory loss after − before training", rounds, RoundLine::memory_loss_change),
    ]
    .into_iter()
    .flatten()
    .collect();
    live.tables.push(("Rounds".into(), rounds_table(rounds)));
}

/// With its sign and three digits.
fn signed(value: f64) -> String {
    let text = if value.abs() < 0.001 { format!("{value:+.1e}") } else { format!("{value:+.3}") };
    text.replace('-', "−")
}

/// The mean of the last rounds.
pub fn seconds_per_round(rounds: &[RoundLine]) -> Option<f64> {
    let last = &rounds[rounds.len().saturating_sub(N_ROUNDS_TIMED)..];
    (!last.is_empty()).then(|| last.iter().map(|r| r.seconds).sum::<f64>() / last.len() as f64)
}

/// The time until the last round ends, if rounds stay as long as they are.
pub fn seconds_left(rounds: &[RoundLine], n_rounds: u32, since: Duration) -> Option<f64> {
    let n_left = (n_rounds as usize).saturating_sub(rounds.len());
    let per_round = seconds_per_round(rounds)?;
    // A round that takes longer than the others is about to end.
    (n_left > 0).then(|| n_left as f64 * per_round - since.as_secs_f64().min(per_round))
}

/// A line over the rounds; none where nothing was measured.
fn chart(title: &str, rounds: &[RoundLine], y: fn(&RoundLine) -> Option<f64>) -> Option<Chart> {
    let point = |r: &RoundLine| {
        let mean = y(r).filter(|v| v.is_finite())?;
        Some(Spread { x: f64::from(r.round + 1), mean, min: mean, max: mean })
    };
    let line: Vec<Spread> = rounds.iter().filter_map(point).collect();
    let (least, most) = line.iter().fold((0.0, f64::MIN), |(a, b), p| (p.mean.min(a), p.mean.max(b)));
    let x = axis(0.0, line.last()?.x);
    let (x, y) = ((x.0, x.1, ticks(x)), axis(least, most.max(0.0)));
    Some(Chart { title: title.into(), y, x, x_label: "rounds done".into(), lines: vec![line] })
}

/// The last rounds, newest first.
fn rounds_table(rounds: &[RoundLine]) -> Table {
    let row = |r: &RoundLine| {
        vec![
            (r.round + 1).to_string(),
            r.accuracy.map_or("–".into(), |a| format!("{:.2} %", 100.0 * a)),
            if r.privacy.is_some() { "–".into() } else { r.counted.to_string() },
            Measure::Time.text(r.seconds),
            Measure::Size.text((r.bytes_up + r.bytes_down) as f64),
            r.model_hash.chars().take(12).collect(),
        ]
    };
    let mut headers = ["round", "accuracy", "clients", "time", "sent", "model"].map(str::to_owned).to_vec();
    let shown = || rounds.iter().rev().take(N_ROUNDS_SHOWN);
    let mut rows: Vec<Vec<String>> = shown().map(row).collect();
    if shown().any(|r| r.privacy.is_some()) {
        headers.push("ε".into());
        let epsilons = shown().map(|r| r.privacy.as_ref().map_or_else(String::new, PrivacySpent::shown));
        rows.iter_mut().zip(epsilons).for_each(|(row, epsilon)| row.push(epsilon));
    }
    Table { headers, rows, ..Table::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
    use tokio::net::TcpStream;

    fn rounds(n: u32) -> Vec<RoundLine> {
        let round = |round| RoundLine {
            round,
            accuracy: Some(0.5),
            seconds: 2.0,
            projection_rate: Some(0.25),
            memory_loss_before: Some(0.1),
            memory_loss_after: Some(0.3),
            ..RoundLine::default()
        };
        (0..n).map(round).collect()
    }

    #[test]
    fn under_privacy_the_page_shows_what_was_spent_and_no_clients() {
        let spent = PrivacySpent { epsilon: 7.981, delta: 1e-5, nominal: true, clip: 1.0, clip_logits: None };
        let rounds: Vec<RoundLine> =
            rounds(2).into_iter().map(|r| RoundLine { privacy: Some(spent.clone()), ..r }).collect();
        let mut live = Live::default();
        follow(&mut live, &rounds, 4, Duration::ZERO);
        assert!(live.tiles.contains(&("privacy, ε".into(), "7.98 (nominal)".into())), "{:?}", live.tiles);
        let row = &live.tables[0].1.rows[0];
        assert_eq!((row[2].as_str(), row[6].as_str()), ("–", "7.98 (nominal)"));
    }

    #[test]
    fn the_time_left_counts_the_running_round() {
        let left = |n, since_s| seconds_left(&rounds(n), 10, Duration::from_secs(since_s));
        assert_eq!((left(0, 0), left(10, 0)), (None, None));
        assert_eq!((left(5, 0), left(5, 1), left(5, 60)), (Some(10.0), Some(9.0), Some(8.0)));
    }

    #[test]
    fn a_run_is_followed_by_numbers_and_curves() {
        let mut live = Live { pace: Pace::Running, ..Live::default() };
        follow(&mut live, &rounds(5), 10, Duration::ZERO);
        let page = live.page();
        for words in ["50.00 %", "time left", "10 s", "25.00 %", "+0.200", "width: 50%", "steps projected, %"] {
            assert!(page.contains(words), "{words} in {page}");
        }
        // Before the first round there is nothing to draw.
        let mut live = Live::default();
        follow(&mut live, &[], 10, Duration::ZERO);
        assert!(live.charts.is_empty() && live.tiles.is_empty());
    }

    /// A page of `n` finished rounds of two.
    async fn serve() -> (SocketAddr, Arc<AtomicU32>, Arc<AtomicBool>) {
        let (n, seen) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, marked) = (Arc::clone(&n), Arc::clone(&seen));
        let look = move || {
            let n = counted.load(Ordering::SeqCst);
            let pace = if n < 2 { Pace::Running } else { Pace::Finished };
            let mut live = Live { now: format!("{n} of 2"), pace, ..Live::default() };
            follow(&mut live, &rounds(n), 2, Duration::ZERO);
            live
        };
        let screen = Screen::new(look, move || marked.store(true, Ordering::SeqCst));
        let (tell, told) = tokio::sync::oneshot::channel();
        tokio::spawn(async move {
            screen.serve(([127, 0, 0, 1], 0).into(), |address| tell.send(address).unwrap()).await.unwrap();
        });
        (told.await.unwrap(), n, seen)
    }

    async fn request(address: SocketAddr, path: &str, host: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_visitor_gets_what_changes_until_the_end() {
        let (address, n, seen) = serve().await;
        let mut events = BufReader::new(request(address, "/events", "localhost").await);
        let mut next = async || loop {
            let mut line = String::new();
            assert!(events.read_line(&mut line).await.unwrap() > 0, "the stream has ended");
            if let Some(data) = line.strip_prefix("data: ") {
                let parts: BTreeMap<String, String> = serde_json::from_str(data).unwrap();
                return parts;
            }
        };
        let first = next().await;
        assert_eq!(first.keys().collect::<Vec<_>>(), ["charts", "state", "tables"]);
        assert!(first["state"].contains("0 of 2"));
        n.store(1, Ordering::SeqCst);
        assert!(next().await["state"].contains("1 of 2"));
        assert!(!seen.load(Ordering::SeqCst));
        n.store(2, Ordering::SeqCst);
        assert!(next().await["state"].contains("2 of 2"));
        let mut rest = String::new();
        events.read_to_string(&mut rest).await.unwrap();
        assert!(rest.contains("event: end"), "{rest}");
        assert!(seen.load(Ordering::SeqCst), "somebody has seen the end");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn only_this_machine_can_look_and_other_sites_cannot() {
        let (address, ..) = serve().await;
        for (host, status) in [("localhost", "200"), ("evil.example", "421")] {
            let mut answer = String::new();
            request(address, "/", host).await.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
        }
        let public = Screen::new(Live::default, || ()).serve(([0, 0, 0, 0], 0).into(), |_| ()).await.unwrap_err();
        assert!(public.to_string().contains("has no password"), "{public}");
    }
}
