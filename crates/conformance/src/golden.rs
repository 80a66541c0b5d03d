//! Networks, losses and optimisers against PyTorch's numbers (`fixtures/torch`).

use crate::Suite;
use crate::backends::Backend;
use crate::compare::{Group, difference};
use crate::fixtures::Fixture;
use crate::nets::standardized;
use crate::training::Training;
use anyhow::Result;
use fedproj_nn::models::{self, Norm, ResNet, Variant};
use fedproj_nn::{Cpu, Direction, Graph, Isa, Loss, LossTargets, Mode, Optimizer, Options, Rule, Shape, Workspace};

const TOLERANCE: f64 = 1e-4;
/// What is left of a difference of two nearly equal weights is less exact: PyTorch itself repeats updates to 1e-4.
const TOLERANCE_UPDATE: f64 = 1e-3;
const TOLERANCE_OPTIMISER: f64 = 1e-6;

pub fn check(suite: &Suite, group: &mut Group) -> Result<()> {
    let cifar = Shape::image(32, 32, 3);
    let plain = Variant::default();
    let resnet = |widths: &[usize], blocks, norm| {
        let variant = Variant { norm, projection_head: None };
        ResNet { widths, blocks, stem_pool: true, variant }.build(cifar, 10)
    };
    for (name, graph) in [
        ("mlp", models::mlp(Shape::vector(20), &[33, 17], 5, plain)?),
        ("cnn", models::cnn(cifar, [8, 16], 24, 10, plain)?),
        ("resnet8", resnet(&[16, 24, 40], 1, Norm::Batch)?),
        ("resnet8-group", resnet(&[8, 16, 24], 1, Norm::Group(2))?),
        ("resnet18", resnet(&[8, 16, 24, 32], 2, Norm::Batch)?),
        ("standardized", standardized(8)?),
    ] {
        group.attempt(name, |group| check_model(suite, group, name, &graph));
    }
    // A GPU's losses and optimisers are compared with the CPU's.
    if suite.device.gpu().is_none() {
        group.attempt("losses", |group| check_losses(suite, group));
        group.attempt("optimisers", |group| check_optimisers(suite, group));
    }
    Ok(())
}

/// Five Adam steps on the fixture's batch, compared at every stage.
pub fn check_model(suite: &Suite, group: &mut Group, name: &str, graph: &Graph) -> Result<()> {
    let fixture = suite.fixture(&format!("torch/{name}"))?;
    for backend in suite.backends() {
        follow(group, &fixture, &backend, &format!("{}{name}", backend.prefix()), graph)?;
    }
    Ok(())
}

fn follow(group: &mut Group, fixture: &Fixture, backend: &Backend, name: &str, graph: &Graph) -> Result<()> {
    let (x, labels) = (fixture.images("input", graph.shape(graph.input()))?, fixture.integers("labels")?);
    let (params, buffers) = (graph.params(), graph.buffers());
    let init = fixture.flat(params, "init")?;
    let rule = Rule::Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-3, weight_decay: 5e-5, decoupled: false };
    // On a GPU two lanes of the same network, each against the same numbers.
    let (compare_tensors, lanes): (fn(&mut Group, &str, &_, &_, &_, _), _) = match backend {
        Backend::Cpu(..) => (Group::compare_each, 1),
        Backend::Gpu(_) => (Group::compare_tensors, 2),
    };
    let starts = vec![(init.clone(), fixture.flat(buffers, "init")?); lanes];
    let mut training = Training::new(backend, graph, rule, (&x, &labels), &starts)?;
    for step in 1..=5 {
        training.step()?;
        for lane in (0..lanes).filter(|_| step == 1 || step == 5) {
            let what = |stage: &str| format!("{name}, lane {lane}: {stage}");
            let found = training.state(lane)?;
            if step == 1 {
                group.compare(&what("logits"), &found.logits, &fixture.floats("logits")?, TOLERANCE);
                group.compare(&what("loss"), &[found.loss_total as f32], &fixture.floats("loss")?, TOLERANCE);
                let expected = fixture.flat(params, "grad")?;
                compare_tensors(group, &what("gradient of"), params, &found.gradient, &expected, TOLERANCE);
            }
            let prefix = format!("after{step}");
            let expected = fixture.flat(buffers, &prefix)?;
            compare_tensors(group, &what(&prefix), buffers, &found.buffers, &expected, TOLERANCE);
            let expected = fixture.flat(params, &prefix)?;
            compare_tensors(group, &what(&prefix), params, &found.params, &expected, TOLERANCE);
            let (found, expected) = (difference(&found.params, &init), difference(&expected, &init));
            group.compare(&what(&format!("{prefix}, whole update")), &found, &expected, TOLERANCE_UPDATE);
        }
    }
    training.evaluate()?;
    for lane in 0..lanes {
        let what = format!("{name}, lane {lane}: logits in evaluation");
        group.compare(&what, &training.state(lane)?.logits, &fixture.floats("eval_logits")?, TOLERANCE);
    }
    Ok(())
}

