//! The part of a model that stays with its client, see [`Method::stays_with_client`]: some parameters, and all buffers.

use crate::error::{Error, Result};
use crate::method::Method;
use crate::trainer::ClientState;
use fedproj_nn::Graph;
use std::ops::Range;

/// Their names in the client's state.
const PARAMS: &str = "stays";
const BUFFERS: &str = "stays.buffers";

/// Which part of a model stays.
#[derive(Clone, Debug)]
pub(crate) struct Own {
    ranges: Vec<Range<usize>>,
    n_buffers: usize,
}

/// All parameters, for methods whose clients keep their model.
pub(crate) fn whole_model(graph: &Graph) -> Vec<Range<usize>> {
    std::iter::once(0..graph.params().len()).collect()
}

impl Own {
    pub fn new(method: &dyn Method, graph: &Graph) -> Self {
        Self { ranges: method.stays_with_client(graph), n_buffers: graph.buffers().len() }
    }

    /// Whether a name in a client's state is of this part. No method works on it.
    pub fn holds(name: &str) -> bool {
        name == PARAMS || name == BUFFERS
    }

    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Values that a client keeps.
    pub fn n_values(&self) -> usize {
        if self.is_empty() { 0 } else { self.ranges.iter().map(Range::len).sum::<usize>() + self.n_buffers }
    }

    /// Puts what the client kept, if it did, in the place of what it received.
    pub fn restore(&self, state: &ClientState, weights: &mut [f32], buffers: &mut [f32]) -> Result<()> {
        let (Some(params), Some(kept)) = (state.get(PARAMS), state.get(BUFFERS)) else { return Ok(()) };
        Error::check_len("the parameters that a client keeps", params.len() + kept.len(), self.n_values())?;
        Error::check_len("the buffers that a client keeps", kept.len(), buffers.len())?;
        let mut rest = &params[..];
        for range in self.ranges.iter().cloned() {
            let (part, others) = rest.split_at(range.len());
            weights[range].copy_from_slice(part);
            rest = others;
        }
        buffers.copy_from_slice(kept);
        Ok(())
    }

    /// Keeps this part of a model.
    pub fn keep(&self, weights: &[f32], buffers: &[f32], state: &mut ClientState) {
        if !self.is_empty() {
            let params = self.ranges.iter().flat_map(|range| &weights[range.clone()]).copied().collect();
            state.insert(PARAMS.into(), params);
            state.insert(BUFFERS.into(), buffers.to_vec());
        }
    }

    /// The global model with this part of a client's.
    pub fn personalise(&self, global: &[f32], client: &[f32]) -> Vec<f32> {
        let mut weights = global.to_vec();
        self.ranges.iter().cloned().for_each(|range| weights[range.clone()].copy_from_slice(&client[range]));
        weights
    }
}
