//! Who holds which samples.
//!
//! A [`PartitionConfig`] describes a scheme, a [`Partition`] is the result. Each scheme is one file; its guarantees
//! (every sample exactly once, a minimum per client) are at its top. A partition depends on data, configuration
//! and seed alone, so that methods are compared on equal terms.

mod config;
mod dirichlet;
mod explicit;
mod iid;
mod labels;
mod natural;
mod one_class;
mod quantity;
mod shards;

use std::borrow::Cow;

use fedproj_rng::{Purpose, Stream};

pub use config::PartitionConfig;

use crate::error::{Error, Result};

/// The samples of each client.
///
/// ```
/// use fedproj_data::Partition;
///
/// let partition = Partition::from_lists("explicit", vec![vec![0, 2], vec![1]], 3)?;
/// assert_eq!(*partition.indices(0), [0, 2]);
/// assert_eq!(partition.sizes().collect::<Vec<_>>(), [2, 1]);
/// # Ok::<(), fedproj_data::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Partition {
    clients: Clients,
    n_moved: usize,
}

#[derive(Clone, Debug, PartialEq)]
enum Clients {
    /// The samples of client k are `indices[offsets[k]..offsets[k + 1]]`.
    Listed { offsets: Vec<usize>, indices: Vec<u32> },
    /// Each client draws `n_draws` of `n_samples` samples by its own stream whenever it is asked.
    Virtual { n_clients: usize, n_draws: u32, n_samples: u32, seed: u64 },
}

impl Partition {
    /// A partition from one list of samples per client; the samples of a client are put in increasing order.
    ///
    /// # Errors
    /// If there is no client, a client is empty, a sample is out of range, or one is held twice.
    pub fn from_lists(kind: &'static str, mut lists: Vec<Vec<u32>>, n_samples: usize) -> Result<Self> {
        let hint = "each client needs at least one sample, and no sample may be given twice";
        let impossible = |problem| Err(Error::impossible(kind, problem, hint));
        let mut owners = vec![u32::MAX; n_samples];
        let mut offsets = vec![0];
        let mut indices = Vec::new();
        for (client, list) in lists.iter_mut().enumerate() {
            list.sort_unstable();
            for &index in &*list {
                match owners.get_mut(index as usize) {
                    None => {
                        return impossible(format!(
                            "client {client} holds sample {index}, but there are only {n_samples}"
                        ));
                    }
                    Some(owner) if *owner != u32::MAX => {
                        return impossible(format!(
                            "sample {index} is held by client {owner} and again by client {client}"
                        ));
                    }
                    Some(owner) => *owner = client as u32,
                }
            }
            if list.is_empty() {
                return impossible(format!("client {client} holds no sample"));
            }
            indices.extend_from_slice(list);
            offsets.push(indices.len());
        }
        if lists.is_empty() {
            return impossible("there is no client".into());
        }
        Ok(Self { clients: Clients::Listed { offsets, indices }, n_moved: 0 })
    }

    /// Clients without memory of their own: each draws `n_draws` distinct samples by the seed when asked.
    ///
    /// # Errors
    /// If there is no client, nothing to draw, or fewer samples than a client draws.
    pub fn virtual_clients(n_clients: usize, n_draws: usize, n_samples: usize, seed: u64) -> Result<Self> {
        let fits = u32::try_from(n_clients).is_ok() && u32::try_from(n_samples).is_ok();
        if n_clients == 0 || n_draws == 0 || n_draws > n_samples || !fits {
            let problem = format!("{n_clients} clients draw {n_draws} of {n_samples} samples each");
            return Err(Error::impossible("virtual", problem, "lower samples, and keep it and clients above 0"));
        }
        let (n_draws, n_samples) = (n_draws as u32, n_samples as u32);
        Ok(Self { clients: Clients::Virtual { n_clients, n_draws, n_samples, seed }, n_moved: 0 })
    }

    /// One client that holds all samples, as a node of a real federation sees it. Nothing is known here about the clients
    /// before it.
    pub fn sole(client: u32, n_samples: usize) -> Self {
        let mut offsets = vec![0; client as usize + 1];
        offsets.push(n_samples);
        Self { clients: Clients::Listed { offsets, indices: (0..n_samples as u32).collect() }, n_moved: 0 }
    }

    /// How many clients there are.
    pub fn n_clients(&self) -> usize {
        match &self.clients {
            Clients::Listed { offsets, .. } => offsets.len() - 1,
            Clients::Virtual { n_clients, .. } => *n_clients,
        }
    }

