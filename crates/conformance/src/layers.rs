//! Every operation over odd shapes: logits, loss, gradients and running statistics of several lanes.

use crate::Suite;
use crate::backends::{Backend, Samples, Start, random_buffers, random_weights};
use crate::compare::Group;
use crate::heads;
use crate::nets::{self, Net};
use anyhow::Result;
use fedproj_nn::{Isa, NormMode};

const TOLERANCE: f64 = 1e-4;
const LANES: usize = 3;

pub fn check(suite: &Suite, group: &mut Group) -> Result<()> {
    check_nets(suite, group, &nets::all()?);
    suite.device.gpu().map_or(Ok(()), |gpu| heads::check(gpu, group))
}

/// Passes of networks on a GPU against the CPU's, or on each instruction set of the CPU against portable code.
pub fn check_nets(suite: &Suite, group: &mut Group, nets: &[Net]) {
    let reference = Backend::Cpu(if suite.device.gpu().is_some() { Isa::detect() } else { Isa::PORTABLE }, 1);
    let backends = suite.backends().into_iter().filter(|b| !matches!(b, Backend::Cpu(Isa::PORTABLE, _)));
    for backend in backends {
        for net in nets {
            let modes: &[(NormMode, &str)] = if net.has_batch_norm() {
                &[(NormMode::Update, "updating"), (NormMode::Batch, "batch"), (NormMode::Frozen, "frozen")]
            } else {
                &[(NormMode::Update, "")]
            };
            for (norm, mode) in modes {
                for (shorter, padding) in [(0, ""), (1, "padded")] {
                    let what = backend.prefix() + [net.name.as_str(), mode, padding].join(" ").trim_end();
                    group.attempt(&what, |group| compare(group, (&backend, &reference), net, *norm, shorter, &what));
                }
            }
        }
    }
}

/// Lane l lacks `shorter`·(l + 1) samples of its batch.
fn compare(
    group: &mut Group,
    (backend, reference): (&Backend, &Backend),
    net: &Net,
    norm: NormMode,
    shorter: usize,
    what: &str,
) -> Result<()> {
    let samples = Samples::new(net, LANES * net.batch);
    let start = |lane: usize| {
        let n_valid = net.batch.saturating_sub(shorter * (lane + 1)).max(1);
        Start {
            params: random_weights(&net.graph, lane as u32),
            buffers: random_buffers(&net.graph, lane as u32),
            // Neighbours in a batch are not neighbours in the data.
            samples: (0..n_valid).map(|i| (i * LANES + lane) as u32).collect(),
            key: 77 + lane as u64,
        }
    };
    let starts: Vec<Start> = (0..LANES).map(start).collect();
    let found = backend.pass(net, &samples, &starts, norm)?;
    let expected = reference.pass(net, &samples, &starts, norm)?;
    for (lane, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let what = format!("{what}, lane {lane}:");
        found.compare(group, &what, net, expected, TOLERANCE);
        group.compare_numbers(&format!("{what} loss"), found.loss, expected.loss, TOLERANCE);
        group.compare_tensors(&what, net.graph.buffers(), &found.buffers, &expected.buffers, TOLERANCE);
    }
    Ok(())
}
