//! Every layer, activation, loss and normalisation mode against finite differences of a double-precision oracle, on
//! every instruction set: gradients of all parameters, of the input and of nodes in the middle.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]
#![allow(clippy::float_cmp, reason = "where numbers are compared, they must be equal")]

mod reference;

use fedproj_nn::{Activation, Cpu, Direction, Dropout, Graph, Init, Mode, NormMode, Options, Shape, Window, Workspace};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use reference::{
    Kind, Layer, Net, Problem, RELU, TANH, bits, check_gradients, conv, conv_bias, id, linear, norm, normals,
    standardized_conv, stream,
};

/// Shapes are drawn, but the same ones in every run: a kink within a rounding error would fail at random.
fn drawn(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, rng_seed: RngSeed::Fixed(5), failure_persistence: None, ..ProptestConfig::default() }
}

/// A chain of layers with a squared error at its end, checked at every parameter and the input.
fn check(input: Shape, layers: &[Layer], batch: usize, norm: NormMode) {
    let seed = (input.len() * 31 + batch) as u64;
    check_gradients(&Problem::at_output(Net::chain(input, layers), batch, norm, Kind::Squared, seed), &[0]);
}

const CHANNELS: [usize; 6] = [1, 3, 8, 16, 17, 24];

proptest! {
    #![proptest_config(drawn(100))]

    #[test]
    fn convolutions_of_any_window_have_the_right_gradients(
        (h, w) in (1usize..10, 1usize..10), kernel in prop::sample::select(&[1usize, 2, 3, 5]), stride in 1usize..4,
        padding in 0usize..3, from in prop::sample::select(&CHANNELS), to in prop::sample::select(&CHANNELS),
        batch in 1usize..4, bias: bool,
    ) {
        let padding = if h.min(w) + 2 * padding < kernel { kernel / 2 } else { padding };
        let window = Window::new(kernel, stride, padding);
        prop_assume!(h.min(w) + 2 * padding >= kernel);
        check(Shape::image(h, w, from), &[Layer::Conv { channels: to, window, bias }], batch, NormMode::Frozen);
    }

    // One weight alone would be standardised to zero.
    #[test]
    fn standardized_convolutions_have_the_right_gradients(
        (h, w) in (1usize..9, 1usize..9), kernel in prop::sample::select(&[1usize, 2, 3, 5]), stride in 1usize..4,
        from in prop::sample::select(&CHANNELS[1..]), to in prop::sample::select(&CHANNELS), batch in 1usize..4, bias: bool,
    ) {
        let window = Window::new(kernel, stride, kernel / 2);
        let layer = Layer::StandardizedConv { channels: to, window, bias };
        check(Shape::image(h, w, from), &[layer], batch, NormMode::Frozen);
    }

    // 3×3 windows of stride 1 with 8 channels or more are what Winograd's algorithm takes.
    #[test]
    fn winograd_convolutions_have_the_right_gradients(
        (h, w) in (1usize..13, 1usize..13), padding in 0usize..3, from in prop::sample::select(&CHANNELS[2..]),
        to in prop::sample::select(&CHANNELS[2..]), batch in 1usize..4,
    ) {
        prop_assume!(h.min(w) + 2 * padding >= 3);
        check(Shape::image(h, w, from), &[conv(to, 3, 1, padding)], batch, NormMode::Frozen);
    }

    #[test]
    fn max_pools_pass_gradients_to_the_largest(
        (h, w) in (1usize..9, 1usize..9), kernel in 1usize..5, stride in 1usize..4, padding in 0usize..3,
        channels in prop::sample::select(&CHANNELS), batch in 1usize..4,
    ) {
        prop_assume!(h.min(w) + 2 * padding >= kernel && 2 * padding <= kernel);
        let pool = Layer::MaxPool(Window::new(kernel, stride, padding));
        check(Shape::image(h, w, channels), &[pool], batch, NormMode::Frozen);
    }

    #[test]
    fn linear_layers_have_the_right_gradients(
        inputs in prop::sample::select(&[1usize, 3, 8, 17, 64, 65, 300]),
        batch in prop::sample::select(&[1usize, 5, 31, 32, 49]),
        outputs in prop::sample::select(&[1usize, 3, 10, 30, 31, 65, 130]), bias: bool,
    ) {
        check(Shape::vector(inputs), &[Layer::Linear { outputs, bias }], batch, NormMode::Frozen);
    }

    #[test]
    fn normalisations_have_the_right_gradients(
        (h, w) in (1usize..6, 1usize..6), batch in 1usize..5,
        channels in prop::sample::select(&[1usize, 3, 8, 17, 24, 64, 65]),
        relu: bool, which in 0usize..4,
    ) {
        // Two samples per channel are normalised to ±1 whatever they are.
        prop_assume!(batch * h * w >= 4);
        let (layer, norm) = match which {
            0 => (Layer::BatchNorm, NormMode::Update),
            1 => (Layer::BatchNorm, NormMode::Batch),
            2 => (Layer::BatchNorm, NormMode::Frozen),
            _ => (Layer::GroupNorm(if channels % 8 == 0 { 4 } else { 1 }), NormMode::Frozen),
        };
        prop_assume!(which < 3 || h * w * channels >= 16);
        let layers = if relu { vec![layer, RELU] } else { vec![layer] };
        check(Shape::image(h, w, channels), &layers, batch, norm);
    }
}

