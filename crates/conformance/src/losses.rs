//! Every loss at a node: its value and its gradient there, with full and short batches, alone and after another.

use crate::Suite;
use crate::backends::{random, random_labels};
use crate::compare::Group;
use anyhow::Result;
use fedproj_nn::cuda::{Batches, Data, Fleet, Gpu, LossOf, NOBODY, Target};
use fedproj_nn::{
    Cpu, Direction, EmbeddingId, Graph, Loss, LossTargets, Mode, Options, RelaxedContrast, Shape, Workspace,
};
use std::sync::Arc;

const TOLERANCE: f64 = 1e-4;
const BATCH: usize = 9;
const WEIGHT: f32 = 0.7;
/// Valid samples of each lane.
const VALID: [usize; 3] = [BATCH, BATCH - 2, 4];

/// Values and what they are compared with, for all samples that lanes draw from.
struct Case {
    shape: Shape,
    z: Vec<f32>,
    target: Vec<f32>,
    /// Embeddings that attract and repel.
    others: [Vec<f32>; 2],
    labels: Vec<u32>,
    marks: Vec<u32>,
    /// Offsets of the classes, one row per lane.
    offsets: Vec<Vec<f32>>,
}

pub fn check(suite: &Suite, group: &mut Group) -> Result<()> {
    for shape in [Shape::vector(5), Shape::vector(37), Shape::image(2, 3, 6)] {
        let (n, len) = (BATCH * VALID.len(), shape.len());
        let case = Case {
            shape,
            z: random(20, n * len),
            target: random(21, n * len),
            others: [random(22, n * len), random(23, n * len)],
            labels: random_labels(24, n, shape.c.min(4)),
            marks: random_labels(25, n, 2),
            // The last class has no label.
            offsets: (26..29).map(|id| [&random(id, len - 1)[..], &[f32::NEG_INFINITY]].concat()).collect(),
        };
        for (name, term) in terms_of(shape) {
            for after_another in [false, true] {
                let found = on_gpu(suite.gpu()?, &case, &term, after_another)?;
                for (lane, (found, n_valid)) in found.iter().zip(VALID).enumerate() {
                    let expected = on_cpu(&case, lane, n_valid, &term, after_another)?;
                    let second = if after_another { ", second" } else { "" };
                    let what = format!("{name}{second} at {shape}, {n_valid} of {BATCH}:");
                    group.compare_numbers(&format!("{what} value"), found.0, expected.0, TOLERANCE);
                    group.compare(&format!("{what} gradient"), &found.1, &expected.1, TOLERANCE);
                }
            }
        }
    }
    Ok(())
}

fn terms_of(shape: Shape) -> Vec<(String, Loss)> {
    let constants = |threshold| {
        Loss::RelaxedContrast(RelaxedContrast {
            temperature: 0.2,
            threshold,
            contrast_weight: 1.0,
            penalty_weight: 0.5,
        })
    };
    let mut all = vec![
        ("relaxed contrast".to_owned(), constants(0.7)),
        ("relaxed contrast, all pushed apart".to_owned(), constants(-1.0)),
    ];
    all.push(("masked squares".into(), Loss::MaskedSquares));
    all.push((
        "contrast".into(),
        Loss::Contrast { positive: EmbeddingId(0), negative: EmbeddingId(1), temperature: 0.5 },
    ));
    if shape.pixels() > 1 {
        return all;
    }
    all.push(("absolute error".into(), Loss::AbsoluteError));
    all.push(("cross-entropy".into(), Loss::CrossEntropy));
    all.push(("cross-entropy with offsets".into(), Loss::OffsetCrossEntropy));
    all.push(("KL of not-true classes".into(), Loss::NotTrueKl { teacher: EmbeddingId(1), temperature: 2.0 }));
    for (name, direction) in [("KL(t ‖ s)", Direction::TeacherToStudent), ("KL(s ‖ t)", Direction::StudentToTeacher)]
    {
        for times_t_squared in [false, true] {
            for only_marked in [false, true] {
                let term = Loss::Kl { temperature: 3.0, direction, times_t_squared, only_marked };
                let squared = if times_t_squared { "·T²" } else { "" };
                let marked = if only_marked { " of marked samples" } else { "" };
                all.push((format!("{name}{squared}{marked}"), term));
            }
        }
    }
    all
}

/// The graph's input is the node in question, so that nothing comes between the numbers and the loss.
fn graph(shape: Shape) -> Result<Graph> {
    let mut g = Graph::new(shape);
    let x = g.flatten("flatten", g.input())?;
    g.linear("fc", x, 2, false)?;
    Ok(g)
}

