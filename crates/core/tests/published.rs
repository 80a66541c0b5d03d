//! What a finished run publishes is what was evaluated.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod small;

use fedproj_core::methods::CATALOGUE;
use fedproj_core::{Evaluator, Model, Run};
use small::{config, settings_of};

#[test]
fn every_method_publishes_the_model_that_it_evaluated() {
    let folder = tempfile::tempdir().unwrap();
    for (name, _) in CATALOGUE {
        let (dir, config) = (folder.path().join(name), config(name, settings_of(name)));
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
