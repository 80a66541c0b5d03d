//! Secure aggregation between a server and nodes: the run is the simulator's, whoever drops out, and lies are refused.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod scene;

use fedproj_core::privacy::accountant::{Accountant, Mechanism, Sampling};
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
async fn nodes_hold_their_updates_to_the_limit_that_the_server_cannot_apply() {
    let mut hashes = Vec::new();
    for clip in ["federation.robust.clip=0.0", "federation.robust.clip=0.01"] {
        let settings = ["method.name=fedavg", "federation.rounds=2", FIXED, clip];
        let mut scene = Scene::new(3, &settings, |server| server.secure = true).await;
        let nodes: Vec<_> = (0..3).map(|client| scene.honest(client)).collect();
        let served = (&mut scene.serving).await.unwrap().unwrap();
        nodes.iter().for_each(tokio::task::JoinHandle::abort);
        // The simulator limits each update. So do the nodes, or the models differ.
        repeats(&scene);
        hashes.push(served.summary.model_hash);
    }
    assert_ne!(hashes[0], hashes[1], "no update is longer than the limit");
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
        let without_it = |e: &Event| matches!(e, Event::RoundClosed { counted, .. } if counted.len() == 4);
        scene.journal().iter().filter(|event| without_it(event)).count()
    };
    let scenes: Vec<_> = [0, 20, 60, 150].map(|wait_ms| tokio::spawn(with_drop(wait_ms))).into();
    let mut n_without = 0;
    for scene in scenes {
        n_without += scene.await.unwrap();
    }
    assert!(n_without > 0, "no round closed without the node that left");
}

