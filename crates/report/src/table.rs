//! A table of text, for terminals and pages.

/// A table whose cells are ready to be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Heads of the columns.
    pub headers: Vec<String>,
    /// Columns at the left that hold names; the others hold numbers and are set flush right.
    pub n_names: usize,
    /// Rows, each with a cell a column.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// The table in columns of spaces. A name that repeats the one above is left out, and a blank line stands where the
    /// first one changes.
    pub fn to_text(&self) -> String {
        let width = |c: usize| {
            let cells = self.rows.iter().map(|row| &row[c]).chain([&self.headers[c]]);
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.headers.len()).map(width).collect();
        let mut out = self.line(&self.headers, &widths);
        for (r, row) in self.rows.iter().enumerate() {
            let above = r.checked_sub(1).map(|r| &self.rows[r]);
            let mut row = row.clone();
            if above.is_some_and(|above| above[0] == row[0]) {
                row[0].clear();
            } else if above.is_some() && self.n_names > 1 {
                out.push('\n');
            }
            out += &self.line(&row, &widths);
        }
        out
    }

    fn line(&self, cells: &[String], widths: &[usize]) -> String {
        let pad = |(c, (cell, width)): (usize, (&String, &usize))| {
            if c < self.n_names { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        };
        let cells: Vec<String> = cells.iter().zip(widths).enumerate().map(pad).collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_groups_are_set_apart() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        let table = Table {
            headers: row(["set", "who", "%"]),
            n_names: 2,
            rows: vec![row(["a", "x", "1.0"]), row(["a", "yy", "10.0"]), row(["b", "x", "–"])],
        };
        assert_eq!(table.to_text(), "set  who     %\na    x     1.0\n     yy   10.0\n\nb    x       –\n");
    }
}
