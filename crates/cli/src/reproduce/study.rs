//! A study: one set-up, one key that is varied, over degrees of skew and seeds. Every run is an ordinary run directory, so a
//! study that is stopped goes on where it was, and one that grows keeps what it has.

use crate::compare::print_table;
use crate::device::DeviceArgs;
use crate::drive::{Driver, Job, duration};
use crate::interrupt::command_line_with;
use crate::say;
use crate::setups::{self, PRESETS, Setup};
use anyhow::{Result, bail};
use clap::Args;
use fedproj_core::{Comparison, Config, Error, Manifest, Plan, PlannedRun, Summary, compare};
use fedproj_data::{PartitionConfig, SourceConfig, registry};
use fedproj_nn::models::nearest;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// What a study is.
pub struct Study {
    /// As users type it.
    pub name: &'static str,
    /// What the paper calls it.
    pub title: &'static str,
    /// One set-up for each data set, at full scale.
    pub setups: &'static [Setup],
    /// Settings beyond the set-up.
    pub fixed: &'static [&'static str],
    /// The key that is varied; its first value is what the others are compared with.
    pub key: &'static str,
    /// The flag that gives its values.
    pub flag: &'static str,
}

/// What all studies ask.
#[derive(Args)]
pub struct StudyArgs {
    /// The private data set: cifar10 (the default), cifar100 or cinic10; of texts sst2 (the default), mnli or marc
    #[arg(long, value_name = "NAME")]
    dataset: Option<String>,
    /// Degrees of skew β (Dirichlet; small is skewed), with commas between them
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0.3,0.5")]
    beta: Vec<f64>,
    /// How many seeds, from 0 on
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    seeds: u16,
    /// Defaults: the paper's text, its published code, or a clean combination of both
    #[arg(long, default_value = "clean", value_parser = PRESETS)]
    preset: String,
    /// The paper's scale, or the beginning of training of a small network, for two CPU cores
    #[arg(long, default_value = "full", value_parser = ["full", "quick"])]
    scale: String,
    /// Where the runs' directories go; else `runs/STUDY-DATASET-SCALE`
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Where data sets lie; else `$FEDPROJ_DATA`, else `data` if it exists
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object on the last line
    #[arg(long)]
    json: bool,
    /// No progress, no table
    #[arg(long)]
    quiet: bool,
    /// Departures from the set-up, such as federation.rounds=50
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

impl Study {
    /// Runs what is not done yet and prints the tables.
    pub fn run(&self, args: &StudyArgs, values: Vec<Value>) -> Result<()> {
        let data_dir = crate::data::data_dir(args.data_dir.clone());
        let setup = self.setup(args)?;
        let plan = self.plan(args, &setup, values, data_dir.as_deref())?;
        check_data(&plan, data_dir.as_deref())?;
        let out = args.out.clone().unwrap_or_else(|| self.default_out(args, &setup));
        let job = |run: PlannedRun| Job { dir: out.join(&run.id), id: run.id, config: run.config };
        let jobs: Vec<Job> = plan.into_iter().map(job).collect();
        let title = self.describe(args, &setup, &jobs[0].config);
        if !args.quiet {
            eprintln!("{title}: {} runs in `{}`", jobs.len(), out.display());
        }
        let driver = Driver {
            data_dir,
            device: args.device.open()?,
            resume: true,
            quiet: args.quiet,
            go_on: command_line_with(None),
        };
        let runs: Vec<PathBuf> = jobs.iter().map(|job| job.dir.clone()).collect();
        let summaries = driver.run_all(&jobs, |title, _, summary, left| {
            if let (Some(left), false) = (left, args.quiet) {
                let (accuracy, took, left) = (100.0 * summary.headline, duration(summary.seconds), duration(left));
                eprintln!("{title}accuracy {accuracy:.2} % after {took}, {left} left for all runs");
            }
        })?;
        let tables = self.tables(&jobs, &summaries)?;
        let title = format!("{title}{}", samples(&runs)?);
        let written = crate::report::write(&runs, &out.join("report"), Some(&title))?;
        if args.json {
            let report = written.report;
            say!("{}", serde_json::json!({ "study": self.name, "title": title, "report": report, "tables": tables }));
        } else if !args.quiet {
            for BetaTable { beta, table } in &tables {
                say!("\n{title}, β = {beta}");
                print_table(table);
            }
            written.notes.iter().for_each(|note| say!("{note}"));
            say!("report   {}", written.report.display());
        }
        Ok(())
    }

