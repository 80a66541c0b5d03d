//! Coloured noise: octaves of smooth random values whose strength falls with their frequency, as in natural images.

use super::{Canvas, byte};

/// Finest octave: 2⁵ cells per side.
const N_OCTAVES: u32 = 6;

pub(super) fn paint(canvas: &mut Canvas<'_>) {
    let [height, width, channels] = canvas.size;
    // Each octave has so much of the strength of the coarser one; and all channels share so much of their values.
    let (falloff, shared) = (canvas.between(0.3, 0.8), canvas.stream.uniform());
    let common = field(canvas, falloff);
    for channel in 0..channels {
        let own = field(canvas, falloff);
        let mixed: Vec<f64> = common.iter().zip(&own).map(|(c, o)| shared * c + (1.0 - shared) * o).collect();
        let least = mixed.iter().copied().fold(f64::INFINITY, f64::min);
        let most = mixed.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let range = (most - least).max(f64::MIN_POSITIVE);
        for (at, value) in mixed.into_iter().enumerate().take(height * width) {
            canvas.pixels[at * channels + channel] = byte((value - least) / range);
        }
    }
}

/// One value per pixel: the sum of the octaves.
fn field(canvas: &mut Canvas<'_>, falloff: f64) -> Vec<f64> {
    let [height, width, _] = canvas.size;
    let (mut sum, mut strength) = (vec![0.0; height * width], 1.0);
    for octave in 0..N_OCTAVES {
        let cells = 1usize << octave;
        if cells > height.max(width) {
            break;
        }
        let lattice: Vec<f64> = (0..(cells + 1) * (cells + 1)).map(|_| canvas.stream.uniform()).collect();
        let columns: Vec<_> = (0..width).map(|x| place(x, width, cells)).collect();
        for y in 0..height {
            let (row, down) = place(y, height, cells);
            let (above, below) = (&lattice[row * (cells + 1)..], &lattice[(row + 1) * (cells + 1)..]);
            for (value, &(x, right)) in sum[y * width..][..width].iter_mut().zip(&columns) {
                let top = above[x] + right * (above[x + 1] - above[x]);
                let bottom = below[x] + right * (below[x + 1] - below[x]);
                *value += strength * (top + down * (bottom - top));
            }
        }
        strength *= falloff;
    }
    sum
}

/// The cell of a pixel's centre, and the smooth share of the cell's far end.
fn place(at: usize, n: usize, cells: usize) -> (usize, f64) {
    let position = (at as f64 + 0.5) / n as f64 * cells as f64;
    let cell = (position as usize).min(cells - 1);
    let t = position - cell as f64;
    (cell, t * t * (3.0 - 2.0 * t))
}
