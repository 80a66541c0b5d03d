//! Gradients against the slopes of a device's own losses.

use crate::Suite;
use crate::backends::{Passed, Samples, Start, random, random_buffers, random_weights};
use crate::compare::Group;
use crate::nets::Net;
use anyhow::Result;
use fedproj_nn::{Activation, Graph, NormMode, Shape, Window};

/// Half the distance between the two ends of a difference. A loss of about 1 is exact to about 1e-6, so a slope of a half is
/// exact to 1e-4 of itself. The error from curvature shrinks with the square of the step; it is a few 1e-3 for these networks.
/// A wrong term of a gradient shows as 1e-1 or more.
const STEP: f32 = 5e-3;
const TOLERANCE: f64 = 1e-2;
const DIRECTIONS: u32 = 4;

/// Passes of several networks.
type PassOf<'a> = &'a dyn Fn(&Net, &Samples, &[Start], NormMode) -> Result<Vec<Passed>>;

pub fn check(suite: &Suite, group: &mut Group) -> Result<()> {
    for backend in suite.backends() {
        let pass: PassOf<'_> = &|net, samples, starts, norm| backend.pass(net, samples, starts, norm);
        check_with(group, &backend.prefix(), pass)?;
    }
    Ok(())
}

fn check_with(group: &mut Group, prefix: &str, pass: PassOf<'_>) -> Result<()> {
    for net in nets()? {
        let samples = Samples::new(&net, net.batch);
        let (params, buffers) = (random_weights(&net.graph, 3), random_buffers(&net.graph, 3));
        let start = |params: Vec<f32>| {
            let samples = (0..net.batch as u32).collect();
            Start { params, buffers: buffers.clone(), samples, key: 5 }
        };
        let pass = |starts: &[Start]| pass(&net, &samples, starts, NormMode::Batch);
        let gradient = pass(&[start(params.clone())])?.remove(0).gradient;
        for id in 0..DIRECTIONS {
            let direction = direction(id, &gradient);
            let moved = |by: f32| start(params.iter().zip(&direction).map(|(w, d)| w + by * d).collect());
            // The two ends are lanes of one fleet.
            let ends = pass(&[moved(STEP), moved(-STEP)])?;
            let slope = (ends[0].loss - ends[1].loss) / f64::from(2.0 * STEP);
            let expected: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
            group.compare_numbers(&format!("{prefix}{}, direction {id}", net.name), slope, expected, TOLERANCE);
        }
    }
    Ok(())
}

/// A unit vector, half random and half along the gradient. Orthogonal to the gradient there is no slope to measure.
fn direction(id: u32, gradient: &[f32]) -> Vec<f32> {
    let norm = |v: &[f32]| v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt().max(1e-12) as f32;
    let noise = random(500 + id, gradient.len());
    let (of_noise, of_gradient) = (norm(&noise), norm(gradient));
    let sum: Vec<f32> = noise.iter().zip(gradient).map(|(n, g)| n / of_noise + g / of_gradient).collect();
    let of_sum = norm(&sum);
    sum.iter().map(|v| v / of_sum).collect()
}

/// Smooth networks, since a kink has no slope.
fn nets() -> Result<Vec<Net>> {
    let mut perceptron = Graph::new(Shape::vector(9));
    let x = perceptron.linear("fc1", perceptron.input(), 14, true)?;
    let x = perceptron.activation("tanh", x, Activation::Tanh)?;
    let x = perceptron.dropout("drop", x, 0.3)?;
    perceptron.linear("fc2", x, 5, true)?;
    let mut nets = vec![Net::new("perceptron", perceptron, 16)];
    for groups in [None, Some(2)] {
        let mut g = Graph::new(Shape::image(7, 6, 3));
        let norm = |g: &mut Graph, name: &str, x| match groups {
            Some(groups) => g.group_norm(name, x, groups),
            None => g.batch_norm(name, x),
        };
        let x = g.conv2d("conv1", g.input(), 8, Window::new(3, 1, 1), false)?;
        let x = norm(&mut g, "norm1", x)?;
        let first = g.activation("gelu", x, Activation::Gelu)?;
        let x = g.conv2d("conv2", first, 8, Window::new(3, 1, 1), false)?;
        let x = norm(&mut g, "norm2", x)?;
        let x = g.add("add", x, first)?;
        let x = g.activation("tanh", x, Activation::Tanh)?;
        let x = g.conv2d("conv3", x, 12, Window::new(3, 2, 1), true)?;
        let tap = g.activation("gelu2", x, Activation::Gelu)?;
        let x = g.global_average_pool("mean", tap)?;
        g.linear("fc", x, 6, true)?;
        let name = if groups.is_some() { "group-norm network" } else { "batch-norm network" };
        nets.push(Net { taps: vec![tap], ..Net::new(name, g, 8) });
    }
    Ok(nets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::Backend;

    #[test]
    fn a_wrong_gradient_is_noticed() -> Result<()> {
        let mut group = Group::default();
        let pass: PassOf<'_> = &|net, samples, starts, norm| {
            let mut passed = Backend::cpu(1).pass(net, samples, starts, norm)?;
            // The gradient of the first tensor is lost.
            for passed in &mut passed {
                passed.gradient[net.graph.params().spans()[0].range()].fill(0.0);
            }
            Ok(passed)
        };
        check_with(&mut group, "", pass)?;
        assert!(group.failures.len() > 6, "{:#?}", group.failures);
        Ok(())
    }
}
