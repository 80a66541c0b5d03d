//! Line charts over rounds: small multiples with a shared legend, means as lines and ranges as bands.

use crate::palette::{Look, SERIES};
use crate::svg::{Anchor, Style, Svg, number};
use std::fmt::Write;

/// Pixels.
const PLOT: (f64, f64) = (270.0, 170.0);
const CELL: (f64, f64) = (356.0, 262.0);
const MARGIN: (f64, f64) = (58.0, 40.0);
const TOP: f64 = 60.0;
const COLUMNS: usize = 3;

/// Charts side by side.
#[derive(Clone, Debug)]
pub struct Charts {
    /// Title.
    pub title: String,
    /// Second line.
    pub subtitle: String,
    /// Names of the series, in the order of [`SERIES`]; the legend takes the place after the last chart.
    pub series: Vec<String>,
    /// Lines of the legend below the names.
    pub notes: Vec<String>,
    /// The charts, row by row.
    pub charts: Vec<Chart>,
}

/// One chart.
#[derive(Clone, Debug)]
pub struct Chart {
    /// What is drawn.
    pub title: String,
    /// The y axis: its least value, its greatest and the distance of its ticks.
    pub y: (f64, f64, f64),
    /// The x axis: first and last value, and the values that get a tick.
    pub x: (f64, f64, Vec<f64>),
    /// What x counts.
    pub x_label: String,
    /// For each series of [`Charts::series`] its points, if it appears in this chart.
    pub lines: Vec<Vec<Spread>>,
}

/// A point of a line: a mean and the range around it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Place on the x axis.
    pub x: f64,
    /// Mean.
    pub mean: f64,
    /// Least value.
    pub min: f64,
    /// Greatest value.
    pub max: f64,
}

impl Charts {
    /// The picture.
    pub fn draw(&self) -> String {
        let n_rows = (self.charts.len() + 1).div_ceil(COLUMNS);
        let (width, height) = (COLUMNS as f64 * CELL.0 + 16.0, TOP + n_rows as f64 * CELL.1);
        let mut svg = Svg::new(width, height, &self.title);
        svg.text(16.0, 26.0, &self.title, Style::new(17.0).bold());
        svg.text(16.0, 45.0, &self.subtitle, Style::new(12.0).soft());
        let corner = |i: usize| ((i % COLUMNS) as f64 * CELL.0, TOP + (i / COLUMNS) as f64 * CELL.1);
        for (i, chart) in self.charts.iter().enumerate() {
            let (x, y) = corner(i);
            chart.draw(&mut svg, x + MARGIN.0, y + MARGIN.1);
        }
        let (x, y) = corner(self.charts.len());
        self.legend(&mut svg, x + MARGIN.0, y + MARGIN.1);
        svg.finish()
    }

    fn legend(&self, svg: &mut Svg, x: f64, mut y: f64) {
        y += 14.0;
        for (name, look) in self.series.iter().zip(SERIES) {
            stroke(svg.line((x, y - 5.0), (x + 44.0, y - 5.0)), look).end();
            svg.tag("path").set("d", &look.mark.path(x + 22.0, y - 5.0, 4.0)).set("fill", look.colour).end();
            svg.text(x + 56.0, y, name, Style::new(14.0));
            y += 26.0;
        }
        for note in &self.notes {
            svg.text(x, y, note, Style::new(12.0).soft());
            y += 18.0;
        }
    }
}

