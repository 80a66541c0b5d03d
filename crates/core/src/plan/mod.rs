//! The plan of a client's round, made once on the host: which samples, learning rate and dropout key each step takes, and
//! which recorded [`Program`] it runs.
//!
//! A method's `local_step` is called once per client and step, while the plan is made. Two executors run plans: a CPU
//! thread ([`crate::trainer`]) and a GPU ([`crate::gpu`]). Both take every draw from the plan, so they agree.

mod program;
mod record;

pub(crate) use program::{Names, Op, Program, VectorId};
pub(crate) use record::Recorder;

use crate::augment;
use crate::error::Result;
use crate::experiment::Experiment;
use crate::generator::{GENERATOR, GeneratorConfig, draw_noise};
use crate::memory::{Cursor, MemoryConfig};
use crate::method::{LOGITS, Method};
use crate::own::Own;
use crate::step::{Batch, Finish, Place, Step};
use crate::trainer::{ClientState, Download};
use fedproj_rng::{Purpose, Stream};
use std::ops::Range;
use std::sync::Arc;

/// One client's round.
#[derive(Debug, Default)]
pub(crate) struct LocalPlan {
    pub client: u32,
    /// The client's samples in the private set.
    pub samples: Vec<u32>,
    pub steps: Vec<LocalStep>,
    /// Places among `samples` that the steps take, one step after another.
    pub order: Vec<u32>,
    /// How the image at each place of `order` is moved, see [`augment`]; empty if none is.
    pub moves: Vec<u32>,
    /// Public samples of the memory batches, one batch after another.
    pub memory: Vec<u32>,
    /// Samples in a memory batch.
    pub memory_batch: usize,
    /// Labels of generated features, one batch after another.
    pub generated: Vec<u32>,
    /// The noise of these features, and of those that teach own samples, in the order of the steps.
    pub noise: Vec<f32>,
    /// Offsets of the classes, see [`Method::class_offsets`].
    pub offsets: Vec<f32>,
    /// Embeddings that its steps use, by their places in [`Names::embeddings`].
    pub embeddings: Vec<usize>,
    /// What the client keeps after the round, by places in [`Names::states`].
    pub kept: Vec<usize>,
    /// What it sends beside its weights, by places in [`Names::uploads`].
    pub uploaded: Vec<usize>,
    /// What it does after the last step.
    pub finish: Program,
}

/// One step of a plan.
#[derive(Clone, Debug)]
pub(crate) struct LocalStep {
    /// The place of its program in [`Planner::programs`].
    pub program: usize,
    pub epoch: u32,
    pub lr_factor: f32,
    pub dropout_key: u64,
    /// Its part of [`LocalPlan::order`].
    pub batch: Range<usize>,
}

/// Makes plans, and holds what they share: distinct programs, and the names of vectors.
#[derive(Debug)]
pub(crate) struct Planner {
    experiment: Arc<Experiment>,
    memory: Option<MemoryConfig>,
    generator: Option<GeneratorConfig>,
    /// The classes of generated features.
    classes: Vec<u32>,
    recorder: Recorder,
    pub programs: Vec<Program>,
}

impl Planner {
    pub fn new(experiment: &Arc<Experiment>, method: &dyn Method) -> Self {
        let classes = method.generator().and_then(|_| method.generated_classes(experiment));
        let all = || (0..experiment.graph.shape(experiment.graph.output()).len() as u32).collect();
        Self {
            classes: classes.unwrap_or_else(all),
            recorder: Recorder::new(&experiment.graph),
            memory: method.memory().cloned(),
            generator: method.generator().cloned(),
            programs: Vec::new(),
            experiment: Arc::clone(experiment),
        }
    }

    pub fn names(&self) -> &Names {
        &self.recorder.names
    }

    /// Whether the client that was planned last has logits for its own samples.
    pub fn has_logits(&self) -> bool {
        self.recorder.has_logits
    }

    /// The largest batch that a step takes.
    pub fn batch_max(&self) -> usize {
        let batch = self.experiment.config.local.batch;
        self.memory.as_ref().map_or(batch, |m| m.batch.min(m.size).max(batch))
    }

