//! The journal: the server's durable round log and its audit log in one file.
//!
//! Each event is a line of JSON with the hash of the previous line. It is synced to disk before anything is acknowledged, so
//! the audit shows exactly what was acknowledged. A changed or missing line breaks the chain. A last line that a crash cut
//! short is dropped. Several processes may append (a server and `fedproj nodes`); a lock on the file orders them.

use crate::error::{Error, Result};
use crate::files::sync_dir;
use crate::wire::Contribution;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

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
    },
}

/// A line of the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Counted from 0.
    pub seq: u64,
    /// When, for people only.
    pub time: String,
    /// Hash of the previous entry.
    pub previous: String,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// The journal of a federation.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    tail: Tail,
}

/// Where the chain ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tail {
    /// Entries so far.
    pub n_entries: u64,
    /// Hash of the last entry. Note it elsewhere to detect a journal that was cut short.
    pub hash: String,
    /// Bytes of all whole lines.
    n_bytes: u64,
}

impl Default for Tail {
    fn default() -> Self {
        Self { n_entries: 0, hash: "0".repeat(64), n_bytes: 0 }
    }
}

impl Journal {
    /// Opens the journal of a federation's folder and calls `visit` with every entry. A last line that a crash cut short is
    /// removed.
    ///
    /// # Errors
    /// If a line does not follow from the previous one.
    pub fn open(dir: &Path, visit: &mut dyn FnMut(Entry)) -> Result<Self> {
        let path = dir.join("journal.jsonl");
        let file = OpenOptions::new().read(true).append(true).create(true).open(&path);
        let file = file.map_err(Error::io("open", &path))?;
        sync_dir(dir)?;
        let mut journal = Self { path, file, tail: Tail::default() };
        journal.locked(|journal| journal.catch_up(visit))?;
        Ok(journal)
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
        self.locked(|journal| {
            // Another process may have appended.
            journal.catch_up(&mut |_| ())?;
            let time = time::OffsetDateTime::now_utc();
            let time = time.format(&time::format_description::well_known::Rfc3339).unwrap_or_default();
            let entry = Entry { seq: journal.tail.n_entries, time, previous: journal.tail.hash.clone(), event };
            let line = serde_json::to_string(&entry).map_err(|e| Error::internal(format!("journal: {e}")))? + "\n";
            let written = journal.file.write_all(line.as_bytes()).and_then(|()| journal.file.sync_data());
            if let Err(source) = written {
                // Half a line would break the chain. If removing it fails too, the next start removes it.
                let _ = journal.file.set_len(journal.tail.n_bytes);
                return Err(Error::io("append to", &journal.path)(source));
            }
            journal.tail.follow(&line);
            Ok(())
        })
    }

    fn locked<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.file.lock().map_err(Error::io("lock", &self.path))?;
        let result = work(self);
        self.file.unlock().map_err(Error::io("unlock", &self.path))?;
        result
    }

    /// Reads what was appended since, and removes half a line at the end.
    fn catch_up(&mut self, visit: &mut dyn FnMut(Entry)) -> Result<()> {
        let len = self.file.metadata().map_err(Error::io("read", &self.path))?.len();
        if len == self.tail.n_bytes {
            return Ok(());
        }
        let mut text = Vec::new();
        let start = SeekFrom::Start(self.tail.n_bytes);
        let read = self.file.seek(start).and_then(|_| self.file.read_to_end(&mut text));
        read.map_err(Error::io("read", &self.path))?;
        for line in text.split_inclusive(|b| *b == b'\n') {
            let Some(whole) = line.strip_suffix(b"\n") else { break };
            let entry = self.tail.check(whole).map_err(Error::corrupt(&self.path))?;
            self.tail.follow(&String::from_utf8_lossy(line));
            visit(entry);
        }
        if self.tail.n_bytes < len {
            // Synced at once: after a power cut the next entry must not follow the torn line.
            let cut = self.file.set_len(self.tail.n_bytes).and_then(|()| self.file.sync_data());
            cut.map_err(Error::io("cut", &self.path))?;
        }
        Ok(())
    }
}

impl Tail {
    /// Reads a line that must follow.
    ///
    /// # Errors
    /// If it does not.
    pub fn check(&self, line: &[u8]) -> std::result::Result<Entry, String> {
        let broken = |problem: String| format!("entry {}: {problem}", self.n_entries);
        let entry: Entry = serde_json::from_slice(line).map_err(|e| broken(e.to_string()))?;
        if entry.seq != self.n_entries || entry.previous != self.hash {
            return Err(broken("does not follow from the previous entry: the journal has been changed".into()));
        }
        Ok(entry)
    }

    fn follow(&mut self, line: &str) {
        self.hash = blake3::hash(line.trim_end_matches('\n').as_bytes()).to_hex().to_string();
        self.n_entries += 1;
        self.n_bytes += line.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(n: u32) -> Event {
        Event::RoundOpened { run: "r".into(), round: n, asked: vec![1, 2] }
    }

    fn read(dir: &Path) -> Result<Vec<Entry>> {
        let mut all = Vec::new();
        Journal::open(dir, &mut |e| all.push(e))?;
        Ok(all)
    }

    #[test]
    fn events_come_back_in_order_and_two_writers_share_a_chain() {
        let dir = tempfile::tempdir().unwrap();
        let mut a = Journal::open(dir.path(), &mut |_| ()).unwrap();
        let mut b = Journal::open(dir.path(), &mut |_| ()).unwrap();
        for n in 0..6 {
            if n % 2 == 0 { &mut a } else { &mut b }.append(event(n)).unwrap();
        }
        let back = read(dir.path()).unwrap();
        assert_eq!(back.iter().map(|e| e.event.clone()).collect::<Vec<_>>(), (0..6).map(event).collect::<Vec<_>>());
        assert_eq!(b.tail().n_entries, 6);
    }

    #[test]
    fn a_torn_last_line_is_dropped_wherever_it_is_torn_and_the_chain_continues() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let mut journal = Journal::open(dir.path(), &mut |_| ()).unwrap();
        journal.append(event(0)).unwrap();
        let one = std::fs::read(&path).unwrap().len();
        journal.append(event(1)).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for cut in one..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let mut journal = Journal::open(dir.path(), &mut |_| ()).unwrap();
            assert_eq!(journal.tail().n_entries, 1, "cut at {cut}");
            journal.append(event(7)).unwrap();
            assert_eq!(read(dir.path()).unwrap()[1].event, event(7));
        }
    }

    #[test]
    fn a_changed_or_missing_entry_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let mut journal = Journal::open(dir.path(), &mut |_| ()).unwrap();
        (0..4).for_each(|n| journal.append(event(n)).unwrap());
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let changed = text.replacen("\"round\":1", "\"round\":9", 1);
        let missing = [lines[0], lines[2], lines[3]].join("\n") + "\n";
        let swapped = [lines[0], lines[2], lines[1], lines[3]].join("\n") + "\n";
        for damaged in [changed, missing, swapped] {
            std::fs::write(&path, damaged).unwrap();
            assert!(read(dir.path()).unwrap_err().to_string().contains("has been changed"));
        }
    }
}
