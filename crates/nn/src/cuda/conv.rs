//! Convolutions on the GPU: which kernel computes a pass, and how its sum is split (split-K).

use super::gpu::{Pass, parameters};
use crate::kernels::conv::Conv;
use crate::kernels::pool::MaxPool;

/// Tiles in flight, and floats per tile along the sum, as in `conv.cu`.
pub(super) const STAGES: usize = 4;
const DEPTH: usize = 16;

/// n / d by multiplication.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Div {
    multiplier: u32,
    shift: u32,
}

impl Div {
    pub fn by(d: usize) -> Self {
        let shift = d.max(1).next_power_of_two().trailing_zeros();
        let multiplier = ((1u64 << 32) * ((1u64 << shift) - d.max(1) as u64) / d.max(1) as u64 + 1) as u32;
        Self { multiplier, shift }
    }
}

/// A convolution, as in `conv.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    h: i32,
    w: i32,
    ci: i32,
    ho: i32,
    wo: i32,
    co: i32,
    kernel: i32,
    stride: i32,
    pad: i32,
    xc: i32,
    batch: i32,
    by_out_pixels: Div,
    by_wo: Div,
    by_xc: Div,
    by_kernel: Div,
    tokens: u64,
}
parameters!(Geometry = "Conv");

impl Geometry {
    /// `pitch`: floats from pixel to pixel of X. `tokens`: the address of the lanes' row counts, if rows are tokens.
    pub fn new(c: &Conv, pitch: usize, batch: usize, tokens: u64) -> Self {
        let [h, w, ci, ho, wo, co, kernel, stride, pad, xc, batch] =
            [c.h, c.w, c.ci, c.ho, c.wo, c.co, c.kernel, c.stride, c.padding, pitch, batch].map(|v| v as i32);
        let [by_out_pixels, by_wo, by_xc, by_kernel] = [c.ho * c.wo, c.wo, pitch, c.kernel].map(Div::by);
        Self { h, w, ci, ho, wo, co, kernel, stride, pad, xc, batch, by_out_pixels, by_wo, by_xc, by_kernel, tokens }
    }
}

/// How a pass is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Launch {
    pub kernel: &'static str,
    pub tiles: usize,
    pub splits: usize,
    pub shared: u32,
}

/// Minimum tiles per lane before split-K: ten lanes then fill a large GPU, two blocks per processor. It does not depend on
/// the number of lanes, so results do not either.
pub(super) const TILES_WANTED: usize = 26;
/// Minimum blocks of wide tiles for the gradient of weights, and for the other passes. Measured: fewer leave too many
/// processors idle in the last wave.
const WIDE_WANTED: (usize, usize) = (200, 600);
/// Minimum length of a part of a sum, and the length of parts of long sums: one lane alone then fills the GPU.
const SPLIT_LEN: (usize, usize) = (256, 2560);

/// Max bytes of shared memory per block: the gradient of weights with wide tiles.
pub(super) const SHARED_MAX: u32 = (4 * STAGES * 2 * DEPTH * (128 + 8)) as u32;

/// Floats of memory that the parts of any pass need, of one lane among others.
pub(super) const PARTS_LEN: usize = 108 * 128 * 128;

/// How much further the sum of a weights' gradient is split where one lane has the GPU to itself: 130 blocks instead of 26.
pub(super) const ALONE: usize = 5;

/// Max bytes of two images with their margins.
pub(super) const STEM_SHARED_MAX: u32 = 2 * 16 * 34 * 34;

/// Bytes of shared memory that `stem.cu` needs, for shapes it supports.
pub(super) fn stem_shared(c: &Conv, pitch: usize) -> Option<u32> {
    let bytes = 2 * 16 * ((c.h + 2) * (c.w + 2)) as u32;
    let is_plain = (c.kernel, c.stride, c.padding) == (3, 1, 1);
    (is_plain && pitch == 4 && c.co.is_multiple_of(64) && bytes <= STEM_SHARED_MAX).then_some(bytes)
}

/// Parts of an image that `stem` computes one after another: halves leave fewer blocks idle at the end.
pub(super) fn stem_parts(c: &Conv) -> usize {
    if c.h.is_multiple_of(2) { 2 } else { 1 }
}

