//! Pictures of who holds what, from the manifest or, for runs that did not record it, from the data.

use super::figures::{Figure, numbered};
use crate::arms::Group;
use crate::runs::Loaded;
use anyhow::{Context, Result, anyhow, ensure};
use fedproj_core::{Experiment, Manifest};
use fedproj_data::Holdings;
use fedproj_report::ClassMap;
use std::path::Path;

/// A picture for the first seed of each group, and a sentence for each group without one.
pub fn pictures(groups: &[Group], data_dir: Option<&Path>) -> (Vec<Figure>, Vec<String>) {
    let (mut figures, mut without) = (Vec::new(), Vec::new());
    for (i, group) in groups.iter().enumerate() {
        let first = &group.arms[0].runs[0];
        let seed = first.run.summary.seed;
        match counted(first, data_dir) {
            Ok(manifest) => {
                let n_clients = manifest.sizes.get("clients").copied().unwrap_or(manifest.class_counts.len());
                let (data, counts) = (&first.run.config.data.private.name, &manifest.class_counts);
                let Holdings { title, subtitle, counts, sizes } =
                    Holdings::from_counts(data, counts, n_clients, manifest.classes.len());
                let map = ClassMap { title, subtitle, counts, sizes, classes: manifest.classes };
                let caption =
                    format!("{}, seed {seed}: the samples of each class that each client holds.", group.title);
                let name = format!("partition{}", numbered(i, groups.len()));
                figures.push(Figure::new(name, map.draw(), caption).narrow(map.draw_narrow()));
            }
            Err(error) => without.push(format!("{}: no picture of the partition. {error:#}.", group.title)),
        }
    }
    (figures, without)
}

/// A manifest that counts classes: the run's own, or that of the same experiment made again.
fn counted(run: &Loaded, data_dir: Option<&Path>) -> Result<Manifest> {
    let recorded = run.manifest.clone().context("The runs have no manifest.json")?;
    if !recorded.class_counts.is_empty() {
        return Ok(recorded);
    }
    // Plain averaging needs no public data, so that none need be there.
    let mut config = run.run.config.clone();
    config.method.name = "fedavg".into();
    let method = config.method.build()?;
    let name = config.data.private.name.clone();
    let experiment = Experiment::load(config, method.as_ref(), data_dir);
    let experiment = experiment.map_err(|_| {
        anyhow!(
            "An earlier version made these runs and did not record it, and `{name}` is not at hand to partition it \
             again; $FEDPROJ_DATA names the data directory"
        )
    })?;
    let again = Manifest::of(&experiment, 1);
    for part in ["private", "partition"] {
        let is_same = recorded.hashes.get(part) == again.hashes.get(part);
        ensure!(is_same, "The data found here are not those of the runs ({part}: another hash)");
    }
    Ok(again)
}
