//! Graphs, vectors and losses that do not fit: every error names the node or vector, what was expected and what was
//! found, and leaves everything as it was. Nothing panics.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use fedproj_nn::models::{self, Norm, Variant};
use fedproj_nn::{
    Cpu, EmbeddingId, Graph, Loss, LossTargets, Mode, NodeId, Optimizer, Options, Result, Rule, Shape, Window,
    Workspace,
};

/// The message of an error, which must hold all of `parts`.
fn check<T>(result: Result<T>, parts: &[&str]) {
    let Err(error) = result else { panic!("no error where {parts:?} was due") };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "`{message}` does not say `{part}`");
    }
    assert!(!message.ends_with('.'), "{message}");
}

/// A layer that cannot be added to an image of 6×5×4 (node `input`) with a vector of 120 beside it (node `flat`): the
/// error says `parts`, and the graph is as it was.
fn check_layer(add: impl Fn(&mut Graph, NodeId, NodeId) -> Result<NodeId>, parts: &[&str]) {
    let mut graph = Graph::new(Shape::image(6, 5, 4));
    let flat = graph.flatten("flat", graph.input()).unwrap();
    let image = graph.conv2d("image", graph.input(), 4, Window::new(1, 1, 0), true).unwrap();
    let before = graph.clone();
    check(add(&mut graph, image, flat), parts);
    assert_eq!(graph, before, "a failed layer leaves something behind: {parts:?}");
}

#[test]
fn layers_whose_shapes_do_not_meet_are_named() {
    check_layer(|g, x, y| g.add("sum", x, y), &["`sum`", "`image`", "6×5×4", "`flat`", "120"]);
    check_layer(|g, x, _| g.linear("fc", x, 3, true), &["`fc`", "vector", "`image`", "6×5×4", "flatten"]);
    check_layer(
        |g, x, _| g.conv2d("c", x, 3, Window::new(7, 1, 0), true),
        &["`c`", "kernel of 7", "image of 6", "padding 0"],
    );
    check_layer(|g, x, _| g.conv2d("c", x, 3, Window::new(6, 1, 0), true), &["`c`", "kernel of 6", "image of 5"]);
    check_layer(
        |g, _, y| g.conv2d("c", y, 3, Window::new(4, 1, 1), true),
        &["`c`", "kernel of 4", "image of 1", "padding 1"],
    );
    check_layer(|g, x, _| g.max_pool("pool", x, Window::new(7, 2, 0)), &["`pool`", "kernel of 7", "image of 6"]);
}

#[test]
fn sizes_that_mean_nothing_are_named() {
    check_layer(|g, x, _| g.conv2d("c", x, 0, Window::new(3, 1, 1), true), &["`c`", "at least one output channel"]);
    check_layer(|g, _, y| g.linear("fc", y, 0, true), &["`fc`", "at least one output"]);
    check_layer(|g, x, _| g.conv2d("c", x, 2, Window::new(0, 1, 1), true), &["`c`", "kernel 0", "at least 1"]);
    check_layer(|g, x, _| g.conv2d("c", x, 2, Window::new(3, 0, 1), true), &["`c`", "stride 0", "at least 1"]);
    check_layer(|g, x, _| g.max_pool("pool", x, Window::new(0, 1, 0)), &["`pool`", "kernel 0"]);
    check_layer(|g, x, _| g.max_pool("pool", x, Window::new(2, 0, 0)), &["`pool`", "stride 0"]);
    check_layer(|g, x, _| g.max_pool("pool", x, Window::new(3, 1, 2)), &["`pool`", "padding 2", "half"]);
    check_layer(|g, x, _| g.max_pool("pool", x, Window::new(16, 1, 8)), &["`pool`", "at most 15"]);
    check_layer(|g, x, _| g.group_norm("gn", x, 3), &["`gn`", "4 channels", "3"]);
    check_layer(|g, x, _| g.group_norm("gn", x, 0), &["`gn`", "4 channels", "0"]);
    check_layer(|g, x, _| g.group_norm("gn", x, 8), &["`gn`", "4 channels", "8"]);
    for (rate, said) in [(1.0, "1"), (-0.1, "-0.1"), (f32::NAN, "NaN"), (7.5, "7.5")] {
        check_layer(|g, x, _| g.dropout("drop", x, rate), &["`drop`", said, "[0, 1)"]);
    }
}

#[test]
fn a_name_that_is_taken_is_refused_for_every_layer() {
    let parts = &["`image`", "exists already"];
    check_layer(|g, x, _| g.conv2d("image", x, 2, Window::new(1, 1, 0), true), parts);
    check_layer(|g, _, y| g.linear("image", y, 2, true), parts);
    check_layer(|g, x, _| g.batch_norm("image", x), parts);
    check_layer(|g, x, _| g.group_norm("image", x, 2), parts);
    check_layer(|g, x, _| g.activation("image", x, fedproj_nn::Activation::Relu), parts);
    check_layer(|g, x, _| g.max_pool("image", x, Window::new(2, 2, 0)), parts);
    check_layer(|g, x, _| g.global_average_pool("image", x), parts);
    check_layer(|g, x, _| g.add("image", x, x), parts);
    check_layer(|g, x, _| g.flatten("image", x), parts);
    check_layer(|g, x, _| g.dropout("image", x, 0.5), parts);
    check_layer(|g, x, _| g.flatten("input", x), &["`input`", "exists already"]);
}

