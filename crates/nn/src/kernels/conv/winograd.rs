//! 3×3 convolution of stride 1 by Winograd's minimal filtering (Lavin and Gray, arXiv:1509.09308).
//!
//! The output is cut into tiles of M×M. Each tile's input patch is transformed to P = (M+2)² values a channel, the
//! weights likewise, and for each of the P positions the channels meet in a matrix product over tiles:
//!
//! ```text
//! forward    V = Bᵀ d B (tiles, I)     U = G g Gᵀ (I, O)      Y  = Aᵀ [V·U] A
//! backward   W = A dy Aᵀ (tiles, O)    dx = B [W·Uᵀ] Bᵀ       dg = Gᵀ [Wᵀ·V] G
//! ```
//!
//! A position costs one multiplication where the plain algorithm spends 9·M²/P: F(4×4) saves a factor of 4, F(2×2) one of
//! 2.25. Images are taken in blocks whose transforms stay in the cache. Where the weights are large and the tiles few, the
//! whole batch is one block and the threads share the positions instead.

use super::super::gemm::{Dims, Order, PANEL, gemm, pack_panels};
use super::super::simd::Isa;
use super::super::team::{Private, Shards, Team, nth_range};
use super::super::{Cpu, Sum};
use super::tiles::{self, FilterRun, Planes};
use super::{Conv, Epilogue, Scratch};
use std::ops::Range;

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

    fn size(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    fn positions(self) -> usize {
        (self.size() + 2).pow(2)
    }

    fn per_image(self, conv: &Conv) -> usize {
        conv.ho.div_ceil(self.size()) * conv.wo.div_ceil(self.size())
    }
}

/// Tiles in a block: their transforms and the weights' should share the second-level cache.
const BLOCK_TILES: usize = 48;
/// Partial weight gradients of a blocked backward pass.
const SLICES: usize = 4;
/// Floats of transformed input and output up to which the whole batch is one block.
const SINGLE_BLOCK_FLOATS: usize = 1 << 21;

/// How a batch is cut; a function of shapes alone.
struct Plan {
    tiles_per_image: usize,
    positions: usize,
    images_per_block: usize,
    n_images: usize,
    /// The whole batch is one block, and threads share its parts.
    single: bool,
}

impl Plan {
    fn new(conv: &Conv, tile: Tile, n_images: usize) -> Self {
        let (tiles_per_image, positions) = (tile.per_image(conv), tile.positions());
        let single = n_images * tiles_per_image * positions * (conv.ci + conv.co) <= SINGLE_BLOCK_FLOATS;
        let images_per_block = if single { n_images } else { (BLOCK_TILES / tiles_per_image).clamp(1, n_images) };
        Self { tiles_per_image, positions, images_per_block, n_images, single }
    }

    fn block_tiles(&self) -> usize {
        self.images_per_block * self.tiles_per_image
    }

    /// Distance between the positions of a transformed block; off by a cache line from powers of two, which would send
    /// all positions of a tile to one set of the first-level cache.
    fn stride(&self, channels: usize) -> usize {
        (self.block_tiles() * channels).next_multiple_of(16) + 16
    }

    fn block_floats(&self, conv: &Conv) -> usize {
        self.positions * (self.stride(conv.ci) + self.stride(conv.co))
    }

    /// The planes of inputs and of outputs of a block, in `memory`.
    fn planes<'a>(&self, conv: &Conv, memory: &'a mut [f32]) -> (Planes<'a>, Planes<'a>) {
        let (v, m) = memory.split_at_mut(self.positions * self.stride(conv.ci));
        let planes = |memory, channels| Planes::new(memory, self.positions, self.stride(channels), channels);
        (planes(v, conv.ci), planes(m, conv.co))
    }

    /// How threads share the images of a block: the number of parts, and each part's first tile and images.
    fn cut(&self, images: Range<usize>) -> (usize, impl Fn(usize) -> (usize, Range<usize>) + Sync) {
        let (parts, tiles_per_image) = (images.len().min(16), self.tiles_per_image);
        (parts, move |i| {
            let part = nth_range(images.len(), parts, i);
            (part.start * tiles_per_image, images.start + part.start..images.start + part.end)
        })
    }

    /// Distance between the positions of transformed weights; off from powers of two for the same reason.
    fn weight_stride(conv: &Conv) -> usize {
        (conv.ci * conv.co).next_multiple_of(16) + 16
    }

    fn slices(&self) -> usize {
        if self.single { 1 } else { SLICES }
    }
}

pub(super) fn scratch_len(conv: &Conv, tile: Tile, n_max: usize) -> (usize, usize) {
    // Smaller batches may be single blocks where the largest is not.
    let per_image = tile.per_image(conv) * tile.positions() * (conv.ci + conv.co);
    let n_single = (SINGLE_BLOCK_FLOATS / per_image).min(n_max);
    let single = if n_single > 0 { Plan::new(conv, tile, n_single).block_floats(conv) } else { 0 };
    let plan = Plan::new(conv, tile, n_max);
    let weights = plan.positions * Plan::weight_stride(conv);
    let shared = weights + (plan.slices() * weights).max(9 * conv.ci * conv.co);
    if plan.single { (shared + single, 0) } else { (shared + single, plan.block_floats(conv)) }
}

