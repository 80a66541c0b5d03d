//! The set-ups that the program knows by a data set's name: the paper's, and a quick form of it for a few CPU cores.

use fedproj_core::{Config, Result};

/// The presets.
pub const PRESETS: [&str; 5] = ["clean", "paper", "authors-code", "leading", "leading-stateless"];

/// What differs between the studies of two data sets. Everything else has its default.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The private data set.
    pub data: &'static str,
    /// The data set's name as the paper writes it.
    pub title: &'static str,
    /// The public data set.
    pub public: &'static str,
    /// The network.
    pub model: &'static str,
    /// The folder of its weights, for texts; empty for images.
    pub checkpoint: &'static str,
    /// Number of clients.
    pub clients: u32,
    /// Share of the clients per round.
    pub fraction: f64,
    /// Communication rounds.
    pub rounds: u32,
    /// Local epochs per round.
    pub epochs: u32,
    /// Epochs of the server.
    pub distill_epochs: u32,
    /// Private samples to use; 0 is all.
    pub private_samples: u32,
    /// Public samples to use; 0 is all.
    pub public_samples: u32,
    /// Samples per memory gradient of FedProj.
    pub memory_batch: u32,
    /// Last rounds whose mean accuracy is the headline; 0 is one per client of a round.
    pub headline_rounds: u32,
}

/// The paper's set-ups.
pub const SETUPS: &[Setup] = &[CIFAR10, CIFAR100, CINIC10, SST2, MNLI, MARC];

/// The paper's set-up for CIFAR-10.
pub const CIFAR10: Setup = Setup {
    data: "cifar10",
    title: "CIFAR-10",
    public: "cifar100",
    model: "resnet8",
    checkpoint: "",
    clients: 100,
    fraction: 0.1,
    rounds: 100,
    epochs: 20,
    distill_epochs: 1,
    private_samples: 0,
    public_samples: 0,
    memory_batch: 256,
    headline_rounds: 0,
};

/// The paper's set-up for CIFAR-100, with the stand-in for its public set.
pub const CIFAR100: Setup = Setup {
    data: "cifar100",
    title: "CIFAR-100",
    public: "tinyimagenet32",
    model: "resnet18",
    clients: 50,
    distill_epochs: 3,
    ..CIFAR10
};

/// The paper's set-up for CINIC-10, with the number of training images that its code uses.
pub const CINIC10: Setup =
    Setup { data: "cinic10", title: "CINIC-10", model: "resnet18", rounds: 60, private_samples: 100_000, ..CIFAR10 };

/// What the paper's experiments on texts set beyond a set-up. Rate, schedule and draw are those of its code.
const TEXT_SETTINGS: &[(&str, &str)] = &[
    ("data.private_draw", "\"balanced\""),
    ("local.optimizer.kind", "\"adam\""),
    ("local.optimizer.lr", "3e-5"),
    ("local.optimizer.weight_decay", "0.0"),
    ("local.schedule.every", "0.0"),
    ("method.fedproj.distill.batch", "128"),
    ("method.fedproj.distill.optimizer.lr", "3e-5"),
    ("method.feddf.distill.batch", "128"),
    ("method.feddf.distill.optimizer.lr", "3e-5"),
    ("method.fedet.batch", "128"),
    ("method.fedet.optimizer.lr", "3e-5"),
];

/// The paper's set-up for SST-2, with a checkpoint that stands in for its TinyBERT and the limits on texts of its code.
pub const SST2: Setup = Setup {
    data: "sst2",
    title: "SST-2",
    public: "sent140",
    model: "bert",
    checkpoint: "minilm-l3",
    clients: 15,
    fraction: 0.3,
    rounds: 15,
    epochs: 1,
    distill_epochs: 1,
    private_samples: 100_000,
    public_samples: 30_000,
    memory_batch: 128,
    headline_rounds: 0,
};

/// The paper's set-up for MNLI.
pub const MNLI: Setup = Setup { data: "mnli", title: "MNLI", public: "snli", ..SST2 };

/// The paper's set-up for MARC, with all public reviews that are available.
pub const MARC: Setup = Setup { data: "marc", title: "MARC", public: "yelp", public_samples: 10_000, ..SST2 };

/// A study in minutes on two CPU cores: skewed clients, few of which take part in a round. The paper has no such set-up.
pub const DIGITS: Setup = Setup {
    data: "digits",
    title: "digits",
    public: "split",
    model: "mlp",
    clients: 10,
    fraction: 0.3,
    rounds: 60,
    epochs: 10,
    headline_rounds: 10,
    ..CIFAR10
};