#[test]
fn models_that_cannot_take_an_image_name_the_layer() {
    let build = |name: &str, shape, norm| models::build(name, shape, 10, Variant { norm, ..Variant::default() });
    check(build("cnn", Shape::image(3, 3, 1), Norm::Batch), &["`conv2`", "kernel of 3", "image of 1"]);
    check(build("resnet8", Shape::image(8, 8, 3), Norm::Group(7)), &["`bn1`", "64 channels", "7"]);
    check(build("resnet9", Shape::image(8, 8, 3), Norm::Batch), &["`resnet9`", "known models", "resnet8-thin"]);
    check(models::mlp(Shape::vector(3), &[4, 0], 2, Variant::default()), &["`fc2`", "at least one output"]);
    check(
        build("mlp", Shape::vector(3), Norm::Batch)
            .and_then(|_| models::mlp(Shape::vector(3), &[], 0, Variant::default())),
        &["`fc1`"],
    );
}

/// A workspace for 3 samples of 4 values, 5 classes, with the hidden layer as its only tap.
fn workspace() -> (Workspace, NodeId, Vec<f32>) {
    let mut graph = Graph::new(Shape::vector(4));
    let hidden = graph.linear("hidden", graph.input(), 6, true).unwrap();
    let relu = graph.activation("relu", hidden, fedproj_nn::Activation::Relu).unwrap();
    graph.linear("out", relu, 5, true).unwrap();
    let options = Options { batch: 3, taps: &[hidden], training: true };
    let params = vec![0.1; graph.params().len()];
    (Workspace::new(&graph, &options, Cpu::new(1)).unwrap(), hidden, params)
}

#[test]
fn vectors_of_another_length_are_named() {
    let (mut ws, _, params) = workspace();
    let x = [0.5; 8];
    let n = params.len();
    let (all, short) = (n.to_string(), (n - 1).to_string());
    check(ws.forward(&params[1..], &mut [], &x, Mode::EVAL), &["parameter vector", &all, &short]);
    check(ws.forward(&params, &mut [0.0; 2], &x, Mode::EVAL), &["buffer vector", "2", "needs 0"]);
    check(ws.forward(&params, &mut [], &x[..7], Mode::EVAL), &["input batch", "7", "needs 4"]);
    ws.forward(&params, &mut [], &x, Mode::EVAL).unwrap();
    let mut grad = vec![0.0; n];
    check(ws.backward(&params[1..], &mut grad), &["parameter vector", &all, &short]);
    check(ws.backward(&params, &mut grad[1..]), &["gradient vector", &all, &short]);
}

#[test]
fn batches_that_do_not_fit_are_refused() {
    let (mut ws, _, params) = workspace();
    check(ws.forward(&params, &mut [], &[0.0; 16], Mode::EVAL), &["batch of 4", "1 to 3"]);
    check(ws.forward(&params, &mut [], &[], Mode::EVAL), &["batch of 0", "1 to 3"]);
    check(Workspace::new(ws.graph(), &Options::training(0), Cpu::new(1)), &["batch", "0", "at least 1"]);
    let empty = Graph::new(Shape::vector(0));
    check(Workspace::new(&empty, &Options::training(1), Cpu::new(1)), &["`input`", "0"]);
}

