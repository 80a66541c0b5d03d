//! Small graphs of odd shapes. Together they have every operation.

use fedproj_nn::{Activation, Graph, NodeId, Result, Shape, Window};

/// A graph, the nodes with a loss besides the output, and the batch size.
pub struct Net {
    pub name: String,
    pub graph: Graph,
    pub taps: Vec<NodeId>,
    pub batch: usize,
    /// The numbers of words and types, if it reads texts.
    pub words: Option<(u32, u32)>,
}

impl Net {
    pub fn new(name: impl Into<String>, graph: Graph, batch: usize) -> Self {
        Self { name: name.into(), graph, taps: Vec::new(), batch, words: None }
    }

    pub fn tapped(mut self, names: &[&str]) -> Self {
        self.taps = names.iter().filter_map(|name| self.graph.find(name)).collect();
        self
    }

    /// Whether it has running statistics.
    pub fn has_batch_norm(&self) -> bool {
        !self.graph.buffers().is_empty()
    }
}

/// All of them.
pub fn all() -> Result<Vec<Net>> {
    let mut nets = convolutions()?;
    nets.extend([
        Net::new("perceptron", perceptron(&[13, 5, 8, 3], true)?, 11),
        Net::new("perceptron without bias", perceptron(&[6, 33, 4], false)?, 130),
        Net::new("perceptron of one sample", perceptron(&[20, 16, 5], true)?, 1),
        Net::new("wide layers", wide()?, 12),
        Net::new("activations", activations()?, 9).tapped(&["gelu", "input"]),
        Net::new("dropout", dropout()?, 10),
        Net::new("batch-norm of vectors", vectors(18)?, 12),
        Net::new("batch-norm of wide vectors", vectors(1028)?, 8),
        Net::new("a normalised node added to itself", own_residual()?, 9).tapped(&["sum"]),
        Net::new("a node added to itself", twice()?, 9).tapped(&["twice"]),
    ]);
    for (window, name) in [
        (Window::new(3, 1, 1), "overlapping"),
        (Window::new(3, 2, 1), "of the stem"),
        (Window::new(2, 2, 0), "side by side"),
        (Window::new(4, 3, 2), "padded by two"),
        (Window::new(2, 3, 0), "with gaps"),
    ] {
        nets.push(Net::new(format!("max-pool {name}"), pool(window)?, 7).tapped(&["pool"]));
    }
    for (channels, groups) in [(16, 4), (10, 2), (20, 1), (64, 8)] {
        let name = format!("group-norm of {channels} channels");
        nets.push(Net::new(name, residual(channels, Some(groups))?, 6));
    }
    for channels in [9, 64] {
        let name = format!("standardised convolutions to {channels} channels");
        nets.push(Net::new(name, standardized(channels)?, 5).tapped(&["conv1"]));
    }
    for channels in [4, 5, 16, 20] {
        nets.push(Net::new(format!("residual block of {channels} channels"), residual(channels, None)?, 9));
        // Nodes that are observed are not fused with what follows.
        let name = format!("tapped residual block of {channels} channels");
        nets.push(Net::new(name, residual(channels, None)?, 9).tapped(&["norm1", "add", "relu2"]));
    }
    Ok(nets)
}

