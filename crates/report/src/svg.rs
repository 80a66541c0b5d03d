//! A tiny writer of SVG: it escapes what it writes, closes what it opens, and keeps numbers short.

use std::fmt::Write;

/// Fonts with DejaVu's widths first; PNG figures are set in DejaVu itself.
const FONTS: &str = "'DejaVu Sans', Verdana, 'Segoe UI', sans-serif";

/// A picture in the making. Colours of text, paper and rules carry a class (`ink`, `soft`, `paper`, `rule`), by which a
/// page can recolour them for the dark.
///
/// ```
/// use fedproj_report::Svg;
///
/// let mut svg = Svg::new(100.0, 40.0, "a < b");
/// svg.tag("rect").number("width", 10.0).number("height", 1.0 / 3.0).set("class", "ink").end();
/// let text = svg.finish();
/// assert!(text.contains("<title>a &lt; b</title>") && text.contains(r#"height="0.33""#));
/// ```
#[derive(Clone, Debug)]
pub struct Svg {
    out: String,
    open: Vec<&'static str>,
}

/// Where a line of text is anchored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Anchor {
    /// At its start.
    #[default]
    Start,
    /// In its middle.
    Middle,
    /// At its end.
    End,
}

/// How a line of text looks.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Style {
    /// Height in pixels.
    pub size: f64,
    /// Anchor.
    pub anchor: Anchor,
    /// Bold.
    pub bold: bool,
    /// Secondary text, in grey.
    pub soft: bool,
}

impl Style {
    /// Plain text of a size.
    pub fn new(size: f64) -> Self {
        Self { size, anchor: Anchor::Start, bold: false, soft: false }
    }

    /// Anchored elsewhere.
    pub fn anchor(self, anchor: Anchor) -> Self {
        Self { anchor, ..self }
    }

    /// In bold.
    pub fn bold(self) -> Self {
        Self { bold: true, ..self }
    }

    /// In grey.
    pub fn soft(self) -> Self {
        Self { soft: true, ..self }
    }
}

