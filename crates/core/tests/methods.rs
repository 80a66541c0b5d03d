//! What a method's settings do: at their neutral value a method is the simpler one bit for bit, at any other it is not.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod small;

use fedproj_core::methods::CATALOGUE;
use fedproj_core::{ClientState, Coordinator, Error, Experiment, LocalTraining, Method, Simulation};
use fedproj_nn::models::Variant;
use small::{NORM, SGD, config, hashes, run_all, settings_of, simulation, simulation_of};

/// Both methods give the same bytes in every round, under Adam and under SGD with momentum, schedule and clipping.
fn check_equal(a: (&str, &[&str]), b: (&str, &[&str]), both: &[&str]) {
    let momentum = ["local.optimizer={kind='sgd', lr=0.1, momentum=0.9}", "local.clip=1.0"];
    for optimizer in [&[][..], &momentum] {
        let run =
            |(method, own): (&str, &[&str])| hashes(simulation(config(method, &[both, own, optimizer].concat()), 2));
        assert_eq!(run(a), run(b), "{a:?} and {b:?} with {both:?} {optimizer:?}");
    }
}

const FEDAVG: (&str, &[&str]) = ("fedavg", &[]);

#[test]
fn fedprox_without_proximal_weight_is_fedavg() {
    check_equal(("fedprox", &["method.fedprox.proximal_weight=0.0"]), FEDAVG, &[]);
}

#[test]
fn without_a_radius_fedsam_is_fedavg_and_fedspeed_is_feddyn() {
    // With batch-norm the second pass must see the statistics of the first, and must not average them again.
    let deep = ["model.name=resnet8-thin", "federation.rounds=2", "local.epochs=1"];
    let (speed, dyn_) = (["method.fedspeed.radius=0.0"], ["method.feddyn.alpha=0.1"]);
    for both in [&[][..], &deep] {
        check_equal(("fedsam", &["method.fedsam.radius=0.0"]), FEDAVG, both);
        check_equal(("fedspeed", &speed), ("feddyn", &dyn_), both);
    }
}

#[test]
fn without_margins_fedlc_is_fedavg_where_every_client_has_every_class() {
    const SHARDS: &str = "data.partition={kind='shards', clients=4}";
    let all = ["data.partition={kind='iid', clients=2}"];
    check_equal(("fedlc", &["method.fedlc.margin=0.0"]), FEDAVG, &all);
    // Two classes per client: the absent ones are left out of the loss, margins or not.
    let few = config("fedlc", &["method.fedlc.margin=0.0", SHARDS]);
    let plain = config("fedavg", &[SHARDS]);
    assert_ne!(hashes(simulation(few, 2)), hashes(simulation(plain, 2)));
}

#[test]
fn fedntd_without_distillation_is_fedavg() {
    check_equal(("fedntd", &["method.fedntd.distill_weight=0.0"]), FEDAVG, &[]);
}

#[test]
fn fedacg_without_momentum_and_proximal_weight_is_an_unweighted_average() {
    let off = ["method.fedacg.momentum=0.0", "method.fedacg.proximal_weight=0.0"];
    check_equal(("fedacg", &off), FEDAVG, &["data.partition={kind='iid', clients=4}"]);
}

#[test]
fn fedproj_without_projection_and_distillation_is_fedavg() {
    let off = ["method.fedproj.projection.mode=off", "method.fedproj.distill.epochs=0"];
    check_equal(("fedproj", &off), FEDAVG, &[]);
    check_equal(("fedproj", &off), FEDAVG, &["model.name=resnet8-thin", "federation.rounds=2"]);
}

#[test]
fn fedrcl_without_weights_is_fedavg() {
    let off = ["method.fedrcl.contrast_weight=0.0", "method.fedrcl.penalty_weight=0.0"];
    check_equal(("fedrcl", &off), FEDAVG, &[]);
}

#[test]
fn fednova_with_equal_steps_is_fedavg() {
    check_equal(("fednova", &[]), FEDAVG, &["data.partition={kind='iid', clients=4}"]);
    // Clients of unequal size that all take one step an epoch; several seeds, because rounding of the weights n_k / n
    // decides whether a shortcut is exact.
    for seed in 0..8 {
        check_equal(("fednova", &[]), FEDAVG, &["local.batch=240", &format!("seed={seed}")]);
    }
}

