//! The faster products (tf32, bf16) against the CPU, on convolutions of the shapes that they have kernels of their own for.

use crate::Suite;
use crate::backends::{Samples, Start, cpu_pass, gpu_evaluation, gpu_pass, random_weights};
use crate::compare::Group;
use crate::nets::{self, Net};
use anyhow::Result;
use fedproj_nn::cuda::{Gpu, Precision};
use fedproj_nn::{Cpu, NormMode};
use std::sync::Arc;

/// What rounding of the factors leaves over two layers: 10 and 7 bits. A wrong place or a missing margin shows as 1e-1.
pub const TOLERANCES: [(Precision, f64); 2] = [(Precision::Tf32, 5e-3), (Precision::Bf16, 3e-2)];
/// The same products and sums in the same order.
const TOLERANCE_JOINED: f64 = 1e-6;
const LANES: usize = 3;

pub fn check(suite: &Suite, group: &mut Group) -> Result<()> {
    for (precision, tolerance) in TOLERANCES {
        let gpu = Gpu::open(suite.ordinal, precision)?;
        for net in nets::square_convolutions()? {
            check_net(group, &gpu, &net, tolerance);
        }
        for net in nets::first_layers()? {
            check_evaluation(group, &gpu, &net);
            check_first_layer(group, &gpu, net);
        }
    }
    Ok(())
}

/// A pass of a cohort that does not train, whose first layer takes in its max-pool, against one that does.
fn check_evaluation(group: &mut Group, gpu: &Arc<Gpu>, net: &Net) {
    let what = format!("{} in {}", net.name, gpu.precision().name());
    group.attempt(&what, |group| {
        let samples = Samples::new(net, LANES * net.batch);
        let mut starts: Vec<Start> = (0..LANES).map(|lane| start(net, lane)).collect();
        let trained = gpu_pass(gpu, net, &samples, &starts, NormMode::Update)?;
        for (start, passed) in starts.iter_mut().zip(trained) {
            start.buffers = passed.buffers;
        }
        let expected = gpu_pass(gpu, net, &samples, &starts, NormMode::Frozen)?;
        for (lane, found) in gpu_evaluation(gpu, net, &samples, &starts)?.iter().enumerate() {
            group.compare(&format!("{what}, lane {lane}: logits"), found, &expected[lane].logits, TOLERANCE_JOINED);
        }
        Ok(())
    });
}

/// Gradients of a first layer, computed together with what comes back through its max-pool, against those of one whose result is observed,
/// which is computed step by step: bit for bit.
fn check_first_layer(group: &mut Group, gpu: &Arc<Gpu>, net: Net) {
    let what = format!("{} in {}", net.name, gpu.precision().name());
    group.attempt(&what, |group| {
        // Drawn before anything is tapped: nothing but the loss of the logits is to reach the layer.
        let samples = Samples::new(&net, LANES * net.batch);
        let starts: Vec<Start> = (0..LANES).map(|lane| start(&net, lane)).collect();
        let modes = [NormMode::Update, NormMode::Frozen];
        let pass = |net: &Net| modes.map(|mode| gpu_pass(gpu, net, &samples, &starts, mode));
        let joined = pass(&net);
        let apart = pass(&net.tapped(&["conv"]));
        for (joined, apart) in joined.into_iter().zip(apart) {
            for (lane, (joined, apart)) in joined?.iter().zip(&apart?).enumerate() {
                let bits = |gradient: &[f32]| gradient.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                let same = bits(&joined.gradient) == bits(&apart.gradient);
                let what = format!("{what}, lane {lane}: gradients have the bytes that they have step by step;");
                group.require(same, &what);
            }
        }
        Ok(())
    });
}

/// Passes of a network against the CPU's, and a lane alone against the same lane among others.
pub fn check_net(group: &mut Group, gpu: &Arc<Gpu>, net: &Net, tolerance: f64) {
    let what = format!("{} in {}", net.name, gpu.precision().name());
    group.attempt(&what, |group| {
        let samples = Samples::new(net, LANES * net.batch);
        let starts: Vec<Start> = (0..LANES).map(|lane| start(net, lane)).collect();
        let together = gpu_pass(gpu, net, &samples, &starts, NormMode::Update)?;
        for (lane, (found, start)) in together.iter().zip(&starts).enumerate() {
            let expected = cpu_pass(Cpu::new(2), net, &samples, start, NormMode::Update)?;
            let what = format!("{what}, lane {lane}:");
            group.compare(&format!("{what} logits"), &found.logits, &expected.logits, tolerance);
            let (place, params) = (format!("{what} gradient of"), net.graph.params());
            group.compare_tensors(&place, params, &found.gradient, &expected.gradient, tolerance);
            for ((tap, found), expected) in net.taps.iter().zip(&found.taps).zip(&expected.taps) {
                let place = format!("{what} gradient at {}", net.graph.name(*tap));
                group.compare(&place, found, expected, tolerance);
            }
        }
        // Which tiles compute a product depends on how many lanes there are; its bytes must not.
        let alone = gpu_pass(gpu, net, &samples, &starts[1..2], NormMode::Update)?;
        let same = alone[0].logits == together[1].logits && alone[0].gradient == together[1].gradient;
        group.require(same, &format!("{what}: a lane alone has the bytes that it has among others;"));
        Ok(())
    });
}

/// Lane l lacks l samples of its batch.
fn start(net: &Net, lane: usize) -> Start {
    Start {
        params: random_weights(&net.graph, lane as u32),
        buffers: net.graph.init_buffers(),
        samples: (0..net.batch - lane).map(|i| (i * LANES + lane) as u32).collect(),
        key: 77 + lane as u64,
    }
}
