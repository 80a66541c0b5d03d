//! Makes runs, one per device at a time: skips finished runs, resumes unfinished ones, and stops between rounds when asked.

use crate::compare::mean;
use crate::queue::{Queue, Shortage};
use anyhow::{Result, bail};
use fedproj_core::{Config, Device, Error, Progress, RoundRecord, Run, RunDir, Summary};
use fedproj_report::duration;
use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// One run to be made.
#[derive(Clone)]
pub struct Job {
    /// Its name among the jobs; empty if it is the only one.
    pub id: String,
    /// Its directory.
    pub dir: PathBuf,
    /// Its configuration.
    pub config: Config,
}

/// What all runs share.
pub struct Driver {
    /// The data directory.
    pub data_dir: Option<PathBuf>,
    /// Where clients train. Each device has one run at a time; several may be of the same GPU, whose work then overlaps.
    pub devices: Vec<Device>,
    /// Whether an unfinished run may be resumed.
    pub resume: bool,
    /// Whether other processes share the sweep. A run that one of them makes is left to it.
    pub shares: bool,
}

/// Follows the work, and may end it. A slot is the place of a run's device.
pub trait Watch: Sync {
    /// Whether to stop after the current round.
    fn is_stopping(&self) -> bool;
    /// Something that a user must know.
    fn note(&self, line: &str);
    /// A run begins or resumes: local trainings in all rounds, and those that are done.
    fn begin(&self, slot: usize, title: &str, n_clients: u64, n_done: u64);
    /// A client has trained. Called from any thread.
    fn client_done(&self, slot: usize);
    /// A round begins.
    fn round(&self, slot: usize, status: String);
    /// A round has ended: a line about it.
    fn round_done(&self, line: String);
    /// The run has ended, in whatever way.
    fn end(&self, slot: usize);
    /// A run's result, with the seconds left for all runs; `None` if the run had finished before.
    fn result(&self, title: &str, job: &Job, summary: &Summary, left: Option<f64>);
}

/// The work was stopped between two rounds.
#[derive(Debug)]
pub struct Stopped {
    /// Run and round.
    pub at: String,
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped {}; nothing is lost", self.at)
    }
}

impl std::error::Error for Stopped {}

