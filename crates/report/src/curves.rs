//! Line charts: small multiples with a shared legend, means as lines and ranges as bands.

use crate::axis::{decimals, power_of_ten, ticks};
use crate::palette::Look;
use crate::svg::{Anchor, Headings, Style, Svg, number, path, wrap};

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
    pub size: ChartSize,
}

/// Size and place of charts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChartSize {
    /// Charts in a row, the legend among them.
    pub columns: usize,
    /// Width and height of a plot, in pixels.
    pub plot: (f64, f64),
}

impl Default for ChartSize {
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

/// One chart below the other, as wide as a phone.
const NARROW: ChartSize = ChartSize { columns: 1, plot: (270.0, 170.0) };

impl Charts {
    /// The picture.
    pub fn draw(&self) -> String {
        self.draw_as(self.size, false)
    }

    /// The picture for a page, and the one for a phone. Both carry the values that the page shows below the pointer.
    pub fn for_page(&self) -> (String, String) {
        (self.draw_as(self.size, true), self.draw_as(NARROW, true))
    }

    fn draw_as(&self, ChartSize { columns, plot }: ChartSize, has_values: bool) -> String {
        let cell = (MARGIN.0 + plot.0 + GAP.0, MARGIN.1 + plot.1 + GAP.1);
        let (n_beside, n_rows) = (self.charts.len() % columns, self.charts.len().div_ceil(columns));
        let legend_width = if self.has_legend() { LEGEND } else { 0.0 };
        let width =
            (self.charts.len().min(columns) as f64 * cell.0).max(n_beside as f64 * cell.0 + legend_width) + 16.0;
        let headings = Headings::wrapped(&self.title, &self.subtitle, width);
        let top = TOP + headings.extra();
        // The legend stands beside the last charts, or below them in as many columns as there is room for.
        let (legend_at, n_legend) = match n_beside {
            0 => ((0.0, top + n_rows as f64 * cell.1 + 8.0), ((width / LEGEND) as usize).max(1)),
            n => ((n as f64 * cell.0, top + (n_rows - 1) as f64 * cell.1 + MARGIN.1), 1),
        };
        let legend_end = if self.has_legend() { self.legend_end(legend_at.1, n_legend) } else { 0.0 };
        let mut svg = Svg::new(width, legend_end.max(top + n_rows as f64 * cell.1), &self.title);
        svg.heading_lines(&headings);
        for (i, chart) in self.charts.iter().enumerate() {
            let (x, y) = ((i % columns) as f64 * cell.0, top + (i / columns) as f64 * cell.1);
            chart.draw(&mut svg, (x + MARGIN.0, y + MARGIN.1), plot, &self.series, has_values);
        }
        if self.has_legend() {
            self.legend(&mut svg, (legend_at.0 + MARGIN.0, legend_at.1), n_legend);
        }
        svg.finish()
    }

