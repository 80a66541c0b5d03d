//! Client-level differential privacy: what clients send is clipped, summed and noised before a method sees it.
//!
//! DP-FedAvg (McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018, arXiv:1710.06963) with
//! the same weight per client and a fixed denominator:
//!
//! Server  w̃ = wᵗ + (Σ_k clip(w_k − wᵗ) + noise) / m,   and likewise the mean of the clients' logits, if a method needs them
//!
//! Everything else follows: a method's `fuse` gets a `Release` in the place of the contributions, so that the next model, the
//! server's state and the metrics are functions of noised sums. Start reading there; [`accountant`] says what it reveals.

pub mod accountant;
pub mod discrete;
mod permitted;
mod release;

pub(crate) use release::{LIMITS, Release};

use crate::config::Config;
use crate::contributions::{Contributions, Part};
use crate::error::{Error, Result};
use crate::evaluate::{Evaluator, Model, Which};
use crate::experiment::{Experiment, draw_cohort};
use crate::fusion::ServerState;
use crate::method::Method;
use accountant::{Accountant, Mechanism, Sampling};
use fedproj_rng::{Bits, Philox, Purpose, Stream, System};
use serde::{Deserialize, Serialize};

/// Client-level differential privacy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrivacyConfig {
    /// Standard deviation of a round's noise, as a multiple of the longest vector that one client adds to a sum. 0: no privacy.
    /// `fedproj privacy plan` finds the multiplier for an ε.
    pub noise_multiplier: f64,
    /// Largest norm of a client's update; longer ones are scaled down to it. With `quantile`, its first value.
    pub clip: f64,
    /// The same for a client's logits on the public set, of the methods that need them (feddf, fedproj).
    pub clip_logits: f64,
    /// Share of the clients whose vectors should stay within a limit, in [0, 1). After each round both limits move towards it
    /// (Andrew et al. 2021). It costs 1 % of the budget per limit. 0: the limits stay.
    pub quantile: f64,
    /// Share of the budget for the logits, in (0, 1); the updates get the rest. Other methods spend all of it on updates.
    pub split: f64,
    /// The δ of (ε, δ), in (0, 1) and below one over the number of clients.
    pub delta: f64,
    /// The round that would exceed this ε does not start. 0: no limit.
    pub epsilon_max: f64,
    /// How the clients of a round are drawn.
    pub sampling: Sampling,
    /// Where the noise and the choice of clients come from.
    pub noise: NoiseFrom,
}

/// Where the draws come from that privacy rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoiseFrom {
    /// The operating system's generator. Nobody can repeat the run.
    System,
    /// The run's public seed, for studies. Anyone who knows the seed can subtract the noise, so ε is nominal.
    Seeded,
    /// The clients: under secure aggregation each adds a share of discrete Gaussian noise, from its own operating system. The
    /// server, too, sees noised sums only.
    Nodes,
}

/// A vector that each client of a round releases, with its limit and its share of the budget.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Released {
    /// The vector.
    pub part: Part<'static>,
    /// Its largest norm.
    pub limit: f64,
    /// Its share of the round's budget.
    pub share: f64,
}

impl Default for PrivacyConfig {
    fn default() -> Self {
        Self {
            noise_multiplier: 0.0,
            clip: 1.0,
            clip_logits: 10.0,
            quantile: 0.0,
            split: 0.2,
            delta: 1e-5,
            epsilon_max: 0.0,
            sampling: Sampling::Fixed,
            noise: NoiseFrom::System,
        }
    }
}

impl PrivacyConfig {
    /// Whether releases are noised.
    pub fn is_on(&self) -> bool {
        self.noise_multiplier > 0.0
    }

    /// Whether a run can be repeated: its draws come from its seed, or it has none that privacy rests on.
    pub fn is_repeatable(&self) -> bool {
        !self.is_on() || self.noise == NoiseFrom::Seeded
    }

    /// Whether clients add the noise.
    pub fn is_by_nodes(&self) -> bool {
        self.is_on() && self.noise == NoiseFrom::Nodes
    }

    /// What clients release where they add the noise. Limits that adapt are the server's, and counted apart.
    pub fn released(&self, has_logits: bool) -> Vec<Released> {
        let for_logits = if has_logits { self.split } else { 0.0 };
        let weights = Released { part: Part::Weights, limit: self.clip, share: 1.0 - for_logits };
        let logits = Released { part: Part::Logits, limit: self.clip_logits, share: for_logits };
        [weights, logits].into_iter().take(1 + usize::from(has_logits)).collect()
    }

    /// What a client does to a vector that it releases, if `n_adders` clients add the noise.
    pub fn share_of(&self, released: &Released, n_adders: usize) -> discrete::Share {
        discrete::Share::new(released.limit, self.noise_multiplier / released.share.sqrt(), n_adders)
    }

