//! The same bytes whatever the number of threads, whoever else computes at the same time, and however large the
//! workspace is beside the batch.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod reference;

use fedproj_nn::models::{self, Norm, ResNet, Variant};
use fedproj_nn::{Cpu, Graph, Init, Loss, LossTargets, Mode, Optimizer, Options, Rule, Shape, Workspace, clip_norm};
use reference::{bits, normals, stream};

const IMAGE: Shape = Shape { h: 13, w: 11, c: 3 };
const CLASSES: usize = 5;

/// Networks that between them use every kernel that threads share.
fn networks() -> Vec<(&'static str, Graph)> {
    let resnet = |norm, stem_pool| {
        let variant = Variant { norm, ..Variant::default() };
        ResNet { widths: &[8, 17], blocks: 1, stem_pool, variant }.build(IMAGE, CLASSES).unwrap()
    };
    vec![
        ("mlp", models::mlp(IMAGE, &[300, 65], CLASSES, Variant::default()).unwrap()),
        ("cnn with dropout", models::cnn(IMAGE, [9, 24], 40, CLASSES, Variant::default()).unwrap()),
        ("resnet with batch-norm", resnet(Norm::Batch, false)),
        ("resnet with group-norm", resnet(Norm::Group(1), true)),
    ]
}

/// Everything that three training steps leave behind, as bits.
#[derive(Debug, PartialEq)]
struct Trace {
    params: Vec<u32>,
    buffers: Vec<u32>,
    grad: Vec<u32>,
    output: Vec<u32>,
    losses: Vec<u64>,
}

/// Three Adam steps on batches of `batch` samples, in a workspace for `batch_max`, then an evaluation.
fn train(graph: &Graph, n_threads: usize, batch: usize, batch_max: usize) -> Trace {
    let mut ws = Workspace::new(graph, &Options::training(batch_max), Cpu::new(n_threads)).unwrap();
    if batch < batch_max {
        // A full batch first, so that everything the smaller one must not see is there.
        train_in(&mut ws, batch_max);
    }
    train_in(&mut ws, batch)
}

fn train_in(ws: &mut Workspace, batch: usize) -> Trace {
    let graph = ws.graph().clone();
    let sample = graph.shape(graph.input()).len();
    let (mut params, mut buffers) = (graph.init_params(3, Init::Torch), graph.init_buffers());
    let mut optimizer = Optimizer::new(Rule::adam(0.01), params.len()).unwrap();
    let mut grad = vec![0.0; params.len()];
    let mut s = stream(31);
    let mut losses = Vec::new();
    for step in 0..3 {
        let x = normals(&mut s, batch * sample, 0.0, 1.0);
        let labels: Vec<u32> = (0..batch).map(|_| s.below(CLASSES as u32)).collect();
        let loss = (Loss::CrossEntropy, LossTargets::labels(&labels));
        let value = ws.loss_gradient(&params, &mut buffers, &x, &loss, Mode::train(step), &mut grad).unwrap();
        losses.push(value.to_bits());
        clip_norm(ws.cpu(), &mut grad, 1.0);
        optimizer.step(ws.cpu(), &mut params, &grad, 1.0);
    }
    let x = normals(&mut s, batch * sample, 0.0, 1.0);
    ws.forward(&params, &mut buffers, &x, Mode::EVAL).unwrap();
    Trace { params: bits(&params), buffers: bits(&buffers), grad: bits(&grad), output: bits(ws.output()), losses }
}

#[test]
fn training_leaves_the_same_bytes_for_any_number_of_threads() {
    for (name, graph) in networks() {
        for batch in [1, 5, 33] {
            let alone = train(&graph, 1, batch, batch);
            assert!(alone.params.iter().all(|p| f32::from_bits(*p).is_finite()), "{name}: diverged");
            for n_threads in [2, 3] {
                assert!(train(&graph, n_threads, batch, batch) == alone, "{name}, batch {batch}, {n_threads} threads");
            }
        }
    }
}

