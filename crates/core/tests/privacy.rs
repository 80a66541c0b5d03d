//! Differential privacy: what is released is clipped and noised as the account assumes, and nothing else is released.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod small;

use fedproj_core::{
    ClientResult, ClientState, Config, Contributions, Coordinator, Error, Experiment, LocalStats, PrivacyConfig,
    PrivacySpent, RoundRecord, Run, RunDir, Seconds, ServerState, VerifyPart, verify,
};
use small::{config, hashes, run_all, simulation};

/// Noise so small that sums can be worked out by hand.
const SILENT: &str = "privacy.noise_multiplier=1e-9";
const SEEDED: &str = "privacy.noise=seeded";

fn coordinator(method: &str, settings: &[&str]) -> Coordinator {
    let config = config(method, settings);
    let method = config.method.build().unwrap();
    let experiment = Experiment::load(config, method.as_ref(), None).unwrap();
    Coordinator::new(experiment, method, 1).unwrap()
}

/// A client that moved the first weights so far.
fn moved(server: &Coordinator, client: u32, by: &[f32]) -> ClientResult {
    let mut weights = server.state().weights.clone();
    weights.iter_mut().zip(by).for_each(|(w, by)| *w += by);
    let (buffers, uploads, state) = (Vec::new(), [].into(), ClientState::new());
    let stats = LocalStats { loss: f64::from(client), ..LocalStats::default() };
    ClientResult { client, n_samples: 1 + client as usize, n_steps: 1, weights, buffers, uploads, state, stats }
}

/// Closes a round with these contributions.
fn close(server: &mut Coordinator, results: &dyn Contributions) -> (RoundRecord, ServerState) {
    let opening = server.open().unwrap();
    let record = server.close(&opening, results, 0.0).unwrap();
    (RoundRecord { seconds: Seconds::default(), ..record }, server.state().clone())
}

/// Mean and variance, as multiples of what is expected.
fn check_noise(what: &str, noise: &[f64], std: f64) {
    let n = noise.len() as f64;
    let (mean, variance) = (noise.iter().sum::<f64>() / n, noise.iter().map(|v| v * v).sum::<f64>() / n);
    // Five standard deviations of the mean and of the variance of n normal draws.
    assert!(mean.abs() < 5.0 * std / n.sqrt(), "{what}: mean {mean}, σ {std}");
    let ratio = variance / (std * std);
    assert!((ratio - 1.0).abs() < 5.0 * (2.0 / n).sqrt(), "{what}: {ratio} times the variance that is due");
}

#[test]
fn noise_has_the_variance_that_the_account_assumes() {
    let common =
        ["model.hidden=[300]", "privacy={ noise_multiplier = 2.0, clip = 0.5, clip_logits = 3.0, split = 0.2 }"];
    for (method, extra, share) in [
        ("fedavg", vec![], 1.0),
        ("fedavg", vec![SEEDED], 1.0),
        ("fedavg", vec!["privacy.quantile=0.5"], 0.99),
        ("fedproj", vec!["method.fedproj.distill.epochs=0", "data.public_samples=500"], 0.8),
        (
            "fedproj",
            vec!["method.fedproj.distill.epochs=0", "data.public_samples=500", "privacy.quantile=0.5"],
            0.8 * 0.98,
        ),
    ] {
        let mut server = coordinator(method, &[&common[..], &extra].concat());
        let before = server.state().weights.clone();
        // Three of four clients take part; they stay where they were, so all that moves is noise.
        let still: Vec<ClientResult> = (0..3).map(|client| moved(&server, client, &[])).collect();
        let (_, state) = close(&mut server, &still);
        let noise: Vec<f64> = state.weights.iter().zip(&before).map(|(a, b)| f64::from(*a) - f64::from(*b)).collect();
        check_noise(&format!("{method} {extra:?}"), &noise, 2.0 * 0.5 / f64::sqrt(share) / 3.0);
        assert_eq!(state.targets.is_some(), method == "fedproj", "who releases logits");
        if let Some(targets) = &state.targets {
            // Three clients' logits, of norm 3 in all, are little beside noise of 3 · 2/√0.2 on each of 5000 values.
            let logits: Vec<f64> = targets.logits.iter().map(|v| f64::from(*v)).collect();
            assert_eq!(logits.len(), 5000);
            check_noise(&format!("logits, {extra:?}"), &logits, 2.0 * 3.0 / f64::sqrt(share * 0.25) / 3.0);
        }
    }
}

