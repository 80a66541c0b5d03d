//! `fedproj status`: which runs of a sweep are finished, and who makes the others.

use crate::settings::SweepSettings;
use crate::{give, say};
use anyhow::Result;
use clap::Args;
use fedproj_report::Table;
use fedproj_study::{RunProgress, RunState, progress_in, progress_of};
use std::path::PathBuf;

/// Arguments of `status`.
#[derive(Args)]
pub struct StatusArgs {
    #[command(flatten)]
    settings: SweepSettings,
    /// Directory of all run directories, as `fedproj run` takes it. Alone, or as the only argument: the runs that were begun there
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl StatusArgs {
    /// Prints the runs.
    pub fn run(self) -> Result<()> {
        let all = match (&self.out, self.settings.directory()) {
            (None, Some(dir)) => progress_in(dir)?,
            (Some(out), _) if self.settings.is_empty() => progress_in(out)?,
            _ => {
                let jobs = crate::run::jobs(self.settings.runs()?, self.out.as_deref(), false)?;
                jobs.iter().map(progress_of).collect::<Result<_>>()?
            }
        };
        give(self.json, &serde_json::json!({ "runs": all }), || {
            let row = |run: &RunProgress| {
                let accuracy = run.accuracy.map_or(String::new(), |a| format!("{:.2} %", 100.0 * a));
                let rounds = format!("{}/{}", run.n_rounds_done, run.n_rounds);
                vec![run.id.clone(), run.state.to_string(), run.by.clone(), rounds, accuracy]
            };
            let headers = ["run", "state", "by", "rounds", "accuracy"];
            let table = Table::new(headers, 3, all.iter().map(row).collect());
            say!("{}", table.to_text().trim_end());
            let n = |state| all.iter().filter(|run| run.state == state).count();
            let (finished, running) = (n(RunState::Finished), n(RunState::Running));
            say!("{finished} of {} runs are finished, {running} are being made", all.len());
        })
    }
}
