//! The networks of the FedProj paper and of the benchmarks it is compared on.
//!
//! Parameter names are those of the same networks in PyTorch, so weights go both ways.

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

/// A residual network of basic blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResNet<'a> {
    /// Channels of each stage; every stage but the first halves the image.
    pub widths: &'a [usize],
    /// Basic blocks in a stage.
    pub blocks: usize,
    /// Whether a 3×3 max-pool of stride 2 follows the stem.
    pub stem_pool: bool,
    /// The normalisation.
    pub norm: Norm,
}

impl ResNet<'_> {
    /// The network for images of shape `input`.
    ///
    /// # Errors
    /// If the images are too small or the groups do not divide the channels.
    pub fn build(&self, input: Shape, classes: usize) -> Result<Graph> {
        let mut g = Graph::new(input);
        let [first, ..] = self.widths else {
            return Err(Error::Shape { node: "conv1".into(), problem: "needs at least one stage".into() });
        };
        let x = g.conv2d("conv1", g.input(), *first, Window::new(3, 1, 1), false)?;
        let x = self.normalise(&mut g, "bn1", x)?;
        let mut x = g.activation("relu", x, Relu)?;
        if self.stem_pool {
            x = g.max_pool("pool", x, Window::new(3, 2, 1))?;
        }
        for (stage, &width) in self.widths.iter().enumerate() {
            for block in 0..self.blocks {
                let name = format!("layers.{}", stage * self.blocks + block);
                x = self.block(&mut g, &name, x, width, if stage > 0 && block == 0 { 2 } else { 1 })?;
            }
        }
        let x = g.global_average_pool("features", x)?;
        g.linear("fc", x, classes, true)?;
        Ok(g)
    }

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
        let sum = g.add(&format!("{name}.add"), y, shortcut)?;
        g.activation(&format!("{name}.relu2"), sum, Relu)
    }

    fn normalise(&self, g: &mut Graph, name: &str, x: NodeId) -> Result<NodeId> {
        match self.norm {
            Norm::Batch => g.batch_norm(name, x),
            Norm::Group(groups) => g.group_norm(name, x, groups),
        }
    }
}

/// A multi-layer perceptron with ReLU between layers `fc1`, `fc2`, …; images are flattened first.
///
/// # Errors
/// If a layer is empty.
pub fn mlp(input: Shape, hidden: &[usize], classes: usize) -> Result<Graph> {
    let mut g = Graph::new(input);
    let mut x = g.input();
    if input.pixels() > 1 {
        x = g.flatten("flatten", x)?;
    }
    for (i, &width) in hidden.iter().enumerate() {
        x = g.linear(&format!("fc{}", i + 1), x, width, true)?;
        x = g.activation(&format!("relu{}", i + 1), x, Relu)?;
    }
    g.linear(&format!("fc{}", hidden.len() + 1), x, classes, true)?;
    Ok(g)
}

/// The network of the pfl-research CIFAR-10 benchmark, with the channels of its two convolutions and its hidden layer.
///
/// # Errors
/// If the images are too small.
pub fn cnn(input: Shape, channels: [usize; 2], hidden: usize, classes: usize) -> Result<Graph> {
    let mut g = Graph::new(input);
    let x = g.conv2d("conv1", g.input(), channels[0], Window::new(3, 1, 0), true)?;
    let x = g.activation("relu1", x, Relu)?;
    let x = g.conv2d("conv2", x, channels[1], Window::new(3, 1, 0), true)?;
    let x = g.activation("relu2", x, Relu)?;
    let x = g.max_pool("pool", x, Window::new(2, 2, 0))?;
    let x = g.dropout("dropout1", x, 0.25)?;
    let x = g.flatten("flatten", x)?;
    let x = g.linear("fc1", x, hidden, true)?;
    let x = g.activation("relu3", x, Relu)?;
    let x = g.dropout("dropout2", x, 0.5)?;
    g.linear("fc2", x, classes, true)?;
    Ok(g)
}

