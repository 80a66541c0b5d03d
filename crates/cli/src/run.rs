//! `fedproj run`: one run, or all runs of a sweep, with progress.

use crate::interrupt::{self, command_line_with};
use crate::making::MakingArgs;
use crate::progress::Progress;
use crate::settings::SweepSettings;
use crate::{say, tell};
use anyhow::{Result, bail};
use clap::Args;
use fedproj_core::{Config, Error, RunDir, Summary};
use fedproj_study::{Driver, Job, SweepRun};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Arguments of `run`.
#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    settings: SweepSettings,
    /// Run directory; with seeds or a sweep, the directory of all run directories [default: below ./runs]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Resume an unfinished run, or extend a finished one by a larger federation.rounds (sweeps always resume)
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    making: MakingArgs,
}

#[derive(Serialize)]
struct Finished {
    run: PathBuf,
    #[serde(flatten)]
    summary: Summary,
}

impl RunArgs {
    /// Runs everything that the settings ask for.
    pub fn run(self) -> Result<()> {
        let (json, quiet) = (self.making.json, self.making.quiet);
        let (runs, notes) = self.settings.planned()?;
        let in_sweep = runs.len() > 1;
        if !quiet {
            for note in &notes {
                tell!("note: {note}");
            }
        }
        let (mut jobs, shard) = (jobs(runs, self.out.as_deref(), self.resume)?, self.making.shard()?);
        if let Some(shard) = shard {
            let n = jobs.len();
            jobs = shard.of(jobs);
            if !quiet {
                tell!("{shard}: {} of {n} runs", jobs.len());
            }
        }
        let devices = self.making.devices(jobs.len())?;
        let progress = Progress::new(quiet, devices.len(), |title: &str, job: &Job, summary: &Summary, _| {
            if !quiet && !json {
                let epsilon = summary.privacy.as_ref().map_or(String::new(), |p| format!(", ε = {}", p.shown()));
                // Further runs are made even where nobody reads on.
                let _ = writeln!(
                    std::io::stdout(),
                    "{title}{}: accuracy {:.2} % (mean of the last rounds), last {:.2} %, best {:.2} %{epsilon}, {:.1} s, {}",
                    summary.method,
                    100.0 * summary.headline,
                    100.0 * summary.last,
                    100.0 * summary.best,
                    summary.seconds,
                    job.dir.display()
                );
            }
        });
        let (data_dir, resume) = (self.settings.data_dir()?, self.resume || in_sweep || shard.is_some());
        let driver = Driver { data_dir, devices, resume, shares: shard.is_some() };
        interrupt::watch(command_line_with((!in_sweep).then_some("--resume")))?;
        let summaries = driver.run_all(&jobs, &progress)?;
        if json {
            let finished = jobs.into_iter().zip(summaries);
            let finished = finished.filter_map(|(job, summary)| Some(Finished { run: job.dir, summary: summary? }));
            match &finished.collect::<Vec<_>>()[..] {
                [only] => say!("{}", serde_json::to_string(only)?),
                all => say!("{}", serde_json::json!({ "runs": all })),
            }
        }
        Ok(())
    }
}

/// The runs of a sweep with their directories: `--out`, or a directory below `runs` that the configuration names.
pub(crate) fn jobs(runs: Vec<SweepRun>, out: Option<&Path>, resume: bool) -> Result<Vec<Job>> {
    let in_sweep = runs.len() > 1;
    let job = |SweepRun { id, config }: SweepRun| {
        let dir = match out {
            Some(out) if in_sweep => out.join(&id),
            Some(out) => out.to_path_buf(),
            None if resume && !in_sweep => dir_to_resume(&config)?,
            None => default_dir(&config)?,
        };
        Ok(Job { id, dir, config })
    };
    runs.into_iter().map(job).collect()
}

/// The directory of a run without `--out`: below `runs`, named by its configuration.
///
/// # Errors
/// Never for a configuration that was made from settings.
pub fn default_dir(config: &Config) -> Result<PathBuf> {
    let hash = blake3::hash(config.identity()?.as_bytes()).to_hex();
    let (method, data, seed) = (&config.method.name, &config.data.private.name, config.seed);
    Ok(Path::new("runs").join(format!("{method}-{data}-seed{seed}-{}", &hash.as_str()[..8])))
}

/// The directory of the run that a configuration resumes. It is named after its settings, of which the number of rounds is
/// one: a run that is extended has another name.
fn dir_to_resume(config: &Config) -> Result<PathBuf> {
    let named = default_dir(config)?;
    let folders = std::fs::read_dir("runs").into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<PathBuf> = folders.filter(|dir| RunDir::holds(dir, config)).collect();
    found.sort();
    if found.contains(&named) {
        return Ok(named);
    }
    let hint = match &found[..] {
        [only] => return Ok(only.clone()),
        [] => "leave out --resume to begin it, or name the run's directory with --out".to_owned(),
        all => {
            let all: Vec<String> = all.iter().map(|dir| format!("--out {}", dir.display())).collect();
            format!("name one of the shorter runs: {}", all.join(", "))
        }
    };
    bail!(Error::config(format!("--resume: `runs` holds no run of these settings\nhint: {hint}")))
}
