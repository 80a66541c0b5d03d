//! The figures of a report.

use super::arms::{Arm, Setting};
use fedproj_core::methods::CATALOGUE;
use fedproj_core::{RoundRecord, deviation, mean};
use fedproj_report::{Chart, Charts, Layout, SERIES, Series, Spread, axis};
use std::collections::BTreeSet;

/// A figure.
pub struct Figure {
    /// Name of its files.
    pub name: String,
    /// The picture.
    pub svg: String,
    /// What it shows.
    pub caption: String,
}

/// What a chart draws: its title, the label of x, and both values of a round. x looks at all rounds up to this one.
struct Plan {
    title: &'static str,
    x_label: &'static str,
    x: fn(&[RoundRecord]) -> f64,
    y: fn(&RoundRecord) -> Option<f64>,
}

fn rounds_done(rounds: &[RoundRecord]) -> f64 {
    rounds.len() as f64
}

fn percent(share: Option<f64>) -> Option<f64> {
    share.map(|v| 100.0 * v)
}

const BY_ROUND: &str = "rounds done";

/// Accuracy over rounds, one large chart a setting.
pub fn accuracy(settings: &[Setting]) -> Figure {
    let plans = [Plan { title: "accuracy, %", x_label: BY_ROUND, x: rounds_done, y: |r| percent(r.accuracy) }];
    let layout = Layout { columns: 2, plot: if settings.len() == 1 { (620.0, 360.0) } else { (430.0, 260.0) } };
    Figure {
        name: "accuracy".into(),
        svg: draw("Test accuracy of the global model, round by round", settings, &plans, layout),
        caption: "Accuracy on the test set after each round.".into(),
    }
}

/// Accuracy over time and over what is sent.
pub fn time(settings: &[Setting]) -> Figure {
    let seconds = |rounds: &[RoundRecord]| rounds.iter().map(|r| r.seconds.local + r.seconds.fusion).sum();
    let megabytes = |rounds: &[RoundRecord]| rounds.iter().map(|r| 1e-6 * (r.bytes_down + r.bytes_up) as f64).sum();
    let y = |r: &RoundRecord| percent(r.accuracy);
    let plans = [
        Plan { title: "accuracy over time, %", x_label: "seconds of training and fusion", x: seconds, y },
        Plan { title: "accuracy over what is sent, %", x_label: "megabytes, down and up", x: megabytes, y },
    ];
    Figure {
        name: "time".into(),
        svg: draw("What accuracy costs", settings, &plans, Layout::default()),
        caption: "The same accuracies over the seconds that the simulator took, evaluation apart, and over the bytes \
                  that a real federation would have sent."
            .into(),
    }
}

/// Clients after local training; none where it was not recorded.
pub fn clients(settings: &[Setting]) -> Option<Figure> {
    let plan = |title, y| Plan { title, x_label: BY_ROUND, x: rounds_done, y };
    let plans = [
        plan("clients' accuracy, %", |r| percent(r.client_accuracy)),
        plan("accuracy on own classes, %", |r| percent(r.personal_accuracy)),
        plan("forgetting, %", |r| percent(r.forgetting)),
    ];
    let any = has_any(settings, |r| r.forgetting.is_some());
    any.then(|| Figure {
        name: "clients".into(),
        svg: draw("Clients after local training", settings, &plans, Layout::default()),
        caption: "Mean over the clients of a round, on the test set: accuracy on all classes, on those that a client \
                  holds, and forgetting, the greatest loss of accuracy on a class through local training."
            .into(),
    })
}

/// What the projection did; none where nothing was projected.
pub fn projection(settings: &[Setting]) -> Option<Figure> {
    let plan = |title, y| Plan { title, x_label: BY_ROUND, x: rounds_done, y };
    let plans = [
        plan("steps projected, %", |r: &RoundRecord| percent(r.projection_rate)),
        plan("cosine of g and r", |r| r.cosine),
        plan("memory loss after − before", |r| Some(r.memory_loss_after? - r.memory_loss_before?)),
    ];
    let any = has_any(settings, |r| r.projection_rate.is_some());
    any.then(|| Figure {
        name: "projection".into(),
        svg: draw("What the projection did", settings, &plans, Layout::default()),
        caption: "Share of the steps whose gradient g pointed against the memory's gradient r and was projected, \
                  their cosine, and what local training did to the memory loss (above 0: forgotten)."
            .into(),
    })
}

fn has_any(settings: &[Setting], of: fn(&RoundRecord) -> bool) -> bool {
    let mut runs = settings.iter().flat_map(|s| &s.arms).flat_map(|a| &a.runs);
    runs.any(|r| r.run.rounds.iter().any(of))
}

