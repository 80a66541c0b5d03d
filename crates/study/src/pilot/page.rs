//! The study's page.

use super::results::Results;
use super::study::{ROUNDS, Scenario};
use crate::page::Figure;
use fedproj_report::{Block, Page, Section};

/// The page with the table and all figures.
pub fn page(results: &Results, figures: &[(Option<Scenario>, Figure)]) -> Page {
    let mean = |scenario, method| 100.0 * results.get(scenario, method).accuracy.mean;
    let client = |scenario, method| 100.0 * results.get(scenario, method).client.mean;
    let lead = format!(
        "Three clients with one kind of flower each, the third with ten flowers only. After {ROUNDS} rounds FedAvg knows \
         {:.1} % of all flowers and FedDF {:.1} %: the third kind is lost. FedProj knows {:.1} %.",
        mean(Scenario::Skewed, "fedavg"),
        mean(Scenario::Skewed, "feddf"),
        mean(Scenario::Skewed, "fedproj"),
    );
    let n = results.seeds.len();
    let table = vec![
        Block::Table(results.table()),
        Block::Text(format!(
            "Mean over {n} seeds (min–max). Accuracy is on all 150 flowers: of the global model after the last \
             round, and of the clients' models after the last round's local training. Forgetting: the largest per-class \
             accuracy drop during local training, mean over clients and rounds. Only what the global model knew can be \
             forgotten, so forgetting is small where that model never learnt the third kind."
        )),
    ];
    let skewed = "Observation 1. The small client's ten flowers weigh 10 of 110 in the average, and the other clients undo \
                  them in every round. The paper reports 64 % for FedAvg and FedDF and 93.33 % for FedProj; it says only \
                  that each client has mostly classes of its own, so this set-up is one that shows the effect."
        .to_owned();
    let balanced = format!(
        "With 50 flowers each, the average recovers ({:.1} % for FedAvg, {:.1} % for FedProj), and \
         only the clients forget ({:.1} % against {:.1} % after local training).",
        mean(Scenario::Balanced, "fedavg"),
        mean(Scenario::Balanced, "fedproj"),
        client(Scenario::Balanced, "fedavg"),
        client(Scenario::Balanced, "fedproj"),
    );
    let pretrained = format!(
        "Observation 2. Even from weights trained on all flowers in one place ({:.1} % right), local training forgets: \
         clients fall to {:.1} % with FedAvg and {:.1} % with FedDF, and keep {:.1} % with FedProj.",
        100.0 * results.get(Scenario::Pretrained, "fedavg").start.mean,
        client(Scenario::Pretrained, "fedavg"),
        client(Scenario::Pretrained, "feddf"),
        client(Scenario::Pretrained, "fedproj"),
    );
    let drawn = |scenario| figures.iter().filter(move |(of, _)| *of == scenario).map(|(_, figure)| figure.block());
    let about = |heading: &str, text: String, scenario| Section {
        heading: heading.to_owned(),
        blocks: std::iter::once(Block::Text(text)).chain(drawn(Some(scenario))).collect(),
    };
    Page {
        title: "FedProj's pilot study: who forgets what".into(),
        lead,
        sections: vec![
            Section { heading: "Results".into(), blocks: table },
            Section { heading: "The idea".into(), blocks: drawn(None).collect() },
            about("Skewed clients, from scratch", skewed, Scenario::Skewed),
            about("Balanced clients, from scratch", balanced, Scenario::Balanced),
            about("Skewed clients, from pre-trained weights", pretrained, Scenario::Pretrained),
            Section { heading: "Set-up".into(), blocks: vec![Block::Facts(setup(results))] },
        ],
        footer: format!("fedproj {} · fedproj reproduce pilot --seeds {n}", results.version),
    }
}

fn setup(results: &Results) -> Vec<(String, String)> {
    let seeds: Vec<String> = results.seeds.iter().map(u64::to_string).collect();
    let facts = [
        (
            "Data",
            "Iris, 150 flowers; centred, not scaled, on the two principal components; the largest loading is positive",
        ),
        ("Clients", "A: 50 setosa; B: 50 versicolor; C: 10 virginica, drawn by the seed (balanced: 50); all take part"),
        ("Network", "2–100–100–3 with ReLU; weights and biases uniform in ±1/√(inputs)"),
        (
            "Local training",
            "5 epochs, batch 8, SGD at 0.001 with momentum 0.9, reset every round; 0.01 from pre-trained weights",
        ),
        (
            "Public set",
            "all 150 flowers without labels; also the memory, whose full gradient is computed at every step",
        ),
        ("FedProj", "conditional projection from the second round on, T = 1"),
        ("Distillation", "FedDF and FedProj: one epoch, batch 32, SGD at 0.001 with momentum 0.9, T = 1"),
        ("Pre-training", "400 steps of plain gradient descent on all flowers at rate 0.05"),
    ];
    let mut facts: Vec<(String, String)> = facts.map(|(a, b)| (a.to_owned(), b.to_owned())).to_vec();
    facts.push(("Rounds and seeds".into(), format!("{ROUNDS} rounds; seeds {}", seeds.join(", "))));
    facts
}
