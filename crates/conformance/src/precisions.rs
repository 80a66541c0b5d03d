//! The faster products (tf32, bf16) against the CPU, on convolutions of shapes that have kernels of their own.

use crate::Suite;
use crate::backends::{Backend, Samples, Start, gpu_evaluation, gpu_pass, random_weights};
use crate::compare::Group;
use crate::nets::{self, Net};
use anyhow::Result;
use fedproj_nn::NormMode;
use fedproj_nn::cuda::{Gpu, Precision};
use std::sync::Arc;

/// What rounding of the factors leaves over two layers: 10 and 7 bits. A wrong place or a missing margin shows as 1e-1.
pub const TOLERANCES: [(Precision, f64); 2] = [(Precision::Tf32, 5e-3), (Precision::Bf16, 3e-2)];
/// The same products and sums in the same order.
const TOLERANCE_JOINED: f64 = 1e-6;
const LANES: usize = 3;

pub fn check(suite: &Suite, group: &mut Group) -> Result<()> {
    for (precision, tolerance) in TOLERANCES {
        let gpu = suite.gpu_in(precision)?;
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

/// A pass of a fleet that does not train, whose first layer fuses its max-pool, against one that does.
fn check_evaluation(group: &mut Group, gpu: &Arc<Gpu>, net: &Net) {
    let what = format!("{} in {}", net.name, gpu.precision().name());
    group.attempt(&what, |group| {
        let (samples, mut starts) = draw(net);
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

/// Gradients of a first layer, fused with the backward pass of its max-pool, bit for bit against those of an observed
/// layer, which are computed step by step.
fn check_first_layer(group: &mut Group, gpu: &Arc<Gpu>, net: Net) {
    let what = format!("{} in {}", net.name, gpu.precision().name());
    group.attempt(&what, |group| {
        // Drawn before anything is tapped: nothing but the loss of the logits is to reach the layer.
        let (samples, starts) = draw(&net);
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
        let (samples, starts) = draw(net);
        let together = gpu_pass(gpu, net, &samples, &starts, NormMode::Update)?;
        let expected = Backend::cpu(2).pass(net, &samples, &starts, NormMode::Update)?;
        for (lane, (found, expected)) in together.iter().zip(&expected).enumerate() {
            found.compare(group, &format!("{what}, lane {lane}:"), net, expected, tolerance);
        }
        // Which tiles compute a product depends on how many lanes there are; its bytes must not.
        let alone = gpu_pass(gpu, net, &samples, &starts[1..2], NormMode::Update)?;
        let same = alone[0].logits == together[1].logits && alone[0].gradient == together[1].gradient;
        group.require(same, &format!("{what}: a lane alone has the bytes that it has among others;"));
        Ok(())
    });
}

/// Samples and where each lane starts; lane l lacks l samples of its batch.
fn draw(net: &Net) -> (Samples, Vec<Start>) {
    let start = |lane: usize| Start {
        params: random_weights(&net.graph, lane as u32),
        buffers: net.graph.init_buffers(),
        samples: (0..net.batch - lane).map(|i| (i * LANES + lane) as u32).collect(),
        key: 77 + lane as u64,
    };
    (Samples::new(net, LANES * net.batch), (0..LANES).map(start).collect())
}