impl Chart {
    fn draw(&self, svg: &mut Svg, left: f64, top: f64) {
        let place = |x: f64, y: f64| {
            let (x0, x1, _) = &self.x;
            let (y0, y1, _) = self.y;
            (left + PLOT.0 * (x - x0) / (x1 - x0), top + PLOT.1 * (y1 - y.clamp(y0, y1)) / (y1 - y0))
        };
        svg.text(left, top - 12.0, &self.title, Style::new(13.0).bold());
        self.axes(svg, left, top, &place);
        for (i, (line, look)) in self.lines.iter().zip(SERIES).enumerate() {
            let Some(first) = line.first() else { continue };
            let mut band = String::new();
            for p in line {
                let (x, y) = place(p.x, p.max);
                let _ = write!(band, "{}{} {}", if p == first { "M" } else { "L" }, number(x), number(y));
            }
            for p in line.iter().rev() {
                let (x, y) = place(p.x, p.min);
                let _ = write!(band, "L{} {}", number(x), number(y));
            }
            svg.tag("path").set("d", &(band + "z")).set("fill", look.colour).set("fill-opacity", "0.16").end();
            let mut d = String::new();
            for p in line {
                let (x, y) = place(p.x, p.mean);
                let _ = write!(d, "{}{} {}", if p == first { "M" } else { "L" }, number(x), number(y));
            }
            stroke(svg.tag("path").set("d", &d).set("fill", "none"), look).set("stroke-linejoin", "round").end();
            // Few marks, each series' at rounds of its own: lines that lie on each other still show both kinds.
            let is_marked = |p: &&Spread| (p.x as usize + 5 - 2 * i).is_multiple_of(5);
            let at = |p: &Spread| place(p.x, p.mean);
            let marks: String = line.iter().filter(is_marked).map(at).map(|(x, y)| look.mark.path(x, y, 3.6)).collect();
            svg.tag("path").set("d", &marks).set("fill", look.colour).end();
        }
    }

    fn axes(&self, svg: &mut Svg, left: f64, top: f64, place: &dyn Fn(f64, f64) -> (f64, f64)) {
        let (least, most, step) = self.y;
        let n_ticks = ((most - least) / step).round() as usize;
        for i in 0..=n_ticks {
            let value = least + step * i as f64;
            let (_, y) = place(self.x.0, value);
            svg.rule((left, y), (left + PLOT.0, y));
            svg.text(left - 7.0, y + 4.0, &number(value), Style::new(11.0).soft().anchor(Anchor::End));
        }
        let bottom = top + PLOT.1;
        for &tick in &self.x.2 {
            let (x, _) = place(tick, least);
            svg.line((x, bottom), (x, bottom + 5.0)).set("stroke", "#777777").set("class", "frame").end();
            svg.text(x, bottom + 18.0, &number(tick), Style::new(11.0).soft().anchor(Anchor::Middle));
        }
        let (x, y) = (left + PLOT.0 / 2.0, bottom + 35.0);
        svg.text(x, y, &self.x_label, Style::new(11.0).soft().anchor(Anchor::Middle));
        svg.line((left, bottom), (left + PLOT.0, bottom)).set("stroke", "#777777").set("class", "frame").end();
    }
}

fn stroke(tag: crate::svg::Tag<'_>, look: Look) -> crate::svg::Tag<'_> {
    let tag = tag.set("stroke", look.colour).number("stroke-width", look.width);
    if look.dashes.is_empty() { tag } else { tag.set("stroke-dasharray", look.dashes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_is_well_formed_and_draws_each_series_that_has_points() {
        let spread = |x| Spread { x, mean: 50.0, min: 40.0, max: 60.0 };
        let chart = Chart {
            title: "accuracy & more".into(),
            y: (0.0, 100.0, 20.0),
            x: (1.0, 20.0, vec![1.0, 5.0, 10.0]),
            x_label: "round".into(),
            lines: vec![(1..=20).map(|x| spread(f64::from(x))).collect(), Vec::new(), vec![spread(3.0)]],
        };
        let charts = Charts {
            title: "t".into(),
            subtitle: String::new(),
            series: ["a", "b", "c"].map(str::to_owned).to_vec(),
            notes: vec!["n".into()],
            charts: vec![chart],
        };
        let text = charts.draw();
        let read = roxmltree::Document::parse(&text).unwrap();
        let lines = read.descendants().filter(|n| n.has_tag_name("path") && n.attribute("fill") == Some("none"));
        assert_eq!(lines.count(), 2);
    }
}
