//! A node: asks for work, trains, hands in its contribution, and starts over; it survives every failure in between.

mod home;
mod link;
mod policy;
mod session;
mod summing;
mod tls;

pub use home::{Home, decode_kept};
pub use link::Link;
pub use policy::Policy;
pub use session::{NodeData, Setup, reject_files};
pub use summing::Summing;
pub use tls::{enrol_tls, node_request, node_tls};

use crate::backoff::BackOff;
use crate::error::{Error, Result};
use crate::identity::Token;
use crate::vault::Vault;
use crate::wire::{
    Blob, Contribution, Decline, EnrolRequest, Heartbeat, RenewRequest, Task, VerdictKind, WorkKind, WorkRequest,
};
use session::Session;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Time between heartbeats. They do not wait for uploads or training.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Max characters of a reason for the server.
const REASON_MAX: usize = 500;

/// The first and the longest wait after a failure. Each node adds a little of its own.
const WAIT_FIRST: Duration = Duration::from_millis(250);
const WAIT_MAX: Duration = Duration::from_secs(30);

/// How long an enrolment tries to get through: a minute of other people's attempts must not end it.
pub const ENROL_PATIENCE: Duration = Duration::from_mins(1);

/// A node that has been enrolled.
#[derive(Debug)]
pub struct Node {
    home: Home,
    link: Link,
    setup: Setup,
    client: u32,
    session: Option<Session>,
    /// The round that the node works on, or −1.
    working: Arc<AtomicI64>,
    /// The server has asked to renew the certificate.
    shall_renew: Arc<AtomicBool>,
}

impl Node {
    /// The node of a folder.
    ///
    /// # Errors
    /// If it is not enrolled.
    pub fn open(dir: &Path, server: &str, setup: Setup) -> Result<Self> {
        let home = Home::new(dir);
        let client = home.identity()?.client;
        let link = Link::new(server, home.tls()?)?;
        let (working, shall_renew) = (Arc::new(AtomicI64::new(-1)), Arc::default());
        Ok(Self { home, link, setup, client, session: None, working, shall_renew })
    }

    /// The same, with what it stores encrypted at rest.
    ///
    /// # Errors
    /// If what it has stored before cannot be decrypted.
    pub fn sealed(self, vault: Vault) -> Result<Self> {
        let home = self.home.sealed(vault);
        home.check_key()?;
        Ok(Self { home, ..self })
    }

    /// Sends heartbeats until it is aborted.
    fn beat(&self) -> JoinHandle<()> {
        let (link, working) = (self.link.clone(), Arc::clone(&self.working));
        let shall_renew = Arc::clone(&self.shall_renew);
        tokio::spawn(async move {
            loop {
                let round = u32::try_from(working.load(Ordering::Relaxed)).ok();
                match link.send(&Heartbeat { round }).await {
                    Ok(answer) => shall_renew.store(answer.renew, Ordering::Relaxed),
                    Err(error) => tracing::debug!(%error, "no heartbeat"),
                }
                tokio::time::sleep(HEARTBEAT).await;
            }
        })
    }

    /// Gets another certificate and uses it from now on. What the client remembers stays as it is.
    async fn renew(&mut self) -> Result<()> {
        let reply = self.link.send(&RenewRequest { request: self.home.renewal_request()? }).await?;
        self.home.renewed(&reply)?;
        self.link = Link::new(self.link.server(), self.home.tls()?)?;
        self.shall_renew.store(false, Ordering::Relaxed);
        tracing::info!("certificate renewed");
        Ok(())
    }

    /// Works for ever, or until the run is over; returns the final model's hash.
    ///
    /// # Errors
    /// Never because of the network: failures are logged and tried again.
    pub async fn run(mut self, until_done: bool) -> Result<String> {
        let mut beating = self.beat();
        let own = Duration::from_millis(u64::from(self.client) * 37 % 250);
        let mut back_off = BackOff::new(WAIT_FIRST + own, WAIT_MAX + own);
        let hash = loop {
            if self.shall_renew.load(Ordering::Relaxed) {
                match self.renew().await {
                    Ok(()) => {
                        beating.abort();
                        beating = self.beat();
                    }
                    // The old certificate still works; the next heartbeat asks again.
                    Err(error) => {
                        self.shall_renew.store(false, Ordering::Relaxed);
                        tracing::warn!(%error, "cannot renew the certificate yet");
                    }
                }
            }
            match self.turn().await {
                Ok(Some(hash)) if until_done => break hash,
                Ok(Some(_)) => tokio::time::sleep(HEARTBEAT).await,
                Ok(None) => back_off.reset(),
                Err(error) => {
                    let wait = back_off.next();
                    tracing::warn!(%error, wait_ms = wait.as_millis() as u64, "will try again");
                    // Over HTTP/2 the server closes the connection of such a node without an answer.
                    if matches!(error, Error::Unreachable(_)) && self.home.is_expired() {
                        tracing::error!(
                            "this node's certificate has expired; ask the server's owner for a token of the same client and enrol again"
                        );
                    }
                    tokio::time::sleep(wait).await;
                }
            }
        };
        beating.abort();
        Ok(hash)
    }

    /// Hands in a pending contribution, or asks for work and does it. Returns the final model's hash if the run is over.
    async fn turn(&mut self) -> Result<Option<String>> {
        if let Some(pending) = self.home.pending()? {
            self.working.store(i64::from(pending.round), Ordering::Relaxed);
            return if pending.is_plain() {
                self.sum_up(&pending).await.map(|()| None)
            } else {
                self.hand_in(&pending).await.map(|()| None)
            };
        }
        self.working.store(-1, Ordering::Relaxed);
        match self.link.send(&WorkRequest::current()).await?.kind {
            Some(WorkKind::Train(task)) => {
                self.working.store(i64::from(task.round), Ordering::Relaxed);
                self.work(*task).await.map(|()| None)
            }
            Some(WorkKind::Done(done)) => Ok(Some(done.model_hash)),
            Some(WorkKind::Wait(_)) => Ok(None),
            None => Err(later_version()),
        }
    }

