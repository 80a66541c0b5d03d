//! The seal of a finished run: hashes of its files, in its manifest.
//!
//! It finds accidents and careless edits. Whoever changes a file on purpose can renew the seal; only
//! [`verify`](super::verify()) proves a run.

use super::manifest::Manifest;
use crate::error::{Error, Result};
use crate::files::read_if_exists;
use std::path::Path;

/// The key of the manifest's own hash, which covers everything but the seal.
const MANIFEST: &str = "manifest.json";

/// Files that a run is sealed with.
const FILES: [&str; 5] = ["config.toml", "metrics.jsonl", "metrics.csv", "model.safetensors", "summary.json"];

/// Files that no reader of results opens. A run is often stored without them.
const OPTIONAL: [&str; 2] = ["metrics.csv", "model.safetensors"];

/// The file of a group's model: the first group's bears the name that a run without groups has.
pub(super) fn model_file(group: usize) -> String {
    if group == 0 { "model.safetensors".into() } else { format!("model-{}.safetensors", group + 1) }
}

/// A file that is not as it was when the run finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Broken {
    pub file: String,
    pub is_missing: bool,
}

impl Broken {
    /// Whether all that is wrong is that a run is stored without a file that no reader of results opens.
    pub fn is_left_out(&self) -> bool {
        self.is_missing && (OPTIONAL.contains(&&*self.file) || self.file.starts_with("model-"))
    }
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.file, if self.is_missing { "is missing" } else { "has changed since the run finished" })
    }
}

/// Seals the manifest of a run whose files are on disk, but for `summary.json`. That file marks a finished run and comes
/// last.
pub(super) fn seal(dir: &Path, n_groups: usize, mut manifest: Manifest, summary: &str) -> Result<Manifest> {
    manifest.seal.clear();
    let value = serde_json::to_value(&manifest).map_err(Error::internal("sealing a run"))?;
    manifest.seal.insert(MANIFEST.into(), hash(value.to_string().as_bytes()));
    for file in FILES.map(str::to_owned).into_iter().chain((1..n_groups).map(model_file)) {
        let hash =
            if file == "summary.json" { Some(hash(summary.as_bytes())) } else { hash_of_file(&dir.join(&file))? };
        manifest.seal.extend(hash.map(|hash| (file, hash)));
    }
    Ok(manifest)
}

/// All files that do not match the seal. A run without a seal has none.
pub(super) fn broken(dir: &Path) -> Result<Vec<Broken>> {
    let path = dir.join(MANIFEST);
    let Some(text) = read_if_exists(&path)? else { return Ok(Vec::new()) };
    let mut manifest: serde_json::Value = serde_json::from_slice(&text).map_err(Error::corrupt(&path))?;
    // Not as a `Manifest`: a later version has other fields, and the hash must cover those that are there.
    let Some(serde_json::Value::Object(seal)) = manifest.as_object_mut().and_then(|keys| keys.remove("seal")) else {
        return Ok(Vec::new());
    };
    let found = |file: &str| match file {
        MANIFEST => Ok(Some(hash(manifest.to_string().as_bytes()))),
        _ => hash_of_file(&dir.join(file)),
    };
    let mut broken = Vec::new();
    let of_groups = (1..).map(model_file).take_while(|file| seal.contains_key(file));
    for file in FILES.into_iter().chain([MANIFEST]).map(str::to_owned).chain(of_groups) {
        let found = found(&file)?;
        if found.is_none() || found.as_deref() != seal.get(&file).and_then(serde_json::Value::as_str) {
            broken.push(Broken { file, is_missing: found.is_none() });
        }
    }
    Ok(broken)
}

/// Rejects a finished run whose files do not match its seal.
pub(super) fn check(dir: &Path) -> Result<()> {
    let mut broken = broken(dir)?;
    broken.retain(|b| !b.is_left_out());
    if broken.is_empty() {
        return Ok(());
    }
    let broken: Vec<String> = broken.iter().map(ToString::to_string).collect();
    let problem = format!(
        "does not match its seal: {}\nhint: restore these files or leave this run out; `fedproj verify` shows which \
         numbers are wrong",
        broken.join(", ")
    );
    Err(Error::Corrupt { path: dir.into(), problem })
}

pub(super) fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// `None` if there is no such file.
fn hash_of_file(path: &Path) -> Result<Option<String>> {
    Ok(read_if_exists(path)?.map(|bytes| hash(&bytes)))
}
