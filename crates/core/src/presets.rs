//! Presets: the paper's text, the published code, a clean combination of both, and what goes beyond them.

use crate::config::FederationConfig;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use toml::Table;

/// A named set of defaults, below the file and the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// The paper's text: projection from the second round on, and its best α per β and data set.
    Paper,
    /// The published code: its schedule, guards, initialisation and integer casts.
    AuthorsCode,
    /// The paper's text, with no projection in the first tenth of the rounds, and α = 0.
    #[default]
    Clean,
    /// Clean, with a correction of local steps, and a teacher averaged over rounds at ρ = 1 − fraction.
    Leading,
    /// Leading without the correction, so that clients keep nothing between rounds.
    LeadingStateless,
}

/// What a preset changes. Some values depend on what was `given`: α on β and the data set.
pub(crate) fn table(preset: Preset, given: &Table) -> Result<Table> {
    let text = match preset {
        Preset::Clean => String::new(),
        Preset::Leading => format!("{}correction = {{ alpha = 0.01 }}\n", averaged(given)),
        Preset::LeadingStateless => averaged(given),
        Preset::Paper => {
            format!("[method.fedproj]\nprojection = {{ warmup = 1 }}\ndistill = {{ alpha = {} }}\n", paper_alpha(given))
        }
        Preset::AuthorsCode if is_text(given) => "
            [data]
            public_draw = 'balanced'
            text = { max_length = 512 }
            [model]
            init = 'authors'
            [method.fedproj]
            projection = { warmup = 0, dropout = 0.3 }
            memory = { size = 30000, batch = 128 }
            "
        .to_owned(),
        // A.2 of the specification. The weight-divergence term of the code is identically zero.
        Preset::AuthorsCode => format!(
            "
            [data]
            byte_cast = {}
            [model]
            init = 'authors'
            [method.fedproj]
            projection = {{ warmup = 10 }}
            memory = {{ size = {}, bn = 'update' }}
            authors = {{ stop_round = 90, norm_guard = 1e-6, coefficient_max = 10.0, integer_cast = true }}
            distill = {{ batch = 128, alpha = 0.0 }}
            [method.feddf]
            distill = {{ batch = 128 }}
            [method.fedet]
            variant = 'authors-cv'
            optimizer = {{ lr = 1e-5, weight_decay = 5e-5 }}
            batch = 128
            [method.fedprox]
            proximal_weight = 0.0
            [method.feddyn]
            authors = true
            clip = 5.0
            [method.fednova]
            momentum_formula = 0.9
            ",
            private_name(given) == "cinic10",
            authors_memory(given),
        ),
    };
    toml::from_str(&text).map_err(Error::internal("reading a preset"))
}

/// A teacher averaged over rounds, which reaches back until about every client has spoken once.
fn averaged(given: &Table) -> String {
    let given = given.get("federation").and_then(|f| number(f.get("fraction")?));
    let rate = (1.0 - given.unwrap_or_else(|| FederationConfig::default().fraction)).clamp(0.0, 0.99);
    format!("[method.fedproj]\naverages = {{ teacher = {rate:?} }}\n")
}

/// Whether a run is on texts, judged by the data set's name.
fn is_text(given: &Table) -> bool {
    fedproj_data::registry::find(private_name(given)).is_ok_and(fedproj_data::registry::Reader::is_text)
}

/// Samples of the memory in the published code's scripts, by data set and β.
fn authors_memory(given: &Table) -> u32 {
    match (private_name(given), beta(given) >= 0.5) {
        ("cinic10", _) | ("cifar10", true) => 10_000,
        ("cifar100", true) => 15_000,
        _ => 12_500,
    }
}

fn beta(given: &Table) -> f64 {
    given.get("data").and_then(|d| number(d.get("partition")?.get("beta")?)).unwrap_or(0.3)
}

/// The paper's best α. β = 0.3: 0. β = 0.5: 0.5 for CIFAR-100, 0.3 for CIFAR-10 and CINIC-10. Texts: 0, the published
/// code has no such term.
fn paper_alpha(given: &Table) -> f64 {
    match (beta(given) >= 0.5, private_name(given)) {
        (false, _) => 0.0,
        _ if is_text(given) => 0.0,
        (true, "cifar100") => 0.5,
        (true, _) => 0.3,
    }
}

fn private_name(given: &Table) -> &str {
    let private = given.get("data").and_then(|d| d.get("private"));
    private.and_then(|p| p.as_str().or_else(|| p.get("name")?.as_str())).unwrap_or("")
}

/// A number, whether written 1 or 1.0.
fn number(value: &toml::Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|v| v as f64))
}
