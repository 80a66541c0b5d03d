//! The page of a report: what stands where, and what is said about it.

use super::figures::Figure;
use super::lead::lead;
use super::tables::{GroupResult, Sheet};
use crate::arms::{Arm, Group, differing};
use anyhow::Result;
use fedproj_report::{Block, Page, Section};
use std::collections::BTreeSet;

/// Everything that is shown.
pub struct Content<'a> {
    /// Title.
    pub title: String,
    /// Groups and arms.
    pub groups: &'a [Group],
    /// Their results.
    pub results: &'a [GroupResult],
    /// What the reader must know about the runs.
    pub notes: &'a [String],
    /// All tables.
    pub sheets: &'a [Sheet],
    /// All figures.
    pub figures: &'a [Figure],
    /// Why a group has no picture of its partition.
    pub without_partition: &'a [String],
}

/// A title that names what was compared.
pub fn title(groups: &[Group]) -> String {
    let arms = || groups.iter().flat_map(|g| &g.arms);
    let mut names: Vec<&str> = Vec::new();
    for arm in arms() {
        if !names.contains(&&arm.name[..]) {
            names.push(&arm.name);
        }
    }
    let what = match names[..] {
        [only] => only.to_owned(),
        [a, b] => format!("{a} and {b} compared"),
        [a, b, c] => format!("{a}, {b} and {c} compared"),
        _ if arms().all(|a| a.told_by.is_empty()) => format!("{} methods compared", names.len()),
        _ => format!("{} configurations compared", names.len()),
    };
    let data: BTreeSet<&str> = arms().map(|a| a.config().data.private.name.as_str()).collect();
    let data: Vec<&str> = data.into_iter().collect();
    match groups {
        [one] => format!("{what} on {}", one.title),
        many => format!("{what} on {} ({} groups)", data.join(", "), many.len()),
    }
}

