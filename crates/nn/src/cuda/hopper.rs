//! Convolutions and linear layers of tokens by Hopper's warp-group products (`hopper.cu`, `dense.cu`): which shapes they
//! support, and how they are launched.

use super::conv::{Div, PARTS_LEN};
use super::gather;
use super::gpu::{Pass, parameters};
use crate::graph::{Graph, Node};
use crate::kernels::conv::Conv;

/// A kernel of products: its name, and positions and channels per tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Product {
    kernel: &'static str,
    positions: usize,
    channels: usize,
}

/// Both compute the same bytes. The second has smaller tiles, but reads the weights from global memory more often.
const PRODUCTS: [Product; 2] = [
    Product { kernel: "shifted_1", positions: 256, channels: 64 },
    Product { kernel: "shifted_2", positions: 128, channels: 128 },
];

/// Blocks of a product per processor.
pub(super) const AT_ONCE: usize = 2;

/// Bytes of shared memory that a kernel needs.
pub(super) fn shared_bytes(kernel: &str) -> Option<u32> {
    let product = |p: &Product| 128 * (2 * (p.positions + 40) + 4 * p.channels) as u32;
    let weight = 3 * (4 * 68 * (CHUNK as u32 + 2 * MARGIN_MAX) + CHUNK as u32 / 4 * FOUR_BYTES);
    let dense = |channels: usize| 4 * 128 * (Dense::TOKENS + channels) as u32;
    let found = PRODUCTS.iter().find(|p| p.kernel == kernel).map(product);
    match kernel {
        "shifted_weight" => Some(weight),
        "dense_1" => Some(dense(64)),
        "dense_2" => Some(dense(128)),
        "dense_weight" => Some(3 * (4 * (128 + 8) * Dense::CHUNK as u32 + Dense::CHUNK as u32 / 4 * FOUR_BYTES)),
        _ => found,
    }
}

/// Zeros on either side of a tile, and positions of a sum at a time, as in `hopper.cu`.
const MARGIN_MAX: u32 = 18;
const CHUNK: usize = 96;
/// Bytes of shared memory of four positions of dY, for 64 channels.
const FOUR_BYTES: u32 = 64 * 16 + 16;
/// Blocks per lane that split sums aim at (ten lanes then give an H200 two per processor), and minimum chunks per part.
const BLOCKS_WANTED: usize = 26;
const CHUNKS_MIN: usize = 5;
/// Minimum parts of a long sum. With fewer, the last of several waves of blocks leaves more processors idle.
const PARTS_MIN: usize = 3;
/// Images laid end to end, as in `hopper.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Strip {
    h: i32,
    w: i32,
    ci: i32,
    co: i32,
    batch: i32,
    by_image: Div,
    by_pitch: Div,
}
parameters!(Strip);

impl Strip {
    /// The convolution, if these kernels support it: 3×3 with stride 1 and many channels. Its images are no wider than the
    /// margin, and large enough that few products are with zeros. It depends on the shape alone.
    pub fn new(c: &Conv, batch: usize, aligned: bool) -> Option<Self> {
        let is_plain = (c.kernel, c.stride, c.padding) == (3, 1, 1);
        let channels = c.ci.is_multiple_of(64) && c.co.is_multiple_of(64);
        let dense = 5 * (c.h + 1) * (c.w + 1) <= 8 * c.h * c.w && c.w + 2 <= MARGIN_MAX as usize;
        let [h, w, ci, co, batch] = [c.h, c.w, c.ci, c.co, batch].map(|v| v as i32);
        let [by_image, by_pitch] = [(c.h + 1) * (c.w + 1), c.w + 1].map(Div::by);
        (is_plain && channels && dense && aligned).then_some(Self { h, w, ci, co, batch, by_image, by_pitch })
    }

    /// With input and output swapped, for the gradient of the input.
    pub fn turned(self) -> Self {
        Self { ci: self.co, co: self.ci, ..self }
    }

    /// Channels of the input and of the output.
    pub fn channels(&self) -> (usize, usize) {
        (self.ci as usize, self.co as usize)
    }

    fn positions(&self) -> usize {
        (self.batch * (self.h + 1) * (self.w + 1)) as usize
    }

    /// Chunks of positions whose moments a forward pass sums.
    pub fn chunks(&self) -> usize {
        self.positions().div_ceil(128)
    }