#[test]
fn fedproj_with_a_correction_only_is_feddyn() {
    let off = ["method.fedproj.projection.mode=off", "method.fedproj.distill.epochs=0"];
    let corrected = [off[0], off[1], "method.fedproj.correction.alpha=0.1"];
    check_equal(("fedproj", &corrected), ("feddyn", &["method.feddyn.alpha=0.1"]), &["federation.fraction=0.5"]);
}

#[test]
fn fedproj_with_a_look_ahead_only_is_fedacg() {
    let off = ["method.fedproj.projection.mode=off", "method.fedproj.distill.epochs=0"];
    let ahead = [off[0], off[1], "method.fedproj.lookahead=0.85"];
    let equal = ["data.partition={kind='iid', clients=4}"];
    check_equal(("fedproj", &ahead), ("fedacg", &["method.fedacg.proximal_weight=0.0"]), &equal);
}

#[test]
fn where_nobody_is_absent_a_correction_of_absent_clients_changes_nothing() {
    let on = ["method.feddyn.alpha=0.1", "method.feddyn.absent=true"];
    check_equal(("feddyn", &on), ("feddyn", &on[..1]), &["federation.fraction=1.0"]);
}

#[test]
fn afedpd_is_feddyn_with_moving_absent_clients() {
    let on = ["method.feddyn.alpha=0.1", "method.feddyn.absent=true"];
    let few = ["federation.fraction=0.5"];
    check_equal(("afedpd", &["method.afedpd.alpha=0.1"]), ("feddyn", &on), &few);
    let run = |method: &str, own: &[&str]| hashes(simulation(config(method, &[&few, own].concat()), 2));
    assert_ne!(run("afedpd", &["method.afedpd.alpha=0.1"]), run("feddyn", &on[..1]), "where some are absent");
}

#[test]
fn dittos_global_model_is_fedavgs_whatever_its_clients_keep() {
    check_equal(("ditto", &["method.ditto.lr=0.1"]), FEDAVG, &[]);
    // With batch-norm the own model's passes must not move the averages of the one that is sent.
    check_equal(("ditto", &[]), FEDAVG, &["model.name=resnet8-thin", "federation.rounds=2", "local.epochs=1"]);
}

#[test]
fn dittos_own_models_depend_on_their_settings_and_are_what_is_measured() {
    let run = |settings: &[&str]| {
        let both = ["federation.evaluate_clients=true", "method.ditto.lr=0.1"];
        let mut simulation = simulation(config("ditto", &[&both, settings].concat()), 2);
        let accuracies = run_all(&mut simulation).pop().unwrap().personal_by_client.unwrap();
        (simulation.clients().values().map(|state| state["personal"].clone()).collect::<Vec<_>>(), accuracies)
    };
    let (plain, measured) = run(&[]);
    let (alone, other) = run(&["method.ditto.proximal_weight=0.0"]);
    assert_ne!(plain, alone);
    assert_ne!(plain, run(&["method.ditto.lr=0.05"]).0);
    assert_ne!(measured, other, "accuracies are those of the own models: the global one is the same");
}

#[test]
fn fedbn_is_fedavg_without_batch_norm_and_in_its_first_round() {
    check_equal(("fedbn", &[]), FEDAVG, &[]);
    let run = |method: &str| hashes(simulation(config(method, &[NORM, "federation.fraction=1.0"]), 2));
    let (fedbn, fedavg) = (run("fedbn"), run("fedavg"));
    assert_eq!(fedbn[0], fedavg[0]);
    assert_ne!(fedbn[1], fedavg[1], "from its second round a client has batch-norm of its own");
}

