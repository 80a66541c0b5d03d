//! A table of values as colours: rows with names, columns with numbers.

use crate::shades::{Shades, column_labels, frame};
use crate::svg::{Anchor, Room, Style, Svg, number, shortened};

/// Pixels.
const TOP: f64 = 66.0;
const ROW: f64 = 22.0;
const DESK: Room = Room { left: 190.0, width: 780.0, n_chars: 25 };

/// A heat map of values from 0 up; what is not known stays blank.
#[derive(Clone, Debug)]
pub struct Heat {
    /// Title.
    pub title: String,
    /// Second line.
    pub subtitle: String,
    /// What the columns count.
    pub column_label: String,
    /// What the values are, with their unit.
    pub value_label: String,
    /// Names of the rows, and a value a column.
    pub rows: Vec<(String, Vec<Option<f64>>)>,
}

impl Heat {
    /// The picture.
    pub fn draw(&self) -> String {
        self.draw_in(DESK)
    }

    /// The picture for a phone.
    pub fn draw_narrow(&self) -> String {
        self.draw_in(Room::PHONE)
    }

    fn draw_in(&self, room: Room) -> String {
        let left = room.left;
        let n_columns = self.rows.iter().map(|(_, values)| values.len()).max().unwrap_or(0).max(1);
        let cell = (room.width / n_columns as f64).min(36.0);
        let most = self.rows.iter().flat_map(|(_, values)| values.iter().flatten()).copied().fold(0.0, f64::max);
        let shades = Shades::new("#D55E00", most, 1.0);
        let beside = (cell * n_columns as f64).max(room.width.min(460.0));
        let width = left + beside + 24.0;
        let headings = room.headings(&self.title, &self.subtitle, width);
        let top = TOP + headings.extra();
        let bottom = top + ROW * self.rows.len() as f64;
        let mut svg = Svg::new(width, bottom + if room.is_phone() { 110.0 } else { 92.0 }, &self.title);
        svg.heading_lines(&headings);
        for (r, (name, values)) in self.rows.iter().enumerate() {
            let y = top + ROW * r as f64;
            svg.text(left - 8.0, y + 15.0, &shortened(name, room.n_chars), Style::new(12.0).anchor(Anchor::End));
            frame(&mut svg, (left, y), (cell * n_columns as f64, ROW - 2.0));
            for (c, value) in values.iter().enumerate() {
                let Some(value) = value else { continue };
                let title = format!("{name}, {} {c}: {} {}", self.column_label, self.value_label, number(*value));
                shades.cell(&mut svg, (left + cell * c as f64, y), (cell - 0.6, ROW - 2.0), *value, &title);
            }
        }
        column_labels(&mut svg, (left, bottom + 14.0), cell, n_columns, &self.column_label);
        let has_blanks = self.rows.iter().any(|(_, values)| values.len() < n_columns || values.contains(&None));
        shades.legend(&mut svg, room, bottom + 54.0, &self.value_label, has_blanks.then_some("not known"));
        svg.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_value_has_a_cell_and_colours_end_at_a_round_number() {
        let heat = Heat {
            title: "a < b".into(),
            subtitle: String::new(),
            column_label: "client".into(),
            value_label: "%".into(),
            rows: vec![("x".into(), vec![Some(0.0), None, Some(3.9)]), ("y".into(), vec![Some(1.0)])],
        };
        let text = heat.draw();
        let read = roxmltree::Document::parse(&text).unwrap();
        let cells = read
            .descendants()
            .filter(|n| n.attribute("fill") == Some("#D55E00") && n.attribute("height") == Some("20"));
        let opacities: Vec<&str> = cells.filter_map(|n| n.attribute("fill-opacity")).collect();
        assert_eq!(opacities, ["0.08", "0.98", "0.31"]);
        let labels: Vec<_> = read.descendants().filter(|n| n.has_tag_name("text")).filter_map(|n| n.text()).collect();
        assert!(labels.ends_with(&["0", "1", "2", "3", "4", "blank: not known"]), "{labels:?}");
        crate::svg::tests::check_fits_a_phone(&heat.draw_narrow());
        assert!(text.contains("<title>x, client 2: % 3.9</title>"), "shown below the pointer");
    }
}
