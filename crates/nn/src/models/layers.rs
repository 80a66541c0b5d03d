//! Networks that a configuration describes layer by layer, so that a new network needs no compiler.

use super::{Variant, classifier};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId, Shape, Tables, Window};
use crate::kernels::Activation;
use serde::{Deserialize, Serialize};

/// More weights or values of a layer than any machine holds; a network's sums of them fit a number.
const SIZE_MAX: usize = 1 << 40;

/// One layer of a network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// What it computes.
    pub op: LayerOp,
    /// Its name, after which its parameters are named. Default: `op` and its place, as in `conv2d1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Names of the layers whose values it takes, or `input`. Default: the layer before it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub from: Vec<String>,
    /// Channels of a convolution, features of a linear layer, width of an embedding. A linear layer without it is the
    /// classifier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outputs: Option<usize>,
    /// Side of a window. Default: 3 for a convolution, 2 for a pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<usize>,
    /// Distance between windows. Default: 1 for a convolution, `kernel` for a pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stride: Option<usize>,
    /// Zeros around the image. Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<usize>,
    /// Whether there is a bias. Default: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<bool>,
    /// Groups of a group-norm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<usize>,
    /// Heads of an attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heads: Option<usize>,
    /// Rate of a dropout, or of the dropout in an attention, in [0, 1). Default: 0.5 and 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f32>,
    /// ε of a layer-norm. Default: 1e-5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eps: Option<f32>,
    /// Word pieces of an embedding. Default: BERT's 30 522.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<usize>,
}

/// What a layer computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerOp {
    /// A convolution.
    Conv2d,
    /// A convolution with standardised weights.
    StandardizedConv2d,
    /// Batch normalisation.
    BatchNorm,
    /// Group normalisation.
    GroupNorm,
    /// Layer normalisation over channels.
    LayerNorm,
    /// A fully connected layer.
    Linear,
    /// max(x, 0)
    Relu,
    /// x Φ(x)
    Gelu,
    /// tanh(x)
    Tanh,
    /// The maximum of each window.
    MaxPool,
    /// The mean over all pixels.
    AveragePool,
    /// The sum of two layers.
    Add,
    /// An image as a vector.
    Flatten,
    /// Drops elements at random while training.
    Dropout,
    /// Vectors of the words, positions and types of a text.
    Embedding,
    /// Self-attention among the tokens of a text.
    Attention,
    /// The vector of the first token of a text.
    FirstToken,
    /// The mean of the tokens of a text.
    MeanOfTokens,
}

impl LayerOp {
    /// The keys that it looks at.
    fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Conv2d | Self::StandardizedConv2d => &["outputs", "kernel", "stride", "padding", "bias"],
            Self::Linear => &["outputs", "bias"],
            Self::MaxPool => &["kernel", "stride", "padding"],
            Self::GroupNorm => &["groups"],
            Self::LayerNorm => &["eps"],
            Self::Dropout => &["rate"],
            Self::Embedding => &["outputs", "vocabulary"],
            Self::Attention => &["heads", "rate"],
            Self::BatchNorm | Self::Relu | Self::Gelu | Self::Tanh | Self::AveragePool | Self::Add | Self::Flatten => {
                &[]
            }
            Self::FirstToken | Self::MeanOfTokens => &[],
        }
    }

    /// As a configuration writes it.
    fn word(self) -> String {
        serde_json::to_value(self).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
    }
}

impl Layer {
    /// Whether a network of these layers reads texts.
    pub fn read_text(layers: &[Self]) -> bool {
        layers.iter().any(|layer| layer.op == LayerOp::Embedding)
    }

    /// The keys that are set.
    fn given(&self) -> Vec<String> {
        let Ok(serde_json::Value::Object(keys)) = serde_json::to_value(self) else { return Vec::new() };
        keys.into_iter().map(|(key, _)| key).filter(|key| !["op", "name", "from"].contains(&&key[..])).collect()
    }

