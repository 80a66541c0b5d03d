//! Dead leaves: shapes of one colour each that cover one another, as leaves on the ground do. Their edges, occlusions and
//! sizes (density ∝ r⁻³, the same at every scale) are those of natural images (Lee, Mumford and Huang 2001; Baradad et al.,
//! "Learning to See by Looking at Noise", NeurIPS 2021).

use super::{Canvas, set};

/// Radii as shares of the shorter side.
const RADII: [f64; 2] = [0.1, 0.7];
/// Leaves at most; what is still bare then has the last one's colour.
const N_LEAVES: u32 = 1000;

/// A shape of radius 1 around 0.
enum Leaf {
    Disc,
    /// Half its sides; the corners lie on the circle.
    Rectangle([f64; 2]),
    Triangle,
}

impl Leaf {
    fn contains(&self, [x, y]: [f64; 2]) -> bool {
        const ROOT_OF_3: f64 = 1.732_050_807_568_877_2;
        match self {
            Self::Disc => x * x + y * y <= 1.0,
            Self::Rectangle([a, b]) => x.abs() <= *a && y.abs() <= *b,
            Self::Triangle => y >= -0.5 && y <= 1.0 - ROOT_OF_3 * x.abs(),
        }
    }
}

/// From the top leaf down, so that a pixel is painted once.
pub(super) fn paint(canvas: &mut Canvas<'_>) {
    let [height, width, _] = canvas.size;
    let (side, mut bare, mut is_bare) = (height.min(width) as f64, height * width, vec![true; height * width]);
    let mut colour = [0; 3];
    for _ in 0..N_LEAVES {
        let r = side * radius(canvas.stream.uniform());
        let (cy, cx) = (canvas.between(0.0, height as f64), canvas.between(0.0, width as f64));
        let [cos, sin] = canvas.direction();
        let leaf = match canvas.stream.below(3) {
            0 => Leaf::Disc,
            1 => Leaf::Rectangle(canvas.direction().map(f64::abs)),
            _ => Leaf::Triangle,
        };
        colour = muted(canvas);
        // A pixel belongs to a leaf if its centre does.
        let from = |c: f64| (c - r - 0.5).max(0.0) as usize;
        let to = |c: f64, n: usize| ((c + r + 0.5) as usize).min(n);
        for y in from(cy)..to(cy, height) {
            for x in from(cx)..to(cx, width) {
                let (dy, dx) = ((y as f64 + 0.5 - cy) / r, (x as f64 + 0.5 - cx) / r);
                if is_bare[y * width + x] && leaf.contains([cos * dx + sin * dy, cos * dy - sin * dx]) {
                    is_bare[y * width + x] = false;
                    bare -= 1;
                    set(canvas.pixel(y, x), colour);
                }
            }
        }
        if bare == 0 {
            return;
        }
    }
    for at in (0..height * width).filter(|&at| is_bare[at]) {
        set(canvas.pixel(at / width, at % width), colour);
    }
}

/// A colour halfway to a grey: pure ones are rare in nature.
fn muted(canvas: &mut Canvas<'_>) -> [u8; 3] {
    let grey = canvas.stream.below(256) as u8;
    canvas.colour().map(|value| value / 2 + grey / 2)
}

/// A radius of density ∝ r⁻³ between the two limits, from a number in [0, 1).
fn radius(u: f64) -> f64 {
    let [small, large] = RADII.map(|r| 1.0 / (r * r));
    1.0 / (small + u * (large - small)).sqrt()
}
