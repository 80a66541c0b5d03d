//! Groups of clients with networks of their own (`model.clients`): averages within a group, logits between groups.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod small;

use fedproj_core::methods::CATALOGUE;
use fedproj_core::{
    ClientState, ClientStates, Config, Error, Evaluator, LocalTraining, Model, RoundRecord, Run, Seconds, Simulation,
    VerifyPart, verify,
};
use small::{BASE, config, run_all, settings_of, simulation};
use std::path::Path;
use std::sync::Arc;

const TWO: &str = "model.clients=[{name='mlp', share=0.5}, {name='mlp', hidden=[7, 5], share=0.5}]";

/// The methods for which groups are.
fn exchanging() -> impl Iterator<Item = &'static str> {
    let exchanges = |name: &&str| config(name, settings_of(name)).method.build().unwrap().exchanges_logits();
    CATALOGUE.iter().map(|(name, _)| *name).filter(exchanges)
}

fn without_times(records: Vec<RoundRecord>) -> Vec<RoundRecord> {
    records.into_iter().map(|record| RoundRecord { seconds: Seconds::default(), ..record }).collect()
}

fn error(overrides: &[&str]) -> String {
    let all: Vec<String> = BASE.iter().chain(overrides).map(|pair| (*pair).to_owned()).collect();
    Config::from_layers(None, &all).unwrap_err().to_string()
}

#[test]
fn these_methods_exchange_logits() {
    let all: Vec<&str> = exchanging().collect();
    for method in ["feddf", "fedet", "fedproj", "fedmd"] {
        assert!(all.contains(&method), "{all:?}");
    }
    assert!(!all.contains(&"fedavg"));
}

#[test]
fn one_group_is_the_network_that_it_names() {
    for method in exchanging() {
        let run = |overrides: &[&str]| without_times(run_all(&mut simulation(config(method, overrides), 2)));
        let plain = run(&["model.hidden=[7, 5]"]);
        assert_eq!(run(&["model.clients=[{name='mlp', hidden=[7, 5], share=1.0}]"]), plain, "{method}");
        assert!(plain[0].accuracy_by_group.is_none());
    }
    // Any method can run in one group.
    config("fedavg", &["model.clients=[{name='cnn', share=1.0}]"]);
}

#[test]
fn weights_are_averaged_within_a_group_and_logits_over_all() {
    let all = ["federation.rounds=1", "federation.fraction=1.0", "method.fedproj.distill.epochs=0", TWO];
    let mut simulation = simulation(config("fedproj", &all), 2);
    run_all(&mut simulation);
    let results = simulation.last_results().unwrap().to_vec();
    let experiment = simulation.experiment();
    assert_eq!((0..4).map(|client| experiment.group_of(client)).collect::<Vec<_>>(), [0, 1, 0, 1]);
    let mut ensemble = vec![0.0f64; experiment.public.as_ref().unwrap().n_samples() * 10];
    for group in 0..2 {
        let (of, state) = (experiment.group(group), simulation.state().group(group));
        let members: Vec<_> = results.iter().filter(|result| experiment.group_of(result.client) == group).collect();
        let total: usize = members.iter().map(|result| result.n_samples).sum();
        assert_eq!((members.len(), experiment.n_clients_of(group)), (2, 2));
        for (i, found) in state.weights.iter().enumerate() {
            let mean = |result: &&fedproj_core::ClientResult| {
                f64::from(result.weights[i]) * result.n_samples as f64 / total as f64
            };
            let expected: f64 = members.iter().map(mean).sum();
            assert!((f64::from(*found) - expected).abs() < 1e-6, "group {group}, weight {i}");
        }
        let models: Vec<Model<'_>> =
            members.iter().map(|result| Model { weights: &result.weights, buffers: &result.buffers }).collect();
        let evaluator = Evaluator::new(&of.graph, 1).unwrap();
        for outputs in evaluator.outputs(&models, of.public.as_ref().unwrap(), false).unwrap() {
            ensemble.iter_mut().zip(&outputs.logits).for_each(|(sum, v)| *sum += f64::from(*v) / 4.0);
        }
    }
    // Both groups remember the same ensemble, that of all four clients.
    for state in simulation.state().groups() {
        let found = &state.targets.as_ref().unwrap().logits;
        assert_eq!(found.len(), ensemble.len());
        assert!(found.iter().zip(&ensemble).all(|(found, mean)| (f64::from(*found) - mean).abs() < 1e-5));
    }
}