/// A data set's name as the paper writes it; its own where the paper has none.
pub fn title(data: &str) -> &str {
    match data {
        "sent140" => "Sentiment140",
        "snli" => "SNLI",
        "yelp" => "Yelp",
        _ => SETUPS.iter().find(|setup| setup.data == data).map_or(data, |setup| setup.title),
    }
}

/// The paper's set-up for a data set, a method and a preset; none where the paper does not use the set.
pub fn paper_setup(data: &str, beta: f64, method: &str, preset: &str) -> Result<Option<Config>> {
    let Some(setup) = SETUPS.iter().find(|s| s.data == data) else { return Ok(None) };
    let mut pairs: Vec<String> =
        setup.with_preset(preset).iter().map(|(key, value)| format!("{key}={value}")).collect();
    pairs.push(format!("data.partition.beta={beta:?}"));
    pairs.push(format!("method.name={method}"));
    Ok(Some(Config::from_layers(None, &pairs)?))
}

impl Setup {
    /// The same study in minutes on two CPU cores: the first rounds, for images with a small network.
    #[must_use]
    pub fn quick(self) -> Self {
        if self.data == DIGITS.data {
            return Self { rounds: 10, ..self };
        }
        if self.is_text() {
            return Self { rounds: 8, private_samples: 6_000, public_samples: 1_000, memory_batch: 32, ..self };
        }
        Self {
            model: "resnet8-thin",
            clients: 20,
            fraction: 0.25,
            rounds: 10,
            epochs: 2,
            distill_epochs: 1,
            private_samples: 10_000,
            public_samples: 5_000,
            memory_batch: 64,
            ..self
        }
    }

    /// Whether its samples are texts.
    pub const fn is_text(&self) -> bool {
        !self.checkpoint.is_empty()
    }

    /// Keys and values in TOML.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let Self { data, public, model, checkpoint, clients, fraction, rounds, epochs, distill_epochs, .. } = self;
        let min_samples = if self.is_text() { 3 } else { 15 };
        let mut settings = vec![
            ("data.private", format!("\"{data}\"")),
            ("data.public", format!("\"{public}\"")),
            (
                "data.partition",
                format!("{{ kind = \"dirichlet\", beta = 0.3, clients = {clients}, min_samples = {min_samples} }}"),
            ),
            ("model.name", format!("\"{model}\"")),
            ("federation.rounds", rounds.to_string()),
            ("federation.fraction", fraction.to_string()),
            ("local.epochs", epochs.to_string()),
            ("local.batch", "64".into()),
        ];
        if self.is_text() {
            settings.push(("model.checkpoint", format!("\"{checkpoint}\"")));
            settings.extend(TEXT_SETTINGS.iter().map(|(key, value)| (*key, (*value).to_owned())));
        } else {
            settings.push(("local.optimizer.kind", "\"adam\"".into()));
            settings.push(("local.optimizer.lr", "1e-3".into()));
            settings.push(("local.optimizer.weight_decay", "5e-5".into()));
        }
        let mut unless = |default: u32, value: u32, keys: &[&'static str]| {
            if value != default {
                settings.extend(keys.iter().map(|key| (*key, value.to_string())));
            }
        };
        unless(0, self.private_samples, &["data.private_samples"]);
        unless(0, self.public_samples, &["data.public_samples"]);
        unless(0, self.headline_rounds, &["federation.headline_rounds"]);
        unless(256, self.memory_batch, &["method.fedproj.memory.batch"]);
        let epochs = ["method.fedproj.distill.epochs", "method.feddf.distill.epochs", "method.fedet.epochs"];
        unless(1, *distill_epochs, &epochs);
        settings
    }

    /// The same with the network of the preset: what the published code calls ResNet-8 has a fourth stage.
    #[must_use]
    pub fn of_preset(self, preset: &str) -> Self {
        let is_authors = preset == "authors-code" && self.model == "resnet8";
        Self { model: if is_authors { "resnet10" } else { self.model }, ..self }
    }

    /// The same with a seed, a preset and FedProj.
    pub fn with_preset(&self, preset: &str) -> Vec<(&'static str, String)> {
        let mut settings = vec![("seed", "0".into()), ("preset", format!("\"{preset}\""))];
        settings.extend(self.of_preset(preset).settings());
        settings.push(("method.name", "\"fedproj\"".into()));
        settings
    }
}
