//! One class per client: client k holds samples of class k mod C only, shared evenly by the clients of a class.
//!
//! Every sample exactly once. Only which of a class's clients gets which sample is random.

use fedproj_rng::{Purpose, Stream};

use super::config::check_clients;
use super::{Partition, even_shares};
use crate::error::{Error, Result};
use crate::split::indices_by_class;

pub(super) fn partition(labels: &[u32], n_classes: usize, n_clients: usize, seed: u64) -> Result<Partition> {
    check_clients("one_class", labels.len(), n_clients, 1)?;
    if n_clients < n_classes {
        let problem = format!("{n_clients} clients cannot hold {n_classes} classes");
        let hint = "raise clients, or use kind = \"labels\" with labels_per_client = 1, which leaves classes out";
        return Err(Error::impossible("one_class", problem, hint));
    }
    let mut stream = Stream::new(seed, Purpose::Partition, [0; 3]);
    let mut lists = vec![Vec::new(); n_clients];
    for (class, mut samples) in indices_by_class(labels, n_classes).into_iter().enumerate() {
        let owners = (class..n_clients).step_by(n_classes);
        if samples.len() < owners.len() {
            let problem = format!("{} clients share the {} samples of class {class}", owners.len(), samples.len());
            return Err(Error::impossible("one_class", problem, "lower clients"));
        }
        stream.shuffle(&mut samples);
        for (share, owner) in even_shares(&samples, owners.len()).zip(owners) {
            lists[owner].extend_from_slice(share);
        }
    }
    Partition::from_lists("one_class", lists, labels.len())
}
