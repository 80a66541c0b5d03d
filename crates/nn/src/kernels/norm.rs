//! Batch and group normalisation, fused with the residual addition and the ReLU that usually follow.
//!
//! Both reduce to three passes over rows of C channels: sums for the statistics, y = x·scale + shift (+ residual,
//! ReLU), and dx = a·dz + b·x + c. Batch-norm has one set of coefficients per batch, group-norm one per image.
//! Coefficients are repeated to at least [`PERIOD`] entries, so that the inner loops are long for any C.

mod chunks;

use super::team::{Private, Shards};
use super::{Cpu, Sum};
use chunks::{apply_chunk, gradient_chunk, gradient_sums_chunk, moments_chunk, sum_chunk};
use serde::{Deserialize, Serialize};

/// Minimum length of a coefficient vector.
const PERIOD: usize = 256;
/// Floats of the tensor per chunk of rows.
const CHUNK: usize = 16 * 1024;

/// Rows of a tensor (R, C), and how they are cut.
#[derive(Clone, Copy)]
struct Rows {
    channels: usize,
    /// Length of the repeated coefficient vectors, a multiple of `channels`.
    period: usize,
    /// Floats per chunk, a multiple of `period`.
    chunk: usize,
    n_chunks: usize,
}

impl Rows {
    fn of(len: usize, channels: usize) -> Self {
        let period = channels * PERIOD.div_ceil(channels);
        let chunk = period * (CHUNK / period).max(1);
        Self { channels, period, chunk, n_chunks: len.div_ceil(chunk) }
    }

    /// Repeats the first C entries of each vector over its period.
    fn spread<const N: usize>(&self, vectors: [&mut [f32]; N]) {
        for vector in vectors {
            let (first, rest) = vector.split_at_mut(self.channels);
            for copy in rest.chunks_exact_mut(self.channels) {
                copy.copy_from_slice(first);
            }
        }
    }

    /// The first vectors of a period each in some memory.
    fn vectors<'a, const N: usize>(&self, memory: &'a mut [f32]) -> [&'a mut [f32]; N] {
        let mut vectors = memory.chunks_exact_mut(self.period);
        std::array::from_fn(|_| vectors.next().expect("scratch memory holds all vectors"))
    }

    fn repeat(&self, values: &[f32], out: &mut [f32]) {
        for copy in out[..self.period].chunks_exact_mut(self.channels) {
            copy.copy_from_slice(values);
        }
    }
}

/// What follows the normalisation: z = relu?(norm(x) + residual?).
#[derive(Clone, Copy)]
pub(crate) struct Fused<'a> {
    pub residual: Option<&'a [f32]>,
    pub relu: bool,
}

/// What the backward pass of a fused normalisation reads and writes beside dz.
pub(crate) struct FusedBackward<'a> {
    /// The output z, if a ReLU was fused.
    pub z: Option<&'a [f32]>,
    /// The residual's gradient. The (masked) dz is added to it.
    pub residual: Option<Sum<'a>>,
}

/// Statistics a batch-norm uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormMode {
    /// The batch's own. They also update the running averages.
    Update,
    /// The batch's own. The running averages stay unchanged.
    Batch,
    /// The running averages.
    Frozen,
}

/// Floats of shared scratch for either normalisation of a tensor of `len` floats.
pub(crate) fn scratch_len(len: usize, channels: usize) -> usize {
    let rows = Rows::of(len, channels);
    2 * rows.n_chunks * channels + 6 * rows.period
}

/// Floats of private scratch for either normalisation.
pub(crate) fn private_len(channels: usize) -> usize {
    8 * Rows::of(0, channels).period
}

/// Batch normalisation over rows of channels.
pub(crate) struct BatchNorm<'a> {
    pub weight: &'a [f32],
    pub bias: &'a [f32],
    pub mode: NormMode,
    pub eps: f32,
}

