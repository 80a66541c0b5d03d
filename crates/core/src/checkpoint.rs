//! Checkpoints: the whole state of a server, or of a simulation with its clients, in one file. A file is complete or does not exist.
//!
//! Layout, little-endian: magic `FEDPROJC`, version u32, header length u64, header (JSON: completed rounds, hash of the
//! configuration, sections with name and length), all sections as consecutive f32, BLAKE3 of everything before.

use crate::bytes::{Named, PREFIX, Sections, lengths, pack, split, unpack};
use crate::error::{Error, Result};
use crate::files::write_atomically;
use crate::fusion::ServerState;
use crate::memory::Targets;
use crate::trainer::ClientStates;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;

const MAGIC: &[u8] = b"FEDPROJC";
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    n_rounds_done: u32,
    config_hash: String,
    sections: Sections,
}

/// What a checkpoint holds.
pub(crate) struct Checkpoint {
    pub state: ServerState,
    pub clients: ClientStates,
    pub config_hash: String,
}

/// Writes the server's state and the state of simulated clients.
pub(crate) fn save(path: &Path, state: &ServerState, clients: &ClientStates, config_hash: &str) -> Result<()> {
    write_atomically(path, &to_bytes(state, clients, config_hash)?)
}

/// Reads a state that was saved with the same configuration: its hash is one of these.
pub(crate) fn load(path: &Path, config_hashes: &[String]) -> Result<(ServerState, ClientStates)> {
    let name = path.file_name().unwrap_or_default().display();
    let hint =
        format!("hint: remove `{name}`; the run then resumes from the checkpoint before it, else from the start");
    let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
    let Checkpoint { state, clients, config_hash } = from_bytes(&bytes)
        .map_err(|problem| Error::Corrupt { path: path.into(), problem: format!("{problem}\n{hint}") })?;
    if !config_hashes.contains(&config_hash) {
        let path = path.display();
        return Err(Error::config(format!(
            "`{path}` belongs to another configuration; resume with the run's own config.toml"
        )));
    }
    Ok((state, clients))
}

/// A checkpoint as bytes.
pub(crate) fn to_bytes(state: &ServerState, clients: &ClientStates, config_hash: &str) -> Result<Vec<u8>> {
    let mut sections = sections_of(state);
    for (at, other) in state.others.iter().enumerate() {
        sections.extend(sections_of(other).into_iter().map(|(name, v)| (format!("group:{}:{name}", at + 1), v)));
    }
    for (client, vectors) in clients {
        sections.extend(vectors.iter().map(|(name, v)| (format!("client:{client}:{name}"), &v[..])));
    }
    let (n_rounds_done, config_hash) = (state.n_rounds_done, config_hash.to_owned());
    let header = Header { n_rounds_done, config_hash, sections: lengths(&sections) };
    let mut bytes = pack(MAGIC, VERSION, &header, &sections)?;
    let hash = blake3::hash(&bytes);
    bytes.extend_from_slice(hash.as_bytes());
    Ok(bytes)
}

/// A checkpoint from bytes, or what is wrong with them.
pub(crate) fn from_bytes(bytes: &[u8]) -> std::result::Result<Checkpoint, String> {
    if bytes.len() < PREFIX + blake3::OUT_LEN || !bytes.starts_with(MAGIC) {
        return Err("not a checkpoint".into());
    }
    let (body, hash) = bytes.split_at(bytes.len() - blake3::OUT_LEN);
    if blake3::hash(body).as_bytes() != hash {
        return Err("damaged checkpoint: its checksum does not match".into());
    }
    let (header, payload) = unpack::<Header>(MAGIC, VERSION, "checkpoint", body)?;
    let mut state = ServerState { n_rounds_done: header.n_rounds_done, ..ServerState::default() };
    let mut clients = ClientStates::new();
    for (name, values) in split(header.sections, payload)? {
        match name.split(':').collect::<Vec<_>>()[..] {
            ["client", id, name] => {
                let id: u32 = id.parse().map_err(|_| format!("section `{id}`"))?;
                clients.entry(id).or_default().insert(name.to_owned(), values);
            }
            ["group", id, ref inner @ ..] => {
                // The groups follow one another.
                let (id, n) = (id.parse::<usize>().ok(), state.others.len());
                let at = id.and_then(|id| id.checked_sub(1)).filter(|at| *at <= n);
                let at = at.ok_or_else(|| format!("section `{name}`"))?;
                if at == n {
                    let n_rounds_done = header.n_rounds_done;
                    state.others.push(ServerState { n_rounds_done, ..ServerState::default() });
                }
                place(&mut state.others[at], inner, values).ok_or_else(|| format!("unknown section `{name}`"))?;
            }
            ref inner => place(&mut state, inner, values).ok_or_else(|| format!("unknown section `{name}`"))?,
        }
    }
    Ok(Checkpoint { state, clients, config_hash: header.config_hash })
}