/// Loss and gradient of each lane; lane l has samples l, l + lanes, …
fn on_gpu(gpu: &Arc<Gpu>, case: &Case, loss: &Loss, after_another: bool) -> Result<Vec<(f64, Vec<f32>)>> {
    let (g, len, lanes) = (graph(case.shape)?, case.shape.len(), VALID.len());
    let node = g.input();
    let options = Options { batch: BATCH, taps: &[node], training: true };
    let mut fleet = Fleet::new(gpu, &g, lanes, &options)?;
    let mut data = Data::matrix(gpu, &case.z, len)?;
    data.set_labels(gpu, &case.labels)?;
    let target = Data::matrix(gpu, &case.target, len)?;
    let marks = Data::numbers(gpu, &case.marks)?;
    let padded = |sample: &dyn Fn(usize, usize) -> usize| {
        let of = |lane: usize| {
            let mut batch: Vec<u32> = (0..VALID[lane]).map(|i| sample(lane, i) as u32).collect();
            batch.resize(BATCH, NOBODY);
            batch
        };
        (0..lanes).map(of).collect::<Vec<_>>()
    };
    fleet.set_table(Batches::Samples, &padded(&|lane, i| i * lanes + lane), BATCH)?;
    // Embeddings lie in the order of a lane's own samples.
    fleet.set_table(Batches::Positions, &padded(&|_, i| i), BATCH)?;
    fleet.gather(&data, Batches::Samples, 0, false)?;
    for slot in [Target::Logits, Target::Features] {
        fleet.gather_target(&target, Batches::Samples, 0, slot, false)?;
    }
    fleet.gather_target(&marks, Batches::Samples, 0, Target::Marks, false)?;
    for (index, others) in case.others.iter().enumerate() {
        let mut all = fleet.vectors(BATCH * len)?;
        for (lane, n_valid) in VALID.into_iter().enumerate() {
            let mut own = rows(others, len, lane, n_valid);
            own.resize(BATCH * len, 0.0);
            fleet.write(&mut all, lane, &own)?;
        }
        fleet.gather_embedding(&all, len, index)?;
        gpu.synchronize()?;
    }
    for (lane, offsets) in case.offsets.iter().enumerate() {
        fleet.set_offsets(lane, offsets)?;
    }
    let (theta, buffers) = (fleet.vectors(g.params().len())?, fleet.vectors(0)?);
    fleet.forward(theta.rows(), buffers.rows(), Mode::EVAL)?;
    if after_another {
        fleet.add_loss(node, &Loss::MaskedSquares, 1.0, true)?;
    }
    fleet.add_loss(node, loss, WEIGHT, !after_another)?;
    fleet.record_loss(LossOf::Samples)?;
    let stats = fleet.stats()?;
    let lane = |lane: usize| Ok((stats[lane].loss_total, fleet.read_gradient(node, lane, VALID[lane])?));
    (0..lanes).map(lane).collect()
}

fn on_cpu(case: &Case, lane: usize, n: usize, loss: &Loss, after_another: bool) -> Result<(f64, Vec<f32>)> {
    let len = case.shape.len();
    let of = |matrix: &[f32]| rows(matrix, len, lane, n);
    let (z, target) = (of(&case.z), of(&case.target));
    let numbers = |all: &[u32]| (0..n).map(|i| all[i * VALID.len() + lane]).collect::<Vec<u32>>();
    let labels = numbers(&case.labels);
    let marks: Vec<bool> = numbers(&case.marks).into_iter().map(|mark| mark != 0).collect();
    let embeddings = [of(&case.others[0]), of(&case.others[1])];
    let (logits, features) = (&target, &target);
    let (offsets, embeddings) = (&case.offsets[lane][..], &embeddings[..]);
    let targets = LossTargets { labels: &labels, logits, features, marks: &marks, offsets, embeddings };
    let mut grad = vec![0.0; z.len()];
    let mut value = 0.0;
    if after_another {
        value += add(&z, case.shape, &(Loss::MaskedSquares, targets), 1.0, &mut grad)?;
    }
    value += add(&z, case.shape, &(*loss, targets), WEIGHT, &mut grad)?;
    Ok((value, grad))
}

/// Adds the gradient of a loss at plain numbers and returns the weighted loss.
fn add(z: &[f32], shape: Shape, loss: &(Loss, LossTargets<'_>), weight: f32, grad: &mut [f32]) -> Result<f64> {
    let g = graph(shape)?;
    let node = g.input();
    let options = Options { batch: z.len() / shape.len(), taps: &[node], training: true };
    let mut ws = Workspace::new(&g, &options, Cpu::new(1))?;
    ws.forward(&vec![0.0; g.params().len()], &mut [], z, Mode::EVAL)?;
    let value = ws.add_loss(node, loss, weight)?;
    ws.inject(node, |_, slope| grad.iter_mut().zip(slope).for_each(|(g, s)| *g += *s))?;
    Ok(f64::from(weight) * value)
}

fn rows(matrix: &[f32], len: usize, lane: usize, n: usize) -> Vec<f32> {
    let row = |i: usize| &matrix[(i * VALID.len() + lane) * len..][..len];
    (0..n).flat_map(row).copied().collect()
}
