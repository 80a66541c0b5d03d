//! Differential privacy as a user sees it: the plan, and an ε in every output.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;

use command::{failure, fedproj, json, rounds, run, stdout};

#[test]
fn a_plan_answers_with_the_noise_and_rejects_what_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let plan = |more: &[&'static str]| {
        let least = ["privacy", "plan", "--rounds", "100", "--clients", "1000"];
        [&least[..], more].concat()
    };
    let args = plan(&["--epsilon", "8", "--cohort", "100", "--delta", "1e-5"]);
    let answer = json(folder, &args);
    // The number of dp-accounting for half of it, since neighbours replace one client.
    assert!((answer["noise_multiplier"].as_f64().unwrap() - 3.037_388_6).abs() < 1e-5, "{answer}");
    assert_eq!(answer["adjacency"], "replace-one");
    assert!(stdout(folder, &args).contains("3.0374"));
    for (more, words) in [
        (&["--epsilon", "-1", "--cohort", "10"][..], "--epsilon = -1: must be positive"),
        (&["--epsilon", "1", "--cohort", "2000"], "--cohort = 2000: must be at most the 1000 clients"),
        (&["--epsilon", "1", "--cohort", "10", "--delta", "0.1"], "--delta = 0.1: must be above 0 and below one over"),
    ] {
        let (code, message) = failure(fedproj(folder, &plan(more)));
        assert!(code == 2 && message.contains(words), "{message}");
    }
}

#[test]
fn every_output_of_a_run_shows_its_epsilon_and_whether_it_is_nominal() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let private = ["method.name=fedavg", "privacy.noise_multiplier=1.0", "privacy.noise=seeded"];
    let summary = run(folder, "all/private", &private);
    run(folder, "all/open", &["method.name=fedavg"]);
    let epsilon = summary["privacy"]["epsilon"].as_f64().unwrap();
    let shown = format!("{epsilon:.2} (nominal)");
    assert_eq!(rounds(&folder.join("all/private"))[2]["privacy"], summary["privacy"]);
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap();
    assert!(read("all/private/manifest.json").contains("ε is nominal"));
    assert!(read("all/private/metrics.csv").ends_with(&format!(",{epsilon}\n")));
    assert!(
        read("all/open/metrics.csv").starts_with("round,accuracy") && !read("all/open/metrics.csv").contains("epsilon")
    );
    let table = stdout(folder, &["compare", "all"]);
    assert!(table.contains(&shown) && table.contains('∞'), "{table}");
    stdout(folder, &["report", "all", "--out", "page"]);
    assert!(read("page/report.html").contains(&shown));
    stdout(folder, &["verify", "all/private"]);
    // A run of a real generator is checked as far as it can be.
    run(folder, "system", &["method.name=fedavg", "privacy.noise_multiplier=1.0"]);
    let verified = json(folder, &["verify", "system"]);
    assert_eq!(verified["n_rounds"], 0);
    let (code, message) = failure(fedproj(folder, &["serve", "privacy.noise_multiplier=1.0", "method.name=fedavg"]));
    assert!(code == 2 && message.contains("privacy: a federation's server"), "{message}");
}
