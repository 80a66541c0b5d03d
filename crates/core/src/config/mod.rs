//! The configuration of a run: every key with its default.
//!
//! [`Config::from_layers`] makes and checks one from defaults, a preset, a file and `key=value` pairs. It rejects unknown
//! keys and names the nearest known one. [`Config::from_toml`] reads back what a run wrote, without another check.
//!
//! The documentation of each field is the reference that users read (`docs/configuration.md`, `fedproj config show
//! --explain KEY`). Its first paragraph is plain text and ends with a full stop.

mod items;
mod layers;
mod legacy;
mod local;
mod reference;

pub use layers::{WHOLE_TABLES, parse_value, read_value, split_pair};
pub(crate) use layers::{merge, table_of};
pub use local::{LocalConfig, OptimizerConfig, OptimizerKind, ScheduleConfig};
pub use reference::Key;

use crate::averages::check_rate;
use crate::error::{Error, Result};
use crate::fixed::Scale;
use crate::groups::{self, ClientGroup};
use crate::methods::{External, MethodConfig};
use crate::presets::{self, Preset};
use crate::privacy::PrivacyConfig;
use crate::robust::{RobustConfig, RobustRule};
use fedproj_data::{PartitionConfig, SourceConfig, TextConfig};
use fedproj_nn::models::Layer;
use fedproj_nn::{Init, models};
use layers::{check_keys, read_words, set_path};
use reference::known_keys;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

/// Widest hidden layer: products of two widths stay far from overflow. Long before, a network is too large for the memory.
pub(crate) const MAX_WIDTH: usize = 1 << 24;

/// Everything that decides a run's bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Seed of every random choice: partition, client sampling, initial weights, order of samples.
    pub seed: u64,
    /// Set of defaults below the file and the `key=value` pairs.
    pub preset: Preset,
    /// Data sets and how samples are partitioned among clients.
    pub data: DataConfig,
    /// The network.
    pub model: ModelConfig,
    /// Rounds and participation.
    pub federation: FederationConfig,
    /// Training on a client.
    pub local: LocalConfig,
    /// Client-level differential privacy. Off unless `noise_multiplier` is set.
    pub privacy: PrivacyConfig,
    /// The method that runs, and a table of hyper-parameters per method.
    pub method: MethodConfig,
}

/// Data sets and how samples are partitioned among clients. The default is the embedded digits set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// The labelled data set that is partitioned among clients: a name, or a table with options.
    pub private: SourceConfig,
    /// Training samples used, drawn at random. 0: all.
    pub private_samples: usize,
    /// How `private_samples` are drawn.
    pub private_draw: Draw,
    /// Share of the samples held out for testing, in [0, 1). Only for data sets without a test part.
    pub test_fraction: f64,
    /// The public unlabelled set: a data set, `"split"` for a part of the private set, or `"none"`.
    pub public: SourceConfig,
    /// Share of the private set that `public = "split"` takes, in [0, 1).
    pub public_fraction: f64,
    /// Public samples used, drawn at random from the training and test parts together. 0: all. But if `public` is `"split"`
    /// and `private_samples` is set, 0 keeps the share of `public_fraction`.
    pub public_samples: usize,
    /// How `public_samples` are drawn. `"balanced"` reads the public labels, as the published code for texts does.
    pub public_draw: Draw,
    /// How texts become tokens.
    pub text: TextConfig,
    /// Move and mirror images at random in clients' training batches, with any method. Images move by up to an eighth of each
    /// side (4 of 32 pixels); zeros fill the margin, after normalisation. The public set and the test set stay as they are.
    pub augment: bool,
    /// Cast pixels to bytes once more after normalisation, which destroys them. Compatibility with the published code only.
    pub byte_cast: bool,
    /// How private samples are partitioned among clients.
    pub partition: PartitionConfig,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            private: SourceConfig::named("digits"),
            private_samples: 0,
            private_draw: Draw::Uniform,
            test_fraction: 0.2,
            public: SourceConfig::named("split"),
            public_fraction: 0.5,
            public_samples: 0,
            public_draw: Draw::Uniform,
            text: TextConfig::default(),
            augment: false,
            byte_cast: false,
            partition: PartitionConfig::Dirichlet { beta: 0.3, clients: 10, min_samples: 15 },
        }
    }
}

