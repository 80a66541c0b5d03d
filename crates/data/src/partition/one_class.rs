//! One class per client: client k holds samples of class k mod C only, shared evenly by the clients of a class.
//!
//! Every sample exactly once. Only which of a class's clients gets which sample is random.

use fedproj_rng::{Purpose, Stream};

use super::config::check_clients;
use super::{Partition, n_samples, share_classes};
use crate::error::{Error, Result};

pub(super) fn partition(classes: Vec<Vec<u32>>, n_clients: usize, seed: u64) -> Result<Partition> {
    let n_classes = classes.len();
    check_clients("one_class", n_samples(&classes), n_clients, 1)?;
    if n_clients < n_classes {
        let problem = format!("{n_clients} clients cannot hold {n_classes} classes");
        let hint = "raise clients, or use kind = \"labels\" with labels_per_client = 1, which leaves classes out";
        return Err(Error::impossible("one_class", problem, hint));
    }
    let mut stream = Stream::new(seed, Purpose::Partition, [0; 3]);
    let owners: Vec<Vec<usize>> = (0..n_classes).map(|c| (c..n_clients).step_by(n_classes).collect()).collect();
    share_classes("one_class", classes, &owners, n_clients, &mut stream, "lower clients")
}
