//! A member can neither stop a federation nor own its model. The server is a real one on loopback; the attacker is this
//! test, with the certificate of an enrolled node.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod scene;

use fedproj_core::{ClientState, Config, Experiment, VerifyPart};
use fedproj_net::Link;
use fedproj_net::node::Home;
use fedproj_net::server::journal::{Event, Journal};
use fedproj_net::server::{Ensemble, Registry};
use fedproj_net::wire::{Contribution, Decline, Heartbeat, Store, Task, VerdictKind, decode_f32};
use scene::{Scene, hand_in, named, reason, task_of};
use std::path::Path;
use std::time::Duration;

/// No case takes longer, even on a loaded machine, unless the federation has stopped.
const PATIENCE: Duration = Duration::from_mins(2);

/// Waits for the end of the run; returns its last accuracy. It does not wait until the attacker knows of it.
async fn ends_well(scene: &mut Scene) -> f64 {
    let end = async {
        while !scene.status.view().done {
            if scene.serving.is_finished() {
                (&mut scene.serving).await.unwrap().unwrap();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, end).await.expect("the run ends");
    scene.status.view().rounds.last().unwrap().accuracy.unwrap()
}

/// The simulator repeats the run, bit for bit.
fn repeats(scene: &Scene) {
    let runs = std::fs::read_dir(scene.server_dir().join("runs")).unwrap();
    for run in runs {
        fedproj_core::verify(&run.unwrap().path(), None, 1, VerifyPart::default(), &|_| ()).unwrap();
    }
}

/// The weights that a task starts from.
async fn weights_of(link: &Link, task: &Task, folder: &Path) -> Vec<f32> {
    let store = Store::open(folder).unwrap();
    link.fetch(&task.weights, &store).await.unwrap();
    decode_f32(&store.get(&task.weights).unwrap(), (task.weights.len / 4) as usize, "weights").unwrap()
}

fn experiment(settings: &[&str]) -> Experiment {
    let settings: Vec<String> = settings.iter().map(|s| (*s).to_owned()).collect();
    let config = Config::from_layers(None, &settings).unwrap();
    let method = config.method.build().unwrap();
    Experiment::load(config, method.as_ref(), None).unwrap()
}

fn events(scene: &Scene, is_meant: impl Fn(&Event) -> bool) -> Vec<Event> {
    scene.journal().into_iter().filter(is_meant).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_would_break_fusion_is_rejected_before_it_counts() {
    let settings = ["federation.rounds=1", "method.name=feddf", "model.name=resnet8-thin"];
    let mut scene = Scene::new(2, &settings, |_| ()).await;
    // Harmless numbers each: statistics of zero, and scales of 200 in every batch-norm.
    let experiment = experiment(&settings);
    let (graph, mut weights) = (&experiment.graph, experiment.weights.clone());
    let norms: Vec<&str> = graph.buffers().spans().iter().filter_map(|s| s.name.strip_suffix(".running_var")).collect();
    assert!(norms.len() > 4, "{norms:?}");
    for span in graph.params().spans().iter().filter(|s| norms.iter().any(|n| s.name == format!("{n}.weight"))) {
        weights[span.range()].fill(200.0);
    }
    let link = scene.attacker(0);
    let task = task_of(&link).await;
    let (mut hostile, store) = scene.contribution("out", &task, &weights);
    hostile.parts[1] = named(&store, "buffers", &vec![0.0; experiment.buffers.len()]);
    let told = reason(hand_in(&link, &hostile, &store).await);
    assert!(told.contains("the model's outputs contain"), "{told}");
    let honest = scene.honest(1);
    ends_well(&mut scene).await;
    honest.await.unwrap().unwrap();
    repeats(&scene);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_round_whose_fusion_fails_is_fused_without_the_contribution_to_blame() {
    // The clients send their logits. Divided by this temperature, logits of a million leave the finite numbers.
    logits_of_a_million_are_left_out("method.feddf.distill.temperature=1e-34", "not finite").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_contribution_out_of_the_range_of_sums_is_left_out() {
    logits_of_a_million_are_left_out("federation.sum=fixed", "does not fit federation.sum").await;
}

async fn logits_of_a_million_are_left_out(setting: &str, why: &str) {
    let settings = ["federation.rounds=2", "method.name=feddf", setting];
    let mut scene = Box::pin(Scene::new(3, &settings, |server| server.ensemble = Ensemble::Clients)).await;
    let honest: Vec<_> = (1..3).map(|client| scene.honest(client)).collect();
    for round in 0..2 {
        let link = scene.attacker(0);
        let task = task_of(&link).await;
        assert_eq!(task.round, round);
        let weights = weights_of(&link, &task, &scene.dir.path().join("fetched")).await;
        let (mut hostile, store) = scene.contribution(&format!("out{round}"), &task, &weights);
        let n_public = experiment(&settings).public.unwrap().n_samples();
        hostile.parts.push(named(&store, "logits", &vec![1e6; 10 * n_public]));
        assert!(matches!(hand_in(&link, &hostile, &store).await, VerdictKind::Accepted(_)));
    }
    ends_well(&mut scene).await;
    for node in honest {
        node.await.unwrap().unwrap();
    }
    let excluded = events(&scene, |e| matches!(e, Event::Excluded { .. }));
    assert_eq!(excluded.len(), 2);
    assert!(
        excluded.iter().all(|e| matches!(e, Event::Excluded { client: 0, node, reason, .. }
        if node == "n0" && reason.contains(why))),
        "{excluded:?}"
    );
    repeats(&scene);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_of_a_huge_norm_neither_moves_the_model_nor_stops_the_next_round() {
    let sgd = "local.optimizer={kind='sgd', lr=0.1}";
    let settings = ["federation.rounds=8", "federation.robust.clip_ratio=3.0", "local.epochs=10", sgd];
    let mut scene = Scene::new(4, &settings, |_| ()).await;
    let honest: Vec<_> = (1..4).map(|client| scene.honest(client)).collect();
    for round in 0..8 {
        let link = scene.attacker(0);
        let task = task_of(&link).await;
        let mut weights = weights_of(&link, &task, &scene.dir.path().join("fetched")).await;
        let pull = 9990.0 / (weights.len() as f32).sqrt();
        for w in &mut weights {
            *w -= pull;
        }
        let (hostile, store) = scene.contribution(&format!("out{round}"), &task, &weights);
        assert!(matches!(hand_in(&link, &hostile, &store).await, VerdictKind::Accepted(_)));
    }
    let accuracy = ends_well(&mut scene).await;
    for node in honest {
        node.await.unwrap().unwrap();
    }
    assert!(accuracy > 0.6, "{accuracy}");
    // An operator sees who pulled how hard.
    let done = events(&scene, |e| matches!(e, Event::RoundDone { .. }));
    assert!(!done.is_empty());
    for event in done {
        let Event::RoundDone { pulls, .. } = event else { unreachable!() };
        assert_eq!(pulls.len(), 4);
        assert!((pulls[0].norm - 9990.0).abs() < 1.0 && pulls[0].cosine > 0.99, "{pulls:?}");
        assert!(pulls[1..].iter().all(|pull| pull.norm < 10.0 && pull.cosine < 0.5), "{pulls:?}");
    }
    let shown = serde_json::to_value(scene.status.view()).unwrap();
    assert!(shown["rounds"][7]["pulls"][0]["norm"].as_f64().unwrap() > 9900.0, "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_always_declines_does_not_stop_the_others() {
    let mut scene = Scene::new(2, &["federation.rounds=2"], |_| ()).await;
    let (honest, link) = (scene.honest(1), scene.attacker(0));
    for round in 0..2 {
        let task = task_of(&link).await;
        link.send(&Decline { run: task.run, round, reason: "no".into() }).await.unwrap();
    }
    ends_well(&mut scene).await;
    honest.await.unwrap().unwrap();
    repeats(&scene);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_node_leaves_the_open_round() {
    // Every member is needed, and the round would wait for five minutes and longer.
    let mut scene = Scene::new(2, &["federation.rounds=2"], |server| server.quorum = 1.0).await;
    let (honest, link) = (scene.honest(1), scene.attacker(0));
    task_of(&link).await;
    Registry::open(&scene.server_dir()).unwrap().revoke("n0").unwrap();
    ends_well(&mut scene).await;
    honest.await.unwrap().unwrap();
    repeats(&scene);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_client_is_drawn_in_the_place_of_one_that_declines() {
    // One of three clients takes part in a round; it declines, and so does the next.
    let settings = ["federation.rounds=1", "federation.fraction=0.34"];
    let mut scene = Scene::new(3, &settings, |server| server.quorum = 1.0).await;
    let asked = |events: &[Event]| -> Vec<u32> {
        let of = |event: &Event| match event {
            Event::RoundOpened { asked, .. } => asked.clone(),
            Event::AskedInstead { clients, .. } => clients.clone(),
            _ => Vec::new(),
        };
        events.iter().flat_map(of).collect()
    };
    let wait_for = async |scene: &Scene, n: usize| loop {
        let asked = asked(&scene.journal());
        if asked.len() >= n {
            return asked;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let decline = async |scene: &Scene, client: u32| {
        let link = scene.attacker(client);
        let task = task_of(&link).await;
        link.send(&Decline { run: task.run, round: 0, reason: "no".into() }).await.unwrap();
    };
    let first = wait_for(&scene, 1).await[0];
    decline(&scene, first).await;
    let second = wait_for(&scene, 2).await[1];
    // A restarted server knows whom it asked, and asks them again.
    scene.restart(|_| ()).await;
    for client in 0..3 {
        scene.attacker(client).send(&Heartbeat::default()).await.unwrap();
    }
    decline(&scene, first).await;
    decline(&scene, second).await;
    let last = wait_for(&scene, 3).await[2];
    assert_eq!([first, second, last].into_iter().collect::<std::collections::BTreeSet<_>>().len(), 3);
    let honest = scene.honest(last);
    ends_well(&mut scene).await;
    honest.await.unwrap().unwrap();
    repeats(&scene);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_heartbeats_and_never_answers_costs_few_deadlines() {
    let mut scene = Scene::new(2, &["federation.rounds=8"], |server| server.deadline_s = 3.0).await;
    let (honest, link) = (scene.honest(1), scene.attacker(0));
    let beating = tokio::spawn(async move {
        loop {
            link.send(&Heartbeat { round: Some(0) }).await.unwrap();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    ends_well(&mut scene).await;
    beating.abort();
    honest.await.unwrap().unwrap();
    let waited: Vec<u32> = scene.status.view().rounds.iter().filter(|r| r.seconds > 3.0).map(|r| r.round).collect();
    assert_eq!(waited, [0, 3]);
    repeats(&scene);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_contribution_that_changes_on_the_servers_disk_is_found_and_asked_for_again() {
    let mut scene = Scene::new(2, &["federation.rounds=1"], |server| server.quorum = 1.0).await;
    let link = scene.attacker(0);
    let task = task_of(&link).await;
    let weights = vec![0.01; (task.weights.len / 4) as usize];
    let (contribution, store) = scene.contribution("out", &task, &weights);
    assert!(matches!(hand_in(&link, &contribution, &store).await, VerdictKind::Accepted(_)));
    let spool = scene.server_dir().join("spool").join(&task.run).join("0/0");
    let path = spool.join(contribution.parts[0].blob.hex());
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let honest = scene.honest(1);
    assert_eq!(task_of(&link).await.round, 0);
    let damaged = events(&scene, |e| matches!(e, Event::Damaged { client: 0, .. }));
    assert_eq!(damaged.len(), 1);
    assert!(matches!(hand_in(&link, &contribution, &store).await, VerdictKind::Accepted(_)));
    ends_well(&mut scene).await;
    honest.await.unwrap().unwrap();
    let closed = events(&scene, |e| matches!(e, Event::RoundClosed { .. }));
    assert!(matches!(closed.last(), Some(Event::RoundClosed { counted, .. }) if *counted == [0, 1]), "{closed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_round_whose_spool_is_gone_is_opened_again() {
    let mut scene = Scene::new(2, &["federation.rounds=1"], |server| server.quorum = 1.0).await;
    let link = scene.attacker(0);
    let task = task_of(&link).await;
    let weights = vec![0.01; (task.weights.len / 4) as usize];
    let (contribution, store) = scene.contribution("out", &task, &weights);
    assert!(matches!(hand_in(&link, &contribution, &store).await, VerdictKind::Accepted(_)));
    scene
        .restart(|dir| {
            std::fs::remove_dir_all(dir.join("spool")).unwrap();
            let closed = Event::RoundClosed { run: task.run.clone(), round: 0, counted: vec![0], late: vec![1] };
            Journal::open(dir, &mut |_| ()).unwrap().append(closed).unwrap();
        })
        .await;
    let link = scene.attacker(0);
    assert_eq!(task_of(&link).await.round, 0);
    let again = Contribution { stats: contribution.stats.clone(), ..contribution.clone() };
    assert!(matches!(hand_in(&link, &again, &store).await, VerdictKind::Accepted(_)));
    let honest = scene.honest(1);
    ends_well(&mut scene).await;
    honest.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_asked_again_sends_the_same_and_its_state_moves_once() {
    let settings = ["federation.rounds=3", "method.name=scaffold", "local.optimizer={kind='sgd', lr=0.05}"];
    let mut scene = Scene::new(2, &settings, |server| server.quorum = 1.0).await;
    let mut honest = vec![scene.honest(0)];
    let accepted = loop {
        match events(&scene, |e| matches!(e, Event::Accepted(_))).pop() {
            Some(Event::Accepted(accepted)) => break accepted,
            _ => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    let spool = scene.server_dir().join("spool").join(&accepted.run).join("0/0");
    std::fs::remove_file(spool.join(accepted.parts[0].blob.hex())).unwrap();
    honest.push(scene.honest(1));
    ends_well(&mut scene).await;
    for node in honest {
        node.await.unwrap().unwrap();
    }
    assert_eq!(events(&scene, |e| matches!(e, Event::Damaged { .. })).len(), 1);
    repeats(&scene);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_whose_disk_damages_its_task_and_its_contribution_fetches_and_trains_again() {
    let mut scene = Scene::new(2, &["federation.rounds=1"], |server| server.quorum = 1.0).await;
    let link = scene.attacker(0);
    let (task, home) = (task_of(&link).await, Home::new(&scene.home(0)));
    let weights = vec![0.01; (task.weights.len / 4) as usize];
    let (pending, _) = scene.contribution("out", &task, &weights);
    named(&home.outbox().unwrap(), "weights", &weights);
    home.set_pending(&task, &pending, &ClientState::new()).unwrap();
    link.fetch(&task.config, &home.cache().unwrap()).await.unwrap();
    for path in [format!("outbox/{}", pending.parts[0].blob.hex()), format!("cache/{}", task.config.hex())] {
        let path = scene.home(0).join(path);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[10] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    let honest: Vec<_> = (0..2).map(|client| scene.honest(client)).collect();
    ends_well(&mut scene).await;
    for node in honest {
        node.await.unwrap().unwrap();
    }
    repeats(&scene);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_round_whose_checkpoint_is_damaged_is_repeated_with_the_same_contributions() {
    let mut scene = Scene::new(2, &["federation.rounds=3"], |server| server.quorum = 1.0).await;
    let round = async |scene: &Scene, round: u32| {
        for client in 0..2 {
            let link = scene.attacker(client);
            let task = task_of(&link).await;
            assert_eq!(task.round, round, "client {client}");
            let weights = vec![0.01 + 0.001 * round as f32; (task.weights.len / 4) as usize];
            let (contribution, store) = scene.contribution(&format!("out{client}"), &task, &weights);
            assert!(matches!(hand_in(&link, &contribution, &store).await, VerdictKind::Accepted(_)));
        }
    };
    round(&scene, 0).await;
    round(&scene, 1).await;
    assert_eq!(task_of(&scene.attacker(0)).await.round, 2);
    scene
        .restart(|dir| {
            let run = std::fs::read_dir(dir.join("runs")).unwrap().next().unwrap().unwrap().path();
            let path = run.join("checkpoints/round-000002.ckpt");
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[100] ^= 1;
            std::fs::write(&path, bytes).unwrap();
        })
        .await;
    for client in 0..2 {
        scene.attacker(client).send(&Heartbeat::default()).await.unwrap();
    }
    round(&scene, 1).await;
    round(&scene, 2).await;
    ends_well(&mut scene).await;
}