/// How samples are drawn from a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Draw {
    /// Every sample with the same probability.
    Uniform,
    /// The same number per class. A class with fewer samples gives all of them, and the total is then smaller.
    Balanced,
}

/// The network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// Name of a network (`fedproj models` lists them), `"bert"` for the network of `checkpoint`, or `"layers"`.
    pub name: String,
    /// Folder of a BERT model (`config.json`, `vocab.txt`, `model.safetensors`), relative to the data directory. Empty: none.
    pub checkpoint: String,
    /// Start from the weights of `checkpoint`. If false, the checkpoint only gives the network's shape.
    pub pretrained: bool,
    /// Widths of the hidden layers of `mlp`. Other networks ignore it.
    pub hidden: Vec<usize>,
    /// Layers of the network where `name` is `"layers"`: one table per layer, with `op` and the keys of that layer.
    pub layers: Vec<Layer>,
    /// Groups of clients with different networks, for methods that exchange logits: `[{ name = "resnet8", share = 0.5 },
    /// { name = "cnn", share = 0.5 }]`. They take the place of `name` and `hidden`. The first group's model is reported; the
    /// others are recorded and saved beside it. Empty: all clients have the same network.
    pub clients: Vec<ClientGroup>,
    /// Groups of group-norm. 0: batch-norm.
    pub group_norm: usize,
    /// How initial weights are drawn. The published code uses `authors`.
    pub init: Init,
    /// A safetensors file with weights to start from, relative to the working directory. Empty: none.
    pub weights: String,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            name: "mlp".into(),
            checkpoint: String::new(),
            pretrained: true,
            hidden: vec![100, 100],
            layers: Vec::new(),
            clients: Vec::new(),
            group_norm: 0,
            init: Init::Torch,
            weights: String::new(),
        }
    }
}

impl ModelConfig {
    /// The engine's word for the network's variant.
    pub fn variant(&self) -> models::Variant {
        let norm = if self.group_norm == 0 { models::Norm::Batch } else { models::Norm::Group(self.group_norm) };
        models::Variant { norm, projection_head: None }
    }
}

/// Rounds and participation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FederationConfig {
    /// Communication rounds.
    pub rounds: u32,
    /// Share of the clients that take part in a round, above 0 and at most 1. At least one client does.
    pub fraction: f64,
    /// Rounds between evaluations of the global model. The last round is always evaluated.
    pub evaluate_every: u32,
    /// Whether every client's model is evaluated too, for forgetting and personal accuracy.
    pub evaluate_clients: bool,
    /// Rate ρ in [0, 1) of an average over rounds of the global model, for any method. The average is evaluated and published;
    /// what is sent stays as it is. The rate grows as t / (t + 2), up to ρ. 0: no average.
    pub average_evaluated: f64,
    /// Last rounds whose mean accuracy is the headline. 0: one per client that takes part in a round.
    pub headline_rounds: u32,
    /// Rounds between checkpoints, from which a run resumes.
    pub checkpoint_every: u32,
    /// How clients' vectors are summed. `"fixed"` sums 64-bit integers, so partial sums and any order of clients give the same
    /// bytes; a client with a value out of their range ends the run.
    pub sum: SumKind,
    /// Robust aggregation, where not every client is trusted.
    pub robust: RobustConfig,
}

impl Default for FederationConfig {
    fn default() -> Self {
        Self {
            rounds: 40,
            fraction: 0.5,
            evaluate_every: 1,
            evaluate_clients: false,
            average_evaluated: 0.0,
            headline_rounds: 0,
            checkpoint_every: 1,
            sum: SumKind::Float,
            robust: RobustConfig::default(),
        }
    }
}

/// See [`FederationConfig::sum`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SumKind {
    /// Single precision, in the order of client ids.
    Float,
    /// 64-bit integers, in any order.
    Fixed,
}

impl FederationConfig {
    /// The scale of sums in integers, if the run has such sums.
    pub fn scale(&self, n_clients: usize) -> Option<Scale> {
        (self.sum == SumKind::Fixed).then(|| Scale::of(self, n_clients))
    }

