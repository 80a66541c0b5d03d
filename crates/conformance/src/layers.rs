//! Every operation over odd shapes: logits, loss, gradients and running statistics of several lanes against the CPU.

use crate::Suite;
use crate::backends::{PassOf, Samples, Start, cpu_pass, gpu_pass, random_buffers, random_weights};
use crate::compare::Group;
use crate::nets::{self, Net};
use anyhow::Result;
use fedproj_nn::{Cpu, NormMode};

const TOLERANCE: f64 = 1e-4;
const LANES: usize = 3;

pub fn check(suite: &Suite, group: &mut Group) -> Result<()> {
    let gpu = suite.gpu()?;
    check_nets(group, nets::all()?, &|net, samples, starts, norm| gpu_pass(gpu, net, samples, starts, norm));
    Ok(())
}

/// Passes of networks against the CPU's.
pub fn check_nets(group: &mut Group, nets: Vec<Net>, pass: PassOf<'_>) {
    for net in nets {
        let modes: &[(NormMode, &str)] = if net.has_batch_norm() {
            &[(NormMode::Update, "updating"), (NormMode::Batch, "batch"), (NormMode::Frozen, "frozen")]
        } else {
            &[(NormMode::Update, "")]
        };
        for (norm, mode) in modes {
            for (shorter, padding) in [(0, ""), (1, "padded")] {
                let what = [net.name.as_str(), mode, padding].join(" ");
                let what = what.trim_end();
                group.attempt(what, |group| compare(group, pass, &net, *norm, shorter, what));
            }
        }
    }
}

/// Lane l lacks `shorter`·(l + 1) samples of its batch.
fn compare(group: &mut Group, pass: PassOf<'_>, net: &Net, norm: NormMode, shorter: usize, what: &str) -> Result<()> {
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
    let found = pass(net, &samples, &starts, norm)?;
    for (lane, (found, start)) in found.iter().zip(&starts).enumerate() {
        let expected = cpu_pass(Cpu::new(1), net, &samples, start, norm)?;
        let what = format!("{what}, lane {lane}:");
        group.compare(&format!("{what} logits"), &found.logits, &expected.logits, TOLERANCE);
        group.compare_numbers(&format!("{what} loss"), found.loss, expected.loss, TOLERANCE);
        let (params, buffers) = (net.graph.params(), net.graph.buffers());
        let place = format!("{what} gradient of");
        group.compare_tensors(&place, params, &found.gradient, &expected.gradient, TOLERANCE);
        group.compare_tensors(&what, buffers, &found.buffers, &expected.buffers, TOLERANCE);
        for ((tap, found), expected) in net.taps.iter().zip(&found.taps).zip(&expected.taps) {
            let place = format!("{what} gradient at {}", net.graph.name(*tap));
            group.compare(&place, found, expected, TOLERANCE);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::texts;
    use super::*;
    use fedproj_nn::Isa;

    /// The harness without a GPU: two ways to compute that round differently stay well within the tolerance, so that what
    /// fails on a GPU is not a network that cannot be compared.
    #[test]
    fn instruction_sets_agree_on_every_network() {
        for isa in Isa::available() {
            let mut group = Group::default();
            let pass = |net: &Net, samples: &Samples, starts: &[Start], norm| {
                starts.iter().map(|start| cpu_pass(Cpu::with_isa(1, isa), net, samples, start, norm)).collect()
            };
            check_nets(&mut group, nets::all().unwrap(), &pass);
            check_nets(&mut group, texts::nets().unwrap(), &pass);
            assert!(group.failures.is_empty(), "{isa:?}: {:#?}", group.failures);
            assert!(group.n_compared > 2000);
            assert!(group.worst.as_ref().is_some_and(|w| w.error < 0.5 * w.tolerance), "{isa:?}: {:?}", group.worst);
        }
    }
}
