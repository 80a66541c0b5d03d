//! Runs are paired and repeatable: what a seed decides is the same for every method, and neither threads nor interruptions
//! change a byte.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod small;

use fedproj_core::methods::CATALOGUE;
use fedproj_core::{Experiment, RoundRecord, Run, RunDir, Seconds};
use small::{NORM, config, hashes, run_all, settings_of, simulation};

fn experiment(method: &str, overrides: &[&str]) -> Experiment {
    let config = config(method, &[settings_of(method), overrides].concat());
    let method = config.method.build().unwrap();
    Experiment::load(config, method.as_ref(), None).unwrap()
}

#[test]
fn partition_cohorts_and_initial_weights_are_the_same_for_every_method() {
    let base = experiment("fedavg", &[]);
    for (name, _) in CATALOGUE {
        let other = experiment(name, &[]);
        assert_eq!(base.partition, other.partition, "{name}");
        assert_eq!((base.private.hash(), base.test.hash()), (other.private.hash(), other.test.hash()), "{name}");
        assert!((0..20).all(|round| base.cohort(round) == other.cohort(round)), "{name}");
        match *name {
            "moon" => (),
            // Its second classifier comes behind all other weights.
            "fedgkt" => assert_eq!(base.weights, other.weights[..base.weights.len()]),
            _ => assert_eq!(base.weights, other.weights, "{name}"),
        }
    }
}

#[test]
fn moons_head_changes_no_other_initial_weight() {
    for model in ["model.name=mlp", "model.name=resnet8-thin"] {
        let (base, moon) = (experiment("fedavg", &[model]), experiment("moon", &[model]));
        let spans = moon.graph.params().spans();
        let shared: Vec<_> = spans.iter().filter(|span| base.graph.params().find(&span.name).is_some()).collect();
        let own: Vec<&str> = spans.iter().map(|s| s.name.as_str()).filter(|name| name.starts_with("head.")).collect();
        assert_eq!(own, ["head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"]);
        assert_eq!(shared.len() + own.len(), spans.len());
        let mut n_equal = 0;
        for span in shared {
            let other = base.graph.params().find(&span.name).unwrap();
            // The classifier has other inputs behind the head; everything before it is the same.
            if span.shape == other.shape && !span.name.starts_with("fc") || span.name.starts_with("fc1.weight") {
                assert_eq!(moon.weights[span.range()], base.weights[other.range()], "{model}: {}", span.name);
                n_equal += 1;
            }
        }
        assert!(n_equal > 0, "{model}");
        assert_eq!(moon.buffers, base.buffers, "{model}");
    }
}

#[test]
fn another_seed_gives_another_partition_cohort_and_start() {
    let (a, b) = (experiment("fedavg", &[]), experiment("fedavg", &["seed=6"]));
    assert_ne!(a.partition, b.partition);
    assert_ne!(a.weights, b.weights);
    assert!((0..20).any(|round| a.cohort(round) != b.cohort(round)));
    let run = |seed| hashes(simulation(config("fedavg", &[seed]), 1));
    assert_ne!(run("seed=5"), run("seed=6"));
}

/// A record without what a clock decides.
fn timeless(record: RoundRecord) -> RoundRecord {
    RoundRecord { seconds: Seconds::default(), ..record }
}

/// Every method, and FedProj with all that the server can keep between rounds and with images that are moved.
fn everything() -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    let methods = CATALOGUE.iter().map(|(name, _)| (*name, settings_of(name)));
    let norm = ("fedbn", &[NORM][..]);
    let inputs = ("fedproj", &["method.fedproj.projection.rule=trgp"][..]);
    methods.chain([
        norm,
        inputs,
        ("fedproj", &["preset=leading", "federation.average_evaluated=0.5", "data.augment=true"][..]),
    ])
}

#[test]
fn threads_change_no_number_of_any_method() {
    for (name, own) in everything() {
        let settings = [own, &["federation.evaluate_clients=true"]].concat();
        let run = |n_threads| -> Vec<RoundRecord> {
            run_all(&mut simulation(config(name, &settings), n_threads)).into_iter().map(timeless).collect()
        };
        let one = run(1);
        assert_eq!(one.len(), 3);
        for n_threads in [2, 3] {
            assert_eq!(one, run(n_threads), "{name} on {n_threads} threads");
        }
    }
}

#[test]
fn threads_change_no_byte_of_a_network_with_batch_norm() {
    let settings = ["model.name=resnet8-thin", "federation.rounds=2", "local.epochs=1"];
    let run = |n_threads| hashes(simulation(config("fedproj", &settings), n_threads));
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(3));
}

