//! Multi-head self-attention among the tokens of each text: softmax(Q·Kᵀ/√d)·V.
//!
//! The forward pass does not keep the attention matrix. The backward pass recomputes it from two numbers per row. This
//! costs a few per cent of a layer's products and saves memory that grows with the square of a text's length.

use super::dropout::multipliers;
use super::elementwise::exp;
use super::gemm::{Dims, Order, gemm, gemm_at, transpose};
use super::simd::{Isa, Simd};
use super::team::{Private, Shards};
use super::{Cpu, Sum};
use crate::tokens::Tokens;

/// Queries per block: their rows of attention stay in the cache.
const QUERIES: usize = 64;

/// Attention over rows that hold queries, keys and values side by side, each `width` long.
#[derive(Clone, Copy)]
pub(crate) struct Attention<'a> {
    pub tokens: &'a Tokens,
    pub heads: usize,
    pub width: usize,
    /// Key and rate of dropout.
    pub drop: Option<([u32; 2], f32)>,
}

/// Floats of private scratch for texts of up to `len` tokens.
pub(crate) fn private_len(len: usize, head_width: usize) -> usize {
    2 * head_width * len + 3 * QUERIES * len
}

/// One head of one text.
struct Head {
    unit: usize,
    /// Tokens of the text, and numbers of the head per token.
    n: usize,
    d: usize,
    /// Offset of the first query in a row of three vectors, and of the first output in a row of one.
    query: usize,
    out: usize,
    /// Offset of its statistics.
    saved: usize,
}

