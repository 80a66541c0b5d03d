//! A data set of one's own in one file: three spirals in the plane, made in memory, with an unlabelled public set drawn from the
//! whole plane. FedAvg and FedProj are run on it.
//!
//! `cargo run --release --example custom_dataset -p fedproj-core`

use fedproj_core::{Config, Experiment, Result, Simulation};
use fedproj_data::{Dataset, Samples, Shape};
use fedproj_rng::{Purpose, Stream};
use std::f64::consts::TAU;

const ARMS: u32 = 3;

/// `n` points on spirals with a little noise. A [`Dataset`] is a shape, all values one after the other, labels and names.
fn spirals(id: u32, n: u32) -> Result<Dataset> {
    let mut stream = Stream::new(0, Purpose::Synthetic, [id, 0, 0]);
    let (mut points, mut labels) = (Vec::new(), Vec::new());
    for i in 0..n {
        let arm = i % ARMS;
        let radius = 0.1 + 0.9 * stream.uniform();
        let angle = TAU * (f64::from(arm) / f64::from(ARMS) + 0.5 * radius) + 0.1 * stream.normal();
        points.extend([(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]);
        labels.push(arm);
    }
    let names = (0..ARMS).map(|arm| format!("arm {arm}")).collect();
    Ok(Dataset::new("spirals", Shape::Vector { features: 2 }, Samples::F32(points), Some(labels), names)?)
}

/// Points anywhere: public data need no labels, and need not look like the private ones.
fn plane(n: u32) -> Result<Dataset> {
    let mut stream = Stream::new(0, Purpose::Synthetic, [2, 0, 0]);
    let points = (0..2 * n).map(|_| (2.0 * stream.uniform() - 1.0) as f32).collect();
    Ok(Dataset::new("plane", Shape::Vector { features: 2 }, Samples::F32(points), None, Vec::new())?)
}

fn main() -> Result<()> {
    for method in ["fedavg", "fedproj"] {
        let settings = [
            &format!("method.name={method}"),
            // Each client knows one arm only.
            "data.partition={kind='one_class', clients=6}",
            "model.hidden=[64, 64]",
            "federation.rounds=30",
            "federation.fraction=0.5",
            "local.epochs=5",
            "method.fedproj.distill.optimizer.lr=1e-3",
        ];
        let settings: Vec<String> = settings.iter().map(|s| (*s).to_owned()).collect();
        let config = Config::from_layers(None, &settings)?;
        let (name, method) = (config.method.name.clone(), config.method.build()?);
        let experiment =
            Experiment::new(config, method.as_ref(), spirals(0, 900)?, spirals(1, 300)?, Some(plane(500)?))?;
        let mut simulation = Simulation::new(experiment, method, 2)?;
        let mut accuracies = Vec::new();
        while !simulation.is_done() {
            accuracies.extend(simulation.round(&|_| ())?.accuracy);
        }
        let last = &accuracies[accuracies.len() - 10..];
        println!("{name:<8} {:.1} %, mean of the last ten rounds", 100.0 * last.iter().sum::<f64>() / 10.0);
    }
    Ok(())
}
