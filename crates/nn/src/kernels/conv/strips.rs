//! Winograd's algorithm on strips of channels, for large weights and few tiles. A strip's transformed weights stay in
//! one core's cache, from transform to product and back. Each strip is multiplied with the tiles of the whole batch.

use super::super::gemm::{Dims, Order, gemm, transpose};
use super::super::team::{Private, Shards, Team, nth_range};
use super::super::{Cpu, Sum};
use super::tiles::{self, FilterRun, Planes};
use super::winograd::{Tile, position_stride, times_panels};
use super::{Backward, Conv, Forward, Scratch};
use std::ops::Range;

/// Channels per strip: up to a panel of the product, fewer if four threads would not get a strip each.
fn strip_width(channels: usize) -> usize {
    channels.div_ceil(4).next_multiple_of(16).min(64)
}

/// The number of strips, and the channels of each.
fn cut(channels: usize) -> (usize, impl Fn(usize) -> Range<usize> + Sync) {
    let width = strip_width(channels);
    (channels.div_ceil(width), move |i| i * width..((i + 1) * width).min(channels))
}

/// Floats of a strip from `inner` to `outer` channels: its weights, untransformed and transformed, and its tiles.
fn strip_floats(tile: Tile, n_tiles: usize, inner: usize, outer: usize) -> usize {
    let width = strip_width(outer);
    let transformed = position_stride(inner * width) + position_stride(n_tiles * width);
    (9 * inner * width).next_multiple_of(16) + tile.positions() * transformed
}

pub(super) fn scratch_len(conv: &Conv, tile: Tile, n_max: usize) -> (usize, usize) {
    let n_tiles = n_max * tile.per_image(conv);
    let shared = tile.positions() * position_stride(n_tiles * conv.ci.max(conv.co));
    let forward = strip_floats(tile, n_tiles, conv.ci, conv.co);
    (shared, forward.max(strip_floats(tile, n_tiles, conv.co, conv.ci)))
}

/// Transforms all images into planes in `memory`. Each thread transforms a share of the images.
fn all_planes<'a>(
    team: &mut Team,
    n_images: usize,
    memory: &'a mut [f32],
    (tile, conv, channels): (Tile, &Conv, usize),
    transform: &(dyn Fn(Range<usize>, usize, Planes<'_>) + Sync),
) -> Planes<'a> {
    let tiles_per_image = tile.per_image(conv);
    let stride = position_stride(n_images * tiles_per_image * channels);
    let planes = Planes::new(memory, tile.positions(), stride, 0..channels);
    let parts = n_images.min(16);
    team.run(parts, &|part, _| {
        let images = nth_range(n_images, parts, part);
        transform(images.clone(), images.start * tiles_per_image, planes);
    });
    planes
}

pub(super) fn forward(cpu: &mut Cpu, conv: &Conv, tile: Tile, pass: Forward<'_>, scratch: Scratch<'_>) {
    let Forward { x, w, end, y } = pass;
    let (n_images, isa, ci, co) = (conv.n_images(x), cpu.isa, conv.ci, conv.co);
    let (image, n_tiles) = (conv.h * conv.w * ci, n_images * tile.per_image(conv));
    let v = all_planes(&mut cpu.team, n_images, scratch.shared, (tile, conv, ci), &|images, first, v| {
        tiles::input(isa, tile, conv, &x[images.start * image..images.end * image], first, v);
    });
    let private = Private::new(&cpu.team, scratch.private);
    let out = Shards::new(y);
    let (n_strips, strip) = cut(co);
    cpu.team.run(n_strips, &|i, worker| {
        let channels = strip(i);
        let width = channels.len();
        // SAFETY: each worker has its own scratch.
        let memory = unsafe { private.of(worker) };
        let (packed, memory) = memory.split_at_mut((9 * ci * width).next_multiple_of(16));
        let stride = position_stride(ci * width);
        let (u, memory) = memory.split_at_mut(tile.positions() * stride);
        // Output channels run along the lanes: (3·3·I, strip). The channels of a tap are contiguous.
        transpose(isa, &w[channels.start * 9 * ci..], 9 * ci, width, &mut packed[..9 * ci * width]);
        let run = FilterRun { len: ci * width, tap_stride: ci * width, position_stride: stride };
        tiles::filter(isa, tile, run, packed, &Shards::new(u), 0);
        let m = Planes::new(memory, tile.positions(), position_stride(n_tiles * width), channels);
        for p in 0..tile.positions() {
            // SAFETY: V is only read now, and this worker owns M.
            let (v, m) = unsafe { (v.read(p), m.position(p)) };
            times_panels(isa, n_tiles, ci, width, v, &u[p * stride..][..ci * width], m);
        }
        tiles::output(isa, tile, conv, m, &out, 0..n_images);
    });
    // SAFETY: all units have ended.
    cpu.team.forget(unsafe { v.memory() });
    let image = conv.ho * conv.wo * co;
    cpu.team.run(n_images, &|i, _| {
        // SAFETY: each unit owns its image.
        end.apply(isa, co, unsafe { out.part(i * image..(i + 1) * image) });
    });
}