impl Attention<'_> {
    fn head(&self, unit: usize) -> Head {
        let (range, head) = (self.tokens.of(unit / self.heads), unit % self.heads);
        let (n, d) = (range.len(), self.width / self.heads);
        Head {
            unit,
            n,
            d,
            query: 3 * range.start * self.width + head * d,
            out: range.start * self.width + head * d,
            saved: 2 * (range.start * self.heads + head * n),
        }
    }

    fn scale(&self) -> f32 {
        1.0 / ((self.width / self.heads) as f32).sqrt()
    }

    /// y (tokens, C) from x (tokens, 3C). `saved` (tokens, heads, 2) keeps the maximum and the inverse sum per row.
    pub fn forward(&self, cpu: &mut Cpu, x: &[f32], y: &mut [f32], saved: &mut [f32], private: &mut [f32]) {
        let (isa, c, scale) = (cpu.isa, self.width, self.scale());
        let private = Private::new(&cpu.team, private);
        let (y, saved) = (Shards::new(y), Shards::new(saved));
        cpu.team.run(self.tokens.n_texts() * self.heads, &|unit, worker| {
            let Head { n, d, query, out, saved: kept, .. } = self.head(unit);
            // SAFETY: each worker has its own scratch, each unit its own statistics.
            let (memory, saved) = unsafe { (private.of(worker), saved.part(kept..kept + 2 * n)) };
            let (keys, memory) = memory.split_at_mut(d * n);
            let (attention, dropped) = memory.split_at_mut(QUERIES.min(n) * n);
            if n > 0 {
                transpose(isa, &x[query + c..], 3 * c, n, keys);
            }
            for first in (0..n).step_by(QUERIES) {
                let m = QUERIES.min(n - first);
                let p = &mut attention[..m * n];
                let d_scores = Dims { m, n, k: d, lda: 3 * c, ldb: n, ldc: n };
                gemm(isa, Order::Rows, d_scores, &x[query + first * 3 * c..], keys, p, false);
                softmax(isa, p, n, scale, &mut saved[2 * first..2 * (first + m)]);
                if let Some((key, rate)) = self.drop {
                    let factors = &mut dropped[..m * n];
                    multipliers(isa, key, [(first / QUERIES) as u32, unit as u32], rate, factors);
                    multiply(isa, p, factors);
                }
                let d_out = Dims { m, n: d, k: n, lda: n, ldb: 3 * c, ldc: c };
                // SAFETY: each unit writes its own columns of its own rows.
                unsafe { gemm_at(isa, Order::Rows, d_out, p, &x[query + 2 * c..], &y, out + first * c, false) };
            }
        });
    }

    /// dx += ∂L/∂x from dy. x, y and `saved` are those of the forward pass.
    pub fn backward(
        &self,
        cpu: &mut Cpu,
        x: &[f32],
        y: &[f32],
        saved: &[f32],
        dy: &[f32],
        dx: Sum<'_>,
        private: &mut [f32],
    ) {
        let isa = cpu.isa;
        let private = Private::new(&cpu.team, private);
        let (add, dx) = (!dx.fresh, Shards::new(dx.values));
        cpu.team.run(self.tokens.n_texts() * self.heads, &|unit, worker| {
            let head = self.head(unit);
            if head.n > 0 {
                // SAFETY: each worker has its own scratch.
                let memory = unsafe { private.of(worker) };
                self.head_backward(isa, &head, x, y, saved, dy, &dx, add, memory);
            }
        });
    }

    fn head_backward(
        &self,
        isa: Isa,
        head: &Head,
        x: &[f32],
        y: &[f32],
        saved: &[f32],
        dy: &[f32],
        dx: &Shards<'_, f32>,
        add: bool,
        memory: &mut [f32],
    ) {
        let (c, scale) = (self.width, self.scale());
        let &Head { unit, n, d, query, out, saved: kept } = head;
        let (key, value) = (query + c, query + 2 * c);
        let (keys, memory) = memory.split_at_mut(d * n);
        let (values, memory) = memory.split_at_mut(d * n);
        let (attention, memory) = memory.split_at_mut(QUERIES.min(n) * n);
        let (gradient, dropped) = memory.split_at_mut(QUERIES.min(n) * n);
        transpose(isa, &x[key..], 3 * c, n, keys);
        transpose(isa, &x[value..], 3 * c, n, values);
        for first in (0..n).step_by(QUERIES) {
            let m = QUERIES.min(n - first);
            let (queries, rows) = (query + first * 3 * c, out + first * c);
            let (p, dp) = (&mut attention[..m * n], &mut gradient[..m * n]);
            let rows_by_keys = |lda| Dims { m, n, k: d, lda, ldb: n, ldc: n };
            let keys_by_rows = |ldb| Dims { m: n, n: d, k: m, lda: n, ldb, ldc: 3 * c };
            gemm(isa, Order::Rows, rows_by_keys(3 * c), &x[queries..], keys, p, false);
            probabilities(isa, p, n, scale, &saved[kept + 2 * first..kept + 2 * (first + m)]);
            gemm(isa, Order::Rows, rows_by_keys(c), &dy[rows..], values, dp, false);
            let kept_attention = match self.drop {
                Some((key, rate)) => {
                    let factors = &mut dropped[..m * n];
                    multipliers(isa, key, [(first / QUERIES) as u32, unit as u32], rate, factors);
                    multiply(isa, dp, factors);
                    multiply(isa, factors, p);
                    &*factors
                }
                None => &*p,
            };
            // Every block of queries adds to all keys and values.
            let more = add || first > 0;
            let by_keys = keys_by_rows(c);
            // SAFETY: each unit writes its own columns of its own rows.
            unsafe { gemm_at(isa, Order::Columns, by_keys, kept_attention, &dy[rows..], dx, value, more) };
            score_gradients(isa, p, dp, n, d, scale, &y[rows..], &dy[rows..], c);
            let by_queries = Dims { m, n: d, k: n, lda: n, ldb: 3 * c, ldc: 3 * c };
            // SAFETY: as above.
            unsafe {
                gemm_at(isa, Order::Rows, by_queries, dp, &x[key..], dx, queries, add);
                gemm_at(isa, Order::Columns, keys_by_rows(3 * c), dp, &x[queries..], dx, key, more);
            }
        }
    }
}

