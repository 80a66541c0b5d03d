//! A fixed number of classes per client ("#C = k" of NIID-Bench).
//!
//! Clients choose in turn, each the k classes with the fewest owners so far, ties at random; a class is then shared
//! evenly by its owners. Owners of two classes differ by at most one in number, so every sample is assigned exactly
//! once if clients · k ≥ classes. With fewer slots, samples of the classes left over belong to nobody.

use fedproj_rng::{Purpose, Stream};

use super::config::check_clients;
use super::{Partition, n_samples, share_classes};
use crate::error::{Error, Result};

pub(super) fn partition(
    classes: Vec<Vec<u32>>,
    n_clients: usize,
    n_labels_each: usize,
    seed: u64,
) -> Result<Partition> {
    let n_classes = classes.len();
    check_clients("labels", n_samples(&classes), n_clients, 1)?;
    if n_labels_each == 0 || n_labels_each > n_classes {
        let problem = format!("it asks for {n_labels_each} classes per client, but there are {n_classes}");
        return Err(Error::impossible("labels", problem, "set labels_per_client between 1 and the number of classes"));
    }
    let mut stream = Stream::new(seed, Purpose::Partition, [0; 3]);
    let mut owners: Vec<Vec<usize>> = vec![Vec::new(); n_classes];
    for client in 0..n_clients {
        let mut choice = stream.permutation(n_classes);
        choice.sort_by_key(|&class| owners[class as usize].len());
        for &class in &choice[..n_labels_each] {
            owners[class as usize].push(client);
        }
    }
    share_classes("labels", classes, &owners, n_clients, &mut stream, "lower clients or labels_per_client")
}
