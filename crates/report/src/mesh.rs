//! A model's scores over a mesh of the plane, and the outlines of the regions where each class wins.

use std::collections::BTreeMap;

/// A rectangle of the plane.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Extent {
    /// Least and greatest x.
    pub x: (f64, f64),
    /// Least and greatest y.
    pub y: (f64, f64),
}

impl Extent {
    /// The rectangle around points, with room on all sides.
    pub fn around(points: impl Iterator<Item = (f64, f64)>, margin: f64) -> Self {
        let (mut x, mut y) = ((f64::INFINITY, f64::NEG_INFINITY), (f64::INFINITY, f64::NEG_INFINITY));
        for (px, py) in points {
            x = (x.0.min(px - margin), x.1.max(px + margin));
            y = (y.0.min(py - margin), y.1.max(py + margin));
        }
        Self { x, y }
    }

    /// The points of a mesh that covers the rectangle, row by row from the least y.
    pub fn mesh_points(&self, n_x: usize, n_y: usize) -> Vec<(f64, f64)> {
        let at = |(least, most): (f64, f64), i: usize, n: usize| least + (most - least) * i as f64 / (n - 1) as f64;
        (0..n_y).flat_map(|j| (0..n_x).map(move |i| (at(self.x, i, n_x), at(self.y, j, n_y)))).collect()
    }
}

/// Scores of the classes at the points of [`Extent::mesh_points`].
#[derive(Clone, Debug, PartialEq)]
pub struct Mesh {
    /// Points along x.
    pub n_x: usize,
    /// Points along y.
    pub n_y: usize,
    /// (n_y, n_x, classes)
    pub scores: Vec<f32>,
}

/// A closed line; coordinates count mesh points.
pub type Outline = Vec<(f64, f64)>;

impl Mesh {
    /// How many classes there are.
    pub fn n_classes(&self) -> usize {
        self.scores.len() / (self.n_x * self.n_y).max(1)
    }

    /// The outlines of the region where `class` has the highest score, in units of mesh points, the origin at the first
    /// one. Parts at the edge of the mesh reach beyond it, to be clipped. Between two points of the mesh the
    /// border lies where the scores, taken as linear, are equal: the lines of a piecewise linear network stay straight.
    pub fn outlines(&self, class: usize) -> Vec<Outline> {
        let (w, h) = (self.n_x + 4, self.n_y + 4);
        // How far the class leads. The edge is repeated once, and around it nobody leads, which closes every outline.
        let lead = |i: usize, j: usize| {
            if i == 0 || j == 0 || i == w - 1 || j == h - 1 {
                return -1.0;
            }
            let (x, y) = (i.saturating_sub(2).min(self.n_x - 1), j.saturating_sub(2).min(self.n_y - 1));
            self.lead(class, x, y)
        };
        let field: Vec<f64> = (0..h).flat_map(|j| (0..w).map(move |i| (i, j))).map(|(i, j)| lead(i, j)).collect();
        trace(&field, w, h).into_iter().map(|line| straighten(&line, 0.02)).filter(|line| line.len() > 2).collect()
    }

    fn lead(&self, class: usize, x: usize, y: usize) -> f64 {
        let n = self.n_classes();
        let row = &self.scores[(y * self.n_x + x) * n..][..n];
        let others = row.iter().enumerate().filter(|(c, _)| *c != class).map(|(_, s)| *s).fold(f32::MIN, f32::max);
        f64::from(row[class]) - f64::from(others)
    }
}

/// A place on the mesh where an outline crosses from one point to its neighbour to the right or above.
type Crossing = (usize, usize, bool);

/// Marching squares over a field that is negative all around: the closed lines where it changes sign, with what is
/// positive on the left. Coordinates are shifted by the two padding points.
fn trace(field: &[f64], w: usize, h: usize) -> Vec<Outline> {
    let mut next: BTreeMap<Crossing, Crossing> = BTreeMap::new();
    for j in 0..h - 1 {
        for i in 0..w - 1 {
            let corners = [(i, j), (i + 1, j), (i + 1, j + 1), (i, j + 1)].map(|(x, y)| field[y * w + x] > 0.0);
            // Edges counter-clockwise from the lower one; an outline enters where a positive corner is followed by
            // another sign, and leaves at the next edge where it comes back. At a saddle the positive corners stay apart.
            let edges: [Crossing; 4] = [(i, j, false), (i + 1, j, true), (i, j + 1, false), (i, j, true)];
            for leave in 0..4 {
                if corners[leave] || !corners[(leave + 1) % 4] {
                    continue;
                }
                let enter = (1..4).map(|k| (leave + k) % 4).find(|&e| corners[e] && !corners[(e + 1) % 4]);
                if let Some(enter) = enter {
                    next.insert(edges[enter], edges[leave]);
                }
            }
        }
    }
    let place = |(i, j, up): Crossing| {
        let (a, b) = (field[j * w + i], field[if up { (j + 1) * w + i } else { j * w + i + 1 }]);
        // Beyond the mesh a straight line will do, since it is clipped.
        let is_outside = i == 0 || j == 0 || i + 2 >= w || j + 2 >= h;
        let t = if is_outside { 0.5 } else { a / (a - b) };
        let (x, y) = (i as f64 - 2.0, j as f64 - 2.0);
        if up { (x, y + t) } else { (x + t, y) }
    };
    let mut outlines = Vec::new();
    while let Some((&first, _)) = next.first_key_value() {
        let (mut line, mut at) = (Vec::new(), first);
        while let Some(following) = next.remove(&at) {
            line.push(place(at));
            at = following;
        }
        outlines.push(line);
    }
    outlines
}

