//! A task on a node: from blobs of checked shape to a contribution, with the simulator's methods and training. Nothing that
//! was received is executed or used as a path.

use super::Policy;
use crate::error::{Error, Result};
use crate::secure::MaskedLayout;
use crate::wire::{
    Blob, Contribution, NOISE_CLIENTS, NamedBlob, PLAIN, Store, Task, TaskMemory, decode_f32, decode_public,
    decode_u32, encode_f32, encode_u64, part_name, place_rows, reject_simulated,
};
use fedproj_core::{
    ClientResult, ClientState, Config, Download, Evaluator, Experiment, GENERATOR, LocalTraining, Method, Model,
    Outputs, Part, Targets, hold_back,
};
use fedproj_data::{Dataset, Partition, PartitionConfig, SourceConfig};
use std::path::PathBuf;
use std::sync::Arc;

/// The source of a node's samples.
#[derive(Clone, Debug)]
pub enum NodeData {
    /// A data set of its own.
    Own(Box<SourceConfig>),
    /// Its part of the run's partitioned data set, for trials on one machine.
    OfRun,
}

/// What a node needs besides a task.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Its samples.
    pub data: NodeData,
    /// The data directory.
    pub data_dir: Option<PathBuf>,
    /// Its limits.
    pub policy: Policy,
}

/// A node's part in a run. Data, network and method stay from round to round.
#[derive(Debug)]
pub struct Session {
    run: String,
    /// What the run's first task has said; a later one that says something else gets a session of its own.
    basis: (Blob, Option<Blob>),
    experiment: Arc<Experiment>,
    method: Box<dyn Method>,
    training: LocalTraining,
    evaluator: Evaluator,
}

impl Session {
    /// Prepares for a run. The task's blobs are in `cache`.
    ///
    /// # Errors
    /// If the policy forbids the run, or the node's data do not fit it.
    pub fn open(task: &Task, cache: &Store, setup: &Setup) -> Result<Self> {
        let text = String::from_utf8(cache.get(&task.config)?);
        let text = text.map_err(|_| Error::protocol("the run's configuration is not text"))?;
        let table = toml::from_str(&text).map_err(|e| Error::protocol(format!("the run's configuration: {e}")))?;
        let mut config = Config::from_layers(Some(&table), &[])?;
        // The weights come with the task; a node takes no path from the network.
        config.model.weights.clear();
        reject_files(&config, matches!(setup.data, NodeData::Own(_)))?;
        let method = config.method.build()?;
        setup.policy.check_run(&config, method.as_ref())?;
        let public = task.public.as_ref().map(|blob| decode_public(&cache.get(blob)?)).transpose()?;
        let experiment = match &setup.data {
            NodeData::Own(source) => own(config, method.as_ref(), source, setup, public, task)?,
            NodeData::OfRun => of_run(config, method.as_ref(), setup, public, task)?,
        };
        let experiment = Arc::new(experiment);
        // A generator's size is the server's choice, and no model bounds it.
        setup.policy.check_parameters(method.len_of_sent(GENERATOR, &experiment)? as u64)?;
        let training = LocalTraining::new(&experiment, method.as_ref())?;
        let evaluator = Evaluator::new(&experiment.graph, 1)?;
        let basis = (task.config.clone(), task.public.clone());
        Ok(Self { run: task.run.clone(), basis, experiment, method, training, evaluator })
    }

    /// Whether it is for the run of this task, with the same configuration and public set.
    pub fn is_for(&self, task: &Task) -> bool {
        self.run == task.run && self.basis.0 == task.config && self.basis.1 == task.public
    }

    /// Bytes of the contribution to a task.
    pub fn upload_bytes(&self, task: &Task) -> u64 {
        let e = &self.experiment;
        let width = |node| e.graph.shape(node).len();
        let (classes, features) = (width(e.graph.output()), e.graph.features().map_or(0, width));
        let per_sample = match task.outputs {
            0 => 0,
            1 => classes,
            _ => classes + features,
        };
        let outputs = e.n_public() * per_sample;
        // Values in a secure sum have twice the bytes.
        let bytes = if task.secure_clients > 0 { 8 } else { 4 };
        bytes * (e.weights.len() * (1 + self.method.uploads().len()) + e.buffers.len() + outputs) as u64
    }

