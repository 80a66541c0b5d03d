//! Which clients are alive: their last signs of life.

use super::lock;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The clients that the server has heard from since its start.
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
    /// The round that it works on.
    pub round: Option<u32>,
    /// Whether it knows that the run is over.
    pub told_done: bool,
    /// Its long polls at present.
    pub n_polls: u32,
}

/// A long poll. Dropping it counts as a sign of life.
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
    pub(crate) fn new() -> Self {
        Self { started: Instant::now(), seen: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Seen>> {
        lock(&self.seen)
    }

    /// All clients heard from since the start.
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

    /// A client waits for work until the result is dropped.
    pub fn poll(&self, client: u32) -> Poll<'_> {
        self.heard(client, None);
        if let Some(seen) = self.lock().get_mut(&client) {
            seen.n_polls += 1;
        }
        Poll { presence: self, client }
    }

    /// A client learns that the run is over.
    pub(crate) fn told_done(&self, client: u32) {
        if let Some(seen) = self.lock().get_mut(&client) {
            seen.told_done = true;
        }
    }

    /// Time since a client's last sign of life; zero while it waits for work.
    pub fn silence(&self, client: u32) -> Duration {
        match self.lock().get(&client) {
            Some(seen) if seen.n_polls > 0 => Duration::ZERO,
            seen => seen.map_or(self.started, |s| s.at).elapsed(),
        }
    }

    /// The clients heard from within this time.
    pub fn within(&self, time: Duration) -> Vec<u32> {
        let known: Vec<u32> = self.lock().keys().copied().collect();
        known.into_iter().filter(|client| self.silence(*client) <= time).collect()
    }
}
