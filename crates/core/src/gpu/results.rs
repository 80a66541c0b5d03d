//! The results of the clients of a wave, while they are still on the GPU.

use super::evaluate::Lane;
use super::executor::Executor;
use super::trainer::GpuTrainer;
use crate::contributions::{Contributions, Head, Part};
use crate::error::{Error, Result};
use crate::evaluate::{Evaluator, Outputs};
use crate::trainer::ClientResult;
use fedproj_nn::cuda::Vectors;
use std::sync::OnceLock;

/// Contributions whose vectors are still on the GPU. Sums run there; a vector is copied to the host when it is read.
#[derive(Debug)]
pub(crate) struct GpuResults<'a> {
    trainer: &'a GpuTrainer,
    results: &'a [ClientResult],
    lanes: &'a [u32],
    read: Vec<[OnceLock<Vec<f32>>; 2]>,
}

impl<'a> GpuResults<'a> {
    pub fn new(trainer: &'a GpuTrainer, results: &'a [ClientResult], lanes: &'a [u32]) -> Self {
        Self { trainer, results, lanes, read: results.iter().map(|_| [OnceLock::new(), OnceLock::new()]).collect() }
    }

    /// What the client of a result sends beside its model, by places among the uploads.
    fn uploaded(&self, at: usize) -> &'a [usize] {
        &self.trainer.uploaded[self.lanes[at] as usize]
    }

    /// The vectors of all lanes that hold a part of one result; none if it was not sent.
    fn vectors(&self, at: usize, part: Part<'_>) -> Option<&'a Vectors> {
        match part {
            Part::Weights => Some(&self.trainer.executor.theta),
            Part::Buffers => Some(&self.trainer.executor.buffers),
            Part::Upload(name) => {
                let names = &self.trainer.planner.names().uploads;
                let upload = self.uploaded(at).iter().find(|&&upload| names[upload] == name)?;
                Some(&self.trainer.executor.uploads[*upload])
            }
            Part::Logits | Part::Features => None,
        }
    }
}

impl Contributions for GpuResults<'_> {
    fn n(&self) -> usize {
        self.results.len()
    }

    fn head(&self, at: usize) -> Head<'_> {
        self.results[at].head()
    }

    fn len_of(&self, at: usize, part: Part<'_>) -> usize {
        self.vectors(at, part).map_or(0, Vectors::len)
    }

    fn n_values(&self, at: usize) -> usize {
        let executor = &self.trainer.executor;
        let uploaded = self.uploaded(at).iter().map(|&upload| executor.uploads[upload].len());
        executor.theta.len() + executor.buffers.len() + uploaded.sum::<usize>()
    }

    fn read(&self, at: usize, part: Part<'_>, from: usize, out: &mut [f32]) -> Result<()> {
        let Some(vectors) = self.vectors(at, part) else {
            out.fill(0.0);
            return Ok(());
        };
        let lane = self.lanes[at] as usize;
        let whole = match part {
            Part::Weights => &self.read[at][0],
            Part::Buffers => &self.read[at][1],
            _ => {
                out.copy_from_slice(&self.trainer.executor.cohort.read(vectors, lane)?[from..from + out.len()]);
                return Ok(());
            }
        };
        if whole.get().is_none() {
            let _ = whole.set(self.trainer.executor.cohort.read(vectors, lane)?);
        }
        if let Some(values) = whole.get() {
            out.copy_from_slice(&values[from..from + out.len()]);
        }
        Ok(())
    }

    fn weighted_sum(&self, chosen: &[usize], weights: &[f32], part: Part<'_>) -> Option<Result<Vec<f32>>> {
        let (&first, others) = chosen.split_first()?;
        let vectors = self.vectors(first, part)?;
        if others.iter().any(|&at| self.vectors(at, part).is_none()) {
            return None;
        }
        let order: Vec<u32> = chosen.iter().map(|&at| self.lanes[at]).collect();
        Some(self.trainer.executor.cohort.weighted_sum(vectors, &order, weights).map_err(Error::from))
    }

    fn ensemble(
        &self,
        evaluator: &Evaluator,
        chosen: &[usize],
        weights: &[f32],
        with_features: bool,
    ) -> Option<Result<Outputs>> {
        let Executor { theta, buffers, .. } = &self.trainer.executor;
        let lane = |&at: &usize| Lane { weights: theta, buffers, at: self.lanes[at] as usize };
        evaluator.sum_on_gpu(&chosen.iter().map(lane).collect::<Vec<_>>(), weights, with_features)
    }
}