/// One chart a plan and setting, with the same axes in every setting.
fn draw(title: &str, settings: &[Setting], plans: &[Plan], layout: Layout) -> String {
    let series = series(settings);
    let mut charts = Vec::new();
    for plan in plans {
        let lines: Vec<Vec<Vec<Spread>>> = settings
            .iter()
            .map(|setting| {
                let of = |s: &Series| setting.arms.iter().find(|a| a.name == s.name).map(|a| line(a, plan));
                series.iter().map(|s| of(s).unwrap_or_default()).collect()
            })
            .collect();
        let points = || lines.iter().flatten().flatten();
        if points().next().is_none() {
            continue;
        }
        let least = points().map(|p| p.min).fold(f64::INFINITY, f64::min);
        let most = points().map(|p| p.max).fold(f64::NEG_INFINITY, f64::max);
        let y = axis(least.min(0.0), most.max(0.0));
        let x_last = points().map(|p| p.x).fold(0.0, f64::max);
        let (_, x_end, x_step) = axis(0.0, x_last);
        let n_ticks = (x_end / x_step).round() as usize;
        let ticks: Vec<f64> = (0..=n_ticks).map(|i| i as f64 * x_step).collect();
        for (setting, lines) in settings.iter().zip(lines) {
            let title =
                if settings.len() == 1 { plan.title.to_owned() } else { format!("{}: {}", plan.title, setting.title) };
            charts.push(Chart { title, y, x: (0.0, x_end, ticks.clone()), x_label: plan.x_label.into(), lines });
        }
    }
    let n_seeds: BTreeSet<usize> = settings.iter().flat_map(|s| &s.arms).map(|a| a.runs.len()).collect();
    let (fewest, most) = (n_seeds.first().copied().unwrap_or(0), n_seeds.last().copied().unwrap_or(0));
    let notes = match (fewest, most) {
        (_, 1) => vec!["one seed".to_owned()],
        (a, b) if a == b => vec![format!("line: mean over {a} seeds"), "band: ± 1 deviation".to_owned()],
        (a, b) => vec![format!("line: mean over {a} to {b} seeds"), "band: ± 1 deviation".to_owned()],
    };
    let subtitle = if settings.len() == 1 { settings[0].title.clone() } else { format!("{} settings", settings.len()) };
    Charts { title: title.to_owned(), subtitle, series, notes, charts, layout }.draw()
}

/// The arms of all settings, each with a look. A method looks the same in every report where it has one arm.
fn series(settings: &[Setting]) -> Vec<Series> {
    let mut arms: Vec<&Arm> = Vec::new();
    for arm in settings.iter().flat_map(|s| &s.arms) {
        if !arms.iter().any(|a| a.name == arm.name) {
            arms.push(arm);
        }
    }
    let methods: BTreeSet<&str> = arms.iter().map(|a| a.config().method.name.as_str()).collect();
    let look = |(i, arm): (usize, &&Arm)| {
        let at = if methods.len() == arms.len() { method_look(&arm.config().method.name) } else { i };
        Series::new(arm.name.clone(), SERIES[at % SERIES.len()])
    };
    arms.iter().enumerate().map(look).collect()
}

/// The pilot's three methods first, then the others as in the catalogue.
fn method_look(name: &str) -> usize {
    const FIRST: [&str; 3] = ["fedavg", "feddf", "fedproj"];
    let others = CATALOGUE.iter().map(|(name, _)| *name).filter(|name| !FIRST.contains(name));
    FIRST.into_iter().chain(others).position(|known| known == name).unwrap_or(0)
}

/// An arm's line: mean over seeds, ± 1 deviation.
fn line(arm: &Arm, plan: &Plan) -> Vec<Spread> {
    let n_rounds = arm.runs.iter().map(|r| r.run.rounds.len()).max().unwrap_or(0);
    let point = |n: usize| {
        let rounds = || arm.runs.iter().filter_map(|r| r.run.rounds.get(..n));
        let values: Vec<f64> = rounds().filter_map(|r| (plan.y)(r.last()?)).filter(|v| v.is_finite()).collect();
        let xs: Vec<f64> = rounds().map(plan.x).collect();
        let (m, s) = (mean(&values), deviation(&values).unwrap_or(0.0));
        (!values.is_empty()).then(|| Spread { x: mean(&xs), mean: m, min: m - s, max: m + s })
    };
    (1..=n_rounds).filter_map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fedproj_report::Look;

    #[test]
    fn every_method_has_a_look_of_its_own() {
        let looks: BTreeSet<usize> = CATALOGUE.iter().map(|(name, _)| method_look(name)).collect();
        assert_eq!(looks.len(), CATALOGUE.len());
        let distinct = |a: &Look, b: &Look| (a.colour, a.dashes) != (b.colour, b.dashes);
        assert!(SERIES.iter().enumerate().all(|(i, a)| SERIES[..i].iter().all(|b| distinct(a, b))));
    }
}
