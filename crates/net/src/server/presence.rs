//! Who is there: every client's last sign of life.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The clients that have been heard of since the server's start.
#[derive(Debug)]
pub struct Presence {
    started: Instant,
    seen: Mutex<BTreeMap<u32, Seen>>,
}

/// A client's last sign of life.
#[derive(Clone, Debug)]
pub struct Seen {
    /// When.
    pub at: Instant,
    /// The round that it is at work on.
    pub round: Option<u32>,
    /// Whether it has been told that the run is over.
    pub told_done: bool,
    /// Requests for work that are held at present.
    pub n_polls: u32,
}

/// A request for work that is held; its end, however it comes, is noted.
#[derive(Debug)]
pub struct Poll<'a> {
    presence: &'a Presence,
    client: u32,
}

impl Drop for Poll<'_> {
    fn drop(&mut self) {
        if let Some(seen) = self.presence.lock().get_mut(&self.client) {
            (seen.at, seen.n_polls) = (Instant::now(), seen.n_polls.saturating_sub(1));
        }
    }
}

impl Presence {
    /// Nobody yet.
    pub(crate) fn new() -> Self {
        Self { started: Instant::now(), seen: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All clients heard of since the start.
    pub fn seen(&self) -> BTreeMap<u32, Seen> {
        self.lock().clone()
    }

    /// A sign of life.
    pub fn heard(&self, client: u32, round: Option<u32>) {
        let now = Instant::now();
        let mut all = self.lock();
        let seen = all.entry(client).or_insert(Seen { at: now, round, told_done: false, n_polls: 0 });
        (seen.at, seen.round) = (now, round);
    }

    /// A client waits for work, as long as the answer is held.
    pub fn poll(&self, client: u32) -> Poll<'_> {
        self.heard(client, None);
        if let Some(seen) = self.lock().get_mut(&client) {
            seen.n_polls += 1;
        }
        Poll { presence: self, client }
    }

    /// A client is told that the run is over.
    pub(crate) fn told_done(&self, client: u32) {
        if let Some(seen) = self.lock().get_mut(&client) {
            seen.told_done = true;
        }
    }

    /// How long a client has not been heard of; nothing while it waits for work.
    pub fn silence(&self, client: u32) -> Duration {
        match self.lock().get(&client) {
            Some(seen) if seen.n_polls > 0 => Duration::ZERO,
            seen => seen.map_or(self.started, |s| s.at).elapsed(),
        }
    }

    /// The clients that have been heard of within this time.
    pub fn within(&self, time: Duration) -> Vec<u32> {
        let known: Vec<u32> = self.lock().keys().copied().collect();
        known.into_iter().filter(|client| self.silence(*client) <= time).collect()
    }
}
