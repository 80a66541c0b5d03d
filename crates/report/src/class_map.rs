//! Who holds what: clients against classes, with bars of sizes.

use crate::svg::escape;
use std::fmt::Write;

/// A heat map with one column per client and one row per class, and bars of the clients' sizes above. Colours run from light
/// to dark in one hue, so that they read the same for colour-blind eyes and in grey print.
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
        let (n_clients, n_classes) = (self.counts.len(), self.classes.len());
        let cell = (900.0 / n_clients as f64).clamp(4.5, 36.0);
        let row = if n_classes <= 30 { 18.0 } else { (540.0 / n_classes as f64).max(5.0) };
        let geometry = Geometry { left: 118.0, bars: 70.0, top: 128.0, cell, row, n_clients, n_classes };
        let mut out = String::new();
        geometry.open(&mut out, &self.title, &self.subtitle);
        geometry.bars(&mut out, &self.sizes);
        geometry.cells(&mut out, self);
        geometry.class_labels(&mut out, &self.classes);
        geometry.client_labels(&mut out);
        geometry.legend(&mut out, self.count_max());
        out.push_str("</g></svg>\n");
        out
    }

    fn count_max(&self) -> u32 {
        self.counts.iter().flatten().copied().max().unwrap_or(1).max(1)
    }
}

/// Geometry of the SVG, in pixels.
struct Geometry {
    left: f64,
    /// Height of the bars of sizes.
    bars: f64,
    /// Upper edge of the heat map.
    top: f64,
    cell: f64,
    row: f64,
    n_clients: usize,
    n_classes: usize,
}

