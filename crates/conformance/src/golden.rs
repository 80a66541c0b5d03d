//! Networks against PyTorch's numbers (`fixtures/torch`), with the tolerances of the engine's own test.

use crate::Suite;
use crate::compare::{Group, difference};
use crate::fixtures::Fixture;
use crate::networks::Training;
use anyhow::Result;
use fedproj_nn::models::{self, Norm, ResNet, Variant};
use fedproj_nn::{Graph, Mode, Rule, Shape};

const TOLERANCE: f64 = 1e-4;
/// What is left of a difference of two nearly equal weights is less exact: PyTorch itself repeats updates to 1e-4.
const TOLERANCE_UPDATE: f64 = 1e-3;

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
    ] {
        let path = suite.fixture(&format!("torch/{name}.safetensors"))?;
        group.attempt(name, |group| check_model(suite, group, name, &graph, &Fixture::open(&path)?));
    }
    Ok(())
}

/// Five Adam steps on the fixture's batch, compared at every stage.
pub fn check_model(suite: &Suite, group: &mut Group, name: &str, graph: &Graph, fixture: &Fixture) -> Result<()> {
    let (x, labels) = (fixture.images("input", graph.shape(graph.input()))?, fixture.integers("labels")?);
    let (params, buffers) = (graph.params(), graph.buffers());
    let init = fixture.flat(params, "init")?;
    let rule = Rule::Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-3, weight_decay: 5e-5, decoupled: false };
    // Two lanes of the same network, each against the same numbers.
    let start = vec![(init.clone(), fixture.flat(buffers, "init")?); 2];
    let mut training = Training::new(suite.gpu()?, graph, &rule, (&x, &labels), &start)?;
    for step in 1..=5 {
        training.step()?;
        for lane in 0..start.len() {
            let what = |stage: &str| format!("{name}, lane {lane}: {stage}");
            if step == 1 {
                let loss = training.loss_total(lane)? as f32;
                group.compare(&what("logits"), &training.logits(lane)?, &fixture.floats("logits")?, TOLERANCE);
                group.compare(&what("loss"), &[loss], &fixture.floats("loss")?, TOLERANCE);
                let expected = fixture.flat(params, "grad")?;
                group.compare_tensors(&what("gradient of"), params, &training.gradient(lane)?, &expected, TOLERANCE);
            }
            if step == 1 || step == 5 {
                let (prefix, found) = (format!("after{step}"), training.weights(lane)?);
                let expected = fixture.flat(params, &prefix)?;
                group.compare_tensors(&what(&prefix), params, &found, &expected, TOLERANCE);
                let (found, expected) = (difference(&found, &init), difference(&expected, &init));
                group.compare(&what(&format!("{prefix}, whole update")), &found, &expected, TOLERANCE_UPDATE);
                let expected = fixture.flat(buffers, &prefix)?;
                group.compare_tensors(&what(&prefix), buffers, &training.buffers(lane)?, &expected, TOLERANCE);
            }
        }
    }
    training.forward(Mode::EVAL)?;
    for lane in 0..start.len() {
        let what = format!("{name}, lane {lane}: logits in evaluation");
        group.compare(&what, &training.logits(lane)?, &fixture.floats("eval_logits")?, TOLERANCE);
    }
    Ok(())
}
