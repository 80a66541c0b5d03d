//! The study of the paper's introduction: three clients, one kind of flower each. [`study`] runs it, [`results`] counts, [`draw`] and
//! [`page`] show; drawing itself is in `fedproj_report`.

mod draw;
mod page;
mod plane;
mod results;
mod study;

use anyhow::{Context, Result};
use plane::Plane;
pub use results::Results;
use std::fs;
use std::path::Path;
pub use study::ROUNDS;
use study::{METHODS, Outcome, Setting};

/// Pixels of a PNG for one of the SVG.
const PNG_SCALE: f32 = 2.0;

/// What a pilot study found.
pub struct Pilot {
    plane: Plane,
    outcomes: Vec<Outcome>,
    /// The numbers.
    pub results: Results,
}

/// Rounds of the study over all its runs.
pub fn n_rounds(n_seeds: u16) -> u64 {
    (Setting::ALL.len() * METHODS.len()) as u64 * u64::from(n_seeds) * u64::from(ROUNDS)
}

impl Pilot {
    /// Runs the study on `n_threads` threads, with the seeds 0, 1, …; `done` is called after each round.
    ///
    /// # Errors
    /// If a run fails.
    pub fn run(n_seeds: u16, n_threads: usize, done: &(dyn Fn() + Sync)) -> Result<Self> {
        let plane = Plane::new()?;
        let seeds: Vec<u64> = (0..u64::from(n_seeds)).collect();
        let outcomes = study::study(&plane, &seeds, n_threads, done)?;
        let results = Results::of(&seeds, &outcomes);
        Ok(Self { plane, outcomes, results })
    }

    /// Writes tables, figures and the page. The directory `figures` below `out` must exist.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&self, out: &Path) -> Result<()> {
        let Self { plane, outcomes, results } = self;
        let figures = draw::figures(plane, results, outcomes);
        for figure in &figures {
            write(&out.join("figures").join(format!("{}.svg", figure.name)), figure.svg.as_bytes())?;
        }
        // The numbers and the page first: pictures of pixels take the longest and matter least.
        write(&out.join("results.json"), (serde_json::to_string_pretty(results)? + "\n").as_bytes())?;
        write(&out.join("table.csv"), results.csv().as_bytes())?;
        write(&out.join("rounds.csv"), results::rounds_csv(outcomes).as_bytes())?;
        write(&out.join("report.html"), page::page(results, &figures).to_html().as_bytes())?;
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
