//! The layers of text encoders. From the embedding on, values are packed: they hold the tokens of a batch without the
//! empty slots.

use super::{Graph, NodeId, Op, Shape, check_cut, check_rate, require};
use crate::error::{Error, Result};
use crate::layout::{Role, Storage};
use std::ops::Range;

/// BERT's standard deviation of initial weights.
pub(crate) const STD: f32 = 0.02;

/// Sizes of the tables of [`Graph::embedding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tables {
    /// Word pieces.
    pub vocabulary: usize,
    /// Positions; no fewer than the input has slots.
    pub positions: usize,
    /// Segments: 1, or 2 for models that read pairs of texts.
    pub types: usize,
    /// Length of a vector.
    pub width: usize,
}

impl Graph {
    /// The sum of a token's word, position and type vectors. The input is a row of slots. A slot holds `1 + 2·id + type` of
    /// a token as a whole number; the slots behind the last token hold 0.
    ///
    /// Parameters `name.word_embeddings.weight`, `name.position_embeddings.weight` and
    /// `name.token_type_embeddings.weight`.
    ///
    /// # Errors
    /// If the input is not a row of slots, a table is empty or has too few positions, or the name is taken.
    pub fn embedding(&mut self, name: &str, tables: Tables) -> Result<NodeId> {
        self.check_name(name)?;
        let slots = self.shape(self.input());
        let Tables { vocabulary, positions, types, width } = tables;
        let problem = if slots != Shape::tokens(slots.w) || self.token_tables().is_some() {
            format!("reads the input, a row of slots, once; the input is {slots}")
        } else if vocabulary == 0 || width == 0 || !(1..=2).contains(&types) {
            format!("cannot have {vocabulary} words of {width} numbers and {types} types; types are 1 or 2")
        } else if vocabulary >= 1 << 22 {
            format!("{vocabulary} words are too many: a slot distinguishes 2²² of them")
        } else if positions < slots.w {
            format!("has {positions} positions, but texts of up to {} tokens", slots.w)
        } else {
            let mut table = |suffix: &str, rows: usize| {
                let role = Role::Normal { std: STD, std_xavier: STD };
                self.params.push(format!("{name}.{suffix}_embeddings.weight"), vec![rows, width], Storage::Plain, role)
            };
            let params = [table("word", vocabulary), table("position", positions), table("token_type", types)];
            return self.add_layer(name, Op::Embedding, self.input(), Shape { c: width, ..slots }, params);
        };
        Err(Error::shape(name, problem))
    }

    /// Whether a node's value is one row per token, (tokens of the batch, C). Losses need one row per sample.
    pub fn has_tokens(&self, node: NodeId) -> bool {
        self.nodes[node.0].packed
    }

    /// Vocabulary and types of the embedding, if there is one.
    pub(crate) fn token_tables(&self) -> Option<(usize, usize)> {
        let node = self.nodes.iter().find(|node| node.op == Op::Embedding)?;
        let [words, _, types] = node.params.each_ref().map(|table| table.len() / node.shape.c);
        Some((words, types))
    }

    /// Normalises the channels of every token, or pixel; parameters `name.weight`, `name.bias`.
    ///
    /// # Errors
    /// If ε is not positive, or the name is taken.
    pub fn layer_norm(&mut self, name: &str, x: NodeId, eps: f32) -> Result<NodeId> {
        self.check_name(name)?;
        require(name, eps.is_finite() && eps > 0.0, || format!("ε = {eps} must be positive"))?;
        let shape = self.shape(x);
        let params = self.scale_and_shift(name, x);
        self.add_layer(name, Op::LayerNorm { eps }, x, shape, params)
    }

    /// Multi-head self-attention among the tokens of a sample, without the output layer that mixes the heads. Parameters
    /// `name.query`, `name.key` and `name.value`, each with weight and bias. `rate` is that of dropout on attention.
    ///
    /// # Errors
    /// If the input has no tokens, the heads do not divide its channels, the rate is not in [0, 1), or the name is taken.
    pub fn self_attention(&mut self, name: &str, x: NodeId, heads: usize, rate: f32) -> Result<NodeId> {
        self.check_name(name)?;
        self.check_tokens(name, x)?;
        let shape = self.shape(x);
        check_cut(name, shape.c, heads, "heads")?;
        check_rate(name, rate)?;
        let joined = self.joined_linear(name, x, ["query", "key", "value"])?;
        self.add_node(name, Op::Attention { heads, rate }, &[joined], shape)
    }

    /// Linear layers of equal size, computed as one product. Their weights are adjacent, and so are their biases.
    fn joined_linear(&mut self, name: &str, x: NodeId, parts: [&str; 3]) -> Result<NodeId> {
        let joined = format!("{name}.joined");
        self.check_name(&joined)?;
        let (from, c) = (self.shape(x), self.shape(x).c);
        let params = &mut self.params;
        let weights = parts.map(|part| {
            let role = Role::Weight { fan_in: c, fan_out: c };
            params.push(format!("{name}.{part}.weight"), vec![c, c], Storage::Plain, role)
        });
        let biases = parts.map(|part| {
            params.push(format!("{name}.{part}.bias"), vec![c], Storage::Plain, Role::LinearBias { fan_in: c })
        });
        let whole = |[first, _, last]: [Range<usize>; 3]| first.start..last.end;
        let shape = Shape { c: parts.len() * c, ..from };
        self.add_layer(&joined, Op::Linear, x, shape, [whole(weights), whole(biases), 0..0])
    }

    /// The vector of each sample's first token; 0 where there is none.
    ///
    /// # Errors
    /// If the input has no tokens, or the name is taken.
    pub fn first_token(&mut self, name: &str, x: NodeId) -> Result<NodeId> {
        self.pool_tokens(name, x, Op::FirstToken)
    }

    /// The mean of each sample's tokens; 0 where there are none.
    ///
    /// # Errors
    /// If the input has no tokens, or the name is taken.
    pub fn mean_of_tokens(&mut self, name: &str, x: NodeId) -> Result<NodeId> {
        self.pool_tokens(name, x, Op::MeanOfTokens)
    }

    fn check_tokens(&self, name: &str, x: NodeId) -> Result<()> {
        require(name, self.nodes[x.0].packed, || format!("needs tokens, but `{}` has none", self.name(x)))
    }

    fn pool_tokens(&mut self, name: &str, x: NodeId, op: Op) -> Result<NodeId> {
        self.check_tokens(name, x)?;
        self.add_node(name, op, &[x], Shape::vector(self.shape(x).c))
    }

    /// Initialises all layers as BERT does: weights from N(0, 0.02²), biases at 0. Under [`crate::Init::Xavier`] the weight
    /// of the classifier comes from N(0, 1).
    pub(crate) fn start_as_bert(&mut self, classifier: &str) {
        let classifier = format!("{classifier}.weight");
        self.params.set_roles(|span| match span.role {
            Role::Weight { .. } => {
                Role::Normal { std: STD, std_xavier: if span.name == classifier { 1.0 } else { STD } }
            }
            Role::LinearBias { .. } => Role::Shift,
            role => role,
        });
    }
}
