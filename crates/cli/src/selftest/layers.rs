//! Every operation over odd shapes: logits, loss, gradients and running statistics of several lanes against the CPU.

use super::Setting;
use super::backends::{Samples, Start, cpu_pass, gpu_pass, random_buffers, random_weights};
use super::compare::Group;
use super::nets::{self, Net};
use anyhow::Result;
use fedproj_nn::NormMode;

const TOLERANCE: f64 = 1e-4;
const LANES: usize = 3;

pub fn check(setting: &Setting, group: &mut Group) -> Result<()> {
    for net in nets::all()? {
        let modes: &[(NormMode, &str)] = if net.has_batch_norm() {
            &[(NormMode::Update, "updating"), (NormMode::Batch, "batch"), (NormMode::Frozen, "frozen")]
        } else {
            &[(NormMode::Update, "")]
        };
        for (norm, mode) in modes {
            for (shorter, padding) in [(0, ""), (1, "padded")] {
                let what = [net.name.as_str(), mode, padding].join(" ");
                let what = what.trim_end();
                group.attempt(what, |group| compare(setting, group, &net, *norm, shorter, what));
            }
        }
    }
    Ok(())
}

/// Lane l lacks `shorter`·(l + 1) samples of its batch.
fn compare(setting: &Setting, group: &mut Group, net: &Net, norm: NormMode, shorter: usize, what: &str) -> Result<()> {
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
    let found = gpu_pass(setting.gpu()?, net, &samples, &starts, norm, true)?;
    for (lane, (found, start)) in found.iter().zip(&starts).enumerate() {
        let expected = cpu_pass(net, &samples, start, norm, true)?;
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