    fn setup(&self, args: &StudyArgs) -> Result<Setup> {
        let known = || self.setups.iter().map(|setup| setup.data);
        let asked = args.dataset.as_deref().unwrap_or(self.setups[0].data);
        let Some(setup) = self.setups.iter().find(|setup| setup.data == asked) else {
            let hint = nearest(asked, known()).map_or(String::new(), |k| format!("\nhint: did you mean `{k}`?"));
            let names = known().collect::<Vec<_>>().join(", ");
            bail!(Error::config(format!("--dataset {asked}: `{}` has {names}{hint}", self.name)));
        };
        Ok(if args.scale == "quick" { setup.quick() } else { *setup })
    }

    /// All runs: seed by seed, so that a whole table is there after the first of them.
    fn plan(
        &self,
        args: &StudyArgs,
        setup: &Setup,
        values: Vec<Value>,
        data_dir: Option<&Path>,
    ) -> Result<Vec<PlannedRun>> {
        let ours = [
            (self.key, self.flag),
            ("data.partition.beta", "--beta"),
            ("seeds", "--seeds"),
            ("seed", "--seeds"),
            ("preset", "--preset"),
        ];
        for pair in &args.overrides {
            let key = pair.split('=').next().unwrap_or_default();
            if let Some((_, flag)) = ours.iter().find(|(ours, _)| *ours == key) {
                bail!(Error::config(format!("`{pair}`: the study sets this key itself\nhint: use {flag}")));
            }
        }
        let mut settings: Vec<String> = setup.settings().iter().map(|(key, value)| format!("{key}={value}")).collect();
        settings.extend(imagenet100(setup, data_dir));
        settings.push(format!("preset={}", args.preset));
        settings.extend(self.fixed.iter().map(|setting| (*setting).to_owned()));
        settings.extend(args.overrides.iter().cloned());
        let betas = args.beta.iter().copied().map(Value::from).collect::<Vec<_>>();
        let sweep = Table::from_iter([
            (self.key.to_owned(), Value::Array(values)),
            ("data.partition.beta".to_owned(), betas.into()),
        ]);
        let seeds: Vec<Value> = (0..i64::from(args.seeds)).map(Value::from).collect();
        let file = Table::from_iter([("sweep".to_owned(), sweep.into()), ("seeds".to_owned(), seeds.into())]);
        let mut runs = Plan::new(Some(&file), &settings)?.runs;
        runs.sort_by_key(|run| run.config.seed);
        runs.iter().try_for_each(|run| beta(&run.config).map(drop))?;
        Ok(runs)
    }

    fn default_out(&self, args: &StudyArgs, setup: &Setup) -> PathBuf {
        let preset = if args.preset == "clean" { String::new() } else { format!("-{}", args.preset) };
        Path::new("runs").join(format!("{}-{}-{}{preset}", self.name, setup.data, args.scale))
    }

    /// Title, data sets and whatever departs from the paper's set-up.
    fn describe(&self, args: &StudyArgs, setup: &Setup, config: &Config) -> String {
        let public = match config.data.public.name.as_str() {
            "tinyimagenet32" => "Tiny-ImageNet at 32×32, which stands in for ImageNet-100",
            "folder" if is_imagenet100(&config.data.public) => "ImageNet-100 at 32×32",
            name => setups::title(name),
        };
        let mut text = format!("{}: {}, public set {public}, preset {}", self.title, setup.title, args.preset);
        if setup.is_text() {
            let stands_in =
                if config.model.checkpoint == setup.checkpoint { ", which stands in for TinyBERT" } else { "" };
            text = format!("{text}, checkpoint {}{stands_in}", config.model.checkpoint);
        }
        if args.scale == "quick" {
            text.push_str(", quick scale");
        }
        if !args.overrides.is_empty() {
            text = format!("{text}, with {}", args.overrides.join(" "));
        }
        text
    }

