//! A network as a static graph: nodes with known shapes, parameters as named spans of one flat vector.

mod exit;
mod op;
mod products;
mod shape;
mod tail;
mod text;

use crate::error::{Error, Result};
use crate::kernels::Activation;
use crate::kernels::conv::Conv;
use crate::kernels::pool::MaxPool;
use crate::layout::{Init, Layout, Role, Storage};
use std::ops::Range;

pub(crate) use op::{Node, Norm, Op, Saved};
pub use products::Product;
pub use shape::{Shape, Window};
pub use tail::Tail;
pub use text::Tables;

/// A node of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeId(pub(crate) usize);

/// ε of batch- and group-norm, and the weight of a new batch in the running statistics: PyTorch's defaults.
pub(crate) const NORM_EPS: f32 = 1e-5;
pub(crate) const NORM_MOMENTUM: f32 = 0.1;

/// A network. Nodes run in the order in which they were added; the last one is the output.
///
/// ```
/// use fedproj_nn::{Activation, Graph, Shape};
///
/// let mut graph = Graph::new(Shape::vector(4));
/// let hidden = graph.linear("fc1", graph.input(), 16, true)?;
/// let hidden = graph.activation("relu", hidden, Activation::Relu)?;
/// graph.linear("fc2", hidden, 3, true)?;
/// assert_eq!(graph.params().len(), 4 * 16 + 16 + 16 * 3 + 3);
/// assert_eq!(graph.params().spans()[0].name, "fc1.weight");
/// # Ok::<(), fedproj_nn::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    pub(crate) nodes: Vec<Node>,
    params: Layout,
    buffers: Layout,
    features: Option<NodeId>,
    levels: Vec<NodeId>,
}

impl Graph {
    /// A graph with an input and nothing else.
    pub fn new(input: Shape) -> Self {
        let (params, buffers) = (Layout::default(), Layout::default());
        let mut graph = Self { nodes: Vec::new(), params, buffers, features: None, levels: Vec::new() };
        graph.push("input", Op::Input, &[], input);
        graph
    }

    /// The input node.
    pub fn input(&self) -> NodeId {
        NodeId(0)
    }

    /// The node added last.
    pub fn output(&self) -> NodeId {
        NodeId(self.nodes.len() - 1)
    }

    /// Finds a node by its name.
    pub fn find(&self, name: &str) -> Option<NodeId> {
        self.nodes.iter().position(|node| node.name == name).map(NodeId)
    }

    /// A node's name.
    pub fn name(&self, node: NodeId) -> &str {
        &self.nodes[node.0].name
    }

    /// The shape of one sample at a node.
    pub fn shape(&self, node: NodeId) -> Shape {
        self.nodes[node.0].shape
    }

