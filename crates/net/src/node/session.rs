//! A task on a node: from blobs of checked shape to a contribution. The same methods and the same training as in the
//! simulator; nothing that was received is run or chosen as a path.

use crate::error::{Error, Result};
use crate::node::policy::Policy;
use crate::server::rounds::targets_of;
use crate::wire::blob::Store;
use crate::wire::message::{Contribution, Named, Train, part_name};
use crate::wire::numbers::{decode_f32, decode_public, decode_u32, encode_f32};
use fedproj_core::{
    ClientResult, ClientState, Config, Download, Evaluator, Experiment, LocalTraining, Method, Model, Outputs, Part,
};
use fedproj_data::{Dataset, Partition, PartitionConfig, SourceConfig};
use std::path::PathBuf;
use std::sync::Arc;

/// Where a node's samples come from.
#[derive(Clone, Debug)]
pub enum NodeData {
    /// A data set of its own, all of it.
    Own(SourceConfig),
    /// Its part of the run's data set, as the run deals it out: for trials on one machine.
    OfRun,
}

/// What a node needs beside a task.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Its samples.
    pub data: NodeData,
    /// Where data sets lie.
    pub data_dir: Option<PathBuf>,
    /// What it will do.
    pub policy: Policy,
}

/// A run as a node takes part in it: data, network and method stay from round to round.
#[derive(Debug)]
pub struct Session {
    run: String,
    experiment: Arc<Experiment>,
    method: Box<dyn Method>,
    training: LocalTraining,
    evaluator: Evaluator,
}

impl Session {
    /// Prepares for a run, if the policy allows it. The task's blobs are in `cache`.
    ///
    /// # Errors
    /// If it does not, or if the node's data do not fit the run.
    pub fn open(task: &Train, cache: &Store, setup: &Setup) -> Result<Self> {
        let text = String::from_utf8(cache.get(&task.config)?);
        let text = text.map_err(|_| Error::protocol("the run's configuration is not text"))?;
        let table = toml::from_str(&text).map_err(|e| Error::protocol(format!("the run's configuration: {e}")))?;
        let mut config = Config::from_layers(Some(&table), &[])?;
        // Weights come with the task; a path from the network is none of ours.
        config.model.weights.clear();
        refuse_texts(&config)?;
        let method = config.method.build()?;
        setup.policy.check_run(&config, method.as_ref())?;
        let public = task.public.as_ref().map(|blob| decode_public(&cache.get(blob)?)).transpose()?;
        let experiment = match &setup.data {
            NodeData::Own(source) => own(config, method.as_ref(), source, setup, public, task)?,
            NodeData::OfRun => of_run(config, method.as_ref(), setup, public, task)?,
        };
        let experiment = Arc::new(experiment);
        let training = LocalTraining::new(&experiment, method.as_ref())?;
        let evaluator = Evaluator::new(&experiment.graph, 1)?;
        Ok(Self { run: task.run.clone(), experiment, method, training, evaluator })
    }

    /// The run.
    pub fn run(&self) -> &str {
        &self.run
    }

    /// Bytes that the client will send back for a task.
    pub fn upload_bytes(&self, task: &Train) -> u64 {
        let e = &self.experiment;
        let width = |node| e.graph.shape(node).len();
        let (classes, features) = (width(e.graph.output()), e.graph.features().map_or(0, width));
        let per_sample = match task.outputs {
            0 => 0,
            1 => classes,
            _ => classes + features,
        };
        let outputs = e.public.as_ref().map_or(0, Dataset::n_samples) * per_sample;
        4 * (e.weights.len() * (1 + self.method.uploads().len()) + e.buffers.len() + outputs) as u64
    }

