//! How a partition divides the classes among clients, in numbers and as text.

use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::partition::Partition;
use std::fmt::Write;

/// Clients in a picture at most; the title says how many there are.
const N_CLIENTS_MAX: usize = 200;

/// The samples of each class that each client holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// Data set, clients and classes.
    pub title: String,
    /// Sizes and, where it is known, the skew index.
    pub subtitle: String,
    /// Per client shown, per class.
    pub counts: Vec<Vec<u32>>,
    /// Samples per client shown.
    pub sizes: Vec<usize>,
}

impl Holdings {
    /// Counts the classes of a partition's first clients, as many as a picture shows.
    ///
    /// ```
    /// use fedproj_data::{Holdings, PartitionConfig, SourceConfig, load};
    ///
    /// let digits = load(&SourceConfig::named("digits"), None)?.train;
    /// let partition = PartitionConfig::Iid { clients: 5 }.build(&digits, 0)?;
    /// assert_eq!(Holdings::of(&partition, &digits)?.counts.len(), 5);
    /// # Ok::<(), fedproj_data::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the data set has no labels.
    pub fn of(partition: &Partition, data: &Dataset) -> Result<Self> {
        Self::first(partition, data, N_CLIENTS_MAX)
    }

    /// The same from stored counts; `n_clients` is the number of all clients.
    pub fn from_counts(name: &str, counts: &[Vec<u32>], n_clients: usize, n_classes: usize) -> Self {
        let counts = counts[..counts.len().min(N_CLIENTS_MAX)].to_vec();
        let sizes: Vec<usize> = counts.iter().map(|classes| classes.iter().sum::<u32>() as usize).collect();
        let subtitle = sizes_in_words(sizes.iter().copied());
        Self { title: title(name, n_clients, counts.len(), n_classes), subtitle, counts, sizes }
    }

    fn first(partition: &Partition, data: &Dataset, n_shown_max: usize) -> Result<Self> {
        let Some(labels) = data.labels() else {
            return Err(Error::inconsistent(data.name(), "without labels there is nothing to count by class"));
        };
        let (n_clients, n_classes) = (partition.n_clients(), data.n_classes());
        let shown = 0..n_clients.min(n_shown_max);
        let skew = partition.skew_index(labels, n_classes);
        Ok(Self {
            title: title(data.name(), n_clients, shown.len(), n_classes),
            subtitle: format!("{} · label skew {skew:.3}", sizes_in_words(partition.sizes())),
            counts: shown.clone().map(|k| partition.class_counts(k, labels, n_classes)).collect(),
            sizes: shown.map(|k| partition.size(k)).collect(),
        })
    }
}

fn title(name: &str, n_clients: usize, n_shown: usize, n_classes: usize) -> String {
    let first = if n_shown < n_clients { format!(" (first {n_shown} shown)") } else { String::new() };
    format!("{name}: {n_clients} clients{first}, {n_classes} classes")
}

fn sizes_in_words(sizes: impl Iterator<Item = usize>) -> String {
    let start = (usize::MAX, 0, 0, 0_usize);
    let fold = |(least, most, total, n): (usize, usize, usize, usize), size: usize| {
        (least.min(size), most.max(size), total + size, n + 1)
    };
    let (least, most, total, n) = sizes.fold(start, fold);
    let mean = total as f64 / n.max(1) as f64;
    format!("samples per client {} to {most}, mean {mean:.1}", least.min(most))
}

/// Plain text: one line per client with its size and one block per class, for at most `n_rows_max` clients.
///
/// The height of a block is the square root of its share of the largest count, which keeps small counts visible.
///
/// # Errors
/// If the data set has no labels.
pub fn holdings_text(partition: &Partition, data: &Dataset, n_rows_max: usize) -> Result<String> {
    const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let holdings = Holdings::first(partition, data, n_rows_max.max(1))?;
    let count_max = f64::from(holdings.counts.iter().flatten().copied().max().unwrap_or(1).max(1));
    let mut out = format!("{}\n{}\n", holdings.title, holdings.subtitle);
    let size_max = holdings.sizes.iter().copied().max().unwrap_or(1);
    let width = size_max.to_string().len().max(4);
    // Few classes get two columns each, so that neighbours look different.
    let repeat = if data.n_classes() <= 30 { 2 } else { 1 };
    let _ = writeln!(out, "client  {:>width$}  classes 0 to {}", "size", data.n_classes() - 1);
    for (client, (counts, size)) in holdings.counts.iter().zip(&holdings.sizes).enumerate() {
        let block = |&n: &u32| {
            // Rounded up: a class that is there at all is never blank.
            let level = (8.0 * (f64::from(n) / count_max).sqrt()).ceil() as usize;
            std::iter::repeat_n(BLOCKS[level.min(8)], repeat)
        };
        let blocks: String = counts.iter().flat_map(block).collect();
        let bar = "━".repeat((20 * size).div_ceil(size_max));
        let _ = writeln!(out, "{client:>6}  {size:>width$} │{blocks}│ {bar}");
    }
    if holdings.counts.len() < partition.n_clients() {
        let _ = writeln!(out, "… and {} more clients", partition.n_clients() - holdings.counts.len());
    }
    Ok(out)
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
    fn text_shows_sizes_and_shares() {
        let data = data(vec![0, 0, 0, 0, 1, 1], &["a", "b"]);
        let partition = Partition::from_lists("explicit", vec![vec![0, 1, 2, 3], vec![4], vec![5]], 6).unwrap();
        let text = holdings_text(&partition, &data, 2).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "t: 3 clients (first 2 shown), 2 classes");
        assert!(lines[1].starts_with("samples per client 1 to 4, mean 2.0 · label skew 0."), "{}", lines[1]);
        assert_eq!(lines[3], format!("     0     4 │██  │ {}", "━".repeat(20)));
        assert_eq!(lines[4], format!("     1     1 │  ▄▄│ {}", "━".repeat(5)));
        assert_eq!(lines[5], "… and 1 more clients");
    }

    #[test]
    fn counts_need_labels_and_stored_counts_give_the_same() {
        let data = data(vec![0, 0, 1, 1], &["a", "b"]);
        let partition = Partition::from_lists("explicit", vec![vec![0, 1, 2], vec![3]], 4).unwrap();
        let holdings = Holdings::of(&partition, &data).unwrap();
        assert_eq!((&holdings.counts, &holdings.sizes), (&vec![vec![2, 1], vec![0, 1]], &vec![3, 1]));
        let stored = Holdings::from_counts("t", &holdings.counts, 2, 2);
        assert_eq!((&stored.title, &stored.counts), (&holdings.title, &holdings.counts));
        assert!(holdings.subtitle.starts_with(&stored.subtitle), "{holdings:?}");
        assert!(Holdings::of(&partition, &data.without_labels()).is_err());
    }
}
