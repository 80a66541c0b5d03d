//! What is recorded of a round and of a run.

use crate::config::FederationConfig;
use crate::evaluate::Score;
use crate::privacy::PrivacySpent;
use serde::{Deserialize, Serialize};

/// One line of `metrics.jsonl`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[serde(expecting = "an object with the numbers of a round")]
pub struct RoundRecord {
    /// Round, counted from 0.
    pub round: u32,
    /// Clients that took part; empty under privacy, which rests on nobody knowing them.
    pub cohort: Vec<u32>,
    /// Test accuracy of the global model, where it was evaluated.
    pub accuracy: Option<f64>,
    /// The same of each group of clients with a network of its own (`model.clients`); the first is that of `accuracy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy_by_group: Option<Vec<f64>>,
    /// Its test loss.
    pub loss: Option<f64>,
    /// Its accuracy on each class.
    pub per_class: Option<Vec<f64>>,
    /// Test accuracy of the average before distillation.
    pub accuracy_before_distillation: Option<f64>,
    /// Mean distillation loss of the last epoch.
    pub distill_loss: Option<f64>,
    /// Mean training loss over clients; not under privacy.
    pub train_loss: Option<f64>,
    /// Share of projected gradients, among the steps that took a memory gradient.
    pub projection_rate: Option<f64>,
    /// Mean cosine between gradient and memory gradient.
    pub cosine: Option<f64>,
    /// Mean memory loss of the clients before local training.
    pub memory_loss_before: Option<f64>,
    /// The same after it.
    pub memory_loss_after: Option<f64>,
    /// Forgetting: the largest per-class accuracy drop during local training, averaged over clients.
    pub forgetting: Option<f64>,
    /// Forgetting per client, in the order of `cohort`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forgetting_by_client: Option<Vec<f64>>,
    /// Mean test accuracy of the clients' models after local training.
    pub client_accuracy: Option<f64>,
    /// The same, restricted to the classes that each client holds; of the clients' own models, if they keep such.
    pub personal_accuracy: Option<f64>,
    /// The same per client, in the order of `cohort`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub personal_by_client: Option<Vec<f64>>,
    /// Seconds of local training, fusion and evaluation.
    pub seconds: Seconds,
    /// Bytes that a real federation would have sent to the clients.
    pub bytes_down: u64,
    /// Bytes that the clients would have sent back.
    pub bytes_up: u64,
    /// BLAKE3 of the weights and buffers that the next round starts from.
    pub model_hash: String,
    /// What all rounds so far have revealed, under privacy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub privacy: Option<PrivacySpent>,
}

/// Seconds of the phases of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[serde(expecting = "an object with the seconds of a round")]
pub struct Seconds {
    /// Local training of all clients.
    pub local: f64,
    /// Fusion, distillation included.
    pub fusion: f64,
    /// Evaluation.
    pub evaluation: f64,
}

impl Seconds {
    /// All phases.
    pub fn total(&self) -> f64 {
        self.local + self.fusion + self.evaluation
    }
}

/// Heads of the column for ε in `metrics.csv`.
const EPSILON: &str = ",epsilon";
const EPSILON_NOMINAL: &str = ",epsilon_nominal";

impl RoundRecord {
    /// Records the scores of the published models: the first group's, and the accuracies of all groups where there are more.
    pub(crate) fn set_scores(&mut self, scores: &[Score]) {
        if let Some(first) = scores.first() {
            (self.accuracy, self.loss) = (Some(first.accuracy), Some(first.loss));
            self.per_class = Some(first.per_class.clone());
        }
        self.accuracy_by_group = (scores.len() > 1).then(|| scores.iter().map(|score| score.accuracy).collect());
    }

    /// Records the clients' accuracies on their own classes, and their mean.
    pub(crate) fn set_personal(&mut self, accuracies: Vec<f64>) {
        self.personal_accuracy = Some(accuracies.iter().map(|accuracy| accuracy / accuracies.len() as f64).sum());
        self.personal_by_client = Some(accuracies);
    }

