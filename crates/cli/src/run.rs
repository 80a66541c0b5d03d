//! `fedproj run`: one run, or all runs of a plan, with progress.

use crate::say;
use crate::settings::Settings;
use anyhow::Result;
use clap::Args;
use fedproj_core::{PlannedRun, Progress, Run, Summary};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Arguments of `run`.
#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    settings: Settings,
    /// The run directory; with seeds or a sweep, the directory of the runs' directories
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on with an unfinished run (the runs of a plan always go on)
    #[arg(long)]
    resume: bool,
    /// Threads; clients train side by side, one a thread
    #[arg(long, value_name = "N", default_value_t = default_threads(), value_parser = clap::value_parser!(u16).range(1..))]
    threads: u16,
    /// Print one JSON object on the last line
    #[arg(long)]
    json: bool,
    /// No progress, no table
    #[arg(long)]
    quiet: bool,
}

/// All threads of the machine.
pub fn default_threads() -> u16 {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(usize::from(u16::MAX)) as u16)
}

#[derive(Serialize)]
struct Outcome {
    run: PathBuf,
    #[serde(flatten)]
    summary: Summary,
}

impl RunArgs {
    /// Runs the plan.
    pub fn run(self) -> Result<()> {
        let plan = self.settings.plan()?;
        let n_runs = plan.runs.len();
        let mut outcomes = Vec::with_capacity(n_runs);
        for (i, planned) in plan.runs.iter().enumerate() {
            let dir = self.dir_of(planned, n_runs)?;
            let title = if n_runs == 1 { String::new() } else { format!("[{}/{n_runs}] {} ", i + 1, planned.id) };
            let summary = self.run_one(planned, &dir, &title, n_runs > 1)?;
            if !self.quiet && !self.json {
                say!(
                    "{title}{}: accuracy {:.2} % (mean of the last rounds), last {:.2} %, best {:.2} %, {:.1} s, {}",
                    summary.method,
                    100.0 * summary.headline,
                    100.0 * summary.last,
                    100.0 * summary.best,
                    summary.seconds,
                    dir.display()
                );
            }
            outcomes.push(Outcome { run: dir, summary });
        }
        if self.json {
            match &outcomes[..] {
                [only] => say!("{}", serde_json::to_string(only)?),
                all => say!("{}", serde_json::json!({ "runs": all })),
            }
        }
        Ok(())
    }

    /// `--out`, or a directory below `runs` that the configuration names.
    fn dir_of(&self, planned: &PlannedRun, n_runs: usize) -> Result<PathBuf> {
        let config = &planned.config;
        Ok(match (&self.out, n_runs) {
            (Some(out), 1) => out.clone(),
            (Some(out), _) => out.join(&planned.id),
            (None, _) => {
                let hash = blake3::hash(config.to_toml()?.as_bytes()).to_hex();
                let name = format!(
                    "{}-{}-seed{}-{}",
                    config.method.name,
                    config.data.private.name,
                    config.seed,
                    &hash.as_str()[..8]
                );
                Path::new("runs").join(name)
            }
        })
    }

    fn run_one(&self, planned: &PlannedRun, dir: &Path, title: &str, in_plan: bool) -> Result<Summary> {
        if let Some(summary) = Run::finished(dir, &planned.config)? {
            if !self.quiet {
                eprintln!("{title}`{}` is done already", dir.display());
            }
            return Ok(summary);
        }
        let data_dir = self.settings.data_dir();
        let threads = usize::from(self.threads);
        let mut run = Run::open(dir, &planned.config, data_dir.as_deref(), threads, self.resume || in_plan)?;
        let config = &planned.config;
        let cohort = config.federation.cohort(run.simulation().experiment().partition.n_clients()) as u64;
        let bar = self.bar(title, u64::from(config.federation.rounds) * cohort, config.federation.rounds);
        bar.set_position(run.rounds().len() as u64 * cohort);
        bar.reset_eta();
        let mut accuracy = run.rounds().iter().rev().find_map(|r| r.accuracy);
        loop {
            let round = run.rounds().len();
            let shown = accuracy.map_or(String::new(), |a| format!(", accuracy {:.2} %", 100.0 * a));
            bar.set_message(format!("round {}/{}{shown}", round + 1, config.federation.rounds));
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
    fn bar(&self, title: &str, n_clients: u64, n_rounds: u32) -> ProgressBar {
        if self.quiet || n_rounds == 0 {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new(n_clients);
        let template = format!("{title}{{bar:30}} {{msg}}, {{per_sec}} clients, {{eta}} left");
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        bar
    }
}