    /// Whether the global model is evaluated after a round, counted from 0.
    pub fn is_evaluated(&self, round: u32) -> bool {
        (round + 1).is_multiple_of(self.evaluate_every) || round + 1 == self.rounds
    }

    /// Whether a round, counted from 0, ends with a checkpoint.
    pub fn saves(&self, round: u32) -> bool {
        (round + 1).is_multiple_of(self.checkpoint_every) || round + 1 >= self.rounds
    }

    /// Clients in a round: max(⌊fraction · N⌋, 1).
    pub fn cohort(&self, n_clients: usize) -> usize {
        ((self.fraction * n_clients as f64 + 1e-9) as usize).clamp(1, n_clients)
    }

    /// The number of last rounds whose mean accuracy is the headline, with `cohort` clients per round.
    pub fn n_headline(&self, cohort: usize) -> usize {
        if self.headline_rounds > 0 { self.headline_rounds as usize } else { cohort }
    }
}

impl Config {
    /// A client's local steps τ_k, normalised as FedNova counts them: a_k.
    pub fn normalised_steps(&self, n_steps: u32) -> f64 {
        self.method.fednova.normaliser(self, n_steps)
    }

    /// Defaults, overlaid by the preset, the file and the overrides (`key.path=value`, values in TOML; plain words need no
    /// quotes).
    ///
    /// # Errors
    /// Names the key that is unknown or the value that is out of range.
    pub fn from_layers(file: Option<&Table>, overrides: &[String]) -> Result<Self> {
        let mut given = file.cloned().unwrap_or_default();
        let defaults = table_of(&Self::default())?;
        legacy::translate(&mut given);
        read_words(&mut given, &defaults);
        for pair in overrides {
            set_path(&mut given, pair)?;
            legacy::translate(&mut given);
            read_words(&mut given, &defaults);
        }
        check_keys(&given, &defaults, "")?;
        let preset = match given.get("preset") {
            Some(value) => read_value(value, "preset", known_keys())?,
            None => Preset::Clean,
        };
        let mut below = defaults;
        merge(&mut below, &presets::table(preset, &given)?);
        let with_given = |mut merged: Table| -> Result<Self> {
            merge(&mut merged, &given);
            read_value(&Value::Table(merged), "", known_keys())
        };
        let mut config = with_given(below.clone())?;
        if let Some(optimizer) = config.own_optimizer(&given) {
            set_optimizer(&mut below, &optimizer)?;
            config = with_given(below)?;
        }
        config.check()?;
        Ok(config)
    }

    /// The optimiser that the method brings along; none where the settings name a kind.
    fn own_optimizer(&self, given: &Table) -> Option<OptimizerConfig> {
        let kind = given.get("local").and_then(|local| local.get("optimizer")?.get("kind"));
        // An unknown method is named by the check that follows.
        if kind.is_some() { None } else { self.method.build().ok()?.optimizer() }
    }

    /// A configuration that was written by [`Config::to_toml`], by this version or an earlier one. Keys that are missing
    /// have their defaults.
    ///
    /// # Errors
    /// Names the key that is unknown or the value of another type.
    pub fn from_toml(text: &str) -> std::result::Result<Self, toml::de::Error> {
        let mut table: Table = toml::from_str(text)?;
        legacy::translate(&mut table);
        table.try_into()
    }

    /// The configuration as TOML under the names that its keys had first. Its hash names a run, so that a run is found
    /// again after a key has moved.
    ///
    /// # Errors
    /// As [`Config::to_toml`].
    pub fn identity(&self) -> Result<String> {
        let mut table = table_of(self)?;
        legacy::restore(&mut table);
        toml::to_string(&table).map_err(Error::internal("writing the configuration"))
    }

