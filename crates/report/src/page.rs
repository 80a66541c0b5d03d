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

const STYLE: &str = "
:root { --ink: #1a1a1a; --soft: #555; --paper: #fff; --rule: #d9d9d9; --frame: #777; --band: #f4f4f2; --mark: #ffe9a8;
  color-scheme: light dark; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --soft: #b4b4b4; --paper: #15171a; --rule: #3a3d42; --frame: #8b8f96; --band: #1f2226; --mark: #57460f; }
  /* The palette's darker blue is too dark for the dark; one between it and the lighter blue stands in. */
  svg [fill='#0072B2'] { fill: #3D95DB; } svg [stroke='#0072B2'] { stroke: #3D95DB; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.2rem 4rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 'DejaVu Sans', Verdana, 'Segoe UI', sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .6rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; }
p, dl { max-width: 52rem; }
.lead { font-size: 1.1rem; }
figure { margin: 1.2rem 0 1.8rem; }
.scroll { overflow-x: auto; border: 1px solid var(--rule); border-radius: 6px; }
figure svg { display: block; max-width: 100%; min-width: 44rem; height: auto; }
/* On a phone a picture keeps its size, or its text could not be read; it scrolls in its box, as tables do. */
@media screen and (max-width: 40rem) { figure svg { max-width: none; } }
figcaption, footer { color: var(--soft); font-size: .9rem; margin-top: .4rem; max-width: 60rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .38rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th.name, td.name { text-align: left; white-space: normal; min-width: 6.5rem; max-width: 20rem; }
th button { font: inherit; font-weight: bold; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
th[aria-sort=ascending] button::after { content: ' ▲'; } th[aria-sort=descending] button::after { content: ' ▼'; }
tbody tr:nth-child(odd) { background: var(--band); }
details { margin: .5rem 0; } summary { cursor: pointer; } pre { padding: .7rem; font-size: .85rem; margin: .4rem 0; }
mark { background: var(--mark); color: inherit; }
dt { font-weight: bold; margin-top: .5rem; } dd { margin: 0 0 0 1rem; }
svg .ink { fill: var(--ink); } svg .soft { fill: var(--soft); } svg .paper { fill: var(--paper); }
svg .rule { stroke: var(--rule); } svg .frame { stroke: var(--frame); } svg .mark { stroke: var(--ink); }
@media print { html { font-size: 10pt; } body { padding: 0; max-width: none; } figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; } .scroll { overflow: visible; border: 0; }
  figure svg { min-width: 0; } table { font-size: 7.5pt; } th, td { padding: .25rem .4rem; } th, td { white-space: normal; } }
";

/// Sorts a table by the column whose head is clicked: as numbers where both cells start with one.
const SCRIPT: &str = "
document.querySelectorAll('th button').forEach(button => button.addEventListener('click', () => {
  const head = button.parentElement, body = head.closest('table').tBodies[0], column = head.cellIndex;
  const down = head.getAttribute('aria-sort') === 'ascending';
  head.parentElement.querySelectorAll('th').forEach(th => th.removeAttribute('aria-sort'));
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const text = row => row.cells[column].textContent;
  const rank = row => { const v = parseFloat(text(row).replace('−', '-')); return isNaN(v) ? -Infinity : v; };
  const named = head.classList.contains('name');
  const order = (a, b) => named ? text(a).localeCompare(text(b)) : (rank(a) === rank(b) ? 0 : rank(a) - rank(b));
  [...body.rows].sort((a, b) => down ? order(b, a) : order(a, b)).forEach(row => body.append(row));
}));
";

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
             <link rel=\"icon\" href=\"data:,\">\n<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
             <h1>{title}</h1>\n<p class=\"lead\">{lead}</p>\n"
        );
        for section in &self.sections {
            let _ = writeln!(out, "<section>\n<h2>{}</h2>", escape(&section.heading));
            section.blocks.iter().for_each(|block| block.write(&mut out));
            out.push_str("</section>\n");
        }
        let _ = write!(out, "<footer>{}</footer>\n<script>{SCRIPT}</script>\n</body>\n</html>\n", escape(&self.footer));
        out
    }
}

// Writing into a string cannot fail, so the results of `write!` are dropped.
impl Block {
    fn write(&self, out: &mut String) {
        let _ = match self {
            Self::Text(text) => writeln!(out, "<p>{}</p>", escape(text)),
            Self::Figure { svg, caption } => {
                let caption = escape(caption);
                writeln!(
                    out,
                    "<figure>\n<div class=\"scroll\">\n{svg}</div>\n<figcaption>{caption}</figcaption>\n</figure>"
                )
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
            Self::Table(table) => {
                let class = |column: usize| if column < table.n_names { " class=\"name\"" } else { "" };
                let row = |cells: &[String], cell: &dyn Fn(usize, &str) -> String| {
                    let cells: String = cells.iter().enumerate().map(|(c, text)| cell(c, &escape(text))).collect();
                    format!("<tr>{cells}</tr>\n")
                };
                let head = |c: usize, text: &str| format!("<th{}><button>{text}</button></th>", class(c));
                let cell = |c: usize, text: &str| format!("<td{}>{text}</td>", class(c));
                let rows: String = table.rows.iter().map(|cells| row(cells, &cell)).collect();
                let head = row(&table.headers, &head);
                writeln!(
                    out,
                    "<div class=\"scroll\"><table>\n<thead>{head}</thead>\n<tbody>\n{rows}</tbody>\n</table></div>"
                )
            }
        };
    }
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
}
