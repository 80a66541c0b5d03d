//! The study's figures.

use super::plane::Plane;
use super::results::{Results, runs};
use super::study::{METHODS, PilotRun, ROUNDS, SHOWN, Scenario, extent};
use crate::compare::mean;
use crate::page::Figure;
use fedproj_core::RoundRecord;
use fedproj_report::{Chart, ChartSize, Charts, Panel, Point, RegionGrid, SERIES, Series, Sketch, Spread};

/// All figures, in the order of the page, each with the scenario it belongs to. The sketch has none.
pub fn figures(plane: &Plane, results: &Results, runs: &[PilotRun]) -> Vec<(Option<Scenario>, Figure)> {
    let mut figures = vec![(None, sketch(results, runs))];
    for scenario in Scenario::ALL {
        let shown: &[u32] = if scenario == Scenario::Skewed { &SHOWN } else { &[1, ROUNDS] };
        figures.extend(shown.iter().map(|&round| (Some(scenario), regions(plane, runs, scenario, round))));
        figures.push((Some(scenario), curves(runs, scenario)));
    }
    figures
}

/// The sketch at the angle that was measured.
fn sketch(results: &Results, all: &[PilotRun]) -> Figure {
    let runs = runs(all, Scenario::Skewed, METHODS.len() - 1);
    let cosines: Vec<f64> = runs.iter().flat_map(|run| run.rounds.iter().filter_map(|r| r.cosine)).collect();
    let cosine = mean(&cosines);
    let rate = results.get(Scenario::Skewed, "fedproj").projection_rate.as_ref().map_or(0.0, |r| r.mean);
    let subtitle = format!(
        "drawn at the mean angle of the skewed study: cosine of g and r −{:.2}; {:.0} % of all steps were projected",
        -cosine,
        100.0 * rate
    );
    let caption = "A step along −g raises the memory loss if the angle between g and r is larger than a right angle. The \
                   projected gradient is the nearest one that does not, to first order.";
    Figure::new("projection", Sketch { cosine, subtitle }.draw(), caption)
}

fn regions(plane: &Plane, all: &[PilotRun], scenario: Scenario, round: u32) -> Figure {
    let with_pictures = || all.iter().filter(|run| run.scenario == scenario && !run.snapshots.is_empty());
    let held = with_pictures().next().map(|o| o.held.clone()).unwrap_or_default();
    let owner = |i: usize| held.iter().position(|samples| samples.contains(&(i as u32)));
    let point = |(i, (x, y, class)): (usize, (f64, f64, usize))| Point { x, y, class, owner: owner(i) };
    let rows = with_pictures().filter_map(|o| {
        let snapshot = o.snapshots.iter().find(|s| s.round == round)?;
        let n = snapshot.models.len();
        let panel = |(i, model): (usize, &super::study::Pictured)| Panel {
            title: format!("accuracy {:.1} %", 100.0 * model.accuracy),
            owner: (i > 0 && i + 1 < n).then(|| i - 1),
            mesh: model.mesh.clone(),
        };
        Some((METHODS[o.method].1.to_owned(), snapshot.models.iter().enumerate().map(panel).collect()))
    });
    let names = plane.data.class_names();
    let client = |(k, samples): (usize, &Vec<u32>)| {
        (format!("client {}", ["A", "B", "C"][k]), format!("after training on {} {}", samples.len(), names[k]))
    };
    let mut columns = vec![("global before".to_owned(), format!("start of round {round}"))];
    columns.extend(held.iter().enumerate().map(client));
    columns.push(("global after".to_owned(), format!("end of round {round}")));
    let seed = with_pictures().next().map_or(0, |o| o.seed);
    let grid = RegionGrid {
        id: format!("{}{round}", scenario.key()),
        title: format!("Decision regions in round {round} of {ROUNDS}: clients {}", scenario.title()),
        subtitle: format!("Iris on its two principal components; accuracy on all 150 flowers; seed {seed}"),
        extent: extent(plane),
        classes: names.to_vec(),
        points: plane.points().into_iter().enumerate().map(point).collect(),
        columns,
        rows: rows.collect(),
    };
    let caption = format!(
        "Round {round}: the global model before, each client after local training, and the global model after fusion."
    );
    Figure::new(format!("regions-{}-round-{round:02}", scenario.key()), grid.draw(), caption)
}

fn curves(all: &[PilotRun], scenario: Scenario) -> Figure {
    let line = |method: usize, of: &dyn Fn(&RoundRecord) -> Option<f64>, start: bool| -> Vec<Spread> {
        let runs = runs(all, scenario, method);
        let spread = |x: u32, values: Vec<f64>| {
            (!values.is_empty()).then(|| {
                let s = super::results::Spread::of(values);
                Spread { x: f64::from(x), mean: s.mean, min: s.min, max: s.max }
            })
        };
        let first = start.then(|| spread(0, runs.iter().map(|run| 100.0 * run.start).collect())).flatten();
        let at =
            |round: u32| spread(round + 1, runs.iter().filter_map(|run| of(&run.rounds[round as usize])).collect());
        first.into_iter().chain((0..ROUNDS).filter_map(at)).collect()
    };
    let chart = |title: &str, y, start, of: &dyn Fn(&RoundRecord) -> Option<f64>| Chart {
        title: title.to_owned(),
        y,
        x: (0.0, f64::from(ROUNDS), vec![0.0, 5.0, 10.0, 15.0, 20.0]),
        x_label: "rounds done".into(),
        lines: (0..METHODS.len()).map(|method| line(method, of, start)).collect(),
    };
    let percent = |v: Option<f64>| v.map(|v| 100.0 * v);
    let losses: Vec<f64> = all
        .iter()
        .filter(|o| o.scenario == scenario)
        .flat_map(|o| o.rounds.iter().filter_map(|r| r.memory_loss_after))
        .collect();
    let loss_step = tick(losses.iter().copied().fold(0.0, f64::max));
    let charts = vec![
        chart("global accuracy, %", (0.0, 100.0, 20.0), true, &|r| percent(r.accuracy)),
        chart("clients' accuracy, %", (0.0, 100.0, 20.0), false, &|r| percent(r.client_accuracy)),
        chart("forgetting, %", (0.0, 100.0, 20.0), false, &|r| percent(r.forgetting)),
        chart("steps projected, %", (0.0, 100.0, 20.0), false, &|r| percent(r.projection_rate)),
        chart("memory loss after local training", (0.0, 5.0 * loss_step, loss_step), false, &|r| r.memory_loss_after),
    ];
    let n_seeds = runs(all, scenario, 0).len();
    let notes = vec![
        String::new(),
        format!("line: mean over {n_seeds} seeds"),
        "band: min to max".into(),
        "clients: after local training".into(),
        "forgetting: largest per-class accuracy drop".into(),
        "in local training, mean over clients".into(),
        "memory loss: KL to last round's ensemble".into(),
    ];
    let curves = Charts {
        title: format!("Round by round: clients {}", scenario.title()),
        subtitle: "accuracy on all 150 flowers".into(),
        series: METHODS.iter().zip(SERIES).map(|((_, name), look)| Series::new(*name, look)).collect(),
        notes,
        charts,
        size: ChartSize::default(),
    };
    let caption = "Accuracy, forgetting and projection over the rounds.";
    Figure::charts(format!("curves-{}", scenario.key()), &curves, caption)
}

/// A round number for a fifth of an axis that reaches `most`.
fn tick(most: f64) -> f64 {
    let fifth = (most / 5.0).max(1e-3);
    let power = 10f64.powf(fifth.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|m| m * power).find(|t| *t >= fifth).unwrap_or(fifth)
}
