//! Accuracies of the networks of a run whose groups of clients have networks of their own (`model.clients`).

use crate::compare::mean;
use fedproj_core::StoredRun;
use serde::Serialize;

/// The accuracy of a group's model, as a share.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NetworkAccuracy {
    /// The network.
    pub network: String,
    /// Mean of the last rounds, as the headline is.
    pub accuracy: f64,
}

impl NetworkAccuracy {
    /// Those of a run, in the order of its groups; none where all clients have one network.
    pub fn of(run: &StoredRun) -> Vec<Self> {
        let evaluated: Vec<&Vec<f64>> = run.rounds.iter().filter_map(|r| r.accuracy_by_group.as_ref()).collect();
        let cohort = run.rounds.last().map_or(1, |round| round.cohort.len());
        let n = run.config.federation.n_headline(cohort);
        let last = &evaluated[evaluated.len().saturating_sub(n)..];
        let accuracy = |group: usize| mean(&last.iter().filter_map(|of| of.get(group).copied()).collect::<Vec<_>>());
        let groups = run.config.model.clients.iter().enumerate().filter(|_| !last.is_empty());
        groups.map(|(group, of)| Self { network: of.name.clone(), accuracy: accuracy(group) }).collect()
    }

    /// The mean over runs of the same networks.
    pub fn over(runs: &[Vec<Self>]) -> Vec<Self> {
        let at = |group: usize| mean(&runs.iter().map(|run| run[group].accuracy).collect::<Vec<_>>());
        let is_whole = |first: &&Vec<Self>| runs.iter().all(|run| run.len() == first.len());
        let first = runs.first().filter(is_whole).into_iter().flatten().enumerate();
        first.map(|(group, of)| Self { network: of.network.clone(), accuracy: at(group) }).collect()
    }

    /// `resnet8 31.20, cnn 35.03`, in per cent.
    pub fn text(all: &[Self]) -> String {
        let one = |of: &Self| format!("{} {:.2}", of.network, 100.0 * of.accuracy);
        all.iter().map(one).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fedproj_core::{Config, RoundRecord, Summary};

    #[test]
    fn the_last_rounds_count_as_in_the_headline() {
        let clients = "model.clients=[{name='mlp', share=0.5}, {name='cnn', share=0.5}]";
        let pairs = ["method=feddf", clients, "federation.headline_rounds=2"].map(str::to_owned);
        let config = Config::from_layers(None, &pairs).unwrap();
        let round = |by_group: Option<[f64; 2]>| RoundRecord {
            accuracy: by_group.map(|of| of[0]),
            accuracy_by_group: by_group.map(|of| of.to_vec()),
            ..RoundRecord::default()
        };
        let rounds = vec![round(Some([0.9, 0.9])), round(Some([0.25, 0.5])), round(None), round(Some([0.5, 0.75]))];
        let summary = Summary::of("feddf", 0, &config.federation, 3, &rounds);
        let run = StoredRun { dir: "a".into(), config, summary, rounds };
        let found = NetworkAccuracy::of(&run);
        assert_eq!(NetworkAccuracy::text(&found), "mlp 37.50, cnn 62.50");
        assert!((found[0].accuracy - run.summary.headline).abs() < 1e-12, "the first group's is the headline");
        let other = vec![NetworkAccuracy { accuracy: 0.5, ..found[0].clone() }, found[1].clone()];
        assert_eq!(NetworkAccuracy::text(&NetworkAccuracy::over(&[found, other])), "mlp 43.75, cnn 62.50");
        let one = Config::from_layers(None, &[]).unwrap();
        assert!(NetworkAccuracy::of(&StoredRun { config: one, rounds: vec![round(None)], ..run }).is_empty());
        assert!(NetworkAccuracy::over(&[]).is_empty());
    }
}