// Writing into a string cannot fail, so the results of `write!` are dropped.
impl Geometry {
    fn open(&self, out: &mut String, title: &str, subtitle: &str) {
        // Short partitions still need room for the title and the legend.
        let width = (self.left + self.width() + 24.0).max(620.0);
        let height = self.bottom() + 84.0;
        let _ = write!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
             height=\"{height:.0}\" font-family=\"sans-serif\" font-size=\"11\">\n\
             <rect class=\"paper\" width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n<g class=\"ink\" fill=\"#222\">\n\
             <text x=\"12\" y=\"22\" font-size=\"15\" font-weight=\"bold\">{}</text>\n\
             <text x=\"12\" y=\"40\" class=\"soft\" fill=\"#555\">{}</text>\n",
            escape(title),
            escape(subtitle)
        );
    }

    fn bars(&self, out: &mut String, sizes: &[usize]) {
        let size_max = sizes.iter().copied().max().unwrap_or(1).max(1);
        let base = self.top - 6.0;
        let full = base - self.bars;
        let (x0, x1) = (self.left, self.left + self.width());
        let _ = writeln!(
            out,
            "<g stroke=\"#bbb\"><path d=\"M{x0:.1} {base:.1}H{x1:.1}M{x0:.1} {full:.1}H{x1:.1}\"/></g>\n\
             <g text-anchor=\"end\" class=\"soft\" fill=\"#555\"><text x=\"{tx:.1}\" y=\"{base:.1}\">0</text>\
             <text x=\"{tx:.1}\" y=\"{ty:.1}\">{size_max}</text>\
             <text x=\"{tx:.1}\" y=\"{my:.1}\" class=\"ink\" fill=\"#222\">samples</text></g>\n<g fill=\"#7a7a7a\">",
            tx = x0 - 6.0,
            ty = full + 8.0,
            my = f64::midpoint(base, full) + 4.0,
        );
        for (client, &size) in sizes.iter().enumerate() {
            let height = self.bars * size as f64 / size_max as f64;
            let _ = writeln!(
                out,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{height:.1}\"><title>client {client}: {size} \
                 samples</title></rect>",
                self.x(client) + 0.5,
                base - height,
                self.cell - 1.0
            );
        }
        out.push_str("</g>\n");
    }

    fn cells(&self, out: &mut String, map: &ClassMap) {
        let (width, height) = (self.width(), self.row * self.n_classes as f64);
        let _ = writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"#fff\" stroke=\"#bbb\"/>",
            self.left, self.top
        );
        let gap = if self.cell < 8.0 || self.row < 8.0 { 0.4 } else { 1.0 };
        let count_max = f64::from(map.count_max());
        for (client, counts) in map.counts.iter().enumerate() {
            for (class, &n) in counts.iter().enumerate().filter(|(_, n)| **n > 0) {
                let _ = writeln!(
                    out,
                    "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"><title>client \
                     {client}, class {class}: {n}</title></rect>",
                    self.x(client) + gap / 2.0,
                    self.y(class) + gap / 2.0,
                    self.cell - gap,
                    self.row - gap,
                    colour(f64::from(n) / count_max)
                );
            }
        }
    }

    fn class_labels(&self, out: &mut String, names: &[String]) {
        // Rows lower than a line of text get a label only every so often.
        let every = (11.0 / self.row).ceil() as usize;
        out.push_str("<g text-anchor=\"end\">\n");
        for (class, name) in names.iter().enumerate().step_by(every) {
            let short: String =
                if name.chars().count() > 16 { name.chars().take(15).chain(['…']).collect() } else { name.clone() };
            let (x, y) = (self.left - 6.0, self.y(class) + self.row / 2.0 + 4.0);
            let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escape(&short));
        }
        out.push_str("</g>\n");
    }

    fn client_labels(&self, out: &mut String) {
        let steps = [1, 2, 5, 10, 20, 50, 100];
        let room = if self.n_clients <= 100 { 22.0 } else { 30.0 };
        let every = steps.into_iter().find(|&s| f64::from(s) * self.cell >= room).unwrap_or(100);
        let y = self.bottom() + 14.0;
        out.push_str("<g text-anchor=\"middle\">\n");
        for client in (0..self.n_clients).step_by(every as usize) {
            let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{y:.1}\">{client}</text>", self.x(client) + self.cell / 2.0);
        }
        let _ =
            writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\">client</text></g>", self.left + self.width() / 2.0, y + 16.0);
    }

    fn legend(&self, out: &mut String, count_max: u32) {
        const N_STEPS: u32 = 24;
        let (x, y) = (self.left, self.bottom() + 44.0);
        let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">per class</text>", x - 6.0, y + 10.0);
        for step in 0..N_STEPS {
            let at = x + 8.0 * f64::from(step);
            let fill = colour(f64::from(step) / f64::from(N_STEPS - 1));
            let _ = writeln!(out, "<rect x=\"{at:.1}\" y=\"{y:.1}\" width=\"8.2\" height=\"12\" fill=\"{fill}\"/>");
        }
        let ticks = [(0.0, "1".to_owned()), (96.0, (count_max / 2).to_string()), (192.0, count_max.to_string())];
        out.push_str("<g text-anchor=\"middle\">\n");
        for (at, text) in ticks.iter().skip(usize::from(count_max < 2)) {
            let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\">{text}</text>", x + at, y + 26.0);
        }
        let _ = writeln!(
            out,
            "</g>\n<text x=\"{:.1}\" y=\"{:.1}\" class=\"soft\" fill=\"#555\">white: none</text>",
            x + 216.0,
            y + 10.0
        );
    }

    fn x(&self, client: usize) -> f64 {
        self.left + self.cell * client as f64
    }

    fn y(&self, class: usize) -> f64 {
        self.top + self.row * class as f64
    }

    fn width(&self) -> f64 {
        self.cell * self.n_clients as f64
    }

    fn bottom(&self) -> f64 {
        self.y(self.n_classes)
    }
}

/// From pale to dark blue. The square root keeps small counts visible beside a few very large ones.
fn colour(share: f64) -> String {
    const STOPS: [[f64; 3]; 4] =
        [[222.0, 235.0, 247.0], [133.0, 182.0, 219.0], [33.0, 113.0, 181.0], [8.0, 40.0, 94.0]];
    let at = share.sqrt() * 3.0;
    let low = (at as usize).min(2);
    let mixed =
        [0, 1, 2].map(|c| (STOPS[low][c] + (STOPS[low + 1][c] - STOPS[low][c]) * (at - low as f64)).round() as u8);
    format!("#{:02x}{:02x}{:02x}", mixed[0], mixed[1], mixed[2])
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
}
