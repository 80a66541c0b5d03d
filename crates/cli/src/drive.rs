//! Drives runs one after the other: skips what is done, goes on with what is not, shows progress and the time left over all,
//! and stops between rounds when asked.

use crate::interrupt::{self, Stopped};
use anyhow::{Result, bail};
use fedproj_core::{Config, Device, Progress, RoundRecord, Run, Summary};
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

/// One run to be driven.
pub struct Job {
    /// What tells it from the others; empty if there are none.
    pub id: String,
    /// Its directory.
    pub dir: PathBuf,
    /// Its configuration.
    pub config: Config,
}

/// What all runs share.
pub struct Driver {
    /// Where data sets lie.
    pub data_dir: Option<PathBuf>,
    /// Where clients train.
    pub device: Device,
    /// Whether a directory with an unfinished run is welcome.
    pub resume: bool,
    /// No progress.
    pub quiet: bool,
    /// The command that continues the work after Ctrl-C.
    pub go_on: String,
}

impl Driver {
    /// Runs all jobs to their ends and tells each outcome as it comes, with the seconds left over all, or `None` if it was
    /// done before. Directories that hold something else are found first.
    pub fn run_all(
        &self,
        jobs: &[Job],
        mut tell: impl FnMut(&str, &Job, &Summary, Option<f64>),
    ) -> Result<Vec<Summary>> {
        let mut outcomes =
            jobs.iter().map(|job| Run::finished(&job.dir, &job.config)).collect::<Result<Vec<_>, _>>()?;
        interrupt::watch(&self.go_on)?;
        let mut told = BTreeSet::new();
        for (at, job) in jobs.iter().enumerate() {
            let title =
                if jobs.len() == 1 { String::new() } else { format!("[{}/{}] {} ", at + 1, jobs.len(), job.id) };
            if let Some(summary) = &outcomes[at] {
                if !self.quiet {
                    eprintln!("{title}`{}` is done already", job.dir.display());
                }
                tell(&title, job, summary, None);
                continue;
            }
            let note = |rounds: &[RoundRecord]| {
                let left = seconds_left(jobs, &outcomes, at, rounds).filter(|_| jobs.len() > 1);
                left.map_or(String::new(), |left| format!(", {} for all runs", duration(left)))
            };
            let summary = self.run_one(job, &title, &note, &mut told)?;
            outcomes[at] = Some(summary.clone());
            tell(&title, job, &summary, seconds_left(jobs, &outcomes, at, &[]));
        }
        Ok(outcomes.into_iter().flatten().collect())
    }

    /// `told` are the notes that earlier runs have had, so that each is told once.
    fn run_one(
        &self,
        job: &Job,
        title: &str,
        note: &dyn Fn(&[RoundRecord]) -> String,
        told: &mut BTreeSet<String>,
    ) -> Result<Summary> {
        let Job { dir, config, .. } = job;
        let mut run = Run::open(dir, config, self.data_dir.as_deref(), self.device.clone(), self.resume)?;
        for note in run.simulation().experiment().notes() {
            if told.insert(note.clone()) && !self.quiet {
                eprintln!("note: {note}");
            }
        }
        let n_rounds = config.federation.rounds;
        let cohort = config.federation.cohort(run.simulation().experiment().partition.n_clients()) as u64;
        let bar = self.bar(title, u64::from(n_rounds) * cohort);
        bar.set_position(run.rounds().len() as u64 * cohort);
        bar.reset_eta();
        let mut accuracy = run.rounds().iter().rev().find_map(|r| r.accuracy);
        loop {
            let round = run.rounds().len();
            if interrupt::is_asked() && !run.simulation().is_done() {
                run.save()?;
                bar.finish_and_clear();
                let at = format!("{title}after round {round} of {n_rounds} of `{}`", dir.display());
                bail!(Stopped { at, go_on: self.go_on.clone() });
            }
            let shown = accuracy.map_or(String::new(), |a| format!(", accuracy {:.2} %", 100.0 * a));
            bar.set_message(format!("left{}; round {}/{n_rounds}{shown}", note(run.rounds()), round + 1));
            let progress = |progress| {
                if progress == Progress::ClientDone {
                    bar.inc(1);
                }
            };
            match run.round(&progress)? {
                Some(record) => accuracy = record.accuracy.or(accuracy),
                None => break,
            }
        }
        bar.finish_and_clear();
        Ok(run.finish()?)
    }

