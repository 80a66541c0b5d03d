//! The figures of a report.

use super::tables::{ArmResult, GroupResult};
use crate::arms::{Arm, Group};
use crate::compare::{mean, standard_deviation};
use anyhow::{Context, Result};
use fedproj_core::RoundRecord;
use fedproj_core::methods::CATALOGUE;
use fedproj_report::{
    Block, Chart, ChartSize, Charts, DotRow, Dots, Heat, Look, Measure, SERIES, Series, Spread, axis, png, ticks,
};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Pixels of a PNG per pixel of the SVG.
const PNG_SCALE: f32 = 2.0;

/// A figure.
pub struct Figure {
    /// Name of its files.
    pub name: String,
    /// The picture of its files.
    svg: String,
    /// The pictures on a page, for a desk and for a phone, where they are not that of the files.
    on_page: Option<(String, String)>,
    /// What it shows.
    caption: String,
}

impl Figure {
    /// A picture that is the same everywhere.
    pub fn new(name: impl Into<String>, svg: String, caption: impl Into<String>) -> Self {
        Self { name: name.into(), svg, on_page: None, caption: caption.into() }
    }

    /// Charts, whose values a page shows below the pointer and which it stacks on a phone.
    pub fn charts(name: impl Into<String>, charts: &Charts, caption: impl Into<String>) -> Self {
        Self { on_page: Some(charts.for_page()), ..Self::new(name, charts.draw(), caption) }
    }

    /// The picture of its files.
    pub fn into_svg(self) -> String {
        self.svg
    }

    /// The same with another picture for a phone.
    #[must_use]
    pub fn narrow(self, svg: String) -> Self {
        Self { on_page: Some((self.svg.clone(), svg)), ..self }
    }

    /// The figure on a page.
    pub fn block(&self) -> Block {
        let (svg, narrow) = match &self.on_page {
            Some((wide, narrow)) => (wide, Some(narrow.clone())),
            None => (&self.svg, None),
        };
        Block::Figure { svg: svg.clone(), narrow, caption: self.caption.clone() }
    }

    /// Its files in a directory: SVG and PNG.
    pub fn files(&self, dir: &Path) -> Result<[(PathBuf, Vec<u8>); 2]> {
        let pixels = png(&self.svg, PNG_SCALE).with_context(|| format!("figure `{}`", self.name))?;
        let path = dir.join(&self.name);
        Ok([(path.with_extension("svg"), self.svg.clone().into()), (path.with_extension("png"), pixels)])
    }
}

/// What a chart draws: its title, the label of x, and both values of a round. x looks at all rounds up to this one.
struct Quantity {
    title: &'static str,
    x_label: &'static str,
    /// What x measures, where it does not count.
    x_measure: Option<Measure>,
    x: fn(&[RoundRecord]) -> f64,
    y: fn(&RoundRecord) -> Option<f64>,
    /// Drawn in per cent, up to 100 at most.
    is_share: bool,
    has_band: bool,
    /// A point is the mean of this round and the n − 1 before it.
    n_averaged: usize,
}

impl Quantity {
    /// The point after the last of these rounds; none where that round, or too few before it, were measured.
    fn value(&self, rounds: &[RoundRecord]) -> Option<f64> {
        let measured = |r: &RoundRecord| (self.y)(r).filter(|v| v.is_finite());
        measured(rounds.last()?)?;
        let last: Vec<f64> = rounds.iter().rev().filter_map(measured).take(self.n_averaged).collect();
        let unit = if self.is_share { 100.0 } else { 1.0 };
        (last.len() == self.n_averaged).then(|| unit * mean(&last))
    }
}

/// A value over the rounds, with a band.
fn by_round(title: &'static str, y: fn(&RoundRecord) -> Option<f64>) -> Quantity {
    let x = |rounds: &[RoundRecord]| rounds.len() as f64;
    Quantity { title, x_label: "rounds done", x_measure: None, x, y, is_share: false, has_band: true, n_averaged: 1 }
}

/// A share over the rounds, with a band.
fn share_by_round(title: &'static str, y: fn(&RoundRecord) -> Option<f64>) -> Quantity {
    Quantity { is_share: true, ..by_round(title, y) }
}

