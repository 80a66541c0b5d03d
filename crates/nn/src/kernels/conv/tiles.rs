//! The vector kernels of [`super::winograd`]: they transform tiles of images and weights forth and back. Channels run
//! along the lanes.

use super::super::simd::{Isa, Simd};
use super::super::team::Shards;
use super::Conv;
use super::transform::{F2, F4, Transform};
use super::winograd::Tile;
use std::marker::PhantomData;
use std::ops::Range;

/// Transformed tiles: one matrix (tiles, channels) per position. The channels are a range of the images' channels.
#[derive(Clone, Copy)]
pub(super) struct Planes<'a> {
    start: *mut f32,
    len: usize,
    stride: usize,
    /// The first channel, and their number.
    channel: usize,
    n_channels: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: exclusively borrowed memory. Users of a position or a tile promise exclusive access.
unsafe impl Sync for Planes<'_> {}

impl<'a> Planes<'a> {
    /// Planes in `memory`, `stride` floats from one position to the next.
    pub fn new(memory: &'a mut [f32], n_positions: usize, stride: usize, channels: Range<usize>) -> Self {
        let memory = &mut memory[..n_positions * stride];
        let (channel, n_channels) = (channels.start, channels.len());
        Self { start: memory.as_mut_ptr(), len: memory.len(), stride, channel, n_channels, lifetime: PhantomData }
    }

    /// The matrix at a position.
    ///
    /// # Safety
    /// Nothing else uses this position meanwhile.
    #[allow(clippy::mut_from_ref, reason = "disjoint parts through a shared reference, as Shards")]
    pub unsafe fn position(&self, p: usize) -> &mut [f32] {
        assert!((p + 1) * self.stride <= self.len, "position {p}");
        // SAFETY: inside the memory by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(p * self.stride), self.stride) }
    }

    /// All positions, read-only.
    ///
    /// # Safety
    /// Nothing writes to them meanwhile.
    pub unsafe fn memory(&self) -> &[f32] {
        // SAFETY: borrowed for this lifetime, and not written by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// The matrix at a position, read-only.
    ///
    /// # Safety
    /// Nothing writes to this position meanwhile.
    pub unsafe fn read(&self, p: usize) -> &[f32] {
        assert!((p + 1) * self.stride <= self.len, "position {p}");
        // SAFETY: inside the memory by the assertion, not written by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.add(p * self.stride), self.stride) }
    }

    /// The channels of a tile at position 0. Position p is `p * stride` further.
    fn tile(&self, tile: usize) -> *mut f32 {
        assert!((tile + 1) * self.n_channels <= self.stride, "tile {tile}");
        // SAFETY: inside the memory by the assertion.
        unsafe { self.start.add(tile * self.n_channels) }
    }
}

/// A kernel for both tiles. It checks its operands itself.
macro_rules! by_tile {
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),*) = $kernel:ident) => {
        $(#[$meta])*
        pub(super) fn $name(isa: Isa, tile: Tile, $($arg: $ty),*) {
            dispatch! { fn two($($arg: $ty),*) = $kernel::<F2, 2, 4> }
            dispatch! { fn four($($arg: $ty),*) = $kernel::<F4, 4, 6> }
            match tile {
                Tile::Two => two(isa, $($arg),*),
                Tile::Four => four(isa, $($arg),*),
            }
        }
    };
}