    /// The largest batch of features that a step takes.
    pub fn features_max(&self) -> usize {
        self.generator.as_ref().map_or(0, |generator| generator.batch.max(self.experiment.config.local.batch))
    }

    /// Names the vectors that came with the weights and are as long: a generator and logits are none of them.
    pub fn receive(&mut self, download: &Download) {
        let n = self.experiment.weights.len();
        for (name, _) in download.vectors.iter().filter(|(_, vector)| vector.len() == n) {
            self.recorder.broadcast_id(name);
        }
    }

    /// Asks the method what a client does, step by step.
    pub fn plan(
        &mut self,
        method: &dyn Method,
        download: &Download,
        client: u32,
        state: &ClientState,
    ) -> Result<LocalPlan> {
        let experiment = Arc::clone(&self.experiment);
        let (config, local) = (&experiment.config, &experiment.config.local);
        let samples = experiment.partition.indices(client as usize).into_owned();
        self.begin(method, download, &samples, state);
        let mut place = Place {
            seed: config.seed,
            round: download.round,
            n_rounds: config.federation.rounds,
            client,
            epoch: 0,
            step: 0,
        };
        let mut plan = LocalPlan { client, ..LocalPlan::default() };
        let mut lr_factor_total = 0.0;
        for epoch in 0..local.epochs {
            place.epoch = epoch;
            let lr_factor = local.schedule.factor(epoch, local.epochs);
            let ids = [place.round, client, epoch];
            let order = Stream::new(place.seed, Purpose::BatchOrder, ids).permutation(samples.len());
            for chunk in order.chunks(local.batch) {
                let program = self.record_step(method, place)?;
                for _ in 0..self.programs[program].n_updates() {
                    lr_factor_total += f64::from(lr_factor);
                }
                self.generate(program, place, chunk.len(), &mut plan);
                let ids = [place.round, client, place.step];
                let dropout_key = Stream::new(place.seed, Purpose::Dropout, ids).next_u64();
                let first = plan.order.len();
                plan.order.extend_from_slice(chunk);
                if config.data.augment {
                    let mut stream = Stream::new(place.seed, Purpose::Augment, ids);
                    plan.moves.extend(chunk.iter().map(|_| augment::draw(&mut stream, experiment.private.shape())));
                }
                plan.steps.push(LocalStep { program, epoch, lr_factor, dropout_key, batch: first..plan.order.len() });
                place.step += 1;
            }
        }
        self.draw_memory(download, place, &mut plan);
        self.recorder.lr_total = (lr_factor_total * f64::from(local.optimizer.lr)) as f32;
        self.recorder.program.ops.clear();
        method.finish_local(&mut Finish { recorder: &mut self.recorder })?;
        plan.finish = self.recorder.program.clone();
        plan.kept = std::mem::take(&mut self.recorder.kept);
        plan.uploaded = std::mem::take(&mut self.recorder.uploaded);
        plan.embeddings = (0..self.names().embeddings.len()).filter(|&index| self.uses(&plan, index)).collect();
        let (labels, n_classes) = (experiment.private.labels().unwrap_or_default(), experiment.private.n_classes());
        let counts = experiment.partition.class_counts(client as usize, labels, n_classes);
        plan.offsets = method.class_offsets(&counts)?;
        plan.samples = samples;
        Ok(plan)
    }

