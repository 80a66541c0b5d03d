//! The conformance suite on the CPU. A GPU is compared by `fedproj selftest`.

use fedproj_conformance::{Suite, Verdict};
use std::path::PathBuf;

fn run(group: &str) -> Vec<Verdict> {
    let fixtures = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures"));
    let suite = Suite::open("cpu", Some(fixtures)).expect("the CPU and the fixtures are there");
    suite.run(group).collect()
}

/// A group of at least so many comparisons, none of which exceeds `share` of its tolerance. On a CPU without vector
/// instructions the layers have nothing to be compared with.
fn check(group: &str, comparisons_min: usize, share: f64) {
    let verdicts = run(group);
    let [verdict] = &verdicts[..] else { panic!("{} groups in place of one", verdicts.len()) };
    if verdict.status == "skipped" && fedproj_nn::Isa::available().len() == 1 {
        return;
    }
    assert_eq!(verdict.status, "ok", "{:#?}", verdict.messages);
    assert!(verdict.comparisons >= comparisons_min, "{} comparisons", verdict.comparisons);
    let worst = verdict.worst.as_ref();
    assert!(worst.is_none_or(|w| w.error <= share * w.tolerance), "{worst:?}");
}

/// Two ways to compute that round differently stay well within the tolerance. So a failure on a GPU is not the fault of a
/// network that cannot be compared.
#[test]
fn instruction_sets_agree_on_every_layer() {
    check("layers", 2000, 0.5);
}

#[test]
fn gradients_are_the_slopes_of_losses() {
    check("slopes", 12, 0.5);
}

#[test]
fn networks_losses_and_optimisers_follow_pytorch() {
    check("golden", 500, 1.0);
}

#[test]
fn text_encoders_agree_and_follow_pytorch() {
    check("text", 1000, 1.0);
}

#[test]
fn methods_follow_the_independent_reference() {
    check("traces", 28 * 3 * 5, 1.0);
}

#[test]
fn methods_give_the_same_bytes_on_one_thread_and_on_two() {
    check("methods", 39 * 2 * 5, 1.0);
}

#[test]
fn methods_give_the_same_bytes_on_every_run() {
    check("reruns", 5 * 4, 1.0);
}

#[test]
fn the_other_groups_need_a_gpu() {
    for group in ["precisions", "losses", "optimisers", "vectors", "networks"] {
        let verdicts = run(group);
        assert_eq!(verdicts.len(), 1);
        assert_eq!((verdicts[0].group, verdicts[0].status), (group, "skipped"));
    }
}