#[test]
fn a_run_resumed_after_any_round_gives_the_same_records_for_every_method() {
    const N_ROUNDS: usize = 4;
    for (name, own) in everything() {
        let settings = [own, &["federation.rounds=4", "federation.evaluate_clients=true"]].concat();
        let config = config(name, &settings);
        let folder = tempfile::tempdir().unwrap();
        // Stops after each of `stops` rounds as a killed process would: without a word.
        let run = |dir: &str, stops: &[usize]| -> Vec<RoundRecord> {
            let dir = folder.path().join(dir);
            for stop in stops.iter().chain([&N_ROUNDS]) {
                let mut run = Run::open(&dir, &config, None, 2, true).unwrap();
                while run.rounds().len() < *stop {
                    run.round(&|_| ()).unwrap().unwrap();
                }
                if *stop == N_ROUNDS {
                    let summary = run.finish().unwrap();
                    assert_eq!(Some(summary), RunDir::finished(&dir, &config).unwrap());
                    return run.rounds().iter().cloned().map(timeless).collect();
                }
            }
            unreachable!("the last stop is the end")
        };
        let unbroken = run("unbroken", &[]);
        for stop in 0..=N_ROUNDS {
            assert_eq!(unbroken, run(&format!("stopped{stop}"), &[stop]), "{name}, stopped after round {stop}");
        }
        assert_eq!(unbroken, run("often", &[1, 2, 3]), "{name}, stopped after every round");
    }
}

#[test]
fn checkpoints_further_apart_resume_from_the_last_one() {
    let config = config("fedproj", &["federation.rounds=5", "federation.checkpoint_every=2"]);
    let folder = tempfile::tempdir().unwrap();
    let reference = hashes(simulation(config.clone(), 2));
    for stop in 0..5 {
        let dir = folder.path().join(stop.to_string());
        let mut run = Run::open(&dir, &config, None, 2, false).unwrap();
        for _ in 0..stop {
            run.round(&|_| ()).unwrap();
        }
        drop(run);
        let mut run = Run::open(&dir, &config, None, 2, true).unwrap();
        assert_eq!(run.rounds().len(), stop / 2 * 2, "rounds after the last checkpoint are made again");
        while run.round(&|_| ()).unwrap().is_some() {}
        let found: Vec<String> = run.rounds().iter().map(|r| r.model_hash.clone()).collect();
        assert_eq!(found, reference, "stopped after round {stop}");
    }
}

#[test]
fn a_checkpoint_is_one_file_and_a_run_that_was_moved_resumes_from_it() {
    // Weights, the server's state and that of three clients: five times 6 MB.
    let settings = ["federation.rounds=3", "federation.fraction=0.3", "local.epochs=1", "model.hidden=[1200,1200]"];
    let config = config("feddyn", &settings);
    let folder = tempfile::tempdir().unwrap();
    let reference = hashes(simulation(config.clone(), 2));
    let mut run = Run::open(&folder.path().join("a"), &config, None, 2, false).unwrap();
    run.round(&|_| ()).unwrap();
    run.round(&|_| ()).unwrap();
    // A stop by hand writes once more what is there already.
    run.save().unwrap();
    drop(run);
    let (from, to) = (folder.path().join("a"), folder.path().join("b"));
    std::fs::create_dir_all(to.join("checkpoints")).unwrap();
    let mut names = Vec::new();
    for name in ["", "checkpoints"] {
        for entry in std::fs::read_dir(from.join(name)).unwrap().map(Result::unwrap).filter(|e| e.path().is_file()) {
            std::fs::copy(entry.path(), to.join(name).join(entry.file_name())).unwrap();
            names.push(entry.file_name().into_string().unwrap());
        }
    }
    names.retain(|name| name.starts_with("round-"));
    names.sort();
    assert_eq!(names, ["round-000001.ckpt", "round-000002.ckpt"]);
    let mut run = Run::open(&to, &config, None, 2, true).unwrap();
    assert_eq!(run.rounds().len(), 2);
    while run.round(&|_| ()).unwrap().is_some() {}
    let found: Vec<String> = run.rounds().iter().map(|r| r.model_hash.clone()).collect();
    assert_eq!(found, reference);
    run.finish().unwrap();
    drop(run);
    let part = fedproj_core::VerifyPart { from_checkpoint: true, rounds: None };
    let verified = fedproj_core::verify(&to, None, 2, part, &|_| ()).unwrap();
    assert_eq!((verified.from, verified.n_rounds), (2, 1));
}
