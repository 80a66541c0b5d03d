//! Deterministic splits: train/test and private/public.
//!
//! The draw depends on the seed and on what the split is for, so that a train/test and a private/public split of
//! the same data are independent of each other.

use fedproj_rng::{Purpose, Stream};

use crate::dataset::Dataset;
use crate::error::{Error, Result};

/// What a split is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitFor {
    /// Hold out a test set.
    Test,
    /// Set aside a public set.
    Public,
}

/// How to split.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SplitConfig {
    /// Share of the samples held out, strictly between 0 and 1.
    pub fraction: f64,
    /// Whether each class gives the same share (needs labels).
    #[serde(default)]
    pub stratified: bool,
}

/// Indices that stay and indices held out, each in increasing order; together every sample once.
///
/// The number held out is `fraction · n` rounded to the nearest; with `stratified`, what rounding leaves over goes to
/// the classes with the largest remainders.
///
/// ```
/// use fedproj_data::{SourceConfig, SplitConfig, SplitFor, load, split};
///
/// let iris = load(&SourceConfig::named("iris"), None)?.train;
/// let (train, test) = split(&iris, SplitFor::Test, SplitConfig { fraction: 0.2, stratified: true }, 0)?;
/// assert_eq!((train.len(), test.len()), (120, 30));
/// # Ok::<(), fedproj_data::Error>(())
/// ```
///
/// # Errors
/// If a side would be empty, or labels are needed and missing.
pub fn split(data: &Dataset, purpose: SplitFor, config: SplitConfig, seed: u64) -> Result<(Vec<u32>, Vec<u32>)> {
    let n = data.n_samples();
    let n_held_out = (config.fraction * n as f64).round() as usize;
    let impossible =
        |problem: String, hint: &'static str| Error::ImpossibleSplit { name: data.name().to_owned(), problem, hint };
    if !(config.fraction > 0.0 && config.fraction < 1.0) || n_held_out == 0 || n_held_out >= n {
        let problem = format!("a fraction of {} of {n} samples leaves one side empty", config.fraction);
        return Err(impossible(problem, "choose a fraction strictly between 0 and 1 that is at least one sample"));
    }
    let strata = match (config.stratified, data.labels()) {
        (false, _) => vec![(0..n as u32).collect()],
        (true, Some(labels)) => indices_by_class(labels, data.n_classes()),
        (true, None) => {
            return Err(impossible("it has no labels to stratify by".into(), "set stratified = false"));
        }
    };
    let quotas = quotas(&strata.iter().map(Vec::len).collect::<Vec<_>>(), n_held_out);
    let mut stream = Stream::new(seed, Purpose::Split, [purpose as u32, 0, 0]);
    let (mut kept, mut held_out) = (Vec::with_capacity(n - n_held_out), Vec::with_capacity(n_held_out));
    for (mut stratum, quota) in strata.into_iter().zip(quotas) {
        stream.shuffle(&mut stratum);
        held_out.extend_from_slice(&stratum[..quota]);
        kept.extend_from_slice(&stratum[quota..]);
    }
    kept.sort_unstable();
    held_out.sort_unstable();
    Ok((kept, held_out))
}

/// Max `n_max` samples, balanced over the classes, in increasing order. Each class gives n / classes of them, where n is
/// `n_max` or the number of samples; a class with fewer samples gives all. An `n_max` of 0 is no limit.
///
/// # Errors
/// If the set has no labels, or `n_max` is less than a sample of each class.
pub fn balanced(data: &Dataset, n_max: usize, stream: &mut Stream) -> Result<Vec<u32>> {
    let impossible =
        |problem: String, hint: &'static str| Error::ImpossibleSplit { name: data.name().to_owned(), problem, hint };
    let Some(labels) = data.labels() else {
        return Err(impossible("it has no labels to balance".into(), "draw it uniformly"));
    };
    let n = if n_max == 0 { data.n_samples() } else { n_max.min(data.n_samples()) };
    let quota = n / data.n_classes();
    if quota == 0 {
        let problem = format!("{n} samples are not one of each of {} classes", data.n_classes());
        return Err(impossible(problem, "take more samples"));
    }
    let mut drawn = Vec::with_capacity(n);
    for mut class in indices_by_class(labels, data.n_classes()) {
        stream.shuffle(&mut class);
        drawn.extend_from_slice(&class[..quota.min(class.len())]);
    }
    drawn.sort_unstable();
    Ok(drawn)
}

