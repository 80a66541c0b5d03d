//! What partitions promise, for random data and requests.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic too")]

use fedproj_data::{Dataset, Partition, PartitionConfig, Samples, Shape};
use proptest::prelude::*;

fn dataset(labels: Vec<u32>, n_classes: u32) -> Dataset {
    let values = Samples::F32(vec![0.0; labels.len()]);
    let names = (0..n_classes).map(|c| c.to_string()).collect();
    Dataset::new("random", Shape::Vector { features: 1 }, values, Some(labels), names).unwrap()
}

/// Labels of 1 to 7 classes, some of them rare or absent.
fn labelled() -> impl Strategy<Value = Dataset> {
    (1_u32..8).prop_flat_map(|n_classes| {
        let label = prop_oneof![4 => Just(0), 1 => 0..n_classes];
        prop::collection::vec(label, 1..400).prop_map(move |labels| dataset(labels, n_classes))
    })
}

fn all_indices(partition: &Partition) -> Vec<u32> {
    let mut all: Vec<u32> = (0..partition.n_clients()).flat_map(|k| partition.indices(k).to_vec()).collect();
    all.sort_unstable();
    all
}

/// If the request is possible: every sample exactly once, the minimum kept, the same seed the same partition.
fn check(config: &PartitionConfig, data: &Dataset, n_clients: usize, n_min: usize, seed: u64) -> Option<Partition> {
    let partition = config.build(data, seed).ok()?;
    assert_eq!(partition.n_clients(), n_clients);
    assert_eq!(all_indices(&partition), (0..data.n_samples() as u32).collect::<Vec<_>>());
    assert!(partition.sizes().all(|size| size >= n_min.max(1)), "{:?}", partition.sizes().collect::<Vec<_>>());
    assert_eq!(partition, config.build(data, seed).unwrap());
    Some(partition)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn dirichlet_deals_every_sample_once_and_keeps_the_minimum(
        data in labelled(), n_clients in 1_usize..40, n_min in 0_usize..12,
        beta in prop_oneof![Just(1e-300), 0.001..0.1, 0.1..10.0, Just(1e9)], seed: u64,
    ) {
        let config = PartitionConfig::Dirichlet { beta, clients: n_clients, min_samples: n_min };
        let is_possible = n_clients * n_min.max(1) <= data.n_samples();
        prop_assert_eq!(check(&config, &data, n_clients, n_min, seed).is_some(), is_possible);
    }

    #[test]
    fn quantity_deals_every_sample_once_and_keeps_the_minimum(
        data in labelled(), n_clients in 1_usize..40, n_min in 0_usize..12,
        beta in prop_oneof![Just(1e-300), 0.001..10.0, Just(1e9)], seed: u64,
    ) {
        let config = PartitionConfig::Quantity { beta, clients: n_clients, min_samples: n_min };
        let is_possible = n_clients * n_min.max(1) <= data.n_samples();
        prop_assert_eq!(check(&config, &data, n_clients, n_min, seed).is_some(), is_possible);
    }

    #[test]
    fn iid_sizes_differ_by_at_most_one(data in labelled(), n_clients in 1_usize..40, seed: u64) {
        let found = check(&PartitionConfig::Iid { clients: n_clients }, &data, n_clients, 1, seed);
        prop_assert_eq!(found.is_some(), n_clients <= data.n_samples());
        prop_assert!(found.is_none_or(|p| p.sizes().max() <= p.sizes().min().map(|least| least + 1)));
    }

    #[test]
    fn shards_deal_every_sample_once(data in labelled(), n_clients in 1_usize..20, each in 1_usize..5, seed: u64) {
        let config = PartitionConfig::Shards { clients: n_clients, shards_per_client: each };
        let is_possible = n_clients * each <= data.n_samples();
        prop_assert_eq!(check(&config, &data, n_clients, each, seed).is_some(), is_possible);
    }

    #[test]
    fn clients_hold_exactly_as_many_labels_as_asked(n_clients in 1_usize..30, each in 1_usize..7, seed: u64) {
        let data = dataset((0..600).map(|i| i % 6).collect(), 6);
        let config = PartitionConfig::Labels { clients: n_clients, labels_per_client: each };
        prop_assert_eq!(config.build(&data, seed).is_ok(), each <= 6);
        if each <= 6 && n_clients * each >= 6 {
            let partition = check(&config, &data, n_clients, each, seed).unwrap();
            for client in 0..n_clients {
                let counts = partition.class_counts(client, data.labels().unwrap(), 6);
                prop_assert_eq!(counts.iter().filter(|&&n| n > 0).count(), each);
            }
        }
    }

    #[test]
    fn one_class_clients_hold_their_class_only(n_clients in 1_usize..30, seed: u64) {
        let data = dataset((0..100).map(|i| i % 4).collect(), 4);
        match check(&PartitionConfig::OneClass { clients: n_clients }, &data, n_clients, 1, seed) {
            None => prop_assert!(n_clients < 4),
            Some(partition) => for client in 0..n_clients {
                prop_assert!(partition.indices(client).iter().all(|i| *i as usize % 4 == client % 4));
            },
        }
    }

    #[test]
    fn natural_clients_are_the_groups(groups in prop::collection::vec(0_u32..9, 1..100)) {
        let data = dataset(vec![0; groups.len()], 1).with_groups(groups.clone()).unwrap();
        let mut distinct = groups.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let partition = check(&PartitionConfig::Natural {}, &data, distinct.len(), 1, 0).unwrap();
        for (client, group) in distinct.iter().enumerate() {
            prop_assert!(partition.indices(client).iter().all(|&i| groups[i as usize] == *group));
        }
    }

    #[test]
    fn virtual_clients_draw_distinct_samples_in_range(
        n_clients in 1_usize..2_000_000, n_draws in 1_usize..50, seed: u64,
    ) {
        let data = dataset(vec![0; 50], 1);
        let partition = PartitionConfig::Virtual { clients: n_clients, samples: n_draws }.build(&data, seed).unwrap();
        let drawn = partition.indices(n_clients - 1);
        prop_assert_eq!(drawn.len(), n_draws);
        prop_assert!(drawn.windows(2).all(|w| w[0] < w[1]) && drawn[n_draws - 1] < 50);
    }
}