#[test]
fn wide_convolutions_have_the_right_gradients() {
    check(Shape::image(6, 5, 64), &[conv(65, 3, 1, 1)], 1, NormMode::Frozen);
    check(Shape::image(5, 7, 65), &[conv_bias(64, 3, 2, 1)], 2, NormMode::Frozen);
    check(Shape::image(4, 4, 65), &[conv(17, 5, 1, 2)], 3, NormMode::Frozen);
    check(Shape::image(3, 4, 64), &[conv(130, 1, 1, 0)], 2, NormMode::Frozen);
    check(Shape::image(1, 1, 65), &[conv(64, 3, 1, 1)], 2, NormMode::Frozen);
    // More rows than one block of the unrolled image holds.
    check(Shape::image(27, 25, 3), &[conv_bias(5, 3, 1, 1)], 2, NormMode::Frozen);
}

#[test]
fn convolutions_of_many_blocks_have_the_right_gradients() {
    // Enough tiles that Winograd's algorithm cuts the batch into blocks and the weights' gradient into slices.
    check(Shape::image(61, 63, 8), &[conv(9, 3, 1, 1)], 15, NormMode::Frozen);
}

#[test]
fn long_linear_layers_have_the_right_gradients() {
    check(Shape::vector(2051), &[linear(33)], 33, NormMode::Frozen);
    check(Shape::image(5, 3, 17), &[Layer::Flatten, linear(70)], 100, NormMode::Frozen);
}

#[test]
fn large_normalisations_have_the_right_gradients() {
    // More than one chunk of rows, channels above and below the period of the coefficients.
    check(Shape::image(31, 17, 24), &[Layer::BatchNorm, RELU], 3, NormMode::Update);
    check(Shape::image(9, 9, 300), &[Layer::BatchNorm], 2, NormMode::Batch);
    check(Shape::image(9, 11, 300), &[Layer::GroupNorm(3), RELU], 2, NormMode::Frozen);
    check(Shape::vector(255), &[Layer::BatchNorm], 70, NormMode::Update);
    for groups in [1, 2, 3, 6] {
        check(Shape::image(5, 4, 6), &[Layer::GroupNorm(groups)], 3, NormMode::Frozen);
    }
}

#[test]
fn activations_and_averages_have_the_right_gradients() {
    for f in [Activation::Relu, Activation::Gelu, Activation::Tanh] {
        for shape in [Shape::vector(1), Shape::image(3, 5, 17), Shape::image(1, 1, 64)] {
            check(shape, &[Layer::Activation(f)], 3, NormMode::Frozen);
            check(shape, &[Layer::Activation(f), Layer::GlobalAverage], 2, NormMode::Frozen);
        }
    }
    check(Shape::image(7, 5, 3), &[Layer::GlobalAverage], 4, NormMode::Frozen);
    check(Shape::image(3, 3, 2), &[conv_bias(3, 2, 1, 0), Layer::Activation(Activation::Gelu)], 2, NormMode::Frozen);
}

