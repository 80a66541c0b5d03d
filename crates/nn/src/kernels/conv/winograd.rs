//! 3×3 convolution of stride 1 by Winograd's minimal filtering (Lavin and Gray, arXiv:1509.09308).
//!
//! The output is cut into tiles of M×M. The input patch of a tile is transformed to P = (M+2)² values per channel. The
//! weights are transformed likewise. At each of the P positions, a matrix product over tiles combines the channels:
//!
//! ```text
//! forward    V = Bᵀ d B (tiles, I)     U = G g Gᵀ (I, O)      Y  = Aᵀ [V·U] A
//! backward   W = A dy Aᵀ (tiles, O)    dx = B [W·Uᵀ] Bᵀ       dg = Gᵀ [Wᵀ·V] G
//! ```
//!
//! Each position costs one multiplication; the plain algorithm needs 9·M²/P. F(4×4) saves a factor of 4, F(2×2) one of
//! 2.25. The larger of the transformed images and weights never leaves the core that computed it. [`blocks`] of images
//! are multiplied with all weights. If the weights are large and the tiles few, [`strips`] of channels are multiplied
//! with all images.

use super::super::Cpu;
use super::super::gemm::{Dims, Order, PANEL, gemm};
use super::super::simd::Isa;
use super::{Backward, Conv, Forward, Scratch, blocks, strips};

/// Which algorithm: F(2×2, 3×3) or F(4×4, 3×3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tile {
    Two,
    Four,
}

impl Tile {
    /// The tile with the fewest multiplications, if one beats the plain algorithm.
    pub fn best_for(conv: &Conv) -> Option<Self> {
        if conv.kernel != 3 || conv.stride != 1 || conv.ci < 8 || conv.co < 8 {
            return None;
        }
        let cost = |tile: Self| tile.per_image(conv) * tile.positions();
        let best = if cost(Self::Four) <= cost(Self::Two) { Self::Four } else { Self::Two };
        (cost(best) < 9 * conv.ho * conv.wo).then_some(best)
    }

    pub fn size(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    pub fn positions(self) -> usize {
        (self.size() + 2).pow(2)
    }

    pub fn per_image(self, conv: &Conv) -> usize {
        conv.ho.div_ceil(self.size()) * conv.wo.div_ceil(self.size())
    }
}

/// The largest batch that runs in strips. Depends only on shapes: the transformed weights must be at least half as
/// large as the transformed images.
fn strips_max(conv: &Conv, tile: Tile) -> usize {
    4 * conv.ci * conv.co / (tile.per_image(conv) * (conv.ci + conv.co))
}

pub(super) fn scratch_len(conv: &Conv, tile: Tile, n_max: usize) -> (usize, usize) {
    // Smaller batches may run in strips even if the largest does not.
    let n_strips = strips_max(conv, tile).min(n_max);
    let of_strips = if n_strips > 0 { strips::scratch_len(conv, tile, n_strips) } else { (0, 0) };
    let of_blocks = if n_strips < n_max { blocks::scratch_len(conv, tile, n_max) } else { (0, 0) };
    (of_strips.0.max(of_blocks.0), of_strips.1.max(of_blocks.1))
}

pub(super) fn forward(cpu: &mut Cpu, conv: &Conv, tile: Tile, pass: Forward<'_>, scratch: Scratch<'_>) {
    if conv.n_images(pass.x) <= strips_max(conv, tile) {
        strips::forward(cpu, conv, tile, pass, scratch);
    } else {
        blocks::forward(cpu, conv, tile, pass, scratch);
    }
}

pub(super) fn backward(cpu: &mut Cpu, conv: &Conv, tile: Tile, pass: Backward<'_>, scratch: Scratch<'_>) {
    if conv.n_images(pass.x) <= strips_max(conv, tile) {
        strips::backward(cpu, conv, tile, pass, scratch);
    } else {
        blocks::backward(cpu, conv, tile, pass, scratch);
    }
}

/// Distance between positions of `len` floats each. It is off by a cache line from powers of two, which would map all
/// positions of a tile to one set of the first-level cache.
pub(super) fn position_stride(len: usize) -> usize {
    len.next_multiple_of(16) + 16
}

/// C (m × n) = A (m × k) · B, with B in panels of [`PANEL`] columns.
pub(super) fn times_panels(isa: Isa, m: usize, k: usize, n: usize, a: &[f32], panels: &[f32], c: &mut [f32]) {
    for (panel, b) in panels.chunks(k * PANEL).enumerate() {
        let width = PANEL.min(n - panel * PANEL);
        let d = Dims { m, n: width, k, lda: k, ldb: width, ldc: n };
        gemm(isa, Order::Rows, d, a, b, &mut c[panel * PANEL..], false);
    }
}
