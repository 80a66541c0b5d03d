//! The oracle of the engine's tests: networks as plain descriptions, evaluated in double precision by loops that follow
//! the definitions word for word, and the finite differences that the engine's gradients are held against.
//!
//! A [`Net`] builds the engine's graph and evaluates itself from the same flat vectors. A [`Problem`] is a network with
//! weights, a batch and losses; [`check_gradients`] compares everything that can be compared.

#![allow(dead_code, reason = "each test file uses a part of it")]

use fedproj_nn::{
    Activation, Cpu, Direction, Dropout, EmbeddingId, Graph, Isa, Loss, LossTargets, Mode, NodeId, NormMode, Options,
    Role, Shape, Tables, Window, Workspace,
};
use fedproj_rng::{Purpose, Stream};
use std::collections::BTreeMap;

/// ε of the normalisations and the weight of a new batch in the running statistics, as the engine has them.
const EPS: f64 = 1e-5_f32 as f64;
const MOMENTUM: f64 = 0.1_f32 as f64;

/// One operation of a [`Net`].
#[derive(Clone, Copy, Debug)]
pub enum Layer {
    Conv {
        channels: usize,
        window: Window,
        bias: bool,
    },
    /// A convolution with standardised weights.
    StandardizedConv {
        channels: usize,
        window: Window,
        bias: bool,
    },
    Linear {
        outputs: usize,
        bias: bool,
    },
    BatchNorm,
    GroupNorm(usize),
    Activation(Activation),
    MaxPool(Window),
    GlobalAverage,
    /// The sum with another node.
    Add(usize),
    Flatten,
    Dropout(f32),
    /// From the input, a row of slots.
    Embedding(Tables),
    /// Layer normalisation.
    RowNorm(f32),
    SelfAttention {
        heads: usize,
    },
    FirstToken,
    MeanOfTokens,
}

pub fn conv(channels: usize, kernel: usize, stride: usize, padding: usize) -> Layer {
    Layer::Conv { channels, window: Window::new(kernel, stride, padding), bias: false }
}

pub fn conv_bias(channels: usize, kernel: usize, stride: usize, padding: usize) -> Layer {
    Layer::Conv { channels, window: Window::new(kernel, stride, padding), bias: true }
}

pub fn standardized_conv(channels: usize, kernel: usize, stride: usize, padding: usize) -> Layer {
    Layer::StandardizedConv { channels, window: Window::new(kernel, stride, padding), bias: false }
}

pub fn linear(outputs: usize) -> Layer {
    Layer::Linear { outputs, bias: true }
}

pub const RELU: Layer = Layer::Activation(Activation::Relu);
pub const TANH: Layer = Layer::Activation(Activation::Tanh);

/// A network: node 0 is the input, node i + 1 applies `layers[i].1` to node `layers[i].0`.
#[derive(Clone, Debug)]
pub struct Net {
    pub input: Shape,
    pub layers: Vec<(usize, Layer)>,
}

impl Net {
    pub fn new(input: Shape) -> Self {
        Self { input, layers: Vec::new() }
    }

    /// A chain of layers.
    pub fn chain(input: Shape, layers: &[Layer]) -> Self {
        layers.iter().fold(Self::new(input), |net, &layer| net.then(layer))
    }

    /// Applies a layer to the last node.
    pub fn then(self, layer: Layer) -> Self {
        let last = self.last();
        self.at(last, layer)
    }

    /// Applies a layer to any node.
    pub fn at(mut self, node: usize, layer: Layer) -> Self {
        self.layers.push((node, layer));
        self
    }

    pub fn last(&self) -> usize {
        self.layers.len()
    }

    /// Whether the value of a node is one row a token.
    fn has_tokens(&self, node: usize) -> bool {
        match node.checked_sub(1).map(|i| self.layers[i]) {
            None | Some((_, Layer::FirstToken | Layer::MeanOfTokens)) => false,
            Some((_, Layer::Embedding(_))) => true,
            Some((from, _)) => self.has_tokens(from),
        }
    }

    /// The tables of the embedding, if there is one.
    fn tables(&self) -> Option<Tables> {
        self.layers
            .iter()
            .find_map(|(_, layer)| if let Layer::Embedding(tables) = layer { Some(*tables) } else { None })
    }

