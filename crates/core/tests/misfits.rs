//! Messages of a peer that is broken or hostile, for every method: what is missing or of another length is an error on either
//! side. It never panics, and it never ends a sum early without a word.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod small;

use fedproj_core::methods::CATALOGUE;
use fedproj_core::{
    ClientResult, ClientState, ClientStates, Coordinator, Download, Error, Experiment, LocalTraining, Opening,
    ServerState, Targets,
};
use std::sync::Arc;

/// Methods with settings under which they keep or send more.
const MORE: &[(&str, &[&str])] = &[
    ("fedproj", &["method.fedproj.correction.alpha=0.1", "method.fedproj.memory.feature_weight=0.1"]),
    ("fedproj", &["method.fedproj.averages={teacher=0.5, memory=0.5}", "method.fedproj.memory.feature_weight=0.1"]),
    ("fedproj", &["method.fedproj.projection={rule='sgp', warmup=0}"]),
    ("feddyn", &["method.feddyn.absent=true"]),
    ("fedavg", &["federation.average_evaluated=0.5", "federation.evaluate_clients=true", small::NORM]),
    ("fedavg", &["privacy={noise_multiplier=1.0, quantile=0.5}"]),
];

/// A server in its third round, with the results of its clients.
struct Round {
    server: Coordinator,
    training: LocalTraining,
    opening: Opening,
    states: ClientStates,
    results: Vec<ClientResult>,
}

fn experiment(method: &str, settings: &[&str]) -> (Experiment, Box<dyn fedproj_core::Method>) {
    let config = small::config(method, &[small::settings_of(method), settings].concat());
    let built = config.method.build().unwrap();
    (Experiment::load(config, built.as_ref(), None).unwrap(), built)
}

fn third_round(method: &str, settings: &[&str]) -> Round {
    let (experiment, built) = experiment(method, settings);
    let mut server = Coordinator::new(experiment, built, 1).unwrap();
    let mut training = LocalTraining::new(server.experiment(), server.method()).unwrap();
    let mut states = ClientStates::new();
    loop {
        let opening = server.open().unwrap();
        let given: Vec<_> = opening.cohort.iter().map(|c| (*c, states.get(c).cloned().unwrap_or_default())).collect();
        let given: Vec<_> = given.iter().map(|(client, state)| (*client, state)).collect();
        let results = training.run_many(server.method(), &opening.download, &given).unwrap();
        if opening.download.round == 2 {
            return Round { server, training, opening, states, results };
        }
        states.extend(results.iter().map(|result| (result.client, result.state.clone())));
        server.close(&opening, &results, 0.0).unwrap();
    }
}

/// A message with each of its vectors cut to three values, and to none.
fn cut<T: Clone>(message: &T, vectors: impl Fn(&mut T) -> Vec<&mut Vec<f32>>) -> Vec<T> {
    let n = vectors(&mut message.clone()).len();
    let mut all = Vec::new();
    for (at, len) in (0..n).flat_map(|at| [(at, 0), (at, 3)]) {
        let mut spoilt = message.clone();
        let vector = vectors(&mut spoilt).swap_remove(at);
        if vector.len() > len {
            vector.truncate(len);
            all.push(spoilt);
        }
    }
    all
}

fn of_targets(targets: &mut Arc<Targets>) -> [&mut Vec<f32>; 2] {
    let Targets { logits, features } = Arc::make_mut(targets);
    [logits, features]
}

fn of_download(download: &mut Download) -> Vec<&mut Vec<f32>> {
    let Download { weights, buffers, vectors, memory, personal, .. } = download;
    let memory = memory.iter_mut().flat_map(|(_, targets)| of_targets(targets));
    [weights, buffers].into_iter().chain(vectors.values_mut()).chain(personal.values_mut()).chain(memory).collect()
}

fn of_result(result: &mut ClientResult) -> Vec<&mut Vec<f32>> {
    [&mut result.weights, &mut result.buffers].into_iter().chain(result.uploads.values_mut()).collect()
}

/// An averaged teacher, targets of the memory and a model to evaluate may be missing: the round makes new ones.
fn of_state(state: &mut ServerState) -> Vec<&mut Vec<f32>> {
    let ServerState { weights, buffers, vectors, evaluated, .. } = state;
    let evaluated = evaluated.iter_mut().flat_map(|(weights, buffers)| [weights, buffers]);
    let own = vectors.iter_mut().filter(|(name, _)| !name.starts_with("teacher.")).map(|(_, v)| v);
    [weights, buffers].into_iter().chain(own).chain(evaluated).collect()
}

fn check(method: &str, settings: &[&str]) -> usize {
    let Round { mut server, mut training, opening, states, results } = third_round(method, settings);
    let (client, before) = (opening.cohort[0], server.state().clone());
    let (what, mut n) = (format!("{method} {settings:?}"), 0);
    let mut fails = |error: Option<Error>| {
        n += 1;
        let error = error.unwrap_or_else(|| panic!("{what}: case {n} is taken as it is"));
        assert!(!error.is_usage(), "the peer's fault, not the user's: {error}");
    };
    let kept = states.get(&client).cloned().unwrap_or_default();
    for download in cut(&*opening.download, of_download) {
        fails(training.run(server.method(), &Arc::new(download), client, &kept).err());
    }
    for kept in cut(&kept, |kept: &mut ClientState| kept.values_mut().collect()) {
        fails(training.run(server.method(), &opening.download, client, &kept).err());
    }
    let mut spoilt = cut(&results[0], of_result);
    spoilt.push(ClientResult { client: 4, ..results[0].clone() });
    spoilt.push(ClientResult { n_samples: usize::MAX, ..results[0].clone() });
    spoilt.extend(results[0].uploads.keys().map(|name| {
        let mut lacking = results[0].clone();
        lacking.uploads.remove(name);
        lacking
    }));
    for result in spoilt {
        let mut all = results.clone();
        all[0] = result;
        fails(server.close(&opening, &all, 0.0).err());
    }
    if !server.experiment().config.privacy.is_on() {
        fails(server.close(&opening, &Vec::<ClientResult>::new(), 0.0).err());
    }
    assert!(*server.state() == before, "{what}: nothing is lost");
    let resume = |state| {
        let (experiment, built) = experiment(method, settings);
        Coordinator::resume(experiment, built, 1, state)
    };
    let mut spoilt = cut(&before, of_state);
    spoilt.push(ServerState { n_rounds_done: u32::MAX, ..before.clone() });
    spoilt.push(ServerState {
        targets: Some(Arc::new(Targets { logits: vec![1.0; 3], features: vec![] })),
        ..before.clone()
    });
    for state in spoilt {
        fails(resume(state).err());
    }
    // The whole messages work.
    assert!(*resume(before.clone()).unwrap().state() == before);
    server.close(&opening, &results, 0.0).unwrap();
    n
}

#[test]
fn whatever_is_missing_or_short_is_an_error_for_every_method() {
    let all: usize = CATALOGUE.iter().map(|(method, _)| check(method, &[])).sum();
    let more: usize = MORE.iter().map(|(method, settings)| check(method, settings)).sum();
    assert!(all > 12 * CATALOGUE.len() && more > 12 * MORE.len(), "{all} and {more} cases");
}
