//! Fixed points that theory knows, on a strongly convex problem: softmax regression with weight decay, two clients whose
//! data differ. Gradients of the true objective come from the engine, whose gradients have their own tests.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use fedproj_core::{Config, Experiment, Simulation};
use fedproj_data::{Dataset, Partition, Samples, Shape};
use fedproj_nn::{Cpu, Loss, LossTargets, Mode, Options, Workspace};
use fedproj_rng::{Purpose, Stream};

const WEIGHT_DECAY: f32 = 0.05;
const FEATURES: usize = 4;

/// `sizes[k]` samples of client k around class means that differ between the clients.
fn dataset(sizes: [usize; 2]) -> (Dataset, Partition) {
    let mut stream = Stream::new(3, Purpose::Synthetic, [0, 0, 0]);
    let (mut x, mut labels, mut lists, mut next) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for (client, size) in sizes.into_iter().enumerate() {
        for i in 0..size {
            let label = (if i % 4 == 0 { client + 1 } else { client }) as u32;
            x.extend((0..FEATURES).map(|f| {
                let centre = if f as u32 == label { 1.5 } else { 0.0 } + client as f64 * 0.7;
                (centre + 0.5 * stream.normal()) as f32
            }));
            labels.push(label);
        }
        lists.push((next..next + size as u32).collect());
        next += size as u32;
    }
    let names = (0..3).map(|c| c.to_string()).collect();
    let shape = Shape::Vector { features: FEATURES };
    let data = Dataset::new("convex", shape, Samples::F32(x), Some(labels), names).unwrap();
    (data, Partition::from_lists("two", lists, next as usize).unwrap())
}

fn simulate(sizes: [usize; 2], overrides: &[&str]) -> Simulation {
    let base = [
        "model.hidden=[]",
        "federation.fraction=1.0",
        "federation.evaluate_every=1000000",
        "local.batch=20",
        "local.schedule.every=0.0",
        "data.public=none",
    ];
    let all: Vec<String> = base.iter().chain(overrides).map(|s| (*s).to_owned()).collect();
    let config = Config::from_layers(None, &all).unwrap();
    let method = config.method.build().unwrap();
    let (data, partition) = dataset(sizes);
    let experiment = Experiment::with_partition(config, method.as_ref(), data.clone(), data, None, partition).unwrap();
    let mut simulation = Simulation::new(experiment, method, 1).unwrap();
    while !simulation.is_done() {
        simulation.round(&|_| ()).unwrap();
    }
    simulation
}

/// ∇F_k(θ), weight decay included.
fn gradient(simulation: &Simulation, client: usize, theta: &[f32]) -> Vec<f64> {
    let experiment = simulation.experiment();
    let indices = experiment.partition.indices(client);
    let mut x = vec![0.0; indices.len() * FEATURES];
    experiment.private.gather(&indices, &mut x);
    let labels: Vec<u32> = indices.iter().map(|&i| experiment.private.labels().unwrap()[i as usize]).collect();
    let mut ws = Workspace::new(&experiment.graph, &Options::training(indices.len()), Cpu::new(1)).unwrap();
    let mut grad = vec![0.0; theta.len()];
    let loss = (Loss::CrossEntropy, LossTargets::labels(&labels));
    ws.loss_gradient(theta, &mut [], &x, &loss, Mode::EVAL, &mut grad).unwrap();
    grad.iter().zip(theta).map(|(g, t)| f64::from(*g) + f64::from(WEIGHT_DECAY * t)).collect()
}

fn norm(v: &[f64]) -> f64 {
    v.iter().map(|v| v * v).sum::<f64>().sqrt()
}

/// ‖Σ_k w_k ∇F_k(θ)‖: 0 at the minimum of the federation's objective.
fn objective_gradient(simulation: &Simulation, weights: [f64; 2], theta: &[f32]) -> f64 {
    let (a, b) = (gradient(simulation, 0, theta), gradient(simulation, 1, theta));
    norm(&a.iter().zip(&b).map(|(a, b)| weights[0] * a + weights[1] * b).collect::<Vec<_>>())
}