    /// Rejects a layer whose weights or values are more than any machine holds, before they are counted.
    fn check_size(&self, name: &str, from: Shape) -> Result<()> {
        let Self { outputs, kernel, stride, padding, groups, heads, vocabulary, .. } = self;
        let given = [outputs, kernel, stride, padding, groups, heads, vocabulary];
        let (side, outputs) = (kernel.unwrap_or(3), outputs.unwrap_or(1));
        let attends = self.op == LayerOp::Attention;
        let padded = [from.h, from.w].map(|side| side.saturating_add(padding.unwrap_or(0).saturating_mul(2)));
        let products = [
            [from.h, from.w, from.c, if self.op == LayerOp::Linear { outputs } else { 1 }],
            [side, side, from.c, outputs],
            [padded[0], padded[1], outputs.max(from.c), 1],
            // A table of scores per head, and the weights of queries, keys and values.
            if attends { [from.w, from.w, heads.unwrap_or(1), 1] } else { [1; 4] },
            if attends { [from.c, from.c, 3, 1] } else { [1; 4] },
        ];
        let is_small = |factors: &[usize]| {
            factors.iter().try_fold(1usize, |product, n| product.checked_mul(*n)).is_some_and(|n| n <= SIZE_MAX)
        };
        if given.into_iter().flatten().all(|n| *n <= SIZE_MAX) && products.iter().all(|factors| is_small(factors)) {
            return Ok(());
        }
        Err(Error::shape(name, "is too large: it would need more than 2⁴⁰ weights or values per sample"))
    }

    /// Adds the layer to a graph.
    fn add(&self, g: &mut Graph, name: &str, x: NodeId, other: Option<NodeId>, last: &Last) -> Result<NodeId> {
        let need = |value: Option<usize>, key: &str| value.ok_or_else(|| Error::shape(name, format!("needs `{key}`")));
        let bias = self.bias.unwrap_or(true);
        let window = |kernel: usize, is_pool: bool| {
            let kernel = self.kernel.unwrap_or(kernel);
            Window::new(kernel, self.stride.unwrap_or(if is_pool { kernel } else { 1 }), self.padding.unwrap_or(0))
        };
        // As in the networks of the catalogue, a level stands before an activation.
        if matches!(self.op, LayerOp::Relu | LayerOp::Gelu | LayerOp::Tanh) && x != g.input() && !g.has_tokens(x) {
            g.mark_level(x);
        }
        match self.op {
            LayerOp::Conv2d => g.conv2d(name, x, need(self.outputs, "outputs")?, window(3, false), bias),
            LayerOp::StandardizedConv2d => {
                g.standardized_conv2d(name, x, need(self.outputs, "outputs")?, window(3, false), bias)
            }
            LayerOp::BatchNorm => g.batch_norm(name, x),
            LayerOp::GroupNorm => g.group_norm(name, x, need(self.groups, "groups")?),
            LayerOp::LayerNorm => g.layer_norm(name, x, self.eps.unwrap_or(1e-5)),
            LayerOp::Linear => match self.outputs {
                Some(outputs) => g.linear(name, x, outputs, bias),
                None if !bias => Err(Error::shape(name, "the classifier has a bias")),
                None => classifier(g, name, x, last.variant.projection_head, last.classes),
            },
            LayerOp::Relu => g.activation(name, x, Activation::Relu),
            LayerOp::Gelu => g.activation(name, x, Activation::Gelu),
            LayerOp::Tanh => g.activation(name, x, Activation::Tanh),
            LayerOp::MaxPool => g.max_pool(name, x, window(2, true)),
            LayerOp::AveragePool => g.global_average_pool(name, x),
            LayerOp::Add => {
                let other = other.ok_or_else(|| Error::shape(name, "needs two layers in `from`"))?;
                g.add(name, x, other)
            }
            LayerOp::Flatten => g.flatten(name, x),
            LayerOp::Dropout => g.dropout(name, x, self.rate.unwrap_or(0.5)),
            LayerOp::Embedding => {
                let (width, positions) = (need(self.outputs, "outputs")?, g.shape(g.input()).len());
                let vocabulary = self.vocabulary.unwrap_or(30_522);
                g.embedding(name, Tables { vocabulary, positions, types: 2, width })
            }
            LayerOp::Attention => g.self_attention(name, x, need(self.heads, "heads")?, self.rate.unwrap_or(0.0)),
            LayerOp::FirstToken => g.first_token(name, x),
            LayerOp::MeanOfTokens => g.mean_of_tokens(name, x),
        }
    }
}