/// The sections of the state of one group of clients.
fn sections_of(state: &ServerState) -> Vec<Named<'_>> {
    let mut sections: Vec<Named<'_>> = vec![("weights".into(), &state.weights), ("buffers".into(), &state.buffers)];
    sections.extend(state.vectors.iter().map(|(name, v)| (format!("vector:{name}"), &v[..])));
    if let Some(targets) = &state.targets {
        sections.push(("targets.logits".into(), &targets.logits));
        sections.push(("targets.features".into(), &targets.features));
    }
    if let Some((weights, buffers)) = &state.evaluated {
        sections.push(("evaluated.weights".into(), weights));
        sections.push(("evaluated.buffers".into(), buffers));
    }
    sections
}

/// Puts a section of [`sections_of`] into its place; `None` if there is no such section.
fn place(state: &mut ServerState, name: &[&str], values: Vec<f32>) -> Option<()> {
    fn targets(state: &mut ServerState) -> &mut Targets {
        Arc::make_mut(state.targets.get_or_insert_default())
    }
    match *name {
        ["weights"] => state.weights = values,
        ["buffers"] => state.buffers = values,
        ["targets.logits"] => targets(state).logits = values,
        ["targets.features"] => targets(state).features = values,
        ["evaluated.weights"] => state.evaluated.get_or_insert_default().0 = values,
        ["evaluated.buffers"] => state.evaluated.get_or_insert_default().1 = values,
        ["vector", name] => drop(state.vectors.insert(name.to_owned(), values)),
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> ServerState {
        let targets = Targets { logits: vec![0.5; 6], features: vec![] };
        let mut state = ServerState { n_rounds_done: 3, weights: vec![1.0, -0.0], ..ServerState::default() };
        state.buffers = vec![f32::MIN_POSITIVE / 2.0];
        state.vectors.insert("send.c".into(), vec![7.0; 2]);
        state.targets = Some(Arc::new(targets));
        state.evaluated = Some((vec![0.25, 4.0], vec![1.0]));
        let other = ServerState { weights: vec![5.0; 3], buffers: Vec::new(), ..state.clone() };
        state.others = vec![other.clone(), ServerState { targets: None, ..other }];
        state
    }

    fn clients() -> ClientStates {
        [(9, [("h".to_owned(), vec![2.0, 3.0])].into())].into()
    }

    #[test]
    fn a_state_comes_back_bit_for_bit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.ckpt");
        save(&path, &state(), &clients(), "h").unwrap();
        let (back, kept) = load(&path, &["h".to_owned()]).unwrap();
        assert_eq!(kept, clients());
        assert_eq!(back, state());
        assert!(back.weights[1].is_sign_negative());
        // Empty targets differ from none: with labels as targets there are no logits, but there is a memory.
        let empty = ServerState { targets: Some(Arc::default()), ..state() };
        save(&path, &empty, &clients(), "h").unwrap();
        assert_eq!(load(&path, &["h".to_owned()]).unwrap(), (empty, clients()));
        assert!(load(&path, &["other".to_owned()]).unwrap_err().to_string().contains("another configuration"));
    }

    #[test]
    fn every_damage_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.ckpt");
        save(&path, &state(), &clients(), "h").unwrap();
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x40;
            std::fs::write(&path, &damaged).unwrap();
            let error = load(&path, &["h".to_owned()]).unwrap_err().to_string();
            assert!(error.contains("a.ckpt") && error.contains("hint"), "byte {at}: {error}");
            std::fs::write(&path, &whole[..at]).unwrap();
            assert!(load(&path, &["h".to_owned()]).is_err(), "cut at {at}");
        }
    }
}