    /// The engine's graph; node i is called `n<i>`.
    pub fn graph(&self) -> Graph {
        let mut g = Graph::new(self.input);
        let mut ids = vec![g.input()];
        for (i, &(x, layer)) in self.layers.iter().enumerate() {
            let (name, x) = (&format!("n{}", i + 1), ids[x]);
            let id = match layer {
                Layer::Conv { channels, window, bias } => g.conv2d(name, x, channels, window, bias),
                Layer::StandardizedConv { channels, window, bias } => {
                    g.standardized_conv2d(name, x, channels, window, bias)
                }
                Layer::Linear { outputs, bias } => g.linear(name, x, outputs, bias),
                Layer::BatchNorm => g.batch_norm(name, x),
                Layer::GroupNorm(groups) => g.group_norm(name, x, groups),
                Layer::Activation(f) => g.activation(name, x, f),
                Layer::MaxPool(window) => g.max_pool(name, x, window),
                Layer::GlobalAverage => g.global_average_pool(name, x),
                Layer::Add(other) => g.add(name, x, ids[other]),
                Layer::Flatten => g.flatten(name, x),
                Layer::Dropout(rate) => g.dropout(name, x, rate),
                Layer::Embedding(tables) => g.embedding(name, tables),
                Layer::RowNorm(eps) => g.layer_norm(name, x, eps),
                Layer::SelfAttention { heads } => g.self_attention(name, x, heads, 0.0),
                Layer::FirstToken => g.first_token(name, x),
                Layer::MeanOfTokens => g.mean_of_tokens(name, x),
            };
            ids.push(id.unwrap_or_else(|e| panic!("{self:?}: {e}")));
        }
        g
    }
}

/// The node of a graph made by [`Net::graph`].
pub fn id(graph: &Graph, node: usize) -> NodeId {
    if node == 0 { graph.input() } else { graph.find(&format!("n{node}")).expect("a node of the net") }
}

/// Which loss stands at a node; its target is drawn from the problem's seed.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    CrossEntropy,
    /// Cross-entropy with offsets; a class without a sample is left out, where there are three or more.
    Offset,
    /// A divergence over all classes but the label's.
    NotTrue {
        temperature: f32,
    },
    Kl {
        temperature: f32,
        direction: Direction,
        times_t_squared: bool,
    },
    /// Masked squares to positive targets, so that the mask leaves nothing out and the loss is smooth.
    Squared,
    /// Masked squares to targets of both signs. A value that changes its sign between the ends of a difference has no
    /// slope, so only for few values.
    Masked,
    /// Absolute differences, which have no slope where they vanish.
    Absolute,
}

/// A weighted loss at a node.
#[derive(Clone, Debug)]
pub struct Term {
    pub node: usize,
    pub kind: Kind,
    pub weight: f32,
    labels: Vec<u32>,
    target: Vec<f32>,
    embeddings: [Vec<f32>; 1],
    offsets: Vec<f32>,
}

impl Term {
    pub fn loss(&self) -> (Loss, LossTargets<'_>) {
        let targets = LossTargets {
            labels: &self.labels,
            logits: &self.target,
            features: &self.target,
            offsets: &self.offsets,
            embeddings: &self.embeddings,
            ..LossTargets::default()
        };
        let loss = match self.kind {
            Kind::CrossEntropy => Loss::CrossEntropy,
            Kind::Offset => Loss::OffsetCrossEntropy,
            Kind::NotTrue { temperature } => Loss::NotTrueKl { teacher: EmbeddingId(0), temperature },
            Kind::Squared | Kind::Masked => Loss::MaskedSquares,
            Kind::Absolute => Loss::AbsoluteError,
            Kind::Kl { temperature, direction, times_t_squared } => {
                Loss::Kl { temperature, direction, times_t_squared, only_marked: false }
            }
        };
        (loss, targets)
    }

