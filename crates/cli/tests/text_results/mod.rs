//! The text studies at the paper's scale: their tables in the pages, and the figures that stand in sentences.

use crate::{
    MARC, MNLI, SST2, beside_the_paper, check, difference, is_beta, manifest, markdown, papers_mean, runs_of, says,
    study, study_against, title, typographic,
};
use fedproj_core::StoredRun;
use fedproj_study::Difference;

/// The text studies at the paper's scale, with their names in the pages and in the paper's table.
const TEXTS: [((&str, usize), &str, &str); 3] =
    [(SST2, "SST-2", "nlp,SST-2,Sentiment140"), (MNLI, "MNLI", "nlp,MNLI,SNLI"), (MARC, "MARC", "nlp,MARC,Yelp")];

/// Rows of each text study and degree of skew.
fn text_rows(rows: impl Fn((&str, usize), &str, &str, f64) -> Vec<String>) -> Vec<String> {
    let settings = TEXTS.into_iter().flat_map(|study| [0.3, 0.5].map(|beta| (study, beta)));
    settings.flat_map(|((runs, data, paper), beta)| rows(runs, data, paper, beta)).collect()
}

/// Accuracies of one seed, method by method.
fn of_seed(runs: &[StoredRun], beta: f64, seed: u64) -> Vec<(String, f64)> {
    let is_asked = |run: &&StoredRun| run.config.seed == seed && is_beta(&run.config, beta);
    runs.iter().filter(is_asked).map(|run| (run.config.method.name.clone(), 100.0 * run.summary.headline)).collect()
}

/// How far `FedProj` is ahead of the best of the others.
fn lead(accuracies: &[(String, f64)]) -> f64 {
    let (ours, others): (Vec<_>, Vec<_>) = accuracies.iter().partition(|(method, _)| method == "fedproj");
    ours[0].1 - others.iter().map(|(_, accuracy)| *accuracy).fold(f64::MIN, f64::max)
}

#[test]
fn texts_at_the_papers_scale_are_what_was_measured() {
    let rows = text_rows(|runs, data, setting, beta| {
        let rows = beside_the_paper(runs, setting, beta).into_iter();
        rows.map(|row| format!("| {data} | {beta} | {row} |")).collect()
    });
    let head = "| data | β | method | seeds | paper, % | ours, % | Δ vs FedAvg | FedProj − this |";
    check("docs/text.md", "table2 full", &markdown(head, "|---|---:|---|---:|---:|---:|---:|---:|", rows.into_iter()));
}

/// Texts of the second of two classes that the last four cohorts held, in per cent, mean over them: the rounds that the
/// accuracy is the mean of.
fn late_share(run: &StoredRun) -> f64 {
    let counts = manifest(run).class_counts;
    let share = |cohort: &[u32]| {
        let held = |class: usize| cohort.iter().map(|c| f64::from(counts[*c as usize][class])).sum::<f64>();
        held(1) / (held(0) + held(1))
    };
    100.0 / 4.0 * run.rounds.iter().rev().take(4).map(|round| share(&round.cohort)).sum::<f64>()
}

#[test]
fn texts_seed_by_seed_are_what_was_measured() {
    let rows = text_rows(|runs, data, _, beta| {
        let runs = runs_of(runs);
        let row = |seed| {
            let all = of_seed(&runs, beta, seed);
            let cell =
                |method: &str| all.iter().find(|(m, _)| m == method).map_or("–".into(), |(_, a)| format!("{a:.2}"));
            let cells = ["fedavg", "feddf", "fedet", "fedproj"].map(cell).join(" | ");
            let lead = typographic(&format!("{:+.2}", lead(&all)));
            let run = runs.iter().find(|r| r.config.seed == seed && is_beta(&r.config, beta)).unwrap();
            let share = if data == "SST-2" { format!("{:.0}", late_share(run)) } else { String::new() };
            format!("| {data} | {beta} | {seed} | {cells} | {lead} | {share} |")
        };
        (0..3).map(row).collect()
    });
    let head = "| data | β | seed | FedAvg | FedDF | FedET | FedProj | FedProj − best other | positive texts, last 4 cohorts, % |";
    let aligned = "|---|---:|---:|---:|---:|---:|---:|---:|---:|";
    check("docs/text.md", "table2 seeds", &markdown(head, aligned, rows.into_iter()));
}

#[test]
fn gains_on_texts_are_what_was_measured() {
    let rows = text_rows(|runs, data, setting, beta| {
        let gain = papers_mean(setting, beta, "FedProj", "") - papers_mean(setting, beta, "FedAvg", "");
        let papers = typographic(&format!("{gain:+.2}"));
        let row = study(runs, beta).into_iter().find(|row| row.name == "fedproj").unwrap();
        let all = runs_of(runs);
        let n_first = (0..3).filter(|seed| lead(&of_seed(&all, beta, *seed)) > 0.0).count();
        vec![format!("| {data} | {beta} | {papers} | {} | {n_first} of 3 |", difference(&row))]
    });
    let head = "| data | β | paper: FedProj Δ vs FedAvg | ours | FedProj first in seeds |";
    let table = markdown(head, "|---|---:|---:|---:|---:|", rows.into_iter());
    check("docs/reproduction.md", "table2 gains", &table);
}

/// `63 454`.
fn spaced(n: usize) -> String {
    if n < 1000 { n.to_string() } else { format!("{} {:03}", n / 1000, n % 1000) }
}

