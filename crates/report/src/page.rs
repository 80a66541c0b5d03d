//! One self-contained HTML page: pictures inline, light and dark, fit for paper and for phones, no network.

use crate::svg::escape;
use crate::table::Table;
use std::fmt::Write;

/// A page.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// Title.
    pub title: String,
    /// What the reader learns, in a sentence or two.
    pub lead: String,
    /// Sections in order.
    pub sections: Vec<Section>,
    /// The last line.
    pub footer: String,
}

/// A heading and what follows it.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// Heading.
    pub heading: String,
    /// Content.
    pub blocks: Vec<Block>,
}

/// A piece of content.
#[derive(Clone, Debug)]
pub enum Block {
    /// A paragraph of plain text.
    Text(String),
    /// A table, sorted by a click on a head.
    Table(Table),
    /// A picture as [`crate::Svg`] makes it, and what it shows.
    Figure {
        /// The SVG.
        svg: String,
        /// The same for a phone, if there is one.
        narrow: Option<String>,
        /// What it shows.
        caption: String,
    },
    /// A text in lines, such as a configuration, to be unfolded.
    Code {
        /// What it is; stands where the text is folded.
        summary: String,
        /// The lines, and whether each is marked.
        lines: Vec<(String, bool)>,
    },
    /// Names and values, such as a set-up.
    Facts(Vec<(String, String)>),
}

/// Nothing may be loaded from anywhere, whatever a page holds.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:";

pub(crate) const STYLE: &str = include_str!("../assets/page.css");

/// Tables that sort.
const SORT: &str = include_str!("../assets/sort.js");

/// Values of charts below the pointer.
pub(crate) const HOVER: &str = include_str!("../assets/hover.js");

impl Page {
    /// The page as HTML.
    pub fn to_html(&self) -> String {
        let mut out = String::new();
        let (title, lead) = (escape(&self.title), escape(&self.lead));
        let _ = write!(
            out,
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
             <link rel=\"icon\" href=\"data:,\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
             <h1>{title}</h1>\n<p class=\"lead\">{lead}</p>\n"
        );
        for section in &self.sections {
            let _ = writeln!(out, "<section>\n<h2>{}</h2>", escape(&section.heading));
            section.blocks.iter().for_each(|block| block.write(&mut out));
            out.push_str("</section>\n");
        }
        let _ = write!(
            out,
            "<footer>{}</footer>\n<script>\n{SORT}{HOVER}</script>\n</body>\n</html>\n",
            with_code(&self.footer)
        );
        out
    }
}

// Writing into a string cannot fail, so the results of `write!` are dropped.
impl Block {
    fn write(&self, out: &mut String) {
        let _ = match self {
            Self::Text(text) => writeln!(out, "<p>{}</p>", with_code(text)),
            Self::Figure { svg, narrow, caption } => {
                let (svg, caption) = (figure_html(svg, narrow.as_deref()), escape(caption));
                writeln!(out, "<figure>\n{svg}<figcaption>{caption}</figcaption>\n</figure>")
            }
            Self::Code { summary, lines } => {
                let line = |(text, is_marked): &(String, bool)| match is_marked {
                    true => format!("<mark>{}</mark>\n", escape(text)),
                    false => escape(text) + "\n",
                };
                let text: String = lines.iter().map(line).collect();
                let summary = escape(summary);
                writeln!(out, "<details>\n<summary>{summary}</summary>\n<pre class=\"scroll\">{text}</pre>\n</details>")
            }
            Self::Facts(facts) => {
                let fact =
                    |(name, value): &(String, String)| format!("<dt>{}</dt><dd>{}</dd>\n", escape(name), escape(value));
                writeln!(out, "<dl>\n{}</dl>", facts.iter().map(fact).collect::<String>())
            }
            Self::Table(table) => writeln!(out, "{}", table_html(table, true)),
        };
    }
}

/// A text whose words between backticks are code, as in the messages of the command line.
fn with_code(text: &str) -> String {
    let parts: Vec<&str> = text.split('`').collect();
    if parts.len().is_multiple_of(2) {
        return escape(text);
    }
    let part = |(i, part): (usize, &&str)| match i % 2 {
        0 => escape(part),
        _ => format!("<code>{}</code>", escape(part)),
    };
    parts.iter().enumerate().map(part).collect()
}