#[test]
fn fedbns_clients_start_from_their_own_batch_norm_and_are_measured_with_it() {
    let run = |method: &str| {
        // A rate at which no weight moves, and running statistics do.
        let still = "local.optimizer={kind='sgd', lr=1e-30, weight_decay=0.0}";
        let settings = [NORM, still, "federation.fraction=1.0", "federation.evaluate_clients=true"];
        let mut simulation = simulation(config(method, &settings), 2);
        let records = run_all(&mut simulation);
        let sent = simulation.last_results().unwrap().iter().map(|r| r.buffers.clone()).collect::<Vec<_>>();
        let kept = simulation.clients().values().map(|state| state["stays.buffers"].clone()).collect::<Vec<_>>();
        (sent, kept, records)
    };
    let (sent, kept, fedbn) = run("fedbn");
    assert_eq!(sent, kept, "a client keeps what it sends");
    let (averaged, none, fedavg) = run("fedavg");
    assert!(none.is_empty() && sent != averaged);
    // Statistics of each client's own samples drift further apart than those that begin anew from the mean.
    let spread = |all: &[Vec<f32>]| -> f32 {
        all.iter().zip(&all[1..]).flat_map(|(a, b)| a.iter().zip(b)).map(|(a, b)| (a - b).abs()).sum()
    };
    assert!(spread(&sent) > 1.2 * spread(&averaged), "{} and {}", spread(&sent), spread(&averaged));
    assert_eq!(fedbn[0].personal_by_client.as_ref().map(Vec::len), Some(4));
    // In FedAvg a client is measured with the weights that it sends; the new global model is another one.
    assert_eq!(fedbn[0].accuracy, fedavg[0].accuracy);
}

#[test]
fn without_distillation_fedkds_and_fedgems_servers_learn_nothing() {
    for method in ["fedkd", "fedgems"] {
        let mut simulation = simulation(config(method, &[&format!("method.{method}.epochs=0")]), 2);
        let start = simulation.state().weights.clone();
        run_all(&mut simulation);
        assert_eq!(simulation.state().weights, start, "{method}: clients' weights are not averaged");
    }
}

#[test]
fn with_labels_alone_fedgems_server_learns_from_no_client_and_its_clients_from_no_logits() {
    let run = |epsilon: &str, rate: &str| {
        let own = [&format!("method.fedgems.label_weight={epsilon}"), &format!("local.optimizer.lr={rate}")];
        hashes(simulation(config("fedgems", &own.map(String::as_str)), 2))
    };
    assert_eq!(run("1.0", "0.01"), run("1.0", "0.02"), "whatever the clients learn");
    assert_ne!(run("0.5", "0.01"), run("0.5", "0.02"));
}

#[test]
fn fedgems_clients_keep_their_own_models_and_its_server_what_it_was_right_about() {
    let mut simulation = simulation(config("fedgems", &["federation.fraction=1.0"]), 2);
    run_all(&mut simulation);
    let sent: Vec<Vec<f32>> = simulation.last_results().unwrap().iter().map(|r| r.weights.clone()).collect();
    let kept: Vec<Vec<f32>> = simulation.clients().values().map(|state| state["stays"].clone()).collect();
    assert_eq!(sent, kept);
    let (known, logits) = (&simulation.state().vectors["known"], &simulation.state().vectors["logits"]);
    let labels = simulation.experiment().public.as_ref().unwrap().labels().unwrap();
    let n_known = known.iter().filter(|known| **known > 0.0).count();
    assert!(n_known > 5 && n_known < labels.len(), "{n_known}");
    for ((known, row), label) in known.iter().zip(logits.chunks(10)).zip(labels) {
        let best = (0..10).fold(0, |best, class| if row[class] > row[best] { class } else { best });
        assert!(*known == 0.0 || best == *label as usize, "{row:?}");
    }
}

#[test]
fn pfedhns_clients_start_from_weights_of_their_own_which_its_rate_moves() {
    let personal = |rate: &str| {
        let config = config("pfedhn", &[&format!("method.pfedhn.lr={rate}"), "method.pfedhn.hidden=8"]);
        let method = config.method.build().unwrap();
        let experiment = Experiment::load(config, method.as_ref(), None).unwrap();
        let mut server = Coordinator::new(experiment, method, 1).unwrap();
        let mut training = LocalTraining::new(server.experiment(), server.method()).unwrap();
        let mut all = Vec::new();
        for _ in 0..2 {
            let opening = server.open().unwrap();
            let none = ClientState::new();
            let clients: Vec<_> = opening.download.personal.keys().map(|client| (*client, &none)).collect();
            let results = training.run_many(server.method(), &opening.download, &clients).unwrap();
            server.close(&opening, &results, 0.0).unwrap();
            all.push(opening.download.personal.clone());
        }
        all
    };
    let (still, moving) = (personal("0.0"), personal("0.1"));
    assert_eq!(still[0], moving[0]);
    let both: Vec<u32> = still[0].keys().filter(|client| still[1].contains_key(client)).copied().collect();
    assert!(!both.is_empty());
    for client in both {
        assert_eq!(still[0][&client], still[1][&client], "without a rate a client starts where it did before");
        assert_ne!(moving[0][&client], moving[1][&client]);
    }
    let mut distinct: Vec<_> = moving[1].values().map(|v| v.iter().map(|w| w.to_bits()).collect::<Vec<_>>()).collect();
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), 3, "no two clients start alike");
}