#[allow(clippy::too_many_arguments, reason = "a kernel takes its operands one by one")]
pub(super) fn forward(
    cpu: &mut Cpu,
    conv: &Conv,
    tile: Tile,
    x: &[f32],
    w: &[f32],
    end: Epilogue<'_>,
    y: &mut [f32],
    scratch: Scratch<'_>,
) {
    let plan = Plan::new(conv, tile, conv.n_images(x));
    let (isa, ci, co) = (cpu.isa, conv.ci, conv.co);
    let weight_stride = Plan::weight_stride(conv);
    let (u, rest) = scratch.shared.split_at_mut(plan.positions * weight_stride);
    filter_forward(cpu, conv, tile, w, &mut rest[..9 * ci * co], u, weight_stride);
    let u = &*u;
    let (image_in, image_out) = (conv.h * conv.w * ci, conv.ho * conv.wo * co);
    let y = Shards::new(y);
    let block = |team: &mut Team, images: Range<usize>, v: Planes<'_>, m: Planes<'_>| {
        let (parts, part) = plan.cut(images.clone());
        team.run(parts, &|i, _| {
            let (first, images) = part(i);
            tiles::input(isa, tile, conv, &x[images.start * image_in..images.end * image_in], first, v);
        });
        let n_tiles = images.len() * plan.tiles_per_image;
        team.run(plan.positions, &|p, _| {
            // SAFETY: each position is one unit's.
            let (v, m) = unsafe { (v.position(p), m.position(p)) };
            times_panels(isa, n_tiles, ci, co, v, &u[p * weight_stride..][..ci * co], m);
        });
        team.run(parts, &|i, _| {
            let (first, images) = part(i);
            // SAFETY: each image is one unit's.
            let y = unsafe { y.part(images.start * image_out..images.end * image_out) };
            tiles::output(isa, tile, conv, m, first, y);
            end.apply(isa, co, y);
        });
    };
    if plan.single {
        let (v, m) = plan.planes(conv, rest);
        return block(&mut cpu.team, 0..plan.n_images, v, m);
    }
    let private = Private::new(&cpu.team, scratch.private);
    cpu.team.run(plan.n_images.div_ceil(plan.images_per_block), &|unit, worker| {
        // SAFETY: each worker has its own scratch.
        let (v, m) = plan.planes(conv, unsafe { private.of(worker) });
        let start = unit * plan.images_per_block;
        block(&mut Team::solo(), start..(start + plan.images_per_block).min(plan.n_images), v, m);
    });
}

#[allow(clippy::too_many_arguments, reason = "a kernel takes its operands one by one")]
pub(super) fn backward(
    cpu: &mut Cpu,
    conv: &Conv,
    tile: Tile,
    x: &[f32],
    w: &[f32],
    dy: &[f32],
    dx: Option<Sum<'_>>,
    dw: &mut [f32],
    scratch: Scratch<'_>,
) {
    let plan = Plan::new(conv, tile, conv.n_images(x));
    let (isa, ci, co) = (cpu.isa, conv.ci, conv.co);
    let weight_stride = Plan::weight_stride(conv);
    let weights = plan.positions * weight_stride;
    let (ut, rest) = scratch.shared.split_at_mut(weights);
    let (du, rest) = rest.split_at_mut(plan.slices() * weights);
    if dx.is_some() {
        filter_backward(cpu, conv, tile, w, ut, weight_stride);
    }
    let ut = &*ut;
    let (image_in, image_out) = (conv.h * conv.w * ci, conv.ho * conv.wo * co);
    let dx = dx.map(Sum::shards);
    let block = |team: &mut Team, images: Range<usize>, v: Planes<'_>, m: Planes<'_>, du: &mut [f32], add: bool| {
        let (parts, part) = plan.cut(images.clone());
        team.run(parts, &|i, _| {
            let (first, images) = part(i);
            tiles::output_adjoint(isa, tile, conv, &dy[images.start * image_out..images.end * image_out], first, m);
            tiles::input(isa, tile, conv, &x[images.start * image_in..images.end * image_in], first, v);
        });
        let n_tiles = images.len() * plan.tiles_per_image;
        let du = Shards::new(du);
        team.run(plan.positions, &|p, _| {
            let span = p * weight_stride..p * weight_stride + ci * co;
            // SAFETY: each position is one unit's.
            let (v, m, du) = unsafe { (v.position(p), m.position(p), du.part(span.clone())) };
            let d = Dims { m: co, n: ci, k: n_tiles, lda: co, ldb: ci, ldc: ci };
            gemm(isa, Order::Columns, d, m, v, du, add);
            if dx.is_some() {
                // dV = W·Uᵀ takes the place of V, which is no longer needed.
                times_panels(isa, n_tiles, co, ci, m, &ut[span], v);
            }
        });
        let Some(dx) = &dx else { return };
        team.run(parts, &|i, _| {
            let (first, images) = part(i);
            // SAFETY: each image is one unit's.
            let dx = unsafe { dx.part(images.start * image_in..images.end * image_in) };
            tiles::input_adjoint(isa, tile, conv, v, first, dx);
        });
    };
    if plan.single {
        let (v, m) = plan.planes(conv, rest);
        block(&mut cpu.team, 0..plan.n_images, v, m, du, false);
        return filter_adjoint(cpu, conv, tile, 1, du, weight_stride, dw);
    }
    let private = Private::new(&cpu.team, scratch.private);
    let partial = Shards::new(du);
    cpu.team.run(SLICES, &|slice, worker| {
        // SAFETY: each worker has its own scratch, each slice its own partial sum.
        let (du, memory) = unsafe { (partial.part(slice * weights..(slice + 1) * weights), private.of(worker)) };
        let (v, m) = plan.planes(conv, memory);
        let range = nth_range(plan.n_images, SLICES, slice);
        if range.is_empty() {
            du.fill(0.0);
        }
        for start in range.clone().step_by(plan.images_per_block) {
            let images = start..(start + plan.images_per_block).min(range.end);
            block(&mut Team::solo(), images, v, m, du, start > range.start);
        }
    });
    filter_adjoint(cpu, conv, tile, SLICES, du, weight_stride, dw);
}