/// One convolution of each kind behind another one, so that it needs the gradient of its input.
fn convolutions() -> Result<Vec<Net>> {
    let mut nets = Vec::new();
    // kernel, stride, padding; channels in and out; height and width; bias; batch
    let cases = [
        ((1, 1, 0), (1, 3), (5, 4), true, 8),
        ((1, 2, 0), (4, 5), (7, 6), false, 17),
        ((1, 3, 1), (5, 4), (6, 7), true, 3),
        ((2, 1, 0), (3, 4), (5, 5), true, 1),
        ((2, 2, 1), (5, 16), (6, 7), false, 17),
        ((3, 1, 1), (3, 16), (8, 8), false, 17),
        ((3, 1, 0), (16, 16), (5, 9), true, 17),
        ((3, 2, 1), (16, 20), (7, 5), true, 9),
        ((3, 3, 0), (20, 4), (9, 8), true, 5),
        ((3, 3, 2), (4, 64), (7, 7), false, 9),
        ((5, 1, 2), (4, 64), (6, 6), true, 17),
        ((5, 3, 2), (5, 20), (7, 9), false, 9),
        ((3, 1, 1), (64, 130), (6, 6), true, 17),
        ((3, 2, 1), (130, 64), (5, 5), false, 9),
        ((3, 1, 1), (64, 256), (8, 8), false, 33),
        ((1, 1, 0), (64, 64), (1, 1), true, 17),
        ((3, 1, 1), (20, 16), (1, 1), false, 5),
    ];
    for ((kernel, stride, padding), (from, to), (h, w), bias, batch) in cases {
        let mut g = Graph::new(Shape::image(h, w, from));
        let x = g.conv2d("before", g.input(), from, Window::new(3, 1, 1), true)?;
        let x = g.activation("tanh", x, Activation::Tanh)?;
        let x = g.conv2d("conv", x, to, Window::new(kernel, stride, padding), bias)?;
        // Among many values a few are so near a kink that rounding decides their side.
        let is_large = batch * to * h * w > 20_000;
        let x = g.activation("after", x, if is_large { Activation::Tanh } else { Activation::Relu })?;
        let x = g.flatten("flatten", x)?;
        g.linear("classes", x, 5, bias)?;
        let name = format!("convolution {kernel}×{kernel} by {stride} + {padding}, {from} → {to} on {h}×{w}");
        nets.push(Net::new(name.clone(), g.clone(), batch));
        if from < 20 {
            nets.push(Net::new(format!("tapped {name}"), g, batch).tapped(&["input", "conv"]));
        }
    }
    Ok(nets)
}

/// Convolutions of 3×3 and of 1×1, of stride 1 and 2, with many channels, or from an image to many, on images of several
/// sizes.
pub fn square_convolutions() -> Result<Vec<Net>> {
    let mut nets = Vec::new();
    let (shifted, halved, single) = (Window::new(3, 1, 1), Window::new(3, 2, 1), Window::new(1, 2, 0));
    // window; channels in, between and out; height and width; batch
    let cases = [
        (shifted, (64, 64, 64), (16, 16), 64),
        (shifted, (64, 128, 64), (8, 8), 33),
        (shifted, (128, 256, 128), (4, 4), 64),
        (shifted, (64, 192, 64), (7, 16), 5),
        (shifted, (128, 64, 64), (16, 5), 3),
        (shifted, (3, 64, 64), (32, 32), 9),
        (shifted, (1, 128, 64), (9, 7), 5),
        (shifted, (64, 512, 256), (2, 2), 64),
        (halved, (64, 128, 256), (16, 16), 33),
        (halved, (128, 192, 64), (8, 8), 7),
        (halved, (64, 64, 128), (32, 12), 5),
        (single, (64, 128, 64), (16, 16), 9),
    ];
    for (window, (from, between, to), (h, w), batch) in cases {
        let mut g = Graph::new(Shape::image(h, w, from));
        let x = g.conv2d("conv1", g.input(), between, window, true)?;
        let x = g.activation("tanh1", x, Activation::Tanh)?;
        let x = g.conv2d("conv2", x, to, window, false)?;
        let x = g.activation("tanh2", x, Activation::Tanh)?;
        let x = g.flatten("flatten", x)?;
        g.linear("classes", x, 12, true)?;
        let (kernel, stride) = (window.kernel, window.stride);
        let name = format!("{kernel}×{kernel} convolutions {from} → {between} → {to} by {stride} on {h}×{w}");
        // An observed image is not padded to four channels, which the kernel of a first layer needs.
        nets.push(Net::new(name, g, batch).tapped(if from < 64 { &[] } else { &["input"] }));
    }
    Ok(nets)
}