/// A picture, and the one that takes its place on a phone.
pub(crate) fn figure_html(svg: &str, narrow: Option<&str>) -> String {
    let narrow = narrow.map(|svg| format!("<div class=\"scroll narrow\">\n{svg}</div>\n")).unwrap_or_default();
    format!("<div class=\"scroll wide\">\n{svg}</div>\n{narrow}")
}

/// A table; `can_sort` makes buttons of its heads.
pub(crate) fn table_html(table: &Table, can_sort: bool) -> String {
    let first = usize::from(table.is_grouped);
    let class = |column: usize| if column < table.n_names { " class=\"name\"" } else { "" };
    let cells = |cells: &[String], cell: &dyn Fn(usize, &str) -> String| -> String {
        cells.iter().enumerate().skip(first).map(|(c, text)| cell(c, &escape(text))).collect()
    };
    let head = |c: usize, text: &str| {
        let text = if can_sort { format!("<button>{text}</button>") } else { text.to_owned() };
        format!("<th{}>{text}</th>", class(c))
    };
    let mut rows = String::new();
    for (r, row) in table.rows.iter().enumerate() {
        if table.is_grouped && (r == 0 || table.rows[r - 1][0] != row[0]) {
            let n = table.headers.len() - 1;
            let end = if r > 0 { "</tbody>\n<tbody>\n" } else { "" };
            let _ = writeln!(rows, "{end}<tr class=\"group\"><th colspan=\"{n}\">{}</th></tr>", escape(&row[0]));
        }
        let bold = if table.bold.contains(&r) { " class=\"bold\"" } else { "" };
        let row = cells(row, &|c, text| format!("<td{}>{text}</td>", class(c)));
        let _ = writeln!(rows, "<tr{bold}>{row}</tr>");
    }
    let heads = cells(&table.headers, &head);
    format!("<div class=\"scroll\"><table>\n<thead><tr>{heads}</tr>\n</thead>\n<tbody>\n{rows}</tbody>\n</table></div>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_escapes_text_and_loads_nothing() {
        let page = Page {
            title: "a < b".into(),
            lead: "<script src='http://x'>".into(),
            sections: vec![Section {
                heading: "h".into(),
                blocks: vec![
                    Block::Text("1 & 2".into()),
                    Block::Facts(vec![("n".into(), "v".into())]),
                    Block::Table(Table {
                        headers: vec!["who".into(), "%".into()],
                        n_names: 1,
                        rows: vec![vec!["<b>".into(), "1".into()]],
                        ..Table::default()
                    }),
                ],
            }],
            footer: String::new(),
        };
        let html = page.to_html();
        assert!(
            html.contains("&lt;script src='http://x'&gt;")
                && html.contains("<td class=\"name\">&lt;b&gt;</td><td>1</td>")
        );
        for loading in ["src=\"", "@import", "url(h", "<link rel=\"stylesheet"] {
            assert!(!html.contains(loading), "{loading}");
        }
    }

    #[test]
    fn groups_stand_below_their_name_and_winners_are_bold() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        let table = Table {
            headers: row(["set", "who", "%"]),
            n_names: 2,
            rows: vec![row(["<a>", "x", "1"]), row(["<a>", "y", "2"]), row(["b", "x", "3"])],
            bold: vec![1],
            is_grouped: true,
        };
        let html = table_html(&table, false);
        let group = |name| format!("<tr class=\"group\"><th colspan=\"2\">{name}</th></tr>");
        assert!(html.contains(&group("&lt;a&gt;")) && html.contains(&format!("</tbody>\n<tbody>\n{}", group("b"))));
        assert_eq!(html.matches("class=\"group\"").count(), 2);
        assert!(
            html.contains("<tr class=\"bold\"><td class=\"name\">y</td><td>2</td></tr>") && !html.contains(">set<")
        );
    }

    #[test]
    fn words_between_backticks_are_code() {
        assert_eq!(with_code("run `a<b` and `c`"), "run <code>a&lt;b</code> and <code>c</code>");
        assert_eq!(with_code("one ` alone"), "one ` alone");
    }
}
