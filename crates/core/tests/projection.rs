//! FedProj's promise on random problems: a projected step does not unlearn the memory to first order, a plain one does.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod small;

use fedproj_core::{ClientResult, Config, Experiment, Simulation};
use fedproj_nn::models::{self, Variant};
use fedproj_nn::vector::{self, Bounds, Conflict};
use fedproj_nn::{Cpu, Init, Loss, LossTargets, Mode, Optimizer, Options, Rule, Shape, Workspace};
use fedproj_rng::{Purpose, Stream};
use small::{SGD, config, run_all, simulation};

const BATCH: usize = 24;
const FEATURES: usize = 6;
const CLASSES: usize = 4;

fn project(g: &mut [f32], r: &[f32]) -> Conflict {
    let mut cpu = Cpu::new(1);
    let conflict = Conflict::between(&cpu, g, r);
    conflict.resolve(&mut cpu, g, r, &Bounds::default());
    conflict
}

/// A random perceptron with a private batch and a memory batch.
struct Case {
    ws: Workspace,
    theta: Vec<f32>,
    x: Vec<f32>,
    labels: Vec<u32>,
    memory: Vec<f32>,
    targets: Vec<f32>,
}

impl Case {
    fn new(seed: u64) -> Self {
        let graph = models::mlp(Shape::vector(FEATURES), &[16], CLASSES, Variant::default()).unwrap();
        let mut stream = Stream::new(seed, Purpose::Synthetic, [1, 0, 0]);
        let mut normals = |n: usize, scale: f64| (0..n).map(|_| (scale * stream.normal()) as f32).collect::<Vec<_>>();
        let (x, memory, targets) =
            (normals(BATCH * FEATURES, 1.0), normals(BATCH * FEATURES, 1.0), normals(BATCH * CLASSES, 2.0));
        // One class, as on a skewed client: its gradient conflicts with a memory of all classes.
        let labels = vec![(seed % CLASSES as u64) as u32; BATCH];
        let theta = graph.init_params(seed, Init::Torch);
        let ws = Workspace::new(&graph, &Options::training(BATCH), Cpu::new(1)).unwrap();
        Self { ws, theta, x, labels, memory, targets }
    }

    fn gradients(&mut self) -> (Vec<f32>, Vec<f32>) {
        let (mut g, mut r) = (vec![0.0; self.theta.len()], vec![0.0; self.theta.len()]);
        let private = (Loss::CrossEntropy, LossTargets::labels(&self.labels));
        self.ws.loss_gradient(&self.theta, &mut [], &self.x, &private, Mode::EVAL, &mut g).unwrap();
        let memory = (Loss::kl(1.0), LossTargets::logits(&self.targets));
        self.ws.loss_gradient(&self.theta, &mut [], &self.memory, &memory, Mode::EVAL, &mut r).unwrap();
        (g, r)
    }

    /// L_mem(θ − η g)
    fn memory_loss(&mut self, eta: f32, g: &[f32]) -> f64 {
        let mut theta = self.theta.clone();
        vector::axpy(&mut Cpu::new(1), -eta, g, &mut theta);
        self.ws.forward(&theta, &mut [], &self.memory, Mode::EVAL).unwrap();
        Loss::kl(1.0).value(&LossTargets::logits(&self.targets), BATCH, self.ws.output()).unwrap()
    }

    /// (L_mem(θ − η g) − L_mem(θ)) / η for a step of this length.
    fn rise(&mut self, length: f64, g: &[f32]) -> f64 {
        let eta = length / vector::squared_norm(&Cpu::new(1), g).sqrt();
        (self.memory_loss(eta as f32, g) - self.memory_loss(0.0, g)) / eta
    }
}

