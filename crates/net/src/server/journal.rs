//! The journal: the server's durable round log and its audit log in one.
//!
//! Each event is a line of JSON with the hash of the previous line. It is synced to disk before anything is acknowledged, so
//! the audit shows exactly what was acknowledged. A changed or missing line breaks the chain. A last line that a crash cut
//! short is dropped. Several processes may append (a server and `fedproj nodes`); a lock on the file orders them.
//!
//! A file that has grown large is left as it is, and the chain continues in the next (`Segments`).

mod segments;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::files::sync_dir;
use crate::wire::Contribution;
use fedproj_core::Pull;
use segments::{Segments, follow};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A node was invited.
    Invited {
        /// Its name.
        node: String,
        /// Its client.
        client: u32,
    },
    /// A token became a certificate.
    Enrolled {
        /// The node's name.
        node: String,
        /// Its client.
        client: u32,
        /// The fingerprint of its certificate.
        fingerprint: String,
    },
    /// A member's certificate was renewed.
    Renewed {
        /// The node's name.
        node: String,
        /// Its client.
        client: u32,
        /// The fingerprint of its new certificate.
        fingerprint: String,
        /// The fingerprint of its old one.
        replaces: String,
    },
    /// A new authority begins to replace the current one, or has replaced it.
    AuthorityRotated {
        /// Whether the old one is gone.
        finished: bool,
        /// The fingerprint of the authority that nodes pin from now on.
        fingerprint: String,
    },
    /// Handshakes failed, or came from nodes that are not members.
    #[serde(rename = "handshakes_refused")]
    HandshakesRejected {
        /// The address or network that they came from.
        from: String,
        /// Why.
        reason: String,
        /// How many since the last such entry.
        n: u64,
    },
    /// A node was revoked.
    Revoked {
        /// Its name.
        node: String,
    },
    /// A round began.
    RoundOpened {
        /// The run.
        run: String,
        /// The round.
        round: u32,
        /// The clients that were asked.
        asked: Vec<u32>,
    },
    /// A contribution counts.
    Accepted(Contribution),
    /// A contribution was rejected.
    #[serde(rename = "refused")]
    Rejected {
        /// The run.
        run: String,
        /// The round.
        round: u32,
        /// The client.
        client: u32,
        /// Why.
        reason: String,
    },
    /// A node declined a task.
    Declined {
        /// The run.
        run: String,
        /// The round.
        round: u32,
        /// The client.
        client: u32,
        /// Why, in the node's words.
        reason: String,
    },
    /// A round closed with these contributions; the other clients were late.
    RoundClosed {
        /// The run.
        run: String,
        /// The round.
        round: u32,
        /// Clients whose contributions are fused.
        counted: Vec<u32>,
        /// Clients that were asked but did not contribute.
        late: Vec<u32>,
    },
    /// A round's result is in the run directory.
    RoundDone {
        /// The run.
        run: String,
        /// The round.
        round: u32,
        /// BLAKE3 of the model.
        model_hash: String,
        /// How hard each client pulled at the model; empty in entries of earlier versions.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pulls: Vec<Pull>,
    },
    /// Clients were asked in the place of others that declined, were revoked, or fell silent.
    AskedInstead {
        /// The run.
        run: String,
        /// The round.
        round: u32,
        /// The clients that were asked.
        clients: Vec<u32>,
    },
    /// A contribution that counted was excluded, because fusion failed with it.
    Excluded {
        /// The run.
        run: String,
        /// The round.
        round: u32,
        /// The client.
        client: u32,
        /// Its node's name.
        node: String,
        /// How fusion failed.
        reason: String,
    },
    /// A contribution that was accepted is missing or changed on disk. Its client is asked again.
    Damaged {
        /// The run.
        run: String,
        /// The round.
        round: u32,
        /// The client.
        client: u32,
        /// What was found.
        reason: String,
    },
    /// The members of a secure sum are fixed.
    RosterFixed {
        /// The run.
        run: String,
        /// The round.
        round: u32,
        /// The clients.
        clients: Vec<u32>,
        /// Shares that rebuild a secret.
        threshold: usize,
        /// The roster's hash, which its nodes know too.
        roster: String,
    },
    /// A secure sum could not be completed. Nothing of it is known, and the round is repeated.
    SumFailed {
        /// The run.
        run: String,
        /// The round.
        round: u32,
        /// Why.
        reason: String,
    },
    /// A round ended without a secure sum, and with the model of the round before. Its nodes had begun to reveal shares, and
    /// they do so for one set of contributions only.
    RoundEmpty {
        /// The run.
        run: String,
        /// The round.
        round: u32,
        /// Why.
        reason: String,
    },
    /// The run's owner went back to an earlier round.
    RolledBack {
        /// The run.
        run: String,
        /// Rounds that were kept; the next one has this number.
        to_round: u32,
    },
}