#[test]
fn fedgen_without_its_terms_is_fedavg() {
    let off = ["method.fedgen.generated_weight=0.0", "method.fedgen.distill_weight=0.0"];
    check_equal(("fedgen", &off), FEDAVG, &[]);
    check_equal(("fedgen", &off), FEDAVG, &["model.name=resnet8-thin", "federation.rounds=2"]);
}

#[test]
fn fedgens_generator_reaches_the_clients_in_the_second_round() {
    let run = |method: &str, settings: &[&str]| hashes(simulation(config(method, settings), 2));
    let plain = run("fedavg", &[]);
    for off in ["generated_weight", "distill_weight"] {
        let one = run("fedgen", &[&format!("method.fedgen.{off}=0.0")]);
        assert_eq!(one[0], plain[0], "without {off}");
        assert!(one[1] != plain[1] && one[1] != run("fedgen", &[])[1], "without {off}");
    }
    let mut simulation = simulation(config("fedgen", &["method.fedgen.generator={noise=4, hidden=6}"]), 2);
    let before = simulation.round(&|_| ()).unwrap().bytes_down;
    let after = simulation.round(&|_| ()).unwrap().bytes_down;
    let n_params = (4 + 10) * 6 + 6 + 6 * 12 + 12;
    assert_eq!(simulation.state().vectors["send.generator"].len(), n_params);
    assert_eq!(after - before, 3 * 4 * n_params as u64, "three clients receive it");
}

#[test]
fn a_generator_that_diverges_fails_the_round_that_made_it() {
    let far = "method.fedgen.optimizer={kind='sgd', lr=1e38, weight_decay=0.0}";
    let error = simulation(config("fedgen", &[far]), 2).round(&|_| ()).unwrap_err();
    assert!(matches!(error, Error::FusionNotFinite { round: 0, .. }), "{error}");
}

#[test]
fn a_generator_that_does_not_fit_into_this_machine_is_rejected() {
    let config = config("fedgen", &["method.fedgen.generator={noise=16777216, hidden=16777216}"]);
    let method = config.method.build().unwrap();
    let error = Experiment::load(config, method.as_ref(), None).unwrap_err().to_string();
    assert!(error.contains("but this machine has"), "{error}");
}

#[test]
fn without_distillation_fedgkts_clients_learn_nothing_from_its_server() {
    let own = |weight: &str, lr: &str| {
        let settings = [format!("method.fedgkt.distill_weight={weight}"), format!("method.fedgkt.optimizer.lr={lr}")];
        let mut simulation = simulation(config("fedgkt", &settings.each_ref().map(String::as_str)), 2);
        run_all(&mut simulation);
        simulation.clients().clone()
    };
    assert_eq!(own("0.0", "0.01"), own("0.0", "0.1"));
    assert_ne!(own("1.0", "0.01"), own("1.0", "0.1"));
}

#[test]
fn fedgkt_names_what_would_work_on_a_network_that_it_cannot_cut() {
    let load = |settings: &[&str]| {
        let config = config("fedgkt", settings);
        let method = config.method.build().unwrap();
        Experiment::load(config, method.as_ref(), None).map(drop).map_err(|error| error.to_string())
    };
    assert!(load(&["model.name=resnet8-thin"]).unwrap_err().contains("model.group_norm=8"));
    assert_eq!(load(&["model.name=resnet8-thin", "model.group_norm=8"]), Ok(()));
    let deep = load(&["method.fedgkt.level=1"]).unwrap_err();
    assert!(deep.contains("method.fedgkt.level = 1") && deep.contains("it has 1"), "{deep}");
    for (at, name) in [(0, "exit"), (1, "exit.relu"), (2, "exit")] {
        let own = |layer: usize| if layer == at { format!(", name='{name}'") } else { String::new() };
        let [hidden, relu, last] = [0, 1, 2].map(own);
        let taken = load(&[&format!(
            "model={{name='layers', layers=[{{op='flatten'}}, {{op='linear', outputs=10{hidden}}}, {{op='relu'{relu}}}, \
             {{op='linear'{last}}}]}}"
        )]);
        assert!(
            taken.unwrap_err().contains(&format!("node `{name}`: a node of this name exists already")),
            "{name} at {at}"
        );
    }
}