dispatch! {
    /// Replaces every row of `p` by softmax(scale·row). Writes its scaled maximum and inverse sum to `saved`.
    fn softmax(p: &mut [f32], n: usize, scale: f32, saved: &mut [f32]) = softmax_rows
}
dispatch! {
    /// As [`softmax`], from the saved maximum and inverse sum.
    fn probabilities(p: &mut [f32], n: usize, scale: f32, saved: &[f32]) = probability_rows
}
dispatch! { fn multiply(y: &mut [f32], x: &[f32]) = multiply_all }
dispatch! {
    /// dp ← scale·p (dp − ⟨y, dy⟩) row by row: the gradient of the scores. ⟨y, dy⟩ equals Σ p·dp, also under dropout.
    fn score_gradients(p: &[f32], dp: &mut [f32], n: usize, d: usize, scale: f32, y: &[f32], dy: &[f32], stride: usize)
        = score_gradient_rows
}

/// Independent partial results per row; the same on every instruction set.
const LANES: usize = 16;

#[inline(always)]
unsafe fn softmax_rows<S: Simd>(p: &mut [f32], n: usize, scale: f32, saved: &mut [f32]) {
    for (row, saved) in p.chunks_exact_mut(n).zip(saved.chunks_exact_mut(2)) {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for chunk in row.chunks(LANES) {
            for (max, v) in lanes.iter_mut().zip(chunk) {
                // NaN wins, so that a diverged network is noticed.
                *max = if *v <= *max { *max } else { *v };
            }
        }
        let max = scale * lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if b <= a { a } else { b });
        let mut sums = [0.0; LANES];
        for chunk in row.chunks_mut(LANES) {
            for (sum, v) in sums.iter_mut().zip(chunk) {
                *v = exp(scale * *v - max);
                *sum += *v;
            }
        }
        let inverse = 1.0 / sums.iter().sum::<f32>();
        for v in row {
            *v *= inverse;
        }
        (saved[0], saved[1]) = (max, inverse);
    }
}

#[inline(always)]
unsafe fn probability_rows<S: Simd>(p: &mut [f32], n: usize, scale: f32, saved: &[f32]) {
    for (row, saved) in p.chunks_exact_mut(n).zip(saved.chunks_exact(2)) {
        let (max, inverse) = (saved[0], saved[1]);
        for v in row {
            *v = exp(scale * *v - max) * inverse;
        }
    }
}

#[inline(always)]
unsafe fn multiply_all<S: Simd>(y: &mut [f32], x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y *= x;
    }
}