/// First layers of images with the max-pool that follows them.
pub fn first_layers() -> Result<Vec<Net>> {
    // height and width; channels of the image and of the layer; batch
    let net = |((h, w), channels, between, batch): ((usize, usize), usize, usize, usize)| {
        let mut g = Graph::new(Shape::image(h, w, channels));
        let x = g.conv2d("conv", g.input(), between, Window::new(3, 1, 1), false)?;
        let x = g.batch_norm("norm", x)?;
        let x = g.activation("relu", x, Activation::Relu)?;
        let x = g.max_pool("pool", x, Window::new(3, 2, 1))?;
        let x = g.flatten("flatten", x)?;
        g.linear("classes", x, 12, true)?;
        let name = format!("convolution {channels} → {between} with a max-pool on {h}×{w}");
        Ok(Net::new(name, g, batch))
    };
    // The first has more images than a large GPU runs blocks. The fifth has a sum of one part.
    let cases = [
        ((32, 32), 3, 64, 200),
        ((16, 16), 1, 128, 5),
        ((28, 28), 3, 64, 4),
        ((16, 8), 4, 192, 7),
        ((2, 64), 3, 64, 3),
        ((24, 16), 2, 64, 3),
    ];
    cases.into_iter().map(net).collect()
}

fn perceptron(widths: &[usize], bias: bool) -> Result<Graph> {
    let mut g = Graph::new(Shape::vector(widths[0]));
    let mut x = g.input();
    for (i, &width) in widths[1..].iter().enumerate() {
        x = g.linear(&format!("fc{i}"), x, width, bias)?;
        if i + 2 < widths.len() {
            x = g.activation(&format!("relu{i}"), x, Activation::Relu)?;
        }
    }
    Ok(g)
}

/// More columns than a block has threads.
fn wide() -> Result<Graph> {
    let mut g = Graph::new(Shape::vector(37));
    let x = g.linear("odd", g.input(), 301, true)?;
    let x = g.activation("tanh1", x, Activation::Tanh)?;
    let x = g.linear("even", x, 1032, true)?;
    let x = g.activation("tanh2", x, Activation::Tanh)?;
    g.linear("classes", x, 10, true)?;
    Ok(g)
}

fn activations() -> Result<Graph> {
    let mut g = Graph::new(Shape::image(3, 5, 7));
    let x = g.activation("gelu", g.input(), Activation::Gelu)?;
    let x = g.conv2d("conv", x, 6, Window::new(2, 1, 0), true)?;
    let x = g.activation("tanh", x, Activation::Tanh)?;
    let x = g.conv2d("conv2", x, 9, Window::new(1, 1, 0), true)?;
    let relu = g.activation("relu", x, Activation::Relu)?;
    // Read twice: directly and through the ReLU.
    let x = g.add("add", x, relu)?;
    let x = g.global_average_pool("mean", x)?;
    g.linear("classes", x, 4, true)?;
    Ok(g)
}

fn dropout() -> Result<Graph> {
    let mut g = Graph::new(Shape::image(4, 5, 3));
    let x = g.dropout("drop1", g.input(), 0.2)?;
    let x = g.conv2d("conv", x, 9, Window::new(3, 1, 1), true)?;
    let x = g.activation("relu", x, Activation::Relu)?;
    let x = g.dropout("drop2", x, 0.5)?;
    let x = g.flatten("flatten", x)?;
    let x = g.dropout("drop3", x, 0.0)?;
    g.linear("classes", x, 6, true)?;
    Ok(g)
}

fn vectors(width: usize) -> Result<Graph> {
    let mut g = Graph::new(Shape::vector(9));
    let x = g.linear("fc", g.input(), width, false)?;
    let x = g.batch_norm("norm", x)?;
    let x = g.activation("gelu", x, Activation::Gelu)?;
    g.linear("classes", x, 4, true)?;
    Ok(g)
}