impl BatchNorm<'_> {
    /// z = fused(norm(x)). `saved` (from 2, C) keeps mean and 1/σ for the backward pass.
    pub fn forward(
        &self,
        cpu: &mut Cpu,
        x: &[f32],
        running: (&mut [f32], &mut [f32]),
        momentum: f32,
        fused: Fused<'_>,
        z: &mut [f32],
        saved: &mut [f32],
        scratch: &mut [f32],
    ) {
        let c = self.weight.len();
        let rows = Rows::of(x.len(), c);
        let (mean, inv_std) = saved[..2 * c].split_at_mut(c);
        let (coefficients, partial) = scratch.split_at_mut(6 * rows.period);
        if self.mode == NormMode::Frozen {
            mean.copy_from_slice(running.0);
            for (inv, var) in inv_std.iter_mut().zip(&*running.1) {
                *inv = 1.0 / (var + self.eps).sqrt();
            }
        } else {
            let n = (x.len() / c) as f64;
            // Sums of x − s, where s is the first row: no cancellation if the mean is large beside the standard
            // deviation.
            let first = &x[..c];
            rows.repeat(first, coefficients);
            let shift = &coefficients[..rows.period];
            let isa = cpu.isa;
            let sums = channel_sums(cpu, rows, x.len(), partial, &|range, acc| {
                let (s1, s2) = acc.split_at_mut(rows.period);
                moments_chunk(isa, &x[range], shift, s1, s2);
            });
            for ch in 0..c {
                let (s1, s2) = (sums.total(ch, 0), sums.total(ch, 1));
                let var = (s2 - s1 * s1 / n).max(0.0) / n;
                let exact_mean = f64::from(first[ch]) + s1 / n;
                mean[ch] = exact_mean as f32;
                inv_std[ch] = (1.0 / (var + f64::from(self.eps)).sqrt()) as f32;
                if self.mode == NormMode::Update {
                    let m = f64::from(momentum);
                    let unbiased = if n > 1.0 { var * n / (n - 1.0) } else { var };
                    running.0[ch] = ((1.0 - m) * f64::from(running.0[ch]) + m * exact_mean) as f32;
                    running.1[ch] = ((1.0 - m) * f64::from(running.1[ch]) + m * unbiased) as f32;
                }
            }
        }
        let (scale, shift) = coefficients[..2 * rows.period].split_at_mut(rows.period);
        for ch in 0..c {
            scale[ch] = self.weight[ch] * inv_std[ch];
            shift[ch] = self.bias[ch] - mean[ch] * scale[ch];
        }
        rows.spread([&mut *scale, &mut *shift]);
        let (scale, shift, isa, len) = (&*scale, &*shift, cpu.isa, x.len());
        let z = Shards::new(z);
        cpu.team.run(rows.n_chunks, &|unit, _| {
            let range = unit * rows.chunk..((unit + 1) * rows.chunk).min(len);
            // SAFETY: each unit owns its chunk.
            let z = unsafe { z.part(range.clone()) };
            apply_chunk(isa, &x[range.clone()], fused.residual.map(|r| &r[range]), scale, shift, fused.relu, z);
        });
    }

    /// Replaces dz by dx. Writes dweight and dbias; adds to the residual's gradient.
    pub fn backward(
        &self,
        cpu: &mut Cpu,
        x: &[f32],
        saved: &[f32],
        fused: FusedBackward<'_>,
        dz: &mut [f32],
        dweight: &mut [f32],
        dbias: &mut [f32],
        scratch: &mut [f32],
    ) {
        let c = self.weight.len();
        let rows = Rows::of(x.len(), c);
        let (mean, inv_std) = saved[..2 * c].split_at(c);
        let (coefficients, partial) = scratch.split_at_mut(6 * rows.period);
        let [means, inverses, ca, cb, cc] = rows.vectors(coefficients);
        rows.repeat(mean, means);
        rows.repeat(inv_std, inverses);
        let (means, inverses, isa) = (&*means, &*inverses, cpu.isa);
        let dz_read = &*dz;
        let sums = channel_sums(cpu, rows, x.len(), partial, &|range, acc| {
            let (s1, s2) = acc.split_at_mut(rows.period);
            let z = fused.z.map(|z| &z[range.clone()]);
            gradient_sums_chunk(isa, &dz_read[range.clone()], z, &x[range], means, inverses, s1, s2);
        });
        let n = (x.len() / c) as f64;
        for ch in 0..c {
            let (s1, s2) = (sums.total(ch, 0), sums.total(ch, 1));
            dbias[ch] = s1 as f32;
            dweight[ch] = s2 as f32;
            let (inv, mean) = (f64::from(inv_std[ch]), f64::from(mean[ch]));
            let a = f64::from(self.weight[ch]) * inv;
            // dx = γ/σ (dz − Σdz/n − x̂ Σ(dz x̂)/n); with frozen statistics only the first term.
            let (b, constant) = if self.mode == NormMode::Frozen {
                (0.0, 0.0)
            } else {
                (-a * inv * s2 / n, -a * s1 / n + a * inv * mean * s2 / n)
            };
            (ca[ch], cb[ch], cc[ch]) = (a as f32, b as f32, constant as f32);
        }
        rows.spread([&mut *ca, &mut *cb, &mut *cc]);
        let (ca, cb, cc, len) = (&*ca, &*cb, &*cc, x.len());
        let dz = Shards::new(dz);
        let residual = fused.residual.map(Sum::shards);
        cpu.team.run(rows.n_chunks, &|unit, _| {
            let range = unit * rows.chunk..((unit + 1) * rows.chunk).min(len);
            // SAFETY: each unit owns its chunk.
            let (dz, dr) = unsafe { (dz.part(range.clone()), residual.as_ref().map(|r| r.part(range.clone()))) };
            gradient_chunk(isa, dz, fused.z.map(|z| &z[range.clone()]), &x[range], ca, cb, cc, dr);
        });
    }
}

