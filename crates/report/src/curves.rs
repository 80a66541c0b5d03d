//! Line charts: small multiples with a shared legend, means as lines and ranges as bands.

use crate::palette::Look;
use crate::svg::{Anchor, Style, Svg, number};
use std::fmt::Write;

/// Pixels.
const MARGIN: (f64, f64) = (58.0, 40.0);
/// Right of a plot, and below it.
const GAP: (f64, f64) = (28.0, 52.0);
const TOP: f64 = 60.0;
/// Width of a column of the legend.
const LEGEND: f64 = 330.0;
/// Characters in a line of the legend.
const N_LEGEND_CHARS: usize = 30;

/// Charts side by side.
#[derive(Clone, Debug)]
pub struct Charts {
    /// Title.
    pub title: String,
    /// Second line.
    pub subtitle: String,
    /// The series; the legend takes the place after the last chart.
    pub series: Vec<Series>,
    /// Lines of the legend below the names.
    pub notes: Vec<String>,
    /// The charts, row by row.
    pub charts: Vec<Chart>,
    /// Their size and place.
    pub layout: Layout,
}

/// Size and place of charts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layout {
    /// Charts in a row, the legend among them.
    pub columns: usize,
    /// Width and height of a plot, in pixels.
    pub plot: (f64, f64),
}

impl Default for Layout {
    fn default() -> Self {
        Self { columns: 3, plot: (270.0, 170.0) }
    }
}

/// A series: the same in every chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// How it looks.
    pub look: Look,
}

impl Series {
    /// A series of a name and a look.
    pub fn new(name: impl Into<String>, look: Look) -> Self {
        Self { name: name.into(), look }
    }
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

/// Round numbers around a range: the axis' least value, its greatest and the distance of at most seven ticks.
pub fn axis(least: f64, most: f64) -> (f64, f64, f64) {
    let width = if most - least > 1e-12 { most - least } else { least.abs().max(1.0) * 0.1 };
    let power = 10f64.powf((width / 6.0).log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0, 20.0].map(|m| m * power);
    let ends = |step: f64| ((least / step + 1e-9).floor() * step, (most / step - 1e-9).ceil() * step);
    let fits = |step: &f64| ((ends(*step).1 - ends(*step).0) / step).round() <= 6.0;
    // What has steps of this size may be counted, and rounds have no halves.
    let is_whole = |step: &f64| (step - 2.5).abs() > 1e-9;
    let step = steps.into_iter().filter(is_whole).find(fits).unwrap_or(20.0 * power);
    let (from, to) = ends(step);
    (from, to.max(from + step), step)
}

/// The ticks of an axis: its least value, its greatest and all between that are a step apart.
pub fn ticks((least, most, step): (f64, f64, f64)) -> Vec<f64> {
    (0..=((most - least) / step).round() as usize).map(|i| least + step * i as f64).collect()
}

impl Charts {
    /// The picture.
    pub fn draw(&self) -> String {
        let Layout { columns, plot } = self.layout;
        let cell = (MARGIN.0 + plot.0 + GAP.0, MARGIN.1 + plot.1 + GAP.1);
        let (n_beside, n_rows) = (self.charts.len() % columns, self.charts.len().div_ceil(columns));
        let width = (self.charts.len().min(columns) as f64 * cell.0).max(n_beside as f64 * cell.0 + LEGEND) + 16.0;
        // The legend stands beside the last charts, or below them in as many columns as there is room for.
        let (legend_at, n_legend) = match n_beside {
            0 => ((0.0, TOP + n_rows as f64 * cell.1 + 8.0), ((width / LEGEND) as usize).max(1)),
            n => ((n as f64 * cell.0, TOP + (n_rows - 1) as f64 * cell.1 + MARGIN.1), 1),
        };
        let mut svg =
            Svg::new(width, self.legend_end(legend_at.1, n_legend).max(TOP + n_rows as f64 * cell.1), &self.title);
        svg.headings(&self.title, &self.subtitle);
        for (i, chart) in self.charts.iter().enumerate() {
            let (x, y) = ((i % columns) as f64 * cell.0, TOP + (i / columns) as f64 * cell.1);
            chart.draw(&mut svg, (x + MARGIN.0, y + MARGIN.1), plot, &self.series);
        }
        self.legend(&mut svg, (legend_at.0 + MARGIN.0, legend_at.1), n_legend);
        svg.finish()
    }