    /// What a user should know before a run without privacy: its other settings change nothing.
    pub fn note(&self) -> Option<String> {
        let is_idle = !self.is_on() && *self != Self { noise_multiplier: self.noise_multiplier, ..Self::default() };
        is_idle.then(|| {
            "privacy.noise_multiplier = 0: no privacy, and the other settings of [privacy] change nothing".into()
        })
    }

    /// What a run's files say beside its ε; none if privacy is off.
    pub fn statement(&self) -> Option<String> {
        let nominal = "; ε is nominal: noise and clients come from the run's public seed";
        self.is_on().then(|| {
            let note = match self.noise {
                NoiseFrom::System => "",
                NoiseFrom::Seeded => nominal,
                NoiseFrom::Nodes => "; clients add discrete Gaussian noise under masks",
            };
            format!("client-level (ε, δ = {:e}), {}{note}", self.delta, self.sampling.adjacency())
        })
    }

    /// Whether all settings are in their ranges and go with the rest of the configuration.
    pub(crate) fn check(&self, config: &Config) -> Result<()> {
        let require = |ok, name: &str, value: f64, expected| {
            Error::require(ok && value.is_finite(), &format!("privacy.{name}"), value, expected)
        };
        let z = self.noise_multiplier;
        require(z >= 0.0, "noise_multiplier", z, "0 (no privacy) or positive")?;
        require(self.clip > 0.0, "clip", self.clip, "positive")?;
        require(self.clip_logits > 0.0, "clip_logits", self.clip_logits, "positive")?;
        require((0.0..1.0).contains(&self.quantile), "quantile", self.quantile, "in [0, 1); 0 keeps the limits")?;
        require(self.split > 0.0 && self.split < 1.0, "split", self.split, "in (0, 1)")?;
        require(self.delta > 0.0 && self.delta < 1.0, "delta", self.delta, "in (0, 1)")?;
        require(self.epsilon_max >= 0.0, "epsilon_max", self.epsilon_max, "0 (no limit) or positive")?;
        if self.is_on() {
            return permitted::check(config);
        }
        if self.epsilon_max > 0.0 {
            return Err(Error::config(format!(
                "privacy.epsilon_max = {}: without noise there is no such ε\nhint: a positive privacy.noise_multiplier; \
                 `fedproj privacy plan` finds it",
                self.epsilon_max
            )));
        }
        Ok(())
    }
}

/// What a round revealed in all, as its record and the run's summary have it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[serde(expecting = "an object with the privacy of a round")]
pub struct PrivacySpent {
    /// ε of all rounds so far.
    pub epsilon: f64,
    /// δ.
    pub delta: f64,
    /// Whether ε is nominal: noise and clients came from the run's public seed.
    pub nominal: bool,
    /// Largest norm of an update in this round.
    pub clip: f64,
    /// Largest norm of a client's logits in this round, where they were released.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_logits: Option<f64>,
}

impl PrivacySpent {
    /// `7.98`, or `7.98 (nominal)`; from a million on `1.25e8`.
    pub fn shown(&self) -> String {
        let nominal = if self.nominal { " (nominal)" } else { "" };
        if self.epsilon < 1e6 {
            format!("{:.2}{nominal}", self.epsilon)
        } else {
            format!("{:.2e}{nominal}", self.epsilon)
        }
    }
}

/// The privacy of a run: its account, its draws and its releases.
#[derive(Debug)]
pub(crate) struct Privacy {
    config: PrivacyConfig,
    seed: u64,
    n_clients: usize,
    /// Expected clients per round m, by which sums are divided.
    cohort: usize,
    accountant: Accountant,
    /// Whether clients' logits are released, too.
    has_logits: bool,
    /// Releases of rounds that a crash lost, and that were made again with other noise.
    n_lost: u32,
}

impl Privacy {
    /// The privacy of an experiment; none where it is off.
    pub fn new(experiment: &Experiment, method: &dyn Method) -> Result<Option<Self>> {
        let (config, n_clients) = (&experiment.config.privacy, experiment.partition.n_clients());
        if !config.is_on() {
            return Ok(None);
        }
        if !experiment.buffers.is_empty() {
            return Err(Error::config(format!(
                "privacy: model `{}` has batch-norm, whose running statistics are means over a client's samples; noise would \
                 make its variances negative\nhint: group-norm keeps none (model.group_norm=8)",
                experiment.config.model.name
            )));
        }
        let below = format!("below one over the {n_clients} clients");
        Error::require(config.delta * (n_clients as f64) < 1.0, "privacy.delta", config.delta, &below)?;
        let cohort = experiment.config.federation.cohort(n_clients);
        let rate = cohort as f64 / n_clients as f64;
        let noise_multiplier =
            if config.is_by_nodes() { by_nodes(experiment, method)? } else { config.noise_multiplier };
        let mechanism = Mechanism { sampling: config.sampling, rate, noise_multiplier };
        let privacy = Self {
            config: config.clone(),
            seed: experiment.config.seed,
            n_clients,
            cohort,
            accountant: Accountant::new(&mechanism),
            has_logits: method.needs_public(),
            n_lost: 0,
        };
        if !privacy.epsilon(experiment.config.federation.rounds).is_finite() {
            return Err(Error::config(format!(
                "privacy.noise_multiplier = {:e}: with so little noise, no ε bounds what the run reveals\nhint: a larger \
                 privacy.noise_multiplier; `fedproj privacy plan` finds it",
                config.noise_multiplier
            )));
        }
        if !privacy.allows_after(0) {
            return Err(Error::config(format!(
                "privacy.epsilon_max = {}: the first round alone takes ε = {:.3}\nhint: a larger privacy.noise_multiplier; \
                 `fedproj privacy plan` finds it",
                config.epsilon_max,
                privacy.epsilon(1)
            )));
        }
        Ok(Some(privacy))
    }