const SGD: &str = "local.optimizer={kind='sgd', lr=0.1, weight_decay=0.05}";
const ROUNDS: &str = "federation.rounds=400";

#[test]
fn scaffold_and_feddyn_reach_the_minimum_where_fedavg_stays_off() {
    let run = |name: &str| {
        let method = format!("method.name={name}");
        let settings = [SGD, ROUNDS, "local.epochs=10", "method.feddyn.alpha=0.5", &method];
        simulate([20, 20], &settings)
    };
    let at = |simulation: &Simulation, theta: &[f32]| objective_gradient(simulation, [0.5, 0.5], theta);
    let fedavg = run("fedavg");
    let drift = at(&fedavg, &fedavg.state().weights);
    assert!(drift > 1e-2, "the problem is heterogeneous enough to show drift: {drift}");
    let scaffold = run("scaffold");
    let gradient = at(&scaffold, &scaffold.state().weights);
    assert!(gradient < 1e-4, "SCAFFOLD stops where the average gradient is 0: {gradient}");
    // FedDyn's evaluated model, the mean of the clients, is the one that converges.
    let mut feddyn = run("feddyn");
    let n_weights = feddyn.state().weights.len();
    let results = feddyn.last_results().unwrap();
    let mean: Vec<f32> = (0..n_weights).map(|i| results.iter().map(|r| r.weights[i]).sum::<f32>() / 2.0).collect();
    let gradient = at(&feddyn, &mean);
    assert!(gradient < 1e-3, "FedDyn stops where the average gradient is 0: {gradient}");
}

#[test]
fn fednova_removes_the_bias_of_unequal_steps() {
    // 1 against 5 steps an epoch: FedAvg leans to the client that steps more, FedNova (small rate) hardly does.
    let sgd = "local.optimizer={kind='sgd', lr=0.02, weight_decay=0.05}";
    let run = |name: &str| {
        let method = format!("method.name={name}");
        let simulation = simulate([20, 100], &[sgd, ROUNDS, "local.epochs=4", &method]);
        objective_gradient(&simulation, [20.0 / 120.0, 100.0 / 120.0], &simulation.state().weights)
    };
    let (fedavg, fednova) = (run("fedavg"), run("fednova"));
    assert!(fednova < 0.5 * fedavg, "FedNova's gradient {fednova}, FedAvg's {fedavg}");
}

#[test]
fn fedprox_solves_each_proximal_problem() {
    // With enough local steps ∇F_k(w_k) + μ (w_k − wᵗ) = 0 for each client, and at the fixed point Σ ∇F_k(w_k) = 0.
    let settings =
        [SGD, "federation.rounds=150", "local.epochs=300", "method.name=fedprox", "method.fedprox.proximal_weight=0.5"];
    let mut simulation = simulate([20, 20], &settings);
    let results: Vec<(u32, Vec<f32>)> =
        simulation.last_results().unwrap().iter().map(|r| (r.client, r.weights.clone())).collect();
    let start: Vec<f64> = {
        // At the fixed point the round starts where it ends.
        simulation.state().weights.iter().map(|w| f64::from(*w)).collect()
    };
    let gradients: Vec<Vec<f64>> =
        results.iter().map(|(client, weights)| gradient(&simulation, *client as usize, weights)).collect();
    for ((client, weights), gradient) in results.iter().zip(&gradients) {
        let residual: Vec<f64> =
            gradient.iter().zip(weights).zip(&start).map(|((g, w), start)| g + 0.5 * (f64::from(*w) - start)).collect();
        assert!(norm(&residual) < 1e-3, "client {client}: {}", norm(&residual));
        assert!(norm(gradient) > 1e-2, "the proximal term holds the client off its own minimum");
    }
    let total: Vec<f64> = gradients[0].iter().zip(&gradients[1]).map(|(a, b)| a + b).collect();
    assert!(norm(&total) < 1e-3, "{}", norm(&total));
}