    /// One table for each β.
    fn tables(&self, jobs: &[Job], summaries: &[Summary]) -> Result<Vec<BetaTable>> {
        let mut groups: Vec<(f64, Vec<(String, Summary)>)> = Vec::new();
        for (job, summary) in jobs.iter().zip(summaries) {
            let beta = beta(&job.config)?;
            let row = (self.row(&job.config)?, summary.clone());
            match groups.iter_mut().find(|(known, _)| known.total_cmp(&beta).is_eq()) {
                Some((_, rows)) => rows.push(row),
                None => groups.push((beta, vec![row])),
            }
        }
        Ok(groups.into_iter().map(|(beta, rows)| BetaTable { beta, table: compare(&rows) }).collect())
    }

    /// What a run's row is called: the varied key's value, with the key's name unless that is `name`.
    fn row(&self, config: &Config) -> Result<String> {
        let config: Table = toml::from_str(&config.to_toml()?)?;
        let mut value = &Value::Table(config);
        for key in self.key.split('.') {
            value = value.get(key).unwrap_or(value);
        }
        let value = match value {
            Value::String(text) => text.clone(),
            Value::Float(number) => number.to_string(),
            other => other.to_string(),
        };
        let key = self.key.rsplit('.').next().unwrap_or_default();
        Ok(if key == "name" { value } else { format!("{key} {value}") })
    }
}

/// The runs of one β beside each other.
#[derive(Serialize)]
struct BetaTable {
    beta: f64,
    table: Comparison,
}

/// How skewed a run's clients are.
fn beta(config: &Config) -> Result<f64> {
    match config.data.partition {
        PartitionConfig::Dirichlet { beta, .. } => {
            Error::require(beta > 0.0 && beta.is_finite(), "--beta", beta, "positive")?;
            Ok(beta)
        }
        _ => bail!(Error::config("a study deals data by a Dirichlet distribution; leave data.partition.kind as it is")),
    }
}

/// The folder of the data directory in which ImageNet-100 is looked for: images, one folder a class.
const IMAGENET100: &str = "imagenet100";

/// ImageNet-100 where the stand-in for it would be taken, if it is there.
fn imagenet100(setup: &Setup, data_dir: Option<&Path>) -> Option<String> {
    let is_there = setup.public == "tinyimagenet32" && data_dir.is_some_and(|dir| dir.join(IMAGENET100).is_dir());
    is_there.then(|| {
        format!("data.public={{ name = \"folder\", path = \"{IMAGENET100}\", resize = [32, 32], standardise = true }}")
    })
}

fn is_imagenet100(source: &SourceConfig) -> bool {
    source.path.as_deref() == Some(Path::new(IMAGENET100))
}

/// How many samples there really were: a set at hand may be a part of the published one.
fn samples(runs: &[PathBuf]) -> Result<String> {
    let manifests = runs.iter().map(|dir| Manifest::read(dir)).collect::<Result<Vec<_>, _>>()?;
    let most = |key: &str| manifests.iter().flatten().filter_map(|m| m.sizes.get(key)).max().copied().unwrap_or(0);
    let (private, test, public) = (most("private_samples"), most("test_samples"), most("public_samples"));
    Ok(format!("; {private} private, {test} test and {public} public samples"))
}

/// The files of a checkpoint; without the last one it gives a network's shape alone.
const CHECKPOINT: [&str; 3] = ["config.json", "vocab.txt", "model.safetensors"];

/// What a checkpoint lacks, and how to get it.
fn missing_of_checkpoint(config: &Config, data_dir: Option<&Path>) -> Option<String> {
    let name = &config.model.checkpoint;
    let folder = data_dir.map_or_else(|| PathBuf::from(name), |dir| dir.join(name));
    let n_needed = if config.model.pretrained { 3 } else { 2 };
    let missing = CHECKPOINT.into_iter().take(n_needed).find(|file| !folder.join(file).is_file());
    missing.filter(|_| !name.is_empty()).map(|file| {
        format!(
            "checkpoint `{name}` is not under {}: no `{name}/{file}`\nhint: put a BERT model's {} there, as Hugging Face has \
             them, or choose another folder with model.checkpoint=…",
            data_dir.map_or("any data directory".into(), |dir| format!("`{}`", dir.display())),
            CHECKPOINT.join(", ")
        )
    })
}

/// Says what is missing of all data sets, and how to get it, before anything starts.
fn check_data(runs: &[PlannedRun], data_dir: Option<&Path>) -> Result<()> {
    let mut missing = BTreeSet::new();
    for run in runs {
        let data = &run.config.data;
        missing.extend(missing_of_checkpoint(&run.config, data_dir));
        let public = (run.config.method.build()?.needs_public()
            && !["split", "none"].contains(&data.public.name.as_str()))
        .then_some(&data.public);
        for source in std::iter::once(&data.private).chain(public) {
            match registry::check(source, data_dir) {
                Ok(()) => (),
                Err(error @ (fedproj_data::Error::Missing { .. } | fedproj_data::Error::Io { .. })) => {
                    missing.insert(error.to_string());
                }
                Err(error) => return Err(Error::from(error).into()),
            }
        }
    }
    if missing.is_empty() { Ok(()) } else { bail!(missing.into_iter().collect::<Vec<_>>().join("\n")) }
}

#[cfg(test)]
mod tests {
    use super::super::studies::{TABLE1, TABLE2};
    use super::*;
    use clap::Parser;
    use fedproj_core::{Draw, InitConfig, OptimizerConfig, StoredRun};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: StudyArgs,
    }

