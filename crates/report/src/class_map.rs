//! Who holds what: clients against classes, with bars of sizes.

use crate::axis::{axis, ticks};
use crate::shades::{Shades, column_labels, frame};
use crate::svg::{Anchor, Room, Style, Svg, number, shortened};

/// Pixels.
const DESK: Room = Room { left: 150.0, width: 900.0, n_chars: 15 };
/// Upper edge of the heat map.
const TOP: f64 = 152.0;
/// Height of the bars of sizes.
const BARS: f64 = 78.0;

/// A heat map with one column per client and one row per class, and bars of the clients' sizes above.
///
/// ```
/// use fedproj_report::ClassMap;
///
/// let (counts, sizes) = (vec![vec![3, 1], vec![0, 2]], vec![4, 2]);
/// let classes = vec!["cat".to_owned(), "dog".to_owned()];
/// let map = ClassMap { title: "pets".into(), subtitle: String::new(), counts, sizes, classes };
/// assert_eq!(map.draw().matches(", class ").count(), 3, "one cell per count that is not zero");
/// ```
#[derive(Clone, Debug)]
pub struct ClassMap {
    /// Title.
    pub title: String,
    /// Second line.
    pub subtitle: String,
    /// Samples per client, per class.
    pub counts: Vec<Vec<u32>>,
    /// Samples per client.
    pub sizes: Vec<usize>,
    /// Names of the classes.
    pub classes: Vec<String>,
}

impl ClassMap {
    /// The picture.
    pub fn draw(&self) -> String {
        self.draw_in(DESK)
    }

    /// The picture for a phone.
    pub fn draw_narrow(&self) -> String {
        self.draw_in(Room::PHONE)
    }

    fn draw_in(&self, room: Room) -> String {
        let (n_clients, n_classes) = (self.counts.len(), self.classes.len());
        let cell = (room.width / n_clients as f64).clamp(if room.is_phone() { 1.0 } else { 4.5 }, 36.0);
        let row = if n_classes <= 30 { 18.0 } else { (540.0 / n_classes as f64).max(5.0) };
        let width = cell * n_clients as f64;
        // Small partitions still need room for the title and the legend.
        let whole = (room.left + width + 24.0).max(if room.is_phone() { 368.0 } else { 620.0 });
        let headings = room.headings(&self.title, &self.subtitle, whole);
        let top = TOP + headings.extra();
        let bottom = top + row * n_classes as f64;
        let mut svg = Svg::new(whole, bottom + if room.is_phone() { 114.0 } else { 96.0 }, &self.title);
        svg.heading_lines(&headings);
        let place = Place { left: room.left, top, cell };
        self.bars(&mut svg, place);
        frame(&mut svg, (room.left, top), (width, row * n_classes as f64));
        let most = self.counts.iter().flatten().copied().max().unwrap_or(1);
        // The square root keeps small counts visible beside a few very large ones.
        let shades = Shades::new("#0072B2", f64::from(most), 0.5);
        let gap = if cell < 3.0 {
            0.0
        } else if cell < 8.0 || row < 8.0 {
            0.4
        } else {
            1.0
        };
        for (client, counts) in self.counts.iter().enumerate() {
            for (class, &n) in counts.iter().enumerate().filter(|(_, n)| **n > 0) {
                let at = (room.left + cell * client as f64 + gap / 2.0, top + row * class as f64 + gap / 2.0);
                let title = format!("client {client}, class {}: {n}", self.classes[class]);
                shades.cell(&mut svg, at, (cell - gap, row - gap), f64::from(n), &title);
            }
        }
        self.class_labels(&mut svg, place, row, room.n_chars);
        column_labels(&mut svg, (room.left, bottom + 16.0), cell, n_clients, "client");
        shades.legend(&mut svg, room, bottom + 54.0, "samples per class", Some("none"));
        svg.finish()
    }

