//! Values as dots in rows, with their mean and a reference value.

use crate::axis::{axis, ticks};
use crate::palette::{Look, Mark};
use crate::svg::{Anchor, Room, Style, Svg, Tag, number, shortened, wrap};

/// Pixels.
const DESK: Room = Room { left: 190.0, width: 620.0, n_chars: 25 };
/// Where rows begin below title and subtitle.
const TOP: f64 = 62.0;
const ROW: f64 = 32.0;
/// How far a row's values and its reference lie from its middle, so that neither hides the other.
const LEVELS: (f64, f64) = (-5.0, 8.0);
const GREY: &str = "#777777";

/// Rows of dots over one axis.
#[derive(Clone, Debug)]
pub struct Dots {
    /// Title.
    pub title: String,
    /// Second line.
    pub subtitle: String,
    /// What the axis measures.
    pub x_label: String,
    /// What a dot is.
    pub dot_label: String,
    /// What a reference is.
    pub reference_label: String,
    /// The rows, group by group; a group's title is empty where there is one group.
    pub groups: Vec<(String, Vec<DotRow>)>,
}

/// A row of dots.
#[derive(Clone, Debug)]
pub struct DotRow {
    /// Its name.
    pub name: String,
    /// Its colour and mark.
    pub look: Look,
    /// The values; there is at least one.
    pub values: Vec<f64>,
    /// Mean and deviation of what they are held against.
    pub reference: Option<(f64, f64)>,
}

impl Dots {
    /// The picture.
    pub fn draw(&self) -> String {
        self.draw_in(DESK)
    }

    /// The picture for a phone.
    pub fn draw_narrow(&self) -> String {
        self.draw_in(Room::PHONE)
    }

    fn draw_in(&self, room: Room) -> String {
        let rows = || self.groups.iter().flat_map(|(_, rows)| rows);
        let ends = |row: &DotRow| {
            let reference = row.reference.map(|(mean, deviation)| [mean - deviation, mean + deviation]);
            row.values.iter().copied().chain(reference.into_iter().flatten()).collect::<Vec<f64>>()
        };
        let all: Vec<f64> = rows().flat_map(ends).collect();
        let (least, most) = all.iter().fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(*v), b.max(*v)));
        let axis = axis(least, most);
        let (from, to, _) = axis;
        let place = |value: f64| room.left + room.width * (value - from) / (to - from);
        let n_titles = self.groups.iter().filter(|(title, _)| !title.is_empty()).count();
        let margin = if room.is_phone() { 16.0 } else { 30.0 };
        let width = room.left + room.width + margin;
        let headings = room.headings(&self.title, &self.subtitle, width);
        let top = headings.extra() + if self.subtitle.is_empty() { TOP - 20.0 } else { TOP };
        let bottom = top + ROW * (rows().count() + n_titles) as f64;

        let x_label = wrap(&self.x_label, if room.is_phone() { 50 } else { usize::MAX });
        let below = 15.0 * (x_label.len() - 1) as f64;
        let mut svg = Svg::new(width, bottom + below + if room.is_phone() { 104.0 } else { 84.0 }, &self.title);
        svg.heading_lines(&headings);
        let ticks = ticks(axis);
        // Labels need some room.
        let every = (34.0 * ticks.len() as f64 / room.width).ceil() as usize;
        for &value in ticks.iter().step_by(every) {
            let text = number(value).replace('-', "−");
            svg.text(place(value), bottom + 18.0, &text, Style::new(11.0).soft().anchor(Anchor::Middle));
        }
        let middle = if room.is_phone() { width / 2.0 } else { room.left + room.width / 2.0 };
        for (i, line) in x_label.iter().enumerate() {
            let y = bottom + 36.0 + 15.0 * i as f64;
            svg.text(middle, y, line, Style::new(11.0).soft().anchor(Anchor::Middle));
        }
        let mut y = top + ROW / 2.0;
        for (title, rows) in &self.groups {
            if !title.is_empty() {
                svg.text(16.0, y + 5.0, title, Style::new(13.0).bold());
                y += ROW;
            }
            for x in ticks.iter().map(|&value| place(value)) {
                svg.rule((x, y - ROW / 2.0), (x, y + ROW * (rows.len() as f64 - 0.5)));
            }
            for row in rows {
                row.draw(&mut svg, y, room, place);
                y += ROW;
            }
        }
        self.legend(&mut svg, room, bottom + below + 64.0, rows().any(|row| row.reference.is_some()));
        svg.finish()
    }

    fn legend(&self, svg: &mut Svg, room: Room, y: f64, has_reference: bool) {
        let (style, left) = (Style::new(12.0).soft(), if room.is_phone() { 20.0 } else { room.left });
        dot(svg, left, y - 4.0, Mark::Circle, GREY).end();
        svg.text(left + 12.0, y, &self.dot_label, style);
        bar(svg, left + 130.0, y - 4.0, GREY);
        svg.text(left + 140.0, y, "mean", style);
        if has_reference {
            let (x, y) = if room.is_phone() { (left, y + 22.0) } else { (left + 210.0, y) };
            reference(svg, y - 4.0, (x + 16.0, x, x + 32.0));
            svg.text(x + 42.0, y, &self.reference_label, style);
        }
    }
}

