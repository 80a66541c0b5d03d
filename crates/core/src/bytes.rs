//! What travels between the halves of a round as bytes: [`Download`], [`ClientResult`], [`ClientState`] and [`ServerState`].
//!
//! Layout, little-endian: magic (8 bytes), version u32, length of the header u64, header (JSON, with the name and length of each
//! section), all sections as consecutive f32. [`crate::checkpoint`] adds a checksum. Readers check every length, so no bytes
//! make them panic or allocate more than a few times their own size.

use crate::checkpoint;
use crate::error::{Error, Result};
use crate::fusion::ServerState;
use crate::memory::Targets;
use crate::trainer::{ClientResult, ClientState, ClientStates, Download, LocalStats};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

const DOWNLOAD: &[u8] = b"FEDPROJD";
const RESULT: &[u8] = b"FEDPROJR";
const STATE: &[u8] = b"FEDPROJS";
const VERSION: u32 = 1;

/// Magic, version and length of the header.
pub(crate) const PREFIX: usize = 20;

/// The names of sections and their numbers of values.
pub(crate) type Sections = Vec<(String, usize)>;

/// A section's name and values.
pub(crate) type Named<'a> = (String, &'a [f32]);

pub(crate) fn lengths(sections: &[Named<'_>]) -> Sections {
    sections.iter().map(|(name, values)| (name.clone(), values.len())).collect()
}

/// Header and sections as bytes.
pub(crate) fn pack(magic: &[u8], version: u32, header: &impl Serialize, sections: &[Named<'_>]) -> Result<Vec<u8>> {
    let header = serde_json::to_vec(header).map_err(Error::internal("writing a message"))?;
    let n_floats: usize = sections.iter().map(|(_, values)| values.len()).sum();
    let mut bytes = Vec::with_capacity(PREFIX + header.len() + 4 * n_floats + blake3::OUT_LEN);
    bytes.extend_from_slice(magic);
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&(header.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&header);
    for (_, values) in sections {
        append(&mut bytes, values, f32::to_le_bytes);
    }
    Ok(bytes)
}

/// Appends values. Room is made once: growing by one value after the other costs ten times as much as copying.
pub(crate) fn append<T: Copy, const N: usize>(bytes: &mut Vec<u8>, values: &[T], to_bytes: impl Fn(T) -> [u8; N]) {
    let start = bytes.len();
    bytes.resize(start + N * values.len(), 0);
    for (place, value) in bytes[start..].as_chunks_mut().0.iter_mut().zip(values) {
        *place = to_bytes(*value);
    }
}

/// The header, and the bytes of the sections. `what` names the bytes in errors.
pub(crate) fn unpack<'a, H: DeserializeOwned>(
    magic: &[u8],
    version: u32,
    what: &str,
    bytes: &'a [u8],
) -> std::result::Result<(H, &'a [u8]), String> {
    let prefix = bytes.split_at_checked(PREFIX).filter(|(prefix, _)| prefix.starts_with(magic));
    let (prefix, rest) = prefix.ok_or_else(|| format!("not a {what}"))?;
    let (of, n_header) = prefix[magic.len()..].split_at(4);
    if of != version.to_le_bytes() {
        return Err(format!("{what} of another version"));
    }
    let n_header = n_header.try_into().map_or(u64::MAX, u64::from_le_bytes);
    let split = usize::try_from(n_header).ok().and_then(|n| rest.split_at_checked(n));
    let (header, sections) = split.ok_or_else(|| format!("the header of the {what} is cut short"))?;
    Ok((serde_json::from_slice(header).map_err(|error| format!("header: {error}"))?, sections))
}

/// The sections, in order; there must be no byte more or less.
pub(crate) fn split(sections: Sections, mut bytes: &[u8]) -> std::result::Result<Vec<(String, Vec<f32>)>, String> {
    let mut all = Vec::with_capacity(sections.len());
    for (name, len) in sections {
        let part = len.checked_mul(4).and_then(|n| bytes.split_at_checked(n));
        let (section, rest) = part.ok_or_else(|| format!("section `{name}` is cut short"))?;
        all.push((name, section.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect()));
        bytes = rest;
    }
    if bytes.is_empty() { Ok(all) } else { Err(format!("{} bytes after the last section", bytes.len())) }
}

fn wrong(what: &'static str) -> impl Fn(String) -> Error {
    move |problem| Error::Message { what, problem }
}

fn unknown(name: &str) -> String {
    format!("unknown section `{name}`")
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DownloadHeader {
    round: u32,
    /// The memory's samples.
    memory: Option<Vec<u32>>,
    sections: Sections,
}

impl Download {
    /// The download as bytes.
    ///
    /// # Errors
    /// Never for one that a [`crate::Coordinator`] made.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut sections: Vec<Named<'_>> = vec![("weights".into(), &self.weights), ("buffers".into(), &self.buffers)];
        sections.extend(self.vectors.iter().map(|(name, v)| (format!("vector:{name}"), &v[..])));
        if let Some((_, targets)) = &self.memory {
            sections.push(("targets.logits".into(), &targets.logits));
            sections.push(("targets.features".into(), &targets.features));
        }
        sections.extend(self.personal.iter().map(|(client, v)| (format!("personal:{client}"), &v[..])));
        let memory = self.memory.as_ref().map(|(indices, _)| indices.clone());
        let header = DownloadHeader { round: self.round, memory, sections: lengths(&sections) };
        pack(DOWNLOAD, VERSION, &header, &sections)
    }

    /// A download from bytes.
    ///
    /// # Errors
    /// If these are not the bytes of one.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let wrong = wrong("a download");
        let (header, rest) = unpack::<DownloadHeader>(DOWNLOAD, VERSION, "download", bytes).map_err(&wrong)?;
        let (mut download, mut targets) = (Self { round: header.round, ..Self::default() }, Targets::default());
        for (name, values) in split(header.sections, rest).map_err(&wrong)? {
            match name.split_once(':').unwrap_or((&name, "")) {
                ("weights", "") => download.weights = values,
                ("buffers", "") => download.buffers = values,
                ("targets.logits", "") => targets.logits = values,
                ("targets.features", "") => targets.features = values,
                ("vector", name) => drop(download.vectors.insert(name.to_owned(), values)),
                ("personal", client) => {
                    let client = client.parse().map_err(|_| wrong(unknown(&name)))?;
                    download.personal.insert(client, values);
                }
                _ => return Err(wrong(unknown(&name))),
            }
        }
        download.memory = header.memory.map(|indices| (indices, Arc::new(targets)));
        Ok(download)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResultHeader {
    client: u32,
    n_samples: usize,
    n_steps: u32,
    stats: LocalStats,
    sections: Sections,
}

impl ClientResult {
    /// The result as bytes, with what the client keeps.
    ///
    /// # Errors
    /// Never for one of [`crate::LocalTraining`].
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut sections: Vec<Named<'_>> = vec![("weights".into(), &self.weights), ("buffers".into(), &self.buffers)];
        sections.extend(self.uploads.iter().map(|(name, v)| (format!("upload:{name}"), &v[..])));
        sections.extend(self.state.iter().map(|(name, v)| (format!("state:{name}"), &v[..])));
        let Self { client, n_samples, n_steps, ref stats, .. } = *self;
        let header = ResultHeader { client, n_samples, n_steps, stats: stats.clone(), sections: lengths(&sections) };
        pack(RESULT, VERSION, &header, &sections)
    }

    /// A result from bytes. [`crate::Coordinator::close`] checks that it fits the network.
    ///
    /// # Errors
    /// If these are not the bytes of one.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let wrong = wrong("a client's result");
        let (header, rest) = unpack::<ResultHeader>(RESULT, VERSION, "client's result", bytes).map_err(&wrong)?;
        let ResultHeader { client, n_samples, n_steps, stats, sections } = header;
        let mut result = Self { client, n_samples, n_steps, stats, ..Self::default() };
        for (name, values) in split(sections, rest).map_err(&wrong)? {
            match name.split_once(':').unwrap_or((&name, "")) {
                ("weights", "") => result.weights = values,
                ("buffers", "") => result.buffers = values,
                ("upload", name) => drop(result.uploads.insert(name.to_owned(), values)),
                ("state", name) => drop(result.state.insert(name.to_owned(), values)),
                _ => return Err(wrong(unknown(&name))),
            }
        }
        Ok(result)
    }
}