    /// The number m by which the sum over n clients is divided: the expected one, unless everybody knows who took part.
    fn divisor(&self, n: usize) -> usize {
        if self.config.sampling == Sampling::Public { n.max(1) } else { self.cohort }
    }

    /// Counts releases that were made and lost.
    pub fn count_lost(&mut self, n: u32) {
        self.n_lost = n;
    }

    /// ε after `n_rounds` rounds.
    pub fn epsilon(&self, n_rounds: u32) -> f64 {
        self.accountant.epsilon(n_rounds + self.n_lost, self.config.delta)
    }

    /// Whether another round after `n_rounds` stays within the budget.
    pub fn allows_after(&self, n_rounds: u32) -> bool {
        self.config.epsilon_max == 0.0 || self.epsilon(n_rounds + 1) <= self.config.epsilon_max
    }

    /// What is spent after a round whose release was lost. It had no limits that others could see.
    pub fn spent_without_release(&self, round: u32) -> PrivacySpent {
        let (epsilon, nominal) = (self.epsilon(round + 1), self.config.is_repeatable());
        PrivacySpent { epsilon, delta: self.config.delta, nominal, clip: self.config.clip, clip_logits: None }
    }

    /// The clients of a round, in increasing order.
    pub fn cohort(&self, round: u32) -> Vec<u32> {
        let all: Vec<u32> = (0..self.n_clients as u32).collect();
        match (self.config.sampling, self.config.noise) {
            (Sampling::Public, _) | (Sampling::Fixed, NoiseFrom::Seeded) => {
                draw_cohort(self.seed, round, &all, self.cohort)
            }
            (Sampling::Fixed, _) => Stream::over(System::default()).choose(self.n_clients as u32, self.cohort as u32),
            (Sampling::Poisson, _) => {
                let (rate, mut draws) = (self.cohort as f64 / self.n_clients as f64, self.draws(round, Draws::Clients));
                all.into_iter().filter(|_| draws.uniform() < rate).collect()
            }
        }
    }

    /// What a round releases of its contributions. Where the limits adapt, the state gets the next round's.
    pub fn release(
        &self,
        experiment: &Experiment,
        evaluator: &Evaluator,
        results: &dyn Contributions,
        state: &mut ServerState,
    ) -> Result<Release> {
        release::release(self, experiment, evaluator, results, state)
    }

    fn draws(&self, round: u32, which: Draws) -> Stream<Box<dyn Bits>> {
        Stream::over(match self.config.noise {
            NoiseFrom::System | NoiseFrom::Nodes => Box::new(System::default()),
            NoiseFrom::Seeded => Box::new(Philox::new(self.seed, Purpose::Privacy, [round, which as u32, 0])),
        })
    }
}

/// The multiplier of Gaussian noise that reveals as much as the clients' discrete noise, if as few as the server permits are
/// left. More clients and fewer values make it a little worse, so all clients are counted.
fn by_nodes(experiment: &Experiment, method: &dyn Method) -> Result<f64> {
    let (config, n) = (&experiment.config.privacy, experiment.partition.n_clients().max(2));
    let n_public = experiment.n_public();
    let n_logits = n_public * experiment.private.n_classes();
    let released = config.released(method.needs_public());
    let precision = released.iter().map(|released| {
        let z = config.noise_multiplier / released.share.sqrt();
        let d = if released.part == Part::Weights { experiment.weights.len() } else { n_logits };
        let variance = config.share_of(released, n).variance;
        // Most noise per client if only three add it.
        let most = config.share_of(released, 3).variance;
        if variance < discrete::VARIANCE_MIN || most > discrete::VARIANCE_MAX {
            let z = config.noise_multiplier;
            return Err(Error::config(format!(
                "privacy.noise_multiplier = {z}: shares of {n} clients would be too small or too large for noise in integers\n\
                 hint: privacy.noise=system"
            )));
        }
        Ok(discrete::multiplier(z, variance, n, d).powi(-2))
    });
    Ok(precision.sum::<Result<f64>>()?.sqrt().recip())
}

/// What a round draws; ids of [`Purpose::Privacy`].
#[derive(Clone, Copy)]
enum Draws {
    Clients = 0,
    Updates = 1,
    Logits = 2,
}
