//! The two halves of a round apart, as a server and its nodes run them: together they are the simulator, and a hostile
//! client is held off by the robust rules.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use fedproj_core::methods::CATALOGUE;
use fedproj_core::{ClientResult, ClientState, Config, Coordinator, Download, Experiment, LocalTraining, Simulation};
use std::collections::BTreeMap;
use std::sync::Arc;

fn experiment(settings: &[&str]) -> (Experiment, Box<dyn fedproj_core::Method>) {
    let small = ["model.hidden=[16]", "local.epochs=1", "federation.rounds=4"];
    let settings: Vec<String> = small.iter().chain(settings).map(|s| (*s).to_owned()).collect();
    let config = Config::from_layers(None, &settings).unwrap();
    let method = config.method.build().unwrap();
    (Experiment::load(config, method.as_ref(), None).unwrap(), method)
}

/// Runs all rounds with a server and clients that share nothing but bytes; the last accuracy and model hash.
fn federate(settings: &[&str], tamper: impl Fn(&mut ClientResult)) -> (f64, String) {
    let (experiment, method) = experiment(settings);
    let mut server = Coordinator::new(experiment, method, 2).unwrap();
    let mut clients: BTreeMap<u32, (LocalTraining, ClientState)> = BTreeMap::new();
    let mut last = (0.0, String::new());
    while !server.is_done() {
        let opening = server.open().unwrap();
        let download = Arc::new(Download::from_bytes(&opening.download.to_bytes().unwrap()).unwrap());
        let mut results = Vec::new();
        for &client in &opening.cohort {
            let (training, state) = clients.entry(client).or_insert_with(|| {
                (LocalTraining::new(server.experiment(), server.method()).unwrap(), ClientState::new())
            });
            let mut result = training.run(server.method(), &download, client, state).unwrap();
            *state = std::mem::take(&mut result.state);
            tamper(&mut result);
            results.push(ClientResult::from_bytes(&result.to_bytes().unwrap()).unwrap());
        }
        let record = server.close(&opening, &results, 0.0).unwrap();
        last = (record.accuracy.unwrap(), record.model_hash);
    }
    last
}

fn simulate(settings: &[&str]) -> String {
    let (experiment, method) = experiment(settings);
    let mut simulation = Simulation::new(experiment, method, 1).unwrap();
    let mut hash = String::new();
    while !simulation.is_done() {
        hash = simulation.round(&|_| ()).unwrap().model_hash;
    }
    hash
}

#[test]
fn server_and_clients_apart_are_the_simulator() {
    let sgd = "local.optimizer={kind='sgd', lr=0.05}";
    let absent = ["method.name=feddyn", "method.feddyn.absent=true", "federation.fraction=0.3"];
    assert_eq!(federate(&absent, |_| ()).1, simulate(&absent), "corrections of absent clients");
    let methods = CATALOGUE.iter().map(|(method, _)| (*method, "clean"));
    for (method, preset) in methods.chain([("fedproj", "leading")]) {
        let (name, preset) = (format!("method.name={method}"), format!("preset={preset}"));
        let settings = [&name, &preset, sgd, "method.fedproj.projection.warmup=0"];
        assert_eq!(federate(&settings, |_| ()).1, simulate(&settings), "{method} {preset}");
    }
    let inputs = ["method.fedproj.projection={rule='sgp', warmup=0}", "method.fedproj.memory.size=100"];
    assert_eq!(federate(&inputs, |_| ()).1, simulate(&inputs), "directions of inputs");
    let augmented = ["method.name=fedavg", "data.augment=true"];
    assert_eq!(federate(&augmented, |_| ()).1, simulate(&augmented));
    assert_ne!(simulate(&augmented), simulate(&augmented[..1]), "images are moved");
}

#[test]
fn robust_rules_hold_off_a_hostile_client_that_an_average_follows() {
    let hostile = |result: &mut ClientResult| {
        if result.client == 0 {
            result.weights.iter_mut().for_each(|w| *w = 50.0 - 30.0 * *w);
        }
    };
    let run = |rule: &str| {
        let rule = format!("federation.robust={{ {rule} }}");
        let sgd = "local.optimizer={kind='sgd', lr=0.1}";
        let iid = "data.partition={kind='iid', clients=10}";
        let settings = [
            "method.name=feddf",
            "federation.fraction=1.0",
            "federation.rounds=12",
            "local.epochs=10",
            sgd,
            iid,
            &rule,
        ];
        federate(&settings, hostile).0
    };
    let average = run("rule='none'");
    assert!(average < 0.4, "the attack is strong enough to show: {average}");
    let clips = ["clip=2.0", "clip_ratio=3.0"];
    for rule in ["rule='median'", "rule='trimmed_mean', share=0.2", "rule='krum', share=0.1"].iter().chain(&clips) {
        let accuracy = run(rule);
        assert!(accuracy > 0.5, "{rule}: {accuracy}");
    }
}

#[test]
fn a_client_that_claims_most_samples_does_not_own_the_model() {
    // It sends back what it received, scaled down: a model that knows nothing.
    let hostile = |result: &mut ClientResult| {
        if result.client == 0 {
            result.weights.iter_mut().for_each(|w| *w *= 0.5);
            (result.n_samples, result.n_steps) = (10_000_000, 4_000_000);
        }
    };
    for method in ["method.name=fedavg", "method.name=fednova"] {
        let run = |limit: &str| {
            let iid = "data.partition={kind='iid', clients=10}";
            let sgd = "local.optimizer={kind='sgd', lr=0.1}";
            let all = ["federation.fraction=1.0", "federation.rounds=12", "local.epochs=10", sgd, iid, method, limit];
            federate(&all, hostile).0
        };
        let (believed, limited) = (run("seed=0"), run("federation.robust.claim_ratio=3.0"));
        assert!(believed < 0.3 && limited > 0.6, "{method}: {believed}, {limited}");
    }
}

#[test]
fn limits_hold_for_what_a_method_sends_beside_the_weights() {
    // SCAFFOLD adds the mean of these vectors to every client's gradients.
    let hostile = |result: &mut ClientResult| {
        if result.client == 0 {
            result.uploads.values_mut().flatten().for_each(|v| *v = 30.0);
        }
    };
    let run = |limit: &str| {
        let (iid, sgd) = ("data.partition={kind='iid', clients=10}", "local.optimizer={kind='sgd', lr=0.1}");
        let all = "federation.fraction=1.0";
        federate(&["method.name=scaffold", "local.epochs=10", all, iid, sgd, limit], hostile).0
    };
    let (free, limited) = (run("seed=0"), run("federation.robust.clip_ratio=3.0"));
    assert!(free < 0.3 && limited > 0.6, "{free}, {limited}");
}

#[test]
fn a_clip_beyond_every_update_changes_no_bit() {
    for beyond in ["clip=1e6", "clip_ratio=1e6", "claim_ratio=1e6"] {
        assert_eq!(simulate(&[&format!("federation.robust.{beyond}")]), simulate(&[]), "{beyond}");
    }
    assert_ne!(simulate(&["federation.robust.clip=0.01"]), simulate(&[]));
}
