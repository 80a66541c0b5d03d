//! The engine against PyTorch: logits, loss, every gradient, and weights after 1 and 5 Adam steps. The numbers come from
//! `fixtures/torch/make.py`; relative L2 error of each tensor at most 1e-4.

#![allow(clippy::unwrap_used, reason = "a test that cannot read its fixture has failed")]

use fedproj_nn::models::{self, BertConfig, Norm, Pooling, ResNet, Variant};
use fedproj_nn::{
    Cpu, Direction, Dropout, Graph, Isa, Layout, Loss, Mode, Optimizer, Options, Rule, Schedule, Shape, Workspace,
};
use safetensors::SafeTensors;

const TOLERANCE: f64 = 1e-4;
/// What is left of a difference of two nearly equal weights is less exact: PyTorch itself repeats updates to 1e-4.
const TOLERANCE_UPDATE: f64 = 1e-3;

struct Fixture {
    bytes: Vec<u8>,
}

impl Fixture {
    fn open(name: &str) -> Self {
        let path = format!("{}/../../fixtures/torch/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        Self { bytes: std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}")) }
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = file.tensor(name).unwrap_or_else(|_| panic!("the fixture has no tensor {name}"));
        view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn labels(&self) -> Vec<u32> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let bytes = file.tensor("labels").unwrap().data().to_vec();
        bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect()
    }

    /// A flat vector from the tensors `prefix/<name of each span>`.
    fn flat(&self, layout: &Layout, prefix: &str) -> Vec<f32> {
        let mut flat = vec![0.0; layout.len()];
        for span in layout.spans() {
            span.write_torch(&self.floats(&format!("{prefix}/{}", span.name)), &mut flat);
        }
        flat
    }

    /// The input, moved from (N, C, H, W) to (N, H, W, C).
    fn input(&self, shape: Shape) -> Vec<f32> {
        let x = self.floats("input");
        let mut out = vec![0.0; x.len()];
        for (to, from) in out.chunks_exact_mut(shape.len()).zip(x.chunks_exact(shape.len())) {
            for pixel in 0..shape.pixels() {
                for c in 0..shape.c {
                    to[pixel * shape.c + c] = from[c * shape.pixels() + pixel];
                }
            }
        }
        out
    }
}

fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |f: &dyn Fn(usize) -> f64| (0..found.len()).map(|i| f(i).powi(2)).sum::<f64>().sqrt();
    let difference = square(&|i| f64::from(found[i]) - f64::from(expected[i]));
    difference / square(&|i| f64::from(expected[i])).max(1e-12)
}

fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f64) {
    let error = relative_error(found, expected);
    assert!(error <= tolerance, "{what}: relative error {error:.2e} exceeds {tolerance:.0e}");
}

fn assert_spans_close(what: &str, layout: &Layout, found: &[f32], expected: &[f32], tolerance: f64) {
    for span in layout.spans() {
        assert_close(&format!("{what} {}", span.name), &found[span.range()], &expected[span.range()], tolerance);
    }
}

