//! Fully connected layers: y = x·Wᵀ + b with W stored (out, in).

use super::conv::Epilogue;
use super::elementwise::add_slices;
use super::gemm::{Dims, Order, PANEL, gemm, gemm_at, pack_panels};
use super::simd::{Isa, Simd};
use super::team::{Shards, nth_range};
use super::{Cpu, Sum};
use std::ops::Range;

/// Sizes of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Linear {
    pub inputs: usize,
    pub outputs: usize,
}

/// Outputs, or weight rows, per unit of work.
const UNIT: usize = 32;
/// Rows of a product that are computed together (see [`gemm`]), and the depth of a block of weights. W is walked along
/// its rows, a few at a time, because every element of a column is on another page.
const ROWS: usize = 6;
const DEPTH: usize = 16;
/// Minimum inputs of a long layer: its W does not fit the caches beside its x and y.
const LONG: usize = 2048;
/// Partial sums of the gradient of a long input. Few, because each needs as much memory as the gradient.
const SLICES: usize = 2;
/// Floats of x that stay in the second-level cache.
const BLOCK_FLOATS: usize = 64 * 1024;

impl Linear {
    /// Whether to compute dot products along `inputs` instead of transposing W first. This pays when few rows use W, or
    /// when rows are so long that the final sum of each dot product does not matter.
    fn by_dots(&self, n: usize) -> bool {
        n < 32 || self.inputs >= LONG
    }

    /// y (N, out) = x (N, in)·Wᵀ, then the epilogue.
    pub fn forward(&self, cpu: &mut Cpu, x: &[f32], w: &[f32], end: Epilogue<'_>, y: &mut [f32], packed: &mut [f32]) {
        let (k, n_out, isa) = (self.inputs, self.outputs, cpu.isa);
        let n = y.len() / n_out;
        let out = Shards::new(y);
        if self.by_dots(n) {
            cpu.team.run(n_out.div_ceil(UNIT), &|unit, _| {
                let outputs = unit * UNIT..((unit + 1) * UNIT).min(n_out);
                // SAFETY: each unit writes its own columns of y, which has n rows of n_out.
                dots(isa, n, k, x, &w[outputs.start * k..outputs.end * k], out.at(outputs.start), n_out);
            });
        } else {
            let packed = &mut packed[..k * n_out];
            pack_panels(cpu, w, n_out, k, packed);
            let packed = &*packed;
            let parts = n.div_ceil(48);
            cpu.team.run(parts, &|part, _| {
                let rows = nth_range(n, parts, part);
                // SAFETY: each unit has its own rows.
                let y = unsafe { out.part(rows.start * n_out..rows.end * n_out) };
                for (panel, b) in packed.chunks(k * PANEL).enumerate() {
                    let width = PANEL.min(n_out - panel * PANEL);
                    let d = Dims { m: rows.len(), n: width, k, lda: k, ldb: width, ldc: n_out };
                    gemm(isa, Order::Rows, d, &x[rows.start * k..], b, &mut y[panel * PANEL..], false);
                }
            });
        }
        end.apply(isa, n_out, y);
    }

