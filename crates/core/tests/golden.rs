//! Every method against an independent reference: two clients, three rounds, a small MLP. The numbers come from
//! `fixtures/methods/make.py`, which computes in double precision; relative L2 error of each tensor at most 1e-4, and of the
//! whole movement from the start at most 1e-3.

#![allow(clippy::unwrap_used, reason = "a test that cannot read its fixture has failed")]

use fedproj_core::{Config, Experiment, Method, Simulation};
use fedproj_data::{Dataset, Partition, Samples, Shape};
use fedproj_nn::Graph;
use safetensors::SafeTensors;

const TOLERANCE: f64 = 1e-4;
const TOLERANCE_MOVEMENT: f64 = 1e-3;

struct Fixture {
    bytes: Vec<u8>,
}

impl Fixture {
    fn open() -> Self {
        let path = format!("{}/../../fixtures/methods/methods.safetensors", env!("CARGO_MANIFEST_DIR"));
        Self { bytes: std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}")) }
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = file.tensor(name).unwrap_or_else(|_| panic!("the fixture has no tensor {name}"));
        view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn integers(&self, name: &str) -> Vec<u32> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = file.tensor(name).unwrap_or_else(|_| panic!("the fixture has no tensor {name}"));
        view.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect()
    }

    fn dataset(name: &str, x: Vec<f32>, labels: Option<Vec<u32>>) -> Dataset {
        let classes = if labels.is_some() { vec!["a".into(), "b".into(), "c".into()] } else { Vec::new() };
        Dataset::new(name, Shape::Vector { features: 6 }, Samples::F32(x), labels, classes).unwrap()
    }

    fn experiment(&self, config: Config, method: &dyn Method) -> Experiment {
        let both =
            |key: &str| [self.floats(&format!("client0/{key}")), self.floats(&format!("client1/{key}"))].concat();
        let labels = [self.integers("client0/y"), self.integers("client1/y")].concat();
        let n_first = self.integers("client0/y").len() as u32;
        let n_all = labels.len() as u32;
        let partition =
            Partition::from_lists("fixture", vec![(0..n_first).collect(), (n_first..n_all).collect()], n_all as usize);
        Experiment::with_partition(
            config,
            method,
            Self::dataset("private", both("x"), Some(labels)),
            Self::dataset("test", self.floats("test/x"), Some(self.integers("test/y"))),
            Some(Self::dataset("public", self.floats("public/x"), None)),
            partition.unwrap(),
        )
        .unwrap()
    }

    fn flat(&self, graph: &Graph, prefix: &str) -> Vec<f32> {
        let mut flat = vec![0.0; graph.params().len()];
        for span in graph.params().spans() {
            span.write_torch(&self.floats(&format!("{prefix}/{}", span.name)), &mut flat);
        }
        flat
    }
}

fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    let square = |f: &dyn Fn(usize) -> f64| (0..found.len()).map(|i| f(i).powi(2)).sum::<f64>().sqrt();
    let difference = square(&|i| f64::from(found[i]) - f64::from(expected[i]));
    difference / square(&|i| f64::from(expected[i])).max(1e-12)
}

const BASE: &[&str] = &[
    "seed=7",
    "model.hidden=[8]",
    "federation.rounds=3",
    "federation.fraction=1.0",
    "local.epochs=2",
    "local.batch=5",
    "local.optimizer={kind='sgd', lr=0.1, weight_decay=0.0}",
    "local.schedule.every=0.0",
    "method.feddf.distill.optimizer.lr=1e-3",
    "method.feddf.distill.batch=4",
    "method.fedet.optimizer.lr=1e-3",
    "method.fedet.batch=4",
    "method.fedproj.projection.warmup=1",
    "method.fedproj.memory={size=8, batch=4}",
    "method.fedproj.distill.optimizer.lr=1e-3",
    "method.fedproj.distill.batch=4",
    "method.fedproj.distill.alpha=0.1",
];

fn config(method: &str, overrides: &[&str]) -> Config {
    let all = BASE.iter().chain(overrides).map(|s| (*s).to_owned());
    Config::from_layers(None, &all.chain([format!("method.name={method}")]).collect::<Vec<_>>()).unwrap()
}

