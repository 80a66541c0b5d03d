//! A server against attackers and broken software: enrolled nodes that send nonsense. The server is a real one on loopback;
//! the attacker is this test.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod scene;

use fedproj_net::node::Home;
use fedproj_net::server::journal::Event;
use fedproj_net::wire::{Accepted, Blob, Contribution, Decline, Store, VerdictKind, encode_f32};
use scene::{Http, Scene, hand_in, reason, task_of};
use std::path::Path;
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_from_enrolled_nodes_does_not_count_and_the_run_continues() {
    // One honest client of eight, and a quorum of one. Each attacker spoils its own contribution only.
    let scene = Scene::new(8, &["federation.rounds=1"], |server| {
        (server.quorum, server.norm_max, server.samples_max) = (0.1, 100.0, 1000);
    })
    .await;
    let n = 64 * 8 + 8 + 8 * 10 + 10;
    let with = |at: usize, value: f32| {
        let mut weights = vec![0.01; n];
        weights[at] = value;
        weights
    };
    let spoilt = [
        (with(n - 1, f32::NAN), "value NaN"),
        (with(0, f32::NEG_INFINITY), "value -inf"),
        (with(3, 3e38), "finite values up to"),
        (vec![50.0; n], "norm_max"),
        (vec![0.01; n - 1], "values of 4 bytes"),
    ];
    for (client, (weights, expected)) in spoilt.iter().enumerate() {
        let link = scene.attacker(client as u32);
        let task = task_of(&link).await;
        let (contribution, store) = scene.contribution(&format!("out{client}"), &task, weights);
        let told = reason(hand_in(&link, &contribution, &store).await);
        assert!(told.contains(expected), "{told}");
        // A rejection holds for the whole round.
        assert!(reason(hand_in(&link, &contribution, &store).await).contains("does not wait for"));
    }
    let link = scene.attacker(5);
    let task = task_of(&link).await;
    let (honest, store) = scene.contribution("five", &task, &vec![0.01; n]);
    for (case, expected) in [
        (Contribution { client: 7, ..honest.clone() }, "stands for client 5"),
        (Contribution { round: 3, ..honest.clone() }, "round 3 is not open"),
        (Contribution { run: "../../x".into(), ..honest.clone() }, "is not open"),
    ] {
        assert!(reason(hand_in(&link, &case, &store).await).contains(expected), "{expected}");
    }
    // Bytes that were not announced, or that leave a gap, are rejected.
    let announced = honest.parts[0].blob.clone();
    assert!(link.upload(&announced, 0, &store).await.is_err(), "nothing was announced yet");
    assert!(matches!(link.send(&honest).await.unwrap().kind, Some(VerdictKind::Missing(_))));
    let other = store.put(b"other bytes").unwrap();
    assert!(link.upload(&other, 0, &store).await.is_err());
    assert!(link.upload(&announced, 8, &store).await.is_err(), "a gap");
    // A claim beyond the server's limit.
    let claim = Contribution { n_samples: 1_000_000_000, ..honest.clone() };
    assert!(reason(hand_in(&link, &claim, &store).await).contains("1000000000 samples"));
    // A hash that does not match the bytes.
    let liar = scene.attacker(6);
    let mut lie = Contribution { client: 6, ..honest.clone() };
    lie.parts[0].blob.hash = vec![7; 32];
    let lying_store = scene.contribution("liar", &task, &[]).1;
    std::fs::write(scene.dir.path().join("liar").join("07".repeat(32)), encode_f32(&vec![0.02; n])).unwrap();
    assert!(matches!(liar.send(&lie).await.unwrap().kind, Some(VerdictKind::Missing(_))));
    let told = liar.upload(&lie.parts[0].blob, 0, &lying_store).await.unwrap_err().to_string();
    assert!(told.contains("do not match its hash"), "{told}");
    liar.send(&Decline { run: lie.run.clone(), round: 0, reason: "found out".into() }).await.unwrap();

    scene.honest(7).await.unwrap().unwrap();
    let events = scene.journal();
    let counted = events.iter().find_map(|e| match e {
        Event::RoundClosed { counted, .. } => Some(counted.clone()),
        _ => None,
    });
    assert_eq!(counted, Some(vec![7]));
    assert_eq!(events.iter().filter(|e| matches!(e, Event::Rejected { .. })).count(), 6);
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_and_replayed_contributions_count_once() {
    let scene = Scene::new(2, &["federation.rounds=2"], |_| ()).await;
    let link = scene.attacker(0);
    let task = task_of(&link).await;
    let n = (task.weights.len / 4) as usize;
    let (first, store) = scene.contribution("a", &task, &vec![0.01; n]);
    assert!(matches!(hand_in(&link, &first, &store).await, VerdictKind::Accepted(_)));
    // The same again, many at a time: the same receipt. Another one: rejected.
    let again: Vec<_> = (0..8)
        .map(|_| {
            let (link, first) = (link.clone(), first.clone());
            tokio::spawn(async move { link.send(&first).await.unwrap().kind.unwrap() })
        })
        .collect();
    for answer in again {
        assert_eq!(answer.await.unwrap(), VerdictKind::Accepted(Accepted { id: first.id() }));
    }
    let (second, store) = scene.contribution("b", &task, &vec![0.02; n]);
    assert!(reason(hand_in(&link, &second, &store).await).contains("has contributed"));
    let honest = scene.honest(1);
    // In the next round the old contribution gets its old receipt and nothing more.
    let next = task_of(&link).await;
    assert_eq!(next.round, 1);
    assert!(matches!(hand_in(&link, &first, &store).await, VerdictKind::Accepted(_)));
    assert!(reason(hand_in(&link, &second, &store).await).contains("round 0 is not open"));
    let (last, store) = scene.contribution("c", &next, &vec![0.03; n]);
    assert!(matches!(hand_in(&link, &last, &store).await, VerdictKind::Accepted(_)));
    honest.await.unwrap().unwrap();
    let accepted = scene.journal().iter().filter(|e| matches!(e, Event::Accepted(_))).count();
    assert_eq!(accepted, 4);
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_round_that_needs_clients_that_dropped_out_asks_them_again() {
    // Both clients are needed. One declines, then sends nonsense, then a valid contribution.
    let scene = Scene::new(2, &["federation.rounds=1"], |server| server.quorum = 1.0).await;
    let honest = scene.honest(1);
    let link = scene.attacker(0);
    let task = task_of(&link).await;
    link.send(&Decline { run: task.run.clone(), round: 0, reason: "busy".into() }).await.unwrap();
    let task = task_of(&link).await;
    let n = (task.weights.len / 4) as usize;
    let (spoilt, store) = scene.contribution("a", &task, &vec![f32::NAN; n]);
    assert!(reason(hand_in(&link, &spoilt, &store).await).contains("NaN"));
    let task = task_of(&link).await;
    let (whole, store) = scene.contribution("b", &task, &vec![0.01; n]);
    assert!(matches!(hand_in(&link, &whole, &store).await, VerdictKind::Accepted(_)));
    honest.await.unwrap().unwrap();
    let closed = scene.journal().into_iter().find_map(|e| match e {
        Event::RoundClosed { counted, .. } => Some(counted),
        _ => None,
    });
    assert_eq!(closed, Some(vec![0, 1]));
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_unordered_and_late_pieces_change_nothing() {
    let scene = Scene::new(2, &["federation.rounds=2"], |_| ()).await;
    let link = scene.attacker(0);
    let task = task_of(&link).await;
    let n = (task.weights.len / 4) as usize;
    let (contribution, store) = scene.contribution("a", &task, &vec![0.01; n]);
    let blob = contribution.parts[0].blob.clone();
    let bytes = store.get(&blob).unwrap();
    let client = Http::new(Home::new(&scene.home(0)).tls().unwrap());
    let put = async |from: usize, to: usize| {
        let address = format!("{}/v1/blob/{}/{from}", scene.address(), blob.hex());
        client.send("PUT", &address, bytes[from..to].to_vec()).await.unwrap().status().as_u16()
    };
    let missing = async || match link.send(&contribution).await.unwrap().kind {
        Some(VerdictKind::Missing(missing)) => missing.have[0].len as usize,
        other => panic!("{other:?}"),
    };
    assert_eq!(missing().await, 0);
    // The last piece first, then the first one twice, then an overlapping one: only what extends the blob counts.
    assert_eq!((put(bytes.len() - 40, bytes.len()).await, missing().await), (200, 0));
    assert_eq!((put(0, 100).await, put(0, 100).await, missing().await), (200, 200, 100));
    assert_eq!((put(60, 300).await, missing().await), (200, 300));
    // The same pieces at the same time, as in a repeated request on another connection.
    tokio::join!(put(300, 900), put(300, 900), put(600, 1000), put(200, 700));
    let have = missing().await;
    assert!((700..=1000).contains(&have), "{have}");
    assert_eq!(put(have, bytes.len()).await, 200);
    assert!(matches!(hand_in(&link, &contribution, &store).await, VerdictKind::Accepted(_)));
    // After the receipt: pieces, a decline, the same contribution with another claim.
    assert_eq!(put(0, 100).await, 400);
    link.send(&Decline { run: task.run.clone(), round: 0, reason: "too late".into() }).await.unwrap();
    let other = Contribution { n_samples: 11, ..contribution.clone() };
    assert!(reason(hand_in(&link, &other, &store).await).contains("has contributed"));
    let honest = scene.honest(1);
    // Pieces of the last round do not belong to the next.
    assert_eq!(task_of(&link).await.round, 1);
    assert_eq!(put(0, 100).await, 400);
    let events = scene.journal();
    assert!(!events.iter().any(|e| matches!(e, Event::Declined { .. } | Event::Rejected { .. })), "{events:?}");
    let accepted = |e: &&Event| matches!(e, Event::Accepted(a) if a.round == 0 && a.client == 0);
    assert_eq!(events.iter().filter(accepted).count(), 1);
    honest.abort();
    scene.serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn while_a_contribution_waits_for_the_disk_others_are_answered() {
    let scene = Scene::new(2, &["federation.rounds=1"], |_| ()).await;
    let (link, other) = (scene.attacker(0), scene.attacker(1));
    let task = task_of(&link).await;
    let n = (task.weights.len / 4) as usize;
    let (contribution, store) = scene.contribution("a", &task, &vec![0.01; n]);
    assert!(matches!(link.send(&contribution).await.unwrap().kind, Some(VerdictKind::Missing(_))));
    link.upload(&contribution.parts[0].blob, 0, &store).await.unwrap();
    // Holding the journal's lock acts like a slow disk.
    let journal = std::fs::File::open(scene.server_dir().join("journal.jsonl")).unwrap();
    journal.lock().unwrap();
    let waiting = tokio::spawn(async move { link.send(&contribution).await.unwrap().kind.unwrap() });
    tokio::time::sleep(Duration::from_millis(300)).await;
    for _ in 0..20 {
        let answered = tokio::time::timeout(Duration::from_secs(20), task_of(&other)).await;
        assert_eq!(answered.expect("a request for work is answered").round, 0);
    }
    assert!(!waiting.is_finished());
    journal.unlock().unwrap();
    assert!(matches!(waiting.await.unwrap(), VerdictKind::Accepted(_)));
    scene.serving.abort();
}

/// A path from a peer never becomes a file name.
#[test]
fn only_hashes_become_file_names() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("in")).unwrap();
    std::fs::write(dir.path().join("secret"), "x").unwrap();
    assert!(Blob { hash: b"../secret".to_vec(), len: 1 }.check().is_err());
    assert!(store.read(Path::new("../secret").as_os_str().as_encoded_bytes(), 0, 10).unwrap().is_none());
}
