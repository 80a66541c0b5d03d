//! The heads of the lanes' networks on a GPU, on features that the server's generator makes: see [`crate::generator`].
//!
//! The generator is a fleet of its own, whose lanes share the weights that the server sent. A head is no network of its own:
//! a pass of the clients' fleet begins where the features enter.

use super::OnGpu;
use crate::error::{Error, Result};
use crate::generator::GeneratorConfig;
use crate::plan::{LocalPlan, Program};
use crate::step::Batch;
use fedproj_nn::cuda::{Batches, Fleet, NOBODY, Rows, Vectors};
use fedproj_nn::{Dropout, Graph, Mode, NodeId, NormMode, Options};

/// The generator on every lane, and where a head begins.
#[derive(Debug)]
pub(super) struct Head {
    generator: Fleet,
    params: Vectors,
    features: NodeId,
    /// Features of [`Batch::Taught`], at most, and of [`Batch::Generated`].
    n_taught: usize,
    n_generated: usize,
    n_noise: usize,
    /// Passes of the current step so far.
    n_passes: usize,
}

impl Head {
    /// Bytes per lane, as [`Fleet::lane_bytes`].
    pub fn lane_bytes(how: &GeneratorConfig, clients: &Graph, features_max: usize) -> Result<usize> {
        Ok(Fleet::lane_bytes(&how.network(clients)?, &options(features_max)))
    }

    /// For as many lanes as the clients' fleet has, whose private batches have up to `n_taught` samples.
    pub fn new(on: &OnGpu, how: &GeneratorConfig, clients: &Fleet, n_taught: usize) -> Result<Self> {
        let graph = how.network(clients.graph())?;
        let GeneratorConfig { batch: n_generated, noise: n_noise, .. } = *how;
        let generator = Fleet::new(&on.gpu, &graph, clients.n_lanes(), &options(n_taught.max(n_generated)))?;
        let params = generator.shared_vector(&vec![0.0; graph.params().len()])?;
        let Some(features) = clients.graph().features() else {
            return Err(Error::Internal {
                what: "a generator's network",
                problem: "nothing takes its features".into(),
            });
        };
        Ok(Self { generator, params, features, n_taught, n_generated, n_noise, n_passes: 0 })
    }

    /// The generator that came with the weights.
    pub fn receive(&mut self, params: &[f32]) -> Result<()> {
        Ok(self.generator.write(&mut self.params, 0, params)?)
    }

    /// The labels and the noise of all features of the plans' steps: per lane max steps · passes per step · the largest batch ·
    /// (1 + noise) words. The device makes the features step by step. Those of a whole round would take memory in proportion
    /// to the network's width, and the host's time.
    pub fn set_table(
        &self,
        fleet: &mut Fleet,
        plans: &[LocalPlan],
        programs: &[Program],
        labels: &[u32],
    ) -> Result<()> {
        let most = programs.iter().map(|program| passes(program).count()).max().unwrap_or(0);
        if most == 0 {
            return Ok(());
        }
        let room = fleet.batch_max();
        let width = most * room * (1 + self.n_noise);
        if i32::try_from(width).is_err() {
            let (n, noise) = (most * room, self.n_noise);
            let problem =
                format!("a step generates {n} features from {noise} values of noise each, too many for a GPU");
            return Err(Error::config(format!("{problem}\nhint: a smaller generator.noise or generator.batch")));
        }
        let table = |plan: &LocalPlan| {
            let mut table = vec![NOBODY; plan.steps.len() * width];
            let (mut generated, mut noise) = (plan.generated.iter().copied(), plan.noise.iter());
            for (step, entry) in plan.steps.iter().zip(table.chunks_exact_mut(width)) {
                let own =
                    || plan.order[step.batch.clone()].iter().map(|&at| labels[plan.samples[at as usize] as usize]);
                for (batch, pass) in passes(&programs[step.program]).zip(entry.chunks_exact_mut(width / most)) {
                    let (classes, bits) = pass.split_at_mut(room);
                    let n = if batch == Batch::Taught { step.batch.len() } else { self.n_generated };
                    if batch == Batch::Taught {
                        classes.iter_mut().zip(own()).for_each(|(to, label)| *to = label);
                    } else {
                        classes.iter_mut().zip(generated.by_ref().take(n)).for_each(|(to, label)| *to = label);
                    }
                    let values = noise.by_ref().take(n * self.n_noise);
                    bits.iter_mut().zip(values).for_each(|(to, value)| *to = value.to_bits());
                }
            }
            table
        };
        Ok(fleet.set_table(Batches::Generated, &plans.iter().map(table).collect::<Vec<_>>(), width)?)
    }

    /// The lanes of the next passes.
    pub fn set_lanes(&mut self, lanes: &[u32]) -> Result<()> {
        Ok(self.generator.set_lanes(lanes)?)
    }

    /// Begins a step.
    pub fn begin_step(&mut self) {
        self.n_passes = 0;
    }

    /// Runs the heads of these weights on the step's next features. As on the CPU, running averages stay as they are.
    pub fn forward(&mut self, fleet: &mut Fleet, batch: Batch, weights: Rows, buffers: Rows) -> Result<()> {
        let n = if batch == Batch::Taught { self.n_taught } else { self.n_generated };
        fleet.gather_generated(&mut self.generator, self.params.rows(), self.features, self.n_passes, n)?;
        self.n_passes += 1;
        let mode = Mode { norm: NormMode::Batch, dropout: Dropout::Off };
        Ok(fleet.forward_from(self.features, weights, buffers, mode)?)
    }
}

fn options(features_max: usize) -> Options<'static> {
    Options { batch: features_max, taps: &[], training: false }
}

/// The batches of a program on which heads run.
fn passes(program: &Program) -> impl Iterator<Item = Batch> {
    program.batches().filter(|batch| matches!(batch, Batch::Taught | Batch::Generated))
}