fn check_losses(suite: &Suite, group: &mut Group) -> Result<()> {
    let fixture = suite.fixture("torch/losses")?;
    let (z, teacher, labels) = (fixture.floats("z")?, fixture.floats("t")?, fixture.integers("labels")?);
    let mut check = |key: &str, loss: (Loss, LossTargets<'_>)| -> Result<()> {
        let (value, gradient) = loss_at_identity(&loss, &z, 5)?;
        group.compare(&format!("{key}: value"), &[value as f32], &fixture.floats(&format!("{key}/value"))?, TOLERANCE);
        group.compare(&format!("{key}: gradient"), &gradient, &fixture.floats(&format!("{key}/grad"))?, TOLERANCE);
        Ok(())
    };
    check("cross_entropy", (Loss::CrossEntropy, LossTargets::labels(&labels)))?;
    for (name, direction) in [("kl_forward", Direction::TeacherToStudent), ("kl_reverse", Direction::StudentToTeacher)]
    {
        for (suffix, times_t_squared) in [("", false), ("_t2", true)] {
            for t in [1u8, 3] {
                let temperature = f32::from(t);
                let loss = Loss::Kl { temperature, direction, times_t_squared, only_marked: false };
                check(&format!("{name}{suffix}/T{t}"), (loss, LossTargets::logits(&teacher)))?;
            }
        }
    }
    Ok(())
}

/// A loss and its gradient at plain numbers, which pass through a linear layer set to the identity.
fn loss_at_identity(loss: &(Loss, LossTargets<'_>), z: &[f32], features: usize) -> Result<(f64, Vec<f32>)> {
    let mut graph = Graph::new(Shape::vector(features));
    let input = graph.input();
    graph.linear("fc", input, features, false)?;
    let mut identity = vec![0.0; features * features];
    identity.iter_mut().step_by(features + 1).for_each(|v| *v = 1.0);
    let options = Options { batch: z.len() / features, taps: &[input], training: true };
    let mut ws = Workspace::new(&graph, &options, Cpu::new(1))?;
    let mut gradient = vec![0.0; identity.len()];
    let value = ws.loss_gradient(&identity, &mut [], z, loss, Mode::EVAL, &mut gradient)?;
    Ok((value, ws.gradient(input)?.to_vec()))
}

fn check_optimisers(suite: &Suite, group: &mut Group) -> Result<()> {
    let fixture = suite.fixture("torch/optim")?;
    let (start, gradients) = (fixture.floats("theta0")?, fixture.floats("grads")?);
    let sgd = |momentum, nesterov, weight_decay| Rule::Sgd { lr: 0.1, momentum, nesterov, weight_decay };
    let adam =
        |weight_decay, decoupled| Rule::Adam { lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay, decoupled };
    let constant: fn(usize) -> f32 = |_| 1.0;
    for (name, rule, factor) in [
        ("sgd", sgd(0.0, false, 0.0), constant),
        ("sgd_momentum", sgd(0.9, false, 0.0), constant),
        ("sgd_nesterov", sgd(0.9, true, 0.0), constant),
        ("sgd_wd", sgd(0.0, false, 0.1), constant),
        ("adam", adam(0.0, false), constant),
        ("adam_wd", adam(0.1, false), constant),
        ("adamw", adam(0.1, true), constant),
        ("adam_steplr", adam(0.0, false), |step| 0.1f32.powi(step as i32 / 2)),
    ] {
        let expected = fixture.floats(name)?;
        for isa in Isa::available() {
            let (mut cpu, mut theta) = (Cpu::with_isa(1, isa), start.clone());
            let mut optimizer = Optimizer::new(rule, start.len())?;
            let steps = gradients.chunks_exact(start.len()).zip(expected.chunks_exact(start.len()));
            for (step, (gradient, expected)) in steps.enumerate() {
                optimizer.step(&mut cpu, &mut theta, gradient, factor(step));
                let what = format!("{isa:?}: {name}, step {step}");
                group.compare(&what, &theta, expected, TOLERANCE_OPTIMISER);
            }
        }
    }
    Ok(())
}