    /// The samples of `client`, in increasing order.
    ///
    /// # Panics
    /// If there is no such client.
    pub fn indices(&self, client: usize) -> Cow<'_, [u32]> {
        match &self.clients {
            Clients::Listed { offsets, indices } => Cow::Borrowed(&indices[offsets[client]..offsets[client + 1]]),
            Clients::Virtual { n_clients, n_draws, n_samples, seed } => {
                assert!(client < *n_clients, "client {client} of {n_clients}");
                let mut stream = Stream::new(*seed, Purpose::VirtualClient, [client as u32, 0, 0]);
                Cow::Owned(stream.choose(*n_samples, *n_draws))
            }
        }
    }

    /// How many samples `client` holds.
    ///
    /// # Panics
    /// If there is no such client.
    pub fn size(&self, client: usize) -> usize {
        match &self.clients {
            Clients::Listed { offsets, .. } => offsets[client + 1] - offsets[client],
            Clients::Virtual { n_draws, .. } => *n_draws as usize,
        }
    }

    /// How many samples each client holds.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.n_clients()).map(|client| self.size(client))
    }

    /// How many samples were moved between clients to reach the minimum that no draw reached by itself; 0 for most
    /// partitions. A caller should report any other value to its user.
    pub fn n_moved(&self) -> usize {
        self.n_moved
    }

    /// How many samples of each class `client` holds.
    ///
    /// # Panics
    /// If `labels` are not those of the partitioned data.
    pub fn class_counts(&self, client: usize, labels: &[u32], n_classes: usize) -> Vec<u32> {
        let mut counts = vec![0; n_classes];
        for &index in &*self.indices(client) {
            counts[labels[index as usize] as usize] += 1;
        }
        counts
    }

    /// Label skew between 0 (every client is a small copy of the whole) and nearly 1.
    ///
    /// It is the mean over clients of the total-variation distance ½ Σ |`p_k` − p| between the client's label
    /// distribution `p_k` and the distribution p of all labels.
    ///
    /// # Panics
    /// If `labels` are not those of the partitioned data.
    pub fn skew_index(&self, labels: &[u32], n_classes: usize) -> f64 {
        let mut global = vec![0.0; n_classes];
        for &label in labels {
            global[label as usize] += 1.0 / labels.len() as f64;
        }
        let distance = |client| {
            let size = self.size(client) as f64;
            let counts = self.class_counts(client, labels, n_classes);
            counts.iter().zip(&global).map(|(&n, p)| (f64::from(n) / size - p).abs()).sum::<f64>() / 2.0
        };
        (0..self.n_clients()).map(distance).sum::<f64>() / self.n_clients() as f64
    }
}

/// How many samples all classes have.
fn n_samples(classes: &[Vec<u32>]) -> usize {
    classes.iter().map(Vec::len).sum()
}

/// Shares the samples of each class evenly among its owners, in an order of the stream.
fn share_classes(
    kind: &'static str,
    classes: Vec<Vec<u32>>,
    owners: &[Vec<usize>],
    n_clients: usize,
    stream: &mut Stream,
    hint: &str,
) -> Result<Partition> {
    let (n, mut lists) = (n_samples(&classes), vec![Vec::new(); n_clients]);
    for (class, (mut samples, owners)) in classes.into_iter().zip(owners).enumerate() {
        if samples.len() < owners.len() {
            let problem = format!("{} clients share the {} samples of class {class}", owners.len(), samples.len());
            return Err(Error::impossible(kind, problem, hint));
        }
        stream.shuffle(&mut samples);
        for (share, &owner) in even_shares(&samples, owners.len()).zip(owners) {
            lists[owner].extend_from_slice(share);
        }
    }
    Partition::from_lists(kind, lists, n)
}

/// Splits `samples` into `n_shares` lists; their sizes differ by at most one.
fn even_shares(samples: &[u32], n_shares: usize) -> impl Iterator<Item = &[u32]> {
    let cut = move |share: usize| share * samples.len() / n_shares;
    (0..n_shares).map(move |share| &samples[cut(share)..cut(share + 1)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sole_client_holds_everything() {
        let partition = Partition::sole(3, 5);
        assert_eq!((partition.n_clients(), partition.size(2)), (4, 0));
        assert_eq!(*partition.indices(3), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn lists_that_overlap_overflow_or_are_empty_are_refused() {
        let message = |lists| Partition::from_lists("explicit", lists, 4).unwrap_err().to_string();
        assert!(message(vec![vec![0, 4]]).contains("client 0 holds sample 4, but there are only 4"));
        assert!(message(vec![vec![0, 1], vec![1]]).contains("sample 1 is held by client 0 and again by client 1"));
        assert!(message(vec![vec![2, 2]]).contains("sample 2"));
        assert!(message(vec![vec![2], vec![]]).contains("client 1 holds no sample"));
        assert!(message(vec![]).contains("no client"));
    }

    #[test]
    fn a_million_virtual_clients_cost_nothing_until_asked() {
        let partition = Partition::virtual_clients(1_000_000, 5, 1797, 3).unwrap();
        assert_eq!(partition.n_clients(), 1_000_000);
        let last = partition.indices(999_999);
        assert!(last.len() == 5 && last.windows(2).all(|w| w[0] < w[1]) && last[4] < 1797);
        assert_eq!(last, partition.indices(999_999));
        assert_ne!(last, partition.indices(0));
        assert!(Partition::virtual_clients(10, 6, 5, 0).is_err());
        assert!(Partition::virtual_clients(0, 1, 5, 0).is_err());
        assert!(Partition::virtual_clients(1, 0, 5, 0).is_err());
    }

    #[test]
    fn skew_index_by_hand() {
        let labels = [0, 0, 1, 1];
        let skew = |lists| Partition::from_lists("explicit", lists, 4).unwrap().skew_index(&labels, 2);
        assert_eq!(skew(vec![vec![0, 2], vec![1, 3]]), 0.0);
        assert_eq!(skew(vec![vec![0, 1], vec![2, 3]]), 0.5);
        assert_eq!(skew(vec![vec![0], vec![1, 2, 3]]), f64::midpoint(0.5, 1.0 / 6.0));
    }
}
