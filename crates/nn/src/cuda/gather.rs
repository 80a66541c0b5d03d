//! Convolutions that cannot be computed as shifts, by Hopper's warp-group products (`gather.cu`): which shapes the kernels
//! support, and how they are launched.

use super::conv::{PARTS_LEN, TILES_WANTED};
use super::gpu::Pass;
use crate::kernels::conv::Conv;

/// How a product is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Product {
    pub kernel: &'static str,
    pub threads: u32,
    pub tiles: usize,
    pub splits: usize,
}

/// Pixels per tile, and numbers of the sum per step.
pub(super) const PIXELS: usize = 128;
const DEPTH: usize = 32;
/// Minimum steps per part of a split sum.
const STEPS_MIN: usize = 8;

/// Results of a sum at a time, floats between pixels in shared memory, and max lines of pixels, as in `gather.cu`.
const CHUNK: usize = 32;
const PITCH: usize = 68;
const LINES_MAX: usize = 216;
/// Blocks per lane that split sums aim at, and minimum chunks per part.
const BLOCKS_WANTED: usize = 26;
const CHUNKS_MIN: usize = 6;

/// Whether the kernels compute a pass of this convolution. It depends on the shape alone.
pub(super) fn serves(pass: Pass, c: &Conv, pitch: usize, aligned: bool) -> bool {
    let is_whole = c.h == c.ho * c.stride && c.w == c.wo * c.stride;
    let channels = c.ci.is_multiple_of(64) && c.co.is_multiple_of(64);
    // A linear layer has too few rows.
    let is_image = c.ho * c.wo > 1 && c.kernel <= 3;
    aligned && pitch == c.ci && is_whole && is_image && channels && (pass != Pass::Weight || lines(c).is_some())
}

/// Lines of pixels that a chunk of the weights' gradient reaches; none if it is no whole number of rows or images.
fn lines(c: &Conv) -> Option<usize> {
    let rows = c.ho.min(CHUNK / c.wo.min(CHUNK));
    let is_whole = CHUNK.is_multiple_of(rows * c.wo) && c.ho.is_multiple_of(rows);
    let side = |n: usize| c.stride * (n - 1) + 3;
    let lines = CHUNK / (rows * c.wo) * side(rows) * side(c.wo);
    ((c.kernel, c.padding) == (3, 1) && is_whole && lines <= LINES_MAX).then_some(lines)
}

/// The kernel that keeps `processors` busiest, for the forward pass or the gradient of the input. All compute the same bytes:
/// how the sum is split depends on the shape alone.
pub(super) fn product(pass: Pass, c: &Conv, batch: usize, lanes: usize, processors: usize) -> Product {
    let is_input = pass == Pass::Input;
    let (columns, depth) = if is_input { (c.ci, c.co) } else { (c.co, c.ci) };
    let classes = if is_input { c.stride * c.stride } else { 1 };
    let rows = batch * c.ho * c.wo;
    let tiles = |width: usize| rows.div_ceil(PIXELS) * (columns / width) * classes;
    let most = (c.kernel * c.kernel * depth / DEPTH / STEPS_MIN).min(PARTS_LEN / (rows * classes * columns)).max(1);
    let splits = if classes > 1 { 1 } else { TILES_WANTED.div_ceil(tiles(64)).clamp(1, most) };
    // A processor computes its tiles side by side, so what counts is how many it gets. Wide tiles read less.
    let busy = |width: usize| (tiles(width) * splits * lanes).div_ceil(processors) * width;
    let is_wide = columns.is_multiple_of(128) && busy(128) <= busy(64);
    let (kernel, width) = match (is_input, is_wide) {
        (false, false) => ("gathered_FORWARD_1", 64),
        (false, true) => ("gathered_FORWARD_2", 128),
        (true, false) => ("gathered_INPUT_1", 64),
        (true, true) => ("gathered_INPUT_2", 128),
    };
    Product { kernel, threads: 2 * width as u32, tiles: tiles(width), splits }
}

/// Tiles of the gradient of the weights, the parts of its sum, and the shared memory it needs. The sum is split `further`
/// times as far as for a lane among others.
pub(super) fn weight(c: &Conv, batch: usize, further: usize) -> (usize, usize, u32) {
    let tiles = c.ci / 64 * (c.co / 64);
    let most = ((batch * c.ho * c.wo).div_ceil(CHUNK) / CHUNKS_MIN).min(further * PARTS_LEN / (9 * c.ci * c.co));
    (tiles, (further * BLOCKS_WANTED / tiles).max(2).min(most).max(1), weight_bytes(lines(c).unwrap_or(0)))
}

fn weight_bytes(lines: usize) -> u32 {
    (3 * 4 * (lines * PITCH + CHUNK * 64)) as u32
}