    /// Height of a row of the legend: that of its longest name.
    fn legend_row(&self) -> f64 {
        let n_lines = self.series.iter().map(|s| wrap(&s.name, N_LEGEND_CHARS).len()).max().unwrap_or(1);
        26.0 + 15.0 * (n_lines - 1) as f64
    }

    fn legend_end(&self, top: f64, n_columns: usize) -> f64 {
        let n_rows = self.series.len().div_ceil(n_columns);
        top + self.legend_row() * n_rows as f64 + 18.0 * self.notes.len() as f64 + 24.0
    }

    fn legend(&self, svg: &mut Svg, (left, top): (f64, f64), n_columns: usize) {
        let n_rows = self.series.len().div_ceil(n_columns);
        for (i, Series { name, look }) in self.series.iter().enumerate() {
            let (x, y) = (left + LEGEND * (i / n_rows) as f64, top + 14.0 + self.legend_row() * (i % n_rows) as f64);
            stroke(svg.line((x, y - 5.0), (x + 44.0, y - 5.0)), look).end();
            svg.tag("path").set("d", &look.mark.path(x + 22.0, y - 5.0, 4.0)).set("fill", look.colour).end();
            let lines = wrap(name, N_LEGEND_CHARS);
            for (i, line) in lines.iter().enumerate() {
                svg.text(x + 56.0, y + 15.0 * i as f64, line, Style::new(if lines.len() > 1 { 12.0 } else { 14.0 }));
            }
        }
        let below = top + 14.0 + self.legend_row() * n_rows as f64;
        for (i, note) in self.notes.iter().enumerate() {
            svg.text(left, below + 18.0 * i as f64, note, Style::new(12.0).soft());
        }
    }
}

/// Words in lines of at most so many characters, unless one word is longer.
fn wrap(text: &str, n_chars: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is always a line");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > n_chars {
            lines.push(word.to_owned());
        } else {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}

impl Chart {
    fn draw(&self, svg: &mut Svg, (left, top): (f64, f64), plot: (f64, f64), series: &[Series]) {
        let place = |x: f64, y: f64| {
            let (x0, x1, _) = &self.x;
            let (y0, y1, _) = self.y;
            (left + plot.0 * (x - x0) / (x1 - x0), top + plot.1 * (y1 - y.clamp(y0, y1)) / (y1 - y0))
        };
        svg.text(left, top - 12.0, &self.title, Style::new(13.0).bold());
        self.axes(svg, (left, top), plot, &place);
        // All bands lie below all lines.
        for (line, Series { look, .. }) in self.lines.iter().zip(series) {
            if line.iter().all(|p| p.min >= p.max) {
                continue;
            }
            let mut band = path(line.iter().map(|p| place(p.x, p.max)));
            for p in line.iter().rev() {
                let (x, y) = place(p.x, p.min);
                let _ = write!(band, "L{} {}", number(x), number(y));
            }
            svg.tag("path").set("d", &(band + "z")).set("fill", look.colour).set("fill-opacity", "0.16").end();
        }
        for (i, (line, Series { look, .. })) in self.lines.iter().zip(series).enumerate() {
            if line.is_empty() {
                continue;
            }
            let d = path(line.iter().map(|p| place(p.x, p.mean)));
            stroke(svg.tag("path").set("d", &d).set("fill", "none"), look).set("stroke-linejoin", "round").end();
            // Few marks, each series' at points of its own: lines that lie on each other still show both kinds.
            let every = (line.len() / 4).max(1);
            let marked = line.iter().enumerate().filter(|(k, _)| (k + 3 * i + 1).is_multiple_of(every));
            let marks: String =
                marked.map(|(_, p)| place(p.x, p.mean)).map(|(x, y)| look.mark.path(x, y, 3.6)).collect();
            svg.tag("path").set("d", &marks).set("fill", look.colour).end();
        }
    }

