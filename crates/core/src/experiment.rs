//! A configuration made concrete: data, network, partition and initial weights, the same for every method of a seed.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::method::Method;
use fedproj_data::{Dataset, Partition, SplitConfig, SplitFor};
use fedproj_nn::{Graph, models};
use fedproj_rng::{Purpose, Stream};
use std::path::Path;

/// What a run works on.
#[derive(Debug)]
pub struct Experiment {
    /// The configuration.
    pub config: Config,
    /// The network, with the method's changes.
    pub graph: Graph,
    /// Initial weights.
    pub weights: Vec<f32>,
    /// Initial buffers.
    pub buffers: Vec<f32>,
    /// All clients' samples.
    pub private: Dataset,
    /// Held-out samples of the same classes.
    pub test: Dataset,
    /// The public unlabelled set.
    pub public: Option<Dataset>,
    /// Which samples each client holds.
    pub partition: Partition,
}

/// Ids of this module's own draws, beyond those of `fedproj_data::split`.
const PRIVATE_SUBSET: u32 = 100;
const PUBLIC_SUBSET: u32 = 101;

impl Experiment {
    /// Loads the data of a configuration and prepares the rest.
    ///
    /// # Errors
    /// If data are missing or do not fit together.
    pub fn load(config: Config, method: &dyn Method, data_dir: Option<&Path>) -> Result<Self> {
        Self::load_beside(config, method, data_dir, None)
    }

    /// As [`Experiment::load`], beside a public set that is here already, as a node has it from its server.
    ///
    /// # Errors
    /// As [`Experiment::load`].
    pub fn load_beside(
        config: Config,
        method: &dyn Method,
        data_dir: Option<&Path>,
        public: Option<Dataset>,
    ) -> Result<Self> {
        let needs_public = method.needs_public() && public.is_none();
        let (private, test, own) = load_data(&config, method, data_dir, needs_public)?;
        Self::new(config, method, private, test, public.or(own))
    }

    /// An experiment on data that are in memory already.
    ///
    /// # Errors
    /// If they do not fit together or the configuration.
    pub fn new(
        config: Config,
        method: &dyn Method,
        private: Dataset,
        test: Dataset,
        public: Option<Dataset>,
    ) -> Result<Self> {
        let partition = config.data.partition.build(&private, config.seed)?;
        Self::with_partition(config, method, private, test, public, partition)
    }

    /// As [`Experiment::new`], with clients dealt by the caller.
    ///
    /// # Errors
    /// If the parts do not fit together or the configuration.
    pub fn with_partition(
        config: Config,
        method: &dyn Method,
        private: Dataset,
        test: Dataset,
        public: Option<Dataset>,
        partition: Partition,
    ) -> Result<Self> {
        if private.labels().is_none() || test.labels().is_none() {
            return Err(Error::config(format!("the private set `{}` has no labels", private.name())));
        }
        let public = if method.needs_public() { public } else { None };
        if let Some(public) = &public {
            if public.shape() != private.shape() {
                return Err(Error::config(format!(
                    "the public set `{}` has samples of shape {}, the private set `{}` of {}\n\
                     hint: data.public = {{ name = \"…\", resize = [height, width] }} resizes images",
                    public.name(),
                    public.shape(),
                    private.name(),
                    private.shape()
                )));
            }
            if method.needs_public_labels()
                && (public.labels().is_none() || public.class_names() != private.class_names())
            {
                return Err(Error::config(format!(
                    "method `{}` is set to use public labels, but `{}` has no labels of the classes of `{}`\n\
                     hint: memory.target = \"ensemble\" needs none",
                    method.name(),
                    public.name(),
                    private.name()
                )));
            }
        } else if method.needs_public() {
            return Err(Error::config(format!(
                "method `{}` needs a public set; set data.public to a data set or to \"split\"",
                method.name()
            )));
        }
        let graph = Self::network(&config, method, &private)?;
        let (weights, buffers) = if config.model.weights.is_empty() {
            (graph.init_params(config.seed, config.model.init()), graph.init_buffers())
        } else {
            fedproj_nn::weights::load(Path::new(&config.model.weights), &graph)?
        };
        Ok(Self { config, graph, weights, buffers, private, test, public, partition })
    }

