//! Sums in integers: neither the order of clients nor partial sums show, and results stay what they are in floating point.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod small;

use fedproj_core::methods::CATALOGUE;
use fedproj_core::{
    ClientResult, ClientState, ClientStates, Config, Coordinator, Error, Experiment, LocalTraining, Opening, Part,
    Partial, StoredRun, SumKind, Summary,
};
use small::{config, run_all, settings_of, simulation};
use std::path::Path;

const FIXED: &str = "federation.sum=fixed";

/// A server, and a round with the results of its clients.
fn round(config: Config) -> (Coordinator, Opening, Vec<ClientResult>) {
    let method = config.method.build().unwrap();
    let experiment = Experiment::load(config, method.as_ref(), None).unwrap();
    let mut server = Coordinator::new(experiment, method, 1).unwrap();
    let opening = server.open().unwrap();
    let mut training = LocalTraining::new(server.experiment(), server.method()).unwrap();
    let cohort = server.experiment().cohort(0);
    let train = |client: u32| training.run(server.method(), &opening.download, client, &ClientState::new()).unwrap();
    let results = cohort.into_iter().map(train).collect();
    (server, opening, results)
}

/// The state after a round whose results come in this order.
fn fused(method: &str, sum: &str, reversed: bool) -> (Vec<f32>, Vec<f32>) {
    let settings = [settings_of(method), &[sum]].concat();
    let (mut server, opening, mut results) = round(config(method, &settings));
    if reversed {
        results.reverse();
    }
    server.close(&opening, &results, 0.0).unwrap();
    (server.state().weights.clone(), server.state().buffers.clone())
}

#[test]
fn the_order_of_clients_does_not_show() {
    let mut n_moved = 0;
    for (method, _) in CATALOGUE {
        // These look at single clients, in floating point.
        if !["fedet", "fedkd", "fedgems", "pfedhn", "fedgen", "fedgkt"].contains(method) {
            assert_eq!(fused(method, FIXED, false), fused(method, FIXED, true), "{method}");
            n_moved += usize::from(fused(method, "seed=5", false) != fused(method, "seed=5", true));
        }
    }
    assert!(n_moved > 10, "in floating point the order shows: {n_moved}");
}

#[test]
fn partial_sums_of_workers_give_the_same_bytes() {
    let mut n_summed = 0;
    for (method, _) in CATALOGUE {
        let settings = [settings_of(method), &[FIXED]].concat();
        let (mut server, _, _) = round(config(method, &settings));
        let Some(means) = server.means() else { continue };
        n_summed += 1;
        let mut simulation = simulation(config(method, &settings), 2);
        let mut workers: Vec<LocalTraining> =
            (0..3).map(|_| LocalTraining::new(server.experiment(), server.method()).unwrap()).collect();
        let mut states = ClientStates::new();
        while !server.is_done() {
            let opening = server.open().unwrap();
            let mut whole = Partial::new(&means);
            // The last worker is ready first; each trains the clients of its number.
            for (worker, training) in workers.iter_mut().enumerate().rev() {
                let cohort = server.experiment().cohort(opening.download.round).into_iter();
                let mine = cohort.filter(|client| *client as usize % 3 == worker);
                let mine: Vec<_> =
                    mine.map(|client| (client, states.get(&client).cloned().unwrap_or_default())).collect();
                let mine: Vec<_> = mine.iter().map(|(client, state)| (*client, state)).collect();
                if !mine.is_empty() {
                    let sums = training.run_summed(server.method(), &opening.download, &mine).unwrap();
                    whole.merge(Partial::from_bytes(&sums.to_bytes().unwrap(), &means).unwrap()).unwrap();
                }
            }
            let record = server.close(&opening, &whole, 0.0).unwrap();
            states.extend(whole.states);
            let expected = simulation.round(&|_| ()).unwrap();
            assert_eq!(
                (record.model_hash, record.cohort, record.train_loss.map(f64::to_bits), record.bytes_up),
                (expected.model_hash, expected.cohort, expected.train_loss.map(f64::to_bits), expected.bytes_up),
                "{method}, round {}",
                record.round
            );
        }
    }
    assert!(n_summed >= 15, "{n_summed}");
}

