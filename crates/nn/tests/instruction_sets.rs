//! Every instruction set against the portable one and against the double-precision oracle: values of all nodes, running
//! statistics and gradients, over shapes that leave partial vectors everywhere.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod reference;

use fedproj_nn::{Activation, Cpu, Isa, NormMode, Shape, Window};
use reference::{Kind, Layer, Net, Problem, RELU, TANH, conv, conv_bias, linear, relative_error, standardized_conv};

/// Relative L2 error of a tensor. A sum of n products carries an error of about √n·6e-8 of its terms; the F(4×4)
/// transforms multiply that by up to 100 (Lavin and Gray report 1e-5 to 1e-4 for single layers), and a layer adds its
/// own.
const TOLERANCE: f64 = 1e-4;

/// Values of every node, buffers and gradients on each instruction set, against the oracle and the portable engine.
fn check(net: &Net, batch: usize, norm: NormMode) {
    let problem = Problem::at_output(net.clone(), batch, norm, Kind::Squared, 21);
    let exact: Vec<f64> = problem.params.iter().map(|&v| f64::from(v)).collect();
    let expected = problem.exact(&exact, None);
    let all: Vec<usize> = (0..=net.last()).collect();
    let portable = problem.run(Cpu::with_isa(1, Isa::PORTABLE), &[]);
    for isa in Isa::available() {
        let what = format!("{net:?}, batch {batch}, {norm:?} on {isa:?}");
        let close = |name: &str, found: &[f32], expected: &[f64]| {
            let error = relative_error(found, expected);
            assert!(error <= TOLERANCE, "{what}: {name}: error {error:.1e}");
        };
        // Fused, as training runs, and with every node observed, which fuses nothing.
        let (fused, observed) = (problem.run(Cpu::with_isa(1, isa), &[0]), problem.run(Cpu::with_isa(1, isa), &all));
        close("output", &fused.output, &expected.nodes[net.last()]);
        for (node, value) in observed.values.iter().enumerate() {
            close(&format!("n{node}"), value, &expected.nodes[node]);
        }
        for run in [&fused, &observed] {
            if !run.buffers.is_empty() {
                close("running statistics", &run.buffers, &expected.buffers);
            }
            for span in problem.graph.params().spans() {
                let portable: Vec<f64> = portable.grad[span.range()].iter().map(|&v| f64::from(v)).collect();
                close(
                    &format!("gradient of {} against the portable one", span.name),
                    &run.grad[span.range()],
                    &portable,
                );
            }
        }
    }
}

