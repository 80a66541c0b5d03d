//! The first sentences of a report: what is best, by how much, and how sure that is.

use super::tables::GroupResult;
use crate::arms::{Arm, Group};
use crate::compare::{Difference, compare};

/// What the reader learns, in a sentence or two per group.
pub fn lead(groups: &[Group], results: &[GroupResult]) -> String {
    let arms = || groups.iter().flat_map(|g| &g.arms);
    let n_runs: usize = arms().map(|arm| arm.runs.len()).sum();
    let n_unfinished: usize = arms().filter(|arm| !arm.is_finished()).map(|arm| arm.runs.len()).sum();
    let mut sentences = vec![match (n_runs, n_unfinished) {
        (1, 0) => "One run.".to_owned(),
        (1, _) => "One run, unfinished: its accuracy is of the rounds done so far.".to_owned(),
        (n, 0) => format!("{n} runs."),
        (n, left) => format!("{n} runs, {left} of them unfinished. Unfinished runs are not ranked."),
    }];
    for (group, result) in groups.iter().zip(results) {
        let place = if groups.len() > 1 { format!("{}: ", result.short) } else { String::new() };
        sentences.push(format!("{place}{}", verdict(group)));
    }
    let n_arms = groups.iter().map(|g| g.arms.len()).max().unwrap_or(0);
    if n_arms > 2 && n_runs > n_arms {
        sentences.push(format!("No p is corrected for the choice of the best of {n_arms}."));
    }
    sentences.join(" ")
}

/// The best arm of a group beside the next one and the baseline.
fn verdict(group: &Group) -> String {
    let mean = |arm: &Arm| crate::compare::mean(&arm.runs.iter().map(|r| r.run.summary.headline).collect::<Vec<_>>());
    let mut ranked: Vec<&Arm> = group.arms.iter().filter(|arm| arm.is_finished()).collect();
    ranked.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
    let Some((best, others)) = ranked.split_first() else {
        let so_far = |arm: &Arm| format!("{} {:.2} %", arm.name, 100.0 * mean(arm));
        return format!("So far: {}.", group.arms.iter().map(so_far).collect::<Vec<_>>().join(", "));
    };
    let (name, accuracy) = (&best.name, 100.0 * mean(best));
    let Some(next) = others.first() else { return format!("{name}: accuracy {accuracy:.2} %.") };
    // The first arm is the baseline of the table.
    let baseline = others[1..].iter().find(|arm| arm.name == group.arms[0].name);
    let margins: Vec<String> = [next].into_iter().chain(baseline).map(|other| margin(best, other)).collect();
    format!("{name} has the highest mean accuracy, {accuracy:.2} %: {}.", margins.join("; "))
}

/// How far one arm is ahead of another, and how sure that is.
fn margin(best: &Arm, other: &Arm) -> String {
    let results = |arm: &Arm| arm.runs.iter().map(|r| (arm.name.clone(), r.run.summary.clone())).collect::<Vec<_>>();
    let difference = compare(&[results(other), results(best)].concat()).rows[1].difference;
    let Some(d) = difference else { return format!("{} has no seed in common with it", other.name) };
    let points = 100.0 * d.mean;
    match d.half_width {
        Some(half) => format!("{points:.2} ± {:.2} points above {}, {}", 100.0 * half, other.name, sureness(&d)),
        None => format!("{points:.2} points above {} (one seed: significance is unknown)", other.name),
    }
}

fn sureness(difference: &Difference) -> String {
    let is_significant = difference.is_significant() == Some(true);
    let (word, zero) = if is_significant { ("significant", "excludes") } else { ("not significant", "includes") };
    let p = match difference.p_value() {
        Some(p) if p < 0.001 => ", p < 0.001".to_owned(),
        Some(p) => format!(", p = {p:.3}"),
        None => String::new(),
    };
    format!("{word} (the 95 % interval over {} seeds {zero} zero{p})", difference.n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::{sort, tests::run};
    use crate::page::tables::results;

    fn check(accuracies: &[(&str, &[f64])], expected: &str) {
        let runs = accuracies.iter().flat_map(|(method, seeds)| {
            let setting = format!("method.name={method}");
            seeds.iter().enumerate().map(move |(seed, accuracy)| run(&[&setting], seed as u64, *accuracy))
        });
        let groups = sort(runs.collect(), &mut Vec::new());
        let results: Vec<GroupResult> = groups.iter().map(|g| results(g).unwrap()).collect();
        assert_eq!(lead(&groups, &results), expected);
    }

    #[test]
    fn it_says_whether_the_difference_is_significant_and_how_sure() {
        check(
            &[("fedavg", &[0.50, 0.60, 0.55]), ("fedproj", &[0.53, 0.64, 0.58])],
            "6 runs. FedProj has the highest mean accuracy, 58.33 %: 3.33 ± 1.43 points above FedAvg, significant (the \
             95 % interval over 3 seeds excludes zero, p = 0.010).",
        );
        check(
            &[("fedavg", &[0.50, 0.60, 0.55]), ("fedproj", &[0.53, 0.58, 0.58])],
            "6 runs. FedProj has the highest mean accuracy, 56.33 %: 1.33 ± 7.17 points above FedAvg, not significant \
             (the 95 % interval over 3 seeds includes zero, p = 0.508).",
        );
    }

    #[test]
    fn the_next_and_the_baseline_are_both_named() {
        check(
            &[("fedavg", &[0.5, 0.5]), ("fedprox", &[0.6, 0.6]), ("fedproj", &[0.7, 0.7])],
            "6 runs. FedProj has the highest mean accuracy, 70.00 %: 10.00 ± 0.00 points above FedProx, significant (the \
             95 % interval over 2 seeds excludes zero); 20.00 ± 0.00 points above FedAvg, significant (the 95 % interval \
             over 2 seeds excludes zero). No p is corrected for the choice of the best of 3.",
        );
    }

    #[test]
    fn one_seed_allows_no_statement() {
        let text = "2 runs. FedProj has the highest mean accuracy, 70.00 %: 20.00 points above FedAvg (one seed: \
                    significance is unknown).";
        check(&[("fedavg", &[0.5]), ("fedproj", &[0.7])], text);
        check(&[("fedproj", &[0.7])], "One run. FedProj: accuracy 70.00 %.");
    }
}
