//! A table of values as colours: rows with names, columns with numbers.

use crate::shades::{Shades, column_labels, frame};
use crate::svg::{Anchor, Style, Svg, number, shortened};

/// Pixels.
const LEFT: f64 = 190.0;
const TOP: f64 = 66.0;
const ROW: f64 = 22.0;
const WIDTH: f64 = 780.0;

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
        let n_columns = self.rows.iter().map(|(_, values)| values.len()).max().unwrap_or(0).max(1);
        let cell = (WIDTH / n_columns as f64).min(36.0);
        let bottom = TOP + ROW * self.rows.len() as f64;
        let most = self.rows.iter().flat_map(|(_, values)| values.iter().flatten()).copied().fold(0.0, f64::max);
        let shades = Shades::new("#D55E00", most, 1.0);
        let mut svg = Svg::new(LEFT + (cell * n_columns as f64).max(460.0) + 24.0, bottom + 92.0, &self.title);
        svg.headings(&self.title, &self.subtitle);
        for (r, (name, values)) in self.rows.iter().enumerate() {
            let y = TOP + ROW * r as f64;
            svg.text(LEFT - 8.0, y + 15.0, &shortened(name, 25), Style::new(12.0).anchor(Anchor::End));
            frame(&mut svg, (LEFT, y), (cell * n_columns as f64, ROW - 2.0));
            for (c, value) in values.iter().enumerate() {
                let Some(value) = value else { continue };
                let title = format!("{name}, {} {c}: {} {}", self.column_label, self.value_label, number(*value));
                shades.cell(&mut svg, (LEFT + cell * c as f64, y), (cell - 0.6, ROW - 2.0), *value, &title);
            }
        }
        column_labels(&mut svg, (LEFT, bottom + 14.0), cell, n_columns, &self.column_label);
        let has_blanks = self.rows.iter().any(|(_, values)| values.len() < n_columns || values.contains(&None));
        shades.legend(&mut svg, (LEFT, bottom + 54.0), &self.value_label, has_blanks.then_some("not known"));
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
        assert!(text.contains("<title>x, client 2: % 3.9</title>"), "shown below the pointer");
    }
}
