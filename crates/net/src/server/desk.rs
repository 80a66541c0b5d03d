//! The server's desk: where nodes get tasks and hand in contributions. No sockets here; [`crate::server::http`] carries it.
//!
//! A contribution is acknowledged only after its vectors have been checked, are on disk, and its entry in the journal is
//! too. The round loop sees the desk through [`Nodes`], so that something else can carry tasks later.

use crate::error::{Error, Result};
use crate::server::check::{check_content, check_shape};
use crate::server::config::ServerConfig;
use crate::server::journal::{Accepted, Event, Journal};
use crate::server::nodes::{Arrival, Nodes, Offer};
use crate::server::presence::Presence;
use crate::server::spool::{Spool, Spooled};
use crate::wire::blob::Store;
use crate::wire::message::{
    Blob, Contribution, Done, Missing, Named, Receipt, Received, Refusal, Train, Verdict, Wait, Work,
};
use crate::wire::message::{verdict, work};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// See the module's description.
#[derive(Debug)]
pub struct Desk {
    dir: PathBuf,
    limits: ServerConfig,
    store: Store,
    journal: Mutex<Journal>,
    inner: Mutex<Inner>,
    arrived: Condvar,
    /// Long polls wait for it to change.
    changed: watch::Sender<u64>,
    /// One piece of a client's upload at a time.
    uploading: Vec<Mutex<()>>,
    /// Who is there.
    pub presence: Presence,
    /// Bytes received from and sent to nodes.
    pub bytes_up: AtomicU64,
    /// See `bytes_up`.
    pub bytes_down: AtomicU64,
    /// Contributions refused since the start.
    pub n_refused: AtomicU64,
}

#[derive(Debug, Default)]
struct Inner {
    open: Option<Open>,
    done: Option<Done>,
    /// The last contribution of each client that counted: round and id.
    last: BTreeMap<u32, (u32, String)>,
    arrivals: VecDeque<Arrival>,
}

#[derive(Debug)]
struct Open {
    offer: Arc<Offer>,
    waiting: BTreeSet<u32>,
    /// What each client has announced and may upload.
    announced: BTreeMap<u32, Contribution>,
    /// Contributions that are on their way to the disk.
    n_accepting: usize,
}

impl Open {
    fn is_of(&self, run: &str, round: u32) -> bool {
        self.offer.task.run == run && self.offer.task.round == round
    }
}

impl Desk {
    /// A desk in a federation's folder. `last` is what the journal knows of each client's last contribution.
    ///
    /// # Errors
    /// If the blobs' folder cannot be made.
    pub fn new(dir: &Path, limits: ServerConfig, journal: Journal, last: BTreeMap<u32, (u32, String)>) -> Result<Self> {
        Ok(Self {
            dir: dir.into(),
            limits,
            store: Store::open(&dir.join("blobs"))?,
            journal: Mutex::new(journal),
            inner: Mutex::new(Inner { last, ..Inner::default() }),
            arrived: Condvar::new(),
            changed: watch::Sender::new(0),
            uploading: (0..64).map(|_| Mutex::new(())).collect(),
            presence: Presence::new(),
            bytes_up: AtomicU64::new(0),
            bytes_down: AtomicU64::new(0),
            n_refused: AtomicU64::new(0),
        })
    }

    /// Writes an event to the journal.
    ///
    /// # Errors
    /// If the disk is full.
    pub fn log(&self, event: Event) -> Result<()> {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner).append(event)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes whenever there may be new work.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// The run is over: nodes are told from now on.
    pub fn finish(&self, done: Done) {
        self.inner().done = Some(done);
        self.changed.send_modify(|n| *n += 1);
    }

    /// Blobs that are of use to nodes now; all others are removed.
    ///
    /// # Errors
    /// If one cannot be removed.
    pub fn keep(&self, blobs: &[&Blob]) -> Result<()> {
        self.store.retain(blobs)
    }

    /// What there is to do for a client.
    pub fn work(&self, client: u32) -> Work {
        let inner = self.inner();
        let kind = match (&inner.done, &inner.open) {
            (Some(done), _) => work::Kind::Done(done.clone()),
            (None, Some(open)) if open.waiting.contains(&client) => {
                work::Kind::Train(Box::new(Train { client, ..open.offer.task.clone() }))
            }
            _ => work::Kind::Wait(Wait {}),
        };
        if matches!(kind, work::Kind::Done(_)) {
            self.presence.told_done(client);
        }
        Work { kind: Some(kind) }
    }