/// Clients that are drawn one by one.
const N_CLIENTS_MAX: usize = 200;
/// Two charts in a row.
const HALF: ChartSize = ChartSize { columns: 2, plot: (480.0, 290.0) };

/// All figures but the partitions, in the order of the page.
pub fn figures(groups: &[Group], results: &[GroupResult]) -> Vec<Figure> {
    let mut figures: Vec<Figure> = outcome(groups, results).into_iter().chain([accuracy(groups)]).collect();
    figures.extend(each(groups, "time", "What accuracy costs", HALF, &time()));
    figures.extend(each(groups, "clients", "Clients after local training", ChartSize::default(), &clients()));
    figures.extend(forgetting(groups));
    figures.extend(each(groups, "projection", "What the projection did", ChartSize::default(), &projection()));
    figures
}

/// What a figure's caption says, by the name of its files.
fn caption(name: &str) -> &'static str {
    match name {
        "time" => {
            "The same accuracies over the simulator's seconds, without evaluation, and over the bytes that a real \
             federation would send; means over seeds."
        }
        "clients" => {
            "Mean over the clients of a round, on the test set: accuracy on all classes, accuracy on the classes that a \
             client holds, and forgetting, the largest per-class accuracy drop during local training."
        }
        _ => {
            "Share of the steps whose gradient g conflicted with the memory's gradient r and was projected; their \
             cosine; and the change of the memory loss during local training (above zero: forgotten)."
        }
    }
}

/// Accuracy over what it costs.
fn over(title: &'static str, x_label: &'static str, x_measure: Measure, x: fn(&[RoundRecord]) -> f64) -> Quantity {
    let x_measure = Some(x_measure);
    Quantity { x_label, x_measure, x, has_band: false, ..share_by_round(title, |r| r.accuracy) }
}

fn time() -> [Quantity; 2] {
    [
        over("accuracy over time, %", "time of training and fusion", Measure::Time, |rounds| {
            rounds.iter().map(|r| r.seconds.local + r.seconds.fusion).sum()
        }),
        over("accuracy over what is sent, %", "sent, down and up", Measure::Size, |rounds| {
            rounds.iter().map(|r| (r.bytes_down + r.bytes_up) as f64).sum()
        }),
    ]
}

fn clients() -> [Quantity; 3] {
    [
        share_by_round("clients' accuracy, %", |r| r.client_accuracy),
        share_by_round("accuracy on own classes, %", |r| r.personal_accuracy),
        share_by_round("forgetting, %", |r| r.forgetting),
    ]
}

fn projection() -> [Quantity; 3] {
    [
        share_by_round("steps projected, %", |r| r.projection_rate),
        by_round("cosine of g and r", |r| r.cosine),
        by_round("memory loss after − before", |r| Some(r.memory_loss_after? - r.memory_loss_before?)),
    ]
}

/// Accuracy, as the mean of so many rounds.
fn accuracy_over(n_averaged: usize) -> Quantity {
    Quantity { n_averaged, ..share_by_round("accuracy, %", |r| r.accuracy) }
}

/// The table of results as a picture: each seed's accuracy, and the paper's; none of a single run.
fn outcome(groups: &[Group], results: &[GroupResult]) -> Option<Figure> {
    let n_runs: usize = groups.iter().flat_map(|g| &g.arms).map(|arm| arm.runs.len()).sum();
    if n_runs < 2 {
        return None;
    }
    let series = series(groups, &[accuracy_over(1)]);
    let dots_of = |(group, result): (&Group, &GroupResult)| {
        let row = |(arm, result): (&Arm, &ArmResult)| {
            let look = series.iter().find(|s| s.name == arm.name)?.look;
            let values = arm.runs.iter().map(|r| 100.0 * r.run.summary.headline).collect();
            Some(DotRow { name: arm.name.clone(), look, values, reference: result.paper.map(|p| (p.mean, p.std)) })
        };
        let rows = group.arms.iter().zip(&result.rows).filter_map(row).collect();
        (if groups.len() > 1 { group.title.clone() } else { String::new() }, rows)
    };
    let dots = Dots {
        title: "Accuracy of each seed".into(),
        subtitle: if let [one] = groups { one.title.clone() } else { String::new() },
        x_label: "test accuracy of the global model, mean of the last rounds, %".into(),
        dot_label: "one seed".into(),
        reference_label: "the paper's mean ± standard deviation".into(),
        groups: groups.iter().zip(results).map(dots_of).collect(),
    };
    let caption = "The table's accuracies, seed by seed. All methods of a seed depend on the same data and client samples, so \
                   methods whose dots overlap may still differ in each seed.";
    Some(Figure::new("outcome", dots.draw(), caption).narrow(dots.draw_narrow()))
}

