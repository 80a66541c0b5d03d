//! `fedproj methods`: what `method.name` can be, and what each method needs.

use crate::settings::Settings;
use crate::{give, say};
use anyhow::{Context, Result};
use clap::Args;
use fedproj_core::methods::CATALOGUE;
use fedproj_core::{Experiment, Needs};
use fedproj_report::{Measure, Table};
use serde::Serialize;

/// Arguments of `methods`.
#[derive(Args)]
pub struct Methods {
    #[command(flatten)]
    settings: Settings,
    /// Print a JSON array of objects
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    about: &'static str,
    #[serde(flatten)]
    needs: Needs,
}

impl Methods {
    /// Prints the catalogue.
    pub fn run(self) -> Result<()> {
        let rows = self.rows()?;
        give(self.json, &rows, || print(&rows))
    }

    fn rows(&self) -> Result<Vec<Row>> {
        let runs = self.settings.runs()?;
        let first = &runs.first().context("the configuration asks for no run")?.config;
        let data_dir = self.settings.data_dir()?;
        let method = first.method.build()?;
        let experiment = Experiment::load(first.clone(), &*method, data_dir.as_deref())?;
        let n_public = experiment.n_public();
        let n_own = experiment.private.n_samples() / experiment.partition.n_clients().max(1);
        let row = |&(name, about): &(&'static str, &'static str)| {
            let mut config = first.clone();
            config.method.name = name.into();
            let method = config.method.build()?;
            let graph = Experiment::network(&config, &*method, &experiment.private, data_dir.as_deref())?;
            let needs = Needs::of(&config, &*method, &graph, n_public)?;
            Ok(Row { name, about, needs: needs.for_samples(&*method, &graph, n_own) })
        };
        CATALOGUE.iter().map(row).collect()
    }
}

fn print(rows: &[Row]) {
    let model = rows.iter().find(|row| row.name == "fedavg").map_or(0, |row| row.needs.bytes_up);
    let group = |needs: &Needs| match needs {
        Needs { public: true, .. } => "public data",
        Needs { bytes_kept: 1.., .. } => "client state",
        _ if needs.bytes_down + needs.bytes_up > 2 * model => "more traffic",
        _ => "nothing more",
    };
    let size = |bytes: usize| if bytes == 0 { "–".into() } else { Measure::Size.text(bytes as f64) };
    let line = |row: &Row| {
        let Needs { bytes_kept, bytes_down, bytes_up, .. } = row.needs;
        let names = [group(&row.needs), row.name, row.about].map(str::to_owned);
        names.into_iter().chain([bytes_kept, bytes_down, bytes_up].map(size)).collect()
    };
    let order = ["nothing more", "more traffic", "client state", "public data"];
    let in_group = |name: &'static str| rows.iter().filter(move |row| group(&row.needs) == name);
    let headers = ["needs", "name", "about", "a client keeps", "receives", "sends"];
    let table = Table::new(headers, 3, order.into_iter().flat_map(in_group).map(line).collect());
    let text = match console::Term::stdout().size_checked() {
        Some((_, n_columns)) => table.to_text_within(n_columns.into(), 2),
        None => table.to_text(),
    };
    say!("{}", text.trim_end());
    say!("\nBytes are per client and round, for the configured network and data. Choose one with method.name=NAME.");
}
