//! Groups of clients with networks of their own: `model.clients`.
//!
//! A group's models are averaged among themselves. All that groups exchange is logits on the public set: a method's fusion
//! runs once per group, and its ensemble ([`Fusion::ensemble`](crate::Fusion::ensemble)) is that of the clients of all groups.

use crate::config::{Config, MAX_WIDTH, ModelConfig, SumKind};
use crate::error::{Error, Result};
use crate::evaluate::Evaluator;
use crate::experiment::Experiment;
use crate::memory::Targets;
use crate::method::Method;
use crate::methods::CATALOGUE;
use crate::robust::RobustConfig;
use fedproj_data::spelling::did_you_mean;
use fedproj_nn::models;
use serde::{Deserialize, Serialize};
use std::cell::OnceCell;

/// A group of clients that share a network.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientGroup {
    /// Name of the group's network, one of `fedproj models`.
    pub name: String,
    /// Share of the clients that are in the group; all shares sum to 1.
    pub share: f64,
    /// Widths of the hidden layers of `mlp`. Empty: those of `model.hidden`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hidden: Vec<usize>,
}

impl ModelConfig {
    /// The network of a group; without groups, the network of all clients.
    #[must_use]
    pub fn of_group(&self, group: usize) -> Self {
        let Some(ClientGroup { name, hidden, .. }) = self.clients.get(group) else { return self.clone() };
        let hidden = if hidden.is_empty() { &self.hidden } else { hidden };
        Self { name: name.clone(), hidden: hidden.clone(), clients: Vec::new(), ..self.clone() }
    }
}

/// Rejects groups that cannot be formed, or that the rest of the configuration cannot take.
pub(crate) fn check(config: &Config, method: &dyn Method) -> Result<()> {
    let groups = &config.model.clients;
    for (at, ClientGroup { name, share, hidden }) in groups.iter().enumerate() {
        let key = format!("model.clients[{at}]");
        let names = || models::CATALOGUE.iter().map(|entry| entry.name);
        if !names().any(|known| known == name) {
            let (known, hint) = (names().collect::<Vec<_>>().join(", "), did_you_mean(name, names()));
            return Err(Error::config(format!("{key}.name = \"{name}\": must be one of {known}{hint}")));
        }
        let widths = hidden.iter().all(|width| (1..=MAX_WIDTH).contains(width));
        let expected = format!("a list of widths from 1 to {MAX_WIDTH}");
        Error::require(widths, &format!("{key}.hidden"), format!("{hidden:?}"), &expected)?;
        Error::require(*share > 0.0 && *share <= 1.0, &format!("{key}.share"), share, "above 0 and at most 1")?;
    }
    let total: f64 = groups.iter().map(|group| group.share).sum();
    if !groups.is_empty() && (total - 1.0).abs() > 1e-6 {
        return Err(Error::config(format!("the shares of model.clients sum to {total}: they must sum to 1")));
    }
    if groups.len() < 2 { Ok(()) } else { check_exchange(config, method) }
}

/// What works among groups with different networks: methods that exchange logits, and nothing that looks at all weights.
fn check_exchange(config: &Config, method: &dyn Method) -> Result<()> {
    if !method.exchanges_logits() {
        let works = |name: &&str| {
            let config = crate::methods::MethodConfig { name: (*name).into(), ..Default::default() };
            config.build().is_ok_and(|method| method.exchanges_logits())
        };
        let names: Vec<&str> = CATALOGUE.iter().map(|(name, _)| *name).filter(works).collect();
        return Err(Error::config(format!(
            "method `{}`, as it is set, averages the models of all clients, but the groups of model.clients have networks of \
             their own\nhint: {} exchange logits as well, with their default settings",
            config.method.name,
            names.join(", ")
        )));
    }
    let federation = &config.federation;
    let features = "a feature loss (feature_weight)";
    for (is_set, what, instead) in [
        (!config.model.weights.is_empty(), "model.weights", "leave it out: a file holds one network"),
        (method.needs_features(), features, "set it to 0: features of different networks have no common space"),
        (federation.sum == SumKind::Fixed, "federation.sum = \"fixed\"", "federation.sum=float"),
        (federation.robust != RobustConfig::default(), "[federation.robust]", "leave its defaults"),
        (config.privacy.is_on(), "[privacy]", "leave privacy off"),
    ] {
        if is_set {
            return Err(Error::config(format!(
                "{what} is for one network, but model.clients has groups of clients with networks of their own\n\
                 hint: {instead}, or choose one network with model.name"
            )));
        }
    }
    Ok(())
}

/// The group of each client: always the one that lags behind its share the most, so neighbours are spread over the groups.
pub(crate) fn assign(groups: &[ClientGroup], n_clients: usize) -> Result<Vec<usize>> {
    if groups.len() < 2 {
        return Ok(Vec::new());
    }
    let mut counts = vec![0usize; groups.len()];
    let mut assigned = Vec::with_capacity(n_clients);
    for client in 0..n_clients {
        let lag = |group: usize| groups[group].share * (client + 1) as f64 - counts[group] as f64;
        // The first one wins ties, as far as rounding does not decide.
        let group = (1..groups.len()).fold(0, |best, group| if lag(group) > lag(best) + 1e-9 { group } else { best });
        counts[group] += 1;
        assigned.push(group);
    }
    match counts.iter().position(|n| *n == 0) {
        None => Ok(assigned),
        Some(at) => Err(Error::config(format!(
            "model.clients[{at}] (`{}`, share {}) gets none of the {n_clients} clients\n\
             hint: a larger share, or more clients (data.partition.clients)",
            groups[at].name, groups[at].share
        ))),
    }
}

/// The groups of a round, as the fusion of one of them sees the others.
#[derive(Debug)]
pub(crate) struct Groups<'a> {
    pub experiment: &'a Experiment,
    /// One per group.
    pub evaluators: &'a [Evaluator],
    /// The ensemble of all groups, once one of them has asked for it; all ask for the same.
    pub ensemble: OnceCell<Targets>,
}

impl<'a> Groups<'a> {
    pub fn new(experiment: &'a Experiment, evaluators: &'a [Evaluator]) -> Self {
        Self { experiment, evaluators, ensemble: OnceCell::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(shares: &[f64]) -> Vec<ClientGroup> {
        shares.iter().map(|&share| ClientGroup { name: "mlp".into(), share, hidden: Vec::new() }).collect()
    }

    #[test]
    fn clients_are_spread_over_the_groups_by_their_shares() {
        assert_eq!(assign(&groups(&[0.5, 0.5]), 5).unwrap(), [0, 1, 0, 1, 0]);
        assert_eq!(assign(&groups(&[0.25, 0.75]), 8).unwrap(), [1, 0, 1, 1, 1, 0, 1, 1]);
        assert!(assign(&groups(&[1.0]), 5).unwrap().is_empty(), "one group needs no list");
        let thirds = assign(&groups(&[1.0 / 3.0; 3]), 99).unwrap();
        for group in 0..3 {
            assert_eq!(thirds.iter().filter(|of| **of == group).count(), 33);
        }
        let message = assign(&groups(&[0.98, 0.02]), 10).unwrap_err().to_string();
        assert!(message.contains("model.clients[1]") && message.contains("none of the 10 clients"), "{message}");
    }
}