    /// The same loss in double precision.
    fn exact(&self, batch: usize, z: &[f64]) -> f64 {
        let features = z.len() / batch;
        let target: Vec<f64> = self.target.iter().map(|&v| f64::from(v)).collect();
        let total: f64 = match self.kind {
            Kind::CrossEntropy => {
                let rows = z.chunks_exact(features).zip(&self.labels);
                rows.map(|(z, &label)| -log_softmax(z, 1.0)[label as usize]).sum()
            }
            Kind::Offset => {
                let rows = z.chunks_exact(features).zip(&self.labels);
                rows.map(|(z, &label)| {
                    let shifted: Vec<f64> = z.iter().zip(&self.offsets).map(|(z, b)| z + f64::from(*b)).collect();
                    -log_softmax(&shifted, 1.0)[label as usize]
                })
                .sum()
            }
            Kind::NotTrue { temperature } => {
                let rows = z.chunks_exact(features).zip(target.chunks_exact(features)).zip(&self.labels);
                rows.map(|((z, teacher), &label)| {
                    let others = |row: &[f64]| [&row[..label as usize], &row[label as usize + 1..]].concat();
                    let of = |row: &[f64]| log_softmax(&others(row), f64::from(temperature));
                    divergence(&of(teacher), &of(z))
                })
                .sum()
            }
            Kind::Squared | Kind::Masked => {
                let counted = z.iter().zip(&target).filter(|(z, t)| **z > 0.0 || **t > 0.0);
                counted.map(|(z, t)| (z - t).powi(2)).sum()
            }
            Kind::Absolute => z.iter().zip(&target).map(|(z, t)| (z - t).abs()).sum::<f64>() / features as f64,
            Kind::Kl { temperature, direction, times_t_squared } => {
                let t = f64::from(temperature);
                let rows = z.chunks_exact(features).zip(target.chunks_exact(features));
                let sum: f64 = rows
                    .map(|(z, teacher)| {
                        let (student, teacher) = (log_softmax(z, t), log_softmax(teacher, t));
                        match direction {
                            Direction::TeacherToStudent => divergence(&teacher, &student),
                            Direction::StudentToTeacher => divergence(&student, &teacher),
                        }
                    })
                    .sum();
                if times_t_squared { sum * t * t } else { sum }
            }
        };
        total / batch as f64
    }
}

/// KL between two distributions, given as logarithms.
fn divergence(p: &[f64], q: &[f64]) -> f64 {
    p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum()
}

fn log_softmax(z: &[f64], temperature: f64) -> Vec<f64> {
    let max = z.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b)) / temperature;
    let sum: f64 = z.iter().map(|z| (z / temperature - max).exp()).sum();
    z.iter().map(|z| z / temperature - max - sum.ln()).collect()
}

/// A network with weights, a batch and losses.
pub struct Problem {
    pub net: Net,
    pub graph: Graph,
    pub batch: usize,
    pub mode: Mode,
    pub terms: Vec<Term>,
    pub params: Vec<f32>,
    pub buffers: Vec<f32>,
    pub x: Vec<f32>,
    /// What dropout multiplies each element of a node by.
    pub masks: BTreeMap<usize, Vec<f64>>,
}

/// What the engine computed.
pub struct Run {
    pub loss: f64,
    pub output: Vec<f32>,
    pub grad: Vec<f32>,
    pub buffers: Vec<f32>,
    /// Value and gradient of each tap.
    pub values: Vec<Vec<f32>>,
    pub grads: Vec<Vec<f32>>,
}

/// The oracle's values of all nodes, and the buffers after the pass.
pub struct Values {
    pub nodes: Vec<Vec<f64>>,
    pub buffers: Vec<f64>,
}

pub fn stream(seed: u64) -> Stream {
    Stream::new(seed, Purpose::Synthetic, [0, 0, 0])
}

pub fn normals(s: &mut Stream, n: usize, mean: f64, std: f64) -> Vec<f32> {
    (0..n).map(|_| (mean + std * s.normal()) as f32).collect()
}

/// Rows of slots: the first text is as long as can be, the second has one token, the third none, the others any number.
pub fn texts(s: &mut Stream, batch: usize, slots: usize, tables: Tables) -> Vec<f32> {
    let mut x = vec![0.0; batch * slots];
    for (i, text) in x.chunks_exact_mut(slots).enumerate() {
        let n = [slots, 1, 0].get(i).copied().unwrap_or_else(|| 1 + s.below(slots as u32) as usize);
        let second = s.below(n as u32 + 1) as usize;
        for (at, slot) in text[..n].iter_mut().enumerate() {
            let kind = if tables.types == 2 && at >= second { 1.0 } else { 0.0 };
            *slot = 1.0 + 2.0 * s.below(tables.vocabulary as u32) as f32 + kind;
        }
    }
    x
}

pub fn mode(norm: NormMode) -> Mode {
    Mode { norm, dropout: Dropout::Off }
}