#[test]
fn what_one_group_learns_reaches_the_other() {
    let other = "model.clients=[{name='mlp', share=0.5}, {name='mlp', hidden=[9], share=0.5}]";
    for method in exchanging() {
        let first_group = |clients: &str, rounds: &str| {
            let mut simulation = simulation(config(method, &[clients, rounds]), 2);
            run_all(&mut simulation);
            (simulation.state().weights.clone(), simulation.state().evaluated.clone(), simulation.clients().clone())
        };
        let two = "federation.rounds=2";
        assert!(first_group(TWO, two) != first_group(other, two), "{method}");
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bytes() {
    for method in exchanging() {
        let run = |n_threads| {
            let settings = [TWO, "federation.evaluate_clients=true", "federation.average_evaluated=0.5"];
            let mut simulation = simulation(config(method, &settings), n_threads);
            let records = without_times(run_all(&mut simulation));
            (records, simulation.state().to_bytes().unwrap())
        };
        let (records, state) = run(1);
        assert!(run(3) == (records.clone(), state), "{method}");
        for record in &records {
            let by_group = record.accuracy_by_group.as_ref().unwrap();
            assert_eq!((by_group.len(), Some(by_group[0])), (2, record.accuracy));
            assert_eq!(record.forgetting.is_some(), method != "fedmd", "FedMD's clients start from their own models");
            assert!(record.client_accuracy.is_some_and(|accuracy| accuracy > 0.1), "{method}");
        }
    }
}

#[test]
fn a_stopped_run_resumes_with_the_same_bytes_and_is_verified() {
    for method in exchanging() {
        let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let config = config(method, &[TWO, "method.fedproj.projection.warmup=1"]);
        let run = |dir: &Path, stop_after: usize| {
            let mut run = Run::open(dir, &config, None, 2, true).unwrap();
            while run.rounds().len() < stop_after && run.round(&|_| ()).unwrap().is_some() {}
            if stop_after > 2 {
                run.finish().unwrap();
            }
        };
        run(whole.path(), 3);
        (1..4).for_each(|stop_after| run(parts.path(), stop_after));
        for file in ["model.safetensors", "model-2.safetensors", "checkpoints/round-000003.ckpt"] {
            let read = |dir: &Path| std::fs::read(dir.join(file)).unwrap();
            assert!(read(whole.path()) == read(parts.path()), "{method}: {file}");
        }
        for part in [VerifyPart::default(), VerifyPart { from_checkpoint: true, ..VerifyPart::default() }] {
            let found = verify(parts.path(), None, 1, part, &|_| ()).unwrap();
            assert!(found.sealed && found.compared.iter().any(|file| file == "model-2.safetensors"), "{found:?}");
        }
    }
}

#[test]
fn a_changed_model_of_any_group_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::open(dir.path(), &config("feddf", &[TWO]), None, 2, false).unwrap();
    while run.round(&|_| ()).unwrap().is_some() {}
    run.finish().unwrap();
    drop(run);
    let path = dir.path().join("model-2.safetensors");
    let (whole, mut changed) = (std::fs::read(&path).unwrap(), std::fs::read(&path).unwrap());
    *changed.last_mut().unwrap() ^= 1;
    std::fs::write(&path, &changed).unwrap();
    let message = fedproj_core::StoredRun::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("model-2.safetensors has changed"), "{message}");
    let message = verify(dir.path(), None, 1, VerifyPart::default(), &|_| ()).unwrap_err().to_string();
    assert!(message.contains("model-2.safetensors: fc"), "{message}");
    std::fs::write(&path, &whole).unwrap();
    verify(dir.path(), None, 1, VerifyPart::default(), &|_| ()).unwrap();
    // Going back removes the results of all groups.
    fedproj_core::rollback(dir.path(), 2).unwrap();
    assert!(!path.exists() && !dir.path().join("model.safetensors").exists());
}

