//! After the first step a training step allocates nothing, alone or with a team of threads.
//!
//! A global allocator counts. The count is of the whole process, so there is one test: others would add to it.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use fedproj_nn::models::{self, BertConfig, Variant};
use fedproj_nn::vector::{Bounds, Conflict};
use fedproj_nn::{Cpu, Graph, Init, Loss, LossTargets, Mode, Optimizer, Options, Rule, Shape, Workspace, clip_norm};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[allow(unsafe_code, reason = "an allocator is unsafe by its nature; this one counts and passes on")]
// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
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

/// Allocations of each of five steps: forward, losses at the output and a tap, backward, projection, clipping, Adam.
fn allocations_of_steps(graph: &Graph, x: &[f32], n_threads: usize) -> [usize; 5] {
    let batch = x.len() / graph.shape(graph.input()).len();
    let tap = graph.features().unwrap_or(graph.input());
    let options = Options { batch, taps: &[tap], training: true };
    let mut ws = Workspace::new(graph, &options, Cpu::new(n_threads)).unwrap();
    let (mut params, mut buffers) = (graph.init_params(1, Init::Torch), graph.init_buffers());
    let mut adam = Optimizer::new(Rule::adam(0.001), params.len()).unwrap();
    let labels: Vec<u32> = (0..batch as u32).map(|i| i % 10).collect();
    let target = vec![0.5; batch * graph.shape(tap).len()];
    let teacher = vec![0.25; batch * graph.shape(graph.output()).len()];
    let (mut grad, mut reference) = (vec![0.0; params.len()], vec![0.0; params.len()]);
    let mut step = |key: u64| {
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        for (out, loss) in [
            (&mut reference, (Loss::kl(3.0), LossTargets::logits(&teacher))),
            (&mut grad, (Loss::CrossEntropy, LossTargets::labels(&labels))),
        ] {
            ws.forward(&params, &mut buffers, x, Mode::train(key)).unwrap();
            ws.add_loss(graph.output(), &loss, 1.0).unwrap();
            ws.add_loss(tap, &(Loss::MaskedSquares, LossTargets::features(&target)), 0.1).unwrap();
            ws.backward(&params, out).unwrap();
        }
        let conflict = Conflict::between(ws.cpu(), &grad, &reference);
        conflict.resolve(ws.cpu(), &mut grad, &reference, &Bounds::default());
        clip_norm(ws.cpu(), &mut grad, 0.5);
        adam.step(ws.cpu(), &mut params, &grad, 1.0);
        ALLOCATIONS.load(Ordering::SeqCst) - before
    };
    std::array::from_fn(|i| step(i as u64))
}

fn check(name: &str, graph: &Graph, x: &[f32]) {
    for n_threads in [1, 2] {
        let counts = allocations_of_steps(graph, x, n_threads);
        assert_eq!(counts[1..], [0; 4], "{name} on {n_threads} threads");
    }
}

#[test]
fn training_steps_after_the_first_allocate_nothing() {
    let counted = ALLOCATIONS.load(Ordering::SeqCst);
    drop(std::hint::black_box(vec![1u8; 100]));
    assert!(ALLOCATIONS.load(Ordering::SeqCst) > counted, "the allocator counts");
    for name in ["resnet8-thin", "cnn", "mlp"] {
        let graph = models::build(name, Shape::image(32, 32, 3), 10, Variant::default()).unwrap();
        let x: Vec<f32> = (0..8 * 32 * 32 * 3).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect();
        check(name, &graph, &x);
    }
    let config = BertConfig { vocabulary: 20, ..BertConfig::sized(2, 32, 2, 48) };
    let x: Vec<f32> = (0..8 * 70).map(|i| if i % 70 < 9 * (i / 70) { 1.0 + (i % 40) as f32 } else { 0.0 }).collect();
    check("bert", &models::bert(&config, 70, 10, Variant::default()).unwrap(), &x);
}