#[tokio::test(flavor = "multi_thread")]
async fn below_the_threshold_a_sum_fails_as_a_whole_and_the_run_goes_on_with_those_who_are_left() {
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
    // Before nodes reveal shares, the round is repeated; after that it ends without a sum.
    let failed = events.iter().filter(|e| matches!(e, Event::SumFailed { .. } | Event::RoundEmpty { .. }));
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

/// What a private run of this scene has released, by round, after its server has ended.
async fn released(scene: &mut Scene, n_nodes: u32) -> Vec<fedproj_core::PrivacySpent> {
    let nodes: Vec<_> = (0..n_nodes).map(|client| scene.honest(client)).collect();
    let served = (&mut scene.serving).await.unwrap().unwrap();
    for node in nodes {
        assert_eq!(node.await.unwrap().unwrap(), served.summary.model_hash);
    }
    let stored = fedproj_core::StoredRun::open(&served.run).unwrap();
    assert_eq!(stored.rounds.last().unwrap().privacy, served.summary.privacy);
    // No journal and no metrics show how hard one client pulls.
    let n_pulls = |e: Event| if let Event::RoundDone { pulls, .. } = e { Some(pulls.len()) } else { None };
    let shown: Vec<usize> = scene.journal().into_iter().filter_map(n_pulls).collect();
    assert_eq!(shown, vec![0; stored.rounds.len()]);
    stored.rounds.into_iter().map(|record| record.privacy.unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_add_the_noise_of_masked_sums_and_the_budget_ends_the_run_with_a_valid_model() {
    let private =
        "privacy={ noise = 'nodes', sampling = 'public', noise_multiplier = 8.0, delta = 1e-3, epsilon_max = 1.0 }";
    for settings in [&["method.name=fedavg"][..], &["method.name=feddyn"], &["method.name=fedproj"]] {
        let settings = [settings, &["federation.rounds=50", private]].concat();
        let mut scene = Scene::new(4, &settings, |server| server.secure = true).await;
        let spent = released(&mut scene, 4).await;
        // One Gaussian release per round of multiplier 8, logits included.
        let plain = Mechanism { sampling: Sampling::Public, rate: 1.0, noise_multiplier: 8.0 };
        let account = Accountant::new(&plain);
        for (round, spent) in (1..).zip(&spent) {
            let due = account.epsilon(round, 1e-3);
            assert!((spent.epsilon - due).abs() < 1e-9 && !spent.nominal, "{spent:?}, {due} is due");
        }
        let n = spent.len() as u32;
        assert!(n > 1 && account.epsilon(n, 1e-3) <= 1.0 && account.epsilon(n + 1, 1e-3) > 1.0, "{n} rounds");
        // Nothing but the masked vector reached the server.
        let accepted =
            scene.journal().into_iter().filter_map(|e| if let Event::Accepted(c) = e { Some(c) } else { None });
        let is_masked = accepted.map(|c| c.n_samples == 0 && c.parts.len() == 1 && c.parts[0].name == "masked");
        assert_eq!(is_masked.collect::<Vec<_>>(), vec![true; 4 * spent.len()]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn noise_of_nodes_is_what_the_account_assumes_where_all_stay() {
    let private = "privacy={ noise = 'nodes', sampling = 'public', noise_multiplier = 2.0, clip = 0.5, delta = 1e-3 }";
    let settings = ["federation.rounds=1", "model.hidden=[60]", "local.optimizer={kind='sgd', lr=1e-9}", private];
    let mut scene = Scene::new(3, &settings, |server| (server.secure, server.secure_threshold) = (true, 1.0)).await;
    released(&mut scene, 3).await;
    let run = std::fs::read_dir(scene.server_dir().join("runs")).unwrap().next().unwrap().unwrap().path();
    let stored = fedproj_core::StoredRun::open(&run).unwrap();
    let method = stored.config.method.build().unwrap();
    let before = fedproj_core::Experiment::load(stored.config, method.as_ref(), None).unwrap().weights;
    let file = std::fs::read(run.join("model.safetensors")).unwrap();
    let n_header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let after: Vec<f32> = file[8 + n_header..].as_chunks().0.iter().map(|v| f32::from_le_bytes(*v)).collect();
    assert_eq!(after.len(), before.len());
    let square = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
    let (n, due) = (after.len() as f64, 2.0 * 0.5 / 3.0);
    let ratio = (square(&after) - square(&before)) / (n * due * due);
    // Five standard deviations of ‖w + noise‖² − ‖w‖² for n normal draws.
    let most = 5.0 * (2.0 / n + 4.0 * square(&before) / (n * due).powi(2)).sqrt();
    assert!(n > 4000.0 && most < 0.2 && (ratio - 1.0).abs() < most, "{ratio} times the variance that is due");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_adds_the_noise_of_sums_in_the_open_and_counts_it() {
    let private = "privacy={ sampling = 'public', noise_multiplier = 4.0, quantile = 0.5, delta = 1e-3 }";
    for settings in [&["method.name=fedavg"][..], &["method.name=fedproj"]] {
        let mut scene = Scene::new(3, &[settings, &["federation.rounds=3", private]].concat(), |_| ()).await;
        let spent = released(&mut scene, 3).await;
        let plain = Mechanism { sampling: Sampling::Public, rate: 1.0, noise_multiplier: 4.0 };
        assert_eq!(spent.len(), 3);
        assert!((spent[2].epsilon - Accountant::new(&plain).epsilon(3, 1e-3)).abs() < 1e-9, "{spent:?}");
        assert!(spent[0].clip.to_bits() != spent[2].clip.to_bits(), "the limit moves");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sum_with_less_noise_than_promised_is_none() {
    // Three of four must stay, for the noise of three: two are no sum, though they could be unmasked.
    let private = "privacy={ noise = 'nodes', sampling = 'public', noise_multiplier = 4.0, delta = 1e-3 }";
    let scene = Scene::new(4, &["federation.rounds=2", private], |server| {
        (server.secure, server.lost_after_s, server.secure_threshold) = (true, 2.0, 0.75);
    })
    .await;
    let nodes: Vec<_> = (0..4).map(|client| scene.honest(client)).collect();
    scene.wait_for(|event| matches!(event, Event::RosterFixed { .. })).await;
    nodes[2].abort();
    nodes[3].abort();
    let has_failed = |e: &Event| matches!(e, Event::SumFailed { reason, .. } if reason.contains("and a sum 3"));
    scene.wait_for(has_failed).await;
    let closed_with_two = |e: &Event| matches!(e, Event::RoundClosed { counted, .. } if counted.len() < 3);
    assert!(!scene.journal().iter().any(closed_with_two));
    nodes.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn privacy_that_a_federation_cannot_keep_is_refused_at_the_start() {
    for (privacy, secure, told) in [
        ("", false, "privacy.sampling=public"),
        ("sampling = 'poisson'", true, "privacy.sampling=public"),
        ("sampling = 'public', noise = 'seeded'", false, "protects nobody"),
        ("sampling = 'public'", true, "privacy.noise=nodes"),
        ("sampling = 'public', noise = 'nodes'", false, "server.secure=true"),
    ] {
        let privacy = format!("privacy={{ noise_multiplier = 1.0, delta = 1e-3, {privacy} }}");
        let error = Scene::refused(4, &[&privacy], |server| server.secure = secure).await;
        assert!(error.contains(told), "{privacy}: {error}");
    }
}
