//! Ready-made networks, and networks that a configuration describes ([`layers()`]). Text encoders are in [`bert()`].
//!
//! Parameters have PyTorch's names, so weights can be exchanged both ways.

mod bert;
mod layers;

pub use bert::{BertConfig, Pooling, bert};
pub use layers::{Layer, LayerOp, check_layers, layers};

use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId, Shape, Window};
use crate::kernels::Activation::Relu;

/// The normalisation after each convolution of a residual network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Norm {
    /// Batch normalisation.
    #[default]
    Batch,
    /// Group normalisation with this many groups.
    Group(usize),
}

/// Options that apply to any named network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Variant {
    /// The normalisation, if the network has one.
    pub norm: Norm,
    /// Outputs of a projection head (Li et al., CVPR 2021) between the features and the classifier; `None`: no head.
    pub projection_head: Option<usize>,
}

/// A residual network of basic blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResNet<'a> {
    /// Channels per stage. Every stage but the first halves the image.
    pub widths: &'a [usize],
    /// Basic blocks per stage.
    pub blocks: usize,
    /// Whether a 3×3 max-pool of stride 2 follows the stem.
    pub stem_pool: bool,
    /// Normalisation and head.
    pub variant: Variant,
}

impl ResNet<'_> {
    /// The network for images of shape `input`.
    ///
    /// # Errors
    /// If the images are too small or the groups do not divide the channels.
    pub fn build(&self, input: Shape, classes: usize) -> Result<Graph> {
        let mut g = Graph::new(input);
        let [first, ..] = self.widths else {
            return Err(Error::shape("conv1", "needs at least one stage"));
        };
        let x = g.conv2d("conv1", g.input(), *first, Window::new(3, 1, 1), false)?;
        let x = self.normalise(&mut g, "bn1", x)?;
        g.mark_level(x);
        let mut x = g.activation("relu", x, Relu)?;
        if self.stem_pool {
            x = g.max_pool("pool", x, Window::new(3, 2, 1))?;
        }
        for (stage, &width) in self.widths.iter().enumerate() {
            for block in 0..self.blocks {
                let name = format!("layers.{}", stage * self.blocks + block);
                let sum = self.block(&mut g, &name, x, width, if stage > 0 && block == 0 { 2 } else { 1 })?;
                if block + 1 == self.blocks {
                    g.mark_level(sum);
                }
                x = g.activation(&format!("{name}.relu2"), sum, Relu)?;
            }
        }
        let x = g.global_average_pool("features", x)?;
        classifier(&mut g, "fc", x, self.variant.projection_head, classes)?;
        Ok(g)
    }

    /// A basic block, up to the sum of its two branches.
    fn block(&self, g: &mut Graph, name: &str, x: NodeId, width: usize, stride: usize) -> Result<NodeId> {
        let y = g.conv2d(&format!("{name}.conv1"), x, width, Window::new(3, stride, 1), false)?;
        let y = self.normalise(g, &format!("{name}.bn1"), y)?;
        let y = g.activation(&format!("{name}.relu1"), y, Relu)?;
        let y = g.conv2d(&format!("{name}.conv2"), y, width, Window::new(3, 1, 1), false)?;
        let y = self.normalise(g, &format!("{name}.bn2"), y)?;
        let shortcut = if stride != 1 || g.shape(x).c != width {
            let s = g.conv2d(&format!("{name}.shortcut.0"), x, width, Window::new(1, stride, 0), false)?;
            self.normalise(g, &format!("{name}.shortcut.1"), s)?
        } else {
            x
        };
        g.add(&format!("{name}.add"), y, shortcut)
    }

    fn normalise(&self, g: &mut Graph, name: &str, x: NodeId) -> Result<NodeId> {
        match self.variant.norm {
            Norm::Batch => g.batch_norm(name, x),
            Norm::Group(groups) => g.group_norm(name, x, groups),
        }
    }
}

/// The last layers: an optional projection head (`head.0`, ReLU, `head.2`), then the linear classifier `name`.
fn classifier(g: &mut Graph, name: &str, x: NodeId, head: Option<usize>, classes: usize) -> Result<NodeId> {
    g.mark_features(x);
    let x = projection_head(g, x, head)?;
    g.linear(name, x, classes, true)
}

fn projection_head(g: &mut Graph, x: NodeId, outputs: Option<usize>) -> Result<NodeId> {
    let Some(outputs) = outputs else { return Ok(x) };
    let y = g.linear("head.0", x, g.shape(x).len(), true)?;
    let y = g.activation("head.1", y, Relu)?;
    g.linear("head.2", y, outputs, true)
}

/// A multi-layer perceptron with ReLU between layers `fc1`, `fc2`, … It flattens images first.
///
/// # Errors
/// If a layer is empty.
pub fn mlp(input: Shape, hidden: &[usize], classes: usize, variant: Variant) -> Result<Graph> {
    let mut g = Graph::new(input);
    let mut x = g.input();
    if input.pixels() > 1 {
        x = g.flatten("flatten", x)?;
    }
    for (i, &width) in hidden.iter().enumerate() {
        x = g.linear(&format!("fc{}", i + 1), x, width, true)?;
        g.mark_level(x);
        x = g.activation(&format!("relu{}", i + 1), x, Relu)?;
    }
    classifier(&mut g, &format!("fc{}", hidden.len() + 1), x, variant.projection_head, classes)?;
    Ok(g)
}