impl Problem {
    /// A problem whose losses (node, kind, weight), weights and batch are drawn from the seed.
    pub fn new(net: Net, batch: usize, norm: NormMode, terms: &[(usize, Kind, f32)], seed: u64) -> Self {
        let graph = net.graph();
        let mut s = stream(seed);
        let mut params = vec![0.0; graph.params().len()];
        for span in graph.params().spans() {
            let (mean, std) = match span.role {
                Role::Weight { fan_in, .. } => (0.0, 1.0 / (fan_in as f64).sqrt()),
                Role::Scale => (1.0, 0.3),
                _ => (0.0, 0.3),
            };
            params[span.range()].copy_from_slice(&normals(&mut s, span.len(), mean, std));
        }
        let mut buffers = normals(&mut s, graph.buffers().len(), 0.0, 0.3);
        for span in graph.buffers().spans().iter().filter(|span| span.role == Role::Scale) {
            buffers[span.range()].iter_mut().for_each(|v| *v = 0.5 + v.abs());
        }
        let x = match net.tables() {
            Some(tables) => texts(&mut s, batch, net.input.w, tables),
            None => normals(&mut s, batch * net.input.len(), 0.1, 1.0),
        };
        let terms = terms
            .iter()
            .map(|&(node, kind, weight)| {
                let features = graph.shape(id(&graph, node)).len();
                let labels: Vec<u32> = (0..batch).map(|_| s.below(features as u32)).collect();
                let mut target = normals(&mut s, batch * features, 0.0, 1.0);
                if matches!(kind, Kind::Squared) {
                    for t in &mut target {
                        *t = t.abs();
                    }
                }
                let mut offsets = target[..features].to_vec();
                let absent = (0..features).find(|class| features > 2 && !labels.contains(&(*class as u32)));
                if let Some(class) = absent {
                    offsets[class] = f32::NEG_INFINITY;
                }
                Term { node, kind, weight, labels, embeddings: [target.clone()], target, offsets }
            })
            .collect();
        Self { net, graph, batch, mode: mode(norm), terms, params, buffers, x, masks: BTreeMap::new() }
    }

    /// One loss at the output.
    pub fn at_output(net: Net, batch: usize, norm: NormMode, kind: Kind, seed: u64) -> Self {
        let last = net.last();
        Self::new(net, batch, norm, &[(last, kind, 1.0)], seed)
    }

    /// Forward pass, losses and backward pass on the engine.
    pub fn run(&self, cpu: Cpu, taps: &[usize]) -> Run {
        let ids: Vec<NodeId> =
            taps.iter().copied().chain(self.terms.iter().map(|t| t.node)).map(|n| id(&self.graph, n)).collect();
        let options = Options { batch: self.batch, taps: &ids, training: true };
        let mut ws = Workspace::new(&self.graph, &options, cpu).unwrap();
        // Whatever the pass does not write is seen.
        let mut grad = vec![f32::NAN; self.params.len()];
        let mut buffers = self.buffers.clone();
        ws.forward(&self.params, &mut buffers, &self.x, self.mode).unwrap();
        let mut loss = 0.0;
        for term in &self.terms {
            let value = ws.add_loss(id(&self.graph, term.node), &term.loss(), term.weight).unwrap();
            loss += f64::from(term.weight) * value;
        }
        ws.backward(&self.params, &mut grad).unwrap();
        let taps = &ids[..taps.len()];
        Run {
            loss,
            output: ws.output().to_vec(),
            grad,
            buffers,
            values: taps.iter().map(|&n| ws.value(n).unwrap().to_vec()).collect(),
            grads: taps.iter().map(|&n| ws.gradient(n).unwrap().to_vec()).collect(),
        }
    }

    /// The sum of the losses, with `offset` added to the value of a node.
    pub fn exact_loss(&self, params: &[f64], offset: Option<(usize, &[f64])>) -> f64 {
        let values = self.exact(params, offset);
        self.terms.iter().map(|t| f64::from(t.weight) * t.exact(self.batch, &values.nodes[t.node])).sum()
    }

    /// Evaluates every node in double precision, with `offset` added to the value of one.
    pub fn exact(&self, params: &[f64], offset: Option<(usize, &[f64])>) -> Values {
        let mut buffers: Vec<f64> = self.buffers.iter().map(|&v| f64::from(v)).collect();
        let mut nodes = vec![self.x.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>()];
        add_offset(&mut nodes[0], 0, offset);
        for (i, &(from, layer)) in self.net.layers.iter().enumerate() {
            let mut y = self.apply(i + 1, from, layer, params, &mut buffers, &nodes);
            add_offset(&mut y, i + 1, offset);
            nodes.push(y);
        }
        Values { nodes, buffers }
    }

