//! The data sets and checkpoints of a study: whether they are there, and how to get them.

use crate::setups::Setup;
use crate::sweep::SweepRun;
use anyhow::{Result, bail};
use fedproj_core::{Config, Error};
use fedproj_data::{SourceConfig, registry};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The folder of ImageNet-100 in the data directory: images, one folder per class.
pub const IMAGENET100: &str = "imagenet100";

/// ImageNet-100 instead of its stand-in, if it is there.
pub fn imagenet100(setup: &Setup, data_dir: Option<&Path>) -> Option<String> {
    let is_there = setup.public == "tinyimagenet32" && data_dir.is_some_and(|dir| dir.join(IMAGENET100).is_dir());
    is_there.then(|| {
        format!("data.public={{ name = \"folder\", path = \"{IMAGENET100}\", resize = [32, 32], standardise = true }}")
    })
}

/// Whether a source is that folder.
pub fn is_imagenet100(source: &SourceConfig) -> bool {
    source.path.as_deref() == Some(Path::new(IMAGENET100))
}

/// The files of a checkpoint; without the last one it gives a network's shape alone.
const CHECKPOINT: [&str; 3] = ["config.json", "vocab.txt", "model.safetensors"];

/// What a checkpoint lacks, and how to get it.
fn missing_of_checkpoint(config: &Config, data_dir: Option<&Path>) -> Option<String> {
    let name = &config.model.checkpoint;
    let folder = data_dir.map_or_else(|| PathBuf::from(name), |dir| dir.join(name));
    let n_needed = if config.model.pretrained { 3 } else { 2 };
    let missing = CHECKPOINT.into_iter().take(n_needed).find(|file| !folder.join(file).is_file());
    missing.filter(|_| !name.is_empty()).map(|file| {
        format!(
            "checkpoint `{name}` is not under {}: no `{name}/{file}`\nhint: put a BERT model's {} there, as Hugging Face has \
             them, or choose another folder with model.checkpoint=…",
            data_dir.map_or("any data directory".into(), |dir| format!("`{}`", dir.display())),
            CHECKPOINT.join(", ")
        )
    })
}

/// Reports everything that is missing, and how to get it, before anything starts.
pub fn check_data(runs: &[SweepRun], data_dir: Option<&Path>) -> Result<()> {
    let mut missing = BTreeSet::new();
    for run in runs {
        let data = &run.config.data;
        missing.extend(missing_of_checkpoint(&run.config, data_dir));
        let public = (run.config.method.build()?.needs_public()
            && !["split", "none"].contains(&data.public.name.as_str()))
        .then_some(&data.public);
        for source in std::iter::once(&data.private).chain(public) {
            match registry::check(source, data_dir) {
                Ok(()) => (),
                Err(error @ (fedproj_data::Error::Missing { .. } | fedproj_data::Error::Io { .. })) => {
                    missing.insert(error.to_string());
                }
                Err(error) => return Err(Error::from(error).into()),
            }
        }
    }
    if missing.is_empty() { Ok(()) } else { bail!(missing.into_iter().collect::<Vec<_>>().join("\n")) }
}