#[test]
fn updates_are_clipped_weigh_the_same_and_are_divided_by_the_expected_number() {
    let mut server = coordinator("fedavg", &[SILENT, "privacy.clip=1.0"]);
    let before = server.state().weights.clone();
    // Of norm 5, ½ and not a number. Three clients are expected.
    let results = vec![moved(&server, 0, &[3.0, 4.0]), moved(&server, 1, &[0.0, 0.5]), moved(&server, 2, &[f32::NAN])];
    let (_, state) = close(&mut server, &results);
    let by: Vec<f32> = state.weights.iter().zip(&before).map(|(a, b)| a - b).collect();
    for (found, expected) in by.iter().zip([0.6 / 3.0, (0.8 + 0.5) / 3.0, 0.0]) {
        assert!((found - expected).abs() < 1e-6, "{:?}", &by[..3]);
    }
}

#[test]
fn the_limit_moves_towards_the_quantile() {
    let settings = [SILENT, "privacy.clip=1.0", "privacy.quantile=0.5"];
    for (norms, within) in [([0.1, 0.2, 0.3], 1.0), ([5.0, 0.2, 7.0], 1.0 / 3.0), ([2.0, 2.0, 2.0], 0.0)] {
        let mut server = coordinator("fedavg", &settings);
        let results: Vec<ClientResult> =
            norms.iter().zip(0..).map(|(norm, client)| moved(&server, client, &[*norm])).collect();
        assert!((close(&mut server, &results).0.privacy.unwrap().clip - 1.0).abs() < 1e-12);
        let next = close(&mut server, &Vec::<ClientResult>::new()).0.privacy.unwrap().clip;
        let expected = f64::exp(-0.2 * (within - 0.5));
        assert!((next - expected).abs() < 1e-6, "{norms:?}: {next}, expected {expected}");
    }
}

#[test]
fn counts_of_vectors_within_a_limit_have_the_noise_that_the_account_assumes() {
    const N: usize = 400;
    let (z, quantile) = (1.0, 0.95);
    // All vectors stay within both limits, wherever noise moves these: no client moves, and logits are far below 1e20. Noise
    // on the updates is far below the weights' last bits.
    let privacy =
        format!("privacy={{ noise_multiplier = {z}, clip = 1e-20, clip_logits = 1e20, quantile = {quantile} }}");
    let tiny = ["model.hidden=[1]", "data.public_samples=10", "method.feddf.distill.epochs=0"];
    let long = ["federation.rounds=500", "federation.evaluate_every=500"];
    let mut server = coordinator("feddf", &[&tiny[..], &long, &[&privacy, SEEDED]].concat());
    let still: Vec<ClientResult> = (0..3).map(|client| moved(&server, client, &[])).collect();
    let limits: Vec<[f64; 2]> = (0..=N)
        .map(|_| {
            let spent = close(&mut server, &still).0.privacy.unwrap();
            [spent.clip, spent.clip_logits.unwrap()]
        })
        .collect();
    for (at, what) in ["updates", "logits"].into_iter().enumerate() {
        // C ← C exp(−0.2 (share + noise − quantile)), with a share of 1. A client moves its count by ½, the count has a
        // hundredth of the budget, and three clients divide it.
        let noise_of = |pair: &[[f64; 2]]| (pair[1][at] / pair[0][at]).ln() / -0.2 + quantile - 1.0;
        let noise: Vec<f64> = limits.windows(2).map(noise_of).collect();
        check_noise(&format!("count of {what}"), &noise, 0.5 * z / 0.1 / 3.0);
    }
}

#[test]
fn nothing_shows_of_single_clients() {
    for method in ["fedavg", "fedavgm", "fedadam", "feddyn", "fedacg", "feddf", "fedproj"] {
        let settings = ["privacy.noise_multiplier=1.0", SEEDED, "privacy.sampling=poisson", "privacy.quantile=0.5"];
        let closed = |turned: bool, samples: usize| {
            let mut server = coordinator(method, &settings);
            let mut updates = [[0.3, 0.1], [-0.2, 0.4]];
            if turned {
                updates.swap(0, 1);
            }
            let mut results = vec![moved(&server, 0, &updates[0]), moved(&server, 3, &updates[1])];
            results[0].n_samples = samples;
            results[1].stats.loss = samples as f64;
            let (record, state) = close(&mut server, &results);
            assert!(record.cohort.is_empty() && record.train_loss.is_none(), "{method}: {record:?}");
            (record, state)
        };
        assert_eq!(closed(false, 10), closed(true, 500), "{method}");
    }
}

