//! Progress of runs on stderr.

use crate::{interrupt, tell};
use fedproj_core::Summary;
use fedproj_study::{Job, Watch};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

/// A bar per run that is made at a time, over all clients of all rounds, and what to do with each result.
pub struct Progress<F> {
    bars: Vec<ProgressBar>,
    all: MultiProgress,
    quiet: bool,
    result: F,
}

impl<F: Fn(&str, &Job, &Summary, Option<f64>) + Sync> Progress<F> {
    /// Hidden if quiet, or if stderr is no terminal.
    pub fn new(quiet: bool, n_runs: usize, result: F) -> Self {
        let all = MultiProgress::new();
        if quiet {
            all.set_draw_target(ProgressDrawTarget::hidden());
        }
        let bar = |_| {
            let bar = all.add(ProgressBar::new(0));
            // A terminal cuts off the end of a line, so the least important comes last.
            if let Ok(style) = ProgressStyle::with_template("{prefix}{bar:16} {eta} {wide_msg}") {
                bar.set_style(style);
            }
            bar
        };
        Self { bars: (0..n_runs).map(bar).collect(), all, quiet, result }
    }
}

impl<F: Fn(&str, &Job, &Summary, Option<f64>) + Sync> Watch for Progress<F> {
    fn is_stopping(&self) -> bool {
        interrupt::is_asked()
    }

    fn note(&self, line: &str) {
        if !self.quiet {
            self.all.suspend(|| tell!("{line}"));
        }
    }

    fn begin(&self, slot: usize, title: &str, n_clients: u64, n_done: u64) {
        let bar = &self.bars[slot];
        bar.reset();
        bar.set_prefix(title.to_owned());
        bar.set_length(n_clients);
        bar.set_position(n_done);
        bar.reset_eta();
        bar.enable_steady_tick(Duration::from_millis(500));
    }

    fn client_done(&self, slot: usize) {
        self.bars[slot].inc(1);
    }

    fn round(&self, slot: usize, status: String) {
        self.bars[slot].set_message(status);
    }

    /// A terminal has the bar. A file or a cluster's log gets a line instead.
    fn round_done(&self, line: String) {
        if !self.quiet && !std::io::stderr().is_terminal() {
            tell!("{line}");
        }
    }

    fn end(&self, slot: usize) {
        self.bars[slot].disable_steady_tick();
        self.bars[slot].finish_and_clear();
    }

    fn result(&self, title: &str, job: &Job, summary: &Summary, left: Option<f64>) {
        self.all.suspend(|| (self.result)(title, job, summary, left));
    }
}
