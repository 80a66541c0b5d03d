//! A study: one set-up and one key that is varied, over degrees of skew and seeds. Every run is an ordinary run directory, so
//! a stopped study resumes, and a study that grows keeps its runs.

mod data;

use crate::arms::labels;
use crate::compare::{Comparison, compare};
use crate::drive::{Driver, Job, Watch};
use crate::page::{ReportOptions, Written, write_report};
use crate::setups::{self, Setup};
use crate::sweep::{SweepRun, expand};
use anyhow::{Result, bail};
use data::{check_data, imagenet100, is_imagenet100};
use fedproj_core::methods::CATALOGUE;
use fedproj_core::{Config, Error, Manifest, RunDir, Summary, did_you_mean};
use fedproj_data::PartitionConfig;
use serde::Serialize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// A study.
pub struct Study {
    /// As users type it.
    pub name: &'static str,
    /// What the paper calls it.
    pub title: &'static str,
    /// One set-up per data set, at full scale.
    pub setups: &'static [Setup],
    /// Settings beyond the set-up.
    pub fixed: &'static [&'static str],
    /// The key that is varied. Its first value is the baseline.
    pub key: &'static str,
    /// The flag that gives its values.
    pub flag: &'static str,
    /// Values of the key that stand for more than one setting.
    pub variants: &'static [Variant],
}

/// A method with settings of its own, under a name of its own.
pub struct Variant {
    /// As users type it, and as its run directories are called.
    pub name: &'static str,
    /// The method.
    pub method: &'static str,
    /// Its settings. `{rate}` stands for 1 − `federation.fraction`, the rate of an average that reaches back until about every
    /// client has taken part once.
    pub settings: &'static [&'static str],
}

/// What a user may choose.
#[derive(Clone, Debug)]
pub struct StudyOptions {
    /// The private data set; the study's first set-up if none is named.
    pub dataset: Option<String>,
    /// Degrees of skew β (Dirichlet; small is skewed).
    pub betas: Vec<f64>,
    /// Seeds.
    pub seeds: Range<u16>,
    /// Defaults, one of [`PRESETS`](crate::PRESETS).
    pub preset: String,
    /// A small network and the first rounds, for two CPU cores, instead of the paper's scale.
    pub is_quick: bool,
    /// Values of the key that is varied.
    pub values: Vec<Value>,
    /// `key=value` pairs that override the set-up.
    pub overrides: Vec<String>,
}

/// The runs of a study, ready to be made.
pub struct Prepared {
    /// What is run, in words.
    pub title: String,
    /// The runs, each in a directory of its own.
    pub jobs: Vec<Job>,
    /// The directory of their directories.
    pub out: PathBuf,
}

/// What a study found.
#[derive(Serialize)]
pub struct StudyResult {
    /// The study's name.
    pub study: &'static str,
    /// What was run, in words.
    pub title: String,
    /// The page.
    pub report: PathBuf,
    /// One table per β.
    pub tables: Vec<BetaTable>,
    /// What a reader of the tables must know.
    #[serde(skip)]
    pub notes: Vec<String>,
}

impl Study {
    /// Plans all runs and checks that their data are there. `out` defaults to `runs/STUDY-DATASET-SCALE`.
    ///
    /// # Errors
    /// If an option cannot be used or data are missing.
    pub fn prepare(&self, options: &StudyOptions, out: Option<PathBuf>, data_dir: Option<&Path>) -> Result<Prepared> {
        let setup = self.setup(options)?;
        let runs = self.runs(options, &setup, data_dir)?;
        check_data(&runs, data_dir)?;
        let out = out.unwrap_or_else(|| self.default_out(options, &setup));
        let job = |run: SweepRun| Job { dir: out.join(&run.id), id: run.id, config: run.config };
        let jobs: Vec<Job> = runs.into_iter().map(job).collect();
        Ok(Prepared { title: self.describe(options, &setup, &jobs[0].config), jobs, out })
    }

    /// Makes the runs `mine` that are not finished yet, and the report of all; `None` while other processes make the others.
    ///
    /// # Errors
    /// If a run fails or is stopped, or the report cannot be written.
    pub fn run(
        &self,
        prepared: &Prepared,
        mine: &[Job],
        driver: &Driver,
        watch: &dyn Watch,
    ) -> Result<Option<StudyResult>> {
        let Prepared { title, jobs, out } = prepared;
        driver.run_all(mine, watch)?;
        let all = jobs.iter().map(|job| RunDir::finished(&job.dir, &job.config)).collect::<Result<Option<Vec<_>>, _>>();
        let Some(summaries) = all? else { return Ok(None) };
        let runs: Vec<PathBuf> = jobs.iter().map(|job| job.dir.clone()).collect();
        let tables = Self::tables(jobs, &summaries)?;
        let title = format!("{title}{}", samples(&runs)?);
        let Written { report, notes, .. } = write_report(&ReportOptions {
            runs: &runs,
            out: &out.join("report"),
            title: Some(&title),
            unfinished: false,
            data_dir: driver.data_dir.as_deref(),
        })?;
        Ok(Some(StudyResult { study: self.name, title, report, tables, notes }))
    }