    /// Trains the client and stores its vectors in the outbox.
    ///
    /// # Errors
    /// If a blob's shape does not fit the run, or the loss is not finite.
    pub fn train(
        &mut self,
        task: &Task,
        kept: &ClientState,
        cache: &Store,
        outbox: &Store,
    ) -> Result<(Contribution, ClientState)> {
        if self.experiment.config.privacy.is_by_nodes() && task.secure_clients == 0 {
            let problem = "the run promises that nobody sees a contribution without noise, but it has no secure sums";
            return Err(Error::Declined(problem.into()));
        }
        let download = Arc::new(self.download(task, cache)?);
        let mut result = self.training.run(self.method.as_ref(), &download, task.client, kept)?;
        let kept = std::mem::take(&mut result.state);
        if task.secure_clients > 0 {
            hold_back(&self.experiment.config.federation.robust, &download, &mut result)?;
        }
        let outputs = self.outputs(task, &result)?;
        let mut parts = vec![(Part::Weights, &result.weights), (Part::Buffers, &result.buffers)];
        for name in self.method.uploads() {
            let values = result.uploads.get(name);
            parts.push((Part::Upload(name), values.ok_or_else(|| Error::internal(format!("no upload `{name}`")))?));
        }
        if let Some(outputs) = &outputs {
            parts.push((Part::Logits, &outputs.logits));
            if task.outputs > 1 {
                parts.push((Part::Features, &outputs.features));
            }
        }
        outbox.retain(&[])?;
        if task.secure_clients > 0 {
            let steps = self.experiment.config.normalised_steps(result.n_steps);
            let n_adders = task.noise_clients as usize;
            let layout =
                MaskedLayout::new(&self.experiment, self.method.as_ref(), task.secure_clients as usize, n_adders)?;
            let values = layout.encode(result.summary(), steps, &download.weights, &parts)?;
            let keep =
                |name: &str, bytes: &[u8]| Ok::<_, Error>(NamedBlob { name: name.into(), blob: outbox.put(bytes)? });
            let mut kept_back = vec![keep(PLAIN, &encode_u64(&values))?];
            if n_adders > 0 {
                kept_back.push(keep(NOISE_CLIENTS, &encode_u64(&[n_adders as u64]))?);
            }
            let Task { run, round, client, .. } = task.clone();
            let contribution = Contribution { run, round, client, parts: kept_back, ..Contribution::default() };
            return Ok((contribution, kept));
        }
        let send = |(part, values): (Part<'_>, &Vec<f32>)| {
            Ok(NamedBlob { name: part_name(part), blob: outbox.put(&encode_f32(values))? })
        };
        let contribution = Contribution {
            run: task.run.clone(),
            round: task.round,
            client: task.client,
            n_samples: result.n_samples as u64,
            n_steps: result.n_steps,
            stats: result.stats,
            parts: parts.into_iter().map(send).collect::<Result<_>>()?,
        };
        Ok((contribution, kept))
    }

    /// The client's outputs on the public set, if the ensemble needs them from clients.
    fn outputs(&self, task: &Task, result: &ClientResult) -> Result<Option<Outputs>> {
        let Some(public) = self.experiment.public.as_ref().filter(|_| task.outputs > 0) else { return Ok(None) };
        let model = Model { weights: &result.weights, buffers: &result.buffers };
        Ok(self.evaluator.outputs(&[model], public, task.outputs > 1)?.pop())
    }

    fn download(&self, task: &Task, cache: &Store) -> Result<Download> {
        let e = &self.experiment;
        let n = e.weights.len();
        let named = |v: &NamedBlob| {
            let n = self.method.len_of_sent(&v.name, e)?;
            Ok((v.name.clone(), decode_f32(&cache.get(&v.blob)?, n, &v.name)?))
        };
        Ok(Download {
            round: task.round,
            weights: decode_f32(&cache.get(&task.weights)?, n, "weights")?,
            buffers: decode_f32(&cache.get(&task.buffers)?, e.buffers.len(), "buffers")?,
            vectors: task.vectors.iter().map(named).collect::<Result<_>>()?,
            memory: task.memory.as_ref().map(|memory| self.memory(memory, cache)).transpose()?,
            ..Download::default()
        })
    }

