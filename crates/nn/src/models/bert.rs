//! BERT and the encoders that share its layers (Devlin et al., "BERT", NAACL 2019, arXiv:1810.04805), as Hugging Face
//! publishes them: a folder with `config.json`, `model.safetensors` and `vocab.txt`.
//!
//! Parameters have the names of Hugging Face's `BertModel`; the classifier is `classifier`.

use super::{Variant, projection_head};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId, Shape, Tables};
use crate::kernels::Activation::{Gelu, Tanh};
use crate::weights;
use serde::Deserialize;
use std::path::Path;

/// How the tokens of a text become one vector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// A linear layer and tanh on the first token, as BERT was trained.
    #[default]
    Pooler,
    /// The mean of all tokens, for encoders without a pooler. MiniLM and similar encoders were trained to represent a
    /// text this way.
    Mean,
}

/// The sizes of an encoder, read from `config.json` by Hugging Face's names and with its defaults.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct BertConfig {
    /// Layers.
    #[serde(rename = "num_hidden_layers")]
    pub layers: usize,
    /// Width of a token's vector.
    #[serde(rename = "hidden_size")]
    pub hidden: usize,
    /// Attention heads; must divide `hidden`.
    #[serde(rename = "num_attention_heads")]
    pub heads: usize,
    /// Width of the feed-forward part.
    #[serde(rename = "intermediate_size")]
    pub intermediate: usize,
    /// Word pieces: the number of lines in `vocab.txt`.
    #[serde(rename = "vocab_size")]
    pub vocabulary: usize,
    /// Positions: the maximum length of a text.
    #[serde(rename = "max_position_embeddings", default = "positions")]
    pub positions: usize,
    /// Segments of a text.
    #[serde(rename = "type_vocab_size", default = "types")]
    pub types: usize,
    /// Dropout rate after embeddings and layers, and before the classifier.
    #[serde(rename = "hidden_dropout_prob", default = "dropout")]
    pub dropout: f32,
    /// Dropout rate on attention.
    #[serde(rename = "attention_probs_dropout_prob", default = "dropout")]
    pub attention_dropout: f32,
    /// ε of the normalisations.
    #[serde(rename = "layer_norm_eps", default = "norm_eps")]
    pub norm_eps: f32,
    /// How tokens become one vector.
    #[serde(skip)]
    pub pooling: Pooling,
}

fn positions() -> usize {
    512
}
fn types() -> usize {
    2
}
fn dropout() -> f32 {
    0.1
}
fn norm_eps() -> f32 {
    1e-12
}

impl BertConfig {
    /// An encoder with BERT's vocabulary, positions and rates. Sizes differ in layers, hidden width and heads.
    pub fn sized(layers: usize, hidden: usize, heads: usize, intermediate: usize) -> Self {
        Self {
            layers,
            hidden,
            heads,
            intermediate,
            vocabulary: 30_522,
            positions: positions(),
            types: types(),
            dropout: dropout(),
            attention_dropout: dropout(),
            norm_eps: norm_eps(),
            pooling: Pooling::Pooler,
        }
    }