fn own_residual() -> Result<Graph> {
    let mut g = Graph::new(Shape::image(4, 4, 8));
    let x = g.conv2d("conv", g.input(), 12, Window::new(3, 1, 1), false)?;
    let y = g.batch_norm("norm", x)?;
    let x = g.add("sum", y, x)?;
    let x = g.activation("relu", x, Activation::Relu)?;
    let x = g.global_average_pool("mean", x)?;
    g.linear("classes", x, 3, true)?;
    Ok(g)
}

fn twice() -> Result<Graph> {
    let mut g = Graph::new(Shape::vector(10));
    let x = g.linear("fc", g.input(), 7, true)?;
    let x = g.add("twice", x, x)?;
    let x = g.activation("tanh", x, Activation::Tanh)?;
    g.linear("classes", x, 3, false)?;
    Ok(g)
}

fn pool(window: Window) -> Result<Graph> {
    let mut g = Graph::new(Shape::image(9, 7, 3));
    let x = g.conv2d("conv", g.input(), 5, Window::new(3, 1, 1), true)?;
    let x = g.activation("tanh", x, Activation::Tanh)?;
    let x = g.max_pool("pool", x, window)?;
    let x = g.flatten("flatten", x)?;
    g.linear("classes", x, 4, true)?;
    Ok(g)
}

/// Of a stem, of 3×3 and stride 1 (Winograd's, and Hopper's for 64 channels) and of another stride, with and without bias.
pub fn standardized(channels: usize) -> Result<Graph> {
    let mut g = Graph::new(Shape::image(12, 9, 3));
    let x = g.standardized_conv2d("conv1", g.input(), channels, Window::new(3, 1, 1), false)?;
    let x = g.group_norm("norm1", x, 1)?;
    let x = g.activation("relu1", x, Activation::Relu)?;
    let x = g.standardized_conv2d("conv2", x, channels, Window::new(3, 1, 1), true)?;
    let x = g.activation("relu2", x, Activation::Relu)?;
    let x = g.standardized_conv2d("conv3", x, channels, Window::new(2, 2, 0), false)?;
    let x = g.group_norm("norm3", x, 1)?;
    let x = g.global_average_pool("mean", x)?;
    g.linear("classes", x, 4, true)?;
    Ok(g)
}

/// A stem, a residual block with a convolution in its shortcut, and one without.
fn residual(channels: usize, groups: Option<usize>) -> Result<Graph> {
    let norm = |g: &mut Graph, name: &str, x| match groups {
        Some(groups) => g.group_norm(name, x, groups),
        None => g.batch_norm(name, x),
    };
    let mut g = Graph::new(Shape::image(8, 7, 3));
    let x = g.conv2d("stem", g.input(), channels, Window::new(3, 1, 1), false)?;
    let x = norm(&mut g, "norm1", x)?;
    let x = g.activation("relu1", x, Activation::Relu)?;
    let x = g.max_pool("pool", x, Window::new(3, 2, 1))?;
    let y = g.conv2d("conv2", x, channels, Window::new(3, 2, 1), false)?;
    let y = norm(&mut g, "norm2", y)?;
    let shortcut = g.conv2d("shortcut", x, channels, Window::new(1, 2, 0), false)?;
    let shortcut = norm(&mut g, "norm3", shortcut)?;
    let x = g.add("add", y, shortcut)?;
    let x = g.activation("relu2", x, Activation::Relu)?;
    let y = g.conv2d("conv4", x, channels, Window::new(3, 1, 1), false)?;
    let y = norm(&mut g, "norm4", y)?;
    let x = g.add("add2", y, x)?;
    let x = g.activation("relu3", x, Activation::Relu)?;
    let x = g.global_average_pool("mean", x)?;
    g.linear("classes", x, 10, true)?;
    Ok(g)
}