fn difference(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

/// A bias of the keys moves all scores of a query alike, so its gradient is 0: both sides have rounding noise there, which
/// must be small against the whole gradient and is not compared further.
fn take_over_noise(layout: &Layout, expected: &mut [f32], found: &[f32]) {
    let norm = |v: &[f32]| v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    for span in layout.spans().iter().filter(|span| span.name.ends_with("key.bias")) {
        let (noise, whole) = (norm(&found[span.range()]), norm(found));
        assert!(noise < 1e-6 * whole, "{}: {noise:.1e} beside a gradient of {whole:.1e}", span.name);
        expected[span.range()].copy_from_slice(&found[span.range()]);
    }
}

/// Five Adam steps on the fixture's batch, compared at every stage, on every instruction set.
fn check_model(name: &str, graph: &Graph) {
    let fixture = Fixture::open(name);
    let (x, labels) = (fixture.input(graph.shape(graph.input())), fixture.labels());
    for isa in Isa::available() {
        let what = |stage: &str| format!("{name} on {isa:?}: {stage}");
        let init = fixture.flat(graph.params(), "init");
        let mut params = init.clone();
        let mut buffers = fixture.flat(graph.buffers(), "init");
        let mut ws = Workspace::new(graph, &Options::training(labels.len()), Cpu::with_isa(1, isa)).unwrap();
        let mut grad = vec![f32::NAN; params.len()];
        let rule = Rule::Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-3, weight_decay: 5e-5, decoupled: false };
        let mut adam = Optimizer::new(rule, params.len()).unwrap();
        // The fixtures have no dropout.
        let mode = Mode { dropout: Dropout::Off, ..Mode::train(0) };
        for step in 1..=5 {
            let loss = Loss::CrossEntropy { labels: &labels };
            let value = ws.loss_gradient(&params, &mut buffers, &x, &loss, mode, &mut grad).unwrap();
            if step == 1 {
                assert_close(&what("logits"), ws.output(), &fixture.floats("logits"), TOLERANCE);
                assert_close(&what("loss"), &[value as f32], &fixture.floats("loss"), TOLERANCE);
                let mut expected = fixture.flat(graph.params(), "grad");
                take_over_noise(graph.params(), &mut expected, &grad);
                assert_spans_close(&what("gradient of"), graph.params(), &grad, &expected, TOLERANCE);
            }
            adam.step(ws.cpu(), &mut params, &grad, 1.0);
            if step == 1 || step == 5 {
                let prefix = format!("after{step}");
                let expected = fixture.flat(graph.params(), &prefix);
                assert_spans_close(&what(&prefix), graph.params(), &params, &expected, TOLERANCE);
                let (found, expected) = (difference(&params, &init), difference(&expected, &init));
                assert_close(&what("whole update"), &found, &expected, TOLERANCE_UPDATE);
                let expected = fixture.flat(graph.buffers(), &prefix);
                assert_spans_close(&what(&prefix), graph.buffers(), &buffers, &expected, TOLERANCE);
            }
        }
        ws.forward(&params, &mut buffers, &x, Mode::EVAL).unwrap();
        assert_close(&what("logits in evaluation"), ws.output(), &fixture.floats("eval_logits"), TOLERANCE);
    }
}

const CIFAR: Shape = Shape { h: 32, w: 32, c: 3 };

#[test]
fn mlp_follows_pytorch() {
    check_model("mlp", &models::mlp(Shape::vector(20), &[33, 17], 5, Variant::default()).unwrap());
}

#[test]
fn cnn_follows_pytorch() {
    check_model("cnn", &models::cnn(CIFAR, [8, 16], 24, 10, Variant::default()).unwrap());
}

#[test]
fn resnet8_follows_pytorch() {
    let net = ResNet { widths: &[16, 24, 40], blocks: 1, stem_pool: true, variant: Variant::default() };
    check_model("resnet8", &net.build(CIFAR, 10).unwrap());
}

#[test]
fn resnet8_with_group_norm_follows_pytorch() {
    let net = ResNet {
        widths: &[8, 16, 24],
        blocks: 1,
        stem_pool: true,
        variant: Variant { norm: Norm::Group(2), projection_head: None },
    };
    check_model("resnet8-group", &net.build(CIFAR, 10).unwrap());
}

#[test]
fn resnet18_follows_pytorch() {
    let net = ResNet { widths: &[8, 16, 24, 32], blocks: 2, stem_pool: true, variant: Variant::default() };
    check_model("resnet18", &net.build(CIFAR, 10).unwrap());
}

/// Texts of full length, of one token and of pairs, padded side by side in PyTorch.
#[test]
fn bert_follows_pytorch() {
    for (name, pooling) in [("bert", Pooling::Pooler), ("bert-mean", Pooling::Mean)] {
        let config = BertConfig { vocabulary: 60, positions: 20, pooling, ..BertConfig::sized(2, 24, 3, 40) };
        check_model(name, &models::bert(&config, 16, 3, Variant::default()).unwrap());
    }
}

