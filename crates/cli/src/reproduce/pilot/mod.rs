//! `fedproj reproduce pilot`: the study of the paper's introduction. [`study`] runs it, [`results`] counts, [`draw`] and
//! [`page`] show; drawing itself is in `fedproj_report`.

mod draw;
mod page;
mod plane;
mod results;
mod study;

use crate::device::default_threads;
use crate::say;
use anyhow::{Context, Result};
use clap::Args;
use draw::Figure;
use indicatif::{ProgressBar, ProgressStyle};
use plane::Plane;
use results::Results;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use study::{METHODS, Outcome, ROUNDS, Setting};

/// Pixels of a PNG for one of the SVG.
const PNG_SCALE: f32 = 2.0;

/// Arguments of `reproduce pilot`.
#[derive(Args)]
pub struct Pilot {
    /// Where tables, figures and the report go
    #[arg(long, value_name = "DIR", default_value = "runs/pilot")]
    out: PathBuf,
    /// How many seeds, from 0 on
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    seeds: u16,
    /// Threads; runs go side by side, one a thread
    #[arg(long, value_name = "N", default_value_t = default_threads(), value_parser = clap::value_parser!(u16).range(1..))]
    threads: u16,
    /// Print one JSON object on the last line
    #[arg(long)]
    json: bool,
}

impl Pilot {
    /// Runs the study, writes everything and prints the table.
    pub fn run(self) -> Result<()> {
        // Found out before the work rather than after it.
        let figures_dir = self.out.join("figures");
        fs::create_dir_all(&figures_dir).with_context(|| format!("cannot make `{}`", figures_dir.display()))?;
        let plane = Plane::new()?;
        let seeds: Vec<u64> = (0..u64::from(self.seeds)).collect();
        let bar = bar(seeds.len());
        let outcomes = study::study(&plane, &seeds, usize::from(self.threads), &|| bar.inc(1))?;
        bar.set_message("drawing");
        let results = Results::of(&seeds, &outcomes);
        let figures = draw::figures(&plane, &results, &outcomes);
        self.write(&results, &outcomes, &figures)?;
        bar.finish_and_clear();
        if self.json {
            say!("{}", serde_json::to_string(&results)?);
            return Ok(());
        }
        say!("{}", results.table().to_text());
        say!("Mean over {} seeds (least–greatest); accuracy on all 150 flowers after {ROUNDS} rounds.", seeds.len());
        say!("report   {}", self.out.join("report.html").display());
        say!("figures  {} (SVG and PNG)", figures_dir.display());
        say!("numbers  {}, table.csv, rounds.csv", self.out.join("results.json").display());
        Ok(())
    }

    fn write(&self, results: &Results, outcomes: &[Outcome], figures: &[Figure]) -> Result<()> {
        let out = &self.out;
        for figure in figures {
            write(&out.join("figures").join(format!("{}.svg", figure.name)), figure.svg.as_bytes())?;
        }
        // The numbers and the page first: pictures of pixels take the longest and matter least.
        write(&out.join("results.json"), (serde_json::to_string_pretty(results)? + "\n").as_bytes())?;
        write(&out.join("table.csv"), results.csv().as_bytes())?;
        write(&out.join("rounds.csv"), results::rounds_csv(outcomes).as_bytes())?;
        write(&out.join("report.html"), page::page(results, figures).to_html().as_bytes())?;
        for figure in figures {
            let png = fedproj_report::png(&figure.svg, PNG_SCALE).with_context(|| figure.name.clone())?;
            write(&out.join("figures").join(format!("{}.png", figure.name)), &png)?;
        }
        Ok(())
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).with_context(|| format!("cannot write `{}`", path.display()))
}

/// A bar over all rounds of all runs; hidden where nobody watches.
fn bar(n_seeds: usize) -> ProgressBar {
    let n_runs = Setting::ALL.len() * METHODS.len() * n_seeds;
    let bar = ProgressBar::new(n_runs as u64 * u64::from(ROUNDS));
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {msg} {pos}/{len} rounds, {eta} left") {
        bar.set_style(style);
    }
    bar.set_message(format!("{n_runs} runs,"));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