#[test]
fn fedgkts_clients_keep_the_first_layers_and_its_server_moves_the_rest() {
    let run = |settings: &[&str]| {
        let mut simulation = simulation(config("fedgkt", &[settings, &["federation.fraction=1.0"]].concat()), 2);
        let start = simulation.experiment().weights.clone();
        let records = run_all(&mut simulation);
        (simulation, start, records)
    };
    let (mut moving, start, records) = run(&[]);
    let graph = moving.experiment().graph.clone();
    let server: Vec<usize> =
        ["fc2.weight", "fc2.bias"].iter().flat_map(|n| graph.params().find(n).unwrap().range()).collect();
    let own: Vec<usize> = (0..start.len()).filter(|at| !server.contains(at)).collect();
    let stays = moving.clients().clone();
    for result in moving.last_results().unwrap() {
        let sent: Vec<f32> = own.iter().map(|at| result.weights[*at]).collect();
        assert_eq!(sent, stays[&result.client]["stays"]);
    }
    let is_moved = |simulation: &Simulation, start: &[f32], at: &usize| {
        simulation.state().weights[*at].to_bits() != start[*at].to_bits()
    };
    assert!(server.iter().all(|at| is_moved(&moving, &start, at)));
    let (still, start, _) = run(&["method.fedgkt.epochs=0"]);
    assert!(!server.iter().any(|at| is_moved(&still, &start, at)), "without passes it does not learn");
    // Every sample of every client: 12 features, 10 logits and a label up, 10 logits down.
    let n = moving.experiment().private.n_samples() as u64;
    assert_eq!((records[1].bytes_up, records[1].bytes_down), (4 * 23 * n, 4 * 10 * n));
    assert!(moving.state().vectors["send.logits"].chunks(10).all(|row| row.iter().any(|z| *z != 0.0)));
}

#[test]
fn a_gem_is_fedproj_without_epsilon() {
    let (rule, eps) = ("method.fedproj.projection.rule=a-gem", "method.fedproj.projection.eps=0.0");
    check_equal(("fedproj", &[rule]), ("fedproj", &[eps]), &[]);
}

#[test]
fn rules_on_inputs_are_feddf_until_the_warm_up_ends() {
    for rule in ["owm", "gpm", "sgp", "trgp"] {
        let rule = format!("method.fedproj.projection.rule={rule}");
        check_equal(("fedproj", &[&rule, "method.fedproj.projection.warmup=3"]), ("feddf", &[]), &[]);
        let run = |settings: &[&str]| hashes(simulation(config("fedproj", settings), 2));
        let (on, off) = (run(&[&rule]), run(&[&rule, "method.fedproj.projection.mode=off"]));
        assert_eq!(on[0], off[0], "{rule}");
        assert_ne!(on[1], off[1], "{rule}");
    }
}

#[test]
fn feddf_is_fedproj_without_projection() {
    let distill = |method: &str| {
        let keys = ["epochs=2", "alpha=0.1", "feature_weight=0.01", "weights=samples", "temperature=2.0"];
        keys.map(|key| format!("method.{method}.distill.{key}"))
    };
    let (df, proj) = (distill("feddf"), distill("fedproj"));
    let df: Vec<&str> = df.iter().map(String::as_str).collect();
    let proj: Vec<&str> = proj.iter().map(String::as_str).chain(["method.fedproj.projection.mode=off"]).collect();
    check_equal(("feddf", &df), ("fedproj", &proj), &[]);
    check_equal(("feddf", &[]), ("fedproj", &["method.fedproj.projection.mode=off"]), &[]);
}

/// FedAvg on the network with MOON's projection head.
#[derive(Debug)]
struct FedAvgWithHead(usize);

impl Method for FedAvgWithHead {
    fn variant(&self, variant: Variant) -> Variant {
        Variant { projection_head: Some(self.0), ..variant }
    }
}

#[test]
fn moon_without_contrast_is_fedavg_on_the_network_with_its_head() {
    let own = ["method.moon.contrast_weight=0.0", "method.moon.head=8"];
    let moon = hashes(simulation(config("moon", &own), 2));
    let fedavg = hashes(simulation_of(config("fedavg", &[]), Box::new(FedAvgWithHead(8)), 2));
    assert_eq!(moon, fedavg);
    assert_ne!(moon, hashes(simulation(config("fedavg", &[]), 2)), "the head must be part of the network");
}

