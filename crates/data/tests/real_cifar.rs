//! The real CIFAR files, where there are any: set `FEDPROJ_DATA` to the folder that holds them.

mod data_dir;

use data_dir::data_dir;
use fedproj_data::{LabelSet, PartitionConfig, SourceConfig, load};

#[test]
fn cifar10_is_whole_and_normalised() {
    let Some(dir) = data_dir("cifar-10-batches-bin") else { return };
    let splits = load(&SourceConfig::named("cifar10"), Some(&dir)).unwrap();
    let test = splits.test.as_ref().unwrap();
    for (part, n_per_class) in [(&splits.train, 5000), (test, 1000)] {
        let labels = part.labels().unwrap();
        assert!((0..10).all(|c| labels.iter().filter(|&&l| l == c).count() == n_per_class));
    }
    // The first training image is a frog; its first pixel is (59, 62, 63).
    assert_eq!(splits.train.class_names()[splits.train.labels().unwrap()[0] as usize], "frog");
    let mut first = vec![0.0; splits.train.sample_len()];
    splits.train.gather(&[0], &mut first);
    assert!((first[1] - (62.0 / 255.0 - 0.4822) / 0.1994).abs() < 1e-5);
    let measured = splits.train.measured_normalisation();
    assert!(measured.mean.iter().zip([0.4914, 0.4822, 0.4465]).all(|(a, b)| (a - b).abs() < 1e-3), "{measured:?}");

    let config = PartitionConfig::Dirichlet { beta: 0.3, clients: 100, min_samples: 15 };
    let partition = config.build(&splits.train, 0).unwrap();
    assert!(partition.sizes().all(|size| size >= 15));
    assert_eq!(partition.sizes().sum::<usize>(), 50_000);
}

#[test]
fn cifar100_has_fine_and_coarse_labels_and_makes_a_public_set() {
    let Some(dir) = data_dir("cifar-100-binary") else { return };
    for (labels, n_classes) in [(LabelSet::Fine, 100), (LabelSet::Coarse, 20)] {
        let config = SourceConfig { labels: Some(labels), ..SourceConfig::named("cifar100") };
        let train = load(&config, Some(&dir)).unwrap().train;
        assert_eq!(train.n_classes(), n_classes);
        let counts = (0..n_classes as u32).map(|c| train.labels().unwrap().iter().filter(|&&l| l == c).count());
        assert!(counts.into_iter().all(|n| n == 50_000 / n_classes));
    }
    let splits = load(&SourceConfig::named("cifar100"), Some(&dir)).unwrap();
    let public = splits.concatenated().unwrap().without_labels();
    assert_eq!((public.n_samples(), public.n_classes()), (60_000, 0));
}