/// A graph that passes its input through one linear layer set to the identity, so that a loss's gradient can be read.
fn loss_at_identity(loss: &Loss<'_>, z: &[f32], features: usize) -> (f64, Vec<f32>) {
    let mut graph = Graph::new(Shape::vector(features));
    let input = graph.input();
    graph.linear("fc", input, features, false).unwrap();
    let mut identity = vec![0.0; features * features];
    identity.iter_mut().step_by(features + 1).for_each(|v| *v = 1.0);
    let batch = z.len() / features;
    let options = Options { batch, taps: &[input], training: true };
    let mut ws = Workspace::new(&graph, &options, Cpu::new(1)).unwrap();
    let mut grad = vec![0.0; identity.len()];
    let value = ws.loss_gradient(&identity, &mut [], z, loss, Mode::EVAL, &mut grad).unwrap();
    (value, ws.gradient(input).unwrap().to_vec())
}

#[test]
fn losses_follow_pytorch() {
    let fixture = Fixture::open("losses");
    let (z, teacher, labels) = (fixture.floats("z"), fixture.floats("t"), fixture.labels());
    let check = |key: &str, loss: Loss<'_>| {
        let (value, grad) = loss_at_identity(&loss, &z, 5);
        assert_close(key, &[value as f32], &fixture.floats(&format!("{key}/value")), TOLERANCE);
        assert_close(key, &grad, &fixture.floats(&format!("{key}/grad")), TOLERANCE);
    };
    check("cross_entropy", Loss::CrossEntropy { labels: &labels });
    check("squared_error", Loss::SquaredError { target: &teacher });
    check("absolute_error", Loss::AbsoluteError { target: &teacher });
    for (name, direction) in [("kl_forward", Direction::TeacherToStudent), ("kl_reverse", Direction::StudentToTeacher)]
    {
        for (suffix, times_t_squared) in [("", false), ("_t2", true)] {
            for t in [1u8, 3] {
                let temperature = f32::from(t);
                let loss = Loss::Kl { teacher: &teacher, temperature, direction, times_t_squared };
                check(&format!("{name}{suffix}/T{t}"), loss);
            }
        }
    }
}

#[test]
fn optimisers_follow_pytorch() {
    let fixture = Fixture::open("optim");
    let (start, grads) = (fixture.floats("theta0"), fixture.floats("grads"));
    let sgd = |momentum, nesterov, weight_decay| Rule::Sgd { lr: 0.1, momentum, nesterov, weight_decay };
    let adam =
        |weight_decay, decoupled| Rule::Adam { lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay, decoupled };
    let check = |name: &str, rule: Rule, schedule: Schedule| {
        for isa in Isa::available() {
            let mut cpu = Cpu::with_isa(1, isa);
            let (mut theta, mut optimizer) = (start.clone(), Optimizer::new(rule, start.len()).unwrap());
            let expected = fixture.floats(name);
            for (step, grad) in grads.chunks_exact(start.len()).enumerate() {
                optimizer.step(&mut cpu, &mut theta, grad, schedule.factor(step as u32));
                let expected = &expected[step * start.len()..][..start.len()];
                assert_close(&format!("{name} on {isa:?}, step {step}"), &theta, expected, 1e-6);
            }
        }
    };
    check("sgd", sgd(0.0, false, 0.0), Schedule::Constant);
    check("sgd_momentum", sgd(0.9, false, 0.0), Schedule::Constant);
    check("sgd_nesterov", sgd(0.9, true, 0.0), Schedule::Constant);
    check("sgd_wd", sgd(0.0, false, 0.1), Schedule::Constant);
    check("adam", adam(0.0, false), Schedule::Constant);
    check("adam_wd", adam(0.1, false), Schedule::Constant);
    check("adamw", adam(0.1, true), Schedule::Constant);
    check("adam_steplr", adam(0.0, false), Schedule::Step { every: 2, factor: 0.1 });
}
