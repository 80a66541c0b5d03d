//! A table of values as colours: rows with names, columns with numbers.

use crate::svg::{Anchor, Style, Svg, number, shortened};

/// Pixels.
const LEFT: f64 = 190.0;
const TOP: f64 = 66.0;
const ROW: f64 = 22.0;
const WIDTH: f64 = 780.0;
const COLOUR: &str = "#D55E00";

/// A heat map of values from 0 up; what is not known stays white.
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
        let mut svg = Svg::new(LEFT + (cell * n_columns as f64).max(430.0) + 24.0, bottom + 86.0, &self.title);
        svg.headings(&self.title, &self.subtitle);
        for (r, (name, values)) in self.rows.iter().enumerate() {
            let y = TOP + ROW * r as f64;
            svg.text(LEFT - 8.0, y + 15.0, &shortened(name), Style::new(12.0).anchor(Anchor::End));
            // White on a dark page too: it stands for what is not known, and colours are mixed with it.
            rectangle(&mut svg, (LEFT, y), (cell * n_columns as f64, ROW - 2.0), "#ffffff", 1.0);
            for (c, value) in values.iter().enumerate() {
                let Some(value) = value else { continue };
                let share = if most > 0.0 { (value / most).clamp(0.0, 1.0) } else { 0.0 };
                // Even a 0 is told from what is not known.
                let opacity = 0.08 + 0.92 * share;
                rectangle(&mut svg, (LEFT + cell * c as f64, y), (cell - 0.6, ROW - 2.0), COLOUR, opacity);
            }
        }
        let every = [1, 2, 5, 10, 20, 50, 100].into_iter().find(|&n| f64::from(n) * cell >= 24.0).unwrap_or(100);
        for c in (0..n_columns).step_by(every as usize) {
            let x = LEFT + cell * (c as f64 + 0.5);
            svg.text(x, bottom + 14.0, &c.to_string(), Style::new(11.0).soft().anchor(Anchor::Middle));
        }
        svg.text(LEFT, bottom + 32.0, &self.column_label, Style::new(11.0).soft());
        let y = bottom + 52.0;
        svg.text(LEFT - 8.0, y + 11.0, &self.value_label, Style::new(11.0).soft().anchor(Anchor::End));
        for step in 0..=4 {
            let (x, share) = (LEFT + 52.0 * f64::from(step), f64::from(step) / 4.0);
            rectangle(&mut svg, (x, y), (52.0, 14.0), "#ffffff", 1.0);
            rectangle(&mut svg, (x, y), (52.0, 14.0), COLOUR, 0.08 + 0.92 * share);
            let text = number((most * share * 10.0).round() / 10.0);
            svg.text(x + 26.0, y + 28.0, &text, Style::new(11.0).soft().anchor(Anchor::Middle));
        }
        if self.rows.iter().any(|(_, values)| values.len() < n_columns || values.contains(&None)) {
            svg.text(LEFT + 276.0, y + 11.0, "white: not known", Style::new(11.0).soft());
        }
        svg.finish()
    }
}

fn rectangle(svg: &mut Svg, at: (f64, f64), size: (f64, f64), fill: &str, opacity: f64) {
    let tag = svg.tag("rect").number("x", at.0).number("y", at.1).number("width", size.0).number("height", size.1);
    tag.set("fill", fill).number("fill-opacity", opacity).end();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_value_has_a_cell_and_the_greatest_is_solid() {
        let heat = Heat {
            title: "a < b".into(),
            subtitle: String::new(),
            column_label: "client".into(),
            value_label: "%".into(),
            rows: vec![("x".into(), vec![Some(0.0), None, Some(4.0)]), ("y".into(), vec![Some(1.0)])],
        };
        let text = heat.draw();
        let read = roxmltree::Document::parse(&text).unwrap();
        let cells =
            read.descendants().filter(|n| n.attribute("fill") == Some(COLOUR) && n.attribute("height") == Some("20"));
        let opacities: Vec<&str> = cells.filter_map(|n| n.attribute("fill-opacity")).collect();
        assert_eq!(opacities, ["0.08", "1", "0.31"]);
    }
}
