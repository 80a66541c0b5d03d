//! Matrix products on row-major blocks: C = A·B or C += A·B. The columns of B and C run along vector lanes; elements of
//! A are broadcast.
//!
//! Every element of C is one chain of fused multiply-adds over k in increasing order. So the result does not depend on
//! the tiling or the thread. Nothing is packed here: callers choose layouts with contiguous rows of B (see
//! [`pack_panels`]). That is enough to run near the machine's peak.

use super::Cpu;
use super::simd::{Isa, Simd};
use super::team::{Shards, nth_range};

/// Columns per panel of [`pack_panels`].
pub(super) const PANEL: usize = 64;

/// How A is stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// A\[i, k\] at `a[i * lda + k]`.
    Rows,
    /// A\[i, k\] at `a[k * lda + i]`: A is the transpose of the stored matrix.
    Columns,
}

/// Sizes and strides of one product: C (m × n) from A (m × k) and B (k × n).
#[derive(Clone, Copy)]
pub(super) struct Dims {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub lda: usize,
    pub ldb: usize,
    pub ldc: usize,
}

/// C = A·B, or C += A·B when `accumulate`.
pub(super) fn gemm(isa: Isa, order: Order, d: Dims, a: &[f32], b: &[f32], c: &mut [f32], accumulate: bool) {
    // SAFETY: C is borrowed exclusively.
    unsafe { gemm_at(isa, order, d, a, b, &Shards::new(c), 0, accumulate) };
}

/// As [`gemm`], for a block of C that starts at `at`. Other threads may own the other blocks of that memory.
///
/// # Safety
/// Nothing else accesses the block meanwhile.
pub(super) unsafe fn gemm_at(
    isa: Isa,
    order: Order,
    d: Dims,
    a: &[f32],
    b: &[f32],
    c: &Shards<'_, f32>,
    at: usize,
    accumulate: bool,
) {
    if d.m == 0 || d.n == 0 {
        return;
    }
    assert!(d.ldc >= d.n && at + (d.m - 1) * d.ldc + d.n <= c.len(), "C is too small");
    if d.k > 0 {
        let (rows, cols) = if order == Order::Rows { (d.m, d.k) } else { (d.k, d.m) };
        assert!(d.lda >= cols && (rows - 1) * d.lda + cols <= a.len(), "A is too small");
        assert!(d.ldb >= d.n && (d.k - 1) * d.ldb + d.n <= b.len(), "B is too small");
    }
    let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.at(at));
    match order {
        Order::Rows => gemm_rows(isa, d, a, b, c, accumulate),
        Order::Columns => gemm_columns(isa, d, a, b, c, accumulate),
    }
}

dispatch! { fn gemm_rows(d: Dims, a: *const f32, b: *const f32, c: *mut f32, accumulate: bool) = block::<false> }
dispatch! { fn gemm_columns(d: Dims, a: *const f32, b: *const f32, c: *mut f32, accumulate: bool) = block::<true> }

/// Walks C in panels as wide as the registers allow, and each panel in groups of rows.
///
/// # Safety
/// The pointers are valid for the sizes in `d`, as [`gemm`] asserts, and the CPU has `S`.
#[inline(always)]
unsafe fn block<S: Simd, const T: bool>(d: Dims, a: *const f32, b: *const f32, c: *mut f32, accumulate: bool) {
    let widest = if S::REGISTERS >= 32 { 4 } else { 2 };
    let mut col = 0;
    while col < d.n {
        let vectors = (d.n - col).div_ceil(S::LANES).min(widest);
        let width = (d.n - col).min(vectors * S::LANES);
        // SAFETY: col + width ≤ n.
        unsafe {
            let (b, c) = (b.add(col), c.add(col));
            match (vectors, S::REGISTERS >= 32) {
                (4, _) => panel::<S, T, 4, 6, 2>(d, width, a, b, c, accumulate),
                (3, _) => panel::<S, T, 3, 8, 2>(d, width, a, b, c, accumulate),
                (2, true) => panel::<S, T, 2, 12, 4>(d, width, a, b, c, accumulate),
                (2, false) => panel::<S, T, 2, 6, 2>(d, width, a, b, c, accumulate),
                (_, true) => panel::<S, T, 1, 24, 6>(d, width, a, b, c, accumulate),
                (_, false) => panel::<S, T, 1, 12, 4>(d, width, a, b, c, accumulate),
            }
        }
        col += width;
    }
}

