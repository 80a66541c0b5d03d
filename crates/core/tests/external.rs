//! A method from outside the program: found by the hash of its source, recorded in the run, and missed where it is not.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use fedproj_core::methods::External;
use fedproj_core::{Batch, Config, Error, Loss, Manifest, Method, Result, Run, Step, VerifyPart, verify};
use std::sync::Arc;
use toml::Table;

const SOURCE: &str = "FedProx once more";

/// FedProx, as somebody else would write it.
#[derive(Debug)]
struct Prox(f32);

impl Method for Prox {
    fn check(&self, _: &Config) -> Result<()> {
        Error::require(self.0 >= 0.0, "mu", self.0, "0 or positive")
    }

    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        step.add_scaled_diff(g, self.0, step.weights(), step.weights_round_start());
        step.update(g);
        Ok(())
    }
}

fn config(pairs: &[&str]) -> Config {
    let small = ["model.hidden=[8]", "local.epochs=1", "federation.rounds=2"];
    let pairs: Vec<String> = small.iter().chain(pairs).map(|&pair| pair.to_owned()).collect();
    Config::from_layers(None, &pairs).unwrap()
}

fn external(mu: f64) -> External {
    let make = |settings: &Table| -> Result<Box<dyn Method>> {
        Ok(Box::new(Prox(settings["mu"].as_float().unwrap_or(f64::NAN) as f32)))
    };
    External::register(SOURCE, Table::from_iter([("mu".to_owned(), mu.into())]), Arc::new(make))
}

fn run(dir: &std::path::Path, config: &Config) -> fedproj_core::Summary {
    let mut run = Run::open(dir, config, None, 1, false).unwrap();
    while run.round(&|_| ()).unwrap().is_some() {}
    run.finish().unwrap()
}

#[test]
fn a_copy_of_fedprox_makes_the_same_model_and_its_run_names_its_source() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (folder.path().join("ours"), folder.path().join("theirs"));
    let built_in = run(&ours, &config(&["method.name=fedprox", "method.fedprox.proximal_weight=0.1"]));
    let copy = config(&[]).with_method("Prox", external(0.1)).unwrap();
    let summary = run(&theirs, &copy);
    assert_eq!((summary.method.as_str(), &summary.model_hash), ("Prox", &built_in.model_hash));
    assert_eq!(copy.keys_in_use()["method.external.settings.mu"], "0.1");
    let stronger = config(&[]).with_method("Prox", external(1.0)).unwrap();
    assert_ne!(copy.identity().unwrap(), stronger.identity().unwrap(), "settings name the run");
    let other = run(&folder.path().join("other"), &stronger);
    assert_ne!(other.model_hash, built_in.model_hash, "its settings reach it");

    let manifest = Manifest::read(&theirs).unwrap().unwrap();
    assert_eq!((manifest.method_source.as_str(), &manifest.hashes["method"]), (SOURCE, &external(0.1).hash));
    assert_eq!(verify(&theirs, None, 1, VerifyPart::default(), &|_| ()).unwrap().n_rounds, 2);
}

#[test]
fn a_method_that_is_not_at_hand_is_named_before_anything_runs() {
    let unknown = External { hash: "0123".into(), settings: Table::new() };
    let message = config(&[]).with_method("MyProx", unknown).unwrap_err().to_string();
    assert!(
        message.starts_with("method `MyProx` is a class in Python") && message.contains("manifest.json"),
        "{message}"
    );
    let message = config(&[]).with_method("Prox", external(-1.0)).unwrap_err().to_string();
    assert_eq!(message, "mu = -1: must be 0 or positive", "its own check is asked");
}