/// CIFAR-10's labels in number, in an order of their own.
fn like_cifar10() -> Dataset {
    dataset((0..50_000).map(|i| i * 7 % 10).collect(), 10)
}

#[test]
fn hopeless_draws_end_in_a_repair() {
    let data = like_cifar10();
    let config = PartitionConfig::Dirichlet { beta: 0.01, clients: 500, min_samples: 15 };
    let partition = check(&config, &data, 500, 15, 0).unwrap();
    assert!(partition.n_moved() > 0);
    // The tightest request of all: everybody holds the minimum and nothing else.
    let config = PartitionConfig::Dirichlet { beta: 0.01, clients: 500, min_samples: 100 };
    let partition = check(&config, &data, 500, 100, 0).unwrap();
    assert!(partition.sizes().all(|size| size == 100));
}

#[test]
fn usual_dirichlet_requests_need_no_repair_and_smaller_beta_skews_more() {
    let data = like_cifar10();
    let labels = data.labels().unwrap();
    let skew = |beta, seed| {
        let config = PartitionConfig::Dirichlet { beta, clients: 100, min_samples: 15 };
        let partition = config.build(&data, seed).unwrap();
        assert_eq!(partition.n_moved(), 0, "beta {beta}, seed {seed}");
        partition.skew_index(labels, 10)
    };
    for seed in 0..3 {
        let (strong, mild, weak) = (skew(0.3, seed), skew(0.5, seed), skew(100.0, seed));
        assert!(strong > mild && mild > weak, "{strong} {mild} {weak}");
        assert!((0.4..0.8).contains(&strong) && weak < 0.1, "{strong} {weak}");
    }
}

#[test]
fn seeds_change_the_partition() {
    let data = like_cifar10();
    let config = PartitionConfig::Dirichlet { beta: 0.3, clients: 10, min_samples: 10 };
    assert_ne!(config.build(&data, 0).unwrap(), config.build(&data, 1).unwrap());
}
