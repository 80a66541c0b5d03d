//! How much memory this machine, or the container on it, has, and whether a network fits into it.

use crate::config::{Config, OptimizerKind};
use crate::error::{Error, Result};
use fedproj_nn::Graph;
use std::path::Path;

/// Total and free memory in bytes, within the limit of a container; unknown where the system does not report them.
pub fn machine_memory() -> [Option<u64>; 2] {
    let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let limit = container_limit(&text("/proc/self/cgroup"), Path::new("/sys/fs/cgroup"));
    read(&text("/proc/meminfo")).map(|bytes| bytes.map(|bytes| limit.map_or(bytes, |limit| bytes.min(limit))))
}

/// The smallest memory limit of this process's control groups, of version 1 or 2. `groups` is `/proc/self/cgroup`; a
/// container may see its own group as the root.
fn container_limit(groups: &str, root: &Path) -> Option<u64> {
    let limits = groups.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let (folder, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => return Vec::new(),
        };
        let inner = folder.join(path.trim_start_matches('/'));
        let above = inner.ancestors().take_while(|above| above.starts_with(&folder));
        above.map(|above| above.join(file)).collect::<Vec<_>>()
    });
    limits.filter_map(|path| std::fs::read_to_string(path).ok()?.trim().parse().ok()).min()
}

fn read(meminfo: &str) -> [Option<u64>; 2] {
    let of = |key: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    [of("MemTotal:"), of("MemAvailable:")]
}

/// Vectors as long as the parameters that every participant holds: where the run starts, the server's, a client's.
pub(crate) const N_VECTORS_MIN: usize = 3;

/// The same for a simulation on the CPU: one per client of a round, and per thread the gradient and the optimiser's moments.
pub(crate) fn n_vectors(config: &Config, n_clients: usize, n_threads: usize) -> usize {
    let optimizer = &config.local.optimizer;
    let n_moments = match optimizer.kind {
        OptimizerKind::Sgd => usize::from(optimizer.momentum > 0.0),
        OptimizerKind::Adam | OptimizerKind::AdamW => 2,
    };
    let cohort = config.federation.cohort(n_clients);
    N_VECTORS_MIN + cohort + n_threads.min(cohort) * (1 + n_moments)
}

/// Rejects a network that cannot fit into this machine, before the allocator ends the process.
pub(crate) fn check_memory(graph: &Graph, n_vectors: usize) -> Result<()> {
    check(graph.params().len() as u64, n_vectors as u64, machine_memory()[0])
}

fn check(n_params: u64, n_vectors: u64, total: Option<u64>) -> Result<()> {
    let needed = n_params.saturating_mul(4).saturating_mul(n_vectors);
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30));
    match total.filter(|&total| needed > total) {
        None => Ok(()),
        Some(total) => Err(Error::config(format!(
            "the network has {n_params} parameters, and the run holds {n_vectors} vectors of that length: {} of memory, \
             but this machine has {}\nhint: choose narrower layers (model.hidden) or a smaller network (model.name)",
            gib(needed),
            gib(total)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_the_systems_table() {
        let table = "MemTotal:       2048 kB\nMemFree:         100 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(read(table), [Some(2 << 20), Some(1 << 20)]);
        assert_eq!(read(""), [None, None]);
    }

    #[test]
    fn a_container_may_have_less_than_the_machine() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let limit = |groups: &str| container_limit(groups, root.path());
        write("memory.max", "max\n");
        write("a/memory.max", "5000\n");
        write("a/b/memory.max", "max\n");
        assert_eq!((limit("0::/"), limit("0::/a/b\n"), limit("")), (None, Some(5000), None));
        // The path of the host, seen from within the container.
        assert_eq!(limit("0::/kubepods/pod1\n"), None);
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        write("memory/c/memory.limit_in_bytes", "7000\n");
        assert_eq!(limit("3:cpu,cpuacct:/c\n2:memory:/c\n"), Some(7000));
        write("memory.max", "6000\n");
        assert_eq!((limit("0::/kubepods/pod1\n"), limit("0::/a")), (Some(6000), Some(5000)));
    }

    #[test]
    fn a_network_that_does_not_fit_is_refused_with_the_figures() {
        assert!(check(1 << 20, 4, Some(16 << 20)).is_ok());
        assert!(check(u64::MAX, 4, None).is_ok(), "unknown memory refuses nothing");
        let message = check(1 << 30, 5, Some(16 << 30)).unwrap_err().to_string();
        assert!(message.contains("20.0 GiB of memory, but this machine has 16.0 GiB"), "{message}");
        let config = Config::from_layers(None, &["federation.fraction=0.3".into()]).unwrap();
        // Three clients on two threads; Adam keeps two moments beside the gradient.
        assert_eq!(n_vectors(&config, 10, 2), 3 + 3 + 2 * 3);
        assert_eq!(n_vectors(&config, 10, 64), 3 + 3 + 3 * 3);
    }
}