/// Group normalisation of images of `image` floats.
pub(crate) struct GroupNorm<'a> {
    pub weight: &'a [f32],
    pub bias: &'a [f32],
    pub groups: usize,
    pub image: usize,
    pub eps: f32,
}

impl GroupNorm<'_> {
    /// z = fused(norm(x)). `saved` (N, 2, G) keeps mean and 1/σ per group for the backward pass.
    pub fn forward(
        &self,
        cpu: &mut Cpu,
        x: &[f32],
        fused: Fused<'_>,
        z: &mut [f32],
        saved: &mut [f32],
        private: &mut [f32],
    ) {
        let (c, image, isa) = (self.weight.len(), self.image, cpu.isa);
        let rows = Rows::of(image, c);
        let per_group = c / self.groups;
        let private = Private::new(&cpu.team, private);
        let (z, saved) = (Shards::new(z), Shards::new(saved));
        cpu.team.run(x.len() / image, &|img, worker| {
            let range = img * image..(img + 1) * image;
            let groups = img * 2 * self.groups..(img + 1) * 2 * self.groups;
            // SAFETY: each unit owns its image, each worker its scratch.
            let (z, saved, memory) = unsafe { (z.part(range.clone()), saved.part(groups), private.of(worker)) };
            let x = &x[range.clone()];
            memory[..3 * rows.period].fill(0.0);
            let [zeros, s1, s2, scale, shift] = rows.vectors(memory);
            moments_chunk(isa, x, zeros, s1, s2);
            let n = (image / self.groups) as f64;
            for group in 0..self.groups {
                let total = |s: &[f32]| -> f64 {
                    s.chunks_exact(c).flat_map(|s| &s[group * per_group..][..per_group]).map(|&v| f64::from(v)).sum()
                };
                let mean = total(s1) / n;
                // A second pass about the mean: an image is small and in the cache.
                let squares: f64 = x
                    .chunks_exact(c)
                    .flat_map(|row| &row[group * per_group..][..per_group])
                    .map(|&v| (f64::from(v) - mean).powi(2))
                    .sum();
                let inv = 1.0 / (squares / n + f64::from(self.eps)).sqrt();
                (saved[group], saved[self.groups + group]) = (mean as f32, inv as f32);
                for ch in group * per_group..(group + 1) * per_group {
                    let a = f64::from(self.weight[ch]) * inv;
                    for copy in (ch..rows.period).step_by(c) {
                        scale[copy] = a as f32;
                        shift[copy] = (f64::from(self.bias[ch]) - mean * a) as f32;
                    }
                }
            }
            apply_chunk(isa, x, fused.residual.map(|r| &r[range]), scale, shift, fused.relu, z);
        });
    }

    /// Replaces dz by dx. Writes dweight and dbias per image to `dparams` (N, 2, C), for the caller to sum.
    pub fn backward(
        &self,
        cpu: &mut Cpu,
        x: &[f32],
        saved: &[f32],
        fused: FusedBackward<'_>,
        dz: &mut [f32],
        dweight: &mut [f32],
        dbias: &mut [f32],
        dparams: &mut [f32],
        private: &mut [f32],
    ) {
        let (c, image, isa) = (self.weight.len(), self.image, cpu.isa);
        let rows = Rows::of(image, c);
        let (per_group, n_images) = (c / self.groups, x.len() / image);
        let private = Private::new(&cpu.team, private);
        let (dz, sums_out) = (Shards::new(dz), Shards::new(&mut dparams[..n_images * 2 * c]));
        let residual = fused.residual.map(Sum::shards);
        cpu.team.run(n_images, &|img, worker| {
            let range = img * image..(img + 1) * image;
            // SAFETY: each unit owns its image, each worker its scratch.
            let (dz, dr, out, memory) = unsafe {
                (
                    dz.part(range.clone()),
                    residual.as_ref().map(|r| r.part(range.clone())),
                    sums_out.part(img * 2 * c..(img + 1) * 2 * c),
                    private.of(worker),
                )
            };
            let (x, z) = (&x[range.clone()], fused.z.map(|z| &z[range]));
            let saved = &saved[img * 2 * self.groups..];
            let [means, inverses, s1, s2, ca, cb, cc] = rows.vectors(memory);
            for i in 0..rows.period {
                let group = i % c / per_group;
                (means[i], inverses[i]) = (saved[group], saved[self.groups + group]);
            }
            s1.fill(0.0);
            s2.fill(0.0);
            gradient_sums_chunk(isa, dz, z, x, means, inverses, s1, s2);
            for ch in 0..c {
                let total = |s: &[f32]| s[ch..].iter().step_by(c).map(|&v| f64::from(v)).sum::<f64>() as f32;
                (out[ch], out[c + ch]) = (total(s2), total(s1));
            }
            self.gradient_coefficients(saved, out, [ca, cb, cc]);
            gradient_chunk(isa, dz, z, x, ca, cb, cc, dr);
        });
        for (out, offset) in [(dweight, 0), (dbias, c)] {
            for (ch, out) in out.iter_mut().enumerate() {
                *out = (0..n_images).map(|i| f64::from(dparams[i * 2 * c + offset + ch])).sum::<f64>() as f32;
            }
        }
    }

    /// a, b and c of dx = a·dz + b·x + c for one image, from its statistics and its sums (2, C) of dz·x̂ and dz.
    fn gradient_coefficients(&self, saved: &[f32], sums: &[f32], [ca, cb, cc]: [&mut [f32]; 3]) {
        let c = self.weight.len();
        let (per_group, n) = (c / self.groups, (self.image / self.groups) as f64);
        for group in 0..self.groups {
            let channels = group * per_group..(group + 1) * per_group;
            let weighted =
                |s: &[f32]| -> f64 { channels.clone().map(|ch| f64::from(self.weight[ch]) * f64::from(s[ch])).sum() };
            let (g2, g1) = (weighted(&sums[..c]), weighted(&sums[c..]));
            let (mean, inv) = (f64::from(saved[group]), f64::from(saved[self.groups + group]));
            // dx = 1/σ (γ dz − Σ(γ dz)/n − x̂ Σ(γ dz x̂)/n)
            let b = -inv * inv * g2 / n;
            let constant = -inv * g1 / n - b * mean;
            for ch in channels {
                for copy in (ch..ca.len()).step_by(c) {
                    ca[copy] = (f64::from(self.weight[ch]) * inv) as f32;
                    (cb[copy], cc[copy]) = (b as f32, constant as f32);
                }
            }
        }
    }
}

