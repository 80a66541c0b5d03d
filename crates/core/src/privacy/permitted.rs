//! What runs under privacy, and why other things do not.

use super::NoiseFrom;
use super::accountant::Sampling;
use crate::config::{Config, SumKind};
use crate::distill::EnsembleWeights;
use crate::error::{Error, Result};
use crate::robust::RobustRule;

/// Methods whose server sees its clients only through the mean of their models, and of their logits.
const PERMITTED: &[&str] = &[
    "fedavg", "fedprox", "feddyn", "moon", "fedrcl", "feddf", "fedproj", "fedavgm", "fedadam", "fedsam", "fedspeed",
    "fedlc", "fedntd", "fedacg",
];

/// Rejects what is not accounted for.
pub(super) fn check(config: &Config) -> Result<()> {
    let (federation, method) = (&config.federation, &config.method);
    let refuse = |what: String, why: &str| Err(Error::config(format!("privacy: {what}: {why}")));
    if federation.evaluate_clients {
        let why = "scores of single clients are not noised\nhint: federation.evaluate_clients=false";
        return refuse("federation.evaluate_clients = true".into(), why);
    }
    if config.data.private.standardise == Some(true) {
        let why = "mean and deviation are measured over all clients' samples, without noise\n\
                   hint: scale the data by public numbers, with data.private.standardise=false";
        return refuse("data.private.standardise = true".into(), why);
    }
    if federation.sum == SumKind::Fixed {
        let why = "noise is added in double precision, not in integers\nhint: federation.sum=float";
        return refuse("federation.sum = \"fixed\"".into(), why);
    }
    if config.privacy.noise == NoiseFrom::Nodes {
        if config.privacy.sampling != Sampling::Public {
            let why = "the server knows whose vectors are in a sum, so nobody hides among those that were not drawn\n\
                       hint: privacy.sampling=public";
            return refuse("noise = \"nodes\"".into(), why);
        }
        if config.privacy.quantile > 0.0 {
            let why = "under masks nobody counts the vectors within a limit\nhint: privacy.quantile=0.0";
            return refuse("quantile with noise = \"nodes\"".into(), why);
        }
    }
    let robust = &federation.robust;
    if robust.rule != RobustRule::None || robust.clip > 0.0 || robust.clip_ratio > 0.0 || robust.claim_ratio > 0.0 {
        let why = "what one client can change depends on the others; privacy.clip limits every client\n\
                   hint: federation.robust={ rule = \"none\", clip = 0.0, clip_ratio = 0.0, claim_ratio = 0.0 }";
        return refuse("federation.robust".into(), why);
    }
    let name = method.name.as_str();
    let why = match name {
        _ if method.external.is_some() => "nobody knows what a method from outside releases",
        "fednova" => "weights clients by their local steps, which are not noised",
        "fedet" => "weights clients by their logits, so it needs each client's",
        "scaffold" => "clients send their control variates, a release that is not accounted for",
        name if PERMITTED.contains(&name) => "",
        _ => "its releases are not accounted for",
    };
    if !why.is_empty() {
        return refuse(format!("method `{name}`"), &format!("{why}\nhint: {} run", PERMITTED.join(", ")));
    }
    if method.build()?.needs_features() {
        let why = "features on the public set are a release that is not accounted for\nhint: feature_weight=0.0";
        return refuse(format!("method `{name}` distils features"), why);
    }
    let weights = match name {
        "feddf" => method.feddf.distill.weights,
        "fedproj" => method.fedproj.distill.weights,
        _ => EnsembleWeights::Uniform,
    };
    if weights == EnsembleWeights::Samples {
        let why = "sample counts are private; under privacy every client counts the same";
        return refuse(format!("method.{name}.distill.weights = \"samples\""), why);
    }
    let keeps_state =
        matches!(name, "feddyn" | "moon" | "fedspeed") || (name == "fedproj" && method.fedproj.correction.alpha > 0.0);
    if keeps_state && config.privacy.sampling == Sampling::Fixed {
        // What a client sends depends on the rounds that drew it before. With coins of its own that reveals nothing further;
        // in a draw of fixed size it is tied to all other clients.
        let why = "the bound for fixed-size sampling holds only if clients keep nothing between rounds\n\
                   hint: privacy.sampling=poisson, or public";
        return refuse(format!("method `{name}` keeps a state per client"), why);
    }
    Ok(())
}
