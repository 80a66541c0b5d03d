//! Finds stored runs, and reports what is wrong with those that are skipped.

use anyhow::{Context, Result, bail};
use fedproj_core::{Error, Manifest, StoredRun};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A run with its manifest, where it has one.
#[derive(Clone)]
pub struct Loaded {
    /// Configuration, summary and rounds.
    pub run: StoredRun,
    /// What it was made of and on.
    pub manifest: Option<Manifest>,
    /// Whether all rounds are done. If not, the summary is of those that are.
    pub is_finished: bool,
}

impl Loaded {
    /// Whether the run has a seal, which its files match.
    pub fn is_sealed(&self) -> bool {
        self.manifest.as_ref().is_some_and(Manifest::is_sealed)
    }

    /// Rounds done and rounds in all, of an unfinished run.
    pub fn rounds_done(&self) -> Option<(usize, u32)> {
        (!self.is_finished).then_some((self.run.rounds.len(), self.run.config.federation.rounds))
    }
}

/// Reads all finished runs at or below the paths, in the order of their names; with `unfinished`, also those that have done a
/// round. Notes name what is left out.
///
/// # Errors
/// If a path holds no run, there is nothing to show, or a run cannot be read or does not match its seal.
pub fn load(paths: &[PathBuf], unfinished: bool) -> Result<(Vec<Loaded>, Vec<String>)> {
    let (mut runs, mut left_out) = (Vec::new(), Vec::new());
    for dir in find_runs(paths)? {
        if dir.join("summary.json").exists() {
            runs.push(open(&dir)?);
            continue;
        }
        let run = StoredRun::so_far(&dir)?;
        match run.rounds.len() {
            1.. if unfinished => runs.push(Loaded { run, manifest: Manifest::read(&dir)?, is_finished: false }),
            n => left_out.push(format!("`{}` is unfinished, {n} rounds are done", dir.display())),
        }
    }
    if runs.is_empty() {
        bail!(Error::config(format!(
            "no run is finished: {}\nhint: `fedproj run … --resume` resumes one; `fedproj report --unfinished` shows what \
             is done, `fedproj watch` follows it",
            left_out.join("; ")
        )));
    }
    let mut notes: Vec<String> = left_out.iter().map(|what| format!("Left out: {what}.")).collect();
    let versions: BTreeSet<&str> = runs.iter().filter_map(|r| Some(r.manifest.as_ref()?.version.as_str())).collect();
    if versions.len() > 1 {
        let versions: Vec<&str> = versions.into_iter().collect();
        notes.push(format!("The runs were made by several versions of the program: {}.", versions.join(", ")));
    }
    notes.extend(not_sealed(&runs));
    Ok((runs, notes))
}

/// Marks runs without a seal.
fn not_sealed(runs: &[Loaded]) -> Option<String> {
    let open: Vec<String> =
        runs.iter().filter(|r| r.is_finished && !r.is_sealed()).map(|r| r.run.dir.display().to_string()).collect();
    let who = match &open[..] {
        [] => return None,
        [one] => format!("`{one}` is"),
        all if all.len() == runs.len() => format!("All {} runs are", all.len()),
        [first, others @ ..] => format!("`{first}` and {} others are", others.len()),
    };
    Some(format!(
        "{who} not sealed, as earlier versions left runs: only `fedproj verify` shows whether files were changed."
    ))
}

/// The run directories at or below the paths, each once; there is at least one.
///
/// # Errors
/// If a path is no directory, or holds no run.
pub fn find_runs(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let (mut all, mut seen) = (Vec::new(), BTreeSet::new());
    for path in paths {
        if !path.is_dir() {
            let path = path.display();
            bail!(Error::config(format!("`{path}` is no directory; a run is a directory with config.toml")));
        }
        let found = find(path)?;
        if found.is_empty() {
            bail!(Error::config(format!(
                "`{}` holds no run, and no directory below it does\nhint: `fedproj run --out DIR` makes one: a \
                 directory with config.toml, metrics.jsonl and, when it is finished, summary.json",
                path.display()
            )));
        }
        for dir in found {
            if seen.insert(dir.canonicalize().with_context(|| format!("cannot read `{}`", dir.display()))?) {
                all.push(dir);
            }
        }
    }
    Ok(all)
}

/// The run directories at or below a path, finished or not, in the order of their names.
fn find(path: &Path) -> Result<Vec<PathBuf>> {
    if path.join("config.toml").exists() || path.join("summary.json").exists() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = std::fs::read_dir(path).with_context(|| format!("cannot list `{}`", path.display()))?;
    let mut folders: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).filter(|p| p.is_dir()).collect();
    folders.sort();
    let found: Vec<Vec<PathBuf>> = folders.iter().map(|folder| find(folder)).collect::<Result<_>>()?;
    Ok(found.concat())
}

fn open(dir: &Path) -> Result<Loaded> {
    let run = StoredRun::open(dir)?;
    let (expected, found) = (run.config.federation.rounds as usize, run.rounds.len());
    if !run.config.may_end_after(found) {
        bail!(
            "`{}`: metrics.jsonl holds {found} rounds, but the configuration asks for {expected}\n\
             hint: the file was cut or changed; leave this run out, or run it again",
            dir.display()
        );
    }
    Ok(Loaded { run, manifest: Manifest::read(dir)?, is_finished: true })
}