/// out (C) = column sums of the rows of x.
pub(crate) fn column_sums(cpu: &mut Cpu, x: &[f32], out: &mut [f32], scratch: &mut [f32]) {
    let rows = Rows::of(x.len(), out.len());
    let isa = cpu.isa;
    let sums = channel_sums(cpu, rows, x.len(), scratch, &|range, acc| sum_chunk(isa, &x[range], acc));
    for (ch, out) in out.iter_mut().enumerate() {
        *out = sums.total(ch, 0) as f32;
    }
}

/// Two sums per channel and chunk: (chunks, 2, C).
struct ChannelSums<'a> {
    partial: &'a [f32],
    rows: Rows,
}

impl ChannelSums<'_> {
    fn total(&self, channel: usize, which: usize) -> f64 {
        let c = self.rows.channels;
        let chunks = self.partial.chunks_exact(2 * c).take(self.rows.n_chunks);
        chunks.map(|chunk| f64::from(chunk[which * c + channel])).sum()
    }
}

/// Sums over chunks. `f` adds a chunk's terms to its accumulators (2, period), which are then folded to (2, C).
fn channel_sums<'a>(
    cpu: &mut Cpu,
    rows: Rows,
    len: usize,
    partial: &'a mut [f32],
    f: &(dyn Fn(std::ops::Range<usize>, &mut [f32]) + Sync),
) -> ChannelSums<'a> {
    let c = rows.channels;
    let shards = Shards::new(partial);
    cpu.team.run(rows.n_chunks, &|unit, _| {
        // SAFETY: each unit owns its chunk.
        let out = unsafe { shards.part(unit * 2 * c..(unit + 1) * 2 * c) };
        let range = unit * rows.chunk..((unit + 1) * rows.chunk).min(len);
        if rows.period == c {
            out.fill(0.0);
            return f(range, out);
        }
        let mut acc = [0.0; 4 * PERIOD];
        let acc = &mut acc[..2 * rows.period];
        f(range, acc);
        for (out, acc) in out.chunks_exact_mut(c).zip(acc.chunks_exact(rows.period)) {
            out.fill(0.0);
            for copy in acc.chunks_exact(c) {
                for (out, v) in out.iter_mut().zip(copy) {
                    *out += v;
                }
            }
        }
    });
    ChannelSums { partial, rows }
}
