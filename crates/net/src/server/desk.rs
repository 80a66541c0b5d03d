//! The server's desk: it offers a round's task to nodes and collects their contributions for the round loop.
//!
//! The desk has no sockets; [`super::http`] carries it. How it accepts a contribution is in `intake.rs`.

use super::attempt::{Attempt, Stage};
use super::check::Trial;
use super::config::ServerConfig;
use super::journal::{Event, Journal};
use super::limit::MemberWarnings;
use super::lock;
use super::presence::Presence;
use super::spool::Spool;
use crate::error::Result;
use crate::vault::Vault;
use crate::wire::{Contribution, Done, Store, Task, Wait, Work, WorkKind};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// A round as nodes see it.
#[derive(Clone, Debug, Default)]
pub struct Offer {
    /// The task, for any client.
    pub task: Task,
    /// The clients that are asked.
    pub asked: Vec<u32>,
    /// The vectors of a contribution, in order, with their numbers of values.
    pub parts: Vec<(String, usize)>,
    /// The weights from which the clients start.
    pub base: Vec<f32>,
    /// Ranges of variances in the buffers: they cannot be negative.
    pub variances: Vec<Range<usize>>,
    /// Local epochs; with `batch` they bound a client's steps.
    pub epochs: u32,
    /// Samples per step.
    pub batch: usize,
    /// Tries models before they count.
    pub(super) trial: Option<Arc<Trial>>,
    /// Contributions that were accepted before a restart.
    pub accepted: Vec<Contribution>,
    /// The attempt at a secure sum, where it begins. Then `parts` is one masked vector, whose values count twice.
    pub(super) attempt: Option<Attempt>,
}

/// What the round loop receives.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrival {
    /// A contribution that counts.
    Contribution(Box<Contribution>),
    /// A client that will not contribute to this round.
    DroppedOut(u32),
    /// A message of a secure sum.
    Answered,
}

/// The desk of a federation.
#[derive(Debug)]
pub struct Desk {
    pub(super) dir: PathBuf,
    pub(super) limits: ServerConfig,
    /// Encrypts what nodes send and fetch, on disk.
    pub(super) vault: Vault,
    /// What nodes may fetch.
    pub blobs: Store,
    journal: Mutex<Journal>,
    inner: Mutex<Inner>,
    pub(super) arrived: Condvar,
    /// Long polls wait for it to change.
    pub(super) changed: watch::Sender<u64>,
    /// A client uploads one piece at a time.
    uploading: Vec<Mutex<()>>,
    /// Which nodes are alive.
    pub presence: Presence,
    /// Bytes received from nodes.
    pub bytes_up: AtomicU64,
    /// Bytes sent to nodes.
    pub bytes_down: AtomicU64,
    /// Contributions rejected since the start.
    pub n_rejected: AtomicU64,
    /// Limits the log lines that each member can cause.
    pub(crate) warnings: MemberWarnings,
}

#[derive(Debug, Default)]
pub(super) struct Inner {
    pub open: Option<Open>,
    pub done: Option<Done>,
    /// Each client's last contribution that counted: round and id.
    pub last: BTreeMap<u32, (u32, String)>,
    pub arrivals: VecDeque<Arrival>,
}

/// The open round.
#[derive(Debug)]
pub(super) struct Open {
    pub offer: Arc<Offer>,
    /// Clients whose contributions are awaited.
    pub waiting: BTreeSet<u32>,
    /// What each client has announced and may upload.
    pub announced: BTreeMap<u32, Contribution>,
    /// Contributions that are being written to the journal.
    pub n_accepting: usize,
    /// The attempt at a secure sum.
    pub attempt: Option<Attempt>,
}

impl Open {
    pub fn is_of(&self, run: &str, round: u32) -> bool {
        self.offer.task.run == run && self.offer.task.round == round
    }

    /// Whether a client that asks for work shall train.
    fn offers_work(&self, client: u32) -> bool {
        let is_begun = self.attempt.as_ref().is_some_and(|attempt| attempt.stage != Stage::Announcing);
        self.waiting.contains(&client) && !is_begun
    }
}