#[test]
fn clients_are_not_summed_where_something_looks_at_each() {
    for setting in ["federation.evaluate_clients=true", "federation.robust.clip=1.0", "federation.sum=float"] {
        let (mut server, _, _) = round(config("fedavg", &[FIXED, setting]));
        assert!(server.means().is_none(), "{setting}");
        let opening = server.open().unwrap();
        let mut training = LocalTraining::new(server.experiment(), server.method()).unwrap();
        let summed = training.run_summed(server.method(), &opening.download, &[(0, &ClientState::new())]);
        assert!(summed.unwrap_err().to_string().contains("federation.sum"), "{setting}");
    }
}

#[test]
fn a_value_out_of_range_is_its_clients_error() {
    for (part, weights) in [(Part::Weights, true), (Part::Upload("control_variate"), false)] {
        let (mut server, opening, mut results) = round(config("scaffold", &[small::SGD, FIXED]));
        let client = results[1].client;
        let vector =
            if weights { &mut results[1].weights } else { results[1].uploads.get_mut("control_variate").unwrap() };
        vector[3] = 2e8;
        let error = server.close(&opening, &results, 0.0).unwrap_err();
        assert!(matches!(&error, Error::Client { client: at, .. } if *at == client), "{part:?}: {error}");
        assert!(error.to_string().contains("does not fit federation.sum"), "{error}");
    }
}

#[test]
fn rules_that_compare_single_clients_are_rejected() {
    for rule in ["median", "trimmed_mean", "krum"] {
        let settings = [FIXED.to_owned(), format!("federation.robust.rule={rule}")];
        let error = Config::from_layers(None, &settings).unwrap_err().to_string();
        assert!(error.contains("federation.robust.rule") && error.contains("federation.sum=float"), "{error}");
    }
}

#[test]
fn the_scale_is_recorded_and_the_run_repeats() {
    let dir = tempfile::tempdir().unwrap();
    let config = config("fedproj", &[FIXED]);
    let mut run = fedproj_core::Run::open(dir.path(), &config, None, 1, false).unwrap();
    while run.round(&|_| ()).unwrap().is_some() {}
    run.finish().unwrap();
    let manifest = fedproj_core::Manifest::read(dir.path()).unwrap().unwrap();
    assert_eq!(manifest.sizes["sum_scale_bits"], 24);
    fedproj_core::verify(dir.path(), None, 2, fedproj_core::VerifyPart::default(), &|_| ()).unwrap();
    let float = run_all(&mut simulation(small::config("fedproj", &[]), 1));
    assert_ne!(run.rounds()[2].model_hash, float[2].model_hash, "the setting does something");
}

/// A committed run with sums in integers.
fn rerun(name: &str) -> (Summary, Summary, f64) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../results/leading-digits-full").join(name);
    let stored = StoredRun::open(&dir).unwrap();
    let mut config = stored.config.clone();
    let mut float = simulation(config.clone(), 2);
    float.round(&|_| ()).unwrap();
    config.federation.sum = SumKind::Fixed;
    let mut fixed = simulation(config.clone(), 2);
    let mut rounds = vec![fixed.round(&|_| ()).unwrap()];
    let pairs = || fixed.state().weights.iter().zip(&float.state().weights);
    let distance: f64 = pairs().map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let norm: f64 = pairs().map(|(_, b)| f64::from(*b).powi(2)).sum();
    let difference = (distance / norm).sqrt();
    rounds.extend(run_all(&mut fixed));
    let summary = Summary::of(&config.method.name, config.seed, &config.federation, 3, &rounds);
    (stored.summary, summary, difference)
}

#[test]
fn a_committed_run_is_the_same_within_rounding() {
    for name in ["beta0.1-fedavg-seed0", "beta0.1-fedproj-seed0"] {
        let (stored, fixed, difference) = rerun(name);
        assert!(difference > 0.0 && difference < 1e-7, "{name}: after one round {difference:e}");
        assert!((stored.headline - fixed.headline).abs() < 0.01, "{name}: {} {}", stored.headline, fixed.headline);
    }
}
