//! Every method against an independent reference in double precision (`fixtures/methods`): two clients, three rounds, a
//! small MLP.

use crate::compare::{Group, difference};
use crate::fixtures::Fixture;
use crate::{Suite, config, fedmd, related};
use anyhow::Result;
use fedproj_core::methods::CATALOGUE;
use fedproj_core::{Config, Experiment, Method, Simulation};
use fedproj_data::{Dataset, Partition, Samples, Shape};
use fedproj_rng::{Purpose, Stream};

pub const TOLERANCE: f64 = 1e-4;
pub const TOLERANCE_MOVEMENT: f64 = 1e-3;

pub const BASE: &[&str] = &[
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

const ADAM: &str = "local.optimizer={kind='adam', lr=0.01, eps=1e-3, weight_decay=0.01}";
const ADAM_PLAIN: &str = "local.optimizer={kind='adam', lr=0.01, eps=1e-3, weight_decay=0.0}";
const DITTO: &[&str] = &["method.ditto.proximal_weight=0.5", "method.ditto.lr=0.1"];
const REVERSE: &str = "method.fedproj.distill.direction=student_to_teacher";

/// Name of the trace, the method, and what differs from the base.
const TRACES: &[(&str, &str, &[&str])] = &[
    ("fedavg", "fedavg", &[]),
    ("fedavg_adam", "fedavg", &[ADAM, "local.schedule={every=0.5, factor=0.1}"]),
    ("fedprox", "fedprox", &["method.fedprox.proximal_weight=0.1"]),
    ("fednova", "fednova", &[]),
    ("fednova_momentum", "fednova", &["local.optimizer.momentum=0.9"]),
    ("feddyn", "feddyn", &["method.feddyn.alpha=0.1"]),
    ("feddyn_authors", "feddyn", &["method.feddyn.authors=true", "method.feddyn.clip=1.0"]),
    ("feddyn_clip", "feddyn", &["method.feddyn.alpha=0.1", "method.feddyn.clip=1.0"]),
    ("scaffold", "scaffold", &[]),
    ("feddc", "feddc", &["method.feddc.alpha=0.1"]),
    ("afedpd", "afedpd", &["method.afedpd.alpha=0.1", "federation.fraction=0.5"]),
    ("ditto_client0", "ditto", DITTO),
    ("ditto_client1", "ditto", DITTO),
    ("fedavgm", "fedavgm", &[]),
    ("fedadam", "fedadam", &[]),
    ("fedsam", "fedsam", &["method.fedsam.radius=0.2"]),
    ("fedspeed", "fedspeed", &["method.fedspeed.radius=0.2"]),
    ("fedlc", "fedlc", &[]),
    ("fedntd", "fedntd", &["method.fedntd.temperature=2.0"]),
    ("fedacg", "fedacg", &["method.fedacg.proximal_weight=0.05"]),
    ("moon", "moon", &["method.moon.head=4"]),
    ("moon_mu0", "moon", &["method.moon.head=4", "method.moon.contrast_weight=0.0"]),
    ("fedrcl", "fedrcl", &[]),
    ("feddf", "feddf", &[]),
    ("fedet", "fedet", &[]),
    ("fedproj", "fedproj", &[]),
    ("fedproj_no_distill", "fedproj", &["method.fedproj.distill.epochs=0"]),
    ("fedproj_always", "fedproj", &["method.fedproj.projection.mode=always"]),
    ("fedproj_layer", "fedproj", &["method.fedproj.projection.scope=layer"]),
    ("fedproj_soft", "fedproj", &["method.fedproj.projection.mode=soft", "method.fedproj.projection.soft_weight=0.5"]),
    ("fedproj_update", "fedproj", &["method.fedproj.projection.space=update", ADAM_PLAIN]),
    (
        "fedproj_feature",
        "fedproj",
        &["method.fedproj.memory.feature_weight=0.1", "method.fedproj.distill.feature_weight=0.1"],
    ),
    ("fedproj_ogd", "fedproj", &["method.fedproj.projection.rule=ogd", "method.fedproj.projection.references=2"]),
    ("fedproj_gem", "fedproj", &["method.fedproj.projection.rule=gem", "method.fedproj.projection.references=2"]),
    ("fedproj_kl_reverse", "fedproj", &[REVERSE]),
    ("fedproj_corrected", "fedproj", &["method.fedproj.correction.alpha=0.1"]),
    ("fedproj_teacher", "fedproj", &["method.fedproj.averages.teacher=0.9"]),
    ("fedproj_memory", "fedproj", &["method.fedproj.averages.memory=0.4"]),
    (
        "fedproj_leading",
        "fedproj",
        &["method.fedproj.correction.alpha=0.1", "method.fedproj.averages={teacher=0.45, memory=0.45}"],
    ),
    (
        "fedproj_reverse",
        "fedproj",
        &[REVERSE, "method.fedproj.distill.anchor=previous_global", "method.fedproj.distill.weights=samples"],
    ),
];

pub fn check(suite: &Suite, group: &mut Group) -> Result<()> {
    let fixture = suite.fixture("methods/methods")?;
    let order = |purpose, n| Stream::new(7, purpose, [0; 3]).permutation(n);
    for (name, found) in [
        ("round0_client0_epoch0", order(Purpose::BatchOrder, 12)),
        ("distill_round0_epoch0", order(Purpose::DistillOrder, 10)),
        ("memory_round1", Stream::new(7, Purpose::Memory, [1, 0, 0]).choose(10, 8)),
    ] {
        group.require(found == fixture.integers(&format!("orders/{name}"))?, &format!("the order {name}"));
    }
    for (method, _) in CATALOGUE {
        let mut traced = TRACES.iter().chain(related::TRACES);
        let is_traced = *method == "fedmd" || traced.any(|(_, traced, _)| traced == method);
        group.require(is_traced, &format!("{method} has a trace:"));
    }
    group.attempt("fedmd", |group| fedmd::check(suite, group));
    let related = suite.fixture("related/related")?;
    for (traces, golden) in [(TRACES, &fixture), (related::TRACES, &related)] {
        for (trace, method, overrides) in traces {
            group.attempt(trace, |group| follow(suite, group, [&fixture, golden], trace, method, overrides));
        }
    }
    Ok(())
}

/// Compares a method with its trace in the second fixture, on the data of the first.
fn follow(
    suite: &Suite,
    group: &mut Group,
    [scene, fixture]: [&Fixture; 2],
    trace: &str,
    method: &str,
    overrides: &[&str],
) -> Result<()> {
    let config = config(method, &[BASE, overrides])?;
    let method = config.method.build()?;
    let experiment = experiment(scene, config, method.as_ref())?;
    let (graph, init) = (experiment.graph.clone(), experiment.weights.clone());
    let (from, prefix) = match trace {
        "fedbn" => (fixture, "init_norm"),
        "fedgkt" => (fixture, "init_exit"),
        _ => (scene, if trace.starts_with("moon") { "init_moon" } else { "init" }),
    };
    group.require(init == from.flat(graph.params(), prefix)?, &format!("{trace}: the initial weights"));
    let mut simulation = Simulation::new(experiment, method, suite.device.clone())?;
    for round in 0..3 {
        let record = simulation.round(&|_| ())?;
        // A client's own model where that is what the method is about.
        let found = match trace.strip_prefix("ditto_client").and_then(|client| client.parse::<u32>().ok()) {
            Some(client) => &simulation.clients()[&client]["personal"],
            None => &simulation.state().weights,
        };
        let expected = fixture.flat(graph.params(), &format!("{trace}/round{round}"))?;
        let what = format!("{trace}, round {round}:");
        if suite.device.gpu().is_some() {
            group.compare_tensors(&what, graph.params(), found, &expected, TOLERANCE);
        } else {
            group.compare_each(&what, graph.params(), found, &expected, TOLERANCE);
        }
        let (found, expected) = (difference(found, &init), difference(&expected, &init));
        group.compare(&format!("{what} movement"), &found, &expected, TOLERANCE_MOVEMENT);
        let (found, layout) = (&simulation.state().buffers, graph.buffers());
        let expected = fixture.flat(layout, &format!("{trace}/round{round}"))?;
        group.compare_each(&format!("{what} buffers"), layout, found, &expected, TOLERANCE);
        if trace == "fedproj" {
            let counts = fixture.integers(&format!("fedproj/round{round}/active"))?;
            let expected = (counts[1] > 0).then(|| f64::from(counts[0]) / f64::from(counts[1]));
            group.require(record.projection_rate == expected, &format!("{what} the share of projected steps"));
        }
    }
    Ok(())
}

/// Two clients, whose data stand in the fixture.
pub fn experiment(fixture: &Fixture, config: Config, method: &dyn Method) -> Result<Experiment> {
    let dataset = |name: &str, x: Vec<f32>, labels: Option<Vec<u32>>| {
        let classes = if labels.is_some() { vec!["a".into(), "b".into(), "c".into()] } else { Vec::new() };
        Dataset::new(name, Shape::Vector { features: 6 }, Samples::F32(x), labels, classes)
    };
    let (first, second) = (fixture.integers("client0/y")?, fixture.integers("client1/y")?);
    let (n_first, n_all) = (first.len() as u32, (first.len() + second.len()) as u32);
    let x = [fixture.floats("client0/x")?, fixture.floats("client1/x")?].concat();
    // Public samples were drawn class by class in turn; most methods never see it.
    let public_labels = method.needs_public_labels().then(|| (0..10).map(|i| i % 3).collect());
    let lists = vec![(0..n_first).collect(), (n_first..n_all).collect()];
    Ok(Experiment::with_partition(
        config,
        method,
        dataset("private", x, Some([first, second].concat()))?,
        dataset("test", fixture.floats("test/x")?, Some(fixture.integers("test/y")?))?,
        Some(dataset("public", fixture.floats("public/x")?, public_labels)?),
        Partition::from_lists("fixture", lists, n_all as usize)?,
    )?)
}
