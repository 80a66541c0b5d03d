//! The runs of the pilot study: three scenarios, three methods, some seeds.

use super::plane::Plane;
use crate::queue::Queue;
use anyhow::Result;
use fedproj_core::{Config, Evaluator, Experiment, Model, RoundRecord, Simulation};
use fedproj_data::{Dataset, Partition, Samples, Shape};
use fedproj_nn::{Cpu, Loss, LossTargets, Mode, Optimizer, Options, Rule, Workspace};
use fedproj_report::{Extent, Mesh};
use fedproj_rng::{Purpose, Stream};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The methods compared, in the order of every table and picture.
pub const METHODS: [(&str, &str); 3] = [("fedavg", "FedAvg"), ("feddf", "FedDF"), ("fedproj", "FedProj")];
/// Rounds of a run.
pub const ROUNDS: u32 = 20;
/// Rounds, counted from 1, whose models are kept for the decision regions.
pub const SHOWN: [u32; 3] = [1, 5, ROUNDS];
/// Flowers of one kind.
const PER_KIND: u32 = 50;
/// Virginica on the small client. With 50 the average recovers, and only the clients forget.
const FEW: u32 = 10;
/// Points of the mesh of a decision region along x and y.
const MESH: (usize, usize) = (150, 100);
/// Room around the flowers.
const MARGIN: f64 = 0.5;

/// How the flowers are dealt out and where the weights start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// One kind a client, the third client small; from scratch.
    Skewed,
    /// One kind a client, all of a size; from scratch.
    Balanced,
    /// Clients as in `Skewed`, from weights that were trained on all data in one place.
    Pretrained,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Skewed, Self::Balanced, Self::Pretrained];

    /// The name in files.
    pub fn key(self) -> &'static str {
        ["skewed", "balanced", "pretrained"][self as usize]
    }

    /// The name in tables and pictures.
    pub fn title(self) -> &'static str {
        ["skewed, from scratch", "balanced, from scratch", "skewed, pre-trained"][self as usize]
    }

    /// Client A has setosa, B versicolor, C virginica: all 50, or a seeded draw of 10.
    fn partition(self, seed: u64) -> Result<Partition> {
        let kind = |k: u32| (k * PER_KIND..(k + 1) * PER_KIND).collect::<Vec<u32>>();
        let mut last = kind(2);
        if self != Self::Balanced {
            let drawn = Stream::new(seed, Purpose::Partition, [0, 0, 0]).choose(PER_KIND, FEW);
            last = drawn.into_iter().map(|i| last[i as usize]).collect();
        }
        Ok(Partition::from_lists("pilot", vec![kind(0), kind(1), last], 3 * PER_KIND as usize)?)
    }
}

/// One run.
#[derive(Clone, Debug)]
pub struct PilotRun {
    /// Where it stands in the study.
    pub scenario: Scenario,
    /// Place in [`METHODS`].
    pub method: usize,
    /// Seed.
    pub seed: u64,
    /// All rounds.
    pub rounds: Vec<RoundRecord>,
    /// Accuracy before the first round.
    pub start: f64,
    /// The flowers of each client.
    pub held: Vec<Vec<u32>>,
    /// Models of the rounds in [`SHOWN`], if they were asked for.
    pub snapshots: Vec<Snapshot>,
}

/// The models of one round.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Round, counted from 1.
    pub round: u32,
    /// The global model before, each client after local training, and the global model after fusion.
    pub models: Vec<Pictured>,
}

/// What a decision region is drawn from.
#[derive(Clone, Debug)]
pub struct Pictured {
    /// Accuracy on all flowers.
    pub accuracy: f64,
    /// The model's scores over the plane.
    pub mesh: Mesh,
}

/// The set-up with every number that is not a default of fedproj.
fn config(scenario: Scenario, method: &str, seed: u64) -> Result<Config> {
    let lr = if scenario == Scenario::Pretrained { "1e-2" } else { "1e-3" };
    let mut settings = vec![
        format!("seed={seed}"),
        format!("method.name={method}"),
        format!("federation.rounds={ROUNDS}"),
        "federation.fraction=1.0".into(),
        "federation.evaluate_clients=true".into(),
        "model.name=mlp".into(),
        "model.hidden=[100, 100]".into(),
        "model.init=torch".into(),
        "local.epochs=5".into(),
        "local.batch=8".into(),
        format!("local.optimizer={{kind='sgd', lr={lr}, momentum=0.9, weight_decay=0.0}}"),
        "local.schedule.every=0.0".into(),
        // From the second round on; the first has no ensemble to remember.
        "method.fedproj.projection={mode='conditional', warmup=1}".into(),
        "method.fedproj.memory={size=150, batch=150, temperature=1.0}".into(),
    ];
    for method in ["feddf", "fedproj"] {
        settings.push(format!("method.{method}.distill={{epochs=1, batch=32, temperature=1.0, alpha=0.0}}"));
        let optimizer = "{kind='sgd', lr=1e-3, momentum=0.9, weight_decay=0.0}";
        settings.push(format!("method.{method}.distill.optimizer={optimizer}"));
    }
    Ok(Config::from_layers(None, &settings)?)
}

