//! The study of the paper's introduction: three clients with one kind of flower each.
//!
//! `study` runs it, `results` counts, `draw` and `page` show it. The drawing itself is in `fedproj_report`.

mod draw;
mod page;
mod plane;
mod results;
mod study;

use anyhow::Result;
use fedproj_core::write_atomically;
use plane::Plane;
pub use results::Results;
use std::path::Path;
pub use study::ROUNDS;
use study::{METHODS, PilotRun, Scenario};

/// What a pilot study found.
pub struct Pilot {
    plane: Plane,
    runs: Vec<PilotRun>,
    /// The numbers.
    pub results: Results,
}

/// Rounds of the study over all its runs.
pub fn n_rounds(n_seeds: u16) -> u64 {
    (Scenario::ALL.len() * METHODS.len()) as u64 * u64::from(n_seeds) * u64::from(ROUNDS)
}

impl Pilot {
    /// Runs the study on `n_threads` threads, with the seeds 0, 1, …; `done` is called after each round.
    ///
    /// # Errors
    /// If a run fails.
    pub fn run(n_seeds: u16, n_threads: usize, done: &(dyn Fn() + Sync)) -> Result<Self> {
        let plane = Plane::new()?;
        let seeds: Vec<u64> = (0..u64::from(n_seeds)).collect();
        let runs = study::study(&plane, &seeds, n_threads, done)?;
        let results = Results::of(&seeds, &runs);
        Ok(Self { plane, runs, results })
    }

    /// Writes tables, figures and the page. The directory `figures` below `out` must exist.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&self, out: &Path) -> Result<()> {
        let Self { plane, runs, results } = self;
        let figures = draw::figures(plane, results, runs);
        let mut files = vec![
            (out.join("results.json"), (serde_json::to_string_pretty(results)? + "\n").into_bytes()),
            (out.join("table.csv"), results.csv().into_bytes()),
            (out.join("rounds.csv"), results::rounds_csv(runs).into_bytes()),
            (out.join("report.html"), page::page(results, &figures).to_html().into_bytes()),
        ];
        for (_, figure) in figures {
            files.extend(figure.files(&out.join("figures"))?);
        }
        Ok(files.iter().try_for_each(|(path, bytes)| write_atomically(path, bytes))?)
    }
}