#[test]
fn layers_fused_with_their_activation_have_the_right_gradients() {
    check(Shape::image(6, 5, 3), &[conv_bias(9, 3, 2, 1), RELU], 3, NormMode::Frozen);
    check(Shape::image(6, 5, 9), &[conv(17, 3, 1, 1), RELU, conv_bias(8, 3, 1, 1), RELU], 3, NormMode::Frozen);
    check(Shape::vector(9), &[linear(33), RELU, linear(5), RELU], 35, NormMode::Frozen);
    let layers = [standardized_conv(17, 3, 1, 1), RELU, standardized_conv(8, 3, 2, 1), Layer::GroupNorm(4), RELU];
    check(Shape::image(6, 5, 9), &layers, 3, NormMode::Frozen);
    let image = Shape::image(5, 4, 3);
    check(image, &[conv_bias(8, 1, 1, 0), Layer::BatchNorm, RELU, Layer::Flatten, linear(3)], 3, NormMode::Update);
}

#[test]
fn losses_have_the_right_gradients() {
    let mut kinds = vec![Kind::CrossEntropy, Kind::Offset, Kind::Squared, Kind::Absolute];
    kinds.extend([1.0, 3.0].map(|temperature| Kind::NotTrue { temperature }));
    for direction in [Direction::TeacherToStudent, Direction::StudentToTeacher] {
        for (temperature, times_t_squared) in [(1.0, false), (3.0, false), (3.0, true), (0.5, true)] {
            kinds.push(Kind::Kl { temperature, direction, times_t_squared });
        }
    }
    for kind in kinds {
        for (features, batch) in [(2, 1), (10, 7), (17, 3), (100, 2)] {
            let net = Net::chain(Shape::vector(6), &[linear(features)]);
            check_gradients(&Problem::at_output(net, batch, NormMode::Frozen, kind, 3), &[0, 1]);
        }
    }
}

#[test]
fn masked_squares_leave_out_what_is_negative_on_both_sides() {
    for batch in [1, 3, 7] {
        let net = Net::chain(Shape::vector(6), &[linear(17)]);
        let problem = Problem::at_output(net, batch, NormMode::Frozen, Kind::Masked, 19);
        check_gradients(&problem, &[0, 1]);
        let run = problem.run(Cpu::new(1), &[1]);
        let (_, targets) = problem.terms[0].loss();
        for ((z, t), slope) in run.output.iter().zip(targets.features).zip(&run.grads[0]) {
            assert_eq!(*slope == 0.0, *z <= 0.0 && *t <= 0.0, "z {z}, t {t}: {slope}");
        }
        assert!(run.grads[0].contains(&0.0), "no value is masked");
    }
}

#[test]
fn a_loss_at_an_image_has_the_right_gradients() {
    let net = Net::chain(Shape::image(5, 4, 3), &[conv_bias(4, 3, 1, 1), TANH]);
    check_gradients(&Problem::at_output(net, 2, NormMode::Frozen, Kind::Squared, 4), &[0, 1]);
}

#[test]
fn dropout_passes_the_gradient_of_what_it_kept() {
    for rate in [0.0, 0.25, 0.5, 0.9] {
        let net = Net::chain(Shape::image(5, 7, 9), &[TANH, Layer::Dropout(rate), Layer::Flatten, linear(5)]);
        let mut problem = Problem::at_output(net, 3, NormMode::Frozen, Kind::Squared, 5);
        problem.mode = Mode { norm: NormMode::Frozen, dropout: Dropout::Key(11) };
        // What was kept can be read off the values, none of which is 0 before.
        let run = problem.run(Cpu::new(1), &[1, 2]);
        let mask = run.values[1].iter().zip(&run.values[0]).map(|(y, x)| f64::from(y / x)).collect();
        problem.masks.insert(2, mask);
        check_gradients(&problem, &[0, 1, 2]);
    }
}

