//! A network that a configuration describes is the one of the catalogue, if it describes that.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use fedproj_core::{Config, Experiment, Result, Simulation};

fn model_hash(pairs: &[&str]) -> Result<String> {
    let small = ["method.name=moon", "local.epochs=1", "federation.rounds=2"];
    let pairs: Vec<String> = small.iter().chain(pairs).map(|&pair| pair.to_owned()).collect();
    let config = Config::from_layers(None, &pairs)?;
    assert_eq!(Config::from_toml(&config.to_toml()?).unwrap(), config, "what is written is read back");
    let method = config.method.build()?;
    let mut simulation = Simulation::new(Experiment::load(config, method.as_ref(), None)?, method, 1)?;
    simulation.round(&|_| ())?;
    Ok(simulation.round(&|_| ())?.model_hash)
}

#[test]
fn a_perceptron_layer_by_layer_gives_the_catalogues_bytes() {
    let by_name = model_hash(&["model.hidden=[8]"]).unwrap();
    let layers = "model.layers=[{op='flatten', name='flatten'}, {op='linear', name='fc1', outputs=8}, {op='relu'}, \
                  {op='linear', name='fc2'}]";
    assert_eq!(model_hash(&["model.name=layers", layers]).unwrap(), by_name);
    let wider = layers.replace("outputs=8", "outputs=9");
    assert_ne!(model_hash(&["model.name=layers", &wider]).unwrap(), by_name);
}

#[test]
fn a_layer_that_does_not_fit_is_named() {
    let message = |layers: &str| model_hash(&["model.name=layers", layers]).unwrap_err().to_string();
    assert!(message("model.layers=[{op='conv2d', outputs=4, kernel=99}]").contains("node `conv2d1`"));
    assert!(message("model.layers=[{op='linear', rate=0.1}]").contains("`linear` takes no `rate`"));
    assert!(message("model.layers=[]").contains("model.layers"));
    assert!(message("model.layers=[{op='convolution'}]").contains("unknown variant `convolution`"));
    let unused = model_hash(&["model.layers=[{op='relu'}]"]).unwrap_err().to_string();
    assert!(unused.contains("a list of layers where model.name is \"layers\", and only there"), "{unused}");
}