#[inline(always)]
unsafe fn score_gradient_rows<S: Simd>(
    p: &[f32],
    dp: &mut [f32],
    n: usize,
    d: usize,
    scale: f32,
    y: &[f32],
    dy: &[f32],
    stride: usize,
) {
    let outputs = y.chunks(stride).zip(dy.chunks(stride));
    for ((p, dp), (y, dy)) in p.chunks_exact(n).zip(dp.chunks_exact_mut(n)).zip(outputs) {
        let mut sums = [0.0; LANES];
        for (y, dy) in y[..d].chunks(LANES).zip(dy[..d].chunks(LANES)) {
            for ((sum, y), dy) in sums.iter_mut().zip(y).zip(dy) {
                *sum = S::fma_scalar(*y, *dy, *sum);
            }
        }
        let total = sums.iter().sum::<f32>();
        for (dp, p) in dp.iter_mut().zip(p) {
            *dp = scale * p * (*dp - total);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Graph, Shape, Tables};
    use fedproj_rng::{Purpose, Stream};

    const SLOTS: usize = 70;
    const WIDTH: usize = 6;
    const HEADS: usize = 2;
    const DROP: ([u32; 2], f32) = ([3, 4], 0.3);

    fn tokens(lens: &[usize]) -> Tokens {
        let mut graph = Graph::new(Shape::tokens(SLOTS));
        graph.embedding("e", Tables { vocabulary: 1, positions: SLOTS, types: 1, width: 1 }).unwrap();
        let mut tokens = Tokens::new(&graph, lens.len());
        let slot = |len: usize| (0..SLOTS).map(move |i| if i < len { 1.0 } else { 0.0 });
        tokens.read(&lens.iter().flat_map(|&len| slot(len)).collect::<Vec<_>>()).unwrap();
        tokens
    }

    /// The definition, in double precision, with the kernel's masks.
    fn naive(tokens: &Tokens, x: &[f64]) -> Vec<f64> {
        let d = WIDTH / HEADS;
        let mut y = vec![0.0; tokens.len() * WIDTH];
        for unit in 0..tokens.n_texts() * HEADS {
            let (range, head) = (tokens.of(unit / HEADS), unit % HEADS);
            let n = range.len();
            let at = |token: usize, part: usize| (range.start + token) * 3 * WIDTH + part * WIDTH + head * d;
            for first in (0..n).step_by(QUERIES) {
                let m = QUERIES.min(n - first);
                let mut factors = vec![0.0; m * n];
                multipliers(Isa::PORTABLE, DROP.0, [(first / QUERIES) as u32, unit as u32], DROP.1, &mut factors);
                for i in first..first + m {
                    let score = |j| (0..d).map(|e| x[at(i, 0) + e] * x[at(j, 1) + e]).sum::<f64>() / (d as f64).sqrt();
                    let sum: f64 = (0..n).map(|j| f64::exp(score(j))).sum();
                    for j in 0..n {
                        let weight = f64::exp(score(j)) / sum * f64::from(factors[(i - first) * n + j]);
                        for e in 0..d {
                            y[(range.start + i) * WIDTH + head * d + e] += weight * x[at(j, 2) + e];
                        }
                    }
                }
            }
        }
        y
    }

    #[test]
    fn dropped_attention_has_the_right_values_and_gradients() {
        let tokens = tokens(&[SLOTS, 1, 0, 9]);
        let mut s = Stream::new(1, Purpose::Synthetic, [0; 3]);
        let mut normals = |n: usize| (0..n).map(|_| s.normal() as f32).collect::<Vec<f32>>();
        let (x, dy) = (normals(tokens.len() * 3 * WIDTH), normals(tokens.len() * WIDTH));
        let exact: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
        let expected = naive(&tokens, &exact);
        let loss = |x: &[f64]| naive(&tokens, x).iter().zip(&dy).map(|(y, dy)| y * f64::from(*dy)).sum::<f64>();
        for isa in Isa::available() {
            let mut cpu = Cpu::with_isa(1, isa);
            let layer = Attention { tokens: &tokens, heads: HEADS, width: WIDTH, drop: Some(DROP) };
            let mut private = vec![0.0; private_len(SLOTS, WIDTH / HEADS)];
            let (mut y, mut saved) = (vec![f32::NAN; dy.len()], vec![0.0; 2 * tokens.len() * HEADS]);
            layer.forward(&mut cpu, &x, &mut y, &mut saved, &mut private);
            let close = |a: f32, b: f64| (f64::from(a) - b).abs() < 1e-5;
            assert!(y.iter().zip(&expected).all(|(a, b)| close(*a, *b)), "{isa:?}");
            let mut dx = vec![f32::NAN; x.len()];
            layer.backward(&mut cpu, &x, &y, &saved, &dy, Sum { values: &mut dx, fresh: true }, &mut private);
            for i in (0..x.len()).step_by(7) {
                let at = |step: f64| {
                    let mut moved = exact.clone();
                    moved[i] += step;
                    loss(&moved)
                };
                let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
                assert!(close(dx[i], slope), "{isa:?}: element {i}: {} ≠ {slope}", dx[i]);
            }
            // The kernel adds to a sum that is not fresh.
            let first = dx.clone();
            layer.backward(&mut cpu, &x, &y, &saved, &dy, Sum { values: &mut dx, fresh: false }, &mut private);
            assert!(dx.iter().zip(&first).all(|(twice, once)| (twice - 2.0 * once).abs() < 1e-5), "{isa:?}");
        }
    }
}