    /// The kernel that keeps `processors` busiest, and its tiles per lane.
    pub fn product(&self, lanes: usize, processors: usize) -> (&'static str, usize) {
        let columns = self.co as usize;
        let tiles = |p: &Product| self.positions().div_ceil(p.positions) * (columns / p.channels);
        // A processor computes its tiles side by side, so what counts is how many it gets.
        let busy = |p: &&Product| (tiles(p) * lanes).div_ceil(processors);
        let serves = |p: &&Product| columns.is_multiple_of(p.channels);
        let best = PRODUCTS.iter().filter(serves).min_by_key(busy).unwrap_or(&PRODUCTS[0]);
        (best.kernel, tiles(best))
    }

    /// Tiles of the gradient of the weights, and the parts of its sum, which is split `further` times as far as for a lane
    /// among others.
    pub fn weight(&self, further: usize) -> (usize, usize) {
        let (ci, co) = self.channels();
        let tiles = ci / 64 * (co / 64);
        let most = (self.positions().div_ceil(CHUNK) / CHUNKS_MIN).min(further * PARTS_LEN / (9 * ci * co));
        (tiles, (further * BLOCKS_WANTED / tiles).max(PARTS_MIN).min(most).max(1))
    }
}

/// A linear layer of tokens, as in `dense.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Dense {
    ci: i32,
    co: i32,
    rows: i32,
    tokens: u64,
}
parameters!(Dense);

impl Dense {
    /// Tokens per tile.
    const TOKENS: usize = 128;
    /// The choice of kernels and splits assumes a token in one of this many slots.
    const FILLED: usize = 4;
    /// Tokens of a sum at a time, and the blocks per lane that its splits aim at.
    const CHUNK: usize = 32;
    const BLOCKS_WANTED: usize = 132;

    /// The layer, if these kernels support it: of tokens, with many inputs and outputs. `rows`: max tokens per lane.
    /// `tokens`: the address of the lanes' token counts.
    pub fn new(ci: usize, co: usize, rows: usize, aligned: bool, tokens: u64) -> Option<Self> {
        let serves = tokens != 0 && aligned && ci.is_multiple_of(64) && co.is_multiple_of(64);
        serves.then_some(Self { ci: ci as i32, co: co as i32, rows: rows as i32, tokens })
    }

    /// With input and output swapped, for the gradient of the input.
    pub fn turned(self) -> Self {
        Self { ci: self.co, co: self.ci, ..self }
    }

    /// Kernel, blocks per lane and threads per block. Both kernels compute the same bytes: wide tiles read less, narrow tiles
    /// give more blocks.
    pub fn launch(&self, lanes: usize, processors: usize) -> (&'static str, usize, u32) {
        let tiles = |rows: usize, channels: usize| rows.div_ceil(Self::TOKENS) * (self.co as usize / channels);
        let rows = self.rows as usize;
        let is_wide = self.co % 128 == 0 && 2 * lanes * tiles(rows / Self::FILLED, 128) >= 3 * processors;
        let (kernel, channels, at_once, threads) =
            if is_wide { ("dense_2", 128, 1, 256) } else { ("dense_1", 64, 2, 128) };
        (kernel, tiles(rows, channels).min((at_once * processors / lanes.max(1)).max(1)), threads)
    }

    /// Tiles of the gradient of the weights and the parts of its split sum, by the shape alone; `None` if the inputs are no
    /// whole number of tiles.
    pub fn weight(&self) -> Option<(usize, usize)> {
        let (ci, co) = (self.ci as usize, self.co as usize);
        let tiles = ci / 128 * (co / 64);
        let chunks = self.rows as usize / Self::FILLED / Self::CHUNK;
        let most = (chunks / CHUNKS_MIN).min(PARTS_LEN / (ci * co)).max(1);
        ci.is_multiple_of(128).then(|| (tiles, Self::BLOCKS_WANTED.div_ceil(tiles).min(most)))
    }
}