    /// The network of a configuration for such data: only its layout, which takes no memory to speak of.
    ///
    /// # Errors
    /// If there is no such network or it cannot take such samples.
    pub fn network(config: &Config, method: &dyn Method, private: &Dataset) -> Result<Graph> {
        let shape = match private.shape() {
            fedproj_data::Shape::Image { height, width, channels } => fedproj_nn::Shape::image(height, width, channels),
            fedproj_data::Shape::Vector { features } => fedproj_nn::Shape::vector(features),
            fedproj_data::Shape::Tokens { len } => fedproj_nn::Shape::image(1, len, 1),
        };
        let variant = method.variant(config.model.variant());
        Ok(match config.model.name.as_str() {
            "mlp" => models::mlp(shape, &config.model.hidden, private.n_classes(), variant)?,
            name => models::build(name, shape, private.n_classes(), variant)?,
        })
    }

    /// Where running variances lie among the buffers.
    pub fn variances(&self) -> Vec<std::ops::Range<usize>> {
        let spans = self.graph.buffers().spans().iter();
        spans.filter(|span| span.name.ends_with(".running_var")).map(fedproj_nn::Span::range).collect()
    }

    /// The clients of a round, in increasing order: uniform without replacement, a function of seed and round alone.
    pub fn cohort(&self, round: u32) -> Vec<u32> {
        let n = self.partition.n_clients();
        let all: Vec<u32> = (0..n as u32).collect();
        self.cohort_among(round, &all, self.config.federation.cohort(n))
    }

    /// As [`Experiment::cohort`], of some clients and of another size: a server draws from those that are there, and may
    /// ask more than it needs.
    pub fn cohort_among(&self, round: u32, clients: &[u32], size: usize) -> Vec<u32> {
        let stream = &mut Stream::new(self.config.seed, Purpose::Cohort, [round, 0, 0]);
        let drawn = stream.choose(clients.len() as u32, size.min(clients.len()) as u32);
        drawn.into_iter().map(|at| clients[at as usize]).collect()
    }
}

fn load_data(
    config: &Config,
    method: &dyn Method,
    data_dir: Option<&Path>,
    needs_public: bool,
) -> Result<(Dataset, Dataset, Option<Dataset>)> {
    let data = &config.data;
    let splits = fedproj_data::load(&data.private, data_dir)?;
    let (mut private, test) = if let Some(test) = splits.test {
        (splits.train, test)
    } else {
        let how = SplitConfig { fraction: data.test_fraction, stratified: true };
        let (kept, held_out) = fedproj_data::split(&splits.train, SplitFor::Test, how, config.seed)?;
        (splits.train.subset(&kept), splits.train.subset(&held_out))
    };
    let public = match data.public.name.as_str() {
        "none" => None,
        "split" => {
            let how = SplitConfig { fraction: data.public_fraction, stratified: false };
            let (kept, held_out) = fedproj_data::split(&private, SplitFor::Public, how, config.seed)?;
            let public = private.subset(&held_out);
            private = private.subset(&kept);
            Some(public)
        }
        // A split changes the private set, so it is done for every method; a set of its own is only read where it is used.
        _ if !needs_public => None,
        _ => Some(fedproj_data::load(&data.public, data_dir)?.concatenated()?),
    };
    private = subset(private, data.private_samples, config.seed, PRIVATE_SUBSET, "data.private_samples")?;
    let public = public
        .map(|p| if method.needs_public_labels() { p } else { p.without_labels() })
        .map(|p| subset(p, data.public_samples, config.seed, PUBLIC_SUBSET, "data.public_samples"))
        .transpose()?;
    if data.byte_cast {
        return Ok((private.with_byte_cast(), test.with_byte_cast(), public.map(Dataset::with_byte_cast)));
    }
    Ok((private, test, public))
}

/// `n` samples drawn without replacement; 0 is all.
fn subset(data: Dataset, n: usize, seed: u64, id: u32, key: &str) -> Result<Dataset> {
    if n == 0 || n == data.n_samples() {
        return Ok(data);
    }
    if n > data.n_samples() {
        let all = data.n_samples();
        return Err(Error::config(format!("{key} = {n}, but `{}` has only {all} samples", data.name())));
    }
    let chosen = Stream::new(seed, Purpose::Split, [id, 0, 0]).choose(data.n_samples() as u32, n as u32);
    Ok(data.subset(&chosen))
}