    /// The round's memory: indices into the public set, and targets in a matrix over the whole set.
    fn memory(&self, memory: &TaskMemory, cache: &Store) -> Result<(Vec<u32>, Arc<Targets>)> {
        let e = &self.experiment;
        let n_public = e.public.as_ref().ok_or_else(|| Error::protocol("memory: there is no public set"))?.n_samples();
        let n_memory = (memory.indices.len / 4) as usize;
        let indices = decode_u32(&cache.get(&memory.indices)?, n_memory, n_public as u32, "memory")?;
        if n_memory == 0 {
            return Err(Error::protocol("memory: it is empty"));
        }
        let width = |node| e.graph.shape(node).len();
        // There are no logits if labels are the target, and features only if they are distilled.
        let targets = |blob: &Blob, width: usize, what: &str| {
            let n = if blob.len == 0 { 0 } else { n_memory * width };
            Ok::<_, Error>(place_rows(&decode_f32(&cache.get(blob)?, n, what)?, &indices, n_public))
        };
        let logits = targets(&memory.logits, width(e.graph.output()), "memory logits")?;
        let features = targets(&memory.features, e.graph.features().map_or(0, width), "memory features")?;
        Ok((indices, Arc::new(Targets { logits, features })))
    }
}

/// Rejects a run that names files: a node takes no path from the network. Data of its own take the place of the run's. Then it
/// also rejects what only the simulator does: a server that looks at the clients' samples would see those of the run.
///
/// # Errors
/// If the run is one.
pub fn reject_files(config: &Config, has_own_data: bool) -> Result<()> {
    reject_simulated(config)?;
    let method = config.method.build()?;
    if let Some(reason) = method.needs_simulator().filter(|_| has_own_data) {
        return Err(Error::Declined(reason.to_owned()));
    }
    let by_file = matches!(config.data.partition, PartitionConfig::File { .. });
    let names_files = config.data.private.path.is_some() || config.data.public.path.is_some() || by_file;
    if has_own_data || !names_files {
        return Ok(());
    }
    let problem = "the run names files, which a node does not take from the network; give it data of its own";
    Err(Error::Declined(problem.into()))
}