impl Desk {
    /// A desk in a federation's folder. `last` holds each client's last contribution that counted, from the journal.
    ///
    /// # Errors
    /// If the folder of blobs cannot be created, or the key file cannot be used.
    pub fn new(dir: &Path, limits: ServerConfig, journal: Journal, last: BTreeMap<u32, (u32, String)>) -> Result<Self> {
        let vault = Vault::open(limits.key_file.as_deref())?;
        Ok(Self {
            dir: dir.into(),
            limits,
            blobs: Store::sealed(&dir.join("blobs"), &vault)?,
            vault,
            journal: Mutex::new(journal),
            inner: Mutex::new(Inner { last, ..Inner::default() }),
            arrived: Condvar::new(),
            changed: watch::Sender::new(0),
            uploading: (0..64).map(|_| Mutex::new(())).collect(),
            presence: Presence::new(),
            bytes_up: AtomicU64::new(0),
            bytes_down: AtomicU64::new(0),
            n_rejected: AtomicU64::new(0),
            warnings: MemberWarnings::default(),
        })
    }

    /// Writes an event to the journal.
    ///
    /// # Errors
    /// If the disk is full.
    pub fn log(&self, event: Event) -> Result<()> {
        lock(&self.journal).append(event)
    }

    pub(super) fn spool(&self, run: &str, round: u32) -> Spool {
        Spool::new(&self.dir, run, round).sealed(&self.vault)
    }

    pub(super) fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    pub(super) fn uploading(&self, client: u32) -> MutexGuard<'_, ()> {
        lock(&self.uploading[client as usize % self.uploading.len()])
    }

    /// Changes when there may be new work.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Bytes received from and sent to nodes so far.
    pub fn traffic(&self) -> (u64, u64) {
        (self.bytes_up.load(Ordering::Relaxed), self.bytes_down.load(Ordering::Relaxed))
    }

    /// Ends the run: nodes that ask for work learn it from now on.
    pub fn finish(&self, done: Done) {
        self.inner().done = Some(done);
        self.changed.send_modify(|n| *n += 1);
    }

    /// What a client has to do.
    pub fn work(&self, client: u32) -> Work {
        let inner = self.inner();
        let kind = match (&inner.done, &inner.open) {
            (Some(done), _) => {
                self.presence.told_done(client);
                WorkKind::Done(done.clone())
            }
            (None, Some(open)) if open.offers_work(client) => {
                WorkKind::Train(Box::new(Task { client, ..open.offer.task.clone() }))
            }
            _ => WorkKind::Wait(Wait {}),
        };
        kind.into()
    }

    /// Offers a round's task.
    pub fn offer(&self, offer: Offer) {
        let mut inner = self.inner();
        let mut waiting: BTreeSet<u32> = offer.asked.iter().copied().collect();
        inner.arrivals.clear();
        for accepted in &offer.accepted {
            waiting.remove(&accepted.client);
            inner.arrivals.push_back(Arrival::Contribution(Box::new(accepted.clone())));
        }
        let attempt = offer.attempt.clone();
        let (offer, announced) = (Arc::new(offer), BTreeMap::new());
        inner.open = Some(Open { offer, waiting, announced, n_accepting: 0, attempt });
        self.changed.send_modify(|n| *n += 1);
    }

    /// The next contribution that counts, or the next client that drops out; `None` after `patience`.
    pub fn take(&self, patience: Duration) -> Option<Arrival> {
        let waited = self.arrived.wait_timeout_while(self.inner(), patience, |inner| inner.arrivals.is_empty());
        let (mut inner, _) = waited.unwrap_or_else(PoisonError::into_inner);
        inner.arrivals.pop_front()
    }

    /// Offers the round's task to further clients, or again to those that have dropped out.
    pub fn ask(&self, clients: &[u32]) {
        if let Some(open) = &mut self.inner().open {
            open.waiting.extend(clients);
        }
        self.changed.send_modify(|n| *n += 1);
    }

    /// Forgets a client's last contribution: it no longer counts, and may be sent again.
    pub(super) fn forget(&self, client: u32) {
        self.inner().last.remove(&client);
    }

    /// Accepts no more contributions for the round. [`Desk::take`] still gives those accepted before.
    pub fn withdraw(&self) {
        let is_accepting = |inner: &mut Inner| inner.open.as_ref().is_some_and(|open| open.n_accepting > 0);
        let waited = self.arrived.wait_while(self.inner(), is_accepting);
        waited.unwrap_or_else(PoisonError::into_inner).open = None;
    }
}