#[test]
fn a_seed_repeats_a_run_and_the_system_does_not() {
    let settings = |noise: &'static str| ["privacy.noise_multiplier=0.5", "privacy.sampling=poisson", noise];
    for method in ["fedavg", "fedprox", "feddyn", "fedproj", "moon"] {
        let hashes = |noise| hashes(simulation(config(method, &settings(noise)), 2));
        assert_eq!(hashes(SEEDED), hashes(SEEDED), "{method}");
        assert_ne!(hashes("privacy.noise=system"), hashes("privacy.noise=system"), "{method}");
    }
}

#[test]
fn rounds_without_clients_release_noise() {
    let settings = ["privacy.noise_multiplier=0.1", "privacy.sampling=poisson", "federation.fraction=0.25", SEEDED];
    let mut simulation = simulation(config("fedproj", &[&settings[..], &["federation.rounds=12"]].concat()), 2);
    let mut n_empty = 0;
    while !simulation.is_done() {
        simulation.round(&|_| ()).unwrap();
        n_empty += usize::from(simulation.last_results().unwrap().is_empty());
    }
    assert!((1..12).contains(&n_empty), "{n_empty} of 12 rounds had no client");
}

#[test]
fn the_budget_ends_a_run_with_a_valid_model() {
    let dir = tempfile::tempdir().unwrap();
    let settings = ["privacy.noise_multiplier=4.0", "federation.rounds=50", "federation.evaluate_every=50", SEEDED];
    let config = config("fedavg", &[&settings[..], &["privacy.epsilon_max=6.0"]].concat());
    let mut run = Run::open(dir.path(), &config, None, 1, false).unwrap();
    while run.round(&|_| ()).unwrap().is_some() {}
    let n = run.rounds().len();
    let told = run.simulation().ended_early().unwrap();
    assert_eq!(told, format!("ended after round {n} of 50: the next would exceed privacy.epsilon_max = 6"));
    let summary = run.finish().unwrap();
    let spent = summary.privacy.clone().unwrap();
    assert!(n > 1 && n < 50 && spent.epsilon <= 6.0 && spent.nominal, "{n} rounds, {spent:?}");
    assert!(summary.last > 0.0 && dir.path().join("model.safetensors").exists());
    // One more round would have been too many.
    let mut longer = config.clone();
    (longer.privacy.epsilon_max, longer.federation.rounds) = (0.0, n as u32 + 1);
    let mut longer = simulation(longer, 1);
    assert!(run_all(&mut longer)[n].privacy.as_ref().unwrap().epsilon > 6.0 && longer.ended_early().is_none());
    assert_eq!(RunDir::finished(dir.path(), &config).unwrap(), Some(summary));
    drop(run);
    let verified = verify(dir.path(), None, 1, VerifyPart::default(), &|_| ()).unwrap();
    assert_eq!(verified.n_rounds as usize, n);
}

#[test]
fn clients_are_drawn_as_the_account_assumes() {
    const N: u32 = 4000;
    // Each of four clients by a coin of its own, or three of them: the chance of a client, and of a pair.
    for (sampling, pair) in [("poisson", 0.75 * 0.75), ("fixed", 0.5)] {
        let sampling_is = format!("privacy.sampling={sampling}");
        let mut server = coordinator("fedavg", &["privacy.noise_multiplier=1.0", &sampling_is]);
        let (mut n_drawn, mut n_pairs) = ([0; 4], [[0; 4]; 4]);
        for _ in 0..N {
            // A round that begins again draws again.
            let cohort = server.open().unwrap().cohort;
            assert!(sampling == "poisson" || cohort.len() == 3, "{cohort:?}");
            for (at, client) in cohort.iter().enumerate() {
                n_drawn[*client as usize] += 1;
                cohort[..at].iter().for_each(|other| n_pairs[*other as usize][*client as usize] += 1);
            }
        }
        let check = |found: u32, chance: f64| {
            let (mean, deviation) = (f64::from(N) * chance, (f64::from(N) * chance * (1.0 - chance)).sqrt());
            assert!((f64::from(found) - mean).abs() < 5.0 * deviation, "{sampling}: {found} of {N}, expected {mean}");
        };
        for (client, found) in n_drawn.into_iter().enumerate() {
            check(found, 0.75);
            for found in &n_pairs[client][client + 1..] {
                check(*found, pair);
            }
        }
    }
}