by_tile! {
    /// V = Bᵀ d B for every tile of the images `x`. The first tile becomes tile `first` of `v`.
    fn input(conv: &Conv, x: &[f32], first: usize, v: Planes<'_>) = input_tiles
}
by_tile! {
    /// Y = Aᵀ m A for every tile of the images `y`.
    fn output(conv: &Conv, m: Planes<'_>, y: &Shards<'_, f32>, images: Range<usize>) = output_tiles
}
by_tile! {
    /// W = A dy Aᵀ for every tile of the gradient images `dy`. The first tile becomes tile `first` of `m`.
    fn output_adjoint(conv: &Conv, dy: &[f32], first: usize, m: Planes<'_>) = output_adjoint_tiles
}
by_tile! {
    /// dx += B dv Bᵀ for every tile. Neighbouring tiles overlap by two pixels.
    fn input_adjoint(conv: &Conv, v: Planes<'_>, dx: &Shards<'_, f32>, images: Range<usize>) = input_adjoint_tiles
}
by_tile! {
    /// u = G g Gᵀ for a run of weights, written from `at`.
    fn filter(run: FilterRun, g: &[f32], u: &Shards<'_, f32>, at: usize) = filter_run
}
by_tile! {
    /// dg = Gᵀ (Σ_slices du) G for a run of weights, written from `at`. Slices are `slice_stride` apart.
    fn filter_adjoint(
        run: FilterRun, du: &[f32], n_slices: usize, slice_stride: usize, dg: &Shards<'_, f32>, at: usize
    ) = filter_adjoint_run
}

/// A run of weights. Its nine taps are `tap_stride` apart, its transforms `position_stride` apart.
#[derive(Clone, Copy)]
pub(super) struct FilterRun {
    pub len: usize,
    pub tap_stride: usize,
    pub position_stride: usize,
}

/// Reads a vector, or its first lanes.
#[inline(always)]
unsafe fn load<S: Simd>(p: *const f32, lanes: usize) -> S::V {
    // SAFETY: the caller guarantees `lanes` readable floats.
    unsafe { if lanes >= S::LANES { S::load(p) } else { S::load_masked(p, S::mask(lanes)) } }
}

/// Writes a vector, or its first lanes.
#[inline(always)]
unsafe fn store<S: Simd>(p: *mut f32, v: S::V, lanes: usize) {
    // SAFETY: the caller guarantees `lanes` writable floats.
    unsafe { if lanes >= S::LANES { S::store(p, v) } else { S::store_masked(p, v, S::mask(lanes)) } }
}

/// Offsets of the pixels of a K×K patch whose top left corner is (`top`, `left`); `OUTSIDE` for missing pixels.
#[inline(always)]
fn patch<const K: usize>(top: isize, left: isize, h: usize, w: usize, channels: usize) -> [[usize; K]; K] {
    let mut offsets = [[OUTSIDE; K]; K];
    for (i, row) in offsets.iter_mut().enumerate() {
        let y = top + i as isize;
        if y < 0 || y >= h as isize {
            continue;
        }
        for (j, offset) in row.iter_mut().enumerate() {
            let x = left + j as isize;
            if x >= 0 && x < w as isize {
                *offset = (y as usize * w + x as usize) * channels;
            }
        }
    }
    offsets
}

const OUTSIDE: usize = usize::MAX;

/// Takes the output pixels whose window reads padding alone out of the offsets of an M×M tile. Their value is 0, which the
/// transforms only give up to rounding. Only a padding of 3 or more has such windows.
#[inline(always)]
fn take_padding<const M: usize>(conv: &Conv, ty: usize, tx: usize, offsets: &mut [[usize; M]; M]) -> [[usize; M]; M] {
    let mut taken = [[OUTSIDE; M]; M];
    if conv.padding < 3 {
        return taken;
    }
    let is_outside = |at: usize, side: usize| at + 2 < conv.padding || at >= side + conv.padding;
    for i in 0..M {
        for j in 0..M {
            if is_outside(ty + i, conv.h) || is_outside(tx + j, conv.w) {
                taken[i][j] = std::mem::replace(&mut offsets[i][j], OUTSIDE);
            }
        }
    }
    taken
}

/// Loads a K×K patch of channel vectors, with zeros outside the image.
#[inline(always)]
unsafe fn load_patch<S: Simd, const K: usize>(
    image: *const f32,
    offsets: &[[usize; K]; K],
    lanes: usize,
) -> [[S::V; K]; K] {
    // SAFETY: offsets other than OUTSIDE are pixels of the image, with `lanes` readable channels each.
    unsafe {
        let mut d = [[S::splat(0.0); K]; K];
        for i in 0..K {
            for j in 0..K {
                if offsets[i][j] != OUTSIDE {
                    d[i][j] = load::<S>(image.add(offsets[i][j]), lanes);
                }
            }
        }
        d
    }
}

/// A transform of the columns of an A×A patch, then of the rows of what that gives. `$put` takes each of the B×B results.
macro_rules! columns_then_rows {
    ($a:expr => $b:expr, $transform:expr, |$j:ident| $column:expr, |$row:ident, $at:ident, $t:ident| $put:expr) => {
        let mut columns = [[S::splat(0.0); $a]; $b];
        for $j in 0..$a {
            let t = $transform($column);
            for i in 0..$b {
                columns[i][$j] = t[i];
            }
        }
        for $row in 0..$b {
            let row = $transform(columns[$row]);
            for $at in 0..$b {
                let $t = row[$at];
                $put;
            }
        }
    };
}

/// One transform of all tiles of some images. `$body` gets the image, the patch's corner and the tile's address.
macro_rules! for_each_tile {
    ($conv:expr, $M:expr, $images:expr, $first:expr, $planes:expr, |$img:ident, $ty:ident, $tx:ident, $at:ident| $body:block) => {
        let mut index = $first;
        for $img in $images {
            for $ty in (0..$conv.ho).step_by($M) {
                for $tx in (0..$conv.wo).step_by($M) {
                    let $at = $planes.tile(index);
                    index += 1;
                    $body
                }
            }
        }
    };
}

#[inline(always)]
unsafe fn input_tiles<S: Simd, F: Transform<M, N>, const M: usize, const N: usize>(
    conv: &Conv,
    x: &[f32],
    first: usize,
    v: Planes<'_>,
) {
    assert!(v.channel + v.n_channels <= conv.ci, "channels that the images do not have");
    let (ci, image) = (conv.ci, conv.h * conv.w * conv.ci);
    for_each_tile!(conv, M, 0..x.len() / image, first, v, |img, ty, tx, at| {
        let (top, left) = (ty as isize - conv.padding as isize, tx as isize - conv.padding as isize);
        let offsets = patch::<N>(top, left, conv.h, conv.w, ci);
        for c in (0..v.n_channels).step_by(S::LANES) {
            // SAFETY: the offsets are pixels of image `img`, c is a channel of the planes. This unit owns the tile's
            // rows at all positions.
            unsafe {
                let lanes = v.n_channels - c;
                let d = load_patch::<S, N>(x.as_ptr().add(img * image + v.channel + c), &offsets, lanes);
                columns_then_rows!(
                    N => N, F::input::<S>, |j| std::array::from_fn(|i| d[i][j]),
                    |i, j, t| store::<S>(at.add((i * N + j) * v.stride + c), t, lanes)
                );
            }
        }
    });
}

#[inline(always)]
unsafe fn output_tiles<S: Simd, F: Transform<M, N>, const M: usize, const N: usize>(
    conv: &Conv,
    m: Planes<'_>,
    y: &Shards<'_, f32>,
    images: Range<usize>,
) {
    assert!(m.channel + m.n_channels <= conv.co, "channels that the images do not have");
    let (co, image) = (conv.co, conv.ho * conv.wo * conv.co);
    assert!(images.end * image <= y.len(), "images {images:?}");
    for_each_tile!(conv, M, images, 0, m, |img, ty, tx, at| {
        let mut offsets = patch::<M>(ty as isize, tx as isize, conv.ho, conv.wo, co);
        let in_padding = take_padding(conv, ty, tx, &mut offsets);
        for &offset in in_padding.iter().flatten().filter(|offset| **offset != OUTSIDE) {
            let pixel = img * image + m.channel + offset;
            // SAFETY: a pixel of image `img`; this unit owns its channels.
            unsafe { y.part(pixel..pixel + m.n_channels) }.fill(0.0);
        }
        for c in (0..m.n_channels).step_by(S::LANES) {
            // SAFETY: this unit owns the tile's rows at all positions. The offsets are pixels of image `img`; this unit
            // owns their channels.
            unsafe {
                let lanes = m.n_channels - c;
                let out = y.at(img * image + m.channel + c);
                columns_then_rows!(
                    N => M, F::output::<S>,
                    |j| std::array::from_fn(|i| load::<S>(at.add((i * N + j) * m.stride + c), lanes)),
                    |i, j, t| if offsets[i][j] != OUTSIDE {
                        store::<S>(out.add(offsets[i][j]), t, lanes);
                    }
                );
            }
        }
    });
}

#[inline(always)]
unsafe fn output_adjoint_tiles<S: Simd, F: Transform<M, N>, const M: usize, const N: usize>(
    conv: &Conv,
    dy: &[f32],
    first: usize,
    m: Planes<'_>,
) {
    assert!(m.channel + m.n_channels <= conv.co, "channels that the images do not have");
    let (co, image) = (conv.co, conv.ho * conv.wo * conv.co);
    for_each_tile!(conv, M, 0..dy.len() / image, first, m, |img, ty, tx, at| {
        let mut offsets = patch::<M>(ty as isize, tx as isize, conv.ho, conv.wo, co);
        take_padding(conv, ty, tx, &mut offsets);
        for c in (0..m.n_channels).step_by(S::LANES) {
            // SAFETY: as in `input_tiles`.
            unsafe {
                let lanes = m.n_channels - c;
                let d = load_patch::<S, M>(dy.as_ptr().add(img * image + m.channel + c), &offsets, lanes);
                columns_then_rows!(
                    M => N, F::output_adjoint::<S>, |j| std::array::from_fn(|i| d[i][j]),
                    |i, j, t| store::<S>(at.add((i * N + j) * m.stride + c), t, lanes)
                );
            }
        }
    });
}

#[inline(always)]
unsafe fn input_adjoint_tiles<S: Simd, F: Transform<M, N>, const M: usize, const N: usize>(
    conv: &Conv,
    v: Planes<'_>,
    dx: &Shards<'_, f32>,
    images: Range<usize>,
) {
    assert!(v.channel + v.n_channels <= conv.ci, "channels that the images do not have");
    let (ci, image) = (conv.ci, conv.h * conv.w * conv.ci);
    assert!(images.end * image <= dx.len(), "images {images:?}");
    for_each_tile!(conv, M, images, 0, v, |img, ty, tx, at| {
        let (top, left) = (ty as isize - conv.padding as isize, tx as isize - conv.padding as isize);
        let offsets = patch::<N>(top, left, conv.h, conv.w, ci);
        for c in (0..v.n_channels).step_by(S::LANES) {
            // SAFETY: as in `output_tiles`.
            unsafe {
                let lanes = v.n_channels - c;
                let out = dx.at(img * image + v.channel + c);
                columns_then_rows!(
                    N => N, F::input_adjoint::<S>,
                    |j| std::array::from_fn(|i| load::<S>(at.add((i * N + j) * v.stride + c), lanes)),
                    |i, j, t| if offsets[i][j] != OUTSIDE {
                        let p = out.add(offsets[i][j]);
                        store::<S>(p, S::add(load::<S>(p, lanes), t), lanes);
                    }
                );
            }
        }
    });
}

#[inline(always)]
unsafe fn filter_run<S: Simd, F: Transform<M, N>, const M: usize, const N: usize>(
    run: FilterRun,
    g: &[f32],
    u: &Shards<'_, f32>,
    at: usize,
) {
    if run.len == 0 {
        return;
    }
    assert!(8 * run.tap_stride + run.len <= g.len(), "weights are too short");
    assert!(at + (N * N - 1) * run.position_stride + run.len <= u.len(), "transformed weights are too short");
    let (g, u) = (g.as_ptr(), u.at(at));
    for c in (0..run.len).step_by(S::LANES) {
        // SAFETY: both lengths are checked above; c < len.
        unsafe {
            let lanes = run.len - c;
            columns_then_rows!(
                3 => N, F::filter::<S>,
                |j| std::array::from_fn(|i| load::<S>(g.add((i * 3 + j) * run.tap_stride + c), lanes)),
                |i, j, t| store::<S>(u.add((i * N + j) * run.position_stride + c), t, lanes)
            );
        }
    }
}

#[inline(always)]
unsafe fn filter_adjoint_run<S: Simd, F: Transform<M, N>, const M: usize, const N: usize>(
    run: FilterRun,
    du: &[f32],
    n_slices: usize,
    slice_stride: usize,
    dg: &Shards<'_, f32>,
    at: usize,
) {
    let last = (n_slices - 1) * slice_stride + (N * N - 1) * run.position_stride;
    assert!(last + run.len <= du.len(), "transformed gradients are too short");
    assert!(at + 8 * run.tap_stride + run.len <= dg.len(), "weight gradients are too short");
    let (du, dg) = (du.as_ptr(), dg.at(at));
    for c in (0..run.len).step_by(S::LANES) {
        // SAFETY: both lengths are checked above; c < len.
        unsafe {
            let lanes = run.len - c;
            columns_then_rows!(
                N => 3, F::filter_adjoint::<S>,
                |j| {
                    let mut column = [S::splat(0.0); N];
                    for (i, sum) in column.iter_mut().enumerate() {
                        let p = du.add((i * N + j) * run.position_stride + c);
                        *sum = load::<S>(p, lanes);
                        for slice in 1..n_slices {
                            *sum = S::add(*sum, load::<S>(p.add(slice * slice_stride), lanes));
                        }
                    }
                    column
                },
                |i, j, t| store::<S>(dg.add((i * 3 + j) * run.tap_stride + c), t, lanes)
            );
        }
    }
}