#[test]
fn a_group_of_which_nobody_takes_part_keeps_its_model() {
    let all = ["federation.rounds=1", "federation.fraction=0.25", "method.feddf.distill.epochs=0", TWO];
    let mut simulation = simulation(config("feddf", &all), 1);
    let start: Vec<_> = simulation.state().groups().map(|state| state.weights.clone()).collect();
    let cohort = run_all(&mut simulation).remove(0).cohort;
    let absent = 1 - simulation.experiment().group_of(cohort[0]);
    assert_eq!(cohort.len(), 1);
    for (group, state) in simulation.state().groups().enumerate() {
        assert_eq!(state.weights == start[group], group == absent, "group {group} of cohort {cohort:?}");
    }
}

#[test]
fn what_needs_one_network_is_refused_with_what_would_work() {
    for (overrides, told) in [
        (&["method.name=fedavg", TWO][..], "feddf, fedet, fedproj, fedmd exchange"),
        (&["method.name=moon", TWO], "averages the models of all clients"),
        (&["method.name=fedproj", "method.fedproj.correction.alpha=0.1", TWO], "as it is set, averages the models"),
        (&["method.name=feddf", "method.feddf.distill.feature_weight=0.1", TWO], "a feature loss"),
        (&["method.name=feddf", "federation.sum=fixed", TWO], "hint: federation.sum=float"),
        (&["method.name=feddf", "federation.robust=median", TWO], "[federation.robust]"),
        (&["method.name=feddf", "model.weights=a.safetensors", TWO], "model.weights is for one network"),
        (&["method.name=fedmd", "method.fedmd.memory.temperature=2.0"], "only size, batch, resample and bn apply"),
        (&["model.clients=[{name='mlp', share=0.5}]"], "sum to 0.5: they must sum to 1"),
        (&["model.clients=[{name='mlp', share=0.5}, {name='cnn', share=0.6}]"], "sum to 1.1"),
        (&["model.clients=[{name='mlp', share=1.5}, {name='cnn', share=-0.5}]"], "model.clients[0].share = 1.5"),
        (&["model.clients=[{name='ccnn', share=1.0}]"], "did you mean `cnn`?"),
        (&["model.clients=[{name='layers', share=1.0}]"], "model.clients[0].name = \"layers\": must be one of"),
        (&["model.clients=[{name='cnn'}]"], "`share` is missing"),
        (&["model.clients=[{name='cnn', share=1.0, width=3}]"], "unknown key `width`"),
        (&["model.clients=[{name='mlp', share=1.0, hidden=[0]}]"], "model.clients[0].hidden"),
        (&["model.clients=cnn"], "must be a list of tables"),
    ] {
        let message = error(overrides);
        assert!(message.contains(told), "{overrides:?}: {message}");
    }
}

#[test]
fn a_group_without_clients_and_a_network_that_cannot_take_the_data_are_refused() {
    let load = |clients: &str| {
        let config = config("feddf", &[clients]);
        let method = config.method.build().unwrap();
        fedproj_core::Experiment::load(config, method.as_ref(), None).unwrap_err()
    };
    let error = load("model.clients=[{name='mlp', share=0.9}, {name='cnn', share=0.1}]");
    assert!(error.is_usage() && error.to_string().contains("none of the 4 clients"), "{error}");
    let error = load("model.clients=[{name='mlp', share=0.5}, {name='bert-tiny', share=0.5}]");
    assert!(matches!(error, Error::Config(_)), "{error}");
}

#[test]
fn groups_train_within_one_process() {
    let simulation = simulation(config("feddf", &[TWO]), 1);
    drop(simulation);
    let config = config("feddf", &[TWO]);
    let method = config.method.build().unwrap();
    let experiment = Arc::new(fedproj_core::Experiment::load(config, method.as_ref(), None).unwrap());
    let mut training = LocalTraining::new(&experiment, method.as_ref()).unwrap();
    let error = training.run(method.as_ref(), &Arc::default(), 0, &ClientState::new()).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("within one process only"), "{error}");
    let other = Simulation::resume(
        fedproj_core::Experiment::load(small::config("feddf", &[TWO]), method.as_ref(), None).unwrap(),
        small::config("feddf", &[]).method.build().unwrap(),
        1,
        fedproj_core::ServerState { weights: experiment.weights.clone(), ..Default::default() },
        ClientStates::new(),
    );
    assert!(other.unwrap_err().to_string().contains("1 groups of clients does not fit 2"));
}
