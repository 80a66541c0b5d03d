//! The interface of a federated method.

use crate::config::{Config, OptimizerConfig};
use crate::distill::EnsembleWeights;
use crate::error::Result;
use crate::experiment::Experiment;
use crate::fusion::{Fusion, GlobalModel, ServerState};
use crate::generator::{GENERATOR, GeneratorConfig};
use crate::memory::{MemoryConfig, Targets};
use crate::partial::{Mean, averages};
use crate::step::{Batch, Finish, Step, Term};
use fedproj_nn::models::Variant;
use fedproj_nn::{Graph, Loss, NodeId};
use std::fmt::Debug;
use std::ops::Range;

/// The name of [`Method::sends_logits`].
pub const LOGITS: &str = "logits";

/// A federated method: what a client does with a mini-batch, and how the server fuses the clients' models. The defaults
/// are FedAvg, so a method's file holds only the differences.
///
/// Methods do no I/O, read no clock and spawn no thread: the simulator and a networked server call the same code.
pub trait Method: Send + Sync + Debug {
    /// Checks that the method works with the rest of the configuration.
    ///
    /// # Errors
    /// Names the value that does not fit and the values that would.
    fn check(&self, config: &Config) -> Result<()> {
        let _ = config;
        Ok(())
    }

    /// The clients' optimiser where the configuration names no kind, for methods that do not work with every kind.
    fn optimizer(&self) -> Option<OptimizerConfig> {
        None
    }

    /// Checks that the method works on this network.
    ///
    /// # Errors
    /// Names what does not fit and what would.
    fn check_network(&self, graph: &Graph) -> Result<()> {
        let _ = graph;
        Ok(())
    }

    /// Changes to the network, such as MOON's projection head.
    fn variant(&self, variant: Variant) -> Variant {
        variant
    }

    /// The network of this run, from the one that is configured. Where that does not fit, [`Method::check_network`]
    /// rejects it.
    fn network(&self, graph: Graph) -> Graph {
        graph
    }

    /// Nodes besides the output whose values or gradients a local step uses.
    fn taps(&self, graph: &Graph) -> Vec<NodeId> {
        let _ = graph;
        Vec::new()
    }

    /// Whether the method needs a public unlabelled set.
    fn needs_public(&self) -> bool {
        false
    }

    /// Whether it also needs the public samples' labels, of the same classes as the private ones.
    fn needs_public_labels(&self) -> bool {
        false
    }

    /// Whether clients with different networks may take part (`model.clients`): they exchange logits on the public set, and
    /// weights are averaged among clients of the same network.
    fn exchanges_logits(&self) -> bool {
        false
    }

    /// Whether models travel. If not, a client sends its logits on the memory's samples alone, and the simulator computes them
    /// from its model.
    fn sends_weights(&self) -> bool {
        true
    }

    /// Values that a client with `n_samples` samples receives and sends, unless these are models or vectors of their length.
    fn exchanged(&self, graph: &Graph, n_samples: usize) -> Option<[usize; 2]> {
        let _ = (graph, n_samples);
        None
    }

    /// Whether the server sends logits for the clients' own samples: the vector `logits`, with a row per private sample. A
    /// client whose rows are all 0 has none, see [`Step::has_logits`].
    fn sends_logits(&self) -> bool {
        false
    }

    /// Whether its ensemble on the public set has features as well as logits.
    fn needs_features(&self) -> bool {
        false
    }

    /// Why only the simulator can run the method, if a federation cannot.
    fn needs_simulator(&self) -> Option<&str> {
        None
    }

    /// The state that holds a client's own model, if it keeps one: `federation.evaluate_clients` then measures that one.
    fn personal_model(&self) -> Option<&str> {
        None
    }

    /// Parameters that stay with their client, together with all buffers. After its first round a client starts from its own.
    /// Where models travel, it sends them all the same, for the score of the global model.
    fn stays_with_client(&self, graph: &Graph) -> Vec<Range<usize>> {
        let _ = graph;
        Vec::new()
    }