/// Accuracy over rounds, one chart per group.
pub fn accuracy(groups: &[Group]) -> Figure {
    let quantities: Vec<Quantity> = [1].into_iter().chain(n_headline(groups)).map(accuracy_over).collect();
    let series = series(groups, &quantities);
    let mut charts = Vec::new();
    for (group, quantity) in groups.iter().flat_map(|group| quantities.iter().map(move |quantity| (group, quantity))) {
        let title = match (groups.len(), quantity.n_averaged) {
            (1, 1) => quantity.title.to_owned(),
            (1, n) => format!("mean of the last {n} rounds, %"),
            (_, 1) => group.title.clone(),
            (_, n) => format!("{}: mean of the last {n} rounds", group.short),
        };
        charts.extend(chart(quantity, group, groups, &series).map(|chart| Chart { title, ..chart }));
    }
    let is_alone = charts.len() == 1;
    let size = if is_alone { ChartSize { columns: 2, plot: (620.0, 380.0) } } else { HALF };
    let subtitle = if let [one] = groups { one.title.clone() } else { "accuracy, %".to_owned() };
    let title = "Test accuracy of the global model, round by round".to_owned();
    let mut caption = "Accuracy on the test set after each round.".to_owned();
    if quantities.len() > 1 {
        caption += " Means over rounds end at the table's accuracy.";
    }
    let charts = Charts { title, subtitle, series, notes: notes(groups, true), charts, size };
    Figure::charts("accuracy", &charts, caption)
}

/// The headline's number of rounds, if it is equal in all runs, above 1, and at most a third of a run's rounds.
fn n_headline(groups: &[Group]) -> Option<usize> {
    let arms = || groups.iter().flat_map(|g| &g.arms);
    let n_of = |arm: &Arm| arm.config().federation.n_headline(arm.size("cohort").unwrap_or(0));
    let n = n_of(arms().next()?);
    let n_rounds = arms().flat_map(|arm| &arm.runs).map(|r| r.run.rounds.len()).min()?;
    (n > 1 && n_rounds >= 3 * n && arms().all(|arm| n_of(arm) == n)).then_some(n)
}

/// One figure per group, with the same axes in all; none where nothing was recorded.
fn each(groups: &[Group], name: &str, title: &str, size: ChartSize, quantities: &[Quantity]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for (i, group) in groups.iter().enumerate() {
        let is_here = |s: &Series| group.arms.iter().any(|a| a.name == s.name);
        let series: Vec<Series> = series(groups, quantities).into_iter().filter(is_here).collect();
        if series.is_empty() {
            continue;
        }
        let charts = Charts {
            title: title.to_owned(),
            subtitle: group.title.clone(),
            notes: notes(groups, quantities.iter().any(|p| p.has_band)),
            charts: quantities.iter().filter_map(|quantity| chart(quantity, group, groups, &series)).collect(),
            series,
            size,
        };
        figures.push(Figure::charts(format!("{name}{}", numbered(i, groups.len())), &charts, caption(name)));
    }
    figures
}