/// Max bytes of shared memory of `stem_pool`: the images and five rows of 32 pixels.
pub(super) const STEM_POOL_SHARED_MAX: u32 = STEM_SHARED_MAX + 5 * 32 * 80 * 4;

/// Bytes of shared memory that `stem_pool` needs. It supports pools of 3×3 and stride 2 over whole bands of 128 pixels.
pub(super) fn stem_pool_shared(c: &Conv, pitch: usize, pool: &MaxPool) -> Option<u32> {
    let is_plain = (pool.kernel, pool.stride, pool.padding) == (3, 2, 1);
    let band = 128 / c.w.max(1);
    let is_whole =
        band > 0 && band * c.w == 128 && c.w.is_multiple_of(2) && band.is_multiple_of(2) && c.h.is_multiple_of(band);
    let bytes = stem_shared(c, pitch)? + (4 * 80 * (band + 1) * c.w) as u32;
    (is_plain && is_whole && bytes <= STEM_POOL_SHARED_MAX).then_some(bytes)
}

/// Max bytes of shared memory of `stem_weight`: two bands of two rows of 64 pixels.
pub(super) const STEM_WEIGHT_SHARED_MAX: u32 = stem_weight_bytes(64) as u32;

/// Bytes of shared memory that `stem_weight` needs for images of this width. It supports the shapes of `stem_pool`.
pub(super) fn stem_weight_shared(c: &Conv) -> u32 {
    stem_weight_bytes(c.w) as u32
}

/// Two bands, each with 128 pixels of 64 channels, their image with its margin, and the pool's windows on them with their
/// winners.
const fn stem_weight_bytes(width: usize) -> usize {
    let rows = 128 / width;
    let windows = (rows / 2 + 1) * (width / 2);
    2 * 4 * (128 * 72 + 4 * (rows + 2) * (width + 2) + (64 + 16) * windows)
}