/// A line of the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(expecting = "an entry of a journal")]
pub struct Entry {
    /// Counted from 0.
    pub seq: u64,
    /// When, for people only.
    pub time: String,
    /// Hash of the previous entry.
    pub previous: String,
    /// Who ran the command that caused it, as the system knows them; none for what the server does by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operator: Option<String>,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
    /// Hash of the line up to here; none in entries of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<String>,
}

/// The journal of a federation.
#[derive(Debug)]
pub struct Journal {
    segments: Segments,
    /// The number of the segment that is written.
    segment: u32,
    file: File,
    tail: Tail,
    segment_bytes_max: u64,
}

/// A segment that has grown beyond this is followed by the next.
const SEGMENT_BYTES_MAX: u64 = 64 << 20;

/// Where the chain ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tail {
    /// Entries so far.
    pub n_entries: u64,
    /// Hash of the last entry. Note it elsewhere to detect a journal that was cut short.
    pub hash: String,
    /// Bytes of the segment's whole lines.
    n_bytes: u64,
    /// Whether the last entry carries its own check. Those after it do too.
    is_checked: bool,
}

impl Default for Tail {
    fn default() -> Self {
        Self { n_entries: 0, hash: "0".repeat(64), n_bytes: 0, is_checked: false }
    }
}

impl Journal {
    /// Opens the journal of a federation's folder and calls `visit` with every entry. A last line that a crash cut short is
    /// removed.
    ///
    /// # Errors
    /// If a line does not follow from the previous one.
    pub fn open(dir: &Path, visit: &mut dyn FnMut(Entry)) -> Result<Self> {
        let segments = Segments::of(dir)?;
        let (segment, tail) = (segments.first, Tail::default());
        let file = open_segment(&segments, segment)?;
        let mut journal = Self { segments, segment, file, tail, segment_bytes_max: SEGMENT_BYTES_MAX };
        journal.locked(visit, |_| Ok(()))?;
        if journal.segments.first > 0 && journal.tail.n_entries == 0 {
            let path = journal.segments.path(journal.segment);
            return Err(Error::corrupt(&path)("it is empty, and the part before it is missing"));
        }
        Ok(journal)
    }

    /// Calls `visit` with every entry, without changing or locking anything; returns where the chain ends. `None` if there
    /// is no journal.
    ///
    /// # Errors
    /// If a line does not follow from the previous one, or `visit` fails.
    pub fn read(dir: &Path, visit: &mut dyn FnMut(Entry) -> Result<()>) -> Result<Option<Tail>> {
        let segments = Segments::of(dir)?;
        let (mut tail, mut segment) = (Tail::default(), segments.first);
        while segments.path(segment).exists() {
            let path = segments.path(segment);
            let file = File::open(&path).map_err(Error::io("open", &path))?;
            tail.n_bytes = 0;
            follow(&mut tail, &file, &path, segment, visit)?;
            segment += 1;
        }
        Ok((segment > segments.first).then_some(tail))
    }

    /// Where the chain ends.
    pub fn tail(&self) -> &Tail {
        &self.tail
    }

    /// Appends an event. It is on disk when this returns.
    ///
    /// # Errors
    /// If the disk is full; the journal is unchanged then.
    pub fn append(&mut self, event: Event) -> Result<()> {
        self.append_as(None, event)
    }

    /// As [`Journal::append`], for what an operator did.
    ///
    /// # Errors
    /// If the disk is full; the journal is unchanged then.
    pub fn append_as(&mut self, operator: Option<String>, event: Event) -> Result<()> {
        // Another process may have appended.
        self.locked(&mut |_| (), |journal| {
            let time = now();
            let Tail { n_entries: seq, hash: previous, .. } = journal.tail.clone();
            let entry = Entry { seq, time, previous, operator, event, check: None };
            let text = serde_json::to_string(&entry).map_err(|e| Error::internal(format!("journal: {e}")))?;
            let line = with_check(&text) + "\n";
            let written = journal.file.write_all(line.as_bytes()).and_then(|()| journal.file.sync_data());
            if let Err(source) = written {
                // Half a line would break the chain. If removing it fails too, the next start removes it.
                let _ = journal.file.set_len(journal.tail.n_bytes);
                return Err(Error::io("append to", &journal.segments.path(journal.segment))(source));
            }
            journal.tail.follow(line.as_bytes());
            if journal.tail.n_bytes > journal.segment_bytes_max {
                open_segment(&journal.segments, journal.segment + 1)?;
            }
            Ok(())
        })
    }

    fn locked<T>(&mut self, visit: &mut dyn FnMut(Entry), work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.lock_newest(visit)?;
        let result = work(self);
        self.file.unlock().map_err(Error::io("unlock", &self.segments.path(self.segment)))?;
        result
    }

