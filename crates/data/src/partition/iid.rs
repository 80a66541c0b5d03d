//! Equal shares of a random order. Every sample exactly once; sizes differ by at most one.

use fedproj_rng::{Purpose, Stream};

use super::config::check_clients;
use super::{Partition, even_shares};
use crate::error::Result;

pub(super) fn partition(n_samples: usize, n_clients: usize, seed: u64) -> Result<Partition> {
    check_clients("iid", n_samples, n_clients, 1)?;
    let order = Stream::new(seed, Purpose::Partition, [0; 3]).permutation(n_samples);
    Partition::from_lists("iid", even_shares(&order, n_clients).map(<[u32]>::to_vec).collect(), n_samples)
}