impl Launch {
    /// `aligned`: whether the weights start at a multiple of four floats. `is_exact`: each product is three, whose registers
    /// leave no room for wide tiles. The number of lanes chooses between kernels that compute the same bytes. How a sum is
    /// split depends on the shape alone. Sums of a weights' gradient are split `further` times as far.
    #[allow(clippy::too_many_arguments, reason = "what a launch depends on")]
    pub fn new(
        pass: Pass,
        c: &Conv,
        pitch: usize,
        batch: usize,
        aligned: bool,
        lanes: usize,
        is_exact: bool,
        further: usize,
    ) -> Self {
        let further = if pass == Pass::Weight { further } else { 1 };
        let taps = c.kernel * c.kernel;
        let fours = |counts: &[usize]| aligned && taps <= 32 && counts.iter().all(|n| n.is_multiple_of(4));
        let (rows, columns, depth) = match pass {
            Pass::Forward => (batch * c.ho * c.wo, c.co, taps * c.ci),
            Pass::Input => (batch * c.h.div_ceil(c.stride) * c.w.div_ceil(c.stride), c.ci, taps * c.co),
            Pass::Weight => (taps * pitch, c.co, batch * c.ho * c.wo),
        };
        let classes = if pass == Pass::Input { c.stride * c.stride } else { 1 };
        let tiles_of = |width: usize| rows.div_ceil(128) * columns.div_ceil(width) * classes;
        let by_fours = match pass {
            Pass::Forward => fours(&[c.ci]),
            Pass::Input => fours(&[c.ci, c.co]),
            Pass::Weight => fours(&[pitch, c.co]),
        };
        let out_len = if pass == Pass::Weight { taps * c.ci * columns } else { rows * columns };
        let wanted = (further * TILES_WANTED).div_ceil(tiles_of(64)).max(depth / SPLIT_LEN.1);
        let most = (depth / SPLIT_LEN.0).min(further * PARTS_LEN / out_len.max(1)).max(1);
        let splits = if classes > 1 { 1 } else { wanted.clamp(1, most) };
        let wide_wanted = if pass == Pass::Weight { WIDE_WANTED.0 } else { WIDE_WANTED.1 };
        let is_wide = !is_exact && by_fours && columns >= 128 && tiles_of(128) * splits * lanes >= wide_wanted;
        let (kernel, width) = match pass {
            _ if is_wide => ("conv_44_2x2x8", 128),
            _ if by_fours => ("conv_44_2x2x4", 64),
            Pass::Forward if pitch.is_multiple_of(4) => ("conv_41_2x2x4", 64),
            _ => ("conv_11_2x2x4", 64),
        };
        let tiles = tiles_of(width);
        let by_rows = |lines: usize| lines * DEPTH;
        let by_columns = |lines: usize| DEPTH * (lines + 8);
        let floats = match pass {
            Pass::Forward => by_rows(128) + by_rows(width),
            Pass::Input => by_rows(128) + by_columns(width),
            Pass::Weight => by_columns(128) + by_columns(width),
        };
        Self { kernel, tiles, splits, shared: (4 * STAGES * floats) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_by_multiplication_is_exact() {
        for d in (1..70).chain([255, 256, 1000, 1024, 12_544, 65_535]) {
            let Div { multiplier, shift } = Div::by(d);
            for n in (0..5000u32).chain([1 << 20, (1 << 31) - 1, 123_456_789]) {
                let high = (u64::from(n) * u64::from(multiplier)) >> 32;
                assert_eq!((high + u64::from(n)) >> shift, u64::from(n) / d as u64, "{n} / {d}");
            }
        }
    }

    #[test]
    fn a_first_layer_takes_in_the_pool_of_images_that_come_in_bands() {
        let conv =
            |side, co| Conv { h: side, w: side, ci: 3, ho: side, wo: side, co, kernel: 3, stride: 1, padding: 1 };
        let pool = |side, kernel| MaxPool {
            h: side,
            w: side,
            c: 64,
            ho: side / 2,
            wo: side / 2,
            kernel,
            stride: 2,
            padding: 1,
        };
        assert_eq!(stem_pool_shared(&conv(32, 64), 4, &pool(32, 3)), Some(STEM_POOL_SHARED_MAX));
        assert!(stem_pool_shared(&conv(16, 128), 4, &pool(16, 3)).is_some());
        for width in [8, 16, 32, 64] {
            assert!(stem_weight_bytes(width) as u32 <= STEM_WEIGHT_SHARED_MAX);
        }
        assert_eq!(stem_pool_shared(&conv(28, 64), 4, &pool(28, 3)), None, "bands of 128 pixels");
        assert_eq!(stem_pool_shared(&conv(32, 64), 4, &pool(32, 2)), None);
        assert_eq!(stem_pool_shared(&conv(32, 48), 4, &pool(32, 3)), None);
        let narrow = Conv { h: 128, w: 1, ho: 128, wo: 1, ..conv(32, 64) };
        assert_eq!(stem_pool_shared(&narrow, 4, &MaxPool { h: 128, w: 1, ho: 64, wo: 1, ..pool(32, 3) }), None);
        assert_eq!(stem_pool_shared(&conv(32, 64), 3, &pool(32, 3)), None, "copies of 16 bytes");
    }

    #[test]
    fn parts_of_sums_fit_their_memory_and_their_blocks() {
        for (h, ci, co, kernel, stride) in
            [(32, 3, 64, 3, 1), (16, 64, 64, 3, 1), (8, 128, 256, 3, 2), (1, 12_544, 128, 1, 1), (7, 5, 9, 5, 3)]
        {
            for batch in [1, 10, 64, 256] {
                let padding = kernel / 2;
                let ho = (h + 2 * padding - kernel) / stride + 1;
                let c = Conv { h, w: h, ci, ho, wo: ho, co, kernel, stride, padding };
                for pass in [Pass::Forward, Pass::Input, Pass::Weight] {
                    for (lanes, further) in [(1, 1), (10, 1), (1, ALONE)] {
                        let launch = Launch::new(pass, &c, ci, batch, true, lanes, false, further);
                        let out = match pass {
                            Pass::Forward => batch * ho * ho * co,
                            Pass::Input => batch * h * h * ci,
                            Pass::Weight => kernel * kernel * ci * co,
                        };
                        assert!(
                            launch.splits == 1 || launch.splits * out <= further * PARTS_LEN,
                            "{pass:?} {c:?} {launch:?}"
                        );
                        assert!(launch.shared <= SHARED_MAX, "{launch:?}");
                        assert_eq!(
                            launch.splits,
                            Launch::new(pass, &c, ci, batch, true, 1, true, further).splits,
                            "lanes must not cut sums"
                        );
                    }
                }
            }
        }
    }
}
