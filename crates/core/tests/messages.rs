//! Messages between the halves of a round as bytes: they come back bit for bit, and no bytes make a reader panic.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod small;

use fedproj_core::{
    ClientResult, ClientState, Coordinator, Download, Error, Experiment, LocalTraining, Opening, Partial, ServerState,
    client_state_from_bytes, client_state_to_bytes,
};
use proptest::prelude::*;
use std::sync::{Arc, LazyLock};

/// A server in its second round of FedProj with everything on: memory, features, corrections.
fn second_round() -> (Coordinator, Opening, LocalTraining, ClientResult) {
    let all =
        ["federation.sum=fixed", "method.fedproj.correction.alpha=0.1", "method.fedproj.memory.feature_weight=0.1"];
    let config = small::config("fedproj", &[&all[..], &["method.fedproj.projection.warmup=0"]].concat());
    let method = config.method.build().unwrap();
    let mut server = Coordinator::new(Experiment::load(config, method.as_ref(), None).unwrap(), method, 1).unwrap();
    let mut training = LocalTraining::new(server.experiment(), server.method()).unwrap();
    let opening = server.open().unwrap();
    let train = |client: u32| training.run(server.method(), &opening.download, client, &ClientState::new()).unwrap();
    let results: Vec<ClientResult> = server.experiment().cohort(0).into_iter().map(train).collect();
    server.close(&opening, &results, 0.0).unwrap();
    let opening = server.open().unwrap();
    let result = results.into_iter().next().unwrap();
    (server, opening, training, result)
}

/// All messages as bytes.
static MESSAGES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let (server, opening, mut training, result) = second_round();
    let clients = [(result.client, &result.state)];
    let sums = training.run_summed(server.method(), &opening.download, &clients).unwrap();
    vec![
        opening.download.to_bytes().unwrap(),
        result.to_bytes().unwrap(),
        client_state_to_bytes(&result.state).unwrap(),
        server.state().to_bytes().unwrap(),
        sums.to_bytes().unwrap(),
    ]
});

/// Reads bytes as every message. The readers' errors name the message.
fn read_all(bytes: &[u8]) -> usize {
    let means = second_means();
    let all = [
        Download::from_bytes(bytes).map(drop),
        ClientResult::from_bytes(bytes).map(drop),
        client_state_from_bytes(bytes).map(drop),
        ServerState::from_bytes(bytes).map(drop),
        Partial::from_bytes(bytes, &means).map(drop),
    ];
    all.into_iter()
        .filter(|read| read.as_ref().map_err(|e| assert!(matches!(e, Error::Message { .. }))).is_ok())
        .count()
}

fn second_means() -> Vec<fedproj_core::Mean> {
    static MEANS: LazyLock<Vec<fedproj_core::Mean>> = LazyLock::new(|| second_round().0.means().unwrap());
    MEANS.clone()
}

#[test]
fn messages_come_back_bit_for_bit() {
    let (server, opening, mut training, result) = second_round();
    let download = Download::from_bytes(&MESSAGES[0]).unwrap();
    assert!(download == *opening.download);
    assert!(
        download.memory.as_ref().is_some_and(|(indices, targets)| indices.len() == 40 && !targets.features.is_empty())
    );
    let back = ClientResult::from_bytes(&MESSAGES[1]).unwrap();
    // Seconds of training differ.
    assert_eq!(ClientResult { stats: result.stats.clone(), ..back }, result);
    assert_eq!(client_state_from_bytes(&MESSAGES[2]).unwrap(), result.state);
    assert!(ServerState::from_bytes(&MESSAGES[3]).unwrap() == *server.state());
    assert!(!result.state.is_empty() && server.state().evaluated.is_some());
    let clients = [(result.client, &result.state)];
    let sums = training.run_summed(server.method(), &Arc::new(download), &clients).unwrap();
    assert_eq!(Partial::from_bytes(&sums.to_bytes().unwrap(), &server.means().unwrap()).unwrap(), sums);
    assert!(MESSAGES.iter().all(|bytes| read_all(bytes) == 1), "each is one message only");
}