/// A network that can be asked for by name.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// What users type.
    pub name: &'static str,
    /// One line about it.
    pub about: &'static str,
    build: fn(Shape, usize, Norm) -> Result<Graph>,
}

/// All networks that have a name.
pub const CATALOGUE: &[Entry] = &[
    Entry { name: "mlp", about: "perceptron with two hidden layers of 100", build: |s, c, _| mlp(s, &[100, 100], c) },
    Entry {
        name: "cnn",
        about: "two convolutions, two linear layers: the pfl-research benchmark",
        build: |s, c, _| cnn(s, [32, 64], 128, c),
    },
    Entry {
        name: "resnet8",
        about: "the paper's ResNet-8: 64-128-256, max-pool after the stem",
        build: |s, c, norm| resnet(&[64, 128, 256], 1, true, norm, s, c),
    },
    Entry {
        name: "resnet8-thin",
        about: "16-32-64 without the pool: quick studies on CPUs",
        build: |s, c, norm| resnet(&[16, 32, 64], 1, false, norm, s, c),
    },
    Entry {
        name: "resnet10",
        about: "64-128-256-512: what the paper's code calls ResNet-8",
        build: |s, c, norm| resnet(&[64, 128, 256, 512], 1, true, norm, s, c),
    },
    Entry {
        name: "resnet18",
        about: "64-128-256-512, two blocks a stage",
        build: |s, c, norm| resnet(&[64, 128, 256, 512], 2, true, norm, s, c),
    },
];

fn resnet(widths: &[usize], blocks: usize, stem_pool: bool, norm: Norm, input: Shape, classes: usize) -> Result<Graph> {
    ResNet { widths, blocks, stem_pool, norm }.build(input, classes)
}

/// The network of a name.
///
/// ```
/// use fedproj_nn::{Shape, models};
///
/// let graph = models::build("resnet8", Shape::image(32, 32, 3), 10, models::Norm::Batch)?;
/// assert_eq!(graph.params().len(), 1_227_594);
/// # Ok::<(), fedproj_nn::Error>(())
/// ```
///
/// # Errors
/// If there is no such network, with the nearest name; or if it cannot take such images.
pub fn build(name: &str, input: Shape, classes: usize, norm: Norm) -> Result<Graph> {
    if let Some(entry) = CATALOGUE.iter().find(|entry| entry.name == name) {
        return (entry.build)(input, classes, norm);
    }
    let names: Vec<&str> = CATALOGUE.iter().map(|entry| entry.name).collect();
    // Hyphens count least: `resnet-8` means `resnet8`, not `resnet18`.
    let plain = |s: &str| s.replace(['-', '_'], "").to_lowercase();
    let distance = |known: &str| (edit_distance(&plain(name), &plain(known)), edit_distance(name, known));
    let nearest = names.iter().map(|known| (distance(known), *known)).min();
    let hint = nearest.filter(|((letters, _), _)| *letters <= 2).map(|(_, known)| known.to_owned());
    Err(Error::UnknownModel { name: name.into(), known: names.join(", "), hint })
}

/// Insertions, deletions and replacements that turn `a` into `b`.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_counts_are_those_of_the_paper_and_the_benchmarks() {
        let count = |name| build(name, Shape::image(32, 32, 3), 10, Norm::Batch).map(|g| g.params().len()).unwrap();
        assert_eq!(count("cnn"), 1_626_442);
        assert_eq!(count("resnet8"), 1_227_594);
        assert_eq!(count("resnet8-thin"), 78_042);
        assert_eq!(count("resnet10"), 4_903_242);
        assert_eq!(count("resnet18"), 11_173_962);
    }

    #[test]
    fn an_unknown_name_gets_the_nearest_one() {
        let error = build("resnet-8", Shape::image(32, 32, 3), 10, Norm::Batch).unwrap_err().to_string();
        assert!(error.contains("unknown model `resnet-8`") && error.contains("did you mean `resnet8`?"), "{error}");
        let error = build("transformer", Shape::vector(4), 2, Norm::Batch).unwrap_err().to_string();
        assert!(error.contains("known models: mlp, cnn") && !error.contains("hint"), "{error}");
    }
}