    fn setup(&self, options: &StudyOptions) -> Result<Setup> {
        let known = || self.setups.iter().map(|setup| setup.data);
        let asked = options.dataset.as_deref().unwrap_or(self.setups[0].data);
        let Some(setup) = self.setups.iter().find(|setup| setup.data == asked) else {
            let hint = did_you_mean(asked, known());
            let names = known().collect::<Vec<_>>().join(", ");
            bail!(Error::config(format!("--dataset {asked}: `{}` has {names}{hint}", self.name)));
        };
        Ok(if options.is_quick { setup.quick() } else { *setup })
    }

    /// All runs, seed by seed, so that the first seed completes a table.
    fn runs(&self, options: &StudyOptions, setup: &Setup, data_dir: Option<&Path>) -> Result<Vec<SweepRun>> {
        let ours = [
            (self.key, self.flag),
            ("data.partition.beta", "--beta"),
            ("seeds", "--seeds"),
            ("seed", "--seeds"),
            ("preset", "--preset"),
        ];
        for pair in &options.overrides {
            let key = pair.split('=').next().unwrap_or_default();
            if let Some((_, flag)) = ours.iter().find(|(ours, _)| *ours == key) {
                bail!(Error::config(format!("`{pair}`: the study sets this key itself\nhint: use {flag}")));
            }
        }
        let settings = setup.of_preset(&options.preset).settings();
        let mut settings: Vec<String> = settings.iter().map(|(key, value)| format!("{key}={value}")).collect();
        settings.extend(imagenet100(setup, data_dir));
        settings.push(format!("preset={}", options.preset));
        settings.extend(self.fixed.iter().map(|setting| (*setting).to_owned()));
        settings.extend(options.overrides.iter().cloned());
        let mut runs = Vec::new();
        for &beta in &options.betas {
            for value in &options.values {
                runs.extend(self.arm(value, beta, &options.seeds, &settings)?);
            }
        }
        runs.sort_by_key(|run| run.config.seed);
        runs.iter().try_for_each(|run| beta(&run.config).map(drop))?;
        Ok(runs)
    }

    /// The runs of one value of the key at one degree of skew.
    fn arm(&self, value: &Value, beta: f64, seeds: &Range<u16>, settings: &[String]) -> Result<Vec<SweepRun>> {
        let variant = self.variants.iter().find(|variant| value.as_str() == Some(variant.name));
        let (mut value, mut settings) = (value.clone(), settings.to_vec());
        if let Some(Variant { method, settings: own, .. }) = variant {
            value = (*method).into();
            let rate = 1.0 - Config::from_layers(None, &settings)?.federation.fraction;
            settings.extend(own.iter().map(|setting| setting.replace("{rate}", &format!("{rate:?}"))));
        } else if !self.variants.is_empty() {
            self.check_method(value.as_str().unwrap_or_default())?;
        }
        let seeds: Vec<Value> = seeds.clone().map(|seed| i64::from(seed).into()).collect();
        let axis = |key: &str, value: Value| (key.to_owned(), vec![value].into());
        let sweep = Table::from_iter([axis(self.key, value), axis("data.partition.beta", beta.into())]);
        let file = Table::from_iter([("sweep".to_owned(), sweep.into()), ("seeds".to_owned(), seeds.into())]);
        let mut runs = expand(Some(&file), &settings)?;
        if let Some(Variant { name, method, .. }) = variant {
            for run in &mut runs {
                run.id = run.id.replace(method, name);
            }
        }
        Ok(runs)
    }

    fn check_method(&self, name: &str) -> Result<()> {
        let methods = CATALOGUE.iter().map(|(name, _)| *name);
        let known: Vec<&str> = methods.chain(self.variants.iter().map(|variant| variant.name)).collect();
        if known.contains(&name) {
            return Ok(());
        }
        let (all, hint) = (known.join(", "), did_you_mean(name, known.iter().copied()));
        bail!(Error::config(format!("{} {name}: `{}` has {all}{hint}", self.flag, self.name)))
    }

    fn default_out(&self, options: &StudyOptions, setup: &Setup) -> PathBuf {
        let preset = if options.preset == "clean" { String::new() } else { format!("-{}", options.preset) };
        let scale = if options.is_quick { "quick" } else { "full" };
        Path::new("runs").join(format!("{}-{}-{scale}{preset}", self.name, setup.data))
    }

