//! Convolution of channels-last images (N, H, W, C) with weights stored (O, H, W, I).
//!
//! There are two algorithms. Only the shape selects one, so the bytes depend on nothing else. [`winograd`] serves 3×3
//! kernels of stride 1, with up to four times fewer multiplications. [`direct`], a product with the unrolled image,
//! serves all others.

mod blocks;
mod direct;
mod strips;
mod tiles;
mod transform;
mod winograd;

use super::simd::Simd;
use super::{Cpu, Isa, Sum};
use winograd::Tile;

/// The geometry of a convolution on one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Conv {
    pub h: usize,
    pub w: usize,
    pub ci: usize,
    pub ho: usize,
    pub wo: usize,
    pub co: usize,
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
}

/// Memory that a kernel may overwrite: one part for all threads, and one per thread.
pub(crate) struct Scratch<'a> {
    pub shared: &'a mut [f32],
    /// Equal parts, one per thread of the team.
    pub private: &'a mut [f32],
}

/// What is done to a complete output.
#[derive(Clone, Copy, Default)]
pub(crate) struct Epilogue<'a> {
    /// Bias (C), added to every pixel.
    pub bias: Option<&'a [f32]>,
    /// Negative values become 0.
    pub relu: bool,
}

/// Operands of y = conv(x, w), then the epilogue: x (N, H, W, I), w (O, K, K, I), y (N, Ho, Wo, O).
pub(crate) struct Forward<'a> {
    pub x: &'a [f32],
    pub w: &'a [f32],
    pub end: Epilogue<'a>,
    pub y: &'a mut [f32],
}

/// Operands of the gradients: dw = ∂L/∂w, and dx += ∂L/∂x if requested, from dy = ∂L/∂y.
pub(crate) struct Backward<'a> {
    pub x: &'a [f32],
    pub w: &'a [f32],
    pub dy: &'a [f32],
    pub dx: Option<Sum<'a>>,
    pub dw: &'a mut [f32],
}

impl Conv {
    /// Length of an unrolled patch.
    fn patch(&self) -> usize {
        self.kernel * self.kernel * self.ci
    }

    fn tile(&self) -> Option<Tile> {
        Tile::best_for(self)
    }

    /// Lengths of [`Scratch`]: shared, and private per thread, for batches of up to `n` images.
    pub fn scratch_len(&self, n: usize) -> (usize, usize) {
        match self.tile() {
            Some(tile) => winograd::scratch_len(self, tile, n),
            None => direct::scratch_len(self),
        }
    }

    /// The forward pass.
    pub fn forward(&self, cpu: &mut Cpu, pass: Forward<'_>, scratch: Scratch<'_>) {
        match self.tile() {
            Some(tile) => winograd::forward(cpu, self, tile, pass, scratch),
            None => direct::forward(cpu, self, pass, scratch),
        }
    }

    /// The backward pass.
    pub fn backward(&self, cpu: &mut Cpu, pass: Backward<'_>, scratch: Scratch<'_>) {
        match self.tile() {
            Some(tile) => winograd::backward(cpu, self, tile, pass, scratch),
            None => direct::backward(cpu, self, pass, scratch),
        }
    }

    fn n_images(&self, x: &[f32]) -> usize {
        x.len() / (self.h * self.w * self.ci)
    }
}

impl Epilogue<'_> {
    /// Applies the epilogue to complete rows of C values.
    pub fn apply(self, isa: Isa, channels: usize, y: &mut [f32]) {
        if self.relu || self.bias.is_some() {
            finish_rows(isa, self, channels, y);
        }
    }
}

/// The larger value. NaN stays NaN, so that a diverged network is noticed.
#[inline(always)]
pub(super) fn at_least(floor: f32, v: f32) -> f32 {
    if v < floor { floor } else { v }
}

dispatch! { fn finish_rows(end: Epilogue<'_>, channels: usize, y: &mut [f32]) = finish }

#[inline(always)]
unsafe fn finish<S: Simd>(end: Epilogue<'_>, channels: usize, y: &mut [f32]) {
    let floor = if end.relu { 0.0 } else { f32::NEG_INFINITY };
    for row in y.chunks_exact_mut(channels) {
        match end.bias {
            Some(bias) => row.iter_mut().zip(bias).for_each(|(v, b)| *v = at_least(floor, *v + b)),
            None => row.iter_mut().for_each(|v| *v = at_least(floor, *v)),
        }
    }
}
