//! The memory of a local step, and the calls that plan it.

use super::*;
use crate::config::Config;
use crate::coordinator::Coordinator;
use crate::plan::Op;
use crate::step::{Batch, Step, Term};
use fedproj_nn::Loss;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

thread_local! {
    /// Allocations of this thread, so that tests beside it do not count.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

impl Counting {
    fn count() {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
    }
}

#[allow(unsafe_code, reason = "an allocator is unsafe by its nature; this one counts and passes on")]
// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        Self::count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn config(method: &str, settings: &[&str]) -> Config {
    let small = [
        "data.private_samples=240",
        "data.public_samples=80",
        "data.partition={kind='iid', clients=4}",
        "model.hidden=[12]",
        "federation.rounds=3",
        "local.epochs=2",
        "local.batch=16",
        "method.fedproj.projection.warmup=0",
        "method.fedproj.memory={size=40, batch=20}",
        "method.fedproj.distill.batch=20",
    ];
    let all = small.iter().chain(settings).map(|s| (*s).to_owned());
    Config::from_layers(None, &all.chain([format!("method.name={method}")]).collect::<Vec<_>>()).unwrap()
}

/// Allocations of the first step of a client's second round, and of the steps after it. Each of the steps must hold an
/// operation like `wanted`.
fn allocations_of_steps(config: Config, wanted: impl Fn(&Op) -> bool) -> (usize, usize) {
    let method = config.method.build().unwrap();
    let experiment = Experiment::load(config, method.as_ref(), None).unwrap();
    let mut server = Coordinator::new(experiment, method, 1).unwrap();
    // From the first round MOON keeps a model, and FedProj has a memory.
    let opening = server.open().unwrap();
    let mut trainer = Trainer::new(server.experiment(), server.method()).unwrap();
    let mut result = trainer.train(server.method(), &opening.download, 0, &ClientState::new()).unwrap();
    let state = std::mem::take(&mut result.state);
    server.close(&opening, &vec![result], 0.0).unwrap();
    let download = server.open().unwrap().download;

    let mut trainer = Trainer::new(server.experiment(), server.method()).unwrap();
    trainer.planner.receive(&download);
    let mut plan = trainer.planner.plan(server.method(), &download, 0, &state).unwrap();
    trainer.executor.begin(&download.weights, &download.buffers, &download);
    trainer.place_vectors(&plan, &download, &state).unwrap();
    trainer.embed(&plan).unwrap();
    let Trainer { experiment, memory, memory_objective, truncates_memory, planner, executor, .. } = &mut trainer;
    let mut feeds = feeds(experiment, (memory.as_ref(), memory_objective), *truncates_memory, &download);
    if planner.has_logits() {
        feeds.own.targets.logits = &download.vectors[LOGITS];
    }
    assert_eq!(plan.moves.is_empty(), !experiment.config.data.augment, "every image is moved, or none is");
    assert!(planner.programs.iter().all(|program| program.ops.iter().any(&wanted)), "{:?}", planner.programs);

    let rest = plan.steps.split_off(1);
    let start = ALLOCATIONS.get();
    executor.run(&plan, &planner.programs, &feeds).unwrap();
    plan.steps = rest;
    assert!(plan.steps.len() > 4);
    let first = ALLOCATIONS.get();
    executor.run(&plan, &planner.programs, &feeds).unwrap();
    (first - start, ALLOCATIONS.get() - first)
}

