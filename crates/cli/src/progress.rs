//! Progress of runs on stderr.

use crate::interrupt;
use fedproj_core::Summary;
use fedproj_study::{Job, Watch};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

/// A bar over all clients of all rounds, and what to do with each result.
pub struct Progress<F> {
    bar: ProgressBar,
    quiet: bool,
    result: F,
}

impl<F: Fn(&str, &Job, &Summary, Option<f64>) + Sync> Progress<F> {
    /// Hidden if quiet, or if stderr is no terminal.
    pub fn new(quiet: bool, result: F) -> Self {
        let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
        // A terminal cuts off the end of a line, so the least important comes last.
        if let Ok(style) = ProgressStyle::with_template("{prefix}{bar:16} {eta} {wide_msg}") {
            bar.set_style(style);
        }
        Self { bar, quiet, result }
    }
}

impl<F: Fn(&str, &Job, &Summary, Option<f64>) + Sync> Watch for Progress<F> {
    fn is_stopping(&self) -> bool {
        interrupt::is_asked()
    }

    fn note(&self, line: &str) {
        if !self.quiet {
            eprintln!("{line}");
        }
    }

    fn begin(&self, title: &str, n_clients: u64, n_done: u64) {
        self.bar.reset();
        self.bar.set_prefix(title.to_owned());
        self.bar.set_length(n_clients);
        self.bar.set_position(n_done);
        self.bar.reset_eta();
        self.bar.enable_steady_tick(Duration::from_millis(500));
    }

    fn client_done(&self) {
        self.bar.inc(1);
    }

    fn round(&self, status: String) {
        self.bar.set_message(status);
    }

    /// A terminal has the bar. A file or a cluster's log gets a line instead.
    fn round_done(&self, line: String) {
        if !self.quiet && !std::io::stderr().is_terminal() {
            eprintln!("{line}");
        }
    }

    fn end(&self) {
        self.bar.disable_steady_tick();
        self.bar.finish_and_clear();
    }

    fn result(&self, title: &str, job: &Job, summary: &Summary, left: Option<f64>) {
        (self.result)(title, job, summary, left);
    }
}
