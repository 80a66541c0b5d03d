//! Layer normalisation of rows of C values, and weight standardisation: its rows are a convolution's output channels.

use super::Cpu;
use super::flat::sum_of_halves;
use super::simd::Simd;
use super::team::Shards;

/// Rows per unit of work. Their share of the parameters' gradients is summed in single precision.
const ROWS: usize = 64;
/// Independent partial sums per row; the same on every instruction set.
const LANES: usize = 32;

/// Normalisation of rows, with its parameters.
#[derive(Clone, Copy)]
pub(crate) struct LayerNorm<'a> {
    pub weight: &'a [f32],
    pub bias: &'a [f32],
    pub eps: f32,
}

/// Floats of scratch for the gradient of a tensor of `len` floats.
pub(crate) fn scratch_len(len: usize, channels: usize) -> usize {
    len.div_ceil(ROWS * channels) * 2 * channels
}

impl LayerNorm<'_> {
    /// y = norm(x) row by row. `saved` (rows, 2) keeps mean and 1/σ for the backward pass.
    pub fn forward(&self, cpu: &mut Cpu, x: &[f32], y: &mut [f32], saved: &mut [f32]) {
        let (c, isa) = (self.weight.len(), cpu.isa);
        let (n_rows, y, saved) = (x.len() / c, Shards::new(y), Shards::new(saved));
        cpu.team.run(n_rows.div_ceil(ROWS), &|unit, _| {
            let (first, last) = (unit * ROWS, ((unit + 1) * ROWS).min(n_rows));
            // SAFETY: each unit has its own rows.
            let (y, saved) = unsafe { (y.part(first * c..last * c), saved.part(2 * first..2 * last)) };
            normalise_rows(isa, *self, &x[first * c..last * c], y, saved);
        });
    }

    /// Replaces dy by dx. Writes the gradients of weight and bias.
    pub fn backward(
        &self,
        cpu: &mut Cpu,
        x: &[f32],
        saved: &[f32],
        dy: &mut [f32],
        dweight: &mut [f32],
        dbias: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (c, isa) = (self.weight.len(), cpu.isa);
        let n_rows = x.len() / c;
        let n_units = n_rows.div_ceil(ROWS);
        let partial = &mut scratch[..n_units * 2 * c];
        let (dy, sums) = (Shards::new(dy), Shards::new(partial));
        cpu.team.run(n_units, &|unit, _| {
            let (first, last) = (unit * ROWS, ((unit + 1) * ROWS).min(n_rows));
            // SAFETY: each unit has its own rows and sums.
            let (dy, sums) = unsafe { (dy.part(first * c..last * c), sums.part(unit * 2 * c..(unit + 1) * 2 * c)) };
            sums.fill(0.0);
            let (dweight, dbias) = sums.split_at_mut(c);
            derive_rows(isa, *self, &x[first * c..last * c], &saved[2 * first..2 * last], dy, dweight, dbias);
        });
        for (i, sum) in dweight.iter_mut().chain(dbias).enumerate() {
            *sum = partial.iter().skip(i).step_by(2 * c).map(|&v| f64::from(v)).sum::<f64>() as f32;
        }
    }
}

/// ŵ = (w − mean) / √(variance + ε) per row of weights. `inverses` has one entry per row and keeps 1/σ.
pub(crate) fn standardize(cpu: &mut Cpu, w: &[f32], eps: f32, out: &mut [f32], inverses: &mut [f32]) {
    let (n_rows, len, isa) = (inverses.len(), w.len() / inverses.len(), cpu.isa);
    let (out, inverses) = (Shards::new(out), Shards::new(inverses));
    cpu.team.run(n_rows, &|row, _| {
        let range = row * len..(row + 1) * len;
        // SAFETY: each unit has its own row.
        let (out, inverse) = unsafe { (out.part(range.clone()), inverses.part(row..row + 1)) };
        inverse[0] = standardize_row(isa, &w[range], eps, out);
    });
}

/// Replaces `dw`, the gradient of ŵ, by that of w.
pub(crate) fn standardize_backward(cpu: &mut Cpu, standardized: &[f32], inverses: &[f32], dw: &mut [f32]) {
    let (n_rows, len, isa) = (inverses.len(), dw.len() / inverses.len(), cpu.isa);
    let dw = Shards::new(dw);
    cpu.team.run(n_rows, &|row, _| {
        let range = row * len..(row + 1) * len;
        // SAFETY: each unit has its own row.
        let dw = unsafe { dw.part(range.clone()) };
        standardize_backward_row(isa, &standardized[range], inverses[row], dw);
    });
}

