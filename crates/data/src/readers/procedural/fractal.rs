//! Fractals of iterated function systems: a point jumps through a few random contractions and leaves its trace
//! (Kataoka et al., "Pre-training without Natural Images", ACCV 2020).

use super::{Canvas, set};

/// A contraction: a matrix, a shift, and a colour for where it leads.
struct Map {
    matrix: [[f64; 2]; 2],
    shift: [f64; 2],
    colour: [f64; 3],
}

/// Jumps before the first point is painted: the start is forgotten by then.
const N_FORGOTTEN: usize = 20;

pub(super) fn paint(canvas: &mut Canvas<'_>) {
    let background = canvas.colour();
    canvas.fill(background);
    for _ in 0..=canvas.stream.below(3) {
        let maps: Vec<Map> = (0..2 + canvas.stream.below(4)).map(|_| map(canvas)).collect();
        trace(canvas, &maps);
    }
}

/// Rotation, stretch and rotation: singular values in [0.2, 0.9), mirrored or not.
fn map(canvas: &mut Canvas<'_>) -> Map {
    let ([c, s], [d, t]) = (canvas.direction(), canvas.direction());
    let (a, b) = (canvas.between(0.2, 0.9), canvas.between(0.2, 0.9));
    let b = if canvas.stream.below(2) == 0 { b } else { -b };
    Map {
        matrix: [[c * a * d - s * b * t, -(c * a * t + s * b * d)], [s * a * d + c * b * t, c * b * d - s * a * t]],
        shift: [canvas.between(-1.0, 1.0), canvas.between(-1.0, 1.0)],
        colour: canvas.colour().map(f64::from),
    }
}

/// Paints the points of a system into a random box of the image.
fn trace(canvas: &mut Canvas<'_>, maps: &[Map]) {
    let [height, width, _] = canvas.size;
    let (mut at, mut colour) = ([0.0; 2], maps[0].colour);
    let mut points = Vec::with_capacity(2 * height * width);
    for n in 0..N_FORGOTTEN + 2 * height * width {
        let map = &maps[canvas.stream.below(maps.len() as u32) as usize];
        let [[a, b], [c, d]] = map.matrix;
        at = [a * at[0] + b * at[1] + map.shift[0], c * at[0] + d * at[1] + map.shift[1]];
        colour.iter_mut().zip(map.colour).for_each(|(now, next)| *now = 0.5 * *now + 0.5 * next);
        if n >= N_FORGOTTEN {
            points.push((at, colour));
        }
    }
    let side = |of: usize| {
        let all = || points.iter().map(|(at, _)| at[of]);
        (all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max))
    };
    let ((left, right), (top, bottom)) = (side(0), side(1));
    let share = canvas.between(0.5, 1.0);
    let corner = [canvas.between(0.0, 1.0 - share), canvas.between(0.0, 1.0 - share)];
    let place = |value: f64, low: f64, high: f64, corner: f64, n: usize| {
        let inside = (value - low) / (high - low).max(f64::MIN_POSITIVE);
        (((corner + share * inside) * n as f64) as usize).min(n - 1)
    };
    for ([x, y], colour) in points {
        let (x, y) = (place(x, left, right, corner[0], width), place(y, top, bottom, corner[1], height));
        set(canvas.pixel(y, x), colour.map(|value| (value + 0.5) as u8));
    }
}
