//! The results of the clients of a wave, while they are still on the GPU.

use super::evaluate::Lane;
use super::executor::Executor;
use super::trainer::GpuTrainer;
use crate::contributions::{ClientSummary, Contributions, Part};
use crate::error::{Error, Result};
use crate::evaluate::{Evaluator, Outputs};
use crate::fixed::{Rounding, Scale};
use crate::trainer::ClientResult;
use fedproj_nn::cuda::Vectors;
use std::sync::OnceLock;

/// Contributions whose vectors are still on the GPU. Sums run there; a vector is copied to the host when it is read.
#[derive(Debug)]
pub(crate) struct GpuResults<'a> {
    trainer: &'a GpuTrainer,
    results: &'a [ClientResult],
    lanes: &'a [u32],
    /// What was copied of each result: weights, buffers, uploads.
    read: Vec<Vec<OnceLock<Vec<f32>>>>,
}

impl<'a> GpuResults<'a> {
    pub fn new(trainer: &'a GpuTrainer, results: &'a [ClientResult], lanes: &'a [u32]) -> Self {
        let n_vectors = 2 + trainer.executor.uploads.len();
        let read = results.iter().map(|_| (0..n_vectors).map(|_| OnceLock::new()).collect()).collect();
        Self { trainer, results, lanes, read }
    }

    /// What the client of a result sends beside its model, by places among the uploads.
    fn uploaded(&self, at: usize) -> &'a [usize] {
        &self.trainer.uploaded[self.lanes[at] as usize]
    }

    /// The vectors of all lanes that hold a part of one result, and the part's place; none if it was not sent.
    fn find(&self, at: usize, part: Part<'_>) -> Option<(&'a Vectors, usize)> {
        let executor = &self.trainer.executor;
        match part {
            Part::Weights => Some((&executor.theta, 0)),
            Part::Buffers => Some((&executor.buffers, 1)),
            Part::Upload(name) => {
                let names = &self.trainer.planner.names().uploads;
                let upload = *self.uploaded(at).iter().find(|&&upload| names[upload] == name)?;
                Some((&executor.uploads[upload], 2 + upload))
            }
            Part::Logits | Part::Features => None,
        }
    }

    /// The vectors of a part and the lanes of these results, if all of them have sent it.
    fn all(&self, chosen: &[usize], part: Part<'_>) -> Option<(&'a Vectors, Vec<u32>)> {
        let (&first, others) = chosen.split_first()?;
        let vectors = self.vectors(first, part)?;
        let have_it = others.iter().all(|&at| self.vectors(at, part).is_some());
        have_it.then(|| (vectors, chosen.iter().map(|&at| self.lanes[at]).collect()))
    }

    fn vectors(&self, at: usize, part: Part<'_>) -> Option<&'a Vectors> {
        self.find(at, part).map(|(vectors, _)| vectors)
    }
}

impl Contributions for GpuResults<'_> {
    fn n(&self) -> usize {
        self.results.len()
    }

    fn summary(&self, at: usize) -> ClientSummary<'_> {
        self.results[at].summary()
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
        let Some((vectors, place)) = self.find(at, part) else {
            out.fill(0.0);
            return Ok(());
        };
        let whole = &self.read[at][place];
        if whole.get().is_none() {
            let _ = whole.set(self.trainer.executor.fleet.read(vectors, self.lanes[at] as usize)?);
        }
        if let Some(values) = whole.get() {
            out.copy_from_slice(&values[from..from + out.len()]);
        }
        Ok(())
    }

    fn weighted_sum(&self, chosen: &[usize], weights: &[f32], part: Part<'_>) -> Option<Result<Vec<f32>>> {
        let (vectors, order) = self.all(chosen, part)?;
        Some(self.trainer.executor.fleet.weighted_sum(vectors, &order, weights).map_err(Error::from))
    }

    fn fixed_sum(&self, chosen: &[usize], weights: &[f64], part: Part<'_>, scale: Scale) -> Option<Result<Vec<i64>>> {
        let (vectors, order) = self.all(chosen, part)?;
        let Rounding { unit, limit, rounder } = Rounding::of(scale);
        let factors: Vec<f64> = weights.iter().map(|w| w * unit).collect();
        let sum = self.trainer.executor.fleet.fixed_sum(vectors, &order, &factors, rounder, limit);
        sum.map_err(Error::from).transpose()
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