    /// dx += dy·W. `scratch` has the length of W.
    pub fn backward_input(&self, cpu: &mut Cpu, w: &[f32], dy: &[f32], dx: Sum<'_>, scratch: &mut [f32]) {
        let (k, n_out, isa) = (self.inputs, self.outputs, cpu.isa);
        let n = dy.len() / n_out;
        let product = |rows: Range<usize>, columns: Range<usize>, c: &Shards<'_, f32>, at: usize, add: bool| {
            for first in rows.clone().step_by(DEPTH) {
                let d = Dims { m: n, n: columns.len(), k: DEPTH.min(rows.end - first), lda: n_out, ldb: k, ldc: k };
                let (a, b) = (&dy[first..], &w[first * k + columns.start..]);
                // SAFETY: each unit has its own block.
                unsafe { gemm_at(isa, Order::Rows, d, a, b, c, at + columns.start, add || first > rows.start) };
            }
        };
        if k >= LONG && SLICES * n <= n_out {
            // W is much larger than dx. Each thread keeps to the rows of W that it reads and writes elsewhere too; the
            // partial sums are added afterwards.
            let partial = &mut scratch[..SLICES * n * k];
            let shards = Shards::new(partial);
            cpu.team.run(SLICES, &|slice, _| {
                let rows = nth_range(n_out, SLICES, slice);
                for start in (0..k).step_by(8 * PANEL) {
                    product(rows.clone(), start..(start + 8 * PANEL).min(k), &shards, slice * n * k, false);
                }
            });
            add_slices(cpu, partial, dx);
            return cpu.team.forget(partial);
        }
        // Threads share columns, not rows: each thread then reads its own part of W once.
        let dx = dx.shards();
        cpu.team.run(k.div_ceil(8 * PANEL), &|part, _| {
            let columns = part * 8 * PANEL..((part + 1) * 8 * PANEL).min(k);
            product(0..n_out, columns, &dx.shards, 0, !dx.fresh);
        });
    }

    /// dW = dyᵀ·x
    pub fn backward_weights(&self, cpu: &mut Cpu, x: &[f32], dy: &[f32], dw: &mut [f32]) {
        let (k, n_out, isa) = (self.inputs, self.outputs, cpu.isa);
        let n = dy.len() / n_out;
        let dw = Shards::new(dw);
        cpu.team.run(n_out.div_ceil(UNIT), &|unit, _| {
            let rows = unit * UNIT..((unit + 1) * UNIT).min(n_out);
            // SAFETY: each unit has its own rows of dW.
            let dw = unsafe { dw.part(rows.start * k..rows.end * k) };
            let width = (BLOCK_FLOATS / n.max(1) / PANEL * PANEL).clamp(PANEL, k.next_multiple_of(PANEL));
            for column in (0..k).step_by(width) {
                for first in rows.clone().step_by(ROWS) {
                    let m = ROWS.min(rows.end - first);
                    let d = Dims { m, n: width.min(k - column), k: n, lda: n_out, ldb: k, ldc: k };
                    let c = &mut dw[(first - rows.start) * k + column..];
                    gemm(isa, Order::Columns, d, &dy[first..], &x[column..], c, false);
                }
            }
        });
        cpu.team.forget(x);
    }
}

/// `c[i * ldc + j] = x[i] · w[j]` for n rows of x and all rows of w, each k long.
///
/// The caller guarantees that `c` is valid there and that nothing else accesses it.
fn dots(isa: Isa, n: usize, k: usize, x: &[f32], w: &[f32], c: *mut f32, ldc: usize) {
    assert!(n * k <= x.len() && w.len().is_multiple_of(k), "operands of another size");
    dots_kernel(isa, n, k, x, w, c, ldc);
}

dispatch! { fn dots_kernel(n: usize, k: usize, x: &[f32], w: &[f32], c: *mut f32, ldc: usize) = all_dots }

#[inline(always)]
unsafe fn all_dots<S: Simd>(n: usize, k: usize, x: &[f32], w: &[f32], c: *mut f32, ldc: usize) {
    let n_out = w.len() / k;
    let mut j = 0;
    while j < n_out {
        // Four weight rows stay in the cache while all rows of x pass.
        let (rows_w, mut i) = (if n_out - j >= 4 { 4 } else { 1 }, 0);
        while i < n {
            // SAFETY: rows i.. of x and j.. of w exist, and `c` is valid for them.
            unsafe {
                let (a, b, c) = (x.as_ptr().add(i * k), w.as_ptr().add(j * k), c.add(i * ldc + j));
                i += match (rows_w, n - i) {
                    (4, 5..) => dot_tile::<S, 5, 4>(k, a, b, c, ldc),
                    (4, _) => dot_tile::<S, 1, 4>(k, a, b, c, ldc),
                    (_, 5..) => dot_tile::<S, 5, 1>(k, a, b, c, ldc),
                    _ => dot_tile::<S, 1, 1>(k, a, b, c, ldc),
                };
            }
        }
        j += rows_w;
    }
}

/// Computes R×Q dot products; returns R.
#[inline(always)]
unsafe fn dot_tile<S: Simd, const R: usize, const Q: usize>(
    k: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    ldc: usize,
) -> usize {
    // SAFETY: R rows of a and Q rows of b, each k long, are readable, and c is writable at R rows of Q.
    unsafe {
        let mut acc = [[S::splat(0.0); Q]; R];
        let whole = k / S::LANES * S::LANES;
        let mask = S::mask(k - whole);
        for at in (0..k).step_by(S::LANES) {
            let partial = at == whole;
            let load = |p: *const f32| if partial { S::load_masked(p, mask) } else { S::load(p) };
            let y: [S::V; Q] = std::array::from_fn(|q| load(b.add(q * k + at)));
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = load(a.add(r * k + at));
                for q in 0..Q {
                    acc[q] = S::fma(x, y[q], acc[q]);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (q, &sum) in acc.iter().enumerate() {
                *c.add(r * ldc + q) = S::sum(sum);
            }
        }
    }
    R
}
