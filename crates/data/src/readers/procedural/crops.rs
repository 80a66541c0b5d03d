//! Crops of one image that the user names: of any scale, turned, mirrored and in changed colours (Asano and Saeed, "The
//! Augmented Image Prior", ICLR 2023).

use std::path::Path;

use super::{Canvas, byte};
use crate::error::{Error, Result};
use crate::readers::image::Image;

/// Least share of the image's area in a crop.
const SCALE_MIN: f64 = 0.01;
/// Tangent of half the largest turn, which is 30°.
const TURN: f64 = 0.267_949_192_431_122_7;

/// An image and its halves, so that a crop of any scale reads as many pixels as it has.
pub(super) struct Pyramid {
    /// Height, width and bytes, the largest first.
    levels: Vec<(usize, usize, Vec<u8>)>,
    channels: usize,
}

impl Pyramid {
    pub fn read(path: &Path, channels: usize) -> Result<Self> {
        let wrong = |found: String| {
            let expected = "a PNG or JPEG image of at least 8×8";
            Error::malformed(path.display(), "image data", expected, found, "path names the image to crop")
        };
        let image = Image::read(path)?.map_err(wrong)?;
        let (height, width) = (image.height, image.width);
        if height.min(width) < 8 {
            return Err(wrong(format!("{height}×{width}")));
        }
        let mut levels = vec![(height, width, image.into_bytes(channels == 1))];
        while let Some((height, width, bytes)) = levels.last().filter(|(height, width, _)| height.min(width) >= &16) {
            levels.push(halved(*height, *width, channels, bytes));
        }
        Ok(Self { levels, channels })
    }

    /// The image as it was read.
    pub fn bytes(&self) -> &[u8] {
        &self.levels[0].2
    }

    /// A value at a place of the largest level, in its pixels, read from the level where a step is about a pixel.
    fn value(&self, level: usize, y: f64, x: f64, channel: usize) -> f64 {
        let (height, width, bytes) = &self.levels[level];
        let shrink = (1u64 << level) as f64;
        let tap = |at: f64, n: usize| {
            let at = (at / shrink - 0.5).clamp(0.0, (n - 1) as f64);
            (at as usize, (at as usize + 1).min(n - 1), at - (at as usize) as f64)
        };
        let ((top, bottom, down), (left, right, aside)) = (tap(y, *height), tap(x, *width));
        let at = |y: usize, x: usize| f64::from(bytes[(y * width + x) * self.channels + channel]);
        let row = |y: usize| at(y, left) + aside * (at(y, right) - at(y, left));
        row(top) + down * (row(bottom) - row(top))
    }
}

/// Means of 2×2 pixels, rounded.
fn halved(height: usize, width: usize, channels: usize, bytes: &[u8]) -> (usize, usize, Vec<u8>) {
    let (h, w) = (height / 2, width / 2);
    let at = |y: usize, x: usize, c: usize| u32::from(bytes[(y * width + x) * channels + c]);
    let mean =
        |y: usize, x: usize, c: usize| (at(y, x, c) + at(y + 1, x, c) + at(y, x + 1, c) + at(y + 1, x + 1, c) + 2) / 4;
    let all = (0..h * w * channels).map(|i| (i / (w * channels), i / channels % w, i % channels));
    (h, w, all.map(|(y, x, c)| mean(2 * y, 2 * x, c) as u8).collect())
}

pub(super) fn paint(pyramid: &Pyramid, canvas: &mut Canvas<'_>) {
    let [height, width, channels] = canvas.size;
    let (from_height, from_width, _) = pyramid.levels[0];
    let side = canvas.between(SCALE_MIN, 1.0).sqrt();
    let tangent = canvas.between(-TURN, TURN);
    let (cos, sin) = ((1.0 - tangent * tangent) / (1.0 + tangent * tangent), 2.0 * tangent / (1.0 + tangent * tangent));
    let flip = if canvas.stream.below(2) == 0 { 1.0 } else { -1.0 };
    // Image pixels per pixel of the crop. The scale is drawn per area, and as much of the image as the crop's shape allows.
    let step = side * (from_height as f64 / height as f64).min(from_width as f64 / width as f64);
    let (half_y, half_x) = (0.5 * step * height as f64, 0.5 * step * width as f64);
    let cy = canvas.between(half_y, from_height as f64 - half_y);
    let cx = canvas.between(half_x, from_width as f64 - half_x);
    let jitter: Vec<[f64; 2]> = (0..channels).map(|_| [canvas.between(0.6, 1.4), canvas.between(-0.2, 0.2)]).collect();
    let level = (0..pyramid.levels.len() - 1).take_while(|level| (2u64 << level) as f64 <= step).count();
    for y in 0..height {
        for x in 0..width {
            let dy = step * (y as f64 + 0.5) - half_y;
            let dx = flip * (step * (x as f64 + 0.5) - half_x);
            let (from_y, from_x) = (cy + cos * dy + sin * dx, cx + cos * dx - sin * dy);
            for (channel, [contrast, shift]) in jitter.iter().enumerate() {
                let value = pyramid.value(level, from_y, from_x, channel) / 255.0;
                canvas.pixel(y, x)[channel] = byte(((value - 0.5) * contrast + 0.5 + shift).clamp(0.0, 1.0));
            }
        }
    }
}