#[test]
fn first_rounds_of_scaffold_and_fedavgm_are_averages() {
    // Control variates and momentum are 0 at first: with clients of one size the first round is FedAvg's, up to the
    // rounding of w + (average − w).
    let same = ["data.partition={kind='iid', clients=4}", "federation.rounds=1", SGD];
    let run = |method: &str| {
        let mut simulation = simulation(config(method, &same), 2);
        run_all(&mut simulation);
        simulation.state().weights.clone()
    };
    let average = run("fedavg");
    for method in ["scaffold", "fedavgm"] {
        let found = run(method);
        let close = found.iter().zip(&average).all(|(a, b)| (a - b).abs() <= 1e-6);
        assert!(close && found.len() == average.len(), "{method}:\n{found:?}\n{average:?}");
    }
}

/// How far the final weights of two configurations lie apart, relative to what the first has moved.
fn distance(method: &str, base: &[&str], setting: &str) -> f64 {
    let run = |overrides: &[&str]| {
        let mut simulation = simulation(config(method, overrides), 2);
        let start = simulation.state().weights.clone();
        run_all(&mut simulation);
        let (state, published) = (simulation.state(), simulation.state().published());
        // What is sent, or what is published where no model is.
        if state.weights == start {
            return (start, published.weights.to_vec(), published.buffers.to_vec());
        }
        (start, state.weights.clone(), state.buffers.clone())
    };
    let norm = |a: &[f32], b: &[f32]| {
        a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum::<f64>().sqrt()
    };
    let (start, plain, plain_buffers) = run(base);
    let (_, changed, changed_buffers) = run(&[base, &[setting]].concat());
    assert_eq!(plain.len(), changed.len(), "{method} {setting}");
    let buffers = norm(&plain_buffers, &changed_buffers);
    (norm(&plain, &changed) + buffers) / norm(&start, &plain)
}

/// Every setting of the table changes the trajectory by more than rounding could: single precision over some hundred
/// steps stays below 1e-5 of the movement.
fn check_live(method: &str, base: &[&str], settings: &[&str]) {
    let base = [settings_of(method), base].concat();
    for setting in settings {
        let moved = distance(method, &base, &format!("method.{method}.{setting}"));
        assert!(moved > 1e-5, "{method}: {setting} changes the final weights by {moved:e} of the movement only");
    }
}

#[test]
fn settings_of_client_side_methods_are_live() {
    check_live("fedprox", &[], &["proximal_weight=0.0", "proximal_weight=1.0"]);
    check_live("feddyn", &[], &["alpha=0.0", "alpha=0.5", "clip=0.1", "absent=true"]);
    check_live("feddc", &[], &["alpha=0.0", "alpha=0.5", "clip=0.1"]);
    check_live("afedpd", &[], &["alpha=0.0", "alpha=0.5", "clip=0.1"]);
    check_live("fedlc", &[], &["margin=0.0", "margin=2.0"]);
    check_live("fedntd", &[], &["distill_weight=0.0", "distill_weight=5.0", "temperature=3.0"]);
    check_live("fedsam", &[], &["radius=0.0", "radius=0.5"]);
    check_live("fedspeed", &[], &["radius=0.0", "radius=0.5", "alpha=0.0", "alpha=0.5", "clip=0.1", "absent=true"]);
    check_live("moon", &["method.moon.head=8"], &["contrast_weight=0.0", "contrast_weight=5.0", "temperature=0.1"]);
    let settings =
        ["temperature=0.5", "threshold=0.99", "contrast_weight=0.0", "contrast_weight=2.0", "penalty_weight=0.0"];
    check_live("fedrcl", &[], &settings);
}

