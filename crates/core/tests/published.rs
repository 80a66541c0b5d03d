//! What a finished run publishes is what was evaluated.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod small;

use fedproj_core::methods::CATALOGUE;
use fedproj_core::{Evaluator, Model, Run};
use small::{config, settings_of, simulation};

#[test]
fn every_method_publishes_the_model_that_it_evaluated() {
    let folder = tempfile::tempdir().unwrap();
    let averaged = [("fedavg", "averaged"), ("feddyn", "averaged")];
    for (name, of) in CATALOGUE.iter().copied().chain(averaged) {
        let average: &[&str] = if of == "averaged" { &["federation.average_evaluated=0.9"] } else { &[] };
        let dir = folder.path().join(format!("{name}{}", average.len()));
        let config = config(name, &[settings_of(name), average].concat());
        let mut run = Run::open(&dir, &config, None, 2, false).unwrap();
        while run.round(&|_| ()).unwrap().is_some() {}
        drop(run);
        // The process was killed before it could finish: everything comes from the last checkpoint.
        let run = Run::open(&dir, &config, None, 2, true).unwrap();
        run.finish().unwrap();
        let (experiment, last) = (run.simulation().experiment(), run.rounds().last().unwrap());
        let (weights, buffers) = fedproj_nn::weights::load(&dir.join("model.safetensors"), &experiment.graph).unwrap();
        let model = Model { weights: &weights, buffers: &buffers };
        let evaluator = Evaluator::new(&experiment.graph, 1).unwrap();
        let score = &evaluator.scores(&[model], &experiment.test).unwrap()[0];
        assert_eq!((Some(score.accuracy), Some(score.loss)), (last.accuracy, last.loss), "{name}");
    }
}

#[test]
fn an_average_over_rounds_changes_what_is_published_and_nothing_else() {
    for method in ["fedavg", "feddyn", "fedproj"] {
        let plain = &mut simulation(config(method, &["federation.rounds=4"]), 2);
        let averaged = config(method, &["federation.rounds=4", "federation.average_evaluated=0.45"]);
        let averaged = &mut simulation(averaged, 2);
        let mut expected = Vec::new();
        // The rate grows: 1/3, then 1/2, but no further than ρ.
        for rate in [0.0, 1.0 / 3.0, 0.45, 0.45] {
            let records = [plain.round(&|_| ()).unwrap(), averaged.round(&|_| ()).unwrap()];
            assert_eq!(records[0].model_hash, records[1].model_hash, "{method}: what is sent");
            let now = plain.state().published().weights;
            expected.resize(now.len(), 0.0);
            for (mean, now) in expected.iter_mut().zip(now) {
                *mean = rate * *mean + (1.0 - rate) * f64::from(*now);
            }
            let found = averaged.state().published().weights;
            let worst = found.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-6, "{method}: {worst}");
        }
        assert_ne!(plain.state().published().weights, averaged.state().published().weights, "{method}");
    }
}