/// A block as residual networks have them, with every operation that is fused with another.
fn residual_net(normalisation: Layer) -> Net {
    let net = Net::chain(Shape::image(9, 7, 3), &[conv(8, 3, 1, 1), normalisation, RELU]); // 1 2 3
    let net = net.then(conv(8, 3, 1, 1)).then(normalisation).then(RELU); // 4 5 6
    let net = net.then(conv(8, 3, 1, 1)).then(normalisation).then(Layer::Add(3)).then(RELU); // 7 8 9 10
    let net = net.then(conv(16, 3, 2, 1)).then(normalisation).then(RELU); // 11 12 13
    let net = net.then(conv(16, 3, 1, 1)).then(normalisation); // 14 15
    let net = net.at(10, conv(16, 1, 2, 0)).then(normalisation).at(15, Layer::Add(17)).then(RELU); // 16 17 18 19
    net.then(Layer::MaxPool(Window::new(3, 2, 1))).then(Layer::GlobalAverage).then(linear(5)) // 20 21 22
}

#[test]
fn residual_networks_have_the_right_gradients() {
    for (normalisation, norm) in [
        (Layer::BatchNorm, NormMode::Update),
        (Layer::BatchNorm, NormMode::Batch),
        (Layer::BatchNorm, NormMode::Frozen),
        (Layer::GroupNorm(4), NormMode::Frozen),
    ] {
        let net = residual_net(normalisation);
        check_gradients(&Problem::at_output(net, 3, norm, Kind::CrossEntropy, 6), &[0]);
    }
}

/// Gradients with every node observed, which forbids all fusion, against those with all fusion. The sums differ only
/// where a fused multiply-add replaces two roundings, so the tolerance is a few roundings of each layer.
#[test]
fn observing_every_node_changes_no_gradient() {
    for normalisation in [Layer::BatchNorm, Layer::GroupNorm(2)] {
        let net = residual_net(normalisation);
        let all: Vec<usize> = (0..=net.last()).collect();
        let problem = Problem::at_output(net, 3, NormMode::Update, Kind::CrossEntropy, 7);
        let fused = problem.run(Cpu::new(1), &[]);
        let observed = problem.run(Cpu::new(1), &all);
        for span in problem.graph.params().spans() {
            let (a, b) = (&fused.grad[span.range()], &observed.grad[span.range()]);
            let difference: Vec<f32> = a.iter().zip(b).map(|(a, b)| a - b).collect();
            assert!(norm(&difference) <= 1e-5 * norm(b), "{}: {:e}", span.name, norm(&difference) / norm(b));
        }
    }
}

#[test]
fn every_node_can_be_observed_and_has_the_right_gradient() {
    for normalisation in [Layer::BatchNorm, Layer::GroupNorm(2)] {
        let net = residual_net(normalisation);
        // Node 19 has no derivative: where all values of a pooling window are 0, any of them may be the largest.
        for node in (1..=net.last()).filter(|&node| node != 19) {
            let problem = Problem::at_output(net.clone(), 2, NormMode::Batch, Kind::CrossEntropy, 8);
            check_node(&problem, node);
        }
    }
}

/// The gradient of one observed node; parameters are left to other tests.
fn check_node(problem: &Problem, node: usize) {
    let run = problem.run(Cpu::new(1), &[node]);
    let mut s = stream(9);
    let direction: Vec<f64> = run.grads[0].iter().map(|_| s.normal()).collect();
    let expected = problem.slope(reference::Place::Node(node), &direction);
    let found: f64 = run.grads[0].iter().zip(&direction).map(|(g, d)| f64::from(*g) * d).sum();
    let error = (found - expected).abs() / norm(&run.grads[0]);
    assert!(error <= reference::TOLERANCE, "n{node}: slope {found:e}, expected {expected:e}, error {error:.1e}");
}