    /// A single series without a name needs none.
    fn has_legend(&self) -> bool {
        !self.notes.is_empty() || self.series.iter().any(|s| !s.name.is_empty())
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

impl Chart {
    fn draw(&self, svg: &mut Svg, (left, top): (f64, f64), plot: (f64, f64), series: &[Series], has_values: bool) {
        let place = |x: f64, y: f64| {
            let (x0, x1, _) = &self.x;
            let (y0, y1, _) = self.y;
            (left + plot.0 * (x - x0) / (x1 - x0), top + plot.1 * (y1 - y.clamp(y0, y1)) / (y1 - y0))
        };
        if has_values {
            svg.tag("g").set("class", "plot").set("data-x", &self.x_label).open();
            // The pointer finds the whole chart, not only its lines.
            svg.rect((left, top), plot).set("fill", "none").set("pointer-events", "all").end();
        }
        self.axes(svg, (left, top), plot, &place);
        // All bands lie below all lines.
        for (line, Series { look, .. }) in self.lines.iter().zip(series) {
            if line.iter().all(|p| p.min >= p.max) {
                continue;
            }
            let upper = line.iter().map(|p| place(p.x, p.max));
            let band = path(upper.chain(line.iter().rev().map(|p| place(p.x, p.min))));
            svg.tag("path").set("d", &(band + "z")).set("fill", look.colour).set("fill-opacity", "0.16").end();
        }
        for (i, (line, Series { name, look })) in self.lines.iter().zip(series).enumerate() {
            if line.is_empty() {
                continue;
            }
            let d = path(line.iter().map(|p| place(p.x, p.mean)));
            let mut tag = stroke(svg.tag("path").set("d", &d).set("fill", "none"), look);
            if has_values {
                let name = if name.is_empty() { &self.title } else { name };
                tag = tag.set("data-name", name).set("data-values", &self.values(line));
            }
            tag.set("stroke-linejoin", "round").end();
            // Few marks, each series' at points of its own: lines that lie on each other still show both kinds.
            let every = (line.len() / 4).max(1);
            let marked = line.iter().enumerate().filter(|(k, _)| (k + 3 * i + 1).is_multiple_of(every));
            let marks: String =
                marked.map(|(_, p)| place(p.x, p.mean)).map(|(x, y)| look.mark.path(x, y, 3.6)).collect();
            svg.tag("path").set("d", &marks).set("fill", look.colour).end();
        }
        if has_values {
            svg.close();
        }
    }

    /// The values of a line's points: x, y and half the range, to two digits more than the axis shows.
    fn values(&self, line: &[Spread]) -> String {
        let decimals = decimals(self.y.2) + 2;
        let value = |p: &Spread| {
            let range = if p.max > p.min { format!(" ± {:.decimals$}", (p.max - p.min) / 2.0) } else { String::new() };
            format!("{}|{:.decimals$}{range}", number(p.x), p.mean)
        };
        line.iter().map(value).collect::<Vec<_>>().join(";")
    }

    fn axes(&self, svg: &mut Svg, (left, top): (f64, f64), plot: (f64, f64), place: &dyn Fn(f64, f64) -> (f64, f64)) {
        let (least, _, step) = self.y;
        let (unit, unit_text) = power_of_ten(self.y);
        let n_chars = ((plot.0 + GAP.0) / 8.0) as usize;
        for (i, line) in wrap(&format!("{}{unit_text}", self.title), n_chars).iter().rev().enumerate() {
            svg.text(left, top - 12.0 - 15.0 * i as f64, line, Style::new(13.0).bold());
        }
        let decimals = decimals(step / unit);
        for value in ticks(self.y) {
            let (_, y) = place(self.x.0, value);
            svg.rule((left, y), (left + plot.0, y));
            let text = format!("{:.decimals$}", value / unit).replace('-', "−");
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
            size: ChartSize::default(),
        };
        let text = charts.draw();
        let read = roxmltree::Document::parse(&text).unwrap();
        let lines = read.descendants().filter(|n| n.has_tag_name("path") && n.attribute("fill") == Some("none"));
        assert_eq!(lines.count(), 2);
    }

    /// One series in two charts, without a name.
    fn plain() -> Charts {
        let line = (1..=3).map(|x| Spread { x: f64::from(x), mean: 0.5, min: 0.25, max: 0.75 }).collect();
        let chart = Chart {
            title: "share".into(),
            y: (0.0, 1.0, 0.2),
            x: (0.0, 3.0, vec![0.0, 3.0]),
            x_label: "round".into(),
            lines: vec![line],
        };
        Charts {
            title: "a title of many words that is longer than a phone is wide".into(),
            subtitle: String::new(),
            series: vec![Series::new("", SERIES[0])],
            notes: Vec::new(),
            charts: vec![chart.clone(), chart],
            size: ChartSize::default(),
        }
    }

    #[test]
    fn a_page_gets_the_values_and_a_file_does_not() {
        assert!(!plain().draw().contains("data-"));
        let (wide, narrow) = plain().for_page();
        for text in [wide, narrow] {
            let read = roxmltree::Document::parse(&text).unwrap();
            let lines: Vec<_> = read.descendants().filter_map(|n| n.attribute("data-values")).collect();
            assert_eq!(lines, ["1|0.500 ± 0.250;2|0.500 ± 0.250;3|0.500 ± 0.250"; 2]);
        }
    }

    #[test]
    fn on_a_phone_charts_stand_below_each_other_and_every_text_fits() {
        let (wide, narrow) = plain().for_page();
        let size = |text: &str, side: &str| {
            roxmltree::Document::parse(text).unwrap().root_element().attribute(side).unwrap().parse::<f64>().unwrap()
        };
        assert!(size(&wide, "width") > 700.0);
        assert!(size(&narrow, "height") > 1.8 * size(&wide, "height"));
        crate::svg::tests::check_fits_a_phone(&narrow);
    }
}