impl Svg {
    /// An empty picture on white; the title is for those who cannot see it.
    pub fn new(width: f64, height: f64, title: &str) -> Self {
        let (w, h) = (number(width), number(height));
        let mut out = String::new();
        let _ = write!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w} {h}\" width=\"{w}\" height=\"{h}\" role=\"img\" \
             font-family=\"{FONTS}\">\n<title>{}</title>\n",
            escape(title)
        );
        let mut svg = Self { out, open: Vec::new() };
        svg.tag("rect").set("width", "100%").set("height", "100%").set("fill", "#ffffff").set("class", "paper").end();
        svg
    }

    /// Begins an element, to be ended by [`Tag::end`] or [`Tag::open`].
    pub fn tag(&mut self, name: &'static str) -> Tag<'_> {
        let _ = write!(self.out, "<{name}");
        Tag { svg: self, name }
    }

    /// Closes the last element that is open.
    ///
    /// # Panics
    /// If there is none.
    pub fn close(&mut self) {
        let name = self.open.pop().expect("an element is open");
        let _ = writeln!(self.out, "</{name}>");
    }

    /// A line of text whose base line starts, ends or has its middle at (x, y).
    pub fn text(&mut self, x: f64, y: f64, text: &str, style: Style) {
        self.rotated_text(x, y, 0.0, text, style);
    }

    /// The same, turned by degrees around (x, y).
    pub fn rotated_text(&mut self, x: f64, y: f64, degrees: f64, text: &str, style: Style) {
        let mut tag = self.tag("text").number("x", x).number("y", y).number("font-size", style.size);
        tag = match style.anchor {
            Anchor::Start => tag,
            Anchor::Middle => tag.set("text-anchor", "middle"),
            Anchor::End => tag.set("text-anchor", "end"),
        };
        if style.bold {
            tag = tag.set("font-weight", "bold");
        }
        if degrees != 0.0 {
            tag = tag.set("transform", &format!("rotate({} {} {})", number(degrees), number(x), number(y)));
        }
        let (fill, class) = if style.soft { ("#555555", "soft") } else { ("#1a1a1a", "ink") };
        tag.set("fill", fill).set("class", class).open();
        self.out.push_str(&escape(text));
        self.close();
    }

    /// What browsers show when the pointer is over the open element.
    pub fn title(&mut self, text: &str) {
        let _ = write!(self.out, "<title>{}</title>", escape(text));
    }

    /// Title and subtitle, where every picture has them.
    pub(crate) fn headings(&mut self, title: &str, subtitle: &str) {
        self.heading_lines(&Headings { title: vec![title.into()], subtitle: vec![subtitle.into()] });
    }

    /// The same in several lines.
    pub(crate) fn heading_lines(&mut self, headings: &Headings) {
        let mut y = 26.0;
        for line in &headings.title {
            self.text(16.0, y, line, Style::new(17.0).bold());
            y += Headings::TITLE_LINE;
        }
        y += 19.0 - Headings::TITLE_LINE;
        for line in &headings.subtitle {
            self.text(16.0, y, line, Style::new(12.0).soft());
            y += Headings::SUBTITLE_LINE;
        }
    }

    /// The title of a vertical axis, around its middle.
    pub(crate) fn axis_title(&mut self, (x, y): (f64, f64), text: &str) {
        self.rotated_text(x, y, -90.0, text, Style::new(11.0).soft().anchor(Anchor::Middle));
    }

    /// A thin grey line.
    pub fn rule(&mut self, from: (f64, f64), to: (f64, f64)) {
        self.line(from, to).set("stroke", "#d9d9d9").set("class", "rule").end();
    }

    /// A rectangle, whose colour is still to be set: its corner at the top left, and its size.
    pub fn rect(&mut self, (x, y): (f64, f64), (width, height): (f64, f64)) -> Tag<'_> {
        self.tag("rect").number("x", x).number("y", y).number("width", width).number("height", height)
    }

    /// A straight line, whose colour is still to be set.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64)) -> Tag<'_> {
        self.tag("line").number("x1", from.0).number("y1", from.1).number("x2", to.0).number("y2", to.1)
    }

    /// The whole picture.
    ///
    /// # Panics
    /// If an element is still open.
    pub fn finish(mut self) -> String {
        assert!(self.open.is_empty(), "{:?} are open", self.open);
        self.out.push_str("</svg>\n");
        self.out
    }
}

/// Title and subtitle of a picture, line by line.
pub(crate) struct Headings {
    title: Vec<String>,
    subtitle: Vec<String>,
}

impl Headings {
    /// Pixels.
    const TITLE_LINE: f64 = 21.0;
    const SUBTITLE_LINE: f64 = 16.0;

    /// In as many lines as a picture of this width needs.
    pub(crate) fn wrapped(title: &str, subtitle: &str, width: f64) -> Self {
        // Mean width of a character: 0.62 of its height.
        let lines = |text, size: f64| wrap(text, ((width - 32.0) / (0.62 * size)) as usize);
        Self { title: lines(title, 17.0), subtitle: lines(subtitle, 12.0) }
    }

    /// Pixels by which everything below moves down.
    pub(crate) fn extra(&self) -> f64 {
        Self::TITLE_LINE * (self.title.len() - 1) as f64 + Self::SUBTITLE_LINE * (self.subtitle.len() - 1) as f64
    }
}

/// An element whose attributes are being written.
#[derive(Debug)]
#[must_use = "an element is ended by end() or open()"]
pub struct Tag<'a> {
    svg: &'a mut Svg,
    name: &'static str,
}

impl Tag<'_> {
    /// An attribute.
    pub fn set(self, name: &str, value: &str) -> Self {
        let _ = write!(self.svg.out, " {name}=\"{}\"", escape(value));
        self
    }

    /// A number, to two decimals.
    pub fn number(self, name: &str, value: f64) -> Self {
        let value = number(value);
        self.set(name, &value)
    }

    /// Ends an element without content.
    pub fn end(self) {
        self.svg.out.push_str("/>\n");
    }

    /// What follows is inside this element, until [`Svg::close`].
    pub fn open(self) {
        self.svg.out.push('>');
        self.svg.open.push(self.name);
    }
}