    /// A piece of a blob that nodes may fetch.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn fetch(&self, hash: &[u8], from: u64, n_max: usize) -> Result<Option<(Vec<u8>, u64)>> {
        self.store.read(hash, from, n_max)
    }

    /// A node drops out of a round.
    ///
    /// # Errors
    /// If the journal cannot be written.
    pub fn decline(&self, client: u32, run: &str, round: u32, reason: &str) -> Result<()> {
        let reason = short(reason);
        if !self.drop_out(client, run, round) {
            return Ok(());
        }
        tracing::warn!(round, client, reason, "declined");
        self.log(Event::Declined { run: run.into(), round, client, reason })
    }

    /// Whether a client was waited for in this round, and no longer is.
    fn drop_out(&self, client: u32, run: &str, round: u32) -> bool {
        let mut inner = self.inner();
        let Some(open) = inner.open.as_mut().filter(|o| o.is_of(run, round)) else {
            return false;
        };
        if !open.waiting.remove(&client) {
            return false;
        }
        open.announced.remove(&client);
        inner.arrivals.push_back(Arrival::DroppedOut(client));
        self.arrived.notify_all();
        true
    }

    /// A client hands in a contribution, or asks what of it is still missing. Asking again changes nothing.
    ///
    /// # Errors
    /// If the disk fails: nothing is acknowledged then.
    pub fn submit(&self, client: u32, contribution: &Contribution) -> Result<Verdict> {
        let _one = self.uploading[client as usize % self.uploading.len()].lock();
        let refuse = |reason: String| Ok(Verdict { kind: Some(verdict::Kind::Refused(Refusal { reason })) });
        let offer = match self.admit(client, contribution)? {
            Ok(offer) => offer,
            Err(verdict) => return Ok(verdict),
        };
        let spool = Spool::new(&self.dir, &contribution.run, contribution.round);
        let checked = check_shape(contribution, &offer, &self.limits);
        if let Err(problem) = checked {
            return self.refuse(client, contribution, &spool, &problem.to_string()).and_then(refuse);
        }
        let store = self.announce(client, contribution, &spool)?;
        let lacking = |part: &Named| {
            let have = Blob { len: store.have(&part.blob), ..part.blob.clone() };
            (have.len < part.blob.len).then_some(have)
        };
        let missing: Vec<Blob> = contribution.parts.iter().filter_map(lacking).collect();
        if !missing.is_empty() {
            return Ok(Verdict { kind: Some(verdict::Kind::Missing(Missing { have: missing })) });
        }
        if let Err(problem) = check_content(contribution, &store, &offer, self.limits.norm_max) {
            return self.refuse(client, contribution, &spool, &problem.to_string()).and_then(refuse);
        }
        self.accept(client, contribution)
    }

    /// Whether a contribution may come from this client now; else what it is told.
    fn admit(&self, client: u32, c: &Contribution) -> Result<std::result::Result<Arc<Offer>, Verdict>> {
        let refused = |reason: String| {
            tracing::warn!(client, round = c.round, reason, "contribution not taken");
            Ok(Err(Verdict { kind: Some(verdict::Kind::Refused(Refusal { reason })) }))
        };
        let inner = self.inner();
        if c.client != client {
            return refused(format!("this node stands for client {client}, not {}", c.client));
        }
        if inner.last.get(&client).is_some_and(|(round, id)| *round == c.round && *id == c.id()) {
            return Ok(Err(Verdict { kind: Some(verdict::Kind::Accepted(Receipt { id: c.id() })) }));
        }
        match &inner.open {
            Some(open) if !open.is_of(&c.run, c.round) => refused(format!(
                "round {} is not open; it is round {} of run {}",
                c.round, open.offer.task.round, open.offer.task.run
            )),
            Some(open) if !open.waiting.contains(&client) => refused(format!(
                "client {client} is not waited for in round {}: it was not asked, has contributed, or dropped out",
                c.round
            )),
            Some(open) => Ok(Ok(Arc::clone(&open.offer))),
            None if inner.done.is_some() => refused("the run is over".into()),
            // Between two rounds, or at the start: the next round's opening tells.
            None => Err(Error::NotNow("no round is open at present; ask again".into())),
        }
    }

    /// Notes what a client may upload, and gives its folder; what it uploaded for another contribution is dropped.
    fn announce(&self, client: u32, contribution: &Contribution, spool: &Spool) -> Result<Store> {
        let known = {
            let mut inner = self.inner();
            let before = inner.open.as_mut().and_then(|o| o.announced.insert(client, contribution.clone()));
            before.is_some_and(|c| c.parts == contribution.parts)
        };
        let store = spool.client(client)?;
        if !known {
            store.retain(&contribution.parts.iter().map(|p| &p.blob).collect::<Vec<_>>())?;
        }
        Ok(store)
    }

    /// A contribution that cannot count: its client is not waited for any longer.
    fn refuse(&self, client: u32, c: &Contribution, spool: &Spool, reason: &str) -> Result<String> {
        self.n_refused.fetch_add(1, Ordering::Relaxed);
        let reason = short(reason);
        tracing::warn!(client, round = c.round, reason, "contribution refused");
        if self.drop_out(client, &c.run, c.round) {
            let event = Event::Refused { run: c.run.clone(), round: c.round, client, reason: reason.clone() };
            self.log(event)?;
            spool.clear(client);
        }
        Ok(reason)
    }

    /// On disk first, then counted, then acknowledged. The disk is waited for without the lock, so that nobody else's
    /// requests wait too; meanwhile the round does not close.
    fn accept(&self, client: u32, contribution: &Contribution) -> Result<Verdict> {
        let accepted = Accepted::of(contribution);
        let id = accepted.id.clone();
        // The round may have been closed while the vectors were checked.
        let is_waited_for = self.inner().open.as_mut().is_some_and(|open| {
            let waits = open.is_of(&contribution.run, contribution.round) && open.waiting.remove(&client);
            open.n_accepting += usize::from(waits);
            waits
        });
        if !is_waited_for {
            let reason = format!("round {} was closed while the contribution was checked", contribution.round);
            return Ok(Verdict { kind: Some(verdict::Kind::Refused(Refusal { reason })) });
        }
        let logged = self.log(Event::Accepted(accepted.clone()));
        let mut inner = self.inner();
        if let Some(open) = &mut inner.open {
            open.n_accepting -= 1;
            if logged.is_ok() {
                open.announced.remove(&client);
            } else {
                open.waiting.insert(client);
            }
        }
        if logged.is_ok() {
            inner.last.insert(client, (contribution.round, id.clone()));
            inner.arrivals.push_back(Arrival::Contribution(Box::new(accepted)));
            tracing::debug!(client, round = contribution.round, id, "contribution accepted");
        }
        self.arrived.notify_all();
        logged.map(|()| Verdict { kind: Some(verdict::Kind::Accepted(Receipt { id })) })
    }

    /// A piece of a blob that the client has announced.
    ///
    /// # Errors
    /// If it has not, the bytes do not fit, or the disk is full.
    pub fn receive(&self, client: u32, hash: &[u8], from: u64, bytes: &[u8]) -> Result<Received> {
        let _one = self.uploading[client as usize % self.uploading.len()].lock();
        let announced = {
            let inner = self.inner();
            inner.open.as_ref().and_then(|open| {
                let contribution = open.announced.get(&client)?;
                let part = contribution.parts.iter().find(|p| p.blob.hash == hash)?;
                Some((contribution.run.clone(), contribution.round, part.blob.clone()))
            })
        };
        let (run, round, blob) =
            announced.ok_or_else(|| Error::protocol("this blob is not expected; announce it first"))?;
        let have = Spool::new(&self.dir, &run, round).client(client)?.append(&blob, from, bytes)?;
        Ok(Received { have })
    }
}

