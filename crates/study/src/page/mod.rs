//! The report of any finished runs: one page, with figures and tables.
//!
//! [`tables`] and [`figures`] show runs, [`content`] puts everything on a page. Everything is made before the first file is
//! written, and a file appears whole or not at all.

mod content;
mod figures;
mod lead;
mod partition;
mod tables;

use crate::{arms, paper, runs};
use anyhow::{Context, Result};
use fedproj_core::write_atomically;
use fedproj_report::Table;
pub use figures::Figure;
use serde::Serialize;
use std::path::{Path, PathBuf};
pub use tables::{ArmResult, GroupResult};

/// The picture of stored runs' accuracies, round by round, as a report has it. Runs may be unfinished.
///
/// # Errors
/// If there is no run to show, or a run cannot be read.
pub fn accuracy_curves(runs: &[PathBuf]) -> Result<String> {
    let (runs, mut notes) = runs::load(runs, true)?;
    Ok(figures::accuracy(&arms::sort(runs, &mut notes)).into_svg())
}

/// What [`write_report`] wrote.
#[derive(Debug, Serialize)]
pub struct Written {
    /// The page's title.
    pub title: String,
    /// The page.
    pub report: PathBuf,
    /// All files, the page among them.
    pub files: Vec<PathBuf>,
    /// The results as numbers.
    #[serde(rename = "settings")]
    pub groups: Vec<GroupResult>,
    /// The results for people.
    #[serde(skip)]
    pub table: Table,
    /// What a reader of the table must know: runs left out, a set-up that is not the paper's.
    pub notes: Vec<String>,
}

/// What [`write_report`] needs.
#[derive(Clone, Copy, Debug)]
pub struct ReportOptions<'a> {
    /// Run directories, or directories of run directories.
    pub runs: &'a [PathBuf],
    /// Where to write.
    pub out: &'a Path,
    /// The page's title; what was compared, if there is none.
    pub title: Option<&'a str>,
    /// Whether to show unfinished runs too, marked as such.
    pub unfinished: bool,
    /// The data directory, for runs that did not record their partition.
    pub data_dir: Option<&'a Path>,
}

/// Writes `report.html`, `report.json`, `figures/` and `tables/` of all runs at or below `runs` into `out`.
///
/// Runs are grouped by their data, then by the method and the keys in which runs of one method differ (arms). So a sweep over
/// any key gets one row per value.
///
/// # Errors
/// If there is no run to show, a run cannot be read, or `out` cannot be written.
pub fn write_report(options: &ReportOptions<'_>) -> Result<Written> {
    let ReportOptions { runs, out, title, unfinished, data_dir } = *options;
    let (runs, mut notes) = runs::load(runs, unfinished)?;
    let groups = arms::sort(runs, &mut notes);
    if groups.len() > 1 {
        notes.push("Groups differ in data or partition: compare within a group, not across groups.".into());
    }
    let results: Vec<GroupResult> = groups.iter().map(tables::results).collect::<Result<_>>()?;
    notes.extend(paper::statements(&results));
    let mut figures = figures::figures(&groups, &results);
    let (partitions, without_partition) = partition::pictures(&groups, data_dir);
    figures.extend(partitions);
    let mut sheets = vec![tables::accuracy(&results), tables::costs(&groups), tables::runs(&groups)];
    sheets.extend(tables::clients(&groups));
    sheets.extend(tables::deviations(&results));
    let content = content::Content {
        title: title.map_or_else(|| content::title(&groups), str::to_owned),
        groups: &groups,
        results: &results,
        notes: &notes,
        sheets: &sheets,
        figures: &figures,
        without_partition: &without_partition,
    };
    let html = content.page()?.to_html();
    let (title, table) = (content.title, sheets[0].shown.clone());
    let mut files: Vec<(PathBuf, Vec<u8>)> = Vec::new();
    for sheet in &sheets {
        let path = out.join("tables").join(sheet.name);
        files.push((path.with_extension("csv"), sheet.raw.to_csv().into()));
        files.push((path.with_extension("tex"), sheet.shown.to_latex().into()));
    }
    for figure in &figures {
        files.extend(figure.files(&out.join("figures"))?);
    }
    let json = serde_json::json!({ "title": title, "settings": results, "notes": notes });
    files.push((out.join("report.json"), (serde_json::to_string_pretty(&json)? + "\n").into()));
    // The page comes last: where it stands, the rest stands too.
    let report = out.join("report.html");
    files.push((report.clone(), html.into()));
    for folder in ["figures", "tables"] {
        let folder = out.join(folder);
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make `{}`", folder.display()))?;
    }
    for (path, bytes) in &files {
        write_atomically(path, bytes)?;
    }
    Ok(Written {
        title,
        report,
        files: files.into_iter().map(|(path, _)| path).collect(),
        groups: results,
        table,
        notes,
    })
}