/// Forgetting of each client with each method, for the first seed of each group; none where it was not recorded.
fn forgetting(groups: &[Group]) -> Vec<Figure> {
    let row = |arm: &Arm| {
        let first = &arm.runs[0];
        let mut lost: Vec<Vec<f64>> = Vec::new();
        for round in &first.run.rounds {
            for (client, value) in round.cohort.iter().zip(round.forgetting_by_client.iter().flatten()) {
                let client = *client as usize;
                lost.resize_with(lost.len().max(client + 1), Vec::new);
                lost[client].push(100.0 * value);
            }
        }
        let values: Vec<Option<f64>> = lost.iter().map(|v| (!v.is_empty()).then(|| mean(v))).collect();
        (!values.is_empty()).then(|| (arm.name.clone(), values))
    };
    let mut figures = Vec::new();
    for (i, group) in groups.iter().enumerate() {
        let rows: Vec<_> = group.arms.iter().filter_map(row).collect();
        // A picture cannot show a million clients one by one.
        if rows.is_empty() || rows.iter().any(|(_, values)| values.len() > N_CLIENTS_MAX) {
            continue;
        }
        let heat = Heat {
            title: "Forgetting of each client".into(),
            subtitle: format!("{}; seed {}", group.title, group.arms[0].runs[0].run.summary.seed),
            column_label: "client".into(),
            value_label: "forgetting, %".into(),
            rows,
        };
        let caption = "The largest per-class accuracy drop during local training, mean over the rounds in which the \
                       client took part.";
        let name = format!("forgetting{}", numbered(i, groups.len()));
        figures.push(Figure::new(name, heat.draw(), caption).narrow(heat.draw_narrow()));
    }
    figures
}

/// The number of a group in file names; nothing where there is one group.
pub fn numbered(i: usize, n_groups: usize) -> String {
    if n_groups > 1 { format!("-{}", i + 1) } else { String::new() }
}

/// What lines and bands are.
fn notes(groups: &[Group], has_band: bool) -> Vec<String> {
    let n_seeds = || groups.iter().flat_map(|g| &g.arms).map(|a| a.runs.len());
    let (fewest, most) = (n_seeds().min().unwrap_or(0), n_seeds().max().unwrap_or(0));
    let line = match (fewest, most) {
        (_, 1) => return vec!["one seed".to_owned()],
        (a, b) if a == b => format!("line: mean over {a} seeds"),
        (a, b) => format!("line: mean over {a} to {b} seeds"),
    };
    if has_band { vec![line, "band: ± 1 standard deviation".to_owned()] } else { vec![line] }
}

/// The chart of a quantity for a group, with axes for all groups; none where nothing was recorded.
fn chart(quantity: &Quantity, group: &Group, groups: &[Group], series: &[Series]) -> Option<Chart> {
    let lines: Vec<Vec<Spread>> = groups.iter().flat_map(|g| &g.arms).map(|arm| line(arm, quantity)).collect();
    let points = || lines.iter().flatten();
    points().next()?;
    // A band that reaches below 0 is cut there where no mean does, and that of a share at the whole.
    let least = points().map(|p| if p.mean < 0.0 { p.min } else { 0.0 }).fold(0.0, f64::min);
    let most = points().map(|p| if p.mean > 0.0 { p.max } else { 0.0 }).fold(0.0, f64::max);
    let most = if quantity.is_share { most.min(100.0) } else { most };
    let x_max = points().map(|p| p.x).fold(0.0, f64::max);
    let unit = quantity.x_measure.map(|measure| measure.unit(x_max));
    let unit_size = unit.map_or(1.0, |(size, _)| size);
    let x = axis(0.0, x_max / unit_size);
    let own = |s: &Series| {
        let mut own = group.arms.iter().find(|a| a.name == s.name).map(|a| line(a, quantity)).unwrap_or_default();
        for point in &mut own {
            point.x /= unit_size;
        }
        own
    };
    Some(Chart {
        title: quantity.title.into(),
        y: axis(least, most),
        x: (x.0, x.1, ticks(x)),
        x_label: unit.map_or(quantity.x_label.into(), |(_, name)| format!("{}, {name}", quantity.x_label)),
        lines: series.iter().map(own).collect(),
    })
}