/// The network of the pfl-research CIFAR-10 benchmark, with the channels of its two convolutions and its hidden layer.
///
/// # Errors
/// If the images are too small.
pub fn cnn(input: Shape, channels: [usize; 2], hidden: usize, classes: usize, variant: Variant) -> Result<Graph> {
    let mut g = Graph::new(input);
    let x = g.conv2d("conv1", g.input(), channels[0], Window::new(3, 1, 0), true)?;
    g.mark_level(x);
    let x = g.activation("relu1", x, Relu)?;
    let x = g.conv2d("conv2", x, channels[1], Window::new(3, 1, 0), true)?;
    g.mark_level(x);
    let x = g.activation("relu2", x, Relu)?;
    let x = g.max_pool("pool", x, Window::new(2, 2, 0))?;
    let x = g.dropout("dropout1", x, 0.25)?;
    let x = g.flatten("flatten", x)?;
    let x = g.linear("fc1", x, hidden, true)?;
    g.mark_level(x);
    let x = g.activation("relu3", x, Relu)?;
    let x = g.dropout("dropout2", x, 0.5)?;
    classifier(&mut g, "fc2", x, variant.projection_head, classes)?;
    Ok(g)
}

/// A network with a name.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The name that users type.
    pub name: &'static str,
    /// A one-line description.
    pub about: &'static str,
    /// Whether it reads texts ([`Shape::tokens`]) instead of images or vectors.
    pub reads_text: bool,
    recipe: Recipe,
}

/// How a named network is built.
#[derive(Clone, Copy, Debug)]
enum Recipe {
    /// [`mlp`] with these hidden layers.
    Mlp(&'static [usize]),
    /// [`cnn`] with these channels and this hidden layer.
    Cnn([usize; 2], usize),
    /// [`ResNet`] with these widths and blocks, and a pool after the stem or none.
    ResNet(&'static [usize], usize, bool),
    /// [`BertConfig::sized`] with these sizes.
    Bert([usize; 4], Pooling),
}

const fn entry(name: &'static str, about: &'static str, recipe: Recipe) -> Entry {
    Entry { name, about, reads_text: matches!(recipe, Recipe::Bert(..)), recipe }
}

/// All named networks.
pub const CATALOGUE: &[Entry] = &[
    entry("mlp", "perceptron with two hidden layers of 100", Recipe::Mlp(&[100, 100])),
    entry("cnn", "two convolutions, two linear layers: the pfl-research benchmark", Recipe::Cnn([32, 64], 128)),
    entry(
        "resnet8",
        "the paper's ResNet-8: 64-128-256, max-pool after the stem",
        Recipe::ResNet(&[64, 128, 256], 1, true),
    ),
    entry("resnet8-thin", "16-32-64 without the pool: quick studies on CPUs", Recipe::ResNet(&[16, 32, 64], 1, false)),
    entry(
        "resnet10",
        "64-128-256-512: what the paper's code calls ResNet-8",
        Recipe::ResNet(&[64, 128, 256, 512], 1, true),
    ),
    entry("resnet18", "64-128-256-512, two blocks a stage", Recipe::ResNet(&[64, 128, 256, 512], 2, true)),
    entry(
        "bert-tiny",
        "BERT with 2 layers of 128: the paper's text encoder, untrained",
        Recipe::Bert([2, 128, 2, 512], Pooling::Pooler),
    ),
    entry(
        "minilm-l3",
        "MiniLM with 3 layers of 384 and the mean of tokens, untrained",
        Recipe::Bert([3, 384, 12, 1536], Pooling::Mean),
    ),
];

impl Recipe {
    fn build(self, input: Shape, classes: usize, variant: Variant) -> Result<Graph> {
        match self {
            Self::Mlp(hidden) => mlp(input, hidden, classes, variant),
            Self::Cnn(channels, hidden) => cnn(input, channels, hidden, classes, variant),
            Self::ResNet(widths, blocks, stem_pool) => {
                ResNet { widths, blocks, stem_pool, variant }.build(input, classes)
            }
            Self::Bert(..) if input != Shape::tokens(input.w) => {
                Err(Error::shape("embeddings", format!("an encoder of texts cannot take samples of shape {input}")))
            }
            Self::Bert([layers, hidden, heads, intermediate], pooling) => {
                let config = BertConfig { pooling, ..BertConfig::sized(layers, hidden, heads, intermediate) };
                bert(&config, input.w, classes, variant)
            }
        }
    }
}

/// Builds a network by its name.
///
/// ```
/// use fedproj_nn::{Shape, models};
///
/// let graph = models::build("resnet8", Shape::image(32, 32, 3), 10, models::Variant::default())?;
/// assert_eq!(graph.params().len(), 1_227_594);
/// # Ok::<(), fedproj_nn::Error>(())
/// ```
///
/// # Errors
/// If no network has this name (the error lists all names), or if the network cannot take such input.
pub fn build(name: &str, input: Shape, classes: usize, variant: Variant) -> Result<Graph> {
    if let Some(entry) = CATALOGUE.iter().find(|entry| entry.name == name) {
        return entry.recipe.build(input, classes, variant);
    }
    let names: Vec<&str> = CATALOGUE.iter().map(|entry| entry.name).collect();
    Err(Error::UnknownModel { name: name.into(), known: names.join(", ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_counts_are_those_of_the_paper_and_the_benchmarks() {
        let count =
            |name| build(name, Shape::image(32, 32, 3), 10, Variant::default()).map(|g| g.params().len()).unwrap();
        assert_eq!(count("cnn"), 1_626_442);
        assert_eq!(count("resnet8"), 1_227_594);
        assert_eq!(count("resnet8-thin"), 78_042);
        assert_eq!(count("resnet10"), 4_903_242);
        assert_eq!(count("resnet18"), 11_173_962);
    }

    #[test]
    fn an_unknown_name_gets_the_known_ones() {
        let error = build("resnet-8", Shape::image(32, 32, 3), 10, Variant::default()).unwrap_err().to_string();
        assert!(error.contains("unknown model `resnet-8`") && error.contains("known models: mlp, cnn"), "{error}");
    }
}