/// One panel of `width` columns: groups of `R` rows, then of `Q`, then single ones.
#[inline(always)]
unsafe fn panel<S: Simd, const T: bool, const V: usize, const R: usize, const Q: usize>(
    d: Dims,
    width: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    accumulate: bool,
) {
    let full = width == V * S::LANES;
    let mut row = 0;
    while row < d.m {
        let left = d.m - row;
        // SAFETY: row < m, and each call covers at most `left` rows.
        unsafe {
            let (a, c) = (a.add(if T { row } else { row * d.lda }), c.add(row * d.ldc));
            row += if left >= R {
                if full {
                    tile::<S, T, V, R, false>(d, width, a, b, c, accumulate);
                } else {
                    tile::<S, T, V, R, true>(d, width, a, b, c, accumulate);
                }
                R
            } else if left >= Q {
                tile::<S, T, V, Q, true>(d, width, a, b, c, accumulate);
                Q
            } else {
                tile::<S, T, V, 1, true>(d, width, a, b, c, accumulate);
                1
            };
        }
    }
}

/// R rows by V vectors of C, in registers over the whole of k. `MASKED`: the last vector may be partial.
#[inline(always)]
unsafe fn tile<S: Simd, const T: bool, const V: usize, const R: usize, const MASKED: bool>(
    d: Dims,
    width: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    accumulate: bool,
) {
    // SAFETY: rows 0..R and columns 0..width of this tile are inside the matrices; masked lanes are not touched.
    unsafe {
        let mask = S::mask(width - (V - 1) * S::LANES);
        let mut acc = [[S::splat(0.0); V]; R];
        let mut at = a;
        let mut bt = b;
        for _ in 0..d.k {
            let mut row_b = [S::splat(0.0); V];
            for (v, value) in row_b.iter_mut().enumerate() {
                let p = bt.add(v * S::LANES);
                *value = if MASKED && v == V - 1 { S::load_masked(p, mask) } else { S::load(p) };
            }
            for (i, acc_row) in acc.iter_mut().enumerate() {
                let x = S::splat(*at.add(if T { i } else { i * d.lda }));
                for (sum, value) in acc_row.iter_mut().zip(row_b) {
                    *sum = S::fma(x, value, *sum);
                }
            }
            at = at.add(if T { d.lda } else { 1 });
            bt = bt.add(d.ldb);
        }
        for (i, acc_row) in acc.iter().enumerate() {
            for (v, &sum) in acc_row.iter().enumerate() {
                let p = c.add(i * d.ldc + v * S::LANES);
                if MASKED && v == V - 1 {
                    let old = if accumulate { S::load_masked(p, mask) } else { S::splat(0.0) };
                    S::store_masked(p, S::add(old, sum), mask);
                } else if accumulate {
                    S::store(p, S::add(S::load(p), sum));
                } else {
                    S::store(p, sum);
                }
            }
        }
    }
}

/// Transposes `w` (n × k) into panels of up to [`PANEL`] columns, each (k × width). A product then reads B from
/// consecutive memory.
pub(super) fn pack_panels(cpu: &mut Cpu, w: &[f32], n: usize, k: usize, packed: &mut [f32]) {
    assert!(w.len() == n * k && packed.len() == n * k, "packed matrix of another size");
    let isa = cpu.isa;
    let parts = k.div_ceil(256);
    let packed = Shards::new(packed);
    cpu.team.run(n.div_ceil(PANEL) * parts, &|unit, _| {
        let (panel, part) = (unit / parts, unit % parts);
        let width = PANEL.min(n - panel * PANEL);
        let rows = nth_range(k, parts, part);
        let start = panel * PANEL * k;
        // SAFETY: each unit has its own rows of its own panel.
        let out = unsafe { packed.part(start + rows.start * width..start + rows.end * width) };
        transpose(isa, &w[start + rows.start..], k, width, out);
    });
}

dispatch! {
    /// `out[r, c] = from[c * stride + r]` for rows of `width`.
    pub(super) fn transpose(from: &[f32], stride: usize, width: usize, out: &mut [f32]) = transpose_block
}

#[inline(always)]
unsafe fn transpose_block<S: Simd>(from: &[f32], stride: usize, width: usize, out: &mut [f32]) {
    // Sixteen columns at a time: their cache lines of `from` stay in the first-level cache over the rows.
    for start in (0..width).step_by(16) {
        let n = 16.min(width - start);
        for (r, row) in out.chunks_exact_mut(width).enumerate() {
            for (c, v) in row[start..start + n].iter_mut().enumerate() {
                *v = from[(start + c) * stride + r];
            }
        }
    }
}
