//! Winograd's algorithm on blocks of images, for many tiles. A block's transforms stay in one core's cache; each block
//! is multiplied with the transformed weights of the whole layer.

use super::super::gemm::{Dims, Order, PANEL, gemm, pack_panels};
use super::super::team::{Private, Shards, nth_range};
use super::super::{Cpu, Sum};
use super::tiles::{self, FilterRun, Planes};
use super::winograd::{Tile, position_stride, times_panels};
use super::{Backward, Conv, Forward, Scratch};

/// Tiles per block: their transforms and the weights' should fit the second-level cache together.
const BLOCK_TILES: usize = 48;
/// Partial weight gradients per backward pass. It can use one thread per gradient.
const SLICES: usize = 4;

/// How a batch is cut; depends only on shapes.
struct Cut {
    tiles_per_image: usize,
    positions: usize,
    images_per_block: usize,
}

impl Cut {
    fn new(conv: &Conv, tile: Tile, n_images: usize) -> Self {
        let tiles_per_image = tile.per_image(conv);
        let images_per_block = (BLOCK_TILES / tiles_per_image).clamp(1, n_images);
        Self { tiles_per_image, positions: tile.positions(), images_per_block }
    }

    fn stride(&self, channels: usize) -> usize {
        position_stride(self.images_per_block * self.tiles_per_image * channels)
    }

    /// The planes of inputs and of outputs of a block, in `memory`.
    fn planes<'a>(&self, conv: &Conv, memory: &'a mut [f32]) -> (Planes<'a>, Planes<'a>) {
        let (v, m) = memory.split_at_mut(self.positions * self.stride(conv.ci));
        let planes = |memory, channels| Planes::new(memory, self.positions, self.stride(channels), 0..channels);
        (planes(v, conv.ci), planes(m, conv.co))
    }
}

pub(super) fn scratch_len(conv: &Conv, tile: Tile, n_max: usize) -> (usize, usize) {
    let cut = Cut::new(conv, tile, n_max);
    let weights = cut.positions * position_stride(conv.ci * conv.co);
    ((1 + SLICES) * weights, cut.positions * (cut.stride(conv.ci) + cut.stride(conv.co)))
}

pub(super) fn forward(cpu: &mut Cpu, conv: &Conv, tile: Tile, pass: Forward<'_>, scratch: Scratch<'_>) {
    let Forward { x, w, end, y } = pass;
    let n_images = conv.n_images(x);
    let cut = Cut::new(conv, tile, n_images);
    let (isa, ci, co) = (cpu.isa, conv.ci, conv.co);
    let weight_stride = position_stride(ci * co);
    let (u, rest) = scratch.shared.split_at_mut(cut.positions * weight_stride);
    filter_forward(cpu, conv, tile, w, &mut rest[..9 * ci * co], u, weight_stride);
    let u = &*u;
    let (image_in, image_out) = (conv.h * conv.w * ci, conv.ho * conv.wo * co);
    let y = Shards::new(y);
    let private = Private::new(&cpu.team, scratch.private);
    cpu.team.run(n_images.div_ceil(cut.images_per_block), &|block, worker| {
        // SAFETY: each worker has its own scratch.
        let (v, m) = cut.planes(conv, unsafe { private.of(worker) });
        let start = block * cut.images_per_block;
        let images = start..(start + cut.images_per_block).min(n_images);
        tiles::input(isa, tile, conv, &x[images.start * image_in..images.end * image_in], 0, v);
        for p in 0..cut.positions {
            // SAFETY: this worker owns the planes.
            let (v, m) = unsafe { (v.position(p), m.position(p)) };
            let n_tiles = images.len() * cut.tiles_per_image;
            times_panels(isa, n_tiles, ci, co, v, &u[p * weight_stride..][..ci * co], m);
        }
        tiles::output(isa, tile, conv, m, &y, images.clone());
        // SAFETY: each unit owns its image.
        end.apply(isa, co, unsafe { y.part(images.start * image_out..images.end * image_out) });
    });
    cpu.team.forget(u);
}