impl Driver {
    /// Finishes all jobs, one per device at a time. Directories that hold another run are found before the first job starts.
    /// A job that finds too little GPU memory beside others waits until one of them has ended. Returns a summary per job; none
    /// where another process makes it.
    ///
    /// # Errors
    /// If a directory holds another run, a run fails, or [`Stopped`] when the watch asks for it.
    pub fn run_all(&self, jobs: &[Job], watch: &dyn Watch) -> Result<Vec<Option<Summary>>> {
        let finished = jobs.iter().map(|job| RunDir::finished(&job.dir, &job.config)).collect::<Result<Vec<_>, _>>()?;
        let work = InProgress {
            driver: self,
            jobs,
            watch,
            queue: Queue::new(jobs.len(), self.devices.len().min(jobs.len())),
            summaries: Mutex::new(finished),
            noted: Mutex::default(),
        };
        work.queue.run(&|slot, at| work.make(slot, at), &work)?;
        Ok(work.summaries.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Jobs that are being made.
struct InProgress<'a> {
    driver: &'a Driver,
    jobs: &'a [Job],
    watch: &'a dyn Watch,
    queue: Queue,
    /// Of the finished jobs.
    summaries: Mutex<Vec<Option<Summary>>>,
    /// The notes that runs have given, so that each appears once.
    noted: Mutex<BTreeSet<String>>,
}

impl InProgress<'_> {
    fn make(&self, slot: usize, at: usize) -> Result<()> {
        let (job, n) = (&self.jobs[at], self.jobs.len());
        let title = if n == 1 { String::new() } else { format!("[{}/{n}] {} ", at + 1, job.id) };
        let known = self.summaries.lock().unwrap_or_else(PoisonError::into_inner)[at].clone();
        if let Some(summary) = known {
            self.watch.note(&format!("{title}`{}` is already finished", job.dir.display()));
            self.watch.result(&title, job, &summary, None);
            return Ok(());
        }
        let made = self.run(slot, at, &title);
        self.watch.end(slot);
        let summary = match made {
            Err(error) if self.driver.shares && matches!(error.downcast_ref(), Some(Error::Locked(_))) => {
                self.watch.note(&format!("{title}`{}` is being made by another process", job.dir.display()));
                return Ok(());
            }
            made => made?,
        };
        self.summaries.lock().unwrap_or_else(PoisonError::into_inner)[at] = Some(summary.clone());
        self.watch.result(&title, job, &summary, self.seconds_left(at, &[]));
        Ok(())
    }

    fn run(&self, slot: usize, at: usize, title: &str) -> Result<Summary> {
        let (Driver { data_dir, devices, resume, .. }, Job { dir, config, .. }) = (self.driver, &self.jobs[at]);
        let watch = self.watch;
        let mut run = Run::open(dir, config, data_dir.as_deref(), devices[slot].clone(), *resume)?;
        for note in run.notes() {
            if self.noted.lock().unwrap_or_else(PoisonError::into_inner).insert(note.clone()) {
                watch.note(&format!("note: {note}"));
            }
        }
        let n_rounds = config.federation.rounds;
        let cohort = config.federation.cohort(run.simulation().experiment().partition.n_clients()) as u64;
        watch.begin(slot, title, u64::from(n_rounds) * cohort, run.rounds().len() as u64 * cohort);
        let shown =
            |accuracy: Option<f64>| accuracy.map_or(String::new(), |a| format!(", accuracy {:.2} %", 100.0 * a));
        let mut accuracy = run.rounds().iter().rev().find_map(|r| r.accuracy);
        while !run.simulation().is_done() {
            let round = run.rounds().len();
            if watch.is_stopping() || self.queue.is_halted() {
                run.save()?;
                bail!(Stopped { at: format!("{title}after round {round} of {n_rounds} of `{}`", dir.display()) });
            }
            let left = self.seconds_left(at, run.rounds()).filter(|_| self.jobs.len() > 1);
            let left = left.map_or(String::new(), |left| format!(", {} for all runs", duration(left)));
            watch.round(slot, format!("left{left}; round {}/{n_rounds}{}", round + 1, shown(accuracy)));
            let progress = |progress| {
                if progress == Progress::ClientDone {
                    watch.client_done(slot);
                }
            };
            if let Some(record) = run.round(&progress)? {
                let seconds = record.seconds.total();
                let epsilon = record.privacy.as_ref().map_or(String::new(), |p| format!(", ε = {}", p.shown()));
                watch.round_done(format!(
                    "{title}round {}/{n_rounds}{}{epsilon}, {seconds:.1} s",
                    round + 1,
                    shown(record.accuracy)
                ));
                accuracy = record.accuracy.or(accuracy);
            }
        }
        if let Some(reason) = run.simulation().ended_early() {
            watch.note(&format!("{title}{reason}"));
        }
        Ok(run.finish()?)
    }

    /// See [`seconds_left`]; the devices share the work.
    fn seconds_left(&self, at: usize, rounds: &[RoundRecord]) -> Option<f64> {
        let summaries = self.summaries.lock().unwrap_or_else(PoisonError::into_inner);
        seconds_left(self.jobs, &summaries, at, rounds).map(|seconds| seconds / self.queue.n_workers() as f64)
    }
}

impl Shortage for InProgress<'_> {
    fn is_shortage(&self, error: &anyhow::Error) -> bool {
        error.downcast_ref().is_some_and(Error::is_gpu_memory)
    }

    fn fewer(&self, error: &anyhow::Error, n_workers: usize) {
        let runs = if n_workers == 1 { "one run" } else { &format!("{n_workers} runs") };
        self.watch.note(&format!("note: {error}; continuing with {runs} at a time"));
    }
}

