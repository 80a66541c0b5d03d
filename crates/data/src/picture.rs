//! Pictures of a partition: clients against classes, with sizes and the skew index.
//!
//! [`svg`] is for reports, [`terminal`] for a quick look. Colours run from light to dark in one hue, so that they
//! read the same for colour-blind eyes and in grey print.

use std::fmt::Write;

use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::partition::Partition;

/// Clients drawn at most; the title says how many there are.
const N_CLIENTS_MAX: usize = 200;

/// A heat map as SVG: one column per client, one row per class, bars of sizes above.
///
/// ```
/// use fedproj_data::{PartitionConfig, SourceConfig, load, picture};
///
/// let digits = load(&SourceConfig::named("digits"), None)?.train;
/// let partition = PartitionConfig::Iid { clients: 5 }.build(&digits, 0)?;
/// assert!(picture::svg(&partition, &digits)?.starts_with("<svg"));
/// # Ok::<(), fedproj_data::Error>(())
/// ```
///
/// # Errors
/// If the data set has no labels.
pub fn svg(partition: &Partition, data: &Dataset) -> Result<String> {
    Ok(draw(&Table::new(partition, data, N_CLIENTS_MAX)?, data.class_names()))
}

/// The same from counts alone, client by client; `n_clients` says how many there are in all.
pub fn svg_of_counts(name: &str, counts: &[Vec<u32>], n_clients: usize, class_names: &[String]) -> String {
    let counts = counts[..counts.len().min(N_CLIENTS_MAX)].to_vec();
    let sizes: Vec<usize> = counts.iter().map(|classes| classes.iter().sum::<u32>() as usize).collect();
    let (least, most) = (sizes.iter().min().copied().unwrap_or(0), sizes.iter().max().copied().unwrap_or(0));
    let mean = sizes.iter().sum::<usize>() as f64 / sizes.len().max(1) as f64;
    let table = Table {
        title: Table::title(name, n_clients, counts.len(), class_names.len()),
        subtitle: format!("samples per client {least} to {most}, mean {mean:.1}"),
        count_max: counts.iter().flatten().copied().max().unwrap_or(1).max(1),
        counts,
        sizes,
    };
    draw(&table, class_names)
}

fn draw(table: &Table, class_names: &[String]) -> String {
    let (n_clients, n_classes) = (table.counts.len(), class_names.len());
    let cell = (900.0 / n_clients as f64).clamp(4.5, 36.0);
    let row = if n_classes <= 30 { 18.0 } else { (540.0 / n_classes as f64).max(5.0) };
    let layout = Layout { left: 118.0, bars: 70.0, top: 128.0, cell, row, n_clients, n_classes };
    let mut out = String::new();
    layout.open(&mut out, &table.title, &table.subtitle);
    layout.bars(&mut out, &table.sizes);
    layout.cells(&mut out, table);
    layout.class_labels(&mut out, class_names);
    layout.client_labels(&mut out);
    layout.legend(&mut out, table.count_max);
    out.push_str("</g></svg>\n");
    out
}

/// Plain text: one line per client with its size and one block per class.
///
/// The height of a block is the square root of its share of the largest count, which keeps small counts visible.
///
/// At most `n_rows_max` clients are shown.
///
/// # Errors
/// If the data set has no labels.
pub fn terminal(partition: &Partition, data: &Dataset, n_rows_max: usize) -> Result<String> {
    const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let table = Table::new(partition, data, n_rows_max.max(1))?;
    let mut out = format!("{}\n{}\n", table.title, table.subtitle);
    let size_max = table.sizes.iter().copied().max().unwrap_or(1);
    let width = size_max.to_string().len().max(4);
    // Few classes get two columns each, so that neighbours are told apart.
    let repeat = if data.n_classes() <= 30 { 2 } else { 1 };
    let _ = writeln!(out, "client  {:>width$}  classes 0 to {}", "size", data.n_classes() - 1);
    for (client, (counts, size)) in table.counts.iter().zip(&table.sizes).enumerate() {
        let blocks: String = counts
            .iter()
            .flat_map(|&n| {
                // Rounded up: a class that is there at all is never blank.
                let level = (8.0 * table.share(n).sqrt()).ceil() as usize;
                std::iter::repeat_n(BLOCKS[level.min(8)], repeat)
            })
            .collect();
        let bar = "━".repeat((20 * size).div_ceil(size_max));
        let _ = writeln!(out, "{client:>6}  {size:>width$} │{blocks}│ {bar}");
    }
    if table.counts.len() < partition.n_clients() {
        let _ = writeln!(out, "… and {} more clients", partition.n_clients() - table.counts.len());
    }
    Ok(out)
}