    /// The encoder of a folder: its `config.json`. It has a pooler unless a `model.safetensors` there has none.
    ///
    /// # Errors
    /// If a file cannot be read, or describes another kind of network.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let text = std::fs::read_to_string(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        let mut config = Self::parse(&text).map_err(|problem| Error::ModelFile { path, problem })?;
        let path = folder.join("model.safetensors");
        // A folder without weights still defines the network's shape; its weights are then random.
        if path.exists()
            && !weights::names(&path)?.iter().any(|name| weights::plain_name(name) == "pooler.dense.weight")
        {
            config.pooling = Pooling::Mean;
        }
        Ok(config)
    }

    fn parse(text: &str) -> std::result::Result<Self, String> {
        #[derive(Deserialize)]
        struct Kind {
            model_type: Option<String>,
            hidden_act: Option<String>,
            position_embedding_type: Option<String>,
        }
        // First, because another kind of network may lack any of the other keys.
        let kind: Kind = serde_json::from_str(text).map_err(|e| format!("not a model's configuration: {e}"))?;
        for (key, found, expected) in [
            ("model_type", kind.model_type, "bert"),
            ("hidden_act", kind.hidden_act, "gelu"),
            ("position_embedding_type", kind.position_embedding_type, "absolute"),
        ] {
            if let Some(found) = found.filter(|found| found != expected) {
                return Err(format!("{key} is `{found}`; only encoders with {key} `{expected}` can be read"));
            }
        }
        serde_json::from_str(text).map_err(|e| e.to_string())
    }

    /// Checks that a vocabulary of `n_lines` words is the one the encoder was trained with.
    ///
    /// # Errors
    /// If it has more or fewer words than the embedding has rows.
    pub fn check_vocabulary(&self, path: &Path, n_lines: usize) -> Result<()> {
        if n_lines == self.vocabulary {
            return Ok(());
        }
        let rows = self.vocabulary;
        let problem = format!("has {n_lines} words, but the embedding has {rows} rows: it belongs to another model");
        Err(Error::ModelFile { path: path.into(), problem })
    }
}

/// An encoder with a classifier, for texts of up to `max_len` tokens.
///
/// ```
/// use fedproj_nn::models::{BertConfig, Variant, bert};
///
/// let tiny = BertConfig::sized(2, 128, 2, 512);
/// let graph = bert(&tiny, 64, 2, Variant::default())?;
/// assert_eq!(graph.params().len(), 4_386_178); // bert-tiny, two classes
/// # Ok::<(), fedproj_nn::Error>(())
/// ```
///
/// # Errors
/// If sizes do not fit each other, or `max_len` exceeds the positions.
pub fn bert(config: &BertConfig, max_len: usize, classes: usize, variant: Variant) -> Result<Graph> {
    if config.layers == 0 {
        return Err(Error::shape("encoder", "needs at least one layer"));
    }
    let mut g = Graph::new(Shape::tokens(max_len));
    let tables = Tables {
        vocabulary: config.vocabulary,
        positions: config.positions,
        types: config.types,
        width: config.hidden,
    };
    let x = g.embedding("embeddings", tables)?;
    let x = g.layer_norm("embeddings.LayerNorm", x, config.norm_eps)?;
    let mut x = dropped(&mut g, "embeddings", x, config.dropout)?;
    for i in 0..config.layers {
        let is_last = i + 1 == config.layers;
        x = layer(&mut g, &format!("encoder.layer.{i}"), x, config, is_last && config.pooling == Pooling::Pooler)?;
    }
    let x = match config.pooling {
        Pooling::Mean => g.mean_of_tokens("pooler.mean", x)?,
        Pooling::Pooler => {
            let dense = g.linear("pooler.dense", x, config.hidden, true)?;
            g.activation("pooler.activation", dense, Tanh)?
        }
    };
    g.mark_features(x);
    let x = dropped(&mut g, "pooler", x, config.dropout)?;
    let x = projection_head(&mut g, x, variant.projection_head)?;
    g.linear("classifier", x, classes, true)?;
    g.start_as_bert("classifier");
    Ok(g)
}

/// Attention, then the feed-forward part, each with its residual and normalisation. A pooler reads only the first
/// token, so the layer before it drops the other tokens after attention.
fn layer(g: &mut Graph, name: &str, x: NodeId, config: &BertConfig, only_first: bool) -> Result<NodeId> {
    let mut y = g.self_attention(&format!("{name}.attention.self"), x, config.heads, config.attention_dropout)?;
    let mut x = x;
    if only_first {
        y = g.first_token(&format!("{name}.attention.first"), y)?;
        x = g.first_token(&format!("{name}.first"), x)?;
    }
    let x = output(g, &format!("{name}.attention.output"), y, x, config)?;
    let y = g.linear(&format!("{name}.intermediate.dense"), x, config.intermediate, true)?;
    let y = g.activation(&format!("{name}.intermediate.gelu"), y, Gelu)?;
    output(g, &format!("{name}.output"), y, x, config)
}