/// The samples of each class, in increasing order.
pub(crate) fn indices_by_class(labels: &[u32], n_classes: usize) -> Vec<Vec<u32>> {
    let mut classes = vec![Vec::new(); n_classes];
    for (index, &label) in labels.iter().enumerate() {
        classes[label as usize].push(index as u32);
    }
    classes
}

/// Shares `total` among strata in proportion to their sizes (largest remainders, ties to the first).
fn quotas(sizes: &[usize], total: usize) -> Vec<usize> {
    let n: usize = sizes.iter().sum();
    let mut quotas: Vec<usize> = sizes.iter().map(|size| size * total / n).collect();
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&s| std::cmp::Reverse(sizes[s] * total % n));
    let n_left = total - quotas.iter().sum::<usize>();
    for &s in &order[..n_left] {
        quotas[s] += 1;
    }
    quotas
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::{Samples, Shape};

    fn data(labels: Vec<u32>, n_classes: usize) -> Dataset {
        let values = Samples::F32(vec![0.0; labels.len()]);
        let names = (0..n_classes).map(|c| c.to_string()).collect();
        Dataset::new("t", Shape::Vector { features: 1 }, values, Some(labels), names).unwrap()
    }

    #[test]
    fn every_sample_lands_on_exactly_one_side() {
        let data = data((0..103).map(|i| i % 7).collect(), 7);
        for stratified in [false, true] {
            let (mut all, test) = split(&data, SplitFor::Test, SplitConfig { fraction: 0.3, stratified }, 5).unwrap();
            assert_eq!(test.len(), 31);
            all.extend(test);
            all.sort_unstable();
            assert_eq!(all, (0..103).collect::<Vec<_>>());
        }
    }

    #[test]
    fn stratified_keeps_the_class_shares() {
        let labels: Vec<u32> = (0..1000).map(|i| u32::from(i >= 900)).collect();
        let config = SplitConfig { fraction: 0.25, stratified: true };
        let (_, test) = split(&data(labels.clone(), 2), SplitFor::Test, config, 1).unwrap();
        assert_eq!(test.iter().filter(|&&i| labels[i as usize] == 1).count(), 25);
    }

    #[test]
    fn a_balanced_draw_takes_as_many_of_each_class_as_there_are() {
        // The sizes of SST-2's classes: the paper's code draws 63 454 samples.
        let labels: Vec<u32> = (0..67_349).map(|i| u32::from(i >= 29_780)).collect();
        let data = data(labels.clone(), 2);
        let draw = |n_max, seed| balanced(&data, n_max, &mut Stream::new(seed, Purpose::Split, [9, 0, 0])).unwrap();
        let counts = |drawn: &[u32]| {
            let n_second: u32 = drawn.iter().map(|&i| labels[i as usize]).sum();
            (drawn.len() - n_second as usize, n_second as usize)
        };
        assert_eq!(counts(&draw(100_000, 0)), (29_780, 33_674));
        assert_eq!(draw(0, 0), draw(100_000, 0));
        let some = draw(1001, 0);
        assert_eq!(counts(&some), (500, 500));
        assert!(some.is_sorted() && some != draw(1001, 1) && some == draw(1001, 0));
        assert!(balanced(&data, 1, &mut Stream::new(0, Purpose::Split, [0; 3])).is_err());
        let unlabelled = data.without_labels();
        assert!(balanced(&unlabelled, 10, &mut Stream::new(0, Purpose::Split, [0; 3])).is_err());
    }

    #[test]
    fn draws_differ_by_seed_and_by_purpose_only() {
        let data = data(vec![0; 200], 1);
        let config = SplitConfig { fraction: 0.5, stratified: false };
        let draw = |purpose, seed| split(&data, purpose, config, seed).unwrap();
        assert_eq!(draw(SplitFor::Test, 1), draw(SplitFor::Test, 1));
        assert_ne!(draw(SplitFor::Test, 1), draw(SplitFor::Test, 2));
        assert_ne!(draw(SplitFor::Test, 1), draw(SplitFor::Public, 1));
    }

    #[test]
    fn empty_sides_and_missing_labels_are_refused() {
        let data = data(vec![0; 10], 1);
        for fraction in [0.0, 1.0, -1.0, f64::NAN, 0.01, 0.99] {
            let config = SplitConfig { fraction, stratified: false };
            assert!(split(&data, SplitFor::Test, config, 0).is_err(), "{fraction}");
        }
        let config = SplitConfig { fraction: 0.5, stratified: true };
        assert!(split(&data.without_labels(), SplitFor::Test, config, 0).is_err());
    }
}