    /// Trains. Declines what it cannot do, so that the server does not wait.
    async fn work(&mut self, task: Task) -> Result<()> {
        let (run, round) = (task.run.clone(), task.round);
        let trained = self.train(task).await;
        self.or_decline(trained, run, round).await.map(drop)
    }

    /// Takes part in a secure sum, or declines.
    async fn sum_up(&self, pending: &Contribution) -> Result<()> {
        let summing = Summing { link: &self.link, home: &self.home, policy: &self.setup.policy, pending };
        let summed = summing.run().await;
        if self.or_decline(summed, pending.run.clone(), pending.round).await? {
            return Ok(());
        }
        self.home.discard()
    }

    /// Whether something was done; if it cannot be done, the server learns why.
    async fn or_decline(&self, done: Result<()>, run: String, round: u32) -> Result<bool> {
        match done {
            Ok(()) => Ok(true),
            // A failure of the network is no reason to decline.
            Err(error @ (Error::Unreachable(_) | Error::Identity(_) | Error::Rejected { .. })) => Err(error),
            Err(error) => {
                tracing::error!(round, %error, "declined");
                let reason = error.to_string().chars().take(REASON_MAX).collect();
                self.link.send(&Decline { run, round, reason }).await.map(|()| false)
            }
        }
    }

    async fn train(&mut self, task: Task) -> Result<()> {
        if task.client != self.client {
            return Err(Error::protocol(format!(
                "a task for client {}; this node has client {}",
                task.client, self.client
            )));
        }
        if self.home.send_again(&task)? {
            tracing::warn!(round = task.round, "the server has lost this node's contribution: it is sent again");
            return Ok(());
        }
        self.setup.policy.check_task(&task)?;
        let cache = self.home.cache()?;
        cache.retain(&task.blobs())?;
        for blob in task.blobs() {
            self.link.fetch(blob, &cache).await?;
        }
        let session = self.session.take().filter(|session| session.is_for(&task));
        let (home, setup) = (self.home.clone(), self.setup.clone());
        let trained = tokio::task::spawn_blocking(move || -> Result<Session> {
            let mut session = match session {
                Some(session) => session,
                None => Session::open(&task, &cache, &setup)?,
            };
            setup.policy.check_bytes(&task, session.upload_bytes(&task))?;
            let kept = home.kept(&task.run)?;
            let (contribution, kept) = session.train(&task, &kept, &cache, &home.outbox()?)?;
            home.set_pending(&task, &contribution, &kept)?;
            Ok(session)
        });
        let session = trained.await.map_err(Error::internal)??;
        self.session = Some(session);
        Ok(())
    }

    /// Hands in a contribution until the server accepts or rejects it.
    async fn hand_in(&self, contribution: &Contribution) -> Result<()> {
        let outbox = self.home.outbox()?;
        loop {
            match self.link.send(contribution).await?.kind {
                Some(VerdictKind::Accepted(accepted)) => {
                    tracing::info!(round = contribution.round, id = accepted.id, "contribution accepted");
                    return self.home.commit(&contribution.run);
                }
                Some(VerdictKind::Missing(missing)) => {
                    let mut has_sent = false;
                    for part in &contribution.parts {
                        let lacks = |b: &&Blob| b.hash == part.blob.hash && b.len < part.blob.len;
                        if let Some(have) = missing.have.iter().find(lacks) {
                            let sent = self.link.upload(&part.blob, have.len, &outbox).await;
                            if sent.is_err() && outbox.check(&part.blob).is_err() {
                                tracing::warn!(round = contribution.round, "the contribution was damaged on this disk");
                                return self.home.discard();
                            }
                            sent?;
                            has_sent = true;
                        }
                    }
                    if !has_sent {
                        return Err(Error::protocol("the server lacks nothing that this node could send"));
                    }
                }
                Some(VerdictKind::Rejected(rejected)) => {
                    tracing::warn!(round = contribution.round, reason = rejected.reason, "contribution rejected");
                    return self.home.discard();
                }
                None => return Err(later_version()),
            }
        }
    }
}

fn later_version() -> Error {
    Error::protocol("the server has a later protocol version; use the same release")
}

/// Turns a token into a certificate in a node's folder; returns the node's name. A server that cannot be reached or has too
/// much to do is asked again, with back-off.
///
/// # Errors
/// If the server is not the token's, or rejects it, or could not be reached for [`ENROL_PATIENCE`].
pub async fn enrol(dir: &Path, server: &str, token: &str) -> Result<String> {
    let token = Token::parse(token)?;
    let home = Home::new(dir);
    let link = Link::new(server, enrol_tls(token.authority)?)?;
    let ask = EnrolRequest { secret: token.secret.to_vec(), request: home.request()? };
    let (start, mut back_off) = (Instant::now(), BackOff::new(WAIT_FIRST, Duration::from_secs(5)));
    let reply = loop {
        match link.send(&ask).await {
            Ok(reply) => break reply,
            Err(error @ (Error::Unreachable(_) | Error::Rejected { status: 429 | 503, .. }))
                if start.elapsed() < ENROL_PATIENCE =>
            {
                let wait = back_off.next();
                tracing::warn!(%error, wait_ms = wait.as_millis() as u64, "will try again");
                tokio::time::sleep(wait).await;
            }
            Err(error) => return Err(error),
        }
    };
    home.enrolled(&reply)?;
    Ok(reply.name)
}