#[test]
fn this_machine_lists_its_instruction_sets_from_plain_to_best() {
    let all = Isa::available();
    assert_eq!(all[0], Isa::PORTABLE);
    assert_eq!(all.last(), Some(&Isa::detect()));
    let names: std::collections::BTreeSet<&str> = all.iter().map(|isa| isa.name()).collect();
    assert_eq!(names.len(), all.len());
    #[cfg(target_arch = "x86_64")]
    assert_eq!(all.len() > 1, is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"));
}

#[test]
fn convolutions_agree() {
    for (from, to) in [(1, 1), (3, 17), (8, 8), (16, 24), (17, 65), (64, 9), (65, 64)] {
        for (h, w, kernel, stride, padding) in [
            (1, 1, 3, 1, 1),
            (5, 9, 3, 1, 1),
            (7, 6, 3, 1, 0),
            (4, 11, 3, 2, 1),
            (6, 5, 1, 1, 0),
            (9, 7, 5, 3, 2),
            (5, 5, 2, 1, 0),
        ] {
            let net = Net::chain(Shape::image(h, w, from), &[conv_bias(to, kernel, stride, padding), RELU]);
            check(&net, 2, NormMode::Frozen);
            if kernel * kernel * from > 1 {
                let standardized = standardized_conv(to, kernel, stride, padding);
                check(&Net::chain(Shape::image(h, w, from), &[standardized, RELU]), 2, NormMode::Frozen);
            }
        }
    }
}

#[test]
fn winograd_convolutions_agree_over_all_tile_remainders() {
    for h in 1..=9 {
        for padding in [0, 1, 2] {
            let w = h + padding;
            if h + 2 * padding >= 3 {
                check(&Net::chain(Shape::image(h, w, 9), &[conv(19, 3, 1, padding)]), 3, NormMode::Frozen);
            }
        }
    }
}

#[test]
fn linear_layers_agree() {
    for inputs in [1, 7, 8, 9, 15, 16, 17, 33, 63, 65, 513] {
        for (outputs, batch) in [(1, 1), (3, 5), (8, 32), (31, 33), (64, 6), (67, 50), (129, 4)] {
            check(&Net::chain(Shape::vector(inputs), &[linear(outputs), RELU]), batch, NormMode::Frozen);
        }
    }
    check(&Net::chain(Shape::vector(2049), &[linear(35)]), 40, NormMode::Frozen);
}

#[test]
fn normalisations_agree() {
    for channels in [1, 3, 8, 17, 65, 255, 256, 257] {
        let image = Shape::image(5, 3, channels);
        for norm in [NormMode::Update, NormMode::Batch, NormMode::Frozen] {
            check(&Net::chain(image, &[Layer::BatchNorm, RELU]), 3, norm);
            // The tanh keeps the convolution's gradient away from 0, which it is where a scale is normalised away.
            let net = Net::chain(image, &[conv(channels, 1, 1, 0), TANH, Layer::BatchNorm]);
            check(&net.then(Layer::Add(0)), 3, norm);
        }
        for groups in [1, channels] {
            check(&Net::chain(image, &[Layer::GroupNorm(groups), RELU]), 3, NormMode::Frozen);
        }
    }
}

#[test]
fn batch_norm_keeps_its_digits_when_the_mean_is_large() {
    // Deviations of 1 about a mean of 1000: one pass over plain squares would lose six of seven digits.
    let mut problem = Problem::at_output(
        Net::chain(Shape::image(6, 7, 5), &[Layer::BatchNorm]),
        4,
        NormMode::Batch,
        Kind::Squared,
        22,
    );
    problem.x.iter_mut().for_each(|v| *v += 1000.0);
    let exact: Vec<f64> = problem.params.iter().map(|&v| f64::from(v)).collect();
    let expected = problem.exact(&exact, None);
    for isa in Isa::available() {
        let run = problem.run(Cpu::with_isa(1, isa), &[]);
        // 1000 itself is rounded to 6e-5 where scale and shift are applied.
        let error = relative_error(&run.output, &expected.nodes[1]);
        assert!(error < 2e-4, "{isa:?}: {error:e}");
    }
}

#[test]
fn the_other_layers_agree() {
    for channels in [1, 15, 16, 17, 40] {
        let image = Shape::image(7, 5, channels);
        for f in [Activation::Relu, Activation::Gelu, Activation::Tanh] {
            check(&Net::chain(image, &[Layer::Activation(f)]), 2, NormMode::Frozen);
        }
        for (kernel, stride, padding) in [(2, 2, 0), (3, 2, 1), (3, 1, 1), (1, 3, 0), (4, 3, 2)] {
            check(&Net::chain(image, &[Layer::MaxPool(Window::new(kernel, stride, padding))]), 2, NormMode::Frozen);
        }
        let net = Net::chain(image, &[conv(channels, 1, 1, 0)]).then(Layer::Add(0)).then(Layer::GlobalAverage);
        check(&net.then(Layer::Flatten).then(Layer::Dropout(0.5)).then(linear(3)), 2, NormMode::Frozen);
    }
}

#[test]
fn residual_blocks_agree() {
    for normalisation in [Layer::BatchNorm, Layer::GroupNorm(3)] {
        let net = Net::chain(Shape::image(11, 9, 3), &[conv(9, 3, 1, 1), normalisation, RELU, conv(18, 3, 2, 1)]);
        let net = net.then(normalisation).then(RELU).then(conv(18, 3, 1, 1)).then(normalisation); // 5 6 7 8
        let net = net.at(3, conv(18, 1, 2, 0)).then(normalisation).at(8, Layer::Add(10)).then(RELU);
        check(&net.then(Layer::GlobalAverage).then(linear(7)), 5, NormMode::Update);
    }
}
