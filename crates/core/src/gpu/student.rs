//! The student of a distillation on a GPU: a plan like a client's, run by the same executor on one lane.

use super::OnGpu;
use super::executor::{Executor, Feeds};
use super::feed::Feed;
use crate::distill::{DistillTask, Student};
use crate::error::Result;
use crate::evaluate::Which;
use crate::memory::TargetTables;
use crate::plan::{LocalPlan, Names, Program};
use fedproj_nn::cuda::{Data, Fleet, Target};
use fedproj_nn::{Dropout, Mode, NormMode, Options};
use std::slice::from_ref;
use std::sync::Arc;

/// A student on a GPU.
#[derive(Debug)]
pub(crate) struct GpuStudent {
    on: Arc<OnGpu>,
    executor: Executor,
    batch: usize,
}

impl GpuStudent {
    pub fn new(on: &Arc<OnGpu>, task: &DistillTask<'_>, n_public: usize) -> Result<Self> {
        let (graph, how) = (&on.experiment.graph, task.how);
        let (batch, taps) = (how.batch.min(n_public), how.taps(graph));
        let TargetTables { logits, features, labels, marks } = task.targets.tables();
        let mode = Mode { norm: how.bn.mode(), dropout: Dropout::Off };
        let mut own = Feed { data: Which::Public, mode, truncates: false, moves: false, targets: Vec::new() };
        own.set_rows(on, Target::Logits, logits)?;
        own.set_rows(on, Target::Features, if taps.is_empty() { &[] } else { features })?;
        let marks: Vec<u32> = marks.iter().map(|&marked| u32::from(marked)).collect();
        for (target, values) in [(Target::Labels, labels.unwrap_or(&[])), (Target::Marks, &marks)] {
            if !values.is_empty() {
                own.targets.push((target, Data::numbers(&on.gpu, values)?));
            }
        }
        let feeds = Feeds { own, memory: None, memory_objective: Vec::new() };
        let options = Options { batch, taps: &taps, training: true };
        let fleet = Fleet::new(&on.gpu, graph, 1, &options)?.alone()?;
        let mut executor = Executor::new(on, fleet, how.optimizer.rule(), 0.0, feeds)?;
        let Executor { fleet, theta, buffers, start, .. } = &mut executor;
        fleet.write(theta, 0, task.weights)?;
        fleet.write(buffers, 0, task.buffers)?;
        fleet.write(start, 0, task.anchor)?;
        Ok(Self { on: Arc::clone(on), executor, batch })
    }

    fn loss_total(&self) -> Result<f64> {
        Ok(self.executor.fleet.stats()?[0].loss_total)
    }
}

impl Student for GpuStudent {
    fn epoch(&mut self, plan: &LocalPlan, program: &Program) -> Result<f64> {
        let executor = &mut self.executor;
        executor.make_vectors(&Names::default(), from_ref(program))?;
        executor.set_tables(from_ref(plan), self.batch)?;
        executor.fleet.rewind()?;
        let before = self.loss_total()?;
        self.executor.run(from_ref(plan), from_ref(program))?;
        Ok((self.loss_total()? - before) / plan.steps.len() as f64)
    }

    fn recalibrate(&mut self, plan: &LocalPlan) -> Result<()> {
        let Some(public) = self.on.data(Which::Public) else { return Ok(()) };
        let Executor { fleet, theta, buffers, .. } = &mut self.executor;
        for step in &plan.steps {
            fleet.gather_range(public, step.batch.start, step.batch.len(), self.batch)?;
            let mode = Mode { norm: NormMode::Update, dropout: Dropout::Off };
            fleet.forward(theta.rows(), buffers.rows(), mode)?;
        }
        Ok(())
    }

    fn model(&self) -> Result<(Vec<f32>, Vec<f32>)> {
        let Executor { fleet, theta, buffers, .. } = &self.executor;
        Ok((fleet.read(theta, 0)?, fleet.read(buffers, 0)?))
    }
}