    /// The clients' sizes, over an axis of their own.
    fn bars(&self, svg: &mut Svg, Place { left, top, cell }: Place) {
        let axis = axis(0.0, self.sizes.iter().copied().max().unwrap_or(1).max(1) as f64);
        let (base, width) = (top - 8.0, cell * self.sizes.len() as f64);
        let place = |value: f64| base - BARS * value / axis.1;
        let (ticks, gap) = (ticks(axis), if cell < 3.0 { 0.0 } else { 1.0 });
        // Three or four labels have room.
        for value in ticks.iter().step_by(ticks.len().div_ceil(4)) {
            svg.rule((left, place(*value)), (left + width, place(*value)));
            let style = Style::new(11.0).soft().anchor(Anchor::End);
            svg.text(left - 8.0, place(*value) + 4.0, &number(*value), style);
        }
        svg.axis_title((18.0, base - BARS / 2.0), "samples");
        for (client, &size) in self.sizes.iter().enumerate() {
            let top = place(size as f64);
            let at = (left + cell * client as f64 + gap / 2.0, top);
            svg.rect(at, (cell - gap, base - top)).set("fill", "#777777").open();
            svg.title(&format!("client {client}: {size} samples"));
            svg.close();
        }
    }

    fn class_labels(&self, svg: &mut Svg, Place { left, top, .. }: Place, row: f64, n_chars: usize) {
        // Rows lower than a line of text get a label only every so often.
        let every = (11.0 / row).ceil() as usize;
        for (class, name) in self.classes.iter().enumerate().step_by(every) {
            let y = top + row * (class as f64 + 0.5) + 4.0;
            svg.text(left - 8.0, y, &shortened(name, n_chars), Style::new(11.0).anchor(Anchor::End));
        }
        svg.axis_title((18.0, top + row * self.classes.len() as f64 / 2.0), "class");
    }
}

/// Where the map stands: its left and upper edges, and the width of a column.
#[derive(Clone, Copy)]
struct Place {
    left: f64,
    top: f64,
    cell: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_cell_per_count_and_names_are_escaped() {
        let classes = ["<a & b>", "b"].map(str::to_owned).to_vec();
        let (counts, sizes) = (vec![vec![2, 1], vec![0, 1]], vec![3, 1]);
        let text = ClassMap { title: "t".into(), subtitle: String::new(), counts, sizes, classes }.draw();
        assert_eq!(text.matches(", class ").count(), 3);
        assert!(text.contains("&lt;a &amp; b&gt;") && !text.contains("<a &"));
    }

    #[test]
    fn on_a_phone_a_hundred_clients_fit() {
        let classes: Vec<String> = (0..10).map(|class| format!("a class with a long name {class}")).collect();
        let (counts, sizes) = (vec![vec![7; 10]; 100], vec![70; 100]);
        let (title, subtitle) = ("digits: 100 clients".into(), "70 samples per client, at least 70, at most 70".into());
        crate::svg::tests::check_fits_a_phone(&ClassMap { title, subtitle, counts, sizes, classes }.draw_narrow());
    }

    #[test]
    fn both_axes_have_titles_and_ticks_are_round() {
        let classes = ["a", "b"].map(str::to_owned).to_vec();
        let (counts, sizes) = (vec![vec![37, 1], vec![0, 93]], vec![38, 93]);
        let text = ClassMap { title: "t".into(), subtitle: String::new(), counts, sizes, classes }.draw();
        let read = roxmltree::Document::parse(&text).unwrap();
        let labels: Vec<_> = read.descendants().filter(|n| n.has_tag_name("text")).filter_map(|n| n.text()).collect();
        for title in ["samples", "client", "class", "samples per class"] {
            assert!(labels.contains(&title), "{title}: {labels:?}");
        }
        for tick in labels.iter().filter_map(|label| label.parse::<u32>().ok()).filter(|tick| *tick > 1) {
            assert_eq!(tick % 20, 0, "{labels:?}");
        }
        // What a page recolours for the dark.
        let is_classed = |n: &roxmltree::Node<'_, '_>| n.attribute("class").is_some();
        assert!(read.descendants().filter(|n| n.has_tag_name("text")).all(|n| is_classed(&n)));
        assert!(read.root_element().attribute("font-family").unwrap().contains("DejaVu"));
    }
}