    /// Trains the client, and puts what it sends in the outbox.
    ///
    /// # Errors
    /// If a blob has another shape than the run, or the loss leaves the finite numbers.
    pub fn train(
        &mut self,
        task: &Train,
        kept: ClientState,
        cache: &Store,
        outbox: &Store,
    ) -> Result<(Contribution, ClientState)> {
        let download = Arc::new(self.download(task, cache)?);
        let mut result = self.training.run(self.method.as_ref(), &download, task.client, kept)?;
        let kept = std::mem::take(&mut result.state);
        let outputs = self.outputs(task, &result)?;
        let mut parts = vec![(Part::Weights, &result.weights), (Part::Buffers, &result.buffers)];
        for name in self.method.uploads() {
            let values = result.uploads.get(*name);
            parts.push((Part::Upload(name), values.ok_or_else(|| Error::config(format!("no upload `{name}`")))?));
        }
        if let Some(outputs) = &outputs {
            parts.push((Part::Logits, &outputs.logits));
            if task.outputs > 1 {
                parts.push((Part::Features, &outputs.features));
            }
        }
        outbox.retain(&[])?;
        let send = |(part, values): (Part<'_>, &Vec<f32>)| {
            Ok(Named { name: part_name(part), blob: outbox.put(&encode_f32(values))? })
        };
        let contribution = Contribution {
            run: task.run.clone(),
            round: task.round,
            client: task.client,
            n_samples: result.n_samples as u64,
            n_steps: result.n_steps,
            stats: (&result.stats).into(),
            parts: parts.into_iter().map(send).collect::<Result<_>>()?,
        };
        Ok((contribution, kept))
    }

    /// The client's share of the ensemble, where clients evaluate the public set themselves.
    fn outputs(&self, task: &Train, result: &ClientResult) -> Result<Option<Outputs>> {
        let Some(public) = self.experiment.public.as_ref().filter(|_| task.outputs > 0) else { return Ok(None) };
        let model = Model { weights: &result.weights, buffers: &result.buffers };
        Ok(self.evaluator.outputs(&[model], public, task.outputs > 1)?.pop())
    }

    fn download(&self, task: &Train, cache: &Store) -> Result<Download> {
        let e = &self.experiment;
        let n = e.weights.len();
        let named = |v: &Named| Ok((v.name.clone(), decode_f32(&cache.get(&v.blob)?, n, &v.name)?));
        let memory = match (&task.memory, &e.public) {
            (Some(memory), Some(public)) => {
                let (n_public, n_memory) = (public.n_samples(), (memory.indices.len / 4) as usize);
                let indices = decode_u32(&cache.get(&memory.indices)?, n_memory, n_public as u32, "memory")?;
                if n_memory == 0 {
                    return Err(Error::protocol("memory: it is empty"));
                }
                let width = |node| e.graph.shape(node).len();
                let (classes, features) = (width(e.graph.output()), e.graph.features().map_or(0, width));
                // With labels as the target there are no logits; features only where they are distilled.
                let rows = |blob: &crate::wire::message::Blob, width: usize, what: &str| {
                    let n = if blob.len == 0 { 0 } else { n_memory * width };
                    decode_f32(&cache.get(blob)?, n, what)
                };
                let logits = rows(&memory.logits, classes, "memory logits")?;
                let features = rows(&memory.features, features, "memory features")?;
                let targets = targets_of(&logits, &features, &indices, n_public);
                Some((indices, Arc::new(targets)))
            }
            (Some(_), None) => return Err(Error::protocol("memory: there is no public set")),
            (None, _) => None,
        };
        Ok(Download {
            round: task.round,
            weights: decode_f32(&cache.get(&task.weights)?, n, "weights")?,
            buffers: decode_f32(&cache.get(&task.buffers)?, e.buffers.len(), "buffers")?,
            vectors: task.vectors.iter().map(named).collect::<Result<_>>()?,
            memory,
        })
    }
}

/// A run on texts names a checkpoint and a vocabulary by their paths, which nothing that was received may choose.
///
/// # Errors
/// If the run is one.
pub(crate) fn refuse_texts(config: &Config) -> Result<()> {
    if config.model.checkpoint.is_empty() && config.data.text.vocabulary.as_os_str().is_empty() {
        return Ok(());
    }
    Err(Error::config(
        "runs on texts are for the simulator so far: model.checkpoint and data.text.vocabulary are paths, which nodes do not \
         take from the network",
    ))
}

/// The network must have as many weights as were announced, before memory is taken for them.
fn check_network(config: &Config, method: &dyn Method, private: &Dataset, task: &Train) -> Result<()> {
    let n = Experiment::network(config, method, private, None)?.params().len();
    if n as u64 == task.weights.len / 4 {
        return Ok(());
    }
    Err(Error::config(format!(
        "the run's model has {} weights, but with this node's data ({}, {} classes) it would have {n}; \
         node and server need data of the same shape and classes",
        task.weights.len / 4,
        private.shape(),
        private.n_classes()
    )))
}

