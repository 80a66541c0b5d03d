//! Clients with two networks on CIFAR-10, and what they gain from each other's logits.

use crate::{accuracy, check, difference, markdown, root, says};
use fedproj_core::{StoredRun, Summary};
use fedproj_study::{ComparedRow, NetworkAccuracy, compare, load};

/// The runs by their folders, and what crosses the networks.
const EXCHANGES: [(&str, &str); 3] = [("none", "no exchange"), ("feddf", "FedDF"), ("fedproj", "FedProj")];

fn runs() -> Vec<(String, StoredRun)> {
    let of = |(folder, name): (&str, &str)| {
        let runs = load(&[root().join("results/networks-cifar10").join(folder)], false).unwrap().0;
        assert_eq!(runs.len(), 3, "{folder}");
        runs.into_iter().map(|loaded| (name.to_owned(), loaded.run)).collect::<Vec<_>>()
    };
    EXCHANGES.into_iter().flat_map(of).collect()
}

/// What a network reached, against the runs without exchange.
fn rows_of(network: &str) -> Vec<ComparedRow> {
    let summary = |(name, run): &(String, StoredRun)| {
        let networks = NetworkAccuracy::of(run);
        let headline = networks.iter().find(|of| of.network == network).unwrap().accuracy;
        (name.clone(), Summary { headline, ..run.summary.clone() })
    };
    compare(&runs().iter().map(summary).collect::<Vec<_>>()).rows
}

#[test]
fn networks_learn_from_each_other_as_was_measured() {
    let (thin, cnn) = (rows_of("resnet8-thin"), rows_of("cnn"));
    let row = |(thin, cnn): (&ComparedRow, &ComparedRow)| {
        let cells = |row| format!("{} | {}", accuracy(row), difference(row));
        format!("| {} | {} | {} |", thin.name, cells(thin), cells(cnn))
    };
    let head = "| what crosses networks | resnet8-thin: accuracy % | Δ | cnn: accuracy % | Δ |";
    let expected = markdown(head, "|---|---:|---:|---:|---:|", thin.iter().zip(&cnn).map(row));
    check("docs/networks.md", "networks cifar10", &expected);
    let gain = |rows: &[ComparedRow]| difference(&rows[2]).replace('+', "");
    says(
        "docs/networks.md",
        &format!("With FedProj `resnet8-thin` gains {} points and `cnn` {}", gain(&thin), gain(&cnn)),
    );
}
