//! A configuration made concrete: data, network, partition and initial weights.
//!
//! Methods share all of it at the same seed, but for a network that a method changes (MOON adds a head).

use crate::config::Config;
use crate::error::{Error, Result};
use crate::groups;
use crate::loading;
use crate::machine;
use crate::method::Method;
use fedproj_data::spelling::did_you_mean;
use fedproj_data::{Dataset, Partition};
use fedproj_nn::models::Layer;
use fedproj_nn::{Graph, models};
use fedproj_rng::{Purpose, Stream};
use std::iter::once;
use std::path::Path;
use std::sync::Arc;

/// What a run starts from.
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
    pub private: Arc<Dataset>,
    /// Held-out samples of the same classes.
    pub test: Arc<Dataset>,
    /// The public unlabelled set.
    pub public: Option<Arc<Dataset>>,
    /// Which samples each client holds.
    pub partition: Arc<Partition>,
    /// Public samples that are in the test set too; 0 if the public set is a part of the private set.
    pub(crate) n_public_in_test: usize,
    /// Tensors of the checkpoint that have no place in the network.
    unused_tensors: Vec<String>,
    /// The same for the further groups of `model.clients`, whose networks differ.
    others: Vec<Arc<Experiment>>,
    /// The group of each client; empty where all are in one.
    group_of: Vec<usize>,
    /// See [`Method::note`].
    note: Option<String>,
}

impl Experiment {
    /// Loads the data of a configuration and prepares the rest.
    ///
    /// # Errors
    /// If data are missing or do not fit together.
    pub fn load(config: Config, method: &dyn Method, data_dir: Option<&Path>) -> Result<Self> {
        Self::load_beside(config, method, data_dir, None)
    }