#[test]
fn large_layers_leave_the_same_bytes_for_any_number_of_threads() {
    // Enough tiles for Winograd's blocks and slices, enough rows for many chunks of every reduction.
    let variant = Variant::default();
    let input = Shape::image(40, 41, 3);
    let graph = ResNet { widths: &[24], blocks: 1, stem_pool: false, variant }.build(input, 3).unwrap();
    let mut s = stream(32);
    let x = normals(&mut s, 12 * input.len(), 0.0, 1.0);
    let labels = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2];
    let params = graph.init_params(4, Init::Torch);
    let run = |n_threads| {
        let mut ws = Workspace::new(&graph, &Options::training(12), Cpu::new(n_threads)).unwrap();
        let (mut buffers, mut grad) = (graph.init_buffers(), vec![0.0; params.len()]);
        let loss = (Loss::CrossEntropy, LossTargets::labels(&labels));
        ws.loss_gradient(&params, &mut buffers, &x, &loss, Mode::train(0), &mut grad).unwrap();
        (bits(&grad), bits(&buffers), bits(ws.output()))
    };
    let alone = run(1);
    assert!(alone == run(2) && alone == run(3));
}

#[test]
fn two_clients_at_the_same_time_leave_the_bytes_of_one_after_the_other() {
    for (name, graph) in networks() {
        let alone = [train(&graph, 1, 5, 5), train(&graph, 1, 7, 7)];
        let together = std::thread::scope(|scope| {
            let first = scope.spawn(|| train(&graph, 1, 5, 5));
            let second = scope.spawn(|| train(&graph, 1, 7, 7));
            [first.join().unwrap(), second.join().unwrap()]
        });
        assert!(together == alone, "{name}");
    }
}

#[test]
fn a_smaller_batch_in_a_larger_workspace_leaves_the_same_bytes() {
    for (name, graph) in networks() {
        for (batch, batch_max) in [(1, 2), (5, 33), (32, 33), (33, 100)] {
            for n_threads in [1, 2] {
                let exact = train(&graph, n_threads, batch, batch);
                let roomy = train(&graph, n_threads, batch, batch_max);
                assert!(exact == roomy, "{name}, batch {batch} in a workspace for {batch_max}, {n_threads} threads");
            }
        }
    }
}

#[test]
fn few_large_images_in_a_larger_workspace_leave_the_same_bytes() {
    // Two images that are too large for one block of Winograd's algorithm leave some of its slices without any.
    let variant = Variant::default();
    let net = ResNet { widths: &[8], blocks: 1, stem_pool: false, variant };
    let graph = net.build(Shape::image(172, 171, 1), CLASSES).unwrap();
    assert!(train(&graph, 1, 2, 2) == train(&graph, 2, 2, 5));
}

#[test]
fn a_pass_does_not_depend_on_the_pass_before() {
    for (name, graph) in networks() {
        let mut ws = Workspace::new(&graph, &Options::training(9), Cpu::new(1)).unwrap();
        let first = train_in(&mut ws, 9);
        assert!(first == train_in(&mut ws, 9), "{name}");
    }
}

#[test]
fn inference_gives_the_bytes_of_a_training_workspace() {
    for (name, graph) in networks() {
        let (params, mut buffers) = (graph.init_params(5, Init::Xavier), graph.init_buffers());
        let x = normals(&mut stream(33), 7 * IMAGE.len(), 0.0, 1.0);
        let mut evaluate = |options: Options<'_>| {
            let mut ws = Workspace::new(&graph, &options, Cpu::new(1)).unwrap();
            ws.forward(&params, &mut buffers, &x, Mode::EVAL).unwrap();
            bits(ws.output())
        };
        let training = evaluate(Options::training(7));
        let inference = evaluate(Options { training: false, ..Options::training(7) });
        assert_eq!(training, inference, "{name}");
    }
}

#[test]
fn dropout_follows_its_key_alone() {
    let graph = models::cnn(IMAGE, [4, 8], 16, CLASSES, Variant::default()).unwrap();
    let params = graph.init_params(6, Init::Torch);
    let x = normals(&mut stream(34), 3 * IMAGE.len(), 0.0, 1.0);
    let mut ws = Workspace::new(&graph, &Options::training(3), Cpu::new(1)).unwrap();
    let mut output = |mode| {
        ws.forward(&params, &mut [], &x, mode).unwrap();
        bits(ws.output())
    };
    let one = output(Mode::train(1));
    assert_ne!(one, output(Mode::train(2)));
    assert_ne!(one, output(Mode::EVAL));
    assert_eq!(one, output(Mode::train(1)));
}