#[test]
fn where_clients_are_drawn_in_a_fixed_number_none_keeps_anything() {
    // The methods that each kind of sampling permits, and those of them whose clients keep something.
    let permitted = |sampling: &str| -> (usize, Vec<String>) {
        let (mut n, mut keeping) = (0, Vec::new());
        let variants = fedproj_core::methods::CATALOGUE.iter().map(|(name, _)| (*name, "seed=5"));
        for (name, more) in variants.chain([("fedproj", "method.fedproj.correction.alpha=0.1")]) {
            let (name_is, sampling_is) = (format!("method.name={name}"), format!("privacy.sampling={sampling}"));
            let private = ["privacy.noise_multiplier=1.0", &sampling_is];
            let settings = [&private[..], small::settings_of(name), &[more, &name_is]].concat();
            let all: Vec<String> = small::BASE.iter().chain(&settings).map(|s| (*s).to_owned()).collect();
            let Ok(config) = Config::from_layers(None, &all) else { continue };
            let mut simulation = simulation(config, 2);
            run_all(&mut simulation);
            n += 1;
            if simulation.clients().values().any(|kept| !kept.is_empty()) {
                keeping.push(name.to_owned());
            }
        }
        (n, keeping)
    };
    let (n_poisson, keeping) = permitted("poisson");
    assert_eq!(keeping, ["feddyn", "moon", "fedspeed", "fedproj"]);
    assert_eq!(permitted("fixed"), (n_poisson - keeping.len(), Vec::new()));
}

#[test]
fn shares_of_the_noise_of_nodes_spend_one_rounds_budget() {
    let (z, n) = (3.0, 7);
    for split in [0.2, 0.7] {
        let config = PrivacyConfig { noise_multiplier: z, split, ..PrivacyConfig::default() };
        for (has_logits, shares) in [(false, vec![1.0]), (true, vec![1.0 - split, split])] {
            let released = config.released(has_logits);
            // Variance of a sum over n, as a multiple of the squared limit: (z² / share) for each vector.
            let unit = f64::from(1 << 20);
            let squares = released.iter().map(|of| config.share_of(of, n).variance * n as f64 / (unit * unit));
            let due = shares.iter().map(|share| z * z / share);
            for (found, due) in squares.clone().zip(due) {
                assert!((found / due - 1.0).abs() < 1e-9, "{found}, {due} is due");
            }
            let spent: f64 = squares.map(f64::recip).sum();
            assert!((spent - 1.0 / (z * z)).abs() < 1e-9 && released.len() == shares.len(), "{spent}");
        }
    }
}

#[test]
fn settings_that_do_nothing_without_noise_are_said_to() {
    let notes = |settings: &[&str]| {
        let config = config("fedavg", settings);
        let method = config.method.build().unwrap();
        let all = Experiment::load(config, method.as_ref(), None).unwrap().notes();
        all.into_iter().filter(|note| note.contains("no privacy")).count()
    };
    assert_eq!((notes(&[]), notes(&["privacy.clip=0.5"])), (0, 1));
    assert_eq!(notes(&["privacy.clip=0.5", "privacy.noise_multiplier=1.0"]), 0);
}

#[test]
fn a_large_epsilon_is_shown_short() {
    let shown = |epsilon, nominal| PrivacySpent { epsilon, delta: 1e-5, nominal, clip: 1.0, clip_logits: None }.shown();
    assert_eq!((shown(7.981, false), shown(999_999.0, true)), ("7.98".into(), "999999.00 (nominal)".into()));
    assert_eq!((shown(4.4e300, false), shown(1.25e8, true)), ("4.40e300".into(), "1.25e8 (nominal)".into()));
}

#[test]
fn noise_of_nodes_needs_a_federation() {
    let config = config("fedavg", &["privacy.noise_multiplier=1.0", "privacy.noise=nodes", "privacy.sampling=public"]);
    let dir = tempfile::tempdir().unwrap();
    let error = Run::open(dir.path(), &config, None, 1, false).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("privacy.noise=system"), "{error}");
}

#[test]
fn a_budget_that_the_first_round_exceeds_is_rejected() {
    let config = config("fedavg", &["privacy.noise_multiplier=0.5", "privacy.epsilon_max=1.0"]);
    let method = config.method.build().unwrap();
    let experiment = Experiment::load(config, method.as_ref(), None).unwrap();
    let error = Coordinator::new(experiment, method, 1).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("the first round alone takes ε"), "{error}");
}