pub(super) fn backward(cpu: &mut Cpu, conv: &Conv, tile: Tile, pass: Backward<'_>, scratch: Scratch<'_>) {
    let Backward { x, w, dy, dx, dw } = pass;
    let n_images = conv.n_images(x);
    let cut = Cut::new(conv, tile, n_images);
    let (isa, ci, co) = (cpu.isa, conv.ci, conv.co);
    let weight_stride = position_stride(ci * co);
    let weights = cut.positions * weight_stride;
    let (ut, rest) = scratch.shared.split_at_mut(weights);
    let du = &mut rest[..SLICES * weights];
    if dx.is_some() {
        filter_backward(cpu, conv, tile, w, ut, weight_stride);
    }
    let ut = &*ut;
    let (image_in, image_out) = (conv.h * conv.w * ci, conv.ho * conv.wo * co);
    let dx = dx.map(Sum::shards);
    let private = Private::new(&cpu.team, scratch.private);
    let partial = Shards::new(du);
    cpu.team.run(SLICES, &|slice, worker| {
        // SAFETY: each worker has its own scratch, each slice its own partial sum.
        let (du, memory) = unsafe { (partial.part(slice * weights..(slice + 1) * weights), private.of(worker)) };
        let (v, m) = cut.planes(conv, memory);
        let range = nth_range(n_images, SLICES, slice);
        if range.is_empty() {
            du.fill(0.0);
        }
        for start in range.clone().step_by(cut.images_per_block) {
            let images = start..(start + cut.images_per_block).min(range.end);
            tiles::output_adjoint(isa, tile, conv, &dy[images.start * image_out..images.end * image_out], 0, m);
            tiles::input(isa, tile, conv, &x[images.start * image_in..images.end * image_in], 0, v);
            let n_tiles = images.len() * cut.tiles_per_image;
            for p in 0..cut.positions {
                let span = p * weight_stride..p * weight_stride + ci * co;
                // SAFETY: this worker owns the planes.
                let (v, m) = unsafe { (v.position(p), m.position(p)) };
                let d = Dims { m: co, n: ci, k: n_tiles, lda: co, ldb: ci, ldc: ci };
                gemm(isa, Order::Columns, d, m, v, &mut du[span.clone()], start > range.start);
                if dx.is_some() {
                    // dV = W·Uᵀ replaces V, which is no longer needed.
                    times_panels(isa, n_tiles, co, ci, m, &ut[span], v);
                }
            }
            let Some(dx) = &dx else { continue };
            // SAFETY: each unit owns its image. Taking the part clears it if it is fresh.
            unsafe { dx.part(images.start * image_in..images.end * image_in) };
            tiles::input_adjoint(isa, tile, conv, v, &dx.shards, images);
        }
    });
    filter_adjoint(cpu, conv, tile, du, weight_stride, dw);
    if dx.is_some() {
        cpu.team.forget(ut);
    }
    cpu.team.forget(du);
}

/// U = G g Gᵀ (P, I, O) in panels along O, for the forward pass.
fn filter_forward(cpu: &mut Cpu, conv: &Conv, tile: Tile, w: &[f32], packed: &mut [f32], u: &mut [f32], stride: usize) {
    // Packed first, so that output channels run along the lanes: (3·3·I, O) in panels. In each panel the channels of a
    // tap are contiguous.
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
fn filter_adjoint(cpu: &mut Cpu, conv: &Conv, tile: Tile, du: &[f32], stride: usize, dw: &mut [f32]) {
    let (ci, co, isa) = (conv.ci, conv.co, cpu.isa);
    let dw = Shards::new(dw);
    let run = FilterRun { len: ci, tap_stride: ci, position_stride: stride };
    cpu.team.run(co, &|o, _| {
        tiles::filter_adjoint(isa, tile, run, &du[o * ci..], SLICES, tile.positions() * stride, &dw, o * 9 * ci);
    });
}