impl Nodes for Desk {
    fn put(&self, bytes: &[u8]) -> Result<Blob> {
        self.store.put(bytes)
    }

    fn offer(&self, offer: Offer) {
        let mut inner = self.inner();
        let mut waiting: BTreeSet<u32> = offer.asked.iter().copied().collect();
        inner.arrivals.clear();
        for accepted in &offer.accepted {
            waiting.remove(&accepted.client);
            inner.arrivals.push_back(Arrival::Contribution(Box::new(accepted.clone())));
        }
        inner.open = Some(Open { offer: Arc::new(offer), waiting, announced: BTreeMap::new(), n_accepting: 0 });
        self.changed.send_modify(|n| *n += 1);
    }

    fn take(&self, patience: Duration) -> Option<Arrival> {
        let inner = self.inner();
        let waited = self.arrived.wait_timeout_while(inner, patience, |inner| inner.arrivals.is_empty());
        let (mut inner, _) = waited.unwrap_or_else(PoisonError::into_inner);
        inner.arrivals.pop_front()
    }

    fn ask_again(&self, clients: &[u32]) {
        if let Some(open) = &mut self.inner().open {
            open.waiting.extend(clients);
        }
        self.changed.send_modify(|n| *n += 1);
    }

    fn get(&self, accepted: Vec<Accepted>) -> Result<Spooled> {
        Spooled::open(&self.dir, accepted)
    }

    fn withdraw(&self) {
        let is_accepting = |inner: &mut Inner| inner.open.as_ref().is_some_and(|open| open.n_accepting > 0);
        let waited = self.arrived.wait_while(self.inner(), is_accepting);
        waited.unwrap_or_else(PoisonError::into_inner).open = None;
    }

    fn silence(&self, client: u32) -> Duration {
        self.presence.silence(client)
    }

    fn present(&self, within: Duration) -> Vec<u32> {
        self.presence.within(within)
    }
}

/// What goes into the journal of a text that a node has had a hand in.
fn short(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(300).collect()
}