    fn apply(
        &self,
        node: usize,
        from: usize,
        layer: Layer,
        params: &[f64],
        buffers: &mut [f64],
        nodes: &[Vec<f64>],
    ) -> Vec<f64> {
        let x = &nodes[from];
        let shape = |node| self.graph.shape(id(&self.graph, node));
        let (s_in, s_out) = (shape(from), shape(node));
        let span = |suffix: &str| self.graph.params().find(&format!("n{node}.{suffix}"));
        let param = |suffix: &str| span(suffix).map(|span| &params[span.range()]);
        match layer {
            Layer::Conv { window, .. } => {
                convolve(x, s_in, s_out, window, param("weight").expect("a weight"), param("bias"))
            }
            Layer::StandardizedConv { window, .. } => {
                let weight = param("weight").expect("a weight");
                let standardize = |row: &[f64]| {
                    let (m, v) = moments(row, &(0..row.len()).collect::<Vec<_>>());
                    row.iter().map(|w| (w - m) / (v + EPS).sqrt()).collect::<Vec<_>>()
                };
                let weight: Vec<f64> = weight.chunks_exact(weight.len() / s_out.c).flat_map(standardize).collect();
                convolve(x, s_in, s_out, window, &weight, param("bias"))
            }
            Layer::Linear { .. } => {
                let inputs = if self.net.has_tokens(from) { s_in.c } else { s_in.len() };
                multiply(x, inputs, param("weight").expect("a weight"), param("bias"))
            }
            Layer::BatchNorm => {
                let (weight, bias) = (param("weight").expect("a weight"), param("bias").expect("a bias"));
                self.batch_norm(node, x, weight, bias, buffers)
            }
            Layer::GroupNorm(groups) => {
                let (weight, bias) = (param("weight").expect("a weight"), param("bias").expect("a bias"));
                let (len, c) = (s_in.len(), s_in.c);
                let mut y = vec![0.0; x.len()];
                for image in 0..x.len() / len {
                    for group in 0..groups {
                        let inside = |i: &usize| i % c / (c / groups) == group;
                        let places: Vec<usize> = (image * len..(image + 1) * len).filter(inside).collect();
                        normalise(&mut y, x, &places, moments(x, &places), EPS, (weight, bias));
                    }
                }
                y
            }
            Layer::Activation(f) => x.iter().map(|&x| activate(f, x)).collect(),
            Layer::MaxPool(window) => max_pool(x, s_in, s_out, window),
            Layer::GlobalAverage => {
                let images = x.chunks_exact(s_in.len());
                let mean =
                    |image: &[f64], c: usize| image[c..].iter().step_by(s_in.c).sum::<f64>() / s_in.pixels() as f64;
                images.flat_map(|image| (0..s_in.c).map(move |c| mean(image, c))).collect()
            }
            Layer::Add(other) => x.iter().zip(&nodes[other]).map(|(a, b)| a + b).collect(),
            Layer::Flatten => x.clone(),
            Layer::Dropout(_) => match self.masks.get(&node) {
                Some(mask) => x.iter().zip(mask).map(|(x, m)| x * m).collect(),
                None => x.clone(),
            },
            _ => self.apply_text(node, from, layer, params, x),
        }
    }

    fn batch_norm(&self, node: usize, x: &[f64], weight: &[f64], bias: &[f64], buffers: &mut [f64]) -> Vec<f64> {
        let range = |suffix| self.graph.buffers().find(&format!("n{node}.{suffix}")).expect("a buffer").range();
        let (mean, var) = (range("running_mean").start, range("running_var").start);
        let mut y = vec![0.0; x.len()];
        for c in 0..weight.len() {
            let places: Vec<usize> = (c..x.len()).step_by(weight.len()).collect();
            let (mut m, mut v) = moments(x, &places);
            let n = places.len() as f64;
            match self.mode.norm {
                NormMode::Frozen => (m, v) = (buffers[mean + c], buffers[var + c]),
                NormMode::Update => {
                    let unbiased = if n > 1.0 { v * n / (n - 1.0) } else { v };
                    buffers[mean + c] += MOMENTUM * (m - buffers[mean + c]);
                    buffers[var + c] += MOMENTUM * (unbiased - buffers[var + c]);
                }
                NormMode::Batch => (),
            }
            normalise(&mut y, x, &places, (m, v), EPS, (weight, bias));
        }
        y
    }