#[test]
fn memory_loss_does_not_rise_to_first_order_over_a_projected_step() {
    let mut n_conflicts = 0;
    for seed in 0..40 {
        let mut case = Case::new(seed);
        let (g, r) = case.gradients();
        let mut projected = g.clone();
        let found = project(&mut projected, &r);
        let cosine = found.dot / (found.squared_norm * vector::squared_norm(&Cpu::new(1), &g)).sqrt();
        if cosine > -0.2 {
            continue;
        }
        n_conflicts += 1;
        // rise(η) = first order + η · second order + …: two lengths tell the first order. Losses of order 1 are exact to
        // 1e-7, so rises at lengths of 0.02 to 1e-5.
        let first_order = |case: &mut Case, g: &[f32]| 2.0 * case.rise(0.02, g) - case.rise(0.04, g);
        let plain = first_order(&mut case, &g);
        assert!(
            (plain + found.dot).abs() < 0.1 * -found.dot,
            "seed {seed}: plain rise {plain}, −⟨g, r⟩ {}",
            -found.dot
        );
        let kept = first_order(&mut case, &projected);
        assert!(kept.abs() < 0.02 * plain, "seed {seed}: projected rise {kept}, plain {plain}");
        // What is left is of second order: half the step, half the rise per length.
        let (long, short) = (case.rise(0.08, &projected), case.rise(0.02, &projected));
        assert!(short.abs() < 0.5 * long.abs() + 0.01 * plain, "seed {seed}: {long} at 0.08, {short} at 0.02");
    }
    assert!(n_conflicts >= 10, "only {n_conflicts} of 40 problems conflict");
}

/// The example of `docs/projection.md`: Adam's step is no multiple of the projected gradient, so the memory loss may rise.
#[test]
fn the_guarantee_is_for_sgd_and_two_coordinates_are_enough_to_break_it_under_adam() {
    let (mut z, r) = ([-1.0f32, 1.0], [2.0f32, 1.0]);
    project(&mut z, &r);
    assert!((z[0] + 0.6).abs() < 1e-6 && (z[1] - 1.2).abs() < 1e-6, "{z:?}");
    // The change of a memory loss whose gradient is r, to first order, in units of the rate.
    let rise = |rule: Rule| {
        let mut theta = [0.0f32; 2];
        Optimizer::new(rule, 2).unwrap().step(&mut Cpu::new(1), &mut theta, &z, 1.0);
        (theta[0] * r[0] + theta[1] * r[1]) / 1e-3
    };
    assert!(rise(Rule::sgd(1e-3)).abs() < 1e-6);
    assert!((rise(Rule::adam(1e-3)) - 1.0).abs() < 1e-4);
}

/// One plain step a round, the whole public set as memory and its batch.
const ONE_STEP: &[&str] = &[
    "local.optimizer={kind='sgd', lr=0.02, weight_decay=0.0}",
    "local.schedule.every=0.0",
    "local.epochs=1",
    "local.batch=240",
    "federation.rounds=2",
    "method.fedproj.memory={size=80, batch=80}",
    "method.fedproj.distill.epochs=0",
];

#[test]
fn a_clients_memory_loss_rises_without_projection_only() {
    // Clients of one class each train for five plain steps; with a guard that no gradient passes, everything is measured
    // and nothing projected.
    let rise = |setting: &str| {
        let own = [
            "federation.rounds=12",
            "local.epochs=5",
            "federation.fraction=1.0",
            "data.partition={kind='one_class', clients=10}",
            "method.fedproj.projection.warmup=11",
            "method.fedproj.memory.temperature=1.0",
            setting,
        ];
        let record = run_all(&mut simulation(config("fedproj", &[ONE_STEP, &own].concat()), 2)).pop().unwrap();
        let rise = record.memory_loss_after.unwrap() - record.memory_loss_before.unwrap();
        (rise, record.projection_rate.unwrap())
    };
    let (plain, never) = rise("method.fedproj.authors.norm_guard=1e9");
    let (projected, rate) = rise("method.fedproj.authors.norm_guard=0.0");
    assert!(never == 0.0 && rate > 0.5, "projected {never} and {rate} of the steps");
    assert!(plain > 0.0, "without projection the memory loss falls by {plain:e}");
    assert!(projected < 0.2 * plain, "the memory loss rises by {projected:e}, without projection by {plain:e}");
}