    /// The whole configuration as TOML.
    ///
    /// # Errors
    /// Never for a configuration made by [`Config::from_layers`].
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(&table_of(self)?).map_err(Error::internal("writing the configuration"))
    }

    /// The same, with what shares of the rounds mean in a run of `n_rounds` written as rounds. A run that is extended keeps it.
    pub(crate) fn begun_with(&self, n_rounds: u32) -> Self {
        let mut config = self.clone();
        config.method.write_rounds(n_rounds);
        config
    }

    /// Whether a finished run may have `n_rounds` rounds: all, or fewer if its privacy budget was spent before.
    pub fn may_end_after(&self, n_rounds: usize) -> bool {
        let rounds = self.federation.rounds as usize;
        n_rounds == rounds || (n_rounds < rounds && self.privacy.is_on() && self.privacy.epsilon_max > 0.0)
    }

    /// The same run with a method from outside this program, under a name of its own.
    ///
    /// # Errors
    /// If the method is not at hand, or does not work with the rest of the configuration.
    pub fn with_method(mut self, name: &str, method: External) -> Result<Self> {
        (self.method.name, self.method.external) = (name.to_owned(), Some(method));
        self.check()?;
        Ok(self)
    }

    fn check(&self) -> Result<()> {
        let (f, l, d) = (&self.federation, &self.local, &self.data);
        let share = "in [0, 1)";
        Error::require(f.rounds > 0, "federation.rounds", f.rounds, "at least 1")?;
        let fraction = f.fraction > 0.0 && f.fraction <= 1.0;
        Error::require(fraction, "federation.fraction", f.fraction, "above 0 and at most 1")?;
        Error::require(f.evaluate_every > 0, "federation.evaluate_every", f.evaluate_every, "at least 1")?;
        Error::require(f.checkpoint_every > 0, "federation.checkpoint_every", f.checkpoint_every, "at least 1")?;
        check_rate("federation.average_evaluated", f.average_evaluated)?;
        f.robust.check()?;
        if f.sum == SumKind::Fixed && f.robust.rule != RobustRule::None {
            let rule =
                "federation.robust.rule compares single contributions, but federation.sum = \"fixed\" is a sum of all";
            return Err(Error::config(format!("{rule}\nhint: federation.sum=float, or federation.robust.rule=none")));
        }
        Error::require(l.epochs > 0, "local.epochs", l.epochs, "at least 1")?;
        Error::require(l.batch > 0, "local.batch", l.batch, "at least 1")?;
        Error::require(l.clip >= 0.0, "local.clip", l.clip, "0 (no limit) or positive")?;
        let every = (0.0..=1.0).contains(&l.schedule.every);
        Error::require(every, "local.schedule.every", l.schedule.every, "a share of the epochs")?;
        Error::require(l.schedule.factor > 0.0, "local.schedule.factor", l.schedule.factor, "positive")?;
        Error::require((0.0..1.0).contains(&d.test_fraction), "data.test_fraction", d.test_fraction, share)?;
        Error::require((0.0..1.0).contains(&d.public_fraction), "data.public_fraction", d.public_fraction, share)?;
        let hidden = format!("{:?}", self.model.hidden);
        let widths = self.model.hidden.iter().all(|width| (1..=MAX_WIDTH).contains(width));
        Error::require(widths, "model.hidden", hidden, &format!("a list of widths from 1 to {MAX_WIDTH}"))?;
        let (bert, checkpoint) = (self.model.name == "bert", &self.model.checkpoint);
        let needed = "the folder of a BERT model where model.name is \"bert\", and only there";
        Error::require(bert != checkpoint.is_empty(), "model.checkpoint", format!("\"{checkpoint}\""), needed)?;
        let is_listed = self.model.name == "layers";
        let needed = "a list of layers where model.name is \"layers\", and only there";
        let n_layers = format!("[{} tables]", self.model.layers.len());
        Error::require(is_listed != self.model.layers.is_empty(), "model.layers", n_layers, needed)?;
        l.optimizer.check("local.optimizer")?;
        self.privacy.check(self)?;
        let method = self.method.build()?;
        groups::check(self, method.as_ref())?;
        method.check(self)
    }
}

