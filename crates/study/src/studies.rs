//! What each study varies. A further one is a [`Study`] and a variant of the command's `Reproduce`.

use crate::setups::{CIFAR10, CIFAR100, CINIC10, DIGITS, MARC, MNLI, SST2};
use crate::study::{Study, Variant};

/// What most studies do: compare methods on the data sets of the paper's image experiments.
const METHODS: Study = Study {
    name: "",
    title: "",
    setups: &[CIFAR10, CIFAR100, CINIC10],
    fixed: &[],
    key: "method.name",
    flag: "--methods",
    variants: &[],
};

/// The nine methods beside each other.
pub const TABLE1: Study = Study { name: "table1", title: "Table 1, image classification", ..METHODS };

/// Four methods on texts, with a small BERT.
pub const TABLE2: Study =
    Study { name: "table2", title: "Table 2, text classification", setups: &[SST2, MNLI, MARC], ..METHODS };

/// FedProj without projection in some client-rounds.
pub const PROJECTION_DROPOUT: Study = Study {
    name: "projection-dropout",
    title: "Ablation: projection dropout",
    fixed: &["method.name=fedproj"],
    key: "method.fedproj.projection.dropout",
    flag: "--rates",
    ..METHODS
};

/// FedProj with a weight-divergence term in its distillation.
pub const WEIGHT_DIVERGENCE: Study = Study {
    name: "weight-divergence",
    title: "Ablation: weight divergence",
    fixed: &["method.name=fedproj"],
    key: "method.fedproj.distill.alpha",
    flag: "--alphas",
    ..METHODS
};

/// What FedProj gains beyond the paper, part by part, beside the methods that it builds on.
pub const LEADING: Study = Study {
    name: "leading",
    title: "What makes FedProj work",
    setups: &[CIFAR10, CIFAR100, CINIC10, SST2, MNLI, MARC, DIGITS],
    variants: &[
        Variant { name: "leading", method: "fedproj", settings: &["preset=leading"] },
        Variant {
            name: "leading-no-projection",
            method: "fedproj",
            settings: &["preset=leading", "method.fedproj.projection.mode=off"],
        },
        Variant {
            name: "leading-no-averaging",
            method: "fedproj",
            settings: &["preset=leading", "method.fedproj.averages.teacher=0.0"],
        },
        Variant {
            name: "leading-no-correction",
            method: "fedproj",
            settings: &["preset=leading", "method.fedproj.correction.alpha=0.0"],
        },
        Variant {
            name: "leading-lookahead",
            method: "fedproj",
            settings: &["preset=leading-stateless", "method.fedproj.lookahead=0.85"],
        },
        Variant { name: "feddyn-averaged", method: "feddyn", settings: &["federation.average_evaluated={rate}"] },
    ],
    ..METHODS
};
