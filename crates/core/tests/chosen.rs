//! Rounds whose clients somebody else chooses: some, none, and those that must be drawn in secret.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod small;

use fedproj_core::privacy::accountant::{Accountant, Mechanism, Sampling};
use fedproj_core::{Coordinator, Experiment};
use small::{config, simulation};

#[test]
fn a_round_without_clients_leaves_everything_as_it_was_but_the_count() {
    for method in ["fedavgm", "fedproj"] {
        let mut simulation = simulation(config(method, &[]), 2);
        let first = simulation.round(&|_| ()).unwrap();
        let (before, clients) = (simulation.state().clone(), simulation.clients().clone());
        let empty = simulation.round_of(&[], &|_| ()).unwrap();
        let mut after = simulation.state().clone();
        assert_eq!((after.n_rounds_done, simulation.clients()), (2, &clients));
        after.n_rounds_done = before.n_rounds_done;
        assert_eq!(after, before);
        assert_eq!((empty.round, empty.cohort.len(), empty.train_loss), (1, 0, None));
        assert_eq!((empty.model_hash, empty.accuracy), (first.model_hash.clone(), first.accuracy));
        assert_eq!((empty.bytes_up, empty.bytes_down), (0, 0));
        let next = simulation.round(&|_| ()).unwrap();
        assert!(next.round == 2 && next.model_hash != first.model_hash);
    }
}

#[test]
fn nobody_chooses_clients_that_privacy_draws_in_secret() {
    let private = |sampling: &str| {
        let sampling = format!("privacy.sampling={sampling}");
        let mut simulation = simulation(config("fedavg", &["privacy.noise_multiplier=2.0", &sampling]), 1);
        simulation.round(&|_| ()).unwrap();
        simulation.round_of(&[0, 1, 2], &|_| ()).map_err(|error| error.to_string())
    };
    for secret in ["fixed", "poisson"] {
        assert!(private(secret).unwrap_err().contains("drawn in secret"), "{secret}");
    }
    assert_eq!(private("public").unwrap().round, 1);
}

#[test]
fn a_runs_epsilon_is_that_of_its_own_sampling_rate() {
    for (sampling, name) in [(Sampling::Poisson, "poisson"), (Sampling::Fixed, "fixed"), (Sampling::Public, "public")] {
        let sampling_is = format!("privacy.sampling={name}");
        let config = config("fedavg", &["privacy={ noise_multiplier = 2.0, delta = 1e-3 }", &sampling_is]);
        let mut simulation = simulation(config, 1);
        let record = simulation.round(&|_| ()).unwrap();
        // Three of four clients take part.
        let of = |rate| Accountant::new(&Mechanism { sampling, rate, noise_multiplier: 2.0 }).epsilon(1, 1e-3);
        let (spent, right) = (record.privacy.unwrap().epsilon, of(0.75));
        assert!((spent - right).abs() < 1e-12, "{name}: {spent}, not {right}");
        assert!(sampling == Sampling::Public || (of(0.375) - right).abs() > 0.01, "{name}");
    }
}

#[test]
fn a_rounds_clients_get_weights_of_their_own_whoever_chose_them() {
    let config = config("pfedhn", &["method.pfedhn.hidden=8"]);
    let method = config.method.build().unwrap();
    let experiment = Experiment::load(config.clone(), method.as_ref(), None).unwrap();
    let mut server = Coordinator::new(experiment, method, 1).unwrap();
    let drawn = server.open().unwrap();
    assert!(drawn.cohort.len() == 3 && drawn.download.personal.keys().eq(&drawn.cohort));
    let left_out: Vec<u32> = (0..4).filter(|client| !drawn.cohort.contains(client)).collect();
    assert!(server.open_with(left_out.clone()).unwrap().download.personal.keys().eq(&left_out));
    assert_eq!(simulation(config, 1).round_of(&left_out, &|_| ()).unwrap().cohort, left_out);
}