/// A number to two decimals, without zeros at the end.
pub(crate) fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".into() } else { text.into() }
}

/// Straight lines through points.
pub(crate) fn path(points: impl Iterator<Item = (f64, f64)>) -> String {
    let mut d = String::new();
    for (x, y) in points {
        let _ = write!(d, "{}{} {}", if d.is_empty() { "M" } else { "L" }, number(x), number(y));
    }
    d
}

/// A name that fits beside its row of a picture.
pub(crate) fn shortened(name: &str, n_chars: usize) -> String {
    if name.chars().count() <= n_chars { name.into() } else { name.chars().take(n_chars - 1).chain(['…']).collect() }
}

/// Where a picture with names of rows at its left has room: the right end of the names and the width beside them, in pixels,
/// and the length of a name in characters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub left: f64,
    pub width: f64,
    pub n_chars: usize,
}

impl Room {
    /// As wide as a phone.
    pub(crate) const PHONE: Self = Self { left: 112.0, width: 232.0, n_chars: 15 };

    /// The headings of a picture of this width. On a phone they wrap; elsewhere they stand in one line.
    pub(crate) fn headings(&self, title: &str, subtitle: &str, width: f64) -> Headings {
        let width = if self.is_phone() { width } else { f64::MAX };
        Headings::wrapped(title, subtitle, width)
    }

    pub(crate) fn is_phone(&self) -> bool {
        self.left <= Self::PHONE.left
    }
}

/// Words in lines of max `n_chars` characters, unless one word is longer.
pub fn wrap(text: &str, n_chars: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + 1 + word.chars().count() <= n_chars => line.extend([" ", word]),
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Text that XML and HTML read as text.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A picture is as wide as a phone, and all its texts are within it.
    pub(crate) fn check_fits_a_phone(svg: &str) {
        let read = roxmltree::Document::parse(svg).unwrap();
        let number = |n: &roxmltree::Node<'_, '_>, name| n.attribute(name).unwrap().parse::<f64>().unwrap();
        let whole = number(&read.root_element(), "width");
        assert!(whole < 380.0, "{whole}");
        for text in read.descendants().filter(|n| n.has_tag_name("text") && n.attribute("transform").is_none()) {
            let n_chars = text.text().unwrap_or("").chars().count() as f64;
            let (x, width) = (number(&text, "x"), 0.55 * number(&text, "font-size") * n_chars);
            let left = match text.attribute("text-anchor") {
                None => x,
                Some("middle") => x - width / 2.0,
                Some(_) => x - width,
            };
            assert!(left > -2.0 && left + width < whole + 2.0, "{:?} from {left} to {}", text.text(), left + width);
        }
    }

    #[test]
    fn foreign_text_stays_text() {
        let mut svg = Svg::new(10.0, 10.0, "</title><script>");
        svg.text(0.0, 0.0, "a & b < \"c\"", Style::new(9.0).bold().soft().anchor(Anchor::End));
        svg.tag("g").set("class", "\"><x").open();
        svg.close();
        let text = svg.finish();
        let read = roxmltree::Document::parse(&text).unwrap();
        let inner = |name| read.descendants().find(|n| n.has_tag_name(name)).unwrap();
        assert_eq!(inner("title").text(), Some("</title><script>"));
        assert_eq!(inner("text").text(), Some("a & b < \"c\""));
        assert_eq!(inner("g").attribute("class"), Some("\"><x"));
    }

    #[test]
    fn numbers_are_short() {
        let cases = [(1.0, "1"), (-0.001, "0"), (0.125, "0.12"), (10.0, "10"), (-2.5, "-2.5"), (100.0, "100")];
        for (value, text) in cases {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn long_names_are_wrapped_between_words() {
        assert_eq!(wrap("FedProj, alpha 0.1, beta 0.3", 12), ["FedProj,", "alpha 0.1,", "beta 0.3"]);
        assert_eq!(wrap("", 12), [""]);
    }
}
