//! `fedproj privacy`: how much noise an ε takes, before anything is trained.

use crate::{commands, give, say};
use anyhow::Result;
use clap::{Args, ValueEnum};
use fedproj_core::Error;
use fedproj_core::privacy::accountant::{NOISE_MAX, Sampling, noise_for};
use fedproj_report::Table;
use serde::Serialize;

commands! {
    /// What there is to ask.
    pub enum PrivacyCommand {
        /// Find the privacy.noise_multiplier that keeps a run within ε
        Plan(PlanArgs),
    }
}

/// Arguments of `privacy plan`.
#[derive(Args)]
pub struct PlanArgs {
    /// ε of the whole run
    #[arg(long, value_name = "ε", allow_negative_numbers = true)]
    epsilon: f64,
    /// δ, below one over the number of clients
    #[arg(long, value_name = "δ", default_value_t = 1e-5)]
    delta: f64,
    /// Communication rounds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Clients per round
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    cohort: u32,
    /// All clients
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    clients: u32,
    /// How the clients of a round are drawn, as privacy.sampling
    #[arg(long, value_enum, default_value = "fixed")]
    sampling: SamplingArg,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum SamplingArg {
    /// So many clients, without replacement; neighbours differ in one client's data
    Fixed,
    /// Each client by its own coin; neighbours differ in the presence of one client
    Poisson,
    /// Any clients, known to everyone; neighbours differ in the presence of one client
    Public,
}

#[derive(Serialize)]
struct Answer {
    epsilon: f64,
    delta: f64,
    rounds: u32,
    cohort: u32,
    clients: u32,
    sampling: Sampling,
    adjacency: &'static str,
    noise_multiplier: f64,
    /// Standard deviation of the noise per weight of the mean update, over `privacy.clip`.
    noise_on_mean: f64,
}

impl PlanArgs {
    fn run(self) -> Result<()> {
        let Self { epsilon, delta, rounds, cohort, clients, .. } = self;
        Error::require(epsilon > 0.0 && epsilon.is_finite(), "--epsilon", epsilon, "positive")?;
        Error::require(cohort <= clients, "--cohort", cohort, &format!("at most the {clients} clients there are"))?;
        let below = format!("above 0 and below one over the {clients} clients");
        Error::require(delta > 0.0 && delta * f64::from(clients) < 1.0, "--delta", delta, &below)?;
        let sampling = match self.sampling {
            SamplingArg::Fixed => Sampling::Fixed,
            SamplingArg::Poisson => Sampling::Poisson,
            SamplingArg::Public => Sampling::Public,
        };
        let rate = f64::from(cohort) / f64::from(clients);
        let noise_multiplier = noise_for(sampling, rate, rounds, epsilon, delta).ok_or_else(|| {
            let hint = "a larger --epsilon or --delta, or fewer --rounds";
            Error::config(format!(
                "--epsilon = {epsilon:e}: no noise multiplier up to {NOISE_MAX:e} keeps it with δ = {delta:e}\nhint: {hint}"
            ))
        })?;
        let noise_on_mean = noise_multiplier / f64::from(cohort);
        let adjacency = sampling.adjacency();
        let answer =
            Answer { epsilon, delta, rounds, cohort, clients, sampling, adjacency, noise_multiplier, noise_on_mean };
        give(self.json, &answer, || {
            // Rounded up, so that what is shown keeps ε.
            let shown = (1e4 * noise_multiplier).ceil() / 1e4;
            let row = |name: &str, value: String| vec![name.to_owned(), value];
            let rows = vec![
                row("privacy.noise_multiplier", format!("{shown:.4}")),
                row("noise per weight of the mean update, × privacy.clip", format!("{noise_on_mean:.6}")),
                row("neighbours", adjacency.into()),
            ];
            say!("{}", Table::new(["", "value"], 1, rows).to_text().trim_end());
            say!("ε = {epsilon}, δ = {delta:e} after {rounds} rounds of {cohort} of {clients} clients.");
        })
    }
}