/// Leaves out points that lie within `tolerance` of the straight line between those that stay (Douglas and Peucker).
fn straighten(line: &[(f64, f64)], tolerance: f64) -> Outline {
    let mut kept = vec![false; line.len()];
    let Some(last) = line.len().checked_sub(1) else { return Vec::new() };
    (kept[0], kept[last]) = (true, true);
    let mut spans = vec![(0, last)];
    while let Some((from, to)) = spans.pop() {
        let far =
            (from + 1..to).map(|i| (distance(line[i], line[from], line[to]), i)).max_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((d, i)) = far
            && d > tolerance
        {
            kept[i] = true;
            spans.extend([(from, i), (i, to)]);
        }
    }
    line.iter().zip(kept).filter(|(_, kept)| *kept).map(|(p, _)| *p).collect()
}

/// From a point to the line through two others.
fn distance(p: (f64, f64), a: (f64, f64), b: (f64, f64)) -> f64 {
    let (dx, dy) = (b.0 - a.0, b.1 - a.1);
    let length = dx.hypot(dy);
    if length == 0.0 {
        return (p.0 - a.0).hypot(p.1 - a.1);
    }
    (dx * (p.1 - a.1) - dy * (p.0 - a.0)).abs() / length
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Twice the signed area: positive where the inside is on the left.
    fn area(line: &Outline) -> f64 {
        let next = line.iter().cycle().skip(1);
        line.iter().zip(next).map(|(a, b)| a.0 * b.1 - b.0 * a.1).sum::<f64>() / 2.0
    }

    fn mesh(n: usize, score: impl Fn(f64, f64) -> [f32; 3]) -> Mesh {
        let extent = Extent { x: (0.0, 1.0), y: (0.0, 1.0) };
        Mesh { n_x: n, n_y: n, scores: extent.mesh_points(n, n).into_iter().flat_map(|(x, y)| score(x, y)).collect() }
    }

    #[test]
    fn a_straight_border_gives_a_polygon_of_a_few_corners() {
        let half = mesh(21, |x, _| [0.525 - x as f32, 0.0, -9.0]);
        let outlines = half.outlines(0);
        assert_eq!(outlines.len(), 1);
        assert!(outlines[0].len() <= 10, "{:?}", outlines[0]);
        let right = outlines[0].iter().map(|p| p.0).fold(f64::MIN, f64::max);
        assert!((right - 0.525 * 20.0).abs() < 1e-4, "{right}");
        assert!(half.outlines(2).is_empty());
    }

    #[test]
    fn outlines_hold_the_area_where_a_class_wins_and_leave_out_holes() {
        let ring = mesh(81, |x, y| {
            let r = ((x - 0.5).hypot(y - 0.5)) as f32;
            [(0.1 - (r - 0.3).abs()), 0.0, -9.0]
        });
        let outlines = ring.outlines(0);
        assert_eq!(outlines.len(), 2);
        let unit = 1.0 / 80.0f64.powi(2);
        let total: f64 = outlines.iter().map(|o| area(o) * unit).sum();
        let expected = std::f64::consts::PI * (0.4f64.powi(2) - 0.2f64.powi(2));
        assert!((total - expected).abs() < 0.003, "{total} {expected}");
    }

    #[test]
    fn a_saddle_closes_every_outline() {
        let checks = mesh(31, |x, y| [((9.0 * x).sin() * (9.0 * y).sin()) as f32, 0.0, -9.0]);
        let whole: f64 = [0, 1].map(|c| checks.outlines(c).iter().map(area).sum::<f64>()).iter().sum();
        assert!(whole > 30.0 * 30.0, "{whole}");
    }
}