fn check(trace: &str, method: &str, overrides: &[&str]) {
    let fixture = Fixture::open();
    let config = config(method, overrides);
    let method = config.method.build().unwrap();
    let experiment = fixture.experiment(config, method.as_ref());
    let graph = experiment.graph.clone();
    let init = experiment.weights.clone();
    let prefix = if trace.starts_with("moon") { "init_moon" } else { "init" };
    assert_eq!(init, fixture.flat(&graph, prefix), "{trace}: initial weights");
    let mut simulation = Simulation::new(experiment, method, 2).unwrap();
    for round in 0..3 {
        let record = simulation.round(&|_| ()).unwrap();
        let found = &simulation.state().weights;
        let expected = fixture.flat(&graph, &format!("{trace}/round{round}"));
        for span in graph.params().spans() {
            let error = relative_error(&found[span.range()], &expected[span.range()]);
            assert!(error <= TOLERANCE, "{trace}, round {round}, {}: relative error {error:.2e}", span.name);
        }
        let moved = |to: &[f32]| to.iter().zip(&init).map(|(a, b)| a - b).collect::<Vec<f32>>();
        let error = relative_error(&moved(found), &moved(&expected));
        assert!(error <= TOLERANCE_MOVEMENT, "{trace}, round {round}: movement differs by {error:.2e}");
        if trace == "fedproj" {
            let counts = fixture.integers(&format!("fedproj/round{round}/active"));
            let expected = (counts[1] > 0).then(|| f64::from(counts[0]) / f64::from(counts[1]));
            assert_eq!(record.projection_rate, expected, "round {round}");
        }
    }
}

#[test]
fn orders_follow_the_reference() {
    use fedproj_rng::{Purpose, Stream};
    let fixture = Fixture::open();
    let order = |purpose, ids, n| Stream::new(7, purpose, ids).permutation(n);
    assert_eq!(order(Purpose::BatchOrder, [0, 0, 0], 12), fixture.integers("orders/round0_client0_epoch0"));
    assert_eq!(order(Purpose::DistillOrder, [0, 0, 0], 10), fixture.integers("orders/distill_round0_epoch0"));
    assert_eq!(Stream::new(7, Purpose::Memory, [1, 0, 0]).choose(10, 8), fixture.integers("orders/memory_round1"));
}

#[test]
fn fedavg_follows_the_reference() {
    check("fedavg", "fedavg", &[]);
    let adam = "local.optimizer={kind='adam', lr=0.01, eps=1e-3, weight_decay=0.01}";
    check("fedavg_adam", "fedavg", &[adam, "local.schedule={every=0.5, factor=0.1}"]);
}

#[test]
fn fedprox_follows_the_reference() {
    check("fedprox", "fedprox", &["method.fedprox.proximal_weight=0.1"]);
}

#[test]
fn fednova_follows_the_reference() {
    check("fednova", "fednova", &[]);
    check("fednova_momentum", "fednova", &["local.optimizer.momentum=0.9"]);
}

#[test]
fn feddyn_follows_the_reference() {
    check("feddyn", "feddyn", &["method.feddyn.alpha=0.1"]);
    check("feddyn_clip", "feddyn", &["method.feddyn.alpha=0.1", "method.feddyn.clip=1.0"]);
}

#[test]
fn scaffold_fedavgm_and_fedadam_follow_the_reference() {
    check("scaffold", "scaffold", &[]);
    check("fedavgm", "fedavgm", &[]);
    check("fedadam", "fedadam", &[]);
}

#[test]
fn moon_follows_the_reference() {
    check("moon", "moon", &["method.moon.head=4"]);
    check("moon_mu0", "moon", &["method.moon.head=4", "method.moon.contrast_weight=0.0"]);
}

#[test]
fn fedrcl_follows_the_reference() {
    check("fedrcl", "fedrcl", &[]);
}

#[test]
fn feddf_and_fedet_follow_the_reference() {
    check("feddf", "feddf", &[]);
    check("fedet", "fedet", &[]);
}

#[test]
fn fedproj_follows_the_reference() {
    check("fedproj", "fedproj", &[]);
    check("fedproj_no_distill", "fedproj", &["method.fedproj.distill.epochs=0"]);
}

#[test]
fn fedproj_switches_follow_the_reference() {
    check("fedproj_always", "fedproj", &["method.fedproj.projection.mode=always"]);
    check("fedproj_layer", "fedproj", &["method.fedproj.projection.scope=layer"]);
    let soft = ["method.fedproj.projection.mode=soft", "method.fedproj.projection.soft_weight=0.5"];
    check("fedproj_soft", "fedproj", &soft);
    let adam = "local.optimizer={kind='adam', lr=0.01, eps=1e-3, weight_decay=0.0}";
    check("fedproj_update", "fedproj", &["method.fedproj.projection.space=update", adam]);
    let features = ["method.fedproj.memory.feature_weight=0.1", "method.fedproj.distill.feature_weight=0.1"];
    check("fedproj_feature", "fedproj", &features);
    let reverse = "method.fedproj.distill.direction=student_to_teacher";
    check("fedproj_kl_reverse", "fedproj", &[reverse]);
    let anchor = "method.fedproj.distill.anchor=previous_global";
    check("fedproj_reverse", "fedproj", &[reverse, anchor, "method.fedproj.distill.weights=samples"]);
}
