//! The memory of public samples against which FedProj projects.

use crate::error::{Error, Result};
use crate::fusion::{Fusion, GlobalModel};
use crate::step::{At, Term};
use fedproj_nn::{Loss, NormMode};
use fedproj_rng::{Purpose, Stream};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What the memory holds: the paper's M ⊆ D_pub with the ensemble's logits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MemoryConfig {
    /// Public samples in the memory; all if there are fewer. The published code has 10 000 to 15 000.
    pub size: usize,
    /// Samples per memory gradient.
    pub batch: usize,
    /// When the memory's samples are drawn.
    pub resample: Resample,
    /// Target of the memory loss.
    pub target: MemoryTarget,
    /// What the first round does, before an ensemble exists.
    pub round0: Round0,
    /// Temperature T of the memory loss, above 0.
    pub temperature: f32,
    /// Weight γ₂ ≥ 0 of the feature loss, beside the loss on logits. 0: off.
    pub feature_weight: f32,
    /// Batch-norm statistics in the memory's forward pass.
    pub bn: NormMode,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            size: 10_000,
            batch: 256,
            resample: Resample::Round,
            target: MemoryTarget::Ensemble,
            round0: Round0::Skip,
            temperature: 3.0,
            feature_weight: 0.0,
            bn: NormMode::Batch,
        }
    }
}

impl MemoryConfig {
    /// Whether all settings are in their ranges; `key` is their table in the configuration.
    ///
    /// # Errors
    /// Names the setting that is not.
    pub fn check(&self, key: &str) -> Result<()> {
        let require =
            |ok, name: &str, value: f32, expected| Error::require(ok, &format!("{key}.{name}"), value, expected);
        require(self.size > 0, "size", 0.0, "at least 1")?;
        require(self.batch > 0, "batch", 0.0, "at least 1")?;
        require(self.temperature > 0.0, "temperature", self.temperature, "positive")?;
        require(self.feature_weight >= 0.0, "feature_weight", self.feature_weight, "0 or positive")?;
        let features = self.has_labels() && self.feature_weight > 0.0;
        require(!features, "feature_weight", self.feature_weight, "0 where labels are the target")
    }

    /// The memory loss, and how many of the terms belong to it.
    pub(crate) fn loss(&self) -> ([Term; 2], usize) {
        let target = match self.target {
            MemoryTarget::Labels => Loss::CrossEntropy,
            MemoryTarget::Ensemble | MemoryTarget::GlobalModel => Loss::kl(self.temperature),
        };
        let features = Term { loss: Loss::MaskedSquares, at: At::Features, weight: self.feature_weight };
        ([target.into(), features], 1 + usize::from(self.feature_weight > 0.0))
    }

    /// Whether the public samples' labels are the target.
    pub(crate) fn has_labels(&self) -> bool {
        self.target == MemoryTarget::Labels
    }

    /// Targets before the first round, if there are any.
    pub(crate) fn first_targets(&self, global: &GlobalModel<'_>, with_features: bool) -> Result<Option<Targets>> {
        match (self.target, self.round0) {
            // Labels need no ensemble: they are available from the start.
            (MemoryTarget::Labels, _) => Ok(Some(Targets::default())),
            (_, Round0::GlobalModel) => global.public_outputs(with_features).map(Some),
            (_, Round0::Skip) => Ok(None),
        }
    }

    /// Sets the next round's targets: the clients' ensemble, or what takes its place.
    pub(crate) fn remember(&self, ensemble: Targets, round: &mut Fusion<'_>, with_features: bool) -> Result<()> {
        let targets = match self.target {
            MemoryTarget::Ensemble => ensemble,
            MemoryTarget::GlobalModel => round.global_outputs(with_features)?,
            MemoryTarget::Labels => Targets::default(),
        };
        round.state.targets = Some(Arc::new(targets));
        Ok(())
    }
}

/// When the memory is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resample {
    /// Every round.
    Round,
    /// Once.
    Fixed,
}

/// The target of the memory loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryTarget {
    /// Mean logits of the previous round's clients.
    Ensemble,
    /// Logits of the global model after fusion.
    GlobalModel,
    /// The public samples' own labels, as the paper's Algorithm 1 has it. Only where both sets have the same classes.
    Labels,
}

/// What projection does in the first round, when no ensemble has spoken yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Round0 {
    /// No projection.
    Skip,
    /// The target is the initial global model's own logits: right for a pre-trained start.
    GlobalModel,
}

/// Targets for every public sample.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Targets {
    /// (n_public, classes)
    pub logits: Vec<f32>,
    /// (n_public, features), empty unless features are distilled.
    pub features: Vec<f32>,
}

/// What losses on a data set compare with, one row per sample; tables may be empty.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TargetTables<'a> {
    pub logits: &'a [f32],
    pub features: &'a [f32],
    /// Where they are not the data's own labels.
    pub labels: Option<&'a [u32]>,
    /// Which samples count, see [`Loss::Kl`].
    pub marks: &'a [bool],
}

/// The memory's samples of a round, in increasing order.
pub(crate) fn draw(config: &MemoryConfig, seed: u64, round: u32, n_public: usize) -> Vec<u32> {
    if config.size >= n_public {
        return (0..n_public as u32).collect();
    }
    let drawn_in = if config.resample == Resample::Round { round } else { 0 };
    Stream::new(seed, Purpose::Memory, [drawn_in, 0, 0]).choose(n_public as u32, config.size as u32)
}

/// Endless batches of a client's memory: pass after pass, each in an order of its own, without partial batches.
#[derive(Debug)]
pub(crate) struct Cursor {
    seed: u64,
    round: u32,
    client: u32,
    pass: u32,
    batch: usize,
    at: usize,
    order: Vec<u32>,
}

impl Cursor {
    pub fn new(seed: u64, round: u32, client: u32, n_memory: usize, batch: usize) -> Self {
        let batch = batch.min(n_memory);
        let mut cursor = Self { seed, round, client, pass: 0, batch, at: 0, order: (0..n_memory as u32).collect() };
        cursor.shuffle();
        cursor
    }

    fn shuffle(&mut self) {
        for (i, v) in self.order.iter_mut().enumerate() {
            *v = i as u32;
        }
        let ids = [self.round, self.client, self.pass];
        Stream::new(self.seed, Purpose::MemoryOrder, ids).shuffle(&mut self.order);
        self.at = 0;
    }

    /// Adds the next batch of `memory` to `out`.
    pub fn next(&mut self, memory: &[u32], out: &mut Vec<u32>) {
        if self.at + self.batch > self.order.len() {
            self.pass += 1;
            self.shuffle();
        }
        out.extend(self.order[self.at..self.at + self.batch].iter().map(|&i| memory[i as usize]));
        self.at += self.batch;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_redrawn_or_kept_as_asked() {
        let mut config = MemoryConfig { size: 5, ..MemoryConfig::default() };
        assert_ne!(draw(&config, 1, 0, 100), draw(&config, 1, 1, 100));
        config.resample = Resample::Fixed;
        assert_eq!(draw(&config, 1, 0, 100), draw(&config, 1, 1, 100));
        assert_eq!(draw(&config, 1, 0, 3), [0, 1, 2]);
    }

    #[test]
    fn a_pass_shows_no_sample_twice() {
        let memory: Vec<u32> = (50..60).collect();
        let mut cursor = Cursor::new(1, 0, 0, memory.len(), 4);
        let mut seen = Vec::new();
        for _ in 0..2 {
            cursor.next(&memory, &mut seen);
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 8);
        cursor.next(&memory, &mut seen);
        assert_eq!((seen.len(), cursor.pass), (12, 1));
    }
}
