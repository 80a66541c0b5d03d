//! Other settings than the table's on CIFAR-10, and what became of `FedProj`'s memory.

use crate::{FULL, check, markdown, mean, percent, root, run_of, typographic};
use fedproj_core::{Config, RoundRecord};
use std::ops::Range;
use std::path::Path;

/// What local training did to the memory of FedProj's clients in the last 50 rounds of the full study.
#[test]
fn what_became_of_the_memory_is_what_was_measured() {
    let rows = (0..3).map(|seed| {
        let rounds = run_of(FULL, 0.3, "fedproj", seed).rounds;
        let over = |of: fn(&RoundRecord) -> Option<f64>| mean(rounds[50..].iter().map(|r| of(r).unwrap()));
        let (projected, cosine) = (100.0 * over(|r| r.projection_rate), over(|r| r.cosine));
        let (before, after) = (over(|r| r.memory_loss_before), over(|r| r.memory_loss_after));
        typographic(&format!("| {seed} | {projected:.0} | {cosine:.2} | {before:.3} | {after:.3} |"))
    });
    let head = "| seed | steps projected % | cosine of g and r | memory loss before local training | after |";
    check("docs/reproduction.md", "table1 full memory", &markdown(head, "|---|---:|---:|---:|---:|", rows));
}

/// Ways to hold the memory that were tried in short runs, by their folders.
const HOLDS: [(&str, &str); 5] = [
    ("gradient", "g projected, Adam (the default)"),
    ("update", "Adam's step projected"),
    ("sgd", "g projected, plain SGD 0.01"),
    ("soft", "memory loss added, Adam"),
    ("off", "nothing, Adam"),
];

#[test]
fn what_holds_the_memory_is_what_was_measured() {
    check("results/cifar10-memory/README.md", "memory", &memory_table("results/cifar10-memory", &HOLDS, &[1, 5]));
}

/// A row for each of a folder's runs: what became of the memory between the first and the last of some rounds, and the accuracy
/// from each to the next.
fn memory_table(folder: &str, runs: &[(&str, &str)], bounds: &[usize]) -> String {
    let spans: Vec<Range<usize>> = bounds.windows(2).map(|pair| pair[0]..pair[1]).collect();
    let all = bounds[0]..bounds[bounds.len() - 1];
    let rows = runs.iter().map(|(run, what)| {
        let rounds = rounds_of(&root().join(folder).join(run));
        let text = |of: fn(&RoundRecord) -> Option<f64>, over: &Range<usize>, decimals: usize| {
            let values: Option<Vec<f64>> = rounds[over.clone()].iter().map(of).collect();
            values.map_or("–".into(), |values| format!("{:.decimals$}", mean(values.into_iter())))
        };
        let projected = text(|r| r.projection_rate.map(|rate| 100.0 * rate), &all, 0);
        let (before, after) = (text(|r| r.memory_loss_before, &all, 3), text(|r| r.memory_loss_after, &all, 3));
        let accuracy = |span| text(|r| r.accuracy.map(|accuracy| 100.0 * accuracy), span, 1);
        let accuracies = spans.iter().map(accuracy).collect::<Vec<_>>().join(" | ");
        format!("| {what} | {projected} | {before} | {after} | {accuracies} |")
    });
    let span = |span: &Range<usize>| match spans.len() {
        1 => " accuracy % |".to_owned(),
        _ => format!(" accuracy %, rounds {}–{} |", span.start + 1, span.end),
    };
    let spans: String = spans.iter().map(span).collect();
    let head = format!("| clients | steps projected % | memory loss before | after |{spans}");
    let aligned = format!("|---{}|", "|---:".repeat(head.matches('|').count() - 2));
    markdown(&head, &aligned, rows)
}

/// The rounds of a run that need not have come to its end.
fn rounds_of(run: &Path) -> Vec<RoundRecord> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Methods whose settings were tried with a seed of its own, and the runs' folders; each method's defaults come first.
const TUNED: [(&str, &[(&str, &str)]); 9] = [
    ("FedAvg", &[("fedavg", "Adam 1e-3"), ("fedavg-sgd", "SGD 0.01, momentum 0.9")]),
    ("FedProx", &[("fedprox", "weight 0.01"), ("fedprox-0.1", "0.1"), ("fedprox-0.001", "0.001")]),
    (
        "FedNova",
        &[("fednova", "Adam 1e-3"), ("fednova-rho", "momentum formula 0.9"), ("fednova-sgd", "SGD 0.01, momentum 0.9")],
    ),
    ("FedDyn", &[("feddyn", "α = 0.01"), ("feddyn-0.1", "0.1"), ("feddyn-0.001", "0.001")]),
    ("MOON", &[("moon", "weight 1"), ("moon-5", "5"), ("moon-0.1", "0.1")]),
    ("FedRCL", &[("fedrcl", "weights 1"), ("fedrcl-w0.1", "0.1"), ("fedrcl-sgd", "SGD 0.01, momentum 0.9")]),
    ("FedET", &[("fedet", "rate 1e-5"), ("fedet-lr1e-4", "1e-4"), ("fedet-lr1e-6", "1e-6")]),
    ("FedDF", &[("feddf", "rate 1e-5"), ("feddf-lr1e-4", "1e-4"), ("feddf-lr1e-6", "1e-6")]),
    ("FedProj", &[("fedproj", "rate 1e-5"), ("fedproj-lr1e-4", "1e-4"), ("fedproj-sgd", "SGD 0.01, momentum 0.9")]),
];

