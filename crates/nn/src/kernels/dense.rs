//! Fully connected layers of every token: y = x·Wᵀ + b with W stored (out, in), for hundreds or thousands of rows.
//!
//! With that many rows it pays to copy an operand into panels that suit the caches and the page tables. `linear` serves
//! the few rows of a batch of vectors, where reading the weights dominates. The result of a row depends on no other
//! row.

use super::Cpu;
use super::Sum;
use super::conv::Epilogue;
use super::gemm::{Dims, Order, PANEL, gemm, gemm_at, pack_panels};
use super::team::{Shards, nth_range};

/// Sizes of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dense {
    pub inputs: usize,
    pub outputs: usize,
}

/// Rows of y or dx per unit of work: a panel of W stays in the second-level cache beside them.
const ROWS: usize = 48;
/// Rows that a block of the weights' gradient sums before it is written.
const DEPTH: usize = 512;
/// Rows of the weights' gradient per unit of work.
const UNIT: usize = 48;

impl Dense {
    /// Floats of scratch for batches of up to `n` rows.
    pub fn scratch_len(&self, n: usize) -> usize {
        (self.inputs * self.outputs).max(DEPTH.min(n) * self.inputs)
    }

    /// y (N, out) = x (N, in)·Wᵀ, then the epilogue.
    pub fn forward(&self, cpu: &mut Cpu, x: &[f32], w: &[f32], end: Epilogue<'_>, y: &mut [f32], scratch: &mut [f32]) {
        let packed = &mut scratch[..w.len()];
        pack_panels(cpu, w, self.outputs, self.inputs, packed);
        let isa = cpu.isa;
        product(cpu, x, self.inputs, packed, self.outputs, Sum { values: y, fresh: true }, &|rows| {
            end.apply(isa, self.outputs, rows);
        });
    }

    /// dx += dy·W
    pub fn backward_input(&self, cpu: &mut Cpu, w: &[f32], dy: &[f32], dx: Sum<'_>, scratch: &mut [f32]) {
        let packed = &mut scratch[..w.len()];
        copy_panels(cpu, w, self.inputs, packed);
        product(cpu, dy, self.outputs, packed, self.inputs, dx, &|_| ());
    }

    /// dW = dyᵀ·x
    pub fn backward_weights(&self, cpu: &mut Cpu, x: &[f32], dy: &[f32], dw: &mut [f32], scratch: &mut [f32]) {
        let (k, n_out, isa) = (self.inputs, self.outputs, cpu.isa);
        let dw = Shards::new(dw);
        if x.is_empty() {
            // SAFETY: no other part is alive.
            unsafe { dw.part(0..n_out * k) }.fill(0.0);
        }
        for (block, (x, dy)) in x.chunks(DEPTH * k).zip(dy.chunks(DEPTH * n_out)).enumerate() {
            let depth = x.len() / k;
            let packed = &mut scratch[..x.len()];
            copy_panels(cpu, x, k, packed);
            let packed = &*packed;
            cpu.team.run(n_out.div_ceil(UNIT), &|unit, _| {
                let rows = unit * UNIT..((unit + 1) * UNIT).min(n_out);
                for (panel, b) in packed.chunks(depth * PANEL).enumerate() {
                    let n = PANEL.min(k - panel * PANEL);
                    let d = Dims { m: rows.len(), n, k: depth, lda: n_out, ldb: n, ldc: k };
                    let at = rows.start * k + panel * PANEL;
                    // SAFETY: each unit has its own rows of dW.
                    unsafe { gemm_at(isa, Order::Columns, d, &dy[rows.start..], b, &dw, at, block > 0) };
                }
            });
        }
    }
}

/// c (N, n) += a (N, k)·b, with b in panels. Calls `end` for complete rows.
fn product(
    cpu: &mut Cpu,
    a: &[f32],
    k: usize,
    packed: &[f32],
    n: usize,
    c: Sum<'_>,
    end: &(dyn Fn(&mut [f32]) + Sync),
) {
    let (isa, n_rows, fresh) = (cpu.isa, a.len() / k, c.fresh);
    let out = Shards::new(c.values);
    let units = n_rows.div_ceil(ROWS);
    cpu.team.run(units, &|unit, _| {
        let rows = nth_range(n_rows, units, unit);
        // SAFETY: each unit has its own rows.
        let c = unsafe { out.part(rows.start * n..rows.end * n) };
        for (panel, b) in packed.chunks(k * PANEL).enumerate() {
            let width = PANEL.min(n - panel * PANEL);
            let d = Dims { m: rows.len(), n: width, k, lda: k, ldb: width, ldc: n };
            gemm(isa, Order::Rows, d, &a[rows.start * k..], b, &mut c[panel * PANEL..], !fresh);
        }
        end(c);
    });
}

/// Copies `b` (k × n) into panels of at most [`PANEL`] columns, each (k × width).
fn copy_panels(cpu: &mut Cpu, b: &[f32], n: usize, packed: &mut [f32]) {
    let k = b.len() / n;
    cpu.team.parts(packed, PANEL * k, &|unit, panel| {
        let (first, width) = (unit * PANEL, panel.len() / k);
        for (to, from) in panel.chunks_exact_mut(width).zip(b.chunks_exact(n)) {
            to.copy_from_slice(&from[first..first + width]);
        }
    });
}