    /// What a user should know about the method on this network before trusting a run.
    fn note(&self, graph: &Graph) -> Option<String> {
        let _ = graph;
        None
    }

    /// Names of the vectors that a client sends with its weights, see [`Finish::upload`].
    fn uploads(&self) -> Vec<&str> {
        Vec::new()
    }

    /// Offsets of the classes for [`Loss::OffsetCrossEntropy`], from the client's number of samples per class.
    ///
    /// # Errors
    /// What a method written in Python raises.
    fn class_offsets(&self, counts: &[u32]) -> Result<Vec<f32>> {
        let _ = counts;
        Ok(Vec::new())
    }

    /// The clients' memory of public samples, if the method has one.
    fn memory(&self) -> Option<&MemoryConfig> {
        None
    }

    /// The generator of features that the server sends under the name `generator`, if the method has one.
    fn generator(&self) -> Option<&GeneratorConfig> {
        None
    }

    /// The classes of generated features, if not all: those that some client holds.
    fn generated_classes(&self, experiment: &Experiment) -> Option<Vec<u32>> {
        let _ = experiment;
        None
    }

    /// The loss on the memory, which is measured before and after local training.
    fn memory_objective(&self) -> Vec<Term> {
        self.memory().map_or_else(Vec::new, |memory| {
            let (terms, n) = memory.loss();
            terms[..n].to_vec()
        })
    }

    /// Whether batches of the memory are truncated to integers, as in FedProj's published code.
    fn truncates_memory(&self) -> bool {
        false
    }

    /// Targets of the memory before the first round, if there are any.
    ///
    /// # Errors
    /// If the network cannot take a batch.
    fn first_targets(&self, global: &GlobalModel<'_>) -> Result<Option<Targets>> {
        let _ = global;
        Ok(None)
    }

    /// The weights that the clients of the round start from, if not all from the global ones; see [`Method::needs_simulator`].
    ///
    /// # Errors
    /// If they cannot be computed.
    fn weights_of(&self, experiment: &Experiment, state: &ServerState, clients: &[u32]) -> Result<Vec<Vec<f32>>> {
        let _ = (experiment, state, clients);
        Ok(Vec::new())
    }

    /// The number of values of a vector that the server sends: the model's, except for a generator and for logits.
    ///
    /// # Errors
    /// If this network cannot have the method's generator.
    fn len_of_sent(&self, name: &str, experiment: &Experiment) -> Result<usize> {
        let Experiment { graph, private, .. } = experiment;
        match self.generator().filter(|_| name == GENERATOR) {
            Some(generator) => Ok(generator.network(graph)?.params().len()),
            None if self.sends_logits() && name == LOGITS => {
                Ok(private.n_samples() * graph.shape(graph.output()).len())
            }
            None => Ok(graph.params().len()),
        }
    }

    /// The number of values of a vector that the server keeps for itself: the model's, unless a method keeps something else.
    ///
    /// # Errors
    /// If this network does not suit the method.
    fn len_of_kept(&self, name: &str, experiment: &Experiment) -> Result<usize> {
        let _ = name;
        Ok(experiment.weights.len())
    }

    /// What a client does with one mini-batch.
    ///
    /// # Errors
    /// If the loss is not finite or the network cannot take the batch.
    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        step.update(g);
        Ok(())
    }

    /// What a client does after its last mini-batch: updates the state it keeps, adds to what it sends.
    ///
    /// # Errors
    /// If the method comes from outside and fails.
    fn finish_local(&self, client: &mut Finish<'_>) -> Result<()> {
        let _ = client;
        Ok(())
    }

    /// The means over clients that [`Method::fuse`] asks for, so that clients can be summed before they arrive. `None`: it looks
    /// at single clients. A mean that is not listed is an error there, never a wrong result.
    fn means(&self) -> Option<Vec<Mean>> {
        Some(averages(EnsembleWeights::Samples))
    }

    /// How the server fuses the clients' results into the next global model.
    ///
    /// # Errors
    /// If a contribution cannot be read or the network cannot take a batch.
    fn fuse(&self, round: &mut Fusion<'_>) -> Result<()> {
        round.average()
    }
}
