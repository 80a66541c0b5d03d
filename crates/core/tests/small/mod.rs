//! A federation that trains in a few milliseconds: 240 digits on four clients of unequal size, 80 of them public, and an MLP with
//! one narrow hidden layer.

#![allow(dead_code, reason = "not every test file uses every helper")]
#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use fedproj_core::{Config, Experiment, Method, RoundRecord, Simulation};

/// What every test here starts from. Learning rates are high, so that three rounds tell methods apart.
pub const BASE: &[&str] = &[
    "seed=5",
    "data.private_samples=240",
    "data.public_samples=80",
    "data.partition={kind='dirichlet', beta=0.5, clients=4, min_samples=20}",
    "model.hidden=[12]",
    "federation.rounds=3",
    "federation.fraction=0.75",
    "local.epochs=2",
    "local.batch=16",
    "local.optimizer={kind='adam', lr=0.01}",
    "method.feddf.distill.optimizer={kind='sgd', lr=0.05, weight_decay=0.0}",
    "method.feddf.distill.batch=20",
    "method.fedet.optimizer={kind='sgd', lr=0.05, weight_decay=0.0}",
    "method.fedet.batch=20",
    "method.fedproj.projection.warmup=1",
    "method.fedproj.memory={size=40, batch=20}",
    "method.fedproj.distill.optimizer={kind='sgd', lr=0.05, weight_decay=0.0}",
    "method.fedproj.distill.batch=20",
];

/// Plain gradient descent, as control variates want it.
pub const SGD: &str = "local.optimizer={kind='sgd', lr=0.1, weight_decay=0.0}";

/// A small network with batch-norm.
pub const NORM: &str = "model={name='layers', layers=[{op='conv2d', outputs=4}, {op='batch_norm'}, {op='relu'}, \
                        {op='flatten'}, {op='linear'}]}";

/// `BASE` with a method and further settings.
pub fn config(method: &str, overrides: &[&str]) -> Config {
    let all = BASE.iter().chain(overrides).map(|s| (*s).to_owned());
    let all: Vec<String> = all.chain([format!("method.name={method}")]).collect();
    Config::from_layers(None, &all).unwrap_or_else(|e| panic!("{method} {overrides:?}: {e}"))
}

/// The optimiser that a method can work with, where the base's does not do.
pub fn settings_of(method: &str) -> &'static [&'static str] {
    if matches!(method, "scaffold" | "feddc") { &[SGD] } else { &[] }
}

/// A simulation of a configuration, at its start.
pub fn simulation(config: Config, n_threads: usize) -> Simulation {
    let method = config.method.build().unwrap();
    simulation_of(config, method, n_threads)
}

/// The same with a method that no configuration names.
pub fn simulation_of(config: Config, method: Box<dyn Method>, n_threads: usize) -> Simulation {
    let experiment = Experiment::load(config, method.as_ref(), None).unwrap();
    Simulation::new(experiment, method, n_threads).unwrap()
}

/// All rounds.
pub fn run_all(simulation: &mut Simulation) -> Vec<RoundRecord> {
    let mut records = Vec::new();
    while !simulation.is_done() {
        records.push(simulation.round(&|_| ()).unwrap());
    }
    records
}

/// The model hash after every round.
pub fn hashes(mut simulation: Simulation) -> Vec<String> {
    run_all(&mut simulation).into_iter().map(|r| r.model_hash).collect()
}