/// The arms that have a value in a quantity, each with a look. A method looks the same in every report where it has one arm.
fn series(groups: &[Group], quantities: &[Quantity]) -> Vec<Series> {
    let mut arms: Vec<&Arm> = Vec::new();
    for arm in groups.iter().flat_map(|g| &g.arms) {
        if !arms.iter().any(|a| a.name == arm.name) {
            arms.push(arm);
        }
    }
    let methods: BTreeSet<&str> = arms.iter().map(|a| a.config().method.name.as_str()).collect();
    let own: Option<Vec<usize>> = arms.iter().map(|arm| method_look(&arm.config().method.name)).collect();
    let own = own.filter(|_| methods.len() == arms.len());
    let look = |(i, arm): (usize, &Arm)| Series::new(arm.name.clone(), look_at(own.as_ref().map_or(i, |own| own[i])));
    let has_value = |(_, arm): &(usize, &Arm)| quantities.iter().any(|quantity| !line(arm, quantity).is_empty());
    arms.into_iter().enumerate().filter(has_value).map(look).collect()
}

/// Looks repeat where a report has more arms than there are looks.
fn look_at(index: usize) -> Look {
    SERIES[index % SERIES.len()]
}

/// The pilot's three methods first, then the others as in the catalogue; none for a method from outside.
fn method_look(name: &str) -> Option<usize> {
    const FIRST: [&str; 3] = ["fedavg", "feddf", "fedproj"];
    let others = CATALOGUE.iter().map(|(name, _)| *name).filter(|name| !FIRST.contains(name));
    FIRST.into_iter().chain(others).position(|known| known == name)
}

/// An arm's line: mean over seeds, ± 1 standard deviation.
fn line(arm: &Arm, quantity: &Quantity) -> Vec<Spread> {
    let n_rounds = arm.runs.iter().map(|r| r.run.rounds.len()).max().unwrap_or(0);
    let point = |n: usize| {
        let rounds = || arm.runs.iter().filter_map(|r| r.run.rounds.get(..n));
        let values: Vec<f64> = rounds().filter_map(|r| quantity.value(r)).collect();
        let xs: Vec<f64> = rounds().map(quantity.x).collect();
        let (m, s) = (mean(&values), standard_deviation(&values).filter(|_| quantity.has_band).unwrap_or(0.0));
        (!values.is_empty()).then(|| Spread { x: mean(&xs), mean: m, min: m - s, max: m + s })
    };
    (1..=n_rounds).filter_map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arms::{sort, tests::run};
    use fedproj_core::{Config, Summary};

    #[test]
    fn every_method_has_a_look_of_its_own() {
        let mut looks: Vec<Look> = Vec::new();
        for (name, _) in CATALOGUE {
            let look = look_at(method_look(name).unwrap());
            assert!(!looks.contains(&look), "{name}: `fedproj_report::SERIES` has too few looks");
            looks.push(look);
        }
    }

    #[test]
    fn the_mean_of_the_last_rounds_ends_at_the_headline() {
        let accuracies = [Some(0.1), None, Some(0.2), Some(0.6), Some(0.7)];
        let round = |accuracy: &Option<f64>| RoundRecord { accuracy: *accuracy, ..RoundRecord::default() };
        let rounds: Vec<RoundRecord> = accuracies.iter().map(round).collect();
        let summary = Summary::of("fedavg", 0, &Config::default().federation, 3, &rounds);
        let after = |n: usize| accuracy_over(3).value(&rounds[..n]);
        assert!((after(5).unwrap() - 100.0 * summary.headline).abs() < 1e-9);
        assert_eq!((after(1), after(2), after(3)), (None, None, None), "too few evaluations, or none in this round");
    }

    #[test]
    fn the_axis_of_a_share_ends_at_the_whole() {
        let with = |seed, accuracy| {
            let mut one = run(&[], seed, accuracy);
            one.run.rounds.push(RoundRecord { accuracy: Some(accuracy), ..RoundRecord::default() });
            one
        };
        // Mean 90, standard deviation 14: the band reaches 104.
        let groups = sort(vec![with(0, 0.8), with(1, 1.0)], &mut Vec::new());
        let quantity = accuracy_over(1);
        let drawn = chart(&quantity, &groups[0], &groups, &series(&groups, std::slice::from_ref(&quantity))).unwrap();
        assert!(drawn.lines[0][0].max > 100.0 && drawn.y.1 <= 100.0, "{drawn:?}");
    }
}
