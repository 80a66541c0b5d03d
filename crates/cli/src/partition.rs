//! `fedproj partition`: which client holds what, before a run.

use crate::settings::Settings;
use crate::{say, tell};
use anyhow::{Context, Result, bail};
use clap::Args;
use fedproj_core::{Error, Experiment};
use fedproj_data::{Holdings, holdings_text};
use fedproj_report::ClassMap;
use serde::Serialize;
use std::path::PathBuf;

/// Arguments of `partition`.
#[derive(Args)]
pub struct Partition {
    #[command(flatten)]
    settings: Settings,
    /// Write an SVG picture to FILE
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Number of clients to show in the terminal
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
    /// Partitions the data and prints who holds what.
    pub fn run(self) -> Result<()> {
        if let Some(path) = self.svg.as_deref().filter(|path| path.extension().is_some_and(|ending| ending != "svg")) {
            let path = path.display();
            bail!(Error::config(format!("--svg {path}: the picture is an SVG file, so its name must end in .svg")));
        }
        let runs = self.settings.runs()?;
        let first = runs.first().context("the configuration asks for no run")?;
        if runs.len() > 1 {
            tell!("note: the configuration asks for {} runs; this is the first one, {}", runs.len(), first.id);
        }
        let method = first.config.method.build()?;
        let experiment = Experiment::load(first.config.clone(), &*method, self.settings.data_dir()?.as_deref())?;
        experiment.notes().iter().for_each(|note| tell!("note: {note}"));
        let (partition, data) = (&experiment.partition, &experiment.private);
        if partition.n_moved() > 0 {
            let n = partition.n_moved();
            tell!("warning: no draw gave every client min_samples; {n} samples were moved between clients");
        }
        if let Some(path) = &self.svg {
            let Holdings { title, subtitle, counts, sizes } = Holdings::of(partition, data)?;
            let map = ClassMap { title, subtitle, counts, sizes, classes: data.class_names().to_vec() };
            let written = std::fs::write(path, map.draw());
            written.with_context(|| format!("cannot write `{}`", path.display()))?;
            tell!("wrote `{}`", path.display());
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
        for line in holdings_text(partition, data, self.clients_shown)?.lines() {
            say!("{line}");
        }
        say!("sizes: min {}, median {median}, max {}", sizes[0], sizes[n - 1]);
        let skew_index = partition.skew_index(labels, n_classes);
        say!("skew index: {skew_index:.3} (0: every client has the same class shares as the whole)");
        Ok(())
    }
}
