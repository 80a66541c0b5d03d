//! A table of text, for terminals, pages, spreadsheets and LaTeX.

/// Fewest letters of a text that are worth their column.
const PROSE_MIN: usize = 12;

/// A table whose cells are ready to be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Heads of the columns.
    pub headers: Vec<String>,
    /// Columns at the left that hold names; the others hold numbers and are set flush right.
    pub n_names: usize,
    /// Rows, each with one cell per column.
    pub rows: Vec<Vec<String>>,
    /// Rows that pages and LaTeX set in bold, such as the winner.
    pub bold: Vec<usize>,
    /// On a page, rows with the same first name stand below it as a heading.
    pub is_grouped: bool,
}

impl Table {
    /// A table whose first `n_names` columns hold names.
    pub fn new(headers: impl IntoIterator<Item: Into<String>>, n_names: usize, rows: Vec<Vec<String>>) -> Self {
        Self { headers: headers.into_iter().map(Into::into).collect(), n_names, rows, ..Self::default() }
    }

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

    /// As [`Table::to_text`] for a terminal of `n_columns`: where the table is wider, the texts of the column `prose` are cut, and
    /// left out where little of them would remain.
    pub fn to_text_within(&self, n_columns: usize, prose: usize) -> String {
        let length = |text: &str| text.chars().count();
        let text = self.to_text();
        let excess = text.lines().map(length).max().unwrap_or(0).saturating_sub(n_columns);
        if excess == 0 || prose >= self.headers.len() {
            return text;
        }
        let mut narrow = self.clone();
        let cells = self.rows.iter().map(|row| &row[prose]).chain([&self.headers[prose]]);
        let room = cells.map(|cell| length(cell)).max().unwrap_or(0).saturating_sub(excess);
        if room < PROSE_MIN {
            narrow.headers.remove(prose);
            narrow.rows.iter_mut().for_each(|row| _ = row.remove(prose));
            narrow.n_names -= usize::from(prose < self.n_names);
        } else {
            for cell in narrow.rows.iter_mut().map(|row| &mut row[prose]).filter(|cell| length(cell) > room) {
                *cell = cell.chars().take(room - 1).chain(['…']).collect();
            }
        }
        narrow.to_text()
    }

    /// Comma-separated values as RFC 4180 has them, heads first.
    pub fn to_csv(&self) -> String {
        let quoted = |cell: &String| {
            if cell.contains([',', '"', '\n', '\r']) {
                format!("\"{}\"", cell.replace('"', "\"\""))
            } else {
                cell.clone()
            }
        };
        let line = |cells: &Vec<String>| cells.iter().map(quoted).collect::<Vec<_>>().join(",") + "\n";
        [&self.headers].into_iter().chain(&self.rows).map(line).collect()
    }

    /// A `tabular` for LaTeX with the package `booktabs`; the comment on top says so.
    pub fn to_latex(&self) -> String {
        let columns: String = (0..self.headers.len()).map(|c| if c < self.n_names { 'l' } else { 'r' }).collect();
        let line = |cells: &Vec<String>, is_bold: bool| {
            let cell = |cell: &String| match latex_escape(cell) {
                text if is_bold && !text.is_empty() => format!("\\textbf{{{text}}}"),
                text => text,
            };
            cells.iter().map(cell).collect::<Vec<_>>().join(" & ") + " \\\\\n"
        };
        let rows: String = self.rows.iter().enumerate().map(|(r, cells)| line(cells, self.bold.contains(&r))).collect();
        format!(
            "% \\usepackage{{booktabs}}\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n{}\\midrule\n{rows}\\bottomrule\n\
             \\end{{tabular}}\n",
            line(&self.headers, false)
        )
    }