    fn axes(&self, svg: &mut Svg, (left, top): (f64, f64), plot: (f64, f64), place: &dyn Fn(f64, f64) -> (f64, f64)) {
        let (least, _, step) = self.y;
        let decimals = decimals(step);
        for value in ticks(self.y) {
            let (_, y) = place(self.x.0, value);
            svg.rule((left, y), (left + plot.0, y));
            let text = format!("{value:.decimals$}").replace('-', "−");
            svg.text(left - 7.0, y + 4.0, &text, Style::new(11.0).soft().anchor(Anchor::End));
        }
        let bottom = top + plot.1;
        for &tick in &self.x.2 {
            let (x, _) = place(tick, least);
            svg.line((x, bottom), (x, bottom + 5.0)).set("stroke", "#777777").set("class", "frame").end();
            svg.text(x, bottom + 18.0, &number(tick), Style::new(11.0).soft().anchor(Anchor::Middle));
        }
        let (x, y) = (left + plot.0 / 2.0, bottom + 35.0);
        svg.text(x, y, &self.x_label, Style::new(11.0).soft().anchor(Anchor::Middle));
        svg.line((left, bottom), (left + plot.0, bottom)).set("stroke", "#777777").set("class", "frame").end();
    }
}

/// Decimals by which multiples of a step differ.
fn decimals(step: f64) -> usize {
    (0..6).find(|&d| (step * 10f64.powi(d)).fract().abs() < 1e-9).unwrap_or(6) as usize
}

/// Straight lines through points.
fn path(points: impl Iterator<Item = (f64, f64)>) -> String {
    let mut d = String::new();
    for (x, y) in points {
        let _ = write!(d, "{}{} {}", if d.is_empty() { "M" } else { "L" }, number(x), number(y));
    }
    d
}

fn stroke<'a>(tag: crate::svg::Tag<'a>, look: &Look) -> crate::svg::Tag<'a> {
    let tag = tag.set("stroke", look.colour).number("stroke-width", look.width);
    if look.dashes.is_empty() { tag } else { tag.set("stroke-dasharray", look.dashes) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::palette::SERIES;

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
            series: ["a", "b", "c"].into_iter().zip(SERIES).map(|(name, look)| Series::new(name, look)).collect(),
            notes: vec!["n".into()],
            charts: vec![chart],
            layout: Layout::default(),
        };
        let text = charts.draw();
        let read = roxmltree::Document::parse(&text).unwrap();
        let lines = read.descendants().filter(|n| n.has_tag_name("path") && n.attribute("fill") == Some("none"));
        assert_eq!(lines.count(), 2);
    }

    #[test]
    fn axes_end_at_round_numbers_around_the_data() {
        let cases = [
            ((0.0, 31.4), (0.0, 40.0, 10.0)),
            ((0.0, 1.0), (0.0, 1.0, 0.2)),
            ((61.2, 69.9), (60.0, 70.0, 2.0)),
            ((0.0, 100.0), (0.0, 100.0, 20.0)),
            ((0.0, 15.0), (0.0, 15.0, 5.0)),
            ((0.0, 0.015), (0.0, 0.015, 0.0025)),
            ((-0.03, 0.011), (-0.03, 0.02, 0.01)),
        ];
        for ((least, most), expected) in cases {
            let found = axis(least, most);
            let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
            assert!(
                near(found.0, expected.0) && near(found.1, expected.1) && near(found.2, expected.2),
                "{least} to {most}: {found:?}"
            );
        }
        let flat = axis(5.0, 5.0);
        assert!(flat.0 <= 5.0 && flat.1 >= 5.0 && flat.1 > flat.0);
    }

    #[test]
    fn long_names_are_wrapped_between_words() {
        assert_eq!(wrap("FedProj, alpha 0.1, beta 0.3", 12), ["FedProj,", "alpha 0.1,", "beta 0.3"]);
        assert_eq!(wrap("", 12), [""]);
    }
}