#[test]
fn nothing_is_projected_at_the_model_whose_own_logits_are_the_target() {
    let own =
        ["method.fedproj.projection.warmup=0", "method.fedproj.memory.round0=global_model", "federation.rounds=1"];
    let run = |method: &str, settings: &[&str]| {
        let mut simulation = simulation(config(method, &[ONE_STEP, &own, settings].concat()), 2);
        let start = simulation.state().weights.clone();
        let record = run_all(&mut simulation).pop().unwrap();
        let moved: Vec<f32> = simulation.state().weights.iter().zip(&start).map(|(a, b)| a - b).collect();
        (record, moved)
    };
    let norm = |v: &[f32]| vector::squared_norm(&Cpu::new(1), v).sqrt();
    let apart = |a: &[f32], b: &[f32]| norm(&a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<_>>());
    let (_, fedavg) = run("fedavg", &[]);
    // Logits of another batch size may differ in their last bits: the memory's gradient is 0 up to rounding, and so is
    // whatever projection makes of it.
    let (record, moved) = run("fedproj", &[]);
    assert!(record.memory_loss_before.is_some_and(|loss| loss.abs() < 1e-7), "{record:?}");
    assert!(apart(&moved, &fedavg) <= 1e-6 * norm(&fedavg), "projection moves the first step");
    // With a guard above rounding nothing is projected, and the round is FedAvg's bit for bit.
    let guard = "method.fedproj.authors.norm_guard=1e-10";
    let (record, moved) = run("fedproj", &[guard]);
    assert_eq!((record.projection_rate, moved), (Some(0.0), fedavg));
    // From the second step on the model has moved away from its target, and there is a gradient to compare with.
    let (record, _) = run("fedproj", &[guard, "local.epochs=2"]);
    assert!(record.cosine.is_some_and(|cosine| cosine != 0.0));
    assert!(record.memory_loss_after.is_some_and(|loss| loss > 1e-6), "{record:?}");
}

#[test]
fn projection_is_off_during_warm_up_after_the_stop_and_for_dropped_clients() {
    let rates = |settings: &[&str]| {
        let records =
            run_all(&mut simulation(config("fedproj", &[&["federation.rounds=5", SGD], settings].concat()), 2));
        records.into_iter().map(|r| r.projection_rate.is_some()).collect::<Vec<_>>()
    };
    assert_eq!(rates(&[]), [false, true, true, true, true]);
    assert_eq!(rates(&["method.fedproj.projection.warmup=3"]), [false, false, false, true, true]);
    assert_eq!(rates(&["method.fedproj.projection.warmup=0.5"]), [false, false, false, true, true]);
    assert_eq!(rates(&["method.fedproj.authors.stop_round=3"]), [false, true, true, false, false]);
    assert_eq!(rates(&["method.fedproj.projection.dropout=1.0"]), [false; 5]);
    assert_eq!(rates(&["method.fedproj.projection.mode=off"]), [false; 5]);
}

/// The algorithm box's target: cross-entropy with public labels, where they are of the private classes.
#[test]
fn labels_are_a_target_where_the_classes_match_and_are_refused_elsewhere() {
    let settings = ["method.fedproj.memory.target=labels", "method.fedproj.projection.warmup=0", "federation.rounds=2"];
    let config = Config::from_layers(None, &settings.map(str::to_owned)).unwrap();
    let method = config.method.build().unwrap();
    let experiment = Experiment::load(config.clone(), method.as_ref(), None).unwrap();
    let (private, test) = ((*experiment.private).clone(), (*experiment.test).clone());
    let public = experiment.public.as_deref().unwrap().clone();
    let mut simulation = Simulation::new(experiment, method, 1).unwrap();
    let first = simulation.round(&|_| ()).unwrap();
    assert!(first.projection_rate.is_some(), "labels are there from the first round on");
    // Against the truth, not against an ensemble: training lowers the memory loss from that of guessing, log 10.
    assert!((first.memory_loss_before.unwrap() - 10f64.ln()).abs() < 0.3, "{first:?}");

    let method = config.method.build().unwrap();
    let error = Experiment::new(config, method.as_ref(), private, test, Some(public.without_labels())).unwrap_err();
    assert!(error.to_string().contains("public labels"), "{error}");
}

/// The cosine of two vectors.
fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let cpu = &Cpu::new(1);
    vector::dot(cpu, a, b) / (vector::squared_norm(cpu, a) * vector::squared_norm(cpu, b)).sqrt()
}