    /// Locks the newest segment and reads what was appended since.
    fn lock_newest(&mut self, visit: &mut dyn FnMut(Entry)) -> Result<()> {
        loop {
            let (path, next) = (self.segments.path(self.segment), self.segment + 1);
            self.file.lock().map_err(Error::io("lock", &path))?;
            if let Err(error) = self.catch_up(visit) {
                self.file.unlock().map_err(Error::io("unlock", &path))?;
                return Err(error);
            }
            if !self.segments.path(next).exists() {
                return Ok(());
            }
            // The lock ends with the file.
            (self.file, self.segment, self.tail.n_bytes) = (open_segment(&self.segments, next)?, next, 0);
        }
    }

    /// Reads what was appended since, and removes half a line at the end.
    fn catch_up(&mut self, visit: &mut dyn FnMut(Entry)) -> Result<()> {
        let path = self.segments.path(self.segment);
        let len = self.file.metadata().map_err(Error::io("read", &path))?.len();
        if len == self.tail.n_bytes {
            return Ok(());
        }
        let mut visit = |entry| {
            visit(entry);
            Ok(())
        };
        follow(&mut self.tail, &self.file, &path, self.segment, &mut visit)?;
        if self.tail.n_bytes < len {
            // Synced at once: after a power cut the next entry must not follow the torn line.
            let cut = self.file.set_len(self.tail.n_bytes).and_then(|()| self.file.sync_data());
            cut.map_err(Error::io("cut", &path))?;
        }
        Ok(())
    }
}

/// The time for people.
pub(super) fn now() -> String {
    let time = time::OffsetDateTime::now_utc();
    time.format(&time::format_description::well_known::Rfc3339).unwrap_or_default()
}

fn open_segment(segments: &Segments, segment: u32) -> Result<File> {
    let path = segments.path(segment);
    let file = OpenOptions::new().read(true).append(true).create(true).open(&path);
    let file = file.map_err(Error::io("open", &path))?;
    sync_dir(&segments.dir)?;
    Ok(file)
}

impl Tail {
    /// Reads a line that must follow.
    ///
    /// # Errors
    /// If it does not.
    pub fn check(&self, line: &[u8]) -> std::result::Result<Entry, String> {
        let broken = |problem: String| format!("entry {}: {problem}", self.n_entries);
        let entry: Entry = serde_json::from_slice(line).map_err(|e| broken(e.to_string()))?;
        let is_whole = check_of(line).unwrap_or(!self.is_checked) && has_its_id(&entry, line);
        if entry.seq != self.n_entries || entry.previous != self.hash || !is_whole {
            let problem = "does not follow from the previous entry: the journal has been changed\n\
                           hint: restore it from a copy; `fedproj audit` shows the entries before";
            return Err(broken(problem.into()));
        }
        Ok(entry)
    }

    /// The tail before an entry, as that entry states it.
    pub(super) fn before(first: &Entry) -> Self {
        Self { n_entries: first.seq, hash: first.previous.clone(), ..Self::default() }
    }

    /// Checks a line without its end, and moves on over it.
    pub(super) fn accept(&mut self, line: &[u8]) -> std::result::Result<Entry, String> {
        let entry = self.check(line)?;
        self.follow(line);
        Ok(entry)
    }

    /// Moves on over a line that follows, its line end included.
    fn follow(&mut self, line: &[u8]) {
        self.hash = blake3::hash(line.strip_suffix(b"\n").unwrap_or(line)).to_hex().to_string();
        self.n_entries += 1;
        self.n_bytes += line.len() as u64;
        self.is_checked = check_of(line.strip_suffix(b"\n").unwrap_or(line)).is_some();
    }
}

const CHECK: &[u8] = b",\"check\":\"";

/// An entry with a hash of its own: no later entry vouches for the last one.
fn with_check(entry: &str) -> String {
    let body = entry.strip_suffix('}').unwrap_or(entry);
    format!("{body}{}{}\"}}", String::from_utf8_lossy(CHECK), blake3::hash(body.as_bytes()).to_hex())
}

/// Whether an entry matches its own hash; `None` for entries of earlier versions, which have none.
fn check_of(line: &[u8]) -> Option<bool> {
    let (body, check) = line.split_at_checked(line.len().checked_sub(CHECK.len() + 66)?)?;
    let hash = check.strip_prefix(CHECK)?.strip_suffix(b"\"}")?;
    Some(hash == blake3::hash(body).to_hex().as_bytes())
}

/// Whether the id beside an accepted contribution is that of its content.
fn has_its_id(entry: &Entry, line: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Id {
        id: String,
    }
    match &entry.event {
        Event::Accepted(contribution) => serde_json::from_slice(line).is_ok_and(|Id { id }| id == contribution.id()),
        _ => true,
    }
}
