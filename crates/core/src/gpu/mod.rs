//! The simulator's work on a GPU: a cohort as lanes of a fleet, evaluation and distillation.
//!
//! All clients are planned before anything runs ([`crate::plan`]); [`trainer`] turns them into lanes and waves. One executor
//! ([`executor`]) runs recorded programs, of clients and of a student. Lanes with the same program share launches. Nothing
//! is copied to the host during local training.

mod evaluate;
mod executor;
mod feed;
mod head;
mod results;
mod student;
mod trainer;

pub(crate) use evaluate::{GpuEvaluator, Lane};
pub(crate) use results::GpuResults;
pub(crate) use student::GpuStudent;
pub(crate) use trainer::GpuTrainer;

use crate::error::Result;
use crate::evaluate::Which;
use crate::experiment::Experiment;
use fedproj_data::Dataset;
use fedproj_nn::cuda::{Data, Gpu};
use std::sync::Arc;

/// The data of an experiment on a GPU. Groups of clients with different networks share the copies on the device.
#[derive(Debug)]
pub(crate) struct OnGpu {
    pub gpu: Arc<Gpu>,
    pub experiment: Arc<Experiment>,
    private: Arc<Data>,
    test: Arc<Data>,
    public: Option<Arc<Data>>,
}

impl OnGpu {
    /// The data for each group of clients; there is one group unless `model.clients` lists several.
    pub fn for_groups(gpu: &Arc<Gpu>, experiment: &Arc<Experiment>) -> Result<Vec<Arc<Self>>> {
        let upload = |data: &Dataset| -> Result<Arc<Data>> {
            // Kernels cannot report a token that the network does not know.
            let mut checked = Ok(());
            let part = |range: std::ops::Range<usize>, out: &mut [f32]| {
                let indices: Vec<u32> = (range.start as u32..range.end as u32).collect();
                data.gather(&indices, out);
                if checked.is_ok() {
                    checked = experiment.groups().try_for_each(|of| of.graph.check_samples(range.start, out));
                }
            };
            let uploaded = Data::upload(gpu, data.n_samples(), data.sample_len(), data.labels(), part)?;
            Ok(checked.map(|()| Arc::new(uploaded))?)
        };
        let (private, test) = (upload(&experiment.private)?, upload(&experiment.test)?);
        let public = experiment.public.as_deref().map(upload).transpose()?;
        let group = |of: &Arc<Experiment>| {
            let (gpu, experiment, public) = (Arc::clone(gpu), Arc::clone(of), public.clone());
            Arc::new(Self { gpu, experiment, private: Arc::clone(&private), test: Arc::clone(&test), public })
        };
        Ok(experiment.groups().map(group).collect())
    }

    /// The device's copy of one of the experiment's data sets.
    pub fn data(&self, which: Which) -> Option<&Data> {
        match which {
            Which::Private => Some(&self.private),
            Which::Test => Some(&self.test),
            Which::Public => self.public.as_deref(),
        }
    }
}