fn own(
    config: Config,
    method: &dyn Method,
    source: &SourceConfig,
    setup: &Setup,
    public: Option<Dataset>,
    task: &Train,
) -> Result<Experiment> {
    let private = fedproj_data::load(source, setup.data_dir.as_deref())?.train;
    check_network(&config, method, &private, task)?;
    let partition = Partition::sole(task.client, private.n_samples());
    // A node tests nothing; the experiment wants a sample.
    let test = private.subset(&[0]);
    Ok(Experiment::with_partition(config, method, private, test, public, partition)?)
}

fn of_run(
    config: Config,
    method: &dyn Method,
    setup: &Setup,
    public: Option<Dataset>,
    task: &Train,
) -> Result<Experiment> {
    let by_file = matches!(config.data.partition, PartitionConfig::File { .. });
    if config.data.private.path.is_some() || config.data.public.path.is_some() || by_file {
        return Err(Error::config(
            "the run names files, which a node does not take from the network; give it data of its own",
        ));
    }
    let private = fedproj_data::load(&config.data.private, setup.data_dir.as_deref())?.train;
    check_network(&config, method, &private, task)?;
    let experiment = Experiment::load_beside(config, method, setup.data_dir.as_deref(), public)?;
    if task.client as usize >= experiment.partition.n_clients() {
        let n = experiment.partition.n_clients();
        return Err(Error::config(format!("this node stands for client {}, but the run has {n}", task.client)));
    }
    Ok(experiment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::numbers::encode_public;

    #[test]
    fn what_will_be_sent_is_known_beforehand() {
        for (settings, outputs) in [
            (&["method.name=fedavg"][..], 0),
            (&["method.name=scaffold", "local.optimizer={kind='sgd', lr=0.1}"], 0),
            (&["method.name=feddf"], 1),
            (&["method.name=fedproj", "method.fedproj.memory.feature_weight=0.5", "model.name=cnn"], 2),
        ] {
            let settings: Vec<String> = settings.iter().chain(&["local.epochs=1"]).map(|s| (*s).to_owned()).collect();
            let config = Config::from_layers(None, &settings).unwrap();
            let method = config.method.build().unwrap();
            let experiment = Experiment::load(config.clone(), method.as_ref(), None).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let store = |name| Store::open(&dir.path().join(name)).unwrap();
            let (cache, outbox) = (store("cache"), store("outbox"));
            let download = fedproj_core::Coordinator::new(experiment, method, 1).unwrap().open().unwrap().download;
            let experiment = Experiment::load(config.clone(), config.method.build().unwrap().as_ref(), None).unwrap();
            let put = |values: &[f32]| cache.put(&encode_f32(values)).unwrap();
            let named = |(name, values): (&String, &Vec<f32>)| Named { name: name.clone(), blob: put(values) };
            let task = Train {
                config: cache.put(config.to_toml().unwrap().as_bytes()).unwrap(),
                public: experiment.public.as_ref().map(|p| cache.put(&encode_public(p)).unwrap()),
                weights: put(&download.weights),
                buffers: put(&download.buffers),
                vectors: download.vectors.iter().map(named).collect(),
                outputs,
                ..Train::default()
            };
            let setup = Setup { data: NodeData::OfRun, data_dir: None, policy: Policy::default() };
            let mut session = Session::open(&task, &cache, &setup).unwrap();
            let expected = session.upload_bytes(&task);
            let (contribution, _) = session.train(&task, ClientState::new(), &cache, &outbox).unwrap();
            assert_eq!(contribution.parts.iter().map(|p| p.blob.len).sum::<u64>(), expected, "{settings:?}");
        }
    }

    #[test]
    fn a_run_that_names_a_checkpoint_is_refused() {
        let config = |pairs: &[&str]| {
            Config::from_layers(None, &pairs.iter().map(|pair| (*pair).to_owned()).collect::<Vec<_>>()).unwrap()
        };
        assert!(refuse_texts(&config(&[])).is_ok());
        for pairs in [&["model.name=bert", "model.checkpoint=/etc"][..], &["data.text.vocabulary=/etc/passwd"]] {
            let message = refuse_texts(&config(pairs)).unwrap_err().to_string();
            assert!(message.contains("do not take from the network"), "{message}");
        }
    }
}
