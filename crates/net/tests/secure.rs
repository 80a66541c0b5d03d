//! Secure aggregation between a server and nodes: the run is the simulator's, whoever drops out, and lies are refused.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod scene;

use fedproj_net::Policy;
use fedproj_net::server::journal::Event;
use scene::Scene;
use std::time::Duration;

const FIXED: &str = "federation.sum=fixed";

fn repeats(scene: &Scene) {
    let run = std::fs::read_dir(scene.server_dir().join("runs")).unwrap().next().unwrap().unwrap().path();
    fedproj_core::verify(&run, None, 1, fedproj_core::VerifyPart::default(), &|_| ()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_masked_run_is_the_simulators_for_every_kind_of_sum() {
    let sgd = "local.optimizer={kind='sgd', lr=0.05}";
    let unequal = "data.partition={kind='dirichlet', beta=0.5, clients=3}";
    for settings in [
        &["method.name=fedavg"][..],
        &["method.name=fedprox"],
        &["method.name=feddyn"],
        &["method.name=scaffold", sgd],
        // Clients of unequal size make unequal numbers of steps.
        &["method.name=fednova", "local.batch=8", unequal],
        &["method.name=fednova", "local.batch=8", unequal, "local.optimizer={kind='sgd', lr=0.05, momentum=0.9}"],
        &["method.name=fedavgm"],
        &["method.name=fedadam", "federation.robust.clip=0.5"],
        &["method.name=feddf", "method.feddf.distill.weights=samples", "model.name=cnn"],
        &["method.name=fedproj", "method.fedproj.projection.warmup=0", "method.fedproj.memory.feature_weight=0.5"],
    ] {
        let settings = [settings, &["federation.rounds=2", FIXED]].concat();
        let mut scene = Scene::new(3, &settings, |server| server.secure = true).await;
        let nodes: Vec<_> = (0..3).map(|client| scene.honest(client)).collect();
        let served = (&mut scene.serving).await.unwrap().unwrap();
        for node in nodes {
            assert_eq!(node.await.unwrap().unwrap(), served.summary.model_hash, "{settings:?}");
        }
        repeats(&scene);
        let accepted: Vec<_> = scene
            .journal()
            .into_iter()
            .filter_map(|e| match e {
                Event::Accepted(accepted) => Some(accepted),
                _ => None,
            })
            .collect();
        assert_eq!(accepted.len(), 6, "{settings:?}");
        assert!(accepted.iter().all(|c| c.n_samples == 0 && c.parts.len() == 1 && c.parts[0].name == "masked"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_drop_out_at_any_moment_and_the_rest_is_the_simulators() {
    let with_drop = |wait_ms| async move {
        let mut scene = Scene::new(5, &["federation.rounds=3", FIXED], |server| {
            (server.secure, server.lost_after_s) = (true, 2.0);
        })
        .await;
        let nodes: Vec<_> = (0..5).map(|client| scene.honest(client)).collect();
        scene.wait_for(|event| matches!(event, Event::RosterFixed { .. })).await;
        tokio::time::sleep(Duration::from_millis(wait_ms)).await;
        nodes[4].abort();
        (&mut scene.serving).await.unwrap().unwrap();
        repeats(&scene);
    };
    let scenes: Vec<_> = [0, 20, 60, 150].map(|wait_ms| tokio::spawn(with_drop(wait_ms))).into();
    for scene in scenes {
        scene.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn below_the_threshold_a_sum_fails_as_a_whole_and_is_repeated_with_those_who_are_left() {
    let mut scene = Scene::new(5, &["federation.rounds=2", FIXED], |server| {
        (server.secure, server.lost_after_s, server.secure_threshold) = (true, 2.0, 1.0);
    })
    .await;
    let nodes: Vec<_> = (0..5).map(|client| scene.honest(client)).collect();
    scene.wait_for(|event| matches!(event, Event::RosterFixed { .. })).await;
    nodes[4].abort();
    (&mut scene.serving).await.unwrap().unwrap();
    repeats(&scene);
    let events = scene.journal();
    let failed =
        events.iter().filter(|e| matches!(e, Event::SumFailed { reason, .. } if reason.contains("of 5 nodes")));
    let closed: Vec<usize> = events
        .iter()
        .filter_map(|e| if let Event::RoundClosed { counted, .. } = e { Some(counted.len()) } else { None })
        .collect();
    // The node may have got through the first round before it was gone.
    assert!(failed.count() >= 1 && closed.last() == Some(&4), "{events:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_cohort_and_a_sum_in_the_open_are_declined() {
    for (policy, secure, told) in [
        (Policy { cohort_min: 4, ..Policy::default() }, true, "cohort_min = 4"),
        (Policy { secure_only: true, ..Policy::default() }, false, "secure_only = true"),
    ] {
        let scene = Scene::new(3, &["federation.rounds=1", FIXED], |server| server.secure = secure).await;
        let nodes: Vec<_> = (0..3).map(|client| scene.honest_with(client, policy.clone())).collect();
        let is_told = |e: &Event| matches!(e, Event::Declined { reason, .. } if reason.contains(told));
        scene.wait_for(is_told).await;
        assert!(!scene.journal().iter().any(|e| matches!(e, Event::Accepted(_))), "{told}");
        nodes.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_needs_single_contributions_is_refused_at_the_start() {
    for (settings, told) in [
        (&["method.name=fedavg"][..], "federation.sum=fixed"),
        (&["method.name=fedet", FIXED], "fedet needs the results of single clients"),
        (&["federation.robust.clip_ratio=3.0", FIXED], "clip_ratio"),
        (&["federation.evaluate_clients=true", FIXED], "evaluate_clients"),
        (&["federation.fraction=0.5", FIXED], "2 clients per round"),
    ] {
        let error = Scene::refused(4, settings, |server| server.secure = true).await;
        assert!(error.contains(told), "{error}");
    }
}
