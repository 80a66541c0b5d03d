//! Samples sorted by label, cut into equal shards, assigned at random. McMahan et al., AISTATS 2017.
//!
//! Every sample exactly once; sizes of shards differ by at most one.

use fedproj_rng::{Purpose, Stream};

use super::config::check_clients;
use super::{Partition, even_shares, n_samples};
use crate::error::{Error, Result};

pub(super) fn partition(
    classes: Vec<Vec<u32>>,
    n_clients: usize,
    n_shards_each: usize,
    seed: u64,
) -> Result<Partition> {
    let n = n_samples(&classes);
    check_clients("shards", n, n_clients, 1)?;
    let n_shards = n_clients.saturating_mul(n_shards_each);
    if n_shards == 0 || n_shards > n {
        let problem = format!("{n_clients} clients with {n_shards_each} each make {n_shards} shards of {n} samples");
        return Err(Error::impossible("shards", problem, "each shard needs a sample; change shards_per_client"));
    }
    let mut stream = Stream::new(seed, Purpose::Partition, [0; 3]);
    let mut sorted = Vec::with_capacity(n);
    for mut class in classes {
        // Which samples of a class share a shard is random, not the order of the file.
        stream.shuffle(&mut class);
        sorted.extend(class);
    }
    let shards: Vec<&[u32]> = even_shares(&sorted, n_shards).collect();
    let order = stream.permutation(n_shards);
    let deal = |hand: &[u32]| hand.iter().flat_map(|&shard| shards[shard as usize]).copied().collect();
    Partition::from_lists("shards", order.chunks(n_shards_each).map(deal).collect(), n)
}