    /// Sets what the method can ask for before the client's first step.
    fn begin(&mut self, method: &dyn Method, download: &Download, samples: &[u32], state: &ClientState) {
        let recorder = &mut self.recorder;
        let names = &mut recorder.names;
        recorder.kept = state.keys().filter(|name| !Own::holds(name)).map(|name| names.state(name)).collect();
        recorder.uploaded.clear();
        let memory = self.memory.as_ref().zip(download.memory.as_ref());
        recorder.has_memory = memory.is_some();
        recorder.n_memory_batches =
            memory.map_or(0, |(config, (indices, _))| indices.len() / config.batch.min(indices.len()).max(1));
        recorder.has_generator = self.generator.is_some() && download.vectors.contains_key(GENERATOR);
        // The server has no answer yet for a client that it has not seen: its rows are 0.
        let logits = download.vectors.get(LOGITS).filter(|_| method.sends_logits());
        let width = self.experiment.graph.shape(self.experiment.graph.output()).len();
        let has_answer = |row: &[f32]| row.iter().any(|z| *z != 0.0);
        recorder.has_logits = logits.is_some_and(|logits| {
            samples.iter().filter_map(|at| logits.chunks_exact(width).nth(*at as usize)).any(has_answer)
        });
    }

    /// Draws the memory batches of all steps.
    fn draw_memory(&self, download: &Download, place: Place, plan: &mut LocalPlan) {
        let Some((config, (indices, _))) = self.memory.as_ref().zip(download.memory.as_ref()) else { return };
        let mut cursor = Cursor::new(place.seed, place.round, plan.client, indices.len(), config.batch);
        plan.memory_batch = config.batch.min(indices.len());
        let n_batches: usize = plan.steps.iter().map(|step| self.programs[step.program].n_memory()).sum();
        (0..n_batches).for_each(|_| cursor.next(indices, &mut plan.memory));
    }

    /// The program of a step, by its place in the list. Nothing is allocated for one that is known.
    fn record_step(&mut self, method: &dyn Method, place: Place) -> Result<usize> {
        self.recorder.program.ops.clear();
        method.local_step(&mut Step { recorder: &mut self.recorder, place })?;
        let recorded = &self.recorder.program;
        Ok(self.programs.iter().position(|known| known == recorded).unwrap_or_else(|| {
            self.programs.push(recorded.clone());
            self.programs.len() - 1
        }))
    }

    /// Draws the features that a step's program takes.
    fn generate(&self, program: usize, place: Place, n_own: usize, plan: &mut LocalPlan) {
        let Some(GeneratorConfig { noise, batch: n_generated, .. }) = self.generator else { return };
        let mut stream = Stream::new(place.seed, Purpose::Generator, [place.round, place.client, place.step]);
        for batch in self.programs[program].batches() {
            match batch {
                Batch::Taught => draw_noise(&mut stream, n_own * noise, &mut plan.noise),
                Batch::Generated => {
                    let class = |_| self.classes[stream.below(self.classes.len() as u32) as usize];
                    plan.generated.extend((0..n_generated).map(class));
                    draw_noise(&mut stream, n_generated * noise, &mut plan.noise);
                }
                Batch::Private | Batch::Memory => (),
            }
        }
    }

    fn uses(&self, plan: &LocalPlan, index: usize) -> bool {
        let embeds = |step: &LocalStep| self.programs[step.program].ops.contains(&Op::Embed { index });
        plan.steps.iter().any(embeds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    /// The classes of features that a client generates, where five clients hold one class each.
    fn generated(weights: &str) -> Vec<u32> {
        let settings = [
            "method.name=fedgen",
            "data.partition={kind='labels', clients=5, labels_per_client=1}",
            &format!("method.fedgen.weights={weights}"),
        ];
        let config = Config::from_layers(None, &settings.map(str::to_owned)).unwrap();
        let method = config.method.build().unwrap();
        let experiment = Arc::new(Experiment::load(config, method.as_ref(), None).unwrap());
        let mut download = Download { round: 1, ..Download::default() };
        download.vectors.insert(GENERATOR.into(), Vec::new());
        let mut planner = Planner::new(&experiment, method.as_ref());
        let mut classes = planner.plan(method.as_ref(), &download, 0, &ClientState::new()).unwrap().generated;
        classes.sort_unstable();
        classes.dedup();
        classes
    }

    #[test]
    fn features_are_of_classes_that_some_client_holds_where_that_is_known() {
        assert_eq!(generated("classes").len(), 5);
        assert_eq!(generated("samples"), (0..10).collect::<Vec<_>>());
    }
}