/// Seconds until all jobs are finished, estimated from the rounds so far. A job that has not begun is expected to take as long
/// as the finished jobs of its method, else as the mean of all that is known. `None` before the first round of the first job.
fn seconds_left(jobs: &[Job], summaries: &[Option<Summary>], at: usize, rounds: &[RoundRecord]) -> Option<f64> {
    let spent: f64 = rounds.iter().map(|r| r.seconds.total()).sum();
    let n_rounds = f64::from(jobs[at].config.federation.rounds);
    let current = (!rounds.is_empty()).then(|| spent / rounds.len() as f64 * n_rounds);
    let finished = || jobs.iter().zip(summaries).filter_map(|(job, summary)| Some((job, summary.as_ref()?.seconds)));
    let expected = |job: &Job| {
        let same = finished().filter(|(other, _)| other.config.method.name == job.config.method.name);
        let known = |seconds: Vec<f64>| (!seconds.is_empty()).then(|| mean(&seconds));
        known(same.map(|(_, seconds)| seconds).collect())
            .or_else(|| known(finished().map(|(_, seconds)| seconds).chain(current).collect()))
    };
    let left = |i: usize| match current {
        Some(whole) if i == at => Some(whole - spent),
        _ => expected(&jobs[i]),
    };
    (0..jobs.len()).filter(|i| summaries[*i].is_none()).map(left).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fedproj_core::FederationConfig;
    use std::sync::Mutex;

    fn job(method: &str) -> Job {
        let config =
            Config::from_layers(None, &[format!("method.name={method}"), "federation.rounds=4".into()]).unwrap();
        Job { id: method.into(), dir: PathBuf::new(), config }
    }

    fn summaries(seconds: [f64; 5]) -> Vec<Option<Summary>> {
        let summary = |seconds| Summary { seconds, ..Summary::of("", 0, &FederationConfig::default(), 1, &[]) };
        seconds.map(|seconds| (seconds > 0.0).then(|| summary(seconds))).into()
    }

    #[test]
    fn the_time_left_counts_runs_by_what_their_method_took() {
        let jobs = [job("fedavg"), job("fedproj"), job("fedavg"), job("fedproj"), job("feddf")];
        // Two finished; of the others, fedproj takes 30 s as before and feddf the mean of both.
        let left = seconds_left(&jobs, &summaries([10.0, 30.0, 0.0, 0.0, 0.0]), 2, &[]).unwrap();
        assert!((left - (10.0 + 30.0 + 20.0)).abs() < 1e-9, "{left}");
        assert_eq!(seconds_left(&jobs, &summaries([0.0; 5]), 0, &[]), None, "nothing is known yet");
        let skipped = seconds_left(&jobs, &summaries([10.0, 30.0, 0.0, 30.0, 5.0]), 2, &[]).unwrap();
        assert!((skipped - 10.0).abs() < 1e-9, "finished runs take no time: {skipped}");
    }

    /// What a watch hears about rounds.
    #[derive(Default)]
    struct Told {
        begun: Mutex<Vec<String>>,
        done: Mutex<Vec<String>>,
    }

    impl Watch for Told {
        fn is_stopping(&self) -> bool {
            false
        }
        fn note(&self, _: &str) {}
        fn begin(&self, _: usize, _: &str, _: u64, _: u64) {}
        fn client_done(&self, _: usize) {}
        fn round(&self, _: usize, status: String) {
            self.begun.lock().unwrap().push(status);
        }
        fn round_done(&self, line: String) {
            self.done.lock().unwrap().push(line);
        }
        fn end(&self, _: usize) {}
        fn result(&self, _: &str, _: &Job, _: &Summary, _: Option<f64>) {}
    }

    #[test]
    fn each_round_is_told_once_and_none_after_the_last() {
        let folder = tempfile::tempdir().unwrap();
        let settings = ["method.name=fedavg", "model.hidden=[4]", "local.epochs=1", "federation.rounds=2"];
        let config = Config::from_layers(None, &settings.map(str::to_owned)).unwrap();
        let job = Job { id: String::new(), dir: folder.path().join("a"), config };
        let (told, driver) =
            (Told::default(), Driver { data_dir: None, devices: vec![1.into()], resume: false, shares: false });
        driver.run_all(&[job], &told).unwrap();
        let (begun, done) = (told.begun.into_inner().unwrap(), told.done.into_inner().unwrap());
        assert_eq!(begun.len(), 2, "{begun:?}");
        assert!(begun[0].contains("round 1/2") && begun[1].contains("round 2/2, accuracy "), "{begun:?}");
        assert_eq!(done.len(), 2, "{done:?}");
        assert!(done[0].starts_with("round 1/2, accuracy ") && done[1].starts_with("round 2/2, accuracy "), "{done:?}");
    }
}
