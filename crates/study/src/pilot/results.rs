//! What the study found: `results.json`, `table.csv`, `rounds.csv` and the table of terminal and page.

use super::study::{METHODS, PilotRun, ROUNDS, Scenario};
use crate::compare::{mean, standard_deviation};
use fedproj_core::RoundRecord;
use fedproj_report::Table;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The study's numbers; shares, not per cent.
#[derive(Clone, Debug, Serialize)]
pub struct Results {
    /// Always `"pilot"`.
    pub study: &'static str,
    /// The program's version.
    pub version: &'static str,
    /// Rounds of a run.
    pub rounds: u32,
    /// The seeds, in the order of all lists below.
    pub seeds: Vec<u64>,
    /// Skewed clients, from scratch.
    pub methods: BTreeMap<&'static str, MethodResult>,
    /// Clients of one size, from scratch.
    pub balanced: BTreeMap<&'static str, MethodResult>,
    /// Skewed clients, from pre-trained weights.
    pub pretrained: BTreeMap<&'static str, MethodResult>,
}

/// A method's numbers in a scenario.
#[derive(Clone, Debug, Serialize)]
pub struct MethodResult {
    /// Accuracy of the global model after the last round.
    #[serde(flatten)]
    pub accuracy: Spread,
    /// Mean of `client`, for those who look for one number.
    pub client_mean: f64,
    /// Accuracy of the global model before the first round.
    pub start: Spread,
    /// Mean accuracy of the clients after the last round's local training.
    pub client: Spread,
    /// Mean over rounds of the clients' mean greatest loss of accuracy on a class.
    pub forgetting: Spread,
    /// Share of all local steps whose gradient was projected; for methods that project.
    pub projection_rate: Option<Spread>,
}

/// Values of all seeds.
#[derive(Clone, Debug, Serialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Standard deviation (n − 1); 0 for one seed.
    pub std: f64,
    /// Least.
    pub min: f64,
    /// Greatest.
    pub max: f64,
    /// Seed by seed.
    pub seeds: Vec<f64>,
}

impl Spread {
    /// Of values, of which there is at least one.
    pub fn of(seeds: Vec<f64>) -> Self {
        Self {
            mean: mean(&seeds),
            std: standard_deviation(&seeds).unwrap_or(0.0),
            min: seeds.iter().copied().fold(f64::INFINITY, f64::min),
            max: seeds.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            seeds,
        }
    }

    /// Mean and range in per cent, as every table shows them.
    fn percent(&self) -> String {
        format!("{:.2} ({:.2}–{:.2})", 100.0 * self.mean, 100.0 * self.min, 100.0 * self.max)
    }
}

impl Results {
    /// The numbers of finished runs.
    pub fn of(seeds: &[u64], all: &[PilotRun]) -> Self {
        let scenario = |scenario| {
            let of = |(i, (key, _)): (usize, &(&'static str, &str))| (*key, MethodResult::of(&runs(all, scenario, i)));
            METHODS.iter().enumerate().map(of).collect()
        };
        Self {
            study: "pilot",
            version: env!("CARGO_PKG_VERSION"),
            rounds: ROUNDS,
            seeds: seeds.to_vec(),
            methods: scenario(Scenario::Skewed),
            balanced: scenario(Scenario::Balanced),
            pretrained: scenario(Scenario::Pretrained),
        }
    }

    fn rows(&self) -> impl Iterator<Item = (Scenario, &'static str, &'static str, &MethodResult)> {
        let of =
            move |scenario| METHODS.iter().map(move |(key, name)| (scenario, *key, *name, self.get(scenario, key)));
        Scenario::ALL.into_iter().flat_map(of)
    }

    /// A method's numbers in a scenario.
    pub fn get(&self, scenario: Scenario, method: &str) -> &MethodResult {
        &[&self.methods, &self.balanced, &self.pretrained][scenario as usize][method]
    }

    /// The table of terminal and page, in per cent.
    pub fn table(&self) -> Table {
        let headers =
            ["clients", "method", "global accuracy %", "clients' accuracy %", "forgetting %", "steps projected %"];
        let row = |(scenario, _, name, r): (Scenario, _, &str, &MethodResult)| {
            let projection = r.projection_rate.as_ref().map_or_else(|| "–".to_owned(), Spread::percent);
            let cells = [r.accuracy.percent(), r.client.percent(), r.forgetting.percent(), projection];
            [scenario.title().to_owned(), name.to_owned()].into_iter().chain(cells).collect()
        };
        Table::new(headers, 2, self.rows().map(row).collect())
    }

    /// `table.csv`: the same numbers unrounded, as shares.
    pub fn csv(&self) -> String {
        let mut out = "setting,method,seeds".to_owned();
        for name in ["accuracy", "client_accuracy", "forgetting", "projection_rate"] {
            let _ = write!(out, ",{name}_mean,{name}_std,{name}_min,{name}_max");
        }
        out.push('\n');
        for (scenario, key, _, r) in self.rows() {
            let _ = write!(out, "{},{key},{}", scenario.key(), self.seeds.len());
            for spread in [Some(&r.accuracy), Some(&r.client), Some(&r.forgetting), r.projection_rate.as_ref()] {
                let _ = match spread {
                    Some(s) => write!(out, ",{},{},{},{}", s.mean, s.std, s.min, s.max),
                    None => write!(out, ",,,,"),
                };
            }
            out.push('\n');
        }
        out
    }
}

impl MethodResult {
    fn of(runs: &[&PilotRun]) -> Self {
        let last = |run: &PilotRun, of: fn(&RoundRecord) -> Option<f64>| run.rounds.last().and_then(of).unwrap_or(0.0);
        let mean = |run: &PilotRun, of: fn(&RoundRecord) -> Option<f64>| {
            run.rounds.iter().filter_map(of).sum::<f64>() / run.rounds.len() as f64
        };
        let spread = |of: &dyn Fn(&PilotRun) -> f64| Spread::of(runs.iter().map(|run| of(run)).collect());
        let client = spread(&|run| last(run, |r| r.client_accuracy));
        let projects = runs.iter().any(|run| run.rounds.iter().any(|r| r.projection_rate.is_some()));
        Self {
            accuracy: spread(&|run| last(run, |r| r.accuracy)),
            client_mean: client.mean,
            start: spread(&|run| run.start),
            client,
            forgetting: spread(&|run| mean(run, |r| r.forgetting)),
            // Every round has as many steps, and a round that looks at no memory projects none of them.
            projection_rate: projects.then(|| spread(&|run| mean(run, |r| r.projection_rate))),
        }
    }
}

/// The runs of a method in a scenario, in the order of their seeds.
pub fn runs(all: &[PilotRun], scenario: Scenario, method: usize) -> Vec<&PilotRun> {
    all.iter().filter(|run| (run.scenario, run.method) == (scenario, method)).collect()
}

/// `rounds.csv`: every round of every run.
pub fn rounds_csv(all: &[PilotRun]) -> String {
    let mut out = format!("setting,method,seed,{}\n", RoundRecord::CSV_HEADER);
    for run in all {
        for record in &run.rounds {
            let _ = writeln!(out, "{},{},{},{}", run.scenario.key(), METHODS[run.method].0, run.seed, record.to_csv());
        }
    }
    out
}