/// C (m × n) = A (m × k) · B, where B lies in panels of [`PANEL`] columns.
fn times_panels(isa: Isa, m: usize, k: usize, n: usize, a: &[f32], panels: &[f32], c: &mut [f32]) {
    for (panel, b) in panels.chunks(k * PANEL).enumerate() {
        let width = PANEL.min(n - panel * PANEL);
        let d = Dims { m, n: width, k, lda: k, ldb: width, ldc: n };
        gemm(isa, Order::Rows, d, a, b, &mut c[panel * PANEL..], false);
    }
}

/// U = G g Gᵀ (P, I, O) in panels along O, for the forward pass.
fn filter_forward(cpu: &mut Cpu, conv: &Conv, tile: Tile, w: &[f32], packed: &mut [f32], u: &mut [f32], stride: usize) {
    // Packed first, so that output channels run along the lanes: (3·3·I, O) in panels, in each of which the channels of a
    // tap are one run.
    let (ci, co, isa) = (conv.ci, conv.co, cpu.isa);
    pack_panels(cpu, w, co, 9 * ci, packed);
    let (packed, u) = (&*packed, Shards::new(u));
    let parts = 4;
    cpu.team.run(co.div_ceil(PANEL) * parts, &|unit, _| {
        let (panel, part) = (unit / parts, unit % parts);
        let width = PANEL.min(co - panel * PANEL);
        let rows = nth_range(ci, parts, part);
        let start = rows.start * width;
        let run = FilterRun { len: rows.len() * width, tap_stride: ci * width, position_stride: stride };
        let from = &packed[panel * PANEL * 9 * ci + start..];
        tiles::filter(isa, tile, run, from, &u, panel * PANEL * ci + start);
    });
}

/// Uᵀ (P, O, I) in panels along I, for the gradient of the input.
fn filter_backward(cpu: &mut Cpu, conv: &Conv, tile: Tile, w: &[f32], ut: &mut [f32], stride: usize) {
    let (ci, co, isa) = (conv.ci, conv.co, cpu.isa);
    let ut = Shards::new(ut);
    cpu.team.run(co, &|o, _| {
        for start in (0..ci).step_by(PANEL) {
            let width = PANEL.min(ci - start);
            let run = FilterRun { len: width, tap_stride: ci, position_stride: stride };
            tiles::filter(isa, tile, run, &w[o * 9 * ci + start..], &ut, start * co + o * width);
        }
    });
}

/// dw = Gᵀ (Σ_slices dU) G.
fn filter_adjoint(cpu: &mut Cpu, conv: &Conv, tile: Tile, n_slices: usize, du: &[f32], stride: usize, dw: &mut [f32]) {
    let (ci, co, isa) = (conv.ci, conv.co, cpu.isa);
    let dw = Shards::new(dw);
    cpu.team.run(co, &|o, _| {
        // SAFETY: each output channel is one unit's.
        let dw = unsafe { dw.part(o * 9 * ci..(o + 1) * 9 * ci) };
        let run = FilterRun { len: ci, tap_stride: ci, position_stride: stride };
        tiles::filter_adjoint(isa, tile, run, &du[o * ci..], n_slices, tile.positions() * stride, dw);
    });
}
