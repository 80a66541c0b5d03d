//! The members of the federation as the round loop sees them: which clients are out, and what their nodes are called.

use super::{NodeEntry, Registry, lock};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How old the known members may be. A revoked node's connections close within seconds too.
const AGE_MAX: Duration = Duration::from_secs(2);

/// The members, read from the registry's files now and then.
#[derive(Debug)]
pub struct Members {
    registry: Registry,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    read_at: Option<Instant>,
    /// Clients whose nodes were all revoked or have expired.
    out: BTreeSet<u32>,
    /// The name of each client's last node.
    names: BTreeMap<u32, String>,
}

impl Known {
    fn of(nodes: Vec<NodeEntry>) -> Self {
        let is_member = |node: &NodeEntry| node.is_out().is_none();
        let members: BTreeSet<u32> = nodes.iter().filter(|n| is_member(n)).map(|n| n.client).collect();
        let out = nodes.iter().map(|n| n.client).filter(|client| !members.contains(client)).collect();
        let (present, former): (Vec<_>, Vec<_>) = nodes.into_iter().partition(is_member);
        let names = former.into_iter().chain(present).map(|n| (n.client, n.name)).collect();
        Self { read_at: Some(Instant::now()), out, names }
    }
}

impl Members {
    /// The members of a registry.
    pub fn new(registry: Registry) -> Self {
        Self { registry, known: Mutex::default() }
    }

    fn known<T>(&self, look: impl FnOnce(&Known) -> T) -> T {
        let mut known = lock(&self.known);
        if known.read_at.is_none_or(|at| at.elapsed() > AGE_MAX) {
            match self.registry.nodes() {
                Ok(nodes) => *known = Known::of(nodes),
                Err(error) => tracing::warn!(%error, "cannot read the list of nodes"),
            }
        }
        look(&known)
    }

    /// Clients below `n` that are out: their nodes were revoked or have expired, and no other node has their place.
    pub fn out(&self, n: usize) -> BTreeSet<u32> {
        self.known(|known| known.out.iter().copied().filter(|client| (*client as usize) < n).collect())
    }

    /// The name of a client's node, as it is now.
    pub fn name(&self, client: u32) -> String {
        lock(&self.known).read_at = None;
        self.known(|known| known.names.get(&client).cloned().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_out_until_another_node_has_its_place() {
        let node = |name: &str, client, revoked| NodeEntry {
            name: name.into(),
            client,
            fingerprint: String::new(),
            revoked,
            expires: u64::MAX,
            trusts: String::new(),
            replaces: None,
        };
        let nodes = vec![node("a", 0, false), node("b", 1, true), node("c", 2, true), node("d", 2, false)];
        let known = Known::of(nodes);
        assert_eq!((known.out, &known.names[&2][..]), ([1].into(), "d"));
    }
}
