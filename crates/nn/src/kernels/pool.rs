//! Pooling of channels-last images.

use super::simd::Simd;
use super::team::Shards;
use super::{Cpu, Sum};

/// The geometry of a max-pool on one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MaxPool {
    pub h: usize,
    pub w: usize,
    pub c: usize,
    pub ho: usize,
    pub wo: usize,
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
}

/// Channels compared at a time.
const LANES: usize = 16;

impl MaxPool {
    /// y = the largest value per window. `arg` = its position in the window; the first one wins ties.
    pub fn forward(&self, cpu: &mut Cpu, x: &[f32], y: &mut [f32], arg: &mut [u8]) {
        let (isa, image_in, image_out) = (cpu.isa, self.h * self.w * self.c, self.ho * self.wo * self.c);
        let (y, arg) = (Shards::new(y), Shards::new(arg));
        cpu.team.run(x.len() / image_in, &|img, _| {
            let range = img * image_out..(img + 1) * image_out;
            // SAFETY: each unit owns its image.
            let (y, arg) = unsafe { (y.part(range.clone()), arg.part(range)) };
            max_pool_image(isa, self, &x[img * image_in..(img + 1) * image_in], y, arg);
        });
    }

    /// dx += dy at the positions of the largest values.
    pub fn backward(&self, cpu: &mut Cpu, arg: &[u8], dy: &[f32], dx: Sum<'_>) {
        let (isa, image_in, image_out) = (cpu.isa, self.h * self.w * self.c, self.ho * self.wo * self.c);
        let n_images = dx.values.len() / image_in;
        let dx = dx.shards();
        cpu.team.run(n_images, &|img, _| {
            let range = img * image_out..(img + 1) * image_out;
            // SAFETY: each unit owns its image.
            let dx = unsafe { dx.part(img * image_in..(img + 1) * image_in) };
            max_pool_image_backward(isa, self, &arg[range.clone()], &dy[range], dx);
        });
    }

    /// Windows that cover the input coordinate `i`, of `n` in all. They start up to kernel − 1 before it.
    fn windows(&self, i: usize, n: usize) -> std::ops::Range<usize> {
        let last = (i + self.padding) / self.stride;
        let first = (i + self.padding + 1).saturating_sub(self.kernel).div_ceil(self.stride);
        first..(last + 1).min(n)
    }
}

dispatch! { fn max_pool_image(pool: &MaxPool, x: &[f32], y: &mut [f32], arg: &mut [u8]) = max_pool }
dispatch! { fn max_pool_image_backward(pool: &MaxPool, arg: &[u8], dy: &[f32], dx: &mut [f32]) = max_pool_backward }

#[inline(always)]
unsafe fn max_pool<S: Simd>(pool: &MaxPool, x: &[f32], y: &mut [f32], arg: &mut [u8]) {
    let c = pool.c;
    let outputs = y.chunks_exact_mut(c).zip(arg.chunks_exact_mut(c)).enumerate();
    for (pixel, (y, arg)) in outputs {
        let (oy, ox) = (pixel / pool.wo, pixel % pool.wo);
        for start in (0..c).step_by(LANES) {
            let n = LANES.min(c - start);
            let mut best = [f32::NEG_INFINITY; LANES];
            let mut place = [0u32; LANES];
            for k in 0..pool.kernel * pool.kernel {
                let row = (oy * pool.stride + k / pool.kernel).wrapping_sub(pool.padding);
                let col = (ox * pool.stride + k % pool.kernel).wrapping_sub(pool.padding);
                if row >= pool.h || col >= pool.w {
                    continue;
                }
                let from = &x[(row * pool.w + col) * c + start..][..n];
                let mut values = [f32::NEG_INFINITY; LANES];
                if n == LANES {
                    values.copy_from_slice(from);
                } else {
                    values[..n].copy_from_slice(from);
                }
                for i in 0..LANES {
                    // NaN wins, so that a diverged network is noticed.
                    let larger = (values[i] > best[i]) | values[i].is_nan();
                    best[i] = if larger { values[i] } else { best[i] };
                    place[i] = if larger { k as u32 } else { place[i] };
                }
            }
            let place = place.map(|p| p as u8);
            if n == LANES {
                y[start..start + LANES].copy_from_slice(&best);
                arg[start..start + LANES].copy_from_slice(&place);
            } else {
                y[start..start + n].copy_from_slice(&best[..n]);
                arg[start..start + n].copy_from_slice(&place[..n]);
            }
        }
    }
}

#[inline(always)]
unsafe fn max_pool_backward<S: Simd>(pool: &MaxPool, arg: &[u8], dy: &[f32], dx: &mut [f32]) {
    let c = pool.c;
    for (pixel, dx) in dx.chunks_exact_mut(c).enumerate() {
        let (iy, ix) = (pixel / pool.w, pixel % pool.w);
        for oy in pool.windows(iy, pool.ho) {
            for ox in pool.windows(ix, pool.wo) {
                let place = (iy + pool.padding - oy * pool.stride) * pool.kernel + ix + pool.padding - ox * pool.stride;
                let at = (oy * pool.wo + ox) * c;
                for ((dx, dy), arg) in dx.iter_mut().zip(&dy[at..at + c]).zip(&arg[at..at + c]) {
                    *dx += if usize::from(*arg) == place { *dy } else { 0.0 };
                }
            }
        }
    }
}

/// y (N, C) = mean over the pixels of x (N, pixels, C).
pub(crate) fn global_average(cpu: &mut Cpu, pixels: usize, channels: usize, x: &[f32], y: &mut [f32]) {
    cpu.team.parts(y, channels, &|img, y| {
        y.fill(0.0);
        for row in x[img * pixels * channels..(img + 1) * pixels * channels].chunks_exact(channels) {
            for (y, x) in y.iter_mut().zip(row) {
                *y += x;
            }
        }
        for y in y {
            *y /= pixels as f32;
        }
    });
}

/// dx += dy / pixels
pub(crate) fn global_average_backward(cpu: &mut Cpu, pixels: usize, channels: usize, dy: &[f32], dx: Sum<'_>) {
    let n_images = dx.values.len() / (pixels * channels);
    let dx = dx.shards();
    cpu.team.run(n_images, &|img, _| {
        // SAFETY: each unit owns its image.
        let dx = unsafe { dx.part(img * pixels * channels..(img + 1) * pixels * channels) };
        for row in dx.chunks_exact_mut(channels) {
            for (dx, dy) in row.iter_mut().zip(&dy[img * channels..(img + 1) * channels]) {
                *dx += dy / pixels as f32;
            }
        }
    });
}