    /// The layers of text encoders.
    fn apply_text(&self, node: usize, from: usize, layer: Layer, params: &[f64], x: &[f64]) -> Vec<f64> {
        let s_in = self.graph.shape(id(&self.graph, from));
        let span = |suffix: &str| self.graph.params().find(&format!("n{node}.{suffix}"));
        let param = |suffix: &str| span(suffix).map(|span| &params[span.range()]);
        match layer {
            Layer::Embedding(tables) => {
                let row = |suffix: &str, at: usize| {
                    &param(&format!("{suffix}_embeddings.weight")).expect("a table")[at * tables.width..]
                        [..tables.width]
                };
                let mut y = Vec::new();
                for text in self.x.chunks_exact(s_in.len()) {
                    for (at, &slot) in text.iter().take_while(|&&slot| slot > 0.0).enumerate() {
                        let code = slot as usize - 1;
                        let rows = [row("word", code / 2), row("position", at), row("token_type", code % 2)];
                        y.extend((0..tables.width).map(|i| rows.iter().map(|row| row[i]).sum::<f64>()));
                    }
                }
                y
            }
            Layer::RowNorm(eps) => {
                let (weight, bias) = (param("weight").expect("a weight"), param("bias").expect("a bias"));
                let mut y = vec![0.0; x.len()];
                for row in 0..x.len() / s_in.c {
                    let places: Vec<usize> = (row * s_in.c..(row + 1) * s_in.c).collect();
                    normalise(&mut y, x, &places, moments(x, &places), f64::from(eps), (weight, bias));
                }
                y
            }
            Layer::SelfAttention { heads } => {
                let [q, k, v] = ["query", "key", "value"].map(|part| {
                    let weight = param(&format!("{part}.weight")).expect("a weight");
                    multiply(x, s_in.c, weight, param(&format!("{part}.bias")))
                });
                let texts = self.texts().into_iter();
                texts.flat_map(|text| attend(&q, &k, &v, text, s_in.c, heads)).collect()
            }
            Layer::FirstToken | Layer::MeanOfTokens => {
                let mut y = Vec::new();
                for text in self.texts() {
                    let n = if matches!(layer, Layer::FirstToken) { text.len().min(1) } else { text.len() };
                    let column = |c: usize| (0..n).map(|t| x[(text.start + t) * s_in.c + c]).sum::<f64>();
                    y.extend((0..s_in.c).map(|c| column(c) / n.max(1) as f64));
                }
                y
            }
            _ => unreachable!("every other layer is in `apply`"),
        }
    }

    /// The tokens of each text among those of the batch.
    fn texts(&self) -> Vec<std::ops::Range<usize>> {
        let mut end = 0;
        let texts = self.x.chunks_exact(self.net.input.len()).map(|text| {
            let start = end;
            end += text.iter().filter(|&&slot| slot > 0.0).count();
            start..end
        });
        texts.collect()
    }

    /// ∂L along `direction` of a parameter tensor or a node's value, by a central difference.
    ///
    /// The step is small against the distance to the next kink of a `relu`, maximum or absolute value, and double
    /// precision still leaves six digits of the difference.
    pub fn slope(&self, place: Place, direction: &[f64]) -> f64 {
        const H: f64 = 1e-8;
        let exact: Vec<f64> = self.params.iter().map(|&v| f64::from(v)).collect();
        let at = |step: f64| match place {
            Place::Node(node) => {
                let offset: Vec<f64> = direction.iter().map(|d| step * d).collect();
                self.exact_loss(&exact, Some((node, &offset)))
            }
            Place::Span(span) => {
                let mut params = exact.clone();
                let range = self.graph.params().spans()[span].range();
                params[range].iter_mut().zip(direction).for_each(|(p, d)| *p += step * d);
                self.exact_loss(&params, None)
            }
        };
        (at(H) - at(-H)) / (2.0 * H)
    }
}

/// Where a gradient is compared.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    Span(usize),
    Node(usize),
}

fn add_offset(y: &mut [f64], node: usize, offset: Option<(usize, &[f64])>) {
    if let Some((_, offset)) = offset.filter(|(at, _)| *at == node) {
        y.iter_mut().zip(offset).for_each(|(y, o)| *y += o);
    }
}

