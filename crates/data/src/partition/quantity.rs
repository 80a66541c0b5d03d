//! Quantity skew: sizes drawn from Dir(β), labels IID.
//!
//! Each client first gets the minimum; what is left is shared in the drawn proportions, fractions rounded down and
//! the rest given to the largest fractions. Every sample exactly once, the minimum always, without redraws.

use fedproj_rng::{Purpose, Stream};

use super::Partition;
use super::config::{check_beta, check_clients};
use crate::error::Result;

pub(super) fn partition(n_samples: usize, beta: f64, n_clients: usize, n_min: usize, seed: u64) -> Result<Partition> {
    check_beta("quantity", beta)?;
    check_clients("quantity", n_samples, n_clients, n_min)?;
    let n_min = n_min.max(1);
    let mut stream = Stream::new(seed, Purpose::Partition, [0; 3]);
    let n_free = n_samples - n_clients * n_min;
    let shares: Vec<f64> = stream.dirichlet(beta, n_clients).iter().map(|p| p * n_free as f64).collect();
    let mut sizes: Vec<usize> = shares.iter().map(|share| n_min + *share as usize).collect();
    let mut by_fraction: Vec<usize> = (0..n_clients).collect();
    by_fraction.sort_by(|&a, &b| shares[b].fract().total_cmp(&shares[a].fract()));
    // Rounding errors of the shares stay far below one sample in all, so the sizes never exceed the samples.
    let n_left = n_samples - sizes.iter().sum::<usize>();
    for &client in by_fraction.iter().cycle().take(n_left) {
        sizes[client] += 1;
    }
    let mut order = stream.permutation(n_samples);
    let lists = sizes.iter().map(|&size| order.split_off(order.len() - size)).collect();
    Partition::from_lists("quantity", lists, n_samples)
}