/// Max bytes of shared memory that a kernel needs.
pub(super) fn shared_bytes(kernel: &str) -> Option<u32> {
    let stages = |channels: usize| (3 * 4 * DEPTH * (PIXELS + channels)) as u32;
    match kernel {
        "gathered_FORWARD_1" | "gathered_INPUT_1" => Some(stages(64)),
        "gathered_FORWARD_2" | "gathered_INPUT_2" => Some(stages(128)),
        "gathered_weight" => Some(weight_bytes(LINES_MAX)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::conv::ALONE;
    use super::*;

    const BATCHES: [usize; 3] = [1, 64, 256];

    fn conv(out: usize, ci: usize, co: usize, kernel: usize, stride: usize) -> Conv {
        let (h, padding) = (out * stride, kernel / 2);
        Conv { h, w: h, ci, ho: out, wo: out, co, kernel, stride, padding }
    }

    #[test]
    fn shapes_that_the_kernels_cannot_compute_are_left_to_the_others() {
        let passes = |c: &Conv| [Pass::Forward, Pass::Input, Pass::Weight].map(|pass| serves(pass, c, c.ci, true));
        assert_eq!(passes(&conv(8, 64, 128, 3, 2)), [true; 3]);
        assert_eq!(passes(&conv(4, 128, 256, 3, 2)), [true; 3]);
        assert_eq!(passes(&conv(2, 256, 512, 3, 2)), [true; 3]);
        assert_eq!(passes(&conv(2, 512, 512, 3, 1)), [true; 3]);
        assert_eq!(passes(&conv(8, 64, 128, 1, 2)), [true, true, false], "one tap");
        assert_eq!(passes(&conv(3, 64, 64, 3, 2)), [true, true, false], "chunks of 32 results");
        assert_eq!(passes(&conv(8, 64, 96, 3, 2)), [false; 3]);
        assert_eq!(passes(&conv(1, 256, 512, 1, 1)), [false; 3], "a linear layer");
        assert_eq!(passes(&Conv { h: 15, ..conv(8, 64, 64, 3, 2) }), [false; 3], "an odd image");
        let c = conv(8, 64, 64, 3, 2);
        assert!(!serves(Pass::Forward, &c, 68, true) && !serves(Pass::Forward, &c, 64, false), "copies of 16 bytes");
    }

    #[test]
    fn tiles_cover_every_result_and_lanes_do_not_cut_sums() {
        for c in [conv(8, 64, 128, 3, 2), conv(4, 128, 256, 1, 2), conv(2, 512, 512, 3, 1), conv(3, 64, 64, 3, 2)] {
            for (batch, pass) in BATCHES.into_iter().flat_map(|n| [(n, Pass::Forward), (n, Pass::Input)]) {
                let [one, ten] = [1, 10].map(|lanes| product(pass, &c, batch, lanes, 132));
                assert_eq!(one.splits, ten.splits);
                let out = if pass == Pass::Forward { c.ho * c.wo * c.co } else { c.h * c.w * c.ci };
                for p in [one, ten] {
                    let area = PIXELS * p.threads as usize / 2;
                    assert!(p.tiles * area >= batch * out, "{p:?}");
                    assert!(p.splits == 1 || p.splits * batch * out <= PARTS_LEN, "{p:?}");
                }
            }
        }
        assert!(product(Pass::Forward, &conv(2, 512, 512, 3, 1), 64, 5, 132).splits > 1);
    }

    #[test]
    fn parts_of_the_weights_gradient_fit_their_memory() {
        const PROCESSOR: u32 = 227 * 1024;
        for (c, batch) in
            [conv(8, 64, 128, 3, 2), conv(2, 256, 512, 3, 2)].into_iter().flat_map(|c| BATCHES.map(|n| (c, n)))
        {
            for further in [1, ALONE] {
                let (tiles, splits, bytes) = weight(&c, batch, further);
                assert_eq!(tiles * 64 * 64, c.ci * c.co);
                assert!(splits == 1 || splits * 9 * c.ci * c.co <= further * PARTS_LEN);
                assert!(Some(bytes) <= shared_bytes("gathered_weight") && bytes > 0);
            }
        }
        for c in [conv(8, 64, 128, 3, 2), conv(4, 128, 256, 3, 2)] {
            let (tiles, splits, _) = weight(&c, 256, ALONE);
            assert!((120..=132).contains(&(tiles * splits)), "one lane alone gives every processor a part: {c:?}");
        }
        assert!(shared_bytes("gathered_weight").is_some_and(|bytes| bytes <= PROCESSOR));
        for (kernel, at_once) in [("gathered_FORWARD_1", 3), ("gathered_INPUT_2", 2)] {
            assert!(shared_bytes(kernel).is_some_and(|bytes| at_once * (bytes + 1024) <= PROCESSOR), "{kernel}");
        }
    }
}
