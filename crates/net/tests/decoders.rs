//! Runs the fuzz targets on random bytes and on damaged messages; `fuzz/` runs them under libFuzzer.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod decode;

use fedproj_core::LocalStats;
use fedproj_net::Policy;
use fedproj_net::identity::{Token, certificate_from, expiry_of};
use fedproj_net::node::node_request;
use fedproj_net::secure::{Party, Roster};
use fedproj_net::server::journal::Tail;
use fedproj_net::server::{Authority, key_of_request};
use fedproj_net::wire::{
    Blob, Contribution, NamedBlob, RosterMessage, Task, TaskMemory, Work, WorkKind, decode, decode_public,
    encode_public,
};
use proptest::prelude::*;
use prost::Message;
use std::sync::LazyLock;

static SEEDS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(seeds);

/// Whole inputs of every kind, to be damaged.
fn seeds() -> Vec<Vec<u8>> {
    let blob = |n: u8| Blob { hash: vec![n; 32], len: u64::from(n) * 4 };
    let named = |name: &str| NamedBlob { name: name.into(), blob: blob(3) };
    let memory = TaskMemory { indices: blob(1), logits: blob(2), features: blob(0) };
    let task = Task {
        run: "0123456789abcdef".into(),
        round: 7,
        client: 3,
        config: blob(9),
        public: Some(blob(8)),
        weights: blob(200),
        buffers: blob(1),
        vectors: vec![named("control_variate")],
        memory: Some(memory),
        outputs: 2,
        secure_clients: 5,
        noise_clients: 4,
    };
    let stats = LocalStats { loss: 0.5, cosine: Some(-0.25), ..LocalStats::default() };
    let parts = vec![named("weights"), named("buffers")];
    let contribution = Contribution { run: "r".into(), round: 1, client: 2, n_samples: 10, n_steps: 4, stats, parts };
    let shape = fedproj_data::Shape::Vector { features: 2 };
    let samples = fedproj_data::Samples::F32(vec![1.0; 6]);
    let names = vec!["a".into(), "b".into()];
    let public = fedproj_data::Dataset::new("x", shape, samples, Some(vec![0, 1, 1]), names).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let certificate =
        Authority::open(&folder.path().join("federation")).unwrap().sign(&node_request().unwrap().1, "n", 10).unwrap();
    vec![
        certificate_from(&certificate).unwrap().to_vec(),
        task.encode_to_vec(),
        Work::from(WorkKind::Train(Box::new(task))).encode_to_vec(),
        contribution.encode_to_vec(),
        encode_public(&public),
        Token::new([1; 32]).unwrap().to_string().into_bytes(),
        node_request().unwrap().1,
        br#"{"seq":0,"time":"t","previous":"0000000000000000000000000000000000000000000000000000000000000000","event":"revoked","node":"a"}"#.to_vec(),
        b"epochs_max = 3\nmethods = ['fedavg']\n".to_vec(),
        roster(),
    ]
}

/// A roster of three nodes as one of them gets it.
fn roster() -> Vec<u8> {
    let member = |client: u32| {
        Party::new(client, [7; 32]).member("r", 0, vec![5; 32], vec![client as u8; 300], &|_| Ok(vec![1; 70])).unwrap()
    };
    Roster::new("r", 0, (0..3).map(member).collect(), 0.7).unwrap().for_node(1).encode_to_vec()
}

/// Otherwise damaged ones would not reach the decoders' ends.
#[test]
fn undamaged_inputs_are_values() {
    let [certificate, task, work, contribution, public, token, request, line, policy, roster] = &SEEDS[..] else {
        panic!("{} seeds", SEEDS.len())
    };
    expiry_of(certificate).unwrap();
    decode::<Task>(task).unwrap();
    decode::<Work>(work).unwrap();
    let contribution = decode::<Contribution>(contribution).unwrap();
    let json = serde_json::to_string(&contribution).unwrap();
    assert_eq!(serde_json::from_str::<Contribution>(&json).unwrap(), contribution);
    decode_public(public).unwrap();
    Token::parse(std::str::from_utf8(token).unwrap()).unwrap();
    key_of_request(request).unwrap();
    Tail::default().check(line).unwrap();
    toml::from_str::<Policy>(std::str::from_utf8(policy).unwrap()).unwrap();
    assert_eq!(decode::<RosterMessage>(roster).unwrap().members.len(), 3);
}

fn all(bytes: &[u8]) {
    decode::messages(bytes);
    decode::blobs(bytes);
    decode::disk(bytes);
    decode::secure(bytes);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_are_values_or_errors(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        all(&bytes);
    }

    #[test]
    fn damaged_inputs_are_values_or_errors(
        seed in 0usize..10,
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        cut in any::<prop::sample::Index>(),
        tail in proptest::collection::vec(any::<u8>(), 0..20),
        keeps_all in any::<bool>(),
    ) {
        let mut bytes = SEEDS[seed].clone();
        for (at, to) in flips {
            let at = at.index(bytes.len());
            bytes[at] = to;
        }
        if !keeps_all {
            bytes.truncate(cut.index(bytes.len()));
            bytes.extend(tail);
        }
        all(&bytes);
    }
}