/// The values at `places`, with the weight and bias of their channels.
fn normalise(
    y: &mut [f64],
    x: &[f64],
    places: &[usize],
    (mean, variance): (f64, f64),
    eps: f64,
    (weight, bias): (&[f64], &[f64]),
) {
    for &i in places {
        let c = i % weight.len();
        y[i] = (x[i] - mean) / (variance + eps).sqrt() * weight[c] + bias[c];
    }
}

fn moments(x: &[f64], places: &[usize]) -> (f64, f64) {
    let n = places.len() as f64;
    let mean = places.iter().map(|&i| x[i]).sum::<f64>() / n;
    (mean, places.iter().map(|&i| (x[i] - mean).powi(2)).sum::<f64>() / n)
}

/// The pixel under tap (ky, kx) of the window at (oy, ox), if it lies inside the image.
fn pixel(shape: Shape, w: Window, (oy, ox): (usize, usize), (ky, kx): (usize, usize)) -> Option<usize> {
    let row = (oy * w.stride + ky).checked_sub(w.padding).filter(|&row| row < shape.h)?;
    let col = (ox * w.stride + kx).checked_sub(w.padding).filter(|&col| col < shape.w)?;
    Some(row * shape.w + col)
}

/// `w` lies (O, K, K, I).
fn convolve(x: &[f64], s_in: Shape, s_out: Shape, window: Window, w: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    let k = window.kernel;
    let mut y = Vec::with_capacity(x.len() / s_in.len() * s_out.len());
    for image in x.chunks_exact(s_in.len()) {
        for out in 0..s_out.pixels() {
            for o in 0..s_out.c {
                let mut sum = bias.map_or(0.0, |bias| bias[o]);
                for tap in 0..k * k {
                    let at = pixel(s_in, window, (out / s_out.w, out % s_out.w), (tap / k, tap % k));
                    if let Some(at) = at {
                        let w = &w[(o * k * k + tap) * s_in.c..][..s_in.c];
                        sum += image[at * s_in.c..][..s_in.c].iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
                    }
                }
                y.push(sum);
            }
        }
    }
    y
}

/// Rows of x times the rows of w, plus the bias.
fn multiply(x: &[f64], inputs: usize, w: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    let mut y = Vec::new();
    for row in x.chunks_exact(inputs) {
        for (o, w) in w.chunks_exact(inputs).enumerate() {
            let products = row.iter().zip(w).map(|(x, w)| x * w);
            y.push(products.sum::<f64>() + bias.map_or(0.0, |b| b[o]));
        }
    }
    y
}

/// Attention of the tokens of one text to each other.
fn attend(q: &[f64], k: &[f64], v: &[f64], text: std::ops::Range<usize>, c: usize, heads: usize) -> Vec<f64> {
    let d = c / heads;
    let mut y = vec![0.0; text.len() * c];
    for head in 0..heads {
        let at = |token: usize| token * c + head * d;
        for i in text.clone() {
            let score = |j: usize| (0..d).map(|x| q[at(i) + x] * k[at(j) + x]).sum::<f64>() / (d as f64).sqrt();
            let log_weights = log_softmax(&text.clone().map(score).collect::<Vec<_>>(), 1.0);
            for (j, log_weight) in text.clone().zip(log_weights) {
                for x in 0..d {
                    y[at(i - text.start) + x] += log_weight.exp() * v[at(j) + x];
                }
            }
        }
    }
    y
}

fn max_pool(x: &[f64], s_in: Shape, s_out: Shape, window: Window) -> Vec<f64> {
    let k = window.kernel;
    let mut y = Vec::new();
    for image in x.chunks_exact(s_in.len()) {
        for out in 0..s_out.pixels() {
            for c in 0..s_out.c {
                let pixels = (0..k * k)
                    .filter_map(|tap| pixel(s_in, window, (out / s_out.w, out % s_out.w), (tap / k, tap % k)));
                y.push(pixels.map(|at| image[at * s_in.c + c]).fold(f64::NEG_INFINITY, f64::max));
            }
        }
    }
    y
}

fn activate(f: Activation, x: f64) -> f64 {
    match f {
        Activation::Relu => x.max(0.0),
        Activation::Tanh => x.tanh(),
        Activation::Gelu => x * normal_cdf(x),
    }
}