    /// As [`Experiment::load`], with a public set that is in memory already: a node has it from its server.
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
        let data = loading::load(&config, method, data_dir, needs_public)?;
        let partition = config.data.partition.build(&data.private, config.seed)?;
        let sets = (data.private, data.test, public.or(data.public));
        let experiment = Self::assemble(config, method, sets, partition, data_dir)?;
        Ok(Self { n_public_in_test: data.n_public_in_test, ..experiment })
    }

    /// An experiment on data that are in memory already.
    ///
    /// # Errors
    /// If the data do not fit together, or do not fit the configuration.
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

    /// As [`Experiment::new`], with a partition that the caller made.
    ///
    /// # Errors
    /// As [`Experiment::new`].
    pub fn with_partition(
        config: Config,
        method: &dyn Method,
        private: Dataset,
        test: Dataset,
        public: Option<Dataset>,
        partition: Partition,
    ) -> Result<Self> {
        Self::assemble(config, method, (private, test, public), partition, None)
    }

    /// The number of groups of clients with networks of their own; 1 unless `model.clients` lists several.
    pub fn n_groups(&self) -> usize {
        1 + self.others.len()
    }

    /// The experiment with the network of a group. The first group's is the experiment itself.
    pub fn group(&self, group: usize) -> &Self {
        group.checked_sub(1).map_or(self, |at| &self.others[at])
    }

    /// The group of a client.
    pub fn group_of(&self, client: u32) -> usize {
        self.group_of.get(client as usize).copied().unwrap_or(0)
    }

    /// The number of clients in a group.
    pub fn n_clients_of(&self, group: usize) -> usize {
        if self.others.is_empty() {
            return self.partition.n_clients();
        }
        self.group_of.iter().filter(|of| **of == group).count()
    }

    /// [`Experiment::group`] for all groups.
    pub(crate) fn groups(self: &Arc<Self>) -> impl Iterator<Item = &Arc<Self>> {
        once(self).chain(&self.others)
    }

    fn assemble(
        config: Config,
        method: &dyn Method,
        (private, test, public): (Dataset, Dataset, Option<Dataset>),
        partition: Partition,
        data_dir: Option<&Path>,
    ) -> Result<Self> {
        let public = public.filter(|_| method.needs_public());
        check_sets(&config, method, [&private, &test], public.as_ref())?;
        let group_of = groups::assign(&config.model.clients, partition.n_clients())?;
        let (private, test, public, partition) =
            (Arc::new(private), Arc::new(test), public.map(Arc::new), Arc::new(partition));
        let with_network = |group: usize| {
            let of_group = Config { model: config.model.of_group(group), ..config.clone() };
            let graph = Self::network(&of_group, method, &private, data_dir)?;
            method.check_network(&graph)?;
            machine::check_memory(&graph, machine::N_VECTORS_MIN)?;
            let is_member = |client: usize| group_of.get(client).is_none_or(|of| *of == group);
            check_batches(&graph, &partition, config.local.batch, is_member)?;
            let (weights, buffers, unused_tensors) = start(&of_group, &graph, data_dir)?;
            let (private, test) = (Arc::clone(&private), Arc::clone(&test));
            let (public, partition) = (public.clone(), Arc::clone(&partition));
            let (n_public_in_test, others, group_of) = (0, Vec::new(), Vec::new());
            let note = method.note(&graph);
            Ok(Self {
                config: of_group,
                graph,
                weights,
                buffers,
                private,
                test,
                public,
                partition,
                n_public_in_test,
                unused_tensors,
                note,
                others,
                group_of,
            })
        };
        let others = (1..config.model.clients.len()).map(|group| with_network(group).map(Arc::new));
        let others = others.collect::<Result<_>>()?;
        let first = with_network(0)?;
        Ok(Self { config, others, group_of, ..first })
    }

    /// The network of a configuration for such data, without weights. A file in the data directory describes that of a
    /// checkpoint.
    ///
    /// # Errors
    /// If there is no such network or it cannot take such samples.
    pub fn network(config: &Config, method: &dyn Method, private: &Dataset, data_dir: Option<&Path>) -> Result<Graph> {
        let shape = match private.shape() {
            fedproj_data::Shape::Image { height, width, channels } => fedproj_nn::Shape::image(height, width, channels),
            fedproj_data::Shape::Vector { features } => fedproj_nn::Shape::vector(features),
            fedproj_data::Shape::Tokens { len } => fedproj_nn::Shape::tokens(len),
        };
        let model = &config.model.of_group(0);
        let (variant, classes) = (method.variant(model.variant()), private.n_classes());
        let bert = loading::checkpoint(config, data_dir)?;
        let entry = models::CATALOGUE.iter().find(|entry| entry.name == model.name);
        let layers = &model.layers;
        let reads_text = bert.is_some() || entry.is_some_and(|entry| entry.reads_text) || Layer::read_text(layers);
        let is_text = matches!(private.shape(), fedproj_data::Shape::Tokens { .. });
        if is_text != reads_text && (entry.is_some() || bert.is_some() || !layers.is_empty()) {
            return Err(Error::config(format!(
                "model `{}` is for {}, but the samples of `{}` are {}\nhint: texts need model.name = \"bert\" with a \
                 model.checkpoint, or an encoder of `fedproj models`",
                model.name,
                if reads_text { "texts" } else { "numbers" },
                private.name(),
                if is_text { "texts" } else { "numbers" },
            )));
        }
        if let Some(positions) = bert.as_ref().map(|bert| bert.positions).filter(|n| is_text && *n < shape.len()) {
            return Err(Error::config(format!(
                "`{}` reads texts of up to {positions} tokens, but data.text.max_length = {}\n\
                 hint: data.text.max_length={positions}",
                model.checkpoint,
                shape.len()
            )));
        }
        Ok(method.network(match (bert, model.name.as_str()) {
            (Some(bert), _) => models::bert(&bert, shape.len(), classes, variant)?,
            (None, "mlp") => models::mlp(shape, &model.hidden, classes, variant)?,
            // What the configuration says is wrong, not the network.
            (None, "layers") => models::layers(layers, shape, classes, variant)
                .map_err(|error| Error::config(format!("model.layers: {error}")))?,
            (None, name) => models::build(name, shape, classes, variant).map_err(|error| match error {
                fedproj_nn::Error::UnknownModel { .. } => {
                    let hint = did_you_mean(name, models::CATALOGUE.iter().map(|entry| entry.name));
                    Error::config(format!("{error}{hint}"))
                }
                other => other.into(),
            })?,
        }))
    }

    /// The number of public samples; 0 without a public set.
    pub fn n_public(&self) -> usize {
        self.public.as_deref().map_or(0, Dataset::n_samples)
    }

    /// What a user should know before trusting a run: texts that were cut, tensors that were ignored, public samples that
    /// are in the test set.
    pub fn notes(&self) -> Vec<String> {
        let sets = [&self.private, &self.test].into_iter().chain(self.public.as_ref());
        let cut = sets.filter(|data| data.n_truncated() > 0).map(|data| {
            let (n, all, name) = (data.n_truncated(), data.n_samples(), data.name());
            format!("{n} of {all} texts of `{name}` are longer than {} and were cut", data.shape())
        });
        let unused = self.unused_tensors.first().map(|first| {
            let n = self.unused_tensors.len();
            format!("{n} tensors of `{}` have no place in the network, such as `{first}`", self.config.model.checkpoint)
        });
        let shared = self.public.as_ref().filter(|_| self.n_public_in_test > 0).map(|public| {
            let (n, all, name, test) = (self.n_public_in_test, public.n_samples(), public.name(), self.test.name());
            format!("{n} of {all} samples of the public set `{name}` are in the test set of `{test}`; their labels are not used")
        });
        let privacy = &self.config.privacy;
        let privacy = privacy.statement().map(|statement| format!("privacy: {statement}")).or_else(|| privacy.note());
        cut.chain(unused).chain(shared).chain(privacy).chain(self.note.clone()).collect()
    }

    /// Ranges of the running variances in the buffers.
    pub fn variances(&self) -> Vec<std::ops::Range<usize>> {
        let spans = self.graph.buffers().spans().iter();
        spans.filter(|span| span.name.ends_with(".running_var")).map(fedproj_nn::Span::range).collect()
    }

    /// The clients that the seed draws for a round, in increasing order: uniformly without replacement. Under privacy a round may
    /// have others; its own are in [`Opening::cohort`](crate::Opening::cohort).
    pub fn cohort(&self, round: u32) -> Vec<u32> {
        let n = self.partition.n_clients();
        let all: Vec<u32> = (0..n as u32).collect();
        self.cohort_among(round, &all, self.config.federation.cohort(n))
    }

    /// As [`Experiment::cohort`], from some clients and of another size: a server draws from the clients that are online,
    /// and may ask more than it needs.
    pub fn cohort_among(&self, round: u32, clients: &[u32], size: usize) -> Vec<u32> {
        draw_cohort(self.config.seed, round, clients, size)
    }
}