#[test]
fn releases_that_a_crash_lost_count() {
    let settings = ["privacy.noise_multiplier=2.0", "federation.checkpoint_every=10"];
    let epsilons = |records: &[RoundRecord]| -> Vec<f64> {
        records.iter().map(|record| record.privacy.as_ref().unwrap().epsilon).collect()
    };
    let whole = epsilons(&run_all(&mut simulation(config("fedavg", &settings), 1)));
    let dir = tempfile::tempdir().unwrap();
    let config = config("fedavg", &settings);
    for n_lost in [0, 2] {
        // Killed before its checkpoint.
        let mut run = Run::open(dir.path(), &config, None, 1, true).unwrap();
        assert!(run.rounds().is_empty());
        let first = run.round(&|_| ()).unwrap().unwrap().privacy.clone().unwrap().epsilon;
        assert!((first - whole[n_lost]).abs() < 1e-12, "{n_lost} lost: {first}, not one of {whole:?}");
        run.round(&|_| ()).unwrap();
    }
    let mut run = Run::open(dir.path(), &config, None, 1, true).unwrap();
    while run.round(&|_| ()).unwrap().is_some() {}
    run.finish().unwrap();
    drop(run);
    let verified = verify(dir.path(), None, 1, VerifyPart::default(), &|_| ()).unwrap();
    assert!(
        verified.n_rounds == 0 && verified.notes.iter().any(|note| note.contains("operating system")),
        "{verified:?}"
    );
    // What does not follow from the recorded rounds is still found.
    let path = dir.path().join("summary.json");
    let forged = std::fs::read_to_string(&path).unwrap().replace("\"best\": 0", "\"best\": 1");
    std::fs::write(&path, forged).unwrap();
    assert!(matches!(verify(dir.path(), None, 1, VerifyPart::default(), &|_| ()), Err(Error::Differs { .. })));
}

#[test]
fn what_is_not_accounted_for_is_rejected() {
    let error = |settings: &[&str]| {
        let all = small::BASE.iter().chain(&["privacy.noise_multiplier=1.0"]).chain(settings);
        let all: Vec<String> = all.map(|s| (*s).to_owned()).collect();
        let loaded = Config::from_layers(None, &all).and_then(|config| {
            let method = config.method.build()?;
            Coordinator::new(Experiment::load(config, method.as_ref(), None)?, method, 1)
        });
        loaded.map(drop).unwrap_err().to_string()
    };
    for (settings, reason) in [
        (&["method.name=scaffold", small::SGD][..], "control variates"),
        (&["method.name=fednova"], "local steps"),
        (&["method.name=fedet"], "needs each client's"),
        (&["method.name=feddyn"], "privacy.sampling=poisson"),
        (&["method.name=fedproj", "method.fedproj.correction.alpha=0.1"], "keeps a state per client"),
        (&["method.name=fedproj", "method.fedproj.distill.weights=samples"], "sample counts are private"),
        (&["method.name=fedproj", "method.fedproj.memory.feature_weight=1.0"], "features"),
        (&["federation.evaluate_clients=true"], "scores of single clients"),
        (&["federation.sum=fixed"], "not in integers"),
        (&["data.private.standardise=true"], "without noise"),
        (&["privacy.noise=nodes"], "privacy.sampling=public"),
        (&["privacy.noise=nodes", "privacy.sampling=public", "privacy.quantile=0.5"], "privacy.quantile=0.0"),
        (&["privacy={ noise = 'nodes', sampling = 'public', noise_multiplier = 1e-6 }"], "too small or too large"),
        (&["federation.robust.clip_ratio=3.0"], "federation.robust"),
        (
            &[
                "model={ name = 'layers', layers = [{op='conv2d', outputs=4, kernel=3}, {op='batch_norm'}, {op='flatten'}, {op='linear'}] }",
            ],
            "batch-norm",
        ),
        (&["privacy.delta=0.5"], "below one over the 4 clients"),
        (&["privacy.noise_multiplier=1e-300"], "with so little noise, no ε bounds"),
        (&["privacy.noise_multiplier=0.0", "privacy.epsilon_max=3.0"], "without noise there is no such ε"),
        (&["privacy.clip=0.0"], "privacy.clip = 0"),
        (&["privacy.split=1.0"], "privacy.split = 1"),
    ] {
        let message = error(settings);
        assert!(message.contains(reason), "{settings:?}: {message}");
    }
}
