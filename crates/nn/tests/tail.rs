//! The part of a network behind a node, a network of its own that computes the same; and a second classifier at a node.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]
#![allow(clippy::float_cmp, reason = "where numbers are compared, they must be equal")]

use fedproj_nn::models::{self, Variant};
use fedproj_nn::{Cpu, Dropout, Graph, Init, Loss, LossTargets, Mode, NodeId, NormMode, Options, Shape, Workspace};
use std::ops::Range;

const N: usize = 3;

/// Value and gradient of a node, output, and gradient of all parameters.
fn run(graph: &Graph, at: NodeId, [params, buffers, x]: [&[f32]; 3]) -> [Vec<f32>; 4] {
    let options = Options { batch: N, taps: &[at], training: true };
    let mut ws = Workspace::new(graph, &options, Cpu::new(1)).unwrap();
    let mut gradient = vec![f32::NAN; params.len()];
    let mode = Mode { norm: NormMode::Batch, dropout: Dropout::Off };
    let loss = (Loss::CrossEntropy, LossTargets::labels(&[4, 0, 2]));
    ws.loss_gradient(params, &mut buffers.to_vec(), x, &loss, mode, &mut gradient).unwrap();
    [ws.value(at).unwrap().to_vec(), ws.gradient(at).unwrap().to_vec(), ws.output().to_vec(), gradient]
}

#[test]
fn a_tail_computes_what_the_network_does_behind_the_node() {
    let mut n_cuts = 0;
    for name in ["cnn", "resnet8-thin"] {
        let whole = models::build(name, Shape::image(8, 8, 3), 5, Variant::default()).unwrap();
        let (params, buffers) = (whole.init_params(1, Init::Torch), whole.init_buffers());
        let x: Vec<f32> = (0..N * 8 * 8 * 3).map(|i| (i as f32 * 0.7).sin()).collect();
        for at in whole.names().filter_map(|name| whole.find(name)) {
            let Ok(tail) = whole.tail(at) else { continue };
            let [value, slope, output, gradient] = run(&whole, at, [&params, &buffers, &x]);
            let mut part = vec![f32::NAN; tail.graph.params().len()];
            tail.take_params(&params, &mut part);
            let mut own_buffers = vec![f32::NAN; tail.graph.buffers().len()];
            tail.take_buffers(&buffers, &mut own_buffers);
            let found = run(&tail.graph, tail.graph.input(), [&part, &own_buffers, &value]);
            assert_eq!([&found[0], &found[1], &found[2]], [&value, &slope, &output], "{name} {}", whole.name(at));
            let mut placed = gradient.clone();
            tail.params.iter().for_each(|range| placed[range.clone()].fill(0.0));
            assert!(
                placed.iter().any(|v| *v != 0.0) || at == whole.input(),
                "something stands before {}",
                whole.name(at)
            );
            tail.place_params(&found[3], &mut placed);
            assert_eq!(placed, gradient, "{name} {}", whole.name(at));
            n_cuts += 1;
        }
    }
    assert!(n_cuts > 20, "{n_cuts}");
}

#[test]
fn a_tail_keeps_the_networks_names_and_marks() {
    let whole = models::build("resnet8-thin", Shape::image(8, 8, 3), 5, Variant::default()).unwrap();
    let (first, second) = (whole.levels()[0], whole.levels()[1]);
    let tail = whole.tail(first).unwrap().graph;
    assert_eq!(tail.levels().len(), whole.levels().len());
    assert_eq!((tail.levels()[0], tail.name(tail.levels()[1])), (tail.input(), whole.name(second)));
    assert_eq!(tail.features().map(|node| tail.name(node)), Some("features"));
    assert_eq!(tail.shape(tail.input()), whole.shape(first));
    let spans = tail.params().spans();
    assert!(spans.iter().all(|span| whole.params().find(&span.name).is_some_and(|of| of.shape == span.shape)));
    let features = whole.tail(whole.features().unwrap()).unwrap();
    assert_eq!(features.graph.names().collect::<Vec<_>>(), ["input", "fc"]);
    assert_eq!(features.params.iter().map(Range::len).sum::<usize>(), features.graph.params().len());
}

#[test]
fn a_node_that_does_not_cut_the_network_is_refused() {
    let whole = models::build("resnet8-thin", Shape::image(8, 8, 3), 5, Variant::default()).unwrap();
    let message = |node: NodeId| whole.tail(node).unwrap_err().to_string();
    let inside = whole.find("layers.0.conv1").unwrap();
    assert!(message(inside).contains("around it"), "{}", message(inside));
    assert!(message(whole.output()).contains("nothing follows"));
}

#[test]
fn an_exit_leaves_the_network_as_it_was_and_reads_its_node() {
    for name in ["cnn", "resnet8-thin"] {
        let whole = models::build(name, Shape::image(8, 8, 3), 5, Variant::default()).unwrap();
        let level = whole.levels()[0];
        let with = whole.with_exit("exit", level, 5).unwrap();
        let (n, params) = (whole.params().len(), with.init_params(1, Init::Torch));
        assert_eq!(params[..n], whole.init_params(1, Init::Torch));
        assert_eq!(with.name(with.output()), whole.name(whole.output()));
        let named = |graph: &Graph| {
            graph.levels().iter().chain(&graph.features()).map(|n| graph.name(*n).to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(named(&with), named(&whole));
        let x: Vec<f32> = (0..N * 8 * 8 * 3).map(|i| (i as f32 * 0.7).sin()).collect();
        let buffers = whole.init_buffers();
        let [value, _, output, gradient] = run(&whole, level, [&params[..n], &buffers, &x]);
        let found = run(&with, level, [&params, &buffers, &x]);
        assert_eq!([&found[0], &found[2]], [&value, &output], "{name}");
        assert_eq!(found[3], [gradient, vec![0.0; params.len() - n]].concat(), "{name}");
        // A loss at the exit reaches what is before it and nothing behind.
        let exit = with.find("exit").unwrap();
        let mut ws = Workspace::new(&with, &Options { batch: N, taps: &[exit], training: true }, Cpu::new(1)).unwrap();
        ws.forward(&params, &mut buffers.clone(), &x, Mode::EVAL).unwrap();
        ws.add_loss(exit, &(Loss::CrossEntropy, LossTargets::labels(&[4, 0, 2])), 1.0).unwrap();
        let mut gradient = vec![f32::NAN; params.len()];
        ws.backward(&params, &mut gradient).unwrap();
        let behind = with.tail(with.levels()[0]).unwrap();
        assert!(behind.params.iter().all(|range| gradient[range.clone()].iter().all(|v| *v == 0.0)), "{name}");
        assert!(gradient[n..].iter().all(|v| *v != 0.0) && gradient[0] != 0.0, "{name}");
        let channels = whole.shape(level).c;
        let pooled = |c: usize| {
            let pixels = value[..value.len() / N].chunks_exact(channels);
            pixels.clone().map(|pixel| pixel[c].max(0.0)).sum::<f32>() / pixels.len() as f32
        };
        let (weight, bias) = (&params[n..n + 5 * channels], &params[n + 5 * channels..]);
        // `value` is of the batch's statistics, the exit's of the running ones: they agree without batch-norm.
        if name == "cnn" {
            let logit: f32 = (0..channels).map(|c| weight[c] * pooled(c)).sum::<f32>() + bias[0];
            assert!((logit - ws.value(exit).unwrap()[0]).abs() < 1e-5);
        }
    }
}
