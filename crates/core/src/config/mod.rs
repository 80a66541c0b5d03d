//! The configuration of a run: every key with its default, and the presets.
//!
//! [`Config`] is only made by [`Config::from_layers`]: defaults, then a preset, then a file, then `key=value` pairs. Unknown
//! keys are refused with the nearest known one.

mod layers;
mod legacy;
mod local;

pub(crate) use layers::{merge, table_of};
pub use local::{LocalConfig, OptimizerConfig, OptimizerKind, ScheduleConfig};

use crate::error::{Error, Result};
use crate::methods::MethodConfig;
use crate::presets::{self, Preset};
use crate::robust::RobustConfig;
use fedproj_data::{PartitionConfig, SourceConfig, TextConfig};
use fedproj_nn::{Init, models};
use layers::{check_keys, set_path};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use toml::{Table, Value};

/// Everything that decides a run's bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Decides the partition, the sampling of clients, initial weights and every order.
    pub seed: u64,
    /// The set of defaults on which the rest stands.
    pub preset: Preset,
    /// Data and how they are dealt out.
    pub data: DataConfig,
    /// The network.
    pub model: ModelConfig,
    /// Rounds and participation.
    pub federation: FederationConfig,
    /// Training on a client.
    pub local: LocalConfig,
    /// The method, and the hyper-parameters of each.
    pub method: MethodConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            seed: 0,
            preset: Preset::Clean,
            data: DataConfig::default(),
            model: ModelConfig::default(),
            federation: FederationConfig::default(),
            local: LocalConfig::default(),
            method: MethodConfig::default(),
        }
    }
}

/// Data and how they are dealt out. The default is the embedded digits set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// The labelled set whose parts the clients hold.
    pub private: SourceConfig,
    /// Training samples that are used; 0 is all.
    pub private_samples: usize,
    /// Whether these are drawn uniformly, or as many of each class; then `private_samples` is the most that there may be.
    pub private_draw: Draw,
    /// Held out for testing where the set comes without a test part.
    pub test_fraction: f64,
    /// The public unlabelled set: a data set, `"split"` for a part of the private one, or `"none"`.
    pub public: SourceConfig,
    /// Share of the private set that `public = "split"` takes.
    pub public_fraction: f64,
    /// Public samples that are used; 0 is all, of training and test part together.
    pub public_samples: usize,
    /// As `private_draw`. A balanced draw looks at the public set's labels, as the authors' code for texts does.
    pub public_draw: Draw,
    /// How texts become tokens.
    pub text: TextConfig,
    /// Compatibility with the authors' code: pixels are cast to bytes once more after normalisation, which destroys them.
    pub byte_cast: bool,
    /// How the private samples are dealt to clients.
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
            byte_cast: false,
            partition: PartitionConfig::Dirichlet { beta: 0.3, clients: 10, min_samples: 15 },
        }
    }
}

/// How samples are drawn from a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Draw {
    /// Every sample with the same chance.
    Uniform,
    /// As many of each class, as far as they go.
    Balanced,
}

/// The network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// A name of `fedproj models`, or `"bert"` for the network of a checkpoint.
    pub name: String,
    /// A folder with a BERT model's `config.json`, `vocab.txt` and `model.safetensors`, relative to the data directory.
    pub checkpoint: String,
    /// Whether the checkpoint's weights are the start; otherwise it gives the network's shape alone.
    pub pretrained: bool,
    /// Hidden layers of `mlp`; other networks have sizes of their own.
    pub hidden: Vec<usize>,
    /// Groups of group-norm; 0 is batch-norm.
    pub group_norm: usize,
    /// How weights start: as PyTorch's layers do, or as the paper's code does.
    pub init: InitConfig,
    /// A safetensors file with weights to start from; empty for none.
    pub weights: String,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            name: "mlp".into(),
            checkpoint: String::new(),
            pretrained: true,
            hidden: vec![100, 100],
            group_norm: 0,
            init: InitConfig::Torch,
            weights: String::new(),
        }
    }
}

/// See [`Init`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InitConfig {
    /// PyTorch's defaults.
    Torch,
    /// The paper's code.
    Authors,
}

impl ModelConfig {
    /// The engine's word for the initialisation.
    pub fn init(&self) -> Init {
        match self.init {
            InitConfig::Torch => Init::Torch,
            InitConfig::Authors => Init::Authors,
        }
    }

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
    /// Share of the clients that take part in a round; at least one does.
    pub fraction: f64,
    /// Rounds between evaluations of the global model; the last one is always evaluated.
    pub evaluate_every: u32,
    /// Whether every client's model is evaluated too, for forgetting and personal accuracy.
    pub evaluate_clients: bool,
    /// Rounds whose mean accuracy is the headline; 0 is as many as clients take part in a round.
    pub headline_rounds: u32,
    /// Rounds between checkpoints.
    pub checkpoint_every: u32,
    /// What takes the place of weighted means where clients are not trusted.
    pub robust: RobustConfig,
}

impl Default for FederationConfig {
    fn default() -> Self {
        Self {
            rounds: 40,
            fraction: 0.5,
            evaluate_every: 1,
            evaluate_clients: false,
            headline_rounds: 0,
            checkpoint_every: 1,
            robust: RobustConfig::default(),
        }
    }
}