/// All runs of the study, on `n_threads` threads; `done` is called after each round.
pub fn study(plane: &Plane, seeds: &[u64], n_threads: usize, done: &(dyn Fn() + Sync)) -> Result<Vec<PilotRun>> {
    let mut jobs = Vec::new();
    for scenario in Scenario::ALL {
        for &seed in seeds {
            jobs.extend((0..METHODS.len()).map(|method| (scenario, method, seed)));
        }
    }
    let made = Mutex::new(BTreeMap::new());
    let make = |_, at: usize| {
        let (scenario, method, seed) = jobs[at];
        let run = run(plane, scenario, method, seed, Some(seed) == seeds.first().copied(), done)?;
        made.lock().unwrap_or_else(PoisonError::into_inner).insert(at, run);
        Ok(())
    };
    Queue::new(jobs.len(), n_threads).run(&make, &())?;
    Ok(made.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect())
}

/// One run through the public interface of the simulator; `pictured` keeps the models of some rounds.
fn run(
    plane: &Plane,
    scenario: Scenario,
    method_idx: usize,
    seed: u64,
    pictured: bool,
    done: &(dyn Fn() + Sync),
) -> Result<PilotRun> {
    let config = config(scenario, METHODS[method_idx].0, seed)?;
    let method = config.method.build()?;
    let (all, public) = (plane.data.clone(), plane.data.clone().without_labels());
    let partition = scenario.partition(seed)?;
    let held = (0..partition.n_clients()).map(|k| partition.indices(k).into_owned()).collect();
    let mut experiment =
        Experiment::with_partition(config, method.as_ref(), all.clone(), all, Some(public), partition)?;
    if scenario == Scenario::Pretrained {
        pretrain(&mut experiment, &plane.data)?;
    }
    let evaluator = Evaluator::new(&experiment.graph, 1)?;
    let mut simulation = Simulation::new(experiment, method, 1)?;
    let start = score(&evaluator, &simulation, &plane.data)?;
    let (mut rounds, mut snapshots) = (Vec::new(), Vec::new());
    while !simulation.is_done() {
        let before = simulation.state().clone();
        rounds.push(simulation.round(&|_| ())?);
        let round = rounds.len() as u32;
        if pictured && SHOWN.contains(&round) {
            let after = simulation.state().clone();
            let mut models = vec![Model { weights: &before.weights, buffers: &before.buffers }];
            let clients = simulation.last_results()?.iter();
            models.extend(clients.map(|r| Model { weights: &r.weights, buffers: &r.buffers }));
            models.push(Model { weights: &after.weights, buffers: &after.buffers });
            snapshots.push(Snapshot { round, models: picture(&evaluator, &models, plane)? });
        }
        done();
    }
    Ok(PilotRun { scenario, method: method_idx, seed, rounds, start, held, snapshots })
}

fn score(evaluator: &Evaluator, simulation: &Simulation, data: &Dataset) -> Result<f64> {
    let state = simulation.state();
    let scores = evaluator.scores(&[Model { weights: &state.weights, buffers: &state.buffers }], data)?;
    Ok(scores.first().map_or(0.0, |s| s.accuracy))
}

/// "Optimal weights": 400 steps of gradient descent on all flowers at once, at rate 0.05.
fn pretrain(experiment: &mut Experiment, data: &Dataset) -> Result<()> {
    let n = data.n_samples();
    let labels = data.labels().unwrap_or(&[]);
    let x = data.gather_all();
    let mut ws = Workspace::new(&experiment.graph, &Options::training(n), Cpu::new(1))?;
    let mut optimizer = Optimizer::new(Rule::sgd(0.05), experiment.weights.len())?;
    let mut grad = vec![0.0; experiment.weights.len()];
    let loss = (Loss::CrossEntropy, LossTargets::labels(labels));
    for _ in 0..400 {
        ws.loss_gradient(&experiment.weights, &mut experiment.buffers, &x, &loss, Mode::EVAL, &mut grad)?;
        optimizer.step(ws.cpu(), &mut experiment.weights, &grad, 1.0);
    }
    Ok(())
}

/// The part of the plane that is drawn.
pub fn extent(plane: &Plane) -> Extent {
    Extent::around(plane.points().iter().map(|p| (p.0, p.1)), MARGIN)
}

/// Accuracy of models, and their scores over a mesh of the plane.
fn picture(evaluator: &Evaluator, models: &[Model<'_>], plane: &Plane) -> Result<Vec<Pictured>> {
    let extent = extent(plane);
    let points = extent.mesh_points(MESH.0, MESH.1).into_iter().flat_map(|(x, y)| [x as f32, y as f32]).collect();
    let mesh = Dataset::new("mesh", Shape::Vector { features: 2 }, Samples::F32(points), None, Vec::new())?;
    let outputs = evaluator.outputs(models, &mesh, false)?;
    let scores = evaluator.scores(models, &plane.data)?;
    let pair = |(out, score): (fedproj_core::Outputs, fedproj_core::Score)| Pictured {
        accuracy: score.accuracy,
        mesh: Mesh { n_x: MESH.0, n_y: MESH.1, scores: out.logits },
    };
    Ok(outputs.into_iter().zip(scores).map(pair).collect())
}
