//! The journal: the server's durable round log and its audit log in one file.
//!
//! Each event is a line of JSON with the hash of the line before, synced to disk before anything is acknowledged. So what
//! was acknowledged is what is audited, and a line that is changed or taken out breaks the chain. What a crash leaves of a
//! last line is dropped. Several processes may append (a server and `fedproj nodes`); a lock on the file orders them.

use crate::error::{Error, Result};
use crate::files::sync_dir;
use crate::wire::message::{Contribution, Named, Stats};
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
        /// The client that it will stand for.
        client: u32,
    },
    /// A token became a certificate.
    Enrolled {
        /// The node's name.
        node: String,
        /// Its client.
        client: u32,
        /// Of its certificate.
        fingerprint: String,
    },
    /// A node was shut out.
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
    Accepted(Accepted),
    /// A contribution was refused.
    Refused {
        /// The run.
        run: String,
        /// The round.
        round: u32,
        /// The client.
        client: u32,
        /// Why.
        reason: String,
    },
    /// A node would not do a task.
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
    /// A round was closed with these contributions; who is not among them was late.
    RoundClosed {
        /// The run.
        run: String,
        /// The round.
        round: u32,
        /// Clients whose contributions are fused.
        counted: Vec<u32>,
        /// Clients that were asked in vain.
        late: Vec<u32>,
    },
    /// A round's outcome is in the run directory.
    RoundDone {
        /// The run.
        run: String,
        /// The round.
        round: u32,
        /// BLAKE3 of the model.
        model_hash: String,
    },
}

/// A contribution that counts, as it was accepted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Accepted {
    /// The run.
    pub run: String,
    /// The round.
    pub round: u32,
    /// The client.
    pub client: u32,
    /// See [`Contribution::id`].
    pub id: String,
    /// Samples.
    pub n_samples: u64,
    /// Local steps.
    pub n_steps: u32,
    /// Measurements.
    pub stats: fedproj_core::LocalStats,
    /// Name, hash and length in bytes of each vector.
    pub parts: Vec<(String, String, u64)>,
}

impl Accepted {
    /// The contribution as it stands in the journal.
    pub fn of(c: &Contribution) -> Self {
        let part = |p: &Named| (p.name.clone(), p.blob.hex(), p.blob.len);
        Self {
            run: c.run.clone(),
            round: c.round,
            client: c.client,
            id: c.id(),
            n_samples: c.n_samples,
            n_steps: c.n_steps,
            stats: (&c.stats).into(),
            parts: c.parts.iter().map(part).collect(),
        }
    }

    /// The contribution again.
    pub fn contribution(&self) -> Contribution {
        let part = |(name, hash, len): &(String, String, u64)| Named {
            name: name.clone(),
            blob: crate::wire::message::Blob {
                hash: crate::wire::message::Blob::parse_hex(hash).unwrap_or_default(),
                len: *len,
            },
        };
        Contribution {
            run: self.run.clone(),
            round: self.round,
            client: self.client,
            n_samples: self.n_samples,
            n_steps: self.n_steps,
            stats: Stats::from(&self.stats),
            parts: self.parts.iter().map(part).collect(),
        }
    }
}

/// A line of the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Counted from 0.
    pub seq: u64,
    /// When, for people: nothing depends on it.
    pub time: String,
    /// Hash of the entry before.
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
    /// Hash of the last one; note it elsewhere, and a journal that was cut short shows too.
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
    /// Opens the journal of a federation's folder and hands every entry to `visit`. What a crash left of a last line is
    /// cut off.
    ///
    /// # Errors
    /// If a line does not follow from the one before.
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

    /// Appends an event; when this returns, it is on disk.
    ///
    /// # Errors
    /// If the disk is full; the journal is as it was then.
    pub fn append(&mut self, event: Event) -> Result<()> {
        self.locked(|journal| {
            // Another process may have written since.
            journal.catch_up(&mut |_| ())?;
            let time = time::OffsetDateTime::now_utc();
            let time = time.format(&time::format_description::well_known::Rfc3339).unwrap_or_default();
            let entry = Entry { seq: journal.tail.n_entries, time, previous: journal.tail.hash.clone(), event };
            let line = serde_json::to_string(&entry).map_err(|e| Error::config(format!("journal: {e}")))? + "\n";
            let written = journal.file.write_all(line.as_bytes()).and_then(|()| journal.file.sync_data());
            if let Err(source) = written {
                // Half a line would end the chain for everybody; if even this fails, the next start cuts it off.
                let _ = journal.file.set_len(journal.tail.n_bytes);
                return Err(Error::Io { action: "append to", path: journal.path.clone(), source });
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

    /// Reads what was appended since, and cuts off half a line at the end.
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
            let entry =
                self.tail.check(whole).map_err(|problem| Error::Corrupt { path: self.path.clone(), problem })?;
            self.tail.follow(&String::from_utf8_lossy(line));
            visit(entry);
        }
        if self.tail.n_bytes < len {
            // Synced at once: what is appended next must not stand behind the torn line after a power cut.
            let cut = self.file.set_len(self.tail.n_bytes).and_then(|()| self.file.sync_data());
            cut.map_err(Error::io("cut", &self.path))?;
        }
        Ok(())
    }
}

impl Tail {
    /// Whether a line follows, and what it says.
    pub(crate) fn check(&self, line: &[u8]) -> std::result::Result<Entry, String> {
        let broken = |problem: String| format!("entry {}: {problem}", self.n_entries);
        let entry: Entry = serde_json::from_slice(line).map_err(|e| broken(e.to_string()))?;
        if entry.seq != self.n_entries || entry.previous != self.hash {
            return Err(broken("does not follow from the entry before: the journal has been changed".into()));
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
    fn a_torn_last_line_is_dropped_wherever_it_is_torn_and_the_chain_goes_on() {
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