    /// Header of `metrics.csv`.
    pub const CSV_HEADER: &str = "round,accuracy,loss,accuracy_before_distillation,distill_loss,train_loss,\
        projection_rate,cosine,memory_loss_before,memory_loss_after,forgetting,client_accuracy,personal_accuracy,\
        seconds_local,seconds_fusion,seconds_evaluation,bytes_down,bytes_up,model_hash";

    /// `metrics.csv`, with a last column for ε under privacy. Its head states where ε is nominal.
    pub fn csv(rounds: &[Self]) -> String {
        let epsilon = |r: &Self| r.privacy.as_ref().map_or(String::new(), |p| format!(",{}", p.epsilon));
        let lines: String = rounds.iter().map(|r| r.to_csv() + &epsilon(r) + "\n").collect();
        let head = match rounds.iter().find_map(|r| r.privacy.as_ref()) {
            None => "",
            Some(spent) if spent.nominal => EPSILON_NOMINAL,
            Some(_) => EPSILON,
        };
        format!("{}{head}\n{lines}", Self::CSV_HEADER)
    }

    /// The same as earlier versions wrote it, which marked no ε as nominal.
    pub(crate) fn unmarked_csv(rounds: &[Self]) -> String {
        Self::csv(rounds).replacen(EPSILON_NOMINAL, EPSILON, 1)
    }

    /// A line of `metrics.csv`.
    pub fn to_csv(&self) -> String {
        let cell = |v: Option<f64>| v.map(|v| v.to_string()).unwrap_or_default();
        let optional = [
            self.accuracy,
            self.loss,
            self.accuracy_before_distillation,
            self.distill_loss,
            self.train_loss,
            self.projection_rate,
            self.cosine,
            self.memory_loss_before,
            self.memory_loss_after,
            self.forgetting,
            self.client_accuracy,
            self.personal_accuracy,
            Some(self.seconds.local),
            Some(self.seconds.fusion),
            Some(self.seconds.evaluation),
        ];
        let cells: Vec<String> = optional.into_iter().map(cell).collect();
        format!("{},{},{},{},{}", self.round, cells.join(","), self.bytes_down, self.bytes_up, self.model_hash)
    }
}

/// The result of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[serde(expecting = "an object with the results of a run")]
pub struct Summary {
    /// The method.
    pub method: String,
    /// The seed.
    pub seed: u64,
    /// Mean accuracy of the last rounds.
    pub headline: f64,
    /// Accuracy of the last round.
    pub last: f64,
    /// Best accuracy of any round.
    pub best: f64,
    /// BLAKE3 of the final weights and buffers.
    pub model_hash: String,
    /// Seconds of all rounds.
    pub seconds: f64,
    /// What the run has revealed, under privacy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub privacy: Option<PrivacySpent>,
}

impl Summary {
    /// The result of finished rounds. The headline covers the last `federation.headline_rounds` evaluations.
    pub fn of(method: &str, seed: u64, federation: &FederationConfig, cohort: usize, rounds: &[RoundRecord]) -> Self {
        let accuracies: Vec<f64> = rounds.iter().filter_map(|r| r.accuracy).collect();
        let tail = &accuracies[accuracies.len().saturating_sub(federation.n_headline(cohort))..];
        Self {
            method: method.to_owned(),
            seed,
            headline: tail.iter().sum::<f64>() / tail.len().max(1) as f64,
            last: accuracies.last().copied().unwrap_or(0.0),
            best: accuracies.iter().copied().fold(0.0, f64::max),
            model_hash: rounds.last().map(|r| r.model_hash.clone()).unwrap_or_default(),
            seconds: rounds.iter().map(|r| r.seconds.total()).sum(),
            privacy: rounds.last().and_then(|r| r.privacy.clone()),
        }
    }
}
