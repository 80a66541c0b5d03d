//! Contributions on disk are fused like contributions in memory, in any order of arrival.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use fedproj_core::{ClientState, Config, Coordinator, Experiment, LocalTraining, Part};
use fedproj_net::server::spool::{Spool, Spooled};
use fedproj_net::wire::{Contribution, NamedBlob, encode_f32, part_name};

#[test]
fn order_of_arrival_and_the_way_through_the_disk_do_not_show() {
    let rules = ["rule='none'", "rule='median'", "rule='krum'", "clip=0.05", "clip_ratio=0.5, claim_ratio=1.0"];
    for (rule, sum) in rules.into_iter().map(|rule| (rule, "float")).chain([("rule='none'", "fixed")]) {
        let settings = [
            "method.name=scaffold".to_owned(),
            "local.optimizer={kind='sgd', lr=0.1}".into(),
            "local.epochs=1".into(),
            // More weights than a block of any reader holds.
            "model.hidden=[400]".into(),
            format!("federation.robust={{ {rule} }}"),
            format!("federation.sum={sum}"),
        ];
        let config = Config::from_layers(None, &settings).unwrap();
        let server = || {
            let method = config.method.build().unwrap();
            let experiment = Experiment::load(config.clone(), method.as_ref(), None).unwrap();
            Coordinator::new(experiment, method, 1).unwrap()
        };
        let mut in_memory = server();
        let opening = in_memory.open().unwrap();
        let mut training = LocalTraining::new(in_memory.experiment(), in_memory.method()).unwrap();
        let train = |client| training.run(in_memory.method(), &opening.download, client, &ClientState::new()).unwrap();
        let results: Vec<_> = [1, 4, 6, 9].map(train).into();
        let dir = tempfile::tempdir().unwrap();
        let spool = Spool::new(dir.path(), "run", 0);
        // Arrived last to first.
        let accepted = results.iter().rev().map(|r| {
            let store = spool.client(r.client).unwrap();
            let vectors = [
                (Part::Weights, &r.weights),
                (Part::Buffers, &r.buffers),
                (Part::Upload("control_variate"), &r.uploads["control_variate"]),
            ];
            let named = |(part, values): (Part<'_>, &Vec<f32>)| NamedBlob {
                name: part_name(part),
                blob: store.put(&encode_f32(values)).unwrap(),
            };
            Contribution {
                run: "run".into(),
                round: 0,
                client: r.client,
                n_samples: r.n_samples as u64,
                n_steps: r.n_steps,
                stats: r.stats.clone(),
                parts: vectors.map(named).into(),
            }
        });
        let vault = fedproj_net::Vault::default();
        let (spooled, damaged) = Spooled::open(dir.path(), &vault, accepted.collect()).unwrap();
        assert!(damaged.is_empty(), "{damaged:?}");
        let mut on_disk = server();
        on_disk.open().unwrap();
        let from_disk = on_disk.close(&opening, &spooled, 0.0).unwrap();
        let from_memory = in_memory.close(&opening, &results, 0.0).unwrap();
        assert_eq!(from_disk.model_hash, from_memory.model_hash, "{rule}");
        assert_eq!((from_disk.cohort, from_disk.bytes_up), (vec![1, 4, 6, 9], from_memory.bytes_up));
        assert_eq!(on_disk.state().vectors, in_memory.state().vectors, "{rule}");
    }
}
