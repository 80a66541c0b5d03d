//! The student of a distillation on the CPU: a plan like a client's, run by the same executor with a team of threads.

use super::Download;
use super::batch::Feed;
use super::executor::{Executor, Feeds};
use crate::distill::{Distill, DistillTask, Student};
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::plan::{LocalPlan, LocalStep, Op, Program, VectorId};
use crate::step::Batch;
use fedproj_data::Dataset;
use fedproj_nn::{Cpu, Dropout, Mode, NormMode, Optimizer, Options, Workspace};
use std::sync::Arc;

/// A student, its program, and the public set with its targets.
#[derive(Debug)]
pub(crate) struct CpuStudent<'a> {
    executor: Executor,
    programs: [Program; 1],
    feeds: Feeds<'a>,
    plan: LocalPlan,
    batch: usize,
}

impl<'a> CpuStudent<'a> {
    pub fn new(
        experiment: &'a Experiment,
        public: &'a Dataset,
        task: &DistillTask<'a>,
        n_threads: usize,
    ) -> Result<Self> {
        let (graph, how) = (&experiment.graph, task.how);
        let (batch, taps) = (how.batch.min(public.n_samples()), how.taps(graph));
        let options = Options { batch, taps: &taps, training: true };
        let ws = Workspace::new(graph, &options, Cpu::new(n_threads))?;
        let optimizer = Optimizer::new(how.optimizer.rule(), task.weights.len())?;
        let mut executor = Executor::new(ws, optimizer, 0.0);
        let start = Download { round: task.round, weights: task.anchor.to_vec(), ..Download::default() };
        executor.begin(task.weights, task.buffers, &Arc::new(start));
        let (norm, targets) = (how.bn.mode(), task.targets.tables());
        let own = Feed { data: public, norm, drops: false, truncates: false, targets };
        Ok(Self {
            executor,
            programs: [program(how, task)],
            feeds: Feeds { own, memory: None, memory_objective: Vec::new() },
            plan: LocalPlan { samples: (0..public.n_samples() as u32).collect(), ..LocalPlan::default() },
            batch,
        })
    }
}

/// One step of the student.
fn program(how: &Distill, task: &DistillTask<'_>) -> Program {
    let (batch, g) = (Batch::Private, VectorId::Gradient(0));
    let mut ops = vec![Op::Forward { batch }];
    ops.extend(how.objective(task.targets).into_iter().map(|term| Op::Loss { term }));
    ops.push(Op::Backward { batch, out: 0 });
    if how.alpha > 0.0 {
        ops.push(Op::AddScaledDiff { g, a: how.anchor_slope(), x: VectorId::Weights, y: VectorId::RoundStart });
    }
    ops.push(Op::Update { g });
    Program { ops }
}

impl Student for CpuStudent<'_> {
    fn epoch(&mut self, order: Vec<u32>) -> Result<f64> {
        let step = |first: usize| LocalStep {
            program: 0,
            epoch: 0,
            lr_factor: 1.0,
            dropout_key: 0,
            batch: first..(first + self.batch).min(order.len()),
        };
        self.plan.steps = (0..order.len()).step_by(self.batch).map(step).collect();
        self.plan.order = order;
        self.executor.tally.loss_total = 0.0;
        match self.executor.run(&self.plan, &self.programs, &self.feeds) {
            Ok(()) => Ok(self.executor.tally.loss_total / self.plan.steps.len() as f64),
            Err(Error::NotFinite { loss, .. }) => Ok(loss),
            Err(other) => Err(other),
        }
    }

    fn recalibrate(&mut self) -> Result<()> {
        let mode = Mode { norm: NormMode::Update, dropout: Dropout::Off };
        let mut chunks = self.plan.samples.chunks(self.batch);
        chunks.try_for_each(|chunk| self.executor.pass(&self.feeds.own, chunk.iter().copied(), mode))
    }

    fn model(&self) -> Result<(Vec<f32>, Vec<f32>)> {
        let vectors = &self.executor.vectors;
        Ok((vectors.theta.to_vec(), vectors.buffers.clone()))
    }
}