pub(super) fn backward(cpu: &mut Cpu, conv: &Conv, tile: Tile, pass: Backward<'_>, scratch: Scratch<'_>) {
    let Backward { x, w, dy, dx, dw } = pass;
    let (n_images, isa, ci, co) = (conv.n_images(x), cpu.isa, conv.ci, conv.co);
    let (image, n_tiles) = (conv.ho * conv.wo * co, n_images * tile.per_image(conv));
    let m = all_planes(&mut cpu.team, n_images, scratch.shared, (tile, conv, co), &|images, first, m| {
        tiles::output_adjoint(isa, tile, conv, &dy[images.start * image..images.end * image], first, m);
    });
    let private = Private::new(&cpu.team, scratch.private);
    let (dx, dw) = (dx.map(Sum::shards), Shards::new(dw));
    let (n_strips, strip) = cut(ci);
    cpu.team.run(n_strips, &|i, worker| {
        let channels = strip(i);
        let width = channels.len();
        // SAFETY: each worker has its own scratch.
        let memory = unsafe { private.of(worker) };
        let stride = position_stride(co * width);
        let (u, memory) = memory.split_at_mut(tile.positions() * stride);
        let run = FilterRun { len: width, tap_stride: ci, position_stride: stride };
        let v = Planes::new(memory, tile.positions(), position_stride(n_tiles * width), channels.clone());
        tiles::input(isa, tile, conv, x, 0, v);
        for p in 0..tile.positions() {
            // SAFETY: W is only read now, and this worker owns V.
            let (m, v) = unsafe { (m.read(p), v.position(p)) };
            let d = Dims { m: co, n: width, k: n_tiles, lda: co, ldb: width, ldc: width };
            gemm(isa, Order::Columns, d, m, v, &mut u[p * stride..], false);
        }
        for o in 0..co {
            tiles::filter_adjoint(isa, tile, run, &u[o * width..], 1, 0, &dw, o * 9 * ci + channels.start);
        }
        let Some(dx) = &dx else { return };
        // Uᵀ replaces dU, and dV = W·Uᵀ replaces V.
        let shards = Shards::new(u);
        for o in 0..co {
            tiles::filter(isa, tile, run, &w[o * 9 * ci + channels.start..], &shards, o * width);
        }
        for p in 0..tile.positions() {
            // SAFETY: as above.
            let (m, v) = unsafe { (m.read(p), v.position(p)) };
            times_panels(isa, n_tiles, co, width, m, &u[p * stride..][..co * width], v);
        }
        for pixel in 0..n_images * conv.h * conv.w {
            // SAFETY: this strip owns these channels. Taking them clears them if they are fresh.
            unsafe { dx.part(pixel * ci + channels.start..pixel * ci + channels.end) };
        }
        tiles::input_adjoint(isa, tile, conv, v, &dx.shards, 0..n_images);
    });
    // SAFETY: all units have ended.
    cpu.team.forget(unsafe { m.memory() });
}
