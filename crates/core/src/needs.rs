//! What a method needs, keeps and sends, found by recording a client's step: nothing is trained.

use crate::config::Config;
use crate::error::Result;
use crate::method::Method;
use crate::own::Own;
use crate::plan::Recorder;
use crate::step::{Finish, Place, Step};
use fedproj_nn::Graph;
use serde::Serialize;

/// Needs of a method, and bytes per client and round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Needs {
    /// Whether it needs a public set.
    pub public: bool,
    /// What a client keeps between rounds.
    pub bytes_kept: usize,
    /// What a client receives: the model, a method's vectors or generator, and the memory's indices and targets.
    pub bytes_down: usize,
    /// What a client sends: the model and a method's vectors.
    pub bytes_up: usize,
}

impl Needs {
    /// The same for a client with `n_samples` samples: some methods' traffic depends on them.
    #[must_use]
    pub fn for_samples(self, method: &dyn Method, graph: &Graph, n_samples: usize) -> Self {
        match method.exchanged(graph, n_samples) {
            Some([down, up]) => Self { bytes_down: 4 * down, bytes_up: 4 * up, ..self },
            None => self,
        }
    }

    /// The needs of a method on this network, with `n_public` public samples.
    ///
    /// # Errors
    /// If the network cannot take a batch.
    pub fn of(config: &Config, method: &dyn Method, graph: &Graph, n_public: usize) -> Result<Self> {
        let mut recorder = Recorder::new(graph);
        (recorder.has_memory, recorder.has_generator) = (method.memory().is_some(), method.generator().is_some());
        let n_rounds = config.federation.rounds;
        let place = Place { seed: config.seed, round: n_rounds - 1, n_rounds, client: 0, epoch: 0, step: 0 };
        // The second time the client finds what it kept.
        for _ in 0..2 {
            recorder.program.ops.clear();
            method.local_step(&mut Step { recorder: &mut recorder, place })?;
            recorder.program.ops.clear();
            method.finish_local(&mut Finish { recorder: &mut recorder })?;
        }
        let (n, n_buffers) = (graph.params().len(), graph.buffers().len());
        let names = &recorder.names;
        let kept = |state: usize| if names.is_buffers(state) { n_buffers } else { n };
        let memory = method.memory().map_or(0, |memory| {
            let width = |node| graph.shape(node).len();
            let features = graph.features().filter(|_| method.needs_features()).map_or(0, width);
            memory.size.min(n_public) * (1 + width(graph.output()) + features)
        });
        let generator =
            method.generator().map_or(Ok(0), |how| how.network(graph).map(|network| network.params().len()))?;
        // A client's logits on the memory's samples take the place of its model.
        let model = |n: usize| if method.sends_weights() { n } else { 0 };
        let logits = if method.sends_weights() { 0 } else { memory - memory / (1 + graph.shape(graph.output()).len()) };
        Ok(Self {
            public: method.needs_public(),
            bytes_kept: 4 * ((0..names.states.len()).map(kept).sum::<usize>() + Own::new(method, graph).n_values()),
            bytes_down: 4 * (model(n + n_buffers) + names.broadcasts.len() * n + generator + memory),
            bytes_up: 4 * (model(n + n_buffers) + method.uploads().len() * n + logits),
        })
    }
}