    /// Title, data sets, and what differs from the paper's set-up.
    fn describe(&self, options: &StudyOptions, setup: &Setup, config: &Config) -> String {
        let public = match config.data.public.name.as_str() {
            "tinyimagenet32" => "Tiny-ImageNet at 32×32, which stands in for ImageNet-100",
            "folder" if is_imagenet100(&config.data.public) => "ImageNet-100 at 32×32",
            name => setups::title(name),
        };
        let mut text = format!("{}: {}, public set {public}, preset {}", self.title, setup.title, options.preset);
        if setup.is_text() {
            let stands_in =
                if config.model.checkpoint == setup.checkpoint { ", which stands in for TinyBERT" } else { "" };
            text = format!("{text}, checkpoint {}{stands_in}", config.model.checkpoint);
        }
        if options.is_quick {
            text.push_str(", quick scale");
        }
        if !options.overrides.is_empty() {
            text = format!("{text}, with {}", options.overrides.join(" "));
        }
        text
    }

    /// One table per β.
    fn tables(jobs: &[Job], summaries: &[Summary]) -> Result<Vec<BetaTable>> {
        let mut groups: Vec<(f64, Vec<(&Config, &Summary)>)> = Vec::new();
        for (job, summary) in jobs.iter().zip(summaries) {
            let beta = beta(&job.config)?;
            match groups.iter_mut().find(|(known, _)| known.total_cmp(&beta).is_eq()) {
                Some((_, runs)) => runs.push((&job.config, summary)),
                None => groups.push((beta, vec![(&job.config, summary)])),
            }
        }
        let table = |(beta, runs): (f64, Vec<(&Config, &Summary)>)| {
            let labels = labels(runs.iter().map(|(config, _)| *config));
            let results: Vec<_> =
                labels.into_iter().zip(runs.into_iter().map(|(_, summary)| summary.clone())).collect();
            BetaTable { beta, table: compare(&results) }
        };
        Ok(groups.into_iter().map(table).collect())
    }
}

/// The runs of one β beside each other.
#[derive(Serialize)]
pub struct BetaTable {
    /// Degree of skew.
    pub beta: f64,
    /// One row per arm; the first value of the study's key is the baseline.
    pub table: Comparison,
}

/// How skewed a run's clients are.
fn beta(config: &Config) -> Result<f64> {
    match config.data.partition {
        PartitionConfig::Dirichlet { beta, .. } => {
            Error::require(beta > 0.0 && beta.is_finite(), "--beta", beta, "positive")?;
            Ok(beta)
        }
        _ => {
            bail!(Error::config("a study partitions data by a Dirichlet distribution; do not set data.partition.kind"))
        }
    }
}

/// The samples that were there: a local copy may be a part of the published set.
fn samples(runs: &[PathBuf]) -> Result<String> {
    let manifests = runs.iter().map(|dir| Manifest::read(dir)).collect::<Result<Vec<_>, _>>()?;
    let most = |key: &str| manifests.iter().flatten().filter_map(|m| m.sizes.get(key)).max().copied().unwrap_or(0);
    let (private, test, public) = (most("private_samples"), most("test_samples"), most("public_samples"));
    Ok(format!("; {private} private, {test} test and {public} public samples"))
}

#[cfg(test)]
mod tests {
    use super::data::IMAGENET100;
    use super::*;
    use crate::studies::{LEADING, TABLE1, TABLE2};
    use fedproj_core::methods::FedDyn;
    use fedproj_core::{Draw, OptimizerConfig, StoredRun};
    use fedproj_nn::Init;

    fn options(dataset: &str, preset: &str, methods: &[&str]) -> StudyOptions {
        StudyOptions {
            dataset: Some(dataset.to_owned()),
            betas: vec![0.3, 0.5],
            seeds: 0..3,
            preset: preset.to_owned(),
            is_quick: false,
            values: methods.iter().map(|&method| method.into()).collect(),
            overrides: Vec::new(),
        }
    }

    fn runs_of(study: &Study, options: &StudyOptions) -> Vec<SweepRun> {
        study.runs(options, &study.setup(options).unwrap(), None).unwrap()
    }