    fn line(&self, cells: &[String], widths: &[usize]) -> String {
        let pad = |(c, (cell, width)): (usize, (&String, &usize))| {
            if c < self.n_names { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        };
        let cells: Vec<String> = cells.iter().zip(widths).enumerate().map(pad).collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    }
}

/// Text that LaTeX sets as it stands.
fn latex_escape(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' | '%' | '$' | '#' | '_' | '{' | '}' => out.extend(['\\', c]),
            '\\' => out.push_str("\\textbackslash{}"),
            '~' => out.push_str("\\textasciitilde{}"),
            '^' => out.push_str("\\textasciicircum{}"),
            '<' | '>' | '|' => out.extend(['$', c, '$']),
            '±' => out.push_str("$\\pm$"),
            '−' => out.push_str("$-$"),
            '×' => out.push_str("$\\times$"),
            'Δ' => out.push_str("$\\Delta$"),
            'α' => out.push_str("$\\alpha$"),
            'β' => out.push_str("$\\beta$"),
            '–' => out.push_str("--"),
            '…' => out.push_str("\\dots{}"),
            // A line break ends a row of some tables and starts a paragraph in others.
            '\n' | '\r' => out.push(' '),
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_terminal_gets_less_prose_and_all_numbers() {
        let row = |name: &str, about: &str, n: &str| [name, about, n].map(str::to_owned).to_vec();
        let rows =
            vec![row("fedavg", "averages the models of all clients", "70"), row("ditto", "one model each", "141")];
        let table = Table::new(["name", "about", "bytes"], 2, rows);
        let widest = |text: &str| text.lines().map(|line| line.chars().count()).max().unwrap();
        assert_eq!(table.to_text_within(80, 1), table.to_text());
        let cut = table.to_text_within(40, 1);
        assert_eq!(widest(&cut), 40);
        assert!(cut.contains("fedavg  averages the models of a…") && cut.contains("one model each"), "{cut}");
        let without = table.to_text_within(20, 1);
        assert!(!without.contains("about") && without.contains("fedavg     70\n"), "{without}");
    }

    /// The fields of RFC 4180, written without a look at [`Table::to_csv`].
    fn read_csv(text: &str) -> Vec<Vec<String>> {
        let (mut rows, mut row, mut field, mut is_quoted) = (Vec::new(), Vec::new(), String::new(), false);
        let mut chars = text.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '"' if is_quoted && chars.peek() == Some(&'"') => field.extend(chars.next()),
                '"' => is_quoted = !is_quoted,
                ',' if !is_quoted => row.push(std::mem::take(&mut field)),
                '\n' if !is_quoted => {
                    row.push(std::mem::take(&mut field));
                    rows.push(std::mem::take(&mut row));
                }
                _ => field.push(c),
            }
        }
        rows
    }

    #[test]
    fn csv_is_read_back_whatever_the_cells_hold() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        let rows = vec![row(["a,b", "say \"hi\""]), row(["two\nlines", ""]), row(["β = 0.3", "\"\"\","])];
        let table = Table { headers: row(["name, of it", "%"]), n_names: 1, rows: rows.clone(), ..Table::default() };
        let read = read_csv(&table.to_csv());
        assert_eq!(read[0], table.headers);
        assert_eq!(read[1..], rows);
    }

    #[test]
    fn latex_reads_every_cell_as_text() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        let table = Table {
            headers: row(["key", "accuracy %"]),
            n_names: 1,
            rows: vec![row(["a_b & {\\input}", "−1 ± 2"]), row(["", "best"])],
            bold: vec![1],
            ..Table::default()
        };
        assert_eq!(
            table.to_latex(),
            "% \\usepackage{booktabs}\n\\begin{tabular}{lr}\n\\toprule\nkey & accuracy \\% \\\\\n\\midrule\n\
             a\\_b \\& \\{\\textbackslash{}input\\} & $-$1 $\\pm$ 2 \\\\\n & \\textbf{best} \\\\\n\\bottomrule\n\\end{tabular}\n"
        );
        assert_eq!(latex_escape("#$%^~<\n"), "\\#\\$\\%\\textasciicircum{}\\textasciitilde{}$<$ ");
    }

    #[test]
    fn columns_line_up_and_groups_are_set_apart() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        let table = Table {
            headers: row(["set", "who", "%"]),
            n_names: 2,
            rows: vec![row(["a", "x", "1.0"]), row(["a", "yy", "10.0"]), row(["b", "x", "–"])],
            ..Table::default()
        };
        assert_eq!(table.to_text(), "set  who     %\na    x     1.0\n     yy   10.0\n\nb    x       –\n");
    }
}
