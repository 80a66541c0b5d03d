//! Several steps of whole networks: a GPU against the CPU.

use crate::Suite;
use crate::backends::{Backend, random, random_labels, random_weights};
use crate::compare::{Group, difference};
use crate::training::Training;
use anyhow::Result;
use fedproj_nn::models::{self, Variant};
use fedproj_nn::{Graph, Rule, Shape};

const TOLERANCE_ONE_STEP: f64 = 1e-4;
/// Rounding errors grow from step to step.
const TOLERANCE_TEN_STEPS: f64 = 1e-3;
/// With this rate two instruction sets of the CPU differ by less than 5e-5 after ten steps. With 0.05, zero weights at the
/// start and noise as data they differ by 4e-2, and a comparison would show nothing.
const LR: f32 = 0.01;
/// For the difference of two nearly equal weights. Among a network's millions of values a few are so near a kink of a ReLU or
/// a pool that rounding decides their side, and each of them changes the gradient. An H200 and Winograd convolutions differ by
/// up to 1.6e-3. A wrong term of a gradient shows as 1e-1 or more.
const TOLERANCE_MOVEMENT: f64 = 1e-2;
const BATCH: usize = 64;
const LANES: usize = 2;

pub fn check(suite: &Suite, group: &mut Group) -> Result<()> {
    let shape = Shape::image(32, 32, 3);
    for name in ["cnn", "resnet8-thin", "resnet8"] {
        let graph = models::build(name, shape, 10, Variant::default())?;
        let (x, labels) = batch(shape);
        ten_steps(suite, group, name, &graph, (&x, &labels))?;
    }
    Ok(())
}

/// Ten steps on the same batch, against the CPU's.
pub fn ten_steps(suite: &Suite, group: &mut Group, name: &str, graph: &Graph, batch: (&[f32], &[u32])) -> Result<()> {
    let start = |lane: usize| (random_weights(graph, lane as u32), graph.init_buffers());
    let starts: Vec<_> = (0..LANES).map(start).collect();
    let training = |backend: &Backend| Training::new(backend, graph, Rule::sgd(LR), batch, &starts);
    let cpu = Backend::cpu(std::thread::available_parallelism().map_or(1, usize::from));
    let (mut found, mut expected) = (training(&Backend::Gpu(suite.gpu()?.clone()))?, training(&cpu)?);
    for step in 1..=10 {
        found.step()?;
        expected.step()?;
        let tolerance = match step {
            1 => TOLERANCE_ONE_STEP,
            10 => TOLERANCE_TEN_STEPS,
            _ => continue,
        };
        for (lane, (init, _)) in starts.iter().enumerate() {
            let what = format!("{name}, lane {lane}, step {step}:");
            let (found, expected) = (found.state(lane)?, expected.state(lane)?);
            group.compare_tensors(&what, graph.params(), &found.params, &expected.params, tolerance);
            group.compare_tensors(&what, graph.buffers(), &found.buffers, &expected.buffers, tolerance);
            let (found, expected) = (difference(&found.params, init), difference(&expected.params, init));
            group.compare(&format!("{what} movement"), &found, &expected, TOLERANCE_MOVEMENT);
        }
    }
    Ok(())
}

/// Ten patterns with noise. There is something to learn, so gradients are more than the noise of their batch.
fn batch(shape: Shape) -> (Vec<f32>, Vec<u32>) {
    let labels = random_labels(101, BATCH, 10);
    let (patterns, noise) = (random(102, 10 * shape.len()), random(100, BATCH * shape.len()));
    let pattern = |i: usize| patterns[labels[i / shape.len()] as usize * shape.len() + i % shape.len()];
    let x = noise.iter().enumerate().map(|(i, v)| 0.5 * v + pattern(i)).collect();
    (x, labels)
}