/// What was changed of FedProj, by the runs' folders, in words and as overrides of its defaults.
const CHANGES: [(&str, &str, &str); 8] = [
    ("fedproj", "the defaults", "seed=100"),
    ("fedproj-lr1e-4", "distillation rate 1e-4 instead of 1e-5", "method.fedproj.distill.optimizer.lr=1e-4"),
    ("fedproj-mem60000", "memory of all 60 000 public images instead of 10 000", "method.fedproj.memory.size=60000"),
    ("fedproj-warm1", "projection from the second round on instead of the third", "method.fedproj.projection.warmup=1"),
    ("fedproj-bn", "batch-norm's statistics move with the memory", "method.fedproj.memory.bn=update"),
    (
        "fedproj-sgd",
        "SGD 0.01, momentum 0.9, instead of Adam",
        r#"local.optimizer={kind="sgd", lr=0.01, momentum=0.9, weight_decay=5e-5}"#,
    ),
    ("fedproj-update", "Adam's step projected instead of g", "method.fedproj.projection.space=update"),
    ("fedproj-soft", "memory loss added, nothing projected", "method.fedproj.projection.mode=soft"),
];

#[test]
fn what_changes_fedproj_is_what_was_measured() {
    let folder = "results/table1-cifar10-tuning";
    let config = |run: &str, overrides: &[String]| {
        let text = std::fs::read_to_string(root().join(folder).join(run).join("config.toml")).unwrap();
        Config::from_layers(Some(&text.parse().unwrap()), overrides).unwrap().to_toml().unwrap()
    };
    for (run, _, change) in CHANGES {
        assert_eq!(config(run, &[]), config("fedproj", &[change.to_owned()]), "{run} is not FedProj with {change}");
    }
    let mut runs = CHANGES.map(|(run, what, _)| (run, what)).to_vec();
    runs.push(("feddf", "nothing (FedDF)"));
    check("results/table1-cifar10-tuning/README.md", "changes", &memory_table(folder, &runs, &[8, 13]));
}

/// Mean of the ninth to the thirteenth round, which all runs reached.
#[test]
fn what_tuning_gave_is_what_was_measured() {
    let folder = "results/table1-cifar10-tuning";
    let outcome = |(run, setting): &(&str, &str)| {
        let late = &rounds_of(&root().join(folder).join(run))[8..13];
        format!("{:.1} ({setting})", percent(late.iter().map(|r| r.accuracy.unwrap())))
    };
    let rows = TUNED.into_iter().map(|(method, settings)| {
        let mut cells: Vec<String> = settings.iter().map(outcome).collect();
        cells.resize(3, String::new());
        format!("| {method} | {} |", cells.join(" | "))
    });
    let table = markdown("| method | defaults, % | others, % | |", "|---|---|---|---|", rows);
    check("results/table1-cifar10-tuning/README.md", "tuning", &table);
}

/// The table's first seed with the memory loss added, as far as it was run, beside its `FedProj` and its `FedDF`.
#[test]
fn what_a_held_memory_gave_is_what_was_measured() {
    let runs = [
        ("table1-cifar10-full/beta0.3-fedproj-seed0", "g projected (FedProj)"),
        ("table1-cifar10-tuning/fedproj-soft-seed0", "memory loss added, nothing projected"),
        ("table1-cifar10-full/beta0.3-feddf-seed0", "nothing (FedDF)"),
    ];
    let warm_up = |(run, _): (&str, &str)| {
        let hashes = rounds_of(&root().join("results").join(run)).into_iter().take(10).map(|r| r.model_hash);
        hashes.collect::<Vec<_>>()
    };
    assert!(runs.map(warm_up).windows(2).all(|pair| pair[0] == pair[1]), "the runs differ before projection begins");
    check("docs/reproduction.md", "table1 full held", &memory_table("results", &runs, &[10, 20, 30]));
}
