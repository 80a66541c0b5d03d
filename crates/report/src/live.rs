//! A page that follows something while it happens. A server sends the parts that change; without a script the page loads
//! itself anew.

use crate::curves::{Chart, ChartSize, Charts, Series};
use crate::page::{HOVER, STYLE, figure_html, table_html};
use crate::palette::SERIES;
use crate::svg::escape;
use crate::table::Table;

const LIVE_STYLE: &str = include_str!("../assets/live.css");

/// Whether it continues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pace {
    /// Nothing has happened yet.
    #[default]
    Waiting,
    /// It continues.
    Running,
    /// Nothing has been heard for long.
    Silent,
    /// It is over.
    Finished,
}

impl Pace {
    fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Silent => "silent",
            Self::Finished => "finished",
        }
    }
}

/// What the page shows at a moment.
///
/// ```
/// use fedproj_report::{Live, Pace};
///
/// let live = Live { title: "FedProj <on> digits".into(), pace: Pace::Running, share_done: 0.25, ..Live::default() };
/// assert!(live.page().contains("FedProj &lt;on&gt; digits"));
/// assert!(live.parts().iter().any(|(id, html)| *id == "state" && html.contains("width: 25%")));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Live {
    /// What is followed.
    pub title: String,
    /// Its name, or where it is.
    pub subtitle: String,
    /// Whether it continues.
    pub pace: Pace,
    /// What happens now.
    pub now: String,
    /// The share that is done, 0 to 1.
    pub share_done: f64,
    /// Names and values.
    pub tiles: Vec<(String, String)>,
    /// Charts of one line each.
    pub charts: Vec<Chart>,
    /// Tables with their headings.
    pub tables: Vec<(String, Table)>,
}

impl Live {
    /// The script of the page, to be served as `live.js` beside it.
    pub fn script() -> String {
        format!("{}{HOVER}", include_str!("../assets/live.js"))
    }

    /// What the page may load and run: its own script, its own events, and nothing else.
    pub const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; \
                              img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

    /// The whole page.
    pub fn page(&self) -> String {
        let part = |(id, html): (&str, String)| format!("<div id=\"{id}\">\n{html}</div>\n");
        let parts = self.parts().map(part).concat();
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <link rel=\"icon\" href=\"data:,\">\n<title>{} – fedproj</title>\n<style>\n{STYLE}{LIVE_STYLE}</style>\n\
             <noscript><meta http-equiv=\"refresh\" content=\"5\"></noscript>\n\
             <script src=\"live.js\" defer></script>\n</head>\n<body>\n{parts}\
             <p id=\"offline\" role=\"status\">No connection; this is what was known last.</p>\n</body>\n</html>\n",
            escape(&self.now)
        )
    }

    /// The parts that can change, by the ids of their elements.
    pub fn parts(&self) -> [(&'static str, String); 3] {
        let table = |(heading, table): &(String, Table)| {
            format!("<section>\n<h2>{}</h2>\n{}\n</section>\n", escape(heading), table_html(table, false))
        };
        let tables: String = self.tables.iter().map(table).collect();
        [
            ("state", self.state()),
            ("charts", self.drawn_charts()),
            ("tables", format!("<div class=\"tables\">\n{tables}</div>\n")),
        ]
    }

    fn state(&self) -> String {
        let tile = |(name, value): &(String, String)| {
            format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escape(name), escape(value))
        };
        let (pace, percent) = (self.pace.name(), (100.0 * self.share_done.clamp(0.0, 1.0)).round());
        format!(
            "<header><h1>{}</h1> <span class=\"badge {pace}\">{pace}</span>\n<p>{}</p></header>\n\
             <p class=\"now\">{}</p>\n<div class=\"bar\" role=\"progressbar\" aria-label=\"rounds done\" \
             aria-valuenow=\"{percent}\"><div style=\"width: {percent}%\"></div></div>\n<dl class=\"tiles\">\n{}</dl>\n",
            escape(&self.title),
            escape(&self.subtitle),
            escape(&self.now),
            self.tiles.iter().map(tile).collect::<String>()
        )
    }

    fn drawn_charts(&self) -> String {
        if self.charts.is_empty() {
            return String::new();
        }
        let size = match self.charts.len() {
            3 => ChartSize::default(),
            _ => ChartSize { columns: 2, plot: (430.0, 190.0) },
        };
        let charts = Charts {
            title: "Round by round".into(),
            subtitle: String::new(),
            series: vec![Series::new("", SERIES[0])],
            notes: Vec::new(),
            charts: self.charts.clone(),
            size,
        };
        let (wide, narrow) = charts.for_page();
        format!("<figure>\n{}</figure>\n", figure_html(&wide, Some(&narrow)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_is_shown_is_text() {
        let hostile = || "<img src=x onerror=alert(1)>\"'&".to_owned();
        let table = Table { headers: vec![hostile()], n_names: 1, rows: vec![vec![hostile()]], ..Table::default() };
        let live = Live {
            title: hostile(),
            subtitle: hostile(),
            now: hostile(),
            tiles: vec![(hostile(), hostile())],
            tables: vec![(hostile(), table)],
            ..Live::default()
        };
        let page = live.page();
        assert!(!page.contains("<img"), "{page}");
        assert_eq!(page.matches("&lt;img src=x onerror=alert(1)&gt;&quot;'&amp;").count(), 9);
        // The policy forbids scripts within the page, whatever else goes wrong.
        assert!(!page.contains("<script>") && Live::POLICY.contains("script-src 'self';"));
    }
}
