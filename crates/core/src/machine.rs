//! How much memory this machine has, and whether a network fits into it.

use crate::config::{Config, OptimizerKind};
use crate::error::{Error, Result};
use fedproj_nn::Graph;

/// Total and free memory in bytes; unknown where the system does not report them.
pub fn memory() -> [Option<u64>; 2] {
    read(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default())
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
    check(graph.params().len() as u64, n_vectors as u64, memory()[0])
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
