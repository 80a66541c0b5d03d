//! Convolution as a matrix product with the unrolled image. Each output pixel has a row with the patch under the
//! kernel. Rows are unrolled one block at a time, into memory that stays in the cache.

use super::super::Cpu;
use super::super::elementwise::sum_slices;
use super::super::gemm::{Dims, Order, PANEL, gemm, pack_panels};
use super::super::team::{Private, Shards, nth_range};
use super::{Backward, Conv, Forward, Scratch};

/// Floats of unrolled image per block: a large part of a core's second-level cache.
const BLOCK_FLOATS: usize = 48 * 1024;
/// Partial weight gradients, summed in order at the end. A backward pass can use one thread per gradient.
const SLICES: usize = 4;

fn rows_per_block(conv: &Conv) -> usize {
    (BLOCK_FLOATS / conv.patch() / 24 * 24).clamp(24, 528)
}

pub(super) fn scratch_len(conv: &Conv) -> (usize, usize) {
    let weights = conv.patch() * conv.co;
    (weights * SLICES, rows_per_block(conv) * conv.patch())
}

pub(super) fn forward(cpu: &mut Cpu, conv: &Conv, pass: Forward<'_>, scratch: Scratch<'_>) {
    let Forward { x, w, end, y } = pass;
    let (k, co, isa) = (conv.patch(), conv.co, cpu.isa);
    let packed = &mut scratch.shared[..k * co];
    pack_panels(cpu, w, co, k, packed);
    let packed = &*packed;
    let n_rows = conv.n_images(x) * conv.ho * conv.wo;
    let block = rows_per_block(conv);
    let private = Private::new(&cpu.team, scratch.private);
    let out = Shards::new(y);
    cpu.team.run(n_rows.div_ceil(block), &|unit, worker| {
        let rows = unit * block..(unit * block + block).min(n_rows);
        // SAFETY: each worker has its own scratch, each unit its own rows.
        let (cols, out) = unsafe { (private.of(worker), out.part(rows.start * co..rows.end * co)) };
        let (a, lda) = unrolled(conv, x, rows.clone(), cols);
        for (panel, b) in packed.chunks(k * PANEL).enumerate() {
            let n = PANEL.min(co - panel * PANEL);
            let d = Dims { m: rows.len(), n, k, lda, ldb: n, ldc: co };
            gemm(isa, Order::Rows, d, a, b, &mut out[panel * PANEL..], false);
        }
        end.apply(isa, co, out);
    });
    cpu.team.forget(packed);
}

pub(super) fn backward(cpu: &mut Cpu, conv: &Conv, pass: Backward<'_>, scratch: Scratch<'_>) {
    let Backward { x, w, dy, dx, dw } = pass;
    let (k, co, isa) = (conv.patch(), conv.co, cpu.isa);
    let n_images = conv.n_images(x);
    let n_rows = n_images * conv.ho * conv.wo;
    let block = rows_per_block(conv);
    let private = Private::new(&cpu.team, scratch.private);

    // dw (O, K·K·I) = Σ_rows dy_rowᵀ · patch_row, one slice of the rows at a time.
    let partial = Shards::new(&mut scratch.shared[..SLICES * k * co]);
    cpu.team.run(SLICES, &|slice, worker| {
        // SAFETY: each worker has its own scratch, each slice its own partial sum.
        let (cols, sum) = unsafe { (private.of(worker), partial.part(slice * k * co..(slice + 1) * k * co)) };
        sum.fill(0.0);
        let range = nth_range(n_rows, SLICES, slice);
        let mut start = range.start;
        while start < range.end {
            let rows = start..(start + block).min(range.end);
            start = rows.end;
            let (b, ldb) = unrolled(conv, x, rows.clone(), cols);
            let d = Dims { m: co, n: k, k: rows.len(), lda: co, ldb, ldc: k };
            gemm(isa, Order::Columns, d, &dy[rows.start * co..], b, sum, true);
        }
    });
    sum_slices(cpu, &scratch.shared[..SLICES * k * co], dw);
    cpu.team.forget(&scratch.shared[..SLICES * k * co]);

    // Patches of dx = dy_row · w, added to the pixels that they cover. One thread owns an image.
    let Some(dx) = dx else { return };
    let image = conv.h * conv.w * conv.ci;
    let dx = dx.shards();
    let per_image = conv.ho * conv.wo;
    cpu.team.run(n_images, &|img, worker| {
        // SAFETY: each worker has its own scratch, each unit its own image.
        let (cols, dx) = unsafe { (private.of(worker), dx.part(img * image..(img + 1) * image)) };
        let mut start = 0;
        while start < per_image {
            let rows = start..(start + block).min(per_image);
            start = rows.end;
            let d = Dims { m: rows.len(), n: k, k: co, lda: co, ldb: k, ldc: k };
            gemm(isa, Order::Rows, d, &dy[(img * per_image + rows.start) * co..], w, cols, false);
            for (row, patch) in rows.zip(cols.chunks_exact(k)) {
                for_each_run(conv, row, |pixel, at, len| {
                    let pixels = &mut dx[pixel..pixel + len];
                    for (d, p) in pixels.iter_mut().zip(&patch[at..at + len]) {
                        *d += p;
                    }
                });
            }
        }
    });
}

/// The unrolled rows and their stride. A 1×1 kernel of stride 1 needs no copy.
fn unrolled<'a>(conv: &Conv, x: &'a [f32], rows: std::ops::Range<usize>, cols: &'a mut [f32]) -> (&'a [f32], usize) {
    let k = conv.patch();
    if conv.kernel == 1 && conv.stride == 1 && conv.padding == 0 {
        return (&x[rows.start * k..rows.end * k], k);
    }
    let per_image = conv.ho * conv.wo;
    let image = conv.h * conv.w * conv.ci;
    for (row, patch) in rows.zip(cols.chunks_exact_mut(k)) {
        let (img, pixel) = (row / per_image, row % per_image);
        let x = &x[img * image..(img + 1) * image];
        let mut filled = 0;
        for_each_run(conv, pixel, |from, at, len| {
            patch[filled..at].fill(0.0);
            patch[at..at + len].copy_from_slice(&x[from..from + len]);
            filled = at + len;
        });
        patch[filled..].fill(0.0);
    }
    (cols, k)
}

/// Calls `f(offset in the image, offset in the patch, length)` for each contiguous run of the patch under output
/// `pixel` that is inside the image. There is one run per kernel row.
#[inline(always)]
fn for_each_run(conv: &Conv, pixel: usize, mut f: impl FnMut(usize, usize, usize)) {
    let top = (pixel / conv.wo * conv.stride) as isize - conv.padding as isize;
    let left = (pixel % conv.wo * conv.stride) as isize - conv.padding as isize;
    let (skip, first) = ((-left).max(0) as usize, left.max(0) as usize);
    let end = (left + conv.kernel as isize).min(conv.w as isize);
    if end <= first as isize {
        return;
    }
    let len = (end as usize - first) * conv.ci;
    for dy in 0..conv.kernel {
        let row = top + dy as isize;
        if row >= 0 && row < conv.h as isize {
            f((row as usize * conv.w + first) * conv.ci, (dy * conv.kernel + skip) * conv.ci, len);
        }
    }
}