#[test]
fn losses_in_the_middle_and_at_the_end_add_up() {
    let net = residual_net(Layer::BatchNorm);
    let last = net.last();
    for node in [1, 2, 3, 5, 9, 10, 12, 18, 20, 21] {
        let terms = [(last, Kind::CrossEntropy, 0.5), (node, Kind::Squared, -0.02)];
        check_gradients(&Problem::new(net.clone(), 2, NormMode::Update, &terms, 10), &[]);
    }
    let twice = [(last, Kind::CrossEntropy, 1.0), (last, Kind::Squared, 2.0), (0, Kind::Squared, 1.0)];
    check_gradients(&Problem::new(net, 2, NormMode::Update, &twice, 11), &[0]);
}

#[test]
fn losses_at_an_image_and_at_its_flattened_view_add_up() {
    let net = Net::chain(Shape::image(3, 4, 2), &[conv_bias(3, 2, 1, 0), TANH, Layer::Flatten, linear(4)]);
    let at = |nodes: &[usize]| -> Vec<_> { nodes.iter().map(|&n| (n, Kind::Squared, 0.7)).collect() };
    for nodes in [&[2, 4][..], &[3, 4], &[2, 3], &[3, 2], &[2, 3, 4], &[4, 3, 2]] {
        check_gradients(&Problem::new(net.clone(), 2, NormMode::Frozen, &at(nodes), 12), &[0]);
        // The two share one gradient, which counts the losses at both.
        check_gradients(&Problem::new(net.clone(), 2, NormMode::Frozen, &at(nodes), 12), &[1, 2]);
    }
}

#[test]
fn a_loss_at_a_tap_leaves_later_parameters_a_gradient_of_exactly_zero() {
    let net = residual_net(Layer::BatchNorm);
    let problem = Problem::new(net, 2, NormMode::Update, &[(10, Kind::Squared, 1.0)], 13);
    check_gradients(&problem, &[0]);
    let run = problem.run(Cpu::new(1), &[22, 19]);
    for span in problem.graph.params().spans() {
        let node: usize = span.name[1..].split('.').next().and_then(|n| n.parse().ok()).expect("a node's number");
        let zero = run.grad[span.range()].iter().all(|g| g.to_bits() == 0);
        assert_eq!(zero, node > 10, "{}", span.name);
    }
    assert!(run.grads.iter().flatten().all(|g| *g == 0.0), "nodes after the loss have no gradient");
}

#[test]
fn a_gradient_of_an_earlier_pass_is_not_left_at_a_tap() {
    let graph = Net::chain(Shape::vector(3), &[linear(4), TANH, linear(2)]).graph();
    let (middle, last) = (id(&graph, 2), graph.output());
    let taps = [graph.input(), middle];
    let mut ws = Workspace::new(&graph, &Options { batch: 2, taps: &taps, training: true }, Cpu::new(1)).unwrap();
    let mut s = stream(14);
    let (params, x) = (normals(&mut s, graph.params().len(), 0.0, 1.0), normals(&mut s, 6, 0.0, 1.0));
    let mut grad = vec![0.0; params.len()];
    let mut pass = |node, value: f32| {
        ws.forward(&params, &mut [], &x, Mode::EVAL).unwrap();
        ws.inject(node, |_, g| g.fill(value)).unwrap();
        ws.backward(&params, &mut grad).unwrap();
        (ws.gradient(last).unwrap().to_vec(), ws.gradient(taps[0]).unwrap().to_vec())
    };
    let (at_last, at_input) = pass(last, 3.0);
    assert!(at_last.iter().all(|g| *g == 3.0) && norm(&at_input) > 0.0);
    let (at_last, _) = pass(middle, 1.0);
    assert!(at_last.iter().all(|g| *g == 0.0), "{at_last:?}");
}

