//! `fedproj reproduce`: the paper's studies.

use crate::compare::print_table;
use crate::device::default_threads;
use crate::interrupt::{self, command_line_with};
use crate::making::MakingArgs;
use crate::progress::Progress;
use crate::{give, say, tell};
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use fedproj_report::duration;
use fedproj_study::WEIGHT_DIVERGENCE;
use fedproj_study::pilot::{self, ROUNDS};
use fedproj_study::{BetaTable, Driver, LEADING, PRESETS, PROJECTION_DROPOUT, Study, StudyOptions, TABLE1, TABLE2};
use indicatif::{ProgressBar, ProgressStyle};
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;
use toml::Value;

/// The studies there are.
#[derive(Subcommand)]
pub enum Reproduce {
    /// The pilot study on Iris, in seconds: who forgets what, with figures
    Pilot(Pilot),
    /// Table 1, image classification: nine methods, three data sets, two degrees of skew
    Table1 {
        #[command(flatten)]
        common: StudyArgs,
        /// Comma-separated methods; `fedproj methods` lists all
        #[arg(
            long,
            value_name = "NAMES",
            value_delimiter = ',',
            default_value = "fedavg,fedprox,fednova,feddyn,moon,fedrcl,feddf,fedet,fedproj"
        )]
        methods: Vec<String>,
    },
    /// Table 2, text classification: four methods, a small BERT, three data sets, two degrees of skew
    Table2 {
        #[command(flatten)]
        common: StudyArgs,
        /// Comma-separated methods; `fedproj methods` lists all
        #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "fedavg,feddf,fedet,fedproj")]
        methods: Vec<String>,
    },
    /// Ablation: FedProj with its projection skipped at random
    ProjectionDropout {
        #[command(flatten)]
        common: StudyArgs,
        /// Comma-separated shares of client-rounds without projection
        #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0,0.25,0.5,0.75,1")]
        rates: Vec<f64>,
    },
    /// Ablation: FedProj with a weight-divergence term of weight α in its distillation
    WeightDivergence {
        #[command(flatten)]
        common: StudyArgs,
        /// Comma-separated weights α; 0 drops the term
        #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0,0.1,0.3,0.5")]
        alphas: Vec<f64>,
    },
    /// What makes FedProj work: preset `leading` and its parts, beside the methods that it builds on
    Leading {
        #[command(flatten)]
        common: StudyArgs,
        /// Comma-separated methods; leading, leading-no-projection, leading-no-averaging, leading-no-correction,
        /// leading-lookahead (FedACG's look-ahead instead of the correction); feddyn-averaged, whose model is averaged over rounds
        /// before it is evaluated
        #[arg(
            long,
            value_name = "NAMES",
            value_delimiter = ',',
            default_value = "feddyn,fedproj,leading,fedavg,fedprox,feddf"
        )]
        methods: Vec<String>,
    },
}

impl Reproduce {
    /// Runs the study.
    pub fn run(self) -> Result<()> {
        match self {
            Self::Pilot(args) => args.run(),
            Self::Table1 { common, methods } => common.run(&TABLE1, methods),
            Self::Table2 { common, methods } => common.run(&TABLE2, methods),
            Self::ProjectionDropout { common, rates } => common.run(&PROJECTION_DROPOUT, rates),
            Self::WeightDivergence { common, alphas } => common.run(&WEIGHT_DIVERGENCE, alphas),
            Self::Leading { common, methods } => common.run(&LEADING, methods),
        }
    }
}

