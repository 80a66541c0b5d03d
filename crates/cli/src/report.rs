//! `fedproj report`: one page, with figures and tables, of any finished runs.

use crate::{give, say};
use anyhow::Result;
use clap::Args;
use fedproj_study::{ReportOptions, write_report};
use std::path::PathBuf;

/// Arguments of `report`.
#[derive(Args)]
pub struct ReportArgs {
    /// Run directories, or directories of run directories
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Directory for the page, figures/ and tables/ [default: RUN/report for one RUN, else ./report]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Title of the page [default: what was compared]
    #[arg(long)]
    title: Option<String>,
    /// Show unfinished runs too, marked as such
    #[arg(long)]
    unfinished: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl ReportArgs {
    /// Writes the report and prints its table.
    pub fn run(self) -> Result<()> {
        let out = match (self.out, &self.runs[..]) {
            (Some(out), _) => out,
            (None, [run]) => run.join("report"),
            (None, _) => PathBuf::from("report"),
        };
        let written = write_report(&ReportOptions {
            runs: &self.runs,
            out: &out,
            title: self.title.as_deref(),
            unfinished: self.unfinished,
            data_dir: crate::data::data_dir(None)?.as_deref(),
        })?;
        give(self.json, &written, || {
            say!("{}\n", written.title);
            say!("{}", written.table.to_text());
            written.notes.iter().for_each(|note| say!("{note}"));
            say!("report   {}", written.report.display());
            say!("figures  {} (SVG and PNG)", out.join("figures").display());
            say!("tables   {} (CSV and LaTeX)", out.join("tables").display());
        })
    }
}