/// Floats of the largest weights that these kernels need with input and output swapped.
pub(super) fn turned_len(graph: &Graph) -> usize {
    let len = |node: &Node| match node.convolution() {
        Some(c) if node.packed || Strip::new(&c, 1, true).is_some() => node.params[0].len(),
        Some(c) if gather::serves(Pass::Input, &c, c.ci, true) => node.params[0].len(),
        _ => 0,
    };
    graph.nodes.iter().map(len).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::conv::ALONE;
    use super::*;

    fn conv(side: usize, ci: usize, co: usize) -> Conv {
        Conv { h: side, w: side, ci, ho: side, wo: side, co, kernel: 3, stride: 1, padding: 1 }
    }

    #[test]
    fn shapes_that_the_kernels_cannot_compute_are_left_to_the_others() {
        assert!(Strip::new(&conv(16, 64, 128), 64, true).is_some());
        assert!(Strip::new(&conv(4, 256, 256), 64, true).is_some());
        assert!(Strip::new(&conv(16, 64, 64), 64, false).is_none(), "copies of 16 bytes");
        assert!(Strip::new(&conv(32, 64, 64), 64, true).is_none(), "the margin");
        assert!(Strip::new(&conv(2, 64, 64), 64, true).is_none(), "mostly zeros");
        assert!(Strip::new(&conv(16, 3, 64), 64, true).is_none());
        assert!(Strip::new(&Conv { stride: 2, ho: 8, wo: 8, ..conv(16, 64, 64) }, 64, true).is_none());
    }

    #[test]
    fn tiles_cover_every_position_and_parts_fit_their_memory() {
        for (side, ci, co) in [(16, 64, 64), (8, 128, 128), (4, 256, 256), (8, 64, 192), (4, 512, 512)] {
            for batch in [1, 64, 256] {
                let Some(strip) = Strip::new(&conv(side, ci, co), batch, true) else { panic!("{side} {ci} {co}") };
                let outputs = batch * (side + 1) * (side + 1) * co;
                for lanes in [1, 10] {
                    let (kernel, tiles) = strip.product(lanes, 132);
                    let Some(p) = PRODUCTS.iter().find(|p| p.kernel == kernel) else { panic!("{kernel}") };
                    let area = p.positions * p.channels;
                    assert!(tiles * area >= outputs && (tiles - co / p.channels) * area < outputs, "{p:?} {tiles}");
                }
                for further in [1, ALONE] {
                    let (_, splits) = strip.weight(further);
                    assert!(splits == 1 || splits * 9 * ci * co <= further * PARTS_LEN);
                }
            }
        }
    }

    #[test]
    fn one_lane_alone_gives_every_processor_a_part_of_the_weights_gradient() {
        for (side, channels) in [(16, 64), (8, 128), (4, 256)] {
            let blocks = |further: usize| {
                let weight = Strip::new(&conv(side, channels, channels), 256, true).map(|strip| strip.weight(further));
                weight.map_or(0, |(tiles, splits)| tiles * splits)
            };
            assert!((24..=48).contains(&blocks(1)) && (120..=132).contains(&blocks(ALONE)), "{side} {channels}");
        }
    }

    #[test]
    fn linear_layers_of_many_tokens_have_wide_tiles_and_others_are_left_alone() {
        let launch = |rows, co, lanes| Dense::new(384, co, rows, true, 1).map(|dense| dense.launch(lanes, 132));
        assert_eq!(launch(16_384, 1536, 1), Some(("dense_2", 132, 256)));
        assert_eq!(launch(16_384, 384, 1), Some(("dense_1", 264, 128)), "too few wide ones");
        assert_eq!(launch(16_384, 384, 4), Some(("dense_2", 33, 256)));
        assert_eq!(launch(256, 192, 1), Some(("dense_1", 6, 128)), "no more blocks than tiles");
        assert_eq!(launch(16_384, 100, 1), None);
        let weight = |ci, co, rows| Dense::new(ci, co, rows, true, 1).and_then(|dense| dense.weight());
        assert_eq!(weight(384, 1536, 16_384), Some((72, 2)));
        assert_eq!(weight(384, 384, 16_384), Some((18, 8)));
        assert_eq!(weight(384, 384, 64), Some((18, 1)), "too few tokens to cut");
        assert_eq!(weight(192, 384, 64), None, "not in tiles of 128");
        assert!(weight(1536, 4096, 16_384).is_some_and(|(_, parts)| parts == 1), "parts fit their memory");
        assert!(Dense::new(384, 384, 64, true, 0).is_none(), "not of tokens");
        assert!(Dense::new(384, 384, 64, false, 1).is_none(), "copies of 16 bytes");
    }

    #[test]
    fn blocks_fit_a_processor() {
        const PROCESSOR: u32 = 227 * 1024;
        assert!(shared_bytes("dense_2").is_some_and(|bytes| bytes <= PROCESSOR));
        for kernel in ["dense_1", "dense_weight"] {
            assert!(shared_bytes(kernel).is_some_and(|bytes| 2 * (bytes + 1024) <= PROCESSOR), "{kernel}");
        }
        for p in PRODUCTS {
            let outputs = 4 * p.positions; // the kernel's own table
            let bytes = shared_bytes(p.kernel).unwrap_or(u32::MAX) as usize + outputs;
            assert!(AT_ONCE * (bytes + 1024) <= PROCESSOR as usize + 1024, "{p:?}: {bytes}");
        }
        assert!(shared_bytes("shifted_weight").is_some_and(|b| b <= PROCESSOR));
    }
}
