//! The training step of a fleet on a GPU.

use anyhow::Result;
use fedproj_nn::cuda::{Batches, Data, Fleet, Gpu, LossOf};
use fedproj_nn::{Dropout, Graph, Init, Loss, Mode, NormMode, Options, Rule};
use fedproj_rng::{Purpose, Stream};
use std::sync::Arc;
use std::time::Instant;

/// Trains `clients` networks side by side, each on a batch of its own of the samples `x`. Returns the median seconds of a step
/// of all.
pub fn step(graph: &Graph, gpu: &Arc<Gpu>, clients: usize, x: &[f32], steps: usize) -> Result<f64> {
    let sample = graph.shape(graph.input()).len();
    let n = x.len() / sample;
    let batch = n / clients;
    let options = Options { batch, taps: &[], training: true };
    let mut fleet = Fleet::new(gpu, graph, clients, &options)?;
    let mut stream = Stream::new(0, Purpose::Synthetic, [0, 1, 0]);
    let labels: Vec<u32> = (0..n).map(|_| stream.below(10)).collect();
    let mut data = Data::matrix(gpu, x, sample)?;
    data.set_labels(gpu, &labels)?;
    let (params, buffers) = (graph.init_params(0, Init::Torch), graph.init_buffers());
    let (mut theta, mut running) = (fleet.vectors(params.len())?, fleet.vectors(buffers.len())?);
    let grad = fleet.vectors(params.len())?;
    for lane in 0..clients {
        fleet.write(&mut theta, lane, &params)?;
        fleet.write(&mut running, lane, &buffers)?;
    }
    let rule = Rule::adam(1e-3);
    let moments = fleet.moments(&rule)?;
    // Every step takes the same batch, as the CPU's measurement does.
    let own = |lane: usize| (lane * batch..(lane + 1) * batch).map(|i| i as u32).collect();
    fleet.set_table(Batches::Samples, &(0..clients).map(own).collect::<Vec<_>>(), batch)?;
    fleet.set_table(Batches::LrFactors, &vec![vec![1.0f32.to_bits()]; clients], 1)?;
    fleet.set_table(Batches::DropoutKeys, &vec![vec![1, 2]; clients], 2)?;
    let pass = Mode { norm: NormMode::Update, dropout: Dropout::OfStep };
    let output = graph.output();
    let mut times = Vec::with_capacity(steps);
    for _ in 0..steps {
        let start = Instant::now();
        if let Some(recording) = fleet.replay(0)? {
            fleet.gather(&data, Batches::Samples, 0, false)?;
            fleet.forward(theta.rows(), running.rows(), pass)?;
            fleet.add_loss(output, &Loss::CrossEntropy, 1.0, true)?;
            fleet.record_loss(LossOf::Samples)?;
            fleet.backward(theta.rows(), grad.rows())?;
            fleet.update(&rule, &moments, theta.rows(), grad.rows())?;
            fleet.end_recording(recording, true)?;
        }
        gpu.synchronize()?;
        times.push(start.elapsed().as_secs_f64());
    }
    let timed = &mut times[steps / 3..];
    timed.sort_by(f64::total_cmp);
    Ok(timed[timed.len() / 2])
}