#[test]
fn settings_of_server_side_methods_are_live() {
    check_live("fednova", &["local.batch=8"], &["momentum_formula=0.9"]);
    check_live("scaffold", &[], &["server_lr=0.5"]);
    check_live("fedacg", &[], &["momentum=0.0", "momentum=0.5", "proximal_weight=0.0", "proximal_weight=0.1"]);
    check_live("fedavgm", &[], &["momentum=0.0", "server_lr=0.5"]);
    check_live("fedadam", &[], &["server_lr=0.1", "beta1=0.0", "beta2=0.5", "eps=0.1"]);
    let settings =
        ["levels=2", "noise=0.1", "weights=samples", "epochs=2", "batch=40", "optimizer.lr=0.01", "temperature=1.0"];
    check_live("fedkd", &[], &settings);
    check_live("pfedhn", &[], &["lr=0.1", "hidden=20"]);
    let settings = [
        "generated_weight=1.0",
        "distill_weight=1.0",
        "diversity_weight=0.0",
        "decay=0.9",
        "weights=samples",
        "generator.noise=8",
        "generator.hidden=100",
        "generator.batch=20",
        "steps=10",
        "optimizer.lr=0.001",
    ];
    check_live("fedgen", &[], &settings);
    let settings = ["level=1", "distill_weight=0.0", "temperature=1.0", "epochs=1", "batch=20", "optimizer.lr=0.01"];
    check_live("fedgkt", &["model.hidden=[12, 12]"], &settings);
    let settings =
        ["label_weight=0.2", "memory.size=20", "memory.batch=10", "memory.temperature=3.0", "epochs=2", "batch=40"];
    check_live("fedgems", &[], &settings);
    let settings = [
        "diversity_weight=0.0",
        "diversity_weight=1.0",
        "epochs=2",
        "batch=40",
        "optimizer.lr=0.01",
        "variant=authors-cv",
    ];
    check_live("fedet", &[], &settings);
}

#[test]
fn settings_of_distillation_are_live() {
    let settings = [
        "epochs=0",
        "epochs=2",
        "batch=40",
        "optimizer.lr=0.01",
        "optimizer.momentum=0.9",
        "optimizer.kind=adam",
        "temperature=1.0",
        "t2=false",
        "direction=student_to_teacher",
        "weights=samples",
        "feature_weight=0.1",
    ]
    .map(|key| format!("distill.{key}"));
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    check_live("feddf", &[], &settings);
    check_live("fedproj", &[], &settings);
}

#[test]
fn weight_divergence_pulls_and_its_anchor_matters() {
    // The published code compares the weights with themselves, so its α does nothing.
    let alphas = ["distill.alpha=0.1", "distill.alpha=1.0"];
    check_live("fedproj", &[], &alphas);
    check_live("feddf", &[], &alphas);
    check_live("fedproj", &["method.fedproj.distill.alpha=0.1"], &["distill.anchor=previous_global"]);
}

#[test]
fn settings_of_the_memory_are_live() {
    let settings = [
        "memory.size=20",
        "memory.batch=10",
        "memory.resample=fixed",
        "memory.target=global_model",
        "memory.temperature=1.0",
        "memory.feature_weight=0.1",
        "authors.integer_cast=true",
    ];
    check_live("fedproj", &[], &settings);
    check_live("fedproj", &["method.fedproj.projection.warmup=0"], &["memory.round0=global_model"]);
}

#[test]
fn settings_of_the_projection_are_live() {
    let settings = [
        "projection.rule=gem",
        "projection.rule=ogd",
        "projection.rule=owm",
        "projection.rule=gpm",
        "projection.rule=sgp",
        "projection.rule=trgp",
        "projection.mode=always",
        "projection.mode=soft",
        "projection.mode=off",
        "projection.space=update",
        "projection.scope=layer",
        "projection.warmup=2",
        "projection.warmup=0.9",
        "authors.stop_round=2",
        "projection.dropout=0.5",
        "projection.eps=0.1",
        "authors.norm_guard=1.0",
        "authors.coefficient_max=0.1",
    ];
    check_live("fedproj", &[], &settings);
    check_live("fedproj", &["method.fedproj.projection.rule=gem"], &["projection.references=2"]);
    check_live("fedproj", &["method.fedproj.projection.rule=ogd"], &["projection.references=2"]);
    for rule in ["owm", "gpm", "sgp", "trgp"] {
        let rule = format!("method.fedproj.projection.rule={rule}");
        check_live("fedproj", &[&rule], &["projection.energy=0.8", "memory.size=20"]);
    }
    check_live("fedproj", &["method.fedproj.projection.rule=gpm"], &["projection.references=1"]);
    check_live("fedproj", &["method.fedproj.projection.rule=owm"], &["memory.batch=10"]);
    let long = ["local.epochs=6", "method.fedproj.distill.epochs=0"];
    check_live("fedproj", &long, &["projection.reference=round_start"]);
    check_live("fedproj", &["method.fedproj.projection.dropout=0.5"], &["projection.dropout_unit=step"]);
    check_live("fedproj", &[], &["correction.alpha=0.1", "averages.teacher=0.5", "averages.memory=0.5"]);
    check_live("fedproj", &["method.fedproj.correction.alpha=0.1"], &["correction.clip=0.1", "correction.absent=true"]);
    check_live("fedproj", &[], &["lookahead=0.85"]);
    let digest = ["epochs=0", "epochs=3", "memory.size=20", "memory.batch=10", "memory.resample=fixed"];
    check_live("fedmd", &["method.fedmd.memory={size=40, batch=20}"], &digest);
    check_live("fedproj", &["method.fedproj.projection.mode=soft"], &["projection.soft_weight=0.1"]);
}

