//! The tokens of a batch of texts, gathered from their slots.

use crate::error::{Error, Result};
use crate::graph::Graph;
use std::ops::Range;

/// The tokens of a batch, text after text. Memory is allocated once, for the largest batch.
#[derive(Debug, Default)]
pub(crate) struct Tokens {
    /// Slots per sample; 0 if the network reads no text.
    slots: usize,
    vocabulary: usize,
    types: usize,
    /// The word and the type of every token.
    pub ids: Vec<u32>,
    pub types_of: Vec<u32>,
    /// The first token of each text, and the total number of tokens at the end.
    pub starts: Vec<usize>,
}

impl Graph {
    /// Checks that the network can read samples `first`, `first` + 1, … of a data set: it must know the tokens of
    /// texts. [`crate::Workspace::forward`] checks by itself. Data for a GPU are checked once, before they are copied.
    ///
    /// # Errors
    /// If a text has a token that the network does not know, or an empty slot before its end.
    pub fn check_samples(&self, first: usize, x: &[f32]) -> Result<()> {
        Tokens::new(self, 1).read(x).map_err(|error| match error {
            Error::Token { sample, slot, problem } => Error::Token { sample: first + sample, slot, problem },
            other => other,
        })
    }
}

impl Tokens {
    /// Tokens for batches of up to `batch` samples of a network.
    pub fn new(graph: &Graph, batch: usize) -> Self {
        let Some((vocabulary, types)) = graph.token_tables() else { return Self::default() };
        let slots = graph.shape(graph.input()).w;
        let memory = || Vec::with_capacity(batch * slots);
        Self { slots, vocabulary, types, ids: memory(), types_of: memory(), starts: Vec::with_capacity(batch + 1) }
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Number of texts.
    pub fn n_texts(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// The tokens of a text.
    pub fn of(&self, text: usize) -> Range<usize> {
        self.starts[text]..self.starts[text + 1]
    }

    /// Reads a batch. Does nothing if the network reads no text.
    pub fn read(&mut self, x: &[f32]) -> Result<()> {
        if self.slots == 0 {
            return Ok(());
        }
        self.ids.clear();
        self.types_of.clear();
        self.starts.clear();
        self.starts.push(0);
        for (sample, slots) in x.chunks_exact(self.slots).enumerate() {
            let n = slots.iter().position(|&v| v == 0.0).unwrap_or(slots.len());
            for (slot, &value) in slots.iter().enumerate() {
                if let Err(problem) = self.push(value, slot < n) {
                    return Err(Error::Token { sample, slot, problem });
                }
            }
            self.starts.push(self.ids.len());
        }
        Ok(())
    }

    fn push(&mut self, value: f32, in_text: bool) -> std::result::Result<(), String> {
        if !in_text {
            return if value == 0.0 { Ok(()) } else { Err(format!("{value} follows an empty slot")) };
        }
        // Integers below 2²⁴ are exact; NaN fails the comparison.
        if !(1.0..16_777_216.0).contains(&value) || value.fract() != 0.0 {
            return Err(format!("{value} is not 1 + 2·id + type of a token"));
        }
        let code = value as u32 - 1;
        let (id, kind) = (code / 2, code % 2);
        if id as usize >= self.vocabulary {
            return Err(format!("token {id} is outside the vocabulary of {}", self.vocabulary));
        }
        if kind as usize >= self.types {
            return Err(format!("segment {kind}, but the network knows {} only", self.types));
        }
        self.ids.push(id);
        self.types_of.push(kind);
        Ok(())
    }
}
