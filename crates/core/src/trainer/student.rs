//! The student of a distillation on the CPU: a plan like a client's, run by the same executor with a team of threads.

use super::Download;
use super::batch::Feed;
use super::executor::{Executor, Feeds};
use crate::distill::{DistillTask, Student};
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::plan::{LocalPlan, Program, VectorId};
use fedproj_data::Dataset;
use fedproj_nn::{Cpu, Dropout, Mode, NormMode, Optimizer, Options, Workspace};
use std::slice::from_ref;
use std::sync::Arc;

/// A student, and the public set with its targets.
#[derive(Debug)]
pub(crate) struct CpuStudent<'a> {
    executor: Executor,
    feeds: Feeds<'a>,
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
        Ok(Self { executor, feeds: Feeds { own, memory: None, memory_objective: Vec::new() } })
    }
}

impl Student for CpuStudent<'_> {
    fn epoch(&mut self, plan: &LocalPlan, program: &Program) -> Result<f64> {
        self.executor.tally.loss_total = 0.0;
        match self.executor.run(plan, from_ref(program), &self.feeds) {
            Ok(()) => Ok(self.executor.tally.loss_total / plan.steps.len() as f64),
            Err(Error::NotFinite { loss, .. }) => Ok(loss),
            Err(other) => Err(other),
        }
    }

    fn recalibrate(&mut self, plan: &LocalPlan) -> Result<()> {
        let mode = Mode { norm: NormMode::Update, dropout: Dropout::Off };
        let mut batches = plan.steps.iter().map(|step| plan.samples[step.batch.clone()].iter().copied());
        batches.try_for_each(|samples| self.executor.pass(&self.feeds.own, samples, &[], VectorId::Weights, mode))
    }

    fn model(&self) -> Result<(Vec<f32>, Vec<f32>)> {
        let vectors = &self.executor.vectors;
        Ok((vectors.theta.to_vec(), vectors.buffers.clone()))
    }
}