/// LayerNorm(x + dropout(dense(y)))
fn output(g: &mut Graph, name: &str, y: NodeId, x: NodeId, config: &BertConfig) -> Result<NodeId> {
    let y = g.linear(&format!("{name}.dense"), y, config.hidden, true)?;
    let y = dropped(g, name, y, config.dropout)?;
    let sum = g.add(&format!("{name}.add"), y, x)?;
    g.layer_norm(&format!("{name}.LayerNorm"), sum, config.norm_eps)
}

fn dropped(g: &mut Graph, name: &str, x: NodeId, rate: f32) -> Result<NodeId> {
    if rate == 0.0 { Ok(x) } else { g.dropout(&format!("{name}.dropout"), x, rate) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters of the encoder with pooler, without a classifier.
    fn count(config: &BertConfig) -> usize {
        bert(config, 16, 1, Variant::default()).unwrap().params().len() - config.hidden - 1
    }

    #[test]
    fn published_encoders_have_their_number_of_parameters() {
        assert_eq!(count(&BertConfig::sized(2, 128, 2, 512)), 4_385_920); // bert-tiny
        assert_eq!(count(&BertConfig::sized(4, 312, 12, 1200)), 14_350_248); // TinyBERT_General_4L_312D
        assert_eq!(count(&BertConfig::sized(12, 768, 12, 3072)), 109_482_240); // bert-base-uncased
        let minilm = BertConfig { pooling: Pooling::Mean, ..BertConfig::sized(3, 384, 12, 1536) };
        assert_eq!(count(&minilm), 17_241_984); // paraphrase-MiniLM-L3-v2
    }

    #[test]
    fn configurations_are_read_with_hugging_faces_defaults() {
        // bert-tiny's file names no model type.
        let tiny = r#"{"hidden_size": 128, "hidden_act": "gelu", "initializer_range": 0.02, "vocab_size": 30522,
            "hidden_dropout_prob": 0.1, "num_attention_heads": 2, "type_vocab_size": 2, "max_position_embeddings": 512,
            "num_hidden_layers": 2, "intermediate_size": 512, "attention_probs_dropout_prob": 0.1}"#;
        assert_eq!(BertConfig::parse(tiny).unwrap(), BertConfig::sized(2, 128, 2, 512));
        for (change, expected) in [
            (("\"hidden_act\": \"gelu\"", "\"hidden_act\": \"relu\""), "hidden_act is `relu`"),
            (("\"hidden_size\": 128,", "\"model_type\": \"roberta\","), "model_type is `roberta`"),
            (("\"hidden_size\": 128,", ""), "missing field `hidden_size`"),
            (
                ("\"hidden_size\": 128,", "\"position_embedding_type\": \"relative_key\", \"hidden_size\": 128,"),
                "absolute",
            ),
            (("}", ""), "not a model's configuration"),
        ] {
            let problem = BertConfig::parse(&tiny.replace(change.0, change.1)).unwrap_err();
            assert!(problem.contains(expected), "{problem}");
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let tiny = BertConfig::sized(2, 128, 2, 512);
        let problem =
            |config: BertConfig, max_len| bert(&config, max_len, 2, Variant::default()).unwrap_err().to_string();
        assert!(problem(tiny.clone(), 513).contains("512 positions, but texts of up to 513"));
        assert!(problem(BertConfig { layers: 0, ..tiny.clone() }, 8).contains("at least one layer"));
        assert!(problem(BertConfig { heads: 3, ..tiny.clone() }, 8).contains("3 equal heads"));
        assert!(problem(BertConfig { types: 3, ..tiny.clone() }, 8).contains("types are 1 or 2"));
        assert!(problem(BertConfig { dropout: 1.0, ..tiny.clone() }, 8).contains("must lie in [0, 1)"));
        let error = tiny.check_vocabulary(Path::new("vocab.txt"), 30_521).unwrap_err().to_string();
        assert!(
            error.contains("vocab.txt") && error.contains("30521 words") && error.contains("30522 rows"),
            "{error}"
        );
    }
}