#[test]
fn a_cut_or_longer_message_and_another_version_are_errors() {
    for bytes in MESSAGES.iter() {
        for n in (0..bytes.len().min(600)).chain([bytes.len() - 5, bytes.len() - 1]) {
            assert_eq!(read_all(&bytes[..n]), 0, "cut at {n}");
        }
        assert_eq!(read_all(&[&bytes[..], &[0]].concat()), 0);
        let mut other = bytes.clone();
        other[8] += 1;
        assert_eq!(read_all(&other), 0);
    }
    let mut other = MESSAGES[0].clone();
    other[8] += 1;
    let error = Download::from_bytes(&other).unwrap_err().to_string();
    assert!(error.contains("a download") && error.contains("another version") && error.contains("hint"), "{error}");
}

proptest! {
    #[test]
    fn random_and_damaged_bytes_are_values_or_errors(
        random in prop::collection::vec(any::<u8>(), 0..300),
        which in 0..5usize,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        header in any::<u64>(),
    ) {
        read_all(&random);
        let mut bytes = MESSAGES[which].clone();
        // Most of the damage is done to the header: the rest are numbers.
        let n = bytes.len().min(500);
        for (at, value) in &damage {
            bytes[at.index(n)] = *value;
        }
        read_all(&bytes);
        bytes[12..20].copy_from_slice(&header.to_le_bytes());
        read_all(&bytes);
    }
}

#[test]
fn vectors_of_another_length_are_errors_on_either_side() {
    let (mut server, opening, mut training, result) = second_round();
    let mut short = |change: fn(&mut Download)| {
        let mut download = (*opening.download).clone();
        change(&mut download);
        let error = training.run(server.method(), &Arc::new(download), 0, &ClientState::new()).unwrap_err();
        assert!(!error.is_usage(), "the peer's fault, not the user's: {error}");
        error.to_string()
    };
    assert!(short(|d| d.weights.truncate(5)).contains("the global weights"));
    assert!(short(|d| d.buffers.push(0.0)).contains("the global buffers"));
    assert!(short(|d| drop(d.vectors.insert("x".into(), vec![1.0]))).contains("a vector of the server"));
    assert!(short(|d| d.memory.as_mut().unwrap().0[0] = 80).contains("public sample 80"));
    assert!(
        short(|d| d.memory.as_mut().unwrap().1 =
            Arc::new(fedproj_core::Targets { logits: vec![0.0; 7], ..Default::default() }))
        .contains("the memory's logits")
    );
    let kept: ClientState = [("h".to_owned(), vec![1.0; 3])].into();
    let error = training.run(server.method(), &opening.download, 0, &kept).unwrap_err().to_string();
    assert!(error.contains("a vector that the client keeps: 3 values"), "{error}");
    let error = training.run(server.method(), &opening.download, 4, &ClientState::new()).unwrap_err();
    assert!(error.to_string().contains("no client 4") && !error.is_usage(), "{error}");
    let before = server.state().clone();
    for n in [0, 3] {
        let short = ClientResult { weights: vec![0.0; n], ..result.clone() };
        let error = server.close(&opening, &vec![result.clone(), short], 0.0).unwrap_err().to_string();
        assert!(error.contains(&format!("client {}: a client's vector: {n} values", result.client)), "{error}");
        assert!(*server.state() == before, "nothing is lost");
    }
}

#[test]
fn training_stops_within_a_round_and_begins_again() {
    let (server, opening, mut training, result) = second_round();
    let expected = training.run(server.method(), &opening.download, result.client, &result.state).unwrap();
    let stop = training.stop().clone();
    stop.set(true);
    let stopped = training.run(server.method(), &opening.download, result.client, &result.state);
    assert!(matches!(stopped, Err(Error::Cancelled)), "{stopped:?}");
    stop.set(false);
    let again = training.run(server.method(), &opening.download, result.client, &result.state).unwrap();
    assert_eq!(again.weights, expected.weights);

    let endless = small::config("fedavg", &["local.epochs=1000000"]);
    let mut simulation = small::simulation(endless, 2);
    let (stop, before) = (simulation.stop().clone(), simulation.state().clone());
    let stopped = std::thread::scope(|scope| {
        let round = scope.spawn(|| simulation.round(&|_| ()));
        std::thread::sleep(std::time::Duration::from_millis(50));
        stop.set(true);
        round.join().unwrap()
    });
    assert!(matches!(stopped, Err(Error::Cancelled)), "{stopped:?}");
    assert!(*simulation.state() == before);
}
