//! `fedproj partition`: who holds what, before a run is started.

use crate::say;
use crate::settings::Settings;
use anyhow::{Context, Result};
use clap::Args;
use fedproj_core::Experiment;
use fedproj_data::picture;
use serde::Serialize;
use std::path::PathBuf;

/// Arguments of `partition`.
#[derive(Args)]
pub struct Partition {
    #[command(flatten)]
    settings: Settings,
    /// Write the picture to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Clients to draw in the terminal
    #[arg(long, value_name = "N", default_value_t = 40)]
    clients_shown: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Summary {
    clients: usize,
    sizes: Vec<usize>,
    skew_index: f64,
    /// Per client, per class.
    class_counts: Vec<Vec<u32>>,
}

impl Partition {
    /// Deals the data and prints who got what.
    pub fn run(self) -> Result<()> {
        let runs = self.settings.runs()?;
        let first = runs.first().context("the configuration asks for no run")?;
        if runs.len() > 1 {
            eprintln!("note: the configuration asks for {} runs; this is the first, {}", runs.len(), first.id);
        }
        let method = first.config.method.build()?;
        let experiment = Experiment::load(first.config.clone(), &*method, self.settings.data_dir().as_deref())?;
        experiment.notes().iter().for_each(|note| eprintln!("note: {note}"));
        let (partition, data) = (&experiment.partition, &experiment.private);
        if partition.n_moved() > 0 {
            let n = partition.n_moved();
            eprintln!("warning: no draw gave every client min_samples; {n} samples were moved between clients for it");
        }
        if let Some(path) = &self.svg {
            let written = std::fs::write(path, picture::svg(partition, data)?);
            written.with_context(|| format!("cannot write `{}`", path.display()))?;
            eprintln!("wrote `{}`", path.display());
        }
        let (labels, n_classes) = (data.labels().context("the private set has no labels")?, data.n_classes());
        if self.json {
            let clients = partition.n_clients();
            let summary = Summary {
                clients,
                sizes: partition.sizes().collect(),
                skew_index: partition.skew_index(labels, n_classes),
                class_counts: (0..clients).map(|k| partition.class_counts(k, labels, n_classes)).collect(),
            };
            say!("{}", serde_json::to_string(&summary)?);
            return Ok(());
        }
        let mut sizes: Vec<usize> = partition.sizes().collect();
        sizes.sort_unstable();
        let n = sizes.len();
        let median = f64::midpoint(sizes[(n - 1) / 2] as f64, sizes[n / 2] as f64);
        print!("{}", picture::terminal(partition, data, self.clients_shown)?);
        say!("sizes: least {}, median {median}, most {}", sizes[0], sizes[n - 1]);
        let skew_index = partition.skew_index(labels, n_classes);
        say!("skew index: {skew_index:.3} (0: every client is a small copy of the whole)");
        Ok(())
    }
}