#[test]
fn batch_norm_settings_are_live_on_a_network_with_batch_norm() {
    let base = ["model.name=resnet8-thin", "federation.rounds=2", "local.epochs=1"];
    let settings = ["memory.bn=update", "memory.bn=frozen", "distill.bn=frozen", "distill.bn=recalibrate"];
    check_live("fedproj", &base, &settings);
    check_live("fedmd", &base, &["memory.bn=update", "memory.bn=frozen"]);
}

#[test]
fn settings_of_local_training_are_live_for_every_method() {
    for (method, _) in CATALOGUE {
        let base = settings_of(method);
        let local = ["local.epochs=1", "local.batch=8", "local.clip=0.1", "local.schedule.every=0.0"];
        for setting in local.into_iter().chain(["data.augment=true"]) {
            let moved = distance(method, base, setting);
            assert!(moved > 1e-5, "{method}: {setting} changes the final weights by {moved:e} of the movement only");
        }
    }
}

#[test]
fn fedmd_without_a_digest_leaves_every_client_alone() {
    let settings = ["federation.fraction=1.0", "method.fedmd.memory={size=40, batch=20}"];
    let run = |epochs: &str, others: &str| {
        let config = config("fedmd", &[&settings[..], &[epochs, others]].concat());
        let mut simulation = simulation(config, 2);
        run_all(&mut simulation);
        simulation.clients().clone()
    };
    let (alone, digesting) = ("method.fedmd.epochs=0", "method.fedmd.epochs=1");
    let two =
        |width: u32| format!("model.clients=[{{name='mlp', share=0.5}}, {{name='mlp', hidden=[{width}], share=0.5}}]");
    let of = |epochs: &str, width: u32| run(epochs, &two(width));
    // Client 0 keeps the first network; what the others have decides only what it digests.
    assert_eq!(of(alone, 7)[&0], of(alone, 9)[&0]);
    assert_ne!(of(digesting, 7)[&0], of(digesting, 9)[&0]);
    assert_ne!(of(digesting, 7)[&0], of(alone, 7)[&0]);
    // In its only round, a lone client is FedAvg's.
    let once = ["federation.rounds=1", "federation.fraction=0.25"];
    let (mut fedmd, mut fedavg) = (simulation(config("fedmd", &once), 2), simulation(config("fedavg", &once), 2));
    let start = fedmd.state().weights.clone();
    let client = run_all(&mut fedmd)[0].cohort[0];
    run_all(&mut fedavg);
    assert_eq!(fedmd.clients()[&client]["stays"], fedavg.state().weights);
    assert_eq!(fedmd.state().weights, start, "no model travels");
}

#[test]
fn fedmd_sends_scores_in_the_place_of_models() {
    let settings = ["federation.evaluate_clients=true", "method.fedmd.memory={size=40, batch=20}"];
    let records = run_all(&mut simulation(config("fedmd", &settings), 2));
    let m = records[1].cohort.len() as u64;
    // Ten classes in four bytes for 40 samples; down with the samples' numbers, as soon as there is a consensus.
    assert_eq!((records[0].bytes_down, records[0].bytes_up), (0, m * 40 * 10 * 4));
    assert_eq!((records[1].bytes_down, records[1].bytes_up), (m * 40 * 11 * 4, m * 40 * 10 * 4));
    assert!(records[1].memory_loss_before.is_some() && records[0].memory_loss_before.is_none());
    assert!(records[1].client_accuracy.is_some() && records[1].forgetting.is_none());
}