    /// Names of all nodes, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.nodes.iter().map(|node| node.name.as_str())
    }

    /// The input of the classifier, or of a projection head before it. Feature distillation compares it.
    pub fn features(&self) -> Option<NodeId> {
        self.features
    }

    /// Marks [`Graph::features`].
    pub fn mark_features(&mut self, node: NodeId) {
        self.features = Some(node);
    }

    /// The outputs of the network's stages, each before its last activation. The stem comes first.
    pub fn levels(&self) -> &[NodeId] {
        &self.levels
    }

    /// Adds to [`Graph::levels`].
    pub fn mark_level(&mut self, node: NodeId) {
        self.levels.push(node);
    }

    /// The trainable parameters.
    pub fn params(&self) -> &Layout {
        &self.params
    }

    /// State without gradients: the running statistics of batch-norm.
    pub fn buffers(&self) -> &Layout {
        &self.buffers
    }

    /// A batch-norm that sees one value per sample and channel, so that it cannot train on one sample.
    pub fn single_valued_norm(&self) -> Option<NodeId> {
        self.nodes.iter().position(|node| node.op == Op::BatchNorm && node.shape.pixels() == 1).map(NodeId)
    }

    /// The parameters of batch-norm, in order.
    pub fn batch_norms(&self) -> impl Iterator<Item = Range<usize>> {
        let norms = self.nodes.iter().filter(|node| node.op == Op::BatchNorm);
        norms.flat_map(|node| node.params.clone()).filter(|range| !range.is_empty())
    }

    /// Initial parameters, a function of the seed and the parameters' names.
    pub fn init_params(&self, seed: u64, init: Init) -> Vec<f32> {
        self.params.init(seed, init)
    }

    /// Initial buffers.
    pub fn init_buffers(&self) -> Vec<f32> {
        self.buffers.init(0, Init::Torch)
    }

    /// Floating-point operations of one sample's forward pass, for the plain algorithm and texts of full length.
    pub fn flops_forward(&self) -> usize {
        self.nodes.iter().map(Node::flops).sum()
    }

    /// The same for a whole training step: forward pass and both gradients, without the gradient of the input.
    pub fn flops_training(&self) -> usize {
        let reads_input = |node: &&Node| node.inputs.first() == Some(&self.input());
        3 * self.flops_forward() - self.nodes.iter().filter(reads_input).map(Node::flops).sum::<usize>()
    }

    /// The node whose memory a node uses: a flattened image is the image itself.
    pub(crate) fn owner(&self, mut node: usize) -> usize {
        while self.nodes[node].op == Op::Flatten {
            node = self.nodes[node].inputs[0].0;
        }
        node
    }

    /// Layers with parameters call this before they claim spans, so that a failure leaves nothing behind.
    fn check_name(&self, name: &str) -> Result<()> {
        require(name, self.find(name).is_none(), || "a node of this name exists already; names must be unique".into())
    }

    /// As [`Graph::check_name`], for layers that cannot read tokens.
    fn check_image(&self, name: &str, x: NodeId) -> Result<()> {
        let problem = || format!("cannot read the tokens of `{}`; pool them first", self.name(x));
        require(name, !self.nodes[x.0].packed, problem)?;
        self.check_name(name)
    }

    fn add_node(&mut self, name: &str, op: Op, inputs: &[NodeId], shape: Shape) -> Result<NodeId> {
        self.check_name(name)?;
        Ok(self.push(name, op, inputs, shape))
    }

    fn push(&mut self, name: &str, op: Op, inputs: &[NodeId], shape: Shape) -> NodeId {
        let packed = op.facts(inputs.first().is_some_and(|x| self.nodes[x.0].packed)).packed;
        let (params, buffers) = Default::default();
        self.nodes.push(Node { name: name.into(), op, inputs: inputs.to_vec(), shape, packed, params, buffers });
        self.output()
    }

    /// A node whose parameters have just been claimed.
    fn add_layer(&mut self, name: &str, op: Op, x: NodeId, shape: Shape, params: [Range<usize>; 3]) -> Result<NodeId> {
        let node = self.add_node(name, op, &[x], shape)?;
        self.nodes[node.0].params = params;
        Ok(node)
    }

    /// The weight and bias of a normalisation of the channels of `x`.
    fn scale_and_shift(&mut self, name: &str, x: NodeId) -> [Range<usize>; 3] {
        let (channels, storage) = (self.shape(x).c, self.per_channel(x));
        let mut span = |suffix: &str, role| self.params.push(format!("{name}.{suffix}"), vec![channels], storage, role);
        [span("weight", Role::Scale), span("bias", Role::Shift), 0..0]
    }

    /// How many windows fit along one side.
    fn windows(node: &str, side: usize, w: Window) -> Result<usize> {
        let problem = if w.kernel == 0 || w.stride == 0 {
            format!("kernel {} and stride {} must be at least 1", w.kernel, w.stride)
        } else if side + 2 * w.padding < w.kernel {
            format!("a kernel of {} does not fit an image of {side} with padding {}", w.kernel, w.padding)
        } else {
            return Ok((side + 2 * w.padding - w.kernel) / w.stride + 1);
        };
        Err(Error::shape(node, problem))
    }

    /// A convolution to `channels` channels; parameters `name.weight` and, if asked, `name.bias`.
    ///
    /// # Errors
    /// If the kernel does not fit the image, there is no output channel, or the name is taken.
    pub fn conv2d(&mut self, name: &str, x: NodeId, channels: usize, window: Window, bias: bool) -> Result<NodeId> {
        self.convolution(name, x, channels, window, bias, Op::Conv)
    }

    /// A convolution by ŵ = (w − mean) / √(variance + ε), taken over the weights of each output channel (Qiao et al. 2019,
    /// arXiv:1903.10520). It replaces [`Graph::conv2d`] before a [`Graph::group_norm`]; parameters are the same.
    ///
    /// # Errors
    /// As [`Graph::conv2d`].
    pub fn standardized_conv2d(
        &mut self,
        name: &str,
        x: NodeId,
        channels: usize,
        window: Window,
        bias: bool,
    ) -> Result<NodeId> {
        self.convolution(name, x, channels, window, bias, Op::StandardizedConv)
    }

    fn convolution(
        &mut self,
        name: &str,
        x: NodeId,
        channels: usize,
        window: Window,
        bias: bool,
        op: fn(Conv) -> Op,
    ) -> Result<NodeId> {
        self.check_image(name, x)?;
        let from = self.shape(x);
        require(name, channels > 0, || "needs at least one output channel".into())?;
        let (ho, wo) = (Self::windows(name, from.h, window)?, Self::windows(name, from.w, window)?);
        let Window { kernel, stride, padding } = window;
        let geometry = Conv { h: from.h, w: from.w, ci: from.c, ho, wo, co: channels, kernel, stride, padding };
        let taps = kernel * kernel;
        let role = Role::Weight { fan_in: taps * from.c, fan_out: taps * channels };
        let storage = Storage::ChannelsLast { outer: channels, channels: from.c, spatial: taps };
        let weight = self.params.push(format!("{name}.weight"), vec![channels, from.c, kernel, kernel], storage, role);
        let role = Role::ConvBias { fan_in: taps * from.c };
        let bias = bias.then(|| self.params.push(format!("{name}.bias"), vec![channels], Storage::Plain, role));
        let params = [weight, bias.unwrap_or_default(), 0..0];
        self.add_layer(name, op(geometry), x, Shape::image(ho, wo, channels), params)
    }

    /// A fully connected layer to `outputs` features, applied to each token if the input has tokens. Parameters `name.weight`
    /// and, if asked, `name.bias`.
    ///
    /// # Errors
    /// If the input is an image, there is no output, or the name is taken.
    pub fn linear(&mut self, name: &str, x: NodeId, outputs: usize, bias: bool) -> Result<NodeId> {
        self.check_name(name)?;
        let from = self.shape(x);
        let packed = self.nodes[x.0].packed;
        let problem = || format!("expects a vector but `{}` gives an image {from}; flatten it first", self.name(x));
        require(name, from.pixels() == 1 || packed, problem)?;
        require(name, outputs > 0, || "needs at least one output".into())?;
        let image = self.flattened(x);
        let storage = Storage::ChannelsLast { outer: outputs, channels: image.c, spatial: image.pixels() };
        let role = Role::Weight { fan_in: from.c, fan_out: outputs };
        let weight = self.params.push(format!("{name}.weight"), vec![outputs, from.c], storage, role);
        let role = Role::LinearBias { fan_in: from.c };
        let bias = bias.then(|| self.params.push(format!("{name}.bias"), vec![outputs], Storage::Plain, role));
        let params = [weight, bias.unwrap_or_default(), 0..0];
        self.add_layer(name, Op::Linear, x, Shape { c: outputs, ..from }, params)
    }

    /// The image whose pixels a vector holds, channels-last here and channels-first in PyTorch. A vector of its own is an
    /// image of one pixel.
    fn flattened(&self, mut x: NodeId) -> Shape {
        let vector = Shape::vector(self.shape(x).c);
        while self.nodes[x.0].op.facts(self.nodes[x.0].packed).keeps_layout {
            x = self.nodes[x.0].inputs[0];
        }
        match self.nodes[x.0].op {
            Op::Flatten => self.shape(self.nodes[x.0].inputs[0]),
            _ => vector,
        }
    }

    /// The order of one value per channel of `x`.
    fn per_channel(&self, x: NodeId) -> Storage {
        let image = self.flattened(x);
        Storage::ChannelsLast { outer: 1, channels: image.c, spatial: image.pixels() }
    }

    /// Batch normalisation; parameters `name.weight`, `name.bias`, buffers `name.running_mean`, `name.running_var`.
    ///
    /// # Errors
    /// If the name is taken.
    pub fn batch_norm(&mut self, name: &str, x: NodeId) -> Result<NodeId> {
        self.check_image(name, x)?;
        let shape = self.shape(x);
        let storage = self.per_channel(x);
        let mut buffer =
            |suffix: &str, role| self.buffers.push(format!("{name}.{suffix}"), vec![shape.c], storage, role);
        let buffers = [buffer("running_mean", Role::Shift), buffer("running_var", Role::Scale)];
        let params = self.scale_and_shift(name, x);
        let node = self.add_layer(name, Op::BatchNorm, x, shape, params)?;
        self.nodes[node.0].buffers = buffers;
        Ok(node)
    }

    /// Group normalisation; parameters `name.weight` and `name.bias`.
    ///
    /// # Errors
    /// If the groups do not divide the channels, the input is a flattened image, or the name is taken.
    pub fn group_norm(&mut self, name: &str, x: NodeId, groups: usize) -> Result<NodeId> {
        self.check_image(name, x)?;
        let shape = self.shape(x);
        check_cut(name, shape.c, groups, "groups")?;
        let image = self.flattened(x);
        let problem = || "the groups of a flattened image are not PyTorch's; normalise before it is flattened".into();
        require(name, groups == 1 || image.pixels() == 1 || image.c == 1, problem)?;
        let params = self.scale_and_shift(name, x);
        self.add_layer(name, Op::GroupNorm { groups }, x, shape, params)
    }

    /// An activation function.
    ///
    /// # Errors
    /// If the name is taken.
    pub fn activation(&mut self, name: &str, x: NodeId, f: Activation) -> Result<NodeId> {
        self.add_node(name, Op::Activation(f), &[x], self.shape(x))
    }

    /// The maximum of each window. Padding never wins.
    ///
    /// # Errors
    /// If the window does not fit the image, or the name is taken.
    pub fn max_pool(&mut self, name: &str, x: NodeId, window: Window) -> Result<NodeId> {
        self.check_image(name, x)?;
        let from = self.shape(x);
        let problem = || format!("padding {} must be at most half of a kernel of at most 15", window.padding);
        require(name, 2 * window.padding <= window.kernel && window.kernel <= 15, problem)?;
        let (ho, wo) = (Self::windows(name, from.h, window)?, Self::windows(name, from.w, window)?);
        let Window { kernel, stride, padding } = window;
        let pool = MaxPool { h: from.h, w: from.w, c: from.c, ho, wo, kernel, stride, padding };
        self.add_node(name, Op::MaxPool(pool), &[x], Shape::image(ho, wo, from.c))
    }

    /// The mean over all pixels.
    ///
    /// # Errors
    /// If the name is taken.
    pub fn global_average_pool(&mut self, name: &str, x: NodeId) -> Result<NodeId> {
        self.check_image(name, x)?;
        self.add_node(name, Op::GlobalAveragePool, &[x], Shape::vector(self.shape(x).c))
    }

    /// The sum of two nodes of equal shape.
    ///
    /// # Errors
    /// If the shapes differ, or the name is taken.
    pub fn add(&mut self, name: &str, x: NodeId, y: NodeId) -> Result<NodeId> {
        let (a, b) = (self.shape(x), self.shape(y));
        let problem = || format!("cannot add `{}` of shape {a} and `{}` of shape {b}", self.name(x), self.name(y));
        require(name, a == b && self.nodes[x.0].packed == self.nodes[y.0].packed, problem)?;
        self.add_node(name, Op::Add, &[x, y], a)
    }

    /// An image as a vector.
    ///
    /// # Errors
    /// If the name is taken.
    pub fn flatten(&mut self, name: &str, x: NodeId) -> Result<NodeId> {
        self.check_image(name, x)?;
        self.add_node(name, Op::Flatten, &[x], Shape::vector(self.shape(x).len()))
    }

    /// Drops elements at random while training.
    ///
    /// # Errors
    /// If the rate is not in [0, 1), or the name is taken.
    pub fn dropout(&mut self, name: &str, x: NodeId, rate: f32) -> Result<NodeId> {
        check_rate(name, rate)?;
        self.add_node(name, Op::Dropout { rate }, &[x], self.shape(x))
    }
}

/// Refuses a node of this name unless a condition holds.
fn require(name: &str, holds: bool, problem: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::shape(name, problem())) }
}

fn check_cut(name: &str, channels: usize, parts: usize, what: &str) -> Result<()> {
    let problem = || format!("{channels} channels cannot be cut into {parts} equal {what}");
    require(name, parts > 0 && channels.is_multiple_of(parts), problem)
}

fn check_rate(name: &str, rate: f32) -> Result<()> {
    require(name, (0.0..1.0).contains(&rate), || format!("rate {rate} must lie in [0, 1)"))
}
