//! What each study varies. A further one is a [`Study`], its arguments, and a line in `reproduce::Reproduce`.

use super::study::{Study, StudyArgs};
use crate::setups::{CIFAR10, CIFAR100, CINIC10, MARC, MNLI, SST2, Setup};
use anyhow::Result;
use clap::Args;

/// The data sets of the paper's image experiments.
const IMAGES: &[Setup] = &[CIFAR10, CIFAR100, CINIC10];

/// The nine methods beside each other.
pub const TABLE1: Study = Study {
    name: "table1",
    title: "Table 1, image classification",
    setups: IMAGES,
    fixed: &[],
    key: "method.name",
    flag: "--methods",
};

/// Four methods on texts, with a small BERT.
pub const TABLE2: Study = Study {
    name: "table2",
    title: "Table 2, text classification",
    setups: &[SST2, MNLI, MARC],
    fixed: &[],
    key: "method.name",
    flag: "--methods",
};

const PROJECTION_DROPOUT: Study = Study {
    name: "projection-dropout",
    title: "Ablation: projection dropout",
    setups: IMAGES,
    fixed: &["method.name=fedproj"],
    key: "method.fedproj.projection.dropout",
    flag: "--rates",
};

const WEIGHT_DIVERGENCE: Study = Study {
    name: "weight-divergence",
    title: "Ablation: weight divergence",
    setups: IMAGES,
    fixed: &["method.name=fedproj"],
    key: "method.fedproj.distill.alpha",
    flag: "--alphas",
};

/// Arguments of `reproduce table1`.
#[derive(Args)]
pub struct Table1 {
    #[command(flatten)]
    common: StudyArgs,
    /// Methods, with commas between them; `fedproj methods` lists more
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "fedavg,fedprox,fednova,feddyn,moon,fedrcl,feddf,fedet,fedproj"
    )]
    methods: Vec<String>,
}

/// Arguments of `reproduce table2`.
#[derive(Args)]
pub struct Table2 {
    #[command(flatten)]
    common: StudyArgs,
    /// Methods, with commas between them; `fedproj methods` lists more
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "fedavg,feddf,fedet,fedproj")]
    methods: Vec<String>,
}

/// Arguments of `reproduce projection-dropout`.
#[derive(Args)]
pub struct ProjectionDropout {
    #[command(flatten)]
    common: StudyArgs,
    /// Shares of client-rounds that go without projection, with commas between them
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0,0.25,0.5,0.75,1")]
    rates: Vec<f64>,
}

/// Arguments of `reproduce weight-divergence`.
#[derive(Args)]
pub struct WeightDivergence {
    #[command(flatten)]
    common: StudyArgs,
    /// Weights α, with commas between them; 0 is without the term
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0,0.1,0.3,0.5")]
    alphas: Vec<f64>,
}

impl Table1 {
    /// Runs the study.
    pub fn run(self) -> Result<()> {
        let methods = self.methods.into_iter().map(toml::Value::from).collect();
        TABLE1.run(&self.common, methods)
    }
}

impl Table2 {
    /// Runs the study.
    pub fn run(self) -> Result<()> {
        let methods = self.methods.into_iter().map(toml::Value::from).collect();
        TABLE2.run(&self.common, methods)
    }
}

impl ProjectionDropout {
    /// Runs the study.
    pub fn run(self) -> Result<()> {
        PROJECTION_DROPOUT.run(&self.common, self.rates.into_iter().map(toml::Value::from).collect())
    }
}

impl WeightDivergence {
    /// Runs the study.
    pub fn run(self) -> Result<()> {
        WEIGHT_DIVERGENCE.run(&self.common, self.alphas.into_iter().map(toml::Value::from).collect())
    }
}