/// Checks that the network has the announced number of weights, before memory is allocated for them.
fn check_network(config: &Config, method: &dyn Method, private: &Dataset, task: &Task) -> Result<()> {
    let n = Experiment::network(config, method, private, None)?.params().len();
    if n as u64 == task.weights.len / 4 {
        return Ok(());
    }
    Err(Error::Declined(format!(
        "the run's model has {} weights; with this node's data ({}, {} classes) it would have {n}; \
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
    task: &Task,
) -> Result<Experiment> {
    let private = fedproj_data::load(source, setup.data_dir.as_deref())?.train;
    check_network(&config, method, &private, task)?;
    let partition = Partition::sole(task.client, private.n_samples());
    // A node does not test, but an experiment needs a test sample.
    let test = private.subset(&[0]);
    Ok(Experiment::with_partition(config, method, private, test, public, partition)?)
}

fn of_run(
    config: Config,
    method: &dyn Method,
    setup: &Setup,
    public: Option<Dataset>,
    task: &Task,
) -> Result<Experiment> {
    let private = fedproj_data::load(&config.data.private, setup.data_dir.as_deref())?.train;
    check_network(&config, method, &private, task)?;
    let experiment = Experiment::load_beside(config, method, setup.data_dir.as_deref(), public)?;
    if task.client as usize >= experiment.partition.n_clients() {
        let n = experiment.partition.n_clients();
        return Err(Error::Declined(format!(
            "this node stands for client {}, but the run has {n} clients",
            task.client
        )));
    }
    Ok(experiment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::encode_public;

    /// A node's first task of a run, and its session, cache and outbox.
    fn first_task(dir: &std::path::Path, settings: &[&str], outputs: u32) -> (Task, Session, Store, Store) {
        let settings: Vec<String> = settings.iter().chain(&["local.epochs=1"]).map(|s| (*s).to_owned()).collect();
        let config = Config::from_layers(None, &settings).unwrap();
        let method = config.method.build().unwrap();
        let experiment = Experiment::load(config.clone(), method.as_ref(), None).unwrap();
        let store = |name| Store::open(&dir.join(name)).unwrap();
        let (cache, outbox) = (store("cache"), store("outbox"));
        let download = fedproj_core::Coordinator::new(experiment, method, 1).unwrap().open().unwrap().download;
        let experiment = Experiment::load(config.clone(), config.method.build().unwrap().as_ref(), None).unwrap();
        let put = |values: &[f32]| cache.put(&encode_f32(values)).unwrap();
        let named = |(name, values): (&String, &Vec<f32>)| NamedBlob { name: name.clone(), blob: put(values) };
        let task = Task {
            config: cache.put(config.to_toml().unwrap().as_bytes()).unwrap(),
            public: experiment.public.as_ref().map(|p| cache.put(&encode_public(p)).unwrap()),
            weights: put(&download.weights),
            buffers: put(&download.buffers),
            vectors: download.vectors.iter().map(named).collect(),
            outputs,
            ..Task::default()
        };
        let setup = Setup { data: NodeData::OfRun, data_dir: None, policy: Policy::default() };
        let session = Session::open(&task, &cache, &setup).unwrap();
        (task, session, cache, outbox)
    }

    #[test]
    fn a_run_whose_nodes_add_the_noise_gets_nothing_in_the_open() {
        let dir = tempfile::tempdir().unwrap();
        let private = "privacy={ noise = 'nodes', sampling = 'public', noise_multiplier = 1.0, delta = 1e-3 }";
        let (task, mut session, cache, outbox) = first_task(dir.path(), &["method.name=fedavg", private], 0);
        let mut train = |task: &Task| session.train(task, &ClientState::new(), &cache, &outbox);
        assert!(matches!(train(&task), Err(Error::Declined(reason)) if reason.contains("no secure sums")));
        // Nor a sum that too few protect.
        assert!(train(&Task { secure_clients: 10, noise_clients: 2, ..task.clone() }).is_err());
        let (contribution, _) = train(&Task { secure_clients: 10, noise_clients: 3, ..task }).unwrap();
        assert_eq!(contribution.parts.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), [PLAIN, NOISE_CLIENTS]);
    }

    #[test]
    fn a_server_that_looks_at_the_clients_samples_gets_no_node_with_data_of_its_own() {
        let reject = |method: &str, weights: &str, has_own_data| {
            let settings = [format!("method.name={method}"), format!("method.{method}.weights={weights}")];
            reject_files(&Config::from_layers(None, &settings).unwrap(), has_own_data)
                .map_err(|error| error.to_string())
        };
        for method in ["fedgen", "fedkd"] {
            assert_eq!((reject(method, "samples", true), reject(method, "classes", false)), (Ok(()), Ok(())));
            assert!(reject(method, "classes", true).unwrap_err().contains("samples per class"), "{method}");
        }
    }

    #[test]
    fn a_generator_is_held_to_the_policy_as_a_model_is() {
        let open = |hidden: usize| {
            let (dir, hidden) = (tempfile::tempdir().unwrap(), format!("method.fedgen.generator.hidden={hidden}"));
            let settings = ["method.name=fedgen", "method.fedgen.weights=samples", hidden.as_str()];
            let (task, _, cache, _) = first_task(dir.path(), &settings, 0);
            let policy = Policy { parameters_max: 100_000, ..Policy::default() };
            Session::open(&task, &cache, &Setup { data: NodeData::OfRun, data_dir: None, policy }).map(drop)
        };
        open(256).unwrap();
        assert!(open(1000).unwrap_err().to_string().contains("parameters_max = 100000"));
    }

    #[test]
    fn the_size_of_a_contribution_is_known_beforehand() {
        for (settings, outputs) in [
            (&["method.name=fedavg"][..], 0),
            (&["method.name=scaffold", "local.optimizer={kind='sgd', lr=0.1}"], 0),
            (&["method.name=feddf"], 1),
            (&["method.name=fedproj", "method.fedproj.memory.feature_weight=0.5", "model.name=cnn"], 2),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let (task, mut session, cache, outbox) = first_task(dir.path(), settings, outputs);
            let expected = session.upload_bytes(&task);
            let (contribution, _) = session.train(&task, &ClientState::new(), &cache, &outbox).unwrap();
            assert_eq!(contribution.parts.iter().map(|p| p.blob.len).sum::<u64>(), expected, "{settings:?}");
        }
    }
}