impl FederationConfig {
    /// Clients in a round: max(⌊fraction · N⌋, 1).
    pub fn cohort(&self, n_clients: usize) -> usize {
        ((self.fraction * n_clients as f64 + 1e-9) as usize).clamp(1, n_clients)
    }

    /// Rounds whose mean accuracy is the headline, where so many clients take part in one.
    pub fn n_headline(&self, cohort: usize) -> usize {
        if self.headline_rounds > 0 { self.headline_rounds as usize } else { cohort }
    }
}

impl Config {
    /// Defaults, overlaid by the preset, the file and the overrides (`key.path=value`, values in TOML; plain words need no
    /// quotes).
    ///
    /// # Errors
    /// Names the key that is unknown or the value that is out of range.
    pub fn from_layers(file: Option<&Table>, overrides: &[String]) -> Result<Self> {
        let mut given = file.cloned().unwrap_or_default();
        legacy::translate(&mut given);
        for pair in overrides {
            set_path(&mut given, pair)?;
            legacy::translate(&mut given);
        }
        let defaults = table_of(&Self::default())?;
        check_keys(&given, &defaults, "")?;
        let preset = match given.get("preset") {
            Some(value) => value.clone().try_into().map_err(|e| Error::config(format!("preset: {e}")))?,
            None => Preset::Clean,
        };
        let mut merged = defaults;
        merge(&mut merged, &presets::table(preset, &given)?);
        merge(&mut merged, &given);
        let config: Self = Value::Table(merged)
            .try_into()
            .map_err(|e: toml::de::Error| Error::config(format!("configuration: {}", e.to_string().trim_end())))?;
        config.check()?;
        Ok(config)
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

    /// Every key that the chosen method looks at, with its value as text; the tables of the other methods are left out.
    pub fn keys_in_use(&self) -> BTreeMap<String, String> {
        fn flatten(value: &Value, path: &str, out: &mut BTreeMap<String, String>) {
            if let Value::Table(table) = value {
                for (key, value) in table {
                    flatten(value, &if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, out);
                }
            } else {
                out.insert(path.to_owned(), value.to_string().replace('"', ""));
            }
        }
        let mut out = BTreeMap::new();
        if let Ok(table) = table_of(self) {
            flatten(&Value::Table(table), "", &mut out);
        }
        let own = format!("method.{}.", self.method.name);
        out.retain(|key, _| !key.starts_with("method.") || key == "method.name" || key.starts_with(&own));
        out
    }

    fn check(&self) -> Result<()> {
        let (f, l, d) = (&self.federation, &self.local, &self.data);
        let share = "in [0, 1)";
        Error::require(f.rounds > 0, "federation.rounds", f.rounds, "at least 1")?;
        let fraction = f.fraction > 0.0 && f.fraction <= 1.0;
        Error::require(fraction, "federation.fraction", f.fraction, "above 0 and at most 1")?;
        Error::require(f.evaluate_every > 0, "federation.evaluate_every", f.evaluate_every, "at least 1")?;
        Error::require(f.checkpoint_every > 0, "federation.checkpoint_every", f.checkpoint_every, "at least 1")?;
        f.robust.check()?;
        Error::require(l.epochs > 0, "local.epochs", l.epochs, "at least 1")?;
        Error::require(l.batch > 0, "local.batch", l.batch, "at least 1")?;
        Error::require(l.clip >= 0.0, "local.clip", l.clip, "0 (no limit) or positive")?;
        let every = (0.0..=1.0).contains(&l.schedule.every);
        Error::require(every, "local.schedule.every", l.schedule.every, "a share of the epochs")?;
        Error::require(l.schedule.factor > 0.0, "local.schedule.factor", l.schedule.factor, "positive")?;
        Error::require((0.0..1.0).contains(&d.test_fraction), "data.test_fraction", d.test_fraction, share)?;
        Error::require((0.0..1.0).contains(&d.public_fraction), "data.public_fraction", d.public_fraction, share)?;
        let hidden = format!("{:?}", self.model.hidden);
        Error::require(!self.model.hidden.contains(&0), "model.hidden", hidden, "a list of positive widths")?;
        let (bert, checkpoint) = (self.model.name == "bert", &self.model.checkpoint);
        let needed = "the folder of a BERT model where model.name is \"bert\", and only there";
        Error::require(bert != checkpoint.is_empty(), "model.checkpoint", format!("\"{checkpoint}\""), needed)?;
        l.optimizer.check("local.optimizer")?;
        self.method.build()?.check(self)
    }
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
            ("fedproj", "distill.alpha=-0.1"),
            ("fedavgm", "momentum=1.0"),
            ("fedadam", "eps=0.0"),
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
    fn keys_in_use_are_those_of_the_chosen_method() {
        let config = Config::from_layers(None, &["method.name=moon".into()]).unwrap();
        let keys = config.keys_in_use();
        assert_eq!(keys["method.name"], "moon");
        assert_eq!(keys["local.optimizer.lr"], "0.001");
        assert!(keys.contains_key("method.moon.temperature") && !keys.keys().any(|k| k.starts_with("method.fed")));
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