    fn plan(line: &str) -> Vec<PlannedRun> {
        let args = Line::parse_from(std::iter::once("study").chain(line.split_whitespace())).args;
        let setup = TABLE1.setup(&args).unwrap();
        TABLE1.plan(&args, &setup, vec!["fedavg".into(), "fedproj".into()], None).unwrap()
    }

    #[test]
    fn the_full_scale_is_the_papers() {
        for (dataset, clients, cohort, rounds, model, distill_epochs) in [
            ("cifar10", 100, 10, 100, "resnet8", 1),
            ("cifar100", 50, 5, 100, "resnet18", 3),
            ("cinic10", 100, 10, 60, "resnet18", 1),
        ] {
            let runs = plan(&format!("--dataset {dataset} --preset paper"));
            assert_eq!(runs.len(), 2 * 2 * 3);
            for run in &runs {
                let Config { data, federation, local, method, .. } = &run.config;
                let PartitionConfig::Dirichlet { beta, clients: found, min_samples } = data.partition else { panic!() };
                assert_eq!((found, min_samples), (clients, 15));
                assert_eq!(federation.cohort(clients), cohort);
                assert_eq!((federation.rounds, local.epochs, local.batch), (rounds, 20, 64));
                assert_eq!(run.config.model.name, model);
                let distill = &method.fedproj.distill;
                assert_eq!(
                    (distill.epochs, distill.batch, method.feddf.distill.epochs),
                    (distill_epochs, 256, distill_epochs)
                );
                // The paper's best α depends on β, and the preset must see the β that is swept.
                let alpha = if beta < 0.4 {
                    0.0
                } else if dataset == "cifar100" {
                    0.5
                } else {
                    0.3
                };
                assert!((f64::from(distill.alpha) - alpha).abs() < 1e-6, "{dataset}, β = {beta}: {}", distill.alpha);
            }
        }
    }

    #[test]
    fn imagenet100_is_taken_where_it_is_and_its_stand_in_is_named() {
        let args = Line::parse_from(["study", "--dataset", "cifar100"]).args;
        let setup = TABLE1.setup(&args).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let title = || {
            let runs = TABLE1.plan(&args, &setup, vec!["fedproj".into()], Some(dir.path())).unwrap();
            TABLE1.describe(&args, &setup, &runs[0].config)
        };
        assert!(title().contains("stands in for ImageNet-100"), "{}", title());
        std::fs::create_dir(dir.path().join(IMAGENET100)).unwrap();
        assert!(title().contains("public set ImageNet-100"), "{}", title());
    }