#[test]
fn an_injected_gradient_acts_like_a_linear_loss() {
    let net = residual_net(Layer::GroupNorm(2));
    let graph = net.graph();
    let problem = Problem::at_output(net, 2, NormMode::Frozen, Kind::Squared, 15);
    for node in [0, 3, 10, 19, 22] {
        let tap = id(&graph, node);
        let options = Options { batch: 2, taps: &[tap, graph.input()], training: true };
        let mut ws = Workspace::new(&graph, &options, Cpu::new(1)).unwrap();
        let mut buffers = problem.buffers.clone();
        let mut run = |scale: f32, times: usize| {
            let mut grad = vec![f32::NAN; problem.params.len()];
            ws.forward(&problem.params, &mut buffers, &problem.x, problem.mode).unwrap();
            for _ in 0..times {
                ws.inject(tap, |value, g| {
                    assert!(value.iter().all(|v| v.is_finite()));
                    g.iter_mut().enumerate().for_each(|(i, g)| *g += scale * (i % 7) as f32);
                })
                .unwrap();
            }
            ws.backward(&problem.params, &mut grad).unwrap();
            (grad, ws.gradient(graph.input()).unwrap().to_vec())
        };
        // Factors of two round nothing, so twice the gradient is twice the result, bit for bit.
        let (once, double, twice) = (run(1.0, 1), run(2.0, 1), run(1.0, 2));
        assert_eq!(bits(&double.0), bits(&twice.0));
        assert_eq!(bits(&double.1), bits(&twice.1));
        assert!(once.0.iter().zip(&double.0).all(|(a, b)| 2.0 * a == *b), "n{node}");
        assert!(norm(&once.1) > 0.0);
    }
}

#[test]
fn nodes_with_several_readers_sum_their_gradients() {
    let image = Shape::image(4, 5, 8);
    let nets = [
        // x + x
        Net::new(image).at(0, Layer::Add(0)),
        Net::chain(image, &[conv(8, 3, 1, 1)]).at(1, Layer::Add(1)).then(RELU),
        // two readers of one activation, and of the input
        Net::chain(image, &[TANH, conv(8, 1, 1, 0)]).at(1, conv(8, 3, 1, 1)).at(2, Layer::Add(3)),
        Net::new(image).at(0, conv(8, 3, 1, 1)).at(0, conv(8, 1, 1, 0)).at(1, Layer::Add(2)),
        // a convolution that two others read, so that its ReLU cannot be fused
        Net::chain(image, &[conv(8, 3, 1, 1), RELU]).at(1, conv(8, 1, 1, 0)).at(2, Layer::Add(3)),
        // a normalisation that two read, and the sum of two normalisations of one node
        Net::chain(image, &[conv(8, 1, 1, 0), Layer::BatchNorm, RELU]).at(2, TANH).at(3, Layer::Add(4)),
        Net::chain(image, &[conv(8, 1, 1, 0), Layer::BatchNorm])
            .at(1, Layer::BatchNorm)
            .at(2, Layer::Add(3))
            .then(RELU),
        // a normalisation added to its own input
        Net::chain(image, &[conv(8, 1, 1, 0), Layer::BatchNorm]).at(2, Layer::Add(1)).then(RELU),
        Net::chain(image, &[conv(8, 1, 1, 0), Layer::BatchNorm]).at(2, Layer::Add(1)).then(RELU).then(conv(3, 1, 1, 0)),
        Net::chain(image, &[conv(8, 1, 1, 0), Layer::GroupNorm(2)]).at(1, Layer::Add(2)),
        Net::chain(image, &[conv(8, 1, 1, 0), Layer::GroupNorm(2)]).at(1, Layer::Add(2)).then(TANH),
        Net::chain(image, &[Layer::BatchNorm]).at(1, Layer::Add(0)),
        // a normalisation added to itself
        Net::chain(image, &[conv(8, 1, 1, 0), Layer::BatchNorm]).at(2, Layer::Add(2)),
        // a vector and its flattened view
        Net::chain(Shape::vector(6), &[linear(5), Layer::Flatten]).at(1, Layer::Add(2)).then(linear(3)),
        Net::chain(Shape::vector(6), &[linear(5), Layer::Flatten]).at(2, Layer::Add(1)).then(linear(3)),
        Net::chain(Shape::vector(6), &[linear(5), Layer::Flatten, Layer::BatchNorm]).at(3, Layer::Add(1)),
        // the sum of two branches of which one is read again later
        Net::chain(image, &[conv(8, 3, 1, 1), RELU, conv(8, 3, 1, 1), Layer::BatchNorm])
            .at(4, Layer::Add(2))
            .then(RELU)
            .at(6, Layer::Add(2)),
    ];
    for net in nets {
        let problem = Problem::at_output(net, 2, NormMode::Update, Kind::Squared, 16);
        check_gradients(&problem, &[0]);
    }
}