#[test]
fn local_steps_after_the_first_allocate_nothing() {
    let check = |method: &str, settings: &[&str], wanted: fn(&Op) -> bool| {
        let (first, rest) = allocations_of_steps(config(method, settings), wanted);
        assert!(first > 0, "{method} {settings:?}: the first step allocates, so allocations are not counted");
        assert_eq!(rest, 0, "{method} {settings:?}");
    };
    check("fedavg", &[], |op| matches!(op, Op::Update { .. }));
    check("fedavg", &["local.clip=0.5"], |op| matches!(op, Op::Update { .. }));
    check("fedprox", &[], |op| matches!(op, Op::AddScaledDiff { .. }));
    check("feddyn", &[], |op| matches!(op, Op::AddScaled { x: VectorId::State(_), .. }));
    check("fedsam", &[], |op| matches!(op, Op::Perturb { .. }));
    check("fedlc", &[], |op| matches!(op, Op::Loss { term: Term { loss: Loss::OffsetCrossEntropy, .. } }));
    check("fedntd", &[], |op| matches!(op, Op::Loss { term: Term { loss: Loss::NotTrueKl { .. }, .. } }));
    check("moon", &[], |op| matches!(op, Op::Loss { term: Term { loss: Loss::Contrast { .. }, .. } }));
    check("fedgen", &[], |op| matches!(op, Op::Forward { batch: Batch::Generated, .. }));
    check("fedrcl", &[], |op| matches!(op, Op::Loss { term: Term { loss: Loss::RelaxedContrast(_), .. } }));
    check("fedproj", &["method.fedproj.projection.mode=soft"], |op| matches!(op, Op::AddScaled { .. }));
    check("fedavg", &["data.augment=true"], |op| matches!(op, Op::Update { .. }));
    check("ditto", &[], |op| matches!(op, Op::Backward { at: VectorId::State(_), .. }));
    check("fedgkt", &[], |op| matches!(op, Op::Forward { batch: Batch::Taught, .. }));
    let rule = |rule: &str, wanted: fn(&Op) -> bool| {
        check("fedproj", &[&format!("method.fedproj.projection.rule={rule}")], wanted);
    };
    rule("a-gem", |op| matches!(op, Op::Project { .. }));
    rule("gem", |op| matches!(op, Op::ProjectToCone { .. }));
    rule("ogd", |op| matches!(op, Op::Project { r: VectorId::State(_), .. }));
    for of_inputs in ["owm", "gpm", "sgp"] {
        rule(of_inputs, |op| matches!(op, Op::ProjectInputs { scales: false, .. }));
    }
    rule("trgp", |op| matches!(op, Op::ProjectInputs { scales: true, .. }));
    for setting in ["space=gradient", "scope=layer", "reference=round_start"] {
        let setting = format!("method.fedproj.projection.{setting}");
        check("fedproj", &[&setting], |op| matches!(op, Op::Project { .. }));
    }
    check("fedproj", &["method.fedproj.projection.space=update"], |op| matches!(op, Op::UpdateProjected { .. }));
}

/// FedAvg with a pull towards the received weights in every other step.
#[derive(Debug, Default)]
struct Alternating {
    n_calls: AtomicU32,
}

impl Method for Alternating {
    fn local_step(&self, step: &mut Step<'_>) -> Result<()> {
        self.n_calls.fetch_add(1, Ordering::Relaxed);
        let g = step.gradient(Batch::Private, &[Loss::CrossEntropy])?;
        if step.place().step % 2 == 1 {
            step.add_scaled_diff(g, 0.1, step.weights(), step.weights_round_start());
        }
        step.update(g);
        Ok(())
    }
}

#[test]
fn a_method_is_asked_once_per_step_and_equal_steps_share_a_program() {
    let method = Alternating::default();
    let experiment = Arc::new(Experiment::load(config("fedavg", &[]), &method, None).unwrap());
    let (weights, buffers) = (experiment.weights.clone(), experiment.buffers.clone());
    let download = Arc::new(Download { weights, buffers, ..Download::default() });
    let mut trainer = Trainer::new(&experiment, &method).unwrap();
    let mut n_steps = 0;
    for client in 0..2 {
        n_steps += trainer.train(&method, &download, client, &ClientState::new()).unwrap().n_steps;
        assert_eq!(method.n_calls.load(Ordering::Relaxed), n_steps);
    }
    assert!(n_steps > 8);
    assert_eq!(trainer.planner.programs.len(), 2, "with the pull and without");
}
