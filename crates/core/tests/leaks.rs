//! What must not reach training, and what batch-norm cannot train on, is found when data are loaded.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod small;

use fedproj_core::{Experiment, Manifest, Result};
use small::config;
use std::path::Path;

fn load(method: &str, overrides: &[&str], data_dir: Option<&Path>) -> Result<Experiment> {
    let config = config(method, overrides);
    let method = config.method.build()?;
    Experiment::load(config, method.as_ref(), data_dir)
}

#[test]
fn a_public_set_that_holds_test_samples_is_counted_and_its_labels_are_refused() {
    let public = ["data.public=digits", "data.public_samples=0"];
    let labels = "method.fedproj.memory.target=labels";
    let experiment = load("fedproj", &public, None).unwrap();
    let n = Manifest::of(&experiment, 1).sizes["public_in_test"];
    assert!(n >= experiment.test.n_samples(), "{n}: the whole test set is in it");
    let notes = experiment.notes().join("\n");
    assert!(notes.contains(&format!("{n} of 1797 samples of the public set `digits` are in the test set")), "{notes}");
    let error = load("fedproj", &[&public[..], &[labels]].concat(), None).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("train on the answers"), "{error}");
    // A part of the private set has labels that clients may see, and a method without a public set sees none.
    for experiment in [load("fedproj", &[labels], None), load("fedavg", &public, None)] {
        let experiment = experiment.unwrap();
        assert!(experiment.notes().is_empty() && !Manifest::of(&experiment, 1).sizes.contains_key("public_in_test"));
    }
}

#[test]
fn a_table_is_standardised_by_its_training_rows_alone() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<String> = (0..200).map(|i| format!("{},{},{}", f64::from(i % 17).powi(3), i, i % 2)).collect();
    std::fs::write(folder.path().join("t.csv"), rows.join("\n")).unwrap();
    let settings = [
        "data.private={name='csv', path='t.csv', standardise=true}",
        "data.private_samples=0",
        "data.public=none",
        "data.partition={kind='iid', clients=4}",
    ];
    let experiment = load("fedavg", &settings, Some(folder.path())).unwrap();
    assert_eq!((experiment.private.n_samples(), experiment.test.n_samples()), (160, 40));
    let measured = experiment.private.measured_normalisation();
    assert_eq!(experiment.private.normalisation(), &measured);
    assert_eq!(experiment.test.normalisation(), &measured);
    assert_ne!(experiment.test.measured_normalisation(), measured, "or nothing would be shown");
}

#[test]
fn a_batch_of_one_is_rejected_before_training_where_batch_norm_would_see_one_value() {
    // Five clients of 48 samples; images of 8×8 end as one pixel in resnet8, as four in resnet8-thin.
    let check = |model: &str, batch: &str| {
        let settings = [model, batch, "data.partition={kind='iid', clients=5}", "data.public=none"];
        load("fedavg", &settings, None).map(|_| ()).map_err(|e| (e.is_usage(), e.to_string()))
    };
    assert_eq!(check("model.name=resnet8", "local.batch=16"), Ok(()));
    for batch in ["local.batch=47", "local.batch=1"] {
        let (is_usage, message) = check("model.name=resnet8", batch).unwrap_err();
        assert!(is_usage && message.contains("client 0 has 48 samples") && message.contains("hint"), "{message}");
        assert_eq!(check("model.name=resnet8-thin", batch), Ok(()), "{batch}");
        assert_eq!(check("model.name=mlp", batch), Ok(()), "{batch}");
    }
}