#[test]
fn a_node_that_nobody_reads_has_a_gradient_of_zero() {
    let net = Net::chain(Shape::vector(4), &[linear(3)]).at(0, linear(7)).at(1, linear(2));
    let problem = Problem::at_output(net, 2, NormMode::Frozen, Kind::Squared, 17);
    check_gradients(&problem, &[0]);
    let run = problem.run(Cpu::new(1), &[2]);
    let unread = problem.graph.params().find("n2.weight").expect("a weight").range();
    assert!(run.grad[unread].iter().all(|g| *g == 0.0));
    assert!(run.grads[0].iter().all(|g| *g == 0.0));
}

/// As in PyTorch: the variance of one value is no estimate.
#[test]
fn batch_norm_does_not_train_on_one_value_per_channel() {
    for (shape, batch) in [(Shape::image(1, 1, 5), 1), (Shape::vector(17), 1), (Shape::vector(17), 2)] {
        let mut graph = Graph::new(shape);
        graph.batch_norm("norm", graph.input()).unwrap();
        let (params, mut buffers) = (graph.init_params(0, Init::Torch), graph.init_buffers());
        let before = buffers.clone();
        let mut workspace = Workspace::new(&graph, &Options::training(2), Cpu::new(1)).unwrap();
        let x = vec![0.5; batch * shape.len()];
        for norm in [NormMode::Update, NormMode::Batch, NormMode::Frozen] {
            let mode = Mode { norm, ..Mode::EVAL };
            match workspace.forward(&params, &mut buffers, &x, mode) {
                Ok(()) => assert!(batch > 1 || norm == NormMode::Frozen, "{shape} {norm:?}"),
                Err(error) => {
                    let message = error.to_string();
                    assert!(batch == 1 && norm != NormMode::Frozen, "{shape} {norm:?}: {message}");
                    assert!(message.contains("`norm`") && message.contains("more than one value"), "{message}");
                    assert_eq!(buffers, before, "a failed pass moves nothing");
                }
            }
        }
    }
}

/// Windows that read padding alone sum zeros, by whichever algorithm and cut of the work.
#[test]
fn windows_in_the_padding_give_exactly_zero() {
    for (side, channels, batch) in [(2, 8, 1), (3, 16, 5), (8, 24, 2), (13, 8, 40), (4, 130, 2)] {
        let mut graph = Graph::new(Shape::image(side, side, channels));
        graph.conv2d("conv", graph.input(), channels, Window::new(3, 1, 4), false).unwrap();
        let params = graph.init_params(3, Init::Torch);
        let mut workspace = Workspace::new(&graph, &Options::training(batch), Cpu::new(1)).unwrap();
        let x: Vec<f32> = (0..batch * side * side * channels).map(|i| (i as f32).sin()).collect();
        workspace.forward(&params, &mut [], &x, Mode::EVAL).unwrap();
        let out = side + 6;
        let is_in_padding = |at: usize| at < 2 || at >= side + 4;
        for (i, pixel) in workspace.output().chunks(channels).enumerate() {
            let (row, column) = (i / out % out, i % out);
            let is_zero = pixel.iter().all(|v| v.to_bits() == 0);
            let expected = is_in_padding(row) || is_in_padding(column);
            assert_eq!(is_zero, expected, "side {side}, pixel ({row}, {column}): {:?}", &pixel[..2]);
        }
    }
}