/// What the classifier needs to know.
struct Last {
    classes: usize,
    variant: Variant,
}

/// The network of these layers. Its last layer gives one value per class.
///
/// ```
/// use fedproj_nn::{Shape, models::{Layer, Variant, layers}};
///
/// let net: Vec<Layer> = serde_json::from_str(r#"[{"op": "linear", "outputs": 8}, {"op": "relu"}, {"op": "linear"}]"#)?;
/// let graph = layers(&net, Shape::vector(4), 3, Variant::default())?;
/// assert_eq!(graph.params().len(), 4 * 8 + 8 + 8 * 3 + 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If a layer does not fit its input, names what is not there, or has a key that it does not look at.
pub fn layers(layers: &[Layer], input: Shape, classes: usize, variant: Variant) -> Result<Graph> {
    let graph = build(layers, input, &Last { classes, variant })?;
    let (output, last) = (graph.output(), graph.name(graph.output()));
    if graph.shape(output) != Shape::vector(classes) || graph.has_tokens(output) {
        let problem = format!(
            "is the last layer and gives {} per sample, but there are {classes} classes; end with a linear layer without \
             `outputs`",
            graph.shape(output)
        );
        return Err(Error::shape(last, problem));
    }
    Ok(graph)
}

/// As [`layers`], for a network that is not complete yet: the shape of its last layer.
///
/// # Errors
/// As [`layers`].
pub fn check_layers(layers: &[Layer], input: Shape) -> Result<Shape> {
    let graph = build(layers, input, &Last { classes: 2, variant: Variant::default() })?;
    Ok(graph.shape(graph.output()))
}