    #[test]
    fn the_full_scale_of_texts_is_the_papers() {
        for (dataset, public, n_public) in
            [("sst2", "sent140", 30_000), ("mnli", "snli", 30_000), ("marc", "yelp", 10_000)]
        {
            let args = Line::parse_from(["study", "--dataset", dataset, "--preset", "paper"]).args;
            let setup = TABLE2.setup(&args).unwrap();
            let runs = TABLE2.plan(&args, &setup, vec!["fedavg".into(), "fedproj".into()], None).unwrap();
            assert_eq!(runs.len(), 2 * 2 * 3);
            for run in &runs {
                let Config { data, federation, local, method, model, .. } = &run.config;
                let PartitionConfig::Dirichlet { clients, min_samples, .. } = data.partition else { panic!() };
                assert_eq!((clients, min_samples, federation.cohort(clients)), (15, 3, 4));
                assert_eq!((federation.rounds, local.epochs, local.batch), (15, 1, 64));
                let rate = OptimizerConfig::adam(3e-5);
                assert_eq!((&local.optimizer, local.schedule.factor(0, 1)), (&rate, 1.0));
                assert_eq!((&model.name[..], &model.checkpoint[..], data.text.max_length), ("bert", "minilm-l3", 128));
                assert_eq!((data.private_draw, data.public_draw), (Draw::Balanced, Draw::Uniform));
                assert_eq!((&data.public.name[..], data.public_samples), (public, n_public));
                let distill = &method.fedproj.distill;
                assert_eq!((distill.batch, distill.epochs, &distill.optimizer), (128, 1, &rate));
                assert_eq!((distill.temperature, distill.alpha, method.fedproj.memory.batch), (3.0, 0.0, 128));
                assert_eq!((&method.feddf.distill.optimizer, method.feddf.distill.batch), (&rate, 128));
                assert_eq!((&method.fedet.optimizer, method.fedet.batch), (&rate, 128));
            }
        }
        let args = Line::parse_from(["study", "--preset", "authors-code"]).args;
        let runs = TABLE2.plan(&args, &TABLE2.setup(&args).unwrap(), vec!["fedproj".into()], None).unwrap();
        let Config { data, model, .. } = &runs[0].config;
        assert_eq!(
            (data.public_draw, data.text.max_length),
            (Draw::Balanced, 512),
            "only the authors' code looks at labels"
        );
        assert_eq!((model.init, data.byte_cast), (InitConfig::Authors, false));
    }

    #[test]
    fn the_committed_results_are_of_the_study_that_the_command_runs() {
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../results");
        let stored = |folder: &str, id: &str| StoredRun::open(&results.join(folder).join(id)).unwrap().config;
        for run in plan("--scale quick --dataset cifar10 --beta 0.3 --seeds 3") {
            assert_eq!(stored("table1-cifar10-quick", &run.id), run.config, "{}", run.id);
        }
        let args = Line::parse_from(["study", "--scale", "quick", "--beta", "0.3", "--seeds", "2"]).args;
        let methods = ["fedavg", "feddf", "fedet", "fedproj"].map(Value::from).to_vec();
        for run in TABLE2.plan(&args, &TABLE2.setup(&args).unwrap(), methods, None).unwrap() {
            assert_eq!(stored("table2-sst2-quick", &run.id), run.config, "{}", run.id);
        }
    }

    #[test]
    fn seeds_come_one_after_the_other_and_runs_have_names() {
        let ids: Vec<String> = plan("--seeds 2 --beta 0.3").into_iter().map(|run| run.id).collect();
        assert_eq!(
            ids,
            ["beta0.3-fedavg-seed0", "beta0.3-fedproj-seed0", "beta0.3-fedavg-seed1", "beta0.3-fedproj-seed1"]
        );
    }
}