    #[test]
    fn variants_differ_from_the_table_in_their_own_keys_alone() {
        let methods = ["feddyn", "leading", "leading-no-correction"];
        let runs = runs_of(&LEADING, &StudyOptions { seeds: 3..5, ..options("cifar10", "clean", &methods) });
        let ids: Vec<&str> = runs.iter().map(|run| run.id.as_str()).collect();
        assert_eq!(ids[..3], ["beta0.3-feddyn-seed3", "beta0.3-leading-seed3", "beta0.3-leading-no-correction-seed3"]);
        assert_eq!((ids.len(), ids[11]), (12, "beta0.5-leading-no-correction-seed4"));
        let table =
            runs_of(&TABLE1, &StudyOptions { seeds: 3..5, ..options("cifar10", "clean", &["feddyn", "fedproj"]) });
        assert_eq!(runs[0].config, table[0].config);
        let mut leading = table[1].config.clone();
        leading.preset = runs[1].config.preset;
        leading.method.fedproj.correction.alpha = 0.01;
        leading.method.fedproj.averages.teacher = 0.9;
        assert_eq!(runs[1].config, leading);
        leading.method.fedproj.correction.alpha = 0.0;
        assert_eq!(runs[2].config, leading);
    }

    #[test]
    fn the_full_scale_is_the_papers() {
        for (dataset, clients, cohort, rounds, model, distill_epochs) in [
            ("cifar10", 100, 10, 100, "resnet8", 1),
            ("cifar100", 50, 5, 100, "resnet18", 3),
            ("cinic10", 100, 10, 60, "resnet18", 1),
        ] {
            let runs = runs_of(&TABLE1, &options(dataset, "paper", &["fedavg", "fedproj"]));
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
    fn the_published_code_has_its_own_network_memory_and_feddyn() {
        let runs = runs_of(&TABLE1, &options("cifar10", "authors-code", &["feddyn", "fedproj"]));
        for run in &runs {
            let Config { data, model, method, .. } = &run.config;
            let PartitionConfig::Dirichlet { beta, .. } = data.partition else { panic!() };
            assert_eq!((&model.name[..], model.init), ("resnet10", Init::Xavier));
            assert_eq!(method.fedproj.memory.size, if beta < 0.4 { 12_500 } else { 10_000 });
            assert_eq!((method.feddyn.authors, method.feddyn.clip), (true, 5.0));
        }
        let clean = runs_of(&TABLE1, &options("cifar10", "clean", &["feddyn"]));
        assert_eq!((runs.len(), clean.len()), (12, 6));
        assert!(clean.iter().all(|run| run.config.method.feddyn == FedDyn::default()));
    }

    #[test]
    fn imagenet100_is_taken_where_it_is_and_its_stand_in_is_named() {
        let options = options("cifar100", "clean", &["fedproj"]);
        let setup = TABLE1.setup(&options).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let title = || {
            let runs = TABLE1.runs(&options, &setup, Some(dir.path())).unwrap();
            TABLE1.describe(&options, &setup, &runs[0].config)
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
            let runs = runs_of(&TABLE2, &options(dataset, "paper", &["fedavg", "fedproj"]));
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
        let runs = runs_of(&TABLE2, &StudyOptions { dataset: None, ..options("", "authors-code", &["fedproj"]) });
        let Config { data, model, .. } = &runs[0].config;
        assert_eq!(
            (data.public_draw, data.text.max_length),
            (Draw::Balanced, 512),
            "only the authors' code looks at labels"
        );
        assert_eq!((model.init, data.byte_cast), (Init::Xavier, false));
    }

    #[test]
    fn the_committed_results_are_of_the_study_that_the_command_runs() {
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../results");
        let stored = |folder: &str, id: &str| StoredRun::open(&results.join(folder).join(id)).unwrap().config;
        let quick = |dataset, n_seeds, methods: &[&str]| StudyOptions {
            is_quick: true,
            betas: vec![0.3],
            seeds: 0..n_seeds,
            ..options(dataset, "clean", methods)
        };
        for run in runs_of(&TABLE1, &quick("cifar10", 3, &["fedavg", "fedproj"])) {
            assert_eq!(stored("table1-cifar10-quick", &run.id), run.config, "{}", run.id);
        }
        let full = StudyOptions { betas: vec![0.3], ..options("cifar10", "clean", &["feddyn", "fedproj"]) };
        for run in runs_of(&LEADING, &full) {
            assert_eq!(stored("table1-cifar10-full", &run.id), run.config, "{}", run.id);
        }
        for run in runs_of(&TABLE2, &quick("sst2", 2, &["fedavg", "feddf", "fedet", "fedproj"])) {
            assert_eq!(stored("table2-sst2-quick", &run.id), run.config, "{}", run.id);
        }
    }

    #[test]
    fn seeds_come_one_after_the_other_and_runs_have_names() {
        let two = StudyOptions { betas: vec![0.3], seeds: 0..2, ..options("cifar10", "clean", &["fedavg", "fedproj"]) };
        let ids: Vec<String> = runs_of(&TABLE1, &two).into_iter().map(|run| run.id).collect();
        assert_eq!(
            ids,
            ["beta0.3-fedavg-seed0", "beta0.3-fedproj-seed0", "beta0.3-fedavg-seed1", "beta0.3-fedproj-seed1"]
        );
    }
}