fn build(layers: &[Layer], input: Shape, last: &Last) -> Result<Graph> {
    if [input.h, input.w, input.c].contains(&0) {
        return Err(Error::shape("input", format!("a sample of {input} has no values")));
    }
    let mut g = Graph::new(input);
    for (at, layer) in layers.iter().enumerate() {
        let name = layer.name.clone().unwrap_or_else(|| format!("{}{}", layer.op.word(), at + 1));
        if let Some(key) = layer.given().iter().find(|key| !layer.op.keys().contains(&&key[..])) {
            let known = layer.op.keys().join(", ");
            let known = if known.is_empty() { "only name and from".to_owned() } else { format!("name, from, {known}") };
            return Err(Error::shape(&name, format!("`{}` takes no `{key}`; it takes {known}", layer.op.word())));
        }
        let find = |from: &String| {
            let here = || g.names().collect::<Vec<_>>().join(", ");
            g.find(from).ok_or_else(|| {
                Error::shape(&name, format!("there is no layer `{from}` before it; there are {}", here()))
            })
        };
        let from = layer.from.iter().map(find).collect::<Result<Vec<_>>>()?;
        let n_max = if layer.op == LayerOp::Add { 2 } else { 1 };
        if from.len() > n_max {
            return Err(Error::shape(&name, format!("takes {n_max} in `from`, not {}", from.len())));
        }
        let x = from.first().copied().unwrap_or_else(|| g.output());
        layer.check_size(&name, g.shape(x))?;
        layer.add(&mut g, &name, x, from.get(1).copied(), last)?;
    }
    Ok(g)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Vec<Layer> {
        serde_json::from_str(json).unwrap()
    }

    const BLOCK: &str = r#"[
        {"op": "conv2d", "name": "conv1", "outputs": 4, "padding": 1, "bias": false},
        {"op": "batch_norm", "name": "bn1"},
        {"op": "relu", "name": "relu"},
        {"op": "conv2d", "name": "conv2", "outputs": 4, "padding": 1, "bias": false},
        {"op": "add", "name": "sum", "from": ["conv2", "relu"]},
        {"op": "average_pool", "name": "pool"},
        {"op": "linear", "name": "fc"}
    ]"#;

    #[test]
    fn layers_are_named_and_joined_as_written() {
        let graph = layers(&parse(BLOCK), Shape::image(8, 8, 3), 5, Variant::default()).unwrap();
        assert_eq!(graph.params().len(), 3 * 9 * 4 + 8 + 4 * 9 * 4 + 4 * 5 + 5);
        assert_eq!(graph.features(), graph.find("pool"));
        assert_eq!(graph.names().collect::<Vec<_>>()[1..], ["conv1", "bn1", "relu", "conv2", "sum", "pool", "fc"]);
        let head = Variant { projection_head: Some(6), ..Variant::default() };
        assert!(layers(&parse(BLOCK), Shape::image(8, 8, 3), 5, head).unwrap().find("head.2").is_some());
    }

    #[test]
    fn the_layer_that_is_wrong_is_named() {
        for (json, expected) in [
            (
                r#"[{"op": "linear", "outputs": 3, "rate": 0.5}]"#,
                "node `linear1`: `linear` takes no `rate`; it takes name, from, outputs, bias",
            ),
            (r#"[{"op": "conv2d"}]"#, "node `conv2d1`: needs `outputs`"),
            (
                r#"[{"op": "relu", "from": ["nowhere"]}]"#,
                "node `relu1`: there is no layer `nowhere` before it; there are input",
            ),
            (r#"[{"op": "add", "from": ["input"]}]"#, "node `add1`: needs two layers in `from`"),
            (r#"[{"op": "relu", "from": ["input", "input"]}]"#, "node `relu1`: takes 1 in `from`, not 2"),
            (
                r#"[{"op": "linear", "outputs": 3}]"#,
                "is the last layer and gives 3 per sample, but there are 5 classes",
            ),
        ] {
            let error = layers(&parse(json), Shape::vector(4), 5, Variant::default()).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let fits = |json| check_layers(&parse(json), Shape::image(4, 4, 1)).map_err(|e| e.to_string());
        assert!(fits(r#"[{"op": "conv2d", "outputs": 2, "kernel": 9}]"#).unwrap_err().contains("node `conv2d1`"));
        assert_eq!(fits(r#"[{"op": "max_pool"}]"#).unwrap(), Shape::image(2, 2, 1));
    }

    #[test]
    fn a_layer_that_is_too_large_to_count_is_rejected() {
        let huge = 1usize << 62;
        for json in [
            r#"[{"op": "linear", "outputs": HUGE}]"#,
            r#"[{"op": "conv2d", "outputs": HUGE}]"#,
            r#"[{"op": "conv2d", "outputs": 2, "kernel": HUGE, "padding": HUGE}]"#,
            r#"[{"op": "conv2d", "outputs": 2, "padding": HUGE}]"#,
            r#"[{"op": "max_pool", "kernel": 2, "padding": HUGE}]"#,
            r#"[{"op": "max_pool", "stride": HUGE}]"#,
        ] {
            let layers = parse(&json.replace("HUGE", &huge.to_string()));
            let error = check_layers(&layers, Shape::image(4, 4, 1)).unwrap_err().to_string();
            assert!(error.contains("is too large") || error.contains("does not fit"), "{error}");
        }
        for (input, expected) in [
            (Shape::vector(huge), "is too large"),
            (Shape::image(huge, huge, huge), "is too large"),
            (Shape::vector(0), "node `input`: a sample of 0 has no values"),
        ] {
            let error = check_layers(&parse(r#"[{"op": "relu"}]"#), input).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        for (json, input) in [
            (r#"[{"op": "linear", "outputs": 2}]"#, Shape::vector(1 << 20)),
            (r#"[{"op": "flatten"}, {"op": "linear", "outputs": 2}, {"op": "relu"}]"#, Shape::image(512, 512, 3)),
        ] {
            let shape = check_layers(&parse(json), input).unwrap();
            assert_eq!(shape.len(), 2, "large, but not too large");
        }
        let texts = parse(r#"[{"op": "embedding", "outputs": 8, "vocabulary": 30}, {"op": "attention", "heads": 2}]"#);
        assert!(check_layers(&texts, Shape::tokens(huge)).unwrap_err().to_string().contains("is too large"));
        assert!(check_layers(&texts, Shape::tokens(8)).is_ok());
        // Its multiplications are more than that, but neither its weights nor its values.
        let wide = parse(r#"[{"op": "conv2d", "outputs": 512, "padding": 1}]"#);
        assert!(check_layers(&wide, Shape::image(4096, 4096, 512)).is_ok());
    }
}
