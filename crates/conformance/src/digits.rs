//! Every method and setting for two rounds on the embedded digits: a GPU against the CPU, or two threads against one.

use crate::compare::{Group, difference};
use crate::{Suite, config};
use anyhow::Result;
use fedproj_core::methods::CATALOGUE;
use fedproj_core::{Device, Experiment, RoundRecord, Simulation};

/// For the movement from the start. Single tensors are not compared: rounding may decide the sign of a nearly orthogonal
/// projection.
const TOLERANCE: f64 = 1e-3;

/// 240 digits on four clients of unequal size. All take part in every round, so MOON's second participation is in round 2.
pub const BASE: &[&str] = &[
    "seed=5",
    "data.private_samples=240",
    "data.public_samples=70",
    "data.partition={kind='dirichlet', beta=0.5, clients=4, min_samples=20}",
    "model.hidden=[13, 12]",
    "federation.rounds=2",
    "federation.fraction=1.0",
    "local.epochs=2",
    "local.batch=16",
    "local.optimizer={kind='sgd', lr=0.05, weight_decay=0.0}",
    "method.feddf.distill.optimizer={kind='sgd', lr=0.05, weight_decay=0.0}",
    "method.feddf.distill.batch=20",
    "method.fedet.optimizer={kind='sgd', lr=0.05, weight_decay=0.0}",
    "method.fedet.batch=20",
    "method.fedproj.projection.warmup=1",
    "method.fedproj.memory={size=40, batch=12}",
    "method.fedproj.distill.optimizer={kind='sgd', lr=0.05, weight_decay=0.0}",
    "method.fedproj.distill.batch=20",
];

/// Two instruction sets of one CPU differ by up to 2e-3 here, because rounding decides on which side of a ReLU's kink a value
/// is. A wrong mode of batch-norm shows as 1e-1 or more.
pub const TOLERANCE_DEEP: f64 = 1e-2;

/// Further settings of deep networks. They are chaotic on so few samples: after several large steps two instruction sets of
/// one CPU have little in common.
const DEEP: &[&str] = &[
    "model.name=resnet8-thin",
    "data.private_samples=200",
    "local.epochs=1",
    "local.batch=64",
    "local.optimizer={kind='sgd', lr=0.01, weight_decay=0.0}",
    "method.fedproj.distill.batch=40",
    "method.fedproj.memory.batch=30",
    "method.fedproj.distill.optimizer={kind='sgd', lr=0.002, weight_decay=0.0}",
    "method.fedgkt={epochs=1, optimizer={kind='sgd', lr=0.01, weight_decay=0.0}}",
];

/// The method, and its settings besides the base. Methods without a case run with the base alone.
const CASES: &[(&str, &[&str])] = &[
    ("fedavg", &[]),
    ("fedavg", &["local.optimizer={kind='sgd', lr=0.05, momentum=0.9, weight_decay=0.001}", "local.clip=0.5"]),
    ("fedavg", &["federation.fraction=0.5", "local.schedule={every=0.5, factor=0.1}"]),
    ("fedavg", &["data.augment=true"]),
    ("fedavg", &["federation.sum='fixed'"]),
    ("fedprox", &["method.fedprox.proximal_weight=0.1"]),
    ("feddyn", &["method.feddyn.alpha=0.1"]),
    ("moon", &["method.moon.head=6"]),
    ("fedsam", &["method.fedsam.radius=0.2"]),
    ("scaffold", &[]),
    ("scaffold", &["federation.sum='fixed'"]),
    ("fedproj", &[]),
    ("fedproj", &["method.fedproj.projection.mode=always"]),
    ("fedproj", &["method.fedproj.projection.mode=soft"]),
    ("fedproj", &["method.fedproj.projection.mode=off"]),
    ("fedproj", &["method.fedproj.projection.scope=layer"]),
    ("fedproj", &["method.fedproj.projection.space=update"]),
    ("fedproj", &["method.fedproj.projection.space=update", "method.fedproj.projection.scope=layer"]),
    ("fedproj", &["method.fedproj.projection.reference=round_start"]),
    ("fedproj", &["method.fedproj.projection.rule=gem"]),
    ("fedproj", &["method.fedproj.projection.rule=owm"]),
    ("fedproj", &["method.fedproj.projection.rule=gpm"]),
    ("fedproj", &["method.fedproj.projection.rule=sgp"]),
    ("fedproj", &["method.fedproj.projection.rule=trgp"]),
    ("fedproj", &["method.fedproj.projection.dropout=0.5", "method.fedproj.projection.dropout_unit=step"]),
    ("fedproj", &["method.fedproj.projection.dropout=0.5", "method.fedproj.projection.dropout_unit=client_round"]),
    ("fedproj", &["method.fedproj.authors.coefficient_max=0.1", "method.fedproj.authors.norm_guard=1e-6"]),
    ("fedproj", &["method.fedproj.memory.target=labels"]),
    ("fedproj", &["method.fedproj.memory.target=global_model", "method.fedproj.memory.round0=global_model"]),
    ("fedproj", &["method.fedproj.memory.resample=fixed", "method.fedproj.authors.integer_cast=true"]),
    ("fedproj", &["method.fedproj.memory.feature_weight=0.1", "method.fedproj.distill.feature_weight=0.1"]),
    ("fedproj", &["method.fedproj.distill.alpha=0.1", "method.fedproj.distill.anchor=previous_global"]),
    ("fedproj", &["method.fedproj.distill.direction=student_to_teacher", "method.fedproj.distill.t2=false"]),
    ("fedproj", &[TWO_NETWORKS]),
    ("fedet", &[TWO_NETWORKS]),
    ("fedmd", &[TWO_NETWORKS]),
];

