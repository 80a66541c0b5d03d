//! Random crops and flips of images, in the batches of a client's own samples.
//!
//! A move is one number per sample and step, drawn with the plan. So it is the same for any number of threads, after a
//! resume, and on a node. GPUs read the same numbers (`gather_moved` in `layers.cu`).

use fedproj_data::Shape;
use fedproj_rng::Stream;

/// The part of a side by which an image moves at most: 4 of 32 pixels.
const PART: usize = 8;

/// A shift s is stored as s + `ZERO` in a byte.
const ZERO: u32 = 128;

/// A crop of the image with a margin of zeros, mirrored or not: rows down, columns right and a mark, from the lowest byte on.
pub(crate) fn draw(stream: &mut Stream, shape: Shape) -> u32 {
    let Shape::Image { height, width, .. } = shape else { return ZERO | ZERO << 8 };
    let mut shift = |side: usize| {
        let margin = ((side / PART) as u32).min(ZERO - 1);
        ZERO - margin + stream.below(2 * margin + 1)
    };
    let (down, right) = (shift(height), shift(width));
    down | right << 8 | stream.below(2) << 16
}

/// Moves an image. `copy` keeps memory between calls.
pub(crate) fn apply(image: &mut [f32], shape: Shape, drawn: u32, copy: &mut Vec<f32>) {
    let Shape::Image { height, width, channels } = shape else { return };
    let shift = |byte: u32| (byte & 255) as isize - ZERO as isize;
    let (down, right, is_mirrored) = (shift(drawn), shift(drawn >> 8), drawn >> 16 != 0);
    copy.clear();
    copy.extend_from_slice(image);
    let inside = |at: usize, by: isize, side: usize| at.checked_add_signed(by).filter(|at| *at < side);
    for (at, pixel) in image.chunks_exact_mut(channels).enumerate() {
        let (row, column) = (at / width, at % width);
        let column = if is_mirrored { width - 1 - column } else { column };
        match inside(row, down, height).zip(inside(column, right, width)) {
            Some((row, column)) => pixel.copy_from_slice(&copy[(row * width + column) * channels..][..channels]),
            None => pixel.fill(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fedproj_rng::Purpose;

    /// Pads, crops and mirrors, step by step.
    fn by_hand(image: &[f32], (height, width, channels): (usize, usize, usize), drawn: u32) -> Vec<f32> {
        let margin = 127;
        let wide = width + 2 * margin;
        let mut padded = vec![0.0; (height + 2 * margin) * wide * channels];
        for row in 0..height {
            let to = ((row + margin) * wide + margin) * channels;
            padded[to..to + width * channels].copy_from_slice(&image[row * width * channels..][..width * channels]);
        }
        let (top, left) = ((drawn & 255) as usize - 1, (drawn >> 8 & 255) as usize - 1);
        let mut out = Vec::new();
        for row in 0..height {
            let from = ((top + row) * wide + left) * channels;
            let mut pixels: Vec<&[f32]> = padded[from..from + width * channels].chunks(channels).collect();
            if drawn >> 16 == 1 {
                pixels.reverse();
            }
            out.extend(pixels.concat());
        }
        out
    }

    #[test]
    fn moves_are_those_of_a_padded_image() {
        let mut stream = Stream::new(1, Purpose::Synthetic, [0; 3]);
        for (height, width, channels) in [(32, 32, 3), (28, 28, 1), (9, 17, 2), (8, 8, 1), (1, 1, 4), (40, 3, 3)] {
            let shape = Shape::Image { height, width, channels };
            let image: Vec<f32> = (0..shape.len()).map(|_| stream.normal() as f32).collect();
            let mut copy = Vec::new();
            let mut seen = std::collections::BTreeSet::new();
            for _ in 0..3000 {
                let drawn = draw(&mut stream, shape);
                let mut moved = image.clone();
                apply(&mut moved, shape, drawn, &mut copy);
                assert_eq!(moved, by_hand(&image, (height, width, channels), drawn), "{shape}: {drawn:x}");
                seen.insert(drawn);
            }
            let (rows, columns) = (2 * (height / PART) + 1, 2 * (width / PART) + 1);
            assert_eq!(seen.len(), 2 * rows * columns, "{shape}: every move occurs");
        }
    }
}
