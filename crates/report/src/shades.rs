//! Values as shades of one colour over the paper, so that they read alike in light and dark, in grey print and for
//! colour-blind eyes.

use crate::axis::{axis, ticks};
use crate::svg::{Anchor, Room, Style, Svg, number};

/// Width of a swatch of the legend, in pixels.
const SWATCH: f64 = 46.0;

/// A scale from 0 to a round number.
pub(crate) struct Shades {
    colour: &'static str,
    /// Its end and its ticks.
    axis: (f64, f64, f64),
    /// Shades grow with the value to this power.
    power: f64,
}

impl Shades {
    /// A scale that covers values up to `most`.
    pub(crate) fn new(colour: &'static str, most: f64, power: f64) -> Self {
        Self { colour, axis: if most > 0.0 { axis(0.0, most) } else { (0.0, 1.0, 1.0) }, power }
    }

    /// A cell of a value; its title shows it below the pointer. Even a 0 differs from the bare paper.
    pub(crate) fn cell(&self, svg: &mut Svg, at: (f64, f64), size: (f64, f64), value: f64, title: &str) {
        let share = (value / self.axis.1).clamp(0.0, 1.0).powf(self.power);
        svg.rect(at, size).set("fill", self.colour).number("fill-opacity", 0.08 + 0.92 * share).open();
        svg.title(title);
        svg.close();
    }

    /// One swatch per tick from `y` on, what the values are at the left, and what bare paper means at the right, on a phone
    /// below.
    pub(crate) fn legend(&self, svg: &mut Svg, room: Room, y: f64, label: &str, blank: Option<&str>) {
        svg.text(room.left - 8.0, y + 11.0, label, Style::new(11.0).soft().anchor(Anchor::End));
        let ticks = ticks(self.axis);
        let swatch = SWATCH.min(room.width / ticks.len() as f64);
        for (i, &value) in ticks.iter().enumerate() {
            let (x, text) = (room.left + swatch * i as f64, number(value));
            self.cell(svg, (x, y), (swatch, 14.0), value, &text);
            svg.text(x + swatch / 2.0, y + 28.0, &text, Style::new(11.0).soft().anchor(Anchor::Middle));
        }
        if let Some(blank) = blank {
            let right = (room.left + swatch * ticks.len() as f64 + 12.0, y + 11.0);
            let (x, y) = if room.is_phone() { (room.left, y + 46.0) } else { right };
            svg.text(x, y, &format!("blank: {blank}"), Style::new(11.0).soft());
        }
    }
}

/// A frame of bare paper for cells.
pub(crate) fn frame(svg: &mut Svg, at: (f64, f64), size: (f64, f64)) {
    svg.rect(at, size).set("fill", "none").set("stroke", "#d9d9d9").set("class", "rule").end();
}

/// Labels of columns: numbers from 0, as many as there is room for.
pub(crate) fn column_labels(svg: &mut Svg, (left, y): (f64, f64), cell: f64, n_columns: usize, label: &str) {
    let room = if n_columns <= 100 { 24.0 } else { 30.0 };
    let every = [1, 2, 5, 10, 20, 50, 100].into_iter().find(|&n| f64::from(n) * cell >= room).unwrap_or(100);
    for c in (0..n_columns).step_by(every as usize) {
        let x = left + cell * (c as f64 + 0.5);
        svg.text(x, y, &c.to_string(), Style::new(11.0).soft().anchor(Anchor::Middle));
    }
    let middle = left + cell * n_columns as f64 / 2.0;
    svg.text(middle, y + 18.0, label, Style::new(11.0).soft().anchor(Anchor::Middle));
}