const TWO_NETWORKS: &str = "model.clients=[{name='mlp', share=0.5}, {name='mlp', hidden=[7], share=0.5}]";

/// The same for deep networks.
const DEEP_CASES: &[(&str, &[&str])] = &[
    ("fedavg", &[]),
    ("fedavg", &["model.name=cnn"]),
    ("fedavg", &["model.group_norm=4"]),
    ("moon", &["method.moon.head=6"]),
    ("fedrcl", &[]),
    ("fedspeed", &[]),
    ("fedbn", &[]),
    ("fedgen", &["method.fedgen.generator.batch=80"]),
    ("fedgkt", &["model.group_norm=4"]),
    ("fedmd", &["method.fedmd.memory={size=60, batch=30}"]),
    ("fedproj", &["data.augment=true"]),
    ("fedproj", &["method.fedproj.projection.rule=gem"]),
    ("fedproj", &["method.fedproj.projection.rule=trgp"]),
    ("fedproj", &["method.fedproj.projection.reference=round_start", "method.fedproj.projection.space=update"]),
    ("fedproj", &["method.fedproj.distill.bn=update", "method.fedproj.memory.bn=update"]),
    ("fedproj", &["method.fedproj.distill.bn=frozen", "method.fedproj.memory.bn=frozen"]),
    ("fedproj", &["method.fedproj.distill.bn=recalibrate", "method.fedproj.memory.bn=batch"]),
];

#[allow(clippy::unnecessary_wraps, reason = "a group like the others")]
pub fn check(suite: &Suite, group: &mut Group) -> Result<()> {
    let others = CATALOGUE.iter().filter(|(method, _)| !CASES.iter().any(|(name, _)| name == method));
    let cases: Vec<_> = CASES.iter().copied().chain(others.map(|(method, _)| (*method, &[][..]))).collect();
    for (cases, base, tolerance) in [(&cases[..], &[][..], TOLERANCE), (DEEP_CASES, DEEP, TOLERANCE_DEEP)] {
        for (method, overrides) in cases {
            let what = [&[*method], &base[..base.len().min(1)], *overrides].concat().join(" ");
            let all = [base, *overrides].concat();
            compare(suite, group, &what, tolerance, &|device| simulation(method, &all, device));
        }
    }
    Ok(())
}

/// A simulation on the device against the same on the device's reference.
pub fn compare(
    suite: &Suite,
    group: &mut Group,
    what: &str,
    tolerance: f64,
    simulation: &dyn Fn(Device) -> Result<Simulation>,
) {
    group.attempt(what, |group| {
        let (reference, share) = suite.reference();
        let (mut found, mut expected) = (simulation(suite.device.clone())?, simulation(reference)?);
        let tolerance = share * tolerance;
        for round in 1..=2 {
            let records = (found.round(&|_| ())?, expected.round(&|_| ())?);
            let what = format!("{what}, round {round}:");
            for (at, (f, e)) in found.state().groups().zip(expected.state().groups()).enumerate() {
                let of = if at == 0 { String::new() } else { format!(" network {}", at + 1) };
                let (f_published, e_published) = (f.published(), e.published());
                let init = expected.experiment().group(at);
                for (part, found, expected, init) in [
                    ("movement", &f.weights[..], &e.weights[..], &init.weights),
                    ("published movement", f_published.weights, e_published.weights, &init.weights),
                    ("running statistics", f_published.buffers, e_published.buffers, &init.buffers),
                ] {
                    let moved = |to: &[f32]| difference(to, init);
                    group.compare(&format!("{what}{of} {part}"), &moved(found), &moved(expected), tolerance);
                }
            }
            compare_records(group, &what, tolerance, &records.0, &records.1);
        }
        Ok(())
    });
}

/// The parts of a round's record that do not depend on rounding.
fn compare_records(group: &mut Group, what: &str, tolerance: f64, found: &RoundRecord, expected: &RoundRecord) {
    for (name, found, expected) in [
        ("training loss", found.train_loss, expected.train_loss),
        ("memory loss before", found.memory_loss_before, expected.memory_loss_before),
        ("memory loss after", found.memory_loss_after, expected.memory_loss_after),
        ("distillation loss", found.distill_loss, expected.distill_loss),
    ] {
        group.require(found.is_some() == expected.is_some(), &format!("{what} the presence of a {name}"));
        if let (Some(found), Some(expected)) = (found, expected) {
            // A model's distance to itself is zero except for rounding.
            let (place, found, expected) = (format!("{what} {name}"), found as f32, expected as f32);
            group.compare_beside(&place, &[found], &[expected], 1e-2, tolerance);
        }
    }
}

/// A simulation of the base with further settings.
pub fn simulation(method: &str, overrides: &[&str], device: Device) -> Result<Simulation> {
    let config = config(method, &[BASE, overrides])?;
    let method = config.method.build()?;
    let experiment = Experiment::load(config, method.as_ref(), None)?;
    Ok(Simulation::new(experiment, method, device)?)
}
