//! Passes that begin at an inner node, on features that another network generates, against that part of the network on the
//! CPU: several per step, and steps with fewer features than the batch has room for.

use crate::backends::{random, random_buffers, random_labels, random_weights};
use crate::compare::Group;
use anyhow::Result;
use fedproj_nn::cuda::{Batches, Fleet, Gpu, LossOf, NOBODY};
use fedproj_nn::{
    Activation, Cpu, Dropout, Graph, Loss, LossTargets, Mode, NodeId, NormMode, Options, Shape, Workspace,
};
use std::sync::Arc;

const TOLERANCE: f64 = 1e-4;
const LANES: usize = 3;
const STEPS: usize = 2;
/// The largest batch, and the features of each pass of a step.
const BATCH: usize = 9;
const PASSES: [usize; 2] = [8, 9];
const NOISE: usize = 3;
const CLASSES: usize = 4;
const MODE: Mode = Mode { norm: NormMode::Batch, dropout: Dropout::Off };

/// What a lane's pass takes: labels, and the noise of each.
type Drawn = (Vec<u32>, Vec<f32>);

/// A network whose head has a batch-norm, and where the head begins.
fn network() -> Result<(Graph, NodeId)> {
    let mut g = Graph::new(Shape::vector(5));
    let x = g.linear("fc1", g.input(), 11, true)?;
    let features = g.activation("features", x, Activation::Relu)?;
    let x = g.linear("fc2", features, 7, false)?;
    let x = g.batch_norm("bn", x)?;
    let x = g.activation("relu", x, Activation::Relu)?;
    g.linear("fc3", x, CLASSES, true)?;
    Ok((g, features))
}

fn generator() -> Result<Graph> {
    let mut g = Graph::new(Shape::vector(NOISE + CLASSES));
    g.linear("generator", g.input(), 11, true)?;
    Ok(g)
}

/// The first pass of a lane lacks some features, as a short batch does.
fn draw(lane: usize, step: usize, pass: usize) -> Drawn {
    let id = (60 + (lane * STEPS + step) * PASSES.len() + pass) as u32;
    let n = PASSES[pass] - if pass == 0 { lane + step } else { 0 };
    (random_labels(id, n, CLASSES), random(id, n * NOISE))
}

/// The words of a lane's table.
fn table(lane: usize) -> Vec<u32> {
    let passes = (0..STEPS).flat_map(|step| (0..PASSES.len()).map(move |pass| draw(lane, step, pass)));
    let words = passes.flat_map(|(mut labels, noise)| {
        labels.resize(BATCH, NOBODY);
        labels.extend(noise.iter().map(|value| value.to_bits()));
        labels.resize(BATCH * (1 + NOISE), NOBODY);
        labels
    });
    words.collect()
}

pub fn check(gpu: &Arc<Gpu>, group: &mut Group) -> Result<()> {
    let ((graph, features), made_by) = (network()?, generator()?);
    let options = Options { batch: BATCH, taps: &[features], training: true };
    let mut fleet = Fleet::new(gpu, &graph, LANES, &options)?;
    let mut generator = Fleet::new(gpu, &made_by, LANES, &Options { taps: &[], training: false, ..options })?;
    let generator_params = generator.shared_vector(&random_weights(&made_by, 9))?;
    let (mut params, mut buffers) = (fleet.vectors(graph.params().len())?, fleet.vectors(graph.buffers().len())?);
    let mut gradient = fleet.vectors(graph.params().len())?;
    for lane in 0..LANES {
        fleet.write(&mut params, lane, &random_weights(&graph, lane as u32))?;
        fleet.write(&mut buffers, lane, &random_buffers(&graph, lane as u32))?;
        fleet.write(&mut gradient, lane, &vec![f32::NAN; graph.params().len()])?;
    }
    let tables: Vec<Vec<u32>> = (0..LANES).map(table).collect();
    fleet.set_table(Batches::Generated, &tables, PASSES.len() * BATCH * (1 + NOISE))?;
    for step in 0..STEPS {
        for (pass, n) in PASSES.into_iter().enumerate() {
            fleet.gather_generated(&mut generator, generator_params.rows(), features, pass, n)?;
            fleet.forward_from(features, params.rows(), buffers.rows(), MODE)?;
            fleet.add_loss(graph.output(), &Loss::CrossEntropy, 1.0, true)?;
            fleet.record_loss(LossOf::Other)?;
            fleet.backward(params.rows(), gradient.rows())?;
            for lane in 0..LANES {
                let drawn = draw(lane, step, pass);
                let (logits, expected) = on_cpu((&graph, features), &made_by, lane, &drawn)?;
                let what = format!("head, lane {lane}, step {step}, pass {pass}:");
                let found = fleet.read_value(graph.output(), lane, drawn.0.len())?;
                group.compare(&format!("{what} logits"), &found, &logits, TOLERANCE);
                let found = fleet.read(&gradient, lane)?;
                group.compare_tensors(&what, graph.params(), &found, &expected, TOLERANCE);
                let stays = fleet.read(&buffers, lane)? == random_buffers(&graph, lane as u32);
                group.require(stays, &format!("{what} running statistics stay:"));
            }
        }
        fleet.advance(1, 0)?;
    }
    let counted = fleet.stats()?.iter().any(|stats| stats.loss_total != 0.0 || stats.not_finite.is_some());
    group.require(!counted, "losses of heads are finite and not counted:");
    Ok(())
}

/// Logits of a lane's head, and the gradient of all of the network's parameters.
fn on_cpu(
    (graph, features): (&Graph, NodeId),
    made_by: &Graph,
    lane: usize,
    (labels, noise): &Drawn,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let mut x = Vec::new();
    for (label, noise) in labels.iter().zip(noise.chunks_exact(NOISE)) {
        x.extend_from_slice(noise);
        x.extend((0..CLASSES).map(|class| f32::from(u8::from(class == *label as usize))));
    }
    let options = Options { batch: BATCH, taps: &[], training: true };
    let mut generator = Workspace::new(made_by, &options, Cpu::new(1))?;
    generator.forward(&random_weights(made_by, 9), &mut [], &x, Mode::EVAL)?;
    let tail = graph.tail(features)?;
    let mut head = Workspace::new(&tail.graph, &options, Cpu::new(1))?;
    let mut params = vec![0.0; tail.graph.params().len()];
    let mut buffers = tail.graph.init_buffers();
    tail.take_params(&random_weights(graph, lane as u32), &mut params);
    tail.take_buffers(&random_buffers(graph, lane as u32), &mut buffers);
    let (mut of_head, mut gradient) = (params.clone(), vec![0.0; graph.params().len()]);
    let loss = (Loss::CrossEntropy, LossTargets::labels(labels));
    head.loss_gradient(&params, &mut buffers, generator.output(), &loss, MODE, &mut of_head)?;
    tail.place_params(&of_head, &mut gradient);
    Ok((head.output().to_vec(), gradient))
}