/// What a client keeps, as bytes.
///
/// # Errors
/// Never for what a client keeps.
pub fn client_state_to_bytes(state: &ClientState) -> Result<Vec<u8>> {
    let sections: Vec<Named<'_>> = state.iter().map(|(name, values)| (name.clone(), &values[..])).collect();
    pack(STATE, VERSION, &lengths(&sections), &sections)
}

/// What a client keeps, from bytes.
///
/// # Errors
/// If these are not the bytes of a client's state.
pub fn client_state_from_bytes(bytes: &[u8]) -> Result<ClientState> {
    let wrong = wrong("a client's state");
    let (sections, rest) = unpack::<Sections>(STATE, VERSION, "client's state", bytes).map_err(&wrong)?;
    Ok(split(sections, rest).map_err(&wrong)?.into_iter().collect())
}

impl ServerState {
    /// The state as bytes: those of a checkpoint without clients.
    ///
    /// # Errors
    /// Never for a server's state.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        checkpoint::to_bytes(self, &ClientStates::new(), "")
    }

    /// A state from bytes. [`crate::Coordinator::resume`] checks that it fits the network.
    ///
    /// # Errors
    /// If these are not the bytes of one.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Ok(checkpoint::from_bytes(bytes).map_err(wrong("a server's state"))?.state)
    }
}
