//! Networks that learn: digits by a perceptron, one batch by heart by a residual network, the order of words by an encoder.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod reference;

use fedproj_nn::models::{self, BertConfig, Norm, Variant};
use fedproj_nn::{Cpu, Init, Loss, LossTargets, Mode, Optimizer, Options, Rule, Shape, Workspace};
use fedproj_rng::{Purpose, Stream};
use reference::{normals, stream};
use std::io::Read;

const PIXELS: usize = 64;

/// The embedded digits: images of 8×8 pixels in [0, 1], and their classes.
fn digits() -> (Vec<f32>, Vec<u32>) {
    let path = format!("{}/../data/embedded/digits.csv.gz", env!("CARGO_MANIFEST_DIR"));
    let file = std::fs::File::open(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    let (mut x, mut labels) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let values: Vec<f32> = line.split(',').map(|v| v.trim().parse().unwrap()).collect();
        assert_eq!(values.len(), PIXELS + 1);
        x.extend(values[..PIXELS].iter().map(|v| v / 16.0));
        labels.push(values[PIXELS] as u32);
    }
    assert_eq!(labels.len(), 1797);
    (x, labels)
}

fn accuracy(logits: &[f32], labels: &[u32]) -> f64 {
    let classes = logits.len() / labels.len();
    let best = |row: &[f32]| (0..classes).max_by(|&a, &b| row[a].total_cmp(&row[b]));
    let right = logits.chunks_exact(classes).zip(labels).filter(|(row, label)| best(row) == Some(**label as usize));
    right.count() as f64 / labels.len() as f64
}

#[test]
fn a_perceptron_reads_digits_with_95_percent_accuracy() {
    const TEST: usize = 360;
    const BATCH: usize = 32;
    let (x, labels) = digits();
    let order = Stream::new(1, Purpose::Split, [0, 0, 0]).permutation(labels.len());
    let gather = |samples: &[u32]| -> (Vec<f32>, Vec<u32>) {
        let pixels = samples.iter().flat_map(|&i| &x[i as usize * PIXELS..(i as usize + 1) * PIXELS]);
        (pixels.copied().collect(), samples.iter().map(|&i| labels[i as usize]).collect())
    };
    let (test, train) = order.split_at(TEST);
    let (x_test, labels_test) = gather(test);

    let graph = models::mlp(Shape::vector(PIXELS), &[100, 100], 10, Variant::default()).unwrap();
    let mut ws = Workspace::new(&graph, &Options::training(TEST), Cpu::new(1)).unwrap();
    let mut params = graph.init_params(1, Init::Torch);
    let mut grad = vec![0.0; params.len()];
    let mut adam = Optimizer::new(Rule::adam(0.002), params.len()).unwrap();
    for epoch in 0..15 {
        let mut train = train.to_vec();
        Stream::new(1, Purpose::BatchOrder, [epoch, 0, 0]).shuffle(&mut train);
        for samples in train.chunks(BATCH) {
            let (x, labels) = gather(samples);
            let loss = (Loss::CrossEntropy, LossTargets::labels(&labels));
            ws.loss_gradient(&params, &mut [], &x, &loss, Mode::train(0), &mut grad).unwrap();
            adam.step(ws.cpu(), &mut params, &grad, 1.0);
        }
    }
    ws.forward(&params, &mut [], &x_test, Mode::EVAL).unwrap();
    let found = accuracy(ws.output(), &labels_test);
    assert!(found >= 0.95, "accuracy {found}");
}

/// A network with as many parameters as this one can learn any 32 labels by heart; one that cannot has a wrong
/// gradient.
fn check_overfits(norm: Norm) {
    const BATCH: usize = 32;
    let variant = Variant { norm, ..Variant::default() };
    let graph = models::build("resnet8-thin", Shape::image(16, 16, 3), 10, variant).unwrap();
    let mut s = stream(41);
    let x = normals(&mut s, BATCH * 16 * 16 * 3, 0.0, 1.0);
    let labels: Vec<u32> = (0..BATCH).map(|_| s.below(10)).collect();
    let mut ws = Workspace::new(&graph, &Options::training(BATCH), Cpu::new(1)).unwrap();
    let (mut params, mut buffers) = (graph.init_params(1, Init::Torch), graph.init_buffers());
    let mut grad = vec![0.0; params.len()];
    let mut adam = Optimizer::new(Rule::adam(0.003), params.len()).unwrap();
    let loss = (Loss::CrossEntropy, LossTargets::labels(&labels));
    let mut value = f64::INFINITY;
    for step in 0..100 {
        value = ws.loss_gradient(&params, &mut buffers, &x, &loss, Mode::train(step), &mut grad).unwrap();
        adam.step(ws.cpu(), &mut params, &grad, 1.0);
    }
    assert!(value < 0.05, "{norm:?}: loss {value}");
    // The running statistics have followed, so evaluation knows the batch too.
    ws.forward(&params, &mut buffers, &x, Mode::EVAL).unwrap();
    let found = accuracy(ws.output(), &labels);
    assert!(found > 0.9, "{norm:?}: accuracy {found} in evaluation");
}

#[test]
fn resnet8_thin_learns_one_batch_by_heart() {
    check_overfits(Norm::Batch);
}

#[test]
fn resnet8_thin_with_group_norm_learns_one_batch_by_heart() {
    check_overfits(Norm::Group(4));
}

/// Whether word 1 comes before word 2 is nothing that words alone tell: attention and positions have to.
#[test]
fn an_encoder_learns_which_of_two_words_comes_first() {
    const SLOTS: usize = 9;
    let config = BertConfig { vocabulary: 12, positions: SLOTS, ..BertConfig::sized(1, 16, 2, 32) };
    let graph = models::bert(&config, SLOTS, 2, Variant::default()).unwrap();
    let mut params = graph.init_params(3, Init::Torch);
    let mut adam = Optimizer::new(Rule::adam(3e-3), params.len()).unwrap();
    let mut grad = vec![0.0; params.len()];
    let mut ws = Workspace::new(&graph, &Options::training(64), Cpu::new(1)).unwrap();
    let mut stream = Stream::new(5, Purpose::Synthetic, [0; 3]);
    let mut batch = || {
        let (mut x, mut labels) = (vec![0.0; 64 * SLOTS], Vec::new());
        for text in x.chunks_exact_mut(SLOTS) {
            let len = 3 + stream.below(SLOTS as u32 - 2) as usize;
            text[0] = 1.0;
            for slot in &mut text[1..len] {
                *slot = 1.0 + 2.0 * (3 + stream.below(9)) as f32;
            }
            let places = stream.choose(len as u32 - 1, 2);
            let swap = stream.below(2);
            for (place, word) in places.iter().zip([1 + swap, 2 - swap]) {
                text[1 + *place as usize] = 1.0 + 2.0 * word as f32;
            }
            let first = |word: u32| text.iter().position(|&slot| slot as u32 == 1 + 2 * word);
            labels.push(u32::from(first(1) < first(2)));
        }
        (x, labels)
    };
    for step in 0..600 {
        let (x, labels) = batch();
        let loss = (Loss::CrossEntropy, LossTargets::labels(&labels));
        ws.loss_gradient(&params, &mut [], &x, &loss, Mode::train(step), &mut grad).unwrap();
        adam.step(ws.cpu(), &mut params, &grad, 1.0);
    }
    let (x, labels) = batch();
    ws.forward(&params, &mut [], &x, Mode::EVAL).unwrap();
    let right = ws.output().chunks_exact(2).zip(&labels).filter(|(z, l)| u32::from(z[1] > z[0]) == **l).count();
    assert!(right >= 60, "{right} of 64");
}