/// Checks that the sets have what the method and the configuration need of them.
fn check_sets(
    config: &Config,
    method: &dyn Method,
    [private, test]: [&Dataset; 2],
    public: Option<&Dataset>,
) -> Result<()> {
    if private.labels().is_none() || test.labels().is_none() {
        return Err(Error::config(format!("the private set `{}` has no labels", private.name())));
    }
    if config.data.augment && !matches!(private.shape(), fedproj_data::Shape::Image { .. }) {
        let kind =
            if matches!(private.shape(), fedproj_data::Shape::Tokens { .. }) { "texts" } else { "rows of a table" };
        return Err(Error::config(format!(
            "data.augment = true moves and mirrors images, but the samples of `{}` are {kind}\nhint: data.augment=false",
            private.name()
        )));
    }
    if let Some(public) = public {
        if public.shape() != private.shape() {
            return Err(Error::config(format!(
                "the public set `{}` has samples of shape {}, the private set `{}` of {}\n\
                 hint: data.public = {{ name = \"…\", resize = [height, width] }} resizes images; data.public=split always fits",
                public.name(),
                public.shape(),
                private.name(),
                private.shape()
            )));
        }
        if method.needs_public_labels() && (public.labels().is_none() || public.class_names() != private.class_names())
        {
            let without = match config.method.name.as_str() {
                "fedproj" => "; method.fedproj.memory.target=ensemble needs no labels",
                _ => "",
            };
            return Err(Error::config(format!(
                "method `{}` is set to use public labels, but `{}` has no labels of the classes of `{}`\n\
                 hint: data.public=split takes a part of the private set{without}",
                config.method.name,
                public.name(),
                private.name()
            )));
        }
    } else if method.needs_public() {
        let name = &config.method.name;
        let problem = format!("method `{name}` needs a public set; set data.public to a data set or to \"split\"");
        return Err(Error::config(problem));
    }
    Ok(())
}

/// The clients of a round, see [`Experiment::cohort_among`]. It needs no data.
pub fn draw_cohort(seed: u64, round: u32, clients: &[u32], size: usize) -> Vec<u32> {
    let stream = &mut Stream::new(seed, Purpose::Cohort, [round, 0, 0]);
    let drawn = stream.choose(clients.len() as u32, size.min(clients.len()) as u32);
    drawn.into_iter().map(|at| clients[at as usize]).collect()
}

/// Weights and buffers that a network starts from, and the tensors of a checkpoint that have no place in it.
fn start(config: &Config, graph: &Graph, data_dir: Option<&Path>) -> Result<(Vec<f32>, Vec<f32>, Vec<String>)> {
    let model = &config.model;
    if !model.weights.is_empty() {
        let (weights, buffers) = fedproj_nn::weights::load(Path::new(&model.weights), graph)?;
        return Ok((weights, buffers, Vec::new()));
    }
    let (mut weights, mut unused_tensors) = (graph.init_params(config.seed, model.init), Vec::new());
    if !model.checkpoint.is_empty() && model.pretrained {
        let path = loading::in_data_dir(data_dir, &model.checkpoint).join("model.safetensors");
        if !path.exists() {
            return Err(Error::config(format!(
                "`{}` is missing, and model.pretrained = true starts from its weights\n\
                 hint: model.pretrained=false starts from random weights",
                path.display()
            )));
        }
        unused_tensors = fedproj_nn::weights::load_encoder(&path, graph, &mut weights)?;
    }
    Ok((weights, graph.init_buffers(), unused_tensors))
}

/// Batch-norm cannot train on one value per channel, as in PyTorch. The last batch of an epoch may be that short.
fn check_batches(graph: &Graph, partition: &Partition, batch: usize, is_member: impl Fn(usize) -> bool) -> Result<()> {
    let Some(node) = graph.single_valued_norm() else { return Ok(()) };
    let is_short = |client: &usize| batch == 1 || partition.size(*client) % batch == 1;
    match (0..partition.n_clients()).filter(|client| is_member(*client)).find(is_short) {
        None => Ok(()),
        Some(client) => Err(Error::config(format!(
            "client {client} has {} samples, so batches of {batch} leave one sample alone, but batch-norm `{}` needs more \
             than one value per channel to train\nhint: another local.batch, larger images, or group-norm (model.group_norm=8)",
            partition.size(client),
            graph.name(node)
        ))),
    }
}
