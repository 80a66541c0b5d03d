//! A node: asks for work, trains, hands in, and comes back for ever, whatever breaks in between.

pub mod home;
mod link;
mod policy;
pub(crate) mod session;

pub use link::Link;
pub use policy::Policy;
pub use session::{NodeData, Setup};

use crate::backoff::BackOff;
use crate::error::{Error, Result};
use crate::identity::{Token, enrol_tls};
use crate::node::home::Home;
use crate::node::session::Session;
use crate::wire::message::{Blob, Contribution, Decline, Train, verdict, work};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// Seconds between signs of life. They do not wait for uploads or training.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Characters of a reason that the server is told.
const REASON_MAX: usize = 500;

/// The waits after failures begin with this and end with that, each a little different for each node.
const WAIT_FIRST: Duration = Duration::from_millis(250);
const WAIT_MAX: Duration = Duration::from_secs(30);

/// A node that has been enrolled.
#[derive(Debug)]
pub struct Node {
    home: Home,
    link: Link,
    setup: Setup,
    client: u32,
    session: Option<Session>,
    /// The round at work, −1 if there is none.
    working: Arc<AtomicI64>,
}

/// What a turn came to.
enum Turn {
    Waited,
    Worked,
    Done(String),
}

impl Node {
    /// The node of a folder.
    ///
    /// # Errors
    /// If it has not been enrolled.
    pub fn open(dir: &Path, server: &str, setup: Setup) -> Result<Self> {
        let home = Home::new(dir);
        let client = home.identity()?.client;
        let link = Link::new(server, home.tls()?)?;
        Ok(Self { home, link, setup, client, session: None, working: Arc::new(AtomicI64::new(-1)) })
    }

    /// Works for ever, or until the run is over: returns the final model's hash then.
    ///
    /// # Errors
    /// Never for what the network does; what breaks is logged and tried again.
    pub async fn run(mut self, until_done: bool) -> Result<String> {
        let (link, working) = (self.link.clone(), Arc::clone(&self.working));
        let beating = tokio::spawn(async move {
            loop {
                let round = u32::try_from(working.load(Ordering::Relaxed)).ok();
                if let Err(error) = link.heartbeat(round).await {
                    tracing::debug!(%error, "no heartbeat");
                }
                tokio::time::sleep(HEARTBEAT).await;
            }
        });
        let own = Duration::from_millis(u64::from(self.client) * 37 % 250);
        let mut back_off = BackOff::new(WAIT_FIRST + own, WAIT_MAX + own);
        let hash = loop {
            match self.turn().await {
                Ok(Turn::Done(hash)) if until_done => break hash,
                Ok(Turn::Done(_)) => tokio::time::sleep(HEARTBEAT).await,
                Ok(Turn::Waited | Turn::Worked) => back_off.reset(),
                Err(error) => {
                    let wait = back_off.next();
                    tracing::warn!(%error, wait_ms = wait.as_millis() as u64, "will try again");
                    // The server hangs up on such a node without a word over HTTP/2.
                    if matches!(error, Error::Unreachable(_)) && self.home.is_expired() {
                        tracing::error!(
                            "this node's certificate has ended; ask the server's owner for a token and enrol in a new folder"
                        );
                    }
                    tokio::time::sleep(wait).await;
                }
            }
        };
        beating.abort();
        Ok(hash)
    }

    async fn turn(&mut self) -> Result<Turn> {
        if let Some(pending) = self.home.pending()? {
            self.working.store(i64::from(pending.round), Ordering::Relaxed);
            self.hand_in(&pending).await?;
            return Ok(Turn::Worked);
        }
        self.working.store(-1, Ordering::Relaxed);
        match self.link.work().await?.kind {
            Some(work::Kind::Train(task)) => {
                self.working.store(i64::from(task.round), Ordering::Relaxed);
                self.work(*task).await?;
                Ok(Turn::Worked)
            }
            Some(work::Kind::Done(done)) => Ok(Turn::Done(done.model_hash)),
            Some(work::Kind::Wait(_)) => Ok(Turn::Waited),
            None => Err(Error::protocol("the server speaks a later version; use the same release")),
        }
    }

    /// Trains; what cannot be done is declined, so that nobody waits for it.
    async fn work(&mut self, task: Train) -> Result<()> {
        let (run, round) = (task.run.clone(), task.round);
        match self.train(task).await {
            Ok(()) => Ok(()),
            // The network's failures are nobody's decision.
            Err(error @ (Error::Unreachable(_) | Error::Refused { .. })) => Err(error),
            Err(error) => {
                tracing::error!(round, %error, "declined");
                let reason = error.to_string().chars().take(REASON_MAX).collect();
                self.link.decline(&Decline { run, round, reason }).await
            }
        }
    }

    async fn train(&mut self, task: Train) -> Result<()> {
        if task.client != self.client {
            return Err(Error::protocol(format!("a task for client {}; this is {}", task.client, self.client)));
        }
        self.setup.policy.check_task(&task)?;
        let cache = self.home.cache()?;
        cache.retain(&task.blobs())?;
        for blob in task.blobs() {
            self.link.fetch(blob, &cache).await?;
        }
        let session = self.session.take().filter(|session| session.run() == task.run);
        let (home, setup) = (self.home.clone(), self.setup.clone());
        let trained = tokio::task::spawn_blocking(move || -> Result<Session> {
            let mut session = match session {
                Some(session) => session,
                None => Session::open(&task, &cache, &setup)?,
            };
            setup.policy.check_bytes(&task, session.upload_bytes(&task))?;
            let kept = home.kept(&task.run)?;
            let (contribution, kept) = session.train(&task, kept, &cache, &home.outbox()?)?;
            home.set_pending(&contribution, &kept)?;
            Ok(session)
        });
        let session = trained.await.map_err(|e| Error::config(format!("training failed: {e}")))??;
        self.session = Some(session);
        Ok(())
    }

    /// Hands in until the server has taken or refused it.
    async fn hand_in(&self, contribution: &Contribution) -> Result<()> {
        let outbox = self.home.outbox()?;
        loop {
            match self.link.contribute(contribution).await?.kind {
                Some(verdict::Kind::Accepted(receipt)) => {
                    tracing::info!(round = contribution.round, id = receipt.id, "contribution taken");
                    return self.home.commit(&contribution.run);
                }
                Some(verdict::Kind::Missing(missing)) => {
                    let mut has_sent = false;
                    for part in &contribution.parts {
                        let lacks = |b: &&Blob| b.hash == part.blob.hash && b.len < part.blob.len;
                        if let Some(have) = missing.have.iter().find(lacks) {
                            self.link.upload(&part.blob, have.len, &outbox).await?;
                            has_sent = true;
                        }
                    }
                    if !has_sent {
                        return Err(Error::protocol("the server misses nothing that could be sent"));
                    }
                }
                Some(verdict::Kind::Refused(refusal)) => {
                    tracing::warn!(round = contribution.round, reason = refusal.reason, "contribution not taken");
                    return self.home.discard();
                }
                None => return Err(Error::protocol("the server speaks a later version; use the same release")),
            }
        }
    }
}

/// Turns a token into a certificate, kept in a node's folder; the node's name.
///
/// # Errors
/// If the server is not the token's, or refuses it.
pub async fn enrol(dir: &Path, server: &str, token: &str) -> Result<String> {
    let token = Token::parse(token)?;
    let home = Home::new(dir);
    let link = Link::new(server, enrol_tls(token.authority)?)?;
    let reply = link.enrol(&token.secret, &home.request()?).await?;
    home.enrolled(&reply)?;
    Ok(reply.name)
}