impl DotRow {
    fn draw(&self, svg: &mut Svg, y: f64, room: Room, place: impl Fn(f64) -> f64) {
        let mut lines = wrap(&self.name, room.n_chars);
        let rest = lines.split_off(lines.len().min(1)).join(" ");
        lines.extend((!rest.is_empty()).then_some(rest));
        for (i, line) in lines.iter().enumerate() {
            let y = y + 4.0 + 14.0 * (i as f64 - (lines.len() - 1) as f64 / 2.0);
            svg.text(room.left - 12.0, y, &shortened(line, room.n_chars), Style::new(12.0).anchor(Anchor::End));
        }
        if let Some((mean, deviation)) = self.reference {
            reference(svg, y + LEVELS.1, (place(mean), place(mean - deviation), place(mean + deviation)));
        }
        let mean = self.values.iter().sum::<f64>() / self.values.len() as f64;
        bar(svg, place(mean), y + LEVELS.0, self.look.colour);
        for value in &self.values {
            dot(svg, place(*value), y + LEVELS.0, self.look.mark, self.look.colour).open();
            svg.title(&format!("{}: {}", self.name, number(*value)));
            svg.close();
        }
    }
}

/// One value; those that lie on each other are darker.
fn dot<'a>(svg: &'a mut Svg, x: f64, y: f64, mark: Mark, colour: &str) -> Tag<'a> {
    svg.tag("path").set("d", &mark.path(x, y, 4.6)).set("fill", colour).set("fill-opacity", "0.6")
}

/// A mean.
fn bar(svg: &mut Svg, x: f64, y: f64, colour: &str) {
    svg.line((x, y - 9.0), (x, y + 9.0)).set("stroke", colour).set("stroke-width", "3").end();
}

/// A hollow mark and its deviation: middle, start and end.
fn reference(svg: &mut Svg, y: f64, (x, start, end): (f64, f64, f64)) {
    svg.line((start, y), (end, y)).set("stroke", GREY).set("class", "frame").end();
    let d = Mark::Diamond.path(x, y, 3.4);
    svg.tag("path").set("d", &d).set("fill", "#ffffff").set("class", "paper").set("stroke", GREY).end();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::palette::SERIES;

    #[test]
    fn every_value_has_a_dot_at_its_place() {
        let row = |values: &[f64], reference| DotRow {
            name: "a name that takes more than one line".into(),
            look: SERIES[0],
            values: values.to_vec(),
            reference,
        };
        let dots = Dots {
            title: "a < b".into(),
            subtitle: String::new(),
            x_label: "%".into(),
            dot_label: "one seed".into(),
            reference_label: "elsewhere".into(),
            groups: vec![
                ("x".into(), vec![row(&[60.0, 70.0], Some((65.0, 1.0)))]),
                ("y".into(), vec![row(&[61.0], None)]),
            ],
        };
        let text = dots.draw();
        let read = roxmltree::Document::parse(&text).unwrap();
        let with = |name, value| read.descendants().filter(move |n| n.attribute(name) == Some(value));
        let coloured: Vec<_> = with("fill", SERIES[0].colour).map(|n| n.attribute("d").unwrap().to_owned()).collect();
        assert_eq!(coloured.len(), 3);
        assert!(text.contains("<title>a name that takes more than one line: 61</title>"), "shown below the pointer");
        assert!(text.contains(">a name that takes more<") && text.contains(">than one line<"), "both lines");
        let left = |d: &str| d[1..].split(' ').next().unwrap().parse::<f64>().unwrap() + 4.6;
        assert!(
            (left(&coloured[0]) - DESK.left).abs() < 0.01 && (left(&coloured[1]) - DESK.left - DESK.width).abs() < 0.01
        );
        let bars: Vec<&str> = with("stroke-width", "3").filter_map(|n| n.attribute("x1")).collect();
        assert_eq!(bars[0], number(DESK.left + DESK.width / 2.0));
        crate::svg::tests::check_fits_a_phone(&dots.draw_narrow());
        // The reference and its entry in the legend.
        assert_eq!(with("class", "paper").filter(|n| n.has_tag_name("path")).count(), 2);
    }
}