/// Φ(x) = ½ + φ(x) (x + x³/3 + x⁵/(3·5) + …) (Marsaglia 2004).
fn normal_cdf(x: f64) -> f64 {
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term.abs() > 1e-18 * sum.abs() {
        n += 2.0;
        term *= x * x / n;
        sum += term;
    }
    0.5 + sum * (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt()
}

pub fn norm(v: &[f32]) -> f64 {
    v.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt()
}

/// ‖a − b‖ / ‖b‖
pub fn relative_error(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum::<f64>().sqrt();
    difference / b.iter().map(|b| b * b).sum::<f64>().sqrt().max(1e-30)
}

pub fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

/// The engine's gradient against finite differences of the oracle, relative to the norm of the tensor's gradient.
///
/// Single precision leaves 1e-7 an operation. Sums of up to a few thousand terms, the transforms of Winograd's F(4×4)
/// (which lose about two digits) and the differences that normalisations take bring it to at most some 1e-5 or 1e-4.
/// One wrong element among the 40 000 of the largest tensor would be 5e-3.
pub const TOLERANCE: f64 = 1e-3;
/// A gradient that is 0 in exact arithmetic is rounding noise of the terms that cancelled, so a tensor's gradient is
/// held against at least this share of the largest gradient of the problem.
const NOISE_SHARE: f64 = 1e-2;

/// Compares the loss, every parameter tensor's gradient and the gradients of `nodes`, on every instruction set; and the
/// parameters' gradients with those of a workspace that observes no node, bit for bit.
pub fn check_gradients(problem: &Problem, nodes: &[usize]) {
    let terms: Vec<_> = problem.terms.iter().map(|t| (t.node, t.kind, t.weight)).collect();
    let what = format!("{:?}, batch {}, {:?}, losses {terms:?}", problem.net, problem.batch, problem.mode.norm);
    let exact: Vec<f64> = problem.params.iter().map(|&v| f64::from(v)).collect();
    let loss = problem.exact_loss(&exact, None);
    let runs: Vec<(Isa, Run)> =
        Isa::available().into_iter().map(|isa| (isa, problem.run(Cpu::with_isa(1, isa), nodes))).collect();
    for (isa, run) in &runs {
        assert!((run.loss - loss).abs() <= 1e-4 * loss.abs().max(1e-2), "{what}: {isa:?}: loss {} ≠ {loss}", run.loss);
        let plain = problem.run(Cpu::with_isa(1, *isa), &[]);
        assert_eq!(bits(&plain.grad), bits(&run.grad), "{what}: {isa:?}: observing a node changed the gradient");
    }
    let spans = problem.graph.params().spans();
    let places = (0..spans.len()).map(Place::Span).chain(nodes.iter().map(|&n| Place::Node(n)));
    let gradient = |run: &'_ Run, place| match place {
        Place::Span(span) => run.grad[spans[span].range()].to_vec(),
        Place::Node(node) => run.grads[nodes.iter().position(|&n| n == node).expect("a tap")].clone(),
    };
    let places: Vec<Place> = places.collect();
    let largest = places.iter().map(|&p| norm(&gradient(&runs[0].1, p))).fold(0.0, f64::max);
    let mut s = stream(77);
    for &place in &places {
        let name = match place {
            Place::Span(span) => spans[span].name.clone(),
            Place::Node(node) => format!("the value of n{node}"),
        };
        let n = gradient(&runs[0].1, place).len();
        // A direction of independent N(0, 1) meets an error e of the gradient in e·v ~ N(0, ‖e‖²), wherever the error
        // is.
        let mut directions: Vec<Vec<f64>> = (0..3).map(|_| (0..n).map(|_| s.normal()).collect()).collect();
        for i in [0, s.below(n as u32) as usize, n - 1] {
            directions.push((0..n).map(|j| f64::from(u8::from(i == j))).collect());
        }
        for direction in &directions {
            let expected = problem.slope(place, direction);
            for (isa, run) in &runs {
                let g = gradient(run, place);
                let found: f64 = g.iter().zip(direction).map(|(g, d)| f64::from(*g) * d).sum();
                let error = (found - expected).abs() / norm(&g).max(NOISE_SHARE * largest).max(1e-12);
                assert!(
                    error <= TOLERANCE,
                    "{what}: {isa:?}: gradient of {name}: slope {found:.6e}, expected {expected:.6e}, error {error:.1e}"
                );
            }
        }
    }
}