/// What both pictures show.
struct Table {
    title: String,
    subtitle: String,
    /// Per client shown, per class.
    counts: Vec<Vec<u32>>,
    sizes: Vec<usize>,
    count_max: u32,
}

impl Table {
    fn new(partition: &Partition, data: &Dataset, n_shown_max: usize) -> Result<Self> {
        let Some(labels) = data.labels() else {
            return Err(Error::inconsistent(data.name(), "without labels there is nothing to draw by class"));
        };
        let n_clients = partition.n_clients();
        let shown = 0..n_clients.min(n_shown_max);
        let counts: Vec<_> = shown.clone().map(|k| partition.class_counts(k, labels, data.n_classes())).collect();
        let sizes: Vec<usize> = shown.map(|k| partition.size(k)).collect();
        let (mut least, mut most, mut total) = (usize::MAX, 0, 0);
        for size in partition.sizes() {
            (least, most, total) = (least.min(size), most.max(size), total + size);
        }
        let skew = partition.skew_index(labels, data.n_classes());
        let mean = total as f64 / n_clients as f64;
        Ok(Self {
            title: Self::title(data.name(), n_clients, counts.len(), data.n_classes()),
            subtitle: format!("samples per client {least} to {most}, mean {mean:.1} · label skew {skew:.3}"),
            count_max: counts.iter().flatten().copied().max().unwrap_or(1).max(1),
            counts,
            sizes,
        })
    }

    fn title(name: &str, n_clients: usize, n_shown: usize, n_classes: usize) -> String {
        let first = if n_shown < n_clients { format!(" (first {n_shown} shown)") } else { String::new() };
        format!("{name}: {n_clients} clients{first}, {n_classes} classes")
    }

    /// A count relative to the largest one.
    fn share(&self, count: u32) -> f64 {
        f64::from(count) / f64::from(self.count_max)
    }
}

/// Geometry of the SVG, in pixels.
struct Layout {
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
impl Layout {
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
            escaped(title),
            escaped(subtitle)
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

    fn cells(&self, out: &mut String, table: &Table) {
        let (width, height) = (self.width(), self.row * self.n_classes as f64);
        let _ = writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"#fff\" stroke=\"#bbb\"/>",
            self.left, self.top
        );
        let gap = if self.cell < 8.0 || self.row < 8.0 { 0.4 } else { 1.0 };
        for (client, counts) in table.counts.iter().enumerate() {
            for (class, &n) in counts.iter().enumerate().filter(|(_, n)| **n > 0) {
                let _ = writeln!(
                    out,
                    "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"><title>client \
                     {client}, class {class}: {n}</title></rect>",
                    self.x(client) + gap / 2.0,
                    self.y(class) + gap / 2.0,
                    self.cell - gap,
                    self.row - gap,
                    colour(table.share(n))
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
            let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escaped(&short));
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

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::{Samples, Shape};

    fn data(labels: Vec<u32>, class_names: &[&str]) -> Dataset {
        let values = Samples::F32(vec![0.0; labels.len()]);
        let names = class_names.iter().map(|&n| n.to_owned()).collect();
        Dataset::new("t", Shape::Vector { features: 1 }, values, Some(labels), names).unwrap()
    }

    #[test]
    fn terminal_shows_sizes_and_shares() {
        let data = data(vec![0, 0, 0, 0, 1, 1], &["a", "b"]);
        let partition = Partition::from_lists("explicit", vec![vec![0, 1, 2, 3], vec![4], vec![5]], 6).unwrap();
        let text = terminal(&partition, &data, 2).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "t: 3 clients (first 2 shown), 2 classes");
        assert!(lines[1].starts_with("samples per client 1 to 4, mean 2.0 · label skew 0."), "{}", lines[1]);
        assert_eq!(lines[3], format!("     0     4 │██  │ {}", "━".repeat(20)));
        assert_eq!(lines[4], format!("     1     1 │  ▄▄│ {}", "━".repeat(5)));
        assert_eq!(lines[5], "… and 1 more clients");
    }

    #[test]
    fn svg_has_one_cell_per_count_and_escapes_names() {
        let data = data(vec![0, 0, 1, 1], &["<a & b>", "b"]);
        let partition = Partition::from_lists("explicit", vec![vec![0, 1, 2], vec![3]], 4).unwrap();
        let text = svg(&partition, &data).unwrap();
        assert_eq!(text.matches(", class ").count(), 3);
        assert!(text.contains("&lt;a &amp; b&gt;") && !text.contains("<a &"));
        assert!(svg(&partition, &data.without_labels()).is_err());
    }
}