/// Puts an optimiser into a configuration's table.
fn set_optimizer(table: &mut Table, optimizer: &OptimizerConfig) -> Result<()> {
    let optimizer = Table::try_from(optimizer).map_err(Error::internal("writing an optimiser"))?;
    let local = table.entry("local").or_insert_with(|| Value::Table(Table::new()));
    if let Value::Table(local) = local {
        local.insert("optimizer".into(), Value::Table(optimizer));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(overrides: &[&str]) -> String {
        let overrides: Vec<String> = overrides.iter().map(|s| (*s).to_owned()).collect();
        Config::from_layers(None, &overrides).unwrap_err().to_string()
    }

    #[test]
    fn settings_out_of_range_are_named_before_anything_runs() {
        for (method, setting) in [
            ("fedprox", "proximal_weight=-1.0"),
            ("fednova", "momentum_formula=2.0"),
            ("feddyn", "clip=0.0"),
            ("moon", "head=0"),
            ("moon", "temperature=0.0"),
            ("fedrcl", "temperature=0.0"),
            ("feddf", "distill.batch=0"),
            ("feddf", "distill.temperature=0.0"),
            ("fedet", "batch=0"),
            ("fedproj", "memory.batch=0"),
            ("fedproj", "projection.dropout=1.5"),
            ("fedproj", "projection.references=17"),
            ("fedproj", "projection.energy=0.0"),
            ("fedproj", "distill.alpha=-0.1"),
            ("fedproj", "averages.teacher=1.0"),
            ("fedproj", "averages.memory=-0.1"),
            ("fedproj", "correction.alpha=-0.1"),
            ("fedproj", "correction.clip=0.0"),
            ("fedproj", "lookahead=1.0"),
            ("fedavgm", "momentum=1.0"),
            ("fedadam", "eps=0.0"),
            ("fedsam", "radius=-0.1"),
            ("fedspeed", "radius=-0.1"),
            ("fedspeed", "alpha=-0.1"),
            ("fedspeed", "clip=0.0"),
            ("feddc", "alpha=-0.1"),
            ("feddc", "clip=0.0"),
            ("afedpd", "alpha=-0.1"),
            ("ditto", "lr=0.0"),
            ("ditto", "proximal_weight=-1.0"),
            ("fedkd", "noise=-1.0"),
            ("fedkd", "temperature=0.0"),
            ("fedgems", "label_weight=0.0"),
            ("fedgems", "memory.batch=0"),
            ("pfedhn", "lr=-1.0"),
            ("pfedhn", "hidden=0"),
            ("fedgen", "generated_weight=-1.0"),
            ("fedgen", "distill_weight=-1.0"),
            ("fedgen", "diversity_weight=-1.0"),
            ("fedgen", "decay=0.0"),
            ("fedgen", "generator.noise=0"),
            ("fedgen", "generator.batch=1000000"),
            ("fedgen", "generator.noise=9223372036854775807"),
            ("fedgen", "generator.hidden=9223372036854775807"),
            ("fedgkt", "distill_weight=-1.0"),
            ("fedgkt", "temperature=0.0"),
            ("fedgkt", "batch=0"),
            ("fedlc", "margin=-1.0"),
            ("fedntd", "distill_weight=-1.0"),
            ("fedntd", "temperature=0.0"),
            ("fedacg", "momentum=1.0"),
            ("fedacg", "proximal_weight=-0.1"),
        ] {
            let message = error(&[&format!("method.name={method}"), &format!("method.{method}.{setting}")]);
            let key = format!("method.{method}.{}", setting.split('=').next().unwrap());
            assert!(message.contains(&key), "{setting}: {message}");
        }
        let message = error(&["method.name=feddf", "method.feddf.distill.optimizer.lr=-1.0"]);
        assert!(message.contains("method.feddf.distill.optimizer: learning rate = -1"), "{message}");
        assert!(error(&["model.hidden=[0]"]).contains("model.hidden"));
        assert!(error(&["local.schedule.factor=0.0"]).contains("local.schedule.factor"));
    }

    #[test]
    fn a_method_rejects_what_its_server_cannot_do() {
        for (method, setting, told) in [
            ("fedgen", "federation.robust.rule=median", "teaches its generator by every client's own"),
            ("fedgen", "federation.robust.rule=trimmed_mean", "rule = \"trimmed_mean\" guards the mean"),
            ("fedgkt", "federation.robust.rule=krum", "each is answered"),
            ("fedgkt", "federation.robust.rule=median", "without federation.robust: that limits"),
            ("fedgkt", "federation.robust.clip=0.1", "without federation.robust: that limits"),
            ("fedgkt", "data.partition={kind='virtual', clients=9, samples=20}", "one row of logits per sample"),
        ] {
            let message = error(&[&format!("method.name={method}"), setting]);
            assert!(message.contains(told), "{method} {setting}: {message}");
        }
    }

    #[test]
    fn keys_in_use_are_those_of_the_chosen_method() {
        let config = Config::from_layers(None, &["method.name=moon".into()]).unwrap();
        let keys = config.keys_in_use();
        assert_eq!(keys["method.name"], "moon");
        assert_eq!(keys["local.optimizer.lr"], "0.001");
        assert!(keys.contains_key("method.moon.temperature") && !keys.keys().any(|k| k.starts_with("method.fed")));
    }

    #[test]
    fn another_kind_of_optimiser_does_not_inherit_the_weight_decay() {
        let decay = |pairs: &[&str]| {
            let pairs: Vec<String> = pairs.iter().map(|pair| (*pair).to_owned()).collect();
            Config::from_layers(None, &pairs).unwrap().local.optimizer.weight_decay.to_bits()
        };
        let (none, default) = (0.0f32.to_bits(), OptimizerConfig::default().weight_decay.to_bits());
        assert_eq!(decay(&["local.optimizer={kind='sgd', lr=0.1}"]), none);
        assert_eq!(decay(&["local.optimizer.kind=sgd"]), none);
        assert_eq!(decay(&["local.optimizer.kind=sgd", "local.optimizer.weight_decay=1e-4"]), 1e-4f32.to_bits());
        assert_eq!(decay(&["local.optimizer={kind='adam', lr=0.1}"]), default);
        assert_eq!(decay(&["local.optimizer.lr=0.1"]), default);
        // What a run has written is read as it stands.
        let explicit = "[local.optimizer]\nkind = 'sgd'\nweight_decay = 5e-5";
        assert_eq!(Config::from_toml(explicit).unwrap().local.optimizer.weight_decay.to_bits(), default);
        let file = toml::from_str(explicit).unwrap();
        assert_eq!(Config::from_layers(Some(&file), &[]).unwrap().local.optimizer.weight_decay.to_bits(), default);
    }

    #[test]
    fn a_method_that_needs_plain_sgd_brings_it_along_unless_the_settings_name_a_kind() {
        let optimizer = |pairs: &[&str]| {
            let pairs: Vec<String> = pairs.iter().map(|pair| (*pair).to_owned()).collect();
            Config::from_layers(None, &pairs).map(|config| config.local.optimizer)
        };
        let sgd = |lr: f32| OptimizerConfig { kind: OptimizerKind::Sgd, lr, weight_decay: 0.0, ..Default::default() };
        for method in ["method=scaffold", "method=feddc"] {
            assert_eq!(optimizer(&[method]).unwrap(), sgd(0.1));
            assert_eq!(optimizer(&[method, "local.optimizer.lr=0.05"]).unwrap(), sgd(0.05));
            assert_eq!(optimizer(&[method, "local.optimizer.kind=sgd"]).unwrap(), sgd(1e-3), "as for every method");
            let message = optimizer(&[method, "local.optimizer=adam"]).unwrap_err().to_string();
            assert!(message.contains("needs plain SGD") && message.contains("hint: local.optimizer = "), "{message}");
        }
        assert_eq!(optimizer(&["method=fedavg"]).unwrap(), OptimizerConfig::default());
    }

    #[test]
    fn layers_override_one_another_key_by_key() {
        let file: Table =
            toml::from_str("preset = 'paper'\n[data]\npartition = { kind = 'iid', clients = 4 }").unwrap();
        let config = Config::from_layers(Some(&file), &["local.optimizer.lr=0.5".into()]).unwrap();
        assert!((config.method.fedproj.projection.warmup - 1.0).abs() < 1e-12, "the preset is below the file");
        assert_eq!(config.data.partition, PartitionConfig::Iid { clients: 4 });
        assert!((config.local.optimizer.lr - 0.5).abs() < 1e-6);
        let back: Config = toml::from_str(&config.to_toml().unwrap()).unwrap();
        assert_eq!(back, config, "what is written is read back");
    }
}
