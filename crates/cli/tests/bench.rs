//! The commands that measure run, and print what scripts read. How fast they are is not tested.

mod command;

use command::json;

#[test]
fn a_round_of_methods_with_and_without_a_public_set_is_timed() {
    let small =
        ["--model", "mlp", "--clients", "2", "--samples", "32", "--epochs", "1", "--public", "64", "--device", "cpu"];
    for method in ["fedavg", "feddyn", "fedproj"] {
        // The second round reads what the first has left.
        let timed =
            json(".".as_ref(), &[&["bench", "round", "--rounds", "2", "--method", method], &small[..]].concat());
        assert!(timed["round_s"].as_f64() > Some(0.0), "{timed}");
        assert_eq!((timed["method"].as_str(), timed["clients"].as_u64()), (Some(method), Some(2)), "{timed}");
    }
}

#[test]
fn a_step_is_timed() {
    let timed = json(".".as_ref(), &["bench", "step", "--model", "mlp", "--steps", "3"]);
    assert!(timed["ms_per_step"].as_f64() > Some(0.0) && timed["samples_per_second"].as_f64() > Some(0.0), "{timed}");
}
