//! Named spans of a flat vector.

use fedproj_rng::{Purpose, Stream};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The order of a tensor's elements in the flat vector, relative to PyTorch's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// In PyTorch's order.
    Plain,
    /// PyTorch has (outer, channels, spatial). Here spatial comes before channels, as images are channels-last.
    ChannelsLast {
        /// Output channels or features.
        outer: usize,
        /// Input channels.
        channels: usize,
        /// Kernel taps, or pixels of a flattened image.
        spatial: usize,
    },
}

/// A parameter's role. It decides the initial values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Role {
    /// A weight matrix or kernel.
    Weight {
        /// Inputs per output.
        fan_in: usize,
        /// Outputs per input.
        fan_out: usize,
    },
    /// The bias of a convolution.
    ConvBias {
        /// Inputs per output.
        fan_in: usize,
    },
    /// The bias of a linear layer.
    LinearBias {
        /// Inputs per output.
        fan_in: usize,
    },
    /// A weight of an encoder: drawn from a normal distribution with mean 0.
    Normal {
        /// Its standard deviation.
        std: f32,
        /// The same under [`Init::Xavier`].
        std_xavier: f32,
    },
    /// The scale of a normalisation, or a running variance: starts at 1.
    Scale,
    /// The shift of a normalisation, or a running mean: starts at 0.
    Shift,
}

/// How initial weights are drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// As PyTorch's layers do by default: uniform in ±1/√fan_in, normalisations at 1 and 0.
    #[default]
    Torch,
    /// Xavier-normal weights, N(1, 0.02) scales, N(0, 1) biases of linear layers.
    #[serde(rename = "authors")]
    Xavier,
}

/// One tensor inside a flat vector.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// PyTorch's name, such as `layers.0.conv1.weight`.
    pub name: String,
    /// PyTorch's shape.
    pub shape: Vec<usize>,
    /// First element in the flat vector.
    pub offset: usize,
    /// Order of the elements.
    pub storage: Storage,
    /// Role.
    pub role: Role,
}

impl Span {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its elements in the flat vector.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len()
    }

    /// Calls `to(ours, torch)` for every pair of positions in our order and PyTorch's.
    fn for_each_place(&self, mut to: impl FnMut(usize, usize)) {
        match self.storage {
            Storage::Plain => (0..self.len()).for_each(|i| to(i, i)),
            Storage::ChannelsLast { outer, channels, spatial } => {
                for o in 0..outer {
                    for s in 0..spatial {
                        for c in 0..channels {
                            to((o * spatial + s) * channels + c, (o * channels + c) * spatial + s);
                        }
                    }
                }
            }
        }
    }

    /// The tensor in PyTorch's order.
    pub fn to_torch(&self, flat: &[f32]) -> Vec<f32> {
        let ours = &flat[self.range()];
        let mut out = vec![0.0; ours.len()];
        self.for_each_place(|place, torch| out[torch] = ours[place]);
        out
    }

    /// Writes a tensor given in PyTorch's order.
    ///
    /// # Panics
    /// If `tensor` and the span differ in length.
    pub fn write_torch(&self, tensor: &[f32], flat: &mut [f32]) {
        assert_eq!(tensor.len(), self.len(), "tensor of another size than span {}", self.name);
        let ours = &mut flat[self.range()];
        self.for_each_place(|place, torch| ours[place] = tensor[torch]);
    }

    /// Fills the span with its initial values. The draws depend only on (seed, name), so adding a layer to a network
    /// leaves the initial values of all others unchanged.
    fn init(&self, seed: u64, init: Init, out: &mut [f32]) {
        let hash = self.name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3) // FNV-1a
        });
        let mut stream = Stream::new(seed, Purpose::Init, [hash as u32, (hash >> 32) as u32, 0]);
        let mut uniform =
            |bound: f64| out.iter_mut().for_each(|v| *v = ((2.0 * stream.uniform() - 1.0) * bound) as f32);
        match (self.role, init) {
            (Role::Scale, Init::Torch) => return out.fill(1.0),
            (Role::Shift, _) | (Role::ConvBias { .. }, Init::Xavier) => return out.fill(0.0),
            (Role::Weight { fan_in, .. } | Role::ConvBias { fan_in } | Role::LinearBias { fan_in }, Init::Torch) => {
                return uniform(1.0 / (fan_in as f64).sqrt());
            }
            _ => (),
        }
        let (mean, std) = match self.role {
            Role::Weight { fan_in, fan_out } => (0.0, (2.0 / (fan_in + fan_out) as f64).sqrt()),
            Role::Normal { std, .. } if init == Init::Torch => (0.0, f64::from(std)),
            Role::Normal { std_xavier, .. } => (0.0, f64::from(std_xavier)),
            Role::Scale => (1.0, 0.02),
            _ => (0.0, 1.0),
        };
        for v in out {
            *v = (mean + std * stream.normal()) as f32;
        }
    }
}