dispatch! { fn standardize_row(w: &[f32], eps: f32, out: &mut [f32]) -> f32 = standardize_one }
dispatch! { fn standardize_backward_row(standardized: &[f32], inverse: f32, dw: &mut [f32]) = standardize_backward_one }
dispatch! { fn normalise_rows(norm: LayerNorm<'_>, x: &[f32], y: &mut [f32], saved: &mut [f32]) = normalise }
dispatch! {
    fn derive_rows(norm: LayerNorm<'_>, x: &[f32], saved: &[f32], dy: &mut [f32], dweight: &mut [f32], dbias: &mut [f32])
        = derive
}

/// Σ f(i) over 0..n in [`LANES`] partial sums.
#[inline(always)]
fn sum(n: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut acc = [0.0; LANES];
    let whole = n / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, acc) in acc.iter_mut().enumerate() {
            *acc += f(start + lane);
        }
    }
    for i in whole..n {
        acc[i - whole] += f(i);
    }
    sum_of_halves(acc)
}

#[inline(always)]
unsafe fn normalise<S: Simd>(norm: LayerNorm<'_>, x: &[f32], y: &mut [f32], saved: &mut [f32]) {
    let c = norm.weight.len();
    let n = c as f32;
    let (weight, bias) = (&norm.weight[..c], &norm.bias[..c]);
    for ((x, y), saved) in x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(saved.chunks_exact_mut(2)) {
        let mean = sum(c, |i| x[i]) / n;
        // About the mean, in a second pass: no digits cancel, and the row is in the first-level cache.
        let inv = 1.0 / (sum(c, |i| (x[i] - mean) * (x[i] - mean)) / n + norm.eps).sqrt();
        (saved[0], saved[1]) = (mean, inv);
        for i in 0..c {
            y[i] = S::fma_scalar((x[i] - mean) * inv, weight[i], bias[i]);
        }
    }
}

#[inline(always)]
unsafe fn derive<S: Simd>(
    norm: LayerNorm<'_>,
    x: &[f32],
    saved: &[f32],
    dy: &mut [f32],
    dweight: &mut [f32],
    dbias: &mut [f32],
) {
    let c = norm.weight.len();
    let n = c as f32;
    let (weight, dweight, dbias) = (&norm.weight[..c], &mut dweight[..c], &mut dbias[..c]);
    for ((x, dy), saved) in x.chunks_exact(c).zip(dy.chunks_exact_mut(c)).zip(saved.chunks_exact(2)) {
        let (mean, inv) = (saved[0], saved[1]);
        // dx = 1/σ (γ dy − Σ(γ dy)/n − x̂ Σ(γ dy x̂)/n)
        let g1 = sum(c, |i| weight[i] * dy[i]) / n;
        let g2 = sum(c, |i| weight[i] * dy[i] * ((x[i] - mean) * inv)) / n;
        for i in 0..c {
            let normal = (x[i] - mean) * inv;
            dweight[i] = S::fma_scalar(dy[i], normal, dweight[i]);
            dbias[i] += dy[i];
            dy[i] = inv * (weight[i] * dy[i] - g1 - normal * g2);
        }
    }
}

#[inline(always)]
unsafe fn standardize_one<S: Simd>(w: &[f32], eps: f32, out: &mut [f32]) -> f32 {
    let n = w.len() as f32;
    let mean = sum(w.len(), |i| w[i]) / n;
    let inverse = 1.0 / (sum(w.len(), |i| (w[i] - mean) * (w[i] - mean)) / n + eps).sqrt();
    for (out, w) in out.iter_mut().zip(w) {
        *out = (w - mean) * inverse;
    }
    inverse
}

#[inline(always)]
unsafe fn standardize_backward_one<S: Simd>(standardized: &[f32], inverse: f32, dw: &mut [f32]) {
    let n = dw.len() as f32;
    // dw = 1/σ (dŵ − Σdŵ/n − ŵ Σ(dŵ ŵ)/n)
    let g1 = sum(dw.len(), |i| dw[i]) / n;
    let g2 = sum(dw.len(), |i| dw[i] * standardized[i]) / n;
    for (dw, s) in dw.iter_mut().zip(standardized) {
        *dw = inverse * (*dw - g1 - s * g2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standardized_weights_and_their_gradient_are_those_worked_out_by_hand() {
        // Mean 2, variance 1/2. The second row is a shifted multiple of the first.
        let w = [3.0, 1.0, 2.0, 2.0, -1.0, -5.0, -3.0, -3.0];
        let (mut out, mut inverses) = ([0.0; 8], [0.0; 2]);
        let mut cpu = Cpu::new(1);
        standardize(&mut cpu, &w, 0.0, &mut out, &mut inverses);
        let root = 2f32.sqrt();
        let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(close(&out, &[root, -root, 0.0, 0.0, root, -root, 0.0, 0.0]), "{out:?}");
        assert!(close(&inverses, &[root, root / 2.0]), "{inverses:?}");
        let mut dw = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0];
        standardize_backward(&mut cpu, &out, &inverses, &mut dw);
        let quarter = root / 4.0;
        let expected = [1.0, 1.0, -1.0, -1.0, 0.5, 0.5, -0.5, -0.5].map(|v| v * quarter);
        assert!(close(&dw, &expected), "{dw:?}");
    }
}