#[test]
fn sizes_of_the_text_studies_are_what_was_drawn() {
    for (study, ..) in TEXTS {
        let runs = runs_of(study);
        let [private, public, test] = ["private", "public", "test"].map(|part| {
            let of = |run: &StoredRun| manifest(run).sizes[&format!("{part}_samples")];
            // FedAvg takes no public texts.
            let mut sizes: Vec<usize> = runs.iter().map(of).filter(|n| *n > 0).collect();
            sizes.dedup();
            assert_eq!(sizes.len(), 1, "{}: {part} samples of {sizes:?}", study.0);
            spaced(sizes[0])
        });
        let words = format!("{private} texts to train on, {public} public ones and {test} to test on");
        says(&format!("results/{}/README.md", study.0), &words);
        if study != SST2 {
            for page in ["docs/text.md", "docs/reproduction.md"] {
                says(page, &format!("{private} texts instead of 100 000"));
            }
        }
    }
}

#[test]
fn steps_that_a_client_takes_on_texts_are_counted() {
    for (study, data, _) in TEXTS {
        let (mut n_clients, mut n_steps) = (0, 0);
        for run in runs_of(study) {
            let counts = manifest(&run).class_counts;
            for client in run.rounds.iter().flat_map(|round| &round.cohort) {
                let n_texts: u32 = counts[*client as usize].iter().sum();
                n_steps += (n_texts as usize).div_ceil(run.config.local.batch);
                n_clients += 1;
            }
        }
        says("docs/text.md", &format!("{:.0} steps on {data}", n_steps as f64 / f64::from(n_clients)));
    }
}

#[test]
fn runs_of_fedet_that_end_with_one_class_are_counted() {
    let ends_with_one = |run: &StoredRun| {
        let recall = run.rounds.last().unwrap().per_class.as_ref().unwrap();
        recall.iter().filter(|class| **class > 0.0).count() == 1
    };
    let runs: Vec<StoredRun> = runs_of(MARC).into_iter().filter(|run| run.config.method.name == "fedet").collect();
    let n_one = runs.iter().filter(|run| ends_with_one(run)).count();
    says("docs/text.md", &format!("In {n_one} of its {} runs the model predicts", runs.len()));
}

#[test]
fn intervals_that_exclude_zero_are_counted() {
    let mut all: Vec<Difference> = Vec::new();
    for ((study_of, ..), beta) in TEXTS.into_iter().flat_map(|study| [0.3, 0.5].map(|beta| (study, beta))) {
        all.extend(study(study_of, beta).iter().filter_map(|row| row.difference));
        // FedAvg's to FedProj is FedProj's to FedAvg.
        let others = study_against("fedproj", study_of, beta).into_iter().filter(|row| row.name != "fedavg");
        all.extend(others.filter_map(|row| row.difference));
    }
    let n_clear = all.iter().filter(|d| d.mean.abs() > d.half_width.unwrap()).count();
    says("docs/text.md", &format!("{n_clear} of the {} intervals exclude zero", all.len()));
}

/// `8 to 13`, with as many digits as asked for.
fn range(values: impl IntoIterator<Item = f64>, digits: usize) -> String {
    let (least, most) = values.into_iter().fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(v), b.max(v)));
    format!("{least:.digits$} to {most:.digits$}")
}

#[test]
fn ranges_over_methods_and_seeds_are_what_was_measured() {
    let page = |words: String| says("docs/text.md", &words);
    let [sst2, marc] = [SST2, MARC].map(runs_of);
    let leads = [0.3, 0.5].into_iter().flat_map(|beta| [0, 1, 2].map(|seed| lead(&of_seed(&sst2, beta, seed))));
    page(format!("by {} points over the best other method", range(leads, 1)));
    let rows = |study_of| [0.3, 0.5].into_iter().flat_map(move |beta| study(study_of, beta));
    page(format!(
        "varies by {} points (one standard deviation)",
        range(rows(SST2).map(|row| 100.0 * row.std.unwrap()), 0)
    ));
    page(format!("all methods have means of {} %", range(rows(SST2).map(|row| 100.0 * row.best), 0)));

    // How far seed 2 of each method and skew is below each of the others.
    let is_sibling = |a: &StoredRun, b: &StoredRun| {
        a.config.method.name == b.config.method.name && a.config.data.partition == b.config.data.partition
    };
    let (last, others): (Vec<&StoredRun>, Vec<&StoredRun>) = sst2.iter().partition(|run| run.config.seed == 2);
    let gaps = last.iter().flat_map(|run| {
        let siblings = others.iter().filter(|other| is_sibling(run, other));
        siblings.map(|other| 100.0 * (other.summary.headline - run.summary.headline))
    });
    page(format!("Seed 2 is {} points below the others", range(gaps, 0)));
    let best = |runs: &[&StoredRun]| range(runs.iter().map(|run| 100.0 * run.summary.best), 0);
    page(format!("({} %, the others' {} %)", best(&last), best(&others)));

    let above_paper = |of| {
        let (study_of, _, setting) = TEXTS.into_iter().find(|(study_of, ..)| *study_of == of).unwrap();
        [0.3, 0.5].into_iter().flat_map(move |beta| {
            let rows = study(study_of, beta).into_iter();
            rows.map(move |row| 100.0 * row.mean - papers_mean(setting, beta, title(&row.name), ""))
        })
    };
    page(format!("on SST-2 are {} points above the paper's", range(above_paper(SST2), 0)));
    page(format!("the means are {} points below the paper's", range(above_paper(MARC).map(|above| -above), 0)));
    let first = marc.iter().filter(|run| run.config.seed == 0);
    page(format!("near the 20 % of chance ({} %)", range(first.map(|run| 100.0 * run.summary.headline), 0)));
}