/// The spans of one flat vector, in order and without gaps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layout {
    spans: Vec<Span>,
    len: usize,
}

impl Layout {
    /// Adds a span; returns its offset in the flat vector.
    pub(crate) fn push(&mut self, name: String, shape: Vec<usize>, storage: Storage, role: Role) -> Range<usize> {
        let span = Span { name, shape, offset: self.len, storage, role };
        let range = span.range();
        self.len = range.end;
        self.spans.push(span);
        range
    }

    /// Adds the spans that make up a range of another layout, and notes in `from` where they stood; returns where they stand
    /// now.
    pub(crate) fn copy_spans(
        &mut self,
        other: &Self,
        range: &Range<usize>,
        from: &mut Vec<Range<usize>>,
    ) -> Range<usize> {
        let start = self.len;
        for Span { name, shape, storage, role, .. } in other.spans.iter().filter(|span| is_within(span, range)).cloned()
        {
            self.push(name, shape, storage, role);
        }
        from.extend((!range.is_empty()).then(|| range.clone()));
        if range.is_empty() { 0..0 } else { start..self.len }
    }

    /// Sets the role of every span to the result of `role`.
    pub(crate) fn set_roles(&mut self, role: impl Fn(&Span) -> Role) {
        self.spans.iter_mut().for_each(|span| span.role = role(span));
    }

    /// Elements of the flat vector.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All spans.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The span with this name.
    pub fn find(&self, name: &str) -> Option<&Span> {
        self.spans.iter().find(|span| span.name == name)
    }

    /// Initial values of the whole vector.
    pub fn init(&self, seed: u64, init: Init) -> Vec<f32> {
        let mut flat = vec![0.0; self.len];
        for span in &self.spans {
            span.init(seed, init, &mut flat[span.range()]);
        }
        flat
    }
}

fn is_within(span: &Span, range: &Range<usize>) -> bool {
    range.start <= span.offset && span.offset + span.len() <= range.end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torch_order_round_trips_and_moves_channels_last() {
        let storage = Storage::ChannelsLast { outer: 2, channels: 3, spatial: 4 };
        let role = Role::Weight { fan_in: 12, fan_out: 8 };
        let span = Span { name: "w".into(), shape: vec![2, 3, 2, 2], offset: 1, storage, role };
        let torch: Vec<f32> = (0..24u8).map(f32::from).collect();
        let mut flat = vec![-1.0; 26];
        span.write_torch(&torch, &mut flat);
        // Pixel 0 of output 0 holds channels 0, 1, 2. They are 4 apart in PyTorch.
        assert_eq!(&flat[..4], &[-1.0, 0.0, 4.0, 8.0]);
        assert_eq!(span.to_torch(&flat), torch);
    }

    #[test]
    fn initial_values_depend_on_the_name_alone() {
        let mut one = Layout::default();
        let mut two = Layout::default();
        let role = Role::Weight { fan_in: 4, fan_out: 4 };
        two.push("extra".into(), vec![7], Storage::Plain, role);
        one.push("w".into(), vec![4, 4], Storage::Plain, role);
        two.push("w".into(), vec![4, 4], Storage::Plain, role);
        for init in [Init::Torch, Init::Xavier] {
            assert_eq!(one.init(3, init), two.init(3, init)[7..]);
            assert_ne!(one.init(3, init), one.init(4, init));
        }
    }
}