/// Arguments of all studies but the pilot.
#[derive(Args)]
pub struct StudyArgs {
    /// Private data set: cifar10, cifar100 or cinic10; for texts sst2, mnli or marc; digits for `leading` [default: the first]
    #[arg(long, value_name = "NAME")]
    dataset: Option<String>,
    /// Comma-separated degrees of skew β (Dirichlet; small is skewed)
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0.3,0.5")]
    beta: Vec<f64>,
    /// Number of seeds: 0, 1, …; or the first and the last, such as 3-4
    #[arg(long, value_name = "N", default_value = "3", value_parser = seeds)]
    seeds: Range<u16>,
    /// Defaults from the paper's text (paper), its published code (authors-code), or a clean combination of both
    #[arg(long, default_value = "clean", value_parser = PRESETS)]
    preset: String,
    /// full: the paper's scale; quick: the first rounds of a small network, for two CPU cores
    #[arg(long, default_value = "full", value_parser = ["full", "quick"])]
    scale: String,
    /// Directory of all run directories [default: runs/STUDY-DATASET-SCALE]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Data directory [default: $FEDPROJ_DATA, then ./data]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    #[command(flatten)]
    making: MakingArgs,
    /// Settings that override the set-up, such as federation.rounds=50
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

impl StudyArgs {
    /// Makes the runs that are not finished yet and prints the tables.
    fn run(self, study: &Study, values: Vec<impl Into<Value>>) -> Result<()> {
        let options = StudyOptions {
            dataset: self.dataset,
            betas: self.beta,
            seeds: self.seeds,
            preset: self.preset,
            is_quick: self.scale == "quick",
            values: values.into_iter().map(Into::into).collect(),
            overrides: self.overrides,
        };
        let data_dir = crate::data::data_dir(self.data_dir)?;
        let prepared = study.prepare(&options, self.out, data_dir.as_deref())?;
        let (shard, all, quiet) = (self.making.shard()?, prepared.jobs.clone(), self.making.quiet);
        let mine = shard.map_or_else(|| all.clone(), |shard| shard.of(all.clone()));
        if !quiet {
            let part = shard.map_or(String::new(), |shard| format!(", {shard}: {} of them", mine.len()));
            tell!("{}: {} runs in `{}`{part}", prepared.title, all.len(), prepared.out.display());
        }
        let devices = self.making.devices(mine.len())?;
        let progress = Progress::new(quiet, devices.len(), |title, _, summary, left| {
            if let (Some(left), false) = (left, quiet) {
                let (accuracy, took, left) = (100.0 * summary.headline, duration(summary.seconds), duration(left));
                tell!("{title}accuracy {accuracy:.2} % after {took}, {left} left for all runs");
            }
        });
        let driver = Driver { data_dir, devices, resume: true, shares: shard.is_some() };
        interrupt::watch(command_line_with(None))?;
        let Some(result) = study.run(&prepared, &mine, &driver, &progress)? else {
            if !quiet {
                let out = prepared.out.display();
                tell!("other shards are at work; the last one writes tables and report (`fedproj status --out {out}`)");
            }
            return Ok(());
        };
        if self.making.json {
            say!("{}", serde_json::to_string(&result)?);
        } else if !quiet {
            for BetaTable { beta, table } in &result.tables {
                say!("\n{}, β = {beta}", result.title);
                print_table(table);
            }
            result.notes.iter().for_each(|note| say!("{note}"));
            say!("report   {}", result.report.display());
        }
        Ok(())
    }
}

/// `5` is the seeds from 0 to 4, `3-4` are two of them.
fn seeds(text: &str) -> Result<Range<u16>, String> {
    let number = |text: &str| text.trim().parse::<u16>().ok().filter(|n| *n < u16::MAX);
    let range = match text.split_once('-') {
        Some((first, last)) => number(first).zip(number(last)).map(|(first, last)| first..last + 1),
        None => number(text).map(|n| 0..n),
    };
    range
        .filter(|range| !range.is_empty())
        .ok_or_else(|| "must be a number from 1 on, or a range such as 3-4".to_owned())
}

/// Arguments of `reproduce pilot`.
#[derive(Args)]
pub struct Pilot {
    /// Directory for tables, figures and the report
    #[arg(long, value_name = "DIR", default_value = "runs/pilot")]
    out: PathBuf,
    /// Number of seeds: 0, 1, …
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    seeds: u16,
    /// Threads; one run per thread
    #[arg(long, value_name = "N", default_value_t = default_threads(), value_parser = clap::value_parser!(u16).range(1..))]
    threads: u16,
    /// Print one JSON object on the last line
    #[arg(long)]
    json: bool,
}

impl Pilot {
    /// Runs the study, writes everything and prints the table.
    fn run(self) -> Result<()> {
        // A directory that cannot be written is found before the work.
        let figures_dir = self.out.join("figures");
        std::fs::create_dir_all(&figures_dir).with_context(|| format!("cannot make `{}`", figures_dir.display()))?;
        let bar = ProgressBar::new(pilot::n_rounds(self.seeds));
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {msg} {pos}/{len} rounds, {eta} left") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        let pilot = pilot::Pilot::run(self.seeds, usize::from(self.threads), &|| bar.inc(1))?;
        bar.set_message("drawing");
        pilot.write(&self.out)?;
        bar.finish_and_clear();
        give(self.json, &pilot.results, || {
            say!("{}", pilot.results.table().to_text());
            say!("Mean over {} seeds (min–max); accuracy on all 150 flowers after {ROUNDS} rounds.", self.seeds);
            say!("report   {}", self.out.join("report.html").display());
            say!("figures  {} (SVG and PNG)", figures_dir.display());
            say!("numbers  {}, table.csv, rounds.csv", self.out.join("results.json").display());
        })
    }
}