impl Content<'_> {
    /// The page.
    pub fn page(&self) -> Result<Page> {
        let mut sections = vec![self.results_section()];
        sections.push(section("Learning curves", [self.figures("accuracy"), self.figures("time")].concat()));
        sections.push(self.clients_section());
        sections.push(self.partition_section());
        sections
            .push(section("What it costs", [self.table("costs"), Some(costs_text())].into_iter().flatten().collect()));
        sections.push(self.deviations_section());
        sections.push(self.configuration_section()?);
        let runs = text(
            "Hashes are the first digits of BLAKE3; runs.csv has them in full. Runs with the same seed share data, partition and client samples, whatever the method.",
        );
        sections.push(section(
            "Seeds, versions, hardware and data",
            [self.table("runs"), Some(runs)].into_iter().flatten().collect(),
        ));
        Ok(Page {
            title: self.title.clone(),
            lead: lead(self.groups, self.results),
            sections,
            footer: format!("fedproj {}: made by `fedproj report`.", env!("CARGO_PKG_VERSION")),
        })
    }

    fn results_section(&self) -> Section {
        let mut blocks: Vec<Block> = self.table("accuracy").into_iter().collect();
        let baselines: BTreeSet<&str> = self.results.iter().map(|r| r.baseline.as_str()).collect();
        let baselines: Vec<&str> = baselines.into_iter().collect();
        let n_arms: usize = self.groups.iter().map(|g| g.arms.len()).sum();
        blocks.push(text(
            "Accuracy: test accuracy of the global model, mean over the last rounds (federation.headline_rounds; the \
             number of clients per round, unless set), ± standard deviation over seeds.",
        ));
        if n_arms > self.groups.len() {
            let baselines = baselines.join(", ");
            blocks.push(text(&format!(
                "Δ: difference to {baselines}, paired by seed, with Student's 95 % interval. Bold: the highest mean of its \
                 group."
            )));
        }
        blocks.extend(self.notes.iter().map(|note| text(note)));
        blocks.extend(self.figures("outcome"));
        section("Results", blocks)
    }

    fn clients_section(&self) -> Section {
        let mut blocks: Vec<Block> = self.table("clients").into_iter().collect();
        if !blocks.is_empty() {
            blocks.push(text("Means over all rounds in which a value was recorded, ± standard deviation over seeds."));
        }
        let figures = [self.figures("clients"), self.figures("forgetting")].concat();
        if figures.is_empty() {
            blocks.push(text(
                "Clients' accuracy and forgetting were not recorded; federation.evaluate_clients=true records them.",
            ));
        }
        blocks.extend(figures);
        blocks.extend(self.figures("projection"));
        section("Clients, forgetting and projection", blocks)
    }

    fn partition_section(&self) -> Section {
        let mut blocks = self.figures("partition");
        blocks.extend(self.without_partition.iter().map(|why| text(why)));
        section("Who holds what", blocks)
    }

    fn deviations_section(&self) -> Section {
        let mut blocks: Vec<Block> = self.table("deviations").into_iter().collect();
        let unknown: Vec<&str> =
            self.results.iter().filter(|r| r.deviations.is_none()).map(|r| r.title.as_str()).collect();
        if !blocks.is_empty() {
            blocks.push(text(
                "The paper's set-up for the data set and β, as the preset paper reads its text. Where the text is \
                 silent (batch, weight decay, schedule, memory size), the published code's value stands.",
            ));
        } else if unknown.is_empty() {
            blocks.push(text("Nothing: every value is that of the preset paper."));
        }
        if !unknown.is_empty() {
            blocks.push(text(&format!(
                "The paper has no results on: {}. There is nothing to compare with.",
                unknown.join("; ")
            )));
        }
        section("Differences from the paper, and why", blocks)
    }

    fn configuration_section(&self) -> Result<Section> {
        let arms = || self.groups.iter().flat_map(|g| g.arms.iter().map(move |a| (g, a)));
        let keys: Vec<_> = arms().map(|(_, arm)| arm.keys()).collect();
        let marked = differing(keys.iter());
        let mut blocks = vec![text(if keys.len() > 1 {
            "One configuration per row of the table, without the seed and the tables of other methods. Values that \
             differ are marked."
        } else {
            "The whole configuration, without the tables of other methods."
        })];
        for (group, arm) in arms() {
            let name = if self.groups.len() > 1 { format!("{}; {}", arm.name, group.short) } else { arm.name.clone() };
            let seeds: Vec<String> = arm.runs.iter().map(|r| r.run.summary.seed.to_string()).collect();
            blocks.push(Block::Code {
                summary: format!("{name}; seeds {}", seeds.join(", ")),
                lines: toml_lines(arm, &marked)?,
            });
        }
        Ok(section("Configuration", blocks))
    }

    fn table(&self, name: &str) -> Option<Block> {
        self.sheets.iter().find(|s| s.name == name).map(|s| Block::Table(s.shown.clone()))
    }

    /// The figures of this name, of all groups.
    fn figures(&self, name: &str) -> Vec<Block> {
        self.figures.iter().filter(|f| f.name.split('-').next() == Some(name)).map(Figure::block).collect()
    }
}

fn text(text: &str) -> Block {
    Block::Text(text.to_owned())
}

fn costs_text() -> Block {
    text(
        "Means over rounds and seeds. Times: what the simulator took on the machine below for all clients of a round. \
         Sizes: what a real federation would send to and from all clients of a round.",
    )
}

fn section(heading: &str, blocks: Vec<Block>) -> Section {
    Section { heading: heading.to_owned(), blocks }
}

/// The configuration's lines that matter to the method, those marked whose key is in `marked`.
fn toml_lines(arm: &Arm, marked: &BTreeSet<String>) -> Result<Vec<(String, bool)>> {
    let config = arm.config();
    let text = config.to_toml()?;
    let (mut lines, mut table, mut is_used) = (Vec::new(), String::new(), true);
    let own = format!("method.{}", config.method.name);
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            table = format!("{name}.");
            is_used = !name.starts_with("method.") || name == own || name.starts_with(&format!("{own}."));
        }
        let key = line.split_once(" = ").map(|(key, _)| format!("{table}{key}"));
        if is_used && key.as_deref() != Some("seed") {
            lines.push((line.to_owned(), key.is_some_and(|key| marked.contains(&key))));
        }
    }
    Ok(lines)
}