#[test]
fn what_ogd_learns_is_orthogonal_to_the_directions_that_a_client_keeps() {
    let no_distillation = "method.fedproj.distill.epochs=0";
    let run = |rule: &str| {
        let mut simulation = simulation(
            config("fedproj", &[SGD, no_distillation, &format!("method.fedproj.projection.rule={rule}")]),
            2,
        );
        // Warm-up takes the first round, and gives the memory its targets.
        simulation.round(&|_| ()).unwrap();
        let start = simulation.state().weights.clone();
        simulation.round(&|_| ()).unwrap();
        let results = simulation.last_results().unwrap();
        let moved: Vec<(u32, Vec<f32>)> = results
            .iter()
            .map(|r| (r.client, r.weights.iter().zip(&start).map(|(w, start)| w - start).collect()))
            .collect();
        (simulation.clients().clone(), moved)
    };
    let ((kept, moved), (_, free)) = (run("ogd"), run("a-gem"));
    for ((client, moved), (_, free)) in moved.iter().zip(&free) {
        let directions: Vec<&Vec<f32>> = (0..4).map(|i| &kept[client][&format!("ogd.{i}")]).collect();
        for (i, direction) in directions.iter().enumerate() {
            assert!(cosine(moved, direction).abs() < 1e-4, "client {client}: {}", cosine(moved, direction));
            for before in &directions[..i] {
                assert!(cosine(before, direction).abs() < 1e-4, "{}", cosine(before, direction));
            }
        }
        let largest = directions.iter().map(|direction| cosine(free, direction).abs()).fold(0.0, f64::max);
        assert!(largest > 1e-2, "without the rule it would not be: {largest}");
    }
}

/// How clients have moved by one plain step each, and the memory gradient of every public sample where they began. The step is
/// along −g, so it unlearns none of what points against it.
fn moved_and_references(settings: &[&str]) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let once = ["data.public_samples=8", "local.epochs=1", "local.batch=500", "method.fedproj.distill.epochs=0", SGD];
    let mut simulation = simulation(config("fedproj", &[&once[..], settings].concat()), 2);
    // Warm-up takes the first round, and gives the memory its targets.
    simulation.round(&|_| ()).unwrap();
    let state = simulation.state().clone();
    simulation.round(&|_| ()).unwrap();
    let results = simulation.last_results().unwrap();
    let apart = |r: &ClientResult| r.weights.iter().zip(&state.weights).map(|(w, start)| w - start).collect();
    let moved = results.iter().map(apart).collect();
    let experiment = simulation.experiment();
    let (public, graph) = (experiment.public.as_deref().unwrap(), &experiment.graph);
    let mut ws = Workspace::new(graph, &Options::training(1), Cpu::new(1)).unwrap();
    let gradient = |(sample, logits): (u32, &[f32])| {
        let (mut x, mut r) = (vec![0.0; public.sample_len()], vec![0.0; state.weights.len()]);
        public.gather(&[sample], &mut x);
        let loss = (Loss::kl(3.0), LossTargets::logits(logits));
        ws.loss_gradient(&state.weights, &mut [], &x, &loss, Mode::EVAL, &mut r).unwrap();
        r
    };
    let targets = state.targets.clone().unwrap_or_default();
    (moved, (0..8).zip(targets.logits.chunks(10)).map(gradient).collect())
}

#[test]
fn gem_meets_every_constraint_where_a_gem_meets_their_mean() {
    // The largest cosine of a client's step and a reference: above 0 it unlearns that sample.
    let worst = |moved: &[Vec<f32>], references: &[Vec<f32>]| {
        moved.iter().flat_map(|m| references.iter().map(move |r| cosine(m, r))).fold(f64::NEG_INFINITY, f64::max)
    };
    let mean = |references: &[Vec<f32>]| {
        let sum = |i: usize| references.iter().map(|r| r[i]).sum::<f32>();
        vec![(0..references[0].len()).map(sum).collect::<Vec<f32>>()]
    };
    let (free, _) = moved_and_references(&["method.fedproj.projection.warmup=2"]);
    // A reference per sample: a pass over the memory shows each of them once.
    let per_sample =
        ["method.fedproj.projection={rule='gem', references=8}", "method.fedproj.memory={size=8, batch=1}"];
    let (gem, references) = moved_and_references(&per_sample);
    assert_eq!((gem.len(), references.len()), (3, 8));
    assert!(worst(&free, &references) > 0.1, "{}", worst(&free, &references));
    assert!(worst(&gem, &references) < 1e-4, "{}", worst(&gem, &references));
    let whole = ["method.fedproj.projection.rule=a-gem", "method.fedproj.memory={size=8, batch=8}"];
    let (agem, references) = moved_and_references(&whole);
    assert!(worst(&agem, &mean(&references)) < 1e-4, "{}", worst(&agem, &mean(&references)));
    assert!(worst(&agem, &references) > 0.05, "{}", worst(&agem, &references));
}