#[test]
fn losses_that_do_not_fit_name_their_target() {
    let (mut ws, hidden, params) = workspace();
    let output = ws.graph().output();
    let kl = |teacher, temperature| (Loss::kl(temperature), LossTargets::logits(teacher));
    check(ws.add_loss(output, &(Loss::CrossEntropy, LossTargets::labels(&[])), 1.0), &["batch of 0"]);
    check(ws.inject(output, |_, _| ()), &["batch of 0"]);
    ws.forward(&params, &mut [], &[0.5; 8], Mode::EVAL).unwrap();
    check(
        ws.add_loss(output, &(Loss::CrossEntropy, LossTargets::labels(&[0, 5])), 1.0),
        &["label 5", "sample 1", "5 classes", "0 to 4"],
    );
    check(
        ws.add_loss(output, &(Loss::CrossEntropy, LossTargets::labels(&[0])), 1.0),
        &["label vector", "1", "needs 2"],
    );
    check(ws.add_loss(output, &kl(&[0.0; 9], 1.0), 1.0), &["teacher's logits", "9", "needs 10"]);
    check(
        ws.add_loss(output, &(Loss::OffsetCrossEntropy, LossTargets::labels(&[0, 1])), 1.0),
        &["offsets", "0", "needs 5"],
    );
    let not_true = Loss::NotTrueKl { teacher: EmbeddingId(0), temperature: 1.0 };
    let check_not_true = |ws: &mut Workspace, labels: &[u32], words: &[&str]| {
        check(ws.add_loss(output, &(not_true, LossTargets::labels(labels)), 1.0), words);
    };
    check_not_true(&mut ws, &[0, 1], &["teacher's logits", "0", "needs 10"]);
    check_not_true(&mut ws, &[0, 5], &["label 5"]);
    check(
        ws.add_loss(output, &(Loss::MaskedSquares, LossTargets::features(&[0.0; 3])), 1.0),
        &["target", "3", "needs 10"],
    );
    check(
        ws.add_loss(hidden, &(Loss::MaskedSquares, LossTargets::features(&[0.0; 10])), 1.0),
        &["target", "10", "needs 12"],
    );
    for (temperature, said) in [(0.0, "0"), (-1.0, "-1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        check(ws.add_loss(output, &kl(&[0.0; 10], temperature), 1.0), &["temperature", said, "positive"]);
    }
    // None of them left a gradient behind.
    let mut grad = vec![f32::NAN; params.len()];
    ws.backward(&params, &mut grad).unwrap();
    assert!(grad.iter().all(|g| *g == 0.0));
}

#[test]
fn a_loss_of_plain_values_checks_their_number() {
    let loss = (Loss::CrossEntropy, LossTargets::labels(&[0, 1]));
    assert!(loss.0.value(&loss.1, 2, &[0.0; 6]).is_ok());
    check(loss.0.value(&loss.1, 2, &[0.0; 7]), &["7", "6"]);
    check(loss.0.value(&loss.1, 2, &[]), &["values", "0"]);
    check(Loss::CrossEntropy.value(&LossTargets::default(), 0, &[]), &["values", "0"]);
    check(loss.0.value(&loss.1, 0, &[0.0; 6]), &["values"]);
}

#[test]
fn nodes_that_are_no_taps_are_named() {
    let (mut ws, hidden, params) = workspace();
    let relu = ws.graph().find("relu").unwrap();
    ws.forward(&params, &mut [], &[0.5; 8], Mode::EVAL).unwrap();
    assert!(ws.value(hidden).is_ok() && ws.value(ws.graph().output()).is_ok());
    check(ws.value(relu), &["`relu`", "tap"]);
    check(ws.gradient(relu), &["`relu`", "tap"]);
    check(ws.inject(relu, |_, _| ()), &["`relu`", "tap"]);
    check(ws.add_loss(relu, &(Loss::MaskedSquares, LossTargets::features(&[0.0; 12])), 1.0), &["`relu`", "tap"]);
    // Without training there are values but no gradients.
    let mut inference =
        Workspace::new(ws.graph(), &Options { training: false, ..Options::training(3) }, Cpu::new(1)).unwrap();
    inference.forward(&params, &mut [], &[0.5; 8], Mode::EVAL).unwrap();
    check(
        inference.add_loss(inference.graph().output(), &(Loss::CrossEntropy, LossTargets::labels(&[0, 0])), 1.0),
        &["`out`"],
    );
}

#[test]
fn a_batch_for_which_there_is_no_memory_is_an_error() {
    let graph = models::mlp(Shape::vector(4), &[100], 3, Variant::default()).unwrap();
    for batch in [1 << 50, usize::MAX] {
        check(Workspace::new(&graph, &Options::training(batch), Cpu::new(1)), &["batch", "must be smaller", "memory"]);
    }
    assert!(Workspace::new(&graph, &Options::training(1 << 16), Cpu::new(1)).is_ok());
}

#[test]
fn constants_of_optimisers_outside_their_range_are_named() {
    let sgd = |lr, momentum, nesterov, weight_decay| Rule::Sgd { lr, momentum, nesterov, weight_decay };
    let adam = |beta1, beta2, eps| Rule::Adam { lr: 0.1, beta1, beta2, eps, weight_decay: 0.0, decoupled: false };
    let check = |rule, parts: &[&str]| check(Optimizer::new(rule, 3), parts);
    check(sgd(-0.5, 0.0, false, 0.0), &["learning rate", "-0.5", "not negative"]);
    check(sgd(f32::NAN, 0.0, false, 0.0), &["learning rate", "NaN"]);
    check(sgd(0.1, 1.0, false, 0.0), &["momentum", "1", "[0, 1)"]);
    check(sgd(0.1, 0.0, true, 0.0), &["momentum", "0", "Nesterov"]);
    check(sgd(0.1, 0.5, true, -1.0), &["weight decay", "-1"]);
    check(adam(1.0, 0.9, 1e-8), &["beta1", "1"]);
    check(adam(0.9, -0.1, 1e-8), &["beta2", "-0.1"]);
    check(adam(0.9, 0.9, 0.0), &["eps", "0", "positive"]);
}
