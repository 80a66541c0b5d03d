//! The files of a journal. The first is `journal.jsonl`; those that continue it have numbers. None is ever renamed, so a
//! process that still reads or locks an earlier one loses nothing. Old ones may be archived elsewhere.

use super::{Entry, Tail};
use crate::error::{Error, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// No line is longer; a damaged file must not fill the memory.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// The segments in a federation's folder.
#[derive(Debug)]
pub(super) struct Segments {
    pub dir: PathBuf,
    /// The first that is here; 0 if none is.
    pub first: u32,
}

impl Segments {
    /// Looks which there are. None may be missing between two others.
    pub fn of(dir: &Path) -> Result<Self> {
        let entries = std::fs::read_dir(dir).map_err(Error::io("list", dir))?;
        let mut numbers: Vec<u32> = entries.filter_map(|e| number(e.ok()?.file_name().to_str()?)).collect();
        numbers.sort_unstable();
        let segments = Self { dir: dir.into(), first: numbers.first().copied().unwrap_or(0) };
        for (expected, number) in (segments.first..).zip(numbers) {
            if number != expected {
                return Err(Error::corrupt(&segments.path(expected))("this part of the journal is missing"));
            }
        }
        Ok(segments)
    }

    pub fn path(&self, segment: u32) -> PathBuf {
        match segment {
            0 => self.dir.join("journal.jsonl"),
            n => self.dir.join(format!("journal-{n:05}.jsonl")),
        }
    }
}

fn number(name: &str) -> Option<u32> {
    match name {
        "journal.jsonl" => Some(0),
        name => name.strip_prefix("journal-")?.strip_suffix(".jsonl")?.parse().ok(),
    }
}

/// Reads a segment's whole lines from the tail on, one at a time.
pub(super) fn follow(
    tail: &mut Tail,
    mut file: &File,
    path: &Path,
    segment: u32,
    visit: &mut dyn FnMut(Entry) -> Result<()>,
) -> Result<()> {
    file.seek(SeekFrom::Start(tail.n_bytes)).map_err(Error::io("read", path))?;
    let (mut reader, mut line) = (BufReader::new(file), Vec::new());
    loop {
        line.clear();
        let read = reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
        if read.map_err(Error::io("read", path))? as u64 == LINE_BYTES_MAX {
            let problem = format!("entry {}: {LINE_BYTES_MAX} bytes without an end", tail.n_entries);
            return Err(Error::corrupt(path)(problem));
        }
        let Some(whole) = line.strip_suffix(b"\n") else { return Ok(()) };
        if segment > 0 && tail.n_entries == 0 {
            // Earlier segments are archived: the chain begins with what this one states.
            let first: Entry = serde_json::from_slice(whole).map_err(Error::corrupt(path))?;
            (tail.n_entries, tail.hash) = (first.seq, first.previous);
        }
        let entry = tail.check(whole).map_err(Error::corrupt(path))?;
        tail.follow(&line);
        visit(entry)?;
    }
}