/// Rows of a layer's weights, each with its bias.
type Rows = Vec<Vec<f32>>;

/// What clients have learnt in a round of plain steps with a rule, as rows of each layer, and the directions that they were sent.
fn rounds_rows(rule: &str) -> Vec<(Rows, Rows)> {
    let rule = format!("method.fedproj.projection.rule={rule}");
    let layers = "model={name='layers', layers=[{op='conv2d', outputs=6, stride=2, padding=1}, {op='relu'}, \
                  {op='flatten'}, {op='linear'}]}";
    let settings = [SGD, layers, "method.fedproj.distill.epochs=0", &rule];
    let mut simulation = simulation(config("fedproj", &settings), 2);
    simulation.round(&|_| ()).unwrap();
    let (start, vectors) = (simulation.state().weights.clone(), simulation.state().vectors.clone());
    simulation.round(&|_| ()).unwrap();
    let products = simulation.experiment().graph.products().unwrap();
    let mut out = Vec::new();
    for result in simulation.last_results().unwrap() {
        let moved: Vec<f32> = result.weights.iter().zip(&start).map(|(w, start)| w - start).collect();
        for product in &products {
            let rows = |v: &[f32]| -> Vec<Vec<f32>> {
                let row = |o: usize| &v[product.weight.clone()][o * product.row_len()..(o + 1) * product.row_len()];
                (0..product.outputs).map(|o| [row(o), &v[product.bias.start + o..][..1]].concat()).collect()
            };
            let sent = vectors.values().flat_map(|v| rows(v)).filter(|r| r.iter().any(|v| *v != 0.0)).collect();
            out.push((rows(&moved), sent));
        }
    }
    out
}

#[test]
fn what_rules_on_inputs_learn_does_not_act_on_the_main_inputs_of_any_layer() {
    let (gpm, owm, free) = (rounds_rows("gpm"), rounds_rows("owm"), rounds_rows("a-gem"));
    assert!(free.iter().all(|(_, sent)| sent.is_empty()), "no directions without a rule on inputs");
    for (moved, sent) in &gpm {
        assert!(!sent.is_empty() && moved.iter().any(|row| row.iter().any(|v| *v != 0.0)));
        let worst = sent.iter().flat_map(|r| moved.iter().map(move |row| cosine(row, r).abs())).fold(0.0, f64::max);
        assert!(worst < 1e-3, "{worst}");
    }
    // OWM damps: little is left along its strongest direction, but not nothing.
    for ((moved, sent), (free, _)) in owm.iter().zip(&free) {
        let along = |rows: &[Vec<f32>]| -> f64 {
            rows.iter().map(|row| vector::dot(&Cpu::new(1), row, &sent[0]).powi(2)).sum::<f64>().sqrt()
        };
        let (left, before) = (along(moved), along(free));
        assert!(left < 0.2 * before && left > 1e-5 * before, "{left} of {before}");
    }
}

#[test]
fn networks_without_plain_products_are_refused_before_anything_is_trained() {
    let layers = "model={name='layers', layers=[{op='standardized_conv2d', outputs=4}, {op='flatten'}, {op='linear'}]}";
    let config = config("fedproj", &[layers, "method.fedproj.projection.rule=gpm"]);
    let method = config.method.build().unwrap();
    let error = Experiment::load(config, method.as_ref(), None).unwrap_err().to_string();
    assert!(error.contains("projection.rule") && error.contains("hint"), "{error}");
}