    /// A bar over all clients of all rounds; hidden where nobody watches.
    fn bar(&self, title: &str, n_clients: u64) -> ProgressBar {
        if self.quiet {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new(n_clients);
        // What does not fit into the terminal's width is cut off at the end, so the least important comes last.
        let template = format!("{title}{{bar:16}} {{eta}} {{wide_msg}}");
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        bar
    }
}

/// Seconds until all jobs are done, by what rounds took so far. A job not begun is expected to take as long as the finished
/// ones of its method, else as the mean of all that is known; `None` before the first round of the first job.
fn seconds_left(jobs: &[Job], outcomes: &[Option<Summary>], at: usize, rounds: &[RoundRecord]) -> Option<f64> {
    let spent: f64 = rounds.iter().map(|r| r.seconds.total()).sum();
    let n_rounds = f64::from(jobs[at].config.federation.rounds);
    let current = (!rounds.is_empty()).then(|| spent / rounds.len() as f64 * n_rounds);
    let finished = || jobs.iter().zip(outcomes).filter_map(|(job, outcome)| Some((job, outcome.as_ref()?.seconds)));
    let expected = |job: &Job| {
        let same = finished().filter(|(other, _)| other.config.method.name == job.config.method.name);
        mean(same.map(|(_, seconds)| seconds)).or_else(|| mean(finished().map(|(_, seconds)| seconds).chain(current)))
    };
    let left = |i: usize| match current {
        Some(whole) if i == at => Some(whole - spent),
        _ => expected(&jobs[i]),
    };
    (0..jobs.len()).filter(|i| outcomes[*i].is_none()).map(left).sum()
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, n) = values.fold((0.0, 0.0), |(sum, n), value| (sum + value, n + 1.0));
    (n > 0.0).then(|| sum / n)
}

/// Seconds as people say them.
pub fn duration(seconds: f64) -> String {
    match seconds.round() as u64 {
        s @ ..=99 => format!("{s} s"),
        s @ ..=5999 => format!("{} min", (s + 30) / 60),
        s => format!("{:.1} h", s as f64 / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fedproj_core::FederationConfig;

    fn job(method: &str) -> Job {
        let config =
            Config::from_layers(None, &[format!("method.name={method}"), "federation.rounds=4".into()]).unwrap();
        Job { id: method.into(), dir: PathBuf::new(), config }
    }

    fn outcomes(seconds: [f64; 5]) -> Vec<Option<Summary>> {
        let summary = |seconds| Summary { seconds, ..Summary::of("", 0, &FederationConfig::default(), 1, &[]) };
        seconds.map(|seconds| (seconds > 0.0).then(|| summary(seconds))).into()
    }

    #[test]
    fn the_time_left_counts_runs_by_what_their_method_took() {
        let jobs = [job("fedavg"), job("fedproj"), job("fedavg"), job("fedproj"), job("feddf")];
        // Two finished; of the others, fedproj takes 30 s as before and feddf the mean of both.
        let left = seconds_left(&jobs, &outcomes([10.0, 30.0, 0.0, 0.0, 0.0]), 2, &[]).unwrap();
        assert!((left - (10.0 + 30.0 + 20.0)).abs() < 1e-9, "{left}");
        assert_eq!(seconds_left(&jobs, &outcomes([0.0; 5]), 0, &[]), None, "nothing is known yet");
        let skipped = seconds_left(&jobs, &outcomes([10.0, 30.0, 0.0, 30.0, 5.0]), 2, &[]).unwrap();
        assert!((skipped - 10.0).abs() < 1e-9, "finished runs take no time: {skipped}");
    }

    #[test]
    fn durations_read_naturally() {
        assert_eq!([5.0, 100.0, 3000.0, 7200.0].map(duration), ["5 s", "2 min", "50 min", "2.0 h"]);
    }
}
